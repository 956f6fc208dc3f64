# SPDX-License-Identifier: Apache-2.0
"""MultiRoom-N4-Random and ObstructedMazeGamut: what a level is, that each has a solution, and what is seen."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX
from minigrid.envs import MultiRoomEnv

import lightning_replay.envs  # noqa: F401
from lightning_replay.envs.grids import MAZES, FullGrid, MultiRooms, ObstructedMazeGamut
from lightning_replay.levels import SequentialLevels
from lightning_replay.levels.environments import make_level_vector

LEFT, RIGHT, FORWARD, PICK_UP, DROP, TOGGLE, DONE = range(7)
AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))
Cell = tuple[int, int]


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


def test_a_view_is_minigrids_own() -> None:
    env, theirs = MultiRooms(view_size=5), MultiRoomEnv(1, 4, 5, 14, 14, agent_view_size=5)
    assert env.observation_space.shape == (5, 5, 3)
    generator = np.random.default_rng(0)
    for level_id in range(10):
        observation, _ = env.reset(seed=level_id)
        expected = theirs.reset(seed=level_id)[0]["image"]
        for action in generator.integers(7, size=20):
            assert np.array_equal(observation, expected)
            observation, expected = env.step(int(action))[0], theirs.step(int(action))[0]["image"]
    for size in (4, 1):
        with pytest.raises(ValueError, match=f"view_size is {size}; it must be"):
            MultiRooms(view_size=size)


@pytest.mark.parametrize("rooms", [(3, 2), (1, 5)])
def test_errors_say_what_is_accepted(rooms: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"max_rooms is \d; 1 <= min_rooms <= max_rooms <= 4 is accepted"):
        MultiRooms(min_rooms=rooms[0], max_rooms=rooms[1])


@pytest.mark.parametrize(("make", "side"), [(MultiRooms, 14), (lambda: ObstructedMazeGamut(9), 19)])
def test_what_is_seen_is_the_whole_grid_whatever_is_done(make: Callable[[], FullGrid], side: int) -> None:
    env = make()
    generator = np.random.default_rng(0)
    observation, _ = env.reset(seed=8)
    kept, first = observation, observation.copy()
    for _ in range(600):
        assert observation.shape == (side, side, 3) and observation.dtype == np.uint8
        assert np.array_equal(observation, seen(env))
        observation, _, terminated, truncated, _ = env.step(int(generator.choice([0, 1, 2, 2, 3, 4, 5, 6])))
        if terminated or truncated:
            observation, _ = env.reset()
    assert np.array_equal(kept, first)  # nothing writes into what was returned


class Player:
    """Plays by rule: clears what obstructs doors, opens boxes, fetches keys, opens doors, takes the blue ball."""

    def __init__(self, env: ObstructedMazeGamut, looks: bool = False) -> None:
        self.env, self.looks = env, looks
        self.steps, self.reward = 0, 0.0

    def act(self, action: int) -> None:
        observation, self.reward, self.done, truncated, _ = self.env.step(action)
        assert not truncated and (not self.looks or np.array_equal(observation, seen(self.env)))
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


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", range(9), ids=[maze.name for maze in MAZES])
def test_every_maze_is_solved_by_rule(difficulty: int) -> None:
    env = ObstructedMazeGamut(9)
    for level_id in range(difficulty, 45, 9):
        _, info = env.reset(seed=level_id)
        assert info == {"difficulty": difficulty} and env.maze is MAZES[difficulty]
        player = Player(env, looks=level_id < 9)
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


def test_the_agent_starts_in_the_room_of_the_authors_mazes() -> None:
    """Column and row, read off their custom_envs/obstructedmaze_fixedgrid.py."""
    env = ObstructedMazeGamut(9)
    rooms = [(0, 0), (0, 0), (0, 0), (2, 1), (2, 1), (2, 1), (1, 1), (1, 1), (1, 1)]
    for level_id in range(90):
        env.reset(seed=level_id)
        assert tuple(int(place) // 6 for place in env.agent_pos) == rooms[level_id % 9]


def test_hard_has_the_first_six_mazes_as_in_the_appendix_and_nine_if_asked() -> None:
    for options, count in (({}, 6), ({"num_mazes": 9}, 9)):
        env = gymnasium.make("ObstructedMazeGamut-Hard-v0", **options)
        assert [env.reset(seed=seed)[1]["difficulty"] for seed in range(12)] == [seed % count for seed in range(12)]


def test_the_seed_says_which_maze() -> None:
    for num_mazes in (3, 6, 9):
        env = ObstructedMazeGamut(num_mazes)
        found = [env.reset(seed=seed)[1]["difficulty"] for seed in range(20)]
        assert found == [seed % num_mazes for seed in range(20)]
        assert {env.reset()[1]["difficulty"] for _ in range(80)} == set(range(num_mazes))
