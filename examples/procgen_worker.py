# SPDX-License-Identifier: Apache-2.0
"""Steps Procgen games for plr_procgen.py, which sends requests to standard input from another environment.

Needs procgen-mirror and NumPy 1.26 only. A request is a letter and an int64 for each game:
``L`` and the level each begins (-1 continues), or ``A`` and the action of each. The answer is, for each game, a
float32 reward, a bool whether its episode ended, and its frame, uint8 ``[64, 64, 3]``.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from procgen import ProcgenGym3Env


class Games:
    """Games whose levels are begun by restoring their first states; Procgen cannot change the level of a game."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.games = [self.make(0) for _ in range(count)]
        self.first_states: dict[int, bytes] = {}

    def make(self, level_id: int) -> ProcgenGym3Env:
        return ProcgenGym3Env(1, self.name, num_levels=1, start_level=level_id, distribution_mode="easy", num_threads=0)

    def begin(self, level_ids: np.ndarray) -> None:
        for game, level_id in zip(self.games, level_ids.tolist(), strict=True):
            if level_id >= 0:
                if level_id not in self.first_states:
                    new = self.make(level_id)
                    self.first_states[level_id] = new.callmethod("get_state")[0]
                    new.close()
                game.callmethod("set_state", [self.first_states[level_id]])

    def act(self, actions: np.ndarray) -> None:
        for game, action in zip(self.games, actions, strict=True):
            game.act(action[None])

    def observe(self) -> bytes:
        """Returns the outcome of the last step; call it before another state is set."""
        rewards, frames, firsts = zip(*(game.observe() for game in self.games), strict=True)
        parts = (np.concatenate(rewards), np.concatenate(firsts), np.concatenate([frame["rgb"] for frame in frames]))
        return b"".join(part.tobytes() for part in parts)


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps prints of libraries out of the answers
    games = Games(sys.argv[1], int(sys.argv[2]))
    while kind := sys.stdin.buffer.read(1):
        numbers = np.frombuffer(sys.stdin.buffer.read(8 * len(games.games)), np.int64)
        (games.begin if kind == b"L" else games.act)(numbers)
        answers.write(games.observe())
        answers.flush()


if __name__ == "__main__":
    main()
