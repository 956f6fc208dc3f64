# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from lightning_replay.state_files import TENSORS_FILE, DamagedFileError, read_state, write_state


def test_nested_values_come_back(tmp_path) -> None:
    state = {
        "a": torch.arange(3),
        "b": {"c": None, "d": [1, 2.5, "x", {"e": torch.zeros(2, 0)}], "f.g": True},
        "strided": torch.arange(6).view(2, 3).T,
        "word": torch.tensor(1.5, dtype=torch.bfloat16),
    }
    write_state(tmp_path, state)
    again = read_state(tmp_path)
    assert torch.equal(again["a"], state["a"]) and torch.equal(again["strided"], state["strided"])
    assert again["word"].dtype == torch.bfloat16
    assert again["b"]["d"][:3] == [1, 2.5, "x"] and again["b"]["d"][3]["e"].shape == (2, 0)
    assert again["b"]["c"] is None and again["b"]["f.g"] is True


def test_what_is_not_plain_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(TypeError, match=r"'sampler.clock' is a object"):
        write_state(tmp_path, {"sampler": {"clock": object()}})


def test_a_truncated_file_is_said_to_be_damaged(tmp_path) -> None:
    write_state(tmp_path, {"a": torch.arange(1000)})
    file = tmp_path / TENSORS_FILE
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DamagedFileError, match="damaged or truncated"):
        read_state(tmp_path)


def test_a_missing_file_is_said_to_be_damaged(tmp_path) -> None:
    with pytest.raises(DamagedFileError):
        read_state(tmp_path / "nowhere")
