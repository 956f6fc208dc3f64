# SPDX-License-Identifier: Apache-2.0
"""With ``NUMBA_DISABLE_JIT=1``, for debugging, every compiled loop runs in Python and returns the same."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_replay
from tests.lives import BUFFERS, life, past_the_end

DECORATORS = {"compiled", "inlined", "_inlined", "njit(inline='always')"}


@pytest.fixture(scope="module")
def without_compilation(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("lives") / "batches.pt"
    command = [sys.executable, "-m", "tests.lives", str(file)]
    root = Path(__file__).parents[2]
    subprocess.run(command, check=True, cwd=root, env=os.environ | {"NUMBA_DISABLE_JIT": "1"})
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUFFERS))
def test_loops_that_are_not_compiled_lead_to_the_same_batches(name: str, without_compilation: dict[str, Any]) -> None:
    for batch, saved in zip(life(name, "never", nullcontext), without_compilation["batches"][name], strict=True):
        for key, column in batch.items(True, True):
            # Compiled powers and those of NumPy differ in the last bit of a float32.
            tolerance = 2e-7 if key == "priority_weight" else 0.0
            torch.testing.assert_close(saved[key], column, rtol=tolerance, atol=0.0, equal_nan=True)


@pytest.mark.slow
def test_the_end_of_a_tree_is_found_without_compilation(without_compilation: dict[str, Any]) -> None:
    assert without_compilation["past the end"] == past_the_end() == [40, 40, 40]


@pytest.mark.slow
def test_every_compiled_loop_ran_without_compilation(without_compilation: dict[str, Any]) -> None:
    package = Path(lightning_replay.__file__).parent
    loops = {
        (str(path.relative_to(package)), node.name)
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and {ast.unparse(one) for one in node.decorator_list} & DECORATORS
    }
    assert len(loops) > 40
    assert not loops - without_compilation["called"]
