"""Pictures of symbols: glyphs of a font that matplotlib ships, or a folder of anyone's."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError

SIZE = 32
_RANGES = ((0x2600, 0x2700), (0x2701, 0x27C0), (0x25A0, 0x2600), (0x2190, 0x2200), (0x0391, 0x03CA), (0x2200, 0x2300))
_ALIKE = 0.8  # cosine of two blurred glyphs from which on they count as the same symbol
_INK = (0.08, 0.6)  # of a picture, at least and at most


@cache
def glyphs(count: int = 100) -> Tensor:
    """Distinct glyphs of DejaVu Sans, black on white: signs, shapes, arrows and letters, in the order of Unicode.

    A glyph that is nearly another one (mirror images aside) is passed over: the cosine of the two, blurred, is above 0.8.

    Args:
        count: how many; there are about 200.

    Returns:
        ``(count, 32, 32)`` uint8.

    Raises:
        UserError: there are not so many.
    """
    import matplotlib
    from matplotlib.ft2font import FT2Font
    from PIL import ImageFont
    from scipy.ndimage import gaussian_filter

    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    there = set(FT2Font(str(file)).get_charmap())
    font = ImageFont.truetype(str(file), 100)
    kept: list[np.ndarray] = []
    blurred = np.zeros((0, SIZE * SIZE))
    for code in (code for first, end in _RANGES for code in range(first, end) if code in there):
        picture = _drawn(chr(code), font)
        ink = gaussian_filter(1.0 - picture / 255.0, 1.5).ravel()
        if not _INK[0] <= ink.mean() <= _INK[1]:
            continue
        ink /= np.linalg.norm(ink)
        if (blurred @ ink > _ALIKE).any():
            continue
        kept.append(picture)
        blurred = np.vstack([blurred, ink])
        if len(kept) == count:
            return torch.from_numpy(np.stack(kept))
    raise UserError(f"{count} symbols were asked for; the font has {len(kept)} distinct ones")


def _drawn(letter: str, font: Any) -> np.ndarray:
    """A glyph as large as fits, in the middle of its picture."""
    from PIL import Image, ImageDraw

    left, top, right, bottom = font.getbbox(letter)
    width, height = max(right - left, 1), max(bottom - top, 1)
    large = Image.new("L", (width, height), 255)
    ImageDraw.Draw(large).text((-left, -top), letter, font=font, fill=0)
    share = (SIZE - 4) / max(width, height)
    width, height = max(round(share * width), 1), max(round(share * height), 1)
    picture = Image.new("L", (SIZE, SIZE), 255)
    picture.paste(large.resize((width, height), Image.Resampling.LANCZOS), ((SIZE - width) // 2, (SIZE - height) // 2))
    return np.asarray(picture)


def from_folder(folder: str | Path) -> Tensor:
    """The PNGs of a folder, 32 x 32 and grey, in the order of the numbers in their names.

    Raises:
        UserError: no such folder, none in it, one that is no picture of this size, or two that are equal.
    """
    from PIL import Image, UnidentifiedImageError

    folder = Path(folder)
    files = sorted(folder.glob("*.png"), key=lambda file: [int(n) for n in re.findall(r"\d+", file.stem)] or [0])
    if not files:
        raise UserError(f"task.symbols={folder} holds no PNGs; expected pictures of {SIZE} x {SIZE}")
    pictures: dict[bytes, Path] = {}
    for file in files:
        try:
            with Image.open(file) as picture:
                if picture.size != (SIZE, SIZE):
                    raise UserError(f"{file} is {picture.size[0]} x {picture.size[1]}; expected {SIZE} x {SIZE}")
                seen = np.asarray(picture.convert("L")).tobytes()
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{file} is no picture that can be read ({type(error).__name__})") from error
        if seen in pictures:
            raise UserError(f"{file} and {pictures[seen]} are the same picture; leave one out")
        pictures[seen] = file
    return torch.frombuffer(bytearray(b"".join(pictures)), dtype=torch.uint8).reshape(-1, SIZE, SIZE)
