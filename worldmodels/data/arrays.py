"""Where the arrays of a data set lie: whole in memory, or on disk, from which the rows are read that are asked for."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError

SHARE = 0.5
"""The part of a device's free memory that the arrays of one data set may take."""
_COPY_BYTES = 1 << 26


class OnDisk:
    """An array that stays in its file: the rows that are asked for are read, and nothing else of it takes memory.

    Departure from a memory map: of that, every page ever touched counts as memory of the process, with those the system
    maps around it, and each miss waits for the disk alone. Here the system is told of all rows before the first is read.

    Args:
        file: the rows one after another.
        dtype: of its elements.
        shape: of the whole, ``(rows, ...)``.
    """

    device = torch.device("cpu")

    def __init__(self, file: Path, dtype: np.dtype, shape: tuple[int, ...]):
        self.file = file
        self.shape = torch.Size(shape)
        self.dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        self._dtype = dtype
        self.row_bytes = self.shape[1:].numel() * dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """The rows at integers ``(...)``, counted from 0, or of a slice, as a tensor gives them."""
        if isinstance(index, slice):
            index = torch.arange(len(self))[index]
        rows = index.flatten().tolist()
        if rows and not 0 <= min(rows) <= max(rows) < len(self):
            raise IndexError(f"rows {min(rows)} to {max(rows)} of an array that has {len(self)}")
        found = np.empty((len(rows), self.row_bytes), np.uint8)
        with self.file.open("rb", buffering=0) as stream:
            if hasattr(os, "posix_fadvise"):
                for row in rows:
                    os.posix_fadvise(stream.fileno(), row * self.row_bytes, self.row_bytes, os.POSIX_FADV_WILLNEED)
            for row, place in zip(rows, found, strict=True):
                stream.seek(row * self.row_bytes)
                if stream.readinto(place.data) != self.row_bytes:
                    raise UserError(f"{self.file} ends within row {row}: it was changed while in use, collect it again")
        return torch.from_numpy(found.view(self._dtype).reshape(*index.shape, *self.shape[1:]))


class OnHost:
    """An array too large for a device: its rows are gathered where it lies and copied there through pinned memory.

    Args:
        source: the array, on the host or on disk.
        device: where the rows are wanted.
    """

    def __init__(self, source: Tensor | OnDisk, device: torch.device):
        self.source = source
        self.device = device
        self.shape, self.dtype = source.shape, source.dtype

    def __len__(self) -> int:
        return len(self.source)

    def dim(self) -> int:
        """How many axes it has."""
        return self.source.dim()

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """The rows at integers ``(...)`` on any device, or of a slice, on the device."""
        rows = self.source[index.cpu() if isinstance(index, Tensor) else index]
        pinned = rows.pin_memory() if self.device.type == "cuda" else rows
        return pinned.to(self.device, non_blocking=True)


Array = Tensor | OnDisk | OnHost
"""What an array of a data set can be; all give tensors for rows by index."""


def place(arrays: Mapping[str, Array], device: torch.device, memory: int | None = None) -> dict[str, Array]:
    """The arrays for use on a device: whole there from the smallest on, as many as fit, and rows of the others.

    On the CPU they stay as they are: what is mapped or read there was settled when they were opened.

    Args:
        arrays: by name.
        device: where rows are wanted.
        memory: bytes that may be taken; None for ``SHARE`` of what is free.
    """
    sources = {name: array.source if isinstance(array, OnHost) else array for name, array in arrays.items()}
    if device.type == "cpu":
        return {name: array.cpu() if isinstance(array, Tensor) else array for name, array in sources.items()}
    sizes = {
        name: array.shape.numel() * array.dtype.itemsize
        for name, array in sources.items()
        if array.device.type != device.type
    }
    outside = sizes.keys() - fitting(sizes, budget(device) if memory is None else memory)
    return {
        name: OnHost(array, device) if name in outside else _whole(array, device) for name, array in sources.items()
    }


def _whole(array: Tensor | OnDisk, device: torch.device) -> Tensor:
    if isinstance(array, Tensor):
        return array.to(device)
    whole = torch.empty(array.shape, dtype=array.dtype, device=device)
    rows = max(1, _COPY_BYTES // max(1, array.row_bytes))
    for start in range(0, len(array), rows):
        whole[start : start + rows] = array[start : start + rows].to(device)
    return whole


def fitting(sizes: Mapping[str, int], memory: int) -> set[str]:
    """The names of what fits into so many bytes together, from the smallest on."""
    fit: set[str] = set()
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        memory -= size
        if memory >= 0:
            fit.add(name)
    return fit


def budget(device: torch.device) -> int:
    """``SHARE`` of the bytes free on a device; on a Linux host, of what it has without swapping and its container allows."""
    if device.type == "cuda":
        return int(SHARE * torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # no Linux: everything is mapped, and the system does as it sees fit
        return sys.maxsize
    try:
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        pass
    return int(SHARE * free)
