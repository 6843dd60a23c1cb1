import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import worldmodels
from worldmodels import checkpoints
from worldmodels.cli import main
from worldmodels.core import Capabilities, Tokens, unroll
from worldmodels.cores.entnet import EntNet
from worldmodels.cores.gru import GRU
from worldmodels.cores.nps import PNPS, SNPS, RoutingNPS
from worldmodels.data.sequences import (
    GRID,
    LOCATIONS,
    NULL,
    OPERATIONS,
    STATEMENT_WORDS,
    VOCABULARY,
    adding,
    coordinate_arithmetic,
    stories,
    tell,
)
from worldmodels.errors import UserError
from worldmodels.logging import read_metrics
from worldmodels.models.sequence import SequenceSum
from worldmodels.tasks.adding import Adding
from worldmodels.tasks.arithmetic import CoordinateArithmetic
from worldmodels.tasks.gridworld import GridWorld

from .helpers import given


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# Data.


@pytest.mark.parametrize(("length", "count"), [(50, 2), (50, 4), (200, 9), (7, 3), (5, 5), (6, 1)])
def test_adding_marks_one_number_in_each_part(length, count):
    sequences, target = adding(300, length, count, seeded())
    assert sequences.shape == (300, length, 2) and target.shape == (300,)
    seen = set()
    for sequence, total in zip(sequences.tolist(), target.tolist(), strict=True):
        marked = [t for t, (_, mark) in enumerate(sequence) if mark == 1.0]
        assert len(marked) == count and all(mark in (0.0, 1.0) and 0 <= x <= 1 for x, mark in sequence)
        assert [t * count // length for t in marked] == list(range(count)) or length % count
        for part, t in enumerate(marked):
            assert part * length // count <= t < (part + 1) * length // count
        assert total == pytest.approx(sum(sequence[t][0] for t in marked), abs=1e-5)
        seen |= set(marked)
    assert seen == set(range(length))


def test_arithmetic_equals_the_four_operations():
    tokens, operation, primary = coordinate_arithmetic(400, seeded())
    for token, o, p in zip(tokens, operation, primary, strict=True):
        (x0, y0), (x1, y1) = token[p, :2], token[1 - p, :2]
        expected = [(x0 + x1, y0), (x0 - x1, y0), (x0, y0 + y1), (x0, y0 - y1)][o]
        assert torch.equal(token[p, 2:], torch.stack(expected))
        assert torch.equal(token[1 - p, 2:], token[1 - p, :2])
    assert len(OPERATIONS) == 4 and set(zip(operation.tolist(), primary.tolist(), strict=True)) == {
        (o, p) for o in range(4) for p in range(2)
    }


def follow(lines):
    """Where the agents of a story are, by its text alone, and whether every statement is legal."""
    strides = {"N": (0, 1), "E": (1, 0), "S": (0, -1), "W": (-1, 0)}
    at, facing = {}, {}
    for line in lines:
        placed = re.fullmatch(r"(agent[12]) is at \((\d+), (\d+)\)", line)
        faces = re.fullmatch(r"(agent[12]) faces-([NESW])", line)
        moves = re.fullmatch(r"(agent[12]) moves-([1-5])", line)
        if placed:
            assert placed[1] not in at
            at[placed[1]] = (int(placed[2]), int(placed[3]))
        elif faces:
            assert faces[1] in at
            facing[faces[1]] = faces[2]
        else:
            assert moves, line
            dx, dy = strides[facing[moves[1]]]
            x, y = at[moves[1]]
            at[moves[1]] = (x + int(moves[2]) * dx, y + int(moves[2]) * dy)
        assert all(1 <= v <= 10 for place in at.values() for v in place)
    return at


def test_the_papers_story_has_the_papers_answers():
    text = """agent1 is at (2, 8)
        agent1 faces-N
        agent2 is at (9, 7)
        agent2 faces-N
        agent2 moves-2
        agent2 faces-E
        agent2 moves-1
        agent1 moves-1
        agent2 faces-S
        agent2 moves-5"""
    assert follow([line.strip() for line in text.splitlines()]) == {"agent1": (2, 9), "agent2": (10, 4)}


def test_stories_tell_where_the_agents_are():
    words, where = stories(200, 30, seeded())
    assert words.shape == (30, 200, STATEMENT_WORDS) and where.shape == (30, 200, 2)
    for b in range(200):
        lines = tell(words[:, b])
        assert [line.split()[0] for line in lines[:4]] == ["agent1", "agent1", "agent2", "agent2"]
        assert " is at " in lines[0] and " is at " in lines[2] and "faces" in lines[1] and "faces" in lines[3]
        assert not any(" is at " in line for line in lines[4:])
        for t in (4, 11, 30):
            places = follow(lines[:t])
            for agent in (0, 1):
                x, y = places[f"agent{agent + 1}"]
                assert VOCABULARY[where[t - 1, b, agent]] == f"({x}, {y})"
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 116 and VOCABULARY[NULL] == ""
    assert VOCABULARY[LOCATIONS] == "(1, 1)" and VOCABULARY[LOCATIONS + GRID * 9 + 9] == "(10, 10)"


def redrawn(rng, place, facing):
    """The paper's procedure: draw until legal."""
    strides = {"N": (0, 1), "E": (1, 0), "S": (0, -1), "W": (-1, 0)}
    while True:
        if rng.random() < 0.5:
            return f"faces-{rng.choice('NESW')}"
        n = rng.randint(1, 5)
        dx, dy = strides[facing]
        if all(1 <= v <= 10 for v in (place[0] + n * dx, place[1] + n * dy)):
            return f"moves-{n}"


def test_actions_are_distributed_as_if_drawn_again_until_legal():
    import random

    words, where = stories(40_000, 5, seeded(5))
    # Agents three steps from the wall they face: (x, 7) facing north.
    lines, agents = [], words[4, :, 0] - 1
    row = torch.arange(40_000)
    facing = torch.where(agents == 0, words[1, :, 1], words[3, :, 1])
    place = where[3, row, agents] - LOCATIONS
    chosen = (place % GRID == 6) & (facing == VOCABULARY.index("faces-N"))
    lines = [VOCABULARY[w] for w in words[4, chosen, 1]]
    assert len(lines) > 700
    rng = random.Random(0)
    drawn = [redrawn(rng, (4, 7), "N") for _ in range(20_000)]
    for name in sorted({*lines, *drawn}):
        assert lines.count(name) / len(lines) == pytest.approx(drawn.count(name) / 20_000, abs=0.05), name
    assert set(lines) == set(drawn)
    turns = sum("faces" in line for line in lines) / len(lines)  # .625; half of the time if only moves were drawn again
    assert turns == pytest.approx(sum("faces" in line for line in drawn) / 20_000, abs=0.06) and turns > 0.56
    assert abs((agents == 0).float().mean() - 0.5) < 0.02


def test_an_agent_at_the_wall_it_faces_turns():
    words, where = stories(20_000, 5, seeded(6))
    agents, row = words[4, :, 0] - 1, torch.arange(20_000)
    facing = torch.where(agents == 0, words[1, :, 1], words[3, :, 1])
    stuck = ((where[3, row, agents] - LOCATIONS) // GRID == 9) & (facing == VOCABULARY.index("faces-E"))
    assert stuck.sum() > 300 and all("faces" in VOCABULARY[w] for w in words[4, stuck, 1])


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: adding(20, 10, 3, seeded(seed)),
        lambda seed: coordinate_arithmetic(20, seeded(seed)),
        lambda seed: stories(20, 8, seeded(seed)),
    ],
)
def test_data_are_a_function_of_the_seed(make):
    assert all(torch.equal(a, b) for a, b in zip(make(1), make(1), strict=True))
    assert not torch.equal(make(1)[0], make(2)[0])


def test_batches_come_from_a_fixed_set_and_the_generator():
    task = Adding(train_size=8, train_length=6)
    draw = task.batches(64, torch.device("cpu"))
    again = Adding(train_size=8, train_length=6).batches(64, torch.device("cpu"))
    sequences, target = draw(seeded(3))
    assert torch.equal(sequences, again(seeded(3))[0]) and not torch.equal(sequences, draw(seeded(4))[0])
    assert len(torch.unique(target)) == 8
    marks = sequences[..., 1].sum(1)
    assert set(marks.tolist()) == {2.0, 4.0}


# Networks around cores.


def test_a_perfect_adder_scores_zero_and_constants_score_their_variance():
    class Perfect(SequenceSum):
        def __init__(self):
            nn.Module.__init__(self)
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, sequences):
            return self.weight * sequences.prod(-1).sum(1)

    result = Adding(test_size=4000, test_counts=(2, 10), test_length=40).evaluate(Perfect())
    assert result["scores"]["mse/2"] < 1e-9 and result["scores"]["mse/10"] < 1e-9
    # A sum of n has variance n / 12; the mean in training is that of 2 and 4 numbers, 1.5.
    assert result["errors"]["10"]["own_mean"] == pytest.approx(10 / 12, rel=0.1)
    assert result["errors"]["10"]["training_mean"] == pytest.approx(10 / 12 + 3.5**2, rel=0.05)
    assert result["errors"]["2"]["training_mean"] == pytest.approx(2 / 12 + 0.5**2, rel=0.1)


def perfect_rules(num_rules, order):
    """SNPS with weights set by hand: rule order[o] for operation o, its slot and context chosen rightly."""
    core = SNPS(4, 2, 2, num_rules=num_rules, rules_see="slot", rule_size=4, key_size=4, hidden_size=4).eval()
    change = torch.tensor([[-1.0, 0, 1, 0], [1, 0, -1, 0], [0, -1, 0, 1], [0, 1, 0, -1]])  # +-(x^ - x), +-(y^ - y)
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.zero_()
        core.rules.rule_key.weight.copy_(torch.eye(4))
        core.rules.slot_query.weight.copy_(change)
        core.rules.context_query.weight[0] = 1.0  # the context is the slot that changed least
        for o in range(4):
            core.rules.embeddings[order[o], o] = 1.0
            hidden, output = core.rules.mlps.hidden, core.rules.mlps.output
            hidden.weight[order[o], 2 + o // 2, 0] = 1.0
            output.weight[order[o], 0, o // 2] = 1.0 if o % 2 == 0 else -1.0
    return core


def test_right_rules_make_no_error_and_a_pure_table():
    task = CoordinateArithmetic(test_size=400)
    core = perfect_rules(5, [2, 0, 4, 1])
    # Scored by hand: among two, the context is the other slot.
    core.rules.context_scores = lambda primary, tokens, mask: (
        -((tokens[:, None] - primary[:, :, None]).square().sum(-1) < 1e-12).to(tokens.dtype)
    )
    result = task.evaluate(task.model(given(core), {}))
    assert result["scores"]["mse"] < 1e-12
    assert result["scores"]["purity"] == result["scores"]["matched"] == result["scores"]["right_slot"] == 1.0
    for o, r in enumerate([2, 0, 4, 1]):
        assert result["uses"][o][r] == sum(result["uses"][o])
    assert result["copy_mse"] == pytest.approx(1 / 12, rel=0.15)  # one number of four is off by a U[0, 1]


def test_matching_demands_distinct_rules():
    class Constant(nn.Module):
        """Applies rule 1 to everything, which is pure but no match."""

        capabilities = Capabilities(memory=False, rules=True)
        token_size, num_slots, slot_size, num_rules, rules_see = 4, 2, 2, 4, "slot"

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def initial_state(self, batch_size, slots=None):
            return {}

        def prepare(self, tokens):
            return tokens

        def forward(self, tokens, state):
            return tokens.features[..., :2] * self.weight, state

        def explain(self, tokens, state):
            ones = torch.ones(len(tokens.features), 1, dtype=torch.long)
            return {"rule": ones, "primary": 0 * ones, "context": ones}

    task = CoordinateArithmetic(test_size=800)
    result = task.evaluate(task.model(given(Constant()), {}))
    assert result["scores"]["purity"] == 1.0 and result["scores"]["matched"] == pytest.approx(0.25, abs=0.05)
    assert result["scores"]["right_slot"] == pytest.approx(0.5, abs=0.06)
    assert result["scores"]["mse"] == result["copy_mse"]


@pytest.mark.parametrize("core_class", [SNPS, PNPS, RoutingNPS])
def test_rules_that_see_slots_cannot_copy_the_output(core_class):
    """What a rule proposes does not depend on what is attached, once the choices are the same."""
    torch.manual_seed(0)
    core = core_class(4, 2, 2, num_rules=1, rules_see="slot").eval()
    tokens = torch.rand(50, 2, 4)
    other = tokens.clone()
    other[..., 2:] += torch.rand(50, 2, 2)
    a, b = core.explain(Tokens(tokens), {}), core.explain(Tokens(other), {})
    same = torch.stack([(a[name] == b[name]).flatten(1).all(1) for name in a]).all(0)
    changes, other_changes = core(Tokens(tokens), {})[0], core(Tokens(other), {})[0]
    assert same.sum() > 5 and torch.equal(changes[same], other_changes[same])
    with pytest.raises(ValueError, match="rules_see is 'all'"):
        core_class(4, 2, 2, rules_see="all")


@pytest.mark.parametrize("core_class", [SNPS, PNPS, RoutingNPS])
def test_arithmetic_refuses_rules_that_see_the_answer(core_class):
    task = CoordinateArithmetic()
    with pytest.raises(UserError, match=r"core\.rules_see=slot"):
        task.model(given(core_class(4, 2, 2)), {})
    task.model(given(core_class(4, 2, 2, rules_see="slot")), {})


def test_routing_equals_its_plain_form():
    core = RoutingNPS(4, 3, 2, num_rules=3).eval()
    features = torch.randn(20, 3, 4)
    ours = core(Tokens(features), {})[0]
    chosen = core.explain(Tokens(features), {})
    for b in range(20):
        h = features[b].flatten()
        for layer in core.routing:
            h = layer(h)
        p, c, r = (int(core.heads[name](h).argmax()) for name in ("primary", "context", "rule"))
        assert (p, c, r) == tuple(int(chosen[name][b, 0]) for name in ("primary", "context", "rule"))
        hidden = torch.cat([features[b, p], features[b, c]]) @ core.mlps.hidden.weight[r] + core.mlps.hidden.bias[r]
        expected = torch.zeros(3, 2)
        expected[p] = torch.relu(hidden) @ core.mlps.output.weight[r] + core.mlps.output.bias[r]
        assert torch.allclose(ours[b], expected, atol=1e-5)
    assert [layer.out_features for layer in core.routing if isinstance(layer, nn.Linear)] == [32] * 4


def test_the_null_symbol_is_zero_and_stays_so():
    task = GridWorld(length=5)
    model = task.model(given(EntNet(20, 5, 20, num_tokens=4)), {})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    draw = task.batches(8, torch.device("cpu"))
    for step in range(3):
        optimizer.zero_grad()
        task.losses(model, draw(seeded(step)), seeded())["loss"].backward()
        optimizer.step()
    assert not model.words.weight[NULL].any() and model.words.weight[1:].abs().sum(1).min() > 0


def test_questions_are_asked_of_the_memory_after_the_statement():
    """Scores for each statement and agent are those of the output module on the unrolled memories."""
    model = GridWorld(length=6).model(given(EntNet(20, 5, 20, num_tokens=4)), {})
    words, _ = stories(3, 6, seeded())
    scores = model(words, 3)
    assert scores.shape == (3, 3, 2, 116)
    tokens = Tokens(model.words(words), mask=words != NULL)
    slots, _ = unroll(model.core, tokens, model.core.initial_state(3))
    for agent in (0, 1):
        asked = [VOCABULARY.index(word) for word in ("where", "is", f"agent{agent + 1}", "?")]
        query = sum(model.question_masks[i] * model.words.weight[word] for i, word in enumerate(asked))
        for t in range(3, 6):
            expected = model.answer(query.expand(3, -1), slots[t])
            assert torch.allclose(scores[t - 3, :, agent], expected, atol=1e-5)


def test_variable_length_averages_over_all_lengths():
    torch.manual_seed(0)
    task = GridWorld(length=7, variable_length=True)
    model = task.model(given(GRU(20, 1, 30, num_tokens=4)), {})
    batch = stories(16, 7, seeded())
    loss = task.losses(model, batch, seeded())["loss"]
    single = [GridWorld(length=t).losses(model, (batch[0][:t], batch[1][:t]), seeded())["loss"] for t in range(4, 8)]
    assert torch.allclose(loss, torch.stack(single).mean(), atol=1e-6)
    assert task.test_lengths == [7, 20, 30, 40, 50, 60, 70, 80] and GridWorld(length=20).test_lengths == [20]
    assert GridWorld(length=20, variable_length=True).test_lengths == [20, 30, 40, 50, 60, 70, 80]


def test_options_that_cannot_work_are_refused():
    for make, says in (
        (lambda: Adding(test_counts=(3, 11), test_length=10), "cannot be added"),
        (lambda: Adding(train_counts=()), "cannot be added"),
        (lambda: Adding(train_seed=3), "both 3"),
        (lambda: CoordinateArithmetic(test_seed=1), "both 1"),
        (lambda: GridWorld(length=3), "first 4 statements"),
        (lambda: Adding().model(given(SNPS(32, 5, 60)), {}), "adding task needs a core with a state"),
        (lambda: GridWorld().model(given(SNPS(20, 5, 20)), {}), "gridworld task needs a core with a state"),
        (lambda: CoordinateArithmetic().model(given(GRU(4, 2, 2)), {}), "applies rules"),
    ):
        with pytest.raises(UserError, match=says):
            make()


# Runs.

EXPERIMENTS = [
    ("adding", "scoff"),
    ("arithmetic", "snps"),
    ("gridworld", "entnet"),
    ("relations", "esbn"),
    ("babi", "entnet"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a smoke run of every task in it."""
    folder = tmp_path_factory.mktemp("tasks")
    before = Path.cwd()
    os.chdir(folder)
    try:
        for task, core in EXPERIMENTS:
            assert main(["train", f"experiment={task}", f"core={core}", "size=smoke", f"run=runs/{task}"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def at_home(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


@pytest.mark.parametrize(("task", "core"), EXPERIMENTS)
def test_a_task_trains_evaluates_and_draws(at_home, capsys, task, core):
    run = at_home / "runs" / task
    saved = json.loads((run / "evaluation.json").read_text())
    assert saved["task"] == task and saved["core"].lower() == core and saved["parameters"] > 0
    (run / "evaluation.json").unlink()
    assert main(["evaluate", f"run={run}"]) == 0
    assert json.loads((run / "evaluation.json").read_text()) == saved
    assert main(["rollout", f"run={run}", "episode=2"]) == 0
    assert main(["compare", f"runs=[{run},{run}]"]) == 0
    out = capsys.readouterr().out
    pictures = re.findall(r"\S+\.png", out)
    assert len(pictures) >= 2 and all(Path(path).stat().st_size > 3000 for path in pictures)
    loaded = worldmodels.load(run)
    assert loaded.evaluate()["scores"] == saved["scores"]
    lines = read_metrics(run)
    assert [line["step"] for line in lines if "task/loss" in line] == [2, 4, 6]
    assert {"task/gradient_norm", "train/learning_rate", f"time/{loaded.task.unit}_per_second"} <= set(lines[0])


@pytest.mark.parametrize(("task", "core"), EXPERIMENTS)
def test_a_killed_task_resumes_bit_for_bit(at_home, monkeypatch, task, core):
    class Killed(Exception):
        pass

    real, calls = torch.nn.utils.clip_grad_norm_, []

    def killing(*args):
        calls.append(1)
        if len(calls) == 5:  # in the fifth step; the last checkpoint is of the third
            raise Killed
        return real(*args)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", killing)
    words = [f"experiment={task}", f"core={core}", "size=smoke", f"run=runs/{task}-killed"]
    with pytest.raises(Killed):
        worldmodels.train(*words)
    monkeypatch.undo()
    os.chdir(at_home)
    assert checkpoints.latest(Path(f"runs/{task}-killed")).name.endswith("3")
    assert main(["train", f"resume=runs/{task}-killed"]) == 0
    whole, resumed = (worldmodels.load(f"runs/{name}").model.state_dict() for name in (task, f"{task}-killed"))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize("core", ["lstm", "gru", "rims"])
@pytest.mark.parametrize("task", ["adding", "gridworld"])
def test_other_cores_do_the_tasks(at_home, task, core):
    run = worldmodels.train(
        f"experiment={task}", f"core={core}", "size=smoke", "trainer.steps=2", f"run=r/{task}-{core}"
    )
    assert run.evaluate()["scores"]


def test_the_routing_baseline_and_more_rules(at_home):
    words = ["experiment=arithmetic", "size=smoke", "trainer.steps=2", "core.num_rules=5"]
    for core in ("routing", "pnps", "snps"):
        result = worldmodels.train(*words, f"core={core}", f"run=r/{core}").evaluate()
        assert [len(uses) for uses in result["uses"]] == [5] * 4
        assert sum(map(sum, result["uses"])) + sum(result["null"]) == result["n"] == 100


def test_arithmetic_stands_beside_the_papers_purity():
    result = {
        "scores": {"mse": 0.01, "purity": 1.0, "matched": 1.0},
        "copy_mse": 0.1,
        "mean_mse": 0.2,
        "uses": [[1] * 5] * 4,
    }
    table = CoordinateArithmetic().table({"snps": result}, "arithmetic")
    cells = [list(column.cells) for column in table.columns]
    assert cells[0][-2] == "paper: NPS, 5 rules" and cells[-2][-2] == "81.5 %"
    counts = [[360, 99, 45, 13, 0], [0, 482, 0, 1, 0], [0, 39, 453, 2, 0], [0, 57, 15, 99, 335]]  # the paper's Table 2
    assert sum(map(max, counts)) / sum(map(sum, counts)) == pytest.approx(0.815, abs=5e-4)


def test_scores_are_logged_on_the_way(at_home):
    words = ["experiment=gridworld", "core=entnet", "size=smoke", "task.length=6", "trainer.evaluate_every=3"]
    worldmodels.train(*words, "task.variable_length=true", "run=r/logged")
    lines = [line for line in read_metrics(Path("r/logged")) if "task/score/error/80" in line]
    assert [line["step"] for line in lines] == [3, 6]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "experiment=adding", "size=smoke", "core=gnn"], "the adding task needs a core with a state"),
        (["train", "experiment=adding", "size=smoke", "core=scoff", "env.id=CartPole-v1"], "makes its own sequences"),
        (["train", "experiment=adding", "size=smoke", "core=scoff", "memory=carry"], "leave them out"),
        (["train", "experiment=adding", "size=smoke", "core=scoff", "task.test_cuonts=[3]"], "test_counts"),
        (["train", "experiment=arithmetic", "size=smoke", "core=gnn"], "applies rules"),
        (["train", "task=arithmetic", "size=smoke", "core=snps"], "set core.rules_see=slot"),
        (["train", "experiment=gridworld", "size=smoke", "core=entnet", "task.length=2"], "first 4 statements"),
        (["train", "task=addding"], "did you mean 'adding'"),
        (["evaluate", "run=runs/adding", "data=data/x"], "leave out data="),
        (["rollout", "run=runs/adding", "episode=-1"], "numbered from 0"),
        (["compare", "runs=[runs/adding,runs/gridworld]"], "runs of one task"),
    ],
)
def test_mistakes_get_one_line(at_home, capsys, words, says):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and "Traceback" not in err, err


def test_a_story_read_word_by_word_is_the_same_story():
    """A core that reads words sees, after a statement, what it would see of a sequence of words cut there."""
    task = GridWorld(length=6, reads="words")
    model = task.model(given(GRU(20, 1, 12, num_tokens=1)), {}).eval()
    words, _ = stories(3, 6, seeded())
    with torch.no_grad():
        whole = model(words, 0)
        for t in (0, 2, 5):
            assert torch.allclose(model(words[: t + 1], t)[0], whole[t], atol=1e-5)
    tokens = model.tokens(words)
    assert tokens.features.shape == (24, 3, 1, 20)
    spelled = [[VOCABULARY[w] for w in words[:, b].flatten().tolist()] for b in range(3)]
    for b in range(3):
        assert [bool(m) for m in tokens.mask[:, b, 0]] == [word != "" for word in spelled[b]]
    with pytest.raises(UserError, match="statements or words"):
        GridWorld(reads="letters")
