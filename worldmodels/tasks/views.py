"""World models of what is seen in parts: S2RM's tasks, on any environment whose observations are views.

The data are episodes; what is seen at a step is drawn from them when it is needed, see ``data.views.ViewSource``.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import RenderableType
from rich.table import Table
from torch import Tensor, nn

from ..data.environments import make_envs
from ..data.views import Views, ViewSource, first_views, side_by_side
from ..errors import UserError
from ..logging import progress_bar
from ..losses import contrastive, polar_loss
from ..models.views import SpatialModel, ViewModel, ViewWorldModel, view_model
from ..report import figures
from ..report import views as pictures
from ..report.tables import scores as ranking_table
from ..seeing import BURN_IN, ViewTest, as_floats, said_and_seen
from . import CoreBuilder, refuse_equal_seeds, refuse_nothing, require_memory
from .recording import recorded

OBJECTIVES = ("views", "contrastive")


class ViewBatch(NamedTuple):
    """Windows of views ``(window + 1, B, ...)``, and where they are from."""

    views: Views
    episode: Tensor
    step: Tensor


class PartialViews:
    """Predict what will be seen, from what was seen, at any place: S2RM's problem (Rahaman et al. 2020, sections 2 and 6).

    At every step the model reads views at known positions and says what will be seen one step later at queried ones: at the
    next step's random pixels, or where the agents then are. Training draws windows of ``window`` + 1 steps, an equal share
    from each variant of the environment.

    Objectives: "views" predicts what is seen, by binary cross-entropy of pixels, or with ``polar`` by S2RM's three terms.
    "contrastive" is C-SWM's in the space of the modules: the slots after the views of step t, changed by the core without
    any views, must come near the slots after the next views; no decoder. Rollouts are told the recorded actions, and with
    them who has died by then, because the dead do nothing.

    Scores of "views", against the share of views that report: balanced accuracy and F1 of pixels thresholded at 0.5, beside
    those of a copy, which says what is now seen at the queried place; with ``polar`` F1 of the friendly markers, macro F1 of
    the unit types in the data, the negative squared error of health, energy, cooldown and shields, and the negative loss
    ("log likelihood"). Where views are crops, the first ``num_views`` x share of them report; agents report or not
    independently at every step with this probability, and are still asked.

    Args:
        env_id: the environment, any Gymnasium id whose observations are views, see above.
        env_kwargs: keyword arguments it always gets.
        train: keyword arguments of the variants trained on, by name.
        test: those of the test's.
        policy: "module:name" of the policy that records; None for random actions.
        train_episodes: for each variant.
        test_episodes: for each variant.
        steps: of an episode.
        train_seed: of the training episodes.
        test_seed: of the test episodes.
        data_dir: where recorded episodes are kept; or several folders, see ``collected``.
        fresh: record them anew, in the place of those that are found there.
        window: steps a training sequence reads.
        objective: "views" or "contrastive".
        oracle: the model sees what it is asked (the paper's time-travelling oracle, with a core without memory).
        polar: views are polar images.
        num_views: crops a step, for environments with ``crops``.
        lingering: share of them, at most a half, that in training look where one of the step before looked; in the test
            all look anywhere. Where nothing lingers, a scaffold first has to learn to say in one place what it saw in
            another, and an LSTM has not done so after 25,000 windows.
        fractions: shares of the views that report in the test.
        removed: numbers of modules that are taken away in the test, of S2RM cores.
        prompt: steps that are seen before a rollout, for environments with ``crops``.
        imagined: steps of a rollout.
        token_size: of an encoded view.
        channels: of the convolutions.
        place_size: d of the places that encoder and decoder are given; an S2RM core has one of its own.
        scale: positions are multiplied by this; 1 should then be about the distance at which two views differ.
        placed: give S2RM's encoder and decoder the places as well, see ``SpatialModel``.
        in_episode: share of negatives from the same window, of the contrastive objective.
        horizons: steps ahead at which states are ranked, of the contrastive objective.
    """

    sections = ()
    tags = ("task", "task/score")
    unit = "sequences"

    def __init__(
        self,
        *,
        env_id: str | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        train: Mapping[str, Mapping[str, Any]] | None = None,
        test: Mapping[str, Mapping[str, Any]] | None = None,
        policy: str | None = None,
        train_episodes: int = 1000,
        test_episodes: int = 100,
        steps: int = 100,
        train_seed: int = 1,
        test_seed: int = 3,
        data_dir: str | Path | Sequence[str | Path] = "data",
        fresh: bool = False,
        window: int = 20,
        objective: str = "views",
        oracle: bool = False,
        polar: bool = False,
        num_views: int = 10,
        lingering: float = 0.0,
        fractions: Sequence[float] = (1.0, 0.7, 0.4, 0.2),
        removed: Sequence[int] = (),
        prompt: int = 20,
        imagined: int = 25,
        token_size: int = 128,
        channels: int = 32,
        place_size: int = 16,
        scale: float = 1.0,
        placed: bool = False,
        in_episode: float = 0.5,
        horizons: Sequence[int] = (1, 5, 10),
    ):
        if env_id is None:
            raise UserError("no environment was named; give task.env_id=<a Gymnasium id>, or experiment=balls_crops")
        if objective not in OBJECTIVES:
            raise UserError(f"task.objective is {objective!r}; expected one of {list(OBJECTIVES)}")
        refuse_equal_seeds(train_seed, test_seed)
        refuse_nothing(train_episodes=train_episodes, test_episodes=test_episodes, window=window, steps=steps)
        refuse_nothing(num_views=num_views, channels=channels, token_size=token_size, prompt=prompt, imagined=imagined)
        if window > steps:
            raise UserError(f"task.window={window} does not fit into task.steps={steps}")
        if place_size < 4 or place_size % 4:
            raise UserError(f"task.place_size={place_size}; expected a multiple of 4, twice the numbers of a position")
        if not 0.0 <= lingering <= 0.5:
            raise UserError(f"task.lingering={lingering}; it is a share of the views, from 0 to 0.5")
        if not fractions or not all(0.0 < fraction <= 1.0 for fraction in fractions):
            raise UserError(f"task.fractions={list(fractions)}; each is a share of the views, above 0 and at most 1")
        if objective == "contrastive" and oracle:
            raise UserError(
                "there is no oracle of a contrastive objective; leave out task.oracle, or core=mlp which sets it"
            )
        if objective == "contrastive" and (
            not horizons or min(horizons) < 1 or max(horizons) + BURN_IN > steps or not 0.0 <= in_episode <= 1.0
        ):
            raise UserError(
                f"task.horizons={list(horizons)} and in_episode={in_episode}; expected horizons of at least 1 that fit into "
                f"task.steps={steps} after {BURN_IN} steps, and a share"
            )
        self.name = f"views of {env_id.rpartition('/')[2]}" + (", contrastive" if objective == "contrastive" else "")
        self.env_id, self.env_kwargs, self.policy = env_id, dict(env_kwargs or {}), policy
        self.train = {name: dict(kwargs) for name, kwargs in (train or {"train": {}}).items()}
        self.test = {name: dict(kwargs) for name, kwargs in (test or {"test": {}}).items()}
        self.train_episodes, self.test_episodes, self.steps = train_episodes, test_episodes, steps
        self.train_seed, self.test_seed, self.data_dir, self.fresh = train_seed, test_seed, data_dir, fresh
        self.window, self.contrastive, self.oracle, self.polar = window, objective == "contrastive", oracle, polar
        self.num_views, self.fractions, self.removed = num_views, list(fractions), list(removed)
        self.prompt, self.imagined, self.horizons = prompt, imagined, list(horizons)
        self.token_size, self.channels, self.place_size, self.scale = token_size, channels, place_size, scale
        self.in_episode, self.placed, self.lingering = in_episode, placed, lingering
        self._recorded: dict[tuple[str, str, str], ViewSource] = {}

    # Data.

    def collect(self, *, quiet: bool = False) -> None:
        """Record all episodes, of training and test, that never were."""
        for which in ("train", "test"):
            for variant in getattr(self, which):
                told = which == "train" and variant == next(iter(self.train)) and not quiet
                again = "task.fresh=true" if told else None
                self.source(which, variant, torch.device("cpu"), quiet=quiet, again=again)

    def source(
        self, which: str, variant: str, device: torch.device, *, quiet: bool = True, again: str | None = None
    ) -> ViewSource:
        """The "train" or "test" episodes of a variant, recorded if they never were, resident on the device."""
        key = (which, variant, str(device))
        if key not in self._recorded:
            kwargs = self.env_kwargs | getattr(self, which)[variant]
            episodes = self.train_episodes if which == "train" else self.test_episodes
            settings = {
                "env_id": self.env_id,
                "env_kwargs": kwargs,
                "episodes": episodes,
                "steps": self.steps,
                "seed": self.train_seed if which == "train" else self.test_seed,
                "policy": _imported(self.policy),
            }
            title = f"recording {which}: {variant}"
            found = recorded(title, self.data_dir, which, settings, quiet=quiet, fresh=self.fresh, again=again)
            env = make_envs(self.env_id, 1, env_kwargs=kwargs, device=str(device))
            self._recorded[key] = ViewSource(found.to(device), env, self.num_views)
        return self._recorded[key]

    def about(self) -> dict[str, Any]:
        """The checksums of the data; the environment says what views look like."""
        cpu = torch.device("cpu")
        data = {
            f"{which} {variant}": self.source(which, variant, cpu).episodes.checksum
            for which in ("train", "test")
            for variant in getattr(self, which)
        }
        return {"data": data}

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], ViewBatch]:
        """Windows of views, as many from every variant."""
        variants = [self.source("train", name, device) for name in self.train]
        for name, source in zip(self.train, variants, strict=True):
            if int(source.episodes.lengths.max()) < self.window:
                raise UserError(f"no episode of {name!r} has task.window={self.window} steps; give a smaller window")
        share, rest = divmod(batch_size, len(variants))

        def draw(generator: torch.Generator) -> ViewBatch:
            parts = []
            shares = [share] * len(variants)
            if rest:  # who gets one more is drawn anew for every batch
                order = torch.randperm(len(variants), generator=generator, device=device).tolist()
                shares = [share + (order[i] < rest) for i in range(len(variants))]
            for number, (source, count) in enumerate(zip(variants, shares, strict=True)):
                if count:
                    views, episode, step = source.windows(count, self.window, generator, lingering=self.lingering)
                    parts.append((views, episode * len(variants) + number, step))
            seen, episodes, steps = zip(*parts, strict=True)
            return ViewBatch(side_by_side(seen), torch.cat(episodes), torch.cat(steps))

        return draw

    # Model and loss.

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> ViewModel | ViewWorldModel:
        """A ``ViewModel``, or with the contrastive objective a ``ViewWorldModel``; S2RM's ten modules of 128 by default."""
        views, crops = first_views(self.env_id, self.env_kwargs | next(iter(self.train.values())), self.num_views)
        if crops and self.prompt + self.imagined > self.steps + 1:
            raise UserError(
                f"a rollout of task.prompt={self.prompt} and imagined={self.imagined} steps needs episodes as long; "
                f"task.steps={self.steps}"
            )
        shown = as_floats(views.observations[0, 0])  # (N, C, H, W)
        done = 0 if views.actions is None else views.actions.shape[-3]
        seen = (shown.shape[1] + done, *shown.shape[2:])
        said = 1 + 10 + 4 if self.polar else shown.shape[1]
        built = core(self.token_size, num_tokens=1, num_slots=10, slot_size=128, position_size=2)
        if self.contrastive:
            require_memory(built, "the contrastive objective")
        if self.oracle and built.capabilities.memory:
            raise UserError("the oracle sees what it is asked and needs no memory; use core=mlp with task.oracle=true")
        if self.polar and seen[0] < said:
            raise UserError(f"polar images have at least 15 channels; these views have {seen[0]}")
        model = view_model(
            built,
            seen,
            None if self.contrastive else said,
            channels=self.channels,
            polar=self.polar,
            place_size=self.place_size,
            scale=self.scale,
            placed=self.placed,
        )
        return ViewWorldModel(model) if self.contrastive else model

    def losses(self, model: nn.Module, batch: ViewBatch, generator: torch.Generator) -> dict[str, Tensor]:
        """The loss of the objective and its terms; 0 of a batch in which nobody sees anything of what is asked."""
        if self.contrastive:
            slots, pred_slots = model(batch.views)
            T, B = pred_slots.shape[:2]
            step = batch.step + torch.arange(T, device=batch.step.device)[:, None]
            loss = contrastive(
                slots[:-1].flatten(0, 1),
                pred_slots.flatten(0, 1),
                slots[1:].flatten(0, 1),
                episode=batch.episode.expand(T, B).flatten(),
                step=step.flatten(),
                in_episode=self.in_episode,
                generator=generator,
            )
            return {"loss": loss.total, "loss_pos": loss.positive, "loss_neg": loss.negative}
        said, truth = said_and_seen(model, batch.views, oracle=self.oracle)
        if self.polar:
            terms = polar_loss(said, truth)
            return {"loss": terms.total, "friendly": terms.friendly, "unit_type": terms.unit_type, "hecs": terms.hecs}
        return {"loss": F.binary_cross_entropy_with_logits(said, truth) if len(said) else said.sum()}

    # Scores.

    @torch.no_grad()
    def evaluate(self, model: Any, limit: int | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """Scores on the test episodes of every variant, or on the first ``limit`` of each."""
        known = self._tests(model)
        n = min(limit or self.test_episodes, self.test_episodes)
        if self.contrastive:
            ranked = {variant: test.ranked(model, self.horizons, limit, variant) for variant, test in known.items()}
            scores = {
                f"hits@1/{variant}/h{h}": entry["h@1"]
                for variant, one in ranked.items()
                for h, entry in one["all"].items()
            }
            return {"scores": scores, "ranked": ranked, "n": n}
        fractions = self.fractions if limit is None else self.fractions[:1]
        views: dict[str, dict[str, dict[str, float]]] = {variant: {} for variant in self.test}
        with progress_bar("scoring") as bar:
            bar.disable |= quiet
            shown = bar.add_task("", total=len(known) * len(fractions), note="variants x shares")
            for variant, test in known.items():
                for share in fractions:
                    views[variant][f"{share:g}"] = test.scored(model, share, limit)
                    bar.advance(shown)
        scores = {
            f"{measure}/{variant}/{share}": value
            for variant, by_share in views.items()
            for share, measured in by_share.items()
            for measure, value in measured.items()
        }
        result: dict[str, Any] = {"scores": scores, "views": views, "n": n, "polar": self.polar}
        if limit is not None:
            return result
        if isinstance(model, SpatialModel) and self.removed:
            result["removed"] = {variant: test.with_less(model, self.removed) for variant, test in known.items()}
        crops = {variant: test for variant, test in known.items() if test.source.crops}
        result["copy"] = {variant: test.copied() for variant, test in crops.items()}
        if crops and not self.oracle:
            result["rollout"] = {
                variant: test.rolled(model, self.prompt, self.imagined)[2] for variant, test in crops.items()
            }
        return result

    def _tests(self, model: nn.Module) -> dict[str, ViewTest]:
        device = next(model.parameters()).device
        return {
            variant: ViewTest(
                self.source("test", variant, device), seed=self.test_seed, polar=self.polar, oracle=self.oracle
            )
            for variant in self.test
        }

    def objective(self, result: Mapping[str, Any]) -> float:
        """The mean over variants of the first measure with all views, or of H@1 at the longest horizon."""
        if "ranked" in result:
            values = [one["all"][str(max(self.horizons))]["h@1"] for one in result["ranked"].values()]
        else:
            values = [next(iter(next(iter(by_share.values())).values())) for by_share in result["views"].values()]
        return float(sum(values) / len(values))

    # What people look at.

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> RenderableType:
        """Scores by variant and share of views, one row a model."""
        title = f"{of}: test data"
        if self.contrastive:
            named = {
                f"{name}, {variant}": ranked
                for name, result in results.items()
                for variant, ranked in result["ranked"].items()
            }
            return ranking_table(named, f"{title}, percent")
        table = Table("variant", "share of\nviews", "model", title=title, title_justify="left")
        first = next(iter(next(iter(next(iter(results.values()))["views"].values())).values()))
        for measure in first:
            table.add_column(measure.replace("_", "\n"), justify="right")
        for variant in next(iter(results.values()))["views"]:
            trained = " (trained)" if variant in self.train else ""
            for share in next(iter(results.values()))["views"][variant]:
                for name, result in results.items():
                    measured = result["views"].get(variant, {}).get(share, {})
                    table.add_row(variant + trained, f"{100 * float(share):.0f} %", name, *_cells(measured))
            copied = next(iter(results.values())).get("copy", {}).get(variant)
            if copied:
                table.add_row(variant + trained, "all pixels", "copy of the present", *_cells(copied))
            table.add_section()
        return table

    @torch.no_grad()
    def draw(
        self,
        model: Any,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """Scores against the share of views, enclaves and the graph of modules, rollouts or polar images of one episode."""
        tests = self._tests(model)
        first = next(iter(tests.values()))
        written = figures.curves(metrics, folder / "curves.png", of="variant")
        if "views" in result:
            shares = pictures.against_share(result["views"], folder / "shares.png", copied=result.get("copy"))
            written.append(shares)
        if result.get("removed"):
            written.append(pictures.against_removed(result["removed"], folder / "removed.png"))
        reader = model.reader if isinstance(model, ViewWorldModel) else model
        if isinstance(reader, SpatialModel):
            extent = first.source.extent()
            written.append(pictures.enclaves(reader.core, extent, reader.scale, folder / "enclaves.png"))
        if isinstance(model, ViewWorldModel) or self.oracle:
            return written
        if example >= self.test_episodes:
            raise UserError(f"there is no episode {example}; the test has {self.test_episodes} of each variant")
        if "rollout" in result:
            shown = {}
            for variant, test in tests.items():
                said, was, _ = test.rolled(model, self.prompt, self.imagined, example + 1)
                shown[variant] = (was[:, example], said[:, example])
            written.append(pictures.rollouts(shown, folder / "rollouts.png"))
            written.append(pictures.along_rollout(result["rollout"], folder / "rollout_accuracy.png"))
        elif self.polar:
            said, truth = first.example(model, example, 20)
            written.append(pictures.polar_pair(truth, said, folder / "polar.png"))
        return written


def _cells(measured: Mapping[str, float]) -> list[str]:
    return [f"{value:.4f}" for value in measured.values()]


def _imported(path: str | None) -> Callable[..., Any] | None:
    """What ``module:name`` names."""
    if path is None:
        return None
    module, _, name = path.partition(":")
    if not name:
        raise UserError(f"task.policy={path}; write module:name")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"task.policy={path} cannot be imported ({error!r}); write module:name") from error
    return found
