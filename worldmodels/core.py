"""What a core is: tokens and a state go in, slots and the next state come out.

Axes: ``B`` batch, ``T`` time, ``K`` slots, ``N`` tokens, ``D`` slot size, ``F`` token size. Sequences are time-major.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Tokens(NamedTuple):
    """What a core reads at one step, or, with a leading time axis, over a sequence.

    Args:
        features: ``(B, N, F)``.
        positions: ``(B, N, P)``, for cores that know where a token is; others ignore them.
        mask: ``(B, N)`` bool, False where a token is absent; None if all are present.
    """

    features: Tensor
    positions: Tensor | None = None
    mask: Tensor | None = None

    def steps(self) -> "list[Tokens]":
        """The entries of the first axis one by one; going back through all of them is a single stack, not a sum."""
        parts = [[None] * len(self.features) if part is None else part.unbind(0) for part in self]
        return [Tokens(*step) for step in zip(*parts, strict=True)]

    def at(self, index: Any) -> "Tokens":
        """Every part at an index of the first axis."""
        positions = None if self.positions is None else self.positions[index]
        mask = None if self.mask is None else self.mask[index]
        return Tokens(self.features[index], positions, mask)


def at_least_one(**options: int) -> None:
    """Refuse options below 1; for the constructors of cores.

    Raises:
        ValueError: naming the first.
    """
    for name, value in options.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")


def above_zero(**options: float) -> None:
    """Refuse options that are not above 0; for the constructors of cores.

    Raises:
        ValueError: naming the first.
    """
    for name, value in options.items():
        if value <= 0:
            raise ValueError(f"{name} is {value}; expected above 0")


def present(tokens: Tokens) -> Tensor:
    """The features with those of absent tokens, which may be anything, as zeros."""
    if tokens.mask is None:
        return tokens.features
    return torch.where(tokens.mask[..., None], tokens.features, 0.0)


State = dict[str, Tensor]
"""A core's memory between two steps: every leaf is ``(B, ...)``; empty for a core without memory."""


@runtime_checkable
class RecurrentCore(Protocol):
    """The one protocol of all cores; each is an ``nn.Module``.

    A core keeps nothing recurrent on itself: the state goes in and comes out. A core whose state is empty has no
    memory: what it returns is the change it proposes for each slot.
    """

    token_size: int
    num_slots: int
    slot_size: int

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """The state before the first step, made from ``slots (B, K, D)`` where slots can be the state."""
        ...

    def prepare(self, tokens: Tokens) -> Tokens:
        """Everything that needs no state, for any leading axes; ``unroll`` calls it once for the whole sequence.

        What the parts of prepared tokens hold is the core's own affair: keys and values, gates, or the tokens themselves.
        """
        ...

    def __call__(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: prepared tokens and the state in, slots ``(B, K, D)`` and the next state out."""
        ...

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """What the core chooses at this step, named, every entry ``(B, ...)``; empty if it chooses nothing."""
        ...


def reset_where(starts: Bool[Tensor, " B"], initial: State, state: State) -> State:
    """The state with rows that start an episode replaced by the core's initial state.

    Args:
        starts: ``(B,)``, True where a new episode begins at this step.
        initial: the core's ``initial_state(B)``.
        state: the state carried so far.

    Returns:
        The state to go into this step.
    """
    return {
        name: torch.where(starts.reshape(-1, *(1,) * (leaf.dim() - 1)), initial[name], leaf)
        for name, leaf in state.items()
    }


def unroll(
    core: RecurrentCore,
    tokens: Tokens,
    state: State,
    starts: Bool[Tensor, "T B"] | None = None,
) -> tuple[Float[Tensor, "T B K D"], State]:
    """Run a core over a sequence: the one loop of training, evaluation and policies.

    Args:
        core: the core.
        tokens: unprepared tokens with leading axes ``(T, B)``.
        state: the state before the first step.
        starts: ``(T, B)``, True where an episode begins; the state is reset to the core's initial state before that
            step. None if no episode begins inside.

    Returns:
        The slots of every step ``(T, B, K, D)`` and the last state.
    """
    tokens = core.prepare(tokens)
    B = tokens.features.shape[1]
    initial = core.initial_state(B) if starts is not None else {}
    slots = []
    for t, tokens_t in enumerate(tokens.steps()):
        if starts is not None:
            state = reset_where(starts[t], initial, state)
        slots_t, state = core(tokens_t, state)
        slots.append(slots_t)
    return torch.stack(slots), state
