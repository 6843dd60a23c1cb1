"""Where do the blocks of a tower go? RPIN's experiment on ShapeStacks, in which NPS has rules in the place of its network."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from ..data.environments import make_envs
from ..data.shapestacks import ShapeStacks, Start
from ..data.video import Videos
from ..encoders import pixels
from ..errors import UserError
from ..logging import progress_bar
from ..models.rpin import RPIN, refuse_other_sizes, rpin_model
from ..report import figures
from ..report import video as pictures
from ..report.choices import draw_choices
from . import Batch, CoreBuilder, refuse_equal_seeds, refuse_nothing
from .video import Recordings, by_core

_AT_ONCE = 100  # towers of an evaluation, so that memory stays bounded
_FIRST_DISCOUNT = 0.01  # of the last step's error, when training begins
_FOLDERS = {"test": "test", "transfer": "ss4"}  # of RPIN's files

PUBLISHED = {
    "RPIN": (1.254, 6.377),
    "RPIN, as its authors released it": (1.027, 4.728),
    "PNPS, 2 rules and the null rule": (1.250, 5.411),
    "SNPS, 4 rules": (1.68, 5.80),
}
"""Errors in frames 1 to 15 and 16 to 30 on ShapeStacks itself: Goyal et al. 2021 (NPS), Table 3, 15 seeds; and RPIN's own."""


class _Towers(Protocol):
    def __len__(self) -> int: ...

    def starts(self, videos: Tensor) -> Start: ...

    def film(self, video: int) -> Tensor: ...


class Stacks:
    """Say from the first frame and the boxes there where every box will be.

    Goyal et al. 2021, "Neural Production Systems", Table 3, after Qi et al. 2021 (RPIN), see ``models.rpin``. Training: the
    squared errors of middles and sizes over ``window`` frames, those of frame t weighted by ``g^(t - 1)``, where g rises from
    ``0.01^(1 / window)`` to 1 in the course of the training; half of the towers are mirrored. Test: the squared error of the
    middles, in parts of the frame, of frames 1 to ``window`` and of those from there to twice as many, x 1000; with a latent
    that of the best of ``samples``.

    Args:
        env: "id" and "kwargs" of the environment, which draws ``frames(states)`` and tells ``boxes(states)``:
            ``worldmodels/Towers-v0``, whose towers are flat and of blocks only, and not ShapeStacks's.
        data: a folder of RPIN's ShapeStacks, with "train", "test" and "ss4" in it; then there is no environment.
        image_size: to which its frames are brought; of an environment, set env.kwargs.image_size.
        test: variants that are tested, by name the keyword arguments in which they differ.
        train_episodes: recorded for training.
        test_episodes: recorded for each variant of the test.
        train_seed: of the training episodes.
        test_seed: of the test episodes, and of the latents drawn there.
        data_dir: where recorded episodes are kept; or several folders, see ``collected``.
        fresh: record them anew, in the place of those that are found there.
        window: frames said in training; twice as many are said in the test.
        every: of how many steps of an episode one frame is seen.
        channels: of features; 256 in the paper.
        roi_size: height and width of a slot's map; 7 in the paper.
        latent_size: of what cannot be seen in the first frame; 8 in the paper, and 0 for none.
        latent_weight: of the latent's distance from its prior.
        samples: of the latent, in the test; 100 in the paper.
        trainer: "steps" of the training.
    """

    name = "towers"
    sections = ("env", "trainer")
    tags = ("task", "task/score")
    unit = "towers"

    def __init__(
        self,
        *,
        env: Mapping[str, Any],
        trainer: Mapping[str, Any],
        data: str | Path | None = None,
        image_size: int = 224,
        test: Mapping[str, Mapping[str, Any]] | None = None,
        train_episodes: int = 10_000,
        test_episodes: int = 1000,
        train_seed: int = 1,
        test_seed: int = 3,
        data_dir: str | Path | Sequence[str | Path] = "data",
        fresh: bool = False,
        window: int = 15,
        every: int = 2,
        channels: int = 256,
        roi_size: int = 7,
        latent_size: int = 8,
        latent_weight: float = 3e-5,
        samples: int = 100,
    ):
        if data is None and env["id"] is None:
            raise UserError(
                "no environment was named; give experiment=stacks, or task.data=FOLDER of RPIN's ShapeStacks"
            )
        if env.get("resize") is not None:
            raise UserError(f"env.resize={env['resize']}, but frames are drawn from states; set env.kwargs.image_size")
        refuse_equal_seeds(train_seed, test_seed)
        refuse_nothing(train_episodes=train_episodes, test_episodes=test_episodes, window=window, samples=samples)
        refuse_nothing(roi_size=roi_size, every=every)
        if channels < 8 or channels % 8:
            raise UserError(f"task.channels={channels}; expected a multiple of 8")
        if latent_size < 0 or latent_weight < 0:
            raise UserError(f"task.latent_size={latent_size}, task.latent_weight={latent_weight}; expected at least 0")
        if data is not None:
            refuse_other_sizes((3, image_size, image_size))
        self.folder = None if data is None else Path(data)
        self.image_size = image_size
        if test is None:
            test = {"test": {}, "transfer": {"num_blocks": 4}}
        self.test = {name: dict(kwargs) for name, kwargs in test.items()}
        self.test_seed, self.window, self.every = test_seed, window, every
        self.network = {"channels": channels, "roi_size": roi_size, "latent_size": latent_size}
        self.latent_weight, self.samples = latent_weight, samples if latent_size else 1
        self.steps = int(trainer["steps"])
        self._recordings = Recordings(
            env["id"] or "",
            dict(env["kwargs"]),
            episodes={"train": train_episodes, "test": test_episodes},
            seeds={"train": train_seed, "test": test_seed},
            steps=2 * window * every,
            data_dir=data_dir,
            fresh=fresh,
            check=refuse_other_sizes,
        )
        self._files: dict[str, ShapeStacks] = {}

    # Data.

    def _refuse_without_boxes(self) -> None:
        env_id, kwargs = self._recordings.env_id, self._recordings.env_kwargs
        if not hasattr(make_envs(env_id, 1, env_kwargs=kwargs), "boxes"):
            raise UserError(
                f"{env_id} does not tell where things are; boxes are predicted of an environment with a method "
                "boxes(states), such as worldmodels/Towers-v0"
            )

    def collect(self, *, quiet: bool = False) -> None:
        """Record all episodes that never were, or read ShapeStacks."""
        if self.folder is None:
            self._refuse_without_boxes()
        for which in ("", *self.test):
            again = None if quiet or which or self.folder else "task.fresh=true"
            self._source(which, torch.device("cpu"), quiet=quiet, again=again)

    def _source(
        self, variant: str, device: torch.device, *, quiet: bool = True, again: str | None = None
    ) -> "ShapeStacks | _Recorded":
        """The training towers ("") or those of a variant of the test."""
        if self.folder is None:
            more = self.test[variant] if variant else {}
            videos = self._recordings.source(variant, more, device, quiet=quiet, again=again)
            return _Recorded(videos, 2 * self.window, self.window, self.every)
        if variant not in self._files:
            name = _FOLDERS.get(variant, variant) if variant else "train"
            steps = 2 * self.window if variant else self.window
            self._files[variant] = ShapeStacks(
                self.folder / name, steps=steps, later=self.window, image_size=self.image_size
            )
        return self._files[variant]

    def about(self) -> dict[str, Any]:
        """The checksums of the data, and how many blocks towers of the training have."""
        cpu = torch.device("cpu")
        sources = {variant or "train": self._source(variant, cpu) for variant in ("", *self.test)}
        told = {name: source.left_out for name, source in sources.items() if isinstance(source, ShapeStacks)}
        blocks = sources["train"].starts(torch.zeros(1, dtype=torch.int64)).boxes.shape[2]
        data = {name: source.checksum for name, source in sources.items()}
        return {"data": data, "num_blocks": blocks, "left_out": told}

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Frames of the first and of a later moment, ``(B, 3, H, W)``, and boxes ``(window + 1, B, K, 4)``."""
        source: _Towers = self._source("", device)

        def draw(generator: torch.Generator) -> Batch:
            videos = torch.randint(len(source), (batch_size,), generator=generator, device=device)
            first, later, boxes = source.starts(videos)
            first, later, boxes = pixels(first), pixels(later), boxes[: self.window + 1]
            mirrored = torch.rand(batch_size, generator=generator, device=device) < 0.5
            first, later = (torch.where(mirrored[:, None, None, None], part.flip(-1), part) for part in (first, later))
            left, top, right, bottom = boxes.unbind(-1)
            turned = torch.stack([1.0 - right, top, 1.0 - left, bottom], dim=-1)
            return first, later, torch.where(mirrored[:, None, None], turned, boxes)

        return draw

    # Model and loss.

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> RPIN:
        """An ``RPIN``; refuses cores with a state, and those that cannot be given towers of another height."""
        network = rpin_model(core, num_slots=about["num_blocks"], **self.network)
        built = network.core
        name = type(built).__name__
        if built.capabilities.memory:
            raise UserError(f"towers need a core without a state, such as core=cin, pnps or gnn; {name} has one")
        if built.slot_size != built.token_size:
            raise UserError(
                f"core.slot_size={built.slot_size}; slots of this task are maps of {built.token_size} features"
            )
        maps = getattr(built, "map_size", 0)
        if maps > 1 and maps != self.network["roi_size"]:
            raise UserError(
                f"core.map_size={maps}, and task.roi_size={self.network['roi_size']}; give them the same size"
            )
        if len(self.test) > 1:
            size = 64 if self.folder is None else self.image_size
            boxes = torch.tensor([0.2, 0.2, 0.8, 0.8]).expand(1, about["num_blocks"] + 1, 4)
            training = network.training
            try:
                with torch.no_grad():
                    network.eval()(torch.zeros(1, 3, size, size), boxes, 1)
            except (RuntimeError, ValueError) as error:
                raise UserError(f"{name} cannot be given towers of another height; choose core=cin or pnps") from error
            network.train(training)
        return network

    def losses(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """The "boxes"' squared errors, and the "latent"'s distance from its prior, weighted."""
        first, later, boxes = batch
        said, distance = model(first, boxes[0], self.window, later, generator)
        squared = (said - middles(boxes[1:])).square().sum(-1).mean((1, 2))  # (T,)
        start = _FIRST_DISCOUNT ** (1.0 / self.window)
        gone = ((cast(RPIN, model).batches - 1) / self.steps).clamp(max=1.0)
        weights = (start + gone * (1.0 - start)) ** torch.arange(self.window, device=squared.device)
        error = (weights * squared).sum() / weights.sum()
        return {"loss": error + self.latent_weight * distance, "boxes": error, "latent": distance}

    # Scores.

    @torch.no_grad()
    def evaluate(self, model: RPIN, limit: int | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """The error of every step and its means over both stretches, by variant, of the model and of boxes that stay."""
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(self.test_seed)
        errors: dict[str, dict[str, list[float]]] = {}
        count: dict[str, int] = {}
        with progress_bar("scoring") as bar:
            bar.disable |= quiet
            shown = bar.add_task("", total=len(self.test), note="variants")
            for variant in self.test:
                source: _Towers = self._source(variant, device)
                told: dict[str, list[Tensor]] = {"model": [], "copy": []}
                for videos in torch.arange(len(source), device=device)[:limit].split(_AT_ONCE):
                    first, _, boxes = source.starts(videos)
                    told["model"].append(self._best(model, pixels(first), boxes, generator).cpu())
                    told["copy"].append(squared_error(middles(boxes[:1]), middles(boxes[1:])).cpu())
                errors[variant] = {name: torch.cat(parts, 1).double().mean(1).tolist() for name, parts in told.items()}
                count[variant] = sum(part.shape[1] for part in told["model"])
                bar.advance(shown)
        scores = {
            f"error/{variant}/{end}": 1e3 * mean
            for variant, lines in errors.items()
            for end, mean in zip((self.window, 2 * self.window), self._stretches(lines["model"]), strict=True)
        }
        return {"scores": scores, "errors": errors, "n": count, "window": self.window}

    def _best(self, model: RPIN, first: Tensor, boxes: Tensor, generator: torch.Generator) -> Tensor:
        """Errors of the middles, ``(T, B)``; of several samples, of that whose mean is least."""
        best = None
        for _ in range(self.samples):
            said, _ = model(first, boxes[0], len(boxes) - 1, generator=generator)
            found = squared_error(said, middles(boxes[1:]))
            best = found if best is None else torch.where(found.mean(0) < best.mean(0), found, best)
        assert best is not None
        return best

    def _stretches(self, errors: Sequence[float]) -> tuple[float, float]:
        """The mean error of the steps of the training, and of as many after them."""
        return float(np.mean(errors[: self.window])), float(np.mean(errors[self.window :]))

    def objective(self, result: Mapping[str, Any]) -> float:
        """Minus the mean of the errors."""
        return -float(np.mean([error for lines in result["errors"].values() for error in lines["model"]]))

    # Tables.

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """The errors by variant and stretch, those of boxes that stay, and the papers'."""
        first = next(iter(results.values()))
        window = first["window"]
        table = Table("core", title=f"{of}: squared error of the boxes' middles x 1000", title_justify="left")
        for variant in first["errors"]:
            for steps in (f"1 to {window}", f"{window + 1} to {2 * window}"):
                table.add_column(f"{variant}\nframes {steps}", justify="right")

        def cells(errors: Mapping[str, Mapping[str, Sequence[float]]], line: str) -> list[str]:
            return [f"{1e3 * mean:.3f}" for lines in errors.values() for mean in self._stretches(lines[line])]

        for name, result in results.items():
            table.add_row(name, *cells(result["errors"], "model"))
        table.add_section()
        table.add_row("boxes that stay", *cells(first["errors"], "copy"))
        for name, found in PUBLISHED.items():
            table.add_row(f"paper, on ShapeStacks: {name}", *(f"{error:.3f}" for error in found))
        return table

    def overview(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """The same of the means over the runs of every core."""
        means = {}
        for core, runs in by_core(results):
            errors = {
                variant: {
                    line: np.mean([run["errors"][variant][line] for run in runs], axis=0).tolist() for line in lines
                }
                for variant, lines in runs[0]["errors"].items()
            }
            means[f"{core} ({len(runs)})"] = {"errors": errors, "window": runs[0]["window"]}
        return self.table(means, of)

    # Pictures.

    @torch.no_grad()
    def draw(
        self,
        model: RPIN,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """Errors along the steps; of one tower of every variant the frames, true boxes and those that were said."""
        device = next(model.parameters()).device
        written = [
            *figures.curves(metrics, folder / "curves.png"),
            pictures.box_errors(result["errors"], self.window, folder / "errors.png"),
        ]
        generator = torch.Generator(device).manual_seed(self.test_seed)
        for variant in self.test:
            source: _Towers = self._source(variant, device)
            if example >= len(source):
                raise UserError(f"example {example} was asked for; there are {len(source)} towers of {variant}")
            first, _, boxes = source.starts(torch.tensor([example], device=device))
            said, _ = model(pixels(first), boxes[0], len(boxes) - 1, generator=generator)
            suffix = f"_{variant}" if len(self.test) > 1 else ""
            film = pixels(source.film(example)).cpu()
            written += pictures.boxes(film[1:], boxes[1:, 0].cpu(), corners(said[:, 0]).cpu(), folder, suffix)
            if variant == next(iter(self.test)):
                written += draw_choices(model.core, model.tokens(pixels(first), boxes[0], len(said), generator), folder)
        return written


class _Recorded:
    """Towers of an environment's recorded episodes.

    Args:
        videos: of states.
        steps: T.
        later: the step of the later frame.
        every: of how many steps of an episode one frame is seen.
    """

    def __init__(self, videos: Videos, steps: int, later: int, every: int):
        self.videos, self.later = videos, later
        self.times = every * torch.arange(steps + 1, device=videos.episodes.device)[:, None]
        self.checksum = videos.episodes.checksum

    def __len__(self) -> int:
        return len(self.videos.episodes)

    def _states(self, videos: Tensor) -> Tensor:
        """``(T + 1, B, *state)``."""
        return self.videos.episodes.rows("observations", videos, self.times)

    def starts(self, videos: Tensor) -> Start:
        """Some of the towers, by their numbers ``(B,)``."""
        states, env = self._states(videos), self.videos.env
        first, later = env.frames(states[[0, self.later]])
        return Start(first, later, env.boxes(states) / first.shape[-2])

    def film(self, video: int) -> Tensor:
        """All frames of an episode, ``(T + 1, H, W, 3)`` uint8."""
        states = self._states(torch.tensor([video], device=self.videos.episodes.device))
        frames: Tensor = self.videos.env.frames(states[:, 0])
        return frames


def middles(boxes: Tensor) -> Tensor:
    """Middles and sizes (x, y, width, height) of boxes (left, top, right, bottom), ``(..., 4)``."""
    low, high = boxes.split(2, dim=-1)
    return torch.cat([(low + high) / 2, high - low], dim=-1)


def corners(said: Tensor) -> Tensor:
    """The inverse of ``middles``."""
    middle, size = said.split(2, dim=-1)
    return torch.cat([middle - size / 2, middle + size / 2], dim=-1)


def squared_error(said: Tensor, true: Tensor) -> Tensor:
    """Of middles ``(T, B, K, 4)``: the squared distance of the two, mean over blocks, ``(T, B)``."""
    return (said - true)[..., :2].square().sum(-1).mean(-1)
