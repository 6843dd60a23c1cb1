"""How well an agent does: whole episodes, without favouring short ones, and tables over seeds."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.table import Table
from scipy import stats

from ..metrics import mean_interval, probability_of_improvement, seeds_interval
from .policy import RecurrentPolicy
from .rollout import each
from .vector import VectorEnvAdapter

MEASURES = ("success", "return", "length")


@torch.no_grad()
def play(
    policy: RecurrentPolicy,
    envs: VectorEnvAdapter,
    episodes: int,
    *,
    deterministic: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> dict[str, np.ndarray]:
    """Play whole episodes.

    Every environment plays the same number of episodes, the first ones it draws, however long they take; taking the first
    episodes to end among all environments would favour short ones. Of a team whose agents are environments each, an episode
    counts once, as its first agent lives through it.

    Args:
        policy: the agent's policy.
        envs: environments that are not used for training at the same time.
        episodes: how many in all; rounded up to a multiple of the environments (or teams), the rest is dropped.
        deterministic: the most probable action instead of a drawn one.
        seed: of the environments.
        progress: called with the number of episodes done.

    Returns:
        "return" and "length" ``(episodes,)``, and "success" where the environment tells it.
    """
    device = policy.device
    counted = slice(None, None, envs.team_size)
    B = envs.num_envs // envs.team_size
    share = -(-episodes // B)
    envs.seed(seed)
    observations = each(lambda part: part.to(device), envs.start())
    state = policy.initial_state(envs.num_envs)
    starts, empty = torch.ones(envs.num_envs, dtype=torch.bool, device=device), torch.zeros(B, dtype=torch.bool)
    total, length = np.zeros(B), np.zeros(B, dtype=int)
    returns, lengths, successes = (
        np.zeros((B, share)),
        np.zeros((B, share), dtype=int),
        np.zeros((B, share), dtype=bool),
    )
    done = np.zeros(B, dtype=int)
    told = False
    while (done < share).any():
        actions, _, _, state = policy(observations, state, starts, deterministic)
        step = envs.advance(policy.bounded(actions))
        valid = ~empty.numpy()
        total += step.rewards[counted].cpu().numpy() * valid
        length += valid
        ended = (step.terminated | step.truncated)[counted].cpu().numpy()
        success = None if step.success is None else step.success[counted]
        told |= success is not None
        for row in np.flatnonzero(ended & (done < share)):
            at = (row, done[row])
            returns[at], lengths[at] = total[row], length[row]
            successes[at] = bool(success[row]) if success is not None else False
            done[row] += 1
        total[ended], length[ended] = 0.0, 0
        observations = each(lambda part: part.to(device), step.observations)
        starts, empty = step.starts.to(device), step.empty[counted].cpu()
        if progress is not None:
            progress(min(int(done.sum()), episodes))
    played: dict[str, np.ndarray] = {"return": returns.T.flatten()[:episodes], "length": lengths.T.flatten()[:episodes]}
    return played | ({"success": successes.T.flatten()[:episodes]} if told else {})


def summary(played: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Mean and 95 % bootstrap interval over episodes of every measure, as JSON."""
    result: dict[str, Any] = {"episodes": len(played["return"])}
    for name, values in played.items():
        low, high = mean_interval(values.astype(float))
        result[name] = {"mean": float(values.mean()), "low": low, "high": high}
    return result


def interquartile_mean(values: np.ndarray) -> float:
    """The mean of the middle half (Agarwal et al. 2021), of any shape."""
    return float(stats.trim_mean(np.asarray(values, dtype=float).flatten(), 0.25))


def table(evaluations: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """One row a run and variant of its environment: success, return and length with 95 % intervals over episodes."""
    shown = Table("run", "core", "seed", "parameters", "variant", title=title, title_justify="left")
    names = [name for name in MEASURES if any(name in v for e in evaluations.values() for v in e["variants"].values())]
    for name in names:
        shown.add_column(f"{name}{', %' * (name == 'success')}\n95 %", justify="right")
    shown.add_column("episodes", justify="right")
    for run, evaluation in evaluations.items():
        for variant, result in evaluation["variants"].items():
            cells = [_cell(name, result[name]) if name in result else "" for name in names]
            about = (run, evaluation["core"], str(evaluation["seed"]), f"{evaluation['parameters']:,}")
            shown.add_row(*about, variant, *cells, str(result["episodes"]))
        shown.add_section()
    return shown


def _cell(name: str, result: Mapping[str, float]) -> str:
    scale, digits = (100, 1) if name == "success" else (1, 2)
    low, high = (f"{scale * result[edge]:.{digits}f}" for edge in ("low", "high"))
    return f"{scale * result['mean']:.{digits}f}\n{low}..{high}"


def by_core(evaluations: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Over seeds: each core's interquartile mean of its runs and how probably it beats GRU and LSTM.

    Fewer than five seeds are listed, not bootstrapped.
    """
    shown = Table("variant", "core", "parameters", "seeds", title=title, title_justify="left")
    shown.add_column("interquartile mean", justify="right")
    shown.add_column("each seed", justify="right")
    for baseline in ("gru", "lstm"):
        shown.add_column(f"P(better than {baseline})", justify="right")
    for variant in evaluations[0]["variants"]:
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for evaluation in evaluations:
            groups.setdefault(evaluation["label"], []).append(evaluation)
        means = {}
        for label, members in groups.items():
            measured = [m["variants"][variant] for m in members if variant in m["variants"]]
            means[label] = [m["success"]["mean"] if "success" in m else m["return"]["mean"] for m in measured]
        for label, values in means.items():
            middle = f"{interquartile_mean(np.array(values)):.3f}"
            if len(values) >= 5:
                low, high = seeds_interval(values, statistic=partial(stats.trim_mean, proportiontocut=0.25))
                middle += f" [{low:.3f}, {high:.3f}]"
            better = [
                f"{probability_of_improvement(values, means[name]):.2f}" if name in means and name != label else ""
                for name in ("gru", "lstm")
            ]
            parameters = f"{groups[label][0]['parameters']:,}"
            listed = ", ".join(f"{value:.3f}" for value in values)
            shown.add_row(variant, label, parameters, str(len(values)), middle, listed, *better)
        shown.add_section()
    return shown
