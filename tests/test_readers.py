"""Readers of whole sequences: what every reader must keep, each against its equations written plainly, and who takes them."""

import math
from itertools import combinations, product

import pytest
import torch
from hydra.utils import get_class
from torch import nn

from worldmodels.cli import main
from worldmodels.core import SequenceReader, Tokens, feature_size, read
from worldmodels.cores import CORES, READERS
from worldmodels.cores.lstm import LSTM
from worldmodels.cores.mnm import MNM
from worldmodels.cores.predinet import PrediNet
from worldmodels.cores.relation_network import RelationNetwork, TemporalRelationNetwork
from worldmodels.cores.transformer import Transformer
from worldmodels.errors import UserError
from worldmodels.plugins import core_builder, named

T, B, N, F = 4, 3, 2, 8


def make(name):
    torch.manual_seed(0)
    reader = get_class(READERS[name]["_target_"])(F, T * N)
    for parameter in reader.parameters():  # biases of zero hide mistakes
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return reader


every = pytest.mark.parametrize("name", READERS)


@every
def test_a_reader_keeps_the_protocol(name):
    reader = make(name)
    assert isinstance(reader, SequenceReader) and reader.token_size == F
    tokens = Tokens(torch.randn(T, B, N, F))
    features, auxiliary = read(reader, tokens)
    assert features.shape == (B, feature_size(reader)) == (B, reader.feature_size) and float(auxiliary) == 0.0
    assert torch.equal(reader(tokens), features)  # nothing is drawn, nothing kept
    assert torch.allclose(reader(tokens.at((slice(None), slice(1, 2)))), features[1:2], rtol=1e-4, atol=1e-5)
    assert reader.double()(tokens._replace(features=tokens.features.double())).dtype == torch.float64


@every
def test_every_parameter_of_a_reader_gets_gradient(name):
    reader = make(name)
    reader(Tokens(torch.randn(T, 64, N, F))).square().sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in reader.parameters())


@every
def test_order_matters_to_a_reader(name):
    reader = make(name)
    tokens = torch.randn(T, 16, N, F)
    assert not torch.allclose(reader(Tokens(tokens)), reader(Tokens(tokens.flip(0))), atol=1e-4)


@every
@pytest.mark.parametrize("whatever", [math.nan, math.inf, 5.0])
def test_absent_tokens_may_hold_anything(name, whatever):
    reader = make(name)
    mask = torch.rand(T, B, N, generator=torch.Generator().manual_seed(1)) < 0.6
    features = torch.randn(T, B, N, F)
    results = []
    for held in (0.0, whatever):
        given = torch.where(mask[..., None], features, held).requires_grad_()
        reader.zero_grad()
        out = reader(Tokens(given, mask=mask))
        out.square().sum().backward()
        results.append([out, given.grad * mask[..., None], *(parameter.grad for parameter in reader.parameters())])
    for a, b in zip(*results, strict=True):
        assert bool(torch.isfinite(b).all()) and torch.allclose(a, b, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(results[0][0], reader(Tokens(features)), atol=1e-3)
    assert bool(torch.isfinite(reader(Tokens(features, mask=torch.zeros_like(mask)))).all())


@pytest.mark.parametrize(
    ("reader", "counted"),
    [
        (RelationNetwork, 528_612),
        (TemporalRelationNetwork, 990_180),
        (PrediNet, 1_395_500),
        (Transformer, 628_708 - 198_272),  # the authors' model holds a copy of its layer that nothing uses
    ],
)
def test_as_many_parameters_as_the_authors_models(reader, counted):
    """With their encoder (197,600), normalisation (256) and an answer of four, for sequences of nine."""
    built = reader(128, 9)
    answer = 4 * (built.feature_size + 1)
    assert 197_600 + 256 + sum(parameter.numel() for parameter in built.parameters()) + answer == counted


def plain_tuples(g, rows):
    return sum(torch.relu(g.output(torch.relu(g.hidden(torch.cat(row))))) for row in rows)


def tag(z):
    return [torch.cat([row, torch.tensor([float(place)])]) for place, row in enumerate(z)]


@torch.no_grad()
def test_relation_networks_equal_their_equations():
    z = torch.randn(T, 1, 1, F)
    rows = tag(z[:, 0, 0])
    pairs = make("relation_network")
    plain = torch.relu(pairs.f(plain_tuples(pairs.g, product(rows, repeat=2))))
    assert torch.allclose(pairs(Tokens(z))[0], plain, rtol=1e-4, atol=1e-4)
    both = make("temporal_relation_network")
    parts = [
        torch.relu(f(plain_tuples(g, combinations(rows, n))))
        for n, g, f in zip((2, 3), both.g, both.f_each, strict=True)
    ]
    assert torch.allclose(both(Tokens(z))[0], torch.relu(both.f(parts[0] + parts[1])), rtol=1e-4, atol=1e-4)
    two = torch.relu(both.f(torch.relu(both.f_each[0](plain_tuples(both.g[0], [rows[:2]])))))
    assert torch.allclose(both(Tokens(z[:2]))[0], two, rtol=1e-4, atol=1e-4)  # no triples of two tokens


@torch.no_grad()
def test_predinet_equals_its_equations():
    reader = PrediNet(F, T, num_heads=3, key_size=5, num_relations=4)
    z = torch.randn(T, 1, 1, F)
    rows = tag(z[:, 0, 0])
    whole = torch.cat(rows)
    said = []
    for head in range(3):
        picked = []
        for query in reader.queries:
            q = query.weight[5 * head : 5 * (head + 1)] @ whole
            weights = torch.softmax(torch.stack([q @ (reader.key.weight @ row) for row in rows]), 0)
            picked.append(sum(w * row for w, row in zip(weights, rows, strict=True)))
        compared = reader.relation.weight @ picked[0] - reader.relation.weight @ picked[1]
        said.append(torch.cat([compared, torch.stack([picked[0][-1], picked[1][-1]])]))
    assert torch.allclose(reader(Tokens(z))[0], torch.relu(reader.output(torch.cat(said))), atol=1e-5)


@torch.no_grad()
def test_transformer_equals_its_equations():
    reader = make("transformer").eval()
    z = torch.randn(T, 1, 1, F)
    places = torch.zeros(T, F)
    for t in range(T):
        for i in range(F // 2):
            angle = t / 10_000 ** (2 * i / F)
            places[t, 2 * i], places[t, 2 * i + 1] = math.sin(angle), math.cos(angle)
    x = z[:, 0, 0] + places
    layer = reader.encoder.layers[0]
    qkv = x @ layer.self_attn.in_proj_weight.T + layer.self_attn.in_proj_bias
    q, k, v = (part.unflatten(-1, (8, -1)).transpose(0, 1) for part in qkv.chunk(3, -1))
    attended = (torch.softmax(q @ k.transpose(1, 2) / math.sqrt(F / 8), -1) @ v).transpose(0, 1).flatten(1)
    x = layer.norm1(x + layer.self_attn.out_proj(attended))
    x = reader.encoder.norm(layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x)))))
    assert torch.allclose(reader(Tokens(z))[0], torch.relu(reader.output(x.mean(0))), atol=1e-5)


def test_a_core_reads_too():
    core = LSTM(F, 2, 3, num_tokens=N)
    tokens = Tokens(torch.randn(T, B, N, F))
    features, auxiliary = read(core, tokens)
    assert features.shape == (B, 6) == (B, feature_size(core)) and float(auxiliary.detach()) == 0.0
    core = MNM(F, 1, 5, num_tokens=N, memory_size=4)
    _, auxiliary = read(core, tokens)
    assert float(auxiliary.detach()) > 0.0 and auxiliary.requires_grad
    assert float(read(core.eval(), tokens)[1].detach()) == 0.0


@pytest.mark.parametrize("name", [*READERS, "lstm", "ntm", "mnm"])
def test_the_builder_makes_readers_and_cores_for_whole_sequences(name):
    builder = core_builder(named("cores", CORES | READERS, name, {}))
    built = builder(8, num_tokens=2, num_slots=1, slot_size=6, length=T)
    assert read(built, Tokens(torch.randn(T, B, 2, 8)))[0].shape[0] == B


@every
def test_who_needs_single_steps_refuses_a_reader_in_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (
        ["train", "experiment=adding", f"core={name}", "run=x", "size=smoke"],
        ["train", "experiment=block_physics", f"core={name}", "run=x", "size=smoke", "data.train.episodes=2"],
        ["train-agent", "env.id=CartPole-v1", f"core={name}", "run=x", "size=smoke"],
        ["check", f"core={name}"],
    ):
        assert main(words) != 0
        said = capsys.readouterr().err.strip()
        assert "reads whole sequences at once" in said and "core=lstm" in said and len(said.splitlines()) == 1, words


def test_a_reader_that_cannot_read_is_refused_before_training():
    with pytest.raises(UserError, match="expected an even number, a multiple of 8 heads"):
        core_builder(READERS["transformer"])(9, num_tokens=1, num_slots=1, slot_size=6, length=T)
    with pytest.raises(UserError, match="num_heads is 0"):
        core_builder(READERS["predinet"] | {"num_heads": 0})(8, num_tokens=1, num_slots=1, slot_size=6, length=T)
    with pytest.raises(ValueError, match="sequences of 3 tokens; this PrediNet was built for 4"):
        PrediNet(F, T)(Tokens(torch.randn(3, B, 1, F)))


def test_they_are_listed(capsys):
    assert main(["cores"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*READERS, "ntm", "mnm"))
