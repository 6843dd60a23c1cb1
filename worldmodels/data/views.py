"""Views: what is seen of a world from some of its places, at every step from others, and by no fixed number of eyes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import UserError
from .environments import make_envs
from .episodes import Episodes, draw_starts


class Views(NamedTuple):
    """Local observations with their positions; leading axes are any, mostly time and batch.

    Args:
        observations: ``(..., N, C, H, W)`` floats, or uint8 pictures ``(..., N, H, W, C)`` as environments give them.
        positions: ``(..., N, P)``.
        mask: ``(..., N)``, False where a view is absent; what it holds then may be anything.
        actions: what is done as pictures of the same views, ``(..., N, A, H, W)``; None where nothing is done.
    """

    observations: Tensor
    positions: Float[Tensor, "*B N P"]
    mask: Bool[Tensor, "*B N"]
    actions: Float[Tensor, "*B N A H W"] | None = None

    def at(self, index: slice | Tensor | int) -> "Views":
        """Every part at an index of the first axis."""
        actions = None if self.actions is None else self.actions[index]
        return Views(self.observations[index], self.positions[index], self.mask[index], actions)

    def reported(self, fraction: float, generator: torch.Generator) -> "Views":
        """These views with each present one kept with a probability, independently at every step."""
        if fraction >= 1.0:
            return self
        draw = torch.rand(self.mask.shape, generator=generator, device=generator.device)
        return self._replace(mask=self.mask & (draw < fraction).to(self.mask.device))

    def first(self, count: int) -> "Views":
        """These views without all but the first ``count`` at every step."""
        keep = torch.arange(self.mask.shape[-1], device=self.mask.device) < count
        return self._replace(mask=self.mask & keep)


class ViewSource:
    """Episodes of an environment, and what was seen in them, drawn on the device when it is needed.

    Three kinds of environment are understood, by what they offer:

    - ``crops(states, positions)``: pictures around any pixel, drawn from recorded states; every step shows ``num_views`` of
      them at random pixels.
    - ``views(units)`` and ``action_views(units, actions, positions)``: what each agent sees and does, drawn from recorded
      states.
    - neither: views as recorded, a Dict with "views", "positions" and "mask"; an agent's action is one-hot on its whole view.

    Args:
        episodes: what was recorded.
        env: the environment, on the same device.
        num_views: crops a step, for environments with ``crops``.
    """

    def __init__(self, episodes: Episodes, env: Any, num_views: int):
        self.episodes, self.env, self.num_views = episodes, env, num_views
        self.crops = hasattr(env, "crops")

    def seen(
        self,
        rows: Tensor,
        generator: torch.Generator,
        *,
        action_rows: Tensor | None = None,
        lingering: float = 0.0,
    ) -> Views:
        """What was seen at rows ``(T, B)`` of the episodes; what was done, if another time, at ``action_rows``.

        Args:
            rows: of the episodes' arrays.
            generator: source of the places of crops.
            action_rows: None for ``rows``.
            lingering: share of the crops that look where one of the step before looked.
        """
        arrays, env = self.episodes.arrays, self.env
        action_rows = rows if action_rows is None else action_rows
        stored = arrays["observations"][rows]
        if self.crops:
            shape = (*rows.shape, self.num_views, 2)
            drawn = torch.randint(env.image_size, shape, generator=generator, device=generator.device)
            positions = drawn.to(rows.device)
            stay = int(lingering * self.num_views)
            positions[1:, :, :stay] = positions[:-1, :, self.num_views - stay :]
            everything = torch.ones(shape[:-1], dtype=torch.bool, device=rows.device)
            return Views(env.crops(stored, positions), positions.float(), everything)
        actions = arrays["actions"][action_rows]
        if hasattr(env, "action_views"):
            views, positions, mask = env.views(stored)
            return Views(views, positions, mask, env.action_views(stored, actions, positions))
        sizes = [int(n) for n in env.single_action_space.nvec]
        done = [F.one_hot(part.long(), n) for part, n in zip(actions.unbind(-1), sizes, strict=True)]
        size = stored.shape[-3:-1] if stored.dtype == torch.uint8 else stored.shape[-2:]
        planes = torch.stack(done, dim=-2)[..., None, None].float().expand(-1, -1, -1, -1, *size)
        return Views(stored, arrays["positions"][rows], arrays["mask"][rows], planes)

    def windows(
        self, count: int, window: int, generator: torch.Generator, *, lingering: float
    ) -> tuple[Views, Tensor, Tensor]:
        """Views of ``count`` random windows of ``window`` + 1 steps, the episodes they are from and where they begin."""
        episode, step = draw_starts(self.episodes, count, window, generator=generator)
        time = torch.arange(window + 1, device=self.episodes.device)[:, None]
        rows = self.episodes.starts[episode] + step + time
        return self.seen(rows, generator, lingering=lingering), episode, step

    def whole(
        self, generator: torch.Generator, at_once: int, *, limit: int | None = None, shortest: int = 1
    ) -> Iterator[tuple[Tensor, Views]]:
        """Rows ``(T, b)`` and views of the first episodes of at least so many steps, a part of ``at_once`` views each.

        Beyond an episode's end its last row is repeated, and no view is there.
        """
        index = torch.nonzero(self.episodes.lengths >= shortest)[:, 0][:limit]
        there, rows = (part.T.contiguous() for part in self.episodes.frames(index))
        many = max(1, at_once // (len(rows) * self.num_views))
        for part, present in zip(rows.split(many, dim=1), there.split(many, dim=1), strict=True):
            views = self.seen(part, generator)
            yield part, views._replace(mask=views.mask & present[..., None])

    def reporting(self, views: Views, share: float, generator: torch.Generator) -> Views:
        """The views that report: of random crops so many, of agents each with this probability."""
        if self.crops:
            return views.first(max(1, round(share * self.num_views)))
        return views.reported(share, generator)

    def extent(self) -> tuple[float, float]:
        """How far positions reach, from the environment or from what was recorded."""
        size = getattr(self.env, "image_size", None) or getattr(self.env, "map_size", None)
        if size is not None:
            return float(size), float(size)
        furthest = self.episodes.arrays["positions"][:].amax((0, 1)) + 1.0
        return float(furthest[0]), float(furthest[1])


def first_views(env_id: str, env_kwargs: Mapping[str, Any], num_views: int) -> tuple[Views, bool]:
    """One step of views of an environment, of the shapes that its recorded episodes will have; and whether they are crops.

    Raises:
        UserError: an environment whose observations are no views.
    """
    env = make_envs(env_id, 1, env_kwargs=env_kwargs)
    if hasattr(env, "crops") or hasattr(env, "action_views"):
        states, _ = env.reset(seed=0)
        if not isinstance(states, Tensor) or states.dim() != 3:
            raise UserError(
                f"{env_id} records {env.single_observation_space}; views are drawn from its table of states, so set "
                "task.env_kwargs.observation=state (BouncingBalls) or units (Skirmish)"
            )
        actions = torch.zeros(1, *(env.single_action_space.shape or ()), dtype=torch.int64)
        arrays = {"observations": states, "actions": actions}
    else:
        space: Any = env.single_observation_space
        if not hasattr(space, "spaces") or "views" not in space.spaces:
            raise UserError(f"{env_id} observes {space}; expected a Dict with 'views', 'positions' and 'mask'")
        number = space["mask"].shape[0]
        if len(space["views"].shape) != 4 or len(getattr(env.single_action_space, "nvec", ())) != number:
            raise UserError(
                f"{env_id} has views {space['views'].shape} and actions {env.single_action_space}; expected views "
                f"(n, H, W, C) or (n, C, H, W) and MultiDiscrete actions, one for each of {number} agents"
            )
        arrays = {name: torch.as_tensor(space[name].sample())[None] for name in ("positions", "mask")}
        arrays["observations"] = torch.as_tensor(space["views"].sample())[None]
        arrays["actions"] = torch.as_tensor(env.single_action_space.sample())[None]
    source = ViewSource(Episodes(arrays, torch.zeros(1, dtype=torch.int64), {}), env, num_views)
    views = source.seen(torch.zeros(1, 1, dtype=torch.int64), torch.Generator().manual_seed(0))
    env.close()
    return views, source.crops


def side_by_side(parts: Sequence[Views]) -> Views:
    """Views of several batches as one, with as many views a step as the most of them has."""
    most = max(part.mask.shape[-1] for part in parts)

    def padded(value: Tensor) -> Tensor:
        missing = most - value.shape[2]
        return (
            value
            if missing == 0
            else torch.cat([value, value.new_zeros(*value.shape[:2], missing, *value.shape[3:])], 2)
        )

    columns = [
        None if any(value is None for value in column) else torch.cat([padded(value) for value in column], dim=1)
        for column in zip(*parts, strict=True)
    ]
    return Views(*columns)  # type: ignore[arg-type]
