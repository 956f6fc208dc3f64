# SPDX-License-Identifier: Apache-2.0
"""Data sets in the layout of each reader, all of the same steps: three episodes, of which the second one is cut off.

The observation of step ``t`` of episode ``e`` is ``[100 e + t, e]``, and its reward is ``t``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import minari
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from gymnasium.spaces import Box, Dict
from minari.data_collector import EpisodeBuffer
from tensordict import TensorDict

from lightning_replay.datasets import from_d4rl, from_lerobot, from_minari

LENGTHS = (5, 4, 6)
CUT_OFF = 1  # the episode that does not terminate
STEPS = sum(LENGTHS)
ID = "recorded/steps-v0"


class Recording(NamedTuple):
    """A layout: how the data set is written into a folder, and read from it."""

    name: str
    write: Callable[[Path], Any]
    read: Callable[[Path], TensorDict]


def episode_steps() -> dict[str, np.ndarray]:
    """All steps by name, arrays ``[15, ...]``."""
    episode = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    step = np.concatenate([np.arange(length) for length in LENGTHS])
    is_last = np.append(episode[1:] != episode[:-1], True)
    return {
        "episode": episode,
        "step": step,
        "observation": np.stack([100 * episode + step, episode], 1).astype(np.float32),
        "action": np.full((STEPS, 1), 0.5, np.float32),
        "reward": step.astype(np.float32),
        "terminated": is_last & (episode != CUT_OFF),
        "truncated": is_last & (episode == CUT_OFF),
    }


def wrong_rows(rows: TensorDict) -> int:
    """The number of rows that no step of the recording is."""
    now, after = rows["observation"], rows["next", "observation"]
    is_end = rows["next", "terminated"].flatten() & (after == now).all(1)
    is_wrong = ((after[:, 0] != now[:, 0] + 1) & ~is_end) | (after[:, 1] != now[:, 1])
    is_wrong |= rows["next", "reward"].flatten() != now[:, 0] % 100
    return int(is_wrong.sum()) + max(len(rows) - STEPS, 0) + len(rows) - len({*now[:, 0].tolist()})


def write_d4rl(folder: Path) -> Path:
    steps = episode_steps()
    names = {"observations": "observation", "actions": "action", "rewards": "reward"}
    names |= {"terminals": "terminated", "timeouts": "truncated"}
    with h5py.File(folder / "steps.hdf5", "w") as file:
        for column, name in names.items():
            file[column] = steps[name]
    return folder / "steps.hdf5"


KINDS = {
    "observation.state": ("float32", [2]),
    "action": ("float32", [1]),
    "next.reward": ("float32", [1]),
    "next.done": ("bool", [1]),
    "episode_index": ("int64", [1]),
    "frame_index": ("int64", [1]),
    "index": ("int64", [1]),
}


def lerobot_table() -> pyarrow.Table:
    steps = episode_steps()
    return pyarrow.table(
        {
            "observation.state": steps["observation"].tolist(),
            "action": steps["action"].tolist(),
            "next.reward": steps["reward"],
            "next.done": steps["terminated"] | steps["truncated"],
            "episode_index": steps["episode"],
            "frame_index": steps["step"],
            "index": np.arange(STEPS),
        }
    )


def write_lerobot(folder: Path, layout: str) -> Path:
    """Layout v2 with a file for each episode, or v3 with one for all."""
    (folder / "data" / "chunk-000").mkdir(parents=True)
    (folder / "meta").mkdir()
    features = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in KINDS.items()}
    info = {"codebase_version": layout, "features": features, "total_frames": STEPS, "total_episodes": len(LENGTHS)}
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    table = lerobot_table()
    episodes = [{"episode_index": number, "length": length, "tasks": ["go"]} for number, length in enumerate(LENGTHS)]
    if layout == "v2.1":
        (folder / "meta" / "episodes.jsonl").write_text("".join(json.dumps(each) + "\n" for each in episodes))
        for number, length in enumerate(LENGTHS):
            part = table.slice(sum(LENGTHS[:number]), length)
            pyarrow.parquet.write_table(part, folder / "data" / "chunk-000" / f"episode_{number:06d}.parquet")
    else:
        (folder / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
        listed = pyarrow.Table.from_pylist(episodes)
        pyarrow.parquet.write_table(listed, folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
        pyarrow.parquet.write_table(table, folder / "data" / "chunk-000" / "file-000.parquet")
    return folder


def write_minari(folder: Path, data_format: str, **observations: Any) -> Path:
    """With further ``observations``: pairs of a space and a value, and the steps as ``state``."""
    steps = episode_steps()
    space: Any = Box(-1_000, 1_000, (2,), np.float32)
    buffers = []
    for number, length in enumerate(LENGTHS):
        part = steps["episode"] == number
        after_last = steps["observation"][part][-1:] + np.float32([1, 0])
        seen: Any = [*np.concatenate([steps["observation"][part], after_last])]
        if observations:
            more = {name: [value] * (length + 1) for name, (_, value) in observations.items()}
            seen = {"state": seen} | more
        flags = {"terminations": steps["terminated"][part].tolist(), "truncations": steps["truncated"][part].tolist()}
        columns = {"actions": [*steps["action"][part]], "rewards": steps["reward"][part].tolist()}
        buffers.append(EpisodeBuffer(id=number, observations=seen, **columns, **flags))
    if observations:
        space = Dict({"state": space} | {name: each for name, (each, _) in observations.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(folder))
        minari.create_dataset_from_buffers(
            ID,
            buffer=buffers,
            env="CartPole-v1",
            eval_env="CartPole-v1",
            observation_space=space,
            action_space=Box(-1, 1, (1,), np.float32),
            data_format=data_format,
            **{name: "x" for name in ("algorithm_name", "author", "author_email", "code_permalink", "description")},
            requirements=[],
        )
    return folder


def read_minari(folder: Path, **options: Any) -> TensorDict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(folder))
        return from_minari(ID, **options)


def read_d4rl(folder: Path) -> TensorDict:
    return from_d4rl(folder / "steps.hdf5")


RECORDINGS = {
    recording.name: recording
    for recording in (
        Recording("d4rl", write_d4rl, read_d4rl),
        Recording("lerobot v2", partial(write_lerobot, layout="v2.1"), from_lerobot),
        Recording("lerobot v3", partial(write_lerobot, layout="v3.0"), from_lerobot),
        Recording("minari hdf5", partial(write_minari, data_format="hdf5"), read_minari),
        Recording("minari arrow", partial(write_minari, data_format="arrow"), read_minari),
    )
}
