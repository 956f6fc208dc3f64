# SPDX-License-Identifier: Apache-2.0
"""Buffers in RLlib's checkpoints as ``lightning-replay inspect`` reads them, and the figures among the metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from lightning_replay.inspection.contents import ReplayContents
from lightning_replay.inspection.saves import read_buffers
from lightning_replay.saving import DamagedFileError
from lightning_replay.saving.folders import Folder
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.checkpoints import WarmUp, read_buffer, read_warm_up, write_buffer
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
from rllib_ext.sharded.checkpoint import write_shards

from .episodes import numbered
from .local_shards import start_locally


def sizes(path: Path) -> dict[str, int]:
    found = {}
    for buffer in read_buffers(path):
        assert isinstance(buffer.contents, ReplayContents)
        found[buffer.name] = len(buffer.contents)
    return found


def test_a_buffer_in_a_checkpoint_and_its_folder(tmp_path: Path) -> None:
    buffer = RecipeEpisodeReplayBuffer("prioritized", capacity=100, seed=0)
    buffer.add([numbered("a", 3), numbered("b", 7, offset=100, truncated=True)])
    write_buffer(buffer, tmp_path / "replay_buffer", WarmUp(0, 0))
    assert sizes(tmp_path) == sizes(tmp_path / "replay_buffer") == {"": 10}
    (contents,) = (one.contents for one in read_buffers(tmp_path))
    assert isinstance(contents, ReplayContents) and contents.draws is not None
    assert contents.columns["next", "reward"].tolist() == [0, 1, 2, *range(100, 107)]
    (rows,) = (tmp_path / "replay_buffer").glob("rows-*")
    rows.rename(tmp_path / "elsewhere")
    with pytest.raises(DamagedFileError, match="which is missing"):
        sizes(tmp_path)


def test_each_shard_is_read(tmp_path: Path, shared_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    start_locally(monkeypatch)
    replay = ShardedEpisodeReplayBuffer("prioritized", num_shards=2, capacity=100, seed=0)
    replay.form_returns(1, 0.99)
    replay.add([numbered(f"e{number}", 5, offset=100.0 * number, terminated=True) for number in range(6)])
    replay.sample(num_items=4)
    write_shards(replay, Folder.at(tmp_path / "replay_buffer"), WarmUp(0, 0), {})
    found = sizes(tmp_path)
    assert list(found) == ["shard 0", "shard 1"] and sum(found.values()) == 30


def test_the_effective_sample_size_is_among_the_metrics() -> None:
    buffer = RecipeEpisodeReplayBuffer("prioritized", capacity=100, seed=0)
    buffer.add([numbered("a", 8, terminated=True)])
    buffer.sample(num_items=4)
    root = MetricsLogger(root=True)
    root.aggregate([buffer.get_metrics()], key="replay_buffer")
    result = root.compile()["replay_buffer"]
    assert result["priorities"]["effective_sample_size"] == pytest.approx(8.0)  # all have the priority of new rows


def take_over(buffer: RecipeEpisodeReplayBuffer, folder: Path) -> None:
    saved = read_buffer(buffer, folder)
    buffer.take_over(saved.modules, saved.state)


def empty_buffer() -> RecipeEpisodeReplayBuffer:
    return RecipeEpisodeReplayBuffer("prioritized", capacity=16, seed=3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The save of a buffer with two episodes of 3 and 4 steps, the second of which goes on."""
    buffer = empty_buffer()
    buffer.add([numbered("a", 3, terminated=True), numbered("b", 4, offset=100.0)])
    write_buffer(buffer, tmp_path / "saved", WarmUp(100, 150))
    return tmp_path / "saved"


@pytest.mark.parametrize("saved_again", [False, True])
def test_a_saved_buffer_is_read_and_goes_on(saved_again: bool, saved: Path, tmp_path: Path) -> None:
    buffer = empty_buffer()
    if saved_again:
        take_over(buffer, saved)
        saved = tmp_path / "again"
        write_buffer(buffer, saved, WarmUp(100, 150))
        buffer = empty_buffer()
    assert read_warm_up(saved) == WarmUp(steps=100, learning_starts=150)
    take_over(buffer, saved)
    assert len(buffer) == 7 and buffer.get_added_timesteps() == 7
    rows = buffer.replay.storage.get(slice(0, 7))
    np.testing.assert_array_equal(rows["observation"][:, 0], [0, 1, 2, 100, 101, 102, 103])
    np.testing.assert_array_equal(rows["next", "terminated"].flatten(), [0, 0, 1, 0, 0, 0, 0])
    buffer.add(numbered("c", 2, offset=50.0))  # The environment began anew.
    truncated = buffer.replay.storage.get(slice(0, 9))["next", "truncated"].flatten()
    np.testing.assert_array_equal(truncated, [0, 0, 0, 0, 0, 0, 1, 0, 0])


def test_a_changed_counter_is_found(saved: Path) -> None:
    text = (saved / "buffer.json").read_text()
    assert text.count("episodes_added") == 1
    (saved / "buffer.json").write_text(text.replace("episodes_added", "episodes_adder"))
    with pytest.raises(DamagedFileError, match="nothing was restored"):
        read_buffer(empty_buffer(), saved)
