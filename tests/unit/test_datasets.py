# SPDX-License-Identifier: Apache-2.0
"""Rows of recorded data sets, from files that h5py, pyarrow and Minari have written here."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import minari
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Text
from hypothesis import given, settings
from hypothesis import strategies as st
from minari.data_collector import EpisodeBuffer
from tensordict import NonTensorStack, TensorDict
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer

from lightning_replay import recipes
from lightning_replay.datasets import fill, from_d4rl, from_lerobot, from_minari, from_torchrl
from tests import recordings
from tests.transitions import numbered_steps


def listed(rows: TensorDict, *keys: Any) -> list[list[Any]]:
    return [rows[key].flatten().tolist() for key in keys]


def write_hdf5(path: Path, **columns: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            file[name] = np.asarray(column)
    return path


def steps(terminals: list[int], timeouts: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """Step i has the observation [i, -i], the action [i / 10] and the reward 10 i."""
    numbers = np.arange(len(terminals), dtype=np.float64)
    columns = {"observations": np.stack([numbers, -numbers], 1), "actions": numbers[:, None] / 10}
    columns |= {"rewards": 10 * numbers, "terminals": np.array(terminals, bool), "metadata": [1.0]} | more
    return columns if timeouts is None else columns | {"timeouts": np.array(timeouts, bool)}


def test_the_classic_layout_of_d4rl_by_hand(tmp_path: Path) -> None:
    """Steps 0 1 2 | 3 4 | 5 6: the first episode terminates, the second is cut off, the third breaks off.

    step         0 1 2*|3 4!|5 6       * terminal, ! timeout
    next         1 2 2 |4 - |6 -       2 has no successor that counts; 4 and 6 have none that is known
    terminated       2
    truncated           3    5         before the steps that are left out
    """
    file = write_hdf5(tmp_path / "classic.hdf5", **steps([0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0]))
    rows = from_d4rl(file)
    assert len(rows) == 5
    assert rows["observation"].tolist() == [[i, -i] for i in (0, 1, 2, 3, 5)]
    assert rows["next", "observation"].tolist() == [[i, -i] for i in (1, 2, 2, 4, 6)]
    assert listed(rows, ("next", "reward"), ("next", "terminated"), ("next", "truncated"), "trajectory") == [
        [0, 10, 20, 30, 50],
        [False, False, True, False, False],
        [False, False, False, True, True],
        [0, 0, 0, 1, 2],
    ]
    assert torch.equal(rows["next", "done"], rows["next", "terminated"] | rows["next", "truncated"])
    dtypes = {rows[key].dtype for key in ("observation", "action", ("next", "observation"), ("next", "reward"))}
    assert dtypes == {torch.float32} and rows["trajectory"].dtype == torch.int64
    assert rows["next", "reward"].shape == rows["next", "done"].shape == (5, 1) and rows["trajectory"].shape == (5,)
    assert torch.equal(rows["action"], torch.tensor([[0.0], [0.1], [0.2], [0.3], [0.5]]))


def test_next_observations_of_d4rl_are_taken_and_no_step_is_left_out(tmp_path: Path) -> None:
    following = np.arange(1, 6, dtype=np.float32)[:, None] * [1, -1]
    columns = steps([0, 0, 0, 1, 0], [0, 1, 0, 0, 0], next_observations=following)
    rows = from_d4rl(write_hdf5(tmp_path / "whole.hdf5", **columns))
    assert rows["next", "observation"].tolist() == following.tolist()
    assert listed(rows, ("next", "terminated"), ("next", "truncated"), "trajectory") == [
        [False, False, False, True, False],
        [False, True, False, False, True],  # the last one breaks off
        [0, 0, 1, 1, 2],
    ]


def test_episodes_without_timeouts_end_after_the_steps_of_the_environment(tmp_path: Path) -> None:
    file = write_hdf5(tmp_path / "old.hdf5", **steps([0, 0, 0, 1, 0, 0, 0, 0]))  # 0 1 2 | 3* | 4 5 6 | 7
    rows = from_d4rl(file, max_episode_steps=3)
    assert rows["observation"][:, 0].tolist() == [0, 1, 3, 4, 5]  # 2 and 6 were cut off, 7 breaks off
    assert listed(rows, "trajectory", ("next", "truncated")) == [[0, 0, 1, 2, 2], [False, True, False, False, True]]
    with pytest.raises(ValueError, match=r"neither timeouts nor next_observations.*Give max_episode_steps"):
        from_d4rl(file)
    following = np.array([1, 2, 9, 4, 5, 9, 7, 9])[:, None] * [1, -1]  # 2 and 5 were cut off, as the next step shows
    rows = from_d4rl(write_hdf5(tmp_path / "next.hdf5", **steps([0, 0, 0, 1] + 4 * [0], next_observations=following)))
    assert listed(rows, "trajectory", ("next", "truncated")) == [
        [0, 0, 0, 1, 2, 2, 3, 3],
        [False, False, True, False, False, True, False, True],
    ]


def test_episodes_of_the_given_length_end_also_where_timeouts_do_not_mark_it(tmp_path: Path) -> None:
    """The file marks neither of the ends after three steps.

    step         0 1!|2 3 4|5 6 7*|8 9       ! timeout, * terminal, which is also the third step
    """
    file = write_hdf5(tmp_path / "some.hdf5", **steps([0] * 7 + [1, 0, 0], [0, 1] + [0] * 8))
    rows = from_d4rl(file, max_episode_steps=3)
    assert rows["observation"][:, 0].tolist() == [0, 2, 3, 5, 6, 7, 8]
    assert listed(rows, "trajectory", ("next", "truncated")) == [
        [0, 1, 1, 2, 2, 2, 3],
        [True, False, True, False, False, True, True],
    ]
    assert from_d4rl(file)["trajectory"].tolist() == [0, 1, 1, 1, 1, 1, 1, 2]
    # d3rlpy 1 marks all ends in episode_terminals.
    columns = steps([0, 0, 1, 0, 0, 0], episode_terminals=np.array([0, 0, 1, 0, 1, 0], bool))
    rows = from_d4rl(write_hdf5(tmp_path / "d3rlpy.hdf5", **columns))
    assert listed(rows, "observation", "trajectory") == [[0, 0, 1, -1, 2, -2, 3, -3], [0, 0, 0, 1]]
    assert listed(rows, ("next", "truncated"), ("next", "terminated")) == [
        [False, False, False, True],
        [False, False, True, False],
    ]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from("...*!"), min_size=1, max_size=30))
def test_rows_of_the_classic_layout_are_those_of_a_loop_over_its_steps(
    tmp_path_factory: pytest.TempPathFactory, ends: list[str]
) -> None:
    """The oracle reads one step after the other, as D4RL's own ``qlearning_dataset``."""
    expected: list[list[Any]] = []
    episode, count = 0, len(ends)
    for i, end in enumerate(ends):
        has_next = end == "." and i + 1 < count
        if has_next or end == "*":
            expected.append([i, i + 1 if has_next else i, end == "*", False, episode])
        elif expected and expected[-1][4] == episode:
            expected[-1][3] = True
        episode += end != "."
    columns = steps([end == "*" for end in ends], [end == "!" for end in ends])
    file = write_hdf5(tmp_path_factory.getbasetemp() / "drawn.hdf5", **columns)
    if not expected:
        with pytest.raises(ValueError, match="no rows"):
            from_d4rl(file)
        return
    rows = from_d4rl(file)
    ended = (rows["next", name][:, 0] for name in ("terminated", "truncated"))
    found_columns = (rows["observation"][:, 0], rows["next", "observation"][:, 0], *ended, rows["trajectory"])
    assert [list(row) for row in zip(*(column.tolist() for column in found_columns), strict=True)] == expected


def test_files_that_are_no_data_set_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = steps([0, 0, 1], [0, 0, 0])
    with pytest.raises(FileNotFoundError):
        from_d4rl(tmp_path / "absent.hdf5")
    (tmp_path / "other.hdf5").write_text("no HDF5")
    with pytest.raises(ValueError, match=r"other\.hdf5 cannot be read \(OSError: .*give an HDF5 file in D4RL's"):
        from_d4rl(tmp_path / "other.hdf5")
    with pytest.raises(ValueError, match=r"actions.*all of one length"):
        from_d4rl(write_hdf5(tmp_path / "short.hdf5", **columns | {"actions": [[0.0]]}))
    with pytest.raises(
        ValueError, match=r"holds <HDF5 dataset .observations.*; give an HDF5 file in D4RL's layout, with obs"
    ):
        from_d4rl(write_hdf5(tmp_path / "part.hdf5", observations=columns["observations"]))
    with pytest.raises(ValueError, match=r"other kinds than numbers, {'actions': '.S1'}"):
        from_d4rl(write_hdf5(tmp_path / "text.hdf5", **columns | {"actions": np.array([b"a", b"b", b"c"])}))
    for name, read in (("h5py", from_d4rl), ("minari", from_minari), ("pyarrow.dataset", from_lerobot)):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-replay\[demonstrations\]'"):
                read("anything")


LAYOUTS = {
    "robomimic": ["data/demo_0/obs/object", "data/demo_0/actions", "mask/train"],
    "ManiSkill": ["traj_0/obs", "traj_0/actions", "traj_1/obs", "traj_1/actions"],
    "d3rlpy 2": ["observations_0", "actions_0", "rewards_0", "terminated_0", "total_step"],
    "Minari": ["episode_0/observations", "episode_0/actions"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_named(layout: str, tmp_path: Path) -> None:
    file = write_hdf5(tmp_path / "other.hdf5", **{name: [1.0] for name in LAYOUTS[layout]})
    found = rf"other.hdf5 holds <HDF5 .*{LAYOUTS[layout][0].split('/')[0]}.*\(the layout of {layout}"
    with pytest.raises(
        ValueError, match=rf"{found}.*give an HDF5 file in D4RL's layout.*or build rows from its episodes"
    ):
        from_d4rl(file)


WRONG_COLUMNS: dict[str, tuple[Any, str]] = {
    "observations": (
        np.array([["a"], ["b"], ["c"]], "S1"),
        "columns of other kinds than numbers, {'observations': '.S1'}; give an HDF5 file",
    ),
    "next_observations": (np.zeros((3, 5, 7)), "cannot be read"),
    "actions": (np.full((3, 1), 2**63 + 5, np.uint64), "action cannot be read .*uint64"),
    "rewards": (np.full(3, 1e300), "reward cannot be read .*overflow"),
    "terminals": (np.array([0.0, np.nan, 1.0]), "terminals holds other numbers than 0 and 1"),
    "timeouts": (np.zeros((3, 2)), r"timeouts must hold one number for each of 3 steps; its shape is \[3, 2\]"),
}


@pytest.mark.parametrize("name", WRONG_COLUMNS)
def test_columns_that_are_no_numbers_of_the_steps_are_named(name: str, tmp_path: Path) -> None:
    value, sentence = WRONG_COLUMNS[name]
    columns = steps([0, 0, 1], None if name == "next_observations" else [0, 0, 0]) | {name: value}
    with pytest.raises(ValueError, match=sentence):
        from_d4rl(write_hdf5(tmp_path / "wrong.hdf5", **columns))


def test_a_group_in_place_of_a_column_is_named(tmp_path: Path) -> None:
    columns = steps([0, 0, 1], [0, 0, 0])
    state = columns.pop("observations")
    with pytest.raises(ValueError, match=r"holds .*<HDF5 group ./observations. \(1 members\)>"):
        from_d4rl(write_hdf5(tmp_path / "group.hdf5", **columns, **{"observations/state": state}))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Written by Minari: an episode that terminates after three steps, and one that is cut off after two."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    spaces = {"state": Box(-100, 100, (1,), np.float64), "camera": Box(0, 255, (2, 2, 1), np.uint8)}
    episodes = [
        EpisodeBuffer(
            observations={
                "state": [np.array([time / 2]) for time in range(len(actions) + 1)],
                "camera": [np.full((2, 2, 1), 10 * time, np.uint8) for time in range(len(actions) + 1)],
            },
            actions=[np.int64(action) for action in actions],
            rewards=[float(action) for action in actions],
            terminations=[time == 2 for time in range(len(actions))],
            truncations=[len(actions) == 2 and time == 1 for time in range(len(actions))],
        )
        for actions in ((1, 2, 3), (0, 1))
    ]
    texts = {name: name for name in ("algorithm_name", "author", "code_permalink", "description")}
    minari.create_dataset_from_buffers(
        "goals/test-v0",
        buffer=episodes,
        env="CartPole-v1",
        eval_env="CartPole-v1",
        observation_space=Dict(spaces),
        action_space=Discrete(4),
        author_email="author@example.com",
        requirements=[],
        data_format="hdf5",
        **texts,
    )
    return "goals/test-v0"


def test_rows_of_minari_are_those_of_its_episodes(recorded: str) -> None:
    rows = from_minari(recorded)
    assert len(rows) == 5
    assert rows["observation", "state"][:, 0].tolist() == [0, 0.5, 1, 0, 0.5]
    assert rows["next", "observation", "state"][:, 0].tolist() == [0.5, 1, 1.5, 0.5, 1]
    assert rows["observation", "camera"].dtype == torch.uint8
    assert rows["next", "observation", "camera"][:, 1, 1, 0].tolist() == [10, 20, 30, 10, 20]
    assert rows["observation", "state"].dtype == torch.float32 and rows["action"].dtype == torch.int64
    assert listed(rows, "action", ("next", "terminated"), ("next", "truncated"), "trajectory") == [
        [1, 2, 3, 0, 1],
        [False, False, True, False, False],
        [False, False, False, False, True],
        [0, 0, 0, 1, 1],
    ]
    assert torch.equal(from_minari(minari.load_dataset(recorded))["action"], rows["action"])
    with pytest.raises(FileNotFoundError, match="no data set 'absent/x-v0' .*; run 'minari download absent/x-v0' in"):
        from_minari("absent/x-v0")


def test_texts_of_minari_are_left_out_by_name(tmp_path: Path) -> None:
    more = {"mission": (Text(40), "go to the red ball"), "direction": (Discrete(4), 3)}
    recordings.write_minari(tmp_path, "hdf5", **more)
    read = partial(recordings.read_minari, tmp_path)
    with pytest.raises(ValueError, match=r"episode 0 .*: observations\['mission'\] is of <U18; .*by observations="):
        read()
    rows = read(observations=["state", "direction"])
    assert rows["observation", "direction"].tolist() == recordings.STEPS * [3]
    assert recordings.wrong_rows(read(observations=["state"])) == 0
    with pytest.raises(
        ValueError, match=r"entries .*'absent'.*KeyError.*observations are \['direction', 'mission', 'st"
    ):
        read(observations=["absent"])
    with pytest.raises(ValueError, match="at least one key, each with another last part"):
        read(observations=["state", ("other", "state")])


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_minari_is_compared_with_its_description(data_format: str, tmp_path: Path) -> None:
    recordings.write_minari(tmp_path, data_format)
    file = tmp_path / recordings.ID / "data" / "metadata.json"
    described = json.loads(file.read_text())
    for key, value in (("total_steps", 16), ("total_episodes", 2)):
        file.write_text(json.dumps(described | {key: value}))
        with pytest.raises(ValueError, match=r"holds \d+ steps in \d episodes, and its description says \d+ in \d;"):
            recordings.read_minari(tmp_path)


@pytest.mark.parametrize("column", ["observations", "actions", "rewards", "terminations", "truncations"])
def test_an_episode_of_minari_with_another_length_is_named(column: str, tmp_path: Path) -> None:
    recordings.write_minari(tmp_path, "hdf5")
    with h5py.File(tmp_path / recordings.ID / "data" / "main_data.hdf5", "a") as file:
        short = file[f"episode_2/{column}"][:-1]
        del file[f"episode_2/{column}"]
        file[f"episode_2/{column}"] = short
    found = r"episode 2 \(of 6 steps\): observations has the shape \[6, 2\]; it must hold 7 entries"
    sentences = {"observations": found, "rewards": r"episode 2 \(of 5 steps\): observations", "actions": "action has"}
    with pytest.raises(
        ValueError, match=sentences.get(column, f"{column} of episode 2 has the shape .5.; .* 6 entries")
    ):
        recordings.read_minari(tmp_path)


FEATURES = {
    "observation.image": ("video", [96, 96, 3]),
    "observation.state": ("float32", [2]),
    "observation.force": ("float32", [1]),
    "action": ("float32", [2]),
    "next.reward": ("float32", [1]),
    "next.done": ("bool", [1]),
    "next.success": ("bool", [1]),
    "episode_index": ("int64", [1]),
    "frame_index": ("int64", [1]),
    "index": ("int64", [1]),
}


def write_lerobot(folder: Path, *, whole_files: bool = False, leave_out: tuple[str, ...] = ()) -> Path:
    """Episodes of three and two frames, a file for each as in v2, or one as in v3; the first one succeeds."""
    index = np.arange(5)
    columns = {
        "observation.state": [[i, i + 0.5] for i in range(5)],
        "observation.force": [100.0 + i for i in range(5)],
        "action": [[-i, 1] for i in range(5)],
        "next.reward": [i / 4 for i in range(5)],
        "next.done": [False, False, True, False, True],
        "next.success": [False, False, True, False, False],
        "episode_index": [0, 0, 0, 1, 1],
        "frame_index": [0, 1, 2, 0, 1],
        "index": index,
    }
    kinds = {"float32": pyarrow.float32(), "bool": pyarrow.bool_(), "int64": pyarrow.int64()}
    arrays = {}
    for name in columns.keys() - set(leave_out):
        dtype, shape = FEATURES[name]
        kind = kinds[dtype] if shape == [1] else pyarrow.list_(kinds[dtype], shape[0])
        arrays[name] = pyarrow.array(columns[name], kind)
    table = pyarrow.table(arrays)
    (folder / "data" / "chunk-000").mkdir(parents=True)
    if whole_files:
        file = folder / "data" / "chunk-000" / "file-000.parquet"
        pyarrow.parquet.write_table(table.sort_by([("index", "descending")]), file)
    else:
        for episode, rows in ((1, table.slice(3)), (0, table.slice(0, 3))):
            pyarrow.parquet.write_table(rows, folder / "data" / "chunk-000" / f"episode_{episode:06d}.parquet")
    features = {name: {"dtype": d, "shape": s} for name, (d, s) in FEATURES.items() if name not in leave_out}
    (folder / "meta").mkdir()
    (folder / "meta" / "info.json").write_text(json.dumps({"codebase_version": "v2.1", "features": features}))
    return folder


@pytest.mark.parametrize("whole_files", [False, True], ids=["v2", "v3"])
def test_rows_of_lerobot_by_hand(tmp_path: Path, whole_files: bool) -> None:
    """The first episode succeeds in its last frame; of the second the last frame has no next observation."""
    rows = from_lerobot(write_lerobot(tmp_path / "set", whole_files=whole_files))
    assert rows["observation"].tolist() == [[i, i + 0.5] for i in (0, 1, 2, 3)]
    assert rows["next", "observation"].tolist() == [[i, i + 0.5] for i in (1, 2, 2, 4)]
    assert rows["action"].tolist() == [[-i, 1] for i in (0, 1, 2, 3)]
    assert listed(rows, ("next", "reward"), ("next", "terminated"), ("next", "truncated"), "trajectory") == [
        [0, 0.25, 0.5, 0.75],
        [False, False, True, False],
        [False, False, False, True],
        [0, 0, 0, 1],
    ]


def test_several_observations_of_lerobot_are_a_dictionary_and_a_missing_reward_is_given(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path / "set", leave_out=("next.reward", "next.success", "next.done"))
    rows = from_lerobot(folder, ("observation.state", "observation.force"), reward=0.5)
    assert rows["observation", "force"].tolist() == [[100], [101], [103]]  # no frame is an end that is known
    assert rows["next", "observation", "state"][:, 0].tolist() == [1, 2, 4]
    assert rows["next", "reward"].flatten().tolist() == [0.5] * 3 and not rows["next", "terminated"].any()
    with pytest.raises(ValueError, match=r"lacks the columns \['next.reward', 'observation.image'\].*not decoded"):
        from_lerobot(folder, ("observation.image",))
    done = from_lerobot(write_lerobot(tmp_path / "done", leave_out=("next.success",)))
    assert done["next", "terminated"].flatten().tolist() == [False, False, True, False, True]
    with pytest.raises(FileNotFoundError):
        from_lerobot(tmp_path / "absent")


def test_the_last_frames_of_lerobot_may_be_cut_off(tmp_path: Path) -> None:
    """Also where a success is marked: both episodes go on after their last frame, whose successor is not known."""
    folder = write_lerobot(tmp_path / "set")
    rows = from_lerobot(folder, done="truncated")
    assert rows["observation"][:, 0].tolist() == [0, 1, 3] and rows["next", "observation"][:, 0].tolist() == [1, 2, 4]
    assert listed(rows, ("next", "terminated"), ("next", "truncated")) == [[False] * 3, [False, True, True]]
    with pytest.raises(ValueError, match=r"done is 'ended'.*terminated.*truncated"):
        from_lerobot(folder, done="ended")


def change_table(file: Path, change: Any) -> None:
    pyarrow.parquet.write_table(change(pyarrow.parquet.read_table(file)), file)


def without_row(place: int) -> Any:
    return lambda table: pyarrow.concat_tables([table.slice(0, place), table.slice(place + 1)])


def with_column(name: str, values: Any) -> Any:
    return lambda table: table.set_column(table.column_names.index(name), name, pyarrow.array(values))


NO_FRAMES = r"frames of .* do not follow each other by index, episode_index and frame_index; .*fill the replay with one"
TABLES: dict[str, tuple[Any, str]] = {
    "a frame is missing": (without_row(2), NO_FRAMES),
    "the last frame is missing": (without_row(14), "episode 2 of .* has 5 frames, and meta describes 6"),
    "the first frame is missing": (without_row(0), "episode 0 of .* has 4 frames, and meta describes 5"),
    "frames are there twice": (lambda table: pyarrow.concat_tables([table, table.slice(3, 4)]), NO_FRAMES),
    "an index is there twice": (with_column("index", [0, *range(14)]), NO_FRAMES),
    "an index of two episodes": (with_column("index", [*range(5), *range(4, 14)]), NO_FRAMES),
    "frame_index has a gap": (with_column("frame_index", [*range(4), 5, *range(4), *range(6)]), NO_FRAMES),
    "a number of an episode is there twice": (with_column("episode_index", 5 * [0] + 4 * [1] + 6 * [0]), NO_FRAMES),
    "an episode is not described": (with_column("episode_index", 5 * [0] + 4 * [1] + 6 * [7]), "episode 7 of .* None"),
    "lists of two lengths": (
        with_column("observation.state", [[1.0, 2.0, 3.0] if i % 2 else [1.0] for i in range(14)] + [[1.0, 2.0]]),
        r"observation.state of .* holds nulls, or lists of the lengths \[\[1, 3, 2\]\], and .* the shape \[2\]",
    ),
    "a list of another length": (
        with_column("observation.state", [[1.0] * 3] * 15),
        r"'observation.state.list.element': 45.* describes 120 in all; give a whole data set",
    ),
    "a null among lists": (with_column("action", [None, *[[1.0]] * 14]), "action of .* holds nulls"),
    "a null among numbers": (with_column("next.reward", [None, *[1.0] * 14]), "next.reward of .* holds nulls"),
    "texts": (with_column("action", ["a"] * 15), "action of .* holds texts or bytes; give numbers"),
    "a column is missing": (
        lambda table: table.drop_columns(["action"]),
        "(?s)cannot be read .*action.*give a whole data set",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_lerobot_that_are_not_as_described_are_refused(name: str, tmp_path: Path) -> None:
    change, sentence = TABLES[name]
    change_table(recordings.write_lerobot(tmp_path, "v3.0") / "data" / "chunk-000" / "file-000.parquet", change)
    with pytest.raises(ValueError, match=sentence):
        from_lerobot(tmp_path)


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
def test_lerobot_is_compared_with_its_description(layout: str, tmp_path: Path) -> None:
    folder = recordings.write_lerobot(tmp_path, layout)
    place = folder / "meta" / "info.json"
    info = json.loads(place.read_text())
    for key, lower in (("total_frames", 14), ("total_episodes", 2)):
        place.write_text(json.dumps(info | {key: lower}))
        with pytest.raises(ValueError, match=rf"holds {lower + 1} where its {key} is {lower}; give a data set of one"):
            from_lerobot(folder)
        place.write_text(json.dumps(info | {key: 100}))
        with pytest.warns(UserWarning, match=rf"holds {lower + 1} where its {key} is 100; the rest is left out"):
            assert recordings.wrong_rows(from_lerobot(folder)) == 0
    place.write_text(json.dumps(info))
    if layout == "v2.1":
        lines = (folder / "meta" / "episodes.jsonl").read_text().replace('"length": 4', '"length": 3')
        (folder / "meta" / "episodes.jsonl").write_text(lines)
    else:
        change_table(folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet", with_column("length", [5, 3, 6]))
    with pytest.raises(ValueError, match="episode 1 of .* has 4 frames, and meta describes 3; give a whole data set"):
        from_lerobot(folder)


@pytest.mark.parametrize("renumbered", ["nothing", "episodes", "indices", "both"])
def test_two_recordings_in_a_folder_are_not_joined(renumbered: str, tmp_path: Path) -> None:
    """No rows of one are the next ones of the other; if both are renumbered, they are one recording."""
    folder = write_lerobot(tmp_path / "set", whole_files=True)
    file = folder / "data" / "chunk-000" / "file-000.parquet"
    table = pyarrow.parquet.read_table(file)
    for name, kinds, by in (("episode_index", ("episodes", "both"), 2), ("index", ("indices", "both"), 5)):
        if renumbered in kinds:
            table = with_column(name, [number + by for number in table[name].to_pylist()])(table)
    other = pyarrow.array(
        [[x + 100, y] for x, y in table["observation.state"].to_pylist()], table["observation.state"].type
    )
    table = with_column("observation.state", other)(table)
    pyarrow.parquet.write_table(table, file.with_name("file-001.parquet"))
    if renumbered == "both":
        assert from_lerobot(folder)["next", "observation"][:, 0].tolist() == [1, 2, 2, 4, 101, 102, 102, 104]
    else:
        with pytest.raises(ValueError, match=NO_FRAMES):
            from_lerobot(folder)


def test_a_folder_without_parquet_files_and_a_broken_description_are_named(tmp_path: Path) -> None:
    folder = recordings.write_lerobot(tmp_path, "v3.0")
    (folder / "data" / "chunk-000" / "file-000.parquet").unlink()
    with pytest.raises(ValueError, match=r"data holds no parquet file; give a whole data set of LeRobot, of layout v2"):
        from_lerobot(folder)
    for content in ("{}", "[" * 100_000, '{"features": {"action": []}}', "no JSON"):
        (folder / "meta" / "info.json").write_text(content)
        with pytest.raises(
            ValueError, match=r"cannot be read \(\w+: .*; give a whole data set of LeRobot, of layout v2"
        ):
            from_lerobot(folder)


def torchrl_rows(count: int = 6) -> TensorDict:
    """As TorchRL's collectors give them, flags of the step before and other columns included."""
    number = torch.arange(count, dtype=torch.float64)
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[[2, 4]] = True
    terminated = done.clone()
    terminated[4] = False
    following = {"observation": number[:, None] + 1, "reward": 2 * number, "done": done, "terminated": terminated}
    following |= {"step_count": torch.ones(count, 1)}
    rows = {"observation": number[:, None], "action": torch.zeros(count, dtype=torch.int32), "next": following}
    return TensorDict(rows | {"done": ~done, "step_count": torch.zeros(count, 1)}, [count])


@pytest.mark.parametrize("kind", ["rows", "list", "storage", "buffer", "full"])
def test_rows_of_torchrl_from_every_source(kind: str) -> None:
    source: Any = torchrl_rows()
    if kind == "list":
        source, rows = ListStorage(10), source
        TensorDictReplayBuffer(storage=source, batch_size=2).extend(rows)
    elif kind != "rows":
        rows = source
        source = TensorDictReplayBuffer(storage=LazyTensorStorage(6 if kind == "full" else 10), batch_size=2)
        if kind == "full":  # the oldest rows do not lie in the first slots
            source.extend(rows[:2])
        source.extend(rows)
        source = source.storage if kind == "storage" else source
    rows = from_torchrl(source)
    assert {*rows.keys(True, True)} == {
        *("observation", "action", "trajectory", ("next", "observation"), ("next", "reward")),
        *(("next", name) for name in ("terminated", "truncated", "done")),
    }
    assert rows["observation"].dtype == torch.float32 and rows["action"].dtype == torch.int64
    assert listed(rows, "observation", ("next", "observation"), ("next", "reward"), "trajectory") == [
        [0, 1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5, 6],
        [0, 2, 4, 6, 8, 10],
        [0, 0, 0, 1, 1, 2],
    ]
    assert listed(rows, ("next", "terminated"), ("next", "truncated")) == [
        [False, False, True, False, False, False],
        [False, False, False, False, True, False],
    ]


def test_named_episodes_and_several_observations_of_torchrl() -> None:
    rows = torchrl_rows().set(("collector", "traj_ids"), torch.tensor([7, 8, 7, 8, 8, 7]))
    rows["pixels"] = rows["next", "pixels"] = torch.zeros(6, 2, 2, 3, dtype=torch.uint8)
    found = from_torchrl(rows, ("observation", "pixels"))
    assert found["trajectory"].tolist() == [7, 8, 7, 8, 8, 7]
    assert found["next", "observation", "pixels"].shape == (6, 2, 2, 3)
    with pytest.raises(ValueError, match=r"the rows lack 'state', \('next', 'state'\); they have .*'action'.*by obs"):
        from_torchrl(rows, ("state",))
    with pytest.raises(ValueError, match=r"single steps, and these have the batch size \[3\] each\. .*transpose"):
        from_torchrl(torchrl_rows().reshape(2, 3))
    with pytest.raises(ValueError, match="holds no rows"):
        from_torchrl(LazyTensorStorage(10))
    with pytest.raises(ValueError, match=r"observations is \[\]; it must be at least one key"):
        from_torchrl(rows, [])
    with pytest.raises(TypeError, match=r"source is 3; it must be a storage"):
        from_torchrl(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["buffer", "storage"])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_storages_of_two_dimensions_are_refused_in_a_sentence_that_helps(kind: str, rounds: int) -> None:
    """Of two environments; the storage has room for six steps of each, and blocks are of three."""
    number = torch.arange(9) + 100 * torch.arange(2)[:, None]
    flags = torch.zeros(2, 9, 1, dtype=torch.bool)
    following = {"observation": number[..., None] + 1.0, "reward": torch.ones(2, 9, 1), "done": flags}
    columns = {"observation": number[..., None] + 0.0, "action": torch.zeros(2, 9, 1), "next": following}
    rows = TensorDict(columns | {"episode": torch.arange(2)[:, None].expand(2, 9)}, [2, 9])
    source: Any = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=2)
    for block in range(rounds):
        source.extend(rows[:, 3 * block : 3 * block + 3])
    storage = source.storage
    with pytest.raises(ValueError, match=r"size \[2\] each\. Give storage\[:\]\.transpose\(0, 1\)\.reshape\(-1\)"):
        from_torchrl(storage if kind == "storage" else source)
    found = from_torchrl(storage[:].transpose(0, 1).reshape(-1))
    assert torch.equal(found["next", "observation"], found["observation"] + 1)
    held = min(3 * rounds, 6)
    assert found["trajectory"].tolist() == held * [0] + held * [1]
    replay = fill(recipes.uniform(capacity=100, batch_size=2, n_steps=2, seed=0), found)
    follows = replay.successors(torch.arange(2 * held)) >= 0
    assert int(follows.sum()) == 2 * (held - 1) - 2 * (rounds == 3)  # the newest row does not go on in the oldest one


def test_texts_of_torchrl_are_left_out() -> None:
    rows = torchrl_rows()
    rows["task"] = NonTensorStack(*["go"] * 6)
    assert from_torchrl(rows)["observation"].shape == (6, 1)
    source = TensorDictReplayBuffer(storage=LazyTensorStorage(6), batch_size=2)
    source.extend(rows)
    assert from_torchrl(source)["observation"].shape == (6, 1)
    with pytest.raises(ValueError, match="observation .*an array of numbers|observation is of .*arrays of numbers"):
        from_torchrl(rows.set(("next", "task"), rows["task"]), ["task"])


def test_a_replay_is_filled_with_episodes_of_numbers_of_their_own() -> None:
    replay = recipes.uniform(capacity=13, batch_size=2, seed=0)
    assert fill(replay, from_torchrl(torchrl_rows())) is replay
    fill(replay, from_torchrl(torchrl_rows()))
    rows = replay[:]
    assert rows["trajectory"].tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 4, 4, 5]
    ends = [False, False, True, False, True, True]  # the last one broke off
    assert rows["next", "done"].flatten().tolist() == 2 * ends
    with pytest.raises(ValueError, match=r"capacity 13 and holds 12 rows; 6 more would evict some. Give capacity=18"):
        fill(replay, from_torchrl(torchrl_rows()))
    assert len(replay) == 12
    with pytest.raises(TypeError, match="of a MixedReplay its offline or online"):
        fill(recipes.mixed(online=recipes.uniform(10), offline=replay, batch_size=2), torchrl_rows())
    with pytest.raises(TypeError, match="rows is 3; it must be a TensorDict"):
        fill(replay, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="replay is None"):
        fill(None, torchrl_rows())  # type: ignore[arg-type]
    named = torchrl_rows().set(("collector", "traj_ids"), torch.tensor([0, 0, 0, 1, 1, 2]))
    twice = fill(fill(recipes.uniform(capacity=12, batch_size=2, seed=0), named), named)
    assert twice[:]["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 4, 4, 5]


@pytest.mark.parametrize("named", [True, False])
def test_refused_rows_leave_running_episodes_as_they_are(named: bool) -> None:
    replay, rows = recipes.prioritized(capacity=20, batch_size=2, n_steps=2, seed=0), numbered_steps(0, 6)
    if named:
        rows["trajectory"] = torch.zeros(6, dtype=torch.int64)
    replay.extend(rows[:3])
    wrong = rows[3:].set("observation", rows["observation"][3:].double())
    with pytest.raises(ValueError, match="columns of the first ones"):
        fill(replay, wrong)
    assert not replay[:]["next", "done"].any()
    assert replay.successors(torch.arange(3)).tolist() == [1, 2, -1]
    replay.extend(rows[3:])
    assert replay.successors(torch.arange(6)).tolist() == [1, 2, 3, 4, 5, -1]
    fill(replay, rows)
    assert replay[:]["next", "done"].flatten().nonzero().flatten().tolist() == [5, 11]
    assert replay.successors(torch.arange(12)).tolist() == [1, 2, 3, 4, 5, -1, 7, 8, 9, 10, 11, -1]
