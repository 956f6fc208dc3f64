# SPDX-License-Identifier: Apache-2.0
"""Runs that are stopped by SIGINT and SIGTERM, and how they go on."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_replay.lit import (
    Evaluate,
    GeneralizationGap,
    LevelDataModule,
    ReplayCheckpoint,
    ReplayDataModule,
    checkpoints,
)
from lightning_replay.lit.checkpoints import StopSignals
from lightning_replay.replay import Replay
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.writers import FirstInFirstOutWriter
from tests.unit.lit.level_toys import Doors, make_agent, make_rollouts
from tests.unit.lit.stopped_runs import RUN, Agent, CloseAt, counts_of, fail, fit, make_data, send
from tests.unit.lit.toys import Counting, make_trainer

pytestmark = pytest.mark.usefixtures("default_handlers")


@pytest.fixture
def each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal right after another one is a second one, as a second later."""
    monkeypatch.setattr(checkpoints, "_ONE_SIGNAL_S", -1.0)


class Joined(Agent):
    takes_update_batches = True
    on_train_batch_end = L.LightningModule.on_train_batch_end  # as often as there are training steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number", "update", "prioritized", "options"),
    [
        (Agent, signal.SIGTERM, 10, True, {}),  # at the end of an epoch
        (Agent, signal.SIGINT, 23, False, {}),
        (Agent, signal.SIGTERM, 30, False, {"updates_per_env_step": 3, "env_steps": 40}),
        (Agent, signal.SIGINT, 12, True, {"updates_per_training_step": 4, "updates_per_epoch": 12}),
        (Joined, signal.SIGINT, 23, True, {}),
    ],
)
def test_a_stopped_run_goes_on_as_the_one_without_a_break(tmp_path, kind, number, update, prioritized, options) -> None:
    whole, single = kind(), {"updates_per_training_step": 1} | options
    unbroken = fit(tmp_path / "whole", whole, make_data(prioritized, **single), [CloseAt(update)])
    # in the middle of a training step, of which the last update is still to come
    first = kind(update - options.get("updates_per_training_step", 1) + 1, send(number))
    with pytest.raises(SystemExit) as end:
        fit(tmp_path, first, make_data(prioritized, **options))
    assert end.value.code == 1 if number == signal.SIGINT else isinstance(end.value, SIGTERMException)
    assert len(first.seen) == update
    second = kind()
    resumed = fit(tmp_path, second, make_data(prioritized, **(options | {"seed": 99})), ckpt_path="last")
    assert first.seen + second.seen == whole.seen
    assert torch.equal(second.weight, whole.weight)
    assert (resumed.datamodule.replay[:] == unbroken.datamodule.replay[:]).all()
    known = slice(3 if kind is Joined else None)  # not how many training steps
    assert kind is Agent or counts_of(resumed)[3] < counts_of(unbroken)[3]
    assert counts_of(resumed)[known] == counts_of(unbroken)[known] and resumed.current_epoch == unbroken.current_epoch


class SignalsInEvaluation(Counting):
    """Sends a signal in the second step of the evaluation number ``at``, the first one being 0."""

    at = 1
    number = signal.SIGTERM
    evaluations = 0
    steps_after = 0
    is_sent = False

    def __init__(self, evaluates: bool = False) -> None:
        super().__init__(length=50)
        self.evaluates = evaluates
        if evaluates:
            SignalsInEvaluation.evaluations += 1

    def step(self, action):
        if self.evaluates and SignalsInEvaluation.is_sent:
            SignalsInEvaluation.steps_after += 1
        if self.evaluates and SignalsInEvaluation.evaluations == self.at + 1 and self.count == 1:
            SignalsInEvaluation.is_sent = True
            send(self.number)()
        return super().step(action)


class NotedEvaluate(Evaluate):
    """Keeps the updates after which it was about to play."""

    def __init__(self, begun: list[int]) -> None:
        super().__init__(every_n_env_steps=30, episodes=4)
        self.begun = begun

    def _play(self, trainer, agent) -> None:
        self.begun.append(trainer.datamodule.updates_done)
        super()._play(trainer, agent)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_evaluation_within_a_step_of_the_environment(tmp_path, monkeypatch, keeps, at, number) -> None:
    for name, value in (("at", at), ("number", number), ("evaluations", 0), ("steps_after", 0), ("is_sent", False)):
        monkeypatch.setattr(SignalsInEvaluation, name, value)

    begun: list[int] = []

    def callbacks() -> list[L.Callback]:
        evaluate = NotedEvaluate(begun)
        return [evaluate, ReplayCheckpoint(tmp_path / "run")] if keeps else [evaluate]

    def run(agent, **options) -> L.Trainer:
        torch.manual_seed(0)
        data = make_data(env=SignalsInEvaluation, evaluation_env_kwargs={"evaluates": True})
        trainer = make_trainer(tmp_path, callbacks())
        trainer.fit(agent, datamodule=data, **options)
        return trainer

    with pytest.raises(SystemExit):
        run(Agent())
    assert SignalsInEvaluation.is_sent and SignalsInEvaluation.steps_after == 0
    if keeps and at == 1:
        resumed = run(Agent(), ckpt_path="last")
        evaluated = resumed.callbacks[0].history
        assert [steps for steps, _ in evaluated] == [0, 30, 60]
        assert begun == [0, 9, 9, 40], "the interrupted evaluation is made again, of the same weights"


def test_a_signal_ends_a_validation_within_a_step_of_the_environment(tmp_path, monkeypatch) -> None:
    for name, value in (("at", 0), ("evaluations", 0), ("steps_after", 0), ("is_sent", False)):
        monkeypatch.setattr(SignalsInEvaluation, name, value)
    data = make_data(env=SignalsInEvaluation, evaluation_env_kwargs={"evaluates": True})
    with pytest.raises(SIGTERMException):
        make_trainer(tmp_path).validate(Agent(), datamodule=data, verbose=False)
    assert SignalsInEvaluation.is_sent and SignalsInEvaluation.steps_after == 0


class SignalsOnALevel(Doors):
    """Sends SIGTERM in the second step on level 100, which is held out."""

    steps_after = 0

    def step(self, action):
        if SignalsOnALevel.steps_after:
            SignalsOnALevel.steps_after += 1
        if self.level == 100 and self.count == 1:
            SignalsOnALevel.steps_after = 1
            send(signal.SIGTERM)()
        return super().step(action)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_signal_ends_an_evaluation_on_levels_within_a_step(tmp_path, monkeypatch, keeps: bool) -> None:
    monkeypatch.setattr(SignalsOnALevel, "steps_after", 0)
    callbacks = [GeneralizationGap(every_n_env_steps=30)]
    if keeps:
        callbacks.append(ReplayCheckpoint(tmp_path / "run"))
    with pytest.raises(SIGTERMException):
        make_trainer(tmp_path, callbacks).fit(make_agent(), datamodule=make_rollouts(SignalsOnALevel))
    assert 1 <= SignalsOnALevel.steps_after <= 3, "the other environments of the vector end this step"


def test_a_signal_does_not_wait_for_the_whole_warm_up(tmp_path: Path) -> None:
    class Signals(Counting):
        steps = 0

        def step(self, action):
            Signals.steps += 1
            if Signals.steps == 1_100:
                send(signal.SIGINT)()
            return super().step(action)

    options = {"warmup_steps": 2_100, "env_steps": 2_112, "num_envs": 1, "updates_per_training_step": 4}
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


def level_state(data: LevelDataModule) -> list:
    state = data.state_dict()
    state.pop("torch_generator")
    levels = data.levels.probabilities()
    columns = [levels[key].tolist() for key in ("level_id", "probability", "score", "staleness")]
    return [state["updates"], state["collection"]["env_steps"], columns, data.levels.episodes]


def test_a_run_of_levels_goes_on_as_the_one_without_a_break(tmp_path: Path) -> None:
    class Sends(L.Callback):
        def on_train_batch_start(self, trainer, *_) -> None:
            if trainer.datamodule.updates_done == 3:
                send(signal.SIGTERM)()

    whole, unbroken = make_agent(), make_rollouts()
    fit(tmp_path / "whole", whole, unbroken, [CloseAt(3)])
    with pytest.raises(SystemExit):
        fit(tmp_path, make_agent(), make_rollouts(), [Sends()])
    agent, resumed = make_agent(), make_rollouts()
    trainer = fit(tmp_path, agent, resumed, ckpt_path="last")
    assert level_state(resumed) == level_state(unbroken)
    assert all(torch.equal(one, other) for one, other in zip(agent.parameters(), whole.parameters(), strict=True))
    assert (resumed.updates_done, trainer.global_step, resumed.env_steps_done) == (6, 6, 90)


def test_a_signal_at_the_end_of_the_last_step(tmp_path: Path, lines) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, Agent(40, send(signal.SIGINT)), make_data())
    assert "Saved: update 40 (environment step 60)" in lines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_at_once_are_one(tmp_path: Path, lines, number) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, Agent(17, send(number, 2)), make_data())
    assert "Saved: update 17 (environment step 38)" in lines()[-1]  # the update is finished


@pytest.mark.usefixtures("each_counts")
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
    def __init__(self, row: int) -> None:
        super().__init__()
        self.row, self.written = row, 0

    def insert(self, data):
        insertion = super().insert(data)
        self.written += len(insertion.slots)
        if self.written == self.row:
            send(signal.SIGINT, 2)()
        return insertion


@pytest.mark.usefixtures("each_counts")
def test_nothing_is_saved_of_a_replay_that_is_half_written(tmp_path: Path, lines) -> None:
    replay = Replay(storage=PackedStorage(500), writer=Interrupting(36), batch_size=4, seed=0)
    trainer = make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / "run", every_n_updates=10)])
    with pytest.raises(SystemExit):
        trainer.fit(Agent(), datamodule=ReplayDataModule(Counting, replay, **RUN))
    line = "\nNothing was saved, because the replay was being written; update 10 (environment step 30) is in"
    assert lines()[-1].startswith(line)
    assert torch.load(tmp_path / "run" / "last.ckpt")["ReplayDataModule"]["updates"] == 10


@pytest.mark.usefixtures("each_counts")
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


@pytest.mark.usefixtures("each_counts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_while_the_last_state_is_saved_do_not_lose_it(tmp_path: Path, number, monkeypatch) -> None:
    replay_save, saves = Replay.save, []

    def save(self, *arguments, **options):
        saves.append(len(self))
        send(number, 2)()
        return replay_save(self, *arguments, **options)

    def end(number, frame):  # as a Ray of this process does
        raise SystemExit(number)

    monkeypatch.setattr(Replay, "save", save)
    signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit):
            fit(tmp_path, Agent(17, send(number)), make_data())
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert saves == [38] and torch.load(tmp_path / "run" / "last.ckpt")["ReplayDataModule"]["updates"] == 17


def test_a_signal_while_the_state_after_an_error_is_saved_has_its_effect(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Replay, "save", lambda *_, **__: send(signal.SIGINT)())
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Agent(17, fail), make_data())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning leaves its handler where its own clean-up is interrupted


@pytest.mark.parametrize("is_stopped", [False, True])
def test_handlers_are_restored_where_the_last_state_cannot_be_read(tmp_path: Path, lines, is_stopped) -> None:
    class Lost(Agent):
        def parameters(self, recurse: bool = True):
            if len(self.seen) < 16:
                return super().parameters(recurse)
            raise ValueError("the device was lost")

    act = send(signal.SIGTERM) if is_stopped else fail
    with pytest.raises(SIGTERMException if is_stopped else ZeroDivisionError):
        fit(tmp_path, Lost(17, act), make_data())
    assert "saving failed, ValueError: the device was lost" in lines()[-1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


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
