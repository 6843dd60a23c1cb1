"""The recurrent baseline without structure: one GRU for all slots at once (Cho et al. 2014, as ``nn.GRU``)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import State, Tokens, present
from ..grouped import gru_update


class GRU(nn.Module):
    """A GRU on the flattened tokens, whose hidden vector of K * D units is given out as K slots of D.

    ``r = s(W_r x + U_r h)``, ``u = s(W_u x + U_u h)``, ``n = tanh(W_n x + r * U_n h)``, ``h' = (1 - u) n + u h``.

    The weights are full, so a "slot" of this core means whatever training makes of it. Its first state is learned.

    Args:
        token_size: F.
        num_slots: K.
        slot_size: D of this core; as a world model's transition it may differ from the encoder's.
        num_tokens: N; None for as many as slots.
    """

    def __init__(self, token_size: int, num_slots: int, slot_size: int, *, num_tokens: int | None = None):
        super().__init__()
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        hidden = num_slots * slot_size
        cell = nn.GRUCell((num_tokens or num_slots) * token_size, hidden)
        self.input_weight, self.input_bias = cell.weight_ih, cell.bias_ih
        self.hidden_weight, self.hidden_bias = cell.weight_hh, cell.bias_hh
        self.first = nn.Parameter(torch.zeros(hidden))

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """The learned first state; encoded slots cannot be the state of a GRU."""
        return {"hidden": torch.tanh(self.first).expand(batch_size, -1)}

    def prepare(self, tokens: Tokens) -> Tokens:
        """The input's part of the gates for every step, as features ``(..., 1, 3 K D)``."""
        return Tokens(F.linear(present(tokens).flatten(-2), self.input_weight, self.input_bias)[..., None, :])

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: the hidden vector as slots, ``(B, K, D)``, and the next state."""
        hidden = state["hidden"]
        recurrent = F.linear(hidden, self.hidden_weight, self.hidden_bias)
        hidden = gru_update(tokens.features.squeeze(1), recurrent, hidden)
        return hidden.unflatten(1, (self.num_slots, self.slot_size)), {"hidden": hidden}

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Nothing: it chooses nothing."""
        return {}
