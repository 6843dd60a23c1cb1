"""Observations to what a policy's core reads: features extractors, which plain Stable-Baselines3 takes as well.

An extractor that says ``token_shape = (N, F)`` gives N tokens of F side by side, ``features_dim = N F``.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from ..core import Tokens, unroll
from ..cores.gru import GRU
from ..encoders import ENCODERS, Encoder, ViewEncoder
from ..plugins import build_encoder, named

INSTRUCTIONS = ("film", "token")
_TILE = 8  # pixels of a side


class FiLM(nn.Module):
    """A residual block of two convolutions, scaled and shifted by an instruction (Perez et al. 2018, equation 2).

    ``y = x + relu((1 + gamma(i)) * conv(relu(conv(x))) + beta(i))``.

    Args:
        channels: of the picture.
        instruction_size: of the instruction.
    """

    def __init__(self, channels: int, instruction_size: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.modulation = nn.Linear(instruction_size, 2 * channels)

    def forward(self, x: Tensor, instruction: Tensor) -> Tensor:
        """``(B, C, H, W)`` and ``(B, I)`` to ``(B, C, H, W)``."""
        gamma, beta = self.modulation(instruction)[..., None, None].chunk(2, dim=1)
        return x + F.relu((1 + gamma) * self.second(F.relu(self.first(x))) + beta)


class BabyAIFeatures(BaseFeaturesExtractor):
    """Pictures of a MiniGrid view and the mission: a convolution a tile, two more, and a GRU for the words.

    The sizes follow BabyAI's pixel agent (Chevalier-Boisvert et al. 2019; the convolution of one tile: Hui et al. 2020):
    each tile of 8 x 8 pixels becomes one cell of 128 channels, two blocks follow, the largest value over the view goes out.

    Departures: BabyAI normalises over the batch; we do not, because in PPO the policy that acts and the one that is trained
    must agree.

    Args:
        observation_space: dict of "image", ``(3, H, W)`` uint8 with H and W multiples of 8, and "mission", words as
            ``MultiDiscrete``.
        features_dim: size of a token.
        channels: of the convolutions.
        words: size of a word's embedding, and of the GRU.
        instruction: "film": the mission scales and shifts the channels of two FiLM blocks, one token goes out;
            "token": the blocks do not know the mission, which goes out as a token of its own.

    Raises:
        ValueError: another observation space.
    """

    takes_raw = True

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        features_dim: int = 128,
        *,
        channels: int = 64,
        words: int = 32,
        instruction: str = "film",
    ):
        if instruction not in INSTRUCTIONS:
            raise ValueError(f"instruction is {instruction!r}; expected one of {', '.join(INSTRUCTIONS)}")
        image = observation_space["image"] if isinstance(observation_space, spaces.Dict) else None
        mission = observation_space.spaces.get("mission") if isinstance(observation_space, spaces.Dict) else None
        if image is None or image.shape is None or not isinstance(mission, spaces.MultiDiscrete):
            raise ValueError(
                f"observations are {observation_space}; expected a dict of a picture and a mission of words"
            )
        if image.shape[1] % _TILE or image.shape[2] % _TILE:
            raise ValueError(f"pictures are {image.shape}; expected tiles of {_TILE} x {_TILE} pixels")
        N = 1 if instruction == "film" else 2
        super().__init__(observation_space, N * features_dim)
        self.token_shape = (N, features_dim)
        self.instruction = instruction
        self.length, vocabulary = len(mission.nvec), int(mission.nvec[0])
        self.embedding = nn.Linear(vocabulary, words, bias=False)
        self.reader = GRU(words, 1, words)  # not nn.GRU, which on a GPU refuses to be trained in evaluation mode
        self.tiles = nn.Conv2d(image.shape[0], channels, _TILE, stride=_TILE)
        instruction_size = words if instruction == "film" else 1
        self.blocks = nn.ModuleList([FiLM(channels, instruction_size) for _ in range(2)])
        self.out = nn.Linear(channels, features_dim)
        self.say = nn.Linear(words, features_dim) if instruction == "token" else None

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """Tokens side by side, ``(B, N F)``, of observations as they are, or as SB3 preprocesses them."""
        mission = self._read(observations["mission"])
        image = observations["image"]
        # Pixels are bytes; dividing the weights by 255 instead of them saves a pass over every picture.
        weight = self.tiles.weight / 255 if image.dtype == torch.uint8 else self.tiles.weight
        x = F.relu(F.conv2d(image.to(weight.dtype), weight, self.tiles.bias, stride=_TILE))
        given = mission if self.instruction == "film" else mission.new_zeros(len(image), 1)
        for block in self.blocks:
            x = block(x, given)
        seen = F.relu(self.out(x.amax((2, 3))))
        return seen if self.say is None else torch.cat([seen, F.relu(self.say(mission))], dim=1)

    def _read(self, mission: Tensor) -> Tensor:
        """What is left of the words after the last, ``(B, words)``; zeros fill up short missions and are not read.

        Args:
            mission: numbers of words ``(B, L)``, or one-hot vectors side by side ``(B, L vocabulary)``.
        """
        if mission.is_floating_point():
            mission = mission.unflatten(1, (self.length, -1)).argmax(-1)
        words = F.embedding(mission, self.embedding.weight.t()).transpose(0, 1)[:, :, None]  # (L, B, 1, words)
        heard, _ = unroll(self.reader, Tokens(words), self.reader.initial_state(len(mission)))
        last = ((mission > 0).sum(1) - 1).clamp(min=0)
        return heard[last, torch.arange(len(last), device=last.device), 0]


class _AsItIs(nn.Module):
    """Keeps a module from SB3's orthogonal initialisation, which would overwrite what was trained."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def apply(self, fn: Any) -> "_AsItIs":
        """Nothing."""
        return self


class SlotFeatures(BaseFeaturesExtractor):
    """Slots of a world model's encoder as tokens; of several pictures, like a present and a goal, slot beside slot.

    Args:
        observation_space: a picture, or a dict of pictures of one size.
        encoder: a name of ``encoder=`` or the path of a class.
        num_slots: K, with ``run`` that of its encoder.
        slot_size: D, with ``run`` that of its encoder.
        run: folder of a trained world model whose encoder is taken, weights and all.
        frozen: leave these weights as they are.
        options: of the encoder.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        *,
        encoder: str = "cswm",
        num_slots: int = 5,
        slot_size: int = 4,
        run: str | None = None,
        frozen: bool = False,
        options: dict[str, Any] | None = None,
    ):
        parts = list(observation_space.values()) if isinstance(observation_space, spaces.Dict) else [observation_space]
        shapes = {part.shape for part in parts}
        if len(shapes) != 1 or len(next(iter(shapes)) or ()) != 3:
            raise ValueError(f"observations are {observation_space}; expected pictures of one size")
        channels, height, width = next(iter(shapes))  # type: ignore[misc]
        built = _encoder_of(run, (height, width, channels)) if run else None
        if built is None:
            config = named("encoders", ENCODERS, encoder, options or {})
            built = build_encoder(config, (height, width, channels), num_slots, slot_size)
        K, D = built.num_slots, built.slot_size * len(parts)
        super().__init__(observation_space, K * D)
        self.token_shape = (K, D)
        self.names = list(observation_space) if isinstance(observation_space, spaces.Dict) else []
        self.encoder = _AsItIs(built)
        if frozen:
            self.encoder.requires_grad_(False)

    def forward(self, observations: Any) -> Tensor:
        """Slots side by side, ``(B, K D)``, of preprocessed pictures with channels first."""
        pictures = [observations[name] for name in self.names] if self.names else [observations]
        together = (
            (torch.cat(pictures).movedim(1, -1) * 255).round().to(torch.uint8)
        )  # encoders take what environments give
        slots = self.encoder.module(together)
        return torch.cat(slots.chunk(len(pictures)), dim=-1).flatten(1)


def _encoder_of(run: str, observation_shape: tuple[int, ...]) -> Any:
    """The encoder of a trained world model.

    Raises:
        ValueError: it was trained on other pictures.
    """
    from ..run import load_run

    encoder = getattr(load_run(run).model, "encoder", None)
    if not isinstance(encoder, Encoder):
        raise ValueError(f"{run} is no run of a world model, so it has no encoder")
    if tuple(encoder.observation_shape) != tuple(observation_shape):
        raise ValueError(
            f"the encoder of {run} takes {encoder.observation_shape}, the environment shows {observation_shape}"
        )
    return encoder


class ViewFeatures(BaseFeaturesExtractor):
    """An agent's local view and what it knows of itself as one token: ``relu(E(view) + W self)``.

    E is S2RM's convolutional network for local views, see ``ViewEncoder``, polar where the view is not a picture.

    Args:
        observation_space: dict of "view", a square picture (uint8, channels last or first) or a polar image
            ``(C, radii, angles)`` of numbers, and "self", a vector.
        features_dim: size of the token.
        channels: of the first convolutions.

    Raises:
        ValueError: another observation space.
    """

    def __init__(self, observation_space: spaces.Space[Any], features_dim: int = 64, *, channels: int = 32):
        parts = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {}
        view, own = parts.get("view"), parts.get("self")
        if view is None or own is None or len(view.shape or ()) != 3 or len(own.shape or ()) != 1:
            raise ValueError(f"observations are {observation_space}; expected a dict of a view and a vector, self")
        super().__init__(observation_space, features_dim)
        a, b, c = view.shape  # type: ignore[misc]
        picture = view.dtype == np.uint8
        if picture and a != b and b != c:
            raise ValueError(f"views are pictures of {view.shape}; expected square ones")
        # SB3 takes the least of three sizes for the channels, so a view of 5 x 5 with 23 of them comes as it is.
        self.channels_last = picture and a == b
        shape = (c, a, b) if self.channels_last else (a, b, c)
        self.encoder = ViewEncoder(shape, features_dim, channels=channels, polar=not picture)
        self.own = nn.Linear(own.shape[0], features_dim)  # type: ignore[index]

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """Features ``(B, features_dim)`` of preprocessed observations."""
        view = observations["view"].movedim(-1, 1) if self.channels_last else observations["view"]
        return F.relu(self.encoder(view) + self.own(observations["self"]))


FEATURES: dict[str, type[BaseFeaturesExtractor]] = {
    "babyai": BabyAIFeatures,
    "slots": SlotFeatures,
    "views": ViewFeatures,
}
