import pytest
import torch
from torch import nn

from worldmodels.core import Capabilities
from worldmodels.cores.entnet import EntNet
from worldmodels.cores.esbn import ESBN
from worldmodels.cores.gnn import GNN
from worldmodels.cores.gru import GRU
from worldmodels.cores.rims import RIMs
from worldmodels.cores.rmc import RMC
from worldmodels.cores.s2rm import S2GRU
from worldmodels.cores.scoff import SCOFF
from worldmodels.data.episodes import Episodes
from worldmodels.errors import UserError
from worldmodels.metrics import hits_at_k, mrr, ranks
from worldmodels.models.world_model import WorldModel, attach
from worldmodels.ranking import _alarms
from worldmodels.tasks.transitions import evaluate

BLOCKS = {"kind": "discrete", "sizes": [6], "per_object": 2}
PLAIN = {"kind": "discrete", "sizes": [3, 2]}
BOX = {"kind": "box", "sizes": [2]}


def test_attaching_actions_by_hand():
    slots = torch.zeros(1, 3, 1)
    assert attach(slots, torch.tensor([3]), BLOCKS, "slot")[0, :, 1:].tolist() == [[0, 0], [0, 1], [0, 0]]
    assert attach(slots, torch.tensor([3]), BLOCKS, "full")[0, :, 1:].tolist() == [[0, 0, 0, 1, 0, 0]] * 3
    assert attach(slots, torch.tensor([[2, 1]]), PLAIN, "copy")[0, :, 1:].tolist() == [[0, 0, 1, 0, 1]] * 3
    assert attach(slots, torch.tensor([[0.5, -1.0]]), BOX, "copy")[0, 1, 1:].tolist() == [0.5, -1.0]


class Identity(nn.Module):
    """The observation is the slots."""

    def __init__(self, num_slots=3, slot_size=1):
        super().__init__()
        self.observation_shape, self.num_slots, self.slot_size = (num_slots, slot_size), num_slots, slot_size
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, observations):
        return observations.float() * self.scale


class Adder(nn.Module):
    """A transparent core: delta is what the action says, one step of +1 or -1 on the acted slot, plus memory's count."""

    def __init__(self, token_size, num_slots, slot_size, remembers=False):
        super().__init__()
        self.capabilities = Capabilities(memory=remembers)
        self.token_size, self.num_slots, self.slot_size, self.remembers = token_size, num_slots, slot_size, remembers

    def initial_state(self, batch_size, slots=None):
        return {"count": torch.zeros(batch_size, 1)} if self.remembers else {}

    def prepare(self, tokens):
        return tokens

    def forward(self, tokens, state):
        delta = tokens.features[..., 1:2] - tokens.features[..., 2:3]
        if self.remembers:
            state = {"count": state["count"] + 1}
            delta = delta + state["count"][..., None]
        return delta, state

    def explain(self, tokens, state):
        return {}


def adder(**options):
    model = WorldModel(
        Identity(), Adder(3, 3, 1, options.pop("remembers", False)), action=BLOCKS, action_to="slot", **options
    )
    if model.has_memory:
        nn.init.ones_(model.readout.output.weight), nn.init.zeros_(model.readout.output.bias)
    return model


def test_step_and_rollout_by_hand():
    model = adder()
    slots = torch.tensor([[[10.0], [20.0], [30.0]]])
    after, _ = model.step(slots, torch.tensor([2]))  # block 1, direction 0
    assert after.flatten().tolist() == [10, 21, 30]
    imagined = model.rollout(slots, torch.tensor([[2], [2], [5]]))
    assert imagined.flatten(1).tolist() == [[10, 21, 30], [10, 22, 30], [10, 22, 29]]


def test_tokens_tell_which_slot_is_which():
    model = WorldModel(Identity(), Adder(6, 3, 1), action=BLOCKS, action_to="slot", slot_ids=True)
    slots = torch.tensor([[[10.0], [20.0], [30.0]]])
    assert model.tokens(slots, torch.tensor([2])).features.tolist() == [
        [[10, 0, 0, 1, 0, 0], [20, 1, 0, 0, 1, 0], [30, 0, 0, 0, 0, 1]]
    ]
    assert model.rollout(slots, torch.tensor([[2], [5]])).flatten(1).tolist() == [[10, 21, 30], [10, 21, 29]]
    with pytest.raises(UserError, match="has tokens of 6"):
        WorldModel(Identity(), Adder(3, 3, 1), action=BLOCKS, action_to="slot", slot_ids=True)


def test_memory_none_starts_afresh_and_carry_goes_on():
    slots = torch.zeros(1, 3, 1)
    actions = torch.tensor([[0], [0], [0]])
    none = adder(remembers=True).rollout(slots, actions)[:, 0, 1, 0]
    carry = adder(remembers=True, memory="carry").rollout(slots, actions)[:, 0, 1, 0]
    assert none.tolist() == [1, 2, 3] and carry.tolist() == [1, 3, 6]
    seen = torch.zeros(3, 1, 3, 1)
    assert adder(remembers=True).predict(seen, actions)[0][:, 0, 1, 0].tolist() == [1, 1, 1]
    assert adder(remembers=True, memory="carry").predict(seen, actions)[0][:, 0, 1, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("memory", ["none", "carry"])
def test_predict_equals_steps(memory):
    model = WorldModel(Identity(3, 4), GRU(10, 3, 5), action=BLOCKS, action_to="full", memory=memory).eval()
    slots, actions = torch.randn(6, 2, 3, 4), torch.randint(0, 6, (6, 2))
    whole, _ = model.predict(slots, actions)
    state = None
    for t in range(6):
        pred, state = model.step(slots[t], actions[t], state)
        assert torch.allclose(pred, whole[t], atol=1e-6)


def test_forward_imagines_on_request():
    model = WorldModel(Identity(3, 2), GNN(4, 3, 2, hidden_size=8), action=BLOCKS, action_to="slot")
    observations, actions = torch.randn(4, 2, 3, 2), torch.randint(0, 6, (3, 2))
    slots, pred = model(observations, actions)
    assert torch.equal(slots, observations) and torch.allclose(pred[1], model.step(slots[1], actions[1])[0], atol=1e-6)
    _, imagined = model(observations, actions, imagine=True)
    assert torch.allclose(imagined, model.rollout(observations[0], actions)) and not torch.allclose(
        imagined[1], pred[1]
    )


def counting_episodes(N=80, steps=6):
    """Slots that count; the truth of the transparent model."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 50, (N, 3), generator=generator).float()
    actions = torch.randint(0, 6, (N, steps + 1), generator=generator)
    actions[:, -1] = 0
    change = torch.zeros(N, steps, 3).scatter_(
        2, (actions[:, :-1] // 2)[..., None], 1.0 - 2.0 * (actions[:, :-1] % 2)[..., None]
    )
    states = torch.cat([start[:, None], start[:, None] + change.cumsum(1)], 1)
    rows = N * (steps + 1)
    moved = torch.zeros(N, steps + 1, 3, dtype=torch.bool)
    moved[:, 2, :2] = torch.arange(N)[:, None] < 60  # 60 paths with two movers in step 2
    arrays = {
        "observations": states.reshape(rows, 3, 1),
        "actions": actions.reshape(rows),
        "info/moved": moved.reshape(rows, 3),
        "info/positions": states.reshape(rows, 3, 1),
    }
    return Episodes(arrays, torch.full((N,), steps), {"action": BLOCKS})


def test_a_perfect_model_scores_one_beside_its_copy():
    model, episodes = adder(), counting_episodes()
    result = evaluate(model, episodes, horizons=(1, 5))
    assert result["all"]["5"]["h@1"] == 1.0 and result["in_episode"]["5"]["h@1"] > 0.99
    seen = episodes.arrays["observations"].view(80, 7, 3)
    copied = ranks(seen[:, 0], seen[:, 5])
    assert result["all"]["5"]["copy_h@1"] == pytest.approx(hits_at_k(copied, 1))
    assert result["all"]["5"]["copy_mrr"] == pytest.approx(mrr(copied))
    assert result["all"]["5"]["true_copy_h@1"] == result["all"]["5"]["copy_h@1"]  # here slots are the true state
    assert set(result["moved"]) == {"5"} and result["moved"]["5"]["n"] == 60  # step 2 lies beyond horizon 1
    assert result["in_episode"]["5"]["copy_h@1"] < 0.3 and result["alarms"] == []
    low, high = result["all"]["5"]["ci95"]
    assert low == high == 1.0


def test_in_episode_scores_by_hand():
    """Predictions one too far: in-episode ranking counts the states nearer to the prediction, not those like the target."""
    episodes = counting_episodes()
    model = adder(remembers=True)  # every slot one too high
    result = evaluate(model, episodes, horizons=(1,))
    states = episodes.arrays["observations"].view(80, 7, 3)
    hit = []
    for e in range(80):
        pred = states[e, 1] + 1.0
        distance = (states[e] - pred).square().sum(-1)
        others = [t for t in range(7) if not torch.equal(states[e, t], states[e, 1])]
        less = sum(bool(distance[t] < distance[1]) for t in others)
        ties = 1 + sum(bool(distance[t] == distance[1]) for t in others)
        hit.append(max(0.0, min(1.0, (1 - less) / ties)))
    assert result["in_episode"]["1"]["h@1"] == pytest.approx(sum(hit) / 80)
    assert 0.1 < sum(hit) / 80 < 0.9


def test_states_that_occur_more_than_once_are_counted_and_left_out():
    """All of the second half of the episodes are copies of the first half's: each target has one equal."""
    episodes = counting_episodes()
    rows = 40 * 7
    episodes.arrays = {name: torch.cat([array[:rows], array[:rows]]) for name, array in episodes.arrays.items()}
    entry = evaluate(adder(), episodes, horizons=(5,))["all"]["5"]
    assert entry["duplicates"] == 1.0 and entry["h@1"] == pytest.approx(0.5) and entry["distinct_h@1"] == 1.0
    assert entry["ceiling"] == 0.5  # and the perfect model reaches it
    numbers = torch.arange(80 * 7).reshape(80, 7)
    numbers[1, 5], numbers[3, 5], numbers[4, 5] = numbers[0, 5], numbers[2, 5], numbers[2, 5]
    told = counting_episodes()
    plain = evaluate(adder(), told, horizons=(5,))["all"]["5"]
    told.arrays["info/state_id"] = numbers.reshape(-1)
    more = evaluate(adder(), told, horizons=(5,))["all"]["5"]
    seen = told.arrays["observations"].view(80, 7, 3)[:, 5]
    again = torch.tensor([any(torch.equal(seen[i], seen[j]) for j in range(80) if j != i) for i in range(80)])
    assert plain["duplicates"] == pytest.approx(float(again.float().mean()))
    again[:5] = True
    assert more["duplicates"] == pytest.approx(float(again.float().mean()))


def test_a_linear_readout_tells_what_slots_hold():
    episodes = counting_episodes()
    states = episodes.arrays["observations"].squeeze(-1)
    noise = torch.randn(len(states), generator=torch.Generator().manual_seed(1))
    both, constant = 3.0 * states[:, 0] - states[:, 2], torch.ones(len(states))
    hidden = torch.where(torch.arange(len(states)) % 3 > 0, 2.0 * states[:, 1], 1e6)
    objects = torch.stack([10.0 - 2.0 * states[:, 1], both, noise, constant, hidden], 1)
    shown = torch.ones(len(states), 5, dtype=torch.bool)
    shown[:, 4] = torch.arange(len(states)) % 3 > 0
    episodes.arrays |= {"info/objects": objects, "info/visible": shown}
    episodes.about["objects"] = ["one", "both", "noise", "constant", "hidden"]
    probe = evaluate(adder(), episodes, horizons=(1, 5))["probe"]
    assert probe["episodes"] == 80 and set(probe["objects"]) == {"one", "both", "noise", "hidden"}
    for name, slot in (("one", 1), ("hidden", 1)):
        told = probe["objects"][name]
        assert told["r2"] > 0.99 and told["slot"] == slot and told["slot_r2"] > 0.99
        assert all(value > 0.99 for value in told["imagined_r2"].values()) and set(told["imagined_r2"]) == {"1", "5"}
    told = probe["objects"]["both"]
    assert told["r2"] > 0.99 and told["slot"] == 0 and 0.7 < told["slot_r2"] < 0.98
    assert probe["objects"]["noise"]["r2"] < 0.1
    assert all(told["time_r2"] < 0.1 for told in probe["objects"].values())  # these worlds know no time
    wrong = evaluate(adder(remembers=True), episodes, horizons=(1, 5))["probe"]["objects"]["one"]
    assert wrong["r2"] > 0.99 > wrong["imagined_r2"]["5"]  # it sees rightly and imagines wrongly
    assert "probe" not in evaluate(adder(), counting_episodes(), horizons=(1,))


def test_the_probe_stands_beside_what_the_step_alone_tells():
    """An object that moves with time only: the mean of each step knows it as well as any slot could."""
    episodes = counting_episodes()
    step = torch.arange(len(episodes.arrays["observations"])) % 7
    noise = 0.1 * torch.randn(len(step), generator=torch.Generator().manual_seed(2))
    objects = torch.stack([5.0 * step + noise, torch.where(step == 3, torch.nan, noise)], 1)
    episodes.arrays |= {"info/objects": objects, "info/visible": torch.ones(3, dtype=torch.bool)}  # of another shape
    episodes.about["objects"] = ["clock", "noise"]
    probe = evaluate(adder(), episodes, horizons=(1, 3))["probe"]["objects"]
    assert probe["clock"]["time_r2"] > 0.999 > 0.5 > probe["clock"]["r2"]
    assert all(value > 0.999 for value in probe["clock"]["imagined_time_r2"].values())
    assert probe["noise"]["imagined_r2"]["3"] is None is probe["noise"]["imagined_time_r2"]["3"]
    assert probe["noise"]["time_r2"] < 0.1


def test_burn_in_fills_a_carried_state():
    model = adder(remembers=True, memory="carry")
    result = evaluate(model, counting_episodes(), horizons=(1, 2), burn_in=3)
    assert result["burn_in"] == 3 and result["memory"] == "carry"
    assert evaluate(model, counting_episodes(), horizons=(1,))["burn_in"] == 5


def test_alarms():
    model, episodes = adder(), counting_episodes()
    with torch.no_grad():
        model.encoder.scale.zero_()
    collapsed = evaluate(model, episodes, horizons=(1,))
    assert any(alarm.startswith("collapse") for alarm in collapsed["alarms"])
    frozen = WorldModel(Identity(), Still(3, 3, 1), action=BLOCKS, action_to="slot")
    still = evaluate(frozen, counting_episodes(120), horizons=(1, 5))
    assert [alarm.split(" the latent")[0] for alarm in still["alarms"]] == ["shortcut: at 5 steps"]
    assert still["all"]["5"]["h@1"] == still["all"]["5"]["copy_h@1"]
    assert not evaluate(frozen, episodes, horizons=(1, 5))["alarms"]  # too few to say so
    assert not evaluate(adder(), counting_episodes(120), horizons=(1, 5))["alarms"]


def test_a_model_at_chance_has_not_learned_yet():
    """Whatever its copy scores; that is no shortcut."""
    for h, low, copy, n, said in (
        (
            0.016,
            0.0,
            0.0,
            64,
            "not learned yet: at 5 steps the model scores 0.016 of 64 test episodes, where chance is",
        ),
        (0.002, 0.0, 0.01, 1000, "not learned yet: at 5 steps the model scores 0.002"),
        (0.3, 0.27, 0.29, 1000, None),
        (0.3, 0.27, 0.31, 1000, "shortcut: at 5 steps the latent copy scores 0.310 and the model 0.300"),
    ):
        entry = {"h@1": h, "copy_h@1": copy, "ci95": [low, h + 0.03]}
        alarms = _alarms({"effective_rank": 4.0, "variance": 1.0, "episodes": n, "all": {"5": entry}}, 5)
        assert (not alarms and said is None) or (len(alarms) == 1 and alarms[0].startswith(said)), alarms


class Still(Adder):
    """Predicts that nothing changes."""

    def forward(self, tokens, state):
        return torch.zeros_like(tokens.features[..., :1]), state


STARTING = {
    "scoff": (SCOFF, {}),
    "rims": (RIMs, {}),
    "rmc": (RMC, {}),
    "entnet": (EntNet, {}),
    "s2gru": (S2GRU, {}),
}


@pytest.mark.parametrize("name", STARTING)
def test_recurrent_cores_start_from_the_slots_they_change(name):
    make, options = STARTING[name]
    for size in (4, 8):  # as long as a slot, and longer: then a linear layer comes between
        core = make(6, 3, size, **options)
        model = WorldModel(Identity(3, 4), core, action=BLOCKS, action_to="slot").eval()
        assert model.starts_from_slots and isinstance(model.lift, nn.Identity if size == 4 else nn.Linear)
        slots = torch.randn(2, 3, 4)
        state = model.initial_state(slots)
        leaf = state["hidden"] if "hidden" in state else state["memory"]
        assert torch.equal(leaf, model.lift(slots))
        # memory=none: what a prediction depends on is the present alone, in whatever sequence it stands
        before, actions = torch.randn(5, 2, 3, 4), torch.randint(6, (5, 2))
        pred, _ = model.predict(before, actions)
        alone, _ = model.step(before[3], actions[3])
        assert torch.allclose(pred[3], alone, atol=1e-6)
        carrying = WorldModel(Identity(3, 4), core, action=BLOCKS, action_to="slot", memory="carry").eval()
        carrying.load_state_dict(model.state_dict())
        assert not torch.allclose(carrying.predict(before, actions)[0][3], alone, atol=1e-4)


def test_cores_that_cannot_start_from_slots_start_from_their_own_state():
    model = WorldModel(Identity(3, 4), GRU(6, 3, 8), action=BLOCKS, action_to="slot")
    assert not model.starts_from_slots and isinstance(model.lift, nn.Identity)
    assert torch.equal(model.initial_state(torch.randn(2, 3, 4))["hidden"], model.core.initial_state(2)["hidden"])


def test_a_core_of_another_number_of_slots_is_read_by_attention():
    core = SCOFF(6, 5, 8)
    model = WorldModel(Identity(3, 4), core, action=BLOCKS, action_to="slot")
    assert not model.readout.aligned and not model.starts_from_slots
    slots, core_slots = torch.randn(2, 3, 4), torch.randn(2, 5, 8)
    with torch.no_grad():
        change = model.readout(slots, core_slots)
        for b in range(2):
            for k in range(3):
                q = model.readout.query(slots[b, k])
                weights = torch.softmax(torch.stack([q @ model.readout.key(h) / 8**0.5 for h in core_slots[b]]), 0)
                plain = model.readout.output(sum(w * h for w, h in zip(weights, core_slots[b], strict=True)))
                assert torch.allclose(change[b, k], plain, atol=1e-5)
    pred, _ = model.step(slots, torch.tensor([0, 3]))
    pred.square().sum().backward()
    assert pred.shape == (2, 3, 4) and model.readout.query.weight.grad.abs().sum() > 0
    with pytest.raises(UserError, match=r"leave core\.num_slots"):
        WorldModel(Identity(3, 4), GNN(6, 5, 4), action=BLOCKS, action_to="slot")


def test_esbn_cannot_be_a_transition():
    with pytest.raises(UserError, match="ESBN cannot be a world model's transition"):
        WorldModel(Identity(3, 4), ESBN(6, 3, 4), action=BLOCKS, action_to="slot")


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="gives 2 actions to each of 4 slots"):
        WorldModel(Identity(4), Adder(3, 4, 1), action=BLOCKS, action_to="slot")
    with pytest.raises(UserError, match="does not have; use copy"):
        WorldModel(Identity(), Adder(3, 3, 1), action=PLAIN, action_to="slot")
    with pytest.raises(UserError, match="takes tokens of 9; this world model has tokens of 3"):
        WorldModel(Identity(), Adder(9, 3, 1), action=BLOCKS, action_to="slot")
    with pytest.raises(UserError, match="needs a core with a state"):
        WorldModel(Identity(), Adder(3, 3, 1), action=BLOCKS, action_to="slot", memory="carry")
    with pytest.raises(UserError, match="expected one of"):
        adder(memory="some")
    with pytest.raises(UserError, match="the encoder takes"):
        adder().encode(torch.zeros(2, 5, 5))
    with pytest.raises(UserError, match="0 test episodes reach 9 steps"):
        evaluate(adder(), counting_episodes(), horizons=(9,))
