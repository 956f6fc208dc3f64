# SPDX-License-Identifier: Apache-2.0
"""Fast paths are taken for a class that declares them, not for a class that is derived from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_replay import PackedStorage, Replay
from lightning_replay.fast_path import has_fast_path, overrides
from lightning_replay.parts import ReplaySampler
from lightning_replay.samplers import PrioritizedSampler
from lightning_replay.writers import FirstInFirstOutWriter
from tests.transitions import numbered_steps


class Derived(PrioritizedSampler):
    pass


class Declared(PrioritizedSampler):
    exact = True


class Backwards(FirstInFirstOutWriter):
    def insert(self, data: Any) -> Any:
        return super().insert(data.flip(0))


class Doubling(Replay):
    def extend(self, tensordicts: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        return super().extend(torch.cat([tensordicts, tensordicts]), update_priority=update_priority)


def test_a_declaration_is_not_inherited() -> None:
    samplers = [kind(4, seed=0) for kind in (PrioritizedSampler, Derived, Declared)]
    assert [has_fast_path(sampler) for sampler in samplers] == [True, False, True]


def test_a_method_that_is_replaced_is_found() -> None:
    assert overrides(Derived(4, seed=0), ReplaySampler, "sample")
    assert not overrides(Derived(4, seed=0), PrioritizedSampler, "sample")


def test_a_derived_writer_stores_rows_by_its_own_insert() -> None:
    replay = Replay(storage=PackedStorage(8), writer=Backwards(), batch_size=2)
    replay.extend(numbered_steps(0, 3, done_every=0))
    assert replay[:]["observation"][:, 0].tolist() == [2.0, 1.0, 0.0]


def test_a_derived_replay_stores_columns_by_its_own_extend() -> None:
    replay = Doubling(storage=PackedStorage(8), batch_size=2, check_continuity=False)
    replay.extend_columns({"observation": np.zeros((2, 3), dtype=np.float32)})
    replay.extend_columns({"observation": np.zeros((2, 3), dtype=np.float32)})
    assert len(replay) == 8
