"""Problems about relations of symbols: ESBN's four tasks, as numbers of symbols.

Webb, Sinha & Cohen 2021, "Emergent Symbols through Binding in External Memory", section 4.1. What the text
leaves open, which symbols are offered as answers and what makes two problems different, is chosen so that there are as many
problems of five symbols as it says: 480 of RMTS, 360 of distribution-of-three, 8,640 of identity rules.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .sequences import generator

Problems = tuple[Tensor, Tensor]
"""Numbers of symbols ``(P, T)``, and which answer is right, ``(P,)``."""

_SHARE = 0.95  # of the pairs that are for training, where no symbol is withheld
_ALL = 200_000  # draws that find nearly all problems of few symbols


class Rule(NamedTuple):
    """What problems of a rule look like.

    Args:
        symbols: T, how many are shown one after another.
        answers: from how many one is chosen.
        segments: where stretches begin that are normalised apart.
        question: so many of the symbols make a problem another one.
    """

    symbols: int
    answers: int
    segments: tuple[int, ...]
    question: int


def _among(choices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Choices ``(B, 4)``, the right one first, in random order, and where the right one then is."""
    order = torch.rand(choices.shape, generator=generator, device=choices.device).argsort(1)
    return choices.gather(1, order), (order == 0).long().argmax(1)


def _rmts(of: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    same, second = torch.randint(2, (2, len(of)), generator=generator, device=of.device)
    a, b, c, d, e = of.unbind(1)
    source = torch.stack([a, torch.where(same.bool(), a, b)], 1)
    pair_of_two, pair_of_one = torch.stack([c, d], 1), torch.stack([e, e], 1)
    like_source = torch.where(same.bool()[:, None], pair_of_one, pair_of_two)
    unlike_source = torch.where(same.bool()[:, None], pair_of_two, pair_of_one)
    first = torch.where(second.bool()[:, None], unlike_source, like_source)
    last = torch.where(second.bool()[:, None], like_source, unlike_source)
    return torch.cat([source, first, last], 1), second


def _distribution_of_three(of: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    order = torch.rand(len(of), 3, generator=generator, device=of.device).argsort(1)
    second = of.gather(1, order)
    choices, answer = _among(torch.cat([second.flip(1), of[:, 3:4]], 1), generator)
    return torch.cat([of[:, :3], second[:, :2], choices], 1), answer


_PATTERNS = torch.tensor([[0, 1, 0], [0, 1, 1], [0, 0, 0]])  # ABA, ABB, AAA


def _identity(of: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    pattern = torch.randint(3, (len(of),), generator=generator, device=of.device)
    columns = _PATTERNS.to(of.device)[pattern]
    first, second = of[:, :2].gather(1, columns), of[:, 2:4].gather(1, columns)
    right = second[:, 2:]
    others = torch.where(right == of[:, 2:3], of[:, 3:4], of[:, 2:3])
    choices, answer = _among(torch.cat([right, others, of[:, :2]], 1), generator)
    return torch.cat([first, second[:, :2], choices], 1), answer


RULES = {
    "same_different": Rule(2, 2, (0,), 2),
    "rmts": Rule(6, 2, (0, 2, 4), 6),
    "distribution_of_three": Rule(9, 4, (0,), 5),
    "identity": Rule(9, 4, (0,), 9),
}
_DRAWN = {"rmts": _rmts, "distribution_of_three": _distribution_of_three, "identity": _identity}
"""Distinct symbols ``(B, 5)`` and a generator in, problems ``(B, T)`` and answers ``(B,)`` out; pairs are enumerated."""


@lru_cache(maxsize=8)
def problems(
    rule: str, num_symbols: int, withheld: int, train_size: int, test_size: int, train_seed: int, test_seed: int
) -> tuple[Problems, Problems]:
    """Training and test problems: fixed sets, distinct, on the CPU.

    Which symbols are withheld is drawn with ``train_seed``. Training problems are of the other symbols, test problems of the
    withheld ones; with none withheld, both are of all, and no test problem is among the training problems. Of pairs for
    "same_different" there are as many that are the same as differ, each kind repeated as need be; with none withheld, 95 %
    of each kind are for training.

    Args:
        rule: of ``RULES``.
        num_symbols: n.
        withheld: m, how many of them.
        train_size: training problems at most; fewer where fewer exist.
        test_size: test problems at most.
        train_seed: of the training problems.
        test_seed: of the test problems.
    """
    draw = generator(train_seed, 0)
    order = torch.randperm(num_symbols, generator=draw)
    hidden, seen = order[:withheld], order[withheld:]
    if rule == "same_different":
        same, different = _pairs(seen, draw)
        ends = [len(kind) if withheld else round(_SHARE * len(kind)) for kind in (same, different)]
        kept = _half_and_half(same[: ends[0]], different[: ends[1]], train_size, draw)
        draw = generator(test_seed, 0)
        asked = _pairs(hidden, draw) if withheld else (same[ends[0] :], different[ends[1] :])
        return kept, _half_and_half(*asked, test_size, draw)
    trained = _drawn(rule, seen, train_size, draw)
    draw = generator(test_seed, 0)
    if withheld:
        return trained, _drawn(rule, hidden, test_size, draw)
    found, answers = _drawn(rule, seen, test_size + train_size, draw)
    _, which = torch.unique(torch.cat([trained[0], found]), dim=0, return_inverse=True)
    known = torch.isin(which[len(trained[0]) :], which[: len(trained[0])])
    return trained, (found[~known][:test_size], answers[~known][:test_size])


def _pairs(symbols: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """All pairs of equal symbols and all of different ones, each in random order."""
    pairs = torch.cartesian_prod(symbols, symbols)
    pairs = pairs[torch.randperm(len(pairs), generator=draw)]
    equal = pairs[:, 0] == pairs[:, 1]
    return pairs[equal], pairs[~equal]


def _half_and_half(same: Tensor, different: Tensor, size: int, draw: torch.Generator) -> Problems:
    half = min(max(len(same), len(different)), size // 2)
    both = torch.cat([kind[torch.arange(half) % len(kind)] for kind in (different, same)])
    order = torch.randperm(2 * half, generator=draw)
    return both[order], (torch.arange(2 * half) >= half).long()[order]


def _drawn(rule: str, symbols: Tensor, size: int, draw: torch.Generator) -> Problems:
    """So many distinct problems, fewer where fewer exist."""
    draws = _ALL if len(symbols) < 10 else 2 * size
    of = symbols[torch.rand(draws, len(symbols), generator=draw).topk(5).indices]
    shown, answers = _DRAWN[rule](of, draw)
    rows = torch.unique(torch.cat([of, shown, answers[:, None]], dim=1), dim=0)
    rows = rows[torch.randperm(len(rows), generator=draw)]
    if RULES[rule].question < RULES[rule].symbols:  # one order of the choices for each question
        _, which = torch.unique(rows[:, 5 : 5 + RULES[rule].question], dim=0, return_inverse=True)
        first = torch.full((int(which.max()) + 1,), len(rows)).scatter_reduce(0, which, torch.arange(len(rows)), "amin")
        rows = rows[first.sort().values]
    return rows[:size, 5:-1], rows[:size, -1]
