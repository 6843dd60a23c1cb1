"""Observations to slots, and to the tokens that a core reads."""

from itertools import pairwise
from typing import Annotated, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from .attention import SlotAttention
from .errors import UserError
from .ranges import AT_LEAST_ONE, NOT_NEGATIVE


@runtime_checkable
class Encoder(Protocol):
    """What an encoder is; each is an ``nn.Module``, built as ``Name(observation_shape, num_slots, slot_size, *, options)``.

    It says in the three attributes what it was built with. Options are keyword-only, each with a default; each can be set as
    ``encoder.<option>``, and no other is asked of it. ``worldmodels check encoder=module:Name`` tries one.

    Attributes:
        observation_shape: of one observation: a picture ``(H, W, C)``, whose values are uint8, or a vector ``(n,)``.
        num_slots: K.
        slot_size: D.
    """

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


MAPS = ("sigmoid", "softmax")


class _PlaceSoftmax(nn.Module):
    """A softmax over the places of each map, ``(..., h, w)``."""

    def forward(self, maps: Tensor) -> Tensor:
        return torch.softmax(maps.flatten(-2), dim=-1).view_as(maps)


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
        mixing_layers: 1x1 convolutions with BatchNorm and ReLU before the maps; none in the paper. Without one, "small" tells
            the objects in a patch by a sum of thresholds of its pixels, and an object whose shade lies between those of two
            others is hard to tell from both.
        maps: "sigmoid" as in the paper, or "softmax": each map is one softmax over its places. A sigmoid map can show its
            object bright on dark or dark on bright, and as faintly as it likes, so the MLP puts slots into frames of their
            own, mirrored or shrunk. A map that is a softmax is a place; all slots then share one frame, in which a core that
            treats slots alike can learn which objects are neighbours. Such maps begin brighter wherever there is anything
            than where there is nothing, because one that begins dark on its object stays a map of everything else.
    """

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        num_slots: int,
        slot_size: int,
        *,
        size: str = "small",
        hidden_size: Annotated[int, AT_LEAST_ONE] = 512,
        channels: Annotated[int | None, AT_LEAST_ONE] = None,
        mixing_layers: Annotated[int, NOT_NEGATIVE] = 0,
        maps: str = "sigmoid",
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
            last = nn.Conv2d(c, num_slots, 1)
        elif size == "medium":
            stride = 5
            convolutions = [nn.Conv2d(in_channels, c, 9, padding=4), nn.BatchNorm2d(c), nn.LeakyReLU()]
            last = nn.Conv2d(c, num_slots, 5, stride=5)
        elif size == "large":
            stride = 1
            convolutions = []
            for i in range(3):
                convolutions += [nn.Conv2d(in_channels if i == 0 else c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU()]
            last = nn.Conv2d(c, num_slots, 3, padding=1)
        else:
            raise ValueError(f"size is {size!r}; expected 'small', 'medium' or 'large'")
        if min(height, width) < stride:
            raise ValueError(f"pictures are {height}x{width}; the {size} encoder needs at least {stride}x{stride}")
        self.observation_shape = tuple(observation_shape)
        self.num_slots = num_slots
        self.slot_size = slot_size
        for _ in range(mixing_layers):
            convolutions += [nn.Conv2d(c, c, 1), nn.BatchNorm2d(c), nn.ReLU()]
        if maps not in MAPS:
            raise ValueError(f"maps is {maps!r}; expected one of {list(MAPS)}")
        self.maps = nn.Sequential(*convolutions, last, nn.Sigmoid() if maps == "sigmoid" else _PlaceSoftmax())
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
        if maps == "softmax":
            with torch.no_grad():
                last.weight.abs_().mul_(0.1)

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
        channels: Annotated[int, AT_LEAST_ONE] = 64,
        num_iterations: Annotated[int, AT_LEAST_ONE] = 3,
        hidden_size: Annotated[int, AT_LEAST_ONE] = 128,
        stride: Annotated[int, AT_LEAST_ONE] = 1,
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

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        num_slots: int,
        slot_size: int,
        *,
        hidden_size: Annotated[int, AT_LEAST_ONE] = 128,
    ):
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


class PolarConv2d(nn.Conv2d):
    """A convolution of maps ``(B, C, radius, angle)``: zeros beyond the last radius, the angle goes round.

    S2RM, appendix E.2.1. Odd kernels; the size of the result is the size divided by the stride, rounded up.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve."""
        around = self.kernel_size[1] // 2
        padded = F.pad(F.pad(input, (around, around, 0, 0), mode="circular"), (0, 0, around, around))
        return F.conv2d(padded, self.weight, self.bias, self.stride)


def convolution(in_channels: int, out_channels: int, *, polar: bool, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution, plain or polar, that keeps the size of maps, or halves it with ``stride=2``, rounding up.

    Its first weights are He's (2015, for rectifiers): with torch's own, a dozen layers without normalisation shrink a view to
    next to nothing, and training stands still.
    """
    if polar:
        layer: nn.Conv2d = PolarConv2d(in_channels, out_channels, 3, stride=stride)
    else:
        layer = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


class ResidualBlock(nn.Module):
    """``x + conv(relu(conv(relu(x))))``.

    Args:
        channels: of the maps.
        polar: whether they are polar, see ``PolarConv2d``.
    """

    def __init__(self, channels: int, *, polar: bool):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(),
            convolution(channels, channels, polar=polar),
            nn.ReLU(),
            convolution(channels, channels, polar=polar),
        )

    def forward(self, maps: Tensor) -> Tensor:
        """The block."""
        return maps + self.layers(maps)


class ViewEncoder(nn.Module):
    """Local views to vectors: S2RM's convolutional network with residual connections, ``e = E(O)``.

    Rahaman et al. 2020, section 4 and appendices D and E: "a seven-layer CNN with residual layers"; in the baselines'
    the place of the view is "injected after the second convolutional layer via concatenation". The exact layers are in
    figures we do not have; ours are three convolutions, the second and the third of which halve the maps, two residual
    blocks of two, and a perceptron of two layers with LayerNorm after it: without, what a core hears of a view is a few
    hundredths of what it hears of itself, and recurrent cores stay for long at saying the same of every moment.

    Args:
        view_shape: ``(C, H, W)``, of polar views (C, radii, angles).
        size: of the vectors.
        channels: of the first two convolutions; twice as many follow.
        hidden_size: of the perceptron after them.
        place_size: d of the places that are injected; 0 for none.
        polar: whether the views are polar images.
    """

    def __init__(
        self,
        view_shape: tuple[int, ...],
        size: int,
        *,
        channels: Annotated[int, AT_LEAST_ONE] = 32,
        hidden_size: Annotated[int, AT_LEAST_ONE] = 256,
        place_size: Annotated[int, NOT_NEGATIVE] = 0,
        polar: bool = False,
    ):
        super().__init__()
        C, H, W = view_shape
        self.view_shape = (C, H, W)
        self.size = size
        self.place_size = place_size
        self.near = nn.Sequential(
            convolution(C, channels, polar=polar),
            nn.ReLU(),
            convolution(channels, channels, polar=polar, stride=2),
            nn.ReLU(),
        )
        self.far = nn.Sequential(
            convolution(channels + place_size, 2 * channels, polar=polar, stride=2),
            ResidualBlock(2 * channels, polar=polar),
            ResidualBlock(2 * channels, polar=polar),
            nn.ReLU(),
        )
        features = 2 * channels * halved(H, 2) * halved(W, 2)
        self.output = nn.Sequential(
            nn.Linear(features, hidden_size), nn.ReLU(), nn.Linear(hidden_size, size), nn.LayerNorm(size)
        )

    def forward(self, views: Tensor, places: Tensor | None = None) -> Tensor:
        """Vectors ``(M, size)`` of views ``(M, C, H, W)`` and, with ``place_size``, of their places ``(M, place_size)``."""
        maps = self.near(views)
        if self.place_size:
            assert places is not None
            told = of_order_one(places)[..., None, None].expand(-1, -1, *maps.shape[-2:])
            maps = torch.cat([maps, told], dim=1)
        return self.output(self.far(maps).flatten(1))


def of_order_one(places: Tensor) -> Tensor:
    """Places ``(M, d)`` on the unit sphere, longer, so that a layer is told as much by each number as by a feature."""
    return places.shape[1] ** 0.5 * places


def halved(size: int, times: int) -> int:
    """A size after so many halvings, each rounded up."""
    return -(-size // 2**times)


SYMBOL_ENCODERS = ("convolutions", "perceptron", "random")


class SymbolEncoder(nn.Module):
    """ESBN's encoder of a symbol, 32 x 32 and grey, to a vector (Webb et al. 2021, appendix A.3.1, and Tables 15 to 18).

    "convolutions": three of 32 channels, 4 x 4 with stride 2, then layers of 256 and of ``size`` units, each with ReLU.
    "perceptron": layers of 512, 256 and ``size`` units with ReLU. "random": one linear map that is not trained. Of the last
    two the sizes are ours; the paper's are not in its text.

    Args:
        kind: one of the three.
        size: of the vector.
    """

    def __init__(self, kind: str = "convolutions", size: Annotated[int, AT_LEAST_ONE] = 128):
        super().__init__()
        if kind not in SYMBOL_ENCODERS:
            raise ValueError(f"kind is {kind!r}; expected one of {', '.join(SYMBOL_ENCODERS)}")
        self.size = size
        layers: list[nn.Module]
        if kind == "convolutions":
            layers = [nn.Conv2d(1, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 4, 2, 1), nn.ReLU()]
            layers += [nn.Conv2d(32, 32, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 256), nn.ReLU()]
            layers += [nn.Linear(256, size), nn.ReLU()]
        elif kind == "perceptron":
            layers = [nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()]
            layers += [nn.Linear(256, size), nn.ReLU()]
        else:
            layers = [nn.Flatten(), nn.Linear(1024, size)]
        self.layers = nn.Sequential(*layers)
        for layer in layers:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        if kind == "random":
            self.requires_grad_(False)

    def forward(self, symbols: UInt8[Tensor, "B H W"]) -> Float[Tensor, "B F"]:
        """Vectors of a batch of symbols."""
        vectors: Tensor = self.layers(symbols[:, None] / 255.0)
        return vectors


SMALLEST_MAP = 8  # pixels on a side to which frames are halved


def halvings(frame_shape: tuple[int, ...]) -> int:
    """How often frames ``(C, H, W)`` are halved until they are of 8 x 8 pixels.

    Raises:
        UserError: frames for which that is no whole number above 0.
    """
    _, height, width = frame_shape
    times = (height // SMALLEST_MAP).bit_length() - 1
    if height != width or times < 1 or SMALLEST_MAP * 2**times != height:
        raise UserError(
            f"frames are {height} x {width}; expected 16, 32, 64 or 128 pixels on a side, as with env.kwargs.image_size=32"
        )
    return times


class FrameEncoder(nn.Module):
    """R-NEM's encoder of a frame: convolutions of 4 x 4 and stride 2, each with LayerNorm and ELU, down to 8 x 8.

    van Steenkiste et al. 2018, "Relational Neural Expectation Maximization", appendix; SCOFF uses it for all its videos. At
    64 x 64 these are three, of 16, 32 and 64 channels; smaller frames go without the first, so that a position covers as
    much of the scene. What a core reads of it:

    - "positions": a token for each of the 64 places, ``a_p = [c_p e_p]``, the features there beside a learned code of the
      place (Goyal et al. 2020, Algorithm 1, step 1), for which object files compete;
    - "vector": one token, a linear layer of all of them with LayerNorm and ELU (R-NEM's own).

    Args:
        frame_shape: ``(C, H, W)``, H = W = 16, 32, 64 or 128.
        tokens: "positions" or "vector".
        channels: of the last convolution, each before it has half as many.
        place_size: of a place's code.
        vector_size: of the vector.
    """

    def __init__(
        self,
        frame_shape: tuple[int, ...],
        *,
        tokens: str = "positions",
        channels: Annotated[int, AT_LEAST_ONE] = 64,
        place_size: Annotated[int, AT_LEAST_ONE] = 16,
        vector_size: Annotated[int, AT_LEAST_ONE] = 512,
    ):
        super().__init__()
        if tokens not in FRAME_TOKENS:
            raise ValueError(f"tokens is {tokens!r}; expected one of {', '.join(FRAME_TOKENS)}")
        times = halvings(frame_shape)
        sizes = [frame_shape[0], *(max(1, channels >> times - 1 - i) for i in range(times))]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Conv2d(before, after, 4, 2, 1), nn.GroupNorm(1, after), nn.ELU()]
        self.convolutions = nn.Sequential(*layers)
        self.places: nn.Parameter | None = None
        if tokens == "positions":
            self.num_tokens, self.token_size = SMALLEST_MAP**2, channels + place_size
            self.places = nn.Parameter(torch.randn(self.num_tokens, place_size))
        else:
            self.num_tokens, self.token_size = 1, vector_size
            self.vector = nn.Sequential(
                nn.Linear(SMALLEST_MAP**2 * channels, vector_size), nn.LayerNorm(vector_size), nn.ELU()
            )

    def forward(self, frames: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N F"]:
        """Tokens of a batch of frames."""
        maps = self.convolutions(frames)
        if self.places is None:
            vectors: Tensor = self.vector(maps.flatten(1))
            return vectors[:, None]
        features = maps.flatten(2).transpose(1, 2)
        return torch.cat([features, self.places.expand(len(frames), -1, -1)], dim=-1)


FRAME_TOKENS = ("positions", "vector")


ENCODERS = {
    "cswm": {"_target_": "worldmodels.encoders.CSWMEncoder"},
    "slot_attention": {"_target_": "worldmodels.encoders.SlotAttentionEncoder"},
    "vector": {"_target_": "worldmodels.encoders.VectorEncoder"},
}
"""Names of the encoders; an installed package adds its own under the entry point ``worldmodels.encoders``."""
