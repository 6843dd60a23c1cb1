"""Recurrent Independent Mechanisms: modules with weights of their own that compete for input and talk sparsely.

Goyal et al. 2019, "Recurrent Independent Mechanisms", section 2 (equations in the order of that section).

Departures:
- The paper adds what a module hears to its state; the authors' code passes it through a gate, ``s(W_g o) * tanh(W_f o)``,
  before adding; we follow the code (``gated=True``), because that is what their results were made with.
- The paper names no sizes for values; the authors' code gives each module values four times its size; so do we.
- The authors' code builds the modules as one dense LSTM whose other weights are zeroed at each forward pass; ours hold only
  the blocks, one batched matmul for all modules.
- The authors' code drops 10 % of both attentions' results in training; we leave that out unless ``dropout`` is set.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import Communication, join_heads, most, over_heads, scores, split_heads, with_null
from ..core import Capabilities, State, Tokens, at_least_one, present
from ..grouped import GroupedGRUCell, GroupedLinear, GroupedLSTMCell, gru_update, lstm_update


class RIMs(nn.Module):
    """K modules; the few that attend most to the input update their state, the others keep it.

    1. Input attention: ``A_k = softmax(h_k W^q_k (X W^e)^T / sqrt(d_e)) X W^v``, X the tokens and a null token of zeros.
    2. Selection: the ``num_active`` modules that give least attention to the null token are active.
    3. Dynamics: ``h~_k = LSTM_k(A_k, h_k)`` for active modules, ``h~_k = h_k`` for the others.
    4. Communication: ``h_k = h~_k + gate(softmax(Q_k K^T / sqrt(d)) V)`` for active modules, with Q, K, V from h~ by
       weights of each module's own. No gradient goes into inactive modules through their keys and values.

    Args:
        token_size: F.
        num_slots: K, the number of modules.
        slot_size: D of each module.
        num_active: how many modules are active at a step; None for two thirds (4 of 6 in the authors' code).
        cell: "lstm" (the paper) or "gru".
        num_heads: of the input attention.
        key_size: of the input attention; 64 in the authors' code.
        value_size: of each head of the input attention; None for ``4 * slot_size``.
        comm_heads: heads of the communication.
        comm_key_size: of each of its heads.
        comm_value_size: of each of its heads.
        gated: whether what is heard is gated, see above.
        dropout: of what is read and heard, in training; 0.1 in the authors' code.
        num_tokens: N, if it is known to be 1: the same function, faster, because what the modules' cells make of a single
            token's value is computed for the whole sequence at once.
    """

    capabilities = Capabilities(starts_from_slots=True)

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_active: int | None = None,
        cell: str = "lstm",
        num_heads: int = 1,
        key_size: int = 64,
        value_size: int | None = None,
        comm_heads: int = 4,
        comm_key_size: int = 16,
        comm_value_size: int = 16,
        gated: bool = True,
        dropout: float = 0.0,
        num_tokens: int | None = None,
    ):
        super().__init__()
        num_active = max(1, round(num_slots * 2 / 3)) if num_active is None else num_active
        if not 1 <= num_active <= num_slots:
            raise ValueError(
                f"num_active is {num_active}; expected 1 to {num_slots}, the number of modules (num_slots)"
            )
        if cell not in ("lstm", "gru"):
            raise ValueError(f"cell is {cell!r}; expected 'lstm' or 'gru'")
        value_size = 4 * slot_size if value_size is None else value_size
        at_least_one(slot_size=slot_size, num_heads=num_heads, key_size=key_size, value_size=value_size)
        at_least_one(comm_heads=comm_heads, comm_key_size=comm_key_size, comm_value_size=comm_value_size)
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.num_active = num_active
        self.num_heads = num_heads
        self.sizes = [num_heads * key_size, num_heads * value_size]
        self.key_value = nn.Linear(token_size, sum(self.sizes), bias=False)  # W^e and W^v
        self.query = GroupedLinear(num_slots, slot_size, num_heads * key_size, bias=False)  # W^q_k
        make_cell = GroupedLSTMCell if cell == "lstm" else GroupedGRUCell
        self.cell = make_cell(num_slots, num_heads * value_size, slot_size)
        self.communication = Communication(
            slot_size,
            comm_heads,
            comm_key_size,
            comm_value_size,
            gated=gated,
            linear=partial(GroupedLinear, num_slots, bias=False),
        )
        self.dropout = nn.Dropout(dropout)
        self.projects_values = num_tokens == 1 and num_heads == 1 and dropout == 0.0
        self.first_hidden = nn.Parameter(torch.randn(num_slots, slot_size) * 0.1)
        if cell == "lstm":
            self.first_cell = nn.Parameter(torch.zeros(num_slots, slot_size))

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """Learned first states, one for each module; given slots are the hidden states."""
        hidden = self.first_hidden.expand(batch_size, -1, -1) if slots is None else slots
        if isinstance(self.cell, GroupedGRUCell):
            return {"hidden": hidden}
        return {"hidden": hidden, "cell": self.first_cell.expand(batch_size, -1, -1)}

    def prepare(self, tokens: Tokens) -> Tokens:
        """Values of the tokens as features ``(..., N, values)``, and their keys as positions ``(..., N, keys)``.

        With ``num_tokens=1`` the features are what each module's cell makes of the value, ``(..., K, gates)``.
        """
        features = present(tokens)
        if not self.projects_values:
            keys, values = self.key_value(features).split(self.sizes, dim=-1)
            return Tokens(values, keys, tokens.mask)
        to_key, to_value = self.key_value.weight.split(self.sizes)
        to_gates = self.cell.input.weight.transpose(0, 1).flatten(1)  # (values, K * gates)
        gates = torch.linalg.multi_dot([features.flatten(0, -2), to_value.T, to_gates])  # in the cheaper order
        values = gates.unflatten(-1, (self.num_slots, -1)).unflatten(0, features.shape[:-2])
        return Tokens(values, F.linear(features, to_key), tokens.mask)

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: the modules' hidden states, ``(B, K, D)``, and the next state."""
        slots, state, _ = self._run(tokens, state)
        return slots, state

    def _run(self, tokens: Tokens, state: State) -> tuple[Tensor, State, dict[str, Tensor]]:
        hidden = state["hidden"]
        values, keys, mask = tokens
        assert keys is not None  # from prepare
        query = split_heads(self.query(hidden), self.num_heads)
        weights = with_null(scores(query, split_heads(keys, self.num_heads)), mask)  # (B, H, K, N)
        if self.projects_values:
            assert self.cell.input.bias is not None
            inputs = self.cell.input.bias + weights.squeeze(1) * values
        else:
            inputs = self.cell.input(self.dropout(join_heads(weights @ split_heads(values, self.num_heads))))
        active = most(weights.sum((1, 3)), self.num_active)  # least attention to the null token
        updates = active[..., None]
        if isinstance(self.cell, GroupedGRUCell):
            state = {}
            updated = gru_update(inputs, self.cell.recurrent(hidden), hidden)
        else:
            updated, cell = lstm_update(inputs + self.cell.recurrent(hidden), state["cell"])
            state = {"cell": torch.where(updates, cell, state["cell"])}
        updated = torch.where(updates, updated, hidden)
        heard, listens = self.communication(updated, torch.where(updates, updated, hidden.detach()))
        slots = torch.where(updates, updated + self.dropout(heard), hidden)
        explained = {"active": active, "input_attention": weights, "communication": listens}
        return slots, {"hidden": slots} | state, explained

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """The "active" modules ``(B, K)``, their "input_attention" ``(B, K, N)`` and "communication" ``(B, K, K)``.

        Attention is the mean over heads. What the input attention lacks to 1 went to the null token.
        """
        return over_heads(self._run(tokens, state)[2])
