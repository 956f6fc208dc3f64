# SPDX-License-Identifier: Apache-2.0
"""The data module under a trainer: in step with the priorities, exact counts of steps and updates, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_replay.lit import ReplayDataModule
from lightning_replay.lit.collection import UpdateSchedule
from tests.unit.lit.toys import Counting, Tiny, make_replay, make_trainer


def fit(directory: Path, prioritized: bool = False, agent: Tiny | None = None, **options):
    replay = make_replay(prioritized)
    options = {"env_steps": 60, "warmup_steps": 20, "seed": 0} | options
    data = ReplayDataModule(Counting, replay, **options)
    agent = agent or Tiny()
    trainer = make_trainer(directory)
    trainer.fit(agent, datamodule=data)
    return trainer, agent, data


@pytest.mark.parametrize(
    ("num_envs", "ratio", "updates"), [(1, 1, 40), (7, 0.25, 10), (1, 0.3, 12), (7, 8, 320), (1, 0.01, 0)]
)
def test_it_stops_by_itself_with_exact_counts(tmp_path: Path, ratio: float, updates: int, num_envs: int) -> None:
    trainer, agent, data = fit(tmp_path, updates_per_env_step=ratio, num_envs=num_envs, updates_per_epoch=15)
    assert data.env_steps_done == len(data.replay) == 60
    assert trainer.current_epoch == (-(-updates // 15) or 1)
    assert data.updates_done == len(agent.seen) == trainer.global_step == updates
    assert data.is_finished and str(data).startswith("ReplayDataModule(Counting, 60 of 60 env steps")


def test_updates_wait_for_their_steps(tmp_path: Path) -> None:
    lengths = []

    class Watching(Tiny):
        def training_step(self, batch, batch_idx):
            lengths.append(len(self.trainer.datamodule.replay))
            return super().training_step(batch, batch_idx)

    fit(tmp_path, agent=Watching(), env_steps=30, updates_per_env_step=0.5)
    assert lengths == [22, 24, 26, 28, 30]
    lengths.clear()
    fit(tmp_path, agent=Watching(), env_steps=23, updates_per_env_step=2)
    assert lengths == [21, 21, 22, 22, 23, 23]


def test_each_draw_sees_the_priorities_of_the_update_before(tmp_path: Path) -> None:
    states = []

    class Watching(Tiny):
        def update(self, batch):
            states.append(self.trainer.datamodule.replay.awaits_priorities)
            return super().update(batch)

    _, _, data = fit(tmp_path, prioritized=True, agent=Watching())
    assert states == [True] * 40 and not data.replay.awaits_priorities


def test_a_prioritized_stream_without_feedback_raises(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="prioritized, but no TD errors came back since its last draw"):
        fit(tmp_path, prioritized=True, agent=Tiny(gives_td_error=False))


@pytest.mark.parametrize(("prioritized", "count"), [(True, 3), (False, 8)])
def test_several_updates_per_training_step_are_the_same_training(tmp_path: Path, prioritized: bool, count: int) -> None:
    torch.manual_seed(1)
    _, single, _ = fit(tmp_path, prioritized, updates_per_env_step=2)
    torch.manual_seed(1)
    trainer, several, data = fit(tmp_path, prioritized, updates_per_env_step=2, updates_per_training_step=count)
    assert several.seen == single.seen
    assert torch.equal(several.weight, single.weight)
    assert trainer.global_step == data.updates_done == 80
    assert not data.replay.awaits_priorities


def test_the_same_seed_is_the_same_training(tmp_path: Path) -> None:
    seen = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        seen.append(fit(tmp_path, seed=seed)[1].seen)
    assert seen[0] == seen[1] != seen[2]


def test_schedules_get_both_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = make_replay()
    clocks = []
    monkeypatch.setattr(replay, "advance", lambda env_steps, updates=None: clocks.append((env_steps, updates)))
    data = ReplayDataModule(Counting, replay, env_steps=24, warmup_steps=20)
    make_trainer(tmp_path).fit(Tiny(), datamodule=data)
    # Steps of the warm-up move the clock of steps alone.
    assert clocks == [(0, None), (21, 0), (22, 1), (23, 2), (24, 3)]


def test_a_finished_run_is_not_trained_again_without_saying_so(tmp_path: Path) -> None:
    _, agent, data = fit(tmp_path)
    with pytest.warns(UserWarning, match="all 60 env_steps are collected"):
        make_trainer(tmp_path).fit(agent, datamodule=data)
    assert data.env_steps_done == 60 and len(agent.seen) == 40


def test_validate_plays_evaluation_episodes(tmp_path: Path) -> None:
    data = ReplayDataModule(Counting, make_replay(), env_steps=60, warmup_steps=20, evaluation_episodes=3)
    trainer = make_trainer(tmp_path)
    assert trainer.validate(Tiny(), datamodule=data, verbose=False) == [{"eval/return": 15.0}]
    assert trainer.callback_metrics["eval/return"] == 15.0
    assert len(data.replay) == 0
    trainer.fit(Tiny(), datamodule=data)
    assert trainer.validate(datamodule=data, model=Tiny(), verbose=False) == [{"eval/return": 15.0}]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataloader_around_the_stream_is_refused(num_workers: int) -> None:
    data = ReplayDataModule(Counting, make_replay(), env_steps=60, warmup_steps=20)
    loader = torch.utils.data.DataLoader(data.train_dataloader(), num_workers=num_workers, batch_size=None)
    with pytest.raises(RuntimeError, match="cannot be wrapped in a DataLoader"):
        next(iter(loader))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_agent_on_cuda_with_the_replay_on_either_device(tmp_path: Path, device: str) -> None:
    from lightning_replay import recipes
    from lightning_replay.agents import DQN, SAC, TD3

    def make_data(actions: int, env_steps: int) -> ReplayDataModule:
        replay = recipes.prioritized(capacity=500, batch_size=8, device=device)
        return ReplayDataModule(lambda: Counting(num_actions=actions), replay, env_steps=env_steps, warmup_steps=20)

    for kind, actions in ((TD3, 0), (SAC, 0), (DQN, 3)):
        trainer = make_trainer(tmp_path, accelerator="cuda", devices=1)
        agent = kind(hidden_sizes=(8,))
        trainer.fit(agent, datamodule=make_data(actions, 60))
        trainer.save_checkpoint(tmp_path / f"{kind.__name__}.ckpt")
        more = make_data(actions, 70)
        trainer = make_trainer(tmp_path, accelerator="cuda", devices=1)
        trainer.fit(agent, datamodule=more, ckpt_path=tmp_path / f"{kind.__name__}.ckpt")
        assert more.updates_done == 50 and trainer.strategy.root_device.type == "cuda"


@pytest.mark.parametrize(("ratio", "total"), [(0.25, 250), (0.1, 100), (1 / 3, 333), (1, 1_000), (20, 20_000)])
def test_totals_are_exact(ratio: float, total: int) -> None:
    assert UpdateSchedule(env_steps=1_100, warmup_steps=100, updates_per_env_step=ratio).total_updates == total


def test_timeline() -> None:
    # steps    0 . . warm-up . . 8 9 10 11 12 13 14 15 16 .. 19
    # due                        0 0  0  0  1  1  1  1  2 ..  2
    pace = UpdateSchedule(env_steps=19, warmup_steps=8, updates_per_env_step=0.25)
    assert [pace.updates_due(steps) for steps in range(8, 20)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert [pace.steps_for(update) for update in (1, 2)] == [12, 19]  # all steps come before the last update


@given(st.floats(0.01, 30), st.integers(1, 50), st.integers(1, 400))
def test_steps_for_is_the_first_step_at_which_an_update_is_due(ratio: float, warmup: int, more: int) -> None:
    pace = UpdateSchedule(env_steps=warmup + more, warmup_steps=warmup, updates_per_env_step=ratio)
    for update in range(1, min(pace.total_updates, 40)):
        steps = pace.steps_for(update)
        assert pace.updates_due(steps) >= update > pace.updates_due(steps - 1)


@pytest.mark.parametrize("env_steps", [10, 100])
def test_the_warm_up_is_shorter_than_the_run(env_steps: int) -> None:
    with pytest.raises(ValueError, match=f"env_steps is {env_steps} and warmup_steps 100; .* must be above it"):
        UpdateSchedule(env_steps, 100, 1)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (0.25, 2)])
def test_another_ratio_holds_from_the_resume_on(before: float, after: float) -> None:
    state = UpdateSchedule(env_steps=200, warmup_steps=60, updates_per_env_step=before).state_dict()
    done = int(140 * before)
    pace = UpdateSchedule(env_steps=400, warmup_steps=60, updates_per_env_step=after)
    pace.resume(state, 200, done)
    assert pace.updates_due(200) == done and pace.total_updates == done + 200 * after
    assert pace.steps_for(done + 1) == 201
    again = UpdateSchedule(env_steps=500, warmup_steps=60, updates_per_env_step=after)
    again.resume(pace.state_dict(), 300, pace.updates_due(300))
    assert [again.updates_due(steps) for steps in (250, 400)] == [pace.updates_due(steps) for steps in (250, 400)]


def test_a_run_stopped_in_its_warm_up_has_the_warm_up_that_is_asked_for() -> None:
    pace = UpdateSchedule(env_steps=400, warmup_steps=100, updates_per_env_step=2)
    pace.resume(UpdateSchedule(200, 60, 1).state_dict(), 40, 0)
    assert pace.updates_due(101) == 2
