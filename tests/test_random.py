import torch
from hypothesis import given
from hypothesis import strategies as st

from worldmodels.envs import random


def plain_splitmix(key: int, data: list[int]) -> int:
    """SplitMix64's finaliser in Python integers."""
    mask = (1 << 64) - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = mix((key ^ 0x9E3779B97F4A7C15) & mask)
    for value in data:
        key = mix((key + (value + 1) * 0x9E3779B97F4A7C15) & mask)
    return key


@given(st.integers(0, 2**62), st.lists(st.integers(0, 2**40), max_size=4))
def test_fold_equals_splitmix_in_plain_integers(seed, data):
    got = int(random.fold(random.seed_key(seed), *data)) % (1 << 64)
    assert got == plain_splitmix(seed, data)
    as_tensors = random.fold(random.seed_key(seed), *(torch.tensor(value) for value in data))
    assert int(as_tensors) % (1 << 64) == got


def test_uniform_is_uniform_and_keys_differ():
    keys = random.fold(random.seed_key(0), torch.arange(1000))
    draws = random.uniform(keys, (100,))
    assert draws.shape == (1000, 100) and draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.005 and abs(draws.var() - 1 / 12) < 0.002
    correlation = torch.corrcoef(torch.stack([draws[:-1].flatten(), draws[1:].flatten()]))[0, 1]
    assert abs(correlation) < 0.02


def test_neighbouring_seeds_share_no_stream():
    a = random.fold(random.seed_key(1), torch.arange(10_000))
    b = random.fold(random.seed_key(2), torch.arange(10_000))
    assert len(torch.unique(torch.cat([a, b]))) == 20_000


def test_choice_draws_without_replacement_and_evenly():
    cells = random.choice(random.fold(random.seed_key(3), torch.arange(5000)), 25, 5)
    assert all(len(set(row)) == 5 for row in cells.tolist())
    counts = torch.bincount(cells.flatten(), minlength=25) / 5000
    assert (counts - 0.2).abs().max() < 0.03


def test_integers_stay_in_range():
    draws = random.integers(random.seed_key(4), 7, (10_000,))
    assert draws.min() == 0 and draws.max() == 6
