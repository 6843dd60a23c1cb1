"""How well imagined states are told from others: ranks beside those of a copy of the present, and what slots hold."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .data.episodes import Episodes
from .metrics import Ranks, effective_rank, hits, mean_interval, ranks, ranks_within, reciprocal_ranks

MOVED_MINIMUM = 50
_ALARM_MINIMUM = 100  # episodes; with fewer the shortcut alarm would ring by chance
_PROBE_MINIMUM = 50  # moments at which an object is seen, in either half of the episodes


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
        self.episodes, self.index, self.burn_in = episodes, index, burn_in
        self.slots, self.imagined = slots, imagined
        self.present, self.rows = episodes.frames(index)

    def info(self, name: str) -> Tensor | None:
        """An info array with one entry per object, ``(E, longest + 1, objects, ...)``; None if the data have none."""
        array = self.episodes.arrays.get(f"info/{name}")
        if array is None or array.dim() < 2:
            return None
        found = array[self.rows]
        return found if bool(torch.isfinite(found.double()).all()) else None


def score(seen: Imagined, horizons: Sequence[int]) -> dict[str, Any]:
    """The scores of imagined states at several horizons, with ties broken at random in expectation.

    Paths are the first ``burn_in + h`` steps of each episode. Entries, one per horizon:

    - "all": each true state ranks the predictions of all paths; ``copy_`` is z' = z under the same encoder, "true_copy_"
      the same with true positions where the environment tells them. "duplicates" is the share of paths whose true state is
      another path's as well, "distinct_" the scores with those rivals left out. "ceiling" is the most that H@1 can be for any
      model: of several paths that lead to the same observation, one prediction is the nearest.
    - "in_episode": the true states of the path's own episode ranked by distance to the prediction; states equal to the
      target are left out; "chance" is the mean of one over the number of candidates.
    - "moved": the paths on which something was pushed, ranked among all; absent below 50 paths.

    States are equal if their observations are, byte by byte, or the environment's ``info["state_id"]`` where it has one.
    Where the data know coordinates of objects, "probe" is what a linear readout of the slots tells of them, see ``probe``.

    Args:
        seen: test episodes and what is imagined of them.
        horizons: steps ahead.

    Returns:
        What ``evaluation.json`` holds, without what is known of the model.
    """
    burn_in = seen.burn_in
    same = _numbers(seen)
    positions, moved = seen.info("positions"), seen.info("moved")
    result: dict[str, Any] = {"all": {}, "in_episode": {}, "moved": {}}
    now = seen.slots[:, burn_in]
    for h in horizons:
        target, pred = seen.slots[:, burn_in + h], seen.imagined[h - 1]
        over_all, copy_over_all = ranks(pred, target), ranks(now, target)
        entry = _scores(over_all, copy_over_all)
        equal = same[:, burn_in + h].to(target.device)
        entry["duplicates"] = _mean(torch.stack([_occurs_again(column) for column in equal.T]).any(0))
        entry["ceiling"] = len(torch.unique(equal[:, 0])) / len(equal)
        if positions is not None:
            true = ranks(positions[:, burn_in].double(), positions[:, burn_in + h].double())
            entry |= {"true_copy_h@1": _mean(hits(true, 1)), "true_copy_mrr": _mean(reciprocal_ranks(true))}
        distinct = ranks(pred, target, equal) if entry["duplicates"] else over_all
        entry |= {"distinct_h@1": _mean(hits(distinct, 1)), "distinct_mrr": _mean(reciprocal_ranks(distinct))}
        for ties in ("reference", "worst"):
            entry[f"h@1_{ties}"] = _mean(hits(over_all, 1, ties=ties))
        result["all"][str(h)] = entry
        different = (seen.present & (same != same[:, burn_in + h, None]).all(-1)).to(seen.slots.device)
        inside = _scores(
            ranks_within(pred, target, seen.slots, different), ranks_within(now, target, seen.slots, different)
        )
        inside["chance"] = _mean(1.0 / (1.0 + different.sum(1).double()))
        result["in_episode"][str(h)] = inside
        if moved is not None:
            pushed = (moved[:, burn_in + 1 : burn_in + h + 1].sum(-1) >= 2).any(1).to(over_all.less.device)
            if int(pushed.sum()) >= MOVED_MINIMUM:
                result["moved"][str(h)] = _scores(_take(over_all, pushed), _take(copy_over_all, pushed))
    probed = probe(seen, horizons)
    result |= {"probe": probed} if probed else {}
    every = seen.slots[
        seen.present.to(seen.slots.device)
    ]  # start states alone may be alike, as after a fixed warm-start
    result["effective_rank"] = effective_rank(every)
    result["variance"] = float(every.double().flatten(1).var(0).sum())
    result |= {"episodes": len(now), "burn_in": burn_in}
    return result | {"alarms": _alarms(result, max(horizons))}


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


def _occurs_again(numbers: Tensor) -> Tensor:
    """Which of these numbers ``(N,)`` occur more than once."""
    _, where, counts = torch.unique(numbers, return_inverse=True, return_counts=True)
    return counts[where] > 1


def _numbers(seen: Imagined) -> Tensor:
    """Numbers of every frame, ``(E, longest + 1, G)``: of the observation's bytes, and of the state's id if data hold it."""
    arrays = seen.episodes.arrays
    kinds = [[arrays[name] for name in ("observations", "positions", "mask") if name in arrays]]
    kinds += [[arrays["info/state_id"]]] if "info/state_id" in arrays else []
    numbers = np.empty((*seen.rows.shape, len(kinds)), dtype=np.int64)
    for g, parts in enumerate(kinds):
        for e, rows in enumerate(seen.rows.cpu()):
            frames = [part[rows.to(part.device)].cpu().numpy() for part in parts]
            for t in range(len(rows)):
                digest = hashlib.blake2b(b"".join(frame[t].tobytes() for frame in frames), digest_size=8).digest()
                numbers[e, t, g] = int.from_bytes(digest, "big", signed=True)
    return torch.from_numpy(numbers).to(seen.present.device)


def probe(seen: Imagined, horizons: Sequence[int]) -> dict[str, Any] | None:
    """How much slots tell of the coordinates of objects that the data know: R^2 of a linear readout (ridge regression).

    The readout is fitted to the slots of every second episode and scored on the others, on moments at which the object is
    seen. Coordinates that hardly ever are, or never change, are left out.

    Args:
        seen: test episodes with ``info/objects`` ``(coordinates,)``, named in ``about["objects"]``, and ``info/visible``
            where an object can be out of play.
        horizons: steps after which the readout is also given what the model imagines.

    Returns:
        For each coordinate "r2" from all slots, "slot" and "slot_r2" from the one slot that fits best; by horizon
        "imagined_r2", one minus the squared error after so many steps over the variance over all moments, None where the
        object is not seen. Beside them "time_r2" and "imagined_time_r2", the same of the mean at each step, which knows
        the time and no slot: a readout is worth something above it. None where the data know no coordinates, with one name
        each.
    """
    array, names = seen.episodes.arrays.get("info/objects"), seen.episodes.about.get("objects")
    if array is None or names is None or array.shape[1:] != (len(names),):
        return None
    slots, device = seen.slots.double(), seen.slots.device
    truth = array[seen.rows].double().to(device)  # (E, longest + 1, coordinates)
    visible = seen.episodes.arrays.get("info/visible")
    shown = torch.isfinite(truth) & seen.present.to(device)[..., None]
    if visible is not None and visible.shape == array.shape:
        shown = shown & visible[seen.rows].bool().to(device)
    half = torch.arange(len(slots), device=device)[:, None] % 2 == 0
    objects = {}
    for i, name in enumerate(names):
        value = truth[..., i]
        a, b = shown[..., i] & half, shown[..., i] & ~half
        if min(int(a.sum()), int(b.sum())) < _PROBE_MINIMUM or value[a].std() < 1e-6 or value[b].std() < 1e-6:
            continue
        everything = _readout(slots[a].flatten(1), value[a])
        single = [_readout(slots[a][:, k], value[a]) for k in range(slots.shape[2])]
        best = max(range(len(single)), key=lambda k: _r2(single[k](slots[a][:, k]), value[a]))
        count = a.sum(0)
        at_step = torch.where(count > 0, value.masked_fill(~a, 0.0).sum(0) / count.clamp(min=1), value[a].mean())
        spread = (value[b] - value[b].mean()).square().mean()
        imagined: dict[str, float | None] = {}
        by_time: dict[str, float | None] = {}
        for h in horizons:
            at = seen.burn_in + h
            rows = b[:, at]
            told = everything(seen.imagined[h - 1][rows].double().flatten(1))
            for scores, guess in ((imagined, told), (by_time, at_step[at])):
                error = (guess - value[rows, at]).square().mean()
                scores[str(h)] = float(1.0 - error / spread) if bool(rows.any()) else None
        objects[name] = {
            "r2": _r2(everything(slots[b].flatten(1)), value[b]),
            "slot": best,
            "slot_r2": _r2(single[best](slots[b][:, best]), value[b]),
            "imagined_r2": imagined,
            "time_r2": _r2(at_step.expand_as(value)[b], value[b]),
            "imagined_time_r2": by_time,
        }
    return {"objects": objects, "episodes": len(slots)}


def _readout(x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    """Ridge regression of y ``(N,)`` on x ``(N, F)``, scaled to unit variance, with a penalty of a hundredth of N."""
    mean, scale, center = x.mean(0), x.std(0) + 1e-9, y.mean()
    z = (x - mean) / scale
    gram = z.T @ z + 0.01 * len(z) * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    weight = torch.linalg.solve(gram, z.T @ (y - center))
    return lambda other: (other - mean) / scale @ weight + center


def _r2(told: Tensor, true: Tensor) -> float:
    return float(1.0 - (told - true).square().sum() / (true - true.mean()).square().sum())


def _alarms(result: dict[str, Any], horizon: int) -> list[str]:
    alarms = []
    if result["effective_rank"] < 1.5 or result["variance"] < 1e-6:
        alarms.append(
            f"collapse: effective rank {result['effective_rank']:.2f}, variance {result['variance']:.1e}; "
            "the encoder tells states hardly apart"
        )
    entry, chance = result["all"][str(horizon)], 1.0 / result["episodes"]
    well_above = entry["copy_h@1"] > max(5 * chance, 0.05) and result["episodes"] >= _ALARM_MINIMUM
    if well_above and entry["copy_h@1"] >= entry["h@1"]:
        alarms.append(
            f"shortcut: at {horizon} steps the latent copy scores {entry['copy_h@1']:.3f} and the model "
            f"{entry['h@1']:.3f}; the encoder tells episodes apart, not states (raise objective.in_episode)"
        )
    if entry["ci95"][0] <= chance:
        alarms.append(
            f"not learned yet: at {horizon} steps the model scores {entry['h@1']:.3f} of {result['episodes']} test episodes, "
            f"where chance is {chance:.3f}; train longer"
        )
    return alarms
