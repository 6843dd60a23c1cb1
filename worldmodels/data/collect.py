"""Collect episodes from any Gymnasium environment."""

import contextlib
import hashlib
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from filelock import FileLock, Timeout
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from ..errors import UserError
from .environments import (
    OUR_NAMESPACE,
    VIEWS,
    action_spec,
    faults_of,
    find_spec,
    left_out,
    make_envs,
    refuse_not_finite,
    resized,
)
from .episodes import MANIFEST, Episodes, EpisodesWriter
from .origin import origin

Policy = Callable[[Any, dict[str, Any]], Any]
"""Observations and infos of a batch in, actions of the batch out."""

_BUFFER_BYTES = 1 << 30
_MOMENT = 1.0  # seconds that pass before a wait is spoken of


def collect(
    env_id: str,
    path: str | Path,
    *,
    episodes: int,
    steps: int | None = None,
    seed: int = 0,
    num_envs: int | None = None,
    policy: Policy | None = None,
    drop_invalid: bool = False,
    resize: tuple[int, int] | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    device: str = "cpu",
    processes: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Episodes:
    """Record episodes of a random policy, or of a callable, into a folder.

    Every copy of the environment records an equal share of the episodes, so long episodes are not passed over for short
    ones. All three autoreset modes of Gymnasium's vector environments are understood.

    Args:
        env_id: any Gymnasium id.
        path: folder to write; it must not exist.
        episodes: how many.
        steps: transitions after which an episode is cut; None for the environment's own limit.
        seed: of the environment and of the random policy.
        num_envs: copies run side by side; None chooses.
        policy: observations and infos of the batch in, actions out; None for uniformly random actions.
        drop_invalid: leave out transitions whose info says "invalid", as the published block-pushing scripts do.
        resize: (height, width) to which pictures are brought, with antialiasing.
        env_kwargs: keyword arguments of the environment.
        device: where our own environments run.
        processes: run each copy of an environment that is not batched in a process of its own; the data are the same.
        progress: called with (episodes recorded, episodes wanted).

    Returns:
        The episodes, memory-mapped.

    Raises:
        UserError: unknown environment or option, no step limit, an observation space that is no single array.
    """
    if episodes < 1 or (steps is not None and steps < 1):
        raise UserError(f"episodes is {episodes} and steps {steps}; both must be at least 1")
    if seed < 0 or (resize is not None and (len(resize) != 2 or min(resize) < 1)):
        raise UserError(f"seed is {seed} and resize {resize}; seeds are not negative, resize is [height,width]")
    spec = find_spec(env_id)
    ours = spec.id.startswith(OUR_NAMESPACE) and spec.vector_entry_point is not None
    if num_envs is None:
        num_envs = min(episodes, 1024 if ours else 16)
    probe = make_envs(env_id, 1, env_kwargs=env_kwargs, device=device)
    space = probe.single_observation_space
    actions = action_spec(probe.single_action_space, probe.metadata.get("actions_per_object"))
    told: dict[str, Any] = {name: probe.metadata[name] for name in ("objects", "recipe") if name in probe.metadata}
    names = told.get("objects", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(
            f'{env_id} says metadata["objects"]={names!r}; expected a list with the name of each coordinate'
        )
    limit = steps if steps is not None else _own_limit(probe, spec)
    dropped = left_out(probe)
    with faults_of(env_id, "when it was closed"):
        probe.close()
    if dropped:
        print(
            f"worldmodels: of what {env_id} observes the image is recorded, not {', '.join(dropped)}", file=sys.stderr
        )
    # Dropped transitions count for the environment's clock, not for ours.
    own_limit = limit + math.ceil(0.1 * limit) + 5 if drop_invalid else limit
    if isinstance(space, gym.spaces.Dict):
        space = next((space[name] for name in ("image", "views") if name in space.spaces), space)
    if not isinstance(space, (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        raise UserError(f"{env_id} observes {space}; expected a picture, a vector, or a Dict with one of them")
    if 0 in (space.shape or ()):
        raise UserError(f"{env_id} observes {space}, which holds no numbers; expected one at least")
    row_bytes = math.prod(space.shape or ()) * np.dtype(space.dtype).itemsize
    num_envs = max(1, min(num_envs, _BUFFER_BYTES // max(1, row_bytes * (limit + 1))))
    envs = make_envs(
        env_id, num_envs, env_kwargs=env_kwargs, max_episode_steps=own_limit, device=device, processes=processes
    )
    about: dict[str, Any] = {
        "env_id": env_id,
        "env_kwargs": dict(env_kwargs or {}),
        "seed": seed,
        "episodes": episodes,
        "steps": steps,
        "drop_invalid": drop_invalid,
        "resize": list(resize) if resize else None,
        "action": actions,
        "policy": "random" if policy is None else f"{policy.__module__}:{getattr(policy, '__qualname__', policy)}",
        **told,
    }
    try:
        with EpisodesWriter(path, about) as writer:
            _record(env_id, envs, writer, episodes, limit, seed, policy, drop_invalid, resize, progress)
    finally:
        with contextlib.suppress(Exception):  # what an environment raises that failed before
            envs.close()
    return Episodes.load(path, verify=False)


def collected(
    folder: str | Path | Sequence[str | Path],
    label: str,
    settings: Mapping[str, Any],
    *,
    fresh: bool = False,
    again: str | None = None,
    **more: Any,
) -> Episodes:
    """The episodes that ``collect`` makes with these settings: opened if they lie in a folder already, else collected.

    They are found by the settings and by what the environment is, see ``origin``: after a change of its code they are
    collected anew. Of several processes that ask for the same at once, one collects and the others wait for it; should it
    fail, the next one collects.

    Args:
        folder: where data are kept; what a data set is called there depends on the settings. Of several all are looked in,
            and what is collected goes into the first.
        label: part of that name, for people.
        settings: keyword arguments of ``collect`` that say what is recorded; JSON, but for a policy.
        fresh: collect in any case, and put that in the place of what is there.
        again: the words with which a user has them collected anew, told beside where the data are that were found.
        more: those that do not, like ``progress``.

    Raises:
        UserError: see ``collect`` and ``Episodes.load``.
    """
    policy = settings.get("policy")
    said = {**settings, "policy": f"{policy.__module__}:{policy.__qualname__}"} if policy else dict(settings)
    said["origin"] = origin(find_spec(settings["env_id"]), *([policy] if policy else []))
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:10]
    name = re.sub(r"[^A-Za-z0-9]+", "-", settings["env_id"]).strip("-")
    folders = [folder] if isinstance(folder, (str, Path)) else folder
    if not folders:
        raise UserError("no folder was named in which data are kept; name one, like data")
    places = [Path(one) / f"{name}-{label}-{digest}" for one in folders]
    path = next((place for place in places if place.exists()), places[0])
    if path.exists() and not fresh:
        return _found(path, label, again)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(f".{path.name}.lock")
    lock = FileLock(file)
    try:
        lock.acquire(timeout=_MOMENT)
    except Timeout:
        print(f"worldmodels: waiting for another process that collects {path}", file=sys.stderr)
        lock.acquire()
    try:
        if path.exists() and not fresh:
            return _found(path, label, again)
        if not path.exists():
            return collect(**settings, path=path, **more)
        aside = path.with_name(f"{path.name}-fresh")
        shutil.rmtree(aside, ignore_errors=True)
        collect(**settings, path=aside, **more)
        shutil.rmtree(path)
        aside.rename(path)
        return Episodes.load(path, verify=False)
    finally:
        with contextlib.suppress(OSError):  # a lock that was removed lets in whoever waits for it
            file.unlink()
        lock.release()


def _found(path: Path, label: str, again: str | None) -> Episodes:
    episodes = Episodes.load(path)
    if again is not None:
        when = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime)
        print(f"{label} data: {path}, recorded {when:%Y-%m-%d %H:%M}; {again} records all anew")
    return episodes


def _own_limit(envs: VectorEnv[Any, Any, Any], spec: Any) -> int:
    """The step limit of an environment: Gymnasium's, or MiniGrid's own ``max_steps``."""
    inside = envs.envs[0].unwrapped if isinstance(envs, gym.vector.SyncVectorEnv) else envs
    limit = spec.max_episode_steps or getattr(inside, "max_steps", None)
    if limit is None:
        raise UserError(f"{spec.id} has no step limit of its own; say how long an episode may be with steps=")
    return int(limit)


def _record(
    env_id: str,
    envs: VectorEnv[Any, Any, Any],
    writer: EpisodesWriter,
    episodes: int,
    limit: int,
    seed: int,
    policy: Policy | None,
    drop_invalid: bool,
    resize: tuple[int, int] | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    B = envs.num_envs
    mode = envs.metadata["autoreset_mode"]
    envs.action_space.seed(seed)
    quota = np.full(B, episodes // B) + (np.arange(B) < episodes % B)
    ours = not isinstance(envs, (gym.vector.SyncVectorEnv, gym.vector.AsyncVectorEnv))
    # Gymnasium gives copy b the seed + b, so that data sets of neighbouring seeds would share their episodes.
    seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(B)]
    with faults_of(env_id, "in its first reset"):
        raw, info = envs.reset(seed=seed) if ours else envs.reset(seed=seeds)  # type: ignore[arg-type]
    buffers, step, info = _Buffers(B, limit, resize), 0, _named(info)
    buffers.begin(np.ones(B, dtype=bool), raw, info)
    fresh = np.zeros(B, dtype=bool)  # NEXT_STEP: this step only starts the next episode
    while quota.any():
        actions = envs.action_space.sample() if policy is None else policy(raw, info)
        if mode == AutoresetMode.DISABLED and fresh.any():
            with faults_of(env_id, f"in a reset after step {step}"):
                raw, info = envs.reset(options={"reset_mask": fresh})
            info = _named(info)
            buffers.begin(fresh, raw, info)
            fresh = np.zeros(B, dtype=bool)
            continue
        step += 1
        with faults_of(env_id, f"in step {step}"):
            raw, rewards, terminated, truncated, info = envs.step(actions)
        info = _named(info)
        told = {"rewards": rewards, "terminated": terminated, "truncated": truncated}
        for name, value in told.items():
            if _numpy(value).shape != (B,):
                raise UserError(
                    f"environment {env_id}: {name} in step {step} have the shape {_numpy(value).shape}; expected {(B,)}"
                )
        terminated, truncated = _numpy(terminated).astype(bool), _numpy(truncated).astype(bool)
        done = terminated | truncated
        if mode == AutoresetMode.SAME_STEP and done.any():
            arrived, arrived_info = _final(raw, info, done)
        else:
            arrived, arrived_info = raw, info
        kept = ~fresh
        if drop_invalid:
            if "invalid" not in info:
                raise UserError("drop_invalid was asked for, but this environment's info has no 'invalid'")
            kept &= ~_numpy(info["invalid"]).astype(bool)
        kept &= (buffers.length < limit) & (quota > 0)
        if mode == AutoresetMode.NEXT_STEP and fresh.any():
            buffers.begin(fresh, raw, info)
        cut = kept & (buffers.length + 1 >= limit) & ~terminated
        buffers.add(kept, arrived, arrived_info, actions, rewards, terminated, truncated | cut)
        ended = (done | (buffers.length >= limit)) & ~fresh & ~buffers.written
        for b in np.flatnonzero(ended & (quota > 0)).tolist():
            if buffers.length[b] > 0:
                episode = buffers.episode(b)
                told = {name: value for name, value in episode.items() if not name.startswith("info/")}
                refuse_not_finite(env_id, f"in the {buffers.length[b]} steps before step {step}", told)
                writer.append(episode)
                quota[b] -= 1
                if progress is not None:
                    progress(len(writer.lengths), episodes)
        buffers.written |= ended
        if mode == AutoresetMode.SAME_STEP:
            buffers.begin(done, raw, info)
        else:
            fresh = done


def _named(info: dict[Any, Any]) -> dict[str, Any]:
    """What an environment tells under a name; other keys have no place in a data set."""
    return {key: value for key, value in info.items() if isinstance(key, str)}


def _final(raw: Any, info: dict[str, Any], done: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """SAME_STEP: the arrays and info of the step itself, where ``raw`` already shows the next episode."""
    final = {name: np.array(value) for name, value in _arrays(raw).items()}
    for b in np.flatnonzero(done):
        for name, value in _arrays(info["final_obs"][b]).items():
            final[name][b] = value
    merged = {key: value for key, value in info.items() if not key.startswith("final_")}
    for key, value in info.get("final_info", {}).items():
        if key in merged and not key.startswith("_"):
            merged[key] = np.array(merged[key])
            merged[key][done] = np.asarray(value)[done]
    return final, merged


def _arrays(raw: Any) -> dict[str, np.ndarray]:
    """An observation as the arrays a data set holds: "observations", and of views their "positions" and "mask" as well."""
    if not isinstance(raw, dict):
        return {"observations": _numpy(raw)}
    if "image" in raw:
        return {"observations": _numpy(raw["image"])}
    if "observations" in raw:
        return raw
    views, positions, mask = (_numpy(raw[name]) for name in VIEWS)
    return {"observations": views, "positions": positions, "mask": mask.astype(bool)}


def _numpy(value: Any) -> np.ndarray:
    return value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


class _Buffers:
    """The episodes under way, one row of fixed arrays a copy, filled at each copy's own cursor."""

    def __init__(self, num_envs: int, limit: int, resize: tuple[int, int] | None):
        self.num_envs = num_envs
        self.limit = limit
        self.resize = resize
        self.length = np.zeros(num_envs, dtype=np.int64)
        self.written = np.zeros(num_envs, dtype=bool)
        self.arrays: dict[str, np.ndarray] = {}
        self.names: set[str] | None = None  # of the arrays, once an episode was written

    def _put(self, name: str, rows: np.ndarray, at: np.ndarray, value: Any) -> None:
        value = _numpy(value)
        if value.dtype.kind not in "biuf" or value.ndim == 0 or len(value) != self.num_envs:
            return
        if self.names is not None and name not in self.names:
            return  # an info that first appears after an episode was written; all episodes hold the same arrays
        if name not in self.arrays:
            shape = (self.num_envs, self.limit + 1, *value.shape[1:])
            self.arrays[name] = np.zeros(shape, value.dtype)
        elif self.names is None and value.dtype != self.arrays[name].dtype:
            self.arrays[name] = self.arrays[name].astype(np.result_type(self.arrays[name], value))
        self.arrays[name][rows, at] = value[rows]

    def _put_observation(self, rows: np.ndarray, at: np.ndarray, raw: Any, info: dict[str, Any]) -> None:
        for name, value in _arrays(raw).items():
            if self.resize is not None and name == "observations":
                value = _numpy(resized(torch.as_tensor(value), self.resize))
            self._put(name, rows, at, value)
        for key, value in info.items():
            if not key.startswith(("_", "final_")) and isinstance(value, (np.ndarray, Tensor)):
                self._put(f"info/{key}", rows, at, value)

    def begin(self, mask: np.ndarray, raw: Any, info: dict[str, Any]) -> None:
        """Start an episode in the copies of the mask."""
        rows = np.flatnonzero(mask)
        for array in self.arrays.values():
            array[rows] = 0
        self.length[rows] = 0
        self.written[rows] = False
        self._put_observation(rows, self.length[rows], raw, info)

    def add(
        self,
        mask: np.ndarray,
        raw: Any,
        info: dict[str, Any],
        actions: Any,
        rewards: Any,
        terminated: Any,
        truncated: Any,
    ) -> None:
        """Add a transition in the copies of the mask: the action at the old row, the observation at the next."""
        rows = np.flatnonzero(mask)
        at = self.length[rows]
        for name, value in (("actions", actions), ("terminated", terminated), ("truncated", truncated)):
            self._put(name, rows, at, value)
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as that
            self._put("rewards", rows, at, _numpy(rewards).astype(np.float32))
        self._put_observation(rows, at + 1, raw, info)
        self.length[rows] += 1

    def episode(self, row: int) -> dict[str, np.ndarray]:
        """The finished episode of a copy."""
        self.names = set(self.arrays)
        return {name: array[row, : self.length[row] + 1] for name, array in self.arrays.items()}
