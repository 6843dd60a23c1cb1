"""Planning: against exhaustive search, a known optimum, and the true simulator of blocks."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch

from worldmodels.cores.gnn import GNN
from worldmodels.encoders import CSWMEncoder
from worldmodels.envs.block_physics import make_block_physics_vec
from worldmodels.errors import UserError
from worldmodels.models.world_model import WorldModel
from worldmodels.planning import Imagination, Planner, Simulator, colored_noise, reach


class Walk:
    """Positions on a plane; the cost of a place is not convex, so that greedy steps go wrong."""

    def __init__(self, moves):
        self.moves = moves

    def encode(self, observations):
        return {"place": observations}

    def step(self, states, actions):
        return {"place": states["place"] + self.moves(actions)}

    def cost(self, states, goals):
        gap = states["place"] - goals["place"]
        return gap.square().sum(-1) + 3.0 * torch.cos(2.0 * gap.sum(-1))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


COMPASS = torch.tensor([[0.0, 0.0], [1.0, 0.5], [-0.5, 1.0], [0.3, -1.0]])


@pytest.mark.parametrize(
    ("space", "moves"),
    [
        (gym.spaces.Discrete(4), lambda actions: COMPASS[actions]),
        (gym.spaces.Discrete(4, start=2), lambda actions: COMPASS[actions - 2]),
        (gym.spaces.MultiDiscrete([3, 2]), lambda actions: actions - torch.tensor([1.0, 0.4])),
    ],
)
@pytest.mark.parametrize("method", ["cem", "icem", "shooting"])
def test_a_plan_is_as_good_as_the_best_of_all_sequences(space, moves, method):
    walk, horizon = Walk(moves), 4
    places, goals = torch.randn(6, 2, generator=seeded(1)), 2.0 * torch.randn(6, 2, generator=seeded(2))
    candidates = 2000 if method == "shooting" else 600
    planner = Planner(space, horizon=horizon, candidates=candidates, rounds=5, elites=20, method=method)
    plan = planner.plan(walk, walk.encode(places), walk.encode(goals), seeded())
    singles = (
        [torch.tensor(a + int(space.start)) for a in range(int(space.n))]
        if isinstance(space, gym.spaces.Discrete)
        else [torch.tensor(pair) for pair in np.ndindex(*space.nvec)]
    )
    best = torch.full((6,), torch.inf)
    for sequence in itertools.product(singles, repeat=horizon):
        states, total = walk.encode(places), torch.zeros(6)
        for action in sequence:
            states = walk.step(states, action.expand(6, *action.shape))
            total = total + walk.cost(states, walk.encode(goals))
        best = torch.minimum(best, total)
    assert torch.allclose(plan.cost, best, atol=1e-4)
    states, total = walk.encode(places), torch.zeros(6)
    assert plan.actions.shape == (horizon, 6, *space.shape)
    for actions in plan.actions:
        assert all(space.contains(action.numpy().astype(space.dtype)) for action in actions)
        states = walk.step(states, actions)
        total = total + walk.cost(states, walk.encode(goals))
    assert torch.allclose(total, plan.cost, atol=1e-4)
    again = planner.plan(walk, walk.encode(places), walk.encode(goals), seeded())
    assert torch.equal(again.actions, plan.actions)


class Pull(Walk):
    def cost(self, states, goals):
        return (states["place"] - goals["place"]).square().sum(-1)


@pytest.mark.parametrize("method", ["cem", "icem"])
def test_boxes_are_planned_to_their_optimum(method):
    """Steps are at most 1 a side: the best is to go there as fast as that allows, and then to stay."""
    space = gym.spaces.Box(-1.0, 1.0, (2,))
    pull = Pull(lambda actions: actions)
    places, goals = torch.zeros(3, 2), torch.tensor([[2.5, -0.4], [0.0, 0.0], [-1.2, 3.0]])
    planner = Planner(space, horizon=4, candidates=300, rounds=12, elites=20, method=method)
    plan = planner.plan(pull, pull.encode(places), pull.encode(goals), seeded())
    expected, gap = torch.zeros(3), goals.clone()
    for _ in range(4):
        gap = gap - gap.clamp(-1.0, 1.0)
        expected = expected + gap.square().sum(-1)
    assert (plan.cost - expected < 0.1).all() and (plan.cost >= expected - 1e-5).all()
    assert float(plan.actions.abs().max()) <= 1.0 and plan.actions.shape == (4, 3, 2)
    later = planner.plan(pull, pull.encode(places), pull.encode(goals), seeded(1), plan)
    assert torch.isfinite(later.cost).all()


def test_the_rest_of_a_plan_is_where_the_next_begins():
    walk = Walk(lambda actions: COMPASS[actions])
    planner = Planner(gym.spaces.Discrete(4), horizon=3, candidates=200, elites=10)
    plan = planner.plan(walk, walk.encode(torch.zeros(1, 2)), walk.encode(torch.ones(1, 2)), seeded())
    moved = planner._shifted(plan.belief)
    assert torch.allclose(moved[:, :2], 0.5 * plan.belief[:, 1:] + 0.125) and torch.allclose(
        moved[:, 2], torch.tensor(0.25)
    )


def test_noise_has_variance_one_and_its_colour():
    for length in (8, 9):
        for color in (0.0, 1.0, 2.0):
            noise = colored_noise((20_000, length), color, seeded())
            assert float(noise.var()) == pytest.approx(1.0, abs=0.03)
        power = torch.fft.rfft(noise).abs().square().mean(0)
        assert float(power[1] / power[3]) == pytest.approx(9.0, rel=0.1)  # f ** -2
    near, far = (colored_noise((20_000, 12), color, seeded()) for color in (2.0, 0.0))
    assert float((near[:, 1:] * near[:, :-1]).mean()) > 0.6 > 0.1 > abs(float((far[:, 1:] * far[:, :-1]).mean()))


@pytest.mark.parametrize(
    ("space", "options", "error", "told"),
    [
        (
            gym.spaces.Box(-np.inf, np.inf, (2,)),
            {},
            UserError,
            "plans are of discrete, multi-discrete and bounded box actions",
        ),
        (
            gym.spaces.Discrete(3),
            {"method": "best"},
            UserError,
            "method is 'best'; expected one of cem, icem, shooting",
        ),
        (gym.spaces.Discrete(3), {"elites": 300}, ValueError, "elites is 300 of 256 candidates"),
        (gym.spaces.Discrete(3), {"horizon": 0}, ValueError, "horizon"),
    ],
)
def test_planners_that_cannot_be_are_refused(space, options, error, told):
    with pytest.raises(error, match=told):
        Planner(space, **options)


# Blocks.


def blocks(copies):
    return make_block_physics_vec(copies, num_objects=3, stay_action=True, shuffle_objects=False)


def gap(states, goals):
    return (states["state/positions"] - goals["state/positions"]).abs().sum((1, 2)).float()


def goals_of(envs, moves):
    """Snapshots and pictures that random moves lead to; the environment is where it was before."""
    before = envs.snapshot()
    generator = seeded(5)
    for _ in range(moves):
        observations, *_ = envs.step(torch.randint(15, (envs.num_envs,), generator=generator))
    reached = envs.snapshot()
    envs.restore(before)
    return reached, observations


def test_the_simulator_plans_to_its_goals_and_does_not_touch_what_is_played():
    envs = blocks(40)
    envs.reset(seed=0)
    reached, _ = goals_of(envs, 4)
    simulator = Simulator(envs, blocks, gap)
    planner = Planner(envs.single_action_space, horizon=4, candidates=150, rounds=4, elites=15)
    before = envs.snapshot()
    goals = {name: part for name, part in reached.items() if name != "steps"}
    planner.plan(simulator, simulator.encode(None), goals, seeded())
    assert all(torch.equal(part, before[name]) for name, part in envs.snapshot().items())
    there = lambda info: (info["positions"] == reached["state/positions"]).all((1, 2))  # noqa: E731
    first, info = reach(envs, simulator, planner, goals, there, steps=6, generator=seeded())
    assert float((first > 0).float().mean()) > 0.9 and int(first.max()) <= 6
    assert torch.equal(there(info)[first < 0], torch.zeros(int((first < 0).sum()), dtype=torch.bool))


def world_model(memory="none"):
    torch.manual_seed(0)
    action = {"kind": "discrete", "sizes": [15], "per_object": 5}
    encoder = CSWMEncoder((50, 50, 3), num_slots=3, slot_size=2, hidden_size=8)
    return WorldModel(encoder, GNN(2 + 5, 3, 2, hidden_size=8), action=action, action_to="slot", memory=memory).eval()


@torch.no_grad()
def test_imagination_costs_what_slots_say():
    model = world_model()
    envs = blocks(4)
    observations, _ = envs.reset(seed=0)
    _, pictures = goals_of(envs, 3)
    imagination = Imagination(model)
    states, goals = imagination.encode(observations), imagination.encode(pictures)
    planner = Planner(envs.single_action_space, horizon=3, candidates=50, elites=5)
    plan = planner.plan(imagination, states, goals, seeded())
    total, slots = torch.zeros(4), model.encode(observations)
    for actions in plan.actions:
        slots = model.step(slots, actions)[0]
        total = total + 0.5 * (slots - model.encode(pictures)).square().sum((1, 2))
    assert torch.allclose(total, plan.cost, atol=1e-5)
    copy = planner.plan(Imagination(model, copies=True), states, goals, seeded())
    apart = 0.5 * (states["slots"] - goals["slots"]).square().sum((1, 2))
    assert torch.allclose(copy.cost, 3 * apart, atol=1e-5)
