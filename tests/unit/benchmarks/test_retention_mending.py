# SPDX-License-Identifier: Apache-2.0
"""Mended surprise by hand-worked numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import PackedStorage, Replay
from lightning_replay.writers import RetentionWriter, SurpriseOnly
from tests.benchmarks.learning.experiments.retention_mending import Draws, MendedRetention, mended


def test_draws_are_counted_anew_for_a_new_row() -> None:
    draws = Draws(3)
    draws.add(np.array([0, 1, 1]), np.array([1, 1, 1]), np.array([4.0, 2.0, 2.0]))
    draws.add(np.array([1, 0]), np.array([1, 2]), np.array([3.0, 5.0]))
    assert draws.count.tolist() == [1, 3, 0]
    assert draws.smallest.tolist() == [5.0, 2.0, np.inf]


class Agent:
    """Its TD errors are the rewards."""

    def surprise(self, run: int, rows: TensorDict) -> Tensor:
        return rows["next", "reward"].flatten().square()


def rows(errors: list[float], first: int = 0) -> TensorDict:
    number = torch.arange(first, first + len(errors))
    return TensorDict({"number": number, "next": {"reward": torch.tensor(errors).unsqueeze(1)}}, [len(errors)])


def fed(mending: str, rate: float, errors: list[list[float]]) -> tuple[list[float], Replay]:
    """Priorities of two rows of surprise 4 and 9 after feedback, with actions of on-policyness 1/2."""
    retention: Any = MendedRetention({"capacity": 2, **mended(mending, rate)}, Agent())
    replay = Replay(storage=PackedStorage(2), writer=RetentionWriter(SurpriseOnly()), batch_size=2)
    retention.prepare(0, replay)
    replay.extend(rows([2.0, 3.0]))
    for each in errors:
        batch = replay.storage.get(torch.tensor([0, 1]))
        batch.update({"index": torch.tensor([0, 1]), "action": torch.zeros(2, dtype=torch.int64)})
        retention.feed(0, replay, batch, torch.tensor(each), torch.zeros(2, 2))
    return replay.writer.retention_priority(torch.arange(2)).tolist(), replay


@pytest.mark.parametrize(
    ("mending", "rate", "expected"),
    [
        ("draws", 0.5, [0.25 * 9.0 / 2, 0.25 * 1.0 / 2]),
        ("floor", 0.5, [(9.0 - 0.75 * 4.0) / 2, (1.0 - 0.75 * 1.0) / 2]),
        ("floor", 0.0, [(9.0 - 4.0) / 2, 0.0]),
    ],
)
def test_feedback_is_mended(mending: str, rate: float, expected: list[float]) -> None:
    assert fed(mending, rate, [])[0] == [4.0, 9.0]
    assert fed(mending, rate, [[2.0, 3.0], [-3.0, 1.0]])[0] == pytest.approx(expected)


def test_an_order_by_discounted_surprise_is_the_same_at_all_times() -> None:
    retention: Any = MendedRetention({"capacity": 2, **mended("age", 10.0)}, Agent())
    errors = [3.0, 0.0, 1.0, 1.0, 1.5, 0.5]
    dated = retention.surprise(0, rows(errors, first=100))
    assert bool((dated >= 0).all())
    age = torch.arange(40.0, 34.0, -1.0)
    discounted = torch.tensor(errors).square() * torch.exp(-age / 10.0)
    assert dated.argsort().tolist() == discounted.argsort().tolist()
    older, newer = fed("age", 10.0, [[2.0, 2.0]])[0]
    assert newer - older == pytest.approx(0.1, abs=1e-5)
