"""Pictures and films of videos: true beside imagined frames, what each slot drew, and which schema was used when."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from .figures import COLORS, WIDEST, as_losses, blank, legend, rgb, save, whole_numbers

_SHOWN = 12  # frames of a rollout side by side


def _picture(frame: Tensor) -> np.ndarray:
    """A frame ``(C, H, W)`` in [0, 1] as ``(H, W, 3)``."""
    return frame.detach().cpu().expand(3, -1, -1).movedim(0, -1).numpy()


def along(errors: Mapping[str, Mapping[str, Sequence[float]]], prompt: int, path: Path) -> Path:
    """The error of imagined frames against their number, a panel for each variant.

    Args:
        errors: by variant and by who said the frames ("model", "copy", "blurred"), the error at each step.
        prompt: true frames before them.
        path: the file to write.
    """
    figure = blank(min(WIDEST, 4.2 * len(errors)), 3.4, layout="constrained")
    axes = figure.subplots(1, len(errors), squeeze=False)[0]
    said = {"model": "the model", "copy": "a copy of the last true frame", "blurred": "the true frame, blurred"}
    for axis, (variant, lines) in zip(axes, errors.items(), strict=True):
        for i, (name, values) in enumerate(lines.items()):
            axis.plot(range(1, len(values) + 1), values, color=COLORS[i], ls="-" if i == 0 else "--", label=said[name])
        axis.set(xlabel="imagined frame", title=variant)
        as_losses(axis)
        whole_numbers(axis)
    axes[0].set_ylabel("squared error of pixels")
    legend(axes[-1])
    figure.suptitle(f"test videos: frames imagined after {prompt} true ones", fontsize=10)
    return save(figure, path)


def rollout(frames: Tensor, said: Tensor, parts: tuple[Tensor, Tensor] | None, folder: Path, suffix: str) -> list[Path]:
    """A test video and what a model made of it, as a strip of frames and as a film.

    Args:
        frames: true, ``(T, C, H, W)``.
        said: the imagined ones of the last S steps, ``(S, C, H, W)``.
        parts: masks ``(S, K, H, W)`` and colours ``(S, K, C, H, W)`` of the slots; None where all draw a frame together.
        folder: where the files go.
        suffix: of their names.
    """
    S = len(said)
    prompt = len(frames) - S
    rows: dict[str, Tensor] = {"true": frames[prompt:], "imagined": said}
    if parts is not None:
        masks, colours = parts
        for k in range(masks.shape[1]):
            rows[f"slot {k + 1}"] = masks[:, k, None] * colours[:, k]
    every = max(1, -(-S // _SHOWN))
    steps = range(0, S, every)
    figure = blank(min(WIDEST, 0.95 * len(steps) + 1.2), 0.95 * len(rows) + 0.6, layout="constrained")
    axes = figure.subplots(len(rows), len(steps), squeeze=False)
    for i, (name, shown) in enumerate(rows.items()):
        for column, t in enumerate(steps):
            axis = axes[i, column]
            axis.imshow(_picture(shown[t]), vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            if i == 0:
                axis.set_title(f"frame {t + 1}", fontsize=8)
        axes[i, 0].set_ylabel(name, fontsize=8)
    figure.suptitle(f"a test video after its first {prompt} frames, and what the model imagines", fontsize=9)
    return [save(figure, folder / f"rollout{suffix}.png"), _film(frames, rows, prompt, folder / f"rollout{suffix}.gif")]


def _film(frames: Tensor, rows: Mapping[str, Tensor], prompt: int, path: Path) -> Path:
    """The rows side by side, frame by frame; in the prompt there is nothing to compare yet."""
    size = frames.shape[-1]
    scale = max(1, 160 // size)
    films = []
    for t in range(len(frames)):
        cells = []
        for name, shown in rows.items():
            frame = frames[t] if name == "true" else shown[t - prompt] if t >= prompt else torch.zeros_like(frames[t])
            enlarged = Image.fromarray((255 * _picture(frame)).round().astype(np.uint8))
            cells.append((name, enlarged.resize((size * scale, size * scale), Image.Resampling.NEAREST)))
        width, height = size * scale, size * scale
        canvas = Image.new("RGB", (len(cells) * (width + 4) - 4, height + 14), (90, 90, 90))
        pen = ImageDraw.Draw(canvas)
        for i, (name, cell) in enumerate(cells):
            canvas.paste(cell, (i * (width + 4), 14))
            said = f"{name}, frame {t + 1}" if name == "true" else name if t >= prompt else "sees true frames"
            pen.text((i * (width + 4) + 3, 1), said, fill=(255, 255, 255))
        films.append(canvas)
    films[0].save(path, save_all=True, append_images=films[1:], duration=120, loop=0)
    return path


def segments(frames: Tensor, true: Tensor, said: Tensor, prompt: int, path: Path) -> Path:
    """Frames of a video, whose their pixels are, and which slot's they are said to be, a colour for each.

    Args:
        frames: ``(S, C, H, W)``.
        true: 0 the background, which stays black, ``(S, H, W)``.
        said: slots, from 0, ``(S, H, W)``.
        prompt: how many frames came before these.
        path: the file to write.
    """
    steps = range(0, len(frames), max(1, -(-len(frames) // _SHOWN)))
    figure = blank(min(WIDEST, 0.95 * len(steps) + 1.2), 3.4, layout="constrained")
    axes = figure.subplots(3, len(steps), squeeze=False)
    palette = np.array(
        [(0.0, 0.0, 0.0), *(rgb(COLORS[k % len(COLORS)]) for k in range(max(int(true.max()), 1 + int(said.max()))))]
    )
    for column, t in enumerate(steps):
        shown = (_picture(frames[t]), palette[true[t].cpu().numpy()], palette[1 + said[t].cpu().numpy()])
        for row, (name, picture) in enumerate(zip(("frame", "true objects", "said slots"), shown, strict=True)):
            axes[row, column].imshow(picture, vmin=0, vmax=1)
            axes[row, column].set(xticks=[], yticks=[])
            axes[row, 0].set_ylabel(name, fontsize=8)
        axes[0, column].set_title(f"frame {prompt + t + 1}", fontsize=8)
    figure.suptitle(
        "a test video, and the slot whose mask is largest at every pixel, said from the frames before", fontsize=9
    )
    return save(figure, path)


def schemata(frames: Tensor, schema: Tensor, laws: Tensor | None, names: Sequence[str], path: Path) -> Path:
    """Frames of a video, the law by which the object moves on from each, and the schema of every object file (Fig. 3, 4, 14).

    Args:
        frames: ``(T, C, H, W)``.
        schema: of each file, ``(T, K)``.
        laws: ``(T,)``; None where they are not known.
        names: of the laws.
        path: the file to write.
    """
    schema = schema.cpu()
    T, K = schema.shape
    shown = min(T, 2 * _SHOWN)
    at = np.linspace(0, T - 1, shown).round().astype(int)
    rows = K + (laws is not None)
    figure = blank(WIDEST, 1.5 + 0.28 * rows, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[1.0, 0.3 * rows])
    strip = np.hstack([np.pad(_picture(frames[t]), ((1, 1), (1, 1), (0, 0)), constant_values=0.5) for t in at])
    above.imshow(strip, aspect="equal", vmin=0, vmax=1)
    above.set_axis_off()
    cells = np.full((rows, shown, 3), 0.94)
    text = []
    if laws is not None:
        for column, t in enumerate(at):
            cells[0, column] = 0.85 - 0.12 * int(laws[t])
            text.append((column, 0, names[int(laws[t])][0].upper()))
    for k in range(K):
        row = k + (laws is not None)
        for column, t in enumerate(at):
            cells[row, column] = rgb(COLORS[int(schema[t, k]) % len(COLORS)])
            text.append((column, row, str(int(schema[t, k]) + 1)))
    below.imshow(cells, aspect="auto")
    for x, y, said in text:
        ink = "black" if laws is not None and y == 0 else "white"
        below.text(x, y, said, ha="center", va="center", fontsize=7, color=ink)
    labels = [f"schema of file {k + 1}" for k in range(K)]
    if laws is not None:
        labels.insert(0, "law: " + ", ".join(f"{name[0].upper()} {name}" for name in names))
    below.set_yticks(range(rows), labels, fontsize=8)
    below.set_xticks(range(shown), [str(t + 1) for t in at], fontsize=7)
    below.set_xlabel("frame")
    figure.suptitle("a test video, and the schema each object file uses after every frame", fontsize=9)
    return save(figure, path)


def box_errors(errors: Mapping[str, Mapping[str, Sequence[float]]], window: int, path: Path) -> Path:
    """The error of boxes at every frame, a panel for each variant.

    Args:
        errors: by variant and by who said the boxes ("model", "copy"), the error at each frame.
        window: frames said in training.
        path: the file to write.
    """
    figure = blank(min(WIDEST, 4.2 * len(errors)), 3.4, layout="constrained")
    axes = figure.subplots(1, len(errors), squeeze=False, sharey=True)[0]
    said = {"model": "the model", "copy": "boxes that stay"}
    for axis, (variant, lines) in zip(axes, errors.items(), strict=True):
        for i, (name, values) in enumerate(lines.items()):
            shown = [1e3 * value for value in values]
            axis.plot(range(1, len(values) + 1), shown, color=COLORS[i], ls="-" if i == 0 else "--", label=said[name])
        axis.axvline(window + 0.5, color="#888888", ls=":", lw=1.2, label="as far as in training", zorder=1)
        axis.set(xlabel="frame", title=variant)
        whole_numbers(axis)
    as_losses(axes[0])
    axes[0].set_ylabel("squared error of the boxes' middles, x 1000")
    legend(axes[-1])
    return save(figure, path)


def boxes(frames: Tensor, true: Tensor, said: Tensor, folder: Path, suffix: str) -> list[Path]:
    """A tower's frames with the true boxes and those that were said, as a strip and as a film.

    Args:
        frames: from the second on, ``(T, 3, H, W)``.
        true: left, top, right and bottom as parts of the frame, ``(T, K, 4)``.
        said: the same, as they were said from the frame before the first.
        folder: where the files go.
        suffix: of their names.
    """
    from matplotlib.patches import Rectangle

    steps = range(0, len(frames), max(1, -(-len(frames) // (_SHOWN // 2))))
    figure = blank(min(WIDEST, 2.0 * len(steps)), 2.5, layout="constrained")
    axes = figure.subplots(1, len(steps), squeeze=False)[0]
    for axis, t in zip(axes, steps, strict=True):
        axis.imshow(_picture(frames[t]), vmin=0, vmax=1, extent=(0, 1, 1, 0))
        for k in range(true.shape[1]):
            for found, style, name in ((true, "-", "true"), (said, "--", "said from the first frame")):
                left, top, right, bottom = found[t, k].tolist()
                color = "#ffffff" if style == "-" else COLORS[1]
                axis.add_patch(
                    Rectangle(
                        (left, top), right - left, bottom - top, fill=False, ls=style, lw=1.4, color=color, label=name
                    )
                )
        axis.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(1, 0), facecolor="#000000")
        axis.set_title(f"frame {t + 1}", fontsize=8)
    handles, labels = axes[-1].get_legend_handles_labels()
    found_of = dict(zip(labels, handles, strict=True))
    figure.legend(
        found_of.values(), found_of.keys(), loc="outside lower center", ncols=2, fontsize=8, facecolor="#777777"
    )
    return [save(figure, folder / f"boxes{suffix}.png"), _box_film(frames, true, said, folder / f"boxes{suffix}.gif")]


def _box_film(frames: Tensor, true: Tensor, said: Tensor, path: Path) -> Path:
    size = 256
    films = []
    for t in range(len(frames)):
        picture = Image.fromarray((255 * _picture(frames[t])).round().astype(np.uint8))
        canvas = picture.resize((size, size), Image.Resampling.NEAREST)
        pen = ImageDraw.Draw(canvas)
        for found, color in ((true, (255, 255, 255)), (said, tuple(int(255 * part) for part in rgb(COLORS[1])))):
            for left, top, right, bottom in (found[t] * size).tolist():
                pen.rectangle((left, top, max(left, right), max(top, bottom)), outline=color, width=2)
        pen.text((4, 2), f"frame {t + 1}: true boxes white, said ones orange", fill=(255, 255, 255))
        films.append(canvas)
    films[0].save(path, save_all=True, append_images=films[1:], duration=160, loop=0)
    return path


def quadruple(frames: Tensor, surprise: Tensor, title: str, path: Path) -> Path:
    """Four movies of a scene, two possible and two impossible, and how surprising each frame was.

    Args:
        frames: ``(T, 4, C, H, W)``, the possible ones first.
        surprise: minus the log likelihood of every frame but the first, ``(T - 1, 4)``.
        title: above it all.
        path: the file to write.
    """
    T = len(frames)
    at = np.linspace(0, T - 1, min(T, _SHOWN)).round().astype(int)
    names = ["possible", "possible", "impossible", "impossible"]
    figure = blank(min(WIDEST, 0.8 * len(at) + 1.0), 6.2, layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[4.0, 2.4])
    above, below = parts
    rows = above.subplots(4, 1)
    for row, axis in enumerate(rows):
        strip = [np.pad(_picture(frames[t, row]), ((1, 1), (1, 1), (0, 0)), constant_values=0.3) for t in at]
        axis.imshow(np.hstack(strip), vmin=0, vmax=1)
        size = strip[0].shape[1]
        axis.set(yticks=[], xticks=[])
        if row == 3:
            axis.set_xticks([size * (i + 0.5) for i in range(len(at))], [str(t + 1) for t in at], fontsize=7)
            axis.set_xlabel("frame")
        axis.set_ylabel(names[row], fontsize=8, rotation=0, ha="right", va="center")
    axis = below.subplots()
    for row, name in enumerate(names):
        style = {"color": COLORS[row], "ls": "-" if row < 2 else "--"}
        axis.plot(range(2, T + 1), surprise[:, row], label=f"{name}, row {row + 1}", **style)
    axis.set(xlabel="frame", ylabel="surprise, nats")
    whole_numbers(axis)
    legend(axis)
    figure.suptitle(title, fontsize=10)
    return save(figure, path)
