# SPDX-License-Identifier: Apache-2.0
"""Prompts in a trainer of two real processes: one curriculum, and one checkpoint that both resume from."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.prompt_fit import STOP_AT
from tests.prompt_ranks import one_process

ROOT = Path(__file__).parents[2]


def fitted(folder: Path, *checkpoint: Path) -> list[list[int]]:
    folder.mkdir()
    command = [sys.executable, "-m", "tests.prompt_fit", str(folder), *map(str, checkpoint)]
    subprocess.run(command, check=True, timeout=300, cwd=ROOT)
    parts = zip(*(torch.load(folder / f"{rank}.pt") for rank in range(2)), strict=True)
    return [first + second for first, second in parts]


@pytest.mark.slow
def test_two_processes_share_prompts_and_resume_from_one_checkpoint(tmp_path: Path) -> None:
    whole = fitted(tmp_path / "whole")
    assert whole == one_process()
    assert fitted(tmp_path / "resumed", tmp_path / "whole" / "stopped.ckpt") == whole[STOP_AT:]


@pytest.mark.slow
def test_the_first_block_of_the_page_on_prompts_learns_in_two_processes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "prompts.md").read_text()
    block = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "sums.py").write_text(block)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "sums.py"]
    done = subprocess.run(command, check=True, timeout=300, cwd=tmp_path, capture_output=True, text=True)
    shares = [int(share) for share in re.findall(r"(\d+)% of all sums", done.stdout)]
    # Both processes have the same network, so that their lines are equal.
    assert len(shares) == 10 and shares[::2] == shares[1::2]
    assert shares[-1] >= 70, "one of 19 answers is right by chance"
