# SPDX-License-Identifier: Apache-2.0
"""A buffer that was saved with an RLlib checkpoint; ``tests/saved_formats.py`` has their contents."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from lightning_replay.saving import DamagedFileError
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.checkpoints import WarmUp, read_buffer, read_warm_up, write_buffer
from tests.saved_formats import empty_rllib_buffer
from tests.unit.rllib.episodes import numbered


def take_over(buffer: RecipeEpisodeReplayBuffer, folder: Path) -> None:
    saved = read_buffer(buffer, folder)
    buffer.take_over(saved.modules, saved.state)


@pytest.mark.parametrize("saved_anew", [False, True])
def test_a_saved_buffer_is_read_and_goes_on(saved_anew: bool, fixtures: Path, tmp_path: Path) -> None:
    folder, buffer = fixtures / "saves_3" / "rllib_buffer", empty_rllib_buffer()
    if saved_anew:
        take_over(buffer, folder)
        write_buffer(buffer, tmp_path, WarmUp(100, 150))
        folder, buffer = tmp_path, empty_rllib_buffer()
    assert read_warm_up(folder) == WarmUp(steps=100, learning_starts=150)
    take_over(buffer, folder)
    assert len(buffer) == 7 and buffer.get_added_timesteps() == 7
    rows = buffer.replay.storage.get(slice(0, 7))
    np.testing.assert_array_equal(rows["observation"][:, 0], [0, 1, 2, 100, 101, 102, 103])
    np.testing.assert_array_equal(rows["next", "terminated"].flatten(), [0, 0, 1, 0, 0, 0, 0])
    buffer.add(numbered("c", 2, offset=50.0))  # of an environment that began anew
    truncated = buffer.replay.storage.get(slice(0, 9))["next", "truncated"].flatten()
    np.testing.assert_array_equal(truncated, [0, 0, 0, 0, 0, 0, 1, 0, 0])


def test_a_changed_counter_is_found(fixtures: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(fixtures / "saves_3" / "rllib_buffer", tmp_path / "buffer")
    text = (folder / "buffer.json").read_text()
    assert text.count("episodes_added") == 1
    (folder / "buffer.json").write_text(text.replace("episodes_added", "episodes_adder"))
    with pytest.raises(DamagedFileError, match="nothing was restored"):
        read_buffer(empty_rllib_buffer(), folder)
