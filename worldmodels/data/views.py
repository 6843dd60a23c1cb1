"""Views: what is seen of a world from some of its places, at every step from others, and by no fixed number of eyes."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Views(NamedTuple):
    """Local observations with their positions; leading axes are any, mostly time and batch.

    Args:
        observations: ``(..., N, C, H, W)`` floats, or uint8 pictures ``(..., N, H, W, C)`` as environments give them.
        positions: ``(..., N, P)``.
        mask: ``(..., N)``, False where a view is absent; what it holds then may be anything.
        actions: what is done as pictures of the same views, ``(..., N, A, H, W)``; None where nothing is done.
    """

    observations: Tensor
    positions: Float[Tensor, "*B N P"]
    mask: Bool[Tensor, "*B N"]
    actions: Float[Tensor, "*B N A H W"] | None = None

    def at(self, index: slice | Tensor | int) -> "Views":
        """Every part at an index of the first axis."""
        actions = None if self.actions is None else self.actions[index]
        return Views(self.observations[index], self.positions[index], self.mask[index], actions)

    def reported(self, fraction: float, generator: torch.Generator) -> "Views":
        """These views with each present one kept with a probability, independently at every step."""
        if fraction >= 1.0:
            return self
        draw = torch.rand(self.mask.shape, generator=generator, device=generator.device)
        return self._replace(mask=self.mask & (draw < fraction).to(self.mask.device))

    def first(self, count: int) -> "Views":
        """These views without all but the first ``count`` at every step."""
        keep = torch.arange(self.mask.shape[-1], device=self.mask.device) < count
        return self._replace(mask=self.mask & keep)
