"""Choosing and attending: hard choices with a straight-through gradient."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def hard_choice(logits: Float[Tensor, "*B N"], *, noise: bool, temperature: float = 1.0) -> Float[Tensor, "*B N"]:
    """Choose one of N as a one-hot vector whose gradient is that of the softmax (straight-through).

    With noise this is the straight-through Gumbel softmax (Jang et al. 2016): ``argmax_i(logits_i + gamma_i)``,
    ``gamma ~ Gumbel(0, 1)``. Without noise it is the argmax, deterministic, with the same gradient.

    Args:
        logits: scores, ``(..., N)``.
        noise: add Gumbel noise; cores pass ``self.training``, because a choice at evaluation must repeat.
        temperature: of the softmax the gradient comes from, above 0.

    Returns:
        One-hot ``(..., N)``.
    """
    if noise:
        logits = logits - torch.empty_like(logits).exponential_().clamp_min(torch.finfo(logits.dtype).tiny).log()
    soft = torch.softmax(logits / temperature, dim=-1)
    hard = F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
    return hard + (soft - soft.detach())
