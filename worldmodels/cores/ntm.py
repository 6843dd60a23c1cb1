"""The Neural Turing Machine: an LSTM controller with a memory it addresses by content and by location.

Graves, Wayne & Danihelka 2014, "Neural Turing Machines", section 3; sizes and first weights as Webb et al. 2021, "Emergent
Symbols through Binding in External Memory", appendix A.3.5, which has it as a baseline.

Departures:
- What is given out: the first paper leaves it open, and in the second the answer is a function of the controller's hidden
  vector, so that a last step without input is needed for what was read last to reach it. Ours is the hidden vector and a
  linear map of what has just been read, as in the same authors' successor (Graves et al. 2016, Differentiable Neural
  Computer), and needs no step without input.
- The first step: the second paper's code reads nothing there, and interpolates with no weights. Ours is like every other
  step; the weights before it are a softmax of learned parameters, uniform at first.
- Sharpening is computed from logarithms, so that no power of a small weight vanishes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import Capabilities, State, Tokens, at_least_one, loop, present
from ..grouped import draw_lstm, lstm_update
from ..repeated import Repeated

_SHIFTS = (-1, 0, 1)


class NTM(nn.Module):
    """An LSTM controller, a memory M of rows, one head that reads and one that writes.

    For the input x, the tokens side by side, and what was read at the step before, r:

    - ``h = LSTM([x, r], h)``;
    - each head emits a key k, a strength beta > 0, a gate g, weights s of shifts by -1, 0, 1, and a sharpness gamma >= 1;
    - ``w_c = softmax(beta cos(k, M))`` (eqs. 5, 6), ``w_g = g w_c + (1 - g) w`` with the head's weights w of the step before
      (eq. 7), ``w~(i) = sum_j w_g(j) s(i - j)`` around the rows (eq. 8), ``w(i) = w~(i)^gamma / sum_j w~(j)^gamma`` (eq. 9);
    - ``r = sum_i w_r(i) M(i)`` (eq. 2), then ``M(i) <- M(i) (1 - w_w(i) e) + w_w(i) a`` with erase and add vectors e, a of
      the writing head (eqs. 3, 4);
    - ``h + W r`` is given out.

    The output of K * D units is given out as K slots of D.

    Args:
        token_size: F.
        num_slots: K.
        slot_size: D; K * D is the size of the controller, 512 in Webb et al.
        num_tokens: N; None for as many as slots.
        memory_rows: of the memory; 10 in Webb et al.
        memory_size: of a row; 256 in Webb et al.
    """

    capabilities = Capabilities(one_vector=True)

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_tokens: int | None = None,
        memory_rows: int = 10,
        memory_size: int = 256,
    ):
        super().__init__()
        at_least_one(slot_size=slot_size, memory_rows=memory_rows, memory_size=memory_size)
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.memory_size = memory_size
        input_size = (num_slots if num_tokens is None else num_tokens) * token_size
        hidden = num_slots * slot_size
        self.input = nn.Linear(input_size, 4 * hidden)
        self.recurrent = nn.Linear(memory_size + hidden, 4 * hidden, bias=False)
        # Of the reading head, then of the writing head: keys, strengths, gates, shifts, sharpness; erase and add vectors.
        self.sizes = [2 * memory_size, 2, 2, 2 * len(_SHIFTS), 2, memory_size, memory_size]
        self.heads = nn.Linear(hidden, sum(self.sizes))
        self.output = nn.Linear(memory_size, hidden, bias=False)
        self.first_memory = nn.Parameter(torch.empty(memory_rows, memory_size))
        self.first_weights = nn.Parameter(torch.zeros(2, memory_rows))  # logits
        whole = torch.empty(4 * hidden, input_size + memory_size + hidden)
        draw_lstm(whole, input_size + memory_size)
        for layer, weight in zip((self.input, self.recurrent), whole.tensor_split([input_size], dim=1), strict=True):
            layer.weight.data.copy_(weight)
        key, strength, gate, shift, sharpness, erase, add = self.heads.weight.detach().split(self.sizes)
        for part, size, gain in (
            (key, memory_size, 5 / 3),
            (gate, 1, 1.0),
            (shift, len(_SHIFTS), 1.0),
            (erase, memory_size, 1.0),
            (add, memory_size, 5 / 3),
        ):
            for layer in part.split(size):
                nn.init.xavier_normal_(layer, gain=gain)
        for part in (strength, sharpness):
            nn.init.kaiming_normal_(part, nonlinearity="relu")
        nn.init.xavier_normal_(self.output.weight)
        nn.init.xavier_normal_(self.first_memory)
        nn.init.zeros_(self.input.bias)
        nn.init.zeros_(self.heads.bias)

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """A controller of zeros that has read zeros, and a learned memory; slots cannot be the state."""
        nothing = self.first_memory.new_zeros(batch_size, self.num_slots * self.slot_size)
        return {
            "hidden": nothing,
            "cell": nothing,
            "read": self.first_memory.new_zeros(batch_size, self.memory_size),
            "memory": self.first_memory.expand(batch_size, -1, -1),
            "weights": torch.softmax(self.first_weights, dim=-1).expand(batch_size, -1, -1),
        }

    def prepare(self, tokens: Tokens) -> Tokens:
        """The tokens' part of the controller's gates, ``(..., 1, 4 K D)``."""
        return Tokens(self.input(present(tokens).flatten(-2))[..., None, :])

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: slots ``(B, K, D)`` and the next state."""
        return self._step(tokens, state, self)

    def sequence(self, tokens: Tokens, sizes: list[int], state: State) -> tuple[Tensor, State]:
        """What ``unroll`` does step by step; equal but for rounding. The weights get their gradient once, see ``Repeated``.

        Args:
            tokens: prepared, pieces laid one step after another (see ``core.Pieces``), ``(sum of sizes, 1, ...)``.
            sizes: how many pieces have a k-th step.
            state: before the first step of each piece.

        Returns:
            Slots ``(sum of sizes, K, D)``, and the state each piece ends in.
        """
        layers = Repeated(recurrent=self.recurrent, heads=self.heads, output=self.output)
        return loop(lambda tokens_t, state_t: self._step(tokens_t, state_t, layers), tokens, sizes, state)

    def _step(self, tokens: Tokens, state: State, layers: "NTM | Repeated") -> tuple[Tensor, State]:
        hidden, cell, weights, erase, add = self._run(tokens, state, layers)
        memory = state["memory"]
        read = (weights[:, :1] @ memory)[:, 0]  # eq. 2
        written = weights[:, 1, :, None]
        memory = torch.addcmul(memory, written, add[:, None] - erase[:, None] * memory)  # eqs. 3 and 4
        slots = (hidden + layers.output(read)).unflatten(1, (self.num_slots, self.slot_size))
        return slots, {"hidden": hidden, "cell": cell, "read": read, "memory": memory, "weights": weights}

    def _run(self, tokens: Tokens, state: State, layers: "NTM | Repeated") -> tuple[Tensor, ...]:
        """The controller, the weights of both heads ``(B, 2, rows)``, and what is erased and added, ``(B, memory_size)``."""
        recurrent = layers.recurrent(torch.cat([state["read"], state["hidden"]], dim=-1))
        hidden, cell = lstm_update(tokens.features.squeeze(1) + recurrent, state["cell"])
        parts = layers.heads(hidden).split(self.sizes, dim=-1)
        key, strength, gate, shift, sharpness = (part.unflatten(-1, (2, -1)) for part in parts[:5])
        memory = state["memory"]
        similarity = F.normalize(torch.tanh(key), dim=-1) @ F.normalize(memory, dim=-1).transpose(1, 2)  # eq. 6
        weights = torch.softmax(F.softplus(strength) * similarity, dim=-1)  # eq. 5
        weights = torch.lerp(state["weights"].to(weights.dtype), weights, torch.sigmoid(gate))  # eq. 7
        shift = torch.softmax(shift, dim=-1)
        moved = torch.stack([weights.roll(by, dims=-1) for by in _SHIFTS], dim=-2)  # (B, 2, shifts, rows)
        weights = (shift[..., None, :] @ moved)[..., 0, :]  # eq. 8
        logs = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
        weights = torch.softmax((1.0 + F.softplus(sharpness)) * logs, dim=-1)  # eq. 9
        return hidden, cell, weights, torch.sigmoid(parts[5]), torch.tanh(parts[6])

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """From which row is read, "memory_read", and to which is written, "memory_write", both ``(B, rows)``, sums 1."""
        weights = self._run(tokens, state, self)[2]
        return {"memory_read": weights[:, 0], "memory_write": weights[:, 1]}
