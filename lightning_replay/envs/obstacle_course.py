# SPDX-License-Identifier: Apache-2.0
"""Obstacle course and randomized skills of the event-table paper, on MiniGrid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from lightning_replay.envs.grids import FullGrid, reach_the_goal
from lightning_replay.options import checked_choice, checked_count, checked_counts, checked_entries, checked_flag

# After the grids, which name the extra if MiniGrid is missing.
# isort: split
from minigrid.core.constants import COLOR_NAMES, COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX
from minigrid.core.grid import Grid
from minigrid.core.mission import MissionSpace
from minigrid.core.world_object import Door, Floor, Goal, Key, Lava, Wall

SECTIONS = ("spikes", "gap", "lava", "door")
_VIEW = 5  # The agent sees so many cells ahead and across.
_ROWS = 4
_SECTION = 3  # A room has two columns, and its obstacle one.

_OBSTACLES = {"spikes": lambda: Floor("yellow"), "gap": Wall, "lava": Lava, "door": Wall}


class ObstacleCourse(FullGrid):
    """Rooms in a row with an obstacle behind each, seen through a window of 5 x 5 cells. They are new in every episode.

    Kompella et al. 2022, section 5, https://arxiv.org/abs/2211.00576, call it the obstacle course. Registered as
    ``RandomSkills-v0``, it is their randomized multi-skill task. The paper gives no map and no sizes. Here, a room has
    2 x 4 cells, and the goal is in the lower right corner of the last room. ``reset(seed=level_id)`` plays the level of
    a seed.

    A column of obstacles is behind each room. ``"spikes"`` leave only the first row free. ``"gap"`` is a wall with a
    gap. ``"lava"`` leaves one cell free. ``"door"`` is a wall with two locked doors of different colors. The room
    before it holds a key for one of them. Each episode draws all cells and colors except the cells of the spikes.

    Args:
        sections: Obstacles in their order, some of ``"spikes"``, ``"gap"``, ``"lava"`` and ``"door"``.
        random_section: Whether an episode has one of the sections, drawn uniformly, in place of all sections.
        start: Coordinates (x, y) of the first cell, in the first room. The paper trains from (1, 1), and tests from
            (1, 4), before the spikes, what was forgotten.
        max_steps: Steps after which an episode is truncated.
        one_hot: Whether every number is observed as a one-hot vector, from which small networks learn sooner.
        render_mode: ``None`` or ``"rgb_array"``.

    Action: ``Discrete(6)``, as in MiniGrid: turn left, turn right, forward, pick up, drop, toggle (opens the door ahead
    with the key of its color).

    Observation: float32 ``[81]``. The first 75 are kind, color, and state of the 5 x 5 cells ahead in MiniGrid's
    numbers, with the agent in the middle of the last row. Then follow whether it carries an object, kind and color of
    the object, or -1, and x, y, and direction. Walls hide nothing. With ``one_hot``, there is one number for each value
    of these numbers.

    Reward: 1 at the goal and -1 on lava, which terminate the episode. It is -1 for stepping on a spike, else 0.

    Infos are flags of this step, for event conditions such as ``info_key("key")``: ``spikes`` (stepped on one),
    ``gap``, ``lava`` and ``door`` (the agent came into this column), ``key`` (picked up), ``goal``. ``difficulty`` is
    0, or with ``random_section`` the place of the drawn section in ``sections``.

    Example:
        >>> env = ObstacleCourse(sections=["gap"])
        >>> observation, _ = env.reset(seed=0)
        >>> observation.shape, observation[-3:].tolist()  # The agent is at (1, 1) and faces right.
        ((81,), [1.0, 1.0, 0.0])
    """

    agent_pos: tuple[int, int]
    agent_dir: int

    def __init__(
        self,
        *,
        sections: Sequence[str] = SECTIONS,
        random_section: bool = False,
        start: Sequence[int] = (1, 1),
        max_steps: int = 300,
        one_hot: bool = False,
        render_mode: str | None = None,
    ) -> None:
        names = checked_entries("sections", sections, f"a list of some of {', '.join(map(repr, SECTIONS))}")
        self.sections: list[str] = [checked_choice(f"sections[{n}]", name, SECTIONS) for n, name in enumerate(names)]
        self.random_section: bool = checked_flag("random_section", random_section)
        place = checked_counts("start", start)
        if not names or len(place) != 2 or place[0] >= _SECTION or place[1] > _ROWS:
            raise ValueError(
                f"sections is {sections!r} and start is {start!r}; there must be at least one section, and start must "
                f"be (x, y) with 1 <= x < {_SECTION} and 1 <= y <= {_ROWS}"
            )
        self.start: tuple[int, int] = (place[0], place[1])
        self.one_hot: bool = checked_flag("one_hot", one_hot)
        super().__init__(
            mission_space=MissionSpace(mission_func=reach_the_goal),
            width=(1 if random_section else len(names)) * _SECTION + 4,
            height=_ROWS + 2,
            max_steps=checked_count("max_steps", max_steps),
            agent_view_size=_VIEW,
            render_mode=checked_choice("render_mode", render_mode, (None, "rgb_array")),
            highlight=False,
        )
        self.action_space: spaces.Discrete[Any] = spaces.Discrete(6)
        kinds = len(OBJECT_TO_IDX)
        colors = len(COLOR_TO_IDX)
        values = [*[kinds, colors, len(STATE_TO_IDX)] * _VIEW**2, 2, kinds + 1, colors + 1, self.width, self.height, 4]
        low = np.zeros(len(values), np.float32)
        low[-5:-3] = -1.0
        high = low + np.array(values, np.float32) - 1.0
        self._first_value: np.ndarray = (np.cumsum([0, *values[:-1]]) - low).astype(np.int64)
        self.observation_space: spaces.Box = spaces.Box(0.0, 1.0, (sum(values),)) if one_hot else spaces.Box(low, high)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Turns, goes forward, picks up, drops, or opens. See the class."""
        before = self.agent_pos
        carried = self.carrying
        observation, _, terminated, truncated, info = super().step(action)
        cell = self.grid.get(*self.agent_pos)
        kind = cell and cell.type
        has_moved = self.agent_pos != before
        column = has_moved and self._columns.get(self.agent_pos[0])
        flags = {name: name == column for name in SECTIONS} | {
            "spikes": has_moved and kind == "floor",
            "key": self.carrying is not None and carried is None,
            "goal": kind == "goal",
        }
        reward = float(kind == "goal") - (has_moved and kind in ("floor", "lava"))
        return observation, reward, terminated, truncated, info | flags

    def gen_obs(self) -> np.ndarray:
        """Returns the window ahead of the agent, its load, and its position and direction.

        :meta private:
        """
        left, top, right, bottom = self.get_view_exts()
        # Walls lie beyond the grid, as at its edge.
        columns = self.cells().take(range(left, right), axis=0, mode="clip")
        view = np.rot90(columns.take(range(top, bottom), axis=1, mode="clip"), -1 - self.agent_dir)
        carried = (0, -1, -1) if self.carrying is None else (1, *self.carrying.encode()[:2])
        observation = np.array([*view.flat, *carried, *self.agent_pos, self.agent_dir], np.float32)
        if not self.one_hot:
            return observation
        vectors = np.zeros(self.observation_space.shape, np.float32)
        vectors[self._first_value + observation.astype(np.int64)] = 1.0
        return vectors

    def _gen_grid(self, width: int, height: int) -> None:
        self.grid: Grid = Grid(width, height)
        self.grid.wall_rect(0, 0, width, height)
        self.agent_pos = self.start
        self.agent_dir = 0
        sections = self.sections
        if self.random_section:
            self.difficulty: int = int(self._rand_int(0, len(sections)))
            sections = [sections[self.difficulty]]
        self._columns = {_SECTION * number: section for number, section in enumerate(sections, start=1)}
        for x, section in self._columns.items():
            self.grid.vert_wall(x, 1, _ROWS, _OBSTACLES[section])
            rows = self._rand_subset(range(1, _ROWS + 1), 2)
            if section == "door":
                colors = self._rand_subset(COLOR_NAMES, 2)
                for row, color in zip(rows, colors, strict=True):
                    self.put_obj(Door(color, is_locked=True), x, row)
                self.place_obj(Key(colors[0]), (x - _SECTION + 1, 1), (_SECTION - 1, _ROWS))
            else:
                self.grid.set(x, 1 if section == "spikes" else rows[0], None)
        self.put_obj(Goal(), width - 2, height - 2)
