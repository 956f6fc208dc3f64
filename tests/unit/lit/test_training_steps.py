# SPDX-License-Identifier: Apache-2.0
"""Training steps of several updates by default: the same run as one update per training step, in fewer steps."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, ModelSummary, Timer

from lightning_replay.agents import DQN
from lightning_replay.agents.interfaces import takes_update_batches
from lightning_replay.lit import Evaluate, LearningCurve, LogReplayStats, ReplayDataModule
from tests.attack.states import difference
from tests.unit.lit.toys import Counting, Tiny, WatchedCheckpoint, make_replay, make_trainer


class Several(Tiny):
    """Takes several batches, and counts its training steps."""

    takes_update_batches = True
    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)


class Epochs(L.Callback):
    def __init__(self) -> None:
        self.ends: list[int] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ends.append(trainer.datamodule.updates_done)


def fit(directory: Path, agent: L.LightningModule, callbacks=(), trainer_options=None, **options):
    torch.manual_seed(0)
    options = {"env_steps": 140, "warmup_steps": 20, "seed": 0} | options
    data = ReplayDataModule(Counting, make_replay(prioritized=True), **options)
    trainer = make_trainer(directory, callbacks, **(trainer_options or {}))
    trainer.fit(agent, datamodule=data)
    return trainer, data


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"updates_per_epoch": 50},
    {"updates_per_env_step": 0.5, "updates_per_epoch": 16},
    {"updates_per_env_step": 3, "num_envs": 7, "env_steps": 61, "updates_per_epoch": 17},
], ids=str)  # fmt: skip
def test_it_is_the_same_run_in_fewer_training_steps(tmp_path: Path, options) -> None:
    runs = []
    for several in (1, None):
        agent, epochs = Several(), Epochs()
        keep = WatchedCheckpoint(tmp_path / str(several), every_n_updates=9)
        evaluate = Evaluate(every_n_env_steps=23, episodes=1)
        curve = LearningCurve(str(tmp_path / "curve.png"))
        callbacks = [keep, evaluate, LogReplayStats(every_n_updates=11), curve, epochs]
        trainer, data = fit(tmp_path, agent, callbacks, updates_per_training_step=several, **options)
        runs.append(
            (agent, epochs.ends, keep.written, evaluate.history, trainer.current_epoch, trainer.global_step, data)
        )
    (single, *expected, one), (joined, *found, data) = runs
    assert found == expected
    assert joined.seen == single.seen and torch.equal(joined.weight, single.weight)
    assert difference(one.replay.state_dict(), data.replay.state_dict()) is None
    assert list(one.collection.episodes) == list(data.collection.episodes)
    assert 2 * joined.steps < single.steps == data.updates_done


@pytest.mark.parametrize("options", [{"max_steps": 37}, {"max_steps": 48, "max_epochs": 3}], ids=str)
def test_max_steps_counts_updates(tmp_path: Path, options) -> None:
    trainer, data = fit(tmp_path, Several(), trainer_options=options)
    assert trainer.global_step == data.updates_done == options["max_steps"]


def test_an_agent_that_stops_the_trainer_stops_it_after_that_update(tmp_path: Path) -> None:
    class Stops(Several):
        takes_update_batches = True

        def update(self, batch):
            self.trainer.should_stop = len(self.seen) == 20
            return super().update(batch)

    _, data = fit(tmp_path, Stops())
    assert data.updates_done == 21


class Logging(DQN):
    def update(self, batch):
        self.log("updates", float(self.trainer.datamodule.updates_done), on_epoch=True)
        return super().update(batch)


class Declared(Logging):
    """Takes several batches all the same."""

    takes_update_batches = True


class Inherited(Several):
    """Has the attribute of its base class alone."""


def test_which_agents_take_several_batches() -> None:
    taken = {
        kind: takes_update_batches(kind.__new__(kind)) for kind in (DQN, Logging, Declared, Several, Inherited, Tiny)
    }
    assert taken == {kind: kind in (DQN, Declared, Several) for kind in taken}


class Watching(L.Callback):
    """Observes batches."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        assert len(batch["index"])


@pytest.mark.slow
@pytest.mark.parametrize(("callbacks", "trainer_options", "options", "steps"), [
    ([Timer(duration="00:01:00:00"), ModelSummary()], {}, {}, 8),
    ([Watching()], {}, {}, 120),
    ([LambdaCallback(on_train_batch_end=lambda *_: None)], {}, {}, 120),
    ([], {"limit_train_batches": 50}, {}, 120),
    ([], {"fast_dev_run": 3}, {}, 3),
    ([], {}, {"updates_per_env_step": 0.2}, 24),
    ([], {}, {"updates_per_training_step": 5}, 24),
], ids=["timer", "callback", "lambda", "limited", "fast_dev_run", "few updates", "given"])  # fmt: skip
def test_when_updates_are_joined(tmp_path: Path, callbacks, trainer_options, options, steps: int) -> None:
    agent = Several()
    fit(tmp_path, agent, callbacks, trainer_options, **options)
    assert agent.steps == steps


@pytest.mark.parametrize(("save", "steps"), [({}, 8), ({"every_n_train_steps": 50}, 120)], ids=str)
def test_checkpoints_of_lightning_at_steps_are_kept(tmp_path: Path, save, steps: int) -> None:
    agent = Several()
    fit(tmp_path, agent, [ModelCheckpoint(tmp_path, save_top_k=-1, **save)])
    assert agent.steps == steps
    written = {path.stem.split("step=")[1] for path in tmp_path.glob("*.ckpt")}
    assert written == ({"50", "100"} if save else {"120"})


class OfOneBatch(Tiny):
    def __init__(self, use) -> None:
        super().__init__()
        self.use = use

    def training_step(self, batch, batch_idx):
        return self.use(self, batch)


def log_in_the_loop(agent, batches):
    for _ in batches:
        agent.log("loss", torch.zeros(()), on_step=False, on_epoch=True)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda agent, batch: batch["observation"], TypeError, r"several batches, and \['observation'\] is of one"),
        (lambda agent, batch: batch.shape, AttributeError, r"several batches, and .shape is of one; .* None"),
        (log_in_the_loop, RuntimeError, "drawn as they are iterated over, once.*batch_size=len"),
    ],
)
def test_code_for_one_batch_gets_an_error_that_names_the_option_or_the_remedy(tmp_path, use, error, message) -> None:
    with pytest.raises(error, match=message):
        fit(tmp_path, OfOneBatch(use), updates_per_training_step=4)
