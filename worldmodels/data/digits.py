"""Handwritten digits, and what is done to them: turned and moved (NPS, section 4.1)."""

import hashlib
import math
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ..errors import UserError

OPERATIONS = ("translate down", "translate up", "rotate right", "rotate left")
CHAIN = 3  # operations one after another
_ANGLE, _SHIFT = 60.0, 0.2  # degrees; share of the frame
_OWN_TRAINING = 1500  # of scikit-learn's 1,797 digits
_SIDE = 28  # of a digit, as MNIST has it


def digits(path: Path | None) -> tuple[UInt8[Tensor, "N 28 28"], UInt8[Tensor, "M 28 28"]]:
    """Digits for training and for the test: MNIST's, or scikit-learn's (1,500 and 297, of 8 x 8 pixels, enlarged).

    Args:
        path: of ``mnist.npz``, as Keras gives it out, with "x_train" and "x_test"; None for scikit-learn's.

    Raises:
        UserError: it is no such file.
    """
    if path is None:
        from sklearn.datasets import load_digits  # takes a second

        small = torch.from_numpy(load_digits().images)[:, None] / 16.0
        large = F.interpolate(small, size=(_SIDE, _SIDE), mode="bilinear")[:, 0].mul(255.0).round().byte()
        return large[:_OWN_TRAINING], large[_OWN_TRAINING:]
    if not path.is_file():
        raise UserError(
            f"task.digits={path} is no file; give MNIST as mnist.npz, or leave it out for scikit-learn's digits"
        )
    try:
        with np.load(path, allow_pickle=False) as archive:
            parts = {name: archive[name] for name in ("x_train", "x_test")}
    except (BadZipFile, ValueError, OSError, EOFError, AttributeError) as error:
        raise UserError(
            f"{path} is no file of arrays: {str(error).splitlines()[0]}; give MNIST as mnist.npz"
        ) from error
    except KeyError as error:
        raise UserError(f"{path} has no array {error.args[0].split()[0]}; mnist.npz has x_train and x_test") from error
    for name, part in parts.items():
        if part.dtype != np.uint8 or part.shape[1:] != (_SIDE, _SIDE) or not len(part):
            raise UserError(
                f"{path}: {name} is {part.dtype} of shape {part.shape}; expected uint8 of (N, {_SIDE}, {_SIDE})"
            )
    return torch.from_numpy(parts["x_train"]), torch.from_numpy(parts["x_test"])


def checksum(pictures: Tensor) -> str:
    """Of the pixels."""
    return hashlib.sha256(pictures.numpy().tobytes()).hexdigest()


def framed(pictures: UInt8[Tensor, "B 28 28"], size: int) -> Float[Tensor, "B 1 S S"]:
    """Digits in the middle of black frames of ``size`` pixels on a side, as floats in [0, 1]."""
    before = (size - _SIDE) // 2
    after = size - _SIDE - before
    return F.pad(pictures[:, None] / 255.0, (before, after, before, after))


def transformed(frames: Float[Tensor, "B 1 S S"], operation: Int[Tensor, " B"]) -> Float[Tensor, "B 1 S S"]:
    """Every frame after its operation, an index into ``OPERATIONS``; what leaves the frame is lost.

    The paper names the operations; by how much is in the authors' code only: turns of 60 degrees and moves of a fifth of the
    frame, here of whole pixels.
    """
    size = frames.shape[-1]
    angle, shift = math.radians(_ANGLE), 2.0 * round(_SHIFT * size) / size  # in a frame from -1 to 1
    turned = torch.tensor([0.0, 0.0, angle, -angle], device=frames.device)[operation]
    moved = torch.tensor([-shift, shift, 0.0, 0.0], device=frames.device)[operation]
    cos, sin, zero = turned.cos(), turned.sin(), torch.zeros_like(turned)
    where = torch.stack([torch.stack([cos, sin, zero], dim=-1), torch.stack([-sin, cos, moved], dim=-1)], dim=1)
    grid = F.affine_grid(where, list(frames.shape), align_corners=False)
    return F.grid_sample(frames, grid, mode="bilinear", padding_mode="zeros", align_corners=False).clamp(0.0, 1.0)


def examples(
    pictures: UInt8[Tensor, "N 28 28"],
    size: int,
    index: Int[Tensor, " B"],
    operations: Int[Tensor, "B 3"],
    done: Tensor,
) -> tuple[Float[Tensor, "B 1 S S"], Int[Tensor, " B"], Float[Tensor, "B 1 S S"]]:
    """A frame, an operation, and the frame after it.

    As in the authors' code three operations follow each other, and any of them is the example: so the frame before has
    seen none, one or two already.

    Args:
        pictures: all digits.
        size: of a frame.
        index: the digit of each example.
        operations: of its chain.
        done: ``(B,)``, how many of these have been done before the example's.
    """
    before = framed(pictures[index], size)
    for turn in range(CHAIN - 1):
        before = torch.where((turn < done)[:, None, None, None], transformed(before, operations[:, turn]), before)
    operation = operations.gather(1, done[:, None])[:, 0]
    return before, operation, transformed(before, operation)


def drawn(number: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """What ``examples`` are made of, on the generator's device: ``index``, ``operations`` and ``done``.

    Args:
        number: of digits there are.
        count: B.
        generator: source of the draws.
    """
    device = generator.device
    index = torch.randint(number, (count,), generator=generator, device=device)
    operations = torch.randint(len(OPERATIONS), (count, CHAIN), generator=generator, device=device)
    return index, operations, torch.randint(CHAIN, (count,), generator=generator, device=device)
