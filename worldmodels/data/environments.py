"""Environments by their id, as recording, checking and training see them."""

import difflib
import functools
import importlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from operator import itemgetter
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from .. import envs as _our_envs  # noqa: F401  registers worldmodels/... ids
from ..errors import UserError, first_line

OUR_NAMESPACE = "worldmodels/"
VIEWS = ("views", "positions", "mask")  # the entries of an observation that is a set of local views
FLATTENED = tuple(getattr(gym.spaces, name) for name in ("Dict", "Tuple", "Discrete", "MultiDiscrete", "MultiBinary"))
_CHANNELS = (1, 3, 4)


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
    entry, one with "views", "positions" and "mask" stays as it is; any other Dict or Tuple, and Discrete, MultiDiscrete and
    MultiBinary, are flattened to a vector. Pictures become bytes with channels last, see ``as_picture``.

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
    except UserError:
        raise
    except Exception as error:  # a stranger's constructor may raise anything
        raise refused(env_id, kwargs, error) from error


def _single(env_id: str, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    env = gym.make(env_id, **kwargs)
    if env_id.startswith(("MiniGrid-", "BabyAI-")):
        from minigrid.wrappers import RGBImgPartialObsWrapper

        env = RGBImgPartialObsWrapper(env)
    space = env.observation_space
    if isinstance(space, gym.spaces.Dict) and "image" in space.spaces:
        env = gym.wrappers.TransformObservation(env, itemgetter("image"), space["image"])
    elif isinstance(space, gym.spaces.Dict) and set(VIEWS) <= set(space.spaces):
        return env
    elif isinstance(space, FLATTENED):
        return gym.wrappers.FlattenObservation(env)
    return as_picture(env)


def as_picture(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """An environment whose pictures are bytes with channels last: ``(H, W, C)`` uint8.

    Understood are grey pictures without channels, channels first, and numbers between finite bounds, which become 0 to 255.
    What is no picture stays as it is.
    """
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box) or len(space.shape) not in (2, 3):
        return env
    low, high = float(space.low.min()), float(space.high.max())
    bytes_already, grey = space.dtype == np.uint8, len(space.shape) == 2
    first = not grey and space.shape[0] in _CHANNELS and space.shape[-1] not in _CHANNELS
    if bytes_already and (high < 255 if grey else not first):
        return env
    if not bytes_already and (grey or not np.isfinite([low, high]).all() or high <= low):
        return env  # a table of numbers

    def picture(observation: Any) -> np.ndarray:
        seen = np.asarray(observation)
        if not bytes_already:
            seen = np.clip(np.rint((seen - low) * (255.0 / (high - low))), 0, 255).astype(np.uint8)
        return seen[..., None] if grey else np.moveaxis(seen, 0, -1) if first else seen

    shape = picture(np.zeros(space.shape, space.dtype)).shape
    return gym.wrappers.TransformObservation(env, picture, gym.spaces.Box(0, 255, shape, np.uint8))


def refused(env_id: str, kwargs: Mapping[str, Any], error: Exception) -> UserError:
    """What to say of an environment that cannot be made."""
    usual = isinstance(error, (TypeError, ValueError, AssertionError, gym.error.Error))
    kind = "" if usual else f"{type(error).__name__} "
    return UserError(f"environment {env_id!r} with {dict(kwargs)}: {kind}{first_line(error)}")


def left_out(envs: VectorEnv[Any, Any, Any]) -> list[str]:
    """The entries of a Dict observation beside its "image", which are not recorded; of MiniGrid that is documented."""
    env = envs.envs[0] if isinstance(envs, gym.vector.SyncVectorEnv) else None
    if env is None or (env.spec is not None and env.spec.id.startswith(("MiniGrid-", "BabyAI-"))):
        return []
    while isinstance(env, gym.Wrapper):
        env, whole = env.env, env.observation_space
        seen = env.observation_space
        if isinstance(seen, gym.spaces.Dict) and "image" in seen.spaces and not isinstance(whole, gym.spaces.Dict):
            return sorted(set(seen.spaces) - {"image"})
    return []


@contextmanager
def faults_of(env: str, when: str) -> Iterator[None]:
    """Turn whatever an environment raises, and nothing else should be inside, into one line.

    Raises:
        UserError: naming the environment, when it was, and the error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a stranger's environment may raise anything
        line = first_line(error)
        raise UserError(f"environment {env} failed {when}: {type(error).__name__}: {line}") from error


def refuse_not_finite(env: str, when: str, values: Mapping[str, np.ndarray]) -> None:
    """Refuse numbers of an environment from which nothing can be learned.

    Raises:
        UserError: naming the environment, which of the values, and when it was.
    """
    for name, value in values.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            found = value[~np.isfinite(value)][0]
            raise UserError(f"environment {env}: {name} hold {found} {when}; expected finite numbers")


def action_spec(space: gym.Space[Any], actions_per_object: int | None = None) -> dict[str, Any]:
    """An action space in JSON: what a manifest says and a model is built from.

    Raises:
        UserError: not Discrete, MultiDiscrete or Box, or one without numbers.
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
    if isinstance(space, gym.spaces.Box) and 0 not in space.shape:
        return {"kind": "box", "sizes": [int(np.prod(space.shape))]}
    raise UserError(f"action space {space} is not supported; expected Discrete, MultiDiscrete or Box")


def resized(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Pictures ``(B, H, W, C)`` uint8 brought to (height, width) with antialiasing."""
    if pictures.dim() != 4 or pictures.dtype != torch.uint8:
        raise UserError(
            f"resize is for pictures (B, H, W, C) uint8; these are {tuple(pictures.shape)} {pictures.dtype}"
        )
    channels_first = pictures.permute(0, 3, 1, 2)
    small = torch.nn.functional.interpolate(channels_first, size=list(size), mode="bilinear", antialias=True)
    return small.permute(0, 2, 3, 1).contiguous()
