"""Metalearned Neural Memory: an LSTM controller whose memory is the weights of a small network that it rewrites as it goes.

Munkhdalai, Sordoni, Wang & Trischler 2019, "Metalearned Neural Memory", section 3, in the variant MNM-p, which writes by a
learned local rule instead of a gradient; sizes as Webb et al. 2021, "Emergent Symbols through Binding in External Memory",
appendix A.3, whose code has it from the authors.

Departures:
- The objective of recall, that what was just written can be read again, is added to a task's loss by tasks that ask for
  ``auxiliary_loss``, as a mean over the steps, as in the authors' code; elsewhere, as in a policy, the core learns from the
  task alone, since writing is differentiable.
- Webb et al. add a last step without input, so that what was read last reaches the answer. What this core gives out is made
  of the controller and what has just been read already, as the authors have it, so ours takes no such step.
- The network's first weights are drawn once and not trained, as in the code; ours are kept with the other weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core import Capabilities, State, Tokens, at_least_one, present
from ..grouped import lstm_update
from ..repeated import Repeated

_LAYERS = 3
_FOLD = 32  # steps; more make longer sums, and keep them all for the backward pass; fewer make the weights more often

_Written = tuple[Tensor, Tensor]
"""What was written to a layer: the inputs it was given and how far off it was, times the rate, each ``(B, R, M)``."""


class MNM(nn.Module):
    """An LSTM controller and a network f of three layers, ``f(k) = W_3 tanh(W_2 tanh(W_1 k))``, whose weights are the memory.

    For the input x, the tokens side by side, and what was read at the step before, r:

    - ``h = LSTM([x, r], h)``;
    - ``tanh(W h)`` is split in what the rate ``beta = s(w . b)`` is made of, and for each of H heads a key k and a value v to
      write and a key q to read;
    - writing: ``z_0 = k``, ``z_l`` what layer l of f makes of it, ``[t_1, t_2, t_3] = W_t v`` what it should make;
      ``W_l <- W_l - beta 2 / (H M) sum_heads (z_l - t_l) z_{l-1}^T``, for all layers at once;
    - reading: ``r = mean_heads f(q)``, through the new weights; ``W_o [h, r] + b_o`` is given out.

    The output of K * D units is given out as K slots of D.

    Args:
        token_size: F.
        num_slots: K.
        slot_size: D; K * D is the size of the controller, 128 in Webb et al.
        num_tokens: N; None for as many as slots.
        memory_size: M, of keys, values and the layers of f; 128 in Webb et al. A state holds ``3 M^2`` numbers a row.
        num_heads: H.
    """

    capabilities = Capabilities(one_vector=True)

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_tokens: int | None = None,
        memory_size: int = 128,
        num_heads: int = 1,
    ):
        super().__init__()
        at_least_one(slot_size=slot_size, memory_size=memory_size, num_heads=num_heads)
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.memory_size = memory_size
        self.num_heads = num_heads
        hidden = num_slots * slot_size
        bound = hidden**-0.5
        self.input = nn.Linear((num_slots if num_tokens is None else num_tokens) * token_size, 4 * hidden)
        self.recurrent = nn.Linear(memory_size + hidden, 4 * hidden, bias=False)
        for parameter in (*self.input.parameters(), *self.recurrent.parameters()):
            nn.init.uniform_(parameter, -bound, bound)
        self.heads = nn.Linear(hidden, (1 + 3 * num_heads) * memory_size)
        self.rate = nn.Linear(memory_size, 1)
        self.targets = nn.Linear(memory_size, _LAYERS * memory_size)
        self.output = nn.Linear(hidden + memory_size, hidden)
        self.first_memory: Tensor
        drawn = torch.empty(_LAYERS, memory_size, memory_size).uniform_(-(memory_size**-0.5), memory_size**-0.5)
        self.register_buffer("first_memory", drawn)

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """A controller of zeros that has read zeros, and the network's first weights; slots cannot be the state."""
        nothing = self.first_memory.new_zeros(batch_size, self.num_slots * self.slot_size)
        return {
            "hidden": nothing,
            "cell": nothing,
            "read": self.first_memory.new_zeros(batch_size, self.memory_size),
            "memory": self.first_memory.expand(batch_size, -1, -1, -1),
            "recall_error": self.first_memory.new_zeros(batch_size),
        }

    def prepare(self, tokens: Tokens) -> Tokens:
        """The tokens' part of the controller's gates, ``(..., 1, 4 K D)``."""
        return Tokens(self.input(present(tokens).flatten(-2))[..., None, :])

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: slots ``(B, K, D)`` and the next state."""
        slots, state, written = self._step(tokens.features.squeeze(1), state, [], self)
        return slots, state | {"memory": _fold(state["memory"], written)}

    def sequence(self, tokens: Tokens, sizes: list[int], state: State) -> tuple[Tensor, State]:
        """What ``unroll`` does step by step, for all steps; equal but for rounding.

        The weights are not made anew at every step: what was written is kept as the factors of a sum of outer products, and
        added to the weights after so many steps. The trained weights get their gradient once, see ``Repeated``.

        Args:
            tokens: prepared, pieces laid one step after another (see ``core.Pieces``), ``(sum of sizes, 1, 4 K D)``.
            sizes: how many pieces have a k-th step.
            state: before the first step of each piece.

        Returns:
            Slots ``(sum of sizes, K, D)``, and the state each piece ends in.
        """
        slots, ended = [], []
        written: list[_Written] = []
        layers = Repeated(recurrent=self.recurrent, heads=self.heads, targets=self.targets, output=self.output)
        for step, inputs in enumerate(tokens.features.squeeze(1).split(sizes)):
            slots_t, state, written = self._step(inputs, state, written, layers)
            slots.append(slots_t)
            going_on = sizes[step + 1] if step + 1 < len(sizes) else 0
            if going_on == 0 or (step + 1) % _FOLD == 0:
                state, written = state | {"memory": _fold(state["memory"], written)}, []
            if going_on < sizes[step]:
                last = {name: leaf[going_on:] for name, leaf in state.items()}
                last["memory"] = _fold(last["memory"], [(z[going_on:], off[going_on:]) for z, off in written])
                ended.append(last)
                state = {name: leaf[:going_on] for name, leaf in state.items()}
                written = [(z[:going_on], off[:going_on]) for z, off in written]
        return torch.cat(slots), {name: torch.cat([part[name] for part in reversed(ended)]) for name in state}

    def _step(
        self, inputs: Tensor, state: State, written: list[_Written], layers: "MNM | Repeated"
    ) -> tuple[Tensor, State, list[_Written]]:
        """One step from weights that lack what was ``written`` lately: slots, the state but for it, and all that is now."""
        hidden, cell, rate, (key, value, query) = self._controller(inputs, state, layers)
        memory = state["memory"]
        activations = [key, *_layers(memory, written, key)]
        targets = layers.targets(value).split(self.memory_size, dim=-1)
        step = rate[:, None] * (2.0 / (self.num_heads * self.memory_size))
        new = [(x, step * (z - t)) for x, z, t in zip(activations[:-1], activations[1:], targets, strict=True)]
        if written:
            new = [(torch.cat([x, z], 1), torch.cat([u, v], 1)) for (x, u), (z, v) in zip(written, new, strict=True)]
        if self.training:  # what is recalled and what is read, in one pass
            recalled, read = _layers(memory, new, torch.cat([key, query], 1))[-1].chunk(2, dim=1)
            error = state["recall_error"] + (recalled - value).square().mean((1, 2))
        else:
            read, error = _layers(memory, new, query)[-1], state["recall_error"]
        read = read.mean(1)
        slots = layers.output(torch.cat([hidden, read], dim=-1)).unflatten(1, (self.num_slots, self.slot_size))
        return slots, {"hidden": hidden, "cell": cell, "read": read, "memory": memory, "recall_error": error}, new

    def _controller(
        self, inputs: Tensor, state: State, layers: "MNM | Repeated"
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Hidden and cell vector, the rate ``(B, 1)``, and keys, values and queries, each ``(B, H, M)``."""
        recurrent = layers.recurrent(torch.cat([state["read"], state["hidden"]], dim=-1))
        hidden, cell = lstm_update(inputs + recurrent, state["cell"])
        sizes = [self.memory_size, 3 * self.num_heads * self.memory_size]
        rate, heads = torch.tanh(layers.heads(hidden)).split(sizes, dim=-1)
        heads = heads.unflatten(-1, (self.num_heads, 3, self.memory_size))
        return hidden, cell, torch.sigmoid(self.rate(rate)), heads.unbind(2)

    def auxiliary_loss(self, state: State) -> Tensor:
        """The mean squared error of recalling what was just written, summed over the steps taken in training, ``(B,)``."""
        return state["recall_error"]

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """How strongly it writes: the "rate" beta ``(B, 1)``, 0 to 1."""
        return {"rate": self._controller(tokens.features.squeeze(1), state, self)[2]}


def _layers(weights: Tensor, written: Sequence[_Written], x: Tensor) -> list[Tensor]:
    """What the layers of f with ``weights (B, 3, M, M)``, and what was written since, make of ``x (B, R, M)``."""
    made = []
    for n, weight in enumerate(weights.unbind(1)):
        shared = weight.stride(0) == 0  # the first weights, the same in every row
        made_of = x @ (weight[0].t() if shared else weight.transpose(1, 2))
        if written:
            inputs, off = written[n]
            made_of = torch.baddbmm(made_of, x @ inputs.transpose(1, 2), off, alpha=-1)
        x = torch.tanh(made_of) if n < _LAYERS - 1 else made_of
        made.append(x)
    return made


def _fold(weights: Tensor, written: Sequence[_Written]) -> Tensor:
    """The weights with what was written, ``W_l - sum off z^T``."""
    if not written:
        return weights
    return weights - torch.stack([off.transpose(1, 2) @ inputs for inputs, off in written], dim=1)
