"""World models of what is seen in parts: S2RM's tasks, on any environment whose observations are views.

The data are episodes; what is seen at a step is drawn from them on the device when it is needed. Three kinds of environment
are understood, by what they offer:

- ``crops(states, positions)``: pictures around any pixel, drawn from recorded states; every step shows ``num_views`` of them
  at random pixels.
- ``views(units)`` and ``action_views(units, actions, positions)``: what each agent sees and does, drawn from recorded states.
- neither: views as recorded, a Dict with "views", "positions" and "mask"; an agent's action is one-hot on all of its view.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from .core import RecurrentCore
from .data.collect import collected, make_envs
from .data.episodes import Episodes
from .data.views import Views
from .encoders import pixels
from .errors import UserError
from .evaluation import Imagined, score
from .logging import progress_bar
from .losses import contrastive, polar_loss, polar_parts, polar_truth
from .metrics import balanced_accuracy, confusion_matrix, f1_scores, macro_f1
from .report import views as pictures
from .report.tables import scores as ranking_table
from .training import draw_starts
from .view_model import SpatialModel, ViewModel, ViewWorldModel, view_model

OBJECTIVES = ("views", "contrastive")
_VIEWS_AT_ONCE = 20_000  # of an evaluation, so that memory stays bounded


class Recorded(NamedTuple):
    """Episodes of one variant of the environment, and the environment that draws what was seen in them."""

    episodes: Episodes
    env: Any


class ViewBatch(NamedTuple):
    """Windows of views ``(window + 1, B, ...)``, where they are from, and the source of further draws."""

    views: Views
    episode: Tensor
    step: Tensor
    generator: torch.Generator


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
        data_dir: where recorded episodes are kept.
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

    position_size = 2
    num_tokens = 1
    num_slots = 10
    slot_size = 128

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
        data_dir: str = "data",
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
        if train_seed == test_seed:
            raise UserError(f"task.train_seed and task.test_seed are both {test_seed}; test data must be others")
        counts = {"train_episodes": train_episodes, "test_episodes": test_episodes, "window": window, "steps": steps}
        counts |= {"num_views": num_views, "channels": channels, "token_size": token_size}
        for name, value in (counts | {"prompt": prompt, "imagined": imagined}).items():
            if value < 1:
                raise UserError(f"task.{name}={value}; expected at least 1")
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
            not horizons or min(horizons) < 1 or max(horizons) + _BURN_IN > steps or not 0.0 <= in_episode <= 1.0
        ):
            raise UserError(
                f"task.horizons={list(horizons)} and in_episode={in_episode}; expected horizons of at least 1 that fit into "
                f"task.steps={steps} after {_BURN_IN} steps, and a share"
            )
        self.name = f"views of {env_id.rpartition('/')[2]}" + (", contrastive" if objective == "contrastive" else "")
        self.env_id, self.env_kwargs, self.policy = env_id, dict(env_kwargs or {}), policy
        self.train = {name: dict(kwargs) for name, kwargs in (train or {"train": {}}).items()}
        self.test = {name: dict(kwargs) for name, kwargs in (test or {"test": {}}).items()}
        self.train_episodes, self.test_episodes, self.steps = train_episodes, test_episodes, steps
        self.train_seed, self.test_seed, self.data_dir = train_seed, test_seed, data_dir
        self.window, self.objective, self.oracle, self.polar = window, objective, oracle, polar
        self.num_views, self.fractions, self.removed = num_views, list(fractions), list(removed)
        self.prompt, self.imagined, self.horizons = prompt, imagined, list(horizons)
        self.token_size, self.channels, self.place_size, self.scale = token_size, channels, place_size, scale
        self.in_episode, self.placed, self.lingering = in_episode, placed, lingering
        self._recorded: dict[tuple[str, str, str], Recorded] = {}

    # Data.

    def record(self) -> None:
        """Record all episodes, of training and test, that never were."""
        for which in ("train", "test"):
            for variant in getattr(self, which):
                self._data(which, variant, torch.device("cpu"))

    def _data(self, which: str, variant: str, device: torch.device) -> Recorded:
        """The episodes of a variant, recorded if they never were, resident on the device."""
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
            with progress_bar(f"recording {which}: {variant}") as bar:
                shown = bar.add_task("", total=episodes, note="episodes", visible=False)
                found = collected(
                    self.data_dir,
                    which,
                    settings,
                    progress=lambda done, _: bar.update(shown, completed=done, visible=True),
                )
            env = make_envs(self.env_id, 1, env_kwargs=kwargs, device=str(device))
            self._recorded[key] = Recorded(found.to(device), env)
        return self._recorded[key]

    def _seen(
        self,
        data: Recorded,
        rows: Tensor,
        generator: torch.Generator,
        *,
        action_rows: Tensor | None = None,
        lingering: float = 0.0,
    ) -> Views:
        """What was seen at rows ``(T, B)`` of the episodes; what was done, if another time, at ``action_rows``."""
        arrays, env = data.episodes.arrays, data.env
        action_rows = rows if action_rows is None else action_rows
        stored = arrays["observations"][rows]
        if hasattr(env, "crops"):
            shape = (*rows.shape, self.num_views, 2)
            drawn = torch.randint(env.image_size, shape, generator=generator, device=generator.device)
            positions = drawn.to(rows.device)
            stay = int(lingering * self.num_views)
            positions[1:, :, :stay] = positions[:-1, :, self.num_views - stay :]
            everything = torch.ones(shape[:-1], dtype=torch.bool, device=rows.device)
            return Views(env.crops(stored, positions), positions.float(), everything)
        actions = arrays["actions"][action_rows]
        if hasattr(env, "action_views"):
            views, positions, mask = env.views(stored)
            return Views(views, positions, mask, env.action_views(stored, actions, positions))
        done = [F.one_hot(part.long(), int(n)) for part, n in zip(actions.unbind(-1), _agent_actions(env), strict=True)]
        size = stored.shape[-3:-1] if stored.dtype == torch.uint8 else stored.shape[-2:]
        planes = torch.stack(done, dim=-2)[..., None, None].float().expand(-1, -1, -1, -1, *size)
        return Views(stored, arrays["positions"][rows], arrays["mask"][rows], planes)

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], ViewBatch]:
        """Windows of views, as many from every variant."""
        variants = [self._data("train", name, device) for name in self.train]
        for name, data in zip(self.train, variants, strict=True):
            if int(data.episodes.lengths.max()) < self.window:
                raise UserError(f"no episode of {name!r} has task.window={self.window} steps; give a smaller window")
        share, rest = divmod(batch_size, len(variants))

        def draw(generator: torch.Generator) -> ViewBatch:
            parts = []
            shares = [share] * len(variants)
            if rest:  # who gets one more is drawn anew for every batch
                order = torch.randperm(len(variants), generator=generator, device=device).tolist()
                shares = [share + (order[i] < rest) for i in range(len(variants))]
            for number, (data, count) in enumerate(zip(variants, shares, strict=True)):
                if count:
                    episode, step = draw_starts(data.episodes, count, self.window, generator=generator)
                    time = torch.arange(self.window + 1, device=device)[:, None]
                    rows = data.episodes.starts[episode] + step + time
                    views = self._seen(data, rows, generator, lingering=self.lingering)
                    parts.append((views, episode * len(variants) + number, step))
            seen, episodes, steps = zip(*parts, strict=True)
            return ViewBatch(_together(seen), torch.cat(episodes), torch.cat(steps), generator)

        return draw

    # Model and loss.

    def model(self, core: RecurrentCore) -> nn.Module:
        """A ``ViewModel``, or with the contrastive objective a ``ViewWorldModel``."""
        probe = make_envs(self.env_id, 1, env_kwargs=self.env_kwargs | next(iter(self.train.values())))
        seen, said = self._shapes(probe)
        probe.close()
        if hasattr(probe, "crops") and self.prompt + self.imagined > self.steps + 1:
            raise UserError(
                f"a rollout of task.prompt={self.prompt} and imagined={self.imagined} steps needs episodes as long; "
                f"task.steps={self.steps}"
            )
        if not core.initial_state(1) and self.objective == "contrastive":
            raise UserError(f"the contrastive objective needs a core with a state; {type(core).__name__} has none")
        if self.oracle and core.initial_state(1):
            raise UserError("the oracle sees what it is asked and needs no memory; use core=mlp with task.oracle=true")
        if self.polar and seen[0] < said:
            raise UserError(f"polar images have at least 15 channels; these views have {seen[0]}")
        model = view_model(
            core,
            seen,
            said if self.objective == "views" else None,
            channels=self.channels,
            polar=self.polar,
            place_size=self.place_size,
            scale=self.scale,
            placed=self.placed,
        )
        return model if self.objective == "views" else ViewWorldModel(model)

    def _shapes(self, env: Any) -> tuple[tuple[int, int, int], int]:
        """The shape ``(C, H, W)`` of a view, actions included, and the channels of what is said of it."""
        generator = torch.Generator().manual_seed(0)
        if hasattr(env, "crops") or hasattr(env, "action_views"):
            states, _ = env.reset(seed=0)
            if not isinstance(states, Tensor) or states.dim() != 3:
                raise UserError(
                    f"{self.env_id} records {env.single_observation_space}; views are drawn from its table of states, so "
                    "set task.env_kwargs.observation=state (BouncingBalls) or units (Skirmish)"
                )
            actions = torch.zeros(1, *(env.single_action_space.shape or ()), dtype=torch.int64)
            arrays = {"observations": states, "actions": actions}
        else:
            space = env.single_observation_space
            if not hasattr(space, "spaces") or "views" not in space.spaces:
                raise UserError(f"{self.env_id} observes {space}; expected a Dict with 'views', 'positions' and 'mask'")
            number = space["mask"].shape[0]
            if len(space["views"].shape) != 4 or len(getattr(env.single_action_space, "nvec", ())) != number:
                raise UserError(
                    f"{self.env_id} has views {space['views'].shape} and actions {env.single_action_space}; expected "
                    f"views (n, H, W, C) or (n, C, H, W) and MultiDiscrete actions, one for each of {number} agents"
                )
            arrays = {name: torch.as_tensor(space[name].sample())[None] for name in ("positions", "mask")}
            arrays["observations"] = torch.as_tensor(space["views"].sample())[None]
            arrays["actions"] = torch.as_tensor(env.single_action_space.sample())[None]
        episodes = Episodes(arrays, torch.zeros(1, dtype=torch.int64), {})
        views = self._seen(Recorded(episodes, env), torch.zeros(1, 1, dtype=torch.int64), generator)
        shown = _maps(views.observations[0, 0])
        done = 0 if views.actions is None else views.actions.shape[-3]
        said = 1 + 10 + 4 if self.polar else shown.shape[1]
        return (shown.shape[1] + done, *shown.shape[2:]), said

    def losses(self, model: nn.Module, batch: ViewBatch) -> dict[str, Tensor]:
        """The loss of the objective and its terms."""
        if self.objective == "contrastive":
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
                generator=batch.generator,
            )
            return {"loss": loss.total, "loss_pos": loss.positive, "loss_neg": loss.negative}
        said, truth = self._said(model, batch.views)
        if self.polar:
            terms = polar_loss(said, truth)
            return {"loss": terms.total, "friendly": terms.friendly, "unit_type": terms.unit_type, "hecs": terms.hecs}
        return {"loss": F.binary_cross_entropy_with_logits(said, truth)}

    def _said(self, model: nn.Module, views: Views, reported: Views | None = None) -> tuple[Tensor, Tensor]:
        """What a model says of all steps but the first, and what there was to see: ``(M, C, H, W)`` both."""
        read = views if reported is None else reported
        asked = views.at(slice(1, None))
        said = model(read.at(slice(1, None) if self.oracle else slice(None, -1)), asked.positions, asked.mask)
        return said, _maps(asked.observations[asked.mask])

    # Scores.

    @torch.no_grad()
    def evaluate(self, model: Any, limit: int | None = None) -> dict[str, Any]:
        """Scores on the test episodes of every variant, or on the first ``limit`` of each."""
        device = next(model.parameters()).device
        if self.objective == "contrastive":
            return self._ranked(model, device, limit)
        short = limit is not None
        fractions = self.fractions if not short else self.fractions[:1]
        views: dict[str, dict[str, dict[str, float]]] = {variant: {} for variant in self.test}
        known = {variant: self._data("test", variant, device) for variant in self.test}
        with progress_bar("scoring") as bar:
            bar.disable |= short
            shown = bar.add_task("", total=len(known) * len(fractions), note="variants x shares")
            for variant, data in known.items():
                for share in fractions:
                    views[variant][f"{share:g}"] = self._scored(model, data, share, limit)
                    bar.advance(shown)
        scores = {
            f"{measure}/{variant}/{share}": value
            for variant, by_share in views.items()
            for share, measured in by_share.items()
            for measure, value in measured.items()
        }
        result: dict[str, Any] = {
            "scores": scores,
            "views": views,
            "n": min(limit or self.test_episodes, self.test_episodes),
            "polar": self.polar,
        }
        if short:
            return result
        if isinstance(model, SpatialModel) and self.removed:
            result["removed"] = {variant: self._with_less(model, data) for variant, data in known.items()}
        crops = {variant: data for variant, data in known.items() if hasattr(data.env, "crops")}
        result["copy"] = {variant: self._copied(data) for variant, data in crops.items()}
        if crops and not self.oracle:
            result["rollout"] = {variant: self._rolled(model, data)[2] for variant, data in crops.items()}
        return result

    def _watched(
        self, data: Recorded, limit: int | None, generator: torch.Generator, shortest: int = 1
    ) -> Iterator[tuple[Tensor, Views]]:
        """Rows ``(T, b)`` and views of the first test episodes of at least so many steps, a part that fits into memory each.

        Beyond an episode's end its last row is repeated, and no view is there.
        """
        index = torch.nonzero(data.episodes.lengths >= shortest)[:, 0][:limit]
        lengths = data.episodes.lengths[index]
        T = int(lengths.max()) + 1
        time = torch.arange(T, device=lengths.device)[:, None]
        rows, there = data.episodes.starts[index] + time.minimum(lengths), time <= lengths
        many = max(1, _VIEWS_AT_ONCE // (T * self.num_views))
        for part, present in zip(rows.split(many, dim=1), there.split(many, dim=1), strict=True):
            views = self._seen(data, part, generator)
            yield part, views._replace(mask=views.mask & present[..., None])

    def _generator(self) -> torch.Generator:
        """What a test draws, the same for every model, share and device."""
        return torch.Generator().manual_seed(self.test_seed * 1_000_003)

    def _reported(self, views: Views, share: float, env: Any, generator: torch.Generator) -> Views:
        """The views that report: of random crops so many, of agents each with this probability."""
        if hasattr(env, "crops"):
            return views.first(max(1, round(share * self.num_views)))
        return views.reported(share, generator)

    def _scored(self, model: Any, data: Recorded, share: float, limit: int | None) -> dict[str, float]:
        tally = PolarTally() if self.polar else PixelTally()
        generator = self._generator()
        for _, views in self._watched(data, limit, generator):
            tally.add(*self._said(model, views, self._reported(views, share, data.env, generator)))
        return tally.scores()

    def _copied(self, data: Recorded) -> dict[str, float]:
        """The scores of saying what is now seen at the queried places, all of which a copy may look at."""
        tally = PixelTally()
        for rows, watched in self._watched(data, None, self._generator()):
            views = watched.at(slice(1, None))
            states = data.episodes.arrays["observations"][rows[:-1]]
            now = _maps(data.env.crops(states, views.positions.long())[views.mask])
            tally.add(2.0 * now - 1.0, _maps(views.observations[views.mask]))
        return tally.scores()

    def _with_less(self, model: SpatialModel, data: Recorded) -> dict[str, dict[str, float]]:
        """Scores with so many random modules taken away."""
        scores = {}
        order = torch.randperm(model.num_slots, generator=torch.Generator().manual_seed(self.test_seed)).tolist()
        for count in self.removed:
            if count < model.num_slots:
                less = copy.deepcopy(model)
                less.core = model.core.keep(sorted(order[count:]))  # type: ignore[attr-defined]
                scores[str(count)] = self._scored(less, data, 1.0, None)
        return scores

    @torch.no_grad()
    def _rolled(
        self, model: ViewModel, data: Recorded, number: int = 100
    ) -> tuple[Tensor, Tensor, dict[str, list[float]]]:
        """Rollouts of crops as in the paper's appendix F.1.1: prompted, then fed with what was said, stitched on a grid.

        Returns:
            Frames that were said and those that were (both ``(imagined, B, H, W)`` in [0, 1]) and the balanced accuracy of
            every step, with "copy" that of the prompt's last frame.
        """
        env, device = data.env, data.episodes.device
        generator = self._generator()
        steps = self.prompt + self.imagined
        number = min(number, len(data.episodes))
        rows = data.episodes.starts[:number] + torch.arange(steps, device=device)[:, None]
        views = self._seen(data, rows, generator)
        along, first = env.image_size // env.crop_size, (env.image_size % env.crop_size) // 2 + env.crop_size // 2
        line = first + env.crop_size * torch.arange(along, device=device)
        grid = torch.cartesian_prod(line, line).expand(steps, number, -1, 2)
        said = model.rollout(views.at(slice(self.prompt)), views.positions[self.prompt :], grid[self.prompt :].float())
        states = data.episodes.arrays["observations"][rows]
        true = _maps(env.crops(states, grid))
        was, last = true[self.prompt :], true[self.prompt - 1].expand_as(said)
        accuracy: dict[str, list[float]] = {"model": [], "copy": []}
        for name, guess in (("model", said), ("copy", last)):
            for t in range(self.imagined):
                matrix = confusion_matrix((guess[t] > 0.5).flatten(), (was[t] > 0.5).flatten(), 2)
                accuracy[name].append(balanced_accuracy(matrix))
        return _stitched(said, along), _stitched(was, along), accuracy

    def _ranked(self, model: ViewWorldModel, device: torch.device, limit: int | None) -> dict[str, Any]:
        """Hits@1 and MRR of imagined states among all test episodes of a variant, as ``evaluation.evaluate``."""
        variants = {}
        for variant in self.test:
            data = self._data("test", variant, device)
            generator = self._generator()
            slots, imagined = [], []
            shortest = _BURN_IN + max(self.horizons)
            index = torch.nonzero(data.episodes.lengths >= shortest)[:, 0][:limit]
            if len(index) < 2:
                raise UserError(
                    f"{len(index)} test episodes of {variant!r} reach {shortest} steps; give smaller horizons"
                )
            for rows, views in self._watched(data, limit, generator, shortest):
                seen, states = model.observe(views)
                at = _BURN_IN
                doing = [
                    self._seen(data, rows[at : at + 1], generator, action_rows=rows[at + h : at + h + 1]).at(0)
                    for h in range(max(self.horizons))
                ]
                slots.append(seen.transpose(0, 1))
                imagined.append(model.rollout(states[at], doing))
            kept = Imagined(data.episodes, index, _BURN_IN, torch.cat(slots), torch.cat(imagined, dim=1))
            variants[variant] = score(kept, self.horizons)
        scores = {
            f"hits@1/{variant}/h{h}": entry["h@1"]
            for variant, one in variants.items()
            for h, entry in one["all"].items()
        }
        return {"scores": scores, "ranked": variants, "n": min(limit or self.test_episodes, self.test_episodes)}

    # What people look at.

    def table(self, results: Mapping[str, Mapping[str, Any]], title: str) -> Table:
        """Scores by variant and share of views, one row a model."""
        if self.objective == "contrastive":
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
    def draw(self, model: Any, result: Mapping[str, Any], folder: Path, example: int) -> list[Path]:
        """Scores against the share of views, enclaves and the graph of modules, rollouts or polar images of one episode."""
        device = next(model.parameters()).device
        written: list[Path] = []
        if "views" in result:
            written.append(pictures.against_share(result["views"], folder / "shares.png"))
        if result.get("removed"):
            written.append(pictures.against_removed(result["removed"], folder / "removed.png"))
        reader = model.reader if isinstance(model, ViewWorldModel) else model
        if isinstance(reader, SpatialModel):
            data = self._data("test", next(iter(self.test)), device)
            extent = _extent(data)
            written.append(pictures.enclaves(reader.core, extent, reader.scale, folder / "enclaves.png"))
        if isinstance(model, ViewWorldModel) or self.oracle:
            return written
        if example >= self.test_episodes:
            raise UserError(f"there is no episode {example}; the test has {self.test_episodes} of each variant")
        if "rollout" in result:
            shown = {}
            for variant in self.test:
                said, was, _ = self._rolled(model, self._data("test", variant, device), example + 1)
                shown[variant] = (was[:, example], said[:, example])
            written.append(pictures.rollouts(shown, folder / "rollouts.png"))
            written.append(pictures.along_rollout(result["rollout"], folder / "rollout_accuracy.png"))
        elif self.polar:
            data = self._data("test", next(iter(self.test)), device)
            length = min(20, int(data.episodes.lengths[example]))
            rows = data.episodes.starts[example] + torch.arange(1 + length, device=device)[:, None]
            said, truth = self._said(model, self._seen(data, rows, self._generator()))
            written.append(pictures.polar_pair(truth, said, folder / "polar.png"))
        return written


_BURN_IN = 5  # steps that fill the state before what is imagined is ranked


class PixelTally:
    """Balanced accuracy and F1 of pixels at the threshold 0.5."""

    def __init__(self) -> None:
        self.matrix: Tensor | int = 0

    def add(self, said: Tensor, truth: Tensor) -> None:
        """Count predicted logits against what there was."""
        self.matrix = self.matrix + confusion_matrix(said > 0.0, truth > 0.5, 2)

    def scores(self) -> dict[str, float]:
        """The measures."""
        assert isinstance(self.matrix, Tensor)
        return {"balanced_accuracy": balanced_accuracy(self.matrix), "f1": float(f1_scores(self.matrix)[1])}


class PolarTally:
    """S2RM's four measures of predicted polar images."""

    def __init__(self) -> None:
        self.friendly: Tensor | int = 0
        self.types: Tensor | int = 0
        self.sums = torch.zeros(3, dtype=torch.float64)  # of the squared error, of the loss, of the views

    def add(self, said: Tensor, truth: Tensor) -> None:
        """Count predicted maps against the true images."""
        if len(said) == 0:
            return
        friendly, types, hecs = polar_parts(said)
        true_friendly, true_types, true_hecs = polar_truth(truth)
        self.friendly = self.friendly + confusion_matrix(friendly > 0.0, true_friendly > 0.5, 2)
        self.types = self.types + confusion_matrix(types.argmax(1), true_types, types.shape[1])
        n = len(said)
        values = [n * F.mse_loss(hecs, true_hecs).double(), n * polar_loss(said, truth).total.double()]
        self.sums += torch.stack([*values, values[0].new_tensor(n)]).cpu()

    def scores(self) -> dict[str, float]:
        """The measures; the larger the better."""
        assert isinstance(self.friendly, Tensor) and isinstance(self.types, Tensor)
        there = self.types.sum(1)[:-1].nonzero()[:, 0]  # types that occur; the last class is "no unit"
        squared, loss, n = self.sums.tolist()
        return {
            "friendly_f1": float(f1_scores(self.friendly)[1]),
            "unit_type_f1": macro_f1(self.types, there),
            "negative_mse": -squared / n,
            "log_likelihood": -loss / n,
        }


def _maps(observations: Tensor) -> Tensor:
    return pixels(observations) if observations.dtype == torch.uint8 else observations


def _together(parts: Sequence[Views]) -> Views:
    """Views of several batches as one, with as many views a step as the most of them has."""
    most = max(part.mask.shape[-1] for part in parts)

    def padded(value: Tensor) -> Tensor:
        missing = most - value.shape[2]
        return (
            value
            if missing == 0
            else torch.cat([value, value.new_zeros(*value.shape[:2], missing, *value.shape[3:])], 2)
        )

    columns = [
        None if any(value is None for value in column) else torch.cat([padded(value) for value in column], dim=1)
        for column in zip(*parts, strict=True)
    ]
    return Views(*columns)  # type: ignore[arg-type]


def _agent_actions(env: Any) -> list[int]:
    return [int(n) for n in env.single_action_space.nvec]


def _stitched(patches: Tensor, along: int) -> Tensor:
    """Patches ``(T, B, along^2, C, h, w)`` side by side, their channels' mean: ``(T, B, H, W)``."""
    rows = patches.mean(3).unflatten(2, (along, along))  # (T, B, i, j, h, w)
    return rows.permute(0, 1, 2, 4, 3, 5).flatten(4).flatten(2, 3)


def _extent(data: Recorded) -> tuple[float, float]:
    """How far positions reach, from the environment or from what was recorded."""
    size = getattr(data.env, "image_size", None) or getattr(data.env, "map_size", None)
    if size is not None:
        return float(size), float(size)
    furthest = data.episodes.arrays["positions"].amax((0, 1)) + 1.0
    return float(furthest[0]), float(furthest[1])


def _cells(measured: Mapping[str, float]) -> list[str]:
    return [f"{value:.4f}" for value in measured.values()]


def _imported(path: str | None) -> Callable[..., Any] | None:
    """What ``module:name`` names."""
    if path is None:
        return None
    import importlib

    module, _, name = path.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"task.policy={path} cannot be imported ({error!r}); write module:name") from error
    return found
