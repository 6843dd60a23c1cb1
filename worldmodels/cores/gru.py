"""The recurrent baseline without structure: one GRU for all slots at once (Cho et al. 2014, as ``nn.GRU``)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import Capabilities, State, Tokens, last_steps, present
from ..grouped import gru_update


class _Sequence(torch.autograd.Function):
    """All steps of the GRU, and all of them back again; for why see ``cores/lstm.py``."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, hidden: Tensor, sizes: list[int]) -> Tensor:
        N, D = len(inputs), weight.shape[1]
        before, after = inputs.new_empty(2, N, D).unbind(0)
        recurrent = torch.empty_like(inputs)
        start = 0
        for size in sizes:
            at = slice(start, start + size)
            before[at] = hidden[:size]
            torch.addmm(bias, before[at], weight.t(), out=recurrent[at])
            after[at] = hidden = gru_update(inputs[at], recurrent[at], before[at])
            start += size
        ctx.save_for_backward(inputs, recurrent, weight, before)
        ctx.sizes = sizes
        return after

    @staticmethod
    def backward(ctx: Any, grad_after: Tensor) -> Any:
        inputs, recurrent, weight, before = ctx.saved_tensors
        N, D = before.shape
        r, u = torch.sigmoid(inputs[:, : 2 * D] + recurrent[:, : 2 * D]).split(D, dim=-1)
        n = torch.tanh(inputs[:, 2 * D :] + r * recurrent[:, 2 * D :])
        to_n = (1 - u) * (1 - n * n)  # from h' to what the tanh is taken of
        to_r = to_n * recurrent[:, 2 * D :] * r * (1 - r)
        factors = torch.stack([to_r, (before - n) * u * (1 - u), to_n * r], 1)
        grads, grads_after = torch.empty_like(factors), torch.empty_like(grad_after)
        grad = before.new_zeros(ctx.sizes[0], D)
        end = N
        for size in reversed(ctx.sizes):
            at = slice(end - size, end)
            now = torch.add(grad[:size], grad_after[at], out=grads_after[at])
            torch.mul(factors[at], now[:, None], out=grads[at])
            torch.addmm(now * u[at], grads[at].view(size, 3 * D), weight, out=grad[:size])
            end -= size
        flat = grads.view(N, 3 * D)
        grad_inputs = torch.cat([grads[:, :2].flatten(1), grads_after * to_n], dim=-1)
        return grad_inputs, flat.t() @ before, flat.sum(0), grad, None


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

    capabilities = Capabilities(one_vector=True)

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

    def sequence(self, tokens: Tokens, sizes: list[int], state: State) -> tuple[Tensor, State]:
        """What ``unroll`` does step by step, for all steps at once, see ``cores/lstm.py``; equal but for rounding."""
        inputs = tokens.features.squeeze(1)
        hidden = _Sequence.apply(inputs, self.hidden_weight, self.hidden_bias, state["hidden"], sizes)
        slots = hidden.unflatten(-1, (self.num_slots, self.slot_size))
        return slots, {"hidden": hidden[last_steps(sizes, inputs.device)]}

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Nothing: it chooses nothing."""
        return {}
