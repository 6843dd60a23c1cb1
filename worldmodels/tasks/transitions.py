"""World models on episodes: trained contrastively, scored by what they imagine beside what a copy of the present would."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType
from torch import Tensor, nn

from ..data.environments import resized
from ..data.episodes import Episodes, Paths, draw_paths
from ..errors import UserError
from ..logging import progress_bar
from ..losses import contrastive, refuse_unknown_forms
from ..models.world_model import WorldModel, attach, attached_size
from ..plugins import build_encoder
from ..ranges import check_ranges
from ..ranking import Imagined, score
from ..report import transitions as pictures
from ..report.tables import scores
from . import CoreBuilder
from .recording import recorded

HORIZONS = (1, 5, 10)
_ENCODE_BATCH = 2000


class Transitions:
    """Predict how an environment's states change, in the space of an encoder's slots.

    Kipf et al. 2020, "Contrastive Learning of Structured World Models", on any Gymnasium environment or recorded episodes.

    Args:
        env: "id" of the environment, its "kwargs", and "resize", the (height, width) pictures are brought to, or None.
        data: "train" and "test" episodes, each a "path" or how many "episodes" of how many "steps" from which "seed"; "dir"
            where collected ones are kept (or several folders, see ``collected``), and how they are, see ``collect``.
        encoder: what makes slots, with ``num_slots`` and ``slot_size``.
        objective: keyword arguments of ``losses.contrastive``.
        memory: "none" or "carry", see ``WorldModel``.
        action_to: how actions reach slots, see ``attach``; None for "slot" where they belong to objects, else "copy".
        slot_ids: whether a core is told which slot is which, see ``WorldModel``.
        evaluation: "horizons", steps ahead that are scored; "burn_in", steps that only fill a carried state; "limit", the
            first so many test episodes.
        trainer: of which "window", "imagine" and "starts_per_episode" say how transitions are drawn, see ``Windows``.
    """

    sections = ("env", "data", "encoder", "objective", "memory", "action_to", "slot_ids", "evaluation", "trainer")
    tags = ("wm", "wm")
    unit = "transitions"

    def __init__(
        self,
        *,
        env: Mapping[str, Any],
        data: Mapping[str, Any],
        encoder: Mapping[str, Any],
        objective: Mapping[str, Any],
        memory: str,
        action_to: str | None,
        slot_ids: bool,
        evaluation: Mapping[str, Any],
        trainer: Mapping[str, Any],
    ):
        self.name = env["id"] or "episodes"
        self.env, self.data, self.encoder = env, data, encoder
        self.memory, self.action_to, self.slot_ids = memory, action_to, slot_ids
        self.horizons, self.limit = list(evaluation["horizons"]), evaluation["limit"]
        if not self.horizons or len(set(self.horizons)) < len(self.horizons):
            raise UserError(f"evaluation.horizons={self.horizons}; give some numbers of steps, each once")
        if memory == "carry" and trainer["window"] < 2:
            raise UserError("memory=carry trains on windows of several steps; set trainer.window=4 or more")
        self.burn_in = burn_in_steps(evaluation["burn_in"], memory)
        self.windows = Windows(
            objective,
            window=trainer["window"],
            imagine=trainer["imagine"],
            starts_per_episode=trainer["starts_per_episode"],
        )
        self._opened: dict[str, Episodes] = {}

    # Data.

    def collect(self, *, quiet: bool = False) -> None:
        """Open the episodes, collected first if these settings never were."""
        for which in ("train", "test"):
            self.episodes(which, quiet=quiet, again="data.fresh=true" if which == "train" and not quiet else None)

    def episodes(self, which: str, *, quiet: bool = True, again: str | None = None) -> Episodes:
        """The "train" or "test" episodes: opened, or collected if these settings never were.

        Raises:
            UserError: missing or damaged data, an unknown environment.
        """
        if which not in self._opened:
            self._opened[which] = self._open(which, quiet=quiet, again=again)
        return self._opened[which]

    def _open(self, which: str, *, quiet: bool, again: str | None) -> Episodes:
        chosen = self.data[which]
        if chosen["path"] is not None:
            return Episodes.load(chosen["path"])
        if self.env["id"] is None:
            raise UserError("no environment was named; give env.id=<a Gymnasium id>, or experiment=block_physics")
        steps = chosen["steps"]
        if which == "test" and steps is not None:  # a carried state is filled before the steps that are scored
            steps += self.burn_in
        settings = {
            "env_id": self.env["id"],
            "env_kwargs": self.env["kwargs"],
            "resize": tuple(self.env["resize"]) if self.env["resize"] else None,
            "episodes": chosen["episodes"],
            "steps": steps,
            "seed": chosen["seed"],
            "drop_invalid": self.data["drop_invalid"],
            "num_envs": self.data["num_envs"],
        }
        more = {"fresh": self.data["fresh"], "again": again, "processes": self.data["processes"]}
        return recorded(f"collecting {which}", self.data["dir"], which, settings, quiet=quiet, **more)

    def about(self) -> dict[str, Any]:
        """The shape of an observation and the actions; refuses test episodes of another kind, or too short to be scored."""
        train, test = self.episodes("train"), self.episodes("test")
        if "action" not in train.about:
            raise UserError("these data do not say what their actions are; collect or import them again")
        about = {
            "observation_shape": list(train.observation_shape),
            "action": train.about["action"],
            "data": {"train": train.checksum, "test": test.checksum},
        }
        _require_same_kind(about, test)
        needed = self.burn_in + max(self.horizons)
        enough = int((test.lengths >= needed).sum())
        if enough < 2:
            longest = int(test.lengths.max()) - self.burn_in
            mend = f"like evaluation.horizons=[{longest}]" if longest > 0 else "or data with longer episodes"
            raise UserError(
                f"{enough} of {len(test)} test episodes reach the {needed} steps that evaluation.horizons={self.horizons} "
                f"need (the longest has {int(test.lengths.max())}); give smaller horizons, {mend}"
            )
        return about

    def on(self, episodes: Episodes) -> "Transitions":
        """The same task, tested on other episodes."""
        other = copy.copy(self)
        other._opened = self._opened | {"test": episodes}
        return other

    # Model and loss.

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> WorldModel:
        """A ``WorldModel``; without other sizes the core has as many slots as the encoder, of the same size."""
        options = dict(self.encoder)
        num_slots, slot_size = options.pop("num_slots"), options.pop("slot_size")
        encoder = build_encoder(options, tuple(about["observation_shape"]), num_slots, slot_size)
        action = about["action"]
        action_to = self.action_to or ("slot" if action.get("per_object") else "copy")
        token_size = slot_size + attached_size(action, action_to, num_slots, self.slot_ids)
        built = core(token_size, num_tokens=num_slots, num_slots=num_slots, slot_size=slot_size)
        return WorldModel(
            encoder, built, action=action, action_to=action_to, slot_ids=self.slot_ids, memory=self.memory
        )

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Paths]:
        """Windows of transitions, see ``Windows``."""
        return self.windows.batches(self.episodes("train"), batch_size, device)

    def losses(self, model: nn.Module, batch: Paths, generator: torch.Generator) -> dict[str, Tensor]:
        """The contrastive loss and its two terms."""
        return self.windows.losses(model, batch, generator)

    # Scores.

    def evaluate(self, model: WorldModel, limit: int | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """The scores of ``evaluate`` on the test episodes; "scores" holds those that are logged."""
        episodes = self.episodes("test", quiet=quiet)
        shape = list(model.encoder.observation_shape)
        _require_same_kind({"observation_shape": shape, "action": model.action}, episodes)
        with progress_bar("encoding") as bar:
            bar.disable |= quiet
            task = bar.add_task("", total=None, note="frames")
            return evaluate(
                model,
                episodes,
                horizons=self.horizons,
                burn_in=self.burn_in,
                limit=self.limit if limit is None else limit,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )

    def objective(self, result: Mapping[str, Any]) -> float:
        """In-episode H@1 at the longest horizon."""
        return float(result["in_episode"][str(max(self.horizons))]["h@1"])

    # What people look at.

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> RenderableType:
        """H@1 and MRR beside the copies; of a single result also how much room the slots take, and the alarms."""
        table = scores(results, f"{of}: held-out episodes, percent")
        if len(results) > 1:
            return table
        (result,) = results.values()
        room = f"effective rank of the slots {result['effective_rank']:.2f}, variance {result['variance']:.3g}"
        return Group(table, room, *(f"ALARM {alarm}" for alarm in result["alarms"]))

    @torch.no_grad()
    def draw(
        self,
        model: WorldModel,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """Learning curves, H@1 against the horizon, and of one test episode what was imagined and what the core chose."""
        limit = max(pictures.REFERENCES, example + 1)
        seen = imagine(model, self.episodes("test"), max(self.horizons), burn_in=self.burn_in, limit=limit)
        written = [pictures.rollout(seen, folder / "rollout.png", episode=example)]
        written.append(pictures.horizons(seen, type(model.core).__name__, folder / "horizons.png"))
        if metrics:
            chance = result["in_episode"][str(max(self.horizons))].get("chance")
            written.append(pictures.curves(metrics, folder / "curves.png", chance=chance))
        drawn = pictures.choices(model, seen, folder / "choices.png", episode=example)
        return written + ([drawn] if drawn else [])

    # What a trained model is for.

    @torch.no_grad()
    def rollout(self, model: WorldModel, observations: Any, actions: Any) -> Tensor:
        """Imagine from observations: predicted slots after each action.

        Args:
            model: the model.
            observations: the present, one frame ``(...)`` or a batch ``(B, ...)``, as the environment gives them.
            actions: ``(T,)`` or ``(T, B)`` integers, or with an action axis, as the environment takes them.

        Returns:
            Slots ``(T, K, D)``, or ``(T, B, K, D)`` for a batch.
        """
        device = next(model.parameters()).device
        seen = observations["image"] if isinstance(observations, Mapping) else observations
        frames, moves = (
            (x if isinstance(x, Tensor) else torch.as_tensor(np.asarray(x))).to(device) for x in (seen, actions)
        )
        single = frames.dim() == len(model.encoder.observation_shape)
        if single:
            frames, moves = frames[None], moves.reshape(len(moves) if moves.dim() else 1, 1, *moves.shape[1:])
        if self.env["resize"] is not None:
            frames = resized(frames, tuple(self.env["resize"]))
        sizes = model.action["sizes"]
        width = () if model.action["kind"] == "discrete" and len(sizes) == 1 else (moves.shape[-1],)
        if len(moves) == 0 or moves.shape[1:2] != (len(frames),) or moves.dim() != 2 + len(width):
            raise UserError(
                f"{len(frames)} observations, but actions of shape {tuple(moves.shape)}; expected (T, {len(frames)}, ...)"
            )
        if model.action["kind"] == "discrete":
            largest = moves.reshape(-1, len(sizes)).amax(0).tolist()
            if int(moves.min()) < 0 or any(m >= n for m, n in zip(largest, sizes, strict=True)):
                raise UserError(f"actions reach {largest}; this model knows actions below {sizes}")
        imagined = model.rollout(model.encode(frames), moves)
        return imagined[:, 0] if single else imagined


class Windows:
    """How transitions are drawn from episodes, and their contrastive loss.

    Args:
        objective: keyword arguments of ``losses.contrastive``.
        window: transitions in a row that are drawn together; above 1 the model is trained on sequences.
        imagine: within a window, predict each step from the prediction before it.
        starts_per_episode: windows of one episode drawn together; a negative from the same episode needs at least 2.
    """

    def __init__(
        self,
        objective: Mapping[str, Any],
        *,
        window: int = 1,
        imagine: bool = False,
        starts_per_episode: int = 1,
    ):
        check_ranges("objective", contrastive, objective)
        refuse_unknown_forms(objective.get("negatives", "cswm"), objective.get("hinge_on", "energy"))
        self.objective = dict(objective)
        self.window, self.imagine, self.starts_per_episode = window, imagine, starts_per_episode
        self.action: Mapping[str, Any] = {}

    def batches(self, data: Episodes, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Paths]:
        """Draws ``batch_size`` transitions, see ``draw_paths``.

        Raises:
            UserError: episodes or batches that windows do not fit into.
        """
        self._check(data, batch_size)
        self.action = data.about.get("action", {})
        data = data.to(device)
        aligned = self.objective.get("negatives") == "time_aligned"

        def draw(generator: torch.Generator) -> Paths:
            return draw_paths(
                data, batch_size, self.window, self.starts_per_episode, time_aligned=aligned, generator=generator
            )

        return draw

    def _acted(self, actions: Tensor, slots: Tensor) -> Tensor | None:
        """What is done to each slot, ``(B, K, A)`` one-hot; None where the objective does not ask.

        Raises:
            UserError: the actions do not divide among the slots.
        """
        if not self.objective.get("displacement"):
            return None
        attached_size(self.action, "slot", slots.shape[1])
        return attach(slots[..., :0], actions, self.action, "slot")

    def _check(self, data: Episodes, batch_size: int) -> None:
        inside = self.window * self.starts_per_episode
        if batch_size % inside:
            raise UserError(
                f"trainer.batch_size gives each process {batch_size} transitions; expected a multiple of window x "
                f"starts_per_episode = {inside}"
            )
        if int(data.lengths.max()) < self.window:
            raise UserError(
                f"trainer.window={self.window}, but the longest episode has {int(data.lengths.max())} transitions"
            )
        if self.objective.get("displacement") and "per_object" not in data.about.get("action", {}):
            raise UserError(
                f"objective.displacement={self.objective['displacement']} needs actions that belong to objects, which these "
                "data do not have; leave it at 0"
            )
        if self.objective.get("in_episode", 0.0) > 0.0 and inside < 2:
            raise UserError(
                "objective.in_episode needs several steps of an episode in a batch; set trainer.starts_per_episode=4"
            )

    def losses(self, model: nn.Module, paths: Paths, generator: torch.Generator) -> dict[str, Tensor]:
        """The contrastive loss over all transitions of a batch of windows, and its two terms."""
        slots, pred_slots = model(paths.observations, paths.actions, self.imagine)  # (L + 1, B, K, D), (L, B, K, D)
        L, B = pred_slots.shape[:2]
        step = paths.step + torch.arange(L, device=paths.step.device)[:, None]
        loss = contrastive(
            slots[:-1].flatten(0, 1),
            pred_slots.flatten(0, 1),
            slots[1:].flatten(0, 1),
            episode=paths.episode.expand(L, B).flatten(),
            step=step.flatten(),
            acted=self._acted(paths.actions.flatten(0, 1), slots[:-1].flatten(0, 1)),
            generator=generator,
            **self.objective,
        )
        return {"loss": loss.total, "loss_pos": loss.positive, "loss_neg": loss.negative}


def burn_in_steps(asked: int | None, memory: str) -> int:
    """Steps at the start of an episode that only fill the state: as asked, else 5 for a carried one and 0 for none."""
    return asked if asked is not None else 0 if memory == "none" else 5


def _require_same_kind(expected: Mapping[str, Any], episodes: Episodes) -> None:
    """Refuse episodes whose observations or actions are not those a model was made for.

    Raises:
        UserError: they differ.
    """
    shape = tuple(expected["observation_shape"])
    if episodes.observation_shape != shape:
        raise UserError(f"the data show {episodes.observation_shape}, the model takes {shape}")
    if episodes.about.get("action") != expected["action"]:
        raise UserError(f"the data have actions {episodes.about.get('action')}, the model takes {expected['action']}")


def imagine(
    model: WorldModel,
    episodes: Episodes,
    horizon: int,
    *,
    burn_in: int = 0,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Imagined:
    """Test episodes as a world model sees them, and what it imagines of them.

    Args:
        model: the model, set to evaluation by the caller.
        episodes: test episodes.
        horizon: how many steps to imagine; shorter episodes are left out.
        burn_in: steps at the start of each episode that only fill a carried state.
        limit: use the first so many of the episodes; None for all.
        progress: called with (frames encoded, frames in all).

    Raises:
        UserError: fewer than two episodes are long enough.
    """
    long_enough = torch.nonzero(episodes.lengths >= burn_in + horizon)[:, 0]
    if len(long_enough) < 2:
        raise UserError(
            f"{len(long_enough)} test episodes reach {burn_in + horizon} steps (the longest has "
            f"{int(episodes.lengths.max())}); give longer episodes or smaller horizons"
        )
    index = long_enough[:limit]
    present, rows = episodes.frames(index)
    device = next(model.parameters()).device
    real = rows[present]  # every frame once; the padding of shorter episodes is not encoded
    encoded = []
    for start in range(0, len(real), _ENCODE_BATCH):
        frames = episodes.arrays["observations"][real[start : start + _ENCODE_BATCH]]
        encoded.append(model.encode(frames.to(device)))
        if progress is not None:
            progress(min(start + _ENCODE_BATCH, len(real)), len(real))
    slots = torch.zeros(*rows.shape, model.num_slots, model.slot_size, device=device)
    slots[present.to(device)] = torch.cat(encoded).float()  # (E, longest + 1, K, D)
    begin, end = burn_in, burn_in + horizon
    actions = episodes.arrays["actions"][rows[:, :end]].transpose(0, 1).to(device)
    state = None
    if burn_in:
        state = model.predict(slots[:, :begin].transpose(0, 1), actions[:begin])[1]
    imagined = model.rollout(slots[:, begin], actions[begin:], state)  # (horizon, E, K, D)
    return Imagined(episodes, index, burn_in, slots, imagined)


@torch.no_grad()
def evaluate(
    model: WorldModel,
    episodes: Episodes,
    *,
    horizons: Sequence[int] = HORIZONS,
    burn_in: int | None = None,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Scores of a world model on held-out episodes, see ``ranking.score``.

    Args:
        model: the model; it is set to evaluation and back.
        episodes: held-out episodes.
        horizons: steps ahead.
        burn_in: None: 0 with memory "none", 5 with "carry".
        limit: use the first so many episodes.
        progress: called with (frames encoded, frames in all).

    Returns:
        What ``evaluation.json`` holds; "scores" are those worth a curve.
    """
    training = model.training
    model.eval()
    burn_in = burn_in_steps(burn_in, model.memory)
    seen = imagine(model, episodes, max(horizons), burn_in=burn_in, limit=limit, progress=progress)
    model.train(training)
    result = score(seen, horizons) | {"memory": model.memory}
    logged: dict[str, float] = {}
    for h, entry in result["all"].items():
        logged |= {f"hits@1/h{h}": entry["h@1"], f"mrr/h{h}": entry["mrr"], f"copy_hits@1/h{h}": entry["copy_h@1"]}
        logged[f"in_episode_hits@1/h{h}"] = result["in_episode"][h]["h@1"]
    return result | {"scores": logged}
