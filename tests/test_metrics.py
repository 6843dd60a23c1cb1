import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodels.metrics import (
    Ranks,
    effective_rank,
    hits,
    hits_at_k,
    mean_interval,
    mrr,
    ranks,
    ranks_within,
    reciprocal_ranks,
)


def plain_ranks(pred, target):
    """Rank all predictions for each true state, one distance at a time in float64."""
    pred, target = pred.double().flatten(1), target.double().flatten(1)
    less, ties = [], []
    for t, own in zip(target, pred, strict=True):
        distances = torch.stack([(t - p).square().sum() for p in pred])
        right = (t - own).square().sum()
        less.append(int((distances < right).sum()))
        ties.append(int((distances == right).sum()))
    return less, ties


def published_script(pred, target):
    """The ranking of C-SWM's eval.py in numpy: distances in float32, the right one put first, a stable sort."""
    pred, target = pred.flatten(1), target.flatten(1)
    distance = ((target[:, None] - pred[None]) ** 2).sum(2)
    augmented = torch.cat([distance.diag()[:, None], distance], 1).numpy()
    order = np.stack([np.lexsort((np.arange(len(row)), row)) for row in augmented])
    hit = float((order[:, 0] == 0).mean())
    first = np.argmax(order == 0, axis=1)
    return hit, float((1.0 / (first + 1)).mean())


def test_hand_values():
    target = torch.tensor([[0.0], [1.0], [4.0]])
    pred = torch.tensor([[0.1], [3.0], [4.0]])
    got = ranks(pred, target)
    # state 1.0: distances .81, 4, 9: the right one (3.0) is second; the others are first
    assert got.less.tolist() == [0, 1, 0] and got.ties.tolist() == [1, 1, 1]
    assert hits_at_k(got, 1) == pytest.approx(2 / 3) and hits_at_k(got, 2) == 1.0
    assert mrr(got) == pytest.approx((1 + 1 / 2 + 1) / 3)


def test_ties_by_hand():
    tied = Ranks(torch.tensor([1]), torch.tensor([3]))  # one nearer, places 2, 3 and 4 shared
    assert [float(hits(tied, k)) for k in (1, 2, 3, 4)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [float(hits(tied, k, ties="reference")) for k in (1, 2)] == [0, 1]
    assert [float(hits(tied, k, ties="worst")) for k in (3, 4)] == [0, 1]
    assert float(reciprocal_ranks(tied)) == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert float(reciprocal_ranks(tied, ties="reference")) == pytest.approx(1 / 2)
    assert float(reciprocal_ranks(tied, ties="worst")) == pytest.approx(1 / 4)
    with pytest.raises(ValueError, match="ties is 'best'"):
        hits(tied, 1, ties="best")


def test_a_collapsed_encoder_scores_chance_and_the_published_script_one():
    N = 50
    flat = torch.zeros(N, 3, 2)
    got = ranks(flat, flat)
    assert got.ties.tolist() == [N] * N
    assert hits_at_k(got, 1) == pytest.approx(1 / N) and hits_at_k(got, 1, ties="worst") == 0
    assert hits_at_k(got, 1, ties="reference") == 1.0 == published_script(flat, flat)[0]
    assert mrr(got) == pytest.approx(np.mean(1 / np.arange(1, N + 1)))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.booleans(), st.integers(0, 10_000))
def test_ranks_equal_the_plain_form(N, d, discrete, seed):
    generator = torch.Generator().manual_seed(seed)
    pred, target = torch.randn(2, N, d, generator=generator)
    if discrete:  # many exact ties
        pred, target = pred.round(), target.round()
    got = ranks(pred, target)
    assert (got.less.tolist(), got.ties.tolist()) == plain_ranks(pred, target)


def test_near_ties_are_told_apart():
    """Differences far below the rounding of |x|^2 + |y|^2 - 2xy, and exact ties beside them."""
    base = 1000.0 + torch.arange(4, dtype=torch.float32)[None]
    pred = base + torch.tensor([[0.0], [6e-5], [6e-5], [1.2e-4], [5.0]])
    target = base.expand(5, 4).contiguous()
    got = ranks(pred, target)
    assert (got.less.tolist(), got.ties.tolist()) == plain_ranks(pred, target)
    assert got.ties.tolist()[1:3] == [2, 2]


def test_rivals_in_an_equal_state_do_not_compete_by_hand():
    target = torch.tensor([[0.0], [0.0], [5.0], [0.0]])
    pred = torch.tensor([[1.0], [0.5], [5.0], [0.25]])
    equal = torch.tensor([[7, 1], [7, 2], [8, 3], [9, 1]])  # 0 and 1 share the first number, 0 and 3 the second
    assert ranks(pred, target).less.tolist() == [2, 1, 0, 0]
    assert ranks(pred, target, equal).less.tolist() == [0, 1, 0, 0]  # to 1, 3 is still a rival
    same = ranks(torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(4, 1, dtype=torch.int64))
    assert same.less.tolist() == [0] * 4 and same.ties.tolist() == [1] * 4


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 25), st.integers(1, 4), st.integers(1, 2), st.integers(0, 10_000))
def test_ranks_without_equal_states_equal_the_plain_form(N, kinds, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    pred, target = torch.randn(2, N, 2, generator=generator).round(decimals=0)
    equal = torch.randint(kinds, (N, columns), generator=generator)
    got = ranks(pred, target, equal)
    for i in range(N):
        rivals = [j for j in range(N) if j == i or not any(equal[i] == equal[j])]
        distance = [float((target[i].double() - pred[j].double()).square().sum()) for j in rivals]
        right = distance[rivals.index(i)]
        assert int(got.less[i]) == sum(d < right for d in distance)
        assert int(got.ties[i]) == sum(d == right for d in distance)


def test_chunks_do_not_change_ranks(monkeypatch):
    pred, target = torch.randn(2, 97, 3, 2).round(decimals=1)
    whole = ranks(pred, target)
    monkeypatch.setattr("worldmodels.metrics._CHUNK_ELEMENTS", 200)
    parts = ranks(pred, target)
    assert torch.equal(whole.less, parts.less) and torch.equal(whole.ties, parts.ties)
    equal = torch.randint(9, (97, 2))
    parts = ranks(pred, target, equal)
    monkeypatch.undo()
    whole = ranks(pred, target, equal)
    assert torch.equal(whole.less, parts.less) and torch.equal(whole.ties, parts.ties)


def test_reference_is_the_published_script():
    pred = torch.randn(200, 5, 2)
    target = pred + 1.5 * torch.randn(200, 5, 2)
    got = ranks(pred, target)
    hit, reciprocal = published_script(pred, target)
    assert 0.05 < hit < 0.95
    assert hits_at_k(got, 1, ties="reference") == pytest.approx(hit) and mrr(got, ties="reference") == pytest.approx(
        reciprocal
    )


def test_one_row_and_bad_input():
    assert ranks(torch.zeros(1, 2), torch.ones(1, 2)) == (torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(ValueError, match="must be equal"):
        ranks(torch.zeros(3, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="not finite"):
        ranks(torch.full((2, 2), torch.nan), torch.zeros(2, 2))


def test_ranks_within_by_hand():
    query, target = torch.tensor([[0.0], [0.0]]), torch.tensor([[2.0], [1.0]])
    others = torch.tensor([[[1.0], [-2.0], [0.0]], [[1.0], [5.0], [0.0]]])
    present = torch.tensor([[True, True, False], [True, True, True]])
    got = ranks_within(query, target, others, present)
    assert got.less.tolist() == [1, 1] and got.ties.tolist() == [2, 2]


def test_effective_rank_by_hand():
    line = torch.randn(500, 1) * torch.tensor([[1.0, 2.0, -1.0]])
    assert effective_rank(line) == pytest.approx(1.0, abs=1e-6)
    assert effective_rank(torch.zeros(100, 2, 3)) == 0.0
    cross = torch.cat([torch.eye(4), -torch.eye(4)])
    assert effective_rank(cross) == pytest.approx(4.0, abs=1e-9)


def test_interval_covers_the_mean_at_its_level():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(60):
        low, high = mean_interval(generator.random(80) < 0.3, seed=trial)
        covered += low <= 0.3 <= high
    assert 50 <= covered <= 60
    assert mean_interval(np.ones(5)) == (1.0, 1.0) and mean_interval(np.array([0.5])) == (0.5, 0.5)
