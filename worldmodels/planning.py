"""Planning with a world model: the actions whose imagined consequences come nearest to a goal, taken anew at every step.

>>> dynamics = Imagination(run.model)  # doctest: +SKIP
>>> planner = Planner(envs.single_action_space, horizon=5)  # doctest: +SKIP
>>> goals = dynamics.encode(pictures_of_goals)  # doctest: +SKIP
>>> plan = planner.plan(dynamics, dynamics.encode(observations), goals, generator)  # doctest: +SKIP
>>> envs.step(plan.actions[0])  # doctest: +SKIP

Model-predictive control by the cross-entropy method: Rubinstein & Kroese 2004; iCEM is Pinneri et al. 2020, "Sample-efficient
Cross-Entropy Method for Real-time Planning". A planner needs three things of a model: encode, step and cost (``Dynamics``).
So it runs on a world model, on a copy of the present and on the true simulator alike.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gymnasium as gym
import torch
from torch import Tensor

from .core import at_least_one
from .errors import UserError
from .models.world_model import WorldModel

METHODS = ("cem", "icem", "shooting")
States = dict[str, Tensor]
"""States of several copies by name, the first axis the copy's; only their ``Dynamics`` knows what they mean."""


@runtime_checkable
class Dynamics(Protocol):
    """What a planner needs to know of a world."""

    def encode(self, observations: Any) -> States:
        """The states ``(B, ...)`` in which copies are that have these observations."""
        ...

    def step(self, states: States, actions: Tensor) -> States:
        """The states after one action each, as the environment takes them, ``(B, ...)``."""
        ...

    def cost(self, states: States, goals: States) -> Tensor:
        """How far states are from goals, ``(B,)``."""
        ...


class Imagination:
    """A world model's slots, and their squared distance to those of the goal.

    Args:
        model: in evaluation mode; ``memory="none"``, since a plan begins at what is seen now.
        copies: whether every action is believed to change nothing: the copy that a model has to beat.

    Raises:
        UserError: the model carries a memory.
    """

    def __init__(self, model: WorldModel, *, copies: bool = False):
        if model.memory != "none":
            raise UserError(
                f"a plan begins at what is seen now, and this model has memory={model.memory}; train it with none"
            )
        self.model, self.copies = model, copies

    @torch.no_grad()
    def encode(self, observations: Tensor) -> States:
        """Slots ``(B, K, D)`` of observations ``(B, ...)``."""
        return {"slots": self.model.encode(observations)}

    @torch.no_grad()
    def step(self, states: States, actions: Tensor) -> States:
        """The slots that are imagined after the actions."""
        return states if self.copies else {"slots": self.model.step(states["slots"], actions)[0]}

    def cost(self, states: States, goals: States) -> Tensor:
        """``1/2 sum_k |z_k - g_k|^2``, C-SWM's distance without its scale."""
        return 0.5 * (states["slots"] - goals["slots"]).square().sum((1, 2))


class Simulator:
    """An environment of ours itself: what the same planner comes to when it knows the world. Nobody can plan better in it.

    What is random in a step is drawn as it will be, so that in an environment with chance this planner also knows its luck.

    Args:
        env: the environment that is played; states are its snapshots.
        make: makes as many copies of it as it is asked for.
        distance: how far snapshots are from goals, ``(B,)``; see ``BatchedEnv.snapshot`` for the names of their parts.
    """

    def __init__(self, env: Any, make: Callable[[int], Any], distance: Callable[[States, States], Tensor]):
        self.env, self.make, self.distance = env, make, distance
        self._copies: dict[int, Any] = {}

    def encode(self, observations: Any) -> States:
        """The environment's present states, whatever is seen of them."""
        return {name: part.to(self.env.device) for name, part in self.env.snapshot().items() if name != "steps"}

    def step(self, states: States, actions: Tensor) -> States:
        """The states that follow."""
        B = len(actions)
        if B not in self._copies:
            self._copies[B] = self.make(B)
        copies = self._copies[B]
        counts = {name: states[name].cpu() for name in ("elapsed", "ended")}
        copies.restore({**states, **counts, "steps": torch.tensor(0)})
        copies.step(actions)
        return {name: part.to(self.env.device) for name, part in copies.snapshot().items() if name != "steps"}

    def cost(self, states: States, goals: States) -> Tensor:
        """The distance that was given."""
        return self.distance(states, goals)


class Plan(NamedTuple):
    """What a planner found for every copy.

    Args:
        actions: the best sequence, ``(horizon, B, ...)``.
        cost: what it is believed to cost, ``(B,)``.
        belief: the last distribution of actions: probabilities ``(B, horizon, parts, choices)``, or means and deviations
            ``(B, horizon, 2, numbers)``.
    """

    actions: Tensor
    cost: Tensor
    belief: Tensor


class Planner:
    """The cross-entropy method over sequences of actions.

    Draw ``candidates`` sequences, imagine each, keep the ``elites`` that cost least, and make a distribution of them from
    which the next are drawn; in the end the best sequence that was ever drawn is the plan. The cost of a sequence is the sum
    over its states of their distance to the goal, so that arriving sooner is better. Actions are drawn from categorical
    distributions (discrete and multi-discrete spaces), or from normal ones cut off at the limits (boxes).

    - "cem": as said.
    - "icem": besides, the elites of one round are candidates of the next, each round has fewer candidates than the one before
      (by 1.25), and in boxes noise is coloured: successive actions resemble each other.
    - "shooting": one round of as many candidates as all rounds have together; no distribution is learned.

    Departure from iCEM: where it adds the mean itself to the last round's candidates, we do not, because the best sequence of
    all rounds is kept anyway.

    Args:
        space: of single actions: discrete, multi-discrete, or a bounded box.
        horizon: actions of a sequence.
        candidates: of the first round.
        rounds: how often the distribution is made anew.
        elites: sequences from which it is made.
        method: see above.
        momentum: share of the old distribution that stays, 0 to below 1.
        color: exponent of the noise's spectrum for "icem" in boxes; 0 is white.

    Raises:
        UserError: a space that is none of these, or an unknown method.
        ValueError: sizes below 1, or more elites than candidates.
    """

    def __init__(
        self,
        space: gym.Space[Any],
        *,
        horizon: int = 5,
        candidates: int = 256,
        rounds: int = 4,
        elites: int = 24,
        method: str = "cem",
        momentum: float = 0.1,
        color: float = 2.0,
    ):
        at_least_one(horizon=horizon, candidates=candidates, rounds=rounds, elites=elites)
        if method not in METHODS:
            raise UserError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
        if elites > candidates or not 0.0 <= momentum < 1.0:
            raise ValueError(
                f"elites is {elites} of {candidates} candidates, momentum {momentum}; give fewer, and 0 to below 1"
            )
        self.horizon, self.candidates, self.rounds, self.elites = horizon, candidates, rounds, elites
        self.method, self.momentum, self.color = method, momentum, color
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self.shape: tuple[int, ...] = ()
        if isinstance(space, gym.spaces.Discrete):
            self.sizes: tuple[int, ...] = (int(space.n),)
            self.start = int(space.start)
        elif isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1:
            self.sizes = tuple(int(n) for n in space.nvec)
            self.start, self.shape = 0, space.shape
        elif isinstance(space, gym.spaces.Box) and space.is_bounded("both"):
            self.sizes, self.shape = (), space.shape
            self.low, self.high = torch.tensor(space.low).flatten(), torch.tensor(space.high).flatten()
        else:
            raise UserError(f"actions are {space}; plans are of discrete, multi-discrete and bounded box actions")

    def plan(
        self, dynamics: Dynamics, states: States, goals: States, generator: torch.Generator, before: Plan | None = None
    ) -> Plan:
        """The best sequence of actions found for every copy.

        Args:
            dynamics: the world.
            states: where copies are, ``(B, ...)``.
            goals: where they should be.
            generator: source of the candidates, on the states' device.
            before: the plan of the step before, whose rest this one begins with; None for none.
        """
        first = next(iter(states.values()))
        B, device = len(first), first.device
        belief = self._uninformed(B, device) if before is None else self._shifted(before.belief)
        shooting = self.method == "shooting"
        counts = [max(2 * self.elites, round(self.candidates / 1.25**i)) for i in range(self.rounds)]
        if self.method != "icem":
            counts = [self.candidates] * self.rounds
        best_cost = torch.full((B,), torch.inf, device=device)
        best: Tensor | None = None
        kept: Tensor | None = None
        for count in [sum(counts)] if shooting else counts:
            drawn = self._drawn(belief, count, generator)  # (B, N, H, ...)
            if kept is not None and self.method == "icem":
                drawn = torch.cat([drawn, kept], dim=1)
            cost = self._costs(dynamics, states, goals, drawn)
            order = cost.topk(min(self.elites, cost.shape[1]), dim=1, largest=False)
            kept = _picked(drawn, order.indices)
            better = order.values[:, 0] < best_cost
            best_cost = torch.where(better, order.values[:, 0], best_cost)
            leader = kept[:, 0]
            best = leader if best is None else torch.where(better.view(-1, *[1] * (leader.dim() - 1)), leader, best)
            if not shooting:
                belief = self.momentum * belief + (1.0 - self.momentum) * self._of_elites(kept)
        assert best is not None
        return Plan(self._taken(best).transpose(0, 1), best_cost, belief)

    def _costs(self, dynamics: Dynamics, states: States, goals: States, drawn: Tensor) -> Tensor:
        """What candidates ``(B, N, H, ...)`` cost, ``(B, N)``."""
        B, N = drawn.shape[:2]
        rows, wanted = (
            {name: part.repeat_interleave(N, 0) for name, part in parts.items()} for parts in (states, goals)
        )
        actions = self._taken(drawn.flatten(0, 1))
        total = torch.zeros(B * N, device=drawn.device)
        for step in range(self.horizon):
            rows = dynamics.step(rows, actions[:, step])
            total = total + dynamics.cost(rows, wanted)
        return total.view(B, N)

    # Distributions of sequences.

    def _uninformed(self, B: int, device: torch.device) -> Tensor:
        if self.low is None:
            weights = torch.zeros(len(self.sizes), max(self.sizes), device=device)
            for part, size in enumerate(self.sizes):
                weights[part, :size] = 1.0 / size
            return weights.expand(B, self.horizon, -1, -1)
        assert self.high is not None
        middle = torch.stack([(self.low + self.high) / 2, (self.high - self.low) / 2]).to(device)
        return middle.expand(B, self.horizon, -1, -1)

    def _shifted(self, belief: Tensor) -> Tensor:
        """A step later; of what comes last nothing is known, and of the rest not all is to be believed."""
        fresh = self._uninformed(len(belief), belief.device)
        moved = torch.cat([belief[:, 1:], fresh[:, -1:]], dim=1)
        if self.low is None:
            return 0.5 * moved + 0.5 * fresh
        return torch.stack([moved[:, :, 0], fresh[:, :, 1]], dim=2)

    def _drawn(self, belief: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Choices ``(B, N, H, parts)``, or numbers ``(B, N, H, A)``."""
        B, H = belief.shape[:2]
        if self.low is None:
            found = torch.multinomial(belief.flatten(0, 2), count, replacement=True, generator=generator)
            return found.view(B, H, -1, count).movedim(-1, 1)
        assert self.high is not None
        mean, deviation = belief[:, None, :, 0], belief[:, None, :, 1]
        color = self.color if self.method == "icem" else 0.0
        noise = colored_noise((B, count, mean.shape[-1], H), color, generator, belief.device).transpose(2, 3)
        low, high = self.low.to(belief.device), self.high.to(belief.device)
        return (mean + deviation * noise).clamp(low, high)

    def _of_elites(self, elites: Tensor) -> Tensor:
        """The distribution of sequences ``(B, E, H, ...)``, each choice with a little of all others."""
        if self.low is None:
            shares = torch.nn.functional.one_hot(elites, max(self.sizes)).float().mean(1)
            return 0.95 * shares + 0.05 * self._uninformed(len(elites), elites.device)
        return torch.stack([elites.mean(1), elites.std(1, correction=0)], dim=2)

    def _taken(self, drawn: Tensor) -> Tensor:
        """Sequences as the environment takes actions, ``(..., H, *action)``."""
        if self.low is None:
            return drawn[..., 0] + self.start if not self.shape else drawn
        return drawn.unflatten(-1, self.shape)


def _picked(drawn: Tensor, index: Tensor) -> Tensor:
    """Of candidates ``(B, N, ...)`` those with the numbers ``(B, E)``."""
    rows = torch.arange(len(drawn), device=drawn.device)[:, None]
    return drawn[rows, index]


def colored_noise(
    shape: tuple[int, ...], color: float, generator: torch.Generator, device: torch.device | str = "cpu"
) -> Tensor:
    """Gaussian noise along the last axis whose power falls with the frequency as ``f ** -color``, of variance 1.

    Timmer & Koenig 1995, as iCEM has it. The lowest frequency stands for the constant part as well.

    Args:
        shape: of the noise.
        color: 0 is white, 1 pink, 2 brown.
        generator: source.
        device: of the noise.
    """
    length = shape[-1]
    if color == 0.0 or length == 1:
        return torch.randn(shape, generator=generator, device=device)
    frequency = torch.fft.rfftfreq(length, device=device)
    frequency[0] = frequency[1]
    scale = frequency ** (-color / 2)
    real, imaginary = (torch.randn((*shape[:-1], len(scale)), generator=generator, device=device) for _ in range(2))
    imaginary[..., 0] = 0.0
    real[..., 0] = real[..., 0] * 2**0.5
    weights = torch.full_like(scale, 2.0)
    weights[0] = 1.0
    if length % 2 == 0:
        imaginary[..., -1] = 0.0
        real[..., -1] = real[..., -1] * 2**0.5
        weights[-1] = 1.0
    # Var of irfft: sum over frequencies of weights * scale^2 * 2 / (2 length^2) and the like for the real-only ends.
    power = (weights * scale.square()).sum() * 2.0 / length**2
    return torch.fft.irfft(torch.complex(real, imaginary) * scale, n=length) / power.sqrt()


def reach(
    envs: Any,
    dynamics: Dynamics,
    planner: Planner,
    goals: States,
    arrived: Callable[[dict[str, Any]], Tensor],
    *,
    steps: int,
    generator: torch.Generator,
) -> tuple[Tensor, dict[str, Any]]:
    """Play an environment by plans, made anew at every step.

    Args:
        envs: a vector environment of ours after ``reset``, whose copies do not end before ``steps``.
        dynamics: the world that plans are made in.
        planner: see there.
        goals: of every copy, as ``dynamics.encode`` gives them.
        arrived: of the infos of a step, which copies are at their goals, ``(B,)``.
        steps: that are played.
        generator: source of the candidates.

    Returns:
        After how many steps each copy was at its goal first, ``(B,)``, -1 where it never was; and the last infos.
    """
    observations = envs.restore(envs.snapshot())
    first, info = None, None
    plan: Plan | None = None
    for step in range(steps):
        plan = planner.plan(dynamics, dynamics.encode(observations), goals, generator, plan)
        observations, _, _, _, info = envs.step(plan.actions[0])
        there = arrived(info)
        if first is None:
            first = torch.full((len(there),), -1, device=there.device)
        first = torch.where((first < 0) & there, step + 1, first)
    assert first is not None and info is not None
    return first, info
