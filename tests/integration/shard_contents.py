# SPDX-License-Identifier: Apache-2.0
"""What the actors of a sharded replay hold and get, for its tests."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from pyarrow import fs

from tests.unit.rllib_ext.local_shards import first_numbers, read

from .rllib_algorithms import watch_td_errors

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Noted(fs.FSSpecHandler):
    """A folder as a file system that notes which process has opened which file. A file "hold" holds up a shard."""

    def __init__(self, root: Path) -> None:
        super().__init__(DirFileSystem(str(root / "files"), LocalFileSystem()))
        self.root = root

    @classmethod
    def below(cls, root: Path, held: bool = False) -> Noted:
        (root / "files").mkdir()
        if held:
            (root / "hold").touch()
        return cls(root)

    def __reduce__(self) -> Any:
        return Noted, (self.root,)

    def note(self, how: str, path: str) -> None:
        with (self.root / f"{how}-{os.getpid()}").open("a") as notes:
            notes.write(f"{path}\n")

    def create_dir(self, path: str, recursive: bool) -> None:
        if "shard-2" in path and (self.root / "hold").exists():
            time.sleep(2.0)  # longer than shard 1 takes to be lost
        super().create_dir(path, recursive)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self.note("written", path)
        while "shard-1" in path and (self.root / "hold").exists():
            (self.root / "held").touch()
            time.sleep(0.05)
        return super().open_output_stream(path, metadata)

    def open_input_file(self, path: str) -> Any:
        self.note("read", path)
        return super().open_input_file(path)

    def open_input_stream(self, path: str) -> Any:
        self.note("read", path)
        return super().open_input_stream(path)

    def taken(self, how: str) -> dict[int, set[str]]:
        """The files that each process has opened since the last call, without their folders' random parts."""
        found = {}
        for notes in self.root.glob(f"{how}-*"):
            found[int(notes.name.partition("-")[2])] = set(notes.read_text().split())
            notes.unlink()
        return found


def lose(handle: Any) -> None:
    """Ends the process of an actor, and waits until its calls raise errors."""
    ray.kill(handle)
    wait_until_ended(handle)


def wait_until_ended(handle: Any) -> None:
    """Waits until the calls of an actor that was killed raise errors: until then its process may still answer."""
    with pytest.raises(ray.exceptions.RayActorError):
        for _ in range(600):
            ray.get(handle.__ray_ready__.remote())
            time.sleep(0.1)


def on_shards(owner: Any, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Runs a function of a shard inside every one of a replay or of an algorithm's."""
    handles = getattr(owner, "local_replay_buffer", owner).shards.handles
    return ray.get([handle.__ray_call__.remote(function, *arguments) for handle in handles])


def stored(shard: Any) -> tuple[list[int], list[int], list[float]]:
    """Step number, trajectory and leaf of the tree of each row."""
    replay = shard.held.replay
    if not len(replay):
        return [], [], []
    slots = replay.oldest_first()
    rows = replay.storage.get(slots)
    leaves = replay.sampler.priority_of(slots).double().add(replay.sampler.priority_offset).pow(0.7)
    return rows["observation"][:, 0].int().tolist(), rows["trajectory"].tolist(), leaves.tolist()


def trajectories(shard: Any) -> list[list[tuple[float, float]]]:
    """Observation and priority of each row, by trajectories."""
    replay = shard.held.replay
    found: dict[int, list[tuple[float, float]]] = {}
    if len(replay):
        slots = replay.oldest_first()
        rows, priority = replay.storage.get(slots), replay.sampler.priority_of(slots)
        columns = (rows["trajectory"], rows["observation"][:, 0], priority)
        for trajectory, observation, one in zip(*(column.tolist() for column in columns), strict=True):
            found.setdefault(trajectory, []).append((observation, one))
    return sorted(found.values())


def watch(shard: Any) -> None:
    """Notes for each TD error whether it comes to the row whose observation it is."""
    shard.home = watch_td_errors(shard.held.replay)


def homes(shard: Any) -> list[bool]:
    found, shard.home[:] = list(shard.home), []
    return found


def observations(blocks: list[Any]) -> np.ndarray:
    return np.concatenate([first_numbers(one) for one in read(blocks)])
