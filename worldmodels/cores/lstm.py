"""The recurrent baseline of most papers: one LSTM for all slots at once (Hochreiter & Schmidhuber 1997, as ``nn.LSTM``)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import State, Tokens, present
from ..grouped import lstm_update


class LSTM(nn.Module):
    """An LSTM on the flattened tokens, whose hidden vector of K * D units is given out as K slots of D.

    ``i, f, o = s(W x + U h + b)``, ``g = tanh(W_g x + U_g h + b_g)``, ``c' = f c + i g``, ``h' = o tanh(c')``.

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
        bound = 1.0 / math.sqrt(hidden)
        self.input = nn.Linear((num_tokens or num_slots) * token_size, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)
        for parameter in (*self.input.parameters(), *self.recurrent.parameters()):
            nn.init.uniform_(parameter, -bound, bound)
        self.first_hidden = nn.Parameter(torch.zeros(hidden))
        self.first_cell = nn.Parameter(torch.zeros(hidden))

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """The learned first state; encoded slots cannot be the state of an LSTM."""
        return {
            "hidden": torch.tanh(self.first_hidden).expand(batch_size, -1),
            "cell": self.first_cell.expand(batch_size, -1),
        }

    def prepare(self, tokens: Tokens) -> Tokens:
        """The input's part of the gates for every step, as features ``(..., 1, 4 K D)``."""
        return Tokens(self.input(present(tokens).flatten(-2))[..., None, :])

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: the hidden vector as slots, ``(B, K, D)``, and the next state."""
        gates = tokens.features.squeeze(1) + F.linear(state["hidden"], self.recurrent.weight)
        hidden, cell = lstm_update(gates, state["cell"])
        return hidden.unflatten(1, (self.num_slots, self.slot_size)), {"hidden": hidden, "cell": cell}

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Nothing: it chooses nothing."""
        return {}
