from functools import partial

import pytest
import torch
from hydra.utils import get_class

from worldmodels.check import check_encoder
from worldmodels.encoders import ENCODERS, CSWMEncoder, SlotAttentionEncoder, VectorEncoder, pixels
from worldmodels.errors import UserError
from worldmodels.plugins import build_encoder


@pytest.mark.parametrize("name", ENCODERS)
def test_ours_keep_the_contract(name):
    found = check_encoder(get_class(ENCODERS[name]["_target_"]))
    assert not found.mend and 1 <= len(found.advice) < 3


class Sloppy(torch.nn.Module):
    """An encoder with a fault."""

    def __init__(self, observation_shape, num_slots, slot_size, *, fault):
        super().__init__()
        if fault == "refuses" or len(observation_shape) == 3:
            raise ValueError("not this one")
        self.observation_shape, self.num_slots, self.slot_size = observation_shape, num_slots, slot_size
        self.fault, self.sizes = fault, (num_slots, slot_size)
        self.linear = torch.nn.Linear(observation_shape[0], num_slots * slot_size)
        self.other = torch.nn.Linear(1, 1) if fault == "dead" else None
        if fault == "attributes":
            del self.num_slots

    def forward(self, observations):
        if self.fault == "rows":
            observations = observations - observations.mean(0)
        slots = self.linear(observations)
        if self.fault == "random":
            slots = slots + torch.randn_like(slots) * 1e-6
        return slots if self.fault == "shape" else slots.unflatten(1, self.sizes)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("none", None),
        ("refuses", "it refuses observations (6,)"),
        ("attributes", "lacks the attribute num_slots"),
        ("shape", "its slots are (4, 24), expected (4, 3, 8)"),
        ("rows", "depend on the other rows"),
        ("random", "two evaluations of the same observations differ"),
        ("dead", "no gradient reaches other.weight, other.bias"),
    ],
)
def test_faults_of_encoders_are_found(fault, says):
    mend = check_encoder(partial(Sloppy, fault=fault)).mend
    assert (says is None and not mend) or says in " ".join(mend)


@pytest.mark.parametrize("encoder", ["cswm", "slot_attention", "vector"])
def test_sizes_of_encoders_have_a_range(encoder):
    with pytest.raises(UserError, match="encoder.hidden_size=0; expected a whole number of at least 1"):
        build_encoder({**ENCODERS[encoder], "hidden_size": 0}, (20, 20, 3), 2, 4)


def test_an_encoder_is_tried_before_training(monkeypatch):
    def forward(self, observations):
        raise RuntimeError("not these\nfor many reasons")

    monkeypatch.setattr(CSWMEncoder, "forward", forward)
    with pytest.raises(UserError, match=r"encoder CSWMEncoder cannot take observations \(20, 20, 3\): not these$"):
        build_encoder(ENCODERS["cswm"], (20, 20, 3), 2, 4)


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("size", "slots", "slot_size", "channels_in", "transition", "published"),
    [
        ("small", 5, 2, 3, 1_059_330, 1_347_209),
        ("medium", 3, 4, 6, None, 1_399_947),
        ("large", 5, 2, 3, 1_059_330, 2_625_577),
    ],
)
def test_parameter_counts_are_the_published_ones(size, slots, slot_size, channels_in, transition, published):
    from worldmodels.cores.gnn import GNN

    encoder = CSWMEncoder((50, 50, channels_in), slots, slot_size, size=size)
    core = GNN(slot_size + (6 if slots == 3 else 4), slots, slot_size)
    if transition:
        assert count(core) == transition
    if size == "small":
        assert count(encoder) == 287_879
    assert count(encoder) + count(core) == published


@pytest.mark.parametrize("size", ["small", "medium", "large"])
@pytest.mark.parametrize("shape", [(50, 50, 3), (56, 40, 1)])
def test_shapes_for_pictures_of_any_size(size, shape):
    encoder = CSWMEncoder(shape, 4, 3, size=size, hidden_size=32)
    frames = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    assert encoder(frames).shape == (2, 4, 3)


def test_pixels_are_channels_first_in_unit_range():
    frames = torch.randint(0, 256, (2, 7, 4, 5, 3), dtype=torch.uint8)
    got = pixels(frames)
    assert got.shape == (2, 7, 3, 4, 5) and got.dtype == torch.float32
    assert torch.equal(got[1, 2, 0], frames[1, 2, :, :, 0].float() / 255)


def test_small_encoder_equals_its_layers_written_out():
    encoder = CSWMEncoder((50, 50, 3), 5, 2, hidden_size=32).eval()
    frames = torch.randint(0, 256, (3, 50, 50, 3), dtype=torch.uint8)
    conv, norm, _, head, _ = encoder.maps
    patches = frames.float().div(255).view(3, 5, 10, 5, 10, 3).permute(0, 1, 3, 5, 2, 4).reshape(3, 25, 300)
    hidden = torch.relu((patches @ conv.weight.reshape(2, 300).T + conv.bias) / (1 + norm.eps) ** 0.5)
    maps = torch.sigmoid(hidden @ head.weight[:, :, 0, 0].T + head.bias).transpose(1, 2)
    assert torch.allclose(encoder(frames), encoder.mlp(maps), atol=1e-5)


@pytest.mark.parametrize("size", ["small", "medium", "large"])
def test_mixing_layers_stand_before_the_maps(size):
    encoder = CSWMEncoder((50, 50, 3), 5, 2, size=size, hidden_size=32, channels=8, mixing_layers=2).eval()
    frames = torch.randint(0, 256, (3, 50, 50, 3), dtype=torch.uint8)
    *_, first, norm, _, second, _, _, head, _ = encoder.maps
    hidden = encoder.maps[:-8](pixels(frames))
    for conv in (first, second):
        hidden = torch.einsum("bchw,dc->bdhw", hidden, conv.weight[:, :, 0, 0]) + conv.bias[:, None, None]
        hidden = torch.relu(hidden / (1 + norm.eps) ** 0.5)
    assert torch.allclose(encoder.maps(pixels(frames)), torch.sigmoid(head(hidden)), atol=1e-5)
    assert encoder(frames).shape == (3, 5, 2)


@pytest.mark.parametrize("size", ["small", "medium", "large"])
def test_softmax_maps_are_places(size):
    """Each map sums to 1; where it is all on one place, slot k is that place's, whichever k: all slots share one frame."""
    encoder = CSWMEncoder((50, 50, 3), 5, 2, size=size, hidden_size=32, maps="softmax").eval()
    frames = torch.randint(0, 256, (3, 50, 50, 3), dtype=torch.uint8)
    maps = encoder.maps(pixels(frames))
    head = encoder.maps[:-1](pixels(frames))
    assert torch.allclose(
        maps.flatten(2), head.flatten(2).exp() / head.flatten(2).exp().sum(-1, keepdim=True), atol=1e-6
    )
    assert torch.allclose(encoder(frames), encoder.mlp(maps.flatten(2)))
    with pytest.raises(ValueError, match="expected one of"):
        CSWMEncoder((50, 50, 3), 5, 2, maps="tanh")


def plain_slot_attention(attention, slots, inputs):
    """Algorithm 1 of the slot attention paper for one set of tokens, inputs already normalised, in loops."""
    D = attention.slot_size
    key, value = attention.key_value.weight.split(D)
    slots = list(slots)
    for _ in range(attention.num_iterations):
        queries = [attention.query(attention.slot_norm(s)) for s in slots]
        weights = []
        for x in inputs:
            scores = torch.stack([key @ x @ q / D**0.5 for q in queries])
            weights.append(torch.softmax(scores, 0) + 1e-8)  # over slots
        new = []
        for k, s in enumerate(slots):
            total = sum(w[k] for w in weights)
            update = sum(w[k] / total * (value @ x) for w, x in zip(weights, inputs, strict=True))
            s = attention.gru(update[None], s[None])[0]
            new.append(s + attention.mlp(s[None])[0])
        slots = new
    return torch.stack(slots)


def test_slot_attention_equals_its_algorithm():
    encoder = SlotAttentionEncoder((6, 6, 3), 3, 8, channels=4, hidden_size=8)
    seen = []
    encoder.attention.inputs_norm.register_forward_hook(lambda module, args, output: seen.append(output))
    frames = torch.randint(0, 256, (2, 6, 6, 3), dtype=torch.uint8)
    with torch.no_grad():
        got = encoder(frames)
        for b in range(2):
            plain = plain_slot_attention(encoder.attention, encoder.first_slots, seen[0][b])
            assert torch.allclose(got[b], plain, atol=1e-5)


def test_slot_attention_starts_from_the_same_slots_every_time():
    encoder = SlotAttentionEncoder((10, 10, 3), 3, 8, channels=8, stride=2)
    frames = torch.randint(0, 256, (1, 10, 10, 3), dtype=torch.uint8).expand(2, 10, 10, 3)
    first, second = encoder(frames)
    assert torch.equal(first, second) and torch.equal(encoder(frames)[0], first)
    assert torch.pdist(first).min() > 1e-3  # no two slots alike


def test_vectors():
    encoder = VectorEncoder((4,), 3, 2)
    assert encoder(torch.zeros(5, 4, dtype=torch.float64)).shape == (5, 3, 2)
    assert VectorEncoder((), 3, 2)(torch.zeros(5, dtype=torch.int64)).shape == (5, 3, 2)


def test_wrong_observations_are_refused():
    with pytest.raises(ValueError, match="takes pictures"):
        CSWMEncoder((4,), 5, 2)
    with pytest.raises(ValueError, match="needs at least 10x10"):
        CSWMEncoder((7, 50, 3), 5, 2)
    with pytest.raises(ValueError, match="expected 'small'"):
        CSWMEncoder((50, 50, 3), 5, 2, size="tiny")
    with pytest.raises(ValueError, match="use encoder=cswm"):
        VectorEncoder((50, 50, 3), 5, 2)
    with pytest.raises(ValueError, match="takes pictures"):
        SlotAttentionEncoder((4,), 5, 2)
