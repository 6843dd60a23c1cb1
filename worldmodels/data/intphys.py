"""IntPhys's own files: folders of scenes, a PNG for each frame.

Riochet et al. 2019, "IntPhys: A Benchmark for Visual Intuitive Physics Reasoning". Training scenes are
``train/00001/scene/scene_001.png`` and so on; those of the test, whose answers are known for "dev", are
``dev/O1/01/1/scene/scene_001.png``: block, quadruple, movie, with a ``status.json`` that says if the movie is possible.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ..encoders import pixels
from ..errors import UserError


class Scenes:
    """Frames of scenes, all as long as each other.

    Args:
        frames: ``(T, n, H, W)`` uint8, grey; of quadruples four after one another, the possible ones first.
    """

    channels = 1

    def __init__(self, frames: Tensor):
        self.frames = frames

    def to(self, device: torch.device) -> "Scenes":
        """The same on another device."""
        return Scenes(self.frames.to(device))

    @property
    def checksum(self) -> str:
        """Of all frames."""
        return hashlib.sha256(self.frames.cpu().numpy().tobytes()).hexdigest()[:16]

    def windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Frames of ``count`` random stretches of ``length``, ``(length, count, 1, H, W)`` in [0, 1].

        Raises:
            UserError: scenes are shorter.
        """
        T, n = self.frames.shape[:2]
        if T < length:
            raise UserError(f"scenes have {T} frames; set task.window={T - 1} or less, or a smaller task.every")
        device = self.frames.device
        scene = torch.randint(n, (count,), generator=generator, device=device)
        start = torch.randint(T - length + 1, (count,), generator=generator, device=device)
        time = start + torch.arange(length, device=device)[:, None]
        return pixels(self.frames[time, scene][..., None])

    def quadruples(self, at_once: int, limit: int | None = None) -> Iterator[Tensor]:
        """Frames of the four movies of some quadruples after others, ``(T, 4, b, 1, H, W)`` in [0, 1]."""
        by_four = self.frames.unflatten(1, (-1, 4))[:, :limit].transpose(1, 2)
        for part in by_four.split(at_once, dim=2):
            yield pixels(part[..., None])


def find(folder: Path, *, image_size: int, every: int) -> tuple[Scenes, dict[str, Scenes]]:
    """The training scenes, and the quadruples of each block that is there.

    Args:
        folder: with "train" and "dev" in it.
        image_size: to which frames are brought.
        every: of how many frames one is taken.

    Raises:
        UserError: what is missing, or is not as it should be, by its name.
    """
    train = _scenes(_folders(folder / "train"), image_size, every)
    found = {}
    for block in (path for path in _folders(folder / "dev") if path.name in ("O1", "O2", "O3")):
        movies: list[Path] = []
        for quadruple in _folders(block):
            four = _folders(quadruple)
            possible = [_possible(movie / "status.json") for movie in four]
            if len(four) != 4 or sum(possible) != 2:
                raise UserError(f"{quadruple} has {len(four)} movies, {sum(possible)} possible; expected 4, 2 possible")
            order = sorted(range(4), key=lambda i: not possible[i])
            movies += [four[i] for i in order]
        found[block.name] = _scenes(movies, image_size, every)
    if not found:
        raise UserError(f"{folder / 'dev'} has none of the blocks O1, O2 and O3")
    return train, found


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, in order; at least one."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; IntPhys has train/ and dev/ with scenes in them")
    found = sorted(path for path in folder.iterdir() if path.is_dir())
    if not found:
        raise UserError(f"{folder} is empty; expected folders of scenes")
    return found


def _possible(file: Path) -> bool:
    try:
        told = json.loads(file.read_text())["header"]["is_possible"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} does not say whether the movie is possible (header, is_possible)") from error
    if not isinstance(told, bool):
        raise UserError(f"{file}: is_possible is {told!r}; expected true or false")
    return told


def _scenes(folders: list[Path], image_size: int, every: int) -> Scenes:
    """The scenes of some folders, in their order."""
    files = [_files(folder) for folder in folders]
    for folder, part in zip(folders, files, strict=True):
        if len(part) != len(files[0]):
            raise UserError(f"{folder} has {len(part)} frames, and {folders[0]} has {len(files[0])}; expected as many")
    frames = [torch.stack([_frame(file, image_size) for file in part[::every]]) for part in files]
    return Scenes(torch.stack(frames, dim=1))


def _files(folder: Path) -> list[Path]:
    """The frames of a scene, in order."""
    files = sorted((folder / "scene").glob("scene_*.png"))
    numbers = [file.stem.removeprefix("scene_") for file in files]
    missing = next((i for i, number in enumerate(numbers, 1) if number != f"{i:03d}"), len(numbers) + 1)
    if missing <= len(numbers) or not files:
        raise UserError(f"{folder / 'scene'} has no scene_{missing:03d}.png")
    return files


def _frame(file: Path, image_size: int) -> Tensor:
    try:
        with Image.open(file) as picture:
            grey = picture.convert("L")
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"{file} is no picture that can be read") from error
    if grey.width != grey.height:
        raise UserError(f"{file} is {grey.width} x {grey.height}; IntPhys's frames are square, 288 x 288")
    return torch.from_numpy(np.array(grey.resize((image_size, image_size), Image.Resampling.BOX)))
