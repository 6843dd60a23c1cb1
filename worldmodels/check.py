"""The contracts a plug-in must keep: the checks behind ``worldmodels check`` and our own tests."""

import copy
import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.utils.env_checker import check_env as gymnasium_check
from gymnasium.vector import AutoresetMode
from torch import Tensor

from .core import RecurrentCore, RuleCore, SpatialCore, State, Tokens, unroll
from .data.environments import VIEWS, action_spec, find_spec, left_out, make_envs, refuse_not_finite
from .errors import UserError, first_line

_STEPS = 12
_LONG = 1000  # steps in which an episode of random actions should end


_FAULTS = re.compile("not within the observation space|default seed argument|reward is|greater than a high value")
"""Which of the warnings of Gymnasium's checker are of what breaks training or data here; the others are advice."""


class Findings(NamedTuple):
    """What a check found, one line each.

    Args:
        mend: what breaks something here.
        advice: what Gymnasium recommends, and what could not be checked.
    """

    mend: list[str]
    advice: list[str]


def check_env(env_id: str) -> Findings:
    """Check an environment: Gymnasium's checker, seeding, and the autoreset and step limit of its vector form.

    Args:
        env_id: any Gymnasium id, also ``package:Id-v0``.

    Returns:
        What to mend, and advice; both empty if all is well.

    Raises:
        UserError: no such environment.
    """
    spec = find_spec(env_id)
    problems: list[str] = []
    advice: list[str] = []
    with (
        _collected(problems, "it cannot be made or fails Gymnasium's checker"),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        env = gym.make(spec.id)
        gymnasium_check(env.unwrapped, skip_render_check=True)
        env.close()
    failed = bool(problems)
    for line in dict.fromkeys(re.sub(r"\x1b\[\d*m", "", str(warning.message)).splitlines()[0] for warning in said):
        if line.startswith("WARN: ") and "infinity" not in line:  # an unbounded Box is allowed, and common
            (problems if _FAULTS.search(line) else advice).append(f"Gymnasium's checker: {line.removeprefix('WARN: ')}")
    if failed:
        return Findings(problems, advice)
    with _collected(problems, "it cannot be learned from"):
        problems += _unknown_spaces(spec.id, advice)
    with _collected(problems, "seeding"):
        first, second = _trace(spec.id, 7), _trace(spec.id, 7)
        if not all(_same(a, b) for a, b in zip(first, second, strict=True)):
            problems.append("two resets with one seed and the same actions differ; draw only from self.np_random")
    kind = "vector_entry_point" if spec.vector_entry_point is not None else "sync"
    with _collected(problems, "autoreset"):
        try:
            problems += _check_autoreset(spec, kind)
        except TypeError as error:
            if kind == "sync" or "max_episode_steps" not in str(error):
                raise
            advice.append("its own vector form takes no max_episode_steps; how that ends episodes was not checked")
            problems += _check_autoreset(spec, "sync")
    return Findings(problems, advice)


@contextmanager
def _collected(problems: list[str], what: str) -> Iterator[None]:
    """Turn what a plug-in's code raises into a line."""
    try:
        yield
    except Exception as error:  # a plug-in may raise anything; every kind is a finding
        problems.append(f"{what}: {type(error).__name__}: {first_line(error)}")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return np.array_equal(a, b)


def _unknown_spaces(env_id: str, advice: list[str]) -> list[str]:
    """What of its observations and actions training would refuse; what it would leave out goes to the advice."""
    problems = []
    envs = make_envs(env_id, 1)
    space = envs.single_observation_space
    if not isinstance(space, gym.spaces.Box) and not (isinstance(space, gym.spaces.Dict) and set(VIEWS) <= set(space)):
        problems.append(f"it observes {space}; wrap it so that it observes a picture or a vector (gym.spaces.Box)")
    elif 0 in (space.shape or ()):
        problems.append(f"it observes {space}, which is empty")
    try:
        action_spec(envs.single_action_space)
    except UserError as error:
        problems.append(str(error))
    dropped = left_out(envs)
    if dropped:
        advice.append(f"training sees the image it observes, not {', '.join(dropped)}; a world model is not told these")
    spec, inside = find_spec(env_id), getattr(envs, "envs", [envs])[0].unwrapped
    limited = (
        spec.max_episode_steps or getattr(inside, "max_steps", None) or "max_num_frames_per_episode" in spec.kwargs
    )
    if not limited and not _ends(envs):
        advice.append(
            f"it sets its episodes no limit, and in {_LONG:,} random steps none ended: collect and train need steps=, and "
            "evaluations of agents cut them; register it with max_episode_steps="
        )
    envs.close()
    return problems


def _ends(envs: Any) -> bool:
    """Whether an episode ends by itself."""
    envs.action_space.seed(0)
    envs.reset(seed=0)
    steps = (envs.step(envs.action_space.sample()) for _ in range(_LONG))
    return any(bool((np.asarray(terminated) | np.asarray(truncated)).any()) for _, _, terminated, truncated, _ in steps)


def _trace(env_id: str, seed: int) -> list[Any]:
    env = gym.make(env_id)
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    trace = [observation]
    for _ in range(_STEPS):
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        refuse_not_finite(env_id, f"in step {len(trace)}", {"rewards": np.asarray(reward, dtype=float)})
        trace += [observation, reward, terminated]
        if terminated or truncated:
            trace.append(env.reset()[0])
    env.close()
    return trace


def _check_autoreset(spec: Any, kind: str) -> list[str]:
    """A vector form ends episodes at the limit and starts new ones as its metadata say."""
    limit = 3
    envs = gym.make_vec(spec.id, num_envs=2, vectorization_mode=kind, max_episode_steps=limit)
    try:
        mode = envs.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            return [f"its vector form declares autoreset_mode {mode!r}; metadata must hold an AutoresetMode"]
        envs.action_space.seed(0)
        envs.reset(seed=0)
        for step in range(1, limit + 1):
            *_, terminated, truncated, info = envs.step(envs.action_space.sample())
            ended = np.asarray(terminated) | np.asarray(truncated)
            if ended.any() and step < limit:
                return []  # it ends by itself before the limit: nothing to see here
        if not np.asarray(truncated).all():
            return [f"max_episode_steps={limit} does not truncate its vector form at step {limit}"]
        if mode == AutoresetMode.SAME_STEP and "final_obs" not in info:
            return ["it declares SAME_STEP but gives no info['final_obs'] when an episode ends"]
        if mode == AutoresetMode.NEXT_STEP:
            _, rewards, terminated, truncated, _ = envs.step(envs.action_space.sample())
            if np.asarray(terminated).any() or np.asarray(truncated).any() or np.asarray(rewards).any():
                return ["it declares NEXT_STEP, but the step after an episode's end is not an empty first step"]
    finally:
        envs.close()
    return []


def check_core(factory: Callable[..., RecurrentCore]) -> list[str]:
    """Run the contract of cores on ``factory(token_size, num_slots, slot_size)``.

    Returns:
        What to mend, one line each; empty if all is well.
    """
    problems: list[str] = []
    for name, contract in CONTRACT.items():
        with _collected(problems, name):
            torch.manual_seed(0)
            contract(factory)
    return problems


OBSERVATIONS = ((64, 64, 3), (210, 160, 3), (6,))
"""Shapes an encoder is tried with: pictures (H, W, C) of two sizes, and a vector."""


def check_encoder(factory: Callable[..., Any]) -> Findings:
    """Check an encoder, ``factory(observation_shape, num_slots, slot_size)``, with each of ``OBSERVATIONS`` it takes.

    Returns:
        What to mend; as advice, which observations it refuses. It need take only one kind.
    """
    problems: list[str] = []
    advice: list[str] = []
    refusals = []
    for shape in OBSERVATIONS:
        try:
            torch.manual_seed(0)
            encoder = factory(shape, K, D)
        except Exception as error:  # a plug-in may raise anything
            refusals.append(f"observations {shape}: {type(error).__name__}: {first_line(error)}")
            continue
        with _collected(problems, f"observations {shape}"):
            _check_encoding(encoder, shape)
    (problems if len(refusals) == len(OBSERVATIONS) else advice).extend(f"it refuses {line}" for line in refusals)
    return Findings(problems, advice)


def _check_encoding(encoder: Any, shape: tuple[int, ...]) -> None:
    """What training asks of an encoder of observations of a shape."""
    _require(isinstance(encoder, torch.nn.Module), "it is not an nn.Module")
    for name, expected in (("observation_shape", shape), ("num_slots", K), ("slot_size", D)):
        _require(hasattr(encoder, name), f"it lacks the attribute {name}; set self.{name} in its constructor")
        found = getattr(encoder, name)
        _require(found == expected or tuple(np.atleast_1d(found)) == expected, f"its {name} is {found}, not {expected}")
    picture = len(shape) == 3
    seen = torch.randint(0, 256, (B, *shape), dtype=torch.uint8) if picture else torch.randn(B, *shape)
    before = seen.clone()
    slots = encoder.train()(seen)
    _require(tuple(slots.shape) == (B, K, D), f"its slots are {tuple(slots.shape)}, expected {(B, K, D)}")
    (slots * torch.randn_like(slots)).sum().backward()
    dead = [name for name, p in encoder.named_parameters() if p.requires_grad and p.grad is None]
    _require(not dead, f"no gradient reaches {', '.join(dead)}")
    _require(torch.equal(seen, before), "it writes into the observations it is given")
    encoder.eval()
    together, alone = encoder(seen), encoder(seen[2:3])
    _close(together[2:3], alone, "in evaluation a row's slots depend on the other rows of the batch", 1e-4)
    _require(torch.equal(together, encoder(seen)), "two evaluations of the same observations differ")
    meta = encoder.to("meta")(seen.to("meta"))
    _require(meta.device.type == "meta", f"moved to another device it returns slots on {meta.device}")


T, B, K, D, F = 6, 4, 3, 8, 13


def _example(factory: Callable[..., Any], *, time: int = T, batch: int = B) -> tuple[Any, Tokens]:
    core = factory(F, K, D).eval()
    return core, Tokens(torch.randn(time, batch, K, F), torch.randn(time, batch, K, 2))


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UserError(otherwise)


def _close(a: Tensor, b: Tensor, otherwise: str, tolerance: float = 1e-5) -> None:
    worst = float((a - b).detach().abs().max())
    _require(worst <= tolerance, f"{otherwise} (largest difference {worst:.2g})")


def _protocol(factory: Callable[..., Any]) -> None:
    core, _ = _example(factory)
    _require(isinstance(core, RecurrentCore), "it lacks a member of worldmodels.core.RecurrentCore")
    _require(isinstance(core, torch.nn.Module), "it is not an nn.Module")
    sizes = (core.token_size, core.num_slots, core.slot_size)
    _require(sizes == (F, K, D), f"built with sizes {(F, K, D)} it says {sizes}")


def _shapes(factory: Callable[..., Any]) -> None:
    for batch in (1, B):
        core, tokens = _example(factory, batch=batch)
        state = core.initial_state(batch)
        _require(isinstance(state, dict), "initial_state must return a dict of tensors")
        _require(all(len(leaf) == batch for leaf in state.values()), "every leaf of the state must begin with axis B")
        slots, last = unroll(core, tokens, state)
        _require(tuple(slots.shape) == (T, batch, K, D), f"slots are {tuple(slots.shape)}, expected {(T, batch, K, D)}")
        same = {name: leaf.shape for name, leaf in state.items()} == {name: leaf.shape for name, leaf in last.items()}
        _require(same, "the state changes its leaves or shapes in a step")
        explained = core.explain(core.prepare(tokens).at(0), state)
        _require(all(len(v) == batch for v in explained.values()), "every entry of explain must begin with axis B")


def _chunks(factory: Callable[..., Any]) -> None:
    core, tokens = _example(factory)
    whole, last = unroll(core, tokens, core.initial_state(B))
    state, parts = core.initial_state(B), []
    for piece in (slice(0, 2), slice(2, T)):
        slots, state = unroll(core, tokens.at(piece), state)
        parts.append(slots)
    _close(torch.cat(parts), whole, "a sequence in two chunks is not the sequence as a whole")
    for name in last:
        _close(state[name], last[name], f"state {name!r} of two chunks is not that of the whole")


def _resets(factory: Callable[..., Any]) -> None:
    core, tokens = _example(factory)
    starts = torch.zeros(T, B, dtype=torch.bool)
    starts[3, 1] = True
    slots, _ = unroll(core, tokens, core.initial_state(B), starts)
    fresh, _ = unroll(core, tokens.at(slice(3, None)), core.initial_state(B))
    through, _ = unroll(core, tokens, core.initial_state(B))
    _close(slots[3:, 1], fresh[:, 1], "a row reset in mid-sequence is not like one that starts there")
    _close(slots[:, 0], through[:, 0], "resetting one row changes another")


def _rows(factory: Callable[..., Any]) -> None:
    core, tokens = _example(factory)
    together, _ = unroll(core, tokens, core.initial_state(B))
    alone, _ = unroll(core, tokens.at((slice(None), slice(2, 3))), core.initial_state(1))
    _close(together[:, 2:3], alone, "a row's slots depend on the other rows of the batch")


def _gradients(factory: Callable[..., Any]) -> None:
    core = factory(F, K, D).train()
    tokens = Tokens(torch.randn(8, 64, K, F), torch.randn(8, 64, K, 2))
    slots, _ = unroll(core, tokens, core.initial_state(64))
    (slots * torch.randn_like(slots)).sum().backward()
    dead = [name for name, p in core.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    _require(not dead, f"no gradient reaches {', '.join(dead)}")


def _deterministic(factory: Callable[..., Any]) -> None:
    core, tokens = _example(factory)
    first, _ = unroll(core, tokens, core.initial_state(B))
    second, _ = unroll(core, tokens, core.initial_state(B))
    _require(
        torch.equal(first, second), "two evaluations of the same input differ; leave noise and dropout to training"
    )


def _copies(factory: Callable[..., Any]) -> None:
    core, tokens = _example(factory)
    expected, _ = unroll(core, tokens, core.initial_state(B))
    buffer = io.BytesIO()
    torch.save(core.state_dict(), buffer)
    buffer.seek(0)
    other = factory(F, K, D).eval()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for name, twin in (("state_dict", other), ("deepcopy", copy.deepcopy(core))):
        _close(unroll(twin, tokens, twin.initial_state(B))[0], expected, f"it does not survive {name}")


def _float64(factory: Callable[..., Any]) -> None:
    core, tokens = _example(factory)
    core = core.double()
    tokens = Tokens(tokens.features.double(), None if tokens.positions is None else tokens.positions.double())
    slots, state = unroll(core, tokens, core.initial_state(B))
    kinds = {slots.dtype} | {leaf.dtype for leaf in state.values() if leaf.is_floating_point()}
    _require(kinds == {torch.float64}, f"in float64 it returns {sorted(map(str, kinds))}")


def _devices(factory: Callable[..., Any]) -> None:
    core, tokens = _example(factory)
    core = core.to("meta")  # a device without data: what stays behind on the CPU meets it and raises
    tokens = Tokens(tokens.features.to("meta"), None if tokens.positions is None else tokens.positions.to("meta"))
    slots, state = unroll(core, tokens, core.initial_state(B))
    places = {slots.device.type} | {leaf.device.type for leaf in state.values()}
    _require(places == {"meta"}, f"moved to another device it returns tensors on {sorted(places)}")


def _capabilities(factory: Callable[..., Any]) -> None:
    core, tokens = _example(factory)
    said, state, given = core.capabilities, core.initial_state(B), torch.randn(B, K, D)
    _require(said.memory == bool(state), f"its capabilities say memory={said.memory}, its state is {sorted(state)}")
    from_slots = core.initial_state(B, given)
    depends = any(not torch.equal(state[name], leaf) for name, leaf in from_slots.items())
    _require(
        said.starts_from_slots == depends,
        f"its capabilities say starts_from_slots={said.starts_from_slots}, but given slots "
        f"{'change' if depends else 'do not change'} its initial state",
    )
    prepared = core.prepare(tokens).at(0)
    rules = "rule" in core.explain(prepared, state) and isinstance(core, RuleCore)
    _require(
        rules or not said.rules, "its capabilities say rules=True; then it is a RuleCore, whose explain names a rule"
    )
    answers = isinstance(core, SpatialCore)
    _require(said.places == answers, f"its capabilities say places={said.places}; a core with places is a SpatialCore")


def _slots(factory: Callable[..., Any]) -> None:
    core, tokens = _example(factory)
    plain, given = core.initial_state(B), core.initial_state(B, torch.randn(B, K, D))
    same = {name: leaf.shape for name, leaf in plain.items()} == {name: leaf.shape for name, leaf in given.items()}
    _require(same, "initial_state from given slots has other leaves or shapes than without")
    unroll(core, tokens, given)


def _values(factory: Callable[..., Any]) -> None:
    core, tokens = _example(factory)
    state: State = core.initial_state(B)
    before = {name: leaf.clone() for name, leaf in state.items()}
    features = tokens.features.clone()
    prepared = core.prepare(tokens)
    core(prepared.at(0), state)
    same = all(torch.equal(before[name], leaf) for name, leaf in state.items()) and torch.equal(
        features, tokens.features
    )
    _require(same, "a step writes into the state or the tokens it was given; return new ones")


def _mixed(factory: Callable[..., Any]) -> None:
    core, tokens = _example(factory)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        slots, _ = unroll(core, tokens, core.initial_state(B, torch.randn(B, K, D)))
    slots.float().sum().backward()
    _require(bool(torch.isfinite(slots).all()), "under mixed precision (bfloat16) its slots are not finite")


def _outcome(core: Any, tokens: Tokens, mask: Tensor, whatever: float) -> dict[str, Tensor]:
    """Slots, last state and gradients where absent tokens hold whatever."""
    assert tokens.positions is not None
    features, positions = (torch.where(mask[..., None], part, whatever) for part in (tokens.features, tokens.positions))
    torch.manual_seed(1)
    slots, last = unroll(core, Tokens(features.requires_grad_(), positions, mask), core.initial_state(B))
    given = {"tokens": features} | dict(core.named_parameters())
    grads = torch.autograd.grad(slots.square().mean(), list(given.values()), allow_unused=True, materialize_grads=True)
    found = {"the output is": slots} | {f"state {name!r} is": leaf.float() for name, leaf in last.items()}
    return found | {f"the gradient of {name} is": grad for name, grad in zip(given, grads, strict=True)}


def _absent(factory: Callable[..., Any]) -> None:
    core, tokens = _example(factory)
    mask = torch.rand(T, B, K) < 0.6
    mask[2, 1] = False  # a step at which nothing is there
    for training in (False, True):
        core.train(training)
        one, other = (_outcome(core, tokens, mask, whatever) for whatever in (1.0, float("nan")))
        for name, value in one.items():
            _close(value, other[name], f"{name} another when absent tokens hold NaN; make them zeros (core.present)")


CONTRACT: dict[str, Callable[[Callable[..., Any]], None]] = {
    "protocol": _protocol,
    "shapes": _shapes,
    "chunked equals whole": _chunks,
    "reset equals fresh start": _resets,
    "rows are independent": _rows,
    "every parameter gets gradient": _gradients,
    "evaluation is deterministic": _deterministic,
    "survives state_dict and deepcopy": _copies,
    "works in float64": _float64,
    "works in mixed precision": _mixed,
    "capabilities are as said": _capabilities,
    "state is a value": _values,
    "follows its device": _devices,
    "can start from slots": _slots,
    "absent tokens may hold anything": _absent,
}
"""The contract of cores, one function each, called with a factory ``(token_size, num_slots, slot_size) -> core``."""
