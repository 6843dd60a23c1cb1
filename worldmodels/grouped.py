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
        bound: weights and biases are drawn from U(-bound, bound); None for ``1 / sqrt(input_size)``.
    """

    def __init__(
        self, num_groups: int, input_size: int, output_size: int, *, bias: bool = True, bound: float | None = None
    ):
        super().__init__()
        bound = bound or 1.0 / math.sqrt(input_size)
        self.weight = nn.Parameter(torch.empty(num_groups, input_size, output_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_groups, output_size).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Float[Tensor, "*B N I"]) -> Float[Tensor, "*B N O"]:
        """Apply the n-th layer to the n-th entry of the last but one axis."""
        groups = x.reshape(-1, *x.shape[-2:]).transpose(0, 1)  # (N, B, I)
        if self.bias is None:
            y = torch.bmm(groups, self.weight)
        else:
            y = torch.baddbmm(self.bias[:, None], groups, self.weight)
        return y.transpose(0, 1).reshape(*x.shape[:-1], self.weight.shape[-1])


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
        self.num_groups, self.input_size = num_groups, input_size
        self.hidden = GroupedLinear(num_groups, input_size, hidden_size)
        self.output = GroupedLinear(num_groups, hidden_size, output_size)

    def forward(self, x: Float[Tensor, "*B N I"]) -> Float[Tensor, "*B N O"]:
        """Apply the n-th perceptron to the n-th entry of the last but one axis."""
        return self.output(torch.relu(self.hidden(x)))

    def of_one(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B N O"]:
        """Apply every perceptron to the same input."""
        return self(x[..., None, :].expand(*x.shape[:-1], self.num_groups, -1))


class GroupedConvolutions(nn.Module):
    """N networks of two 3 x 3 convolutions with ReLU between them side by side, on features that are flattened maps.

    An input is some tokens one after the other, each a slot of ``channels * map_size ** 2`` features and what is attached
    to it, which every place of the map sees; an output is as long as a slot.

    Args:
        num_groups: N.
        num_tokens: of an input.
        slot_size: features of a slot, a multiple of ``map_size ** 2``.
        attached_size: features attached to it.
        hidden_channels: of the first convolution.
        map_size: height and width of the maps.

    Raises:
        ValueError: slots that are no such maps.
    """

    def __init__(
        self,
        num_groups: int,
        num_tokens: int,
        slot_size: int,
        attached_size: int,
        hidden_channels: int,
        map_size: int,
    ):
        super().__init__()
        channels = map_channels(slot_size, map_size)
        self.num_groups, self.input_size = num_groups, num_tokens * (slot_size + attached_size)
        self.slot_size, self.num_tokens, self.map_size = slot_size, num_tokens, map_size
        seen = num_tokens * (channels + attached_size)
        self.hidden = nn.Conv2d(seen, num_groups * hidden_channels, 3, padding=1)
        self.output = nn.Conv2d(num_groups * hidden_channels, num_groups * channels, 3, padding=1, groups=num_groups)

    def of_one(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B N O"]:
        """Apply every network to the same input."""
        maps = as_maps(x.reshape(-1, self.num_tokens, x.shape[-1] // self.num_tokens), self.slot_size, self.map_size)
        y = self.output(torch.relu(self.hidden(maps.flatten(1, 2))))
        return y.view(*x.shape[:-1], self.num_groups, self.slot_size)


def map_channels(slot_size: int, map_size: int) -> int:
    """Channels of a slot that is a map.

    Raises:
        ValueError: it is none.
    """
    if map_size < 1 or slot_size % map_size**2:
        raise ValueError(
            f"slot_size is {slot_size} and map_size {map_size}; a slot of maps has channels * map_size ** 2 features"
        )
    return slot_size // map_size**2


def as_maps(tokens: Tensor, slot_size: int, map_size: int) -> Tensor:
    """Tokens ``(..., F)`` as maps ``(..., C, M, M)``: a slot's own, and a constant one for each attached feature."""
    slots, attached = tokens.split([slot_size, tokens.shape[-1] - slot_size], dim=-1)
    maps = slots.reshape(*slots.shape[:-1], -1, map_size, map_size)
    if not attached.shape[-1]:
        return maps
    return torch.cat([maps, attached[..., None, None].expand(*attached.shape, map_size, map_size)], dim=-3)


def gru_update(inputs: Tensor, recurrent: Tensor, hidden: Tensor) -> Tensor:
    """The gates of a GRU (Cho et al. 2014, in the form of ``nn.GRU``).

    ``r = s(i_r + h_r)``, ``u = s(i_u + h_u)``, ``n = tanh(i_n + r * h_n)``, ``h' = (1 - u) n + u h``.

    Args:
        inputs: ``W x + b``, ``(..., 3 D)``, in the order r, u, n.
        recurrent: ``U h + b``, ``(..., 3 D)``.
        hidden: h, ``(..., D)``, or a shape that broadcasts to it.

    Returns:
        h', ``(..., D)``.
    """
    D = hidden.shape[-1]
    input_gates, input_candidate = inputs.split([2 * D, D], dim=-1)
    recurrent_gates, recurrent_candidate = recurrent.split([2 * D, D], dim=-1)
    reset, update = torch.sigmoid(input_gates + recurrent_gates).split(D, dim=-1)
    candidate = torch.tanh(torch.addcmul(input_candidate, reset, recurrent_candidate))
    return candidate + update * (hidden - candidate)  # not lerp, which mixed precision does not promote


def lstm_update(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """The gates of an LSTM (Hochreiter & Schmidhuber 1997, in the form of ``nn.LSTM``).

    ``c' = s(f) c + s(i) tanh(g)``, ``h' = s(o) tanh(c')``.

    Args:
        gates: ``W x + U h + b``, ``(..., 4 D)``, in the order i, f, o, g (``nn.LSTM`` has i, f, g, o).
        cell: c, ``(..., D)``, or a shape that broadcasts to it.

    Returns:
        h' and c', ``(..., D)``.
    """
    D = cell.shape[-1]
    gates, candidate = gates.split([3 * D, D], dim=-1)
    input_gate, forget, output = torch.sigmoid(gates).split(D, dim=-1)
    cell = torch.addcmul(forget * cell, input_gate, torch.tanh(candidate))
    return output * torch.tanh(cell), cell


@torch.no_grad()
def draw_lstm(weight: Tensor, input_size: int) -> None:
    """Draw the weights of an LSTM as Webb et al. 2021 do for all their recurrent models (appendix A.3.3).

    Normal after Glorot & Bengio 2010, with a gain of 1 for gates and of 5/3 for what goes through tanh. As in the authors'
    code the input and forget gates are drawn as one matrix, the weights of inputs and of hidden units apart.

    Args:
        weight: ``(4 D, input_size + D)``, in the order i, f, o, g.
        input_size: features of the input.
    """
    D = len(weight) // 4
    for part in weight.split([input_size, D], dim=1):
        gates, output, candidate = part.split([2 * D, D, D])
        nn.init.xavier_normal_(gates)
        nn.init.xavier_normal_(output)
        nn.init.xavier_normal_(candidate, gain=5 / 3)


class GroupedGRUCell(nn.Module):
    """N GRU cells side by side, block-diagonal for real; weights drawn as ``nn.GRUCell`` draws its own.

    Args:
        num_groups: N.
        input_size: features each cell reads.
        hidden_size: D of each cell.
    """

    def __init__(self, num_groups: int, input_size: int, hidden_size: int):
        super().__init__()
        bound = 1.0 / math.sqrt(hidden_size)
        self.input = GroupedLinear(num_groups, input_size, 3 * hidden_size, bound=bound)
        self.recurrent = GroupedLinear(num_groups, hidden_size, 3 * hidden_size, bound=bound)

    def forward(self, x: Float[Tensor, "B N I"], hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """The next hidden vectors, see ``gru_update``."""
        return gru_update(self.input(x), self.recurrent(hidden), hidden)


class GroupedLSTMCell(nn.Module):
    """N LSTM cells side by side, block-diagonal for real; weights drawn as ``nn.LSTMCell`` draws its own.

    Args:
        num_groups: N.
        input_size: features each cell reads.
        hidden_size: D of each cell.
    """

    def __init__(self, num_groups: int, input_size: int, hidden_size: int):
        super().__init__()
        bound = 1.0 / math.sqrt(hidden_size)
        self.input = GroupedLinear(num_groups, input_size, 4 * hidden_size, bound=bound)
        self.recurrent = GroupedLinear(num_groups, hidden_size, 4 * hidden_size, bias=False, bound=bound)

    def forward(
        self, x: Float[Tensor, "B N I"], hidden: Float[Tensor, "B N D"], cell: Float[Tensor, "B N D"]
    ) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "B N D"]]:
        """The next hidden and cell vectors, see ``lstm_update``."""
        return lstm_update(self.input(x) + self.recurrent(hidden), cell)
