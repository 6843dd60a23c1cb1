"""The Relational Memory Core: rows of memory that attend to each other and to the input.

Santoro et al. 2018, "Relational recurrent neural networks", section 3; where it is silent, the authors' module in Sonnet 1.

Departures: none in the equations. As in Sonnet, queries, keys and values are normalised together, one LayerNorm over all of
a row's; the inputs' rows attend too there, but what they become is thrown away, so ours only answer.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import join_heads, scores, split_heads
from ..core import Capabilities, State, Tokens, at_least_one, present
from ..grouped import GroupedLinear, GroupedMLP


class RelationalMemory(nn.Module):
    """One step of G relational memories side by side, each with weights of its own; RMC has one, S2RMC one per module.

    For a memory M of S rows and input rows x:

    - ``[q, k, v] = LayerNorm(W row)`` for every row of ``[M; x]``, ``A = softmax(q k^T / sqrt(key_size)) v`` per head;
    - ``M~ = LayerNorm(M + A)``, ``M~ = LayerNorm(M~ + MLP(M~))``;
    - ``i, f = W_g [x_1, x_2, ...] + U_g tanh(M)`` per unit, ``M' = s(i) tanh(M~) + s(f + 1) M``.

    Args:
        num_groups: G.
        input_size: of an input row.
        num_inputs: how many input rows come with a step.
        memory_size: D, of a memory row.
        num_heads: of the attention; the values of a head have ``D / num_heads``.
        key_size: of a head's queries and keys; None for as many as its values.
        mlp_size: of the MLP's hidden layer; None for D.
    """

    def __init__(
        self,
        num_groups: int,
        input_size: int,
        num_inputs: int,
        memory_size: int,
        *,
        num_heads: int,
        key_size: int | None = None,
        mlp_size: int | None = None,
    ):
        super().__init__()
        at_least_one(memory_size=memory_size, num_heads=num_heads)
        if memory_size % num_heads:
            raise ValueError(f"num_heads is {num_heads}; it must divide the size of a memory row, {memory_size}")
        value_size = memory_size // num_heads
        key_size = value_size if key_size is None else key_size
        at_least_one(key_size=key_size)
        self.num_heads = num_heads
        self.sizes = [num_heads * key_size, num_heads * key_size, num_heads * value_size]
        self.embed = GroupedLinear(num_groups, input_size, memory_size)
        self.qkv = GroupedLinear(num_groups, memory_size, sum(self.sizes))
        self.qkv_weight = nn.Parameter(torch.ones(num_groups, sum(self.sizes)))
        self.qkv_bias = nn.Parameter(torch.zeros(num_groups, sum(self.sizes)))
        self.norm_weight = nn.Parameter(torch.ones(2, num_groups, memory_size))
        self.norm_bias = nn.Parameter(torch.zeros(2, num_groups, memory_size))
        self.mlp = GroupedMLP(num_groups, memory_size, memory_size if mlp_size is None else mlp_size, memory_size)
        self.input_gates = GroupedLinear(num_groups, num_inputs * memory_size, 2 * memory_size)
        self.memory_gates = GroupedLinear(num_groups, memory_size, 2 * memory_size, bias=False)

    def prepare(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What needs no memory.

        Args:
            inputs: ``(..., N, G, input_size)``.

        Returns:
            Queries, keys and values of the input rows, ``(..., N, G, .)``, and their part of the gates ``(..., G, 2 D)``.
        """
        rows = self.embed(inputs)  # (..., N, G, D)
        gates = self.input_gates(rows.transpose(-2, -3).flatten(-2))
        return self._qkv(rows), gates

    def _qkv(self, rows: Tensor) -> Tensor:
        return _norm(self.qkv(rows)) * self.qkv_weight + self.qkv_bias

    def forward(self, memory: Tensor, qkv: Tensor, gates: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            memory: ``(B, S, G, D)``.
            qkv: of the input rows, ``(B, N, G, .)``.
            gates: of the inputs, ``(B, G, 2 D)``.
            mask: ``(B, G, N)``, False for input rows that are absent; None if all are there.

        Returns:
            The next memory ``(B, S, G, D)``, and its attention ``(B, G, H, S, S + N)``.
        """
        S = memory.shape[1]
        rows = torch.cat([self._qkv(memory), qkv], dim=1).transpose(1, 2)  # (B, G, S + N, .)
        query, keys, values = (split_heads(x, self.num_heads) for x in rows.split(self.sizes, dim=-1))
        logits = scores(query[..., :S, :], keys)  # (B, G, H, S, S + N)
        if mask is not None:
            present = F.pad(mask, (S, 0), value=True)[:, :, None, None]
            logits = logits.masked_fill(~present, torch.finfo(logits.dtype).min)
        weights = torch.softmax(logits, dim=-1)
        attended = join_heads(weights @ values).transpose(1, 2)  # (B, S, G, D)
        new = _norm(memory + attended) * self.norm_weight[0] + self.norm_bias[0]
        new = _norm(new + self.mlp(new)) * self.norm_weight[1] + self.norm_bias[1]
        input_gate, forget = (gates[:, None] + self.memory_gates(torch.tanh(memory))).chunk(2, dim=-1)
        memory = torch.sigmoid(input_gate) * torch.tanh(new) + torch.sigmoid(forget + 1.0) * memory
        return memory, weights


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def identity_rows(num_rows: int, size: int, like: Tensor) -> Tensor:
    """The first memory: rows of the identity, cut or padded with zeros."""
    return torch.eye(num_rows, size, dtype=like.dtype, device=like.device)


class RMC(nn.Module):
    """K rows of memory; attention over the rows and the tokens proposes new rows, gates of each unit let them in.

    The equations are those of ``RelationalMemory`` with one memory of K rows. It starts as rows of the identity. Every
    token is a row of the input.

    Args:
        token_size: F.
        num_slots: K, rows of memory.
        slot_size: D of each.
        num_tokens: N; None for as many as rows.
        num_heads: must divide D; None for 4, or 2 or 1 where that does not.
        key_size: of a head; None for ``D / num_heads``.
        mlp_size: of the MLP's hidden layer; None for D.
    """

    capabilities = Capabilities(starts_from_slots=True)

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_tokens: int | None = None,
        num_heads: int | None = None,
        key_size: int | None = None,
        mlp_size: int | None = None,
    ):
        super().__init__()
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        num_tokens = num_slots if num_tokens is None else num_tokens
        num_heads = math.gcd(4, slot_size) if num_heads is None else num_heads
        at_least_one(slot_size=slot_size, num_heads=num_heads)
        if slot_size % num_heads:
            wider = slot_size + num_heads - slot_size % num_heads
            raise ValueError(
                f"num_heads is {num_heads}; it must divide slot_size, {slot_size}; slot_size={wider} would do"
            )
        self.relational = RelationalMemory(
            1, token_size, num_tokens, slot_size, num_heads=num_heads, key_size=key_size, mlp_size=mlp_size
        )

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """Rows of the identity; given slots are the rows."""
        if slots is not None:
            return {"memory": slots}
        rows = identity_rows(self.num_slots, self.slot_size, self.relational.norm_weight)
        return {"memory": rows.expand(batch_size, -1, -1)}

    def prepare(self, tokens: Tokens) -> Tokens:
        """Queries, keys and values of the tokens as rows, and a last row with their part of the gates."""
        qkv, gates = self.relational.prepare(present(tokens)[..., None, :])
        width = max(qkv.shape[-1], gates.shape[-1])
        qkv, gates = (F.pad(x, (0, width - x.shape[-1])) for x in (qkv[..., 0, :], gates))
        return tokens._replace(features=torch.cat([qkv, gates], dim=-2))

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: the rows, ``(B, K, D)``, and the next state."""
        memory, _ = self._run(tokens, state)
        return memory, {"memory": memory}

    def _run(self, tokens: Tokens, state: State) -> tuple[Tensor, Tensor]:
        qkv = tokens.features[:, :-1, None, : sum(self.relational.sizes)]
        gates = tokens.features[:, -1:, : 2 * self.slot_size]
        mask = None if tokens.mask is None else tokens.mask[:, None]
        memory, attention = self.relational(state["memory"][:, :, None], qkv, gates, mask)
        return memory[:, :, 0], attention[:, 0]

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Each row's attention to tokens, "input_attention" ``(B, K, N)``, and rows, "communication" ``(B, K, K)``."""
        attention = self._run(tokens, state)[1].mean(1)
        return {
            "input_attention": attention[..., self.num_slots :],
            "communication": attention[..., : self.num_slots],
        }
