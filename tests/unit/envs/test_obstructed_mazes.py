# SPDX-License-Identifier: Apache-2.0
"""ObstructedMazeGamut: which maze a seed is, that a player with a key-and-door rule solves each, and the errors."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX

import lightning_replay.envs  # noqa: F401
from lightning_replay.envs.grids import MAZES, ObstructedMazeGamut

LEFT, RIGHT, FORWARD, PICK_UP, DROP, TOGGLE, DONE = range(7)
AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))
Cell = tuple[int, int]


class Player:
    """Plays by rule: clears what obstructs doors, opens boxes, fetches keys, opens doors, takes the blue ball."""

    def __init__(self, env: ObstructedMazeGamut) -> None:
        self.env = env
        self.steps, self.reward = 0, 0.0

    def act(self, action: int) -> None:
        observation, self.reward, self.done, truncated, _ = self.env.step(action)
        assert not truncated and np.array_equal(observation, seen(self.env))
        self.steps += 1

    def kind(self, cell: Cell) -> str:
        thing = self.env.grid.get(*cell)
        return "nothing" if thing is None else "locked" if getattr(thing, "is_locked", False) else thing.type

    def cells(self, kind: str) -> list[Cell]:
        return [(x, y) for x in range(19) for y in range(19) if self.kind((x, y)) == kind]

    def face(self, target: Cell) -> bool:
        """Goes where the agent faces the target, through closed doors; whether there is a way."""
        start = (tuple(map(int, self.env.agent_pos)), self.env.agent_dir)
        before: dict = {start: None}
        waiting = deque([start])
        while waiting:
            state = waiting.popleft()
            place, facing = state
            ahead = (place[0] + AHEAD[facing][0], place[1] + AHEAD[facing][1])
            if ahead == target:
                self.walk(before, state)
                return True
            following = [(place, (facing - 1) % 4), (place, (facing + 1) % 4)]
            if self.kind(ahead) in ("nothing", "door"):
                following.append((ahead, facing))
            for state_after in following:
                if state_after not in before:
                    before[state_after] = state
                    waiting.append(state_after)
        return False

    def walk(self, before: dict, state: tuple) -> None:
        states = []
        while state is not None:
            states.append(state)
            state = before[state]
        for (place, facing), (place_after, facing_after) in zip(states[::-1], states[-2::-1], strict=False):
            if place != place_after:
                door = self.env.grid.get(*place_after)
                if door is not None and not door.is_open:
                    self.act(TOGGLE)
                self.act(FORWARD)
            else:
                self.act(LEFT if facing_after == (facing - 1) % 4 else RIGHT)

    def put_down(self) -> None:
        """Drops what is carried where it obstructs nothing: with no door or agent beside."""
        for cell in self.cells("nothing"):
            beside = [(cell[0] + x, cell[1] + y) for x, y in AHEAD]
            if not any(self.kind(one) in ("door", "locked") for one in beside) and self.face(cell):
                self.act(DROP)
                return
        raise AssertionError("nowhere to put it down")

    def solve(self) -> None:
        goal = self.env.obj
        for _ in range(60):
            if self.face(tuple(goal.cur_pos)):
                self.act(PICK_UP)
                return
            assert self.clear_a_door() or self.open_a_box() or self.unlock_a_door(), "nothing left to do"
        raise AssertionError("too many rounds")

    def clear_a_door(self) -> bool:
        for x, y in self.cells("locked"):
            for ahead in AHEAD:
                cell = (x + ahead[0], y + ahead[1])
                if self.kind(cell) == "ball" and self.env.grid.get(*cell) is not self.env.obj and self.face(cell):
                    self.act(PICK_UP)
                    self.put_down()
                    return True
        return False

    def open_a_box(self) -> bool:
        for cell in self.cells("box"):
            if self.face(cell):
                self.act(TOGGLE)
                assert self.kind(cell) == "key"
                return True
        return False

    def unlock_a_door(self) -> bool:
        for key in self.cells("key"):
            for door in self.cells("locked"):
                if self.env.grid.get(*key).color == self.env.grid.get(*door).color and self.face(door):
                    assert self.face(key)
                    self.act(PICK_UP)
                    assert self.face(door)
                    self.act(TOGGLE)
                    self.put_down()
                    return True
        return False


def seen(env: ObstructedMazeGamut) -> np.ndarray:
    """The whole grid encoded anew, as MiniGrid's FullyObsWrapper does."""
    grid = env.grid.encode()
    grid[tuple(env.agent_pos)] = [OBJECT_TO_IDX["agent"], COLOR_TO_IDX["red"], env.agent_dir]
    return grid


@pytest.mark.parametrize("difficulty", range(9), ids=[maze.name for maze in MAZES])
def test_every_maze_is_solved_by_rule(difficulty: int) -> None:
    env = ObstructedMazeGamut(9)
    for level_id in range(difficulty, 45, 9):
        _, info = env.reset(seed=level_id)
        assert info == {"difficulty": difficulty} and env.maze is MAZES[difficulty]
        player = Player(env)
        player.solve()
        assert player.done and player.reward == pytest.approx(1 - 0.9 * player.steps / env.max_steps)


@pytest.mark.parametrize(
    ("difficulty", "doors", "hidden", "balls", "max_steps"),
    [
        (0, 1, 0, 0, 392),
        (1, 1, 1, 0, 392),
        (2, 1, 1, 1, 392),
        (3, 2, 0, 0, 784),
        (4, 2, 2, 0, 784),
        (5, 2, 2, 2, 784),
        (6, 2, 2, 2, 980),
        (7, 4, 4, 4, 2156),
        (8, 8, 8, 8, 4900),
    ],
)
def test_what_a_maze_is_made_of(difficulty: int, doors: int, hidden: int, balls: int, max_steps: int) -> None:
    env = ObstructedMazeGamut(9)
    for level_id in range(difficulty, 90, 9):
        env.reset(seed=level_id)
        player = Player(env)
        assert len(player.cells("locked")) == doors and len(player.cells("box")) == hidden
        assert len(player.cells("key")) == doors - hidden and len(player.cells("ball")) == balls + 1
        assert env.max_steps == max_steps and env.mission == "pick up the blue ball"


def test_the_seed_says_which_maze() -> None:
    for num_mazes in (3, 6, 9):
        env = ObstructedMazeGamut(num_mazes)
        found = [env.reset(seed=seed)[1]["difficulty"] for seed in range(20)]
        assert found == [seed % num_mazes for seed in range(20)]
        assert {env.reset()[1]["difficulty"] for _ in range(80)} == set(range(num_mazes))


def test_what_is_seen_is_the_whole_grid_whatever_is_done() -> None:
    env = ObstructedMazeGamut(9)
    generator = np.random.default_rng(0)
    observation, _ = env.reset(seed=8)
    for _ in range(600):
        assert np.array_equal(observation, seen(env)) and observation.shape == (19, 19, 3)
        observation, _, terminated, truncated, _ = env.step(int(generator.choice([0, 1, 2, 2, 3, 4, 5])))
        assert not terminated and not truncated
