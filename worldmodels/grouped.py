"""One parameter tensor for many modules: the same layer N times with different weights, as one batched matmul."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn


class GroupedLinear(nn.Module):
    """N linear layers side by side: ``y_n = x_n W_n + b_n``, weights drawn as ``nn.Linear`` draws its own.

    Args:
        num_groups: N.
        input_size: features in.
        output_size: features out.
        bias: whether each group has a bias.
    """

    def __init__(self, num_groups: int, input_size: int, output_size: int, *, bias: bool = True):
        super().__init__()
        bound = 1.0 / math.sqrt(input_size)
        self.weight = nn.Parameter(torch.empty(num_groups, input_size, output_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_groups, output_size).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Float[Tensor, "*B N I"]) -> Float[Tensor, "*B N O"]:
        """Apply the n-th layer to the n-th entry of the last but one axis."""
        y = torch.einsum("...ni,nio->...no", x, self.weight)
        return y if self.bias is None else y + self.bias


class GroupedMLP(nn.Module):
    """N two-layer perceptrons with ReLU side by side.

    Args:
        num_groups: N.
        input_size: features in.
        hidden_size: width of the hidden layer.
        output_size: features out.
    """

    def __init__(self, num_groups: int, input_size: int, hidden_size: int, output_size: int):
        super().__init__()
        self.hidden = GroupedLinear(num_groups, input_size, hidden_size)
        self.output = GroupedLinear(num_groups, hidden_size, output_size)

    def forward(self, x: Float[Tensor, "*B N I"]) -> Float[Tensor, "*B N O"]:
        """Apply the n-th perceptron to the n-th entry of the last but one axis."""
        return self.output(torch.relu(self.hidden(x)))
