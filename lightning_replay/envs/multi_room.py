# SPDX-License-Identifier: Apache-2.0
"""MultiRoom-N4-Random of the level-replay paper on MiniGrid: one to four rooms in a row, a goal in the last."""

from __future__ import annotations

from gymnasium import spaces

from lightning_replay.envs.full_grid import FullGrid  # first: it names the extra if MiniGrid is missing
from lightning_replay.validation import checked_count

from minigrid.envs import MultiRoomEnv  # isort: skip

MOST_ROOMS = 4
_GRID_SIZE, _ROOM_SIZE, _STEPS_PER_ROOM = 14, 5, 20


class MultiRooms(FullGrid, MultiRoomEnv):
    """Rooms of 4 or 5 cells a side, walls included, joined by closed doors; as ``MultiRoom-N4-Random-v0``.

    A level is a seed: ``reset(seed=level_id)``; its ``difficulty`` is its number of rooms. Jiang et al. 2021,
    https://arxiv.org/abs/2010.03934, train on 4000 levels and test on all others.

    Args:
        min_rooms: the fewest rooms of a level.
        max_rooms: the most rooms of a level, at most 4.
        max_steps: steps after which an episode is truncated; ``None`` for 20 times ``max_rooms``.
        render_mode: ``None`` or ``"rgb_array"``.

    Raises:
        ValueError: numbers of rooms that are not 1 <= min_rooms <= max_rooms <= 4; no steps.

    Action: ``Discrete(7)``, MiniGrid's own: turn left, turn right, forward, pick up, drop, toggle (opens the door
    ahead), done. Pick up, drop and done do nothing here.

    Observation: uint8 ``[14, 14, 3]``, the whole grid; see :class:`~lightning_replay.envs.full_grid.FullGrid`.

    Reward: ``1 - 0.9 * steps / max_steps`` at the goal, which terminates the episode; else 0.
    """

    def __init__(
        self,
        *,
        min_rooms: int = 1,
        max_rooms: int = MOST_ROOMS,
        max_steps: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        if not 1 <= checked_count("min_rooms", min_rooms) <= checked_count("max_rooms", max_rooms) <= MOST_ROOMS:
            raise ValueError(
                f"min_rooms is {min_rooms} and max_rooms is {max_rooms}; 1 <= min_rooms <= max_rooms <= {MOST_ROOMS} "
                "is accepted"
            )
        if max_steps is not None:
            checked_count("max_steps", max_steps)
        super().__init__(
            minNumRooms=min_rooms,
            maxNumRooms=max_rooms,
            maxRoomSize=_ROOM_SIZE,
            width=_GRID_SIZE,
            height=_GRID_SIZE,
            max_steps=_STEPS_PER_ROOM * max_rooms if max_steps is None else max_steps,
            render_mode=render_mode,
            highlight=False,
        )
        self.observation_space: spaces.Box = self.grid_space()

    def _gen_grid(self, width: int, height: int) -> None:
        super()._gen_grid(width, height)
        self.difficulty: int = len(self.rooms)
