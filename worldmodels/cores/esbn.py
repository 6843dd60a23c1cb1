"""The Emergent Symbol Binding Network: a controller that never sees what is in the input, only where it was seen before.

Webb, Sinha & Cohen 2021, "Emergent Symbols through Binding in External Memory", Algorithm 1 and appendix A.3.3; temporal
context normalisation from its section 3.1.

In Algorithm 1 a step begins with the controller, which takes in the key read at the step before, zero at first; and after the
last of T inputs the controller takes one more step, without which it would never learn of that input's match (the authors'
code does so with an input of zeros, and throws away what it reads and writes then). Ours is the same loop cut at another
place: the controller's first step, on a key of zeros, makes the initial state, and each step ends with the controller taking
in what was read. So T steps of ours are the T + 1 of the paper, and no step without input is needed.

Departures:
- ``write="after"`` is not the paper's: a blog about it by others (Daigavane et al. 2022, ICLR blog track) has the key bound
  to an input given after the controller has taken in that input's match, and begins with a controller of zeros that has not
  taken its first step. It calls this order equivalent, which it is not: the paper's key does not yet know of the match.
- The memory grows without end in the paper; ours holds the last ``capacity`` inputs.
- Initial weights: see ``grouped.draw_lstm``.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ..attention import hide
from ..core import Capabilities, State, Tokens, at_least_one, loop, present
from ..grouped import draw_lstm, lstm_update
from ..repeated import Repeated

WRITE = ("before", "after")


class ESBN(nn.Module):
    """An LSTM controller with a memory of pairs (key, value): values are inputs, keys are the controller's own.

    It begins with ``h = LSTM(0, 0)`` and an empty memory. For the input z, the tokens side by side:

    - ``k_w = ReLU(W_k h)``, ``g = s(W_g h)``;
    - ``w = softmax(M_v . z)``, ``c = s(gamma (M_v . z) + beta)``;
    - ``k_r = g sum_i w_i [M_k,i, c_i]``; zeros while the memory is empty;
    - ``M_k <- [M_k, k_w]``, ``M_v <- [M_v, z]``;
    - ``h <- LSTM(h, k_r)``.

    With ``write="after"`` it begins with ``h = 0``, and ``k_w`` is made of the new h.

    The controller's hidden vector of K * D units is given out as K slots of D; no value ever reaches it, only how well
    values match. So it cannot be a world model's transition.

    Args:
        token_size: F.
        num_slots: K.
        slot_size: D; K * D is the size of the controller, 512 in the paper.
        num_tokens: N; None for as many as slots.
        key_size: of keys; 256 in the paper.
        capacity: pairs the memory holds; the oldest is overwritten.
        write: whether the key bound to an input comes "before" the controller has taken in its match, as in the paper, or
            "after" it; see above.
    """

    capabilities = Capabilities(one_vector=True, transition=False)

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_tokens: int | None = None,
        key_size: int = 256,
        capacity: int = 32,
        write: str = "before",
    ):
        super().__init__()
        if write not in WRITE:
            raise ValueError(f"write is {write!r}; expected one of {', '.join(WRITE)}")
        at_least_one(slot_size=slot_size, key_size=key_size, capacity=capacity)
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.capacity = capacity
        self.write = write
        self.value_size = (num_slots if num_tokens is None else num_tokens) * token_size
        self.key_size = key_size
        hidden = num_slots * slot_size
        self.controller = nn.Linear(key_size + 1 + hidden, 4 * hidden)
        self.key = nn.Linear(hidden, key_size)
        self.gate = nn.Linear(hidden, 1)
        draw_lstm(self.controller.weight, key_size + 1)  # appendix A.3.3
        nn.init.kaiming_normal_(self.key.weight, nonlinearity="relu")
        nn.init.xavier_normal_(self.gate.weight)
        for layer in (self.controller, self.key, self.gate):
            nn.init.zeros_(layer.bias)
        self.gain = nn.Parameter(torch.ones(()))  # gamma
        self.offset = nn.Parameter(torch.zeros(()))  # beta

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """The controller after its first step, on a key of zeros, or one of zeros (``write="after"``); an empty memory.

        Slots cannot be the state, because no value reaches the controller.
        """
        hidden = cell = self.gain.new_zeros(batch_size, self.num_slots * self.slot_size)
        if self.write == "before":
            hidden, cell = lstm_update(self.controller.bias.expand(batch_size, -1), cell)
        return {
            "hidden": hidden,
            "cell": cell,
            "keys": self.gain.new_zeros(batch_size, self.capacity, self.key_size),
            "values": self.gain.new_zeros(batch_size, self.capacity, self.value_size),
            "count": torch.zeros(batch_size, dtype=torch.long, device=self.gain.device),  # below twice the capacity
        }

    def prepare(self, tokens: Tokens) -> Tokens:
        """The tokens side by side as one, absent ones as zeros."""
        return Tokens(present(tokens).flatten(-2)[..., None, :])

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: the controller's hidden vector as slots, ``(B, K, D)``, and the next state."""
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
        layers = Repeated(controller=self.controller, key=self.key)
        return loop(lambda tokens_t, state_t: self._step(tokens_t, state_t, layers), tokens, sizes, state)

    def _step(self, tokens: Tokens, state: State, layers: "ESBN | Repeated") -> tuple[Tensor, State]:
        z = tokens.features.squeeze(1)
        hidden, cell, keys, values, count = (state[name] for name in ("hidden", "cell", "keys", "values", "count"))
        weights, confidence = self._match(z, state)
        read = (weights[:, None] @ torch.cat([keys, confidence[..., None]], dim=-1))[:, 0]
        read = torch.sigmoid(self.gate(hidden)) * read
        new_hidden, cell = lstm_update(layers.controller(torch.cat([read, hidden], dim=-1)), cell)
        key = torch.relu(layers.key(hidden if self.write == "before" else new_hidden))
        here = (torch.arange(self.capacity, device=z.device) == (count % self.capacity)[:, None])[..., None]
        state = {
            "hidden": new_hidden,
            "cell": cell,
            "keys": torch.where(here, key[:, None], keys),
            "values": torch.where(here, z[:, None], values),
            "count": torch.where(count + 1 == 2 * self.capacity, self.capacity, count + 1),
        }
        return new_hidden.unflatten(1, (self.num_slots, self.slot_size)), state

    def _match(self, z: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Read weights, 0 where nothing is stored, and confidences, both ``(B, capacity)``."""
        similarity = (state["values"] @ z[..., None])[..., 0]
        stored = torch.arange(self.capacity, device=z.device) < state["count"][:, None]
        return torch.softmax(hide(similarity, stored), dim=-1) * stored, torch.sigmoid(
            self.gain * similarity + self.offset
        )

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """The "memory_read" weights and the "confidence" of each place in memory, both ``(B, capacity)``."""
        weights, confidence = self._match(tokens.features.squeeze(1), state)
        return {"memory_read": weights, "confidence": confidence * (weights > 0)}


class TemporalContextNorm(nn.Module):
    """Every feature of a sequence normalised over time, within its episode.

    ``z'_t = gain (z_t - mean) / sqrt(var + eps) + bias``, mean and variance over the steps of the sequence.

    It acts on whole sequences and comes before a core. ``causal=True`` is the running form, for policies that cannot see the
    future: mean and variance over the steps up to t. The paper gives no equation; the authors' code divides the variance by
    T - 1 (our default), the blog above by T (``unbiased=False``). Over two steps the result is always 0 or +-0.7 and says
    little but "same" or "different".

    Args:
        size: of the features.
        causal: running statistics.
        unbiased: divide by T - 1.
        eps: added to the variance.
    """

    def __init__(self, size: int, *, causal: bool = False, unbiased: bool = True, eps: float = 1e-8):
        super().__init__()
        self.causal = causal
        self.unbiased = unbiased
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(
        self, z: Float[Tensor, "T B *N D"], starts: Bool[Tensor, "T B"] | None = None
    ) -> Float[Tensor, "T B *N D"]:
        """Normalise.

        Args:
            z: the sequence.
            starts: True where an episode begins; statistics do not reach across it. None for one episode.

        Returns:
            The sequence normalised, of the same shape.
        """
        T, B = z.shape[:2]
        time = torch.arange(T, device=z.device)[:, None]
        begins = torch.zeros(T, B, dtype=torch.bool, device=z.device) if starts is None else starts
        first = torch.where(begins, time, 0).cummax(0).values  # of the episode that step t is in
        last = time.expand(T, B)
        if not self.causal:  # the step before the next episode begins
            following = torch.where(begins, time, T).flip(0).cummin(0).values.flip(0)
            last = torch.cat([following[1:], following.new_full((1, B), T)]) - 1
        count = (last - first + 1).reshape(T, B, *(1,) * (z.dim() - 2)).to(z.dtype)
        origin = _at(z, first)
        x = z - origin  # near the mean, so that differences of sums stay exact
        mean = _between(x, first, last) / count
        if self.causal:
            squares = (_between(x.square(), first, last) - count * mean.square()).clamp_min(0.0)
        else:
            squares = _between((x - mean).square(), first, last)
        variance = squares / (count - 1 if self.unbiased else count).clamp_min(1.0)
        return self.gain * (x - mean) / torch.sqrt(variance + self.eps) + self.bias


def _at(x: Tensor, time: Tensor) -> Tensor:
    """``x (T, B, ...)`` at a time ``(T, B)`` of its own for every step and row."""
    return x.gather(0, time.reshape(*time.shape, *(1,) * (x.dim() - 2)).expand_as(x))


def _between(x: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """The sum of ``x (T, B, ...)`` from step ``first`` to step ``last``, both ``(T, B)``."""
    total = x.cumsum(0)
    return _at(total, last) - _at(total, first) + _at(x, first)
