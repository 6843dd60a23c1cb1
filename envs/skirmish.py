"""Small battles of two teams of StarCraft II units, simulated in torch: the scenarios of SMAC without the game.

Sources: Samvelyan et al. 2019, "The StarCraft Multi-Agent Challenge" (scenarios, actions, reward); Rahaman et al. 2020,
"S2RMs: Spatially Structured Recurrent Modules" (views, see ``polar.py``); the units' stats are those of patch 4.x, as
Liquipedia's unit pages list them.

This is an approximation of our own, for training and testing models where the game is not at hand. It has never been
compared with the game; ``Skirmish`` says what it models and what it leaves out.
"""

import math
import re
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, MultiBinary, MultiDiscrete
from torch import Tensor

from . import random
from .batched import BatchedEnv, Observation, SingleEnv, State
from .polar import CHANNELS, UNIT_TYPES, Divisors, PolarGrid, action_image, polar_image

LOOPS = 8  # game loops in a step
LOOPS_PER_SECOND = 22.4  # at the speed "faster", in whose seconds the stats below are given

# The columns of the table of units.
COLUMNS = (
    "team",  # 0 the agents', 1 the other
    "type",  # number in polar.UNIT_TYPES
    "x",  # map units to the east
    "y",  # map units to the north
    "health",  # hit points; a unit with none is dead
    "energy",  # 0: none of these units has any
    "cooldown",  # game loops until the weapon is ready
    "shield",  # points
)
_TEAM, _TYPE, _X, _Y, _HEALTH, _ENERGY, _COOLDOWN, _SHIELD = range(len(COLUMNS))

# A unit's actions: these, then "attack enemy 0", "attack enemy 1", ...; in pictures of actions all attacks are one.
NO_OP, STOP, NORTH, SOUTH, EAST, WEST, ATTACK = range(7)
ACTIONS = ("no-op", "stop", "north", "south", "east", "west", "attack")
_HEADINGS = ((0.0, 0.0), (0.0, 0.0), (0.0, 1.0), (0.0, -1.0), (1.0, 0.0), (-1.0, 0.0), (0.0, 0.0))


class Unit(NamedTuple):
    """What a unit of one type is and does.

    Args:
        health: hit points.
        shield: points, lost before hit points are.
        armour: taken from what each hit does to hit points.
        damage: of a hit.
        hits: of an attack.
        bonus: damage more per hit against units that are ``against``.
        against: an attribute, or "".
        cooldown: seconds between attacks.
        range: from edge to edge, map units.
        speed: map units per second.
        radius: map units.
        attributes: what the unit is.
        splash: the attack also hits enemies beside the target.
    """

    health: float
    shield: float
    armour: float
    damage: float
    hits: int
    bonus: float
    against: str
    cooldown: float
    range: float
    speed: float
    radius: float
    attributes: tuple[str, ...]
    splash: bool = False


UNITS = {
    "stalker": Unit(80.0, 80.0, 1.0, 13.0, 1, 5.0, "armoured", 1.34, 6.0, 4.13, 0.625, ("armoured", "mechanical")),
    "zealot": Unit(100.0, 50.0, 1.0, 8.0, 2, 0.0, "", 0.86, 0.1, 3.15, 0.5, ("light", "biological")),
    "colossus": Unit(
        200.0, 150.0, 1.0, 10.0, 2, 5.0, "light", 1.07, 7.0, 3.15, 1.0, ("armoured", "massive", "mechanical"), True
    ),
    "marine": Unit(45.0, 0.0, 0.0, 6.0, 1, 0.0, "", 0.61, 5.0, 3.15, 0.375, ("light", "biological")),
}
_LETTERS = {"s": "stalker", "z": "zealot", "c": "colossus", "m": "marine"}

SPLASH_WIDTH, SPLASH_DEPTH = 2.8, 0.3  # of the colossus's line of fire, across the shot and along it
MOVE = 2.0  # map units a move aims at, as in SMAC; a move is possible if the place half as far is on the map
_LEAST_DAMAGE = 0.5  # of a hit, however thick the armour
_CALM = round(10 * LOOPS_PER_SECOND)  # loops without damage until shields grow again
# Points of health and shield are multiples of 1/4096, as in the game, so sums of them are exact in any order.
_POINT = 4096
_REGENERATION = round(2 / LOOPS_PER_SECOND * _POINT) / _POINT  # shield points in a loop: 2 a second
_KILL_REWARD, _WIN_REWARD, _MOST_REWARD = 10.0, 200.0, 20.0

_CENTRES = (9 / 32, 23 / 32)  # of the teams at the start, in widths of the map
_JITTER, _SHIFT = 0.25, 1.0  # of each unit's and of each team's start, map units, either way
_LONGEST_PUSH = 0.25  # map units in a loop
_PIXELS = 16  # of a picture, to the map unit
_BAR = 14  # pixels of a full bar
_GROUND = (104, 92, 74), (214, 202, 176)  # colours of the lowest and the highest
_TEAM_COLORS = (36, 84, 200), (200, 40, 36)
_MARKS = {
    "stalker": ".####\n#....\n#....\n.###.\n....#\n....#\n####.",
    "zealot": "#####\n....#\n...#.\n..#..\n.#...\n#....\n#####",
    "colossus": ".###.\n#...#\n#....\n#....\n#....\n#...#\n.###.",
    "marine": "#...#\n##.##\n#.#.#\n#...#\n#...#\n#...#\n#...#",
}
_TINY, _NEVER = 1e-12, 1e12  # squared distances: of units at one place, of what cannot be a target
_NOWHERE = -1e6  # where nothing is seen, not even the ground


def parse_scenario(scenario: str) -> list[str]:
    """The units of a team by name, in order: "1c2z" is a colossus and two zealots.

    Raises:
        ValueError: it does not consist of numbers and letters of unit types.
    """
    groups = re.findall(r"(\d+)([a-z])", scenario)
    letters = ", ".join(f"{letter} {name}" for letter, name in _LETTERS.items())
    if not groups or "".join(count + letter for count, letter in groups) != scenario:
        raise ValueError(f"the scenario is {scenario!r}; give numbers and letters such as '3s5z' ({letters})")
    for count, letter in groups:
        if letter not in _LETTERS:
            raise ValueError(f"the scenario {scenario!r} has the letter {letter!r}; known are {letters}")
        if int(count) < 1:
            raise ValueError(f"the scenario {scenario!r} has {count}{letter}; give at least one unit of each letter")
    return [_LETTERS[letter] for count, letter in groups for _ in range(int(count))]


class Skirmish(BatchedEnv):
    """A micro-battle: each friendly unit is an agent, the other team attacks whoever is nearest.

    ==================  =================================================================================================
    modelled            how
    ==================  =================================================================================================
    time                a step is 8 game loops of 1/22.4 s
    damage              armour off each hit on hit points (at least 0.5 remains), bonus against attributes, several hits
    shields             lost first, without armour; 10 s after the last damage they grow by 2 a second
    weapons             hit at once when the target is in range, edge to edge; ready again after a whole number of loops
    colossus            hits every enemy that touches a box of 2.8 by 0.3 across the shot, with full damage
    movement            straight, at full speed or not at all
    collision           units that overlap push each other apart by half the overlap each, at most 0.25 a loop
    other team          each unit goes for the friendly unit nearest to it, until that is dead; decided once a step
    ground              a height, drawn and without effect
    ==================  =================================================================================================

    Left out: path finding, obstacles, acceleration, turning, the time shots fly and weapons take to fire, high ground, sight
    (the other team sees all), abilities (blink, charge, stimpacks), upgrades, the colossus's walking over others.

    Actions of a unit: 0 no-op (the dead's), 1 stop, 2 to 5 move north, south, east, west, 6 + j attack enemy j, going
    there if it is out of range. What is impossible (a dead enemy, a move off the map, acting as no-op) is a stop, and a
    unit that stops does not attack. A move aims at a point 2 map units away and gets as far as the unit's speed allows
    in a step, 1.1 (zealot) to 1.5 (stalker). With ``targets="nearest"`` there is one attack only, 6, on the living enemy that
    is nearest as the step begins; so actions are ``ACTIONS`` in every scenario, as those of ``StarCraft2`` are.

    Observation "polar": Dict of "views" ``(n, 15, I, J)``, one per friendly unit (see ``polar.py``), "positions"
    ``(n, 2)`` in map units and "mask" ``(n,)``; the dead are 0 in all three. "units": the table ``(U, 8)`` of
    ``COLUMNS``, friendly units first; dead ones stay in it with health 0, where they fell.

    Reward, one for all: what the enemies have lost of health and shields in the step (less what grew again), 10 for each
    kill and 200 for the win, scaled so that a won battle gives 20. SMAC takes the absolute value, so there enemies'
    shields growing again is rewarded.

    Info: "units" ``(U, 8)``, "mask" ``(n,)`` who is alive, "positions" ``(n, 2)``, "targets" ``(n,)`` whom each attacks (-1:
    nobody), "won" and "success": all enemies are dead and not all friends. ``reset(options={"units": (B, U, 8)})`` sets
    the table; its teams and types must be the scenario's, points beyond what a unit can have are cut off, and shields grow
    from the start. ``height`` ``(map_size, map_size)`` is the ground's, by x and y, the same in all copies and episodes.

    Args:
        num_envs: copies B.
        scenario: the friendly units, such as "3s5z": numbers of s stalkers, z zealots, c colossi, m marines.
        enemy: the other team; None for the same.
        observation: "polar" or "units".
        targets: "each" enemy can be attacked, or the "nearest".
        num_radii: rings of a view.
        num_angles: directions of a view.
        radial_step: map units from ring to ring.
        map_size: side of the map in map units.
        terrain: seed of the height of the ground; None for flat ground.
        ends: an episode ends when a team is dead; False: it goes on to the time limit, as the paper's trajectories do.
        device: where the copies live.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
    """

    terminates: ClassVar[bool] = True
    option_names: ClassVar[tuple[str, ...]] = ("units",)
    metadata = {**BatchedEnv.metadata, "render_fps": 3, "actions": ACTIONS}  # a step is 0.36 s

    def __init__(
        self,
        num_envs: int = 1,
        *,
        scenario: str = "3s5z",
        enemy: str | None = None,
        observation: str = "polar",
        targets: str = "each",
        num_radii: int = 9,
        num_angles: int = 18,
        radial_step: float = 1.0,
        map_size: int = 32,
        terrain: int | None = 0,
        ends: bool = True,
        device: str = "cpu",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ):
        if observation not in ("polar", "units"):
            raise ValueError(f"observation is {observation!r}; expected 'polar' or 'units'")
        if targets not in ("each", "nearest"):
            raise ValueError(f"targets is {targets!r}; expected 'each' or 'nearest'")
        if num_radii < 1 or num_angles < 1 or radial_step <= 0:
            raise ValueError(f"a view of {num_radii} x {num_angles} pixels, rings {radial_step} apart, shows nothing")
        self.scenario, self.enemy = scenario, scenario if enemy is None else enemy
        names = [parse_scenario(self.scenario), parse_scenario(self.enemy)]
        kinds = [UNITS[name] for name in names[0] + names[1]]
        self.num_friends, self.num_enemies = n, m = len(names[0]), len(names[1])
        self.num_units = n + m
        self.observation, self.targets = observation, targets
        self.grid = PolarGrid(num_radii, num_angles, radial_step)
        self.map_size = map_size
        self.ends = ends
        self._formations = [_formation(team, map_size, at) for team, at in zip(names, _CENTRES, strict=True)]
        if observation == "polar":
            views = Box(0.0, 1.0, (n, CHANNELS, num_radii, num_angles), np.float32)
            positions = Box(0.0, map_size, (n, 2), np.float32)
            self.single_observation_space = Dict({"views": views, "positions": positions, "mask": MultiBinary(n)})
        else:
            most = (1, len(UNIT_TYPES) - 1, map_size, map_size, *Divisors())  # no unit has more than these
            high = np.tile(np.array(most, dtype=np.float32), (n + m, 1))
            self.single_observation_space = Box(np.zeros_like(high), high, dtype=np.float32)
        if targets == "each":
            self.metadata = {**self.metadata, "actions": (*ACTIONS[:ATTACK], *(f"attack enemy {i}" for i in range(m)))}
        self.num_actions = ATTACK + (m if targets == "each" else 1)
        self.single_action_space = MultiDiscrete([self.num_actions] * n)
        super().__init__(num_envs, device, max_episode_steps, render_mode)

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self.device)[:, None]

        self.height = _terrain(terrain, map_size).to(self.device)  # (X, Y) in [0, 1]
        self._teams = column([0.0] * n + [1.0] * m)
        self._types = column([float(UNIT_TYPES.index(name)) for name in names[0] + names[1]])
        self._health = column([kind.health for kind in kinds])
        self._shield = column([kind.shield for kind in kinds])
        self._cooldown = column([float(_loops(kind)) for kind in kinds])
        self._range = column([kind.range for kind in kinds])
        self._radius = column([kind.radius for kind in kinds])
        self._speed = column([kind.speed / LOOPS_PER_SECOND for kind in kinds])
        self._touching = ((self._radius + self._radius.t()) / 2).fill_diagonal_(-1)[..., None]  # (U, U, 1)
        numbers = torch.arange(1.0, n + m + 1, device=self.device)[:, None]
        self._aside, self._far = 1e-5 * numbers, 1e4 * numbers
        self._border = map_size - self._radius
        self._first_opponent = torch.tensor([n] * n + [0] * m, device=self.device)[:, None]
        self._headings = torch.tensor(_HEADINGS, device=self.device).t().contiguous()  # (2, 7)
        self._weapons = _Weapons(kinds, n, self.device)
        self._most = float(self._health[n:].sum() + self._shield[n:].sum()) + _KILL_REWARD * m + _WIN_REWARD

    def _initial(self, key: Tensor, options: dict[str, Any]) -> State:
        R, U = len(key), self.num_units
        if "units" in options:
            units = self._units_from(options["units"])
        else:
            places = [self._line_up(random.fold(key, team), team) for team in (0, 1)]
            units = torch.zeros(R, U, len(COLUMNS), device=self.device)
            units[..., _X : _Y + 1] = torch.cat(places, 1)
            fixed = {_TEAM: self._teams, _TYPE: self._types, _HEALTH: self._health, _SHIELD: self._shield}
            for name, value in fixed.items():
                units[..., name] = value[:, 0]
        calm = torch.full((R, U), _CALM, dtype=torch.float32, device=self.device)
        target = torch.full((R, U), -1, dtype=torch.int64, device=self.device)
        return {"units": units, "calm": calm, "target": target}

    def _line_up(self, key: Tensor, team: int) -> Tensor:
        """Start places of a team, ``(R, n, 2)``: places of its formation in random order, each a little off."""
        places, size = self._formations[team].to(self.device), (self.num_friends, self.num_enemies)[team]
        order = random.choice(random.fold(key, 0), len(places), size)
        apart = (2 * random.uniform(random.fold(key, 1), (size, 2)) - 1) * _JITTER
        together = (2 * random.uniform(random.fold(key, 2), (1, 2)) - 1) * _SHIFT
        return places[order] + apart + together

    def _units_from(self, value: Any) -> Tensor:
        """A table set by hand, checked."""
        shape = (self.num_envs, self.num_units, len(COLUMNS))
        units = torch.as_tensor(value, dtype=torch.float32, device=self.device)
        if units.shape not in (shape, shape[1:]):
            raise ValueError(f"units has shape {tuple(units.shape)}; expected {shape} with the columns {COLUMNS}")
        units = units.expand(shape).clone()
        given, expected = units[..., : _TYPE + 1], torch.cat([self._teams, self._types], 1)
        if not bool((given == expected).all()):
            raise ValueError(f"the teams and types of units are not those of {self.scenario} against {self.enemy}")
        if not bool(units.isfinite().all()):
            raise ValueError("units has numbers that are not finite; give health 0 to the dead")
        points = torch.stack([self._health, 0 * self._health, self._cooldown, self._shield], -1)[:, 0]
        units[..., _X : _Y + 1] = units[..., _X : _Y + 1].clamp(0, self.map_size)
        units[..., _HEALTH:] = torch.minimum(units[..., _HEALTH:].clamp(min=0), points)
        units[..., _HEALTH:] = (units[..., _HEALTH:] * _POINT).round() / _POINT
        units[..., _COOLDOWN] = units[..., _COOLDOWN].round()
        return units

    def _checked(self, actions: Any) -> Tensor:
        actions = super()._checked(actions).long()
        last = self.num_actions - 1
        if actions.device.type == "cpu" and (int(actions.min()) < 0 or int(actions.max()) > last):
            raise ValueError(f"actions reach from {int(actions.min())} to {int(actions.max())}; expected 0 to {last}")
        return actions

    def _transition(
        self, state: State, actions: Tensor, key: Tensor
    ) -> tuple[State, Tensor, Tensor, dict[str, Tensor]]:
        n = self.num_friends
        units = state["units"].permute(2, 1, 0).contiguous()  # copies last, so that pairs of units are long rows
        calm, last = state["calm"].t().contiguous(), state["target"].t().contiguous()
        points, lived = units[_HEALTH, n:] + units[_SHIELD, n:], units[_HEALTH, n:] > 0
        goal, attacks, velocity = self._orders(units, last, actions.t().contiguous())
        self._fight(units, calm, goal, attacks, velocity)
        target = torch.where(attacks, goal - self._first_opponent, -1)

        alive = units[_HEALTH] > 0
        killed = lived & ~alive[n:]
        lost = (points - units[_HEALTH, n:] - units[_SHIELD, n:]).sum(0)
        some, none = alive[:n].any(0), ~alive[n:].any(0)
        won = some & none & killed.any(0)
        rewards = (lost + _KILL_REWARD * killed.sum(0) + _WIN_REWARD * won) * (_MOST_REWARD / self._most)
        over = ~some | none if self.ends else torch.zeros_like(won)
        next_state = {"units": units.permute(2, 1, 0), "calm": calm.t(), "target": target.t()}
        return {name: value.contiguous() for name, value in next_state.items()}, rewards, over, {}

    def _orders(self, units: Tensor, last: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What each unit sets out to do in this step.

        Args:
            units: ``(8, U, B)``.
            last: whom each attacked in the last step, among its opponents, -1 for nobody, ``(U, B)``.
            actions: of the friendly units, ``(n, B)``.

        Returns:
            Its target's row ``(U, B)``, whether it attacks ``(U, B)`` bool, and where it moves if not, map units a loop,
            ``(2, U, B)``.
        """
        n, m = self.num_friends, self.num_enemies
        place, alive = units[_X : _Y + 1], units[_HEALTH] > 0
        if self.targets == "each":
            chosen = (actions - ATTACK).clamp(0, m - 1)
        else:
            chosen = _nearest(place[:, :n], place[:, n:], alive[n:])
        attacks = (actions >= ATTACK) & alive[:n] & alive[n:].gather(0, chosen)

        heading = self._headings.index_select(1, actions.clamp(0, ATTACK).flatten()).view(2, *actions.shape)
        ahead = place[:, :n] + heading * (MOVE / 2)
        on_map = ((ahead >= 0) & (ahead <= self.map_size)).all(0)
        velocity = heading * (self._speed[:n] * (on_map & alive[:n]))

        kept = last[n:].clamp(min=0)
        keeps = (last[n:] >= 0) & alive[:n].gather(0, kept)
        theirs = torch.where(keeps, kept, _nearest(place[:, n:], place[:, :n], alive[:n]))
        attacks = torch.cat([attacks, alive[n:] & alive[:n].any(0)])
        goal = torch.cat([chosen, theirs]) + self._first_opponent
        return goal, attacks, torch.nn.functional.pad(velocity, (0, 0, 0, m))

    def _fight(self, units: Tensor, calm: Tensor, goal: Tensor, attacks: Tensor, velocity: Tensor) -> None:
        """Eight game loops; ``units`` ``(8, U, B)`` and ``calm`` ``(U, B)`` are changed in place."""
        place, health, cooldown, shield = units[_X : _Y + 1], units[_HEALTH], units[_COOLDOWN], units[_SHIELD]
        goals = goal.expand(2, -1, -1)
        reach = self._range + self._radius + self._radius.expand_as(goal).gather(0, goal)
        reach *= reach
        volley = self._weapons.aim(goal)
        room = place.new_empty(4, *goal.shape[:1], *goal.shape)  # for what is known of pairs of units, all loops long
        for _ in range(LOOPS):
            alive = health > 0
            cooldown.sub_(1).clamp_(min=0)
            way = place.gather(1, goals).sub_(place)
            distance = (way * way).sum(0)
            active = attacks & alive & alive.gather(0, goal)
            in_range = distance <= reach
            fires = (active & in_range & (cooldown <= 0)).float()
            cooldown.add_(fires * self._cooldown)

            hurt, struck = self._weapons.damage(volley, fires, shield, place, way, alive, room[0])
            health.sub_(hurt).clamp_(min=0)
            shield.sub_(struck).clamp_(min=0)
            calm.add_(1).mul_((struck == 0) & (health > 0))
            shield.add_((calm >= _CALM) * _REGENERATION)
            torch.minimum(shield, self._shield, out=shield)

            pace = distance.clamp_(min=_TINY).rsqrt_().mul_(self._speed).mul_(active & ~in_range)
            place.add_(way.mul_(pace)).add_(velocity * alive)
            place.add_(self._push(place, alive, room))
            torch.minimum(place.clamp_(min=self._radius), self._border, out=place)
        cooldown.mul_(health > 0)

    def _push(self, place: Tensor, alive: Tensor, room: Tensor) -> Tensor:
        """How far units that overlap push each other in a loop, ``(2, U, B)``; overwrites ``room`` ``(4, U, U, B)``."""
        gap, share, square = room[:2], room[2], room[3]
        # The dead are put far away from all; two at the very same place part along a line that their numbers give.
        place = place + self._aside + self._far * ~alive
        torch.sub(place[:, :, None], place[:, None], out=gap)
        torch.mul(gap[0], gap[0], out=share)
        torch.mul(gap[1], gap[1], out=square)
        share.add_(square).rsqrt_()
        # Half the overlap over the distance; on the diagonal, where the distance is 0, nothing.
        share.mul_(self._touching).sub_(0.5).clamp_(0, 1e6)
        return _sum_over(gap.mul_(share)).clamp_(-_LONGEST_PUSH, _LONGEST_PUSH)

    def views(self, units: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """What is seen of tables of units: all a data set has to store.

        Args:
            units: tables, ``(..., U, 8)``.
            positions: places to see from in map units, ``(..., A, 2)``; None for the friendly units'.

        Returns:
            Views ``(..., A, 15, I, J)``, positions ``(..., A, 2)``, and the mask ``(..., A)`` bool: False for a dead unit,
            whose view and position are 0.
        """
        observers, positions, mask = self._observers(units, positions)
        ox, oy = observers.unbind(-1)
        team, kind, x, y, health, energy, cooldown, shield = units.unbind(-1)
        stats = (x, y, health, energy, cooldown, shield, self.height.to(units.device))
        views = polar_image(team, kind, *stats, observers_x=ox, observers_y=oy, grid=self.grid)
        return views, positions, mask

    def action_views(self, units: Tensor, actions: Tensor, positions: Tensor | None = None) -> Tensor:
        """What the friendly units in view do, in ``ACTIONS``, whatever the number of enemies, and "unknown".

        Args:
            units: tables, ``(..., U, 8)``.
            actions: of the friendly units, ``(..., n)``.
            positions: places to see from in map units, ``(..., A, 2)``; None for the friendly units'.

        Returns:
            ``(..., A, 8, I, J)``; 0 for the view of a dead unit.
        """
        observers, _, mask = self._observers(units, positions)
        known = torch.nn.functional.pad(actions.clamp(max=ATTACK), (0, self.num_enemies))
        ox, oy = observers.unbind(-1)
        team, _, x, y, health, *_ = units.unbind(-1)
        views = action_image(team, x, y, health, known, len(ACTIONS), observers_x=ox, observers_y=oy, grid=self.grid)
        return views.mul_(mask[..., None, None, None])

    def _observers(self, units: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Where to see from (far off for the dead), positions, mask."""
        if units.shape[-2:] != (self.num_units, len(COLUMNS)):
            expected = (self.num_units, len(COLUMNS))
            raise ValueError(f"units has shape {tuple(units.shape)}; expected (..., {expected[0]}, {expected[1]})")
        if positions is not None:
            return positions, positions, torch.ones_like(positions[..., 0], dtype=torch.bool)
        friends = units[..., : self.num_friends, :]
        mask = friends[..., _HEALTH] > 0
        places = friends[..., _X : _Y + 1]
        return (
            torch.where(mask[..., None], places, _NOWHERE),
            torch.where(mask[..., None], places, 0.0),
            mask,
        )

    def _observe(self, state: State) -> Observation:
        if self.observation == "units":
            return state["units"].clone()
        views, positions, mask = self.views(state["units"])
        return {"views": views, "positions": positions, "mask": mask.to(torch.int8)}

    def _image(self, state: State) -> Tensor:
        """The map from above, north up, ``(B, 16 map_size, 16 map_size, 3)``.

        Ground the lighter the higher; living units as discs in their team's colour (ours blue) with the letter of their
        type, above it a bar of the shield left and one of the health left; the dead as crosses; lines to the attacked.
        """
        units, n = state["units"], self.num_friends
        canvas = _Canvas(len(units), self.map_size, self.height)
        alive, places = units[..., _HEALTH] > 0, units[..., _X : _Y + 1]
        targets = torch.cat([state["target"][:, :n] + n, state["target"][:, n:]], 1).clamp(min=0)
        shown = (state["target"] >= 0) & alive & alive.gather(1, targets)
        for team, own in ((0, slice(n)), (1, slice(n, None))):
            ends = places.gather(1, targets[:, own, None].expand(-1, -1, 2))
            canvas.lines(places[:, own], ends, shown[:, own], _TEAM_COLORS[team])
        for i, color in enumerate([_TEAM_COLORS[0]] * n + [_TEAM_COLORS[1]] * self.num_enemies):
            name = UNIT_TYPES[int(self._types[i])]
            canvas.stamp(places[:, i], ~alive[:, i], _cross(), ((90, 80, 70),))
            rim = (color[0] // 2, color[1] // 2, color[2] // 2)
            canvas.stamp(places[:, i], alive[:, i], _disc(name), (color, rim, (255, 255, 255)))
        for i in range(self.num_units):
            above = places[:, i] + places.new_tensor([0.0, float(self._radius[i]) + 0.2])
            canvas.bar(above, alive[:, i], units[:, i, _HEALTH] / self._health[i], 0, (70, 220, 70))
            if self._shield[i]:
                canvas.bar(above, alive[:, i], units[:, i, _SHIELD] / self._shield[i], 1, (150, 210, 255))
        return canvas.picture()

    def _info(self, state: State, events: dict[str, Tensor] | None) -> dict[str, Tensor]:
        units, n = state["units"], self.num_friends
        _, positions, mask = self._observers(units, None)
        won = mask.any(1) & ~(units[:, n:, _HEALTH] > 0).any(1)
        return {
            "units": units.clone(),
            "mask": mask,
            "positions": positions,
            "targets": state["target"][:, :n].clone(),
            "won": won,
            "success": won.clone(),
        }


class _Weapons:
    """What the units' weapons do.

    Args:
        kinds: of all units.
        num_friends: how many of them, the first, are the friendly team.
        device: where the copies live.
    """

    def __init__(self, kinds: list[Unit], num_friends: int, device: torch.device):
        def table(rows: list[Any]) -> Tensor:
            return torch.tensor(rows, dtype=torch.float32, device=device)

        hit = [[i.damage + i.bonus * (i.against in j.attributes) for j in kinds] for i in kinds]
        self.hit = table(hit)  # (U, U): of one hit of each on each
        self.second = self.hit * table([i.hits - 1 for i in kinds])[:, None]
        self.armour = table([i.armour for i in kinds])[:, None]
        self.radius = table([i.radius for i in kinds])[:, None]
        self.earlier = torch.ones(len(kinds), len(kinds), device=device).tril(-1)[..., None]
        splashing = [i for i, kind in enumerate(kinds) if kind.splash]
        self.splashing = torch.tensor(splashing, dtype=torch.int64, device=device)
        team = torch.arange(len(kinds), device=device) >= num_friends
        self.opponents = (team[self.splashing, None] != team)[..., None]  # (s, U, 1)

    def aim(self, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What stays the same while the targets are these rows ``(U, B)``; see ``damage``."""
        hit, second = self.hit.gather(1, goal), self.second.gather(1, goal)
        armour = self.armour.expand_as(goal).gather(0, goal)
        return goal, hit, second, armour, (goal[:, None] == goal) * self.earlier

    def damage(
        self,
        volley: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        fires: Tensor,
        shield: Tensor,
        place: Tensor,
        way: Tensor,
        alive: Tensor,
        room: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What the units suffer in a loop in which some fire.

        Hits come in the order of the shooters, a shooter's two one after the other, and what splashes beside the targets
        after all these. Each takes from the shield what is left of it, and with the rest, less the armour, from the hit
        points.

        Args:
            volley: what ``aim`` gave.
            fires: 1 for who does, ``(U, B)``.
            shield: ``(U, B)``.
            place: ``(2, U, B)``.
            way: from each to its target, ``(2, U, B)``.
            alive: ``(U, B)`` bool.
            room: to be overwritten, ``(U, U, B)``.

        Returns:
            Hit points lost, and the damage of all hits together, ``(U, B)``.
        """
        goal, hit, second, armour, earlier = volley
        first, then = fires * hit, fires * second
        total = first + then
        # Sums of whole numbers (and below of multiples of 1/4096) are exact, so their order does not matter.
        left = shield.gather(0, goal).sub_(torch.mul(earlier, total, out=room).sum(1)).clamp_(min=0)
        hurt = torch.zeros_like(shield).scatter_add_(0, goal, _pierced(first, then, left, armour))
        struck = torch.zeros_like(shield).scatter_add_(0, goal, total)
        if len(self.splashing):
            beside = self._beside(goal, fires, place, way) & alive
            first = beside * self.hit[self.splashing, :, None]  # (s, U, B)
            then = beside * self.second[self.splashing, :, None]
            total = first + then
            left = (shield - struck - (total.cumsum(0) - total)).clamp_(min=0)
            hurt += _pierced(first, then, left, self.armour).sum(0)
            struck += total.sum(0)
        return hurt, struck

    def _beside(self, goal: Tensor, fires: Tensor, place: Tensor, way: Tensor) -> Tensor:
        """Whom else shots that splash hit, ``(s, U, B)`` bool: units whose disc's box touches the box of the shot."""
        way, goal, fires = way[:, self.splashing], goal[self.splashing], fires[self.splashing]
        ahead = way / (way[0] * way[0]).add_(way[1] * way[1]).sqrt_().clamp_(min=_TINY)
        off = place[:, None] - place.gather(1, goal.expand(2, -1, -1))[:, :, None]  # (2, s, U, B)
        along = off[0] * ahead[0][:, None] + off[1] * ahead[1][:, None]
        across = off[1] * ahead[0][:, None] - off[0] * ahead[1][:, None]
        near = (along.abs() <= SPLASH_DEPTH / 2 + self.radius) & (across.abs() <= SPLASH_WIDTH / 2 + self.radius)
        other = goal[:, None] != torch.arange(place.shape[1], device=place.device)[:, None]
        return near & other & self.opponents & (fires > 0)[:, None]


def _pierced(first: Tensor, then: Tensor, shield: Tensor, armour: Tensor) -> Tensor:
    """Hit points lost by one hit and then another, 0 for no hit, on so much shield."""
    rests = first - shield, then - (shield - first).clamp_(min=0)
    one, other = ((rest - armour).clamp_(min=_LEAST_DAMAGE).mul_(rest > 0) for rest in rests)
    return one.add_(other)


class _Canvas:
    """Pictures of a batch of maps, north up, drawn upon one layer after the other.

    Args:
        num_envs: pictures B.
        map_size: map units of a side.
        height: of the ground, ``(X, Y)``.
    """

    def __init__(self, num_envs: int, map_size: int, height: Tensor):
        self.side = map_size * _PIXELS
        low, high = (height.new_tensor(color) for color in _GROUND)
        ground = low + height.t().flip(0)[..., None] * (high - low)
        ground = ground.to(torch.uint8).repeat_interleave(_PIXELS, 0).repeat_interleave(_PIXELS, 1).view(1, -1, 3)
        # One pixel more than the picture has takes all that lies outside.
        self.pixels = torch.nn.functional.pad(ground, (0, 0, 0, 1)).repeat(num_envs, 1, 1)

    def paint(self, right: Tensor, down: Tensor, shown: Tensor, colors: Tensor) -> None:
        """Set pixels ``(B, N)`` to colours ``(N, 3)`` where ``shown`` ``(B, N)``."""
        inside = (right >= 0) & (right < self.side) & (down >= 0) & (down < self.side) & shown
        index = torch.where(inside, down * self.side + right, self.side * self.side)
        self.pixels.scatter_(1, index[..., None].expand(-1, -1, 3), colors.expand(*index.shape, 3))

    def at(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The pixels of places ``(..., 2)`` in map units: to the right, and down."""
        right, up = (places * _PIXELS).round().long().unbind(-1)
        return right, self.side - up

    def lines(self, starts: Tensor, ends: Tensor, shown: Tensor, color: tuple[int, int, int]) -> None:
        """Lines ``(B, N, 2)`` to ``(B, N, 2)``, dotted."""
        part = torch.linspace(0, 1, 100, device=starts.device)[:, None]
        right, down = self.at(starts[:, :, None] + part * (ends - starts)[:, :, None])
        self.paint(right.flatten(1), down.flatten(1), shown.repeat_interleave(100, 1), self._colors([color]))

    def stamp(self, places: Tensor, shown: Tensor, stamp: Tensor, colors: tuple[tuple[int, int, int], ...]) -> None:
        """A stamp of numbers ``(S, S)``, 0 for nothing and i for the colour i - 1, around places ``(B, 2)``."""
        row, column = stamp.to(places.device).nonzero().unbind(1)
        middle = len(stamp) // 2
        right, down = self.at(places[:, None])
        chosen = self._colors(list(colors))[stamp.to(places.device)[row, column] - 1]
        self.paint(right + column - middle, down + row - middle, shown[:, None].expand(-1, len(row)), chosen)

    def bar(self, places: Tensor, shown: Tensor, share: Tensor, rank: int, color: tuple[int, int, int]) -> None:
        """A bar over places ``(B, 2)``, filled from the left by a share ``(B,)``; those of higher rank lie higher."""
        row, column = torch.ones(2, _BAR, device=places.device, dtype=torch.bool).nonzero().unbind(1)
        right, down = self.at(places[:, None])
        filled = column < share[:, None] * _BAR
        for part, paint in ((~filled, (40, 40, 40)), (filled, color)):
            spot = right + column - _BAR // 2, down + row - 3 * rank - 2
            self.paint(*spot, part & shown[:, None], self._colors([paint]))

    def picture(self) -> Tensor:
        """The pictures, ``(B, side, side, 3)`` uint8."""
        return self.pixels[:, :-1].view(-1, self.side, self.side, 3)

    def _colors(self, colors: list[tuple[int, int, int]]) -> Tensor:
        return torch.tensor(colors, dtype=torch.uint8, device=self.pixels.device)


def _disc(name: str) -> Tensor:
    """A stamp for a unit: 1 disc, 2 rim, 3 letter."""
    radius = UNITS[name].radius * _PIXELS
    reach = math.ceil(radius)
    off = torch.arange(-reach, reach + 1)
    distance = (off[:, None].square() + off.square()).sqrt()
    stamp = (distance <= radius).long() + (distance <= radius) * (distance > radius - 1.5)
    letter = torch.tensor([[mark == "#" for mark in row] for row in _MARKS[name].split()])
    rows, columns = letter.shape
    top, start = reach - rows // 2, reach - columns // 2
    stamp[top : top + rows, start : start + columns][letter] = 3
    return stamp


def _cross() -> Tensor:
    """A stamp for a dead unit."""
    return torch.maximum(torch.eye(7), torch.eye(7).flip(0)).long()


def _loops(unit: Unit) -> int:
    """Game loops between attacks; the game keeps the fraction."""
    return round(unit.cooldown * LOOPS_PER_SECOND)


def _sum_over(parts: Tensor) -> Tensor:
    """Sum over axis 2, always in the same order (``torch.sum`` chooses by the tensor's size); overwrites ``parts``."""
    while (count := parts.shape[2]) > 1:
        half = count // 2
        parts[:, :, :half] += parts[:, :, count - half :]
        parts = parts[:, :, : count - half]
    return parts[:, :, 0]


def _nearest(place: Tensor, others: Tensor, alive: Tensor) -> Tensor:
    """The number of the nearest living other, of equally near ones the lowest; places ``(2, n, B)``, ``(2, k, B)``."""
    gap = place[:, :, None] - others[:, None]
    distance = (gap[0] * gap[0]).add_(gap[1] * gap[1]).add_(_NEVER * ~alive)
    return distance.min(1).indices  # the first of equal ones


def _formation(names: list[str], map_size: int, centre: float) -> Tensor:
    """Places in rows and columns, at least as many as units, that these can stand on without touching, ``(., 2)``."""
    radius = max(UNITS[name].radius for name in names)
    columns = math.ceil(math.sqrt(len(names)))
    rows = math.ceil(len(names) / columns)
    apart = 2 * (radius + _JITTER)
    border = radius + _JITTER + _SHIFT
    width, depth = (columns - 1) * apart / 2 + border, (rows - 1) * apart / 2 + border
    room = min(min(_CENTRES), (_CENTRES[1] - _CENTRES[0]) / 2) * map_size
    if width > room or depth > map_size / 2:
        raise ValueError(
            f"{len(names)} units have no room on a map of {map_size} by {map_size}; give a greater map_size"
        )
    x, y = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="ij")
    x, y = (x.flatten() - (columns - 1) / 2) * apart, (y.flatten() - (rows - 1) / 2) * apart
    return torch.stack([x + centre * map_size, y + map_size / 2], 1)


def _terrain(seed: int | None, size: int) -> Tensor:
    """A smooth height over the map, in steps of 1/255 as the game gives it, ``(size, size)`` in [0, 1]."""
    if seed is None:
        return torch.zeros(size, size)
    waves = 12
    key = random.seed_key(seed)
    length = 1.0 / (6.0 + 18.0 * random.uniform(random.fold(key, 0), (waves, 1, 1)).double())
    turn = 2 * math.pi * random.uniform(random.fold(key, 1), (2, waves, 1, 1)).double()
    x, y = torch.arange(size).double()[:, None] + 0.5, torch.arange(size).double() + 0.5
    along = x * torch.cos(turn[0]) + y * torch.sin(turn[0])
    height = torch.cos(2 * math.pi * along * length + turn[1]).sum(0)
    low, high = height.min(), height.max()
    return ((height - low) / (high - low) * 255).round().float() / 255


def focus_nearest(observation: Any, info: dict[str, Any]) -> Any:
    """SMAC's heuristic as a policy for the friendly team, to collect data with as the paper does.

    Every living unit attacks the living enemy nearest to it and stays on it until it dies; where no enemy is left, it
    stops.

    Args:
        observation: not read.
        info: of ``Skirmish``, of a batch or of one copy: "units" and "targets"; with targets "each".

    Returns:
        Actions ``(..., n)`` int64, a tensor or an array as the info is.
    """
    units, last = torch.as_tensor(info["units"]), torch.as_tensor(info["targets"])
    n = last.shape[-1]
    friends, enemies = units[..., :n, :], units[..., n:, :]
    alive = enemies[..., _HEALTH] > 0
    place, others = friends[..., _X : _Y + 1], enemies[..., _X : _Y + 1]
    mine, theirs = (value.reshape(-1, *value.shape[-2:]).permute(2, 1, 0) for value in (place, others))
    nearest = _nearest(mine, theirs, alive.reshape(-1, alive.shape[-1]).t()).t().reshape(last.shape)
    kept = last.clamp(min=0)
    target = torch.where((last >= 0) & alive.gather(-1, kept), kept, nearest)
    actions = torch.where(alive.any(-1, keepdim=True), ATTACK + target, STOP)
    actions = torch.where(friends[..., _HEALTH] > 0, actions, NO_OP)
    return actions if isinstance(info["units"], Tensor) else actions.numpy()


def make_skirmish(**options: Any) -> SingleEnv:
    """One copy of ``Skirmish``."""
    return SingleEnv(Skirmish(1, **options))
