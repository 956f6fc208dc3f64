# SPDX-License-Identifier: Apache-2.0
"""Level replay after a break: contents, counters and the next choices are those of a run without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_replay.agents import PPO
from lightning_replay.levels import SequentialLevels, UniformLevels, tscl
from lightning_replay.lit import ReturnNormalization
from tests.unit.lit.level_toys import Valuer, fit, make_agent, make_data, make_levels
from tests.unit.lit.toys import make_trainer

SOURCES = [
    pytest.param(lambda: make_levels(levels=100), id="known"),
    pytest.param(lambda: make_levels(levels=None, capacity=8), id="unbounded"),
    pytest.param(lambda: UniformLevels(100, seed=0), id="uniform"),
    pytest.param(lambda: SequentialLevels(100), id="sequential"),
    pytest.param(lambda: tscl(100, seed=0), id="tscl"),
]


@pytest.mark.slow
@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("flush", [False, True])
def test_a_resumed_run_chooses_as_one_without_a_break(tmp_path: Path, make, flush: bool) -> None:
    options = {"num_envs": 10, "rollout_length": 3, "flush_unfinished": flush}
    data = make_data(make(), env_steps=180, return_normalization=ReturnNormalization(), **options)
    checkpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    fit(tmp_path, data, make_agent(), [checkpoint])
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=3.ckpt", "step=6.ckpt"]

    resumed = make_data(make(), env_steps=210, return_normalization=ReturnNormalization(), **options)
    seen = {}

    class Watching(PPO):
        def on_train_start(self):
            source = self.trainer.datamodule
            seen["state"] = source.state_dict()
            seen["contents"] = source.levels.probabilities()

        def training_step(self, batch, batch_idx):
            seen.setdefault("chosen", batch["level_id"][:, 0].tolist())
            seen["in_flight"] = [source.in_flight(actor) for actor in range(10)]
            return super().training_step(batch, batch_idx)

    source = resumed.levels
    agent = Watching(hidden_sizes=(8,), epochs=1, minibatches=2)
    trainer = make_trainer(tmp_path, [ModelCheckpoint(tmp_path / "more", every_n_train_steps=3, save_top_k=-1)])
    trainer.fit(agent, datamodule=resumed, ckpt_path=tmp_path / "step=6.ckpt")

    for key in ("level_id", "probability", "score", "staleness"):
        assert torch.equal(seen["contents"][key], data.levels.probabilities()[key])
    assert seen["state"]["updates"] == 6 and seen["state"]["collection"]["env_steps"] == 180
    assert _plain(seen["state"]) == _plain(data.state_dict())
    assert seen["chosen"] == [data.levels.next_level(actor) for actor in range(10)]
    assert resumed.env_steps_done == 210 and resumed.updates_done == trainer.global_step == 7
    # what was in flight before the break is forgotten: at most the level being played is
    assert all(len(levels) == 1 for levels in seen["in_flight"])


def _plain(value):
    """Comparable: tensors as lists; torch's own generator moved on."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key != "torch_generator"}
    return value


def test_fewer_environments_after_a_resume(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, make_data(num_envs=5))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    resumed = make_data(num_envs=2, env_steps=80)
    make_trainer(tmp_path).fit(Valuer(), datamodule=resumed, ckpt_path=tmp_path / "end.ckpt")
    assert [len(resumed.levels.in_flight(actor)) for actor in range(5)] == [1, 1, 0, 0, 0]
    assert resumed.env_steps_done == 80


def test_a_second_fit_goes_on_with_new_episodes(tmp_path: Path) -> None:
    levels = make_levels()
    data = make_data(levels)
    _, agent = fit(tmp_path, data)
    with pytest.warns(UserWarning, match="all 60 env_steps are collected"):
        fit(tmp_path, data, agent)
    data.pace.env_steps = 90
    fit(tmp_path, data, agent)
    assert data.env_steps_done == 90 and len(agent.rollouts) == 6
    assert (agent.rollouts[4]["observation"][:, 0, 1] == 0).all()
    assert all(len(levels.in_flight(actor)) == 1 for actor in range(3))


@pytest.mark.gpu
def test_an_agent_on_cuda_and_its_resume(tmp_path: Path) -> None:
    options = {"accelerator": "cuda", "devices": 1}
    data = make_data(return_normalization=ReturnNormalization())
    trainer, agent = fit(tmp_path, data, make_agent(), **options)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    more = make_data(return_normalization=ReturnNormalization(), env_steps=90)
    make_trainer(tmp_path, **options).fit(make_agent(), datamodule=more, ckpt_path=tmp_path / "end.ckpt")
    assert more.env_steps_done == 90 and more.updates_done == 6 and agent.is_built
