"""Scores of a world model on held-out episodes, beside what a copy of the present would score."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .data.episodes import Episodes
from .errors import UserError
from .metrics import Ranks, effective_rank, hits, mean_interval, ranks, ranks_within, reciprocal_ranks
from .world_model import WorldModel

HORIZONS = (1, 5, 10)
MOVED_MINIMUM = 50
_ENCODE_BATCH = 2000


def burn_in_steps(asked: int | None, memory: str) -> int:
    """Steps at the start of an episode that only fill the state: as asked, else 5 for a carried one and 0 for none."""
    return asked if asked is not None else 0 if memory == "none" else 5


class Imagined:
    """Slots of test episodes, and what a model imagines of them.

    Args:
        episodes: test episodes.
        index: which of them, ``(E,)``.
        burn_in: the step from which on is imagined.
        slots: of every frame, ``(E, longest + 1, K, D)``, anything beyond an episode's end.
        imagined: after each step, ``(horizon, E, K, D)``.
    """

    def __init__(self, episodes: Episodes, index: Tensor, burn_in: int, slots: Tensor, imagined: Tensor):
        self.episodes, self.burn_in = episodes, burn_in
        self.slots, self.imagined = slots, imagined
        self._find(index)

    def _find(self, index: Tensor) -> None:
        """Where the frames of these episodes lie."""
        self.index = index
        self.lengths = self.episodes.lengths[index]
        time = torch.arange(int(self.lengths.max()) + 1, device=self.episodes.device)
        self.present = time <= self.lengths[:, None]  # (E, longest + 1)
        self.rows = self.episodes.starts[index][:, None] + torch.minimum(time, self.lengths[:, None])

    def info(self, name: str) -> Tensor | None:
        """An info array with one entry per object, ``(E, longest + 1, objects, ...)``; None if the data have none."""
        array = self.episodes.arrays.get(f"info/{name}")
        if array is None or array.dim() < 2 or not bool(torch.isfinite(array.double()).all()):
            return None
        return array[self.rows]


class Encoded(Imagined):
    """Test episodes as a world model sees them, and what it imagines of them.

    Args:
        model: the model, set to evaluation by the caller.
        episodes: test episodes.
        horizon: how many steps to imagine; shorter episodes are left out.
        burn_in: steps at the start of each episode that only fill a carried state.
        limit: use the first so many of the episodes; None for all.
        progress: called with (frames encoded, frames in all).
    """

    def __init__(
        self,
        model: WorldModel,
        episodes: Episodes,
        horizon: int,
        *,
        burn_in: int = 0,
        limit: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ):
        long_enough = torch.nonzero(episodes.lengths >= burn_in + horizon)[:, 0]
        if len(long_enough) < 2:
            raise UserError(
                f"{len(long_enough)} test episodes reach {burn_in + horizon} steps (the longest has "
                f"{int(episodes.lengths.max())}); give longer episodes or smaller horizons"
            )
        self.episodes, self.burn_in = episodes, burn_in
        self._find(long_enough[:limit])
        device = next(model.parameters()).device
        real = self.rows[self.present]  # every frame once; the padding of shorter episodes is not encoded
        slots = []
        for start in range(0, len(real), _ENCODE_BATCH):
            frames = episodes.arrays["observations"][real[start : start + _ENCODE_BATCH]]
            slots.append(model.encode(frames.to(device)))
            if progress is not None:
                progress(min(start + _ENCODE_BATCH, len(real)), len(real))
        self.slots = torch.zeros(*self.rows.shape, model.num_slots, model.slot_size, device=device)
        self.slots[self.present.to(device)] = torch.cat(slots).float()  # (E, longest + 1, K, D)
        begin, end = burn_in, burn_in + horizon
        actions = episodes.arrays["actions"][self.rows[:, :end]].transpose(0, 1).to(device)
        state = None
        if burn_in:
            state = model.predict(self.slots[:, :begin].transpose(0, 1), actions[:begin])[1]
        self.imagined = model.rollout(self.slots[:, begin], actions[begin:], state)  # (horizon, E, K, D)


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
    """Hits@1 and MRR of imagined states at several horizons, with ties broken at random in expectation.

    Paths are the first ``burn_in + h`` steps of each episode. Entries, one per horizon:

    - "all": each true state ranks the predictions of all paths; ``copy_`` is z' = z under the same encoder, "true_copy_"
      the same with true positions where the environment tells them.
    - "in_episode": the true states of the path's own episode ranked by distance to the prediction; states that look the
      same as the target are left out; "chance" is the mean of one over the number of candidates.
    - "moved": the paths on which something was pushed, ranked among all; absent below 50 paths.

    Args:
        model: the model; it is set to evaluation and back.
        episodes: held-out episodes.
        horizons: steps ahead.
        burn_in: None: 0 with memory "none", 5 with "carry".
        limit: use the first so many episodes.
        progress: called with (frames encoded, frames in all).

    Returns:
        What ``evaluation.json`` holds.
    """
    burn_in = burn_in_steps(burn_in, model.memory)
    training = model.training
    model.eval()
    seen = Encoded(model, episodes, max(horizons), burn_in=burn_in, limit=limit, progress=progress)
    model.train(training)
    result = score(seen, horizons)
    result |= {"memory": model.memory, "core": type(model.core).__name__}
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    result["parameters"] = sum(counts.values())
    result["core_parameters"] = sum(count for name, count in counts.items() if name.startswith("core."))
    return result


def score(seen: Imagined, horizons: Sequence[int]) -> dict[str, Any]:
    """The scores of imagined states, see ``evaluate``."""
    burn_in = seen.burn_in
    looks = _looks(seen)
    positions, moved = seen.info("positions"), seen.info("moved")
    result: dict[str, Any] = {"all": {}, "in_episode": {}, "moved": {}}
    now = seen.slots[:, burn_in]
    for h in horizons:
        target, pred = seen.slots[:, burn_in + h], seen.imagined[h - 1]
        over_all, copy_over_all = ranks(pred, target), ranks(now, target)
        entry = _scores(over_all, copy_over_all)
        if positions is not None:
            true = ranks(positions[:, burn_in].double(), positions[:, burn_in + h].double())
            entry |= {"true_copy_h@1": _mean(hits(true, 1)), "true_copy_mrr": _mean(reciprocal_ranks(true))}
        for ties in ("reference", "worst"):
            entry[f"h@1_{ties}"] = _mean(hits(over_all, 1, ties=ties))
        result["all"][str(h)] = entry
        different = (seen.present & (looks != looks[:, burn_in + h, None])).to(seen.slots.device)
        inside = _scores(
            ranks_within(pred, target, seen.slots, different), ranks_within(now, target, seen.slots, different)
        )
        inside["chance"] = _mean(1.0 / (1.0 + different.sum(1).double()))
        result["in_episode"][str(h)] = inside
        if moved is not None:
            pushed = (moved[:, burn_in + 1 : burn_in + h + 1].sum(-1) >= 2).any(1).to(over_all.less.device)
            if int(pushed.sum()) >= MOVED_MINIMUM:
                result["moved"][str(h)] = _scores(_take(over_all, pushed), _take(copy_over_all, pushed))
    result["effective_rank"] = effective_rank(now)
    result["variance"] = float(now.double().flatten(1).var(0).sum())
    result["alarms"] = _alarms(result, max(horizons))
    return result | {"episodes": len(now), "burn_in": burn_in}


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _take(of: Ranks, mask: Tensor) -> Ranks:
    return Ranks(of.less[mask], of.ties[mask])


def _scores(model: Ranks, copy: Ranks) -> dict[str, Any]:
    hit = hits(model, 1)
    return {
        "h@1": _mean(hit),
        "mrr": _mean(reciprocal_ranks(model)),
        "copy_h@1": _mean(hits(copy, 1)),
        "copy_mrr": _mean(reciprocal_ranks(copy)),
        "ci95": list(mean_interval(hit.cpu().numpy())),
        "n": len(hit),
    }


def _looks(seen: Imagined) -> Tensor:
    """A number per frame, ``(E, longest + 1)``, equal where the observation's bytes are equal."""
    frames = seen.episodes.arrays["observations"]
    numbers = np.empty(tuple(seen.rows.shape), dtype=np.int64)
    for e, rows in enumerate(seen.rows.cpu()):
        for t, frame in enumerate(frames[rows.to(frames.device)].cpu().numpy()):
            numbers[e, t] = int.from_bytes(hashlib.blake2b(frame.tobytes(), digest_size=8).digest(), "big", signed=True)
    return torch.from_numpy(numbers).to(seen.present.device)


def _alarms(result: dict[str, Any], horizon: int) -> list[str]:
    alarms = []
    if result["effective_rank"] < 1.5 or result["variance"] < 1e-6:
        alarms.append(
            f"collapse: effective rank {result['effective_rank']:.2f}, variance {result['variance']:.1e}; "
            "the encoder tells states hardly apart"
        )
    entry = result["all"][str(horizon)]
    if entry["copy_h@1"] >= entry["ci95"][0]:
        alarms.append(
            f"shortcut: at {horizon} steps the latent copy scores {entry['copy_h@1']:.3f} and the model "
            f"{entry['h@1']:.3f}; the encoder tells episodes apart, not states (raise objective.in_episode)"
        )
    return alarms
