"""The recurrent baseline of most papers: one LSTM for all slots at once (Hochreiter & Schmidhuber 1997, as ``nn.LSTM``)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import Capabilities, State, Tokens, last_steps, present
from ..grouped import lstm_update


class _Sequence(torch.autograd.Function):
    """All steps of the LSTM, and all of them back again, as plain products on preallocated tensors.

    Going back through single steps, a gradient as large as the recurrent weights is made and added at every step; here it
    is one product at the end. The elementwise factors of the gradients need no recurrence and are made for all steps at once.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor, sizes: list[int]
    ) -> tuple[Tensor, Tensor]:
        N, D, S = len(gates), weight.shape[1], sizes[0]
        gates = gates.clone()
        hiddens, cells = gates.new_empty(2, S + N, D).unbind(0)  # the first S rows are before the first step
        hiddens[:S], cells[:S] = hidden, cell
        previous, start = 0, 0
        for size in sizes:
            before, after = slice(previous, previous + size), slice(S + start, S + start + size)
            now = gates[start : start + size].addmm_(hiddens[before], weight.t())
            i, f, o, g = now.split(D, dim=-1)
            now[:, : 3 * D].sigmoid_()
            g.tanh_()
            new = torch.mul(f, cells[before], out=cells[after]).addcmul_(i, g)
            torch.mul(o, torch.tanh(new), out=hiddens[after])
            previous, start = S + start, start + size
        ctx.save_for_backward(gates, weight, hiddens, cells)
        ctx.sizes = sizes
        return hiddens[S:], cells[S:]

    @staticmethod
    def backward(ctx: Any, grad_after: Tensor, grad_cell_after: Tensor) -> Any:
        gates, weight, hiddens, cells = ctx.saved_tensors
        N, D = len(gates), weight.shape[1]
        before, cell_before, cell_after = _before(hiddens, ctx.sizes), _before(cells, ctx.sizes), cells[ctx.sizes[0] :]
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


def _before(after: Tensor, sizes: list[int]) -> Tensor:
    """What each step began with, ``(N, D)``, of what there was before the first step and after each, ``(S + N, D)``."""
    S = sizes[0]
    if sizes[-1] == S:
        return after[:-S]
    starts = [0]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size)
    previous = [0, *(S + start for start in starts[:-1])]
    return torch.cat([after[at : at + size] for at, size in zip(previous, sizes, strict=True)])


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

    capabilities = Capabilities(one_vector=True)

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
        """The tokens side by side, ``(..., 1, N F)``; torch's own kernel multiplies them with the weights itself."""
        return Tokens(present(tokens).flatten(-2)[..., None, :])

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: the hidden vector as slots, ``(B, K, D)``, and the next state."""
        gates = self.input(tokens.features.squeeze(1)) + F.linear(state["hidden"], self.recurrent.weight)
        hidden, cell = lstm_update(gates, state["cell"])
        return hidden.unflatten(1, (self.num_slots, self.slot_size)), {"hidden": hidden, "cell": cell}

    def sequence(self, tokens: Tokens, sizes: list[int], state: State) -> tuple[Tensor, State]:
        """What ``unroll`` does step by step, for all steps at once; equal but for rounding.

        Args:
            tokens: prepared, pieces laid one step after another (see ``core.Pieces``), ``(sum of sizes, 1, N F)``.
            sizes: how many pieces have a k-th step.
            state: before the first step of each piece.

        Returns:
            Slots ``(sum of sizes, K, D)``, and the state each piece ends in.
        """
        inputs = tokens.features.squeeze(1)
        if sizes[0] == sizes[-1] and inputs.device.type == "cpu":  # cuDNN warns of weights that are not its own
            return self._whole(inputs.unflatten(0, (len(sizes), sizes[0])), state)
        gates = self.input(inputs)
        hidden, cell = _Sequence.apply(gates, self.recurrent.weight, state["hidden"], state["cell"], sizes)
        ends = last_steps(sizes, gates.device)
        slots = hidden.unflatten(-1, (self.num_slots, self.slot_size))
        return slots, {"hidden": hidden[ends], "cell": cell[ends]}

    def _whole(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Pieces of equal length ``(T, S, N F)`` by torch's own kernel, which has the gates in the order i, f, g, o."""
        order = torch.arange(4 * state["cell"].shape[1], device=inputs.device).view(4, -1)[[0, 1, 3, 2]].flatten()
        weights = [part[order] for part in (self.input.weight, self.recurrent.weight, self.input.bias)]
        weights.append(torch.zeros_like(weights[-1]))
        start = (state["hidden"][None].contiguous(), state["cell"][None].contiguous())
        hidden, last, cell = torch._VF.lstm(inputs, start, weights, True, 1, 0.0, True, False, False)
        slots = hidden.flatten(0, 1).unflatten(-1, (self.num_slots, self.slot_size))
        return slots, {"hidden": last[0], "cell": cell[0]}

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Nothing: it chooses nothing."""
        return {}
