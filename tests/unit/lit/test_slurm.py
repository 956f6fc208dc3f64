# SPDX-License-Identifier: Apache-2.0
"""Jobs of SLURM: the signal before the time limit, Lightning's checkpoint, and the job that is requeued."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_replay.lit import ReplayCheckpoint
from tests.unit.lit.level_toys import make_agent, make_rollouts
from tests.unit.lit.stopped_runs import Agent, CloseAt, counts_of, make_data, send
from tests.unit.lit.toys import Counting, make_trainer

pytestmark = pytest.mark.usefixtures("default_handlers", "job")
SETTINGS = {"JOB_ID": "4711", "JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that SLURM sets, and a command ``scontrol`` that writes down how it was called."""
    commands = tmp_path / "bin"
    commands.mkdir()
    script = commands / "scontrol"
    script.write_text(f'#!/bin/sh\nls "{tmp_path}" >> "{tmp_path}/seen"\necho "$@" >> "{tmp_path}/requeued"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def train(root: Path, agent, data, callbacks=(), **options):
    torch.manual_seed(0)
    trainer = make_trainer(root, callbacks)
    trainer.fit(agent, datamodule=data, **options)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("joined", [1, 4])
def test_a_requeued_job_goes_on_as_a_run_without_a_break(tmp_path: Path, prioritized: bool, joined: int) -> None:
    options = {"updates_per_training_step": joined}
    whole = Agent()
    closed = CloseAt(12)
    unbroken = train(tmp_path / "whole", whole, make_data(prioritized, **options), [closed])

    first = Agent(13 - joined, send(signal.SIGUSR1))  # in the step whose last update is the twelfth
    train(tmp_path, first, make_data(prioritized, **options))
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    assert len(first.seen) == len(whole.seen), "Lightning goes on until SLURM ends the job"
    names = {path.name for path in tmp_path.glob("hpc*")}
    assert names == {"hpc_ckpt_1.ckpt", "hpc_ckpt~1.12.replay"}
    assert names <= set((tmp_path / "seen").read_text().split()), "the job may end as soon as it is requeued"

    second = Agent()
    resumed = train(tmp_path, second, make_data(prioritized, **(options | {"seed": 99})))  # finds it by itself
    assert second.seen == whole.seen[12:] and torch.equal(second.weight, whole.weight)
    assert (resumed.datamodule.replay[:] == unbroken.datamodule.replay[:]).all()
    assert counts_of(resumed) == counts_of(unbroken)


def test_a_job_is_requeued_again_and_again(tmp_path: Path) -> None:
    for part in range(3):
        train(tmp_path, Agent(5 + 10 * part, send(signal.SIGUSR1)), make_data(env_steps=40 + 10 * part))
    assert (tmp_path / "requeued").read_text() == 3 * "requeue 4711\n"
    assert sorted(path.name for path in tmp_path.glob("hpc*.ckpt")) == [f"hpc_ckpt_{n}.ckpt" for n in (1, 2, 3)]
    resumed = train(tmp_path, agent := Agent(), make_data(env_steps=60))
    assert resumed.datamodule.clocks == (60, 40) and len(agent.seen) == 15


def test_a_signal_amid_a_write_to_the_replay_waits(tmp_path: Path) -> None:
    data = make_data()
    extend = data.replay.extend_columns
    is_amid = []

    def interrupted(*args, **kwargs):
        if len(data.replay) == 26:
            is_amid.append(True)
            send(signal.SIGUSR1)()
            assert not (tmp_path / "requeued").exists()
        return extend(*args, **kwargs)

    data.replay.extend_columns = interrupted  # type: ignore[method-assign]
    train(tmp_path, Agent(), data)
    assert is_amid and (tmp_path / "requeued").exists()
    resumed = train(tmp_path, Agent(), make_data(env_steps=61))
    assert resumed.datamodule.env_steps_done >= 61


def test_a_signal_does_not_wait_for_the_whole_warm_up(tmp_path: Path) -> None:
    class Signals(Counting):
        steps = 0

        def step(self, action):
            Signals.steps += 1
            if Signals.steps == 1_100:
                send(signal.SIGUSR1)()
            return super().step(action)

    options = {"warmup_steps": 3_100, "env_steps": 3_112, "num_envs": 1}
    train(tmp_path, Agent(), make_data(env=Signals, **options))
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["ReplayDataModule"]
    assert 1_100 <= saved["collection"]["env_steps"] < 2_200 and saved["updates"] == 0
    resumed = train(tmp_path, Agent(), make_data(**options))
    assert resumed.datamodule.clocks == (3_112, 12)


def test_the_checkpoint_is_whole_before_the_job_is_requeued_also_if_a_thread_writes(tmp_path: Path) -> None:
    keep = ReplayCheckpoint(tmp_path / "run", background=True)
    train(tmp_path, Agent(12, send(signal.SIGUSR1)), make_data(), [keep])
    assert {"hpc_ckpt_1.ckpt", "hpc_ckpt~1.12.replay"} <= set((tmp_path / "seen").read_text().split())


def test_the_best_and_the_last_checkpoint_go_on_in_the_folder(tmp_path: Path) -> None:
    def keep() -> ReplayCheckpoint:
        return ReplayCheckpoint(tmp_path / "run", every_n_updates=5, monitor=None)

    train(tmp_path, Agent(12, send(signal.SIGUSR1)), make_data(), [keep()])
    train(tmp_path, Agent(), make_data(env_steps=80), [keep()])
    assert sorted(path.name for path in (tmp_path / "run").glob("[a-z]*")) == ["last.60.replay", "last.ckpt"]
    # A run that starts from nothing still leaves the checkpoints of another run alone.
    for path in tmp_path.glob("hpc*.ckpt"):
        path.unlink()
    train(tmp_path, Agent(), make_data(), [keep()])
    assert {"last.ckpt", "last-v1.ckpt"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_levels_are_requeued_too(tmp_path: Path) -> None:
    rollouts = make_rollouts()
    agent = make_agent()
    learn = agent.training_step

    def signalled(batch, batch_idx):
        if rollouts.updates_done == 2:
            send(signal.SIGUSR1)()
        return learn(batch, batch_idx)

    agent.training_step = signalled
    train(tmp_path, agent, rollouts)
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["LevelDataModule"]["updates"] == 2
    resumed = train(tmp_path, make_agent(), make_rollouts())
    assert resumed.datamodule.env_steps_done == rollouts.env_steps_done


def test_other_handlers_stay(tmp_path: Path) -> None:
    received = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        train(tmp_path, Agent(12, send(signal.SIGUSR1)), make_data())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1] and not (tmp_path / "requeued").exists()


def test_another_signal_may_be_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer = make_trainer(tmp_path, plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR2)])
    trainer.fit(Agent(12, send(signal.SIGUSR2)), datamodule=make_data())
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists() and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
