"""Counter-based random numbers: every draw is a pure function of its key, on any device and at any batch size.

A key is built by folding integers (seed, environment index, episode, step, draw) into 64 bits with the SplitMix64
finaliser (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"). Integer arithmetic only, so CPU
and GPU agree bit for bit.
"""

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, n: int) -> Tensor:
    """Logical shift of int64 (torch's ``>>`` keeps the sign)."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def fold(key: Tensor, *data: int | Tensor) -> Tensor:
    """Fold integers into a key: a new key, as if drawn afresh for each different ``data``.

    Args:
        key: int64, any shape.
        data: integers or int64 tensors that broadcast with ``key``.

    Returns:
        int64 key of the broadcast shape.
    """
    for value in data:
        step = (value + 1) * _GOLDEN
        key = _mix(key + (_wrapped(step) if isinstance(step, int) else step))
    return key


def _wrapped(value: int) -> int:
    """A Python integer as the signed 64-bit integer torch's own arithmetic would leave."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def seed_key(seed: int | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """The key of a seed: a scalar int64 tensor (or one key per seed)."""
    return _mix(torch.as_tensor(seed, dtype=torch.int64, device=device) ^ _GOLDEN)


def bits(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Independent 64-bit draws, ``(*key.shape, *shape)`` int64, one counter each."""
    count = 1
    for size in shape:
        count *= size
    counter = torch.arange(count, device=key.device).reshape(shape)
    return fold(key.reshape(key.shape + (1,) * len(shape)), counter)


def uniform(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniform float32 draws in [0, 1), ``(*key.shape, *shape)``, of 24 bits each."""
    return _shift_right(bits(key, shape), 40).to(torch.float32) * 2.0**-24


def integers(key: Tensor, high: int, shape: tuple[int, ...]) -> Tensor:
    """Uniform int64 draws in [0, high), ``(*key.shape, *shape)``; high is far below 2**31, so the bias is below 1e-6."""
    return _shift_right(bits(key, shape), 33) % high


def choice(key: Tensor, high: int, count: int) -> Tensor:
    """``count`` different integers of [0, high) in random order, ``(*key.shape, count)`` int64."""
    return bits(key, (high,)).argsort(dim=-1, stable=True)[..., :count]
