"""Agents by the command line: run folders, exact resume, evaluation, features, pictures."""

import json
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from PIL import Image
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from torch import nn

import worldmodels
from worldmodels import checkpoints
from worldmodels.agents import BabyAIFeatures, RecurrentPPO, SlotFeatures, VectorEnvAdapter, pictures
from worldmodels.agents import load as load_agent
from worldmodels.agents.evaluation import interquartile_mean, play
from worldmodels.agents.run import make_envs
from worldmodels.cli import main
from worldmodels.errors import UserError
from worldmodels.logging import read_metrics

from .test_agents import LENGTHS, counting, ppo

SMOKE = ["size=smoke", "logger.figures=false", "logger.progress=false"]


def trained(run, *words):
    assert main(["train-agent", *SMOKE, f"run={run}", *words]) == 0
    return load_agent(run)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a run on Recall and one on GoToObjMaze."""
    folder = tmp_path_factory.mktemp("agents")
    trained(folder / "recall", "experiment=memory", "core=scoff", "core.num_slots=2", "core.slot_size=8")
    trained(folder / "maze", "experiment=gotoobjmaze", "core=gru", "core.slot_size=16", "core.num_slots=1")
    return folder


RESUMED = [
    ("experiment=memory", "core=scoff", "core.num_slots=2", "core.slot_size=8"),
    ("experiment=gotoobjmaze", "core=gru", "core.num_slots=1", "core.slot_size=16", "+env.kwargs.renew_every=10"),
    ("experiment=cartpole", "core=rims", "ppo.critic=own", "core.num_slots=2", "core.slot_size=8"),
]


@pytest.mark.parametrize("words", RESUMED)
def test_a_killed_run_resumes_bit_for_bit(words, tmp_path, monkeypatch):
    whole = trained(tmp_path / "whole", *words)
    real, saves = RecurrentPPO.train, []

    class Killed(Exception):
        pass

    def killing(self):
        saves.append(1)
        if len(saves) == 4:
            raise Killed
        real(self)

    monkeypatch.setattr(RecurrentPPO, "train", killing)
    with pytest.raises(Killed):
        main(["train-agent", *SMOKE, f"run={tmp_path / 'cut'}", *words])
    monkeypatch.undo()
    assert 0 < checkpoints.step_of(checkpoints.latest(tmp_path / "cut")) < whole.model.num_timesteps
    torch.manual_seed(99)
    assert main(["train-agent", f"resume={tmp_path / 'cut'}"]) == 0
    cut = load_agent(tmp_path / "cut")
    for (name, a), b in zip(
        whole.model.policy.state_dict().items(), cut.model.policy.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    kept = [
        [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(tmp_path / run)]
        for run in ("whole", "cut")
    ]
    assert kept[0] == kept[1] and len(kept[0]) == 4
    scores = [json.loads((tmp_path / run / "evaluation.json").read_text()) for run in ("whole", "cut")]
    assert scores[0]["variants"] == scores[1]["variants"]


def test_foreign_environments_begin_anew_and_say_so(tmp_path, monkeypatch, capsys):
    words = ("env.id=CartPole-v1", "core=gru", "core.num_slots=1", "core.slot_size=8")
    real = RecurrentPPO.train

    def killing(self):
        if self.num_timesteps >= 96:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(RecurrentPPO, "train", killing)
    assert main(["train-agent", *SMOKE, f"run={tmp_path / 'a'}", *words]) == 2
    monkeypatch.undo()
    capsys.readouterr()
    assert main(["train-agent", f"resume={tmp_path / 'a'}"]) == 0
    assert "their episodes begin anew" in capsys.readouterr().err
    assert load_agent(tmp_path / "a").model.num_timesteps == 128


def test_run_folder_evaluation_and_pictures(home, capsys):
    run = home / "maze"
    result = json.loads((run / "evaluation.json").read_text())
    assert list(result["variants"]) == ["as trained", "rooms of 10 x 10"]
    assert result["label"] == "gru" and result["variants"]["rooms of 10 x 10"]["options"] == {
        "room_size": 10,
        "max_steps": 40,
    }
    logged = set(read_metrics(home / "recall")[-1])
    assert {"rollout/ep_len_mean", "rollout/success_rate", "train/approx_kl", "time/steps_per_second"} <= logged
    assert main(["evaluate-agent", f"run={run}", "episodes=3", "env.room_size=5", "env.max_steps=10"]) == 0
    again = json.loads((run / "evaluation.json").read_text())
    assert again["variants"]["env"]["episodes"] == 3 and again["variants"]["env"]["length"]["high"] <= 10
    assert main(["rollout", f"run={run}"]) == 0
    with Image.open(run / "figures" / "episode.gif") as video:
        assert video.n_frames > 1
    assert main(["rollout", f"run={home / 'recall'}", "episode=1"]) == 0
    assert (home / "recall" / "figures" / "choices.png").is_file()
    capsys.readouterr()


def test_load_opens_agents_as_well(home):
    run = worldmodels.load(home / "recall")
    assert isinstance(run, worldmodels.agents.AgentRun) and run.model.num_timesteps == 128


def test_curves_say_when_no_episode_ended(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: kept.append(figure) or path)
    pictures.curves([{"step": 1280, "train/loss": 0.1}], tmp_path / "x.png")
    pictures.curves([{"step": 64, "rollout/ep_rew_mean": 2.0, "rollout/success_rate": 0.5}], tmp_path / "x.png")
    (empty,), (returns, success) = kept[0].axes, kept[1].axes
    assert not empty.axison and "no episode ended in the 1,280 environment steps" in empty.texts[0].get_text()
    assert returns.lines[0].get_marker() == "o" and success.get_ylim() == (-0.02, 1.02)  # a single point is seen


def test_a_film_tells_step_action_and_return(home, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(pictures, "_with_caption", lambda frame, lines: told.append(lines) or frame)
    policy = load_agent(home / "maze").model.policy
    envs = make_envs("worldmodels/GoToObjMaze-v0", 1, {"room_size": 4, "num_rows": 1, "num_cols": 1}, "cpu")
    ended, advance = [], envs.advance

    def win_at_the_third(actions):
        step = advance(actions)
        ended.append(int(actions[0]))
        done = torch.tensor([len(ended) == 3])
        return step._replace(rewards=done * 0.75, terminated=done)

    monkeypatch.setattr(envs, "advance", win_at_the_third)
    pictures.episode(policy, envs, tmp_path, seed=0)
    names = ["left", "right", "forward", "pickup", "drop", "toggle", "done"]
    assert [lines[:2] for lines in told] == [
        [f"step {t}   return {0.75 if t == 2 else 0:.3g}", f"action: {names[action]}"] for t, action in enumerate(ended)
    ]


def test_a_caption_stands_below_the_frame():
    frame = np.zeros((40, 100, 3), dtype=np.uint8)
    film = pictures._with_strip(frame, None, 1, ["step 0   return 0", "action: left"])
    assert film.shape[1] == 400 and film.shape[0] > 160  # wide enough for the text
    assert not film[:160].any() and film[160:].max() == 255 and film[160:].min() == 0


def test_actions_have_the_names_their_environment_tells():
    class Meanings(gym.Wrapper):
        metadata: ClassVar = {}

        def __init__(self):
            super().__init__(gym.make("CartPole-v1"))

        @property
        def unwrapped(self):
            return self

        def get_action_meanings(self):
            return ["LEFT", "RIGHT"]

    def names(*what):
        return pictures._action_names(make_envs(*what))

    assert names("MiniGrid-Empty-5x5-v0", 1, {}, "cpu")[2] == "forward"
    assert names("CartPole-v1", 1, {}, "cpu") == []
    assert names("worldmodels/CartPole-v0", 1, {}, "cpu") == ["push left", "push right"]
    assert names("worldmodels/Skirmish-v0", 1, {"scenario": "1s2z"}, "cpu", {})[5:] == [
        "west",
        *(f"attack enemy {i}" for i in range(3)),
    ]
    assert pictures._action_names(VectorEnvAdapter(SyncVectorEnv([Meanings]))) == ["LEFT", "RIGHT"]
    assert pictures.action_text(torch.tensor(7), ["left"]) == "7"
    assert pictures.action_text(torch.tensor([0.5, -1.0])) == "0.5, -1"


def test_tables_over_seeds(home, capsys):
    trained(home / "recall-1", "experiment=memory", "core=gru", "core.num_slots=1", "core.slot_size=8", "seed=1")
    capsys.readouterr()
    assert main(["compare", f"runs=[{home / 'recall'},{home / 'recall-1'}]"]) == 0
    shown = capsys.readouterr().out
    assert "over seeds" in shown and "scoff" in shown and "better" in shown
    assert main(["evaluate-agent", f"runs=[{home / 'recall'},{home / 'recall-1'}]", "episodes=4"]) == 0


def test_seeds_reproduce_a_run(home, tmp_path):
    words = ("experiment=memory", "core=scoff", "core.num_slots=2", "core.slot_size=8")
    again = trained(tmp_path / "again", *words)
    other = trained(tmp_path / "other", *words, "seed=1")
    first = load_agent(home / "recall").model.policy.state_dict()
    assert all(torch.equal(value, first[name]) for name, value in again.model.policy.state_dict().items())
    assert any(not torch.equal(value, first[name]) for name, value in other.model.policy.state_dict().items())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["experiment=memory", "core=scof"], "did you mean 'scoff'"),
        (
            ["experiment=memory", "ppo.batch_size=7"],
            "batch_size is 7; a minibatch is whole sequences of sequence_length=8 steps",
        ),
        (["experiment=memory", "ppo.batchsize=7"], "did you mean 'batch_size'"),
        (["experiment=memory", "encoder.name=babyai"], "expected a dict of a picture and a mission"),
        (["experiment=memory", "encoder.name=nothing"], "encoder.name=nothing; expected auto, flatten"),
        (["env.id=Nothing-v0"], "unknown environment 'Nothing-v0'"),
        ([], "no environment was named"),
        (["experiment=memory", "+env.kwargs.cues=3"], "unexpected keyword argument 'cues'"),
        (["experiment=memory", "core=gnn", "core.num_slots=3"], "set num_slots=1 and slot_size to at most"),
        (["experiment=memory", "+core.num_schemata=2"], "does not take core.num_schemata"),
        (["experiment=memory", "ppo.n_steps=0"], "ppo.n_steps=0; expected a whole number of at least 1"),
        (["experiment=memory", "trainer.device=gpu"], "device 'gpu' cannot be used here"),
        (
            ["experiment=memory", "ppo.vf_coef=1e39"],
            "ppo.vf_coef=1e+39; expected numbers between 1e-30 and 1e+30 in size",
        ),
        (["experiment=memory", "ppo.n_epochs=10000000000000"], "expected whole numbers of at most 1,099,511,627,776"),
        (["experiment=memory", "ppo.vf_coef=9e29"], "was not finite in the update after 32 steps"),
    ],
)
def test_mistakes_get_one_line(tmp_path, capsys, words, says):
    assert main(["train-agent", *SMOKE, f"run={tmp_path / 'run'}", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("worldmodels: ") and error.count("\n") == 1


def test_runs_of_another_kind_are_named(home, capsys, tmp_path):
    assert main(["evaluate", f"run={home / 'recall'}"]) == 2
    assert "is the run of an agent" in capsys.readouterr().err
    with pytest.raises(UserError, match="no run at"):
        load_agent(tmp_path)
    assert main(["train-agent", *SMOKE, "experiment=memory", f"run={home / 'recall'}"]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_variants_of_other_spaces_get_one_line(home, capsys):
    assert main(["evaluate-agent", f"run={home / 'recall'}", "env.num_cues=6"]) == 2
    error = capsys.readouterr().err
    assert "the agent was trained with Box(0.0, 1.0, (5,), float32)" in error and error.count("\n") == 1


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_play_takes_the_same_number_of_whole_episodes_everywhere(mode):
    """Episodes 0, 1 of copy 0, episodes 1, 2 of copy 1, episodes 2, 3 of copy 2."""
    envs = VectorEnvAdapter(counting(mode))
    played = play(ppo(counting(mode)).policy, envs, 6)
    expected = [LENGTHS[episode % 3] for turn in range(2) for episode in (turn, turn + 1, turn + 2)]
    assert played["length"].tolist() == expected
    assert played["return"].tolist() == [n * (n + 1) / 2 for n in expected]
    assert "success" not in played
    recall = gym.make_vec("worldmodels/Recall-v0", num_envs=8, delay=1)
    played = play(ppo(recall).policy, VectorEnvAdapter(recall), 20)
    assert (
        (played["success"] == played["return"]).all() and (played["length"] == 3).all() and len(played["success"]) == 20
    )


def test_statistics_over_seeds_by_hand():
    assert interquartile_mean(np.array([0.0, 1.0, 2.0, 100.0])) == 1.5


MISSION = spaces.Dict({"image": spaces.Box(0, 255, (3, 40, 40), np.uint8), "mission": spaces.MultiDiscrete([9] * 4)})


def words_of(*rows):
    return nn.functional.one_hot(torch.tensor(rows), 9).float().flatten(1)


@pytest.mark.parametrize("instruction", ["film", "token"])
def test_babyai_features(instruction):
    extractor = BabyAIFeatures(MISSION, 16, channels=8, words=6, instruction=instruction)
    image = torch.rand(3, 3, 40, 40)
    mission = words_of([1, 2, 0, 0], [1, 2, 0, 0], [1, 3, 0, 0])
    given = {"image": image[[0, 0, 0]], "mission": mission}
    features = extractor(given)
    assert features.shape == (3, extractor.features_dim) and extractor.token_shape == (1 + (instruction == "token"), 16)
    assert torch.allclose(features[0], features[1])
    with torch.no_grad():  # nothing after the last word is read
        longer = words_of([1, 2, 5, 0])
        assert not torch.allclose(extractor._read(mission[:1]), extractor._read(longer))
        hidden = extractor.reader.initial_state(1)["hidden"]
        plain = nn.GRUCell(6, 6)
        plain.weight_ih, plain.bias_ih = extractor.reader.input_weight, extractor.reader.input_bias
        plain.weight_hh, plain.bias_hh = extractor.reader.hidden_weight, extractor.reader.hidden_bias
        for word in (1, 2):
            hidden = plain(extractor.embedding.weight[:, word][None], hidden)
        assert torch.allclose(extractor._read(mission[:1]), hidden, atol=1e-6)
    tokens = features.unflatten(1, extractor.token_shape)
    if instruction == "token":
        assert torch.allclose(tokens[0, 0], tokens[2, 0]) and not torch.allclose(tokens[0, 1], tokens[2, 1])
    else:
        assert not torch.allclose(tokens[0], tokens[2])


def test_features_in_plain_sb3():
    maze = {"env_id": "BabyAI-GoToLocal-v0", "mission_length": 20}
    env = make_vec_env("worldmodels/MiniGrid-v0", 1, env_kwargs=maze)
    options = {"features_extractor_class": BabyAIFeatures, "features_extractor_kwargs": {"channels": 8, "words": 8}}
    PPO("MultiInputPolicy", env, n_steps=8, batch_size=8, n_epochs=1, policy_kwargs=options, device="cpu").learn(8)
    env = make_vec_env("worldmodels/BlockPhysics-v0", 1)
    options = {"features_extractor_class": SlotFeatures, "features_extractor_kwargs": {"options": {"hidden_size": 32}}}
    PPO("CnnPolicy", env, n_steps=8, batch_size=8, n_epochs=1, policy_kwargs=options, device="cpu").learn(8)


def test_slots_of_a_trained_world_model(tmp_path, capsys):
    words = ("experiment=block_physics", "core=gnn", "size=smoke", "trainer.threads=1", "logger.progress=false")
    run = worldmodels.train(*words, f"run={tmp_path / 'model'}", f"data.dir={tmp_path / 'data'}")
    more = ("experiment=block_physics", "core=gru", "core.num_slots=1", "core.slot_size=8", "encoder.frozen=true")
    agent = trained(tmp_path / "agent", *more, f"encoder.run={tmp_path / 'model'}")
    envs = make_envs("worldmodels/BlockPhysics-v0", 3, {"goal": True}, "cpu")
    seen = envs.start()
    with torch.no_grad():
        slots = run.model.encode(seen["image"].movedim(1, -1))
        goals = run.model.encode(seen["goal"].movedim(1, -1))
        features = agent.model.policy.extract_features(seen)
    order = list(envs.observation_space.spaces)
    expected = torch.cat([{"image": slots, "goal": goals}[name] for name in order], -1)
    assert torch.allclose(features.unflatten(1, (5, 8)), expected, atol=1e-6)
    other = ["train-agent", *SMOKE, f"run={tmp_path / 'other'}", "env.id=ALE/Pong-v5"]
    assert main([*other, f"encoder.run={tmp_path / 'model'}"]) == 2
    assert "takes (50, 50, 3), the environment shows (84, 84, 4)" in capsys.readouterr().err


def test_atari_learns_and_plays(tmp_path):
    trained(tmp_path / "pong", "experiment=atari_ppo", "core=gru", "core.num_slots=1", "core.slot_size=8")
    result = json.loads((tmp_path / "pong" / "evaluation.json").read_text())
    assert result["variants"]["as trained"]["episodes"] == 2


def test_weights_known_by_two_names_are_saved_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = self.a

    first, second = Tied(), Tied()
    checkpoints.save(tmp_path, 1, first, {})
    checkpoints.load_weights(checkpoints.folder(tmp_path, 1), second)
    assert torch.equal(first.b.weight, second.a.weight)
    with pytest.raises(UserError, match="made by another model"):
        checkpoints.load_weights(checkpoints.folder(tmp_path, 1), nn.Linear(3, 3))
