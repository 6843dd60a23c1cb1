"""The Recurrent Entity Network: memories with keys, each gated by how well the input fits its key or its content.

Henaff et al. 2016, "Tracking the World State with Recurrent Entity Networks", section 2.

Departures:
- Biases: the paper writes none; the authors' code has one for each memory in the gate and one in U (``biases=True``).
- The slope of the parametric ReLU: the authors' code shares it with the output module; the paper does not say; ours are
  separate, so that the core can be used without that module.
- Padding: as in the authors' code, a step whose tokens are all absent closes the gates and leaves the memories as they are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import Capabilities, State, Tokens, at_least_one, present

KEYS = ("free", "tied")


class EntNet(nn.Module):
    """K memories h_j with keys w_j; all share the same weights, and each decides for itself how far to change.

    - Input encoder: ``s = sum_i f_i * e_i`` over the tokens (eq. 1), the masks f_i learned.
    - ``g_j = sigmoid(s . h_j + s . w_j)`` (eq. 2), ``h~_j = phi(U h_j + V w_j + W s)`` (eq. 3),
      ``h_j <- h_j + g_j h~_j`` (eq. 4), ``h_j <- h_j / |h_j|`` (eq. 5).

    Weights are drawn from N(0, 0.1), masks and slopes of phi start at 1, memories start as their keys (appendix A). Where
    tokens are of another size than memories, a linear layer without bias, drawn as torch does, comes before the masks.

    Args:
        token_size: F.
        num_slots: m, the number of memories.
        slot_size: D of each.
        num_tokens: N, how many masks f_i; None for as many as memories.
        keys: "free", learned for each memory; or "tied": the slots given to ``initial_state``, such as the embeddings of the
            entities of a story, are the keys; where none are given they are the learned ones.
        simple: the simple variant, ``U = V = 0``, ``W = I``, phi the identity (section 5.3).
        normalise: equation 5; the paper's simple variant goes without.
        biases: the authors' code, see above.
        gate_masks: masks of their own for what the gates see, "separate input encodings for the update and gating functions"
            (section 5.3).
    """

    capabilities = Capabilities(starts_from_slots=True)

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_tokens: int | None = None,
        keys: str = "free",
        simple: bool = False,
        normalise: bool = True,
        biases: bool = False,
        gate_masks: bool = False,
    ):
        super().__init__()
        if keys not in KEYS:
            raise ValueError(f"keys is {keys!r}; expected one of {', '.join(KEYS)}")
        at_least_one(slot_size=slot_size)
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.tied = keys == "tied"
        self.simple = simple
        self.normalise = normalise
        self.embed: nn.Module = nn.Identity()
        if token_size != slot_size:
            self.embed = nn.Linear(token_size, slot_size, bias=False)
        self.masks = nn.Parameter(torch.ones(num_slots if num_tokens is None else num_tokens, slot_size))  # f_i
        self.gate_masks = nn.Parameter(torch.ones_like(self.masks)) if gate_masks else None
        self.keys = nn.Parameter(torch.randn(num_slots, slot_size) * 0.1)  # w_j
        if not simple:
            self.U, self.V, self.W = (nn.Linear(slot_size, slot_size, bias=biases and name == "U") for name in "UVW")
            for layer in (self.U, self.V, self.W):
                nn.init.normal_(layer.weight, std=0.1)
            self.phi = nn.PReLU(slot_size, init=1.0)
        self.gate_bias = nn.Parameter(torch.zeros(num_slots)) if biases else None

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """Memories that are their keys; given slots are the memories, and with tied keys the keys as well."""
        keys = self.keys.expand(batch_size, -1, -1)
        memory = keys if slots is None else slots
        return {"memory": memory, "keys": memory} if self.tied else {"memory": memory}

    def prepare(self, tokens: Tokens) -> Tokens:
        """The encoded input s (eq. 1) as gates see it, and below it W s, ``(..., 2, D)``; the mask says if there was any."""
        N = tokens.features.shape[-2]
        if N > len(self.masks):
            raise ValueError(f"got {N} tokens, but this EntNet has masks for {len(self.masks)}; set num_tokens={N}")
        embedded = self.embed(present(tokens))
        encoded = (embedded * self.masks[:N]).sum(-2, keepdim=True)
        seen = encoded if self.gate_masks is None else (embedded * self.gate_masks[:N]).sum(-2, keepdim=True)
        both = torch.cat([seen, encoded if self.simple else self.W(encoded)], dim=-2)
        return Tokens(both, mask=None if tokens.mask is None else tokens.mask.any(-1, keepdim=True))

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: the memories, ``(B, K, D)``, and the next state."""
        memory, _ = self._run(tokens, state)
        return memory, state | {"memory": memory}

    def _run(self, tokens: Tokens, state: State) -> tuple[Tensor, Tensor]:
        memory, (s, Ws) = state["memory"], tokens.features.unbind(1)  # (B, K, D), (B, D) each
        keys = state["keys"] if self.tied else self.keys
        fit = (memory @ s[..., None])[..., 0] + (keys @ s[..., None])[..., 0]  # (B, K)
        gate = torch.sigmoid(fit if self.gate_bias is None else fit + self.gate_bias)  # eq. 2
        if tokens.mask is not None:
            gate = gate * tokens.mask
        if self.simple:
            candidate = Ws[:, None]
        else:
            total = self.U(memory) + (self.V(keys) + Ws[:, None])
            candidate = self.phi(total.flatten(0, 1)).view_as(total)  # eq. 3
        changed = torch.addcmul(memory, gate[..., None], candidate)  # eq. 4
        if self.normalise:
            changed = F.normalize(changed, dim=-1)  # eq. 5
        if tokens.mask is not None:
            changed = torch.where(tokens.mask[..., None], changed, memory)
        return changed, gate

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """How far the "gate" of each memory is open, ``(B, K)``, 0 to 1."""
        return {"gate": self._run(tokens, state)[1]}


class OutputModule(nn.Module):
    """EntNet's answer to a query: a soft read of the memories, and a word.

    ``p_j = softmax_j(q . h_j)``, ``u = sum_j p_j h_j``, ``y = R phi(q + H u)`` (eq. 6).

    Args:
        slot_size: D, of memories and queries.
        output_size: words to choose from.
    """

    def __init__(self, slot_size: int, output_size: int):
        super().__init__()
        self.H = nn.Linear(slot_size, slot_size, bias=False)
        self.R = nn.Linear(slot_size, output_size, bias=False)
        self.phi = nn.PReLU(slot_size, init=1.0)
        for layer in (self.H, self.R):
            nn.init.normal_(layer.weight, std=0.1)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        """Scores of the words.

        Args:
            query: q, ``(B, D)``.
            memory: ``(B, K, D)``.

        Returns:
            y, ``(B, output_size)``.
        """
        p = torch.softmax((memory @ query[..., None])[..., 0], dim=-1)
        u = (p[:, None] @ memory)[:, 0]
        return self.R(self.phi(query + self.H(u)))
