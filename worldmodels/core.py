"""What a core is: tokens and a state go in, slots and the next state come out.

Axes: ``B`` batch, ``T`` time, ``K`` slots, ``N`` tokens, ``D`` slot size, ``F`` token size. Sequences are time-major.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Tokens(NamedTuple):
    """What a core reads at one step, or, with a leading time axis, over a sequence.

    Args:
        features: ``(B, N, F)``.
        positions: ``(B, N, P)``, for cores that know where a token is; others ignore them.
        mask: ``(B, N)`` bool, False where a token is absent; None if all are present. What absent tokens hold, NaN included,
            changes neither slots nor gradients.
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


class Capabilities(NamedTuple):
    """What can be asked of a core, as the core itself says it: a class attribute of every core.

    Args:
        memory: it reads a sequence step by step, its state going in and coming out. Without: its state is empty, and what it
            returns is the change it proposes for each slot.
        starts_from_slots: slots can be its state: ``initial_state`` begins from those it is given.
        one_vector: its state is one vector, of which slots are equal parts.
        transition: what it returns depends on what is in the slots, so it can be the transition of a world model.
        places: it takes the positions of tokens, and answers at any position, see ``SpatialCore``.
        rules: it applies rules to slots, and ``explain`` says which ("rule"), see ``RuleCore``.
    """

    memory: bool = True
    starts_from_slots: bool = False
    one_vector: bool = False
    transition: bool = True
    places: bool = False
    rules: bool = False


@runtime_checkable
class RecurrentCore(Protocol):
    """The one protocol of all cores; each is an ``nn.Module``.

    A core keeps nothing recurrent on itself: the state goes in and comes out.
    """

    capabilities: Capabilities
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


@runtime_checkable
class SpatialCore(RecurrentCore, Protocol):
    """A core with ``capabilities.places``: its modules have places, and so has what they are asked."""

    position_size: int | None

    def answer(self, slots: Tensor, positions: Tensor) -> Tensor:
        """What the modules together say at positions ``(..., Q, P)``, ``(..., Q, D)``."""
        ...

    def keep(self, modules: list[int]) -> "SpatialCore":
        """The same core with these modules only."""
        ...


@runtime_checkable
class RuleCore(RecurrentCore, Protocol):
    """A core with ``capabilities.rules``: how many there are, and whether they see the whole "token" or its "slot" alone."""

    num_rules: int
    rules_see: str


@runtime_checkable
class LearningCore(RecurrentCore, Protocol):
    """A core with an objective of its own beside the task's, such as that what it writes can be read again."""

    def auxiliary_loss(self, state: State) -> Tensor:
        """What it has cost so far, by the state the core is in, ``(B,)``."""
        ...


@runtime_checkable
class SequenceReader(Protocol):
    """The core's little sister, for tasks that see a whole sequence at once: tokens in, features of the answer out.

    It has no state between steps, so it can be neither a policy's memory nor a world model's transition. Each is an
    ``nn.Module``, built with the size of tokens and the length of sequences, T times N. A core reads in the same way by
    ``read``.
    """

    token_size: int
    feature_size: int

    def __call__(self, tokens: Tokens) -> Tensor:
        """Features ``(B, feature_size)`` of tokens with leading axes ``(T, B)``."""
        ...


def feature_size(reader: "RecurrentCore | SequenceReader") -> int:
    """How many features ``read`` returns: the reader's own, or all slots of a core side by side."""
    return reader.feature_size if isinstance(reader, SequenceReader) else reader.num_slots * reader.slot_size


def read(reader: "RecurrentCore | SequenceReader", tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Read whole sequences, from a core's initial state.

    Args:
        reader: a reader, or a core, which is unrolled.
        tokens: with leading axes ``(T, B)``.

    Returns:
        Features ``(B, feature_size(reader))``, of a core its slots after the last step; and the auxiliary loss, a mean over
        the steps of all sequences, 0 where there is none.
    """
    if isinstance(reader, SequenceReader):
        return reader(tokens), tokens.features.new_zeros(())
    T, B = tokens.features.shape[:2]
    slots, state = unroll(reader, tokens, reader.initial_state(B))
    features = slots[-1].flatten(1)
    loss = reader.auxiliary_loss(state).mean() / T if isinstance(reader, LearningCore) else features.new_zeros(())
    return features, loss


def elements(tokens: Tokens) -> tuple[Tensor, Tensor | None]:
    """All tokens of each sequence side by side, in order: features ``(B, T N, F)``, and which are there, ``(B, T N)``."""
    features = present(tokens).transpose(0, 1).flatten(1, 2)
    return features, None if tokens.mask is None else tokens.mask.transpose(0, 1).flatten(1, 2)


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


class Pieces(NamedTuple):
    """A batch of sequences ``(T, B)`` cut where episodes begin, so that a loop over time needs no resets.

    Pieces are sorted by length, the longest first, and laid one step after another: the first steps of all S pieces, then the
    second steps of those that have one, and so on (as in ``torch.nn.utils.rnn.PackedSequence``).
    """

    sizes: list[int]  # how many pieces have a k-th step; the first entry is S
    source: Tensor  # (T B,), where in the flattened (T, B) each step of a piece comes from
    env: Tensor  # (S,), which sequence a piece was cut from
    fresh: Tensor  # (S,) bool, whether it begins with an episode
    last: Tensor  # (B,), the last piece of each sequence


def cut(starts: Bool[Tensor, "T B"]) -> Pieces:
    """Cut sequences where episodes begin; this looks at ``starts`` on the host, once."""
    given = starts.cpu().numpy()
    T, B = given.shape
    begins = given.copy()
    begins[0] = True
    env, time = np.nonzero(begins.T)
    final = np.append(env[1:] != env[:-1], True)  # the last piece of a sequence
    length = np.where(final, T, np.append(time[1:], T)) - time
    order = np.argsort(-length, kind="stable")
    env, time, length, final = env[order], time[order], length[order], final[order]
    sizes = len(length) - np.searchsorted(length[::-1], np.arange(length[0]), side="right")
    step = np.repeat(np.arange(length[0]), sizes)
    piece = np.arange(len(step)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    last = np.empty(B, dtype=np.int64)
    last[env[final]] = np.flatnonzero(final)
    index, env_, fresh, last_ = (
        torch.from_numpy(part).to(starts.device)
        for part in ((time[piece] + step) * B + env[piece], env, given[time, env], last)
    )
    return Pieces(sizes.tolist(), index, env_, fresh, last_)


def last_steps(sizes: list[int], device: torch.device) -> Tensor:
    """Where the last step of each piece lies among steps laid one after another, ``(S,)``; for cores' ``sequence``."""
    each = np.array(sizes)
    length = len(each) - np.searchsorted(each[::-1], np.arange(each[0]), side="right")  # of each piece
    return torch.from_numpy((np.cumsum(each) - each)[length - 1] + np.arange(each[0])).to(device)


def unroll(
    core: RecurrentCore,
    tokens: Tokens,
    state: State,
    starts: Bool[Tensor, "T B"] | None = None,
) -> tuple[Float[Tensor, "T B K D"], State]:
    """Run a core over a sequence: the one loop of training, evaluation and policies.

    Where episodes begin inside, sequences are cut there and the pieces run side by side; the loop is as long as the longest.
    A core may have a method ``sequence(prepared, sizes, state)`` that runs pieces faster than step by step, see
    ``cores/lstm.py``.

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
    T, B = tokens.features.shape[:2]
    if starts is None or T == 1 or not bool(starts[1:].any()):
        if starts is not None:
            state = reset_where(starts[0], core.initial_state(B), state)
        slots, state = _run(core, _flattened(tokens), [B] * T, state)
        return slots.unflatten(0, (T, B)), state
    pieces = cut(starts)
    given = {name: leaf[pieces.env] for name, leaf in state.items()}
    given = reset_where(pieces.fresh, core.initial_state(len(pieces.env)), given)
    slots, state = _run(core, _flattened(tokens).at(pieces.source), pieces.sizes, given)
    whole = torch.empty_like(slots).index_copy(0, pieces.source, slots)
    return whole.unflatten(0, (T, B)), {name: leaf[pieces.last] for name, leaf in state.items()}


def _flattened(tokens: Tokens) -> Tokens:
    """Tokens ``(T, B, ...)`` as ``(T B, ...)``."""
    positions = None if tokens.positions is None else tokens.positions.flatten(0, 1)
    mask = None if tokens.mask is None else tokens.mask.flatten(0, 1)
    return Tokens(tokens.features.flatten(0, 1), positions, mask)


def _run(core: RecurrentCore, tokens: Tokens, sizes: list[int], state: State) -> tuple[Tensor, State]:
    """Run pieces laid one step after another, ``(sum of sizes, ...)``: slots in this order, and the state each ends in."""
    sequence = getattr(core, "sequence", None)
    device = tokens.features.device.type
    mixed = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)  # which only single steps sort out
    if sequence is not None and len(sizes) > 1 and not mixed:
        return sequence(tokens, sizes, state)
    return loop(core, tokens, sizes, state)


def loop(
    step: Callable[[Tokens, State], tuple[Tensor, State]], tokens: Tokens, sizes: list[int], state: State
) -> tuple[Tensor, State]:
    """Take pieces laid one step after another through a core's step.

    Args:
        step: a core, or what its ``sequence`` puts in its place.
        tokens: prepared, ``(sum of sizes, ...)``.
        sizes: how many pieces have a k-th step.
        state: before the first step of each piece.

    Returns:
        Slots ``(sum of sizes, K, D)``, and the state each piece ends in.
    """
    parts = [[None] * len(sizes) if part is None else part.split(sizes) for part in tokens]
    slots, ended = [], []
    for t, tokens_t in enumerate(zip(*parts, strict=True)):
        slots_t, state = step(Tokens(*tokens_t), state)
        slots.append(slots_t)
        going_on = sizes[t + 1] if t + 1 < len(sizes) else 0
        if going_on < sizes[t]:
            parted = {name: leaf.split([going_on, sizes[t] - going_on]) for name, leaf in state.items()}
            ended.append({name: over for name, (_, over) in parted.items()})
            state = {name: on for name, (on, _) in parted.items()}
    return torch.cat(slots), {name: torch.cat([part[name] for part in reversed(ended)]) for name in state}
