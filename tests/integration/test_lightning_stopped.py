# SPDX-License-Identifier: Apache-2.0
"""Processes that are stopped by signals while they train; another process goes on from what they left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_replay.lit import ReplayCheckpoint
from lightning_replay.lit.cli import main
from lightning_replay.options import config_directory
from tests.unit.lit.stopped_runs import Agent, CloseAt, counts_of, make_data
from tests.unit.lit.toys import make_trainer

pytestmark = pytest.mark.slow
PATIENCE = 120.0  # seconds; of a machine that does other things


def fit(directory: Path, agent: Agent, callbacks=(), ckpt_path=None, every_n_updates=None):
    torch.manual_seed(0)
    data = make_data(prioritized=True, env_steps=170)
    keep = ReplayCheckpoint(every_n_updates=every_n_updates)
    trainer = make_trainer(directory, [keep, *callbacks], logger=CSVLogger(directory))
    trainer.fit(agent, datamodule=data, ckpt_path=ckpt_path)
    return trainer


class Slow(Agent):
    def update(self, batch):
        time.sleep(0.01)
        return super().update(batch)


def start(directory: Path) -> int:
    """Trains in a forked process; returns its id."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a Ray that ran in this process leaves a handler of its own
        status = 99
        try:
            fit(directory, Slow(), every_n_updates=2)
        except SystemExit as end:
            status = end.code or 0
        finally:
            os._exit(status)
    return child


def wait_for(path: Path, child: int | None = None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        assert child is None or os.waitpid(child, os.WNOHANG) == (0, 0), "the process ended early"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("number", "times", "status"),
    [
        (signal.SIGINT, 1, 1 << 8),
        (signal.SIGTERM, 1, 143 << 8),
        (signal.SIGTERM, 2, 143 << 8),
        (signal.SIGKILL, 1, int(signal.SIGKILL)),
    ],
    ids=["int", "term", "timeout", "kill"],
)
def test_another_process_goes_on_where_one_was_stopped(tmp_path: Path, number: int, times: int, status: int) -> None:
    runs = tmp_path / "lightning_logs"
    child = start(tmp_path)
    wait_for(runs / "version_0" / "checkpoints" / "last.ckpt", child)
    time.sleep(random.Random(str(tmp_path)).uniform(0, 0.3))
    for _ in range(times):  # timeout(1) sends it to the process, and again to its group
        os.kill(child, number)
        time.sleep(0.002)  # two that arrive at once would be one
    assert os.waitpid(child, 0)[1] == status

    resumed = fit(tmp_path, agent := Agent(), ckpt_path="last")
    checkpoint = torch.load(runs / "version_0" / "checkpoints" / "last.ckpt")
    update = checkpoint["ReplayDataModule"]["updates"]
    assert 2 <= update < 150 and len(agent.seen) == 150 - update
    unbroken = fit(tmp_path / "whole", whole := Agent(), [CloseAt(update)])
    assert agent.seen == whole.seen[update:] and torch.equal(agent.weight, whole.weight)
    assert (resumed.datamodule.replay[:] == unbroken.datamodule.replay[:]).all()
    assert counts_of(resumed) == counts_of(unbroken)
    files = sorted(path.name for path in (runs / "version_1" / "checkpoints").glob("[a-z]*"))
    assert files == ["last.150.replay", "last.ckpt"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's use of jsonargparse
def test_ctrl_c_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = [
        "fit",
        f"-c={config_directory() / 'lightning/per_dqn_cartpole.yaml'}",
        "--data.init_args.warmup_steps=100",
        "--trainer.accelerator=cpu",
        "--trainer.callbacks=[{class_path: lightning_replay.lit.ReplayCheckpoint, init_args: {every_n_updates: 20}}]",
    ]
    # a shell that starts the tests in the background has its processes ignore Ctrl-C
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from lightning_replay.lit.cli import main; main(sys.argv[1:])"
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            checkpoints = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
            wait_for(checkpoints / "last.ckpt")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 1
    update = torch.load(checkpoints / "last.ckpt")["ReplayDataModule"]["updates"]
    assert (
        f"\nSaved: update {update:,} (environment step {update + 100:,}) is in {checkpoints}/last.ckpt. Go on" in errors
    )
    main([*arguments, f"--data.init_args.env_steps={update + 130}", "--ckpt_path=last"])
    assert (tmp_path / "lightning_logs" / "version_1" / "checkpoints" / f"last.{update + 30}.replay").is_dir()
