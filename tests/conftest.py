"""What all tests share: the checkout off the path, few threads, small data."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT]

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_collection_modifyitems(config, items):
    """Tests that take long run only when asked for."""
    if "slow" not in config.getoption("-m"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes more than a minute; run with -m slow"))


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors are fastest on one thread, and results then do not depend on the machine."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def block_episodes(tmp_path_factory):
    """40 short episodes of BlockPhysics."""
    from worldmodels.data.collect import collect

    path = tmp_path_factory.mktemp("data") / "blocks"
    return collect("worldmodels/BlockPhysics-v0", path, episodes=40, steps=12, seed=1, drop_invalid=True)
