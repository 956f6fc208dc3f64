# SPDX-License-Identifier: Apache-2.0
"""TorchRL's slices: those drawn are steps of one episode, and rows that allow no such slices are refused."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import (
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
)

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.lit import ReplayDataModule
from lightning_replay.writers import FirstInFirstOutWriter, RetentionWriter, TaskTableWriter

LENGTH = 10
BY_TRAJECTORY = {"slice_len": 8, "traj_key": "trajectory"}
BY_END = {"slice_len": 8, "end_key": ("next", "done")}


def steps(first: int, count: int, num_envs: int = 1, length: int = LENGTH, key="trajectory") -> TensorDict:
    """Steps ``[count * num_envs]`` of environments in turn, whose episodes last ``length`` steps.

    Of environment e the step t has observation ``[e, t]`` and the episode ``1000 * e + t // length``.
    """
    time = torch.arange(first, first + count).repeat_interleave(num_envs)
    env = torch.arange(num_envs).repeat(count)
    done = (time % length == length - 1).unsqueeze(-1)
    rows = TensorDict(
        {
            "observation": torch.stack((env, time), -1).float(),
            "step": time % length,
            "next": {"terminated": done, "truncated": torch.zeros_like(done), "done": done},
        },
        [count * num_envs],
    )
    if key is not None:
        rows[key] = 1000 * env + time // length
    return rows


def make(storage=None, batch_size: int = 32, **options) -> Replay:
    storage = PackedStorage(200) if storage is None else storage
    return Replay(storage=storage, sampler=SliceSampler(**options), batch_size=batch_size)


def follow_each_other(batch: TensorDict, length: int = 8) -> bool:
    env, time = batch["observation"].view(-1, length, 2).unbind(-1)
    return bool(
        (env.diff() == 0).all() and (time.diff() == 1).all() and (time[:, 0] // LENGTH == time[:, -1] // LENGTH).all()
    )


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("rows_at_once", [8, 160])
@pytest.mark.parametrize("options", [BY_TRAJECTORY, {"num_slices": 4, "traj_key": "trajectory"}])
def test_slices_along_interleaved_trajectories_are_refused(options, rows_at_once, strict) -> None:
    replay = make(strict_length=strict, **options)
    for rows in steps(0, 40, num_envs=4).split(rows_at_once):
        replay.extend(rows)
    with pytest.raises(
        ValueError, match="several environments are interleaved: 144 of 160 runs .*slice of 8 and"
    ) as error:
        replay.sample()
    assert "SliceSampler(fragmented=True, traj_key='trajectory', step_key=...)" in str(error.value)
    assert "or collect from one environment" in str(error.value)


@pytest.mark.parametrize("options", [BY_END, {"slice_len": 8}, {"slice_len": 8, "end_keys": [("next", "done")]}])
def test_slices_that_would_run_from_one_episode_into_another_are_refused(options) -> None:
    replay = make(**options)
    replay.extend(steps(0, 40, num_envs=4))
    message = r"ends slices where \('next', 'done'\) is true, and 144 of 160 runs .* traj_key='trajectory'; otherwise"
    with pytest.raises(ValueError, match=message):
        replay.sample()


def test_the_way_out_that_the_error_names() -> None:
    replay = make(fragmented=True, step_key="step", **BY_TRAJECTORY)
    replay.extend(steps(0, 40, num_envs=4))
    replay.extend(steps(40, 20, num_envs=4))  # the buffer is full before
    for _ in range(20):
        batch = replay.sample()
        assert len(batch) == 32 and follow_each_other(batch)


@pytest.mark.parametrize("options", [BY_TRAJECTORY, BY_END, {"slice_len": 8}])
@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_rows_of_one_environment_are_drawn_without_crossing_the_newest_row(options, storage, tmp_path) -> None:
    replay = make(storage(53), **options)
    for first in range(0, 252, 12):  # the newest episode is in progress
        replay.extend(steps(first, 12))
    for drawn in (replay, None):
        if drawn is None:
            replay.save(tmp_path)
            drawn = make(storage(53), **options)
            drawn.load(tmp_path)
        for _ in range(30):
            batch = drawn.sample()
            assert len(batch) == 32 and follow_each_other(batch)


def test_slices_without_trajectories_end_at_the_newest_row() -> None:
    replay = make(PackedStorage(53), **BY_END)
    rows = steps(0, 240, length=1000, key=None)
    for part in rows.split(40):
        replay.extend(part)
    for _ in range(100):
        time = replay.sample()["observation"][:, 1].view(4, 8)
        assert (time.diff() == 1).all()


@pytest.mark.parametrize("chunk", [14, 20])
def test_batches_of_a_collector_are_taken_along_trajectories_alone(chunk) -> None:
    # TorchRL's collectors: [environments, time], flattened; an episode of 50 steps goes on in the next batch
    parts = []
    for first in range(0, 100, chunk):
        rows = steps(first, chunk, num_envs=3, length=50, key=("collector", "traj_ids"))
        parts.append(rows.reshape(chunk, 3).transpose(0, 1).reshape(-1))
    by_trajectory, by_end = make(PackedStorage(400), slice_len=8), make(PackedStorage(400), **BY_END)
    for part in parts:
        by_trajectory.extend(part)
        by_end.extend(part)
    env, time = by_trajectory.sample()["observation"].view(4, 8, 2).unbind(-1)
    assert (env.diff() == 0).all() and (time.diff() == 1).all()
    with pytest.raises(ValueError, match=r"build the sampler with traj_key=\('collector', 'traj_ids'\)"):
        by_end.sample()


def test_short_episodes_are_the_users_own_choice() -> None:
    as_they_are, numbered_anew, broken_off = (steps(0, 60, length=3) for _ in range(3))
    numbered_anew["trajectory"] %= 4
    broken_off["next", "done"].zero_()
    for rows in (as_they_are, numbered_anew, broken_off):
        replay = make(strict_length=False, **BY_TRAJECTORY)
        replay.extend(rows)
        assert len(replay.sample()) == 12


def test_rows_are_looked_at_again_when_a_sixteenth_is_new_and_after_a_change_of_all() -> None:
    replay = make(PackedStorage(2_000), **BY_TRAJECTORY)
    replay.extend(steps(0, 160))
    replay.sample()
    replay.extend(steps(160, 80, num_envs=4))
    with pytest.raises(ValueError, match="are interleaved"):
        replay.sample()
    replay.empty()
    replay.extend(steps(0, 160))
    replay.sample()
    replay.empty()
    replay.extend(steps(0, 40, num_envs=4))
    with pytest.raises(ValueError, match="are interleaved"):
        replay.sample()


def test_slices_without_replacement_are_checked_too() -> None:
    sampler = SliceSamplerWithoutReplacement(**BY_TRAJECTORY, strict_length=False)
    replay = Replay(storage=PackedStorage(200), sampler=sampler, batch_size=32)
    replay.extend(steps(0, 40, num_envs=4))
    with pytest.raises(ValueError, match="SliceSamplerWithoutReplacement cuts slices from rows that lie side by side"):
        replay.sample()


def test_static_trajectories_are_those_of_the_user() -> None:
    rows, storage = steps(0, 40, num_envs=4), PackedStorage(160)
    Replay(storage=storage, batch_size=8).extend(rows)
    replay = make(storage, slice_len=8, trajectories=torch.arange(160) // 40, cache_values=True)
    assert (replay.sample()["index"].view(4, 8).diff() == 1).all()


@pytest.mark.parametrize(
    "writer", [TensorDictMaxValueWriter, RetentionWriter, lambda: TaskTableWriter(["easy", "hard"], 50)]
)
def test_writers_that_keep_no_order_are_refused(writer) -> None:
    with pytest.raises(ValueError, match="Writer does not keep them in order. Use FirstInFirstOutWriter, or build"):
        Replay(storage=PackedStorage(200), sampler=SliceSampler(**BY_TRAJECTORY), writer=writer(), batch_size=32)


def test_an_empty_buffer_has_no_slices() -> None:
    with pytest.raises(RuntimeError, match="empty"):
        make(**BY_TRAJECTORY).sample()


def test_several_environments_of_a_data_module_are_refused_before_they_are_stepped() -> None:
    options = {"env": "CartPole-v1", "env_steps": 100, "warmup_steps": 50}
    with pytest.raises(ValueError, match="num_envs is 4, and the replay draws with SliceSampler.*Use num_envs=1"):
        ReplayDataModule(replay=make(**BY_TRAJECTORY), num_envs=4, **options)
    ReplayDataModule(replay=make(**BY_TRAJECTORY), num_envs=1, **options)
    ReplayDataModule(replay=recipes.uniform(100, 8), num_envs=4, **options)


@pytest.mark.parametrize("writer", [FirstInFirstOutWriter, TensorDictRoundRobinWriter])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_slices_of_torchrls_buffers_end_at_the_newest_row(writer, is_loaded, tmp_path) -> None:
    def build() -> TensorDictReplayBuffer:
        sampler = SliceSampler(slice_len=4)
        return TensorDictReplayBuffer(storage=PackedStorage(10), writer=writer(), sampler=sampler, batch_size=400)

    replay = build()
    rows = steps(0, 19, length=1000, key=None)
    for part in (*rows.split(7)[:2], rows[14:17], rows[17:18]):
        replay.extend(part)
    replay.add(rows[18])
    if is_loaded:
        replay.dumps(tmp_path)
        replay = build()
        replay.loads(tmp_path)
    torch.manual_seed(0)
    time = replay.sample()["observation"][:, 1].view(-1, 4)
    assert (time.diff() == 1).all() and set(time[:, 0].tolist()) == set(range(9, 16))


def test_a_query_finds_trajectories_across_the_end_of_the_ring() -> None:
    replay = Replay(storage=PackedStorage(10), batch_size=4)
    for part in steps(0, 14, length=1000).split(7):
        replay.extend(part)
    (found,) = replay.query(trajectory_key="trajectory")
    assert found.data["observation"][:, 1].tolist() == list(range(4, 14))
