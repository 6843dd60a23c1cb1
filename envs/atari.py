"""Atari games as C-SWM and NPS see them: short episodes of two stacked colour frames, after a warm-start of random play.

Kipf et al. 2020, "Contrastive Learning of Structured World Models", Appendix, and Goyal et al. 2021, "Neural Production
Systems", Appendix E.3, on the Arcade Learning Environment (Bellemare et al. 2013; Machado et al. 2018).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import gymnasium as gym
import numpy as np
from ale_py import ALEInterface, LoggerMode, roms
from ale_py.env import AtariEnv
from PIL import Image

_SCREEN_ROWS = 210
_TRIES = 20  # games in which a warm-start may be lost


@dataclass(frozen=True)
class Recipe:
    """How a game is seen.

    Args:
        frameskip: frames an action is held; only the last is seen.
        warm_start: random actions before an episode begins, or (fewest, most) for a number drawn for each episode.
        crop: (first, last + 1) rows of the screen's 210 that are seen.
        ram: where the console keeps coordinates, by name (address, sign, offset): in pixels of the screen a coordinate is
            ``sign * RAM[address] + offset``.
        visible: (address, least, most), by the name of a coordinate that means nothing while RAM[address] is not within.
    """

    frameskip: int = 4
    warm_start: int | tuple[int, int] = 50
    crop: tuple[int, int] = (0, _SCREEN_ROWS)
    ram: Mapping[str, tuple[int, int, float]] = field(default_factory=dict)
    visible: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)


# Pong and Space Invaders: frame skips, warm-starts and crops of C-SWM's code. No paper or code says how NPS saw the other
# three; the choices are ours: the rows of the playing field, without the score where it stands apart, and warm-starts of
# varying length, because Freeway's cars are a function of time alone and nine of ten states would occur again and again.
# RAM addresses as annotated by Anand et al. 2019 ("Unsupervised State Representation Learning in Atari"), offsets measured.
RECIPES = {
    "pong": Recipe(
        warm_start=58,
        crop=(35, 190),
        ram={"ball x": (49, 1, -48.5), "ball y": (54, 1, -12.5), "player y": (51, 1, -5.5), "enemy y": (50, 1, -7.5)},
        visible={"ball x": (54, 1, 255), "ball y": (54, 1, 255)},
    ),
    "space_invaders": Recipe(frameskip=3, crop=(30, 200), ram={"player x": (28, 1, 2.0), "invaders x": (26, 1, -1.0)}),
    "freeway": Recipe(warm_start=(50, 150), crop=(15, 196), ram={"chicken y": (14, -1, 196.5)}),
    "breakout": Recipe(
        warm_start=(20, 100),
        crop=(32, 196),
        ram={"ball x": (99, 1, -48.5), "ball y": (101, 1, 10.5), "paddle x": (72, 1, -39.5)},
        visible={"ball x": (101, 1, 179), "ball y": (101, 1, 179)},
    ),
    "qbert": Recipe(warm_start=(50, 150), crop=(10, 210), ram={"qbert x": (43, 1, 0.0), "qbert y": (67, 1, 3.0)}),
}


class Atari(gym.Env[np.ndarray, Any]):
    """One Atari game in the console's own colours, cropped, made small, two frames at a time.

    An episode begins after ``warm_start`` random actions and one that does nothing; if the game is lost on the way, another
    is begun. Observations are ``stack`` frames ``(height, width, 3 * stack)`` uint8, the newest last. ``info`` tells the
    RAM's 128 bytes as "state_id", "lives", and of the games whose RAM is understood the coordinates of "objects", in pixels
    of the screen and in the order of ``metadata["objects"]``, 0 where "visible" says that the object is not in play. The RAM
    is all the console knows, but not all of the emulator: where a paddle is turned by an analog knob, as in Pong, moments
    of equal RAM can part later.

    The paper (C-SWM) says ``PongDeterministic-v4`` and ``SpaceInvadersDeterministic-v4``, ids that Gymnasium no longer has:
    frame skip 4, of Space Invaders 3, and no repeated ("sticky") actions. We put the older frame first; C-SWM's code puts it
    last, which to a convolution is a renaming of channels.

    Args:
        game: one of ale-py's ROMs, like "pong" or "space_invaders".
        frameskip: frames an action is held; None for the recipe's.
        warm_start: random actions before an episode, or (fewest, most); None for the recipe's.
        crop: (first, last + 1) rows of the screen; None for the recipe's.
        size: (height, width) frames are brought to, by Pillow's Lanczos filter as in C-SWM's code.
        stack: frames of an observation.
        repeat_action_probability: of the console repeating the last action instead of taking the new one.
        render_mode: None or "rgb_array".

    Raises:
        ValueError: no such game, or an option out of range.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(
        self,
        game: str = "pong",
        *,
        frameskip: int | None = None,
        warm_start: int | Sequence[int] | None = None,
        crop: Sequence[int] | None = None,
        size: Sequence[int] = (50, 50),
        stack: int = 2,
        repeat_action_probability: float = 0.0,
        render_mode: str | None = None,
    ):
        games = roms.get_all_rom_ids()
        if game not in games:
            near = get_close_matches(str(game).lower(), games, 3)
            raise ValueError(f"no game {game!r}; " + (f"did you mean {near}?" if near else f"ale-py has {games}"))
        recipe = RECIPES.get(game, Recipe())
        warm = recipe.warm_start if warm_start is None else warm_start
        warm = (warm, warm) if isinstance(warm, int) else warm
        crop = recipe.crop if crop is None else crop
        frameskip = recipe.frameskip if frameskip is None else frameskip
        if not _whole(warm, 2) or not 0 <= warm[0] <= warm[1]:
            raise ValueError(f"warm_start is {warm_start}; give a number of actions, or [fewest, most]")
        if not _whole(crop, 2) or not 0 <= crop[0] < crop[1] <= _SCREEN_ROWS:
            raise ValueError(f"crop is {crop}; give [first, last + 1] of the screen's {_SCREEN_ROWS} rows")
        if not _whole(size, 2) or not _whole((stack, frameskip), 2) or min(*size, stack, frameskip) < 1:
            raise ValueError(
                f"size is {size}, stack {stack} and frameskip {frameskip}; size is [height, width], all at least 1"
            )
        if not 0.0 <= repeat_action_probability <= 1.0:
            raise ValueError(f"repeat_action_probability is {repeat_action_probability}; expected 0 to 1")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode is {render_mode!r}; this environment offers None and 'rgb_array'")
        self.warm_start, self.crop = tuple(warm), tuple(crop)
        self.height, self.width = size
        self.stack, self.render_mode = stack, render_mode
        ALEInterface.setLoggerMode(LoggerMode.Error)
        self.console = AtariEnv(
            game=game, obs_type="rgb", frameskip=frameskip, repeat_action_probability=repeat_action_probability
        )
        self.coordinates, self.visible = dict(recipe.ram), dict(recipe.visible)
        self.metadata = {**type(self).metadata, "objects": list(self.coordinates)}
        self.metadata["recipe"] = {"game": game, "frameskip": frameskip, "warm_start": list(warm), "crop": list(crop)}
        self.action_space = self.console.action_space
        self.observation_space = gym.spaces.Box(0, 255, (self.height, self.width, 3 * stack), np.uint8)
        self._frames: deque[np.ndarray] = deque(maxlen=stack)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a game and play its warm-start."""
        super().reset(seed=seed)
        screen, _ = self.console.reset(seed=seed)
        for _ in range(_TRIES):
            fewest, most = self.warm_start
            count = int(self.np_random.integers(fewest, most + 1))
            actions = self.np_random.integers(self.action_space.n, size=count).tolist()  # type: ignore[attr-defined]
            before = [screen]
            lost = False
            for action in [*actions, 0]:
                screen, _, lost, *_ = self.console.step(action)
                before.append(screen)
                if lost:
                    break
            if not lost:
                recent = before[-self.stack :]
                recent = [recent[0]] * (self.stack - len(recent)) + recent
                self._frames.extend(self._small(frame) for frame in recent)
                return self._observation(), self._info()
            screen, _ = self.console.reset()
        raise ValueError(f"{_TRIES} games were lost within warm_start={list(self.warm_start)}; give fewer actions")

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Hold an action for ``frameskip`` frames; the reward is the game's own."""
        screen, reward, terminated, truncated, _ = self.console.step(int(action))
        self._frames.append(self._small(screen))
        return self._observation(), float(reward), terminated, truncated, self._info()

    def render(self) -> np.ndarray | None:
        """The whole screen (210, 160, 3) uint8, or None if no render mode was asked for."""
        return None if self.render_mode is None else self.console.ale.getScreenRGB()

    def _small(self, screen: np.ndarray) -> np.ndarray:
        rows = Image.fromarray(screen[self.crop[0] : self.crop[1]])
        return np.asarray(rows.resize((self.width, self.height), Image.Resampling.LANCZOS))

    def _observation(self) -> np.ndarray:
        return np.concatenate(self._frames, axis=-1)

    def _info(self) -> dict[str, Any]:
        ram = self.console.ale.getRAM()
        info: dict[str, Any] = {"state_id": ram, "lives": np.int64(self.console.ale.lives())}
        if self.coordinates:
            inside = {name: least <= ram[address] <= most for name, (address, least, most) in self.visible.items()}
            visible = [bool(inside.get(name, True)) for name in self.coordinates]
            where = [sign * float(ram[address]) + offset for address, sign, offset in self.coordinates.values()]
            info["visible"] = np.array(visible)
            info["objects"] = np.where(visible, where, 0.0).astype(np.float32)
        return info


def _whole(values: Any, count: int) -> bool:
    """Whether these are so many whole numbers."""
    return isinstance(values, Sequence) and len(values) == count and all(type(value) is int for value in values)
