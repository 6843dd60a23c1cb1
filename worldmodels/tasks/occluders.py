"""Is what comes out from behind a wall what went in? SCOFF's test of intuitive physics, in the manner of IntPhys."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from ..data.intphys import Scenes, find
from ..data.video import Videos, frame_shape
from ..errors import UserError
from ..logging import progress_bar
from ..models.video import VideoModel, video_model
from ..report import figures
from ..report import video as pictures
from ..report.choices import draw_choices
from . import Batch, CoreBuilder, refuse_equal_seeds, refuse_nothing, require_memory
from .video import Recordings, by_core, next_frame_loss, refuse_unknown_network

BLOCKS = {"O1": "vanishes or appears", "O2": "changes shape", "O3": "changes place"}
_POSSIBLE = 2  # of the four movies of a quadruple, the first two
_AT_ONCE = 50  # quadruples of an evaluation, so that memory stays bounded
_SURE = 0.95  # how sure a copy is that a pixel stays

PUBLISHED = {
    "RMC": {"O1": (0.43, 0.05), "O2": (0.39, 0.03), "O3": (0.46, 0.02)},
    "IntPhys's own": {"O1": (0.52, 0.0), "O2": (0.52, 0.0), "O3": (0.51, 0.0)},
    "SCOFF": {"O1": (0.34, 0.05), "O2": (0.35, 0.05), "O3": (0.42, 0.02)},
}
"""Goyal et al. 2020, Table 1, on IntPhys itself: relative error, mean and spread of three runs (0 where none is given)."""


class Occluders:
    """Trained on what is possible only, tell possible from impossible movies by how likely they are.

    Goyal et al. 2020, "Factorizing Declarative and Procedural Knowledge in Structured, Dynamical Environments" (SCOFF), Table
    1, after Riochet et al. 2019, "IntPhys". Movies come in quadruples of the same scene, two possible and two impossible
    ones, which differ only in what happens while it cannot be seen. A movie is as plausible as the sum over its frames of
    the log likelihood of each, given those before. The relative error is the share of quadruples whose impossible movies are
    together more plausible than their possible ones (equal ones count half), the absolute error the share of all pairs of a
    possible and an impossible movie that are in the wrong order (one less the area under the curve). Chance is 0.5 for both.

    Args:
        env: "id" and "kwargs" of the environment, whose option ``block`` is "possible", "O1", "O2" or "O3" and ``movie`` 0
            to 3; ``worldmodels/Occluders-v0``, whose scenes are flat, and not IntPhys's.
        data: a folder of IntPhys itself, with "train" and "dev" in it (``data.intphys``); then there is no environment.
        image_size: to which its frames are brought.
        every: of how many of its frames one is taken.
        train_episodes: recorded for training.
        quadruples: of each block of the test.
        steps: of an episode.
        train_seed: of the training episodes.
        test_seed: of the test's.
        data_dir: where recorded episodes are kept; or several folders, see ``collected``.
        fresh: record them anew, in the place of those that are found there.
        window: frames that are read in training.
        tokens: see ``tasks.video.Video``, as are those that follow.
        decoder: "joint" or "slots".
        readout: "attention" or "concatenated".
        channels: of the last convolution.
        hidden_size: of the linear layers around the core.
        stack: frames seen at a step.
        noise: share of the pixels that are inverted in training, where they are read.
    """

    sections = ("env",)
    tags = ("task", "task/score")
    unit = "sequences"

    def __init__(
        self,
        *,
        env: Mapping[str, Any],
        data: str | Path | None = None,
        image_size: int = 64,
        every: int = 2,
        train_episodes: int = 15_000,
        quadruples: int = 1000,
        steps: int = 40,
        train_seed: int = 1,
        test_seed: int = 3,
        data_dir: str | Path | Sequence[str | Path] = "data",
        fresh: bool = False,
        window: int = 40,
        tokens: str = "positions",
        decoder: str = "joint",
        readout: str = "attention",
        channels: int = 64,
        hidden_size: int = 512,
        stack: int = 1,
        noise: float = 0.0,
    ):
        if data is None and env["id"] is None:
            raise UserError("no environment was named; give experiment=occluders, or task.data=FOLDER of IntPhys")
        refuse_unknown_network(tokens, decoder, readout, noise, hidden_size)
        refuse_equal_seeds(train_seed, test_seed)
        refuse_nothing(train_episodes=train_episodes, quadruples=quadruples, steps=steps, window=window, stack=stack)
        refuse_nothing(channels=channels, hidden_size=hidden_size, image_size=image_size, every=every)
        if data is None and window > steps:
            raise UserError(f"task.window={window} and one more frame do not fit into task.steps={steps}")
        self.name = "occluders" if data is None else f"IntPhys in {data}"
        self.env_id, self.env_kwargs = env["id"] or "", dict(env["kwargs"])
        self.folder = None if data is None else Path(data)
        self.image_size, self.every = image_size, every
        self.steps = steps
        self.window, self.noise = window, noise
        self.network: dict[str, Any] = {"tokens": tokens, "decoder": decoder, "readout": readout}
        self.network |= {"channels": channels, "hidden_size": hidden_size, "stack": stack}
        self._recordings = Recordings(
            self.env_id,
            self.env_kwargs,
            episodes={"train": train_episodes, "test": quadruples},
            seeds={"train": train_seed, "test": test_seed},
            steps=steps,
            data_dir=data_dir,
            fresh=fresh,
        )
        self._scenes: tuple[Scenes, dict[str, Scenes]] | None = None

    # Data.

    def collect(self, *, quiet: bool = False) -> None:
        """Record all episodes that never were, or read IntPhys."""
        if self.folder is not None:
            self.official()
            return
        frame_shape(self.env_id, {**self.env_kwargs, "block": "O1", "movie": 3})  # refuses others before it records
        self._source("", 0, torch.device("cpu"), quiet=quiet, again=None if quiet else "task.fresh=true")
        for block in BLOCKS:
            for movie in range(4):
                self._source(block, movie, torch.device("cpu"), quiet=quiet)

    def official(self) -> tuple[Scenes, dict[str, Scenes]]:
        """The training scenes and the quadruples of each block, of IntPhys itself."""
        if self._scenes is None:
            assert self.folder is not None
            self._scenes = find(self.folder, image_size=self.image_size, every=self.every)
        return self._scenes

    def _source(
        self, block: str, movie: int, device: torch.device, *, quiet: bool = True, again: str | None = None
    ) -> Videos:
        """The training episodes (block "") or those of a movie, resident on the device."""
        variant = f"{block}, movie {movie + 1}" if block else ""
        more = {"block": block, "movie": movie} if block else {}
        return self._recordings.source(variant, more, device, quiet=quiet, again=again)

    def about(self) -> dict[str, Any]:
        """The checksums of the data, and the shape of a frame."""
        if self.folder is not None:
            train, blocks = self.official()
            parts = {"train": train} | blocks
            return {
                "data": {name: part.checksum for name, part in parts.items()},
                "frame_shape": [train.channels, self.image_size, self.image_size],
            }
        cpu = torch.device("cpu")
        data = {"train": self._source("", 0, cpu).episodes.checksum}
        for block in BLOCKS:
            for movie in range(4):
                data[f"{block} {movie + 1}"] = self._source(block, movie, cpu).episodes.checksum
        return {"data": data, "frame_shape": list(self._recordings.frame_shape)}

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Frames of random windows of possible movies, ``(window + 1, B, C, H, W)``."""
        source = self._source("", 0, device) if self.folder is None else self.official()[0].to(device)
        return lambda generator: source.windows(batch_size, self.window + 1, generator)

    # Model and loss.

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> VideoModel:
        """A ``VideoModel``; without other sizes the core has four slots of 100."""
        channels, height, width = about["frame_shape"]
        video = video_model(core, (channels, height, width), **self.network)
        require_memory(video.core, "video prediction")
        return video

    def losses(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """The binary cross-entropy of the next frames' pixels."""
        return {"loss": next_frame_loss(model, batch, self.noise, generator)}

    # Scores.

    def _quadruples(self, block: str, device: torch.device, limit: int | None) -> Any:
        """Frames of the four movies of some quadruples after others, ``(T, 4, b, C, H, W)``."""
        if self.folder is not None:
            yield from self.official()[1][block].to(device).quadruples(_AT_ONCE, limit)
            return
        sources = [self._source(block, movie, device) for movie in range(4)]
        parts = [source.whole(self.steps + 1, _AT_ONCE, limit) for source in sources]
        for states in zip(*parts, strict=True):
            yield torch.stack([source.drawn(part) for source, part in zip(sources, states, strict=True)], dim=1)

    @torch.no_grad()
    def evaluate(self, model: VideoModel, limit: int | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """The relative and the absolute error of each block, of the model and of a copy."""
        device = next(model.parameters()).device
        blocks: dict[str, Any] = {}
        with progress_bar("scoring") as bar:
            bar.disable |= quiet
            names = list(BLOCKS) if self.folder is None else list(self.official()[1])
            shown = bar.add_task("", total=len(names), note="blocks")
            for block in names:
                told: dict[str, list[Tensor]] = {"model": [], "copy": []}
                for frames in self._quadruples(block, device, limit):
                    flat = frames.flatten(1, 2)
                    told["model"].append(plausibility(model(flat[:-1]), flat[1:]).sum(0).view(4, -1).cpu())
                    stays = torch.logit(flat[:-1].clamp(1.0 - _SURE, _SURE))
                    told["copy"].append(plausibility(stays, flat[1:]).sum(0).view(4, -1).cpu())
                blocks[block] = {name: errors(torch.cat(parts, dim=1)) for name, parts in told.items()}
                blocks[block]["n"] = sum(part.shape[1] for part in told["model"])
                bar.advance(shown)
        scores = {f"relative_error/{block}": found["model"]["relative"] for block, found in blocks.items()}
        return {"scores": scores, "blocks": blocks, "official": self.folder is not None}

    def objective(self, result: Mapping[str, Any]) -> float:
        """Minus the mean relative error."""
        return -float(np.mean([found["model"]["relative"] for found in result["blocks"].values()]))

    # Tables.

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """Relative errors by block, with the absolute ones in brackets; the copy and the paper's figures below."""
        first = next(iter(results.values()))
        table = Table("relative error (absolute)", title=of, title_justify="left")
        for block in first["blocks"]:
            table.add_column(f"{block}\n{BLOCKS[block]}", justify="right")
        for name, result in results.items():
            table.add_row(name, *(_cell(found["model"]) for found in result["blocks"].values()))
        table.add_section()
        table.add_row("copy of the frame before", *(_cell(found["copy"]) for found in first["blocks"].values()))
        table.add_row("chance", *("0.500 (0.500)" for _ in first["blocks"]))
        where = "" if first["official"] else " on IntPhys"
        for name, figures_of in PUBLISHED.items():
            cells = (
                f"{figures_of[block][0]:.2f}" + (f" ± {figures_of[block][1]:.2f}" if figures_of[block][1] else "")
                for block in first["blocks"]
            )
            table.add_row(f"paper: {name}{where}", *cells)
        return table

    def overview(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """The same with the mean and the standard deviation over the runs of every core."""
        means = {}
        for core, runs in by_core(results):
            blocks = {}
            for block, found in runs[0]["blocks"].items():
                values = {
                    kind: [run["blocks"][block]["model"][kind] for run in runs] for kind in ("relative", "absolute")
                }
                model = {kind: float(np.mean(value)) for kind, value in values.items()}
                if len(runs) > 1:
                    model["spread"] = float(np.std(values["relative"], ddof=1))
                blocks[block] = {"model": model, "copy": found["copy"]}
            means[f"{core} ({len(runs)})"] = {"blocks": blocks, "official": runs[0]["official"]}
        return self.table(means, of)

    # Pictures.

    @torch.no_grad()
    def draw(
        self,
        model: VideoModel,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """Of one quadruple of every block the movies, and how surprised the model is by each frame."""
        device = next(model.parameters()).device
        written = figures.curves(metrics, folder / "curves.png", of="frames")
        for block in result["blocks"]:
            for i, frames in enumerate(self._quadruples(block, device, example + 1)):
                if i != example // _AT_ONCE:
                    continue
                if frames.shape[2] <= example % _AT_ONCE:
                    raise UserError(f"example {example} was asked for; there are fewer quadruples of {block}")
                four = frames[:, :, example % _AT_ONCE]  # (T, 4, C, H, W)
                surprise = -plausibility(model(four[:-1]), four[1:])
                title = f"{block}: what goes behind the wall {BLOCKS[block]}"
                written.append(pictures.quadruple(four, surprise.cpu(), title, folder / f"{block}.png"))
        return written + draw_choices(model.core, model.tokens(four[:, 2:3]), folder)


def plausibility(logits: Tensor, frames: Tensor) -> Tensor:
    """The log likelihood of frames, in nats: minus the binary cross-entropy, summed over pixels.

    Args:
        logits: of what was said, ``(..., C, H, W)``.
        frames: what came, in [0, 1].

    Returns:
        ``(...)``, in float64.
    """
    return -F.binary_cross_entropy_with_logits(logits, frames, reduction="none").double().sum((-3, -2, -1))


def errors(plausible: Tensor) -> dict[str, float]:
    """The relative and the absolute error of IntPhys.

    Args:
        plausible: how plausible the movies of quadruples are, ``(4, n)``, the possible ones first.

    Returns:
        "relative" and "absolute", from 0 to 1.
    """
    possible, impossible = plausible[:_POSSIBLE], plausible[_POSSIBLE:]
    ahead = possible.sum(0) - impossible.sum(0)
    one, other = possible.flatten()[:, None], impossible.flatten()
    return {
        "relative": float((ahead < 0).double().mean() + 0.5 * (ahead == 0).double().mean()),
        "absolute": float((one < other).double().mean() + 0.5 * (one == other).double().mean()),
    }


def _cell(found: Mapping[str, float]) -> str:
    spread = f" ± {found['spread']:.3f}" if "spread" in found else ""
    return f"{found['relative']:.3f}{spread} ({found['absolute']:.3f})"
