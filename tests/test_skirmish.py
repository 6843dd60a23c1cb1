"""The micro-battles: by hand, against a plain loop over units, and by what must hold."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import worldmodels.envs  # noqa: F401
from worldmodels.envs.skirmish import (
    ACTIONS,
    ATTACK,
    COLUMNS,
    EAST,
    LOOPS,
    NO_OP,
    NORTH,
    SOUTH,
    STOP,
    UNITS,
    WEST,
    Skirmish,
    focus_nearest,
    make_skirmish,
    parse_scenario,
)

HEALTH, COOLDOWN, SHIELD = (COLUMNS.index(name) for name in ("health", "cooldown", "shield"))
X, Y = COLUMNS.index("x"), COLUMNS.index("y")
REGENERATION = 366 / 4096  # 2 / 22.4, in the game's steps


def battle(scenario, enemy, rows, **options):
    """An environment with one copy and this table: for each unit x, y, and what differs from a fresh one by name."""
    env = Skirmish(scenario=scenario, enemy=enemy, observation="units", terrain=None, **options)
    table, _ = env.reset(seed=0)
    for row, (x, y, *other) in zip(table[0], rows, strict=True):
        row[X], row[Y] = x, y
        for name, value in dict(*other).items():
            row[COLUMNS.index(name)] = value
    env.reset(seed=0, options={"units": table})
    return env


def after(env, *actions, steps=1):
    for _ in range(steps):
        env.step(torch.tensor([actions]))
    return env._state["units"][0].clone()


def points(unit):
    return float(unit[HEALTH] + unit[SHIELD])


class Plain:
    """The rules of ``Skirmish`` as a loop over units with Python's numbers: the second form."""

    def __init__(self, names, friends, table, map_size=32):
        self.kinds, self.n, self.size = [UNITS[name] for name in names], friends, map_size
        self.units = [dict(zip(COLUMNS, map(float, row), strict=True)) for row in table]
        self.last, self.calm = [None] * len(names), [224] * len(names)

    def gap(self, i, j):
        return math.dist(*((self.units[k]["x"], self.units[k]["y"]) for k in (i, j)))

    def alive(self, i):
        return self.units[i]["health"] > 0

    def hit(self, i, j):
        return self.kinds[i].damage + self.kinds[i].bonus * (self.kinds[i].against in self.kinds[j].attributes)

    def orders(self, actions):
        """For each unit ("attack", whom), ("move", (dx, dy)) or None."""
        orders = [None] * len(self.units)
        for i, action in enumerate(actions):
            unit = self.units[i]
            if self.alive(i) and action >= ATTACK and self.alive(self.n + action - ATTACK):
                orders[i] = "attack", self.n + action - ATTACK
            if self.alive(i) and NORTH <= action <= WEST:
                dx, dy = {NORTH: (0, 1), SOUTH: (0, -1), EAST: (1, 0), WEST: (-1, 0)}[action]
                if 0 <= unit["x"] + dx <= self.size and 0 <= unit["y"] + dy <= self.size:
                    orders[i] = "move", (dx, dy)
        for i in range(self.n, len(self.units)):
            prey = [j for j in range(self.n) if self.alive(j)]
            if self.alive(i) and prey:
                keeps = self.last[i] is not None and self.alive(self.last[i])
                orders[i] = "attack", self.last[i] if keeps else min(prey, key=lambda j: self.gap(i, j))
        return orders

    def strike(self, j, damage, shields):
        """One hit: what is left of the shield takes its part, armour something of the rest; returns hit points lost."""
        rest = max(damage - shields[j], 0.0)
        shields[j] = max(shields[j] - damage, 0.0)
        return max(rest - self.kinds[j].armour, 0.5) if rest > 0 else 0.0

    def step(self, actions):
        orders = self.orders(actions)
        for _ in range(LOOPS):
            self.loop(orders)
        self.last = [order[1] if order and order[0] == "attack" else None for order in orders]

    def loop(self, orders):
        everyone = range(len(self.units))
        living = [i for i in everyone if self.alive(i)]
        shields, lost = [unit["shield"] for unit in self.units], [0.0 for _ in everyone]
        struck, shots, ways = set(), [], {}
        for i in everyone:
            self.units[i]["cooldown"] = max(self.units[i]["cooldown"] - 1, 0)
        for i in living:
            if orders[i] and orders[i][0] == "move":
                ways[i] = orders[i][1]
            elif orders[i] and self.alive(orders[i][1]):
                j = orders[i][1]
                if self.gap(i, j) > self.kinds[i].range + self.kinds[i].radius + self.kinds[j].radius:
                    ways[i] = [(self.units[j][c] - self.units[i][c]) / self.gap(i, j) for c in "xy"]
                elif self.units[i]["cooldown"] <= 0:
                    shots.append((i, j))
                    self.units[i]["cooldown"] = round(self.kinds[i].cooldown * 22.4)
        splashes = [(i, k) for i, j in shots if self.kinds[i].splash for k in living if self.beside(i, j, k)]
        for i, j in shots + splashes:
            struck.add(j)
            for _ in range(self.kinds[i].hits):
                lost[j] += self.strike(j, self.hit(i, j), shields)
        for i in everyone:
            unit = self.units[i]
            unit["health"], unit["shield"] = max(unit["health"] - lost[i], 0.0), shields[i]
            self.calm[i] = 0 if i in struck or not self.alive(i) else self.calm[i] + 1
            if self.calm[i] >= 224:
                unit["shield"] = min(unit["shield"] + REGENERATION, self.kinds[i].shield)
        for i, way in ways.items():
            for c, part in zip("xy", way, strict=True):
                self.units[i][c] += part * self.kinds[i].speed / 22.4
        pushes = [self.push(i, living) for i in living]
        for i, push in zip(living, pushes, strict=True):
            for c, part in zip("xy", push, strict=True):
                moved = self.units[i][c] + min(max(part, -0.25), 0.25)
                self.units[i][c] = min(max(moved, self.kinds[i].radius), self.size - self.kinds[i].radius)
        for unit in self.units:
            unit["cooldown"] *= unit["health"] > 0

    def beside(self, i, j, k):
        """Whether the shot of i at j also hits k."""
        if k == j or (k < self.n) == (i < self.n):
            return False
        ahead = [(self.units[j][c] - self.units[i][c]) / self.gap(i, j) for c in "xy"]
        off = [self.units[k][c] - self.units[j][c] for c in "xy"]
        along = abs(off[0] * ahead[0] + off[1] * ahead[1])
        across = abs(off[1] * ahead[0] - off[0] * ahead[1])
        return along <= 0.15 + self.kinds[k].radius and across <= 1.4 + self.kinds[k].radius

    def push(self, i, living):
        push = [0.0, 0.0]
        for j in living:
            overlap = self.kinds[i].radius + self.kinds[j].radius - self.gap(i, j)
            if j != i and overlap > 0:
                for c, name in enumerate("xy"):
                    push[c] += overlap / 2 * (self.units[i][name] - self.units[j][name]) / self.gap(i, j)
        return push


@pytest.mark.parametrize(
    ("scenario", "enemy", "steps"),
    [("1s", "1z", 40), ("1c2s2z", "1c1s3z", 40), ("2s1m", "3m", 40), ("3s5z", "3s5z", 20)],
)
def test_is_the_loop_over_units(scenario, enemy, steps):
    """Until, in a crowd, the last bits decide who fires a loop earlier."""
    env = Skirmish(scenario=scenario, enemy=enemy, observation="units", ends=False)
    draw = np.random.default_rng(1)
    table, info = env.reset(seed=7)
    plain = Plain(parse_scenario(scenario) + parse_scenario(enemy), env.num_friends, table[0])
    struck = 0
    for step in range(steps):
        actions = focus_nearest(table, info)
        wild = torch.from_numpy(draw.integers(0, ATTACK + env.num_enemies, actions.shape))
        actions = torch.where(torch.from_numpy(draw.random(actions.shape) < 0.15), wild, actions)
        table, *_, info = env.step(actions)
        plain.step(actions[0].tolist())
        expected = torch.tensor([list(unit.values()) for unit in plain.units])
        living = expected[:, HEALTH] > 0
        columns = [HEALTH, COOLDOWN, SHIELD]
        assert torch.allclose(table[0][:, columns], expected[:, columns], atol=1e-3), step
        assert torch.allclose(table[0][living], expected[living], atol=2e-2), step
        struck += int((table[0][:, SHIELD] < env._shield[:, 0]).sum())
    assert struck > 20


def test_a_zealot_kills_a_stalker():
    """One against one and 10 apart, on a line; by hand the shots fall in loops 10, 40, ... and the blows in 52, 71, ...

    The zealot needs 5 blows of 16 for the shield and 6 of 14 for the hit points, so it ends in loop 52 + 10 * 19.
    """
    env = battle("1s", "1z", [(8, 16), (18, 16)])
    loop, distance = 0, 10.0
    stalker, zealot = {"health": 80, "shield": 80, "cooldown": 0}, {"health": 100, "shield": 50, "cooldown": 0}
    shots = []

    def hit(unit, damage):
        rest = max(damage - unit["shield"], 0)
        unit["shield"] = max(unit["shield"] - damage, 0)
        unit["health"] -= max(rest - 1, 0.5) if rest else 0

    while stalker["health"] > 0 and zealot["health"] > 0:
        loop += 1
        close, melee = distance <= 6 + 0.625 + 0.5, distance <= 0.1 + 0.625 + 0.5
        for unit in (stalker, zealot):
            unit["cooldown"] = max(unit["cooldown"] - 1, 0)
        if close and stalker["cooldown"] == 0:
            stalker["cooldown"] = 30
            shots.append(loop)
            hit(zealot, 13)
        if melee and zealot["cooldown"] == 0:
            zealot["cooldown"] = 19
            hit(stalker, 8)
            hit(stalker, 8)
        distance -= (0 if close else 4.13 / 22.4) + (0 if melee else 3.15 / 22.4)
    steps = math.ceil(loop / LOOPS)
    before = after(env, ATTACK, steps=steps - 1)
    assert (before[:, HEALTH] > 0).all()
    _, _, terminated, _, info = env.step(torch.tensor([[ATTACK]]))
    assert terminated and not info["won"] and not info["mask"].any()
    assert info["units"][0, 1, HEALTH] == zealot["health"] and info["units"][0, 1, SHIELD] == 0
    assert (shots[0], len(shots), loop) == (10, 8, 242)


@pytest.mark.parametrize(
    ("friends", "enemy", "shield", "health_lost"),
    [
        ("1s", "1z", 0, 13 - 1),
        ("1s", "1s", 0, 13 + 5 - 1),  # armoured
        ("1s", "1c", 0, 13 + 5 - 1),
        ("1s", "1m", 0, 13),  # no armour
        ("1z", "1z", 0, 2 * (8 - 1)),  # armour off each hit
        ("1z", "1m", 0, 2 * 8),
        ("1m", "1z", 0, 6 - 1),
        ("1c", "1z", 0, 2 * (10 + 5 - 1)),  # light
        ("1c", "1s", 0, 2 * (10 - 1)),
        ("1s", "1z", 13, 0),
        ("1s", "1z", 5, 8 - 1),  # what the shield leaves meets the armour
        ("1s", "1z", 12.75, 0.5),  # the least
        ("1z", "1z", 3, 5 - 1 + 7),
        ("1z", "1z", 8, 7),
        ("1z", "1z", 11, 5 - 1),
        ("3s", "1z", 20, 0 + (6 - 1) + 12),  # one after the other
        ("2s1z", "1z", 27, 0 + 0 + (7 - 1) + 7),
    ],
)
def test_damage_by_hand(friends, enemy, shield, health_lost):
    n = len(parse_scenario(friends))
    rows = [(15 - 0.7 * (i == n - 1), 16 + 1.3 * (i - (n - 1) / 2) * (n > 1)) for i in range(n)]
    rows[-1] = (15.0, 16.0)
    for i in range(n - 1):
        rows[i] = (13.0, 14.0 + 4 * i)
    reach = 0.05 + UNITS[parse_scenario(friends)[-1]].radius + UNITS[parse_scenario(enemy)[0]].radius
    target = (15.0 + reach, 16.0, {"shield": shield, "cooldown": 30})
    env = battle(friends, enemy, [*rows, target])
    unit = after(env, *[ATTACK] * n)[n]
    full = UNITS[parse_scenario(enemy)[0]].health
    assert full - float(unit[HEALTH]) == pytest.approx(health_lost)
    assert float(unit[SHIELD]) == max(0, shield - {"1s": 13, "1z": 16, "1c": 30}.get(friends, 99))


def test_cooldown_in_loops():
    """Attacks of a stalker come 30 loops apart: in loops 1, 31 and 61 of the battle."""
    env = battle("1s", "1c", [(10, 16), (16, 16)])
    left, cooldowns = [], []
    for _ in range(8):
        unit = after(env, ATTACK)
        left.append(points(unit[1]))
        cooldowns.append(int(unit[0, COOLDOWN]))
    assert [350 - amount for amount in left] == [18, 18, 18, 36, 36, 36, 36, 54]
    assert cooldowns == [23, 15, 7, 29, 21, 13, 5, 27]
    for name, loops in (("zealot", 19), ("colossus", 24), ("marine", 14)):
        letter = name[0]
        near = battle(f"1{letter}", "1c", [(10, 16), (10 + 1.05 + UNITS[name].radius, 16)])
        assert after(near, ATTACK)[0, COOLDOWN] == loops - 7


@pytest.mark.parametrize("name", UNITS)
def test_how_far_a_move_goes(name):
    size = 40
    for action, (dx, dy) in {NORTH: (0, 1), SOUTH: (0, -1), EAST: (1, 0), WEST: (-1, 0)}.items():
        env = battle(f"1{name[0]}", "1m", [(6, 20), (38, 20)], map_size=size)
        unit = after(env, action)[0]
        far = LOOPS * UNITS[name].speed / 22.4
        assert unit[[X, Y]].tolist() == pytest.approx([6 + far * dx, 20 + far * dy], abs=1e-4)
    for action, place in {WEST: (0.999, 20), EAST: (39.001, 20), SOUTH: (10, 0.999), NORTH: (10, 39.001)}.items():
        x, y = place  # a map unit further is off the map, so this is a stop
        env = battle(f"1{name[0]}", "1m", [place, (38, 20) if x < 30 else (2, 20)], map_size=size)
        unit = after(env, action)[0]
        border = UNITS[name].radius
        assert unit[[X, Y]].tolist() == pytest.approx([min(max(c, border), size - border) for c in (x, y)])
    for action in (NO_OP, STOP):
        unit = after(battle(f"1{name[0]}", "1m", [(6, 20), (38, 20)], map_size=size), action)[0]
        assert unit[[X, Y]].tolist() == [6, 20]


def test_a_move_ends_at_the_border():
    env = battle("1s", "1m", [(30.5, 16), (2, 16)])
    assert after(env, EAST, steps=3)[0, X] == 32 - 0.625


def test_range_is_from_edge_to_edge():
    reach = 6 + 0.625 + 0.5
    closing = (4.13 + 3.15) / 22.4  # in a loop, both coming
    for distance, loop in ((reach, 1), (reach + 0.001, 2), (reach + 2.5 * closing, 4), (reach + 8.5 * closing, None)):
        unit = after(battle("1s", "1z", [(10, 16), (10 + distance, 16)]), ATTACK)[0]
        assert unit[COOLDOWN] == (0 if loop is None else 30 - (LOOPS - loop)), distance


def test_stop_and_the_impossible():
    """A unit that stops does not shoot back; nor does one that attacks the dead, or is told to do nothing."""
    for action in (STOP, NO_OP, ATTACK + 1):
        env = battle("1s", "2z", [(10, 16), (14, 16), (12, 20, {"health": 0, "shield": 0})])
        unit = after(env, action)
        assert points(unit[1]) == 150 and unit[0, X] == 10
        assert env._state["target"][0, 0] == -1
    assert points(after(env, ATTACK)[1]) == 137


def test_shields_grow_again_after_ten_seconds():
    """Struck in loop 1 by a zealot that dies in it: growth begins with loop 225, the first of step 29."""
    env = battle("1z", "1z", [(10, 16), (11.05, 16, {"health": 1, "shield": 0})], ends=False)
    assert after(env, ATTACK)[0].tolist()[HEALTH:] == [100, 0, 12, 50 - 16]
    assert after(env, STOP, steps=27)[0, SHIELD] == 34
    assert after(env, STOP)[0, SHIELD] == 34 + 8 * REGENERATION
    assert after(env, STOP, steps=40)[0, SHIELD] == 50  # and no further
    assert 8 * REGENERATION == pytest.approx(2 * 8 / 22.4, rel=1e-3)
    fresh = battle("1z", "1z", [(5, 16, {"shield": 10}), (25, 16)])
    assert after(fresh, STOP)[0, SHIELD] == 10 + 8 * REGENERATION
    assert after(env, STOP)[1, SHIELD] == 0  # never those of the dead


def test_splash_hits_a_line_across_the_shot():
    places = [(16, 16), (16, 17.05), (16, 13.99), (16, 14.2), (16.6, 18), (15.3, 17.9), (17.5, 16)]
    env = battle("1c1z", "7z", [(10, 16), (16, 15), *places])
    unit = after(env, ATTACK, STOP)
    lost = [150 - points(row) for row in unit[2:]]
    # In the box: the target, 1.05 and 1.8 aside; not: 2.01 aside, 2 aside, 0.7 nearer; 1.5 behind.
    assert lost == [30, 30, 0, 30, 0, 0, 0]
    assert points(unit[1]) > 150 - 16 * 7 - 1 and unit[0, COOLDOWN] == 24 - 7
    # Diagonally, on shields of 20: 15 of the first hit, 5 of the second, whose other 10 meet the armour.
    aside = 1.2 / math.sqrt(2)
    rows = [(10, 10), (15, 15), (15 - aside, 15 + aside, {"shield": 20}), (15 + aside, 15 + aside)]
    unit = after(battle("1c", "3z", rows), ATTACK)
    assert unit[1:, [HEALTH, SHIELD]].tolist() == [[100, 20], [100 - 9, 0], [100, 50]]


def test_units_that_overlap_part():
    env = battle("2s", "1m", [(10, 16), (10.9, 16), (30, 16)])
    unit = after(env, STOP, STOP)
    assert unit[:2, X].tolist() == pytest.approx([10 - 0.175, 10.9 + 0.175], abs=1e-4)  # 1.25 apart, by half each
    assert unit[:2, Y].tolist() == pytest.approx([16, 16], abs=1e-4)
    unit = after(battle("2s", "1m", [(10, 16), (10, 16), (30, 16)]), STOP, STOP)
    assert math.dist(unit[0, [X, Y]], unit[1, [X, Y]]) == pytest.approx(1.25, abs=1e-3)
    corner = battle("2z", "1m", [(0.5, 0.5), (0.5, 0.5), (30, 16)])
    unit = after(corner, STOP, STOP, steps=3)
    assert math.dist(unit[0, [X, Y]], unit[1, [X, Y]]) > 0.9
    dead = battle("2s", "1m", [(10, 16), (10.5, 16, {"health": 0, "shield": 0}), (30, 16)])
    assert after(dead, STOP, NO_OP)[:2, X].tolist() == [10, 10.5]


def test_the_other_team_goes_for_the_nearest_and_stays_with_it():
    env = battle("2z", "1s", [(10, 20), (16, 25), (20, 16)])
    assert env.step(torch.tensor([[STOP, STOP]]))[-1]["targets"].tolist() == [[-1, -1]]
    assert env._state["target"][0, 2] == 1  # 9.8 away, the other 10.8
    table = env._state["units"].clone()
    table[0, 1, X] = 4
    env._state["units"] = table  # now the other is nearer
    after(env, STOP, STOP)
    assert env._state["target"][0, 2] == 1
    env._state["units"][0, 1, [HEALTH, SHIELD]] = 0
    after(env, STOP, NO_OP)
    assert env._state["target"][0, 2] == 0


def test_reward():
    env = battle("1s", "1z1m", [(10, 16), (14, 16, {"shield": 1}), (12, 19, {"health": 6})], ends=True)
    most = 150 + 45 + 2 * 10 + 200
    _, reward, terminated, _, info = env.step(torch.tensor([[ATTACK]]))
    assert float(reward) == pytest.approx(20 / most * (1 + 11))
    assert not terminated and not info["success"]
    env._state["units"][0, 0, COOLDOWN] = 0
    _, reward, *_ = env.step(torch.tensor([[ATTACK + 1]]))
    assert float(reward) == pytest.approx(20 / most * (6 + 10))
    env._state["units"][0, 0, COOLDOWN] = 0
    env._state["units"][0, 1, HEALTH] = 2
    _, reward, terminated, _, info = env.step(torch.tensor([[ATTACK]]))
    assert float(reward) == pytest.approx(20 / most * (2 + 10 + 200))
    assert terminated and info["success"] and info["won"] and info["mask"].tolist() == [[True]]
    _, reward, terminated, _, info = env.step(torch.tensor([[STOP]]))  # the next episode
    assert not reward and not terminated and not info["success"] and info["targets"].tolist() == [[-1]]


def test_whole_battles():
    """Half of even battles are won, for 20 points in all; the dead stay dead, and all values stay in their space."""
    env = Skirmish(192, scenario="2s3z", observation="units", ends=False, max_episode_steps=100)
    table, info = env.reset(seed=1)
    total, masks = torch.zeros(192), info["mask"]
    low, high = torch.from_numpy(env.single_observation_space.low), torch.from_numpy(env.single_observation_space.high)
    for step in range(100):
        before = table
        table, reward, terminated, truncated, info = env.step(focus_nearest(table, info))
        dead = before[..., HEALTH] <= 0
        assert not (dead & (table[..., HEALTH] > 0)).any() and torch.equal(table[dead], before[dead])
        assert not table[dead][:, HEALTH:].any()
        assert (table >= low).all() and (table <= high).all()
        assert torch.equal(info["mask"], table[:, :5, HEALTH] > 0) and not (info["mask"] & ~masks).any()
        assert not info["positions"][~info["mask"]].any()
        assert not terminated.any() and bool(truncated.all()) == (step == 99)
        total, masks = total + reward, info["mask"]
    friends, enemies = masks.any(1), (table[:, 5:, HEALTH] > 0).any(1)
    assert not (friends & enemies).any()
    assert torch.equal(info["won"], friends & ~enemies) and torch.equal(info["success"], info["won"])
    assert torch.allclose(total[info["won"]], torch.tensor(20.0), atol=1e-4) and (total[~info["won"]] < 17).all()
    assert 0.35 < info["won"].float().mean() < 0.65  # four standard errors


def win_rates(scenario, enemy, copies=192):
    env = Skirmish(copies, scenario=scenario, enemy=enemy, observation="units", ends=False)
    table, info = env.reset(seed=2)
    for _ in range(70):
        table, *_, info = env.step(focus_nearest(table, info))
    lost = ~info["mask"].any(1) & (table[:, env.num_friends :, HEALTH] > 0).any(1)
    return float(info["won"].float().mean()), float(lost.float().mean())


def test_sides_are_equal():
    """What a team wins from the left it wins from the right (of 192 battles each; four standard errors)."""
    won, lost = win_rates("3s", "3z")
    mirrored_won, mirrored_lost = win_rates("3z", "3s")
    assert won == pytest.approx(mirrored_lost, abs=0.2) and lost == pytest.approx(mirrored_won, abs=0.2)
    assert won + lost > 0.9


def test_focus_nearest_beats_chance():
    """By at least 0.3 of the battles won and 6 of 20 points; random units win almost none."""
    results = []
    for heuristic in (True, False):
        env = Skirmish(128, scenario="2s3z", observation="units", ends=False)
        table, info = env.reset(seed=3)
        draw, total = torch.Generator().manual_seed(0), torch.zeros(128)
        for _ in range(80):
            wild = torch.randint(0, ATTACK + 5, (128, 5), generator=draw)
            table, reward, *_, info = env.step(focus_nearest(table, info) if heuristic else wild)
            total += reward
        results.append((float(info["won"].float().mean()), float(total.mean())))
    assert results[0][0] > results[1][0] + 0.3 and results[0][1] > results[1][1] + 6


def test_focus_nearest_by_hand():
    rows = [(10, 16), (10, 20, {"health": 0, "shield": 0}), (10, 8), (20, 8), (20, 16), (21, 16)]
    env = battle("1s2z", "3m", rows)
    info = env._info(env._state, None)
    assert focus_nearest(None, info).tolist() == [[ATTACK + 1, NO_OP, ATTACK]]
    assert focus_nearest(None, info | {"targets": torch.tensor([[2, 2, 1]])}).tolist() == [
        [ATTACK + 2, NO_OP, ATTACK + 1]
    ]
    single = {name: value[0].numpy() for name, value in info.items()}
    chosen = focus_nearest(None, single)
    assert isinstance(chosen, np.ndarray) and chosen.tolist() == [ATTACK + 1, NO_OP, ATTACK]
    info["units"][0, 4, HEALTH] = 0  # their middle one
    assert focus_nearest(None, info | {"targets": torch.tensor([[1, 2, 1]])}).tolist() == [[ATTACK + 2, NO_OP, ATTACK]]
    info["units"][0, 3:, HEALTH] = 0
    assert focus_nearest(None, info).tolist() == [[STOP, NO_OP, STOP]]


def trajectory(copies, seed=7, steps=32, **options):
    env = Skirmish(copies, scenario="1c1s2z", **options)
    seen, info = env.reset(seed=seed)
    kept = [(seen["views"], info["units"])]
    for step in range(steps):
        index = torch.arange(copies)[:, None] * 7 + torch.arange(4) * 3 + step * 5
        wild = (index * 2654435761 >> 7) % (ATTACK + 4)
        actions = torch.where(index % 6 == 0, wild, focus_nearest(seen, info))
        seen, rewards, terminated, truncated, info = env.step(actions)
        kept.append((seen["views"], info["units"], rewards, terminated, truncated))
    return kept


def test_same_seed_same_trajectory_at_any_batch_size():
    many = trajectory(13, max_episode_steps=22)
    for copies in (1, 6):
        few = trajectory(copies, max_episode_steps=22)
        for step, (part, whole) in enumerate(zip(few, many, strict=True)):
            assert all(torch.equal(a, b[:copies]) for a, b in zip(part, whole, strict=True)), (copies, step)
    again = trajectory(13, max_episode_steps=22)
    assert torch.equal(again[-1][1], many[-1][1])
    other = trajectory(2, seed=8, steps=1)
    assert not torch.equal(other[0][1], many[0][1][:2]) and not torch.equal(many[0][1][0], many[0][1][1])


def test_snapshot_and_restore():
    options = {"scenario": "2s2z", "max_episode_steps": 12}
    env, other = Skirmish(3, **options), Skirmish(3, **options)
    seen, info = env.reset(seed=4)
    for _ in range(9):
        seen, *_, info = env.step(focus_nearest(seen, info))
    snapshot = env.snapshot()
    restored = other.restore(snapshot)
    assert all(torch.equal(restored[name], seen[name]) for name in seen)
    for _ in range(8):  # over the end of an episode
        actions = focus_nearest(seen, info)
        seen, reward, *_, info = env.step(actions)
        theirs, their_reward, *_, their_info = other.step(actions)
        assert torch.equal(theirs["views"], seen["views"]) and torch.equal(their_reward, reward)
        assert all(torch.equal(their_info[name], info[name]) for name in info)


@pytest.mark.parametrize("observation", ["polar", "units"])
def test_is_what_gymnasium_expects(observation):
    env = make_skirmish(scenario="2s1z", enemy="2m", observation=observation, render_mode="rgb_array")
    check_env(env, skip_render_check=True)
    assert env.action_space == gym.spaces.MultiDiscrete([8, 8, 8])
    seen, info = env.reset(seed=0)
    assert env.observation_space.contains(seen)
    seen, reward, terminated, truncated, info = env.step(focus_nearest(seen, info))
    assert env.observation_space.contains(seen) and isinstance(reward, float)
    assert info["units"].shape == (5, 8) and info["positions"].dtype == np.float32
    batch = Skirmish(3, scenario="2s1z", enemy="2m", observation=observation)
    many, _ = batch.reset(seed=0)
    first = {name: value[0].numpy() for name, value in many.items()} if observation == "polar" else many[0].numpy()
    assert batch.single_observation_space.contains(first)
    if observation == "polar":
        alone, _ = env.reset(seed=0)
        assert all(
            np.array_equal(alone[name], first[name]) and alone[name].dtype == first[name].dtype for name in first
        )


def test_ends_and_starts_again():
    env = Skirmish(4, scenario="1s", enemy="1m", observation="units")
    table, info = env.reset(seed=0)
    ended = torch.zeros(4, dtype=torch.bool)
    for _ in range(40):
        table, reward, terminated, truncated, info = env.step(focus_nearest(table, info))
        assert torch.equal(table[ended][:, 0, HEALTH], torch.full((int(ended.sum()),), 80.0))
        assert not reward[ended].any() and not terminated[ended].any() and not truncated.any()
        assert torch.equal(terminated, (table[:, :, HEALTH] <= 0).any(1))
        ended = terminated
        if env._episode.min() >= 1:
            break
    assert env._episode.min() >= 1
    lost = battle("1m", "1s", [(10, 16, {"health": 13}), (14, 16)])
    _, reward, terminated, _, info = lost.step(torch.tensor([[STOP]]))
    assert terminated and not reward and not info["won"]


def test_start():
    for scenario in ("1c3s5z", "8m", "2s3z", "5s3z", "1s2z", "27m"):
        env = Skirmish(64, scenario=scenario, observation="units")
        table, info = env.reset(seed=0)
        n, radius = env.num_friends, env._radius[:, 0]
        gaps = torch.cdist(table[..., [X, Y]], table[..., [X, Y]])
        touching = gaps < radius[:, None] + radius - 1e-4
        assert not (touching & ~torch.eye(2 * n, dtype=torch.bool)).any()
        assert (table[:, :n, X] + radius[:n] < 16).all() and (table[:, n:, X] - radius[n:] > 16).all()
        assert table[:, :n, X].mean() == pytest.approx(9, abs=0.4)
        assert table[:, n:, X].mean() == pytest.approx(23, abs=0.4)
        assert table[:, :, Y].mean() == pytest.approx(16, abs=0.4)
        fresh = [[UNITS[name].health, 0, 0, UNITS[name].shield] for name in parse_scenario(scenario)]
        assert torch.equal(table[..., HEALTH:], torch.tensor(fresh * 2).float().expand(64, -1, -1))
        assert len(table[:, 0, X].unique()) == 64 and info["mask"].all()
    env = Skirmish(scenario="1c1s", enemy="2m", observation="units")
    table, _ = env.reset(seed=0)
    assert table[0, :, :2].tolist() == [[0, 5], [0, 3], [1, 0], [1, 0]]


def test_terrain():
    env = Skirmish(2)
    height = env.height
    assert height.shape == (32, 32) and height.min() == 0 and height.max() == 1
    assert (height.diff(dim=0).abs().max() < 0.35) and (height.diff(dim=1).abs().max() < 0.35)
    env.reset(seed=0)
    env.reset()
    assert torch.equal(env.height, height) and torch.equal(Skirmish(1, map_size=32).height, height)
    assert not torch.equal(Skirmish(1, terrain=1).height, height) and not Skirmish(1, terrain=None).height.any()


def test_views_of_stored_tables():
    env = Skirmish(6, scenario="2s2z", enemy="3s", ends=False)
    seen, info = env.reset(seed=0)
    tables, views, places, masks = [info["units"]], [seen["views"]], [seen["positions"]], [seen["mask"]]
    for step in range(40):
        seen, *_, info = env.step(focus_nearest(seen, info))
        if step % 2:
            tables.append(info["units"])
            for kept, name in ((views, "views"), (places, "positions"), (masks, "mask")):
                kept.append(seen[name])
    stored = torch.stack(tables)  # (T, B, U, 8)
    images, positions, mask = env.views(stored)
    assert mask.dtype == torch.bool and not mask.all() and mask.any()
    assert torch.equal(images, torch.stack(views)) and torch.equal(positions, torch.stack(places))
    assert torch.equal(mask, torch.stack(masks).bool())
    assert not images[~mask].any() and not positions[~mask].any()
    own = images[..., :, 0, 0, 0].bool()  # everyone sees himself at (0, 0)
    assert torch.equal(own, mask)

    queries = 32 * torch.rand(21, 6, 9, 2)
    images, positions, mask = env.views(stored, queries)
    assert images.shape == (21, 6, 9, 15, 9, 18) and positions is queries and mask.all()
    at_units, *_ = env.views(stored, stored[..., :4, [X, Y]])
    living = torch.stack(masks).bool()
    assert torch.equal(at_units[living], torch.stack(views)[living])

    actions = torch.randint(0, ATTACK + 3, (21, 6, 4))
    doing = env.action_views(stored, actions)
    assert doing.shape == (21, 6, 4, len(ACTIONS) + 1, 9, 18)
    assert torch.equal(doing[..., 0, 0].argmax(-1)[living], actions.clamp(max=ATTACK)[living])  # of himself
    assert torch.equal(doing.sum(3), living[..., None, None].float().expand(21, 6, 4, 9, 18))
    assert torch.equal(env.action_views(stored[3, 2], actions[3, 2], queries[3, 2]).sum(1), torch.ones(9, 9, 18))
    friends, enemies = (at_units[..., 0, :, :] == 1), (at_units[..., 1:10, :, :].sum(3) == 1)
    enemies = enemies & ~friends
    unknown = doing[..., len(ACTIONS), :, :] == 1
    assert torch.equal(unknown[living], enemies[living])


def test_grid_options():
    env = Skirmish(2, scenario="2s", num_radii=5, num_angles=8, radial_step=2.0, map_size=48)
    seen, _ = env.reset(seed=0)
    assert seen["views"].shape == (2, 2, 15, 5, 8) and env.height.shape == (48, 48)
    assert (seen["positions"][..., 0] < 24).all()


def test_pictures():
    env = gym.make("worldmodels/Skirmish-v0", scenario="1c1s1z1m", render_mode="rgb_array")
    seen, info = env.reset(seed=0)
    first = env.render()
    assert first.shape == (512, 512, 3) and first.dtype == np.uint8
    for color in ((36, 84, 200), (200, 40, 36), (255, 255, 255), (70, 220, 70), (150, 210, 255)):
        assert (first == color).all(-1).sum() > 50, color
    row, column = 512 - round(16 * info["units"][0, Y]), round(16 * info["units"][0, X])  # our colossus
    near = first[row - 12 : row + 13, column - 12 : column + 13].reshape(-1, 3)
    assert (near == (36, 84, 200)).all(1).sum() > 300
    for _ in range(25):
        seen, *_, info = env.step(focus_nearest(seen, info))
    assert not np.array_equal(env.render(), first)
    batch = Skirmish(3, scenario="1s", render_mode="rgb_array", terrain=None)
    batch.reset(seed=0, options={"units": torch.tensor([[0.0, 3, 0, 0, 80, 0, 0, 80], [1, 3, 32, 32, 0, 0, 0, 0]])})
    assert batch.render().shape == (3, 512, 512, 3) and (batch.render() == batch.render()[:1]).all()


def test_refused():
    for scenario in ("", "3", "s3", "3s 5z", "s", "3x", "0s", "2s0z", "3S"):
        with pytest.raises(ValueError, match="scenario"):
            Skirmish(scenario=scenario)
    with pytest.raises(ValueError, match="has the letter 'k'; known are s stalker"):
        Skirmish(scenario="3s", enemy="2k")
    with pytest.raises(ValueError, match="'polar' or 'units'"):
        Skirmish(observation="pixels")
    with pytest.raises(ValueError, match="shows nothing"):
        Skirmish(num_radii=0)
    with pytest.raises(ValueError, match="greater map_size"):
        Skirmish(scenario="200m")
    env = Skirmish(2, scenario="1s", observation="units")
    table, _ = env.reset(seed=0)
    with pytest.raises(ValueError, match="from 0 to 9; expected 0 to 6"):
        env.step(torch.tensor([[0], [9]]))
    with pytest.raises(ValueError, match="actions have shape"):
        env.step(torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="units has shape"):
        env.reset(seed=0, options={"units": table[:, :1]})
    with pytest.raises(ValueError, match="not those of 1s against 1s"):
        env.reset(seed=0, options={"units": table.flip(1)})
    with pytest.raises(ValueError, match="not finite"):
        env.reset(seed=0, options={"units": table * torch.tensor([1, 1, 1, 1, 1, 1, 1, math.nan])})
    with pytest.raises(ValueError, match=r"expected \(\.\.\., 2, 8\)"):
        env.views(table[..., :5])
