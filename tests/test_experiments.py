"""Every experiment composes and builds with every core at every size, the papers' included (on a device without data)."""

import functools

import pytest
import torch
from gymnasium.spaces import Box, Dict
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from hydra_plugins import _worldmodels
from worldmodels.agents import run as agents
from worldmodels.config import CONFIGS, SIZES, TrainConfig, experiment, experiments, plain, register
from worldmodels.cores import CORES
from worldmodels.data.environments import action_spec, make_envs
from worldmodels.errors import UserError
from worldmodels.plugins import core_builder
from worldmodels.run import build_task
from worldmodels.tasks import views
from worldmodels.training import TrainerSettings, check_settings

AGENTS = CONFIGS / "agents"
WITHOUT_STATE = {"gnn", "snps", "pnps", "routing", "cin", "op3", "rules", "mlp"}
REFUSED = {  # which cores cannot do what an experiment asks
    **dict.fromkeys(("any", "block_physics", "shapes", "atari"), {"esbn"}),
    **dict.fromkeys(("adding", "gridworld", "relations", "babi"), WITHOUT_STATE),
    **dict.fromkeys(("video", "balls", "balls_masks", "sprites", "single_ball"), {"routing"}),
    **dict.fromkeys(("switching", "occluders"), WITHOUT_STATE),
    "cbt": set(CORES) - {"entnet"},
    **dict.fromkeys(("arithmetic", "mnist"), set(CORES) - {"snps", "pnps", "routing"}),
    "stacks": set(CORES) - WITHOUT_STATE | {"routing", "mlp"},
    **dict.fromkeys(("views", "balls_crops", "skirmish", "flatland"), WITHOUT_STATE - {"mlp"}),
}
NAMED = {"any": ["env.id=CartPole-v1", "encoder=vector"], "views": ["task.env_id=worldmodels/Skirmish-v0"]}
NAMED["video"] = ["env.id=worldmodels/Towers-v0", "+env.kwargs.observation=state"]
NAMED["cbt"] = ["task.data=books"]
NAMED["views"] += ["+task.env_kwargs.observation=units", "+task.env_kwargs.scenario=2m", "task.polar=true"]
ABOUT = {  # what a task without an environment says of its data
    "relations": {"num_symbols": 100},
    "babi": {"vocabulary": ["mary", "where"], "longest": [7, 7]},
    "cbt": {"vocabulary": ["alice", "said"]},
    **dict.fromkeys(("balls", "single_ball", "switching", "occluders"), {"frame_shape": [1, 64, 64]}),
    **dict.fromkeys(("video", "balls_masks", "sprites"), {"frame_shape": [3, 64, 64]}),
    "stacks": {"num_blocks": 3},
}


@pytest.fixture
def composed():
    """Composes an experiment, a core and a size as the command line does, in plain values."""
    GlobalHydra.instance().clear()
    _worldmodels.register()
    with initialize(config_path=None, version_base="1.3"):
        yield lambda *words: plain(compose("train", overrides=list(words)))


def merged(schema, name, core, size, *words):
    """The same by merging what was registered in the order of ``train.yaml``, a tenth of the time Hydra takes."""
    repo = ConfigStore.instance().repo

    def node(*at):
        found = repo
        for part in at[:-1]:
            found = found.get(part, {})
        entry = found.get(f"{at[-1]}.yaml")
        return OmegaConf.to_container(entry.node, resolve=False) if entry is not None else {}

    about = node("experiment", name)
    chosen = {}
    for entry in node("train")["defaults"]:
        if isinstance(entry, str) or len(entry) != 1:
            continue
        ((group, default),) = entry.items()
        if group in ("env", "encoder", "core", "task", "objective"):
            chosen[group] = default
    for entry in about.pop("defaults", []):
        ((group, default),) = entry.items()
        chosen[group.removeprefix("override /")] = default
    chosen["core"] = core
    own = [word for word in words if word.partition("=")[0] in chosen]
    chosen |= dict(word.split("=") for word in own)
    rest = [word.removeprefix("+") for word in words if word not in own]
    top = {key: value for key, value in node("train").items() if key not in ("defaults", "hydra", "label")}
    parts = [schema, top, *({group: node(group, choice)} for group, choice in chosen.items()), {"size": size}, about]
    parts += [node("sizes", name, size), node("options", name, core), node("options", name, f"{core}-{size}")]
    encoder = f"{chosen.get('encoder')}-{size}"
    parts += [node("encoding", name, encoder), node("encoding", name, f"{encoder}-{core}")]
    return plain(OmegaConf.merge(*parts, OmegaConf.from_dotlist(rest)))


@functools.cache
def seen(env_id):
    """What the models of an environment are built from; the railway, which is an extra, in numbers."""
    env = make_envs(env_id, 1)
    action = action_spec(env.single_action_space, env.metadata.get("actions_per_object"))
    env.close()
    return {"observation_shape": list(env.single_observation_space.shape), "action": action}


@functools.cache
def first_views(env_id, options, num_views):
    if env_id == "worldmodels/Flatland-v0":
        from worldmodels.data.views import Views

        cells = torch.zeros(1, 1, 4, 23, 5, 5)
        return Views(cells, torch.zeros(1, 1, 4, 2), torch.ones(1, 1, 4, dtype=torch.bool), cells[..., :5, :, :]), False
    return REAL_FIRST_VIEWS(env_id, dict(options), num_views)


REAL_FIRST_VIEWS = views.first_views


@pytest.fixture
def few_environments(monkeypatch):
    def known(env_id, kwargs, num_views):
        return first_views(env_id, tuple(sorted(kwargs.items())), num_views)

    monkeypatch.setattr(views, "first_views", known)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", experiments(CONFIGS))
def test_every_core_builds(composed, few_environments, name, size):
    register([name])
    built = set()
    for core in CORES:
        config = merged(TrainConfig, name, core, size, *NAMED.get(name, ()))
        if core == "scoff":
            assert config == composed(f"experiment={name}", f"core={core}", f"size={size}", *NAMED.get(name, ()))
        check_settings(TrainerSettings(**config["trainer"]))
        try:
            task = build_task(config)
            about = (seen(config["env"]["id"]) if "env" in task.sections else {}) | ABOUT.get(name, {})
            drawn = "env_id" in config["task"] or "stack" in config["task"]  # who looks at numbers while it is built
            with torch.device("cpu" if drawn else "meta"):
                model = task.model(core_builder(config["core"]), about)
        except UserError as error:
            assert core in REFUSED[name], f"{core}: {error}"
            continue
        assert core not in REFUSED[name] and sum(parameter.numel() for parameter in model.parameters()) > 0
        built.add(core)
    assert built == set(CORES) - REFUSED[name]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", experiments(AGENTS))
def test_every_agent_builds(composed, name, size):
    agents.register_agents([name])
    if name == "flatland":
        pytest.importorskip("flatland", reason="needs the extra 'flatland'")
    words = ["env.id=worldmodels/Recall-v0"] if name == "any" else []
    envs = None
    for core in CORES:
        config = merged(agents.AgentConfig, name, core, size, *words)
        if core == "scoff":
            asked = composed(f"experiment={name}", f"core={core}", f"size={size}", "label=", *words)
            assert config == asked
        if envs is None:  # two copies show what as many as the size has would
            envs = agents._configured(config, "cpu", 2)
        space = envs.observation_space
        assert isinstance(space, (Box, Dict))
        policy, kwargs = agents._policy(config, space)
        assert policy.endswith("Policy") and set(kwargs) <= {
            "net_arch",
            "features_extractor_class",
            "features_extractor_kwargs",
        }
        unknown = set(config["ppo"]) - set(agents.ppo_options())
        assert not unknown, unknown
        if size != "paper" or core in ("scoff", "gru"):  # weights of the papers' sizes take seconds to draw
            rollout = {"n_steps": 4, "batch_size": 8}
            model = agents.build_agent(config | {"ppo": config["ppo"] | rollout}, envs)
            assert sum(parameter.numel() for parameter in model.policy.parameters()) > 0
    envs.close()


def test_experiments_say_nothing_that_is_not_read():
    """Sizes and cores have the names that registration reads, and `like` names an experiment."""
    for folder in (CONFIGS, AGENTS):
        for name in experiments(folder):
            whole = experiment(folder, name)
            assert set(whole["sizes"]) == set(SIZES), name
            assert set(whole.get("cores", {})) <= set(CORES), name
            for core, by_size in whole.get("cores", {}).items():
                assert set(by_size) <= {"any", *SIZES}, (name, core)


def test_only_the_experiments_that_are_named_are_read(composed):
    register(["experiment=adding"])
    adding = composed("experiment=adding", "core=scoff", "size=cpu")
    assert (
        adding["core"]["num_schemata"] == 2 and adding["core"]["num_heads"] == 1 and adding["trainer"]["steps"] == 1200
    )
    register()
    assert composed("experiment=adding", "core=scoff", "size=cpu") == adding


def test_an_experiment_that_is_like_another_differs_in_what_it_says():
    skirmish, views_ = (experiment(CONFIGS, name) for name in ("skirmish", "views"))
    assert skirmish["sizes"]["smoke"] == views_["sizes"]["smoke"] and "like" not in skirmish
    assert skirmish["cores"]["rims"] == views_["cores"]["rims"]
    assert skirmish["cores"]["lstm"]["paper"] == {"core": {"slot_size": 2048}}
    assert skirmish["sizes"]["cpu"]["task"] == views_["sizes"]["cpu"]["task"] | {
        "train_episodes": 200,
        "test_episodes": 30,
        "scale": 0.5,
        "fractions": [1.0, 0.8, 0.6, 0.4, 0.2],
    }
