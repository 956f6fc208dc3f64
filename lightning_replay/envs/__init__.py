# SPDX-License-Identifier: Apache-2.0
"""Environments of the published experiments. Importing this module registers them with Gymnasium.

Import it before ``gymnasium.make("HalfField-1v0")``, or name it in the id, ``"lightning_replay.envs:HalfField-1v0"``.
"""

from __future__ import annotations

from typing import Any

from gymnasium.envs.registration import register, registry

_ENVIRONMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Atari-v0": ("atari:atari", {}),
    "MinAtar-v0": ("atari:MinAtarGame", {}),
    "BitFlipping-v0": ("bit_flipping:BitFlipping", {}),
    "HalfField-1v0": ("half_field:HalfField", {"keeper": False}),
    "HalfField-1v1": ("half_field:HalfField", {"keeper": True}),
    "MultiRoom-N4-Random-v0": ("grids:MultiRooms", {}),
    "ObstructedMazeGamut-Easy-v0": ("grids:ObstructedMazeGamut", {"num_mazes": 3}),
    "ObstructedMazeGamut-Medium-v0": ("grids:ObstructedMazeGamut", {"num_mazes": 6}),
    # The appendix of the paper calls the mazes of Medium hard.
    "ObstructedMazeGamut-Hard-v0": ("grids:ObstructedMazeGamut", {"num_mazes": 6}),
    "MultiRoom-N4-Random-OneHot-v0": ("grids:one_hot_grid", {"identifier": "MultiRoom-N4-Random-v0"}),
    "ObstructedMazeGamut-Easy-OneHot-v0": ("grids:one_hot_grid", {"identifier": "ObstructedMazeGamut-Easy-v0"}),
    "ObstructedMazeGamut-Medium-OneHot-v0": ("grids:one_hot_grid", {"identifier": "ObstructedMazeGamut-Medium-v0"}),
    "ObstructedMazeGamut-Hard-OneHot-v0": ("grids:one_hot_grid", {"identifier": "ObstructedMazeGamut-Hard-v0"}),
    "RecallCue-v0": ("recall:RecallCue", {}),
    "ThreeRooms-v0": ("grids:ThreeRooms", {}),
    "TwoRooms-v0": ("grids:TwoRooms", {}),
    "ObstacleCourse-v0": ("obstacle_course:ObstacleCourse", {}),
    "RandomSkills-v0": (
        "obstacle_course:ObstacleCourse",
        {"sections": ("lava", "gap", "door"), "random_section": True, "max_steps": 100},
    ),
    "PointMazeTasks-UMaze-v0": ("point_maze:PointMazeTasks", {"maze": "UMaze"}),
    "PointMazeTasks-Medium-v0": ("point_maze:PointMazeTasks", {"maze": "Medium"}),
}


def register_envs() -> None:
    """Registers every environment of this package with Gymnasium, unless its id is registered already.

    MiniGrid, MuJoCo, ale-py and MinAtar are imported when such an environment is made.
    """
    for identifier, (entry_point, options) in _ENVIRONMENTS.items():
        if identifier not in registry:
            register(identifier, entry_point=f"{__name__}.{entry_point}", kwargs=options)


register_envs()
