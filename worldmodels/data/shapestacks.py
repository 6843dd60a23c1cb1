"""RPIN's files of ShapeStacks: a folder of frames and a file of boxes for every video.

Qi et al. 2021 (RPIN) prepared Groth et al.'s (2018) towers as ``train/``, ``test/`` (three blocks) and ``ss4/`` (four). Each
has folders of JPG frames and, beside a folder ``0001``, a pickled array ``0001_boxes.pkl`` ``(T, blocks, 5)``: a number, and
left, top, right and bottom in pixels. Of a pickle nothing is ever run: only what numpy needs to make an array is let through.
"""

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ..errors import UserError, first_line

_LARGEST = 1 << 24  # bytes of a file of boxes
_ARRAYS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),  # how older pickles write bytes
}


class Start(NamedTuple):
    """Where videos begin, and where the boxes go.

    Args:
        first: frames of the first moment, ``(B, H, W, 3)`` uint8.
        later: of a later one.
        boxes: left, top, right and bottom as parts of width and height, ``(T + 1, B, K, 4)``, the first moment's first.
    """

    first: Tensor
    later: Tensor
    boxes: Tensor


class ShapeStacks:
    """The videos of one folder.

    Args:
        folder: like ``ss/train``.
        steps: T, after the first frame. Videos with fewer are left out, as in RPIN's code.
        later: the step of the later frame.
        image_size: to which frames are brought.

    Attributes:
        left_out: how many videos are too short.

    Raises:
        UserError: what is missing, or is not as it should be, by its name.
    """

    def __init__(self, folder: Path, *, steps: int, later: int, image_size: int):
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; RPIN's ShapeStacks has train/, test/ and ss4/ with videos in them")
        videos = sorted(path for path in folder.iterdir() if path.is_dir())
        if not videos:
            raise UserError(f"{folder} has no videos; expected folders of JPG frames, each with its _boxes.pkl")
        self.image_size = image_size
        firsts: list[Tensor] = []
        laters: list[Tensor] = []
        boxes: list[Tensor] = []
        self._frames: list[list[Path]] = []
        for video in videos:
            frames = sorted(video.glob("*.jpg"))
            if not frames:
                raise UserError(f"{video} has no JPG frames")
            file = video.with_name(f"{video.name}_boxes.pkl")
            found = _boxes(file)
            if len(found) != len(frames):
                raise UserError(f"{file} has boxes of {len(found)} frames, and {video} has {len(frames)}")
            if len(frames) <= steps:
                continue
            first, size = self._frame(frames[0])
            if boxes and found.shape[1] != boxes[0].shape[1]:
                raise UserError(f"{file} has {found.shape[1]} blocks, the videos before it {boxes[0].shape[1]}")
            firsts.append(first)
            laters.append(self._frame(frames[later])[0])
            boxes.append(found[: steps + 1] / torch.tensor([*size, *size]))
            self._frames.append(frames[: steps + 1])
        self.left_out = len(videos) - len(boxes)
        if not boxes:
            raise UserError(f"{folder} has no video of more than {steps} frames; the longest is needed to step {steps}")
        self.first, self.later = torch.stack(firsts), torch.stack(laters)
        self.boxes = torch.stack(boxes, dim=1)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def checksum(self) -> str:
        """Of first and later frames and all boxes."""
        digest = hashlib.sha256()
        for part in (self.first, self.later, self.boxes):
            digest.update(part.numpy().tobytes())
        return digest.hexdigest()[:16]

    def starts(self, videos: Tensor) -> Start:
        """Some of the videos, by their numbers ``(B,)``, on the device of these."""
        device, cpu = videos.device, videos.cpu()
        return Start(self.first[cpu].to(device), self.later[cpu].to(device), self.boxes[:, cpu].to(device))

    def film(self, video: int) -> Tensor:
        """All frames of a video, ``(T + 1, H, W, 3)`` uint8."""
        return torch.stack([self._frame(frame)[0] for frame in self._frames[video]])

    def _frame(self, file: Path) -> tuple[Tensor, tuple[int, int]]:
        """A frame, brought to size, and the width and height that it had."""
        try:
            with Image.open(file) as picture:
                colour = picture.convert("RGB")
        except (OSError, UnidentifiedImageError) as error:
            raise UserError(f"{file} is no picture that can be read") from error
        resized = colour.resize((self.image_size, self.image_size), Image.Resampling.BOX)
        return torch.from_numpy(np.array(resized)), (colour.width, colour.height)


class _OnlyArrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _boxes(file: Path) -> Tensor:
    """The boxes of a video, ``(T, blocks, 4)``."""
    try:
        if file.stat().st_size > _LARGEST:
            raise UserError(f"{file} has {file.stat().st_size:,} bytes; expected an array of boxes, far smaller")
        found = _OnlyArrays(io.BytesIO(file.read_bytes())).load()
    except OSError as error:
        raise UserError(f"{file} cannot be read; every folder of frames needs its boxes beside it") from error
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{file} is no pickled array of boxes: {first_line(error)}") from error
    shaped = isinstance(found, np.ndarray) and found.ndim == 3 and found.shape[-1] == 5 and found.shape[1] > 0
    if not shaped or found.dtype.kind not in "fiu":
        told = f"shape {found.shape} and {found.dtype}" if isinstance(found, np.ndarray) else type(found).__name__
        raise UserError(f"{file} holds {told}; expected numbers of shape (frames, blocks, 5)")
    boxes = torch.from_numpy(found[..., 1:].astype(np.float32))
    if not bool(boxes.isfinite().all()) or not bool((boxes[..., 2:] > boxes[..., :2]).all()):
        raise UserError(f"{file} has boxes that are none; expected left < right and top < bottom in all of them")
    return boxes
