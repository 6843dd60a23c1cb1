import inspect

import pytest
import torch
from torch import nn

import worldmodels.nn as layers
from worldmodels.core import Tokens, unroll

NAMES = layers.__all__
SMALL = {"ESBN": {"key_size": 6, "capacity": 5}, "NTM": {"memory_size": 6}, "MNM": {"memory_size": 8}}
STATE = {"ESBN": 2 * 240 + 5 * (6 + 240) + 1, "NTM": 2 * 240 + 6 + 10 * 6 + 2 * 10, "MNM": 2 * 240 + 8 + 3 * 8 * 8 + 1}


def make(name, *sizes, **options):
    return getattr(layers, name)(*sizes, **options, **SMALL.get(name, {}))


def program(make_rnn, seed=0, steps=60):
    """A small program written for nn.GRU: a next-number regressor with two layers, run in chunks, until half is learned."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = make_rnn(3, 240, num_layers=2, batch_first=True, dropout=0.1)
            self.head = nn.Linear(240, 3)

        def forward(self, x, h=None):
            self.rnn.flatten_parameters()
            y, h = self.rnn(x, h)
            return self.head(y), h

    torch.manual_seed(seed)
    model = Model()
    x = torch.sin(torch.arange(16.0)[None, :, None] / 3 + torch.rand(16, 1, 3) * 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        h, total = None, 0.0
        for chunk in x.split(8, dim=1):
            y, h = model(chunk, h)
            h = h.detach()
            total = total + (y[:, :-1] - chunk[:, 1:]).square().mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
        if losses[-1] < 0.5 * losses[0]:
            break
    assert h.shape[:2] == (2, 16) and y.shape == (16, 8, 3)
    return losses


@pytest.mark.learning
@pytest.mark.parametrize("name", ["GRU", *(n for n in NAMES if n != "ESBN")])
def test_a_program_written_for_gru_runs_and_learns_with_each_layer(name, learned):
    """The loss is halved; a layer that says nothing leaves 0.99 of it, the variance of the numbers.

    Measured: 30 seeds of 30, most after 3 to 15 steps of the 60, the slowest of SCOFF's after 40.
    """

    def left(seed):
        losses = program(nn.GRU if name == "GRU" else lambda *sizes, **options: make(name, *sizes, **options), seed)
        return losses[-1] / losses[0]

    learned(left, lambda part: part < 0.5)


def test_the_program_runs_with_esbn_which_sees_only_what_repeats():
    losses = program(lambda *sizes, **options: make("ESBN", *sizes, **options), steps=5)
    assert all(loss == loss for loss in losses)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_those_of_gru(name):
    ours = list(inspect.signature(getattr(layers, name)).parameters)
    assert ours[:9] == [
        "input_size",
        "hidden_size",
        "num_layers",
        "bias",
        "batch_first",
        "dropout",
        "bidirectional",
        "device",
        "dtype",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_shapes_chunks_and_unbatched_input(name):
    layer = make(name, 7, 240, num_layers=2).eval()
    x = torch.randn(9, 4, 7)
    output, h_n = layer(x)
    assert output.shape == (9, 4, 240) and h_n.shape == (2, 4, layer.state_size)
    assert layer.state_size == STATE.get(name, 240)
    first, h = layer(x[:4])
    second, h = layer(x[4:], h)
    assert torch.allclose(torch.cat([first, second]), output, atol=1e-5) and torch.allclose(h, h_n, atol=1e-5)
    alone, h = layer(x[:, 1])
    assert alone.shape == (9, 240) and h.shape == (2, layer.state_size)
    assert torch.allclose(alone, output[:, 1], atol=1e-5) and torch.allclose(h, h_n[:, 1], atol=1e-5)
    again, _ = layer(x[:4, 1])
    assert torch.allclose(layer(x[4:, 1], layer(x[:4, 1])[1])[0], output[4:, 1], atol=1e-5) and len(again) == 4
    batch_first = make(name, 7, 240, num_layers=2, batch_first=True).eval()
    batch_first.load_state_dict(layer.state_dict())
    assert torch.allclose(batch_first(x.transpose(0, 1))[0].transpose(0, 1), output, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_starts_reset_every_layer(name):
    layer = make(name, 7, 240, num_layers=2, batch_first=True).eval()
    x = torch.randn(4, 9, 7)
    starts = torch.zeros(4, 9, dtype=torch.bool)
    starts[2, 5] = True
    output, h_n = layer(x, starts=starts)
    fresh, h_fresh = layer(x[:, 5:])
    through, _ = layer(x)
    assert torch.allclose(output[2, 5:], fresh[2], atol=1e-5) and torch.allclose(h_n[:, 2], h_fresh[:, 2], atol=1e-5)
    assert torch.allclose(output[:2], through[:2], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_as_hx_are_a_fresh_start_in_every_row(name):
    """Programs for nn.GRU begin with zeros and reset by multiplying with zeros; equal slots would stay equal for ever."""
    layer = make(name, 7, 240, num_layers=2).eval()
    x = torch.randn(6, 3, 7)
    fresh, _ = layer(x)
    assert torch.allclose(layer(x, hx=torch.zeros(2, 3, layer.state_size))[0], fresh, atol=1e-6)
    _, h = layer(torch.randn(4, 3, 7))
    h = h * torch.tensor([1.0, 0.0, 1.0])[:, None]
    mixed, _ = layer(x, h)
    assert torch.allclose(mixed[:, 1], fresh[:, 1], atol=1e-6)
    assert name == "ESBN" or not torch.allclose(mixed[:, 0], fresh[:, 0], atol=1e-4)


def test_attributes_are_those_of_gru():
    gru, ours = nn.GRU(7, 60, 2, dropout=0.1), layers.RIMs(7, 60, 2, dropout=0.1, core_dropout=0.3)
    for name in (
        "input_size",
        "hidden_size",
        "num_layers",
        "bias",
        "batch_first",
        "dropout",
        "bidirectional",
        "proj_size",
    ):
        assert getattr(ours, name) == getattr(gru, name), name
    assert ours.cores[0].dropout.p == 0.3 and layers.RIMs(7, 60).cores[0].dropout.p == 0.0
    assert list(inspect.signature(ours.forward).parameters)[:2] == ["input", "hx"]


@pytest.mark.parametrize("name", ["RIMs", "SCOFF"])
def test_lstm_cells_return_a_pair_as_lstm_does(name):
    layer = make(name, 7, 240, num_layers=2, cell="lstm").eval()
    x = torch.randn(9, 4, 7)
    output, (h, c) = layer(x)
    assert h.shape == c.shape == (2, 4, 240) and torch.allclose(h[-1], output[-1])
    second, _ = layer(x[4:], layer(x[:4])[1])
    assert torch.allclose(second, output[4:], atol=1e-5)
    with pytest.raises(ValueError, match="a pair"):
        layer(x, h)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_its_core(name):
    layer = make(name, 7, 240).eval()
    x = torch.randn(5, 3, 7)
    core = layer.cores[0]
    slots, _ = unroll(core, Tokens(x[:, :, None]), core.initial_state(3))
    assert torch.equal(layer(x)[0], slots.flatten(2))


@pytest.mark.parametrize("name", NAMES)
def test_any_width_gets_the_usual_number_of_slots_or_the_nearest_that_divides_it(name):
    usual = make(name, 7, 240).cores[0].num_slots
    assert usual == {"SCOFF": 6, "RIMs": 6, "RMC": 4, "EntNet": 5, "S2GRU": 10}.get(name, 1)
    for width in (1, 13, 64, 77, 100, 256):
        slots = make(name, 7, width).cores[0].num_slots
        nearer = range(usual - abs(slots - usual) + 1, usual + abs(slots - usual))
        assert width % slots == 0 and not [other for other in nearer if other > 0 and width % other == 0]
    assert layers.SCOFF(7, 256).cores[0].num_slots == 4  # as near as 8
    assert make(name, 7, 64)(torch.randn(3, 2, 7))[0].shape == (3, 2, 64)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_is_refused_in_one_line(name):
    for options, words in (
        ({"bidirectional": True}, "no bidirectional form"),
        ({"bias": False}, "without biases"),
        ({"num_layers": 0}, "at least 1"),
        ({"num_slots": 0}, "at least 1"),
        ({"num_tokens": 2}, "leave num_tokens out"),
        ({"num_slots": 7}, "multiple of num_slots=7: leave num_slots out, or set it to [68]$"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            make(name, 7, 240, **options)
        assert "\n" not in str(error.value)
    layer = make(name, 7, 240)
    with pytest.raises(TypeError, match="packed"):
        layer(nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 7), torch.tensor([5, 4, 2])))
    with pytest.raises(ValueError, match=r"expected \(T, B, 7\)"):
        layer(torch.randn(5, 3, 6))
    with pytest.raises(ValueError, match="got hx"):
        layer(torch.randn(5, 3, 7), torch.zeros(1, 2, layer.state_size))
    with pytest.raises(ValueError, match="starts"):
        layer(torch.randn(5, 3, 7), starts=torch.zeros(3, 5, dtype=torch.bool))


def test_scoff_has_fewer_recurrent_parameters_than_a_gru_of_its_width():
    for input_size in (64, 2400):
        scoff, gru = layers.SCOFF(input_size, 2400), nn.GRU(input_size, 2400)
        count = {"scoff": sum(p.numel() for p in scoff.parameters()), "gru": sum(p.numel() for p in gru.parameters())}
        assert count["scoff"] < count["gru"] / 3
        if input_size == 64:
            two = [sum(p.numel() for p in make(64, 600, num_layers=2).parameters()) for make in (layers.SCOFF, nn.GRU)]
            assert [round(n / 1e6, 1) for n in two] == [0.7, 3.4]  # what the README says
        core = scoff.cores[0]
        recurrent = sum(p.numel() for name, p in core.named_parameters() if not name.startswith("key_value"))
        assert recurrent < gru.weight_hh_l0.numel() / 3


def test_dtype_and_device_are_as_asked():
    layer = layers.SCOFF(7, 240, dtype=torch.float64)
    assert layer(torch.randn(2, 3, 7, dtype=torch.float64))[0].dtype == torch.float64
    assert next(layers.RIMs(7, 240, device="meta").parameters()).device.type == "meta"
