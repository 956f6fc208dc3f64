# SPDX-License-Identifier: Apache-2.0
"""Small buffers whose content is known by hand, as every format of a save has to give them back.

``python -m tests.saved_formats FOLDER`` saves them as the code of now does. Whoever changes a format runs it before the
change, and keeps what it writes among the fixtures.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.events import EventTable, reward_at_least, sustained
from lightning_replay.levels import LevelBuffer
from lightning_replay.levels.scores import L1ValueLoss
from lightning_replay.samplers import PrioritizedSampler
from lightning_replay.saving import chunks
from lightning_replay.saving import states as state
from lightning_replay.writers import SurpriseOnly
from tests.level_steps import segment
from tests.transitions import numbered_steps


def prioritized() -> Replay:
    """Rows 0 to 19 in 16 slots, each of the priority of its slot's number plus one; nothing was drawn."""
    sampler = PrioritizedSampler(16, priority_exponent=1.0, priority_offset=0.0)
    replay = Replay(storage=PackedStorage(16), sampler=sampler, batch_size=4, n_steps=3, discount=0.5, seed=3)
    for first in range(0, 20, 10):
        replay.extend(_steps(first, 10))
    replay.update_priority(torch.arange(16), torch.arange(1.0, 17.0))
    return replay


def event_tables() -> Replay:
    """Rows 0 to 11, of which the last six are in the default table, of an episode that goes on.

    Reward n of row n reaches 8 in rows 8 to 11: an event, its second one in a row another, each with a step before it.
    Two batches are drawn ahead of the third.
    """
    tables = [
        EventTable("high", condition=reward_at_least(8.0), history_length=2, capacity=4, min_size=1),
        EventTable("twice", condition=sustained(reward_at_least(10.0), 2), history_length=2, capacity=4, min_size=1),
    ]
    replay = recipes.event_tables(6, 4, tables=tables, max_trajectories=2, prefetch=2, seed=3)
    for first in range(0, 12, 4):
        replay.extend(_steps(first, 4))
        replay.sample()
    return replay


def retention() -> Replay:
    """Rows 0 to 5 were offered to 4 slots, of surprise 1, 4, 2, 0.5, 3, 0.25: the last two came once those were known.

    Row 4 took the place of row 3, and row 5 was refused.
    """
    replay = recipes.surprise_retention(
        4, 4, rule=SurpriseOnly(), initial_surprise=surprise_of_rows, priority_exponent=0.0, seed=3
    )
    replay.extend(_steps(0, 4))
    replay.update_priority(torch.arange(4), surprise=torch.tensor([1.0, 4.0, 2.0, 0.5]), td_error=torch.zeros(4))
    replay.extend(_steps(4, 2))
    return replay


def surprise_of_rows(rows: TensorDict) -> torch.Tensor:
    """What is known of rows 0 to 5 when they are offered."""
    return torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0, 0.25])[rows["observation"][:, 0].long()]


def levels() -> LevelBuffer:
    """Levels 0, 1 and 2 of 6 have the scores 0.25, 0.5 and 1; one actor plays level 5, of whose episode a step came."""
    buffer = empty_levels()
    for level_id, reward in enumerate([0.25, 0.5, 1.0]):
        buffer.start(0, level_id)
        buffer.update(0, level_id, segment([reward]), episode_done=True)
    buffer.start("away", 5)
    buffer.update("away", 5, segment([2.0], done=False), episode_done=False)
    return buffer


def empty_levels() -> LevelBuffer:
    """One built like :func:`levels`."""
    return LevelBuffer(6, score=L1ValueLoss(1.0, 1.0), staleness_weight=0.5, seed=3)


def rllib_buffer() -> Any:
    """Two episodes of 3 and 4 steps behind RLlib's interface, the second of which goes on."""
    from tests.unit.rllib.episodes import numbered

    buffer = empty_rllib_buffer()
    buffer.add([numbered("a", 3, terminated=True), numbered("b", 4, offset=100.0)])
    return buffer


def empty_rllib_buffer() -> Any:
    """One built like :func:`rllib_buffer`."""
    from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer

    return RecipeEpisodeReplayBuffer("prioritized", capacity=16, seed=3)


def _steps(first: int, count: int) -> TensorDict:
    steps = numbered_steps(first, count)
    return steps.set("action", steps["observation"][:, :2] / 16)


def write(folder: Path) -> None:
    """Saves all of them; what takes more than 900 bytes counts as large, and lies in chunks."""
    from rllib_ext.checkpoints import WarmUp, write_buffer

    state.LARGE_BYTES, chunks.CHUNK_BYTES = 900, 4096
    prioritized().save(folder / "prioritized")
    event_tables().save(folder / "event_tables")
    retention().save(folder / "retention")
    levels().save(folder / "levels")
    write_buffer(rllib_buffer(), folder / "rllib_buffer", WarmUp(100, 150))
    for lock in folder.rglob(".lock"):
        lock.unlink()


if __name__ == "__main__":
    from tests import saved_formats  # whose functions have names by which a save can find them

    saved_formats.write(Path(sys.argv[1]))
