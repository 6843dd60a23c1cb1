"""Vectors to local views: what would be seen at a queried position."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .encoders import ResidualBlock, convolution, halved, of_order_one


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
