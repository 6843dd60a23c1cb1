"""What a third-party package looks like: an environment, a core, an encoder and a task, found by entry point."""

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from worldmodels.core import Capabilities, Tokens, present, unroll


class Lamp(gym.Env):
    """A lamp in one of nine places; the action moves it left or right."""

    observation_space = gym.spaces.Box(0, 255, (20, 90, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": [], "render_fps": 1}
    render_mode = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(9))
        return self._picture(), {}

    def step(self, action):
        self.place = int(np.clip(self.place + 2 * int(action) - 1, 0, 8))
        return self._picture(), 0.0, False, False, {}

    def _picture(self):
        picture = np.zeros((20, 90, 3), np.uint8)
        picture[5:15, 10 * self.place : 10 * self.place + 10] = 255
        return picture


class RandomLamp(Lamp):
    """A lamp that forgets its seed: what ``worldmodels check`` is for."""

    resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        RandomLamp.resets += 1
        self.place = RandomLamp.resets % 9  # never where it was at the reset before
        return self._picture(), {}


def register():
    for name, env in (("Tiny/Lamp-v0", Lamp), ("Tiny/RandomLamp-v0", RandomLamp)):
        if name not in gym.registry:
            gym.register(name, entry_point=env, max_episode_steps=30)


class RunningMean(nn.Module):
    """A core that remembers a running mean of its tokens: mixes them in, reads them out."""

    capabilities = Capabilities()

    def __init__(self, token_size, num_slots, slot_size, *, rate=0.5):
        super().__init__()
        self.token_size, self.num_slots, self.slot_size, self.rate = token_size, num_slots, slot_size, rate
        self.mix = nn.Linear(token_size, slot_size)

    def initial_state(self, batch_size, slots=None):
        return {"mean": self.mix.bias.new_zeros(batch_size, self.num_slots, self.slot_size)}

    def prepare(self, tokens):
        return tokens._replace(features=torch.tanh(self.mix(present(tokens))))

    def forward(self, tokens, state):
        mean = state["mean"] + self.rate * (tokens.features - state["mean"])
        return mean, {"mean": mean}

    def explain(self, tokens, state):
        return {}


class Strips(nn.Module):
    """An encoder: how bright each of a few upright strips of a picture is."""

    def __init__(self, observation_shape, num_slots, slot_size, *, strips=9):
        super().__init__()
        if len(observation_shape) != 3:
            raise ValueError(f"observations are {observation_shape}; Strips takes pictures (H, W, C)")
        self.observation_shape, self.num_slots, self.slot_size = tuple(observation_shape), num_slots, slot_size
        self.strips = nn.AdaptiveAvgPool2d((1, strips))
        self.slots = nn.Linear(strips * observation_shape[2], num_slots * slot_size)

    def forward(self, observations):
        bright = self.strips(observations.movedim(-1, 1).float() / 255)
        return self.slots(bright.flatten(1)).unflatten(1, (self.num_slots, self.slot_size))


class LastSeen(nn.Module):
    """A core that reads numbers, and a readout of its slots."""

    def __init__(self, core):
        super().__init__()
        self.core = core
        self.readout = nn.Linear(core.num_slots * core.slot_size, 1)

    def forward(self, numbers):
        slots, _ = unroll(self.core, Tokens(numbers[..., None, None]), self.core.initial_state(numbers.shape[1]))
        return self.readout(slots[-1].flatten(1))[:, 0]


class Recency:
    """A task: say the last of a few numbers."""

    name = "recency"
    sections = ()
    tags = ("task", "task/score")
    unit = "sequences"

    def __init__(self, *, length=4):
        self.length = length

    def collect(self, *, quiet=False):
        pass

    def about(self):
        return {}

    def model(self, core, about):
        return LastSeen(core(1, num_tokens=1, num_slots=2, slot_size=8))

    def batches(self, batch_size, device):
        return lambda generator: torch.rand(self.length, batch_size, generator=generator, device=device)

    def losses(self, model, batch, generator):
        return {"loss": (model(batch) - batch[-1]).square().mean()}

    @torch.no_grad()
    def evaluate(self, model, limit=None, *, quiet=True):
        numbers = torch.rand(self.length, limit or 100, generator=torch.Generator().manual_seed(3))
        return {"scores": {"mse": float((model(numbers) - numbers[-1]).square().mean())}}

    def objective(self, result):
        return -result["scores"]["mse"]

    def table(self, results, of):
        return "\n".join(f"{of}: {name} {result['scores']['mse']:.4f}" for name, result in results.items())

    def draw(self, model, result, metrics, folder, example):
        return []
