# SPDX-License-Identifier: Apache-2.0
"""The example of docs/lightning-command-line.md: a user's own classes, in the folder that holds them."""

from __future__ import annotations

import csv
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(?:python|yaml)\n# ([\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Lightning's use of jsonargparse
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page, and nothing else."""
    files = dict(BLOCK.findall((ROOT / "docs" / "lightning-command-line.md").read_text()))
    assert set(files) == {"my_module.py", "my.yaml", "parts.yaml"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def _in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process there; what it imports and registers is forgotten afterwards."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    sys.modules.pop("my_module", None)
    gymnasium.registry.pop("MyEnv-v0", None)


def check_that_it_learned(version: Path) -> None:
    with (version / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    returns = {int(row["step"]): float(row["eval/return"]) for row in rows if row["eval/return"]}
    assert sorted(returns) == [0, 101, 200, 300] and returns[300] > max(1.5, returns[0])  # 2.5 is the best
    losses = [(int(row["step"]), int(row["updates"])) for row in rows if row["loss"]]
    assert losses == [(100 + update, update) for update in range(10, 201, 10)]


def test_the_example_of_the_page_trains_by_the_console_script(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("lightning-replay")), "fit", "-c", "my.yaml"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    check_that_it_learned(folder / "lightning_logs" / "version_0")


@pytest.mark.usefixtures("_in_the_folder")
def test_parts_of_a_second_file_train_by_python_m(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = list(sys.path)
    monkeypatch.delitem(sys.modules, "lightning_replay.__main__", raising=False)  # another test may have imported it
    sys.argv[1:] = ["fit", "-c", "my.yaml", "-c", "parts.yaml"]
    runpy.run_module("lightning_replay", run_name="__main__")
    assert sys.path.index(str(folder)) >= len(path), "behind the libraries"
    version = folder / "lightning_logs" / "version_0"
    check_that_it_learned(version)
    saved = yaml.safe_load((version / "config.yaml").read_text())["data"]["init_args"]
    assert saved["env"]["class_path"] == "my_module.MyEnv"
    assert saved["replay"]["init_args"]["sampler"]["class_path"] == "my_module.LogPrioritized"
