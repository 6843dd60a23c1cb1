"""Rules on pairs of slots: the equations in plain words, and what a choice may do."""

import gymnasium as gym
import pytest
import torch
import torch.nn.functional as F

import worldmodels.envs  # noqa: F401
from worldmodels.check import CONTRACT
from worldmodels.core import Tokens
from worldmodels.cores.rules import Rules
from worldmodels.training import Annealed

FORMS = {
    "one rule": {},
    "3 rules, 2 stages": {"num_rules": 3, "num_stages": 2},
    "parallel": {"parallel": True, "num_rules": 2},
    "parallel, 2 stages": {"parallel": True, "num_stages": 2},
    "cold": {"num_rules": 2, "temperature": 1e-3},
    "three layers": {"num_layers": 3},
}


@pytest.mark.parametrize("contract", CONTRACT)
@pytest.mark.parametrize("form", FORMS)
def test_contract(form, contract):
    CONTRACT[contract](lambda *sizes: Rules(*sizes, hidden_size=16, **FORMS[form]))


def plain(core, features):
    """The class's equations for one row, in loops: the change of every slot."""
    D, K = core.slot_size, len(features)
    V = [row.clone() for row in features]

    def look(p, c, i):
        H = core.action.weight.shape[1]
        rule = slice(i * H, (i + 1) * H)
        h = core.as_primary.weight[rule] @ V[p] + core.as_primary.bias[rule] + core.as_context.weight[rule] @ V[c]
        h = torch.relu(h)
        for layer, norm in zip(core.hidden, core.norms, strict=True):
            h = torch.relu(norm(h @ layer.weight[i] + layer.bias[i]))
        return float(h @ core.condition.weight[i][:, 0]), h @ core.action.weight[i] + core.action.bias[i]

    changed = set()
    for _ in range(core.num_stages):
        found = {(p, c, i): look(p, c, i) for p in range(K) for c in range(K) for i in range(core.num_rules)}
        if core.parallel:
            best = [max((key for key in found if key[0] == p), key=lambda key: found[key][0]) for p in range(K)]
        else:
            best = [max((key for key in found if key[0] not in changed), key=lambda key: found[key][0])]
        for key in best:
            V[key[0]] = torch.cat([V[key[0]][:D] + found[key][1], V[key[0]][D:]])
            changed.add(key[0])
    return (torch.stack(V) - features)[:, :D]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("form", ["3 rules, 2 stages", "parallel", "parallel, 2 stages", "three layers"])
def test_the_equations_in_plain_words(form, training):
    """With and without computing the changes that were not chosen."""
    core = Rules(6, 4, 2, hidden_size=8, noise=0.0, **FORMS[form]).train(training)
    features = 2.0 * torch.randn(20, 4, 6)
    with torch.no_grad():
        ours = core(Tokens(features), {})[0]
        for row, change in zip(features, ours, strict=True):
            assert torch.allclose(change, plain(core, row), atol=1e-5)


def test_a_rule_by_hand():
    """One rule that fits where both have an action, and moves the primary by the context's."""
    core = Rules(2, 3, 1, hidden_size=2, num_layers=1).eval()
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.zero_()
        core.as_primary.weight.copy_(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))  # h_1 = relu(a_p), h_2 = relu(a_c)
        core.as_context.weight.copy_(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
        core.condition.weight.copy_(torch.tensor([[[1.0], [1.0]]]))
        core.action.weight.copy_(torch.tensor([[[0.0], [1.0]]]))
    tokens = Tokens(torch.tensor([[[5.0, 1.0], [7.0, 0.0], [9.0, 3.0]]]))
    assert core(tokens, {})[0].tolist() == [[[0.0], [0.0], [3.0]]]  # slot 2 with itself: 3 + 3
    assert {name: part.tolist() for name, part in core.explain(tokens, {}).items()} == {
        "rule": [[0]],
        "primary": [[2]],
        "context": [[2]],
    }


def test_half_of_the_units_begin_with_the_difference():
    core = Rules(6, 5, 2, num_rules=2, hidden_size=8)
    both = torch.randn(1, 2, 6)
    both[:, 1, :2] = both[:, 0, :2]  # two objects in one place
    seen = (core.as_primary(both)[:, 0] + core.as_context(both)[:, 1]).unflatten(-1, (2, 8))
    both[..., :2] += 7.0  # wherever that is
    moved = (core.as_primary(both)[:, 0] + core.as_context(both)[:, 1]).unflatten(-1, (2, 8))
    same = torch.isclose(seen, moved, atol=1e-5)
    assert bool(same[..., :4].all()) and not bool(same[..., 4:].any())


def test_a_slot_is_changed_once_and_none_that_may_not():
    core = Rules(6, 5, 2, num_rules=2, num_stages=4, hidden_size=16).eval()
    tokens = Tokens(torch.randn(40, 5, 6), mask=torch.rand(40, 5) < 0.8)
    may = torch.rand(40, 5) < 0.6
    change, chosen = core.run(tokens, may)
    allowed = tokens.mask & may
    assert not bool((change.abs().sum(-1) > 0)[~allowed].any())
    assert torch.equal(
        (change.abs().sum(-1) > 0).sum(1), allowed.sum(1).clamp(max=4)
    )  # as many as there are stages for
    for row, there in zip(range(40), allowed.sum(1).tolist(), strict=True):
        picked = [p for p in chosen["primary"][row].tolist() if p >= 0]
        assert len(set(picked)) == len(picked) == min(4, there)
        contexts = [c for c in chosen["context"][row].tolist() if c >= 0]
        assert all(bool(tokens.mask[row, c]) for c in contexts)
    nothing = Tokens(torch.randn(3, 5, 6), mask=torch.zeros(3, 5, dtype=torch.bool))
    for one in (core, Rules(6, 5, 2, parallel=True)):
        for mode in (True, False):
            change, chosen = one.train(mode).run(nothing)
            assert not bool(change.any()) and all(bool((part == -1).all()) for part in chosen.values())


def test_what_training_changes():
    """Noise falls to nothing; untold, a core is as at the end."""
    core = Rules(6, 5, 2, num_stages=2, hidden_size=16, noise_until=0.5)
    assert isinstance(core, Annealed)
    tokens = Tokens(torch.randn(64, 5, 6))
    same = lambda: torch.equal(core(tokens, {})[0], core(tokens, {})[0])  # noqa: E731
    assert same()
    for done, noisy in ((0.0, True), (0.3, True), (0.5, False), (1.0, False)):
        core.anneal(done)
        assert same() != noisy
        core.eval()
        assert same()
        core.train()
    core.anneal(0.1)
    other = Rules(6, 5, 2, num_stages=2, hidden_size=16, noise_until=0.5)
    other.load_state_dict(core.state_dict())
    assert float(other.done) == pytest.approx(0.1)  # a checkpoint knows how far it was


def test_exploring_rows_see_one_context():
    core = Rules(6, 5, 2, hidden_size=16, explore=1.0, noise_until=0.5)
    tokens = Tokens(torch.randn(400, 5, 6), mask=torch.arange(5).expand(400, 5) < 4)
    usual = core.explain(tokens, {})["context"]
    core.anneal(0.0)
    contexts = core.explain(tokens, {})["context"].flatten()
    assert torch.bincount(contexts, minlength=5)[:4].min() > 60 and int(contexts.max()) == 3  # any that is there
    core.anneal(0.25)
    assert 0.2 < float((core._contexts(tokens.mask).sum(1) == 1).float().mean()) < 0.8
    core.anneal(0.5)
    assert torch.equal(core.explain(tokens, {})["context"], usual)
    core.anneal(0.0)
    assert torch.equal(core.eval().explain(tokens, {})["context"], usual)


def test_the_gradient_goes_through_what_comes_out():
    """``d/d s = softmax' of the changes of all candidates``, not of a mixture of what goes in."""
    core = Rules(3, 3, 1, hidden_size=4, noise=0.0, temperature=0.7)
    tokens, weights = Tokens(torch.randn(5, 3, 3)), torch.randn(5, 3)
    (core(tokens, {})[0][..., 0] * weights).sum().backward()
    got = core.condition.weight.grad.clone()
    core.zero_grad()
    hidden = core._hidden(tokens.features)
    changes = core.action(hidden)[..., 0, 0].detach()
    hidden = hidden.detach()
    share = torch.softmax(core.condition(hidden)[..., 0].flatten(1) / 0.7, dim=-1).view(5, 3, 3)
    ((share * changes).sum(2) * weights).sum().backward()
    assert torch.allclose(got, core.condition.weight.grad, atol=1e-6)


def pushing(seed, number=8192):
    """True slots of three blocks, in half of the rows the second beside the first; the action at its block; how all move."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.rand(number, 25, generator=generator).argsort(1)[:, :3]
    positions = torch.stack([cells // 5, cells % 5], dim=-1)
    offsets = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])
    beside = positions[:, 0] + offsets[torch.randint(4, (number,), generator=generator)]
    free = (beside >= 0).all(-1) & (beside < 5).all(-1) & (beside != positions[:, 2]).any(-1)
    positions[:, 1] = torch.where((free & (torch.arange(number) % 2 == 0))[:, None], beside, positions[:, 1])
    actions = torch.randint(15, (number,), generator=generator)
    envs = gym.make_vec("worldmodels/BlockPhysics-v0", num_envs=number, num_objects=3)
    _, info = envs.reset(seed=seed, options={"positions": positions})
    weights = info["weights"].clone()
    *_, after = envs.step(actions)
    moves = (after["positions"] - positions).float()
    slots = torch.cat([positions, weights[..., None]], dim=-1) / 2.0
    action = torch.zeros(number, 3, 5)
    action[torch.arange(number), actions // 5, actions % 5] = 1.0
    return torch.cat([slots, action], dim=-1), moves


def right_with_a_push(make, seed, steps=2000, enough=1.0):
    """The share of pushes of which both blocks' moves are told right, when training ends or every 250 steps it is enough."""
    torch.manual_seed(seed)
    tokens, moves = pushing(seed)
    test, truth = pushing(seed + 1000)
    pushes = (truth != 0).any(-1).sum(-1) == 2
    assert int(pushes.sum()) > 200
    core = make()
    optimizer = torch.optim.Adam(core.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / steps)
    for step in range(1, steps + 1):
        if isinstance(core, Annealed):
            core.anneal(step / steps)
        rows = torch.randint(len(tokens), (128,))
        change = core.train()(Tokens(tokens[rows]), {})[0]
        optimizer.zero_grad()
        (F.pad(moves[rows], (0, 1)) - change).square().sum((1, 2)).mean().backward()
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            with torch.no_grad():
                told = core.eval()(Tokens(test[pushes]), {})[0][..., :2].round()
            right = float((told == truth[pushes]).all(-1).all(-1).float().mean())
            if right > enough:
                break
    return right


@pytest.mark.learning
def test_a_push_is_learned(learned):
    """Two blocks move, and which is the second depends on where it stands, which linear keys cannot see: SNPS tells no push.

    Measured: 20 seeds of 20 come above 0.6 within the 2,000 steps.
    """
    learned(
        lambda seed: right_with_a_push(lambda: Rules(8, 3, 3, num_stages=2), seed, enough=0.6),
        lambda share: share > 0.6,
    )
