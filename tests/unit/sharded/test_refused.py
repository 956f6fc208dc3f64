# SPDX-License-Identifier: Apache-2.0
"""What a sharded replay refuses: nothing is started or changed by it."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_replay.sharded import ShardedReplay
from tests.unit.sharded.local_replay import built, coordinator_of, filled, steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_replays")]  # Ray starts once


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": "prioritised"}, ValueError, "there is no recipe 'prioritised'.*Did you mean 'prioritized'"),
        ({"num_shards": 101}, ValueError, "num_shards is 101 and capacity is 100; every shard holds at least one row"),
        ({"alpha": 0.5}, TypeError, "no argument 'alpha'; accepted are"),
        ({"prefetch": 2}, ValueError, "prefetch is of a replay in one process"),
        ({"samples_per_insert": 4.0, "error_buffer": 7.0}, ValueError, "error_buffer is 7.*Give at least 8"),
        ({"wait_timeout_s": 0.0}, ValueError, "wait_timeout_s"),
        ({"batch_size": 101}, ValueError, "capacity 100 is below batch_size 101"),
        ({"recipe": 3}, TypeError, "recipe"),
        ({"nonsense": 3}, TypeError, "accepted are name, .*samples_per_insert, .*restart_shards, .*capacity, "),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        built(**options)


def test_bad_rows_change_nothing() -> None:
    replay = built()
    with pytest.raises(RuntimeError, match="the sharded replay is empty; call extend before sample"):
        replay.sample()
    lacking = steps(0, 3).exclude(("next", "reward"), ("next", "terminated"), ("next", "truncated"))
    good = steps(0, 3)
    for rows, error, message in (
        (good[:0], ValueError, r"batch size \[N\] with N >= 1"),
        (good.reshape(3, 1), ValueError, r"got \[3, 1\]"),
        ({"observation": 1}, TypeError, "extend takes a TensorDict"),
        (steps(0, 3).set(("next", "reward"), torch.full((3, 1), torch.nan)), ValueError, "reward"),
    ):
        with pytest.raises(error, match=message):
            replay.extend(rows)
    assert len(replay) == 0
    replay.extend(good)
    with pytest.raises(ValueError, match="rows have other columns than those stored"):
        replay.extend(lacking)
    assert len(replay) == 3
    curriculum = ShardedReplay("parallel_curriculum", 2, tasks=["a", "b"], capacity_per_task=9, batch_size=2)
    with pytest.raises(ValueError, match="task"):  # which a shard refuses, not this process
        curriculum.extend(good)
    curriculum.extend(steps(0, 3, task=torch.zeros(3, dtype=torch.int64)))
    assert len(curriculum) == 3


def test_bad_feedback_changes_nothing() -> None:
    replay, other = filled(), filled()
    batch = replay.sample()
    for arguments, error, message in (
        ((batch, torch.ones(7)), ValueError, "one finite value for each of the 8 rows of the batch"),
        ((batch, torch.full((8,), torch.nan)), ValueError, "8 of them NaN or infinite"),
        ((batch,), TypeError, "no td_error"),
        ((batch["index"], torch.ones(8)), TypeError, "give the batch, or generation="),
        ((batch.exclude("index"), torch.ones(8)), TypeError, "a batch without 'index'"),
        ((other.sample(), torch.ones(8)), ValueError, "8 of 8 rows were not drawn from this sharded replay"),
    ):
        with pytest.raises(error, match=message):
            replay.update_priority(*arguments)
    with pytest.raises(TypeError, match="the signal 'surprize'"):
        replay.update_priority(batch, torch.ones(8), surprize=torch.ones(8))
    with pytest.raises(TypeError, match="no td_error"):
        replay.update_tensordict_priority(batch)
    assert replay.awaits_priorities and np.isclose(sum(replay.stats()["mass"]), 40, rtol=1e-4)


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    replay = filled()
    with pytest.raises(TypeError, match="filesystem is 's3'; it must be a file system of pyarrow, or None"):
        replay.save(tmp_path, filesystem="s3")
    with pytest.raises(NotImplementedError, match="this replay has no curriculum"):
        replay.progress("near", 0.5)
    with pytest.raises(NotImplementedError, match="this replay has no curriculum"):
        replay.actor_tasks(1)


def test_a_save_of_another_capacity_is_refused_with_both(tmp_path: Path) -> None:
    filled().save(tmp_path)
    for num_shards in (2, 3):
        other = built(num_shards=num_shards, capacity=50)
        with pytest.raises(ValueError, match=r"a sharded replay of .*'capacity': 100\}\}, and this one is of .* 50\}"):
            other.load(tmp_path)
        assert len(other) == 0


def test_a_replay_of_the_same_name_has_the_same_options() -> None:
    coordinator = coordinator_of(built(priority_exponent=0.5, samples_per_insert=1.0, error_buffer=9.0))
    options = coordinator.options
    assert coordinator.key_for(copy.deepcopy(options)) == coordinator.key_for(options)
    for name, ours, value in (("priority_exponent", 0.5, 0.6), ("capacity", 100, 99), ("n_steps", None, 3)):
        other = dataclasses.replace(options, of_recipe=options.of_recipe | {name: value, "seed": 77})
        with pytest.raises(ValueError, match=rf"built with {{'{name}': {ours}}}; this one has {{'{name}': {value}}}"):
            coordinator.key_for(other)
    with pytest.raises(ValueError, match="'samples_per_insert': 1.0}; this one"):
        coordinator.key_for(dataclasses.replace(options, limits=options.limits | {"samples_per_insert": 2.0}))
