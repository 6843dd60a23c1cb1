"""Episodes: the container of recorded experience, on disk and on the device."""

import glob
import hashlib
import json
import math
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import UserError, first_line
from .arrays import Array, OnDisk, budget, fitting, place

FORMAT = "worldmodels episodes"
VERSION = 2
WITHOUT_CHECKSUM = 1  # the version before, whose manifests have no checksum; it is still read
MANIFEST = "manifest.json"
VERIFIED: set[tuple[Any, ...]] = set()
"""Files whose checksum this process has compared: path, time of the last change and checksum."""


class Paths(NamedTuple):
    """Stretches of episodes, time-major.

    Args:
        observations: ``(h + 1, B, ...)`` as the environment gave them.
        actions: ``(h, B, ...)``; action t led from observation t to t + 1.
        episode: ``(B,)``, the episode each stretch is from.
        step: ``(B,)``, where in the episode it begins.
    """

    observations: Tensor
    actions: Tensor
    episode: Tensor
    step: Tensor


class Episodes:
    """Recorded episodes as a few long arrays: row ``starts[e] + t`` is step t of episode e.

    An episode of n transitions has n + 1 rows, so that its last observation has a place; of that last row, the action,
    reward and flags are zero. ``info`` arrays stand beside the observation they came with: what a step did (like
    "moved") is in the row that the step led to.

    Args:
        arrays: "observations", "actions", "rewards", "terminated", "truncated" and "info/..." entries, each with one
            row per observation; tensors, or what gives a tensor of the rows asked for (see ``worldmodels.data.arrays``).
        lengths: transitions per episode, ``(E,)``.
        about: where the data are from: "env_id", "env_kwargs", "seed", "action_space", "actions_per_object" ...
        checksum: of the manifest of the folder they were opened from.
    """

    def __init__(
        self, arrays: Mapping[str, Array], lengths: Tensor, about: Mapping[str, Any], *, checksum: str | None = None
    ):
        self.arrays: dict[str, Array] = dict(arrays)
        self.device = self.arrays["observations"].device
        self.lengths = lengths.to(self.device)
        self.starts = torch.cumsum(self.lengths + 1, 0) - (self.lengths + 1)
        self.about = dict(about)
        self.checksum = checksum
        rows = int((self.lengths + 1).sum())
        for name, array in self.arrays.items():
            if len(array) != rows:
                raise UserError(f"array {name!r} has {len(array)} rows; {len(lengths)} episodes have {rows}")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_transitions(self) -> int:
        """Transitions in all episodes."""
        return int(self.lengths.sum())

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation."""
        return tuple(self.arrays["observations"].shape[1:])

    def to(self, device: torch.device | str, *, memory: int | None = None) -> "Episodes":
        """The same episodes on a device: whole there if they fit, else large arrays stay and the rows drawn are copied.

        Args:
            device: where the rows are wanted; on the CPU nothing changes.
            memory: bytes that arrays may take there; None for half of what is free.
        """
        device = torch.device(device)
        arrays = place(self.arrays, device, memory)
        return Episodes(arrays, self.lengths.to(device), self.about, checksum=self.checksum)

    def rows(self, name: str, episode: Tensor, step: Tensor) -> Tensor:
        """Entries of one array by index gather; ``episode`` and ``step`` broadcast."""
        return self.arrays[name][self.starts[episode] + step]

    def paths(self, episode: Int[Tensor, " B"], step: Int[Tensor, " B"], horizon: int) -> Paths:
        """Stretches of ``horizon`` transitions beginning at the given steps, by index gather.

        Raises:
            ValueError: a stretch would leave its episode.
        """
        if bool((step + horizon > self.lengths[episode]).any()) or bool((step < 0).any()):
            raise ValueError(f"a path of {horizon} transitions leaves its episode")
        return self.paths_unchecked(episode, step, horizon)

    def paths_unchecked(self, episode: Int[Tensor, " B"], step: Int[Tensor, " B"], horizon: int) -> Paths:
        """``paths`` for starts known to be right: nothing is read back from the device."""
        time = torch.arange(horizon + 1, device=self.device)[:, None]
        return Paths(
            observations=self.rows("observations", episode, step + time),
            actions=self.rows("actions", episode, step + time[:-1]),
            episode=episode,
            step=step,
        )

    def frames(self, index: Int[Tensor, " E"]) -> tuple[Tensor, Tensor]:
        """Where the frames of these episodes lie: which are there and their rows, ``(E, longest + 1)`` both.

        Beyond an episode's end its last row is repeated.
        """
        lengths = self.lengths[index]
        time = torch.arange(int(lengths.max()) + 1, device=self.device)
        return time <= lengths[:, None], self.starts[index][:, None] + torch.minimum(time, lengths[:, None])

    def save(self, path: str | Path) -> None:
        """Write to a folder, aside first and renamed when whole."""
        with EpisodesWriter(path, self.about) as writer:
            for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
                rows = slice(start, start + length + 1)
                writer.append({name: array[rows].cpu().numpy() for name, array in self.arrays.items()})

    @classmethod
    def load(cls, path: str | Path, *, verify: bool = True, memory: int | None = None) -> "Episodes":
        """Open a folder written by ``save`` or ``collect``; ``.to(device)`` brings it to a device.

        Arrays are memory-mapped from the smallest on, as many as fit into ``memory``: processes that open the same folder
        share the pages that the system holds of it, and it is read from disk once. Of the others each batch reads its
        rows, and memory does not grow with the data.

        Args:
            path: the folder.
            verify: compare every array with its checksum, about a second per gigabyte; once while a file stays as it is.
            memory: bytes of the arrays that may come to lie in memory; None for half of what is free.

        Raises:
            UserError: no such folder, not ours, truncated or edited.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        try:
            entries = _checked(manifest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path / MANIFEST}: {_said(error)}; collect the data again") from error
        sizes = {name: entry.bytes for name, entry in entries.items()}
        mapped = fitting(sizes, budget(torch.device("cpu")) if memory is None else memory)
        arrays = {name: _open_array(path, entry, verify, name in mapped) for name, entry in entries.items()}
        lengths = torch.tensor(manifest["lengths"], dtype=torch.int64)
        return cls(arrays, lengths, manifest["about"], checksum=manifest["checksum"])


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise UserError(f"no data at {path}; expected a folder written by 'worldmodels collect'")
    if not (path / MANIFEST).is_file():
        raise UserError(f"{path} holds no {MANIFEST}; expected a folder written by 'worldmodels collect'")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path / MANIFEST} is not JSON ({error}); collect the data again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path / MANIFEST} is not a manifest of {FORMAT}; was this folder written by another program?")
    if manifest.get("version") not in (VERSION, WITHOUT_CHECKSUM):
        raise UserError(f"{path} has format version {manifest.get('version')}; this release reads {VERSION}")
    own = _own_checksum(manifest)
    if manifest["version"] == VERSION and manifest.get("checksum") != own:
        raise UserError(
            f"{path / MANIFEST} does not match its checksum: it was edited or damaged, collect the data again"
        )
    return manifest | {"checksum": own}


def _own_checksum(manifest: Mapping[str, Any]) -> str:
    """Of all that a manifest says but its checksum."""
    said = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


class _Entry(NamedTuple):
    """An array as a manifest describes it."""

    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    bytes: int
    sha256: str


def _checked(manifest: Mapping[str, Any]) -> dict[str, _Entry]:
    """The arrays of a manifest from anyone: plain files beside it, of plain numbers, with as many rows as episodes need.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is none of ours.
    """
    lengths = manifest["lengths"]
    if not isinstance(lengths, list) or not all(type(length) is int and 0 <= length < 1 << 48 for length in lengths):
        raise ValueError("lengths are no list of whole numbers")
    if not isinstance(manifest["about"], dict):
        raise TypeError("about is no mapping")
    entries = {}
    for name, entry in manifest["arrays"].items():
        file, dtype, shape = entry["file"], np.dtype(str(entry["dtype"])), entry["shape"]
        if (
            not isinstance(file, str)
            or not file.isprintable()
            or Path(file).name != file
            or file in ("", "..", MANIFEST)
        ):
            raise ValueError(f"array {name!r} lies in {file!r}, which is no name of a file in this folder")
        if dtype.kind not in "biuf" or dtype.itemsize > 8 or not dtype.isnative:
            raise ValueError(f"array {name!r} is of {dtype.str!r}, which is no plain number of this machine")
        plain = isinstance(shape, list) and shape and all(type(size) is int and size >= 0 for size in shape)
        if not plain or 0 in shape[1:]:
            raise ValueError(f"array {name!r} has the shape {shape!r}")
        if shape[0] != sum(lengths) + len(lengths):
            raise ValueError(
                f"array {name!r} has {shape[0]} rows; {len(lengths)} episodes have {sum(lengths) + len(lengths)}"
            )
        entries[name] = _Entry(file, dtype, tuple(shape), math.prod(shape) * dtype.itemsize, str(entry["sha256"]))
    if "observations" not in entries:
        raise ValueError("it lacks observations")
    return entries


def _said(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)


def _open_array(folder: Path, entry: _Entry, verify: bool, mapped: bool) -> Array:
    file = folder / entry.file
    if file.resolve().parent != folder.resolve():
        raise UserError(f"{file} is a link to {file.resolve()}, outside of its folder; copy the file in its place")
    size = file.stat().st_size if file.is_file() else -1
    if size != entry.bytes:
        found = "is missing" if size < 0 else f"has {size} bytes"
        raise UserError(f"{file} {found}; its manifest says {entry.bytes}: the data are truncated, collect them again")
    known = (str(file.resolve()), file.stat().st_mtime_ns, entry.sha256)
    if verify and known not in VERIFIED:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != entry.sha256:
            raise UserError(f"{file} does not match its checksum: the data were edited or damaged, collect them again")
        VERIFIED.add(known)
    if entry.bytes == 0:
        return torch.from_numpy(np.zeros(entry.shape, entry.dtype))
    if not mapped:
        return OnDisk(file.resolve(), entry.dtype, entry.shape)
    return torch.from_numpy(np.memmap(file, dtype=entry.dtype, mode="c", shape=entry.shape))


class EpisodesWriter:
    """Writes episodes one after another; the folder takes its name only when all is written.

    Args:
        path: the folder to make; it must not exist.
        about: what the manifest says about the data, JSON values.
    """

    def __init__(self, path: str | Path, about: Mapping[str, Any]):
        self.path = Path(path)
        if self.path.exists():
            raise UserError(f"{self.path} exists already; remove it or choose another path")
        self.about = dict(about)
        self.lengths: list[int] = []
        self._aside = self.path.with_name(f".{self.path.name}.{socket.gethostname()}.{os.getpid()}.partial")
        self._streams: dict[str, Any] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, Any] = {}

    def __enter__(self) -> "EpisodesWriter":
        for left in self.path.parent.glob(f".{glob.escape(self.path.name)}.{socket.gethostname()}.*.partial"):
            if not _alive(left.suffixes[-2]):  # of a process of this machine that was killed
                shutil.rmtree(left, ignore_errors=True)
        self._aside.mkdir(parents=True)
        return self

    def append(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Add an episode: arrays of n + 1 rows each."""
        rows = {len(array) for array in arrays.values()}
        if len(rows) != 1:
            raise ValueError(f"arrays of an episode have {sorted(rows)} rows; they must have equally many")
        if self._entries and set(arrays) != set(self._entries):
            raise ValueError(f"an episode has arrays {sorted(arrays)}; those before had {sorted(self._entries)}")
        for name, array in arrays.items():
            array = np.ascontiguousarray(array)
            if name not in self._entries:
                file = name.replace("/", "_") + ".bin"
                self._streams[name] = (self._aside / file).open("wb")
                self._entries[name] = {"file": file, "dtype": array.dtype.str, "shape": [0, *array.shape[1:]]}
                self._digests[name] = hashlib.sha256()
            entry = self._entries[name]
            if array.dtype.str != entry["dtype"] or list(array.shape[1:]) != entry["shape"][1:]:
                raise ValueError(
                    f"{name} has {array.dtype.str} {array.shape[1:]}; before it was {entry['dtype']} {entry['shape'][1:]}"
                )
            data = array.tobytes()
            self._streams[name].write(data)
            self._digests[name].update(data)
            entry["shape"][0] += len(array)
        self.lengths.append(rows.pop() - 1)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            for stream in self._streams.values():
                stream.close()
            if error is None:
                self._finish()
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)

    def _finish(self) -> None:
        for name, entry in self._entries.items():
            entry["sha256"] = self._digests[name].hexdigest()
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "about": self.about,
            "lengths": self.lengths,
            "arrays": self._entries,
        }
        manifest["checksum"] = _own_checksum(json.loads(json.dumps(manifest)))
        (self._aside / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        try:
            self._aside.rename(self.path)
        except OSError:
            if not (self.path / MANIFEST).is_file():  # else another process has just written the same data
                raise


def _alive(suffix: str) -> bool:
    """Whether another process has the number after the dot; this one, which writes only now, does not count."""
    number = suffix.removeprefix(".")
    if not number.isdecimal() or int(number) == os.getpid():
        return False
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def draw_paths(
    episodes: Episodes,
    batch_size: int,
    window: int,
    starts_per_episode: int,
    *,
    time_aligned: bool,
    generator: torch.Generator,
) -> Paths:
    """A batch of windows: ``batch_size / window`` of them, ``starts_per_episode`` from each episode drawn.

    Episodes are drawn with replacement in proportion to their windows. The starts within one are different steps, every set
    of them as likely, while it has enough; else they are all that it has, and the rest drawn from these. ``time_aligned``
    uses the same starts in all episodes.

    Departure: C-SWM's authors pass through the data in shuffled epochs; we draw with replacement, because a batch then
    is a function of the generator alone and a killed run resumes exactly.

    Args:
        episodes: the data.
        batch_size: transitions.
        window: transitions in a row.
        starts_per_episode: windows of each episode.
        time_aligned: same starts everywhere.
        generator: source of the draws, on the data's device.
    """
    episode, step = draw_starts(
        episodes,
        max(1, batch_size // (window * starts_per_episode)),
        window,
        starts_per_episode=starts_per_episode,
        time_aligned=time_aligned,
        generator=generator,
    )
    return episodes.paths_unchecked(episode, step, window)


def draw_starts(
    episodes: Episodes,
    groups: int,
    window: int,
    *,
    starts_per_episode: int = 1,
    time_aligned: bool = False,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Where ``groups`` x ``starts_per_episode`` windows begin: episodes and steps; see ``draw_paths``."""
    possible = (episodes.lengths - window + 1).clamp(min=0)
    S = starts_per_episode
    episode = torch.multinomial(possible.double(), groups, replacement=True, generator=generator)
    count = possible[episode]
    if time_aligned:
        count = count.min().expand(groups)
    # S different starts, every set of them as likely (Floyd's sampling): round j draws from the first `first` starts, and
    # takes the last of these where what it drew is taken. Where there are fewer than S, the rounds too many draw from all.
    fraction = torch.rand(1 if time_aligned else groups, S, generator=generator, device=episodes.device)
    step = torch.zeros(groups, S, dtype=torch.int64, device=episodes.device)
    rounds = torch.arange(S, device=episodes.device)
    for j in range(S):
        first = count - S + 1 + j
        first = torch.where(first > 0, first, count)
        drawn = (fraction[:, j] * first).long().minimum(first - 1)
        taken = (step == drawn[:, None]) & (rounds < j) & (rounds >= (S - count)[:, None])
        step[:, j] = torch.where(taken.any(dim=1), first - 1, drawn)
    step = step.sort(dim=1).values
    return episode.repeat_interleave(S), step.flatten()
