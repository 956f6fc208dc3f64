# SPDX-License-Identifier: Apache-2.0
"""One draw of a sharded replay for several ranks of a trainer."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_replay.sharded import ShardedReplay
from lightning_replay.sharded.coordinator import NotYet
from tests.unit.sharded.local_replay import built, coordinator_of, filled, steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_replays")]  # Ray starts once


def test_ranks_get_disjoint_parts_of_one_draw() -> None:
    replay = filled(batch_size=10)
    replay.update_priority(batch := replay.sample(), torch.arange(10.0) + batch["action"])
    twin = copy.deepcopy(coordinator_of(replay).draws.divider("replay").state_dict())
    whole = replay.sample()
    coordinator_of(replay).draws.divider("replay").load_state_dict(twin)
    ranks = [replay.for_rank(rank, 2) for rank in range(2)]
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 have not requested the next batch.*Every rank must"):
        ranks[0].sample()
    shares = [ranks[1].sample(), ranks[0].sample()][::-1]
    assert [len(share) for share in shares] == [5, 5]
    for key in ("index", "priority_weight", "action", "generation"):
        assert torch.cat([share[key] for share in shares]).tolist() == whole[key].tolist()
    assert replay.stats()["num_draws"] == 3


def test_a_rank_that_restarts_begins_all_anew() -> None:
    replay = filled()
    first = [replay.for_rank(rank, 2) for rank in range(2)]
    with pytest.raises(TimeoutError):
        first[0].sample()
    again = [replay.for_rank(rank, 2) for rank in range(2)]
    with pytest.raises(TimeoutError):  # the request of the former rank 0 does not count
        again[1].sample()
    replay.for_rank(0, 1)
    with pytest.raises(ValueError, match="shares draws with 2 ranks, and 1 entered since"):
        again[0].sample()


def test_a_curriculum_draws_one_task_for_all_ranks_and_takes_progress() -> None:
    replay = ShardedReplay("parallel_curriculum", 2, tasks=["far", "near"], capacity_per_task=50, batch_size=4, seed=0)
    assert replay.tasks == ["far", "near"] and replay.capacity == 100
    for number in range(8):
        replay.extend(steps(10 * number, 5, number, task=torch.full((5,), number % 2)))
    ranks = [replay.for_rank(rank, 2) for rank in range(2)]
    tasks = []
    for _ in range(20):
        shares = [None, None]
        assert isinstance(coordinator_of(replay).call("0", "draw_share", 1.0, (0, 2, {})), NotYet)
        shares[1] = ranks[1].sample()
        shares[0] = ranks[0].sample()
        (task,) = set(torch.cat([one["task"] for one in shares]).tolist())
        tasks.append(task)
    assert set(tasks) == {0, 1}
    replay.progress("near", 0.5)
    assert len(replay.actor_tasks(3)) == 3
    with pytest.raises(ValueError, match="task is 'middle'"):
        replay.progress("middle", 0.5)


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (0, 3, "batch_size is 8, and 3 processes cannot draw equal shares of it; give a multiple of 3"),
        (2, 2, "rank is 2 of 2 processes; ranks are 0 to 1"),
    ],
)
def test_bad_shares(rank: int, world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built().for_rank(rank, world_size)
