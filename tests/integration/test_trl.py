# SPDX-License-Identifier: Apache-2.0
"""The example for TRL with TRL installed: in one process and in two, killed and resumed."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_replay.levels import LevelBuffer, LevelSet
from lightning_replay.levels.scores import Learnability
from tests.matrix import ENVIRONMENTS, FOLDER, ROOT, install

pytestmark = [pytest.mark.slow, pytest.mark.trl]

UPDATES, KILLED = 12, 10  # checkpoints after updates 6 and 12
GROUP, PROMPTS, WINDOW = 8, 8, 8
Calls = list[tuple[list[int], list[float]]]  # ids and outcomes of each call of record


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """An interpreter with TRL: this one, or that of an environment which is removed afterwards."""
    if importlib.util.find_spec("trl") is not None:
        yield sys.executable
        return
    faulthandler.cancel_dump_traceback_later()  # a download may take long
    folder = FOLDER / "trl-test"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)  # uv is there
            path = install(ENVIRONMENTS["trl"], folder)
        yield str(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _own_time_limit() -> None:
    faulthandler.cancel_dump_traceback_later()  # each run has a limit, and a test has three


class Runs:
    """Runs of the example in one folder, each in so many processes."""

    def __init__(self, python: str, num_processes: int, folder: Path) -> None:
        self.num_processes = num_processes
        self.folder = folder
        self.command = [python]
        if num_processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
            self.command += launcher

    def start(self, name: str, *arguments: str, stop: int = 0) -> tuple[list[str], list[Calls]]:
        """Returns the lines about learnability, and the calls of each process; ``stop`` is the call that kills it."""
        example = str(ROOT / "examples" / "trl_prompts.py")
        options = ["--updates", str(UPDATES), "--folder", str(self.folder), *arguments]
        script = [str(ROOT / "tests" / "recorded_prompts.py"), str(self.folder / name), str(stop)]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            [*self.command, *script, example, *options],
            capture_output=True, text=True, cwd=self.folder, env=variables, timeout=600, check=False,
        )  # fmt: skip
        assert (result.returncode == 0) is (stop == 0), result.stderr[-3_000:]
        lines = [line for line in result.stdout.splitlines() if line.startswith("learnability: ")]
        written = [self.folder / f"{name}-{rank}" for rank in range(self.num_processes)]
        return lines, [[tuple(json.loads(line)) for line in path.read_text().splitlines()] for path in written]

    def levels(self) -> LevelBuffer:
        """Returns the level buffer of the newest checkpoint."""
        sums = LevelSet([{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(5) for b in range(5)])
        levels = LevelBuffer(sums, score=Learnability(WINDOW), seed=1)
        (path,) = (self.folder / "learnability").glob("checkpoint-*/levels.pt")
        levels.load_state_dict(torch.load(path)[0])
        return levels


def scores_after(processes: list[Calls]) -> dict[int, float]:
    """Returns p (1 - p) of the last outcomes of each prompt."""
    given: dict[int, list[float]] = defaultdict(list)
    for calls in zip(*processes, strict=True):
        for ids, outcomes in calls:
            for level_id, outcome in zip(ids, outcomes, strict=True):
                given[level_id].append(outcome)
    rates = {level_id: sum(outcomes[-WINDOW:]) / WINDOW for level_id, outcomes in given.items()}
    return {level_id: rate * (1 - rate) for level_id, rate in rates.items()}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_prompts_of_a_killed_run_go_on_as_in_a_whole_one(python: str, num_processes: int, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("whole", "killed")}
    for folder in folders.values():
        folder.mkdir()
    whole = Runs(python, num_processes, folders["whole"])
    lines, processes = whole.start("calls")
    # Each process learns from whole groups, and no prompt comes twice in the batch of all processes.
    for calls in zip(*processes, strict=True):
        parts = [ids[::GROUP] for ids, _ in calls]
        assert [len(part) for part in parts] == [PROMPTS // num_processes] * num_processes
        assert all(ids == [one for one in ids[::GROUP] for _ in range(GROUP)] for ids, _ in calls)
        assert len({one for part in parts for one in part}) == PROMPTS
    assert [len(calls) for calls in processes] == [UPDATES] * num_processes
    # One more batch is drawn ahead.
    assert len(lines) == num_processes
    assert all(line.startswith(f"learnability: {PROMPTS * (UPDATES + 1)} questions drawn, ") for line in lines)
    saved = whole.levels()
    rows = saved.probabilities()
    assert dict(zip(rows["level_id"].tolist(), rows["score"].tolist(), strict=True)) == scores_after(processes)
    assert saved.stats()["in_flight"] == PROMPTS

    killed = Runs(python, num_processes, folders["killed"])
    _, first = killed.start("first", stop=KILLED)
    assert first == [calls[: KILLED - 1] for calls in processes]
    _, resumed = killed.start("resumed", "--resume")
    # The checkpoint is that of update 6; the batch drawn ahead of it comes first.
    assert resumed == [calls[UPDATES // 2 :] for calls in processes]
    saved = killed.levels()
    rows = saved.probabilities()
    assert dict(zip(rows["level_id"].tolist(), rows["score"].tolist(), strict=True)) == scores_after(processes)
    assert saved.stats()["in_flight"] == PROMPTS and saved.stats()["expired"] == 0
