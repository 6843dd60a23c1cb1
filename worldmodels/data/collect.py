"""Collect episodes from any Gymnasium environment."""

import contextlib
import difflib
import functools
import hashlib
import importlib
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from filelock import FileLock, Timeout
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from .. import envs as _our_envs  # noqa: F401  registers worldmodels/... ids
from ..errors import UserError
from .episodes import Episodes, EpisodesWriter

Policy = Callable[[Any, dict[str, Any]], Any]
"""Observations and infos of a batch in, actions of the batch out."""

OUR_NAMESPACE = "worldmodels/"
VIEWS = ("views", "positions", "mask")  # the entries of an observation that is a set of local views
_BUFFER_BYTES = 1 << 30
_MOMENT = 1.0  # seconds that pass before a wait is spoken of


@functools.cache
def register_plugins() -> None:
    """Load, once, what installed packages offer under the entry point ``worldmodels.envs``: a module, or a callable."""
    for entry in entry_points(group="worldmodels.envs"):
        try:
            loaded = entry.load()
            if callable(loaded):
                loaded()
        except Exception as error:  # whatever a stranger's module raises must not stop those who do not use it
            print(f"worldmodels: the plug-in {entry.name!r} cannot be loaded: {error!r}", file=sys.stderr)


def find_spec(env_id: str) -> gym.envs.registration.EnvSpec:
    """The registered specification of an id; ``package:Namespace/Name-v0`` imports the package first.

    Raises:
        UserError: no such environment.
    """
    register_plugins()
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UserError(
                f"environment {env_id!r}: no module {error.name!r}; install it, or check the name"
            ) from error
        except Exception as error:  # a stranger's module may raise anything
            raise UserError(f"environment {env_id!r}: importing {module!r} raises {error!r}") from error
    elif name.startswith(("MiniGrid-", "BabyAI-")):
        importlib.import_module("minigrid")
    elif name.startswith("ALE/"):
        gym.register_envs(importlib.import_module("ale_py"))
    if name not in gym.registry:
        near = [repr(known) for known in _near(name)]
        asked = f"; did you mean {', '.join(near[:-1])}{' or ' if near[1:] else ''}{near[-1]}?" if near else "."
        elsewhere = "" if module else f" If a package registers it, write package:{name}"
        raise UserError(f"unknown environment {env_id!r}{asked}{elsewhere}")
    return gym.spec(name)


def _near(name: str) -> list[str]:
    """At most three ids whose names are nearest to one that does not exist, whatever their namespace and version."""
    known = set(gym.registry)
    for package in ("minigrid", "ale_py"):  # of which find_spec knows the ids by how they begin
        importlib.import_module(package)
    known |= {env_id for env_id in gym.registry if env_id.startswith(("MiniGrid-", "BabyAI-", "ALE/"))}
    asked, word, version = _parts(name)

    def distance(env_id: str) -> tuple[bool, bool, int]:
        namespace, _, own_version = _parts(env_id)
        return own_version != version, namespace != asked, -own_version

    by_word: dict[str, list[str]] = {}
    for env_id in sorted(sorted(known), key=distance):
        by_word.setdefault(_parts(env_id)[1], []).append(env_id)
    close = difflib.get_close_matches(word, by_word) or [other for other in by_word if word in other]
    return [env_id for other in close for env_id in by_word[other]][:3]


def _parts(env_id: str) -> tuple[str, str, int]:
    """Namespace, name in small letters, and version of an id, which may lack the first and the last."""
    namespace, _, rest = env_id.rpartition("/")
    word, _, version = rest.rpartition("-v") if re.search(r"-v\d+$", rest) else (rest, "", "0")
    return namespace, word.lower(), int(version)


def make_envs(
    env_id: str,
    num_envs: int,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    max_episode_steps: int | None = None,
    device: str = "cpu",
    processes: bool = False,
) -> VectorEnv[Any, Any, Any]:
    """A vector environment of any id: batched ones of ours on the device, others as ``SyncVectorEnv`` with autoreset.

    MiniGrid and BabyAI ids get RGB pictures of the agent's view; a Dict observation with an entry "image" gives that
    entry, one with "views", "positions" and "mask" stays as it is, any other Dict or Tuple of vectors is flattened.

    Args:
        env_id: any Gymnasium id.
        num_envs: copies.
        env_kwargs: keyword arguments of the environment.
        max_episode_steps: another step limit than the id's own.
        device: where batched environments of ours run.
        processes: each copy of another environment in a process of its own (``AsyncVectorEnv``), which pays where a step
            takes far longer than the tenth of a millisecond that its way between processes takes.

    Raises:
        UserError: no such environment, or it refuses the options.
    """
    spec = find_spec(env_id)
    kwargs = dict(env_kwargs or {})
    if max_episode_steps is not None:
        kwargs["max_episode_steps"] = max_episode_steps
    try:
        if spec.id.startswith(OUR_NAMESPACE) and spec.vector_entry_point is not None:
            return gym.make_vec(
                spec.id, num_envs=num_envs, vectorization_mode="vector_entry_point", device=device, **kwargs
            )
        make = [lambda: _single(spec.id, kwargs)] * num_envs
        if not processes:
            return gym.vector.SyncVectorEnv(make)
        with warnings.catch_warnings():  # forking is safe: the copies only run the environment
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            return gym.vector.AsyncVectorEnv(make)
    except (TypeError, ValueError, AssertionError, gym.error.Error) as error:
        raise UserError(f"environment {env_id!r} with {kwargs}: {str(error).splitlines()[0]}") from error


def _single(env_id: str, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    env = gym.make(env_id, **kwargs)
    if env_id.startswith(("MiniGrid-", "BabyAI-")):
        from minigrid.wrappers import RGBImgPartialObsWrapper

        env = RGBImgPartialObsWrapper(env)
    space = env.observation_space
    if isinstance(space, gym.spaces.Dict) and "image" in space.spaces:
        picture = space["image"]
        return gym.wrappers.TransformObservation(env, _image, picture)
    if isinstance(space, gym.spaces.Dict) and set(VIEWS) <= set(space.spaces):
        return env
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        return gym.wrappers.FlattenObservation(env)
    return env


def _image(observation: dict[str, Any]) -> Any:
    return observation["image"]


def action_spec(space: gym.Space[Any], actions_per_object: int | None = None) -> dict[str, Any]:
    """An action space in JSON: what a manifest says and a model is built from.

    Raises:
        UserError: not Discrete, MultiDiscrete or Box.
    """
    if isinstance(space, gym.spaces.Discrete):
        if space.start != 0:
            raise UserError(f"action space {space} does not start at 0; wrap it so that it does")
        spec: dict[str, Any] = {"kind": "discrete", "sizes": [int(space.n)]}
        if actions_per_object is not None:
            spec["per_object"] = int(actions_per_object)
        return spec
    if isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1 and not space.start.any():
        return {"kind": "discrete", "sizes": [int(n) for n in space.nvec]}
    if isinstance(space, gym.spaces.Box):
        return {"kind": "box", "sizes": [int(np.prod(space.shape))]}
    raise UserError(f"action space {space} is not supported; expected Discrete, MultiDiscrete or Box")


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
    probe.close()
    # Dropped transitions count for the environment's clock, not for ours.
    own_limit = limit + math.ceil(0.1 * limit) + 5 if drop_invalid else limit
    if isinstance(space, gym.spaces.Dict):
        space = next((space[name] for name in ("image", "views") if name in space.spaces), space)
    if not isinstance(space, (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        raise UserError(f"{env_id} observes {space}; expected a picture, a vector, or a Dict with one of them")
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
            _record(envs, writer, episodes, limit, seed, policy, drop_invalid, resize, progress)
    except (
        ValueError,
        EOFError,
        ConnectionError,
    ) as error:  # what an environment raises, or a process of one that died
        line = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"{env_id} with {about['env_kwargs']} failed while it was recorded: {line}") from error
    finally:
        envs.close()
    return Episodes.load(path, verify=False)


def collected(
    folder: str | Path | Sequence[str | Path], label: str, settings: Mapping[str, Any], **more: Any
) -> Episodes:
    """The episodes that ``collect`` makes with these settings: opened if they lie in a folder already, else collected.

    Of several processes that ask for the same at once, one collects and the others wait for it; should it fail, the next
    one collects.

    Args:
        folder: where data are kept; what a data set is called there depends on the settings. Of several all are looked in,
            and what is collected goes into the first.
        label: part of that name, for people.
        settings: keyword arguments of ``collect`` that say what is recorded; JSON, but for a policy.
        more: those that do not, like ``progress``.

    Raises:
        UserError: see ``collect`` and ``Episodes.load``.
    """
    policy = settings.get("policy")
    said = {**settings, "policy": f"{policy.__module__}:{policy.__qualname__}"} if policy else settings
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:10]
    name = re.sub(r"[^A-Za-z0-9]+", "-", settings["env_id"]).strip("-")
    folders = [folder] if isinstance(folder, (str, Path)) else folder
    places = [Path(one) / f"{name}-{label}-{digest}" for one in folders]
    path = next((place for place in places if place.exists()), places[0])
    if path.exists():
        return Episodes.load(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(f".{path.name}.lock")
    lock = FileLock(file)
    try:
        lock.acquire(timeout=_MOMENT)
    except Timeout:
        print(f"worldmodels: waiting for another process that collects {path}", file=sys.stderr)
        lock.acquire()
    try:
        return Episodes.load(path) if path.exists() else collect(**settings, path=path, **more)
    finally:
        with contextlib.suppress(OSError):  # a lock that was removed lets in whoever waits for it
            file.unlink()
        lock.release()


def _own_limit(envs: VectorEnv[Any, Any, Any], spec: Any) -> int:
    """The step limit of an environment: Gymnasium's, or MiniGrid's own ``max_steps``."""
    inside = envs.envs[0].unwrapped if isinstance(envs, gym.vector.SyncVectorEnv) else envs
    limit = spec.max_episode_steps or getattr(inside, "max_steps", None)
    if limit is None:
        raise UserError(f"{spec.id} has no step limit of its own; say how long an episode may be with steps=")
    return int(limit)


def _record(
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
    raw, info = envs.reset(seed=seed) if ours else envs.reset(seed=seeds)  # type: ignore[arg-type]
    buffers = _Buffers(B, limit, resize)
    buffers.begin(np.ones(B, dtype=bool), raw, info)
    fresh = np.zeros(B, dtype=bool)  # NEXT_STEP: this step only starts the next episode
    while quota.any():
        actions = envs.action_space.sample() if policy is None else policy(raw, info)
        if mode == AutoresetMode.DISABLED and fresh.any():
            raw, info = envs.reset(options={"reset_mask": fresh})
            buffers.begin(fresh, raw, info)
            fresh = np.zeros(B, dtype=bool)
            continue
        raw, rewards, terminated, truncated, info = envs.step(actions)
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
                writer.append(buffers.episode(b))
                quota[b] -= 1
                if progress is not None:
                    progress(len(writer.lengths), episodes)
        buffers.written |= ended
        if mode == AutoresetMode.SAME_STEP:
            buffers.begin(done, raw, info)
        else:
            fresh = done


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
        self._put("rewards", rows, at, _numpy(rewards).astype(np.float32))
        self._put_observation(rows, at + 1, raw, info)
        self.length[rows] += 1

    def episode(self, row: int) -> dict[str, np.ndarray]:
        """The finished episode of a copy."""
        self.names = set(self.arrays)
        return {name: array[row, : self.length[row] + 1] for name, array in self.arrays.items()}


def resized(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Pictures ``(B, H, W, C)`` uint8 brought to (height, width) with antialiasing."""
    if pictures.dim() != 4 or pictures.dtype != torch.uint8:
        raise UserError(
            f"resize is for pictures (B, H, W, C) uint8; these are {tuple(pictures.shape)} {pictures.dtype}"
        )
    channels_first = pictures.permute(0, 3, 1, 2)
    small = torch.nn.functional.interpolate(channels_first, size=list(size), mode="bilinear", antialias=True)
    return small.permute(0, 2, 3, 1).contiguous()
