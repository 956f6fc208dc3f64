# SPDX-License-Identifier: Apache-2.0
"""The own sampler, writer and transform of docs/write-your-own.md, through all integrations, saved and resumed."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import lightning as L
import pytest
import torch
from scipy import stats
from torchrl.data import LazyTensorStorage, ReplayBuffer

from lightning_replay import PackedStorage, Replay, load_replay
from lightning_replay.agents import DQN
from lightning_replay.lit import ReplayCheckpoint, ReplayDataModule
from tests.transitions import numbered_steps

PAGE = Path(__file__).resolve().parents[2] / "docs" / "write-your-own.md"


@pytest.fixture(scope="module")
def own_parts(tmp_path_factory: pytest.TempPathFactory):
    """The first block of the page as a module that can be imported."""
    folder = tmp_path_factory.mktemp("own")
    block = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (folder / "own_parts.py").write_text(block.group(1))
    sys.path.insert(0, str(folder))
    yield importlib.import_module("own_parts")
    sys.path.remove(str(folder))
    del sys.modules["own_parts"]


def own_replay(own_parts: ModuleType, capacity: int = 40, window: int = 20, n_steps: int = 1, **options) -> Replay:
    return Replay(
        storage=PackedStorage(capacity),
        sampler=own_parts.NewestSampler(window=window),
        writer=own_parts.ReservoirWriter(),
        transform=own_parts.ClipReward(1.0),
        batch_size=8,
        n_steps=n_steps,
        seed=0,
        **options,
    )


def test_what_is_stored_and_drawn(own_parts) -> None:
    replay = own_replay(own_parts, capacity=10, window=3)
    index = replay.extend(numbered_steps(0, 6))
    assert index.tolist() == [0, 1, 2, 3, 4, 5] and replay.last_insertion.rows.tolist() == [0, 1, 2, 3, 4, 5]
    batch = replay.sample(64)
    assert set(batch["index"].tolist()) == {3, 4, 5}
    assert batch["next", "reward"].max() == 1.0, "rewards of 3, 4 and 5 are clipped"
    assert replay.storage.get(torch.tensor([5]))["next", "reward"].item() == 5.0


@pytest.mark.slow
def test_every_row_is_kept_with_the_same_probability(own_parts) -> None:
    """Of 30 rows 10 stay; in 1,000 buffers each row stays as often as any other."""
    kept = torch.zeros(30)
    for seed in range(1_000):
        writer = own_parts.ReservoirWriter(seed=seed)
        buffer = ReplayBuffer(storage=LazyTensorStorage(10), writer=writer, batch_size=1)
        for first in range(0, 30, 6):
            buffer.extend(numbered_steps(first, 6))
        kept[buffer.storage.get(slice(0, 10))["observation"][:, 0].long()] += 1
    assert kept.sum() == 10_000
    # the counts of one buffer are negatively correlated, by which the statistic is 29/30 * 20/30 of a chi-square's
    assert stats.chi2.sf(float(((kept - 1_000 / 3) ** 2 / (1_000 / 3)).sum()) * 1.5, 29) > 1e-4


def test_returns_do_not_cross_rows_that_the_writer_left_out(own_parts) -> None:
    replay = own_replay(own_parts, capacity=12, window=12, n_steps=2)
    for first in range(0, 60, 6):
        replay.extend(numbered_steps(first, 6))
    stored = set(replay.storage.get(torch.arange(12))["observation"][:, 0].tolist())
    batch = replay.sample(256)
    number, steps = batch["observation"][:, 0].tolist(), batch["steps_to_next_obs"].flatten().tolist()
    assert steps == [2 if each + 1 in stored else 1 for each in number] and set(steps) == {1, 2}


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_run_that_is_saved_and_loaded_draws_as_one_without_a_break(own_parts, tmp_path, prefetch) -> None:
    replay = own_replay(own_parts, prefetch=prefetch)
    for first in range(0, 90, 9):
        replay.extend(numbered_steps(first, 9))
        replay.sample()
    replay.save(tmp_path / "buffer")
    again = load_replay(tmp_path / "buffer", trust=["own_parts"])
    for first in range(90, 120, 10):
        for one in (replay, again):
            one.extend(numbered_steps(first, 10))
        assert torch.equal(replay.sample()["observation"], again.sample()["observation"])


def test_a_refused_call_changes_nothing(own_parts) -> None:
    replay = own_replay(own_parts)
    replay.extend(numbered_steps(0, 50))
    before, wrong = replay.state_dict(), numbered_steps(50, 4)
    wrong["next", "reward"][2] = float("nan")
    with pytest.raises(ValueError, match="is nan in rows"):
        replay.extend(wrong)
    after = replay.state_dict()
    assert before["writer"]["seen"] == after["writer"]["seen"] == 50
    assert torch.equal(before["storage"]["rows"], after["storage"]["rows"])
    assert torch.equal(before["writer"]["generator"], after["writer"]["generator"])


def fitted(own_parts: ModuleType, folder: Path, env_steps: int, ckpt_path: Path | None = None) -> ReplayDataModule:
    L.seed_everything(0)
    replay = own_replay(own_parts, capacity=200, window=100)
    data = ReplayDataModule(env="CartPole-v1", replay=replay, env_steps=env_steps, warmup_steps=50, seed=0)
    trainer = L.Trainer(
        default_root_dir=folder,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ReplayCheckpoint(dirpath=folder, every_n_updates=None)],
    )
    trainer.fit(DQN(hidden_sizes=[16]), data, ckpt_path=ckpt_path)
    return data


@pytest.mark.slow
def test_lightning_trains_saves_and_resumes(own_parts, tmp_path) -> None:
    first = fitted(own_parts, tmp_path, 150)
    assert first.updates_done == 100 and 0 < len(first.replay) <= 200
    second = fitted(own_parts, tmp_path, 250, tmp_path / "last.ckpt")
    assert second.updates_done == 200 and second.replay.writer.seen == 250


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_rllib_trains_saves_and_restores(own_parts, tmp_path) -> None:
    from ray.rllib.algorithms.algorithm import Algorithm
    from ray.rllib.algorithms.dqn import DQNConfig

    import rllib_ext

    parts = {
        "sampler": {"class_path": "own_parts.NewestSampler", "init_args": {"window": 100}},
        "writer": {"class_path": "own_parts.ReservoirWriter"},
        "transform": {"class_path": "own_parts.ClipReward", "init_args": {"limit": 1.0}},
    }
    config = (
        DQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0)
        .training(
            replay_buffer_config=rllib_ext.replay_config(capacity=200, **parts),
            num_steps_sampled_before_learning_starts=50,
        )
        .reporting(min_sample_timesteps_per_iteration=100, min_time_s_per_iteration=0)
        .debugging(seed=0)
    )
    algorithm = rllib_ext.configure(config).build_algo()
    algorithm.train()
    replay = algorithm.local_replay_buffer.modules["default_policy"].replay
    assert isinstance(replay.sampler, own_parts.NewestSampler) and 0 < len(replay) <= 200
    seen, rows = replay.writer.seen, replay.storage.state_dict()["rows"].clone()
    path = algorithm.save_to_path(tmp_path / "checkpoint")
    algorithm.stop()
    again = Algorithm.from_checkpoint(path)
    restored = again.local_replay_buffer.modules["default_policy"].replay
    assert restored.writer.seen == seen and torch.equal(restored.storage.state_dict()["rows"], rows)
    again.train()
    assert restored.writer.seen > seen
    again.stop()
