# SPDX-License-Identifier: Apache-2.0
"""``Replay.end_episodes``: nothing follows the newest rows of the episodes that ran."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import TensorDictRoundRobinWriter

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.events import EventTable, reward_at_least, sustained
from lightning_replay.samplers import ContinuousTransitionSampler
from lightning_replay.transforms import NStepTransitions
from lightning_replay.writers import FirstInFirstOutWriter, SurpriseOnly
from tests.transitions import connected, numbered_steps


def interleaved(first: int, trajectories: list[int], done: list[int] | None = None) -> TensorDict:
    """Row i, of the number ``first + i``, is of the i-th trajectory; ``done`` are places of rows that end theirs."""
    steps = numbered_steps(first, len(trajectories))
    for place in done or []:
        steps["next", "terminated"][place] = steps["next", "done"][place] = True
    return connected(steps.set("trajectory", torch.tensor(trajectories)))


def flags(replay: Replay, name: str) -> dict[int, bool]:
    rows = replay.storage.get(replay.storage.occupancy.slots())
    return dict(zip(rows["observation"][:, 0].int().tolist(), rows["next", name].flatten().tolist(), strict=True))


@pytest.mark.parametrize("name", ["uniform", "prioritized", "neighborhood_mixup", "continuous_transition"])
def test_the_newest_row_of_each_running_episode_is_truncated(name) -> None:
    replay = recipes.by_name(name)(10, 4, seed=0)
    replay.extend(interleaved(0, [7, 8, 9, 7, 8, 9], done=[4]))  # 8 ends at row 4; 7 and 9 run at rows 3 and 5
    assert replay.end_episodes().tolist() == []
    assert [number for number, flag in flags(replay, "truncated").items() if flag] == [3, 5]
    assert [number for number, flag in flags(replay, "done").items() if flag] == [3, 4, 5]
    assert [number for number, flag in flags(replay, "terminated").items() if flag] == [4]


def test_the_named_trajectories_end_alone() -> None:
    replay = recipes.uniform(10, 4, n_steps=2, discount=0.5, seed=0)
    steps = interleaved(0, [7, 8, 7, 8, 7, 8])
    replay.extend(steps[:4])
    replay.end_episodes([7, 99])
    replay.extend(steps[4:])
    assert [number for number, flag in flags(replay, "truncated").items() if flag] == [2]
    rows = {int(row["observation"][0]): row for row in replay.sample(256)}
    assert rows[2]["steps_to_next_obs"].item() == 1, "row 4 is of a new episode although its trajectory is 7"
    assert rows[3]["steps_to_next_obs"].item() == 2 and rows[3]["next", "reward"].item() == 3 + 5 / 2


def test_without_trajectories_there_is_one_environment() -> None:
    replay = recipes.uniform(4, 4, n_steps=3, discount=0.5, seed=0)
    replay.extend(numbered_steps(0, 6))  # the ring has rows 2 to 5; row 5 is at slot 1
    replay.end_episodes()
    replay.extend(numbered_steps(6, 1))
    assert [number for number, flag in sorted(flags(replay, "truncated").items()) if flag] == [5]
    rows = {int(row["observation"][0]): row for row in replay.sample(256)}
    assert rows[4]["steps_to_next_obs"].item() == 2 and rows[5]["steps_to_next_obs"].item() == 1


def test_histories_and_conditions_of_event_tables_forget_the_episode() -> None:
    tables = [
        EventTable("high", condition=reward_at_least(4.0), history_length=4, capacity=8, min_size=1),
        EventTable("twice", condition=sustained(reward_at_least(2.0), 2), history_length=1, capacity=8, min_size=1),
    ]
    replay = recipes.event_tables(10, 4, tables=tables, min_size=1, seed=0)
    replay.extend(interleaved(0, [7, 7, 7]))  # rewards 0, 1, 2
    replay.end_episodes()
    replay.extend(interleaved(3, [7, 7]))  # rewards 3, 4: 3 is the first of its episode above 2
    assert replay.table("high")["observation"][:, 0].tolist() == [3, 4]
    assert replay.table("twice")["observation"][:, 0].tolist() == [4]


def test_steps_that_wait_are_stored_with_the_returns_there_are() -> None:
    replay = recipes.uniform(10, 4, seed=0)
    replay.append_transform(NStepTransitions(n_steps=3, discount=0.5))
    replay.extend(interleaved(0, [7, 8, 7, 8, 7]))
    assert len(replay) == 1
    assert len(replay.end_episodes([7])) == 2 and len(replay) == 3
    assert len(replay.end_episodes()) == 2 and len(replay) == 5
    assert not any(flags(replay, "truncated").values()), "a formed return ends at an earlier row than its last step"


def test_a_row_that_may_not_be_the_last_stays_as_it_is() -> None:
    """Row 1 is refused: row 0 is the newest stored one of its episode, and not the last."""
    replay = recipes.surprise_retention(
        2, 2, rule=SurpriseOnly(), initial_surprise=lambda rows: rows["next", "reward"].flatten() % 3, seed=0
    )
    replay.extend(interleaved(1, [7, 7]))  # surprise 1 and 2
    replay.extend(interleaved(3, [7]))  # surprise 0: refused
    replay.end_episodes()
    assert flags(replay, "truncated") == {1: False, 2: False}


def test_an_empty_buffer_has_none() -> None:
    assert recipes.prioritized(10, 4).end_episodes().tolist() == []


def test_over_torchrls_writer_and_storage() -> None:
    replay = Replay(storage=PackedStorage(4), writer=TensorDictRoundRobinWriter(), batch_size=2)
    replay.extend(interleaved(0, [1, 2, 1]))
    replay.end_episodes()
    assert flags(replay, "truncated") == {0: False, 1: True, 2: True}
    waiting = NStepTransitions(n_steps=3, discount=0.5)
    replay = Replay(storage=LazyTensorStorage(4), transform=waiting, batch_size=2)
    replay.extend(interleaved(0, [1, 1, 1, 1]))
    assert len(replay) == 2 and len(replay.end_episodes()) == 2, "the two steps that wait are stored"
    linked = Replay(storage=LazyTensorStorage(4), sampler=ContinuousTransitionSampler(), batch_size=2)
    steps = interleaved(0, [1, 2, 1, 2])
    linked.extend(steps[:2])
    assert linked.end_episodes().tolist() == []
    linked.extend(steps[2:])
    assert linked.sampler.partners(torch.arange(4), linked.storage).tolist() == [0, 1, 2, 3]


def test_without_an_order_of_rows_nothing_is_marked_and_nothing_follows() -> None:
    class Unordered(FirstInFirstOutWriter):
        def age_of(self, index):
            return None

    replay = Replay(storage=PackedStorage(8), writer=Unordered(), batch_size=4, n_steps=2, discount=0.5, seed=0)
    replay.extend(interleaved(0, [7, 7]))
    replay.end_episodes()
    replay.extend(interleaved(2, [7]))
    rows = {int(row["observation"][0]): row for row in replay.sample(256)}
    assert [rows[number]["steps_to_next_obs"].item() for number in (0, 1, 2)] == [2, 1, 1]
    assert not any(flags(replay, "truncated").values())


def test_slots_without_generations_are_refused() -> None:
    replay = recipes.uniform(capacity=8, batch_size=2)
    slots = replay.extend(interleaved(0, [1, 1]))
    with pytest.raises(ValueError, match="end_episodes got slots and no generation; give generation="):
        replay.end_episodes(slots=slots)
