# SPDX-License-Identifier: Apache-2.0
"""Obstacle course and randomised skills of the event-table paper, on MiniGrid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from lightning_replay.envs.grids import FullGrid, reach_the_goal
from lightning_replay.options import checked_choice, checked_count, checked_counts, checked_entries, checked_flag

# After the grids, which name the extra where MiniGrid is missing.
# isort: split
from minigrid.core.constants import COLOR_NAMES, COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX
from minigrid.core.grid import Grid
from minigrid.core.mission import MissionSpace
from minigrid.core.world_object import Door, Floor, Goal, Key, Lava, Wall

SECTIONS = ("spikes", "gap", "lava", "door")
_VIEW, _ROWS, _SECTION = 5, 4, 3  # cells seen ahead and across, free rows, and columns of a room with its obstacle
_PENALTY = -1.0

_OBSTACLES = {"spikes": lambda: Floor("yellow"), "gap": Wall, "lava": Lava, "door": Wall}


class ObstacleCourse(FullGrid):
    """Rooms in a row with an obstacle behind each, seen through a window of 5 x 5 cells; new in every episode.

    The obstacle course of Kompella et al. 2022, section 5, https://arxiv.org/abs/2211.00576, and as ``RandomSkills-v0``
    its randomised multi-skill task. The paper's text gives no map and no sizes: here a room has 2 x 4 cells, and
    the goal is in the lower right corner of the last one. ``reset(seed=level_id)`` plays the level of that seed.

    A column of obstacles is behind each room. ``"spikes"``: free in the first row only. ``"gap"``: a wall with a gap.
    ``"lava"``: free in one cell. ``"door"``: a wall with two locked doors of different colours, and in the room before
    it a key for one of them. All cells and colours but those of the spikes are drawn for each episode.

    Args:
        sections: obstacles in their order, some of ``"spikes"``, ``"gap"``, ``"lava"`` and ``"door"``.
        random_section: an episode has one of the sections, drawn uniformly, instead of all.
        start: (x, y) of the first cell, in the first room; the paper trains from (1, 1) and tests what was forgotten
            from (1, 4), before the spikes.
        max_steps: steps after which an episode is truncated.
        one_hot: observe every number as a one-hot vector, side by side, from which small networks learn sooner.
        render_mode: ``None`` or ``"rgb_array"``.

    Action: ``Discrete(6)``, MiniGrid's own: turn left, turn right, forward, pick up, drop, toggle (opens the door ahead
    with the key of its colour).

    Observation: float32 ``[81]``: kind, colour and state of the 5 x 5 cells ahead in MiniGrid's numbers, walls hiding
    nothing, the agent in the middle of the last row; whether it carries something; kind and colour of that, -1 if
    nothing; x, y and direction. With ``one_hot`` as many as these have values.

    Reward: 1 at the goal and -1 on lava, which terminate the episode; -1 for stepping on a spike; else 0.

    Infos, flags of this step for event conditions such as ``info_key("key")``: ``spikes`` (stepped on one), ``gap``,
    ``lava`` and ``door`` (the agent came into this column), ``key`` (picked up), ``goal``. ``difficulty``: with
    ``random_section`` the place in ``sections`` of the one that was drawn, else 0.

    Example:
        >>> env = ObstacleCourse(sections=["gap"])
        >>> observation, _ = env.reset(seed=0)
        >>> observation.shape, observation[-3:].tolist()  # at (1, 1), facing right
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
        checked_choice("render_mode", render_mode, (None, "rgb_array"))
        self.one_hot: bool = checked_flag("one_hot", one_hot)
        super().__init__(
            mission_space=MissionSpace(mission_func=reach_the_goal),
            width=(1 if random_section else len(names)) * _SECTION + 4,
            height=_ROWS + 2,
            max_steps=checked_count("max_steps", max_steps),
            agent_view_size=_VIEW,
            render_mode=render_mode,
            highlight=False,
        )
        self.action_space: spaces.Discrete[Any] = spaces.Discrete(6)
        kinds, colors = len(OBJECT_TO_IDX), len(COLOR_TO_IDX)
        values = [*[kinds, colors, len(STATE_TO_IDX)] * _VIEW**2, 2, kinds + 1, colors + 1, self.width, self.height, 4]
        low = np.zeros(len(values), np.float32)
        low[-5:-3] = -1.0
        high = low + np.array(values, np.float32) - 1.0
        self._first_value: np.ndarray = (np.cumsum([0, *values[:-1]]) - low).astype(np.int64)
        shape = (sum(values),) if one_hot else None
        self.observation_space: spaces.Box = spaces.Box(0.0, 1.0, shape) if one_hot else spaces.Box(low, high)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Turns, goes forward, picks up, drops or opens; see the class."""
        before, carried = self.agent_pos, self.carrying
        observation, _, terminated, truncated, info = super().step(action)
        cell = self.grid.get(*self.agent_pos)
        has_moved, kind = self.agent_pos != before, "" if cell is None else cell.type
        column = self._columns.get(self.agent_pos[0]) if has_moved else None
        is_hurt, is_goal = has_moved and kind in ("floor", "lava"), kind == "goal"
        flags = {name: name == column for name in SECTIONS} | {
            "spikes": has_moved and kind == "floor",
            "key": self.carrying is not None and carried is None,
            "goal": is_goal,
        }
        return observation, 1.0 if is_goal else _PENALTY * is_hurt, terminated, truncated, info | flags

    def gen_obs(self) -> np.ndarray:
        left, top, right, bottom = self.get_view_exts()
        # Beyond the grid are walls, as at its edge.
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
        self.agent_pos, self.agent_dir = self.start, 0
        if self.random_section:
            self.difficulty: int = int(self._rand_int(0, len(self.sections)))
        sections = [self.sections[self.difficulty]] if self.random_section else self.sections
        self._columns = {_SECTION * number: section for number, section in enumerate(sections, start=1)}
        for x, section in self._columns.items():
            self.grid.vert_wall(x, 1, _ROWS, _OBSTACLES[section])
            free, other = self._rand_subset(range(1, _ROWS + 1), 2)
            if section == "door":
                colors = self._rand_subset(COLOR_NAMES, 2)
                for row, color in zip((free, other), colors, strict=True):
                    self.put_obj(Door(color, is_locked=True), x, row)
                self.place_obj(Key(colors[0]), (x - _SECTION + 1, 1), (_SECTION - 1, _ROWS))
            else:
                self.grid.set(x, 1 if section == "spikes" else free, None)
        self.put_obj(Goal(), width - 2, height - 2)
