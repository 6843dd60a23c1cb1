"""How good predictions in latent space are: ranks with their ties, Hits@k, MRR, intervals, collapse."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

TIES = ("expected", "reference", "worst")

_CHUNK_ELEMENTS = 4_000_000  # of a block of the distance matrix: 32 MB in float64


class Ranks(NamedTuple):
    """Where the right prediction stands in the list of all, nearest first.

    Args:
        less: ``(N,)`` int64, how many predictions are strictly nearer than the right one.
        ties: ``(N,)`` int64, how many are exactly as near as the right one, itself included; at least 1.
    """

    less: Int[Tensor, " N"]
    ties: Int[Tensor, " N"]


def ranks(
    pred: Float[Tensor, " N *D"], target: Float[Tensor, " M *E"], equal: Int[Tensor, "N G"] | None = None
) -> Ranks:
    """For each true next state, rank all predictions by their distance to it.

    ``D_ij = ||target_i - pred_j||^2``; ``less_i = #{j: D_ij < D_ii}``, ``ties_i = #{j: D_ij = D_ii}``. The published
    script ranks the same way round (a true state ranks the predictions) and counts ties in favour of the truth.

    Distances are compared exactly: a matrix product in float64 settles every pair that is farther apart than its
    rounding error, and the few pairs left are computed from their differences, the right one by the same kernel as its
    rivals. Equal predictions are counted once and weighted, so a collapsed encoder costs no more than a good one.

    Args:
        pred: predictions, ``(N, ...)``; flattened from the second axis on.
        target: true next states in the same order.
        equal: ``(N, G)``, numbers of the true states; a prediction whose state has a number in common with a row's, in the
            same column, does not compete there, because it is not wrong. None: all compete.

    Returns:
        The ranks; memory beyond the inputs is O(N * dimensions + chunk).

    Raises:
        ValueError: shapes differ, or a value is not finite.
    """
    if pred.shape != target.shape:
        raise ValueError(f"pred has shape {tuple(pred.shape)} and target {tuple(target.shape)}; they must be equal")
    if not (torch.isfinite(pred).all() and torch.isfinite(target).all()):
        raise ValueError("pred or target holds values that are not finite; distances to them mean nothing")
    N = len(pred)
    candidates, own, counts = torch.unique(pred.reshape(N, -1), dim=0, return_inverse=True, return_counts=True)
    targets, candidates = target.reshape(N, -1).double(), candidates.double()
    origin = candidates.mean(0, keepdim=True)  # distances stay what they are; the squares below get smaller
    x, y = targets - origin, candidates - origin
    squares = y.square().sum(1)
    # What rounding can do to |y|^2 - 2 x.y: (d + 3) units in the last place of its largest terms, and one unit in the last
    # place of the coordinates moved to the origin.
    d, eps = x.shape[1], torch.finfo(torch.float64).eps
    largest = torch.maximum(targets.abs().max(), candidates.abs().max())
    reach, lengths = squares.max().sqrt(), x.norm(dim=1)
    slack = 4 * (d + 3) * eps * (reach.square() + 2 * lengths * reach) + 8 * eps * d**0.5 * largest * (lengths + reach)
    less = torch.empty(N, dtype=torch.int64, device=pred.device)
    ties = torch.empty_like(less)
    chunk = max(1, _CHUNK_ELEMENTS // len(y))
    weights = counts.double()
    for start in range(0, N, chunk):
        rows = slice(start, min(start + chunk, N))
        distance = torch.addmm(squares[None], x[rows], y.T, alpha=-2)  # D_ij - |x_i|^2
        right = distance.gather(1, own[rows, None])
        nearer = distance < right - slack[rows, None]
        near = (distance <= right + slack[rows, None]) ^ nearer
        row_less = nearer.to(weights.dtype) @ weights if len(y) < N else nearer.sum(1)
        row_ties = torch.zeros_like(row_less)
        i, j = near.nonzero(as_tuple=True)
        for part in range(0, len(i), max(1, _CHUNK_ELEMENTS // d)):
            take = slice(part, part + max(1, _CHUNK_ELEMENTS // d))
            exact = (targets[rows][i[take]] - candidates[j[take]]).square().sum(1)
            exact_right = (targets[rows][i[take]] - candidates[own[rows][i[take]]]).square().sum(1)
            weight = counts[j[take]].to(row_less.dtype)
            row_less.index_add_(0, i[take], weight * (exact < exact_right))
            row_ties.index_add_(0, i[take], weight * (exact == exact_right))
        less[rows] = row_less.to(torch.int64)
        ties[rows] = row_ties.to(torch.int64)
    if equal is not None:
        _without_equals(less, ties, candidates[own], targets, equal.to(pred.device))
    return Ranks(less, ties)


def _without_equals(less: Tensor, ties: Tensor, pred: Tensor, target: Tensor, equal: Tensor) -> None:
    """Take rivals out of the ranks, in place, that share a number of ``equal`` with the right one."""
    chunk = max(1, _CHUNK_ELEMENTS // len(pred))
    for start in range(0, len(pred), chunk):
        shared = (equal[start : start + chunk, None] == equal[None]).any(-1)
        i, j = shared.nonzero(as_tuple=True)
        i = i + start
        i, j = i[i != j], j[i != j]
        for part in range(0, len(i), max(1, _CHUNK_ELEMENTS // pred.shape[1])):
            take = slice(part, part + max(1, _CHUNK_ELEMENTS // pred.shape[1]))
            rival = (target[i[take]] - pred[j[take]]).square().sum(1)
            right = (target[i[take]] - pred[i[take]]).square().sum(1)  # by the same kernel, or ties are lost
            less.index_add_(0, i[take], -(rival < right).to(less.dtype))
            ties.index_add_(0, i[take], -(rival == right).to(ties.dtype))


def _check_ties(ties: str) -> None:
    if ties not in TIES:
        raise ValueError(f"ties is {ties!r}; expected one of {list(TIES)}")


def hits(ranks: Ranks, k: int, *, ties: str = "expected") -> Float[Tensor, " N"]:
    """Hits@k of every row: whether the right one is among the k nearest.

    - "expected": over a random order within the tie, ``clamp((k - less) / ties, 0, 1)``.
    - "reference": ties favour the truth, as in the published script, ``less < k``.
    - "worst": ties go against it, ``less + ties <= k``.

    Args:
        ranks: what ``ranks`` returned.
        k: at least 1.
        ties: which of the three.

    Returns:
        ``(N,)`` float64 in [0, 1].
    """
    _check_ties(ties)
    less, tied = ranks.less.double(), ranks.ties.double()
    if ties == "expected":
        return ((k - less) / tied).clamp(0.0, 1.0)
    return (less < k if ties == "reference" else less + tied <= k).double()


def reciprocal_ranks(ranks: Ranks, *, ties: str = "expected") -> Float[Tensor, " N"]:
    """One over the rank of every row, ranks counted from 1.

    - "expected": over a random order within the tie, ``1/ties * sum_{r = less + 1}^{less + ties} 1/r``.
    - "reference": ``1 / (less + 1)``.
    - "worst": ``1 / (less + ties)``.
    """
    _check_ties(ties)
    less, tied = ranks.less.double(), ranks.ties.double()
    if ties == "reference":
        return 1.0 / (less + 1)
    if ties == "worst":
        return 1.0 / (less + tied)
    # H_n, the sum of 1/r up to n, is digamma(n + 1) - digamma(1).
    spread = (torch.special.digamma(less + tied + 1) - torch.special.digamma(less + 1)) / tied
    return torch.where(tied == 1, 1.0 / (less + 1), spread)


def hits_at_k(ranks: Ranks, k: int, *, ties: str = "expected") -> float:
    """Share of rows whose right prediction is among the k nearest; see ``hits``."""
    return float(hits(ranks, k, ties=ties).mean())


def mrr(ranks: Ranks, *, ties: str = "expected") -> float:
    """Mean reciprocal rank; see ``reciprocal_ranks``."""
    return float(reciprocal_ranks(ranks, ties=ties).mean())


def ranks_within(
    query: Float[Tensor, " N *D"], target: Float[Tensor, " N *D"], others: Float[Tensor, " N M *D"], present: Tensor
) -> Ranks:
    """For each prediction, rank its target among candidates of its own (those of its episode).

    Args:
        query: predictions, ``(N, ...)``.
        target: the true next states.
        others: the other candidates of each row, ``(N, M, ...)``.
        present: ``(N, M)`` bool, which of them take part.

    Returns:
        Ranks by distance to the prediction; the target itself counts in ``ties``.
    """
    candidates = torch.cat([target[:, None], others], dim=1).double().flatten(2)
    distance = (candidates - query.double().flatten(1)[:, None]).square().sum(-1)
    right, rest = distance[:, :1], distance[:, 1:]
    return Ranks(((rest < right) & present).sum(1), 1 + ((rest == right) & present).sum(1))


def mean_interval(values: np.ndarray, *, seed: int = 0) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of the mean over episodes (2,000 resamples)."""
    values = np.asarray(values, dtype=np.float64)
    if len(values) < 2 or np.ptp(values) == 0.0:
        mean = float(values.mean())
        return mean, mean
    from scipy import stats  # a second that only scores need

    result = stats.bootstrap(
        (values,), np.mean, n_resamples=2000, batch=50, method="percentile", rng=np.random.default_rng(seed)
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def effective_rank(slots: Float[Tensor, " N *D"]) -> float:
    """How many directions an encoding uses: exp of the entropy of the covariance's normalised eigenvalues.

    Roy & Vetterli 2007, "The effective rank". 1 for a line, the dimension for a sphere, 0 for a single point.
    """
    flat = slots.double().flatten(1)
    spectrum = torch.linalg.eigvalsh(torch.cov(flat.T).reshape(flat.shape[1], -1)).clamp(min=0)
    if float(spectrum.sum()) <= 1e-12:
        return 0.0
    share = spectrum / spectrum.sum()
    return float(torch.exp(-torch.special.xlogy(share, share).sum()))


def confusion_matrix(pred: Tensor, true: Tensor, num_classes: int) -> Int[Tensor, "C C"]:
    """How often class i (row) was called class j (column); matrices of parts of the data add up.

    Args:
        pred: predicted classes, of any shape.
        true: true classes, of the same shape.
        num_classes: C.
    """
    pairs = true.flatten().long() * num_classes + pred.flatten().long()
    return torch.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def balanced_accuracy(matrix: Int[Tensor, "C C"]) -> float:
    """The mean of the recalls of all classes that occur; of two classes the mean of recall and specificity."""
    support = matrix.sum(1)
    occurs = support > 0
    return float((matrix.diagonal()[occurs].double() / support[occurs]).mean())


def f1_scores(matrix: Int[Tensor, "C C"]) -> Float[Tensor, " C"]:
    """``F1 = 2 TP / (2 TP + FP + FN)`` of every class, NaN of those that neither occur nor are predicted."""
    right = matrix.diagonal().double()
    return 2.0 * right / (matrix.sum(0) + matrix.sum(1)).double()


def macro_f1(matrix: Int[Tensor, "C C"], classes: Int[Tensor, " n"] | None = None) -> float:
    """The mean F1 of classes, of those that occur or are predicted; NaN if none is.

    Args:
        matrix: from ``confusion_matrix``.
        classes: which classes count; None for all.
    """
    scores = f1_scores(matrix) if classes is None else f1_scores(matrix)[classes]
    return float(scores.nanmean())


def seeds_interval(
    *samples: Sequence[float] | np.ndarray, statistic: Callable[..., Any] = np.mean, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of a statistic over seeds, for at least five of them (2,000 resamples).

    Args:
        samples: one number a seed; of a statistic of several samples, one sequence each.
        statistic: of the samples, along ``axis``.
        seed: of the resampling.
    """
    from scipy import stats

    result = stats.bootstrap(
        tuple(np.asarray(sample, dtype=float) for sample in samples),
        statistic,
        n_resamples=2000,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def probability_of_improvement(
    ours: Sequence[float] | np.ndarray, theirs: Sequence[float] | np.ndarray, axis: int = -1
) -> Any:
    """How probably a run of ours does better than one of theirs (Agarwal et al. 2021): ``P(X > Y) + P(X = Y) / 2``.

    Args:
        ours: one number a seed, along the last axis.
        theirs: the same; the number of seeds may differ.
        axis: the last one.
    """
    x, y = np.asarray(ours, dtype=float)[..., :, None], np.asarray(theirs, dtype=float)[..., None, :]
    return ((x > y) + 0.5 * (x == y)).mean((-2, -1))
