"""The masks that slots draw, scored against the true ones: which pixels are whose, and who is who over time."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..segmentation import adjusted_rand, contingency, matched_iou
from ..tracking import SCORES, tracking

SEGMENTED = ("ari", "ari_foreground", "iou")

PUBLISHED_ARI = {
    "SCOFF": {"test": 0.28, "transfer": 0.15},
    "SCOFF++": {"test": 0.8437, "transfer": 0.2632},
    "PNPS, 10 rules": {"test": 0.7813, "transfer": 0.1997},
    "SNPS, 10 rules": {"test": 0.8518, "transfer": 0.3553},
}
"""Goyal et al. 2021 (NPS), Table 4: four balls, and six to eight; two runs. Whether the background counts is not said."""

PUBLISHED_TRACKING = {
    "OP3": (89.1, 78.4, 92.4, 91.8, 95.9, 3.7, 0.4, 6.8),
    "OP3 with NPS": (90.72, 79.91, 94.66, 93.18, 96.93, 2.48, 0.58, 6.2),
}
"""Goyal et al. 2021 (NPS), Table 10, in the order of ``tracking.SCORES``, in %: Sprites-MOT, three runs."""


class Segments:
    """Scores of the segmentations of videos, collected part by part."""

    def __init__(self) -> None:
        self._pictures: dict[str, list[Tensor]] = {name: [] for name in SEGMENTED}
        self._tables: list[Tensor] = []
        self._identities: list[Tensor] = []

    def add(self, true: Tensor, said: Tensor, identities: Tensor | None) -> None:
        """Add some videos.

        Args:
            true: whose each pixel is, 0 the background's, ``(T, B, H, W)``.
            said: the slot it is said to be of, from 0.
            identities: who objects 1, 2, ... are, ``(T, B, objects)``; None where they are not tracked.
        """
        T, B = true.shape[:2]
        true, said = true.flatten(0, 1).flatten(1), said.flatten(0, 1).flatten(1)
        table = contingency(true, said, torch.ones_like(true, dtype=torch.bool))
        self._pictures["ari"].append(adjusted_rand(table).cpu())
        self._pictures["ari_foreground"].append(adjusted_rand(contingency(true, said, true > 0)).cpu())
        self._pictures["iou"].append(matched_iou(table))
        if identities is not None:
            self._tables += table.unflatten(0, (T, B)).unbind(1)
            self._identities += identities[..., : table.shape[1] - 1].unbind(1)

    def scores(self) -> dict[str, float]:
        """Means over all frames in which there is something to segment, and the scores of tracking."""
        found = {name: float(torch.cat(parts).nanmean()) for name, parts in self._pictures.items()}
        return found | (tracking(self._tables, self._identities) if self._tables else {})


def columns(found: Mapping[str, Mapping[str, float]]) -> tuple[list[str], dict[str, list[str]]]:
    """The headings of a table's columns, by the scores of each variant of one result, and the papers' cells by model."""
    tracked = [variant for variant, scores in found.items() if "mota" in scores]
    headings = [f"{variant}\nARI (objects)" for variant in found]
    headings += [
        name.upper() if name.startswith("mot") else name.replace("_", "\n") for _ in tracked for name in SCORES
    ]
    published: dict[str, list[str]] = {}
    if set(found) == {"test", "transfer"}:
        published = {name: [f"{of[variant]:.3f}" for variant in found] for name, of in PUBLISHED_ARI.items()}
    if list(found) == tracked == ["test"]:
        published = {name: ["", *(f"{share:.1f}" for share in of)] for name, of in PUBLISHED_TRACKING.items()}
    return headings, published


def cells(found: Mapping[str, Mapping[str, float]], like: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A result's cells in the columns that ``like`` has; empty where it has no such scores."""
    line = []
    for variant in like:
        scores = found.get(variant)
        line.append(f"{scores['ari']:.3f} ({scores['ari_foreground']:.3f})" if scores else "")
    for variant, scores in like.items():
        if "mota" in scores:
            line += [f"{100 * found[variant][name]:.1f}" if name in found.get(variant, {}) else "" for name in SCORES]
    return line
