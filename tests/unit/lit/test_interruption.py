# SPDX-License-Identifier: Apache-2.0
"""Runs that are stopped by an exception: what is saved, and how they go on."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_replay.lit import ReplayCheckpoint
from tests.unit.lit.level_toys import Stairs, make_agent, make_rollouts
from tests.unit.lit.stopped_runs import Agent, counts_of, fail, fit, make_data
from tests.unit.lit.toys import Counting, make_trainer

pytestmark = pytest.mark.usefixtures("default_handlers")


class Failing(Counting):
    number, failing = 0, 0

    def step(self, action):
        type(self).number += 1
        if self.number == self.failing:
            fail()
        return super().step(action)


@pytest.mark.parametrize(
    ("failing", "updates_per_training_step", "updates"),
    [(15, 1, 0), (33, 1, 12), (33, 5, 12)],  # in the warm-up, where rows wait to be stored, and after
)
def test_steps_before_a_failed_one_are_kept(tmp_path: Path, failing, updates_per_training_step, updates, lines) -> None:
    kind = type("FailingOnce", (Failing,), {"failing": failing})
    options = {"num_envs": 1, "updates_per_training_step": updates_per_training_step}
    first, data, second = Agent(), make_data(env=kind, **options), Agent()
    with pytest.raises(ZeroDivisionError, match="of the test"):
        fit(tmp_path, first, data)
    assert (len(data.replay), data.env_steps_done, data.updates_done) == (failing - 1, failing - 1, updates)
    assert f"Saved: update {updates} (environment step {failing - 1})" in lines()[-1]
    resumed = fit(tmp_path, second, make_data(**options), ckpt_path="last")
    rows = resumed.datamodule.replay[:]
    assert (rows[: failing - 2] == data.replay[: failing - 2]).all()
    assert rows["next", "truncated"].flatten().nonzero().flatten().tolist() == [failing - 2]
    assert counts_of(resumed)[:3] == (60, 40, 40) and len(first.seen) + len(second.seen) == 40


@pytest.mark.parametrize(("updates_per_training_step", "epoch"), [(1, [10] * 4), (4, [12] * 3)])
@pytest.mark.parametrize("is_after", [False, True])
def test_an_update_that_failed_is_not_counted_and_done_again(
    tmp_path: Path, updates_per_training_step: int, epoch, is_after: bool, lines
) -> None:
    class Fails(Agent):
        def update(self, batch):
            outputs = super().update(batch)
            if is_after and self.trainer.datamodule.updates_done == 18:
                fail()
            return outputs

    first = Fails(0 if is_after else 18, fail)
    options = {"updates_per_training_step": updates_per_training_step, "updates_per_epoch": epoch[0]}
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, first, make_data(True, **options))
    assert len(first.seen) == 17 + is_after
    assert "Saved: update 17 (environment step 38)" in lines()[-1]
    second = Agent()
    resumed = fit(tmp_path, second, make_data(True, **options), ckpt_path="last")
    assert len(second.seen) == 23 and resumed.datamodule.updates_done == 40
    assert resumed.global_step == 40 + is_after  # an optimizer's step that was taken stays counted
    steps = resumed.fit_loop.epoch_loop.batch_progress.total
    assert steps.ready == steps.started == steps.processed == steps.completed


def test_an_update_after_which_a_callback_fails_is_counted(tmp_path: Path, lines) -> None:
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer, *_) -> None:
            if trainer.datamodule.updates_done == 18:
                fail()

    first, second = Agent(), Agent()
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, first, make_data(True), [Fails()])
    assert "Saved: update 18" in lines()[-1]
    resumed = fit(tmp_path, second, make_data(True), ckpt_path="last")
    assert len(first.seen) + len(second.seen) == 40 and resumed.global_step == 40


@pytest.mark.parametrize("fails_in", ["environment", "training_step"])
def test_a_rollout_that_failed_is_collected_again(tmp_path: Path, fails_in: str, lines) -> None:
    class Fails(Stairs):
        number = 0

        def step(self, action):
            Fails.number += 1
            if Fails.number == 3 * 17 and fails_in == "environment":
                fail()
            return super().step(action)

    class Raises(L.Callback):
        def on_train_batch_start(self, trainer, *_) -> None:
            if trainer.datamodule.updates_done == 4 and fails_in == "training_step":
                fail()

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, make_agent(), make_rollouts(Fails), [Raises()])
    assert "Saved: update 3 (environment step 45)" in lines()[-1]
    data = make_rollouts()
    trainer = fit(tmp_path, make_agent(), data, ckpt_path="last")
    assert (data.updates_done, trainer.global_step, data.env_steps_done) == (6, 6, 90)


def test_weights_that_are_not_finite_do_not_replace_good_ones(tmp_path: Path, lines) -> None:
    agent = Agent(18)

    def diverge() -> None:
        agent.weight.data.fill_(torch.nan)

    agent.before_update = diverge
    trainer = make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / "run", every_n_updates=10)])
    with pytest.raises(ValueError, match="NaN"):  # of update_priority
        trainer.fit(agent, datamodule=make_data(True))
    assert "Nothing was saved, because weights of the agent are NaN or infinite; update 10 (env" in lines()[-1]
    assert torch.load(tmp_path / "run" / "last.ckpt")["state_dict"]["weight"].isfinite().all()


class Full(L.Callback):
    """From an update on the disk is full; counts the attempts to write a checkpoint."""

    def __init__(self, update: int) -> None:
        self.update, self.attempts = update, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.datamodule.updates_done == self.update:
            trainer.strategy.checkpoint_io.wrapped.save_checkpoint = self.refuse

    def refuse(self, *_, **__) -> None:
        self.attempts += 1
        raise OSError(28, "No space left on device")


def test_a_save_that_fails_is_raised_and_not_tried_again(tmp_path: Path, lines) -> None:
    full = Full(15)
    trainer = make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / "run", every_n_updates=10), full])
    with pytest.raises(OSError, match="No space left"):
        trainer.fit(Agent(), datamodule=make_data())
    assert full.attempts == 1
    assert "Nothing was saved, because saving failed; update 10 (environment step 30) is in" in lines()[-1]
    second = Agent()
    fit(tmp_path, second, make_data(), ckpt_path="last")
    assert len(second.seen) == 30


def test_an_exception_is_not_replaced_by_that_of_saving_it(tmp_path: Path, lines) -> None:
    full = Full(15)
    with pytest.raises(ZeroDivisionError, match="of the test"):
        fit(tmp_path, Agent(18, fail), make_data(), [full])
    assert full.attempts == 1
    assert lines()[-1] == (
        "\nNothing was saved, because saving failed, OSError: [Errno 28] No space left on device; "
        "there is no checkpoint of this run yet"
    )


def test_a_run_that_cannot_be_restored_saves_nothing(tmp_path: Path) -> None:
    class Other(Agent):
        def configure_optimizers(self):
            return torch.optim.SGD([{"params": [self.weight]}, {"params": [torch.nn.Parameter(torch.ones(1))]}], lr=0.1)

    fit(tmp_path, Agent(), make_data())
    last = tmp_path / "run" / "last.ckpt"
    before = last.read_bytes()
    data = make_data()
    with pytest.raises(ValueError, match="different number of parameter groups"):  # when the replay is restored already
        fit(tmp_path, Other(), data, ckpt_path="last")
    assert data.updates_done == 40
    assert last.read_bytes() == before and len(list((tmp_path / "run").glob("*.ckpt"))) == 1
