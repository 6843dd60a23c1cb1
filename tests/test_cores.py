from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import get_class
from torch import nn

from worldmodels.attention import hard_choice, hide
from worldmodels.check import CONTRACT, check_core
from worldmodels.core import Capabilities, Tokens, cut, last_steps, reset_where, unroll
from worldmodels.cores import CORES
from worldmodels.cores.gnn import GNN
from worldmodels.cores.gru import GRU
from worldmodels.cores.mlp import MLP
from worldmodels.cores.nps import PNPS, SNPS, RoutingNPS
from worldmodels.grouped import GroupedLinear, GroupedMLP


def factory(entry):
    """``factory(token_size, num_slots, slot_size)`` of an entry of the table, with the entry's own options."""
    options = {key: value for key, value in entry.items() if key not in ("_target_", "slot_size")}
    return partial(get_class(entry["_target_"]), **options)


FACTORIES = {name: factory(entry) for name, entry in CORES.items()}
FACTORIES |= {
    "gnn, edges see actions": lambda *sizes: GNN(*sizes, hidden_size=32, edge_actions=True),
    "snps, 3 rules, 2 stages": lambda *sizes: SNPS(*sizes, num_rules=3, num_stages=2, score_dropout=0.3),
    "pnps, 3 rules, 2 stages": lambda *sizes: PNPS(*sizes, num_rules=3, num_stages=2),
    "snps, cold": lambda *sizes: SNPS(*sizes, num_rules=3, temperature=0.1),
    "pnps, cold": lambda *sizes: PNPS(*sizes, num_rules=3, temperature=0.1),
    "snps, gradient through outputs": lambda *sizes: SNPS(*sizes, num_rules=3, num_stages=2, gradient="outputs"),
    "pnps, gradient through outputs": lambda *sizes: PNPS(*sizes, num_rules=3, num_stages=2, gradient="outputs"),
    "routing, cold": lambda *sizes: RoutingNPS(*sizes, temperature=0.1),
}


@pytest.mark.parametrize("contract", CONTRACT)
@pytest.mark.parametrize("name", FACTORIES)
def test_contract(name, contract):
    CONTRACT[contract](FACTORIES[name])


class Leaky(nn.Module):
    """A core with every fault: state on itself, noise at evaluation, rows that see each other, a dead parameter."""

    capabilities = Capabilities()

    def __init__(self, token_size, num_slots, slot_size):
        super().__init__()
        self.token_size, self.num_slots, self.slot_size = token_size, num_slots, slot_size
        self.linear, self.dead = nn.Linear(token_size, slot_size), nn.Linear(2, 2)
        self.last = 0.0

    def initial_state(self, batch_size, slots=None):
        return {"h": torch.zeros(batch_size, 1)}

    def prepare(self, tokens):
        return tokens

    def forward(self, tokens, state):
        self.last = self.linear(tokens.features).mean(0, keepdim=True) + self.last
        state["h"] += 1.0
        return self.linear(tokens.features) + self.last.detach() + torch.rand(()), state

    def explain(self, tokens, state):
        return {}


def test_the_contract_finds_faults():
    found = {problem.split(":")[0] for problem in check_core(Leaky)}
    assert found >= {
        "rows are independent",
        "every parameter gets gradient",
        "evaluation is deterministic",
        "state is a value",
        "absent tokens may hold anything",
    }


def gather_scatter_gnn(core: GNN, features):
    """C-SWM's form of the same network: a list of edges, one message each, messages added at their target."""
    B, K, _ = features.shape
    flat = features.reshape(B * K, -1)
    pairs = [(b * K + i, b * K + j) for b in range(B) for i in range(K) for j in range(K) if i != j]
    node_inputs = flat.new_zeros(B * K, core.edge_out.out_features)
    if pairs:
        row, column = torch.tensor(pairs).T
        ends = flat[:, : core.edge_size]
        edge = torch.relu(core.edge_in(torch.cat([ends[row], ends[column]], 1)))
        edge = core.edge_out(torch.relu(core.edge_norm(core.edge_hidden(edge))))
        node_inputs = node_inputs.index_add(0, row, edge)
    node = torch.relu(core.node_in(torch.cat([flat, node_inputs], 1)))
    return core.node_out(torch.relu(core.node_norm(core.node_hidden(node)))).view(B, K, -1)


@pytest.mark.parametrize("K", [1, 2, 5])
@pytest.mark.parametrize("edge_actions", [False, True])
def test_gnn_equals_its_gather_scatter_form(K, edge_actions):
    core = GNN(7, K, 3, hidden_size=32, edge_actions=edge_actions).double()
    features = torch.randn(6, K, 7, dtype=torch.float64, requires_grad=True)
    ours, _ = core(Tokens(features), {})
    plain = gather_scatter_gnn(core, features)
    assert torch.allclose(ours, plain, atol=1e-12)
    a, b = (torch.autograd.grad(y.square().sum(), [features, core.node_in.weight]) for y in (ours, plain))
    assert all(torch.allclose(x, y, atol=1e-9) for x, y in zip(a, b, strict=True))


def test_gnn_edges_see_actions_only_if_asked():
    for edge_actions in (False, True):
        core = GNN(5, 3, 2, hidden_size=16, edge_actions=edge_actions)
        features = torch.randn(1, 3, 5)
        acted = features.clone()
        acted[:, 0, 2:] += 1.0
        change = (core(Tokens(acted), {})[0] - core(Tokens(features), {})[0]).abs().sum(-1)[0]
        assert change[0] > 0 and bool((change[1:] > 0).all()) == edge_actions


@pytest.mark.parametrize("name", ["gnn", "snps", "pnps"])
def test_an_absent_token_is_as_if_it_were_not_there(name):
    core = FACTORIES[name](7, 4, 3).eval()
    features = torch.randn(5, 4, 7)
    mask = torch.tensor([True, True, True, False]).expand(5, 4)
    masked = core(Tokens(features, mask=mask), {})[0][:, :3]
    assert torch.allclose(masked, core(Tokens(features[:, :3]), {})[0], atol=1e-5)


@pytest.mark.parametrize("name", ["gnn", "snps", "pnps", "snps, 3 rules, 2 stages", "pnps, 3 rules, 2 stages"])
def test_slots_are_exchangeable_and_may_change_in_number(name):
    core = FACTORIES[name](7, 4, 3).eval()
    for K in (1, 4, 6):
        features = torch.randn(5, K, 7)
        order = torch.randperm(K)
        straight, permuted = core(Tokens(features), {})[0], core(Tokens(features[:, order]), {})[0]
        assert torch.allclose(straight[:, order], permuted, atol=1e-5)


def plain_snps(core: SNPS, features):
    """Algorithm 1 in loops, without noise."""
    rules, D = core.rules, core.slot_size
    out = features.clone()
    for b in range(len(features)):
        V = [row.clone() for row in features[b]]
        for _ in range(core.num_stages):
            keys = [rules.rule_key(R) for R in rules.embeddings]
            queries = [rules.slot_query(v) for v in V]
            scores = {(i, j): float(q @ k) for i, k in enumerate(keys) for j, q in enumerate(queries)}
            r, p = max(scores, key=scores.get)
            query = rules.context_query(V[p])
            c = max(range(len(V)), key=lambda j: float(query @ rules.context_key(V[j])))
            hidden = torch.cat([V[p], V[c]]) @ rules.mlps.hidden.weight[r] + rules.mlps.hidden.bias[r]
            change = torch.relu(hidden) @ rules.mlps.output.weight[r] + rules.mlps.output.bias[r]
            V[p] = torch.cat([V[p][:D] + change, V[p][D:]])
        out[b] = torch.stack(V)
    return (out - features)[..., :D]


def plain_pnps(core: PNPS, features):
    """Algorithm 2 in loops, without noise."""
    rules, D = core.rules, core.slot_size
    out = features.clone()
    for b in range(len(features)):
        V = [row.clone() for row in features[b]]
        for _ in range(core.num_stages):
            any_rule = core.any_rule(torch.cat(list(rules.embeddings)))
            new = [v.clone() for v in V]
            for p, v in enumerate(V):
                key = core.null_key(v)
                if float(any_rule @ key) <= float(core.null_rule @ key):
                    continue
                r = max(
                    range(len(rules.embeddings)),
                    key=lambda i: float(rules.slot_query(v) @ rules.rule_key(rules.embeddings[i])),
                )
                c = max(range(len(V)), key=lambda j: float(rules.context_query(v) @ rules.context_key(V[j])))
                hidden = torch.cat([v, V[c]]) @ rules.mlps.hidden.weight[r] + rules.mlps.hidden.bias[r]
                change = torch.relu(hidden) @ rules.mlps.output.weight[r] + rules.mlps.output.bias[r]
                new[p] = torch.cat([v[:D] + change, v[D:]])
            V = new
        out[b] = torch.stack(V)
    return (out - features)[..., :D]


@pytest.mark.parametrize(("core_class", "plain"), [(SNPS, plain_snps), (PNPS, plain_pnps)])
def test_nps_equals_its_algorithm(core_class, plain):
    core = core_class(6, 4, 2, num_rules=3, num_stages=2, rule_size=8, key_size=4, hidden_size=16).eval()
    features = 2.0 * torch.randn(20, 4, 6)
    with torch.no_grad():
        ours = core(Tokens(features), {})[0]
        assert torch.allclose(ours, plain(core, features), atol=1e-5)
    assert bool((ours.abs().sum(-1) > 0).any())


def test_snps_changes_one_slot_a_stage_and_says_which():
    for stages in (1, 3):
        core = SNPS(6, 5, 2, num_rules=2, num_stages=stages).eval()
        tokens = Tokens(torch.randn(40, 5, 6))
        changed = core(tokens, {})[0].abs().sum(-1) > 0
        assert changed.sum(1).max() <= stages
        chosen = core.explain(tokens, {})
        assert chosen["rule"].shape == chosen["primary"].shape == chosen["context"].shape == (40, stages)
        for b in range(40):
            assert set(changed[b].nonzero()[:, 0].tolist()) == set(chosen["primary"][b].tolist())


def test_pnps_leaves_slots_of_the_null_rule_as_they_are():
    core = PNPS(6, 5, 2, num_rules=2).eval()
    tokens = Tokens(2 * torch.randn(200, 5, 6))
    null = core.explain(tokens, {})["rule"][:, 0] == -1
    unchanged = core(tokens, {})[0].abs().sum(-1) == 0
    assert torch.equal(null, unchanged) and 0 < null.float().mean() < 1


def test_nps_is_noisy_in_training_only():
    core = SNPS(6, 5, 2)
    tokens = Tokens(torch.randn(64, 5, 6))
    assert not torch.equal(core(tokens, {})[0], core(tokens, {})[0])
    core.eval()
    assert torch.equal(core(tokens, {})[0], core(tokens, {})[0])


@pytest.mark.parametrize("core_class", [SNPS, PNPS])
def test_the_gradient_through_outputs(core_class, monkeypatch):
    """Forward the same as through inputs; backward the choices are credited with the changes of their own candidates."""
    quiet = lambda scores, *, noise, temperature: hard_choice(scores, noise=False, temperature=temperature)  # noqa: E731
    monkeypatch.setattr("worldmodels.cores.nps.hard_choice", quiet)
    core = core_class(6, 4, 2, num_rules=3, hidden_size=16, temperature=0.7, gradient="outputs")
    features, weights = torch.randn(20, 4, 6, requires_grad=True), torch.randn(20, 4, 2)
    tokens = Tokens(features)
    change = core(tokens, {})[0]
    assert torch.allclose(change, core.eval()(tokens, {})[0], atol=1e-6)
    (got,) = torch.autograd.grad((change * weights).sum(), core.rules.slot_query.weight)

    soft = lambda scores: torch.softmax(scores / 0.7, dim=-1)  # noqa: E731
    one = lambda scores: F.one_hot(scores.argmax(-1), scores.shape[-1]).float()  # noqa: E731
    scores, contexts = core.rules.match(features), core.rules.context_scores(features, features, None)
    pairs = torch.cat([features, one(contexts) @ features], dim=-1)[:, :, None].expand(-1, -1, 3, -1)
    outputs = core.rules.mlps(pairs).detach()  # of every slot with its context under every rule
    share = soft(scores.flatten(1)).view_as(scores) if core_class is SNPS else soft(scores)
    mixed = (share[..., None] * outputs).sum(2)
    if core_class is PNPS:
        keys = core.null_key(features)
        sides = torch.stack([keys @ core.any_rule(core.rules.embeddings.flatten()), keys @ core.null_rule], dim=-1)
        mixed = mixed * one(sides)[..., :1]
    (expected,) = torch.autograd.grad((mixed * weights).sum(), core.rules.slot_query.weight)
    assert torch.allclose(got, expected, atol=1e-5) and bool(got.any())
    with pytest.raises(ValueError, match="expected one of"):
        core_class(6, 4, 2, gradient="both")


def test_hard_choice_is_one_hot_with_the_gradient_of_the_softmax():
    logits = torch.randn(50, 4, requires_grad=True)
    choice = hard_choice(logits, noise=False, temperature=0.5)
    assert torch.equal(choice.detach().round(), F.one_hot(logits.argmax(-1), 4).float())
    weights = torch.randn(50, 4)
    (got,) = torch.autograd.grad((choice * weights).sum(), logits)
    (soft,) = torch.autograd.grad((torch.softmax(logits / 0.5, -1) * weights).sum(), logits)
    assert torch.allclose(got, soft, atol=1e-6)


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.1, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_choices_among_absent_tokens(noise, temperature, dtype):
    """What is there is chosen, as if the rest were not; where nothing is, something is, and no gradient goes back."""
    logits = torch.randn(30, 5, dtype=dtype, requires_grad=True)
    mask = torch.rand(30, 5) < 0.5
    mask[:10] = False
    choice = hard_choice(hide(logits, mask), noise=noise, temperature=temperature)
    one_hot = choice.detach().float().round()
    assert torch.equal(one_hot.sum(-1), torch.ones(30)) and not bool((one_hot * ~mask)[mask.any(-1)].any())
    (grad,) = torch.autograd.grad((choice * torch.randn(30, 5, dtype=dtype)).sum(), logits)
    assert bool(torch.isfinite(grad).all()) and not bool(grad[~mask].any())


def test_absent_tokens_leave_the_choice_among_the_others_as_it_is():
    logits = torch.randn(50, 4, requires_grad=True)
    there = torch.tensor([True, False, True, True])
    weights = torch.randn(50, 4)
    for temperature in (0.1, 2.0):
        hidden = hard_choice(hide(logits, there.expand(50, 4)), noise=False, temperature=temperature)
        alone = hard_choice(logits[:, there], noise=False, temperature=temperature)
        assert torch.equal(hidden[:, there], alone)
        (got,) = torch.autograd.grad((hidden * weights).sum(), logits)
        (expected,) = torch.autograd.grad((alone * weights[:, there]).sum(), logits)
        assert torch.allclose(got, expected, atol=1e-6)


def test_noisy_choices_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0])
    drawn = hard_choice(logits.expand(40_000, 3), noise=True).mean(0)
    assert torch.allclose(drawn, torch.softmax(logits, 0), atol=0.01)


def test_gru_equals_torchs_cell_and_mlp_its_network():
    core = GRU(5, 3, 4)
    tokens = torch.randn(7, 2, 3, 5)
    slots, last = unroll(core, Tokens(tokens), core.initial_state(2))
    cell = nn.GRUCell(15, 12)
    with torch.no_grad():
        cell.weight_ih.copy_(core.input_weight), cell.bias_ih.copy_(core.input_bias)
        cell.weight_hh.copy_(core.hidden_weight), cell.bias_hh.copy_(core.hidden_bias)
    hidden = torch.zeros(2, 12)
    for t in range(7):
        hidden = cell(tokens[t].flatten(1), hidden)
        assert torch.allclose(slots[t].flatten(1), hidden, atol=1e-6)
    assert torch.allclose(last["hidden"], hidden, atol=1e-6)
    flat = MLP(5, 3, 4, hidden_size=8)
    assert torch.equal(flat(Tokens(tokens[0]), {})[0].flatten(1), flat.network(tokens[0].flatten(1)))


def test_grouped_layers_equal_separate_ones():
    layer, mlp = GroupedLinear(3, 4, 5), GroupedMLP(3, 4, 6, 2)
    x = torch.randn(2, 7, 3, 4)
    for n in range(3):
        assert torch.allclose(layer(x)[..., n, :], x[..., n, :] @ layer.weight[n] + layer.bias[n], atol=1e-6)
        hidden = torch.relu(x[..., n, :] @ mlp.hidden.weight[n] + mlp.hidden.bias[n])
        assert torch.allclose(mlp(x)[..., n, :], hidden @ mlp.output.weight[n] + mlp.output.bias[n], atol=1e-6)


def test_a_token_shorter_than_its_slot_is_refused():
    with pytest.raises(ValueError, match="begins with its slot"):
        GNN(2, 3, 4)


def stepped(core, tokens, state, starts):
    """``unroll`` written plainly: one step after another, rows that start an episode reset before it."""
    prepared = core.prepare(tokens)
    initial = core.initial_state(starts.shape[1])
    slots = []
    for t in range(len(starts)):
        state = reset_where(starts[t], initial, state)
        slots_t, state = core(prepared.at(t), state)
        slots.append(slots_t)
    return torch.stack(slots), state


STARTS = {
    "anywhere": torch.rand(9, 4, generator=torch.Generator().manual_seed(0)) < 0.3,
    "at the first step": torch.arange(9)[:, None].eq(0) & torch.tensor([True, False, True, False]),
    "nowhere": torch.zeros(9, 4, dtype=torch.bool),
    "at every step of one row": torch.tensor([True, False, False, False]).expand(9, 4).clone(),
}


@pytest.mark.parametrize("where", STARTS)
@pytest.mark.parametrize("name", CORES)
def test_cut_sequences_equal_single_steps_with_resets(name, where):
    core = get_class(CORES[name]["_target_"])(6, 3, 4 if name != "s2rmc" else 8).double().eval()
    tokens = Tokens(torch.randn(9, 4, 3, 6, dtype=torch.float64))
    with torch.no_grad():
        _, state = unroll(core, tokens, core.initial_state(4))
        found, last = unroll(core, tokens, state, STARTS[where])
        expected, expected_last = stepped(core, tokens, state, STARTS[where])
    assert torch.allclose(found, expected, atol=1e-10)
    assert all(torch.allclose(last[leaf].double(), expected_last[leaf].double(), atol=1e-10) for leaf in expected_last)


@pytest.mark.parametrize("where", STARTS)
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_whole_sequences_have_the_gradients_of_single_steps(name, where):
    core = get_class(CORES[name]["_target_"])(5, 2, 4, num_tokens=1).double()
    for parameter in core.parameters():
        nn.init.normal_(parameter, std=0.4)
    tokens = Tokens(torch.randn(9, 4, 1, 5, dtype=torch.float64, requires_grad=True))
    state = {k: torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for k in core.initial_state(1)}
    given = [*core.parameters(), tokens.features, *state.values()]
    gradients = []
    for run in (unroll, stepped):
        slots, last = run(core, tokens, state, STARTS[where])
        weights = torch.linspace(-1, 1, slots.numel(), dtype=torch.float64).view_as(slots)
        loss = (slots * weights).sum() + sum((i + 1) * leaf.square().sum() for i, leaf in enumerate(last.values()))
        gradients.append(torch.autograd.grad(loss, given, materialize_grads=True))
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


def test_cut_by_hand():
    """Two sequences of four: the first begins anew at step 2, the second at steps 0 and 1."""
    pieces = cut(torch.tensor([[False, True], [False, True], [True, False], [False, False]]))
    # by length: the second from step 1 (3), the first from 0 (2) and from 2 (2), the second's step 0 (1)
    assert pieces.sizes == [4, 3, 1]
    assert pieces.env.tolist() == [1, 0, 0, 1] and pieces.fresh.tolist() == [True, False, True, True]
    assert pieces.source.tolist() == [3, 0, 4, 1, 5, 2, 6, 7]
    assert pieces.last.tolist() == [2, 0]
    assert last_steps([4, 3, 1], torch.device("cpu")).tolist() == [7, 5, 6, 3]


@pytest.mark.parametrize("where", STARTS)
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_mixed_precision_may_cut_sequences(name, where):
    core = get_class(CORES[name]["_target_"])(5, 2, 4, num_tokens=1)
    tokens = Tokens(torch.randn(9, 4, 1, 5))
    expected, _ = unroll(core, tokens, core.initial_state(4), STARTS[where])
    with torch.autocast("cpu", torch.bfloat16):
        found, last = unroll(core, tokens, core.initial_state(4), STARTS[where])
    assert torch.allclose(found.float(), expected, atol=0.05)
    found.float().sum().backward()
