# SPDX-License-Identifier: Apache-2.0
"""MultiRoom-N4-Random: what a level is, that each has a way to its goal, what is seen, and the errors."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX

import lightning_replay.envs  # noqa: F401
from lightning_replay.envs.grids import FullGrid, MultiRooms
from lightning_replay.levels import SequentialLevels
from lightning_replay.levels.environments import make_level_vector

LEFT, RIGHT, FORWARD, PICK_UP, DROP, TOGGLE, DONE = range(7)
AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))


def shortest_way(env: MultiRooms) -> list[int]:
    """Actions to the goal by breadth-first search over place, direction and doors opened."""
    start = ((int(env.agent_pos[0]), int(env.agent_pos[1])), env.agent_dir, frozenset())
    before: dict = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        place, facing, opened = state
        ahead = (place[0] + AHEAD[facing][0], place[1] + AHEAD[facing][1])
        cell = env.grid.get(*ahead)
        kind = None if cell is None else cell.type
        following = [(LEFT, (place, (facing - 1) % 4, opened)), (RIGHT, (place, (facing + 1) % 4, opened))]
        if kind == "door" and ahead not in opened:
            following.append((TOGGLE, (place, facing, opened | {ahead})))
        elif kind != "wall":
            following.append((FORWARD, (ahead, facing, opened)))
        for action, state_after in following:
            if state_after not in before:
                before[state_after] = (action, state)
                waiting.append(state_after)
                if action == FORWARD and kind == "goal":
                    return way_back(before, state_after)
    raise AssertionError("no way to the goal")


def way_back(before: dict, state: tuple) -> list[int]:
    actions = []
    while before[state] is not None:
        action, state = before[state]
        actions.append(action)
    return actions[::-1]


def seen(env: FullGrid) -> np.ndarray:
    """The whole grid encoded anew, as MiniGrid's FullyObsWrapper does."""
    grid = env.grid.encode()
    grid[tuple(env.agent_pos)] = [OBJECT_TO_IDX["agent"], COLOR_TO_IDX["red"], env.agent_dir]
    return grid


def test_every_level_has_a_way_to_its_goal_that_pays_what_minigrid_pays() -> None:
    env = MultiRooms()
    steps: dict[int, list[int]] = {rooms: [] for rooms in range(1, 5)}
    for level_id in range(60):
        _, info = env.reset(seed=level_id)
        actions = shortest_way(env)
        assert actions.count(TOGGLE) == info["difficulty"] - 1
        for number, action in enumerate(actions):
            observation, reward, terminated, truncated, info = env.step(action)
            assert terminated == (number == len(actions) - 1) and not truncated
            assert np.array_equal(observation, seen(env))
        assert reward == pytest.approx(1 - 0.9 * len(actions) / 80) and info == {"difficulty": env.difficulty}
        steps[env.difficulty].append(len(actions))
    means = [np.mean(steps[rooms]) for rooms in range(1, 5)]
    assert means == sorted(means) and means[0] < 5 and means[3] > 15


def test_what_is_seen_is_the_whole_grid_whatever_is_done() -> None:
    env = MultiRooms()
    generator = np.random.default_rng(0)
    observation, _ = env.reset(seed=1)
    kept, first = observation, observation.copy()
    for _ in range(300):
        assert observation.shape == (14, 14, 3) and observation.dtype == np.uint8
        assert np.array_equal(observation, seen(env))
        observation, _, terminated, truncated, _ = env.step(int(generator.integers(7)))
        if terminated or truncated:
            observation, _ = env.reset()
    assert np.array_equal(kept, first)  # nothing writes into what was returned


def test_rooms_are_1_to_4_about_equally_often_and_4_or_5_cells_wide() -> None:
    env = MultiRooms()
    rooms: Counter[int] = Counter()
    sides: set[int] = set()
    for level_id in range(400):
        rooms[env.reset(seed=level_id)[1]["difficulty"]] += 1
        sides |= {side for room in env.rooms for side in room.size}
    assert set(rooms) == {1, 2, 3, 4} and min(rooms.values()) > 70 and sides == {4, 5}
    assert {MultiRooms(min_rooms=2, max_rooms=2).reset(seed=seed)[1]["difficulty"] for seed in range(9)} == {2}


def test_the_time_limit_is_20_steps_for_each_room() -> None:
    for max_rooms, steps in ((4, 80), (2, 40)):
        env = MultiRooms(max_rooms=max_rooms)
        env.reset(seed=0)
        ends = [env.step(DONE)[2:4] for _ in range(steps)]
        assert ends == [(False, False)] * (steps - 1) + [(False, True)]
    env = MultiRooms()
    env.reset(seed=0)
    way = shortest_way(env)
    env = MultiRooms(max_steps=len(way))
    env.reset(seed=0)
    outcomes = [env.step(action) for action in way]
    assert outcomes[-1][2:4] == (True, False) and outcomes[-1][1] == pytest.approx(0.1)


def test_the_vector_plays_its_levels() -> None:
    env = MultiRooms()
    assert env.action_space.n == 7
    envs = make_level_vector("MultiRoom-N4-Random-v0", 2, SequentialLevels([30, 31]))
    observations, infos = envs.reset()
    assert np.array_equal(observations[1], env.reset(seed=31)[0])
    assert infos["difficulty"].tolist() == [env.reset(seed=seed)[1]["difficulty"] for seed in (30, 31)]


@pytest.mark.parametrize("rooms", [(3, 2), (1, 5)])
def test_errors_say_what_is_accepted(rooms: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"max_rooms is \d; 1 <= min_rooms <= max_rooms <= 4 is accepted"):
        MultiRooms(min_rooms=rooms[0], max_rooms=rooms[1])
