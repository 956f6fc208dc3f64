# SPDX-License-Identifier: Apache-2.0
"""The obstacle course: that each level has a solution, what is drawn, seen and paid, and the flags of its events."""

from __future__ import annotations

from collections import Counter, deque

import gymnasium
import numpy as np
import pytest
from minigrid.core.constants import OBJECT_TO_IDX
from minigrid.core.world_object import Door, Key

from lightning_replay.envs.obstacle_course import SECTIONS, ObstacleCourse

LEFT, RIGHT, FORWARD, PICK_UP, DROP, TOGGLE = range(6)
AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))


def shortest_way(env: ObstacleCourse) -> list[int]:
    """Actions to the goal without a penalty, by breadth-first search over place, direction, key and door."""
    kinds = {(x, y): env.grid.get(x, y) for x in range(env.width) for y in range(env.height)}
    keys = [cell.color for cell in kinds.values() if isinstance(cell, Key)]
    start = (env.agent_pos, env.agent_dir, False, False)
    before: dict = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        (x, y), facing, has_key, is_open = state
        ahead = (x + AHEAD[facing][0], y + AHEAD[facing][1])
        cell = kinds[ahead]
        following = [(LEFT, ((x, y), (facing - 1) % 4, has_key, is_open))]
        following.append((RIGHT, ((x, y), (facing + 1) % 4, has_key, is_open)))
        if isinstance(cell, Key) and not has_key:
            following.append((PICK_UP, ((x, y), facing, True, is_open)))
        elif isinstance(cell, Door) and cell.color in keys and not is_open and has_key:
            following.append((TOGGLE, ((x, y), facing, has_key, True)))
        elif cell is None or cell.type == "goal" or isinstance(cell, Key) or (isinstance(cell, Door) and is_open):
            following.append((FORWARD, (ahead, facing, has_key, is_open)))
        for action, state_after in following:
            if state_after not in before and not (
                isinstance(cell, Door) and action == FORWARD and cell.color not in keys
            ):
                before[state_after] = (action, state)
                waiting.append(state_after)
                if action == FORWARD and cell is not None and cell.type == "goal":
                    actions, state = [], state_after
                    while before[state] is not None:
                        action, state = before[state]
                        actions.append(action)
                    return actions[::-1]
    raise AssertionError("no way to the goal")


@pytest.mark.parametrize("start", [(1, 1), (1, 4)])
def test_every_level_has_a_way_to_its_goal_without_penalty_that_raises_each_event_once(start: tuple[int, int]) -> None:
    env, lengths = ObstacleCourse(start=start), []
    for level in range(40):
        observation, _ = env.reset(seed=level)
        assert observation[-3:].tolist() == [*start, 0]
        way, events, total = shortest_way(env), Counter(), 0.0
        for action in way:
            observation, reward, terminated, truncated, info = env.step(action)
            events.update(name for name, flag in info.items() if flag)
            total += reward
        lengths.append(len(way))
        assert (total, terminated, truncated) == (1.0, True, False)
        assert events == Counter({"gap": 1, "lava": 1, "door": 1, "key": 1, "goal": 1})
    assert 16 <= min(lengths) < max(lengths) < 50  # within the history of the paper


def test_cells_keys_doors_and_colours_are_drawn_and_the_spikes_are_not() -> None:
    env, drawn = ObstacleCourse(), {name: Counter() for name in (*SECTIONS, "key", "color", "right door")}
    for level in range(400):
        env.reset(seed=level)
        columns = [[env.grid.get(x, y) for y in range(1, 5)] for x in (3, 6, 9, 12)]
        assert [cell and (cell.type, cell.color) for cell in columns[0]] == [None, *[("floor", "yellow")] * 3]
        for name, kind, column in zip(SECTIONS[1:3], ("wall", "lava"), columns[1:3], strict=True):
            assert sorted(cell.type if cell else "" for cell in column) == ["", kind, kind, kind]
            drawn[name][column.index(None)] += 1
        ((place, key),) = [
            ((x, y), env.grid.get(x, y)) for x in (10, 11) for y in range(1, 5) if env.grid.get(x, y) is not None
        ]
        doors = {y: cell for y, cell in enumerate(columns[3]) if isinstance(cell, Door)}
        assert len(doors) == 2 and len({door.color for door in doors.values()}) == 2
        assert all(door.is_locked for door in doors.values())
        (right,) = [y for y, door in doors.items() if door.color == key.color]
        drawn["door"][tuple(doors)] += 1
        drawn["right door"][right] += 1
        drawn["key"][place] += 1
        drawn["color"][key.color] += 1
    for name, values in {"gap": 4, "lava": 4, "door": 6, "right door": 4, "key": 8, "color": 6}.items():
        counts = np.array([*drawn[name].values()])
        assert len(counts) == values  # the bound has p > 1e-4 for each
        assert ((counts - 400 / values) ** 2 / (400 / values)).sum() < {4: 21.1, 6: 25.7, 8: 29.9}[values]


def test_a_seed_is_one_level_whatever_was_played_before() -> None:
    env, other = ObstacleCourse(), ObstacleCourse()
    for level in (4, 11, 2**31 - 1):
        env.reset(seed=level)
        other.reset(seed=level + 1)
        other.agent_pos = (2, 4)
        other.step(FORWARD)
        other.reset(seed=level)
        assert np.array_equal(other.cells(), env.cells()) and np.array_equal(other.grid.encode(), env.grid.encode())
    levels = set()
    for level in range(100):
        env.reset(seed=level)
        levels.add(env.grid.encode().tobytes())
    assert len(levels) == 100


def test_an_episode_has_one_skill_and_says_which() -> None:
    env, counts = gymnasium.make("RandomSkills-v0").unwrapped, Counter()
    env.reset(seed=0)
    for _ in range(300):
        _, info = env.reset()
        kinds = {env.grid.get(3, y) and env.grid.get(3, y).type for y in range(1, 5)}
        expected = {"lava": {None, "lava"}, "gap": {None, "wall"}, "door": {"wall", "door"}}
        assert kinds == expected[("lava", "gap", "door")[info["difficulty"]]]
        counts[info["difficulty"]] += 1
        way = shortest_way(env)
        last = [env.step(action) for action in way][-1]
        assert last[1:3] == (1.0, True) and last[4]["difficulty"] == info["difficulty"]
    assert all(abs(counts[kind] - 100) < 35 for kind in range(3))


def test_rewards_and_flags_by_hand() -> None:
    env = ObstacleCourse()
    env.reset(seed=3)
    env.agent_pos = (2, 3)
    step = env.step(FORWARD)
    assert step[1:4] == (-1.0, False, False) and [name for name, flag in step[4].items() if flag] == ["spikes"]
    assert step[0][-3:].tolist() == [3, 3, 0]
    assert env.step(LEFT)[1] == 0.0  # on the spike, not stepping on one
    env.agent_pos, env.agent_dir = (2, 1), 0
    free = env.step(FORWARD)
    assert free[1] == 0.0 and not any(free[4].values())
    row = next(y for y in range(1, 5) if env.grid.get(9, y) is not None)
    env.agent_pos = (8, row)
    step = env.step(FORWARD)
    assert step[1:4] == (-1.0, True, False) and [name for name, flag in step[4].items() if flag] == ["lava"]


def test_only_the_key_of_its_colour_opens_a_door_and_what_is_carried_is_observed() -> None:
    env = ObstacleCourse(sections=["door"], max_steps=60)
    env.reset(seed=1)
    x, y = next((x, y) for x in (1, 2) for y in range(1, 5) if isinstance(env.grid.get(x, y), Key))
    key = env.grid.get(x, y)
    doors = {env.grid.get(3, row).color: row for row in range(1, 5) if isinstance(env.grid.get(3, row), Door)}
    env.agent_pos, env.agent_dir = (3 - x, y), 0 if x == 2 else 2  # beside the key, facing it
    assert env.gen_obs()[75:78].tolist() == [0, -1, -1]
    step = env.step(PICK_UP)
    assert step[0][75:78].tolist() == [1, *key.encode()[:2]] and step[4]["key"] and not env.step(PICK_UP)[4]["key"]
    for color, row in doors.items():
        env.agent_pos, env.agent_dir = (2, row), 0
        env.step(TOGGLE)
        moved = env.step(FORWARD)[4]["door"]
        assert moved is (color == key.color)
    env.agent_pos, env.agent_dir = (1, 2), 1
    assert env.step(DROP)[0][75:78].tolist() == [0, -1, -1] and env.grid.get(1, 3) is key


def test_the_view_is_minigrids_with_walls_that_hide_nothing() -> None:
    env, generator, seen = ObstacleCourse(max_steps=50), np.random.default_rng(0), set()
    env.see_through_walls = True  # of MiniGrid's own view, which is compared with
    observation, _ = env.reset(seed=0)
    for _ in range(1_500):
        if generator.random() < 0.1:  # to places that a walk would rarely reach
            x, y = int(generator.integers(1, env.width - 1)), int(generator.integers(1, 5))
            if env.grid.get(x, y) is None:
                env.agent_pos = (x, y)
        observation, *ends, _ = env.step(int(generator.integers(6)))
        view, expected = observation[:75].reshape(5, 5, 3), env.gen_obs_grid()[0].encode()
        view[2, 4] = expected[2, 4]  # there MiniGrid shows what is carried
        assert np.array_equal(view, expected)
        assert observation in env.observation_space
        seen |= set(expected[..., 0].flat)
        if ends[1] or ends[2]:
            env.reset()
    assert seen >= {OBJECT_TO_IDX[kind] for kind in ("empty", "wall", "floor", "door", "key", "goal", "lava")}


def test_one_hot_vectors_are_the_same_numbers() -> None:
    plain, vectors = ObstacleCourse(), ObstacleCourse(one_hot=True)
    space = plain.observation_space
    ends = np.cumsum(space.high - space.low + 1).astype(int)
    assert vectors.observation_space == gymnasium.spaces.Box(0.0, 1.0, (ends[-1],))
    observations = [env.reset(seed=5)[0] for env in (plain, vectors)]
    generator = np.random.default_rng(1)
    for _ in range(300):
        parts = np.split(observations[1], ends[:-1])
        assert {float(part.sum()) for part in parts} == {1.0}
        assert np.array_equal([part.argmax() for part in parts] + space.low, observations[0])
        action = int(generator.integers(6))
        results = [env.step(action) for env in (plain, vectors)]
        assert results[0][1:] == results[1][1:]
        is_over = results[0][2] or results[0][3]
        observations = [
            env.reset()[0] if is_over else result[0] for env, result in zip((plain, vectors), results, strict=True)
        ]


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"sections\[1\] is 'gaps'; it must be one of .* Did you mean 'gap'"):
        ObstacleCourse(sections=["lava", "gaps"])
    for options in ({"sections": []}, {"start": (3, 1)}, {"start": (1, 5)}, {"start": (1,)}):
        with pytest.raises(ValueError, match=r"start must be \(x, y\) with 1 <= x < 3 and 1 <= y <= 4"):
            ObstacleCourse(**options)
    with pytest.raises(ValueError, match=r"start\[0\] is 0"):
        ObstacleCourse(start=(0, 1))
