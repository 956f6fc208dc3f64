# SPDX-License-Identifier: Apache-2.0
"""The grids: their maps, their shortest ways by breadth-first search, what a step does, and their errors."""

from __future__ import annotations

from collections import deque

import gymnasium
import numpy as np
import pytest

import lightning_replay.envs  # noqa: F401
from lightning_replay.envs.grids import FORWARD, LEFT, RIGHT, ThreeRooms, TwoRooms
from lightning_replay.envs.grids import TabularGrid as RoomGrid

GRIDS = [ThreeRooms, TwoRooms]


def shortest_ways(grid: type[RoomGrid]) -> dict[tuple[int, int], int]:
    """Steps to every cell by breadth-first search, walked with the environment itself."""
    env = grid()
    env.reset()
    steps = {(env.agent_pos, env.agent_dir): 0}
    waiting = deque(steps)
    while waiting:
        state = waiting.popleft()
        for action in (LEFT, RIGHT, FORWARD):
            env.agent_pos, env.agent_dir = state
            terminated = env.step(action)[2]
            following = (env.agent_pos, env.agent_dir)
            if following not in steps:
                steps[following] = steps[state] + 1
                if not terminated:
                    waiting.append(following)
    cells = {cell for cell, _ in steps}
    return {cell: min(count for (other, _), count in steps.items() if other == cell) for cell in cells}


@pytest.mark.parametrize(("grid", "steps"), [(ThreeRooms, 23), (TwoRooms, 21)])
def test_the_shortest_way_to_the_goal(grid: type[RoomGrid], steps: int) -> None:
    ways = shortest_ways(grid)
    assert ways[grid.GOAL] == steps
    assert [ways[gap] for gap in grid.GAPS] == sorted(ways[gap] for gap in grid.GAPS)


@pytest.mark.parametrize("grid", GRIDS)
def test_maps_are_closed_and_nothing_passes_a_wall_but_through_its_gap(grid: type[RoomGrid]) -> None:
    rows = grid.MAP
    assert len({len(row) for row in rows}) == 1
    assert set(rows[0] + rows[-1]) == {"#"} and all(row[0] == row[-1] == "#" for row in rows)
    for x, y in grid.GAPS:
        assert rows[y][x] == "." and all(row[x] == "#" for number, row in enumerate(rows) if number != y)


def test_steps_by_hand() -> None:
    env = ThreeRooms()
    observation, info = env.reset(seed=0)
    assert observation.tolist() == [1, 1, 1, 0, 0, 0] and observation.dtype == np.float32 and info == {}
    assert env.step(LEFT)[0].tolist() == [1, 1, 0, 0, 0, 1]
    assert env.step(FORWARD)[0].tolist() == [1, 1, 0, 0, 0, 1]  # the wall
    for direction in ([1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0]):
        assert env.step(RIGHT)[0].tolist() == direction
    assert env.step(FORWARD)[0].tolist() == [1, 2, 0, 1, 0, 0]
    env.step(LEFT)
    columns = [env.step(FORWARD)[0][0].round() for _ in range(5)]
    assert columns == [2, 3, 4, 5, 6]  # the gap's column, as the event condition of the paper's experiment reads it
    env = ThreeRooms()
    env.reset()
    with pytest.raises(ValueError, match=r"action is 3; accepted are 0 \(turn left\)"):
        env.step(3)


@pytest.mark.parametrize("grid", GRIDS)
def test_one_hot_observations_are_the_same_places(grid: type[RoomGrid]) -> None:
    plain, one_hot = grid(), grid(one_hot=True)
    width, height = len(grid.MAP[0]), len(grid.MAP)
    assert one_hot.observation_space == gymnasium.spaces.Box(0.0, 1.0, (width + height + 4,))
    observations = [env.reset()[0] for env in (plain, one_hot)]
    generator = np.random.default_rng(0)
    seen = set()
    for _ in range(2_000):
        (x, y, *direction), parts = observations[0].tolist(), np.split(observations[1], [width, width + height])
        assert observations[1].dtype == np.float32 and observations[1] in one_hot.observation_space
        assert [part.sum() for part in parts] == [1.0, 1.0, 1.0]
        assert (parts[0].argmax(), parts[1].argmax(), parts[2].tolist()) == (x, y, direction)
        seen.add((x, y, *direction))
        action = int(generator.integers(3))
        results = [env.step(action) for env in (plain, one_hot)]
        assert results[0][1:] == results[1][1:]
        is_over = results[0][2] or results[0][3]
        observations = [
            env.reset()[0] if is_over else result[0] for env, result in zip((plain, one_hot), results, strict=True)
        ]
    assert len(seen) > 50


def test_the_goal_pays_1_and_terminates_and_max_steps_truncates() -> None:
    env = ThreeRooms(max_steps=4, step_reward=-0.1)
    env.reset()
    outcomes = []
    for position in ((2, 2), (15, 3), (15, 4)):
        env.agent_pos, env.agent_dir = position, 1
        outcomes.append(env.step(FORWARD)[1:4])
    assert outcomes == [(-0.1, False, False), (-0.1, False, False), (1.0, True, False)]
    env = ThreeRooms()
    env.reset()
    env.agent_pos = (14, 5)
    assert env.step(FORWARD)[1:4] == (1.0, True, False)
    env = TwoRooms(max_steps=2)
    env.reset()
    assert [env.step(RIGHT)[2:4] for _ in range(2)] == [(False, False), (False, True)]
    env.reset()
    env.step(RIGHT)
    env.agent_pos, env.agent_dir = (10, 1), 0
    assert env.step(FORWARD)[2:4] == (True, False)
    assert ThreeRooms().max_steps == 500


@pytest.mark.parametrize("grid_of", GRIDS)
def test_the_picture_shows_the_goal(grid_of: type[RoomGrid]) -> None:
    grid = grid_of(render_mode="rgb_array")
    grid.reset(seed=0)
    picture = grid.render()
    assert picture.shape == (grid.height * grid.tile_size, grid.width * grid.tile_size, 3)
    x, y = (round((number + 0.5) * grid.tile_size) for number in grid.GOAL)
    assert picture[y, x].tolist() == [0, 255, 0]
