"""A structured world model: an encoder from observations to slots, and a core that predicts how they change."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..attention import scores
from ..core import RecurrentCore, State, Tokens, unroll
from ..encoders import Encoder
from ..errors import UserError

ACTION_TO = ("slot", "copy", "full")
MEMORY = ("none", "carry")


def attached_size(action: Mapping[str, Any], action_to: str, num_slots: int, slot_ids: bool = False) -> int:
    """How many features each slot's token gets besides the slot.

    Args:
        action: {"kind": "discrete" or "box", "sizes": [...]} and "per_object" where actions belong to objects.
        action_to: "slot", "copy" or "full", see ``attach``.
        num_slots: K.
        slot_ids: see ``attach``.

    Raises:
        UserError: the actions do not divide among the slots.
    """
    if action_to not in ACTION_TO:
        raise UserError(f"action_to is {action_to!r}; expected one of {list(ACTION_TO)}")
    total = sum(action["sizes"])
    ids = num_slots if slot_ids else 0
    if action_to != "slot":
        return total + ids
    if "per_object" not in action:
        raise UserError("action_to=slot needs actions per object, which this environment does not have; use copy")
    if total != action["per_object"] * num_slots:
        raise UserError(
            f"action_to=slot gives {action['per_object']} actions to each of {num_slots} slots, but the environment has "
            f"{total}; set encoder.num_slots={total // action['per_object']}, or action_to=full"
        )
    return int(action["per_object"]) + ids


def attach(slots: Tensor, actions: Tensor, action: Mapping[str, Any], action_to: str, slot_ids: bool = False) -> Tensor:
    """Slots with the action attached: a world model's tokens.

    - "slot": the acted object's slot gets the one-hot of what is done to it, the others zeros (C-SWM's block worlds).
    - "copy": every slot gets the whole action (C-SWM's Atari); "full" is the same where the action names an object (NPS).

    Args:
        slots: ``(..., K, D)``.
        actions: as the environment takes them: ``(...)`` or ``(..., n)`` integers, or ``(..., A)`` floats.
        action: the environment's actions.
        action_to: see above.
        slot_ids: attach the slot's number too, one-hot.

    Returns:
        ``(..., K, D + attached_size)``.
    """
    K = slots.shape[-2]
    lead = slots.shape[:-2]
    if action["kind"] == "box":
        vector = actions.reshape(*lead, -1).to(slots.dtype)
    else:
        parts = actions.reshape(*lead, len(action["sizes"])).unbind(-1)
        one_hots = [F.one_hot(part.long(), size) for part, size in zip(parts, action["sizes"], strict=True)]
        vector = torch.cat(one_hots, dim=-1).to(slots.dtype)
    if action_to == "slot":
        attached = vector.unflatten(-1, (K, action["per_object"]))
    else:
        attached = vector[..., None, :].expand(*lead, K, vector.shape[-1])
    tokens = [slots, attached]
    if slot_ids:
        tokens.append(torch.eye(K, dtype=slots.dtype, device=slots.device).expand(*lead, K, K))
    return torch.cat(tokens, dim=-1)


class SlotReadout(nn.Module):
    """The change of every encoder slot, read from a core's slots.

    Where the core has as many slots and they are aligned, by one linear layer shared by all slots; where it has another
    number, by one layer of attention queried by the slots: ``delta_k = W softmax((Q z_k) (P h)^T / sqrt(d)) h``.

    Args:
        slot_size: D of the encoder's slots.
        core_slot_size: of the core's slots.
        aligned: whether slot k of the core belongs to slot k of the encoder.
    """

    def __init__(self, slot_size: int, core_slot_size: int, *, aligned: bool):
        super().__init__()
        self.aligned = aligned
        self.output = nn.Linear(core_slot_size, slot_size)
        if not aligned:
            self.query = nn.Linear(slot_size, core_slot_size, bias=False)
            self.key = nn.Linear(core_slot_size, core_slot_size, bias=False)

    def forward(self, slots: Tensor, core_slots: Tensor) -> Tensor:
        """The change ``(..., K, D)`` of slots ``(..., K, D)``, from the core's slots ``(..., K', D')``."""
        if self.aligned:
            return self.output(core_slots)
        weights = torch.softmax(scores(self.query(slots), self.key(core_slots)), dim=-1)
        return self.output(weights @ core_slots)


class WorldModel(nn.Module):
    """``z_t = encoder(o_t)``; ``z'_{t+1} = z_t + delta``, with delta from the core's slots.

    A core without memory returns delta itself; a core with memory is read by a ``SlotReadout``, and where slots can be its
    state, it starts from z_0, brought to the size of its slots by one linear layer if sizes differ.

    ``memory`` says what a core's state is worth. "none", the setting of the papers: the state is made afresh at every
    step, from z_t where slots can be the state, so a prediction depends on the present slots alone. "carry": the state is
    carried along the episode.

    Args:
        encoder: observations to slots, with ``num_slots`` and ``slot_size``.
        core: a ``RecurrentCore``; without memory, of as many slots of the same size.
        action: the environment's actions, as a data set's manifest has them.
        action_to: how the action reaches the slots, see ``attach``.
        slot_ids: attach each slot's number to it, one-hot. Where slot k always holds object k, what never changes of an
            object, such as its weight, need not be in its slot; a core that treats all slots alike then has to be told which
            is which.
        memory: "none" or "carry".
    """

    def __init__(
        self,
        encoder: Encoder,
        core: RecurrentCore,
        *,
        action: Mapping[str, Any],
        action_to: str,
        slot_ids: bool = False,
        memory: str = "none",
    ):
        super().__init__()
        self.encoder: Encoder
        self.core: RecurrentCore
        if memory not in MEMORY:
            raise UserError(f"memory is {memory!r}; expected one of {list(MEMORY)}")
        if not core.capabilities.transition:
            raise UserError(
                f"{type(core).__name__} cannot be a world model's transition, because what it returns does not depend on "
                "what is in the slots; choose another core, such as core=scoff"
            )
        self.num_slots = encoder.num_slots
        self.slot_size = encoder.slot_size
        self.action = dict(action)
        self.action_to = action_to
        self.slot_ids = slot_ids
        self.memory = memory
        token_size = self.slot_size + attached_size(action, action_to, self.num_slots, slot_ids)
        if core.token_size != token_size:
            raise UserError(f"the core takes tokens of {core.token_size}; this world model has tokens of {token_size}")
        self.encoder = encoder
        self.core = core
        self.has_memory = core.capabilities.memory
        aligned = core.num_slots == self.num_slots
        if not self.has_memory and (core.slot_size != self.slot_size or not aligned):
            raise UserError(
                f"the core has {core.num_slots} slots of {core.slot_size}, but a core without memory changes the encoder's "
                f"{self.num_slots} slots of {self.slot_size}; leave core.num_slots and core.slot_size out"
            )
        if not self.has_memory and memory == "carry":
            raise UserError(f"memory=carry needs a core with a state; {type(core).__name__} has none")
        self.starts_from_slots = aligned and core.capabilities.starts_from_slots
        self.lift: nn.Module = nn.Identity()
        if self.starts_from_slots and core.slot_size != self.slot_size:
            self.lift = nn.Linear(self.slot_size, core.slot_size)
        if self.has_memory:
            self.readout = SlotReadout(self.slot_size, core.slot_size, aligned=aligned)

    def encode(self, observations: Tensor) -> Tensor:
        """Slots of observations with any leading axes, ``(..., K, D)``."""
        shape = self.encoder.observation_shape
        lead = observations.shape[: observations.dim() - len(shape)]
        if tuple(observations.shape[len(lead) :]) != tuple(shape):
            raise UserError(f"observations have shape {tuple(observations.shape)}; the encoder takes (..., {shape})")
        return self.encoder(observations.reshape(-1, *shape)).reshape(*lead, self.num_slots, self.slot_size)

    def tokens(self, slots: Float[Tensor, "*B K D"], actions: Tensor) -> Tokens:
        """What the core is given: slots with what is attached to them."""
        return Tokens(attach(slots, actions, self.action, self.action_to, self.slot_ids))

    def initial_state(self, slots: Float[Tensor, "B K D"]) -> State:
        """The state before the first step of an episode that begins with these slots."""
        return self.core.initial_state(len(slots), self.lift(slots) if self.starts_from_slots else None)

    def _changed(self, slots: Tensor, core_slots: Tensor) -> Tensor:
        """The predicted slots, from what the core returned."""
        return slots + (self.readout(slots, core_slots) if self.has_memory else core_slots)

    def step(
        self, slots: Float[Tensor, "B K D"], actions: Tensor, state: State | None = None
    ) -> tuple[Float[Tensor, "B K D"], State]:
        """One step in latent space.

        Args:
            slots: z_t.
            actions: a_t, as the environment takes them, ``(B, ...)``.
            state: what the last step returned; None, and always with memory "none", a fresh one.

        Returns:
            Predicted next slots and the state after the step.
        """
        if state is None or self.memory == "none":
            state = self.initial_state(slots)
        tokens = self.core.prepare(self.tokens(slots, actions))
        core_slots, state = self.core(tokens, state)
        return self._changed(slots, core_slots), state

    def predict(
        self, slots: Float[Tensor, "T B K D"], actions: Tensor, state: State | None = None
    ) -> tuple[Float[Tensor, "T B K D"], State]:
        """The next slots of every step of a sequence, each from the true slots of that step.

        Args:
            slots: z_0 ... z_{T-1}.
            actions: ``(T, B, ...)``.
            state: with memory "carry", the state before the first step; None for a fresh one.

        Returns:
            Predictions of z_1 ... z_T and the last state.
        """
        T, B = slots.shape[:2]
        if self.memory == "none":
            pred_slots, state = self.step(slots.flatten(0, 1), actions.flatten(0, 1))
            return pred_slots.unflatten(0, (T, B)), state
        core_slots, state = unroll(
            self.core, self.tokens(slots, actions), self.initial_state(slots[0]) if state is None else state
        )
        return self._changed(slots, core_slots), state

    def rollout(
        self, slots: Float[Tensor, "B K D"], actions: Tensor, state: State | None = None
    ) -> Float[Tensor, "T B K D"]:
        """Imagine: each step from the predicted slots of the step before.

        Args:
            slots: z_0.
            actions: ``(T, B, ...)``.
            state: the state before the first step; None for a fresh one.

        Returns:
            Predictions of z_1 ... z_T.
        """
        imagined = []
        for action in actions:
            slots, state = self.step(slots, action, state)
            imagined.append(slots)
        return torch.stack(imagined)

    def forward(self, observations: Tensor, actions: Tensor, imagine: bool = False) -> tuple[Tensor, Tensor]:
        """What training needs: encoded slots ``(T + 1, B, K, D)`` and predictions of the last T of them.

        Args:
            observations: ``(T + 1, B, ...)``.
            actions: ``(T, B, ...)``.
            imagine: predict each step from the prediction before it instead of from the encoded slots.
        """
        slots = self.encode(observations)
        if imagine:
            return slots, self.rollout(slots[0], actions)
        return slots, self.predict(slots[:-1], actions)[0]
