# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import torch
from torchrl.data import TensorDictReplayBuffer

from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.writers import FirstInFirstOutWriter
from tests.stored import stored_numbers
from tests.transitions import numbered_steps


def test_the_oldest_is_overwritten() -> None:
    """Capacity 5:  0 1 2 | 3 4 5 6  ->  slots 5 6 2 3 4."""
    replay = Replay(storage=PackedStorage(5), batch_size=2)
    assert replay.extend(numbered_steps(0, 3)).tolist() == [0, 1, 2]
    assert replay.extend(numbered_steps(3, 4)).tolist() == [3, 4, 0, 1]
    assert stored_numbers(replay) == [5, 6, 2, 3, 4]
    assert replay.writer.age_of(torch.arange(5)).tolist() == [1, 0, 4, 3, 2]


def test_torchrls_buffer_gets_a_slot_for_each_row_also_of_more_than_it_holds() -> None:
    sampler = PrioritizedSampler(3, priority_exponent=1.0, priority_offset=0.0, seed=0)
    replay = TensorDictReplayBuffer(
        storage=PackedStorage(3), writer=FirstInFirstOutWriter(), sampler=sampler, batch_size=2
    )
    steps = numbered_steps(1, 5)
    steps["td_error"] = torch.tensor([9.0, 9.0, 1.0, 2.0, 3.0])
    assert replay.extend(steps).tolist() == [-1, -1, 2, 0, 1]
    assert replay[:]["observation"][:, 0].tolist() == [4, 5, 3]
    assert sampler.priority_of(torch.arange(3)).tolist() == [2, 3, 1]


def test_a_state_is_loaded_before_there_is_a_storage(tmp_path: Path) -> None:
    replay = Replay(storage=PackedStorage(5), batch_size=2)
    replay.extend(numbered_steps(0, 8))
    replay.writer.dumps(tmp_path)
    writer = FirstInFirstOutWriter()
    writer.loads(tmp_path)
    assert writer.state_dict() == {"cursor": 3, "write_count": 8}
    smaller = Replay(storage=PackedStorage(2), writer=writer, batch_size=2)
    assert smaller.extend(numbered_steps(0, 1)).tolist() == [1], "3 is beyond this ring"
