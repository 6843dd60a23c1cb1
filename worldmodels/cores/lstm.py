"""The recurrent baseline of most papers: one LSTM for all slots at once (Hochreiter & Schmidhuber 1997, as ``nn.LSTM``)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import State, Tokens, last_steps, present
from ..grouped import lstm_update


class _Sequence(torch.autograd.Function):
    """All steps of the LSTM, and all of them back again, as plain products on preallocated tensors.

    Going back through single steps, a gradient as large as the recurrent weights is made and added at every step; here it
    is one product at the end. The elementwise factors of the gradients need no recurrence and are made for all steps at once.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, gates: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor, sizes: list[int]
    ) -> tuple[Tensor, Tensor]:
        N, D = len(gates), weight.shape[1]
        gates = gates.clone()
        before, cell_before, after, cell_after = gates.new_empty(4, N, D).unbind(0)
        start = 0
        for size in sizes:
            at = slice(start, start + size)
            before[at], cell_before[at] = hidden[:size], cell[:size]
            now = gates[at].addmm_(before[at], weight.t())
            i, f, o, g = now.split(D, dim=-1)
            now[:, : 3 * D].sigmoid_()
            g.tanh_()
            cell = torch.addcmul(f * cell_before[at], i, g, out=cell_after[at])
            hidden = torch.mul(o, torch.tanh(cell), out=after[at])
            start += size
        ctx.save_for_backward(gates, weight, before, cell_before, cell_after)
        ctx.sizes = sizes
        return after, cell_after

    @staticmethod
    def backward(ctx: Any, grad_after: Tensor, grad_cell_after: Tensor) -> Any:  # type: ignore[override]
        gates, weight, before, cell_before, cell_after = ctx.saved_tensors
        N, D = before.shape
        i, f, o, g = gates.split(D, dim=-1)
        squashed = torch.tanh(cell_after)
        through = o * (1 - squashed.square())  # from h' to c'
        factors = torch.stack([g * i * (1 - i), cell_before * f * (1 - f), squashed * o * (1 - o), i * (1 - g * g)], 1)
        grads = torch.empty_like(factors)
        grad_hidden, grad_cell = before.new_zeros(2, ctx.sizes[0], D).unbind(0)
        end = N
        for size in reversed(ctx.sizes):
            at = slice(end - size, end)
            hidden = grad_hidden[:size].add_(grad_after[at])
            cell = grad_cell[:size].add_(grad_cell_after[at]).addcmul_(hidden, through[at])
            torch.mul(factors[at], cell[:, None], out=grads[at])
            torch.mul(factors[at, 2], hidden, out=grads[at, 2])
            torch.mm(grads[at].view(size, 4 * D), weight, out=hidden)
            cell.mul_(f[at])
            end -= size
        flat = grads.view(N, 4 * D)
        return flat, flat.t() @ before, grad_hidden, grad_cell, None


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

    def sequence(self, tokens: Tokens, sizes: list[int], state: State) -> tuple[Tensor, State]:
        """What ``unroll`` does step by step, for all steps at once; equal but for rounding.

        Args:
            tokens: prepared, pieces laid one step after another (see ``core.Pieces``), ``(sum of sizes, 1, 4 K D)``.
            sizes: how many pieces have a k-th step.
            state: before the first step of each piece.

        Returns:
            Slots ``(sum of sizes, K, D)``, and the state each piece ends in.
        """
        gates = tokens.features.squeeze(1)
        hidden, cell = _Sequence.apply(gates, self.recurrent.weight, state["hidden"], state["cell"], sizes)
        ends = last_steps(sizes, gates.device)
        slots = hidden.unflatten(-1, (self.num_slots, self.slot_size))
        return slots, {"hidden": hidden[ends], "cell": cell[ends]}

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Nothing: it chooses nothing."""
        return {}
