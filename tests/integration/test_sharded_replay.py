# SPDX-License-Identifier: Apache-2.0
"""A sharded replay of real actors: other processes, a lost shard, TorchRL's remote collectors, ranks of a trainer."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import ray
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_replay.lit import InspectBuffer, ReplayCheckpoint, ReplayDataModule
from lightning_replay.sharded import ShardedReplay
from lightning_replay.sharded.draws import batch_of
from lightning_replay.sharded.replay import NAMESPACE
from tests.ranks import RecordingDQN, RecordingSAC
from tests.unit.sharded.local_replay import steps

pytestmark = pytest.mark.slow

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other processes need not import Lightning


@pytest.fixture(scope="module")
def replay(shared_ray: None) -> Iterator[ShardedReplay]:
    with ShardedReplay(
        "prioritized",
        2,
        capacity=1_000,
        batch_size=32,
        seed=0,
        num_cpus_per_shard=0.5,
        name="tested",
        wait_timeout_s=120,
    ) as replay:
        yield replay


@pytest.fixture
def empty_replay(replay: ShardedReplay, tmp_path_factory: pytest.TempPathFactory) -> ShardedReplay:
    """The same after a save of nothing was loaded: starting others would take longer than most tests."""
    nothing = tmp_path_factory.getbasetemp() / "nothing"
    if not nothing.exists():
        assert not len(replay)
        replay.save(nothing)
    replay.load(nothing)
    return replay


def coordinator_of(replay: ShardedReplay) -> Any:
    return ray.get_actor(replay.name, namespace=NAMESPACE)


def handles_of(replay: ShardedReplay) -> list[Any]:
    return ray.get(coordinator_of(replay).__ray_call__.remote(lambda coordinator: coordinator.shards.handles))


@ray.remote(num_cpus=0.5)
def fill_and_draw(replay: ShardedReplay) -> list[int]:
    replay.extend(steps(100, 10, trajectory=0))
    batch = replay.sample(500)
    replay.update_priority(batch, torch.where(batch["action"] < 100, 3.0, 0.5))
    return sorted(set(batch["trajectory"].tolist()))


def test_other_processes_fill_it_draw_from_it_and_find_it_by_name(empty_replay: ShardedReplay) -> None:
    replay = empty_replay
    for number in range(4):
        replay.extend(steps(10 * number, 10, trajectory=number))
    assert ray.get(fill_and_draw.remote(replay)) == [0, 1, 2, 3, 2**40]
    with ShardedReplay("prioritized", 2, capacity=1_000, batch_size=32, name="tested") as same:
        pass  # which does not stop what it has not started
    assert len(same) == 50 and same.stats()["rows"] == [20, 30]
    batch = pickle.loads(pickle.dumps(replay)).sample(2_000)
    drawn = batch["action"].unique(return_counts=True)
    assert len(drawn[0]) == 50 and drawn[1][:40].min() > drawn[1][40:].float().mean()
    same.update_priority(batch, torch.ones(2_000))
    with pytest.raises(ValueError, match="a sharded replay of this name runs already, built with"):
        ShardedReplay("uniform", 2, capacity=1_000, batch_size=32, name="tested")


def test_training_goes_on_when_a_shard_is_lost(replay: ShardedReplay, tmp_path: Path) -> None:
    replay.save(tmp_path)
    rows, epochs = (replay.stats()[name] for name in ("rows", "epochs"))
    batch = replay.sample(64)
    drawn = ray.get(coordinator_of(replay).call.remote("test", "draw", 60.0, (64, {})))
    ray.kill(handles_of(replay)[0])
    deadline = time.monotonic() + 60
    while len(fetched := batch_of(drawn.fetch(timeout_s=10))) == 64:  # until the rows are gone with their owner
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(fetched) == (drawn.columns["index"] >= 2**40).sum() < 64
    assert (fetched["index"] >= 2**40).all()
    for _ in range(3):
        assert len(replay.sample(64)) == 64
    replay.update_priority(batch, torch.ones(64))
    replay.extend(steps(200, 5, trajectory=9))
    stats = replay.stats()
    assert stats["rows_lost"] == rows[0] and stats["epochs"] == [epochs[0] + 1, epochs[1]]
    assert stats["td_errors_dropped"] == (batch["index"] < 2**40).sum()
    replay.load(tmp_path)
    assert replay.stats()["rows"] == rows


def test_remote_collectors_of_torchrl_fill_it_while_this_process_draws(run_example: Callable[..., list[str]]) -> None:
    lines = run_example("torchrl_sharded.py")
    assert lines[0] == "env_steps  stored  loss" and len(lines) == 9
    assert all(int(line.split()[1]) >= int(line.split()[0]) for line in lines[1:-1])
    found = re.fullmatch(r"(\d+) rows in 2 shards: \[(\d+), (\d+)\]", lines[-1])
    assert found is not None
    rows, first, second = map(int, found.groups())
    assert rows == first + second >= 400 and min(first, second) > 100


def trainer_in(folder: Path, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(max_epochs=-1, accelerator="cpu", default_root_dir=folder, **quiet, **options)


def fitted(replay: ShardedReplay, folder: Path, env_steps: int, **options: Any) -> list[dict[str, Any]]:
    """Fits for so many steps, two updates for each batch of eight; returns what each rank has recorded."""
    data = ReplayDataModule(
        "CartPole-v1", replay, env_steps=env_steps, warmup_steps=40, num_envs=2, updates_per_env_step=0.25, seed=0
    )
    checkpoint = ReplayCheckpoint(folder / "checkpoints", monitor=None)
    trainer = trainer_in(folder, callbacks=[checkpoint], **options)
    resumed = "last" if (folder / "checkpoints" / "last.ckpt").exists() else None
    trainer.fit(RecordingDQN(), datamodule=data, ckpt_path=resumed)
    return [torch.load(folder / f"{rank}.pt") for rank in range(trainer.world_size)]


def test_a_trainer_of_one_process_resumes_with_its_rows(empty_replay: ShardedReplay, tmp_path: Path) -> None:
    own = empty_replay
    (record,) = fitted(own, tmp_path, 80, devices=1)
    assert record["clocks"] == (80, 10) and len(own) == 80 and own.stats()["num_draws"] == 10
    row = own.sample()[:1].exclude("index", "generation", "priority_weight")
    own.extend(row.set("trajectory", torch.full((1,), 99)))  # of the environment, which the checkpoint lacks
    (record,) = fitted(own, tmp_path, 120, devices=1)
    assert record["clocks"] == (120, 20) and len(own) == 120 and own.stats()["num_draws"] == 20


def test_two_ranks_of_ddp_fill_one_replay_and_learn_the_same_weights(
    empty_replay: ShardedReplay, tmp_path: Path
) -> None:
    multiprocessing.set_forkserver_preload(["tests.ranks"])  # "spawn" would import it in each process
    own = empty_replay
    for env_steps, updates in ((80, 10), (120, 20)):
        records = fitted(own, tmp_path, env_steps, devices=2, strategy=DDPStrategy(start_method="forkserver"))
        first, second = records
        assert [one["clocks"] for one in records] == [(env_steps, updates)] * 2
        assert [one["local_steps"] for one in records] == [env_steps // 2] * 2
        assert [one["explored"] for one in records] == [env_steps - 40] * 2
        assert len(own) == own.write_count == env_steps and own.stats()["num_draws"] == updates
        torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
        trajectories = set()
        for one, other in zip(first["drawn"], second["drawn"], strict=True):
            assert one.shape == other.shape == (3, 16) and not torch.equal(one, other)
            trajectories |= {int(number) >> 40 for number in torch.cat([one, other], 1)[2]}
        assert len(trajectories) == 2  # of both
    (saved,) = (tmp_path / "checkpoints").glob("*.replay")
    assert (saved / "replay_shards.json").exists()


def test_ranks_of_an_agent_with_several_optimizers_learn_the_same_weights(
    empty_replay: ShardedReplay, tmp_path: Path
) -> None:
    data = ReplayDataModule("Pendulum-v1", empty_replay, env_steps=60, warmup_steps=40, updates_per_env_step=0.5)
    strategy = DDPStrategy(start_method="forkserver")
    trainer = trainer_in(tmp_path, enable_checkpointing=False, devices=2, strategy=strategy)
    trainer.fit(RecordingSAC(), datamodule=data)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["clocks"] == second["clocks"] == (60, 10) and len(empty_replay) == 60
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)


def test_what_a_sharded_replay_does_not_offer_is_refused(replay: ShardedReplay) -> None:
    class OfAnother(SingleDeviceStrategy):
        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return "replay-of-the-first-process"

    data, another, alone = (
        ReplayDataModule("CartPole-v1", replay, env_steps=steps, warmup_steps=40) for steps in (81, 80, 80)
    )
    data.trainer = another.trainer = SimpleNamespace(world_size=2, global_rank=0, strategy=OfAnother())
    trainer = L.Trainer(max_epochs=-1, logger=False, accelerator="cpu", devices=1, callbacks=[InspectBuffer()])
    with pytest.raises(TypeError, match="leave InspectBuffer out"):
        trainer.fit(RecordingDQN(), datamodule=alone)
    with pytest.raises(ValueError, match="env_steps is 81; 2 processes share it, give a multiple of 2"):
        data.setup("fit")
    with pytest.raises(ValueError, match=r"each process has built a replay of its own.*Give all the same name"):
        another.setup("fit")


def test_after_stop_every_copy_is_refused(replay: ShardedReplay) -> None:
    copy = pickle.loads(pickle.dumps(replay))
    copy.stop()
    for one in (copy, replay):
        with pytest.raises(RuntimeError, match=r"this sharded replay has stopped: stop\(\) was called"):
            one.sample()
    replay.stop()  # again changes nothing
