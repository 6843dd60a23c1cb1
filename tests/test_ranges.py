"""Values out of their range are refused in one line, before anything is written."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodels.agents import RecurrentPPO
from worldmodels.agents.run import AgentConfig
from worldmodels.cli import main
from worldmodels.config import TrainConfig
from worldmodels.errors import UserError
from worldmodels.losses import contrastive
from worldmodels.ranges import AT_LEAST_ONE, POSITIVE, SHARE, Range, check_ranges, check_types
from worldmodels.training import TrainerSettings

SMOKE = ["experiment=block_physics", "size=smoke", "core=gnn", "logger.figures=false", "logger.progress=false"]
AGENT = ["experiment=memory", "size=smoke", "core=gru", "logger.figures=false", "logger.progress=false"]


def options(
    a: Annotated[int, AT_LEAST_ONE] = 1,
    b: Annotated[float | None, SHARE] = None,
    c: Annotated[list[int], Range(2, 4)] = (2,),
    d: float = 1.0,
):
    """Nothing."""


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"a": 0}, "x.a=0; expected a whole number of at least 1"),
        ({"a": True}, "x.a=True; expected a whole number of at least 1"),
        ({"a": 1.5}, "x.a=1.5; expected a whole number of at least 1"),
        ({"a": None}, "x.a=None; expected a whole number of at least 1"),
        ({"b": math.nan}, "x.b=nan; expected a number of at least 0 and at most 1"),
        ({"b": "abc"}, "x.b=abc; expected a number of at least 0 and at most 1"),
        ({"c": [3, 5]}, r"x.c=\[3, 5\]; expected a whole number of at least 2 and at most 4"),
    ],
)
def test_one_line_says_what_was_received_and_what_is_expected(values, line):
    with pytest.raises(UserError, match=f"^{line}$"):
        check_ranges("x", options, values)


def test_what_is_within_passes():
    check_ranges("x", options, {"a": 1, "b": None, "c": [2, 4], "d": math.nan, "unknown": -1})
    check_ranges("", options, {"b": 0})
    assert 0 not in POSITIVE and 1e-9 in POSITIVE and math.inf not in POSITIVE and math.nan not in POSITIVE
    assert str(POSITIVE) == "above 0" and str(Range()) == "that is finite"


def annotated(target):
    """The type and the range of every option that has one."""
    hints = get_type_hints(
        getattr(target, "__init__", target) if target is RecurrentPPO else target, include_extras=True
    )
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Annotated}


@pytest.mark.parametrize("value", [2**40 + 1, -(2**70), 1e-31, -1e31, [1, [2, 2**41]]])
def test_numbers_beyond_all_measure_are_refused_anywhere(value):
    def made(width=1, temperature: float = 1.0): ...

    with pytest.raises(UserError, match="core.width=.*; expected (whole numbers of at most|numbers between)"):
        check_types("core", made, {"width": value})
    check_types("core", made, {"width": 2**40, "temperature": 1e-30})


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_value_is_within_its_range_or_refused(data):
    target = data.draw(st.sampled_from([TrainerSettings, contrastive, RecurrentPPO]))
    name, (kind, allowed) = data.draw(st.sampled_from(sorted(annotated(target).items(), key=str)))
    value = data.draw(st.one_of(st.integers(), st.floats(), st.none(), st.booleans(), st.text(max_size=5)))
    try:
        check_ranges("x", target, {name: value})
    except UserError as error:
        assert str(error).startswith(f"x.{name}=")
    else:
        fits = not isinstance(value, (bool, str)) and value is not None and value in allowed
        fits = fits and (value == 0 or 1e-30 <= abs(value) <= (2**40 if isinstance(value, int) else 1e30))
        assert fits or (value is None and ("None" in str(kind) or "Any" in str(kind)))


def refused(capsys, *words):
    """One line that names the last word's option, and no folder."""
    assert main([*words, "run=runs/x"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and words[-1].split("=")[0] in err, err
    assert not Path("runs/x").exists()


def numbers(target, prefix=""):
    """Dotted names of all numbers of a schema, and whether they have a range."""
    for name, hint in get_type_hints(target, include_extras=True).items():
        if hasattr(hint, "__dataclass_fields__"):
            yield from numbers(hint, f"{prefix}{name}.")
        elif get_origin(hint) is Annotated:
            yield prefix + name, True
        elif hint in (int, float, int | None, float | None):
            yield prefix + name, False


@pytest.mark.parametrize("schema", [TrainConfig, AgentConfig])
def test_every_number_of_a_config_has_a_range(schema):
    assert [name for name, ranged in numbers(schema) if not ranged] == []


@pytest.mark.parametrize(
    "word",
    [
        "trainer.clip_norm=-1",
        "trainer.steps=-1",
        "trainer.warmup_steps=-5",
        "trainer.learning_rate=1000",
        "trainer.learning_rate=nan",
        "trainer.threads=-1",
        "trainer.checkpoint_every=0",
        "objective.hinge=-1",
        "objective.hinge=abc",
        "objective.sigma=0",
        "evaluation.horizons=[1,1]",
        "evaluation.horizons=[]",
        "evaluation.horizons=[0]",
        "evaluation.burn_in=-1",
        "evaluation.limit=1",
        "seed=-1",
        "seed=100000000000000000000000",
        "env.resize=[0,0]",
        "data.num_envs=0",
        "data.train.seed=-1",
        "jobs=0",
    ],
)
def test_train_refuses_them_before_anything_is_written(word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(capsys, "train", *SMOKE, word)


@pytest.mark.parametrize(
    "word",
    [
        "ppo.max_grad_norm=-1",
        "ppo.gamma=2",
        "ppo.gamma=abc",
        "ppo.gae_lambda=2",
        "ppo.clip_range=-1",
        "ppo.vf_coef=-1",
        "ppo.target_kl=nan",
        "ppo.learning_rate=1000",
        "trainer.checkpoint_every=0",
        "trainer.log_every=0",
        "trainer.steps=0",
        "trainer.threads=-4",
        "evaluation.episodes=0",
        "env.num_envs=0",
        "seed=-1",
    ],
)
def test_train_agent_refuses_them_before_anything_is_written(word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(capsys, "train-agent", *AGENT, word)


def test_from_python_too():
    with pytest.raises(UserError, match="^gamma=2.0; expected a number of at least 0 and at most 1$"):
        RecurrentPPO("MlpPolicy", "CartPole-v1", core="gru", gamma=2.0)


class Typed:
    """What a constructor with options looks like."""

    def __init__(
        self,
        size: int,
        *,
        share: float = 0.5,
        until: int | None = None,
        whole: bool = False,
        names: Sequence[str] = (),
        table: Mapping[str, int] | None = None,
        odd: int = "by its default",  # type: ignore[assignment]
        any: Any = None,
    ):
        pass


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"share": 1}, None),
        ({"share": True}, "made.share=True; expected a number"),
        ({"share": float("inf")}, "made.share=inf; expected a number"),
        ({"size": 2.0}, "made.size=2.0; expected a whole number"),
        ({"until": None}, None),
        ({"until": " "}, "made.until=' '; expected a whole number or null"),
        ({"whole": 1}, "made.whole=1; expected true or false"),
        ({"names": ["a", "b"]}, None),
        ({"names": ["a", [1]]}, "expected a list, each text"),
        ({"names": "a"}, "expected a list, each text"),
        ({"table": [1]}, "made.table=[1]; expected a mapping or null"),
        ({"odd": "by its default"}, None),
        ({"any": object}, None),
        ({"unknown": object}, None),
    ],
    ids=str,
)
def test_types_are_checked(option, says):
    if says is None:
        check_types("made", Typed, option)
        return
    with pytest.raises(UserError) as caught:
        check_types("made", Typed, option)
    assert says in str(caught.value)
