"""Video prediction: SCOFF's experiments on moving pictures, on any environment that draws frames of its states."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from ..core import Tokens
from ..data.environments import make_envs
from ..data.video import Shape, Videos, frame_shape
from ..decoders import READOUT_HEADS, SlotDecoder
from ..encoders import FRAME_TOKENS, halvings
from ..errors import UserError, nearest
from ..logging import progress_bar
from ..models.op3 import OP3, op3_model
from ..models.video import DECODERS, MODELS, READOUTS, VideoModel, video_model
from ..report import figures
from ..report import video as pictures
from ..report.choices import draw_choices, trace
from . import Batch, CoreBuilder, refuse_equal_seeds, refuse_nothing, require_memory, segments
from .recording import recorded

_EPISODES_AT_ONCE = 50  # of an evaluation, so that memory stays bounded
_SETTLED = 5  # frames after which a law that has to be told from motion counts: the paper's "about five"
_USED = 0.01  # a schema chosen less often than this counts as not used


class Video:
    """Say the next frame of a video, and then go on from what was said.

    Goyal et al. 2020, "Factorizing Declarative and Procedural Knowledge in Structured, Dynamical Environments" (SCOFF),
    section 5. Training: windows of ``window`` + 1 frames, the binary cross-entropy of every next frame. Test: ``prompt``
    true frames, then ``imagined`` more that the model says from its own; the squared error of pixels at the ``horizons``,
    beside those of a copy of the last true frame and of the true frame blurred (``_blurred``), and relative to a GRU where
    one is in the table (the paper's Fig. 5, 7).

    Where the environment tells by which law its object moves (``laws(states)``, as ``worldmodels/OneBall-v0`` does) and the
    core chooses schemata, it is measured whether each schema belongs to one law: the share of frames at which the schema is
    the law's, by the assignment of schemata to laws for which that share is largest. Where the law can be told from motion
    only, the first five frames do not count.

    Where the environment tells which pixels are whose (``masks(states)``) and every slot draws a mask (``decoder="slots"``),
    these are measured as segmentations of the frames after the prompt, each said from the true ones before it (NPS, Table 4):
    the adjusted Rand index, with the background as a segment and of the objects' pixels only, and the overlap of each object
    with the slot assigned to it. Where it also tells who is who (``identities(states)``, as ``worldmodels/Sprites-v0`` does),
    objects are tracked (NPS, Table 5 and 10; ``tracking.tracking``).

    Args:
        env: "id" of the environment, which draws ``frames(states)``, and its "kwargs", by which its observations are states.
        test: variants that are tested, by name the keyword arguments in which they differ; None for the same environment.
        test_slots: how many object files a variant is run with, where these are more than in training.
        train_episodes: recorded for training.
        test_episodes: recorded for each variant of the test.
        steps: of an episode.
        train_seed: of the training episodes.
        test_seed: of the test episodes.
        data_dir: where recorded episodes are kept; or several folders, see ``collected``.
        fresh: record them anew, in the place of those that are found there.
        window: frames that are read in training.
        prompt: true frames before a rollout.
        imagined: frames of a rollout.
        horizons: of these, which are in the table.
        model: "frames", in which a core reads what an encoder makes of a frame (``VideoModel``), or "op3", in which slots are
            refined until they draw it and a core without a state is their dynamics (``models.op3.OP3``), with ``decoder``,
            its sizes and ``slot_size`` alone of the options below.
        tokens: what a core reads of a frame, "positions" or "vector", see ``FrameEncoder``.
        decoder: "joint", a frame of all slots together, or "slots", a mask and colours of each; "broadcast" for the same by a
            ``BroadcastDecoder``.
        readout: of the joint decoder: "attention", or slots "concatenated", for cores whose slots are not of a kind.
        channels: of the last convolution; 64 in R-NEM.
        hidden_size: of the linear layers around the core; 512 in R-NEM.
        slot_size: of OP3's slots; of other models it is core.slot_size.
        stack: frames seen at a step; 5 in the paper's switching dynamics.
        noise: share of the pixels that are inverted in training, where they are read; 0.2 in R-NEM.
    """

    sections = ("env",)
    tags = ("task", "task/score")
    unit = "sequences"

    def __init__(
        self,
        *,
        env: Mapping[str, Any],
        test: Mapping[str, Mapping[str, Any]] | None = None,
        test_slots: Mapping[str, int] | None = None,
        train_episodes: int = 50_000,
        test_episodes: int = 10_000,
        steps: int = 50,
        train_seed: int = 1,
        test_seed: int = 3,
        data_dir: str | Path | Sequence[str | Path] = "data",
        fresh: bool = False,
        window: int = 20,
        prompt: int = 15,
        imagined: int = 30,
        horizons: Sequence[int] = (1, 10, 15, 30),
        model: str = "frames",
        tokens: str = "positions",
        decoder: str = "joint",
        readout: str = "attention",
        channels: int = 64,
        hidden_size: int = 512,
        slot_size: int = 128,
        stack: int = 1,
        noise: float = 0.0,
    ):
        if env["id"] is None:
            raise UserError("no environment was named; give env.id=<a Gymnasium id>, or experiment=balls")
        if env.get("resize") is not None:
            raise UserError(f"env.resize={env['resize']}, but frames are drawn from states; set env.kwargs.image_size")
        if model not in MODELS:
            raise UserError(f"task.model is {model!r}; {nearest(model, MODELS)}")
        refuse_unknown_network(tokens, decoder, readout, noise, hidden_size)
        if model == "op3" and (stack > 1 or noise):
            raise UserError(
                f"task.model=op3 sees each frame as it is; leave out task.stack={stack} and task.noise={noise}"
            )
        refuse_equal_seeds(train_seed, test_seed)
        refuse_nothing(
            train_episodes=train_episodes, test_episodes=test_episodes, steps=steps, window=window, stack=stack
        )
        refuse_nothing(prompt=prompt, imagined=imagined, channels=channels, hidden_size=hidden_size)
        if window > steps or prompt + imagined > steps + 1:
            raise UserError(
                f"task.steps={steps} has {steps + 1} frames, too few for task.window={window} and one more, or for "
                f"task.prompt={prompt} and task.imagined={imagined}; give longer episodes"
            )
        if not horizons or min(horizons) < 1 or max(horizons) > imagined:
            raise UserError(f"task.horizons={list(horizons)}; expected frames of 1 to task.imagined={imagined}")
        self.test = {name: dict(kwargs) for name, kwargs in (test or {"test": {}}).items()}
        self.test_slots = dict(test_slots or {})
        unknown = sorted(set(self.test_slots) - set(self.test))
        if unknown:
            raise UserError(f"task.test_slots names {unknown[0]!r}; {nearest(unknown[0], self.test)}")
        self.env_id, self.env_kwargs = env["id"], dict(env["kwargs"])
        self.name = f"videos of {self.env_kwargs.get('preset') or self.env_id.rpartition('/')[2]}"
        self.test_episodes = test_episodes
        self.window, self.prompt, self.imagined, self.horizons = window, prompt, imagined, list(horizons)
        self.noise, self.kind, self.slot_size = noise, model, slot_size
        self.network: dict[str, Any] = {"tokens": tokens, "decoder": decoder, "readout": readout}
        self.network |= {"channels": channels, "hidden_size": hidden_size, "stack": stack}
        self._recordings = Recordings(
            self.env_id,
            self.env_kwargs,
            episodes={"train": train_episodes, "test": test_episodes},
            seeds={"train": train_seed, "test": test_seed},
            steps=steps,
            data_dir=data_dir,
            fresh=fresh,
        )

    # Data.

    def collect(self, *, quiet: bool = False) -> None:
        """Record all episodes, of training and test, that never were."""
        for which in ("", *self.test):
            self.source(which, torch.device("cpu"), quiet=quiet, again=None if quiet or which else "task.fresh=true")

    def source(self, variant: str, device: torch.device, *, quiet: bool = True, again: str | None = None) -> Videos:
        """The training episodes ("") or those of a variant of the test, resident on the device."""
        more = self.test[variant] if variant else {}
        return self._recordings.source(variant, more, device, quiet=quiet, again=again)

    def about(self) -> dict[str, Any]:
        """The checksums of the data, and the shape of a frame."""
        cpu = torch.device("cpu")
        data = {variant or "train": self.source(variant, cpu).episodes.checksum for variant in ("", *self.test)}
        return {"data": data, "frame_shape": list(self._recordings.frame_shape)}

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Frames of random windows, ``(window + 1, B, C, H, W)``, drawn on the device."""
        source = self.source("", device)
        return lambda generator: source.windows(batch_size, self.window + 1, generator)

    # Model and loss.

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> VideoModel | OP3:
        """A ``VideoModel``, whose core without other sizes has four slots of 100, SCOFF's; or an ``OP3``."""
        channels, height, width = about["frame_shape"]
        video: VideoModel | OP3
        if self.kind == "op3":
            sizes = {name: self.network[name] for name in ("decoder", "channels", "hidden_size")}
            video = op3_model(core, (channels, height, width), **sizes, slot_size=self.slot_size)
        else:
            video = video_model(core, (channels, height, width), **self.network)
            require_memory(video.core, "video prediction")
        for variant, number in self.test_slots.items():
            try:
                video.rollout(torch.zeros(1, 1, channels, height, width), 1, num_slots=number)
            except (RuntimeError, KeyError, ValueError) as error:
                raise UserError(
                    f"task.test_slots runs {variant} with {number} slots, which {type(video.core).__name__} and its readout "
                    "cannot be given after training; leave it out, or choose core=scoff"
                ) from error
        return video

    def losses(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """The binary cross-entropy of the next frames' pixels; of OP3 its own loss, see there."""
        if self.kind == "op3":
            return model(batch)
        return {"loss": next_frame_loss(model, batch, self.noise, generator)}

    # Scores.

    @torch.no_grad()
    def evaluate(self, model: VideoModel | OP3, limit: int | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """Errors along rollouts on the test episodes of every variant, or the first ``limit`` of each, and schemata."""
        device = next(model.parameters()).device
        n = min(limit or self.test_episodes, self.test_episodes)
        errors: dict[str, dict[str, list[float]]] = {}
        chosen: dict[str, Any] = {}
        segmented: dict[str, dict[str, float]] = {}
        chooses = self._chooses(model)
        with progress_bar("scoring") as bar:
            bar.disable |= quiet
            shown = bar.add_task("", total=n * len(self.test), note="videos")
            for variant in self.test:
                source = self.source(variant, device)
                tally = _Errors(self.imagined)
                seen: list[tuple[Tensor, Tensor | None]] = []
                parts = segments.Segments()
                masks = isinstance(model.decoder, SlotDecoder) and hasattr(source.env, "masks")
                for states in source.whole(self.prompt + self.imagined, _EPISODES_AT_ONCE, limit):
                    frames = source.drawn(states)
                    tally.add(self._imagine(model, frames, variant)[0], frames[self.prompt - 1 :])
                    if chooses:
                        start = model.core.initial_state(frames.shape[1])
                        schema = trace(model.core, model.tokens(frames), start)["schema"]
                        laws = source.env.laws(states) if hasattr(source.env, "laws") else None
                        seen.append((schema.cpu(), None if laws is None else laws.cpu()))
                    if masks:
                        who = (
                            source.env.identities(states[self.prompt :]) if hasattr(source.env, "identities") else None
                        )
                        parts.add(*self._segments(model, source, states, frames, variant), who)
                    bar.advance(shown, frames.shape[1])
                errors[variant] = tally.means()
                if seen:
                    chosen[variant] = self._schemata(seen, source.env)
                if masks:
                    segmented[variant] = parts.scores()
        scores = {
            f"mse/{variant}/{h}": lines["model"][h - 1] for variant, lines in errors.items() for h in self.horizons
        }
        for variant, found in chosen.items():
            scores |= {f"{name}/{variant}": found[name] for name in ("agreement", "after_switch") if name in found}
        scores |= {f"{name}/{variant}": value for variant, found in segmented.items() for name, value in found.items()}
        told = {"schemata": chosen, "segments": segmented}
        return {"scores": scores, "errors": errors, **told, "prompt": self.prompt, "n": n}

    @staticmethod
    def _chooses(model: VideoModel | OP3) -> bool:
        """Whether the core chooses schemata; of one that does not, nothing is traced."""
        token = next(model.parameters()).new_zeros(1, 1, *model.token_shape)
        return "schema" in trace(model.core, Tokens(token), model.core.initial_state(1))

    def _imagine(self, model: VideoModel | OP3, frames: Tensor, variant: str) -> tuple[Tensor, Tensor]:
        return model.rollout(frames[: self.prompt], self.imagined, num_slots=self.test_slots.get(variant))

    def _segments(
        self, model: VideoModel | OP3, source: Videos, states: Tensor, frames: Tensor, variant: str
    ) -> tuple[Tensor, Tensor]:
        """Whose each pixel is, of the frames after the prompt: truly (0 the background), and the slot whose mask is largest.

        Both ``(imagined, B, H, W)``; the masks are said from the true frames before.
        """
        slots, _ = model.observe(frames[:-1], model.initial_state(frames.shape[1], self.test_slots.get(variant)))
        assert isinstance(model.decoder, SlotDecoder)
        said = [model.decoder.parts(of_step)[0].argmax(1) for of_step in slots[self.prompt - 1 :]]
        masks = source.env.masks(states[self.prompt :])
        numbers = torch.arange(1, masks.shape[2] + 1, device=masks.device)[:, None, None]
        return (masks * numbers).sum(2), torch.stack(said)

    def _schemata(self, seen: Sequence[tuple[Tensor, Tensor | None]], env: Any) -> dict[str, Any]:
        schema = torch.cat([part for part, _ in seen], dim=1)  # (T, B, K)
        count = torch.bincount(schema.flatten()).double()
        shares = count / count.sum()
        found: dict[str, Any] = {"shares": shares.tolist(), "used": int((shares > _USED).sum())}
        parts = [laws for _, laws in seen if laws is not None]
        if not parts:
            return found
        switching = bool((torch.cat(parts, dim=1).diff(dim=0) != 0).any())
        return found | agreement(schema, torch.cat(parts, dim=1), len(env.law_names), 0 if switching else _SETTLED)

    def objective(self, result: Mapping[str, Any]) -> float:
        """Minus the mean over variants and horizons of the logarithm of the error."""
        errors = [lines["model"][h - 1] for lines in result["errors"].values() for h in self.horizons]
        return -float(np.log10(np.maximum(errors, 1e-12)).mean())

    # Tables.

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """Errors by variant and horizon, and relative to the GRU if one is there; then what schemata do."""
        first = next(iter(results.values()))
        columns = [(variant, h) for variant in first["errors"] for h in self.horizons]
        gru = [result["errors"] for result in results.values() if result.get("core") == "gru"]
        title = f"{of}: squared error of pixels x 1000, after {first['prompt']} true frames"
        if any("mota" in scores for result in results.values() for scores in (result.get("segments") or {}).values()):
            title += "; tracking in %"
        table = Table("model", title=title + ("; in brackets relative to the GRU" if gru else ""), title_justify="left")
        for variant, h in columns:
            table.add_column(f"{variant}\nframe {h}", justify="right")
        told = [result["schemata"] for result in results.values()]
        laws = [variant for variant in first["errors"] if any("agreement" in found.get(variant, {}) for found in told)]
        for variant in laws:
            table.add_column(f"{variant}\nschema is the law's, %", justify="right")
            table.add_column("after a switch, %", justify="right")
        segmented: Mapping[str, Any] = next(
            (result["segments"] for result in results.values() if result.get("segments")), {}
        )
        headings, published = segments.columns(segmented)
        for heading in headings:
            table.add_column(heading, justify="right")

        def cells(errors: Mapping[str, Mapping[str, Sequence[float]]], line: str) -> list[str]:
            found = []
            for variant, h in columns:
                error = errors[variant][line][h - 1]
                base = float(np.mean([other[variant]["model"][h - 1] for other in gru])) if gru else 0.0
                found.append(f"{1000 * error:.2f}" + (f" ({error / base:.2f})" if base else ""))
            return found

        for name, result in results.items():
            more = []
            for variant in laws:
                found = result["schemata"].get(variant, {})
                more += [f"{100 * found[key]:.1f}" if key in found else "" for key in ("agreement", "after_switch")]
            more += segments.cells(result.get("segments") or {}, segmented)
            table.add_row(name, *cells(result["errors"], "model"), *more)
        table.add_section()
        table.add_row("copy of the last true frame", *cells(first["errors"], "copy"))
        table.add_row("true frames, blurred", *cells(first["errors"], "blurred"))
        for name, found in published.items():
            table.add_row(f"paper: {name}", *[""] * (len(columns) + 2 * len(laws)), *found)
        return table

    def overview(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """The same of the means over the runs of every core."""
        return self.table({f"{core} ({len(runs)})": _mean(runs) for core, runs in by_core(results)}, of)

    # Pictures.

    @torch.no_grad()
    def draw(
        self,
        model: VideoModel | OP3,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """Errors along rollouts; of one test video true and imagined frames, what each slot drew, and its schemata."""
        if example >= self.test_episodes:
            raise UserError(f"example {example} was asked for; there are {self.test_episodes} test videos")
        device = next(model.parameters()).device
        written = [
            *figures.curves(metrics, folder / "curves.png", of="frames"),
            pictures.along(result["errors"], self.prompt, folder / "errors.png"),
        ]
        for variant in self.test:
            source = self.source(variant, device)
            rows = self.prompt + self.imagined
            states = source.episodes.arrays["observations"][
                source.episodes.starts[example] + torch.arange(rows).to(device)
            ]
            frames = source.drawn(states)[:, None]
            said, slots = self._imagine(model, frames, variant)
            parts = model.decoder.parts(slots.flatten(0, 1)) if isinstance(model.decoder, SlotDecoder) else None
            suffix = f"_{variant}" if len(self.test) > 1 else ""
            written += pictures.rollout(frames[:, 0], said[:, 0], parts, folder, suffix)
            if parts is not None and hasattr(source.env, "masks"):
                true, labels = (part[:, 0] for part in self._segments(model, source, states[:, None], frames, variant))
                path = folder / f"segments{suffix}.png"
                written.append(pictures.segments(frames[self.prompt :, 0], true, labels, self.prompt, path))
            read = model.tokens(frames)
            chosen = trace(model.core, read, model.core.initial_state(1))
            if "schema" in chosen:
                laws = source.env.laws(states).cpu() if hasattr(source.env, "laws") else None
                names = source.env.law_names if laws is not None else ()
                written.append(
                    pictures.schemata(
                        frames[:, 0], chosen["schema"][:, 0], laws, names, folder / f"schemata{suffix}.png"
                    )
                )
            if variant == next(iter(self.test)):
                written += draw_choices(model.core, read, folder)
        return written


class Recordings:
    """Episodes of an environment's states and of its variants, recorded if they never were.

    Args:
        env_id: of the environment.
        env_kwargs: keyword arguments it always gets.
        episodes: how many, for "train" and for each variant of the "test".
        seeds: of the environment, for "train" and "test".
        steps: of an episode.
        data_dir: see ``collected``.
        fresh: see ``collected``.
        check: of the frames' sizes, see ``frame_shape``.
    """

    def __init__(
        self,
        env_id: str,
        env_kwargs: Mapping[str, Any],
        *,
        episodes: Mapping[str, int],
        seeds: Mapping[str, int],
        steps: int,
        data_dir: str | Path | Sequence[str | Path],
        fresh: bool,
        check: Callable[[Shape], object] = halvings,
    ):
        self.check = check
        self.env_id, self.env_kwargs, self.episodes, self.seeds = env_id, env_kwargs, episodes, seeds
        self.steps, self.data_dir, self.fresh = steps, data_dir, fresh
        self._opened: dict[tuple[str, str], Videos] = {}

    @cached_property
    def frame_shape(self) -> Shape:
        """``(C, H, W)``; an environment that draws no frames of its states is refused, before anything is recorded."""
        return frame_shape(self.env_id, self.env_kwargs, self.check)

    def source(
        self,
        variant: str,
        more: Mapping[str, Any],
        device: torch.device,
        *,
        quiet: bool = True,
        again: str | None = None,
    ) -> Videos:
        """The episodes of a variant, resident on the device.

        Args:
            variant: its name; "" for the training.
            more: keyword arguments in which it differs.
            device: where they go.
            quiet: without a progress bar.
            again: see ``collected``.
        """
        key = (variant, str(device))
        if key not in self._opened:
            _ = self.frame_shape  # which refuses other environments
            which = "test" if variant else "train"
            kwargs = {**self.env_kwargs, **more}
            settings = {"env_id": self.env_id, "env_kwargs": kwargs, "episodes": self.episodes[which]}
            settings |= {"steps": self.steps, "seed": self.seeds[which]}
            title = f"recording test: {variant}" if variant else "recording train"
            found = recorded(title, self.data_dir, which, settings, quiet=quiet, fresh=self.fresh, again=again)
            env = make_envs(self.env_id, 1, env_kwargs=kwargs, device=str(device))
            self._opened[key] = Videos(found.to(device), env)
        return self._opened[key]


def refuse_unknown_network(tokens: str, decoder: str, readout: str, noise: float, hidden_size: int) -> None:
    """Refuse what ``video_model`` and ``next_frame_loss`` do not offer.

    Raises:
        UserError: naming the option.
    """
    for option, value, known in (
        ("tokens", tokens, FRAME_TOKENS),
        ("decoder", decoder, DECODERS),
        ("readout", readout, READOUTS),
    ):
        if value not in known:
            raise UserError(f"task.{option} is {value!r}; {nearest(value, known)}")
    if decoder == "joint" and readout == "attention" and hidden_size % READOUT_HEADS:
        raise UserError(
            f"task.hidden_size={hidden_size}; expected a multiple of {READOUT_HEADS}, the heads of task.readout=attention"
        )
    if not 0.0 <= noise < 0.5:
        raise UserError(f"task.noise={noise}; expected a share of the pixels, from 0 to below 0.5")


def by_core(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Results in groups, one for each core, in the order of their names."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for result in results.values():
        groups.setdefault(str(result["core"]), []).append(result)
    return sorted(groups.items())


def next_frame_loss(model: nn.Module, frames: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """The mean binary cross-entropy of the pixels of every frame but the first, said after the true ones before it.

    Args:
        model: a ``VideoModel``.
        frames: ``(T + 1, B, C, H, W)``.
        noise: share of the pixels of what is read that are inverted.
        generator: source of the noise.
    """
    seen = frames[:-1]
    if noise:
        flipped = torch.rand(seen.shape, generator=generator, device=seen.device) < noise
        seen = torch.where(flipped, 1.0 - seen, seen)
    return F.binary_cross_entropy_with_logits(model(seen), frames[1:])


class _Errors:
    """Squared errors along rollouts, of the model and of what it is compared with."""

    def __init__(self, steps: int):
        self.sums = {name: torch.zeros(steps, dtype=torch.float64) for name in ("model", "copy", "blurred")}
        self.count = 0

    def add(self, said: Tensor, frames: Tensor) -> None:
        """Add what was said, ``(S, B, C, H, W)``, where the last true frame and those asked for are ``(S + 1, B, ...)``."""
        true = frames[1:]
        for name, frames_said in (("model", said), ("copy", frames[:1].expand_as(true)), ("blurred", blurred(true))):
            self.sums[name] += (frames_said - true).square().mean((2, 3, 4)).double().sum(1).cpu()
        self.count += true.shape[1]

    def means(self) -> dict[str, list[float]]:
        """By what said it, the mean error at each step."""
        return {name: (part / self.count).tolist() for name, part in self.sums.items()}


def blurred(frames: Tensor) -> Tensor:
    """True frames at half their resolution: each pixel is the mean of the 2 x 2 block that it is in.

    What a model would reach that knew where everything is, but not to the pixel.

    Args:
        frames: ``(..., H, W)``, even.
    """
    coarse = F.avg_pool2d(frames.flatten(0, -3), 2)
    return coarse.repeat_interleave(2, -1).repeat_interleave(2, -2).view_as(frames)


def agreement(schema: Tensor, laws: Tensor, num_laws: int, settled: int) -> dict[str, Any]:
    """Whether each schema belongs to one law.

    Args:
        schema: chosen by every object file at every frame, ``(T, B, K)``.
        laws: the laws by which the object moves on from it, ``(T, B)``.
        num_laws: how many there are.
        settled: frames at the beginning of a video that do not count.

    Returns:
        "table": frames by schema and law. "agreement": the share in which the schema is the law's, by the best assignment,
        and "chance", its value if all frames had the most frequent schema. "entropy": of the law given the schema, in bits.
        Where laws switch, "after_switch": the share at the first frames after it. Else "frames_to_settle": after how many
        frames, on average, no schema is another than the law's any more; a video that ends with another counts whole.
    """
    T, B, K = schema.shape
    num_schemata = int(schema.max()) + 1
    law = laws[..., None].expand_as(schema)
    table = torch.zeros(num_schemata, num_laws, dtype=torch.float64)
    pairs = (schema[settled:], law[settled:])
    table.index_put_(tuple(part.flatten() for part in pairs), torch.ones(1, dtype=torch.float64), accumulate=True)
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    belongs = torch.full((num_schemata,), -1)
    belongs[torch.as_tensor(rows)] = torch.as_tensor(columns)
    right = belongs[schema] == law
    given = table / table.sum(1, keepdim=True).clamp(min=1.0)
    uncertain = -(given * given.clamp(min=1e-12).log2()).sum(1)
    found: dict[str, Any] = {
        "table": table.long().tolist(),
        "agreement": float(right[settled:].double().mean()),
        "chance": float(table.sum(0).max() / table.sum()),
        "entropy": float((uncertain * table.sum(1)).sum() / table.sum()),
    }
    switched = laws[1:] != laws[:-1]
    if bool(switched.any()):
        return found | {"after_switch": float(right[1:][switched].double().mean())}
    wrong = ~right.all(-1)  # (T, B)
    last = torch.where(wrong, torch.arange(1, T + 1)[:, None], 0).amax(0)
    return found | {"frames_to_settle": float(last.double().mean())}


def _mean(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of several: the mean of every error and of what schemata do."""
    first = runs[0]
    errors = {
        variant: {line: np.mean([run["errors"][variant][line] for run in runs], axis=0).tolist() for line in lines}
        for variant, lines in first["errors"].items()
    }
    schemata: dict[str, dict[str, float]] = {}
    for variant, found in first["schemata"].items():
        named = [name for name in ("agreement", "after_switch") if name in found]
        schemata[variant] = {name: float(np.mean([run["schemata"][variant][name] for run in runs])) for name in named}
    segmented = {
        variant: {name: float(np.mean([run["segments"][variant][name] for run in runs])) for name in found}
        for variant, found in (first.get("segments") or {}).items()
    }
    told = {"schemata": schemata, "segments": segmented}
    return {"core": first["core"], "prompt": first["prompt"], "errors": errors, **told}
