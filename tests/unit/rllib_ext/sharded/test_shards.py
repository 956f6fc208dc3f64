# SPDX-License-Identifier: Apache-2.0
"""Shards of a replay: their options, where episodes go, the folders of their saves, another number of shards."""

from __future__ import annotations

import functools
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import tree
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.core import DEFAULT_MODULE_ID

import rllib_ext
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.saving import DamagedFileError
from lightning_replay.saving.files import LOCK_FILE
from lightning_replay.saving.folders import Folder
from lightning_replay.sharded import saves as served_folders
from lightning_replay.sharded.actors import ShardActors
from lightning_replay.sharded.options import ShardOptions
from lightning_replay.sharded.saves import FolderServer, ServedFolder
from rllib_ext.checkpoints import WarmUp, write_buffer
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
from rllib_ext.sharded.routing import EpisodeReference, Router
from rllib_ext.sharded.shard import EpisodeShard, options_of_shard
from tests.integration.shard_contents import trajectories
from tests.unit.rllib_ext.episodes import numbered


def dqn(**options: Any) -> DQNConfig:
    config = DQNConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    return config.training(
        replay_buffer_config=rllib_ext.replay_config("prioritized", **{"capacity": 1000, "num_shards": 2, **options})
    )


def test_capacities_are_divided_and_rounded_up() -> None:
    table = EventTable("goal", condition=reward_at_least(1.0), history_length=4, capacity=10, min_size=9)
    options = {
        "capacity": 10,
        "frame_capacity": 7,
        "tables": [table],
        "memmap": "/rows",
        "min_size": 8,
        "seed": 3,
        "modules": {"pursuer": {"capacity": 4}, "evader": None},
    }
    one, other = (options_of_shard(options, 3, number) for number in (0, 2))
    assert (one["capacity"], one["frame_capacity"]) == (4, 3)
    assert (one["tables"][0].capacity, one["tables"][0].min_size, table.capacity) == (4, None, 10)
    assert (one["memmap"], other["memmap"]) == ("/rows/shard-0", "/rows/shard-2")
    assert one["modules"] == {"pursuer": {"capacity": 2}, "evader": None}
    assert "min_size" not in one and len({3, one["seed"], other["seed"]}) == 3
    whole = options_of_shard(options, 3)
    assert whole["tables"][0] is table and whole["min_size"] == 8 and whole["capacity"] == 10 and "memmap" not in whole


def test_the_driver_holds_no_rows() -> None:
    assert options_of_shard({"capacity": 10**9}, 64)["capacity"] <= 1024
    assert options_of_shard({"capacity": 10**9}, 64, 1)["capacity"] == 10**9 / 64


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"shard_timeout_s": 0}, ValueError, "shard_timeout_s is 0"),
        ({"save_timeout_s": 0}, ValueError, "save_timeout_s is 0"),
        ({"num_shards": None, "num_prefetch": 1}, ValueError, "num_prefetch is for a replay of several shards"),
        ({"num_shards": 11, "capacity": 10}, ValueError, "num_shards is 11 and capacity is 10; every shard holds"),
        ({"importance": 1.0}, ValueError, "has no option 'importance'"),
        ({"rows_per_draw": 8.0}, ValueError, "no option 'rows_per_draw'.*modules.*Ray actors num_shards, "),
        ({"num_shard": 2}, ValueError, "has no option 'num_shard'. Did you mean 'num_shards'"),
        ({"prefetch": 2}, ValueError, "has no option 'prefetch'.*num_prefetch"),
        ({"memmap": True}, TypeError, "memmap is True; it must be a directory, or None"),
        ({"layout": "rows"}, ValueError, "layout is 'rows', and Learners fetch .* Leave layout out, or num_shards"),
    ],
)
def test_refused_options(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        dqn(**options)


def test_no_shards_are_one_buffer() -> None:
    config = rllib_ext.replay_config("prioritized", capacity=10, num_shards=None, num_prefetch=None)
    assert config == rllib_ext.replay_config("prioritized", capacity=10)


def test_shards_without_room_are_refused_before_ray_waits(shared_ray: None) -> None:
    with pytest.raises(
        ValueError, match=r"0 Learners, 9 shards \(num_cpus_per_shard=1\) and evaluation need 9 CPUs and Ray has 8"
    ):
        rllib_ext.configure(dqn(num_shards=9))
    with pytest.raises(ValueError, match=r"num_cpus_per_shard=5, and the nodes, of 8 CPUs, have room for 1"):
        ShardedEpisodeReplayBuffer("uniform", capacity=10, num_shards=2, num_cpus_per_shard=5).start()


class Broken:
    def __init__(self, *arguments: Any) -> None:
        raise OSError("no space left on device")

    def report(self) -> None: ...


def test_shards_that_cannot_be_built_are_named_with_the_error(shared_ray: None) -> None:
    actors = ShardActors(Broken, lambda shard: (), ShardOptions(1, num_cpus_per_shard=0))
    with pytest.raises(RuntimeError, match=r"(?s)shard 0 could not be started in 3 attempts.*no space left"):
        actors.start()
    assert actors.handles == []


def test_nothing_starts_before_it_is_needed_and_the_driver_keeps_its_replay() -> None:
    replay = ShardedEpisodeReplayBuffer("prioritized", capacity=10, num_shards=2)
    assert len(replay) == 0 and replay.stats()["num_rows"] == 0 and replay.shards.handles == []
    with pytest.raises(TypeError, match="belongs to the driver that built it"):
        pickle.dumps(replay)
    with pytest.raises(ValueError, match="rows were drawn for \\[\\] since the last update"):
        replay.update_priorities(np.zeros(3), "default_policy")
    replay.shards.handles = [None, None]  # as if they had started
    replay.start(object())
    with pytest.raises(ValueError, match="belongs to another algorithm"):
        replay.start(object())


def test_a_replay_that_ended_with_its_algorithm_does_not_start_again() -> None:
    replay = ShardedEpisodeReplayBuffer("prioritized", capacity=10, num_shards=2)
    replay.expected = {"default_policy": (np.zeros(1, np.int64), np.zeros(1, np.int64))}  # as if it had been drawn from
    replay.stop()
    feedback = functools.partial(replay.update_priorities, np.zeros(1))
    for call in (functools.partial(replay.sample, num_items=4), feedback, replay.get_state):
        with pytest.raises(RuntimeError, match="has ended with its algorithm"):
            call()
    assert len(replay) == 0 and replay.shards.handles == []


FRAGMENTS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9), st.booleans()), max_size=60)


@given(fragments=FRAGMENTS, num_shards=st.integers(1, 5), first=st.integers(0, 9))
def test_an_episode_stays_in_one_shard_and_a_new_one_goes_to_that_with_the_fewest_steps(
    fragments: list[tuple[int, int, bool]], num_shards: int, first: int
) -> None:
    router, homes, lives = Router(num_shards, first), {}, Counter()
    steps = [0] * num_shards
    for number, length, ended in fragments:
        name = f"{number}-{lives[number]}"
        shard = router.shard_of(name, length, ended=ended)
        if name in homes:
            assert shard == homes[name]
        else:
            assert steps[shard] == min(steps)
        homes[name] = shard
        steps[shard] += length
        lives[number] += ended
    assert router.num_steps == steps


def test_env_runners_that_start_together_begin_with_different_shards() -> None:
    first = [Router(4, number).shard_of("a", 1, ended=False) for number in range(5)]
    assert first == [0, 1, 2, 3, 0]


def test_an_episode_that_never_ends_is_forgotten() -> None:
    router = Router(2, remembered=2)
    for name in "abc":
        router.shard_of(name, 1, ended=False)
    assert router.shard_of("c", 1, ended=False) == 0  # as before
    assert router.shard_of("a", 1, ended=False) == 1  # again a new one: 3 steps are in shard 0, one in shard 1


def test_a_reference_is_one_leaf_for_rllib_and_can_be_pickled() -> None:
    reference = EpisodeReference(2, None, 7)  # type: ignore[arg-type]
    assert tree.flatten([[reference], [reference]]) == [reference, reference]
    copy = pickle.loads(pickle.dumps(reference))
    assert (copy.shard, copy.reference, copy.num_steps) == (2, None, 7)


FILES = {"manifest.json": b"{}", "data/empty": b"", "data/rows": bytes(range(256)) * 9, "data/deep/one": b"1" * 1000}


def remote(root: Path) -> Folder:
    return Folder.at("checkpoint/part", fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()))


def write(folder: Folder, files: dict[str, bytes]) -> None:
    with folder.to_write() as local:
        for name, content in files.items():
            (local / name).parent.mkdir(parents=True, exist_ok=True)
            (local / name).write_bytes(content)
        (local / LOCK_FILE).touch()


def found(directory: Path) -> dict[str, bytes]:
    files = (file for file in directory.rglob("*") if file.is_file())
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}


def manifest(data: str) -> bytes:
    return json.dumps({"format": "lightning-replay-test", "data": data}).encode()


FIRST = {"replay_shards.json": manifest("shards-0123456789ab"), "shards-0123456789ab/shard-0/000000.chunk": b"1"}
SECOND = {"replay.json": manifest("data-0123456789ab"), "data-0123456789ab/values.json": b"2"}
THIRD = {"replay.json": manifest("data-ab0123456789"), "data-ab0123456789/values.json": b"3"}
OF_THE_USER = {
    "notes.txt": b"mine",
    "buffer.json": b'{"data": "seed-202611281130"}',
    "state.json": b"{}",
    "seed-202611281130/values.json": b"mine",
    "data-202611281130/model.ckpt": b"mine",
}


def test_a_save_replaces_the_one_before_and_no_other_files(tmp_path: Path) -> None:
    folder = remote(tmp_path)
    assert folder.local is None and not folder.exists()
    for name, content in OF_THE_USER.items():
        file = tmp_path / "checkpoint" / "part" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    for files in (FIRST, FIRST | SECOND, FIRST | THIRD):
        write(folder, files)
        assert found(tmp_path / "checkpoint" / "part") == files | OF_THE_USER
        with folder.to_read() as local:
            assert files.items() <= found(local).items() <= (files | OF_THE_USER).items()
        with folder.to_read(deep=False) as local:
            assert found(local).keys() == {*(name for name in files if "/" not in name), "buffer.json", "state.json"}
    with folder.to_write() as local:
        (local / "replay_shards.json").unlink()
    assert found(tmp_path / "checkpoint" / "part") == THIRD | OF_THE_USER
    with (folder / "absent").to_read() as local:
        assert not local.exists()


def test_a_data_folder_with_another_file_stays_whole(tmp_path: Path) -> None:
    """On a file system without links and locks, a manifest may name a folder that is the user's."""
    folder = remote(tmp_path)
    write(folder, SECOND)
    (tmp_path / "checkpoint" / "part" / "data-0123456789ab" / "notes.txt").write_bytes(b"mine")
    write(folder, THIRD)
    assert found(tmp_path / "checkpoint" / "part") == SECOND | THIRD | {"data-0123456789ab/notes.txt": b"mine"}


def test_errors_name_the_folder_and_not_its_copy(tmp_path: Path) -> None:
    folder = remote(tmp_path)
    with pytest.raises(DamagedFileError, match="^subtree.*:checkpoint/part/rows is gone$"), folder.to_read() as local:
        raise DamagedFileError(f"{local}/rows is gone")


@pytest.mark.slow
def test_a_folder_of_another_node_is_copied_in_pieces(shared_ray: None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(served_folders, "PIECE_BYTES", 1000)
    server = ray.remote(num_cpus=0)(FolderServer).remote()
    folder = ServedFolder(fs.LocalFileSystem(), (tmp_path / "part").as_posix(), server)
    assert folder.local is None and not folder.exists() and not (folder / "data").exists()
    write(folder, FILES)
    assert found(tmp_path / "part") == FILES and (folder / "data").exists()
    with (folder / "data").to_read() as local:
        assert {f"data/{name}": content for name, content in found(local).items()} == {
            name: content for name, content in FILES.items() if name.startswith("data/")
        }


WARM_UP = WarmUp(10, 10)
OPTIONS = {"capacity": 120, "seed": 0}
LENGTHS = (5, 3, 8, 1, 7, 2, 6, 4, 9, 5)


def shard(number: int, count: int, recipe: str = "prioritized", **options: Any) -> EpisodeShard:
    return EpisodeShard(recipe, {**OPTIONS, "returns": (1, 0.99), **options}, number, count, 60.0, None)


def fill(buffers: list[Any]) -> None:
    """Adds ten episodes, in turn, whose observations are 100 e + t, and gives each row its observation as priority."""
    for number, length in enumerate(LENGTHS):
        buffers[number % len(buffers)].add([numbered(f"e{number}", length, offset=100.0 * number, terminated=True)])
    for buffer in buffers:
        replay = buffer.replay
        slots = replay.oldest_first()
        replay.update_priority(slots, replay.storage.get(slots)["observation"][:, 0] + 1.0)


def saved(shards: list[EpisodeShard], folder: Path) -> list[Folder]:
    folders = [Folder.at(folder / str(number)) for number in range(len(shards))]
    for one, path in zip(shards, folders, strict=True):
        one.save(path, None, WARM_UP)
    return folders


def restored(folders: list[Folder], count: int, recipe: str = "prioritized", **options: Any) -> list[EpisodeShard]:
    shards = [shard(number, count, recipe, **options) for number in range(count)]
    for one in shards:
        assert len(one.report().report.rows) and not sum(one.report().report.rows.values())
        one.stage(folders, {})
        assert not sum(one.report().report.rows.values())  # nothing is used yet
    for one in shards:
        one.take_over()
    return shards


def test_counters_are_divided_and_new_episodes_get_new_numbers(tmp_path: Path) -> None:
    shards = [shard(number, 3) for number in range(3)]
    fill([one.held for one in shards])
    again = restored(saved(shards, tmp_path), 2)
    sizes = [len(one.held) for one in again]
    assert max(sizes) - min(sizes) <= max(LENGTHS)
    reports = [one.report().report for one in again]
    assert sum(report.rows[DEFAULT_MODULE_ID] for report in reports) == sum(LENGTHS)
    assert sum(report.counts["steps_added", ""] for report in reports) == sum(LENGTHS)
    assert sum(report.counts["episodes_added", ""] for report in reports) == len(LENGTHS)
    again[0].held.add([numbered("e0", 2, offset=5000.0, terminated=True)])  # an id that was seen before the save
    assert [5000.0, 5001.0] in [[observation for observation, _ in rows] for rows in trajectories(again[0])]


def test_a_save_without_shards_is_dealt_out(tmp_path: Path) -> None:
    buffer = rllib_ext.RecipeEpisodeReplayBuffer("prioritized", **OPTIONS)
    fill([buffer])
    write_buffer(buffer, tmp_path / "whole", WARM_UP)
    again = restored([Folder.at(tmp_path / "whole")], 2)
    rows = [row for one in again for trajectory in trajectories(one) for row in trajectory]
    expected = [100.0 * number + t for number, length in enumerate(LENGTHS) for t in range(length)]
    assert sorted(rows) == [(value, pytest.approx(value + 1.0, rel=1e-4)) for value in expected]


def test_rows_kept_by_importance_go_to_the_same_number_alone(tmp_path: Path) -> None:
    def built(number: int, count: int) -> EpisodeShard:
        return shard(number, count, "surprise_retention", returns=(3, 0.99))

    shards = [built(number, 2) for number in range(2)]
    for one in shards:
        one.held.add([numbered("e", 9, terminated=True)])
    folders = saved(shards, tmp_path)
    with pytest.raises(ValueError, match="NStepTransitions formed before they were stored"):
        built(0, 3).stage(folders, {})
    again = built(1, 2)
    again.stage(folders, {})
    again.take_over()
    assert len(again.held) == len(shards[1].held) > 0
