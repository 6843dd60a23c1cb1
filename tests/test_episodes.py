import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from worldmodels.data.episodes import Episodes, EpisodesWriter
from worldmodels.errors import UserError


def write(path, lengths, shape=(2, 3), seed=0):
    generator = np.random.default_rng(seed)
    episodes = []
    with EpisodesWriter(path, {"env_id": "test"}) as writer:
        for n in lengths:
            episodes.append(
                {
                    "observations": generator.integers(0, 256, (n + 1, *shape), dtype=np.uint8),
                    "actions": generator.integers(0, 5, n + 1),
                    "rewards": generator.random(n + 1).astype(np.float32),
                    "terminated": np.zeros(n + 1, bool),
                    "truncated": np.arange(n + 1) == n - 1,
                    "info/positions": generator.random((n + 1, 2)),
                }
            )
            writer.append(episodes[-1])
    return episodes


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    shape=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    seed=st.integers(0, 99),
)
def test_what_is_written_is_read(tmp_path_factory, lengths, shape, seed):
    path = tmp_path_factory.mktemp("x") / "data"
    written = write(path, lengths, shape, seed)
    for episodes in (Episodes.load(path), Episodes.load(path).to("cpu")):
        assert len(episodes) == len(lengths) and episodes.num_transitions == sum(lengths)
        assert episodes.observation_shape == shape
        for e, arrays in enumerate(written):
            for name, array in arrays.items():
                step = torch.arange(lengths[e] + 1)
                got = episodes.rows(name, torch.full_like(step, e), step).numpy()
                assert got.dtype == array.dtype and np.array_equal(got, array)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hnp.arrays(hnp.unsigned_integer_dtypes() | hnp.floating_dtypes(sizes=(32, 64)), (4, 2)))
def test_any_numeric_type_survives(tmp_path_factory, array):
    if array.dtype.byteorder == ">" or array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return  # torch has no such type; environments do not give it
    path = tmp_path_factory.mktemp("x") / "data"
    with EpisodesWriter(path, {}) as writer:
        writer.append({"observations": array})
    assert np.array_equal(Episodes.load(path).arrays["observations"].numpy(), array, equal_nan=array.dtype.kind == "f")


def test_saving_again_gives_the_same_data(tmp_path):
    write(tmp_path / "a", [3, 1, 4])
    first = Episodes.load(tmp_path / "a")
    first.save(tmp_path / "b")
    second = Episodes.load(tmp_path / "b")
    assert all(torch.equal(first.arrays[name], second.arrays[name]) for name in first.arrays)
    assert torch.equal(first.lengths, second.lengths) and first.about == second.about


def test_paths_equal_slices(tmp_path):
    written = write(tmp_path / "a", [3, 6, 4])
    episodes = Episodes.load(tmp_path / "a")
    paths = episodes.paths(torch.tensor([1, 0, 2, 1]), torch.tensor([3, 0, 1, 0]), 3)
    assert paths.observations.shape == (4, 4, 2, 3) and paths.actions.shape == (3, 4)
    for b, (e, t) in enumerate([(1, 3), (0, 0), (2, 1), (1, 0)]):
        assert np.array_equal(paths.observations[:, b].numpy(), written[e]["observations"][t : t + 4])
        assert np.array_equal(paths.actions[:, b].numpy(), written[e]["actions"][t : t + 3])
    with pytest.raises(ValueError, match="leaves its episode"):
        episodes.paths(torch.tensor([0]), torch.tensor([1]), 3)


def test_two_writers_of_the_same_data_do_not_hurt_each_other(tmp_path):
    with EpisodesWriter(tmp_path / "a", {}) as late:
        late.append({"observations": np.zeros((2, 1))})
        late._aside = late._aside.rename(tmp_path / ".other.partial")  # another process has another name
        with EpisodesWriter(tmp_path / "a", {}) as early:
            early.append({"observations": np.zeros((2, 1))})
    assert len(Episodes.load(tmp_path / "a")) == 1 and len(list(tmp_path.iterdir())) == 1


def test_an_unfinished_folder_never_takes_its_name(tmp_path):
    with pytest.raises(RuntimeError), EpisodesWriter(tmp_path / "a", {}) as writer:
        writer.append({"observations": np.zeros((2, 1))})
        raise RuntimeError("killed")
    assert list(tmp_path.iterdir()) == []


def damage_cut(path):
    file = path / "observations.bin"
    file.write_bytes(file.read_bytes()[:-1])


def damage_edit(path):
    file = path / "actions.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(bytes(data))


def damage_manifest(path):
    (path / "manifest.json").write_text("{")


def damage_foreign(path):
    (path / "manifest.json").write_text('{"format": "other"}')


def damage_version(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))


def damage_key(path):
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["lengths"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def damage_arrays(path):
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["arrays"]["observations"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def damage_missing(path):
    (path / "rewards.bin").unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_cut, "truncated"),
        (damage_edit, "checksum"),
        (damage_manifest, "not JSON"),
        (damage_foreign, "another program"),
        (damage_version, "version 99"),
        (damage_key, "lengths"),
        (damage_arrays, "observations"),
        (damage_missing, "missing"),
    ],
)
def test_damaged_data_are_refused_in_one_line(tmp_path, damage, says):
    write(tmp_path / "a", [3, 2])
    damage(tmp_path / "a")
    with pytest.raises(UserError, match=says) as caught:
        Episodes.load(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_missing_and_taken_folders(tmp_path):
    with pytest.raises(UserError, match="no data at"):
        Episodes.load(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no manifest"):
        Episodes.load(tmp_path)
    with pytest.raises(UserError, match="exists already"):
        EpisodesWriter(tmp_path, {})


def test_episodes_must_be_alike(tmp_path):
    with pytest.raises(ValueError, match="equally many"), EpisodesWriter(tmp_path / "a", {}) as writer:
        writer.append({"observations": np.zeros((3, 1)), "actions": np.zeros(2)})
    with pytest.raises(ValueError, match="before it was"), EpisodesWriter(tmp_path / "b", {}) as writer:
        writer.append({"observations": np.zeros((3, 1))})
        writer.append({"observations": np.zeros((3, 2))})
