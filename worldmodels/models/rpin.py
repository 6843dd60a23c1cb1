"""RPIN: where boxes go, from a picture of the first moment.

Qi et al. 2021, "Learning Long-term Visual Dynamics with Region Proposal Interaction Networks", section 3 and appendix; sizes
and what the paper leaves open as in the authors' code for ShapeStacks. A slot is a map of features, cut out of the picture
where its box is; any core without a state says how slots change, RPIN's own being ``cores/cin.py``.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import RecurrentCore, Tokens
from ..errors import UserError

_DEPTH = 3  # of the hourglass
_SAMPLES = 2  # a side, of the points whose mean is a place of a slot's map


class RPIN(nn.Module):
    """Slots of a picture's boxes, and what a core makes of them step by step.

    ``x_k^0 = f(RoIAlign(backbone(picture), box_k))``, ``x^{t+1} = P(x^t + core(x^t))``, ``box_k^t = W x_k^t`` (equations 1 to
    4). What cannot be seen in the picture may be in a latent: ``z ~ N(0, 1)``, in training from the features of the picture
    and of a later one, is the state from which an LSTM that reads nothing says a vector for each step, and before a step
    ``x <- normalized(ReLU(W [x, z_t]))``, normalised over the channels of each place.

    Departures:
    - The authors' code also has every slot draw the mask of its object, with a weight of .001; the error NPS reports is of
      boxes alone, and so is ours.
    - Their RoIAlign places the pixels of features half a pixel off (``aligned=False``); in ours they are where they are.

    Args:
        core: without a state, for tokens of ``channels * roi_size ** 2`` features.
        channels: of the features of a picture and of a slot's map; 256 in the paper, a multiple of 8.
        roi_size: height and width of a slot's map; 7 in the paper.
        latent_size: of z; 8 in the paper, and 0 for none.

    Attributes:
        batches: that it was trained on.
    """

    def __init__(self, core: RecurrentCore, *, channels: int, roi_size: int, latent_size: int):
        super().__init__()
        self.core: RecurrentCore
        self.batches: Tensor
        self.core = core
        self.roi_size, self.latent_size = roi_size, latent_size
        self.backbone = Hourglass(channels)
        self.embed = nn.Sequential(*(part for _ in range(3) for part in (_convolution(channels, channels), nn.ReLU())))
        self.predict = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU())
        self.box = nn.Linear(channels * roi_size**2, 4)
        if latent_size:
            pairs = (2 * channels, channels, channels)
            layers = [part for size in pairs for part in (_convolution(size, channels, stride=2), nn.ReLU())]
            self.compare = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.posterior = nn.Linear(channels, 2 * latent_size)
            self.unfold = nn.LSTM(1, latent_size)
            self.attach = nn.Conv2d(channels + latent_size, channels, 1)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(
        self,
        pictures: Tensor,
        boxes: Tensor,
        steps: int,
        later: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Where the boxes go.

        Args:
            pictures: of the first moment, ``(B, 3, H, W)`` in [0, 1], of heights and widths that are multiples of 32.
            boxes: there, ``(B, K, 4)``: left, top, right and bottom, as parts of width and height.
            steps: T.
            later: pictures of a later moment, from which the latent is drawn; without them it is drawn from the prior.
            generator: source of the latent.

        Returns:
            Middles and sizes ``(T, B, K, 4)``: x, y, width and height, as parts of the picture's; and how far the latent is
            from the prior, ``KL / (B latent_size)`` in nats, 0 where it was drawn from the prior.
        """
        if self.training:
            self.batches += 1
        _, maps, distance = self._unrolled(pictures, boxes, steps, later, generator)
        return self.box(maps.flatten(-3)), distance

    def tokens(self, pictures: Tensor, boxes: Tensor, steps: int, generator: torch.Generator | None = None) -> Tokens:
        """What the core reads at every step, ``(T, B, K, F)``; see ``forward``."""
        return Tokens(self._unrolled(pictures, boxes, steps, None, generator)[0])

    def _unrolled(
        self, pictures: Tensor, boxes: Tensor, steps: int, later: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the core reads at every step, the maps ``(T, B, K, C, S, S)`` after it, and the latent's distance."""
        B, K, _ = boxes.shape
        both = pictures if later is None or not self.latent_size else torch.cat([pictures, later])
        features = self.backbone(both)
        maps = self.embed(roi_align(features[:B], boxes, self.roi_size).flatten(0, 1))
        z, distance = self._latent(features, steps, B, generator)
        read, found = [], []
        for step in range(steps):
            if self.latent_size:
                told = z[step].repeat_interleave(K, 0)[..., None, None].expand(-1, -1, *maps.shape[2:])
                maps = F.normalize(torch.relu(self.attach(torch.cat([maps, told], dim=1))), dim=1)
            slots = maps.flatten(1).unflatten(0, (B, K))
            read.append(slots)
            slots = slots + self.core(self.core.prepare(Tokens(slots)), {})[0]
            maps = self.predict(slots.view_as(maps))
            found.append(maps.unflatten(0, (B, K)))
        return torch.stack(read), torch.stack(found), distance

    def _latent(self, features: Tensor, steps: int, B: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """A vector for every step, ``(T, B, latent)``, and the distance of what it comes from to the prior."""
        none = features.new_zeros(())
        if not self.latent_size:
            return none, none
        options = {"dtype": features.dtype, "device": features.device}
        drawn = torch.randn(B, self.latent_size, generator=generator, **options)  # type: ignore[call-overload]
        if len(features) > B:
            mean, log_variance = self.posterior(self.compare(torch.cat(features.split(B), dim=1))).chunk(2, dim=-1)
            none = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).mean()
            drawn = mean + (0.5 * log_variance).exp() * drawn
        nothing = drawn.new_zeros(steps, B, 1)
        return self.unfold(nothing, (torch.zeros_like(drawn)[None], drawn[None]))[0], none


def rpin_model(
    core: Callable[..., RecurrentCore], *, num_slots: int, channels: int, roi_size: int, latent_size: int
) -> RPIN:
    """The model around a core; see ``RPIN``.

    Args:
        core: makes the core in the sizes it is given.
        num_slots: boxes in training.
        channels: of features.
        roi_size: of a slot's map.
        latent_size: of z.
    """
    size = channels * roi_size**2
    built = core(size, num_tokens=num_slots, num_slots=num_slots, slot_size=size)
    return RPIN(built, channels=channels, roi_size=roi_size, latent_size=latent_size)


def refuse_other_sizes(frame_shape: tuple[int, int, int]) -> None:
    """Refuse frames that the hourglass cannot halve five times.

    Raises:
        UserError: naming their size.
    """
    channels, height, width = frame_shape
    if channels != 3 or height != width or height % 32:
        raise UserError(
            f"frames are {height} x {width} with {channels} channels; towers are seen in square ones of 3 colours whose size "
            "is a multiple of 32, such as 64 or 224"
        )


def roi_align(features: Tensor, boxes: Tensor, size: int) -> Tensor:
    """What features show within boxes, brought to one size (He et al. 2017, "Mask R-CNN", section 3).

    Each place of a map is the mean of 2 x 2 points, spread evenly over its part of the box, between the features around
    them; outside of the picture they are those at its edge.

    Args:
        features: ``(B, C, H, W)``.
        boxes: ``(B, K, 4)``: left, top, right and bottom, as parts of width and height.
        size: S, height and width of the maps.

    Returns:
        ``(B, K, C, S, S)``.
    """
    B, K, _ = boxes.shape
    points = _SAMPLES * size
    along = (torch.arange(points, dtype=boxes.dtype, device=boxes.device) + 0.5) / points
    left_top, right_bottom = boxes.split(2, dim=-1)
    places = left_top[..., None, :] + (right_bottom - left_top)[..., None, :] * along[:, None]  # (B, K, points, 2)
    x, y = places.unbind(-1)
    shape = (B, K, points, points)
    grid = torch.stack([x[:, :, None].expand(shape), y[..., None].expand(shape)], dim=-1)
    seen = F.grid_sample(
        features, 2.0 * grid.flatten(1, 2) - 1.0, mode="bilinear", padding_mode="border", align_corners=False
    )  # (B, C, K points, points)
    return F.avg_pool2d(seen, _SAMPLES).unflatten(2, (K, size)).transpose(1, 2)


class Hourglass(nn.Module):
    """Features of a picture at a quarter of its resolution, each with the whole picture in view.

    Newell et al. 2016, "Stacked Hourglass Networks for Human Pose Estimation": one hourglass of three halvings, with the
    pre-activated bottlenecks of He et al. 2016 and batch normalisation, as RPIN has it.

    Args:
        channels: C, of the features; 256 in RPIN, a multiple of 8.
    """

    def __init__(self, channels: int):
        super().__init__()
        C = channels
        self.start = nn.Sequential(
            nn.Conv2d(3, C // 4, 7, stride=2, padding=3),
            *_normed(C // 4),
            _Bottleneck(C // 4, C // 2),
            nn.MaxPool2d(2),
            _Bottleneck(C // 2, C),
            _Bottleneck(C, C),
        )
        self.beside, self.down, self.up = (
            nn.ModuleList(_Bottleneck(C, C) for _ in range(_DEPTH)) for _ in range(3)
        )  # by halving
        self.bottom = _Bottleneck(C, C)
        self.end = nn.Sequential(_Bottleneck(C, C), nn.Conv2d(C, C, 1), *_normed(C), nn.Conv2d(C, C, 1))

    def forward(self, pictures: Tensor) -> Tensor:
        """``(B, C, H / 4, W / 4)`` of pictures ``(B, 3, H, W)`` in [0, 1]."""
        x = self.start(pictures - 0.5)
        kept = []
        for beside, down in zip(self.beside, self.down, strict=True):
            kept.append(beside(x))
            x = down(F.max_pool2d(x, 2))
        x = self.bottom(x)
        for up in reversed(self.up):
            x = kept.pop() + F.interpolate(up(x), scale_factor=2)
        return self.end(x)


class _Bottleneck(nn.Module):
    """``x + W_3 a(W_2 a(W_1 a(x)))``: a is ReLU after batch normalisation, W_2 a 3 x 3 convolution of half the channels."""

    def __init__(self, channels: int, output_channels: int):
        super().__init__()
        half = output_channels // 2
        self.change = nn.Sequential(
            *_normed(channels),
            nn.Conv2d(channels, half, 1),
            *_normed(half),
            _convolution(half, half),
            *_normed(half),
            nn.Conv2d(half, output_channels, 1),
        )
        self.past = nn.Identity() if channels == output_channels else nn.Conv2d(channels, output_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, output channels, H, W)``."""
        return self.past(x) + self.change(x)


def _normed(channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.BatchNorm2d(channels), nn.ReLU()


def _convolution(channels: int, output_channels: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, output_channels, 3, stride=stride, padding=1)
