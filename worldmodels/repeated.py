"""Linear layers that are called at every step of a loop, whose weights get their gradient from all steps at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Repeated:
    """Linear layers of a core by name, for one pass through a sequence.

    Autograd makes a gradient as large as the weights at every step, and adds it up. Where the weights are large and the batch
    is not, that takes longer than all else; one product over the rows of all steps takes a fraction of it. The result is the
    same but for rounding. Gradients of gradients are not available.

    Args:
        layers: each becomes an attribute of its name.
    """

    def __init__(self, **layers: nn.Linear):
        for name, layer in layers.items():
            setattr(self, name, _Layer(layer) if torch.is_grad_enabled() and layer.weight.requires_grad else layer)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is none of the repeated layers: {', '.join(vars(self))}")


class _Layer:
    """A layer in the loop."""

    def __init__(self, layer: nn.Linear):
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}  # by step, what it was given and the gradient of what it gave
        self.steps = 0
        self.weight, self.bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        self.weights: Tensor = _Weights.apply(self, layer.weight, layer.bias)

    def __call__(self, x: Tensor) -> Tensor:
        self.steps += 1
        return _Step.apply(self, self.steps, x, self.weights)


class _Weights(torch.autograd.Function):
    """Stands for the weights in the graph; its backward pass comes after that of all steps."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return weight.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor, Tensor | None]:
        layer = ctx.layer
        given, grads = (torch.cat(parts) for parts in zip(*layer.seen.values(), strict=True))
        layer.seen.clear()
        return None, grads.t() @ given, None if layer.bias is None else grads.sum(0)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: _Layer, step: int, x: Tensor, weights: Tensor) -> Tensor:
        ctx.layer, ctx.step = layer, step
        ctx.save_for_backward(x)
        return F.linear(x, layer.weight, layer.bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor | None, Tensor]:
        (x,) = ctx.saved_tensors
        ctx.layer.seen[ctx.step] = x.flatten(0, -2), grad.flatten(0, -2)
        return None, None, grad @ ctx.layer.weight if ctx.needs_input_grad[2] else None, grad.new_zeros(())
