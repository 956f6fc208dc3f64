# SPDX-License-Identifier: Apache-2.0
"""Rows of recorded data sets, TensorDicts ``[N]``, with the columns that a data module stores.

Columns, and the last step of an episode whose next observation is not recorded: docs/demonstrations.md.
"""

from __future__ import annotations

import importlib
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import ReplayBuffer, Storage

from lightning_replay.episodes.links import TRAJECTORY_KEYS
from lightning_replay.episodes.running import slots_by_age, stored_trajectories
from lightning_replay.options import (
    check_kind,
    checked_choice,
    checked_keys,
    checked_number,
    checked_optional_count,
    missing_extra,
)
from lightning_replay.parts import declared_writer
from lightning_replay.replay import Replay
from lightning_replay.storage.columns import normalized
from lightning_replay.storage.packed import PackedStorage, occupancy_of
from lightning_replay.storage.rows import each_part, shown

__all__ = ["fill", "from_d4rl", "from_lerobot", "from_minari", "from_torchrl"]


def fill(replay: Replay, rows: TensorDictBase) -> Replay:
    """Stores all rows of a data set in a replay, and returns it.

    Episodes get numbers above those that are stored, and those that break off are truncated at their last row.

    Args:
        replay: with room for all rows: none is evicted. Call ``replay.extend`` where that is meant. Of a
            :class:`~lightning_replay.MixedReplay` one side, ``replay.offline`` for demonstrations.
        rows: TensorDict ``[N]``, such as one of the functions here returned.

    Raises:
        TypeError: something else than a replay of this process, or than rows.
        ValueError: more rows than there is room for, or rows that the replay refuses; nothing is changed then, and no
            episode ended.

    Example:
        >>> from lightning_replay import recipes
        >>> done = torch.tensor([False, True])
        >>> rows = TensorDict({"observation": torch.zeros(2, 3), "next": {"done": done}}, [2])
        >>> len(fill(recipes.uniform(capacity=100, batch_size=2), rows))
        2
    """
    wanted = (
        "a Replay, such as lightning_replay.recipes.uniform(capacity=100_000), of a MixedReplay its offline or online"
    )
    check_kind("replay", replay, Replay, wanted)
    accepted = "a TensorDict [N], such as a function of lightning_replay.datasets returned"
    check_kind("rows", rows, TensorDictBase, accepted)
    needed = len(replay) + len(rows)
    if needed > replay.capacity:
        raise ValueError(
            f"the replay has the capacity {replay.capacity} and holds {len(replay)} rows; {len(rows)} more would evict "
            f"some. Give capacity={needed} or more. Nothing was stored"
        )
    first = 1 + max([-1, *(name for name in stored_trajectories(replay.storage) if name is not None)])
    key = next((key for key in TRAJECTORY_KEYS if rows.get(key, None) is not None), None)
    if key is None and len(replay):  # without names, rows would continue the newest episode
        if isinstance(replay.storage, PackedStorage):
            replay.storage.checked_values(normalized(rows))
        replay.end_episodes()
    replay.extend(rows if key is None or not first else rows.copy().set(key, rows[key] + first))
    replay.end_episodes()
    return replay


def from_minari(dataset: Any) -> TensorDict:
    """Returns the rows of a Minari data set.

    Args:
        dataset: the data set, or the id of one that is on this machine (``minari download ID``).

    Raises:
        FileNotFoundError: no data set of this id is there.
        ValueError: the data set has no step.
        TypeError: observations or actions are neither arrays nor dictionaries or tuples of them.
    """
    if isinstance(dataset, str):
        try:
            dataset = _imported("minari").load_dataset(dataset)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"no data set {dataset!r} is on this machine; run 'minari download {dataset}' in a shell, or give "
                "an id that 'minari list local' shows"
            ) from error
    episodes = []
    for number, episode in enumerate(dataset.iterate_episodes()):
        # One observation more than steps: the last one is only a successor.
        cuts = (slice(None, -1), slice(1, None))
        before, after = (each_part(episode.observations, operator.itemgetter(cut)) for cut in cuts)
        reward, terminated, truncated = map(np.asarray, (episode.rewards, episode.terminations, episode.truncations))
        numbers = np.full(len(reward), number)
        episodes.append(_episodes(before, episode.actions, reward, terminated, truncated, numbers, after))
    return _some(torch.cat(episodes) if episodes else TensorDict({}, [0]))


def from_d4rl(path: str | Path, max_episode_steps: int | None = None) -> TensorDict:
    """Returns the rows of an HDF5 file in D4RL's layout.

    That is ``observations``, ``actions``, ``rewards`` and ``terminals`` of steps in order, and where it has them
    ``timeouts`` and ``next_observations``; without the latter they are those of the next step. Fu et al. 2020, https://arxiv.org/abs/2004.07219.

    Args:
        path: of the file.
        max_episode_steps: steps after which the environment ended an episode; for a file without ``timeouts``.

    Raises:
        OSError: no HDF5 file is there, or one that is damaged.
        ValueError: columns that are missing or of several lengths; neither ``timeouts`` nor ``next_observations`` nor
            ``max_episode_steps``, so that the next step may be of another episode.
    """
    h5py, needed = _imported("h5py"), ("observations", "actions", "rewards", "terminals")
    checked_optional_count("max_episode_steps", max_episode_steps)
    try:
        with h5py.File(path) as file:
            columns = {name: file[name][:] for name in (*needed, "timeouts", "next_observations") if name in file}
    except FileNotFoundError:
        raise
    except OSError as error:
        raise OSError(f"{path} cannot be read as HDF5 ({error}); give a whole file in D4RL's layout") from error
    lengths = {name: len(column) for name, column in columns.items()}
    if not lengths.keys() >= {*needed} or len({*lengths.values()}) > 1:
        raise ValueError(f"{path} has the columns {lengths}; give one with {', '.join(needed)}, all of one length")
    observation, action, reward, terminated = (columns[name] for name in needed)
    terminated, following = terminated.astype(bool).reshape(-1), columns.get("next_observations")
    place = np.arange(len(terminated))
    if "timeouts" in columns:
        truncated = columns["timeouts"].astype(bool).reshape(-1)
    elif max_episode_steps is not None:
        start = np.maximum.accumulate(np.where(np.append(True, terminated[:-1]), place, 0))
        truncated = (place - start) % max_episode_steps == max_episode_steps - 1
    elif following is not None:  # the next step goes on from another observation
        truncated = (following != observation[np.roll(place, -1)]).any(tuple(range(1, following.ndim)))
        truncated &= ~terminated
    else:
        raise ValueError(
            f"{path} has neither timeouts nor next_observations, so that an episode that was cut off would go on in "
            "the next one. Give max_episode_steps, that of the environment"
        )
    is_last = terminated | truncated
    numbers = np.cumsum(is_last) - is_last
    return _some(_episodes(observation, action, reward, terminated, truncated, numbers, following))


def from_lerobot(
    path: str | Path,
    observations: Sequence[str] = ("observation.state",),
    reward: float | None = None,
    done: str = "terminated",
) -> TensorDict:
    """Returns the rows of a LeRobot data set, read from its parquet files; videos and images are not decoded.

    Layouts v2 and v3. Observations are those before the actions.

    Args:
        path: folder with ``meta`` and ``data``.
        observations: one column, or several that become a dictionary, by what follows ``observation.``.
        reward: of each step, for a data set without ``next.reward``.
        done: what ``next.done`` says of a step: ``"terminated"``, if ``next.success`` (where there is one) is true as
            well, or ``"truncated"``, for recordings in which it marks the last frame alone and no state is an end.

    Raises:
        FileNotFoundError: no data set is there.
        ValueError: columns that it lacks, or that are images.
    """
    parquet, folder = _imported("pyarrow.dataset"), Path(path)
    is_terminated = checked_choice("done", done, ("terminated", "truncated")) == "terminated"
    names = [name for (name,) in checked_keys("observations", observations)]
    features = json.loads((folder / "meta" / "info.json").read_text())["features"]
    numbers = [name for name, feature in features.items() if feature["dtype"] not in ("video", "image", "string")]
    needed = [*names, "action", "episode_index", "index", *(["next.reward"] if reward is None else [])]
    if not {*needed} <= {*numbers}:
        raise ValueError(
            f"{folder} lacks the columns {sorted({*needed} - {*numbers})}; it has the numbers {sorted(numbers)}. Name "
            "others as observations, and give reward where there is no next.reward; images are not decoded"
        )
    ends = [name for name in ("next.done", "next.success")[: 1 + is_terminated] if name in numbers]
    table = parquet.dataset(folder / "data", format="parquet").to_table(columns=[*needed, *ends]).sort_by("index")

    def column(name: str) -> np.ndarray:
        values = table[name].combine_chunks()
        while values.type.num_fields:  # of lists
            values = values.flatten()
        return values.to_numpy(zero_copy_only=False).reshape(table.num_rows, *features[name]["shape"])

    rewards = column("next.reward") if reward is None else np.full(table.num_rows, checked_number("reward", reward))
    parts, never = {name.removeprefix("observation."): column(name) for name in names}, np.zeros(len(rewards), np.bool_)
    observation = parts if len(parts) > 1 else column(names[0])
    ended = np.logical_and.reduce([column(name).reshape(-1) for name in ends] or [never])
    terminated, truncated = (ended, never) if is_terminated else (never, ended)
    trajectory = column("episode_index").reshape(-1)
    return _some(_episodes(observation, column("action"), rewards, terminated, truncated, trajectory))


def from_torchrl(
    source: Storage | ReplayBuffer | TensorDictBase, observations: Sequence[str | tuple[str, ...]] = ("observation",)
) -> TensorDict:
    """Returns the rows of a storage or a buffer of TorchRL, such as an offline data set, oldest first.

    ``terminated`` and ``truncated`` are read from ``done`` where they are missing, and ``trajectory`` from
    ``("collector", "traj_ids")``, ``traj_ids`` or ``episode``, or else by the ends of episodes. Flags stay as stored.

    Args:
        source: of TensorDicts ``[]`` with the keys of TorchRL's environments; or such rows, a TensorDict ``[N]``.
        observations: one column, or several that become a dictionary, by the last part of each key.

    Raises:
        TypeError: something else.
        ValueError: no rows, rows of several dimensions, or columns that they lack.
    """
    accepted = "a storage, a replay buffer or an offline data set of TorchRL, or a TensorDict [N]"
    check_kind("source", source, Storage | ReplayBuffer | TensorDictBase, accepted)
    keys, held = checked_keys("observations", observations), source
    if isinstance(source, Storage | ReplayBuffer) and len(source):
        held = source.storage if isinstance(source, ReplayBuffer) else source
        in_order = slots_by_age(held, declared_writer(source.writer)) if isinstance(source, ReplayBuffer) else None
        held = held[occupancy_of(held).slots() if in_order is None else in_order]
    rows = _some(torch.stack(held) if isinstance(held, list) else held)
    rows = normalized(rows).cpu()
    needed = [*keys, *(("next", *key) for key in keys), ("action",), ("next", "reward"), ("next", "done")]
    missing = ", ".join(shown(key) for key in needed if rows.get(key, None) is None)
    if missing:
        raise ValueError(
            f"the rows lack {missing}; they have {', '.join(map(shown, rows.keys(True, True)))}. Name the observations "
            "by observations=, and the others as TorchRL's environments do"
        )
    if rows.ndim > 1:
        raise ValueError(
            f"from_torchrl takes rows that are single steps, and these have the batch size {list(rows.shape[1:])} "
            "each. Give storage[:].transpose(0, 1).reshape(-1)"
        )
    following = rows["next"]
    done, ended, truncated = (following.get(name, None) for name in ("done", "terminated", "truncated"))
    if ended is None:
        ended = done if truncated is None else done & ~truncated
    names = (rows.get(key, None) for key in (*TRAJECTORY_KEYS, "traj_ids", "episode"))
    trajectory = next((name for name in names if name is not None), done.long().cumsum(0) - done.long())
    seen, after = (
        each.get(keys[0]) if len(keys) == 1 else {key[-1]: each.get(key) for key in keys} for each in (rows, following)
    )
    truncated = done & ~ended if truncated is None else truncated
    return _transitions(seen, after, rows["action"], following["reward"], ended, truncated, trajectory)


def _some(rows: Any) -> Any:
    if not len(rows):
        raise ValueError("the data set holds no rows; give one with recorded steps")
    return rows


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing_extra("the data set", str(error.name), "demonstrations") from error


def _episodes(
    observation: Any, action: Any, reward: Any, terminated: Any, truncated: Any, trajectory: Any, following: Any = None
) -> TensorDict:
    """Returns the rows of whole episodes, arrays ``[n, ...]`` of steps in order."""
    is_last = np.append(trajectory[1:] != trajectory[:-1], True)[: len(trajectory)]
    truncated, kept = truncated | (is_last & ~terminated), np.full(len(is_last), True)
    if following is None:
        successor = np.arange(len(is_last)) + ~is_last
        following, kept = each_part(observation, lambda column: column[successor]), ~is_last | terminated
        truncated[:-1] |= ~kept[1:] & ~is_last[:-1]
    rows = _transitions(observation, following, action, reward, terminated, truncated, trajectory)
    return rows if kept.all() else rows[torch.from_numpy(kept)]


def _transitions(
    observation: Any, following: Any, action: Any, reward: Any, terminated: Any, truncated: Any, trajectory: Any
) -> TensorDict:
    count = len(reward)
    reward, *ends = (_column(each).reshape(count, 1) for each in (reward, terminated, truncated))
    after = {"observation": each_part(following, _column), "reward": reward.float(), "terminated": ends[0]}
    rows = {
        "observation": each_part(observation, _column),
        "action": each_part(action, lambda column: _column(column, np.int64)),
        "next": after | {"truncated": ends[1], "done": ends[0] | ends[1]},
        "trajectory": _column(trajectory, np.int64).reshape(count),
    }
    return TensorDict(rows, [count])


def _column(value: Any, integer: Any = None) -> Tensor:
    column = np.asarray(value)
    kind = column.dtype.kind
    if kind not in "biuf":
        raise TypeError(
            f"a column is of {column.dtype}; observations and actions must be arrays of numbers, or dictionaries or "
            "tuples of them. Convert the data set first"
        )
    is_wide = integer is not None and kind == "i" and column.dtype.itemsize > 1  # int8 is of MultiBinary
    return torch.from_numpy(column.astype(integer if is_wide else np.float32 if kind == "f" else column.dtype))
