# SPDX-License-Identifier: Apache-2.0
"""Saves of shards on other nodes than the driver: to file systems of pyarrow, and to a folder that they do not see.

The nodes share the disk of this machine. Which process has written or read what is noted by a file system; a folder
that other nodes do not see is below ``/proc/self/cwd``, as their processes work in another directory.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs
from ray.cluster_utils import Cluster
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig

import rllib_ext
from lightning_replay.saving import DamagedFileError
from rllib_ext.checkpoints import FOLDER

from .rllib_algorithms import Counting, small
from .shard_contents import Noted, on_shards, trajectories

pytestmark = pytest.mark.slow

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
SEEN_HERE = Path("/proc/self/cwd")


@pytest.fixture(scope="module", autouse=True)
def _cluster(small_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A head without CPUs, where the driver is, and two nodes for shards, whose processes work elsewhere."""
    ray.shutdown()
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("head"))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    here = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("others"))
    for _ in range(2):
        cluster.add_node(num_cpus=3)
    os.chdir(here)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield
    ray.shutdown()
    cluster.shutdown()
    os.chdir(before)


@pytest.fixture
def noted(tmp_path: Path) -> Noted:
    return Noted.below(tmp_path)


def built(num_shards: int) -> Algorithm:
    config = small(DQNConfig, Counting, "prioritized", num_shards=num_shards, priority_exponent=0.7, seed=3)
    return rllib_ext.configure(config.env_runners(num_env_runners=0)).build_algo()


@pytest.fixture(scope="module")
def algorithm(_cluster: None) -> Iterator[Algorithm]:
    algorithm = built(3)
    algorithm.train()
    yield algorithm
    algorithm.stop()


def process(shard: Any) -> tuple[int, str]:
    return os.getpid(), ray.get_runtime_context().get_node_id()


def episodes(parts: list[Any]) -> list[Any]:
    """Rows of all shards by trajectory; dealt out anew, their priorities are rounded once more."""
    every = sorted(rows for part in parts for rows in part)
    return [[(observation, pytest.approx(priority, rel=1e-6)) for observation, priority in rows] for rows in every]


def test_each_shard_writes_and_reads_its_own_files_and_the_driver_no_rows(algorithm: Algorithm, noted: Noted) -> None:
    remote = fs.PyFileSystem(noted)
    processes = on_shards(algorithm, process)
    here = ray.get_runtime_context().get_node_id()
    assert here not in {node for _, node in processes} and len({node for _, node in processes}) == 2
    before = on_shards(algorithm, trajectories)
    algorithm.save_to_path("first", filesystem=remote)
    written = noted.taken("written")
    for shard, (pid, _) in enumerate(processes):
        assert all(f"/shard-{shard}/" in file for file in written[pid]) and len(written[pid]) >= 4
    of_driver = written.pop(os.getpid())
    assert set(written) == {pid for pid, _ in processes}
    own = {Path(file).name for file in of_driver if FOLDER in file}
    assert own == {"shards.json", "state.json", "values.json", "tensors.safetensors"}
    assert not any("/shard-" in file for file in of_driver)
    sizes = {file: (noted.root / "files" / file).stat().st_size for file in of_driver if FOLDER in file}
    assert sum(sizes.values()) < 30_000

    algorithm.train()
    assert on_shards(algorithm, trajectories) != before
    algorithm.restore_from_path("first", filesystem=remote)
    assert on_shards(algorithm, trajectories) == before
    read = noted.taken("read")
    for shard, (pid, _) in enumerate(processes):
        assert read[pid] and all(f"/shard-{shard}/" in file for file in read[pid])
    assert not any("/shard-" in file for file in read[os.getpid()])
    algorithm.train()


def test_another_number_of_shards_reads_a_save_of_a_uri(algorithm: Algorithm, noted: Noted) -> None:
    remote = fs.SubTreeFileSystem(str(noted.root / "files"), fs.LocalFileSystem())
    algorithm.save_to_path("first", filesystem=remote)
    expected = episodes(on_shards(algorithm, trajectories))
    again = built(2)
    again.restore_from_path("first", filesystem=remote)
    found = sorted(rows for part in on_shards(again, trajectories) for rows in part)
    again.train()
    again.stop()
    assert found == expected and sum(map(len, found)) >= 40


def test_a_shard_that_is_killed_during_its_upload_leaves_the_save_before(algorithm: Algorithm, noted: Noted) -> None:
    remote, replay = fs.PyFileSystem(noted), algorithm.local_replay_buffer
    algorithm.save_to_path("first", filesystem=remote)
    before = on_shards(algorithm, trajectories)
    algorithm.train()
    (noted.root / "hold").touch()
    noted.taken("written")
    lost = replay.shards.handles[1]

    def kill() -> None:
        while not (noted.root / "held").exists():
            time.sleep(0.05)
        ray.kill(lost)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RuntimeError, match="shard 1 was lost.*saved into py::.*second/replay_buffer"):
        algorithm.save_to_path("second", filesystem=remote)
    killer.join()
    (noted.root / "hold").unlink()
    on_shards(algorithm, process)  # after the save in the shards that were not lost
    second = noted.root / "files" / "second" / FOLDER
    assert not list(second.glob("*"))
    with pytest.raises(DamagedFileError, match=r"shards.json is missing or damaged"):
        algorithm.restore_from_path("second", filesystem=remote)
    algorithm.restore_from_path("first", filesystem=remote)
    assert on_shards(algorithm, trajectories) == before and replay.shards.epochs.tolist() == [1, 2, 1]

    data = second / "rows-0123456789ab"  # of a buffer without shards
    data.mkdir()
    (data / "values.json").touch()
    (second / "buffer.json").write_text('{"format": "lightning-replay-rllib", "data": "rows-0123456789ab"}')
    algorithm.save_to_path("second", filesystem=remote)
    assert sorted(part.suffix or part.name[:7] for part in second.iterdir()) == [".json", "shards-"]
    algorithm.restore_from_path("second", filesystem=remote)
    assert on_shards(algorithm, trajectories) == before


def test_a_lost_shard_starts_again_with_its_last_save_of_another_file_system(
    algorithm: Algorithm, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, shards = fs.PyFileSystem(noted), algorithm.local_replay_buffer.shards
    monkeypatch.setattr(shards, "options", dataclasses.replace(shards.options, restart_shards="last_save"))
    algorithm.save_to_path("first", filesystem=remote)
    before, added = on_shards(algorithm, trajectories), algorithm.local_replay_buffer.get_added_timesteps()
    epochs = shards.epochs.copy()
    ray.kill(shards.handles[2])
    algorithm.save_to_path("second", filesystem=remote)  # a save starts lost shards first
    assert on_shards(algorithm, trajectories) == before and (shards.epochs - epochs).tolist() == [0, 0, 1]
    assert algorithm.local_replay_buffer.get_added_timesteps() == added  # the steps of the save are counted once


def test_damaged_and_missing_files_of_another_file_system_are_found(algorithm: Algorithm, noted: Noted) -> None:
    remote = fs.SubTreeFileSystem(str(noted.root / "files"), fs.LocalFileSystem())
    algorithm.save_to_path("first", filesystem=remote)
    before = on_shards(algorithm, trajectories)
    files = [file for file in (noted.root / "files" / "first" / FOLDER).rglob("*") if file.is_file()]
    assert len(files) == 2 + 3 + 3 * 4 - 1
    for file in files:
        content = file.read_bytes()
        for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1], None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(DamagedFileError, match="subtree.*first/replay_buffer"):
                algorithm.restore_from_path("first", filesystem=remote)
        file.write_bytes(content)
    assert on_shards(algorithm, trajectories) == before
    algorithm.restore_from_path("first", filesystem=remote)


def test_a_file_system_of_each_process_is_refused(algorithm: Algorithm) -> None:
    with pytest.raises(ValueError, match=r"shards \[0, 1, 2\] have written into py::.*the driver does not find it"):
        algorithm.save_to_path("first", filesystem=fs.PyFileSystem(fs.FSSpecHandler(MemoryFileSystem())))


@pytest.mark.skipif(not SEEN_HERE.exists(), reason="needs the working directory of each process as a path")
def test_a_folder_that_the_shards_do_not_see(algorithm: Algorithm) -> None:
    path = SEEN_HERE / "first"
    before = on_shards(algorithm, trajectories)
    algorithm.save_to_path(path)
    files = [file for file in path.rglob("*/shard-*/**/*") if file.is_file()]
    assert len(files) >= 12
    assert not any(on_shards(algorithm, lambda shard: Path("/proc/self/cwd/first").exists()))
    algorithm.train()
    algorithm.restore_from_path(path)
    assert on_shards(algorithm, trajectories) == before
