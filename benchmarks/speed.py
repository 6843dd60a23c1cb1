"""Speed and memory on this machine: environments, views, recurrent cores, a training step of the GNN, ranks.

Ratios are of one run.

python benchmarks/speed.py [--device cuda] [--out FILE.json]
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import worldmodels.envs  # noqa: F401
from worldmodels.core import Tokens, unroll
from worldmodels.cores.esbn import ESBN
from worldmodels.cores.gnn import GNN
from worldmodels.cores.lstm import LSTM
from worldmodels.cores.mnm import MNM
from worldmodels.cores.ntm import NTM
from worldmodels.cores.rims import RIMs
from worldmodels.cores.s2rm import S2GRU
from worldmodels.cores.scoff import SCOFF
from worldmodels.encoders import CSWMEncoder, pixels
from worldmodels.envs.skirmish import focus_nearest
from worldmodels.losses import contrastive
from worldmodels.metrics import ranks
from worldmodels.models.video import video_model


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median time of a call, after two to warm up."""
    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= 2:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def environments(device: torch.device) -> dict[str, float]:
    """Rendered frames a second at 1,024 copies."""
    rates = {}
    for env_id in ("worldmodels/Shapes-v0", "worldmodels/BlockPhysics-v0", "worldmodels/GoToObjMaze-v0"):
        envs = gym.make_vec(env_id, num_envs=1024, device=str(device))
        envs.reset(seed=0)
        actions = torch.randint(0, int(envs.single_action_space.n), (1024,), device=device)
        rates[env_id] = 1024 / seconds(lambda envs=envs, actions=actions: envs.step(actions), device, 250)
    return rates


def partial_views(device: torch.device) -> dict[str, float]:
    """Battles a second at 1,024 copies of 3s5z with both teams' heuristics, and views a second drawn from stored states."""
    rates = {}
    battles = gym.make_vec("worldmodels/Skirmish-v0", num_envs=1024, device=str(device), observation="units")
    observation, info = battles.reset(seed=0)

    def fight() -> None:
        nonlocal observation, info
        observation, _, _, _, info = battles.step(focus_nearest(observation, info))

    rates["Skirmish 3s5z, steps"] = 1024 / seconds(fight, device, 100)
    units = observation
    rates["Skirmish 3s5z, polar images"] = 8 * 1024 / seconds(lambda: battles.views(units), device, 50)
    rates["Skirmish 3s5z, action images"] = (
        8 * 1024 / seconds(lambda: battles.action_views(units, focus_nearest(observation, info)), device, 50)
    )
    balls = gym.make_vec("worldmodels/BouncingBalls-v0", num_envs=1024, device=str(device), observation="state")
    states, _ = balls.reset(seed=0)
    nothing = torch.zeros(1024, dtype=torch.int64, device=device)
    rates["BouncingBalls, 3 balls, steps"] = 1024 / seconds(lambda: balls.step(nothing), device, 50)
    rates["BouncingBalls, 3 balls, frames of 48 x 48"] = 1024 / seconds(lambda: balls.frames(states), device, 100)
    at = torch.randint(48, (1024, 10, 2), device=device)
    rates["BouncingBalls, 3 balls, crops of 11 x 11"] = (
        10 * 1024 / seconds(lambda: balls.crops(states, at), device, 100)
    )
    return rates


class GatherScatterGNN(nn.Module):
    """C-SWM's own form of the transition, on the parameters of ours: a list of edges, gathered and scattered."""

    def __init__(self, core: GNN, batch_size: int):
        super().__init__()
        self.core = core
        K = core.num_slots
        first, second = (~torch.eye(K, dtype=torch.bool)).nonzero().T
        offset = K * torch.arange(batch_size)[:, None]
        self.register_buffer("row", (first + offset).flatten())
        self.register_buffer("column", (second + offset).flatten())

    def forward(self, features: Tensor) -> Tensor:
        """The change of every slot."""
        c = self.core
        flat = features.flatten(0, 1)
        ends = flat[:, : c.slot_size]
        edge = torch.relu(c.edge_in(torch.cat([ends[self.row], ends[self.column]], 1)))
        edge = c.edge_out(torch.relu(c.edge_norm(c.edge_hidden(edge))))
        total = edge.new_zeros(len(flat), edge.shape[1]).index_add(0, self.row, edge)
        node = torch.relu(c.node_in(torch.cat([flat, total], 1)))
        return c.node_out(torch.relu(c.node_norm(c.node_hidden(node)))).view_as(features[..., : c.slot_size])


def recurrent_layers(device: torch.device, input_size: int) -> dict[str, float]:
    """Forward and backward of 32 steps of 32 rows, one thread, against ``nn.LSTM`` of the same total hidden size.

    On a GPU the steps of rims and scoff are measured compiled as well (CUDA graphs), and how far that is from eager.
    """
    T, B = 32, 32
    pairs = {
        "rims, 6 x 100, 4 active": (RIMs(input_size, 6, 100, num_active=4, num_tokens=1), 600),
        "scoff, 6 x 100, 4 schemata": (SCOFF(input_size, 6, 100), 600),
        "s2gru, 10 x 128": (S2GRU(input_size, 10, 128, num_tokens=1), 1280),
        "esbn, 512": (ESBN(input_size, 1, 512), 512),
        "ntm, 512": (NTM(input_size, 1, 512), 512),
        "mnm, 512": (MNM(input_size, 1, 512), 512),
    }
    x = torch.randn(T, B, input_size, device=device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = {}
    for name, (core, hidden_size) in pairs.items():
        core = core.to(device).eval()
        lstm = nn.LSTM(input_size, hidden_size).to(device)
        forms = {"": core}
        if device.type == "cuda" and name.startswith(("rims", "scoff")):
            forms[", compiled"] = torch.compile(core, mode="reduce-overhead")
        for form, callable_core in forms.items():

            def ours(run: Any = callable_core, core: Any = core) -> Tensor:
                if run is core:
                    return unroll(core, Tokens(x[:, :, None]), core.initial_state(B))[0]
                tokens, state, slots = core.prepare(Tokens(x[:, :, None])), core.initial_state(B), []
                for tokens_t in tokens.steps():
                    slots_t, state = run(tokens_t, state)
                    # A captured graph writes its next results into the same memory.
                    slots_t, state = slots_t.clone(), {name: leaf.clone() for name, leaf in state.items()}
                    slots.append(slots_t)
                return torch.stack(slots)

            def both_ways(forward: Callable[[], Tensor], module: nn.Module) -> None:
                module.zero_grad()
                forward().sum().backward()

            times: list[list[float]] = [[], []]
            for _ in range(5):  # in turns, so that both meet the same machine
                times[0].append(seconds(lambda f=ours, c=core: both_ways(f, c), device, 3))
                times[1].append(seconds(lambda m=lstm: both_ways(lambda: m(x)[0], m), device, 3))
            mine, theirs = (sorted(part)[2] for part in times)
            results[f"{name}{form}, ms"] = 1000 * mine
            results[f"{name}{form}, x nn.LSTM({hidden_size})"] = mine / theirs
            if form:
                with torch.no_grad():
                    results[f"{name}{form}, difference"] = float((ours() - ours(run=core)).abs().max())
    torch.set_num_threads(threads)
    return results


def training_step(device: torch.device) -> dict[str, float]:
    """Transitions a second of a whole training step at C-SWM's published sizes, ours against gather and scatter."""
    B, K, D, A = 1024, 5, 2, 4
    torch.manual_seed(0)
    encoder = CSWMEncoder((50, 50, 3), K, D, size="small", hidden_size=512).to(device)
    core = GNN(D + A, K, D, hidden_size=512).to(device)
    plain = GatherScatterGNN(core, B).to(device)
    frames = torch.randint(0, 256, (2 * B, 50, 50, 3), dtype=torch.uint8, device=device)
    actions = nn.functional.one_hot(torch.randint(0, K * A, (B,), device=device), K * A).view(B, K, A).float()
    parameters = [*encoder.parameters(), *core.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=5e-4)

    def step(transition: Callable[[Tensor], Tensor]) -> None:
        slots, following = encoder(frames).chunk(2)
        delta = transition(torch.cat([slots, actions], -1))
        loss = contrastive(slots, slots + delta, following).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with torch.no_grad():
        tokens = torch.cat([torch.randn(B, K, D, device=device), actions], -1)
        difference = float((core(Tokens(tokens), {})[0] - plain(tokens)).abs().max())
    repeats = 5 if device.type == "cpu" else 50
    ours, theirs = [], []
    for _ in range(3):  # in turns, so that both meet the same machine
        ours.append(seconds(lambda: step(lambda tokens: core(Tokens(tokens), {})[0]), device, repeats))
        theirs.append(seconds(lambda: step(plain), device, repeats))
    ours_s, theirs_s = sorted(ours)[1], sorted(theirs)[1]
    return {
        "ours, transitions/s": B / ours_s,
        "gather and scatter, transitions/s": B / theirs_s,
        "ratio": theirs_s / ours_s,
        "largest difference": difference,
    }


def videos(device: torch.device, size: str) -> dict[str, float]:
    """A training step of ``experiment=balls`` at a size: SCOFF beside an LSTM of as many parameters, on 21 frames a video.

    The frames are drawn anew in every step, as in training; a run takes as many hours as its steps do.
    """
    B, image, channels, hidden, units, steps = (16, 32, 32, 256, 178, 4000)
    if size == "paper":
        B, image, channels, hidden, units, steps = (64, 64, 64, 512, 128, 78_125)
    radius = (image / 16, image / 8)
    balls: Any = gym.make_vec(
        "worldmodels/BouncingBalls-v0",
        B,
        device=str(device),
        observation="state",
        num_balls=4,
        radius=radius,
        image_size=image,
    )
    states = [balls.reset(seed=0)[0]]
    for _ in range(20):
        states.append(balls.step(torch.zeros(B, dtype=torch.int64, device=device))[0])
    recorded = torch.stack(states)
    network = {"decoder": "joint", "readout": "attention", "channels": channels, "hidden_size": hidden, "stack": 1}

    def scoff(token_size: int, **_: int) -> SCOFF:
        return SCOFF(token_size, 4, 100, num_schemata=4, value_size=100, dropout=0.1)

    def lstm(token_size: int, num_tokens: int, **_: int) -> LSTM:
        return LSTM(token_size, 1, units, num_tokens=num_tokens)

    found = {"frames drawn, a second": 21 * B / seconds(lambda: pixels(balls.frames(recorded)), device, 5)}
    for name, core, tokens in (("SCOFF", scoff, "positions"), ("LSTM", lstm, "vector")):
        model = video_model(core, (1, image, image), tokens=tokens, **network).to(device)
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)

        def step(model: nn.Module = model, optimiser: torch.optim.Optimizer = optimiser) -> None:
            frames = pixels(balls.frames(recorded))
            optimiser.zero_grad()
            binary_cross_entropy_with_logits(model(frames[:-1]), frames[1:]).backward()
            optimiser.step()

        each = seconds(step, device, 3)
        found |= {f"{name}, ms a step": 1000 * each, f"{name}, hours of a run": each * steps / 3600}
    return found | {"SCOFF / LSTM, a step": found["SCOFF, ms a step"] / found["LSTM, ms a step"]}


def ranking(dimensions: int) -> dict[str, float]:
    """Time of ``ranks`` for 10,000 states, and memory beyond its inputs, in a process of its own."""
    code = f"""
import os, threading, time, torch
from worldmodels.metrics import ranks
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
pred = torch.randn(10_000, {dimensions}); target = pred + 0.5 * torch.randn(10_000, {dimensions})
ranks(pred[:500], target[:500])
before, peak, running = resident(), 0.0, True
def watch():
    global peak
    while running:
        peak = max(peak, resident()); time.sleep(0.001)
thread = threading.Thread(target=watch); thread.start()
start = time.perf_counter(); ranks(pred, target); taken = time.perf_counter() - start
running = False; thread.join()
print(taken, peak - before)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    taken, memory = map(float, done.stdout.split())
    return {"seconds": taken, "MB beyond the inputs": memory}


def published_ranking() -> float:
    """Seconds of the published script's way at 10 dimensions for 2,000 states: one matrix, one Python sort a row."""
    import numpy as np

    pred = torch.randn(2000, 10)
    target = pred + 0.5 * torch.randn(2000, 10)
    start = time.perf_counter()
    distance = ((target[:, None] - pred[None]) ** 2).sum(2)
    augmented = torch.cat([distance.diag()[:, None], distance], 1).numpy()
    np.stack([np.lexsort((np.arange(len(row)), row)) for row in augmented])
    published = time.perf_counter() - start
    start = time.perf_counter()
    ranks(pred, target)
    return published / (time.perf_counter() - start)


def main() -> None:
    """Run everything and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    results: dict[str, dict[str, float]] = {
        "environments, frames/s at 1,024 copies": environments(device),
        "parts of worlds at 1,024 copies, a second": partial_views(device),
        "recurrent cores, input 64": recurrent_layers(device, 64),
        "recurrent cores, input 600": recurrent_layers(device, 600),
        "training step of C-SWM's sizes (batch 1024, hidden 512)": training_step(device),
        "videos of 4 balls, 32 x 32 (size=cpu)": videos(device, "cpu"),
        "videos of 4 balls, 64 x 64 (size=paper)": videos(device, "paper"),
        "ranks of 10,000 states, 10 dimensions": ranking(10),
        "ranks of 10,000 states, 640 dimensions": ranking(640),
        "ranks of 2,000 states, 10 dimensions": {"published way / ours": published_ranking()},
    }
    table = Table("what", "measure", "value", title=f"{device}, {torch.get_num_threads()} threads")
    for what, values in results.items():
        for measure, value in values.items():
            table.add_row(what, measure, f"{value:,.0f}" if value >= 100 else f"{value:.3g}")
            what = ""
    Console(width=120).print(table)
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
