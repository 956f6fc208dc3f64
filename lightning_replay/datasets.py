# SPDX-License-Identifier: Apache-2.0
"""Rows of recorded data sets, TensorDicts ``[N]``, with the columns that a data module stores.

Columns, and the last step of an episode whose next observation is not recorded: docs/demonstrations.md.
"""

from __future__ import annotations

import collections
import functools
import json
import math
import operator
import re
import warnings
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import ReplayBuffer, Storage

from lightning_replay.dataset_files import (
    DatasetError,
    files_below,
    imported,
    own_columns,
    readable,
    without_ghostscript,
)
from lightning_replay.episodes.links import TRAJECTORY_KEYS
from lightning_replay.episodes.running import slots_by_age, stored_trajectories
from lightning_replay.free_memory import check_free
from lightning_replay.options import (
    check_kind,
    checked_choice,
    checked_keys,
    checked_local_path,
    checked_number,
    checked_optional_count,
)
from lightning_replay.parts import as_replay_writer
from lightning_replay.replay import Replay
from lightning_replay.saving.files import check_regular
from lightning_replay.storage.columns import normalized
from lightning_replay.storage.packed import PackedStorage, occupancy_of
from lightning_replay.storage.rows import each_part, shown

_NO_NUMBERS = ("video", "image", "string")  # kinds of features of LeRobot
_NUMBERS = "biuf"  # kinds of dtypes of NumPy
# Layouts of HDF5 files that from_d4rl does not read, by the name of an entry at the top.
_LAYOUTS = {
    "data": " (the layout of robomimic)",
    r"traj_\d+": " (the layout of ManiSkill)",
    r"observations_\d+": " (the layout of d3rlpy 2)",
    r"episode_\d+": " (the layout of Minari, which from_minari reads)",
}

__all__ = ["fill", "from_d4rl", "from_lerobot", "from_minari", "from_torchrl"]


def fill(replay: Replay, rows: TensorDictBase) -> Replay:
    """Stores all rows of a data set in a replay, and returns it.

    Episodes get numbers above the stored ones, and episodes that break off are truncated at their last row.

    Args:
        replay: with room for all rows: none is evicted. Call ``replay.extend`` if that is meant. Of a
            :class:`~lightning_replay.MixedReplay` one side, ``replay.offline`` for demonstrations.
        rows: TensorDict ``[N]``, such as one of the functions here returned.

    Raises:
        TypeError: something else than a replay of this process, or than rows.
        ValueError: more rows than there is room for, or rows that the replay refuses. Nothing is changed then, and no
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
    if key is None and len(replay):  # Rows without a trajectory would continue the newest episode.
        if isinstance(replay.storage, PackedStorage):
            replay.storage.checked_values(normalized(rows))
        replay.end_episodes()
    replay.extend(rows if key is None or not first else rows.copy().set(key, rows[key] + first))
    replay.end_episodes()
    return replay


def from_minari(dataset: Any, observations: Sequence[str | tuple[str, ...]] | None = None) -> TensorDict:
    """Returns the rows of a Minari data set.

    The files of an id are checked before Minari reads them. A data set that does not describe its spaces is refused,
    because Minari would build the environment that the data set names.

    Args:
        dataset: id of a data set that is on this machine (``minari download ID``), or the loaded data set. Load only a
            data set that you trust by yourself.
        observations: entries of dictionary observations to keep, for example to leave out a text. One entry is kept as
            it is. Several become a dictionary, by the last part of each key. By default all are kept.

    Raises:
        FileNotFoundError: No data set of this id is there.
        ValueError: The data set has no step. An episode has other lengths than its steps. A column is no array of
            numbers. Steps or episodes differ from the description. A file is damaged or leads out of the data set.
    """
    minari = imported("minari")
    keys = None if observations is None else _checked_keys(observations)
    with readable(f"the data set {dataset}", "a whole data set of Minari"), without_ghostscript():
        if isinstance(dataset, str):
            place = imported("minari.storage").get_dataset_path(dataset) / "data"
            if not place.exists():
                raise FileNotFoundError(
                    f"no data set {dataset!r} is on this machine; run 'minari download {dataset}' in a shell, or give "
                    "an id that 'minari list local' shows"
                )
            if not {"observation_space", "action_space"} <= {*_minari_description(place)}:
                raise DatasetError(
                    f"{place} does not describe its spaces, and Minari would build the environment that it names, "
                    "which can be any code. If you trust it, give minari.load_dataset(id) in place of the id"
                )
            dataset = minari.load_dataset(dataset)
        is_described = isinstance(dataset, minari.MinariDataset)
        if is_described:
            _minari_description(dataset.storage.data_path)
        episodes = [_minari_episode(number, each, keys) for number, each in enumerate(dataset.iterate_episodes())]
        found = (sum(map(len, episodes)), len(episodes))
        if is_described and found != (dataset.total_steps, dataset.total_episodes):
            raise DatasetError(
                f"the data set holds {found[0]} steps in {found[1]} episodes, and its description says "
                f"{dataset.total_steps} in {dataset.total_episodes}; give a whole data set of Minari"
            )
    return _some(torch.cat(episodes) if episodes else TensorDict({}, [0]))


def _minari_description(place: Path) -> Any:
    """Returns the description in the folder of a data set, whose files lead to no other one and are safe to read."""
    files = files_below(place.parent, place)
    description = json.loads((place / "metadata.json").read_text("utf-8"))
    arrays = place / "main_data.hdf5"
    if arrays in files:
        with imported("h5py").File(arrays) as file:
            needed = sum(column.nbytes for column in own_columns(file).values())
            check_free(needed, f"the arrays of {arrays}", advice="Give a smaller data set")
    if description["data_format"] == "arrow":
        # A length that is forged would end the process. Minari reads these names, also in place of an episode's folder.
        # Each file by itself, because several together are read with the columns of the first one alone.
        for file in files:
            if not file.name.startswith(("_", ".", "metadata.json")):
                for batch in _source([file], "arrow").to_batches():
                    batch.validate(full=True)
    return description


def _minari_episode(number: int, episode: Any, keys: list[tuple[str, ...]] | None) -> TensorDict:
    observed = episode.observations
    if keys is not None:
        held = [*observed] if isinstance(observed, Mapping) else "an array"
        with readable(f"the entries {keys} of the observations", f"entries of them; the observations are {held}"):
            observed = _one_or_all({key[-1]: functools.reduce(operator.getitem, key, observed) for key in keys})
    count = len(episode.rewards)
    # One observation more than steps: the last one is only a successor.
    observed = _columns(f"episode {number} (of {count} steps): observations", observed, count + 1)
    before, after = (each_part(observed, operator.itemgetter(cut)) for cut in (slice(None, -1), slice(1, None)))
    terminated, truncated = (
        _flags(f"{name} of episode {number}", column, count)
        for name, column in (("terminations", episode.terminations), ("truncations", episode.truncations))
    )
    return _episodes(before, episode.actions, episode.rewards, terminated, truncated, np.full(count, number), after)


def from_d4rl(path: str | Path, max_episode_steps: int | None = None) -> TensorDict:
    """Returns the rows of an HDF5 file in D4RL's layout.

    That is ``observations``, ``actions``, ``rewards`` and ``terminals`` of steps in order. A file may also have
    ``timeouts`` (or d3rlpy's ``episode_terminals``), and ``next_observations``, which else are the observations of the
    next step. Fu et al. 2020, https://arxiv.org/abs/2004.07219.

    Args:
        path: path of the file. Its values must lie in the file itself.
        max_episode_steps: steps after which the environment ended an episode, also if ``timeouts`` does not mark it.

    Raises:
        FileNotFoundError: No file is there.
        ValueError: The path is a URL. The file is damaged, leads to other files, or is in another layout. Columns are
            missing, are no numbers, or have several lengths. Without ``timeouts``, ``next_observations`` and
            ``max_episode_steps``, the next step may be of another episode.
        MemoryError: The columns need more memory than is free.
    """
    h5py = imported("h5py")
    needed = ("observations", "actions", "rewards", "terminals")
    accepted = f"an HDF5 file in D4RL's layout, with {', '.join(needed)}, arrays of numbers, all of one length"
    checked_optional_count("max_episode_steps", max_episode_steps)
    path = checked_local_path("path", path)
    with readable(path, accepted):
        check_regular(path)
        with h5py.File(path) as file:
            found = own_columns(file)
            if not {*needed} <= {*found}:
                layout = next((_LAYOUTS[key] for key in _LAYOUTS if any(re.fullmatch(key, name) for name in file)), "")
                raise DatasetError(
                    f"{path} holds {', '.join([*map(str, file.values())][:10])}{layout}; give {accepted}, or build "
                    "rows from its episodes, as docs/demonstrations.md shows"
                )
            more = ("timeouts", "episode_terminals", "next_observations")
            used = {name: found[name] for name in (*needed, *more) if name in found}
            kinds = {name: str(column.dtype) for name, column in used.items() if column.dtype.kind not in _NUMBERS}
            if kinds:  # Many values of other kinds can refer to one object of the file.
                raise DatasetError(f"{path} has columns of other kinds than numbers, {kinds}; give {accepted}")
            check_free(sum(column.nbytes for column in used.values()), f"the rows of {path}", advice="Split the file")
            columns = {name: column[:] for name, column in used.items()}
        lengths = {name: len(column) for name, column in columns.items()}
        if len({*lengths.values()}) > 1:
            raise DatasetError(f"{path} has columns of the lengths {lengths}; give {accepted}")
        return _d4rl_rows(path, columns, max_episode_steps)


def _d4rl_rows(path: str | Path, columns: dict[str, Any], max_episode_steps: int | None) -> TensorDict:
    observation = columns["observations"]
    following = columns.get("next_observations")
    count = len(observation)
    terminated = _flags("terminals", columns["terminals"], count)
    place = np.arange(count)
    if "timeouts" in columns:
        truncated = _flags("timeouts", columns["timeouts"], count)
    elif "episode_terminals" in columns:
        truncated = _flags("episode_terminals", columns["episode_terminals"], count) & ~terminated
    elif max_episode_steps is not None:
        truncated = np.zeros(count, np.bool_)
    elif following is not None:  # the next step goes on from another observation
        truncated = (following != observation[np.roll(place, -1)]).any(tuple(range(1, following.ndim)))
        truncated &= ~terminated
    else:
        raise DatasetError(
            f"{path} has neither timeouts nor next_observations, so that an episode that was cut off would go on in "
            "the next one. Give max_episode_steps, that of the environment"
        )
    if max_episode_steps is not None:
        start = np.maximum.accumulate(np.where(np.append(True, (terminated | truncated)[:-1])[:count], place, 0))
        truncated |= (place - start) % max_episode_steps == max_episode_steps - 1
    is_last = terminated | truncated
    numbers = np.cumsum(is_last) - is_last
    return _some(
        _episodes(observation, columns["actions"], columns["rewards"], terminated, truncated, numbers, following)
    )


def from_lerobot(
    path: str | Path,
    observations: Sequence[str] = ("observation.state",),
    reward: float | None = None,
    done: str = "terminated",
) -> TensorDict:
    """Returns the rows of a LeRobot data set, read from its parquet files. Videos and images are not decoded.

    Layouts v2 and v3. Observations are those before the actions. Frames and episodes are compared with ``meta``.

    Args:
        path: folder with ``meta`` and ``data``.
        observations: one column, or several that become a dictionary, by what follows ``observation.``.
        reward: of each step, for a data set without ``next.reward``.
        done: what ``next.done`` says of a step: ``"terminated"``, if ``next.success`` (if there is one) is true as
            well, or ``"truncated"``, for recordings in which it marks the last frame alone and no state is an end.

    Raises:
        FileNotFoundError: no data set is there.
        ValueError: The path is a URL. Columns are missing, are images, or hold nulls or entries of other shapes than
            ``meta`` describes. Frames are missing, or occur twice, because two recordings are in one folder. Frames or
            episodes differ from ``meta``. A file is damaged or leads out of the folder.
        MemoryError: The columns need more memory than is free.
    """
    imported("pyarrow.dataset")
    folder = checked_local_path("path", path)
    is_terminated = checked_choice("done", done, ("terminated", "truncated")) == "terminated"
    names = [".".join(key) for key in _checked_keys(observations)]
    given = None if reward is None else checked_number("reward", reward)
    accepted = "a whole data set of LeRobot, of layout v2 or v3, with meta/info.json and parquet files in data"
    with readable(folder, accepted):
        described = files_below(folder, folder / "meta")
        info = json.loads((folder / "meta" / "info.json").read_text("utf-8"))
        features = {name: each for name, each in info["features"].items() if each["dtype"] not in _NO_NUMBERS}
        needed = [*names, "action", "episode_index", "index", *(["next.reward"] if reward is None else [])]
        if not {*needed} <= {*features}:
            raise DatasetError(
                f"{folder} lacks the columns {sorted({*needed} - {*features})}; it has the numbers {sorted(features)}. "
                "Name others as observations, and give reward where there is no next.reward; images are not decoded"
            )
        ends = [name for name in ("next.done", "next.success")[: 1 + is_terminated] if name in features]
        more = [name for name in ("frame_index",) if name in features]
        shapes = {name: features[name]["shape"] for name in (*needed, *ends, *more)}
        files = [file for file in files_below(folder, folder / "data") if file.suffix == ".parquet"]
        if not files:
            raise DatasetError(f"{folder / 'data'} holds no parquet file; give {accepted}")
        width = sum(math.prod(each["shape"]) for name, each in features.items() if _is_below(name, [*shapes]))
        table = _table(files, [*shapes], width).sort_by("index")
        columns = {name: _entries(f"{name} of {folder}", table[name], shape) for name, shape in shapes.items()}
        count = table.num_rows
        _check_frames(folder, info, described, columns)
        rewards = columns["next.reward"] if given is None else np.full(count, given)
        observation = _one_or_all({name.removeprefix("observation."): columns[name] for name in names})
        never = np.zeros(count, np.bool_)
        ended = np.logical_and.reduce([_flags(name, columns[name], count) for name in ends] or [never])
        terminated, truncated = (ended, never) if is_terminated else (never, ended)
        trajectory = columns["episode_index"].reshape(-1)
        return _some(_episodes(observation, columns["action"], rewards, terminated, truncated, trajectory))


def _is_below(path: str, names: list[str]) -> bool:
    """Whether a path of a parquet file may be of one of these columns.

    The name of another column may begin with the name.
    """
    return any(f"{path}.".startswith(f"{name}.") for name in names)


def _table(files: list[Path], names: list[str], width: int) -> Any:
    """Returns the columns ``names`` of all ``files``, at most ``width`` numbers a row, counted before they are read."""
    stored: collections.Counter[str] = collections.Counter()
    described = 0
    for file in files:
        with file.open("rb") as content:
            footer = imported("pyarrow.parquet").read_metadata(content)
        described += width * footer.num_rows
        for place in range(footer.num_columns):
            column = footer.schema.column(place)
            if not _is_below(column.path, names):
                continue
            # Parquet has no 16-bit numbers: they are bytes of this logical type.
            if column.physical_type.endswith("BYTE_ARRAY") and column.logical_type.type != "FLOAT16":
                raise DatasetError(f"{column.path} of {file} holds texts or bytes; give numbers")
            groups = map(footer.row_group, range(footer.num_row_groups))
            stored[column.path] += sum(group.column(place).num_values for group in groups)
    check_free(8 * max(stored.total(), described), f"the columns {names}", advice="Give a smaller data set")
    if stored.total() > described:
        raise DatasetError(
            f"the parquet files hold these numbers: {dict(stored)}, and meta/info.json describes {described} in all; "
            "give a whole data set of one recording"
        )
    return _source(files, "parquet").to_table(columns=names)


def _source(files: list[Path], kind: str) -> Any:
    local = imported("pyarrow.fs").LocalFileSystem()  # A path is no URI of another file system.
    return imported("pyarrow.dataset").dataset([*map(str, files)], filesystem=local, format=kind)


def _entries(name: str, column: Any, shape: Sequence[int]) -> np.ndarray:
    """Returns a column of lists, or of numbers, as an array ``[N, *shape]``."""
    levels = [column.combine_chunks()]
    lengths = []
    while levels[-1].type.num_fields:  # of lists
        lengths.append(imported("pyarrow.compute").list_value_length(levels[-1]).unique().to_pylist())
        levels.append(levels[-1].flatten())
    wanted = [[length] for length in shape if length != 1]  # a list of one number may be stored as the number
    if any(level.null_count for level in levels) or [each for each in lengths if each != [1]] != wanted:
        raise DatasetError(
            f"{name} holds nulls, or lists of the lengths {lengths}, and meta/info.json describes the shape {shape}; "
            "give a whole data set without nulls"
        )
    return levels[-1].to_numpy(zero_copy_only=False).reshape(len(column), *shape)


def _check_frames(folder: Path, info: dict[str, Any], described: list[Path], columns: dict[str, np.ndarray]) -> None:
    """Refuses frames that do not follow each other, and frames and episodes that ``meta`` does not describe."""
    index = columns["index"].reshape(-1)
    episode = columns["episode_index"].reshape(-1)
    starts = episode[1:] != episode[:-1]
    step = np.diff(index)
    frame_step = np.diff(columns.get("frame_index", index).reshape(-1))
    is_broken = np.where(starts, step < 1, (step != 1) | (frame_step != 1))
    names, counts = np.unique(episode, return_counts=True)
    if is_broken.any() or np.count_nonzero(starts) >= max(len(names), 1):
        raise DatasetError(
            f"the frames of {folder} do not follow each other by index, episode_index and frame_index; the first wrong "
            f"indices are {index[1:][is_broken][:3].tolist()}. Frames are missing, a file is there twice, or the "
            "folder holds two recordings: read each from its own folder, and fill the replay with one after the other"
        )
    lengths: dict[int, int] = {}
    for file in described:
        entries = []
        if file.name == "episodes.jsonl":
            entries = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        elif folder / "meta" / "episodes" in file.parents and file.suffix == ".parquet":
            entries = _table([file], ["episode_index", "length"], 2).to_pylist()
        lengths |= {each["episode_index"]: each["length"] for each in entries}
    for name, count in zip(names.tolist(), counts.tolist(), strict=True):
        if lengths and lengths.get(name) != count:
            raise DatasetError(
                f"episode {name} of {folder} has {count} frames, and meta describes {lengths.get(name)}; give a whole "
                "data set of one recording"
            )
    for key, count in (("total_frames", len(index)), ("total_episodes", len(names))):
        total = info.get(key, count)
        if count > total:
            raise DatasetError(f"{folder} holds {count} where its {key} is {total}; give a data set of one recording")
        if count < total:
            warnings.warn(f"{folder} holds {count} where its {key} is {total}; the rest is left out", stacklevel=3)


def from_torchrl(
    source: Storage | ReplayBuffer | TensorDictBase, observations: Sequence[str | tuple[str, ...]] = ("observation",)
) -> TensorDict:
    """Returns the rows of a storage or a buffer of TorchRL, such as an offline data set, oldest first.

    ``terminated`` and ``truncated`` are read from ``done`` if they are missing, and ``trajectory`` from
    ``("collector", "traj_ids")``, ``traj_ids`` or ``episode``, or else by the ends of episodes. Flags stay as stored.

    Args:
        source: of TensorDicts ``[]`` with the keys of TorchRL's environments, or such rows, a TensorDict ``[N]``. Other
            columns, such as texts, are left out.
        observations: one column, or several that become a dictionary, by the last part of each key.

    Raises:
        TypeError: something else.
        ValueError: No rows, rows or a storage of several dimensions, or columns that are missing or no numbers.
    """
    accepted = "a storage, a replay buffer or an offline data set of TorchRL, or a TensorDict [N]"
    check_kind("source", source, Storage | ReplayBuffer | TensorDictBase, accepted)
    keys = _checked_keys(observations)
    with readable("the source", "rows with the keys of TorchRL's environments"):
        return _torchrl_rows(source, keys)


def _torchrl_rows(source: Storage | ReplayBuffer | TensorDictBase, keys: list[tuple[str, ...]]) -> TensorDict:
    held = source
    if isinstance(source, Storage | ReplayBuffer) and len(source):
        held = source.storage if isinstance(source, ReplayBuffer) else source
        in_order = None
        if isinstance(source, ReplayBuffer) and held.ndim == 1:
            in_order = slots_by_age(held, as_replay_writer(source.writer))
        slots = occupancy_of(held).slots() if held.ndim == 1 else slice(None)
        held = held[slots if in_order is None else in_order]
    rows = _some(torch.stack(held) if isinstance(held, list) else held)
    rows = normalized(rows).cpu()
    needed = [*keys, *(("next", *key) for key in keys), ("action",), ("next", "reward"), ("next", "done")]
    missing = ", ".join(shown(key) for key in needed if rows.get(key, None) is None)
    if missing:
        raise DatasetError(
            f"the rows lack {missing}; they have {', '.join(map(shown, rows.keys(True, True)))}. Name the observations "
            "by observations=, and the others as TorchRL's environments do"
        )
    if rows.ndim > 1:
        raise DatasetError(
            f"from_torchrl takes rows that are single steps, and these have the batch size {list(rows.shape[1:])} "
            "each. Give storage[:].transpose(0, 1).reshape(-1)"
        )
    following = rows["next"]
    done, ended, truncated = (following.get(name, None) for name in ("done", "terminated", "truncated"))
    if ended is None:
        ended = done if truncated is None else done & ~truncated
    names = (rows.get(key, None) for key in (*TRAJECTORY_KEYS, "traj_ids", "episode"))
    trajectory = next((name for name in names if name is not None), done.long().cumsum(0) - done.long())
    seen, after = (_one_or_all({key[-1]: each.get(key) for key in keys}) for each in (rows, following))
    truncated = done & ~ended if truncated is None else truncated
    return _transitions(seen, after, rows["action"], following["reward"], ended, truncated, trajectory)


def _checked_keys(observations: object) -> list[tuple[str, ...]]:
    keys = checked_keys("observations", observations)
    if not keys or len({key[-1] for key in keys}) < len(keys):
        raise ValueError(f"observations is {observations!r}; it must be at least one key, each with another last part")
    return keys


def _one_or_all(parts: dict[str, Any]) -> Any:
    return parts if len(parts) > 1 else next(iter(parts.values()))


def _some(rows: Any) -> Any:
    if not len(rows):
        raise DatasetError("the data set holds no rows; give one with recorded steps")
    return rows


def _episodes(
    observation: object,
    action: object,
    reward: Sized,
    terminated: np.ndarray,
    truncated: np.ndarray,
    trajectory: np.ndarray,
    following: object = None,
) -> TensorDict:
    """Returns the rows of whole episodes, arrays ``[n, ...]`` of steps in order."""
    is_last = np.append(trajectory[1:] != trajectory[:-1], True)[: len(trajectory)]
    truncated = truncated | (is_last & ~terminated)
    kept = np.full(len(is_last), True)
    if following is None:
        successor = np.arange(len(is_last)) + ~is_last
        following = each_part(observation, lambda column: column[successor])
        kept = ~is_last | terminated
        truncated[:-1] |= ~kept[1:] & ~is_last[:-1]
    rows = _transitions(observation, following, action, reward, terminated, truncated, trajectory)
    return rows if kept.all() else rows[torch.from_numpy(kept)]


def _transitions(
    observation: object,
    following: object,
    action: object,
    reward: Sized,
    terminated: object,
    truncated: object,
    trajectory: object,
) -> TensorDict:
    count = len(reward)
    ends = [
        torch.from_numpy(_flags(name, each, count)).reshape(count, 1)
        for name, each in (("terminated", terminated), ("truncated", truncated))
    ]
    observed = _columns("observation", observation, count)
    after = {
        "observation": _columns("the next observation", following, count),
        "reward": _numbers("reward", reward, count).float().reshape(count, 1),
        "terminated": ends[0],
    }
    rows = {
        "observation": observed,
        "action": _columns("action", action, count, np.int64),
        "next": after | {"truncated": ends[1], "done": ends[0] | ends[1]},
        "trajectory": _numbers("trajectory", trajectory, count, np.int64),
    }
    return TensorDict(rows, [count])


def _flags(name: str, value: object, count: int) -> np.ndarray:
    """Returns a column of one flag for each of ``count`` steps, bool ``[count]``."""
    column = _numbers(name, value, count)
    if not ((column == 0) | (column == 1)).all():
        raise DatasetError(f"{name} holds other numbers than 0 and 1; it must hold one flag for each step")
    return column.bool().numpy()


def _numbers(name: str, value: object, count: int, integer: Any = None) -> Any:
    """Returns a column of one number for each of ``count`` steps, a tensor ``[count]``."""
    column = _columns(name, value, count, integer)
    if not isinstance(column, Tensor) or column.numel() != count:
        raise DatasetError(
            f"{name} must hold one number for each of {count} steps; its shape is {list(np.shape(column))}"
        )
    return column.reshape(count)


def _columns(name: str, value: object, count: int, integer: Any = None) -> Any:
    """Returns a column, or a tree of columns, as tensors ``[count, ...]``. Integers are stored as ``integer``."""
    parts = dict(enumerate(value)) if isinstance(value, tuple) else value
    if isinstance(parts, Mapping) and len(parts.keys()):  # TorchRL's texts are trees without entries
        return {str(part): _columns(f"{name}[{part!r}]", each, count, integer) for part, each in parts.items()}
    with readable(name, "an array of numbers that float32, or int64, can hold"), np.errstate(over="raise"):
        column = np.asarray(value)
        kind = column.dtype.kind
        if kind not in _NUMBERS:
            raise DatasetError(
                f"{name} is of {column.dtype}; columns must be arrays of numbers, or dictionaries or tuples of "
                "them. Leave it out by observations=, or convert the data set first"
            )
        if column.shape[:1] != (count,):
            raise DatasetError(f"{name} has the shape {list(column.shape)}; it must hold {count} entries")
        if kind == "f":
            return torch.from_numpy(column.astype(np.float32))
        is_wide = integer is not None and kind in "iu" and column.dtype.itemsize > 1  # Bytes are of MultiBinary.
        return torch.from_numpy(column.astype(integer if is_wide else column.dtype, casting="safe"))
