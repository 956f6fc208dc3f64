# SPDX-License-Identifier: Apache-2.0
"""Runs that are stopped by signals and exceptions: what is saved, and how they go on."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_replay.lit import LevelDataModule, ReplayCheckpoint, ReplayDataModule
from lightning_replay.lit.stop_signals import StopSignals
from lightning_replay.replay import Replay
from lightning_replay.storage import PackedStorage
from lightning_replay.writers import FirstInFirstOutWriter
from tests.unit.lit.level_toys import Stairs, make_agent, make_levels
from tests.unit.lit.level_toys import make_data as make_level_data
from tests.unit.lit.toys import Counting, Tiny, make_replay, make_trainer

RUN = {"env_steps": 60, "warmup_steps": 20, "seed": 0, "updates_per_epoch": 10, "num_envs": 2}


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Those of a program that was just started, whatever runs the tests; every run must leave them as they were."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGINT, before[0]), signal.signal(signal.SIGTERM, before[1])


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was said of saving."""
    with caplog.at_level(logging.INFO):
        yield lambda: [one.getMessage() for one in caplog.records if "aved" in one.getMessage()]


def make_data(prioritized: bool = False, env=Counting, **options) -> ReplayDataModule:
    return ReplayDataModule(env, make_replay(prioritized), **(RUN | options))


class Agent(Tiny):
    """Does something before an update, and moves its weight after each training step, as target networks do."""

    def __init__(self, at: int = 0, act: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.at, self.before_update = at, act

    def update(self, batch):
        if self.trainer.datamodule.updates_done == self.at and self.before_update is not None:
            self.before_update()
        return super().update(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        with torch.no_grad():
            self.weight.mul_(0.999)


class CloseAt(L.Callback):
    """Closes the environments between two training steps, so that the next ones begin new episodes."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_train_start(self, trainer, pl_module) -> None:
        data = trainer.datamodule
        data.pause_hooks.append(lambda between: data.collection.close() if data.updates_done == self.update else None)


def send(number: int, times: int = 1) -> Callable[[], None]:
    def act() -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    return act


def fail() -> None:
    raise ZeroDivisionError("of the test")


def fit(directory: Path, agent, data, callbacks=(), **options) -> L.Trainer:
    torch.manual_seed(0)
    trainer = make_trainer(directory, [ReplayCheckpoint(directory / "run"), *callbacks])
    trainer.fit(agent, datamodule=data, **options)
    return trainer


def counts_of(trainer: L.Trainer) -> tuple[int, ...]:
    data, batches = trainer.datamodule, trainer.fit_loop.epoch_loop.batch_progress
    steps = trainer.global_step, batches.total.completed, batches.current.completed, trainer.current_epoch
    return (data.env_steps_done, data.updates_done, *steps)


@pytest.mark.parametrize(
    ("number", "update", "prioritized", "options"),
    [
        (signal.SIGINT, 7, False, {}),
        (signal.SIGTERM, 10, True, {}),  # at the end of an epoch
        (signal.SIGINT, 23, True, {}),
        (signal.SIGTERM, 30, False, {"updates_per_env_step": 3, "env_steps": 40}),
        (signal.SIGINT, 12, True, {"updates_per_training_step": 4, "updates_per_epoch": 12}),
    ],
)
def test_a_stopped_run_goes_on_as_the_one_without_a_break(
    tmp_path: Path, number, update: int, prioritized: bool, options
) -> None:
    whole = Agent()
    unbroken = fit(tmp_path / "whole", whole, make_data(prioritized, **options), [CloseAt(update)])
    # in the middle of a training step, of which the last update is still to come
    first = Agent(update - options.get("updates_per_training_step", 1) + 1, send(number))
    with pytest.raises(SystemExit) as end:
        fit(tmp_path, first, make_data(prioritized, **options))
    assert end.value.code == 1 if number == signal.SIGINT else isinstance(end.value, SIGTERMException)
    assert len(first.seen) == update
    second = Agent()
    resumed = fit(tmp_path, second, make_data(prioritized, **(options | {"seed": 99})), ckpt_path="last")
    assert first.seen + second.seen == whole.seen
    assert torch.equal(second.weight, whole.weight)
    assert (resumed.datamodule.replay[:] == unbroken.datamodule.replay[:]).all()
    assert counts_of(resumed) == counts_of(unbroken)


@pytest.mark.parametrize("updates_per_training_step", [1, 4])
def test_a_signal_does_not_wait_for_the_whole_warm_up(tmp_path: Path, updates_per_training_step: int) -> None:
    class Signals(Counting):
        steps = 0

        def step(self, action):
            Signals.steps += 1
            if Signals.steps == 1_100:
                send(signal.SIGINT)()
            return super().step(action)

    options = {"warmup_steps": 3_000, "env_steps": 3_040, "num_envs": 1}
    options["updates_per_training_step"] = updates_per_training_step
    whole, second = Agent(), Agent()

    def close(trainer) -> None:
        data = trainer.datamodule
        data.pause_hooks.append(lambda _: data.collection.close() if data.env_steps_done == 2_048 else None)

    closing = L.Callback()
    closing.on_train_start = lambda trainer, pl_module: close(trainer)
    unbroken = fit(tmp_path / "whole", whole, make_data(**options), [closing])
    with pytest.raises(SystemExit):
        fit(tmp_path, Agent(), make_data(env=Signals, **options))
    assert Signals.steps == 2_048
    resumed = fit(tmp_path, second, make_data(**options), ckpt_path="last")
    assert second.seen == whole.seen and torch.equal(second.weight, whole.weight)
    assert (resumed.datamodule.replay[:] == unbroken.datamodule.replay[:]).all()
    assert counts_of(resumed) == counts_of(unbroken)


def test_a_signal_at_the_end_of_the_last_step(tmp_path: Path, lines) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, Agent(40, send(signal.SIGINT)), make_data())
    assert "Saved: update 40 (environment step 60)" in lines()[-1]


def test_a_second_signal_leaves_the_step_unfinished(tmp_path: Path, lines) -> None:
    agent, data = Agent(17, send(signal.SIGINT, 2)), make_data()
    with pytest.raises(SystemExit) as end:
        fit(tmp_path, agent, data)
    assert end.value.code == 1 and len(agent.seen) == data.updates_done == 16
    assert "Saved: update 16 (environment step 38)" in lines()[-1]
    with pytest.raises(SIGTERMException):
        fit(tmp_path, Agent(30, send(signal.SIGTERM, 2)), make_data(), ckpt_path="last")
    assert "Saved: update 29 (environment step 50)" in lines()[-1]


class Interrupting(FirstInFirstOutWriter):
    """Interrupted while it writes the row of a given number."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row, self.written = row, 0

    def extend(self, data):
        index = super().extend(data)
        self.written += len(index)
        if self.written == self.row:
            send(signal.SIGINT, 2)()
        return index


def test_nothing_is_saved_of_a_replay_that_is_half_written(tmp_path: Path, lines) -> None:
    for row, callbacks in ((36, []), (50, [])):
        replay = Replay(storage=PackedStorage(500), writer=Interrupting(row), batch_size=4, seed=0)
        data = ReplayDataModule(Counting, replay, **RUN)
        keep = ReplayCheckpoint(tmp_path / "run", every_n_updates=10)
        trainer = make_trainer(tmp_path, [keep, *callbacks])
        with pytest.raises(SystemExit):
            trainer.fit(Agent(), datamodule=data)
        assert "Nothing was saved, because the replay was being written; " in lines()[-1]
        assert "update 10 (environment step 30) is in" in lines()[-1] or row == 50


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_during_a_save_does_not_lose_it(tmp_path: Path, number, monkeypatch) -> None:
    replay_save, saves = Replay.save, []

    def save(self, *arguments, **options):
        saves.append(len(self))
        if len(saves) == 2:
            send(number, 2)()
        return replay_save(self, *arguments, **options)

    monkeypatch.setattr(Replay, "save", save)
    with pytest.raises(SystemExit):
        trainer = make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / "run", every_n_updates=10)])
        trainer.fit(Agent(), datamodule=make_data())
    assert saves == [30, 40, 40]
    assert torch.load(tmp_path / "run" / "last.ckpt")["ReplayDataModule"]["updates"] == 20


class Failing(Counting):
    """Its environments' step of a given number fails."""

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
def test_steps_before_a_failed_one_are_kept(
    tmp_path: Path, failing: int, updates_per_training_step: int, updates: int, lines
) -> None:
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
    fit(tmp_path, Agent(), make_data())
    last = tmp_path / "run" / "last.ckpt"
    before = last.read_bytes()
    next((tmp_path / "run").glob("*.replay/data-*/tensors.safetensors")).unlink()
    with pytest.raises(Exception, match=r"tensors\.safetensors"):
        fit(tmp_path, Agent(), make_data(), ckpt_path="last")
    assert last.read_bytes() == before and len(list((tmp_path / "run").glob("*.ckpt"))) == 1


def make_rollouts(env=Stairs) -> LevelDataModule:
    return make_level_data(make_levels(), env=env, env_steps=90, rollouts_per_epoch=2)


def level_state(data: LevelDataModule) -> list:
    state = data.state_dict()
    state.pop("torch_generator")
    levels = data.levels.probabilities()
    columns = [levels[key].tolist() for key in ("level_id", "probability", "score", "staleness")]
    return [state["updates"], state["collection"]["env_steps"], columns, data.levels.episodes]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_of_levels_goes_on_as_the_one_without_a_break(tmp_path: Path, number) -> None:
    class Sends(L.Callback):
        def on_train_batch_start(self, trainer, *_) -> None:
            if trainer.datamodule.updates_done == 3:
                send(number)()

    whole, unbroken = make_agent(), make_rollouts()
    fit(tmp_path / "whole", whole, unbroken, [CloseAt(3)])
    with pytest.raises(SystemExit):
        fit(tmp_path, make_agent(), make_rollouts(), [Sends()])
    agent, resumed = make_agent(), make_rollouts()
    trainer = fit(tmp_path, agent, resumed, ckpt_path="last")
    assert level_state(resumed) == level_state(unbroken)
    assert all(torch.equal(one, other) for one, other in zip(agent.parameters(), whole.parameters(), strict=True))
    assert (resumed.updates_done, trainer.global_step, resumed.env_steps_done) == (6, 6, 90)


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


def test_a_thread_leaves_the_signals_alone(tmp_path: Path) -> None:
    seen = []

    def look() -> None:
        seen.extend([signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=fit, args=(tmp_path, Agent(7, look), make_data()))
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler, signal.SIG_DFL]
    assert (tmp_path / "run" / "last.ckpt").exists()


def test_a_handler_of_the_program_stays(tmp_path: Path) -> None:
    received, seen = [], []
    handler = lambda *given: received.append(given)  # noqa: E731

    def act() -> None:
        seen.append(signal.getsignal(signal.SIGINT))
        send(signal.SIGINT)()

    signal.signal(signal.SIGINT, handler)
    try:
        fit(tmp_path, Agent(7, act), make_data())
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert seen == [handler] and len(received) == 1


def test_forked_environments_outlive_ctrl_c_and_obey_sigterm() -> None:
    signals = StopSignals()
    signals.install()
    statuses = []
    for number in (signal.SIGINT, signal.SIGTERM):
        child = os.fork()
        if child == 0:
            send(number, 2)()
            os._exit(0)
        statuses.append(os.waitpid(child, 0)[1])
    signals.raise_pending()
    signals.remove()
    assert statuses == [0, signal.SIGTERM]
