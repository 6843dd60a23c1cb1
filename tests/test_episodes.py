import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from worldmodels.data.arrays import OnDisk, OnHost, fitting, place
from worldmodels.data.episodes import Episodes, EpisodesWriter, _own_checksum
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
    for episodes in (Episodes.load(path), Episodes.load(path).to("cpu"), Episodes.load(path, memory=0)):
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


def test_rows_from_disk_are_those_of_the_map(tmp_path):
    write(tmp_path / "a", [3, 6, 4])
    mapped, read = Episodes.load(tmp_path / "a"), Episodes.load(tmp_path / "a", memory=0)
    assert all(isinstance(array, OnDisk) for array in read.arrays.values())
    index = torch.tensor([[3, 3, 15], [0, 4, 1]])
    for name, array in mapped.arrays.items():
        found = read.arrays[name]
        assert (found.shape, found.dtype, found.dim(), len(found)) == (
            array.shape,
            array.dtype,
            array.dim(),
            len(array),
        )
        for at in (index, index[:0], slice(4, 9), slice(None)):
            assert torch.equal(found[at], array[at]) and found[at].dtype == array.dtype
    starts = torch.tensor([1, 0, 2, 1]), torch.tensor([3, 0, 1, 0])
    for a, b in zip(mapped.paths(*starts, 3), read.to("cpu").paths(*starts, 3), strict=True):
        assert torch.equal(a, b)
    read.save(tmp_path / "b")
    assert (tmp_path / "a" / "manifest.json").read_text() == (tmp_path / "b" / "manifest.json").read_text()
    for row in (-1, 16):
        with pytest.raises(IndexError, match="of an array that has 16"):
            read.arrays["rewards"][torch.tensor([row])]
    damage_cut(tmp_path / "a")
    with pytest.raises(UserError, match="ends within row 15"):
        read.arrays["observations"][torch.tensor([15])]


def test_the_smallest_arrays_are_held_in_memory(tmp_path):
    assert fitting({"c": 5, "a": 3, "b": 0}, 7) == {"a", "b"} and fitting({"a": 3}, 2) == set()
    write(tmp_path / "a", [3, 2], shape=(9, 9))
    episodes = Episodes.load(tmp_path / "a", memory=300)
    assert {name for name, array in episodes.arrays.items() if isinstance(array, OnDisk)} == {"observations"}
    assert not any(isinstance(array, OnDisk) for array in Episodes.load(tmp_path / "a").arrays.values())


def test_what_does_not_fit_on_a_device_is_gathered_on_the_host(tmp_path):
    write(tmp_path / "a", [3, 2], shape=(9, 9))
    device = torch.device("meta")  # a device without data: only its name can be looked at
    arrays = Episodes.load(tmp_path / "a").arrays
    placed = place(arrays, device, 300)
    assert isinstance(placed["observations"], OnHost) and isinstance(placed["actions"], torch.Tensor)
    rows = placed["observations"][torch.tensor([[6, 0]])]
    assert rows.device == placed["actions"].device == device and rows.shape == (1, 2, 9, 9)
    large = {"observations": placed["observations"]}
    assert place(large, torch.device("cpu"))["observations"] is arrays["observations"]
    assert place(large, device, 10_000)["observations"].shape == arrays["observations"].shape
    read = place(Episodes.load(tmp_path / "a", memory=0).arrays, device)
    assert all(isinstance(array, torch.Tensor) and array.device == device for array in read.values())


RESIDENT = """
import os, sys, torch
from worldmodels.data.episodes import Episodes
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
for memory in (1 << 20, 1 << 30):
    episodes = Episodes.load(sys.argv[1], memory=memory)
    total, before = 0, None
    for rows in torch.randperm(len(episodes)).split(16):
        total += int(episodes.paths(rows, torch.zeros_like(rows), 1).observations.sum())
        before = before or resident()
    print(total, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_data(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (2, 128, 128), dtype=np.uint8)
    with EpisodesWriter(tmp_path / "a", {}) as writer:
        for _ in range(2048):  # 64 MB
            writer.append({"observations": frames, "actions": np.zeros(2, np.int64)})
    words = [sys.executable, "-P", "-c", RESIDENT, str(tmp_path / "a")]
    said = subprocess.run(words, capture_output=True, text=True, check=True)
    total, read, same, mapped = (int(word) for word in said.stdout.split())
    assert total == same == 2048 * int(frames.sum(dtype=np.int64))
    assert read < 16 and mapped > 48, f"{read} MB where rows are read, {mapped} MB where the file is mapped"


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


def without(path, change):
    """A manifest that lacks something, written with a checksum that fits."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest | {"checksum": _own_checksum(manifest)}))


def damage_key(path):
    without(path, lambda manifest: manifest.pop("lengths"))


def damage_arrays(path):
    without(path, lambda manifest: manifest["arrays"].pop("observations"))


def damage_length(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("[3, 2]", "[2, 3]"))


def damage_checksum(path):
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["checksum"]
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
        (damage_length, "does not match its checksum"),
        (damage_checksum, "does not match its checksum"),
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
