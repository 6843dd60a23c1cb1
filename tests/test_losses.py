import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worldmodels.errors import UserError
from worldmodels.losses import contrastive, draw_negatives, energy


def test_energy_by_hand():
    a = torch.tensor([[[0.0, 0.0], [1.0, 1.0]]])
    b = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]])
    # squared distances 25 and 1, mean 13, times 1 / (2 * 0.25)
    assert energy(a, b).tolist() == [26.0] and energy(a, b, sigma=1.0).tolist() == [6.5]


def test_loss_by_hand():
    """Two rows: each is the other's negative."""
    slots = torch.tensor([[[0.0]], [[0.5]]])
    pred, following = torch.tensor([[[0.1]], [[0.5]]]), torch.tensor([[[0.2]], [[0.5]]])
    loss = contrastive(slots, pred, following, in_episode=0.0)
    assert float(loss.positive) == pytest.approx(2 * 0.01 / 2)
    assert float(loss.negative) == pytest.approx(1 - 2 * 0.25)
    assert float(loss.total) == pytest.approx(0.51)
    paper = contrastive(slots, pred, following, negatives="paper")
    assert float(paper.negative) == pytest.approx(((1 - 2 * 0.09) + (1 - 2 * 0.25)) / 2)
    far = contrastive(10 * slots, 10 * pred, 10 * following)
    assert float(far.negative) == 0.0


def test_an_action_must_displace_its_slot_on_the_average():
    """Two slots, two actions each. Slot 0 goes up by 2 and by 1 under action 0, so m = 1.5 and its distance is
    sqrt(2 * 1.5^2 / 2) = 1.5, beyond the hinge; under action 1 of slot 1 moves of +.5 and -.5 cancel, though each of them is
    a move. What another slot does, does not count, nor an action that was not taken: three of four hinges are open.
    """
    slots = torch.zeros(4, 2, 1)
    following = torch.tensor([[[2.0], [9.0]], [[1.0], [9.0]], [[9.0], [0.5]], [[9.0], [-0.5]]])
    acted = torch.zeros(4, 2, 2)
    acted[:2, 0, 0] = acted[2:, 1, 1] = 1.0
    own = torch.arange(4)  # episodes of their own
    options = {"episode": own, "step": own, "acted": acted}
    without = contrastive(slots, following, following, **options)
    loss = contrastive(slots, following, following, displacement=2.0, **options)
    assert torch.allclose(loss.negative - without.negative, torch.tensor(2 * 3 / 4), atol=1e-5)
    assert torch.equal(loss.positive, without.positive)
    agreed = following.clone()
    agreed[3, 1] = 0.5  # the two moves agree: m = .5, and the hinge is half open
    loss = contrastive(slots, agreed, agreed, displacement=2.0, **options)
    assert torch.allclose(loss.negative - without.negative, torch.tensor(2 * 2.5 / 4), atol=1e-5)
    same = torch.ones(4, 2, 1, requires_grad=True)  # nothing moved
    (none,) = torch.autograd.grad(contrastive(same, same, same, displacement=1.0, acted=acted).total, same)
    assert not bool(none.any())
    with pytest.raises(UserError, match="acted does not say what was done"):
        contrastive(slots, slots, slots, displacement=1.0)
    with pytest.raises(UserError, match="displacement is -1.0"):
        contrastive(slots, slots, slots, displacement=-1.0, acted=acted)


def test_hinge_on_the_distance_by_hand():
    slots = torch.tensor([[[0.0]], [[0.01]]], requires_grad=True)
    loss = contrastive(slots, slots, slots, hinge_on="distance")
    assert loss.negative.detach() == pytest.approx(1 - 2**0.5 * 0.01, abs=1e-4)
    (steep,) = torch.autograd.grad(loss.negative, slots)
    (flat,) = torch.autograd.grad(contrastive(slots, slots, slots).negative, slots)
    assert steep.abs().max() > 1.0 > 0.1 > flat.abs().max()  # near states are pushed apart as hard as far ones
    same = torch.zeros(2, 5, 2, requires_grad=True)
    (none,) = torch.autograd.grad(contrastive(same, same, same, hinge_on="distance").total, same)
    assert torch.equal(none, torch.zeros_like(none))


def plain_loss(slots, pred, following, row, negatives, hinge, sigma):
    total = 0.0
    for b in range(len(slots)):
        scale = 0.5 / sigma**2
        positive = scale * sum(float((pred[b, k] - following[b, k]).square().sum()) for k in range(slots.shape[1]))
        anchor = following if negatives == "paper" else slots
        negative = scale * sum(float((anchor[b, k] - slots[row[b], k]).square().sum()) for k in range(slots.shape[1]))
        total += positive / slots.shape[1] + max(0.0, hinge - negative / slots.shape[1])
    return total / len(slots)


@pytest.mark.parametrize("negatives", ["cswm", "paper", "time_aligned"])
def test_loss_equals_the_plain_form(negatives):
    slots, pred, following = 0.4 * torch.randn(3, 12, 5, 2)
    episode, step = torch.arange(12) // 3, torch.arange(12) % 3
    options = {"in_episode": 0.5, "generator": torch.Generator().manual_seed(1)}
    kind = {"time_aligned": negatives == "time_aligned", "but_next": negatives == "paper"}
    row = draw_negatives(episode, step, **kind, **options)
    options["generator"].manual_seed(1)
    loss = contrastive(
        slots, pred, following, episode=episode, step=step, negatives=negatives, hinge=0.7, sigma=0.8, **options
    )
    assert float(loss.total) == pytest.approx(plain_loss(slots, pred, following, row, negatives, 0.7, 0.8), rel=1e-5)


def test_a_collapsed_encoder_pays_the_whole_hinge():
    flat = torch.zeros(6, 5, 2)
    assert contrastive(flat, flat, flat, hinge=0.9).total == pytest.approx(0.9)


@given(st.integers(2, 12), st.integers(0, 1000))
def test_no_row_is_its_own_negative(B, seed):
    row = draw_negatives(torch.zeros(B).long(), torch.arange(B), generator=torch.Generator().manual_seed(seed))
    assert (row != torch.arange(B)).all()


def test_shares_and_kinds_of_negatives():
    episode, step = torch.arange(400) // 4, torch.arange(400) % 4
    generator = torch.Generator().manual_seed(0)
    inside = draw_negatives(episode, step, in_episode=1.0, generator=generator)
    assert (episode[inside] == episode).all() and (step[inside] != step).all()
    half = draw_negatives(episode, step, in_episode=0.5, generator=generator)
    assert 0.4 < float((episode[half] == episode).float().mean()) < 0.6
    aligned = draw_negatives(episode, step, time_aligned=True, generator=generator)
    assert (step[aligned] == step).all() and (episode[aligned] != episode).all()
    own = sum(
        int((draw_negatives(episode[:4], step[:4], self_pairs=True, generator=generator) == torch.arange(4)).sum())
        for _ in range(500)
    )
    assert 400 < own < 600  # a quarter of 2,000
    lonely = draw_negatives(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), in_episode=1.0, generator=generator)
    assert lonely[0] != 0 and lonely[1:].tolist() == [2, 1]


def test_the_papers_negative_is_never_the_target():
    """States far from each other: only the target as its own negative would cost anything."""
    places = 10.0 * torch.eye(6)[:, None]  # the observations of steps 0 to 5 of one episode, one slot each
    slots, following = places[:-1], places[1:]
    generator = torch.Generator().manual_seed(0)
    for in_episode in (0.0, 1.0):
        for _ in range(50):
            options = {"negatives": "paper", "in_episode": in_episode, "generator": generator}
            loss = contrastive(
                slots, following, following, episode=torch.zeros(5).long(), step=torch.arange(5), **options
            )
            assert float(loss.total) == 0.0


@pytest.mark.parametrize("self_pairs", [False, True])
def test_negatives_but_the_next_are_uniform_over_the_others(self_pairs):
    episode, step = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([3, 4, 5, 4, 3])
    generator = torch.Generator().manual_seed(0)
    for in_episode in (0.0, 1.0):
        counts = torch.zeros(5, 5)
        for _ in range(1500):
            row = draw_negatives(
                episode, step, in_episode=in_episode, self_pairs=self_pairs, but_next=True, generator=generator
            )
            counts[torch.arange(5), row] += 1
        for i in range(5):
            others = {
                j
                for j in range(5)
                if (self_pairs or i != j)
                and (episode[i], step[i] + 1) != (episode[j], step[j])
                and (in_episode == 0.0 or episode[i] == episode[j])
            }
            if not others:  # the last row holds the target alone of its episode: any other row
                others = {j for j in range(3)}
            expected = torch.tensor([float(j in others) for j in range(5)]) / len(others)
            assert torch.allclose(counts[i] / 1500, expected, atol=0.06)


def test_where_a_batch_holds_only_the_target_it_is_drawn():
    row = draw_negatives(torch.zeros(2).long(), torch.arange(2), in_episode=1.0, but_next=True)
    assert row.tolist() == [1, 0]


def test_bad_arguments_are_refused():
    three = torch.zeros(3, 5, 2)
    with pytest.raises(ValueError, match="negatives is 'hard'"):
        contrastive(three, three, three, negatives="hard")
    with pytest.raises(ValueError, match="hinge_on is 'angle'"):
        contrastive(three, three, three, hinge_on="angle")
    with pytest.raises(ValueError, match="share"):
        contrastive(three, three, three, in_episode=1.5)
    with pytest.raises(ValueError, match="at least two"):
        contrastive(three[:1], three[:1], three[:1])
