"""Vectors to local views, and slots to frames."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import join_heads, scores, split_heads
from .encoders import SMALLEST_MAP, ResidualBlock, convolution, halved, halvings, of_order_one

READOUT_HEADS = 8


class ViewDecoder(nn.Module):
    """Vectors to maps: S2RM's deconvolutional network with residual connections, ``O = D(d)`` or ``O = D(h, s)``.

    Rahaman et al. 2020, section 4 and appendices D and E. In the baselines' the place of the query is concatenated "after a
    single convolutional layer"; all queries of one vector share that layer. The exact layers are in figures we do not have.
    Ours begins with the vector, normalised, as a map of one pixel: the first layer is linear, the place joins its features,
    a second one makes maps of a quarter of the view's size. Then come a residual block, and twice a doubling (to the nearest
    neighbour) with a convolution, which leaves no chequerboard as strided transposed convolutions do.

    Args:
        size: of the vectors.
        view_shape: ``(C, H, W)`` of the result.
        channels: of the last convolution's input; the maps before have twice as many.
        hidden_size: of the first layer.
        place_size: d of the places that are injected; 0 for none.
        polar: whether the views are polar images.
    """

    def __init__(
        self,
        size: int,
        view_shape: tuple[int, ...],
        *,
        channels: int = 32,
        hidden_size: int = 256,
        place_size: int = 0,
        polar: bool = False,
    ):
        super().__init__()
        C, H, W = view_shape
        self.view_shape = (C, H, W)
        self.place_size = place_size
        self.first = (2 * channels, halved(H, 2), halved(W, 2))
        self.second = (halved(H, 1), halved(W, 1))
        self.common = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, hidden_size), nn.ReLU())
        self.input = nn.Linear(hidden_size + place_size, math.prod(self.first))
        self.own = nn.Sequential(ResidualBlock(2 * channels, polar=polar), nn.ReLU())
        self.wider = nn.Sequential(convolution(2 * channels, channels, polar=polar), nn.ReLU())
        self.output = convolution(channels, C, polar=polar)

    def forward(self, vectors: Tensor, places: Tensor | None = None, index: Tensor | None = None) -> Tensor:
        """Maps of queries.

        Args:
            vectors: ``(M, size)``.
            places: with ``place_size``, those of the queries ``(Q, place_size)``.
            index: which vector each query asks, ``(Q,)``; None if each asks its own.

        Returns:
            ``(Q, C, H, W)``.
        """
        features = self.common(vectors)
        if index is not None:
            features = features[index]
        if self.place_size:
            assert places is not None
            features = torch.cat([features, of_order_one(places)], dim=1)
        maps = F.interpolate(self.own(self.input(features).unflatten(1, self.first)), size=self.second)
        return self.output(F.interpolate(self.wider(maps), size=self.view_shape[1:]))


class SlotReadout(nn.Module):
    """All slots as one vector, whatever their order: SCOFF's readout (Goyal et al. 2020, section 4).

    "The state of each OF is remapped by a siamese network [...] and used by an attention-based mechanism operating over the
    OF slots to ensure exchangeability": ``u_k = ELU(W h_k)``, and learned queries, one for each head, read the ``u_k``. The
    paper says no more; the layers are ours.

    Args:
        slot_size: D.
        size: of the vector, a multiple of the heads.
        num_heads: queries.
    """

    def __init__(self, slot_size: int, size: int, *, num_heads: int = READOUT_HEADS):
        super().__init__()
        self.num_heads = num_heads
        self.siamese = nn.Sequential(nn.Linear(slot_size, size), nn.ELU())
        self.key_value = nn.Linear(size, 2 * size)
        self.queries = nn.Parameter(torch.randn(num_heads, 1, size // num_heads))

    def forward(self, slots: Tensor) -> Tensor:
        """Slots ``(B, K, D)`` as vectors ``(B, size)``."""
        keys, values = (split_heads(x, self.num_heads) for x in self.key_value(self.siamese(slots)).chunk(2, dim=-1))
        weights = torch.softmax(scores(self.queries.expand(len(slots), -1, -1, -1), keys), dim=-1)
        return join_heads(weights @ values)[:, 0]


class DoublingConv2d(nn.Conv2d):
    """A doubling to the nearest neighbour and a convolution of 4 x 4 that keeps the size, as one convolution of 3 x 3.

    An output pixel sees two or three pixels of a row before the doubling: at even places those at -1, 0, 0 and 1, at odd
    ones those at 0, 0, 1 and 1. So the taps that see the same pixel are added up, the four outputs of a pixel become
    channels, and with 36 multiplications instead of 64 these are laid out as 2 x 2.
    """

    taps: Tensor

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels, 4)
        sees = torch.zeros(2, 3, 4)  # output's place, pixel at -1, 0 or 1, tap
        for place, offsets in enumerate(((0, 1, 1, 2), (1, 1, 2, 2))):
            for tap, offset in enumerate(offsets):
                sees[place, offset, tap] = 1.0
        self.register_buffer("taps", sees, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Maps ``(B, C, H, W)`` as maps ``(B, out_channels, 2 H, 2 W)``."""
        weight = torch.einsum("oiyx,pby,qcx->opqibc", self.weight, self.taps, self.taps).flatten(0, 2)
        assert self.bias is not None
        return F.pixel_shuffle(F.conv2d(input, weight, self.bias.repeat_interleave(4), padding=1), 2)


class FrameDecoder(nn.Module):
    """R-NEM's decoder: two linear layers to a map of 8 x 8, then doublings, each with a convolution of 4 x 4.

    van Steenkiste et al. 2018, appendix: linear 512, linear 8 * 8 * 64, LayerNorm and ELU after both; three times a doubling
    to the nearest neighbour and a convolution, of 32, 16 and as many channels as a frame has, LayerNorm and ELU between them.
    Smaller frames take fewer of these.

    Args:
        size: of the vectors.
        frame_shape: ``(C, H, W)`` of the result, H = W = 16, 32, 64 or 128.
        channels: of the first map; each later one has half as many.
        hidden_size: of the first layer.
    """

    def __init__(self, size: int, frame_shape: tuple[int, ...], *, channels: int = 64, hidden_size: int = 512):
        super().__init__()
        times = halvings(frame_shape)
        self.channels = channels
        self.linear = nn.Sequential(
            *(nn.Linear(size, hidden_size), nn.LayerNorm(hidden_size), nn.ELU()),
            *(nn.Linear(hidden_size, SMALLEST_MAP**2 * channels), nn.LayerNorm(SMALLEST_MAP**2 * channels), nn.ELU()),
        )
        layers: list[nn.Module] = []
        for i in range(times):
            after = frame_shape[0] if i == times - 1 else max(1, channels >> i + 1)
            layers.append(DoublingConv2d(max(1, channels >> i), after))
            if i < times - 1:
                layers += [nn.GroupNorm(1, after), nn.ELU()]
        self.convolutions = nn.Sequential(*layers)

    def forward(self, vectors: Tensor) -> Tensor:
        """Vectors ``(B, size)`` as frames ``(B, C, H, W)``."""
        # Channels last in memory: on a CPU these convolutions then take half the time.
        maps = self.linear(vectors).unflatten(1, (SMALLEST_MAP, SMALLEST_MAP, self.channels)).movedim(-1, 1)
        frames: Tensor = self.convolutions(maps)
        return frames.contiguous()


class JointDecoder(nn.Module):
    """One frame of all slots together: SCOFF's readout and R-NEM's decoder. A single slot is decoded as it is.

    Args:
        num_slots: K, of which other numbers may be decoded if it is above 1.
        slot_size: D.
        frame_shape: ``(C, H, W)``.
        channels: see ``FrameDecoder``.
        hidden_size: of the readout's vector and of the decoder's first layer.
        exchangeable: False lays the slots side by side instead, for cores whose slots are not of a kind.
    """

    def __init__(
        self,
        num_slots: int,
        slot_size: int,
        frame_shape: tuple[int, ...],
        *,
        channels: int,
        hidden_size: int,
        exchangeable: bool,
    ):
        super().__init__()
        attends = num_slots > 1 and exchangeable
        self.readout: nn.Module = SlotReadout(slot_size, hidden_size) if attends else nn.Flatten()
        size = hidden_size if attends else num_slots * slot_size
        self.decoder = FrameDecoder(size, frame_shape, channels=channels, hidden_size=hidden_size)

    def forward(self, slots: Tensor) -> Tensor:
        """Slots ``(B, K, D)`` as the logits of frames, ``(B, C, H, W)``."""
        frames: Tensor = self.decoder(self.readout(slots))
        return frames


class BroadcastDecoder(nn.Module):
    """The vector at every pixel beside the pixel's place, and convolutions of 5 x 5 that keep the size.

    Watters et al. 2019, "Spatial Broadcast Decoder", as OP3's code has it: four convolutions of 32 channels with ELU, and one
    more. Every pixel passes through all of them, which costs tens of times what a ``FrameDecoder`` does.

    Args:
        size: of the vectors.
        frame_shape: ``(C, H, W)`` of the result.
        channels: of the convolutions but the last.
    """

    places: Tensor

    def __init__(self, size: int, frame_shape: tuple[int, ...], *, channels: int = 32):
        super().__init__()
        C, H, W = frame_shape
        self.register_buffer("places", pixel_places(H, W), persistent=False)
        layers: list[nn.Module] = []
        for before in (size + 2, channels, channels, channels):
            layers += [nn.Conv2d(before, channels, 5, padding=2), nn.ELU()]
        self.convolutions = nn.Sequential(*layers, nn.Conv2d(channels, C, 5, padding=2))

    def forward(self, vectors: Tensor) -> Tensor:
        """Vectors ``(B, size)`` as frames ``(B, C, H, W)``."""
        maps = vectors[..., None, None].expand(-1, -1, *self.places.shape[-2:])
        frames: Tensor = self.convolutions(torch.cat([maps, self.places.expand(len(vectors), -1, -1, -1)], dim=1))
        return frames


def pixel_places(height: int, width: int) -> Tensor:
    """The place of every pixel, x and y from -1 to 1, ``(2, H, W)``."""
    x, y = torch.meshgrid(torch.linspace(-1, 1, width), torch.linspace(-1, 1, height), indexing="xy")
    return torch.stack([x, y])


class SlotDecoder(nn.Module):
    """Every slot as a mask and colours of its own, and the frame as their mixture.

    ``p = sum_k m_k c_k`` with ``m = softmax_k`` of the masks' logits and ``c_k`` the sigmoid of the colours', as in slot
    attention (Locatello et al. 2020) and in NPS's bouncing balls (Goyal et al. 2021, Table 4). Each slot goes through the
    same ``FrameDecoder``, so slots are exchangeable and any number of them can be decoded.

    Args:
        slot_size: D.
        frame_shape: ``(C, H, W)``.
        channels: see ``FrameDecoder``.
        hidden_size: see ``FrameDecoder``.
        broadcast: a ``BroadcastDecoder`` of half as many channels in its place.
    """

    def __init__(
        self,
        slot_size: int,
        frame_shape: tuple[int, ...],
        *,
        channels: int,
        hidden_size: int,
        broadcast: bool = False,
    ):
        super().__init__()
        C, H, W = frame_shape
        self.decoder: nn.Module
        if broadcast:
            self.decoder = BroadcastDecoder(slot_size, (C + 1, H, W), channels=channels // 2)
        else:
            self.decoder = FrameDecoder(slot_size, (C + 1, H, W), channels=channels, hidden_size=hidden_size)

    def forward(self, slots: Tensor) -> Tensor:
        """Slots ``(B, K, D)`` as the logits of frames, ``(B, C, H, W)``."""
        log_masks, colours = self._parts(slots)
        lit = (log_masks + F.logsigmoid(colours)).logsumexp(1)
        dark = (log_masks + F.logsigmoid(-colours)).logsumexp(1)
        return lit - dark  # the logit of a mixture: log p - log(1 - p)

    def parts(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The masks ``(B, K, H, W)``, which add up to 1 over the slots, and colours ``(B, K, C, H, W)`` in 0 to 1."""
        log_masks, colours = self._parts(slots)
        return log_masks[:, :, 0].exp(), colours.sigmoid()

    def logits(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the masks, ``(B, K, 1, H, W)``, and of the colours, ``(B, K, C, H, W)``."""
        each = self.decoder(slots.flatten(0, 1)).unflatten(0, slots.shape[:2])  # (B, K, C + 1, H, W)
        return each[:, :, :1], each[:, :, 1:]

    def _parts(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        masks, colours = self.logits(slots)
        return torch.log_softmax(masks, dim=1), colours
