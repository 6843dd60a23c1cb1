"""How well segmentations of pictures agree: the adjusted Rand index and the overlap of segments."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def contingency(
    true: Int[Tensor, "N P"], said: Int[Tensor, "N P"], counts: Bool[Tensor, "N P"]
) -> Int[Tensor, "N A B"]:
    """How many of the pixels that count are in segment a truly and in segment b by what was said, for each of N pictures.

    Args:
        true: the true segment of every pixel, from 0.
        said: the other, from 0.
        counts: which pixels count.
    """
    A, B = int(true.max()) + 1, int(said.max()) + 1
    pairs = (true * B + said).masked_fill(~counts, A * B)
    table = pairs.new_zeros(len(pairs), A * B + 1).scatter_add_(1, pairs, torch.ones_like(pairs))
    return table[:, :-1].unflatten(1, (A, B))


def adjusted_rand(table: Int[Tensor, "N A B"]) -> Float[Tensor, " N"]:
    """The adjusted Rand index of two segmentations of each picture: 1 where they are the same, 0 in the mean of chance.

    Hubert & Arabie 1985, equation 5: with the pairs of pixels that are in one segment of both, ``sum_ab C(n_ab, 2)``, of the
    first and of the second, ``(index - expected) / ((first + second) / 2 - expected)`` and ``expected = first second / all``.

    Args:
        table: from ``contingency``.

    Returns:
        float64; NaN of pictures of which no pixel counts.
    """
    n = table.double()
    index, first, second = (_pairs(part).flatten(1).sum(1) for part in (n, n.sum(2), n.sum(1)))
    pixels = n.sum((1, 2))
    expected = first * second / _pairs(pixels).clamp(min=1.0)
    most = (first + second) / 2
    found = torch.where(most == expected, 1.0, (index - expected) / (most - expected))
    return torch.where(pixels > 0, found, torch.nan)


def _pairs(n: Tensor) -> Tensor:
    return n * (n - 1) / 2


def matched_iou(table: Int[Tensor, "N A B"]) -> Float[Tensor, " N"]:
    """The mean over the true segments but 0, the background, of their overlap with the segment assigned to each.

    Overlap is the intersection over the union; each said segment is assigned to one true segment at most, so that the sum is
    largest (Kuhn 1955). True segments of no pixel do not count.

    Args:
        table: from ``contingency``, where all pixels count.

    Returns:
        float64; NaN of pictures with a background only.
    """
    n = table.double()
    union = n.sum(2, keepdim=True) + n.sum(1, keepdim=True) - n
    overlap = (n / union.clamp(min=1.0))[:, 1:].cpu().numpy()
    present = (n[:, 1:].sum(2) > 0).cpu().numpy()
    found = np.full(len(n), np.nan)
    for i, picture in enumerate(overlap):  # of a library that takes one at a time
        if present[i].any():
            picture = picture[present[i]]
            found[i] = picture[linear_sum_assignment(picture, maximize=True)].sum() / len(picture)
    return torch.from_numpy(found)
