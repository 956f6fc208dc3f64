# SPDX-License-Identifier: Apache-2.0
"""The buffer in an algorithm's checkpoints: saved, restored, left out, refused."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import fs
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig

from lightning_replay.saving import DamagedFileError
from rllib_ext.checkpoints import FOLDER, read_buffer
from tests.saves import forge
from tests.stored import stored_rows

from .rllib_algorithms import Counting, built, small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]


def config(recipe: str = "prioritized", env: Any = "CartPole-v1", **options: Any) -> AlgorithmConfig:
    return small(DQNConfig, env, recipe, **options).training(n_step=(1, 3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, shared_ray: None) -> tuple[Path, dict[str, Any], list[Any]]:
    """A checkpoint, the state of its buffer and the ten draws that followed it."""
    algorithm = built(config())
    for _ in range(3):
        algorithm.train()
    path = Path(algorithm.save_to_path(tmp_path_factory.mktemp("checkpoint") / "saved"))
    state = snapshot(algorithm)
    drawn = draws(algorithm)
    algorithm.stop()
    return path, state, drawn


def snapshot(algorithm: Algorithm) -> dict[str, Any]:
    buffer = algorithm.local_replay_buffer
    rows = stored_rows(buffer.replay).clone()
    return {"rows": rows, "counters": buffer.plain_state()["counters"], "stats": buffer.replay.stats()}


def draws(algorithm: Algorithm) -> list[Any]:
    batches = []
    for _ in range(10):
        (block,) = algorithm.local_replay_buffer.sample(num_items=16, n_step=(1, 3), gamma=0.99)
        rows = slice(0, 16)
        outputs = [block.get_extra_model_outputs(key, rows) for key in ("weights", "n_step")]
        batches.append([block.get_observations(rows), block.get_actions(rows), block.get_rewards(rows), *outputs])
    return batches


def assert_same(algorithm: Algorithm, state: dict[str, Any], drawn: list[Any]) -> None:
    present = snapshot(algorithm)
    assert (present["rows"] == state["rows"]).all()
    assert present["counters"] == state["counters"]
    ages = {"drawn_age_mean", "drawn_age_max"}  # of the last batch, which is not kept
    assert {key: value for key, value in state["stats"].items() if key not in ages} == present["stats"]
    for before, after in zip(drawn, draws(algorithm), strict=True):
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_built_again_algorithm_goes_on_with_the_same_draws(saved: Any) -> None:
    path, state, drawn = saved
    again = Algorithm.from_checkpoint(path)
    assert_same(again, state, drawn)
    stored = len(again.local_replay_buffer)
    result = again.train()
    rows = again.local_replay_buffer.replay.storage.all_rows
    interrupted = rows["next", "truncated"][:stored].flatten() & ~state["rows"]["next", "truncated"].flatten()
    running = ~state["rows"]["next", "done"].flatten()[stored - 1]
    assert result["replay_buffer"]["num_env_steps_stored"] == stored + 42
    assert result["replay_buffer"]["num_fragment_gaps_lifetime"] == 0
    assert interrupted.nonzero().flatten().tolist() == ([stored - 1] if running else [])


def test_saving_again_writes_what_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr("lightning_replay.saving.chunks.CHUNK_BYTES", 4096)
    monkeypatch.setattr("lightning_replay.saving.states.LARGE_BYTES", 4096)
    for incremental in (True, False):
        algorithm = built(config("uniform"), incremental=incremental)
        for _ in range(4):
            algorithm.train()
        first = Path(algorithm.save_to_path(tmp_path / f"first_{incremental}"))
        algorithm.train()
        with caplog.at_level(logging.INFO, logger="rllib_ext.checkpoints"):
            second = Path(algorithm.save_to_path(tmp_path / f"second_{incremental}"))
        state, drawn = snapshot(algorithm), draws(algorithm)
        shared = {file.stat().st_ino for file in (first / FOLDER).rglob("*") if file.is_file()}
        linked = [file for file in (second / FOLDER).rglob("*") if file.stat().st_ino in shared]
        assert bool(linked) is incremental
        size = sum(file.stat().st_size for file in (second / FOLDER).rglob("rows-*/**/*") if file.is_file())
        assert f"{size:,} bytes" in caplog.text
        shutil.rmtree(first)
        again = Algorithm.from_checkpoint(second)
        assert_same(again, state, drawn)


def test_saving_over_a_checkpoint_keeps_one_and_a_killed_save_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The algorithm's files are those of the third iteration, the buffer's of the second: they do not fit."""
    algorithm = built(config())
    algorithm.train()
    path = algorithm.save_to_path(tmp_path / "checkpoint")
    algorithm.train()
    algorithm.save_to_path(path)
    assert len(list((tmp_path / "checkpoint" / FOLDER).glob("rows-*"))) == 1
    state, drawn = snapshot(algorithm), draws(algorithm)
    algorithm.train()
    with monkeypatch.context() as killed:
        killed.setattr("lightning_replay.saving.directory.replace_file", cut_short)
        with pytest.raises(KeyboardInterrupt):
            algorithm.save_to_path(path)
    again = built(config())
    with pytest.raises(DamagedFileError, match="files of two checkpoints.*restore_replay=False"):
        again.restore_from_path(path)
    assert len(again.local_replay_buffer) == 0
    saved = read_buffer(again.local_replay_buffer, tmp_path / "checkpoint" / FOLDER)
    again.local_replay_buffer.take_over(saved.modules, saved.state)
    assert_same(again, state, drawn)
    again.restore_from_path(path, restore_replay=False)


def test_a_changed_file_of_the_algorithm_is_found(saved: Any, tmp_path: Path) -> None:
    copied = shutil.copytree(saved[0], tmp_path / "copied")
    files = [file for file in copied.rglob("*") if file.is_file() and FOLDER not in file.parts]
    assert len(files) > 5
    again = built(config())
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DamagedFileError, match=f"{file.name} is not the one that was saved"):
            again.restore_from_path(copied)
        file.unlink()
        with pytest.raises(DamagedFileError, match=f"{file.name} is not the one that was saved"):
            again.restore_from_path(copied)
        file.write_bytes(content)
    again.restore_from_path(copied)


def cut_short(*given: object) -> None:
    raise KeyboardInterrupt


def test_another_file_system_takes_the_buffer_too(tmp_path: Path) -> None:
    algorithm = built(config())
    algorithm.train()
    remote = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    algorithm.save_to_path("there", filesystem=remote)
    assert (tmp_path / "there" / FOLDER / "buffer.json").is_file()
    rows = {folder.name for folder in (tmp_path / "there" / FOLDER).glob("rows-*")}
    algorithm.save_to_path("there", filesystem=remote)
    assert rows.isdisjoint(folder.name for folder in (tmp_path / "there" / FOLDER).glob("rows-*"))
    assert len(list((tmp_path / "there" / FOLDER).glob("rows-*"))) == 1
    state, drawn = snapshot(algorithm), draws(algorithm)
    again = built(config())
    again.restore_from_path("there", filesystem=remote)
    assert_same(again, state, drawn)


@pytest.mark.parametrize("said_by", ["configure", "from_checkpoint"])
def test_without_the_buffer_a_new_warm_up_begins(saved: Any, said_by: str, tmp_path: Path) -> None:
    path, _, _ = saved
    if said_by == "configure":
        algorithm = built(config(), restore=False)
        algorithm.restore_from_path(path)
    else:
        algorithm = Algorithm.from_checkpoint(path, restore_replay=False)
    buffer = algorithm.local_replay_buffer
    assert len(buffer) == 0
    start = algorithm.metrics.peek(("env_runners", "num_env_steps_sampled_lifetime"))
    while len(buffer) < 39:
        algorithm.training_step()
        assert buffer.get_sampled_timesteps() == 0
    algorithm.train()
    assert buffer.get_sampled_timesteps() > 0
    assert algorithm.config.num_steps_sampled_before_learning_starts == start + 40
    # saved and restored without the buffer once more, the warm-up is as long as the first one
    again = Algorithm.from_checkpoint(algorithm.save_to_path(tmp_path / "again"), restore_replay=False)
    steps = again.metrics.peek(("env_runners", "num_env_steps_sampled_lifetime"))
    assert steps > start
    assert again.config.num_steps_sampled_before_learning_starts == steps + 40
    # and a restore with the buffer learns when the saved run did
    again.restore_from_path(path, restore_replay=True)
    assert again.config.num_steps_sampled_before_learning_starts == 40


def weights(algorithm: Algorithm) -> torch.Tensor:
    module = algorithm.learner_group._learner.module["default_policy"]
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def change(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


DAMAGES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "a file cut short": (
        lambda copy: change(max(copy.glob("rows-*/module-*/data-*/*"), key=os.path.getsize), lambda text: text[:-7]),
        *(DamagedFileError, "truncated or changed"),
    ),
    "no buffer": (shutil.rmtree, FileNotFoundError, "saved without rllib_ext.configure.*restore_replay=False"),
    "a changed manifest": (
        lambda copy: change(copy / "buffer.json", lambda text: text.replace(b"steps_added", b"steps_addfd")),
        *(DamagedFileError, "its checksum differs"),
    ),
    "a newer version": (lambda copy: forge(copy / "buffer.json", version=99), ValueError, "format version 99"),
    "no rows": (lambda copy: shutil.rmtree(*copy.glob("rows-*")), DamagedFileError, "is missing"),
}


def check_refused(algorithm: Algorithm, path: Path, error: type[Exception], message: str) -> None:
    """Asserts that a checkpoint is refused and that neither the buffer nor the weights are overwritten."""
    before, parameters = snapshot(algorithm), weights(algorithm)
    with pytest.raises(error, match=message):
        algorithm.restore_from_path(path)
    after = snapshot(algorithm)
    assert (after["rows"] == before["rows"]).all() and after["counters"] == before["counters"]
    assert torch.equal(weights(algorithm), parameters)


def test_a_damaged_checkpoint_is_refused_and_nothing_is_overwritten(saved: Any, tmp_path: Path) -> None:
    algorithm = built(config())
    algorithm.train()
    for name, (damage, error, message) in DAMAGES.items():
        copy = shutil.copytree(saved[0], tmp_path / name)
        damage(copy / FOLDER)
        check_refused(algorithm, copy, error, message)
        algorithm.train()
    stored = len(algorithm.local_replay_buffer)
    algorithm.restore_from_path(saved[0] / "learner_group", component="learner_group")
    assert len(algorithm.local_replay_buffer) == stored  # one component leaves the buffer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "uniform"}, "state is of recipe 'prioritized'; this buffer is 'uniform'"),
        ({"capacity": 500}, "capacity 1000, here 500"),
        ({"env": Counting}, r"holds observations of \[\(4,\)\]; here they are .*\(1,\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_is_overwritten(
    saved: Any, settings: dict[str, Any], message: str
) -> None:
    algorithm = built(config(**settings))
    algorithm.train()
    check_refused(algorithm, saved[0], ValueError, message)
    algorithm.train()


def test_without_configure_the_buffer_is_in_checkpoints_too(tmp_path: Path) -> None:
    algorithm = config().build_algo()
    for _ in range(3):
        algorithm.train()
    path = algorithm.save_to_path(tmp_path / "checkpoint")
    state, drawn = snapshot(algorithm), draws(algorithm)
    assert (tmp_path / "checkpoint" / FOLDER).exists()
    assert_same(Algorithm.from_checkpoint(path), state, drawn)


def test_a_restored_buffer_has_the_exponents_of_the_present_config(
    saved: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As the page on checkpoints says."""
    algorithm = built(config(priority_exponent=1.0, importance_exponent=0.7))
    with caplog.at_level(logging.INFO, logger="lightning_replay"):
        algorithm.restore_from_path(saved[0])
    sampler = algorithm.local_replay_buffer.replay.sampler
    assert (sampler.alpha, sampler.beta) == (1.0, 0.7)
    assert "priority_exponent" in caplog.text and "importance_exponent" in caplog.text
