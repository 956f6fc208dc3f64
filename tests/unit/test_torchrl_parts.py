# SPDX-License-Identifier: Apache-2.0
"""The table of docs/torchrl.md: every part in every buffer over every storage, against a ``Replay``."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.data import TensorDictPrioritizedReplayBuffer

from lightning_replay import samplers, transforms, writers
from lightning_replay.parts import ReplaySampler, ReplayTransform, ReplayWriter
from lightning_replay.writers import FirstInFirstOutWriter
from tests.torchrl_parts import (
    BUFFERS,
    PARTS,
    PRIORITIZED,
    STORAGES,
    built,
    difference,
    reference,
    refusal,
    steps_of,
    table,
    table_on_the_page,
)

ROOT = Path(__file__).resolve().parents[2]
OF_BENCHMARKS = ROOT / ".bench-torchrl"
expected_of = cache(reference)
#: The rows of samplers and transforms take longer together, and other tests run them one by one.
ROWS: list[Any] = [
    name if part.writer is not FirstInFirstOutWriter else pytest.param(name, marks=pytest.mark.slow)
    for name, part in PARTS.items()
]


def test_the_page_shows_the_table() -> None:
    assert table_on_the_page() == table(), "run python -m tests.torchrl_parts"


@pytest.mark.parametrize("module", [samplers, writers, transforms], ids=lambda module: module.__name__)
def test_every_part_has_a_row(module: Any) -> None:
    """``PairSampler`` is abstract, and the others of these names are no parts."""
    kinds = (ReplaySampler, ReplayWriter, ReplayTransform)
    exported = [getattr(module, name) for name in module.__all__]
    parts = [one for one in exported if isinstance(one, type) and issubclass(one, kinds)]
    lacking = [one.__name__ for one in parts if f"`{one.__name__}`" not in table()]
    assert lacking == (["PairSampler"] if module is samplers else [])


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("buffer", [buffer for buffer in BUFFERS if buffer != PRIORITIZED])
def test_a_cell_of_the_table(buffer: str, name: str) -> None:
    differences = [difference(buffer, name, storage, expected_of(name)) for storage in STORAGES]
    assert not any(differences), differences


def test_a_refused_part_is_refused_in_a_replay_too_or_works_there() -> None:
    """The reference of a row that works anywhere must have been played."""
    for name in PARTS:
        works = any(refusal(buffer, name, storage) is None for buffer in BUFFERS for storage in STORAGES)
        assert works == (name != "event tables alone")
        assert not works or isinstance(expected_of(name), list)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["first in, first out", "event tables", "tasks", "retention"])
def test_rows_without_one_are_refused(name: str, storage: str) -> None:
    part, rows = PARTS[name], steps_of(0)
    for given in (rows[:0], rows.reshape(-1, 2)):
        buffer = built("TensorDictReplayBuffer", part, storage)
        with pytest.raises(ValueError, match="batch size .N. with N >= 1; got"):
            buffer.extend(given)
        buffer.extend(rows)
        with pytest.raises(ValueError, match="batch size .N. with N >= 1; got"):
            buffer.extend(given)
        assert len(buffer.sample()) > 0


def tree_loads() -> bool:
    """Whether TorchRL's tree of priorities loads beside this torch."""
    try:
        TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=STORAGES["LazyTensorStorage"](4), batch_size=2)
    except (ImportError, RuntimeError):
        return False
    return True


@pytest.mark.slow
def test_the_column_of_tensordict_prioritized_replay_buffer() -> None:
    python = OF_BENCHMARKS / "bin" / "python" if (OF_BENCHMARKS / ".complete").exists() else None
    if tree_loads():
        python = Path(sys.executable)
    if python is None:
        pytest.skip(
            f"the tree of {PRIORITIZED} does not load beside torch {torch.__version__}; make bench-torchrl builds an "
            "environment in which it does"
        )
    command = [str(python), "-W", "ignore", "-m", "tests.torchrl_parts", PRIORITIZED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
