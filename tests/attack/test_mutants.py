# SPDX-License-Identifier: Apache-2.0
"""Every attack finds the defect that it is for, once the part that prevents it is taken out."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import pytest

import lightning_replay.datasets
from lightning_replay.replay import Replay
from lightning_replay.replay_parts import ReplayParts
from lightning_replay.saving import directory, snapshot, spec
from lightning_replay.saving import states as state
from tests.attack import datasets, endurance, flips, histories, kills, names, neighbors, overlaps, threads
from tests.attack.report import Report
from tests.attack.subjects import LevelsSubject, ReplaySubject
from tests.attack.variants import VARIANTS, Variant
from tests.recordings import RECORDINGS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def finds(report: Report, text: str) -> None:
    assert any(text in one for one in report.findings), report


def test_histories_find_a_refused_call_that_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayParts, "undone_if_refused", lambda self: nullcontext())
    variants = [variant for variant in VARIANTS if variant.has_functions and variant.recipe == "surprise_retention"]
    finds(histories.attack(seed=1, count=100, variants=variants * 3), "left a trace")


def test_histories_find_feedback_for_a_row_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Replay.update_priority

    def without_generation(self: Replay, index: Any, td_error: Any = None, **more: Any) -> None:
        more.pop("generation", None)
        update(self, index if not hasattr(index, "batch_size") else index["index"], td_error, **more)

    monkeypatch.setattr(Replay, "update_priority", without_generation)
    finds(histories.attack(seed=1, count=60, variants=[Variant("prioritized", ())] * 5), "late updates were dropped")


@pytest.mark.parametrize("kind", [ReplaySubject, LevelsSubject])
def test_kills_find_a_save_written_over_the_one_before(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write = state.write_data

    def over_the_old(save: directory.NewSave, *more: Any) -> Any:
        for old in save.data.parent.glob(f"{save.data.name[:-12]}*"):
            if old.is_dir() and old != save.data:
                shutil.rmtree(old)
        time.sleep(0.02)
        return write(save, *more)

    monkeypatch.setattr(state, "write_data", over_the_old)
    monkeypatch.setattr("lightning_replay.saves.write_data", over_the_old)
    finds(kills.attack(kind, seed=1, kills=30), "leaves nothing")


def test_kills_find_what_killed_saves_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_remove_marked", lambda *which: None)
    finds(kills.attack(LevelsSubject, seed=1, kills=10), "left files")


def test_neighbors_find_a_folder_that_is_removed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_replay.saving.files.is_saved", lambda name: True)
    monkeypatch.setattr("lightning_replay.saving.folders.is_saved", lambda name: True)
    report = neighbors.attack(seed=4, count=3)
    finds(report, "in /")
    finds(report, "in memory://")
    finds(report, "removed")


def test_neighbors_find_a_file_that_is_taken_for_a_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "is_manifest", lambda file: file.exists())
    finds(neighbors.attack(seed=1, count=3), "removed replay_shards.json")


def test_damages_find_a_manifest_that_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "checksum_of", lambda manifest: "the same")
    finds(flips.attack(lambda folder: ReplaySubject(folder, 1), "replay", count=600), "")


def test_damages_find_files_that_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "check_file", lambda file, record: None)
    finds(flips.attack(lambda folder: LevelsSubject(folder, 1), "levels", count=100), "loads with other behaviour")


def test_forged_names_find_packages_that_are_trusted_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "_check_trusted", lambda module, name, path, trusted: None)
    finds(names.attack_recipes(seed=1, count=300, variants=[]), "trap was called")


@pytest.mark.parametrize("layout", ["d4rl", "minari hdf5"])
def test_hostile_data_sets_find_links_that_are_followed(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_columns(file: Any) -> dict[str, Any]:
        return {name: file[name] for name in file if isinstance(file[name], h5py.Dataset)}

    monkeypatch.setattr("lightning_replay.datasets.own_columns", all_columns)
    finds(datasets.attack(RECORDINGS[layout], seed=1, count=400), "another file was read")


@pytest.mark.parametrize("layout", ["lerobot v2", "minari arrow"])
def test_hostile_data_sets_find_pipes_that_are_read(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_replay.datasets.files_below", lambda data_set, folder: sorted(folder.rglob("*.*")))
    monkeypatch.setattr(datasets, "PATIENCE", 1)
    monkeypatch.setattr(datasets.Stranger, "device", datasets.Stranger.pipe)  # a device fills the memory
    finds(datasets.attack(RECORDINGS[layout], seed=1, count=50), "is waited for")


def test_hostile_data_sets_find_environments_that_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = {"observation_space": "", "action_space": ""}
    described = lightning_replay.datasets._minari_description
    monkeypatch.setattr("lightning_replay.datasets._minari_description", lambda place: described(place) | spaces)
    finds(datasets.attack(RECORDINGS["minari hdf5"], seed=1, count=200), "names was built")


def test_hostile_data_sets_find_recordings_that_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_replay.datasets._check_frames", lambda *frames: None)
    finds(datasets.attack(RECORDINGS["lerobot v3"], seed=1, count=150), "were not recorded")


def test_overlaps_find_savers_that_do_not_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def nothing(place: Path) -> Iterator[bool]:
        yield True

    monkeypatch.setattr(directory, "exclusive", nothing)
    assert overlaps.attack(overlaps.Scores, seconds=3.0).findings


def test_threads_find_rows_that_are_not_kept_for_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot.Snapshots, "keep", lambda self, slots: None)
    finds(threads.attack(seed=1, seconds=20.0, variants=[Variant("uniform", ())]), "beside others")


def test_threads_find_locks_that_a_fork_leaves_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replay, "after_fork", lambda self: None)
    monkeypatch.setattr(threads, "PATIENCE", 3.0)
    finds(threads.attack(seed=1, seconds=20.0, variants=[Variant("uniform", ())]), "a forked process")


def test_endurance_finds_what_is_kept_of_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    extend, kept = Replay.extend, []

    def keeping(self: Replay, rows: Any) -> Any:
        kept.append(rows.clone())
        return extend(self, rows)

    monkeypatch.setattr(Replay, "extend", keeping)
    finds(endurance.attack("uniform()", rows=60_000), "bytes more")
