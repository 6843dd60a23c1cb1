"""How well objects are tracked: the scores of multi-object tracking, of segments that slots draw."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

SCORES = (
    "mota",
    "motp",
    "mostly_detected",
    "mostly_tracked",
    "match",
    "miss",
    "id_switches",
    "false_positives",
)
_OVERLAP = 0.5  # of an object and the slot that is matched to it, at least
_BACKGROUND = 0.2  # overlap with the background above which a slot is taken to draw it
_SMALLEST = 5  # pixels; segments of no more do not count
_LIFETIME = 0.8  # share of the frames in which an object has to be found


def tracking(
    tables: Sequence[Int[Tensor, "T A K"]], identities: Sequence[Int[Tensor, "T objects"]]
) -> dict[str, float]:
    """Multi-object tracking scores of videos, by py-motmetrics.

    The protocol of Weis et al. 2020, "Benchmarking Unsupervised Object Representations for Video Sequences", which NPS uses
    (Goyal et al. 2021, appendix F.1): in every frame objects are matched to slots whose overlap, the intersection over the
    union, is at least 0.5, matches of the frame before first. Slots that overlap with the background by more than 0.2 are not
    false positives, nor are segments of five pixels or fewer objects or slots.

    Args:
        tables: of each video, how many pixels of a frame are object a's (0 the background) and slot k's, see
            ``segmentation.contingency``.
        identities: who object a = 1, 2, ... is in each frame, a number within its video.

    Returns:
        By name, in shares of the number of objects in all frames: "match", "miss", "id_switches", "false_positives"; "mota",
        1 minus the last three (equation 1 there); "motp", the mean overlap of matches (equation 2). And in shares of all
        objects those "mostly_detected", found in at least 80 % of their frames, and "mostly_tracked", found in as many
        without a switch in that frame, as Weis et al. count them; NPS's text wants no switch at all. Empty without objects.
    """
    import motmetrics  # with pandas: what is not asked for tracking need not wait for them

    events = motmetrics.MOTAccumulator(auto_id=True)
    for video, (table, names) in enumerate(zip(tables, identities, strict=True)):
        n = table.double()
        union = n.sum(2, keepdim=True) + n.sum(1, keepdim=True) - n
        overlap = n / union.clamp(min=1.0)
        objects = n[:, 1:].sum(2) > _SMALLEST
        slots = (n.sum(1) > _SMALLEST) & (overlap[:, 0] <= _BACKGROUND)
        parts = [part.cpu().numpy() for part in (overlap[:, 1:], objects, slots, names)]
        for shares, seen, drawn, who in zip(*parts, strict=True):
            distance = 1.0 - shares[seen][:, drawn]
            distance[distance > 1.0 - _OVERLAP] = np.nan
            # Numbers that no other video has.
            hypotheses = video * shares.shape[1] + np.flatnonzero(drawn)
            events.update([(int(name) << 32) + video for name in who[seen]], hypotheses.tolist(), distance)
    counted = ["mota", "motp", "num_matches", "num_misses", "num_switches", "num_false_positives", "num_objects"]
    found = motmetrics.metrics.create().compute(events, metrics=counted, return_dataframe=False)
    total = found["num_objects"]
    if not total:
        return {}
    kinds = events.mot_events

    def frames(*chosen: str) -> Any:
        return kinds[kinds.Type.isin(chosen)].OId.value_counts()  # by object

    lifetime = frames("MATCH", "SWITCH", "MISS")

    def share(*chosen: str) -> float:
        return float((frames(*chosen).reindex(lifetime.index, fill_value=0) / lifetime >= _LIFETIME).mean())

    values = (
        found["mota"],
        1.0 - found["motp"] if found["num_matches"] else 0.0,
        share("MATCH", "SWITCH"),
        share("MATCH"),
        *(found[name] / total for name in ("num_matches", "num_misses", "num_switches", "num_false_positives")),
    )
    return dict(zip(SCORES, map(float, values), strict=True))
