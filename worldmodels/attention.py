"""Choosing and attending: hard choices, key-value attention, competition for tokens, attention in space."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn


def hard_choice(
    logits: Float[Tensor, "*B N"], *, noise: bool | Tensor, temperature: float = 1.0
) -> Float[Tensor, "*B N"]:
    """Choose one of N as a one-hot vector whose gradient is that of the softmax (straight-through).

    With noise this is the straight-through Gumbel softmax (Jang et al. 2016): ``argmax_i(logits_i + gamma_i)``,
    ``gamma ~ Gumbel(0, 1)``. Without noise it is the argmax, deterministic, with the same gradient.

    Args:
        logits: scores, ``(..., N)``; of absent ones as ``hide`` makes them. Where all are, one is chosen all the same.
        noise: add Gumbel noise, as large as a tensor says; cores pass ``self.training``, because a choice at evaluation must
            repeat.
        temperature: of the softmax the gradient comes from, above 0.

    Returns:
        One-hot ``(..., N)``.
    """
    if noise is not False:
        logits = (
            logits - noise * torch.empty_like(logits).exponential_().clamp_min(torch.finfo(logits.dtype).tiny).log()
        )
    sharp = (logits / temperature).clamp_min(
        torch.finfo(logits.dtype).min
    )  # of hidden scores a low temperature makes -inf
    soft = torch.softmax(sharp, dim=-1)
    hard = F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
    return hard + (soft - soft.detach())


def most(relevance: Float[Tensor, "B K"], count: int) -> Bool[Tensor, "B K"]:
    """The ``count`` most relevant of K, as a mask; it passes no gradient."""
    chosen = relevance.detach().topk(count, dim=-1).indices
    return torch.zeros_like(relevance, dtype=torch.bool).scatter(-1, chosen, True)


def split_heads(x: Float[Tensor, "*B N HxD"], num_heads: int) -> Float[Tensor, "*B H N D"]:
    """Heads as an axis of their own."""
    return x.unflatten(-1, (num_heads, -1)).transpose(-2, -3)


def join_heads(x: Float[Tensor, "*B H N D"]) -> Float[Tensor, "*B N HxD"]:
    """Heads side by side."""
    return x.transpose(-2, -3).flatten(-2)


def scores(query: Float[Tensor, "*B Q D"], keys: Float[Tensor, "*B N D"]) -> Float[Tensor, "*B Q N"]:
    """``q k^T / sqrt(D)`` (Vaswani et al. 2017, equation 1)."""
    return (query * query.shape[-1] ** -0.5) @ keys.transpose(-1, -2)


def over_heads(explained: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a core explains with its attentions ``(B, H, K, N)`` as their means over heads."""
    return {name: part.mean(1) if part.dim() == 4 else part for name, part in explained.items()}


def hide(logits: Float[Tensor, "B *H N"], mask: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B *H N"]:
    """Scores of absent tokens made so low that a softmax over tokens gives them nothing."""
    if mask is None:
        return logits
    mask = mask.reshape(len(mask), *(1,) * (logits.dim() - 2), -1)
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min)


def over_slots(logits: Float[Tensor, "B H K N"], mask: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B H K N"]:
    """Competition among the slots for every token: softmax over K; absent tokens have nothing to give."""
    weights = torch.softmax(logits, dim=-2)
    return weights if mask is None else weights * mask[:, None, None]


def with_null(logits: Float[Tensor, "B H K N"], mask: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B H K N"]:
    """Competition between the tokens and a null token of zeros, for every slot: softmax over N + 1.

    The null token's key and value are zero, so its score is 0 and it adds nothing; what the weights lack to 1 is its
    share.
    """
    padded = F.pad(hide(logits, mask), (1, 0))
    return torch.softmax(padded, dim=-1)[..., 1:]


class Communication(nn.Module):
    """Every slot queries all slots: ``softmax(q k^T / sqrt(d)) v``, several heads, and one linear layer to the slot's size.

    Args:
        slot_size: D.
        num_heads: H.
        key_size: of each head's queries and keys.
        value_size: of each head's values.
        gated: the result is ``s(W_g o) * tanh(W_f o)`` instead of ``W o``.
        linear: makes a bias-free layer ``(input size, output size)``: shared by the slots, or one for each.
    """

    def __init__(
        self,
        slot_size: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        gated: bool,
        linear: Callable[[int, int], nn.Module],
    ):
        super().__init__()
        self.num_heads = num_heads
        self.sizes = [num_heads * key_size, num_heads * value_size]
        self.query = linear(slot_size, num_heads * key_size)
        self.key_value = linear(slot_size, num_heads * (key_size + value_size))
        self.gated = gated
        self.output = linear(num_heads * value_size, (2 if gated else 1) * slot_size)

    def forward(
        self, asking: Float[Tensor, "B K D"], answering: Float[Tensor, "B K D"]
    ) -> tuple[Float[Tensor, "B K D"], Float[Tensor, "B H K K"]]:
        """What each slot hears, and how much it listens to each other one.

        Args:
            asking: the states that queries are made from.
            answering: the states that keys and values are made from.
        """
        query = split_heads(self.query(asking), self.num_heads)
        keys, values = (split_heads(x, self.num_heads) for x in self.key_value(answering).split(self.sizes, dim=-1))
        weights = torch.softmax(scores(query, keys), dim=-1)
        heard = self.output(join_heads(weights @ values))
        if self.gated:
            gate, value = heard.chunk(2, dim=-1)
            heard = torch.sigmoid(gate) * torch.tanh(value)
        return heard, weights


class SlotAttention(nn.Module):
    """Iterative competition of slots for tokens.

    Locatello et al. 2020, Algorithm 1: ``attn = softmax_slots(k(inputs) q(slots)^T / sqrt(D))``, ``updates = weighted mean
    over inputs of v(inputs)``, ``slots = GRU(updates, slots)``, ``slots += MLP(LayerNorm(slots))``, repeated.

    Args:
        input_size: of the tokens.
        slot_size: D.
        num_iterations: rounds.
        hidden_size: of the residual MLP.
    """

    def __init__(self, input_size: int, slot_size: int, *, num_iterations: int = 3, hidden_size: int = 128):
        super().__init__()
        self.slot_size = slot_size
        self.num_iterations = num_iterations
        self.inputs_norm = nn.LayerNorm(input_size)
        self.key_value = nn.Linear(input_size, 2 * slot_size, bias=False)
        self.query = nn.Linear(slot_size, slot_size, bias=False)
        self.slot_norm = nn.LayerNorm(slot_size)
        self.gru = nn.GRUCell(slot_size, slot_size)
        self.mlp = nn.Sequential(
            nn.LayerNorm(slot_size), nn.Linear(slot_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, slot_size)
        )

    def prepare(self, inputs: Float[Tensor, "*B N F"]) -> Float[Tensor, "*B N E"]:
        """Keys and values side by side: everything that needs no slots."""
        return self.key_value(self.inputs_norm(inputs))

    def forward(
        self, prepared: Float[Tensor, "B N E"], slots: Float[Tensor, "B K D"], mask: Bool[Tensor, "B N"] | None = None
    ) -> tuple[Float[Tensor, "B K D"], Float[Tensor, "B K N"]]:
        """The slots after the last round, and how the tokens were shared among them in it."""
        keys, values = prepared.chunk(2, dim=-1)
        keys = keys / self.slot_size**0.5
        attention = keys.new_zeros(())
        for _ in range(self.num_iterations):
            attention = torch.softmax(self.query(self.slot_norm(slots)) @ keys.transpose(1, 2), dim=1) + 1e-8
            if mask is not None:
                attention = attention * mask[:, None]
            total = attention.sum(2, keepdim=True).clamp_min(1e-8)
            updates = (attention / total) @ values
            slots = self.gru(updates.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
            slots = slots + self.mlp(slots)
        return slots, attention


def embed_position(positions: Tensor, size: int) -> Tensor:
    """The place of a position on the unit sphere (S2RM, eq. 3; ``cores/s2rm.py`` says how ours differs).

    ``s = (sin(x_m / 10000^(2 j n / d)), cos(x_m / 10000^(2 j n / d)))`` for every coordinate x_m and ``j < d / 2n``,
    ``P(x) = s / |s|``.

    Args:
        positions: x, ``(..., n)``, in units in which 1 is about the distance at which two views have little in common.
        size: d, a multiple of 2 n.

    Returns:
        ``(..., d)`` of length 1.
    """
    count = size // (2 * positions.shape[-1])
    wavelength = 10_000.0 ** (torch.arange(count, device=positions.device, dtype=positions.dtype) / count)
    angle = positions[..., None] / wavelength  # (..., n, count)
    return F.normalize(torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-3), dim=-1)


def spherical_kernel(
    p: Float[Tensor, "Q d"], s: Float[Tensor, "*B N d"], *, bandwidth: float, truncation: float
) -> Float[Tensor, "*B Q N"]:
    """The truncated spherical Gaussian kernel of S2RM (equations 5 and 14).

    ``Z(p, s) = exp(-2 eps (1 - p . s))`` where ``p . s >= tau``, else 0. As in appendix E.4.1 of the paper the gradient
    passes through the constant region as if the kernel were not truncated.

    Args:
        p: unit vectors.
        s: unit vectors.
        bandwidth: eps, above 0.
        truncation: tau, -1 to below 1.
    """
    cosine = p @ s.transpose(-1, -2)
    whole = torch.exp(-2.0 * bandwidth * (1.0 - cosine))
    return whole - torch.where(cosine >= truncation, 0.0, whole).detach()
