# SPDX-License-Identifier: Apache-2.0
"""A curriculum under a trainer: actors on their tasks, signals to the scheduler, all of it after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_replay import recipes
from lightning_replay.agents import MPDQN
from lightning_replay.lit import Evaluate, ReplayDataModule
from lightning_replay.schedulers import EasyToHard, Exp3, MeanReturn, OneTask
from tests.unit.lit.toys import make_trainer

pytestmark = pytest.mark.slow

TASKS = ["target", "far", "near", "goal_mouth"]


def make_data(scheduler, env_steps: int, **options) -> ReplayDataModule:
    replay = recipes.parallel_curriculum(TASKS, 2_000, batch_size=16, scheduler=scheduler, seed=0)
    options |= {"warmup_steps": 400, "updates_per_env_step": 0.25, "num_envs": 4, "env_kwargs": {"max_steps": 20}}
    progress = MeanReturn(low=0.0, high=5.0, window=10, every=2)
    return ReplayDataModule("HalfField-1v0", replay, env_steps=env_steps, seed=0, progress=progress, **options)


def make_agent() -> MPDQN:
    torch.manual_seed(0)
    return MPDQN(hidden_sizes=(16,), target_low=0.0, target_high=5.0, exploration_steps=1_000)


def test_every_batch_is_of_one_task_and_every_row_of_its_environments_task(tmp_path: Path) -> None:
    drawn: set[int] = set()

    class Watching(MPDQN):
        def update(self, batch):
            assert (batch["task"] == batch["task"][0]).all()
            drawn.add(int(batch["task"][0]))
            return super().update(batch)

    data = make_data(Exp3(exploration=0.5), env_steps=1_000, info_keys=("goal", "ball_distance", "task"))
    trainer = make_trainer(tmp_path, [Evaluate(every_n_env_steps=300, episodes=1)])
    trainer.fit(Watching(hidden_sizes=(16,)), datamodule=data)
    assert trainer.global_step == 150 and drawn == {0, 1, 2, 3}
    rows = data.replay[:]
    assert torch.bincount(rows["task"]).tolist() == [250] * 4
    # the environment's own word, index into its TASKS, which are in the same order
    assert torch.equal(rows["next", "task"].flatten().long(), rows["task"])
    assert torch.equal(rows["next", "goal"], (rows["next", "reward"] == 5.0).float())
    assert (rows["next", "ball_distance"] > 0).any()
    # the four starts differ in how far the ball is from the goal
    ball = [rows["observation"][rows["task"] == task, 6].mean().item() for task in range(4)]
    assert ball == sorted(ball) and ball[3] - ball[0] > 0.5


def test_a_resumed_run_keeps_weights_signals_and_assignment(tmp_path: Path) -> None:
    scheduler = EasyToHard(order=TASKS[::-1], advance_at=0.99, max_signals=2)
    data = make_data(scheduler, env_steps=800)
    options = {"dirpath": tmp_path, "filename": "{step}", "every_n_train_steps": 50, "save_top_k": -1}
    make_trainer(tmp_path, [ModelCheckpoint(**options)]).fit(make_agent(), datamodule=data)
    saved = torch.load(tmp_path / "step=50.ckpt", weights_only=True)["ReplayDataModule"]["collection"]["tasks"]
    assert len(saved["next"]) == 4 and saved["progress"]["episodes"]

    resumed = make_data(EasyToHard(order=TASKS[::-1], advance_at=0.99, max_signals=2), env_steps=900)
    state = {}

    class Watching(MPDQN):
        def on_train_start(self):
            state.update(self.trainer.datamodule.collection.state_dict()["tasks"])

    again = Watching(hidden_sizes=(16,), target_low=0.0, target_high=5.0, exploration_steps=1_000)
    trainer = make_trainer(tmp_path, [ModelCheckpoint(**options)])
    trainer.fit(again, datamodule=resumed, ckpt_path=tmp_path / "step=50.ckpt")
    assert state == saved
    assert resumed.env_steps_done == 900 and resumed.updates_done == 125
    rows = resumed.replay[:]
    tasks = rows["task"][rows["trajectory"].argsort()]
    assert tasks[0] == 3 and tasks[-1] < 3  # the stages went on from where they were


def test_without_a_curriculum_all_actors_play_the_target(tmp_path: Path) -> None:
    data = make_data(OneTask(), env_steps=440)
    make_trainer(tmp_path).fit(make_agent(), datamodule=data)
    assert (data.replay[:]["task"] == 0).all()
