# SPDX-License-Identifier: Apache-2.0
"""The maze tasks: start cells by the length of the way, the ends of an episode, options and errors."""

from __future__ import annotations

import ctypes.util
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import lightning_replay.envs  # noqa: F401
from lightning_replay.envs.point_maze import MAZES, PointMazeTasks, path_lengths, start_cells

STILL = np.zeros(2, np.float32)


def cell_of(env: PointMazeTasks, position: np.ndarray) -> tuple[int, int]:
    """(row, column) of a position; cells are squares of 1 metre and rows go down."""
    rows, columns = len(env.maze.walls), len(env.maze.walls[0])
    return math.floor(rows / 2 - position[1]), math.floor(position[0] + columns / 2)


#  UMaze: the goal at G, the length of the way from each cell
#  #####
#  #G12#
#  ###3#
#  #654#
#  #####
def test_path_lengths_by_hand() -> None:
    u_maze = MAZES["UMaze"]
    assert path_lengths(u_maze.walls, (1, 1)) == {
        (1, 1): 0, (1, 2): 1, (1, 3): 2, (2, 3): 3, (3, 3): 4, (3, 2): 5, (3, 1): 6,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("maze", "task", "cells"),
    [
        ("UMaze", "target", {(3, 1)}),
        ("UMaze", "far", {(3, 3)}),
        ("UMaze", "near", {(1, 3)}),
        ("UMaze", "nearest", {(1, 2)}),
        ("Medium", "target", {(1, 1), (5, 1)}),
        ("Medium", "far", {(2, 5), (3, 2), (6, 3)}),
        ("Medium", "near", {(4, 5)}),
        ("Medium", "nearest", {(5, 6), (6, 5)}),
    ],
)
def test_every_task_starts_in_its_cells(maze: str, task: str, cells: set[tuple[int, int]]) -> None:
    env = PointMazeTasks(task, maze=maze)
    assert set(start_cells(env.maze.walls, env.maze.goal, task)) == cells
    started = set()
    for seed in range(30):
        observation, info = env.reset(seed=seed)
        started.add(cell_of(env, observation[:2]))
        assert cell_of(env, observation[4:]) == env.maze.goal
        assert (info["task"], info["success"]) == (PointMazeTasks.TASKS.index(task), False)
        assert info["goal_distance"] == pytest.approx(math.dist(observation[:2], observation[4:]), abs=1e-5)
    assert started == cells
    env.close()


def test_cells_are_chosen_by_options_for_one_episode() -> None:
    env = PointMazeTasks("nearest")
    observation, _ = env.reset(seed=0, options={"goal_cell": (3, 1), "reset_cell": np.array([1, 2])})
    assert (cell_of(env, observation[:2]), cell_of(env, observation[4:])) == ((1, 2), (3, 1))
    observation, _ = env.reset(options={"goal_cell": (3, 1), "reset_cell": None})
    assert (cell_of(env, observation[:2]), cell_of(env, observation[4:])) == ((3, 2), (3, 1))
    observation, _ = env.reset()
    assert (cell_of(env, observation[:2]), cell_of(env, observation[4:])) == ((1, 2), (1, 1))


def test_the_goal_pays_1_and_terminates_and_max_steps_truncates() -> None:
    env = PointMazeTasks("nearest")
    observation, _ = env.reset(seed=1)
    rewards = []
    for _ in range(env.max_steps):
        way = observation[4:] - observation[:2]
        observation, reward, terminated, truncated, info = env.step(way / np.linalg.norm(way))
        rewards.append(reward)
        if terminated or truncated:
            break
    assert terminated and not truncated and info["success"] and info["goal_distance"] <= 0.45
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    env = PointMazeTasks("target", max_steps=3)
    env.reset(seed=0)
    assert [env.step(STILL)[1:4] for _ in range(3)] == [(0.0, False, False)] * 2 + [(0.0, False, True)]
    assert (PointMazeTasks().max_steps, PointMazeTasks(maze="Medium").max_steps) == (300, 600)


def test_an_action_is_repeated() -> None:
    action = np.array([0.7, -0.2], np.float32)
    plain, skipping = PointMazeTasks("near", max_steps=8), PointMazeTasks("near", max_steps=8, frame_skip=3)
    for env in (plain, skipping):
        env.reset(seed=4)
    found = [plain.step(action) for _ in range(8)]
    for step, last in enumerate((2, 5, 7)):  # the third repetition is cut short by the end
        np.testing.assert_array_equal((made := skipping.step(action))[0], found[last][0])
        assert made[1:4] == (0.0, False, step == 2)


def test_errors_say_what_is_accepted() -> None:
    with pytest.raises(ValueError, match="maze is 'Large'; it must be one of 'UMaze', 'Medium'"):
        PointMazeTasks(maze="Large")
    env = PointMazeTasks()
    for cell in ((2, 1), (9, 1), (-1, 1)):
        with pytest.raises(ValueError, match=rf"reset_cell is \({cell[0]}, {cell[1]}\); it must be"):
            env.reset(options={"reset_cell": cell})


def test_no_file_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    PointMazeTasks().reset(seed=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(ctypes.util.find_library("EGL") is None, reason="MuJoCo needs EGL to draw without a screen")
def test_a_picture_is_drawn() -> None:
    code = (
        "from lightning_replay.envs.point_maze import PointMazeTasks\n"
        "env = PointMazeTasks(render_mode='rgb_array')\n"
        "env.reset(seed=0)\n"
        "picture = env.render()\n"
        "assert picture.dtype.name == 'uint8' and picture.shape == (480, 480, 3) and picture.std() > 1\n"
        "env.close()\n"
    )
    environment = {**os.environ, "MUJOCO_GL": "egl"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
