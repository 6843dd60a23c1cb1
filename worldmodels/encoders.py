"""Observations to slots."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from .attention import SlotAttention
from .errors import UserError


@runtime_checkable
class Encoder(Protocol):
    """What an encoder is; each is an ``nn.Module``."""

    observation_shape: tuple[int, ...]
    num_slots: int
    slot_size: int

    def __call__(self, observations: Tensor) -> Tensor:
        """Slots ``(B, K, D)`` of a batch of observations as the environment gives them."""
        ...


def pixels(observations: UInt8[Tensor, "*B H W C"]) -> Float[Tensor, "*B C H W"]:
    """Pictures as environments give them, ``(..., H, W, C)`` uint8, as floats in [0, 1] with channels first."""
    if observations.dtype != torch.uint8:
        raise UserError(f"pictures are {observations.dtype}; expected uint8, so have the environment give 0 to 255")
    return torch.div(observations.movedim(-1, -3), 255.0)


class CSWMEncoder(nn.Module):
    """C-SWM's object extractor and object encoder: one feature map a slot, one MLP for all maps.

    Kipf et al. 2020, section 2.1 and appendix; sizes as in the authors' code. The convolutions end in K sigmoid maps
    m_k; ``z_k = MLP(m_k)`` with two hidden layers, LayerNorm after the second.

    Args:
        observation_shape: ``(H, W, C)``.
        num_slots: K.
        slot_size: D.
        size: "small" (10x10 patches, for grids), "medium" (maps a fifth as high and wide) or "large" (full maps).
        hidden_size: of the MLP; 512 in the paper.
        channels: of the convolutions; None for ``hidden_size // 16`` as in the authors' code.
    """

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        num_slots: int,
        slot_size: int,
        *,
        size: str = "small",
        hidden_size: int = 512,
        channels: int | None = None,
    ):
        super().__init__()
        if len(observation_shape) != 3:
            raise ValueError(
                f"observations are {observation_shape}; this encoder takes pictures (H, W, C); for vectors use encoder=vector"
            )
        height, width, in_channels = observation_shape
        c = channels or max(1, hidden_size // 16)
        if size == "small":
            stride = 10
            convolutions = [nn.Conv2d(in_channels, c, 10, stride=10), nn.BatchNorm2d(c), nn.ReLU()]
            convolutions += [nn.Conv2d(c, num_slots, 1)]
        elif size == "medium":
            stride = 5
            convolutions = [nn.Conv2d(in_channels, c, 9, padding=4), nn.BatchNorm2d(c), nn.LeakyReLU()]
            convolutions += [nn.Conv2d(c, num_slots, 5, stride=5)]
        elif size == "large":
            stride = 1
            convolutions = []
            for i in range(3):
                convolutions += [nn.Conv2d(in_channels if i == 0 else c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU()]
            convolutions += [nn.Conv2d(c, num_slots, 3, padding=1)]
        else:
            raise ValueError(f"size is {size!r}; expected 'small', 'medium' or 'large'")
        if min(height, width) < stride:
            raise ValueError(f"pictures are {height}x{width}; the {size} encoder needs at least {stride}x{stride}")
        self.observation_shape = tuple(observation_shape)
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.maps = nn.Sequential(*convolutions, nn.Sigmoid())
        self.mlp = nn.Sequential(
            nn.Linear((height // stride) * (width // stride), hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.LayerNorm(hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, slot_size),
        )
        for module in self.maps:
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, observations: UInt8[Tensor, "B H W C"]) -> Float[Tensor, "B K D"]:
        """Slots of a batch of pictures."""
        return self.mlp(self.maps(pixels(observations)).flatten(2))


class SlotAttentionEncoder(nn.Module):
    """A convolutional backbone and slot attention: K slots compete for the pixels.

    Locatello et al. 2020, "Object-Centric Learning with Slot Attention", Algorithm 1:
    ``attn = softmax_slots(k(inputs) q(slots)^T / sqrt(D))``, ``updates = weighted mean over inputs of v(inputs)``,
    ``slots = GRU(updates, slots)``, ``slots += MLP(LayerNorm(slots))``, repeated ``num_iterations`` times. The backbone
    is four convolutions that keep the picture's size, 64 channels (the NPS paper's physics encoder), with a learned
    linear embedding of the position added, as in the slot attention paper.

    Departure: the paper draws the first slots from one learned Gaussian. A world model compares slot k of an observation
    with slot k of its successor, so ours start from K learned vectors, the same for every picture; drawn ones would be
    numbered differently each time and slot-wise distances would mean nothing.

    Args:
        observation_shape: ``(H, W, C)``.
        num_slots: K.
        slot_size: D.
        channels: of the backbone.
        num_iterations: rounds of attention.
        hidden_size: of the residual MLP.
        stride: of the first two convolutions; 2 makes attention look at a sixteenth of the pixels.
    """

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        num_slots: int,
        slot_size: int,
        *,
        channels: int = 64,
        num_iterations: int = 3,
        hidden_size: int = 128,
        stride: int = 1,
    ):
        super().__init__()
        if len(observation_shape) != 3:
            raise ValueError(
                f"observations are {observation_shape}; this encoder takes pictures (H, W, C); for vectors use encoder=vector"
            )
        self.observation_shape = tuple(observation_shape)
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.backbone = nn.Sequential(
            nn.Conv2d(observation_shape[2], channels, 5, stride=stride, padding=2),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 5, stride=stride, padding=2),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 5, padding=2),
            nn.ReLU(),
        )
        self.position = nn.Linear(4, channels)
        self.input_norm = nn.LayerNorm(channels)
        self.input_mlp = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels))
        self.attention = SlotAttention(channels, slot_size, num_iterations=num_iterations, hidden_size=hidden_size)
        self.first_slots = nn.Parameter(torch.randn(num_slots, slot_size))

    def forward(self, observations: UInt8[Tensor, "B H W C"]) -> Float[Tensor, "B K D"]:
        """Slots of a batch of pictures."""
        maps = self.backbone(pixels(observations)).movedim(1, -1)  # (B, h, w, channels)
        inputs = self.input_mlp(self.input_norm((maps + self.position(_grid(maps))).flatten(1, 2)))
        slots, _ = self.attention(self.attention.prepare(inputs), self.first_slots.expand(len(observations), -1, -1))
        return slots


def _grid(maps: Tensor) -> Tensor:
    """(h, w, 4): distance of each place from the four sides, 0 to 1."""
    height, width = maps.shape[1:3]
    row = torch.linspace(0.0, 1.0, height, device=maps.device, dtype=maps.dtype)[:, None].expand(height, width)
    column = torch.linspace(0.0, 1.0, width, device=maps.device, dtype=maps.dtype).expand(height, width)
    return torch.stack([row, column, 1.0 - row, 1.0 - column], dim=-1)


class VectorEncoder(nn.Module):
    """A perceptron from a vector observation to K slots, two hidden layers with LayerNorm after the second.

    Args:
        observation_shape: ``(n,)``, or any shape that is flattened.
        num_slots: K.
        slot_size: D.
        hidden_size: width.
    """

    def __init__(self, observation_shape: tuple[int, ...], num_slots: int, slot_size: int, *, hidden_size: int = 128):
        super().__init__()
        if len(observation_shape) == 3:
            raise ValueError(f"observations are {observation_shape}; this encoder takes vectors, use encoder=cswm")
        size = 1
        for axis in observation_shape:
            size *= axis
        self.observation_shape = tuple(observation_shape)
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.first = nn.Linear(size, hidden_size)
        self.rest = nn.Sequential(
            nn.ReLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.LayerNorm(hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, num_slots * slot_size),
        )

    def forward(self, observations: Tensor) -> Float[Tensor, "B K D"]:
        """Slots of a batch of vectors."""
        flat = observations.reshape(len(observations), -1).to(self.first.weight.dtype)
        return self.rest(self.first(flat)).unflatten(1, (self.num_slots, self.slot_size))


ENCODERS = {
    "cswm": {"_target_": "worldmodels.encoders.CSWMEncoder"},
    "slot_attention": {"_target_": "worldmodels.encoders.SlotAttentionEncoder"},
    "vector": {"_target_": "worldmodels.encoders.VectorEncoder"},
}
"""Names of the encoders; an installed package adds its own under the entry point ``worldmodels.encoders``."""
