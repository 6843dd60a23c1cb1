"""Layers in a loop whose weights get their gradient once."""

import pytest
import torch
from torch import nn

from worldmodels.core import Tokens, loop, unroll
from worldmodels.cores.esbn import ESBN
from worldmodels.cores.mnm import MNM
from worldmodels.cores.ntm import NTM
from worldmodels.repeated import Repeated


def walk(step, x, times=4):
    seen = []
    for _ in range(times):
        x = torch.tanh(step(x))
        seen.append(x)
    return torch.stack(seen)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_autograd(bias):
    torch.manual_seed(0)
    layer, weigh = nn.Linear(6, 6, bias=bias).double(), torch.randn(4, 3, 2, 6, dtype=torch.float64)
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    plain = torch.autograd.grad((walk(layer, x) * weigh).sum(), inputs)
    layers = Repeated(layer=layer)
    ours = torch.autograd.grad((walk(layers.layer, x) * weigh).sum(), inputs)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(plain, ours, strict=True))


def test_twice_through_the_same_graph_and_only_part_of_it():
    torch.manual_seed(0)
    layer = nn.Linear(5, 5).double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    said = walk(Repeated(layer=layer).layer, x)
    whole, of_two = (
        torch.autograd.grad(part, layer.weight, retain_graph=True)[0] for part in (said.sum(), said[1].sum())
    )
    (alone,) = torch.autograd.grad(said.sum(), x, retain_graph=True)  # the weights are not asked for
    plain = walk(layer, x)
    assert torch.allclose(whole, torch.autograd.grad(plain.sum(), layer.weight, retain_graph=True)[0], atol=1e-12)
    assert torch.allclose(of_two, torch.autograd.grad(plain[1].sum(), layer.weight, retain_graph=True)[0], atol=1e-12)
    assert torch.allclose(alone, torch.autograd.grad(plain.sum(), x)[0], atol=1e-12)


def test_frozen_weights_and_no_gradient():
    layer = nn.Linear(4, 4).requires_grad_(False)
    x = torch.randn(2, 4, requires_grad=True)
    assert Repeated(layer=layer).layer is layer
    walk(Repeated(layer=layer).layer, x).sum().backward()
    assert x.grad is not None and layer.weight.grad is None
    with torch.no_grad():
        trained = nn.Linear(4, 4)
        assert Repeated(layer=trained).layer is trained


def test_what_is_not_available_says_so():
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    layers = Repeated(layer=layer)
    (grad,) = torch.autograd.grad(walk(layers.layer, x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    with pytest.raises(AttributeError, match="other is none of the repeated layers: layer"):
        _ = layers.other


@pytest.mark.parametrize("build", [ESBN, NTM, MNM])
def test_a_core_learns_the_same_step_by_step(build):
    """Of sequences in which episodes begin, against the plain loop over the core's own steps."""
    torch.manual_seed(0)
    core = build(3, 2, 8, num_tokens=1).double()
    x = torch.randn(7, 4, 1, 3, dtype=torch.float64)
    starts = torch.zeros(7, 4, dtype=torch.bool)
    starts[3, 1] = starts[5, 1] = starts[2, 2] = True
    weigh = torch.randn(7, 4, 2, 8, dtype=torch.float64)
    slots, _ = unroll(core, Tokens(x), core.initial_state(4), starts)
    ours = torch.autograd.grad(
        (slots * weigh).sum(), [p for p in core.parameters() if p.requires_grad], allow_unused=True
    )
    core.sequence = lambda tokens, sizes, state: loop(core, tokens, sizes, state)
    slots, _ = unroll(core, Tokens(x), core.initial_state(4), starts)
    plain = torch.autograd.grad(
        (slots * weigh).sum(), [p for p in core.parameters() if p.requires_grad], allow_unused=True
    )
    for a, b in zip(ours, plain, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, atol=1e-9)
