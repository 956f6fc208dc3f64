# SPDX-License-Identifier: Apache-2.0
"""Saves written by hand, whose checksums fit: nothing that stands in them ends in more than a refusal."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_replay import PackedStorage, free_memory, load_replay, recipes, save_replay
from lightning_replay.inspection.saves import read_buffers
from lightning_replay.levels import LevelBuffer, LevelSampler
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.retention.eviction import LeavingOrder
from lightning_replay.saving import DamagedFileError, chunks, read_state, write_state
from lightning_replay.saving.spec import NotRebuildableError
from lightning_replay.tables.tables import Tables
from tests import level_steps
from tests.attack.states import fingerprint
from tests.attack.worlds import World
from tests.recipe_options import built, fitting
from tests.saves import forge
from tests.transitions import numbered_steps


def forge_values(file: Path, change: Callable[[Any], Any]) -> None:
    """Changes the values of a save in the folder of its manifest, and makes the checksums fit."""
    manifest = json.loads(file.read_text())
    values = file.parent / manifest["data"] / "values.json"
    values.write_text(json.dumps(change(json.loads(values.read_text()))))
    forge(file, files=manifest["files"] | {"values.json": chunks.fingerprint(values)._asdict()})


STRANGE = (None, -1, 10**15, 10**30, 1.5, True, "x", [], {})
# That count as they are built.
OPTIONS = {"min_priority", "rule", "priority_exponent", "importance_exponent", "priority_offset"}
KINDS = ["uniform", "prioritized", "event_tables", "surprise_retention", "levels"]


def levels_of(**options: Any) -> LevelBuffer:
    return level_steps.buffer(20, seed=0, **options)


def saved(kind: str, folder: Path) -> tuple[Path, Callable[[Path], Any]]:
    """Saves a used buffer; its manifest, and what loads the save."""
    if kind == "levels":
        levels = levels_of()
        for score in (0.25, 0.5, 0.75):
            level_steps.play(levels, levels.next_level(0), score)
        levels.next_level(1)
        levels.save(folder)
        return folder / "state.json", _loaded_levels
    replay = built(kind, capacity=12, batch_size=4, seed=0)
    for first in range(0, 20, 5):
        replay.extend(fitting(replay, numbered_steps(first, 5)))
        replay.update_priority(replay.sample(), torch.arange(4.0))
    save_replay(replay, folder)
    return folder / "replay.json", load_replay


def _loaded_levels(folder: Path) -> LevelBuffer:
    levels = levels_of()
    before = fingerprint(levels.state_dict())
    try:
        levels.load(folder)
    except Exception:
        assert fingerprint(levels.state_dict()) == before, "a load that was refused left a trace"
        raise
    return levels


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where anything stands in nested dictionaries and lists."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*place, key)
        yield from places_in(item, (*place, key))


def with_other(value: Any, place: tuple[Any, ...], other: Any) -> Any:
    changed = copy.deepcopy(value)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = other
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_entry_of_a_manifest_is_believed(kind: str, tmp_path: Path) -> None:
    """What loads is the same buffer, or was built with an option that its class accepts and the state goes with."""
    file, load = saved(kind, tmp_path)
    whole = json.loads(file.read_text())
    expected = fingerprint(load(tmp_path).state_dict())
    for place in places_in({key: value for key, value in whole.items() if key != "checksum"}):
        for other in STRANGE:
            file.write_text("{}")
            forge(file, **with_other(whole, place, other))
            try:
                state = load(tmp_path).state_dict()
            except (DamagedFileError, NotRebuildableError):
                continue
            except ValueError as error:
                assert place == ("version",) and "Install a newer lightning-replay" in str(error), (place, other)
            except MemoryError as error:
                assert "bytes are needed for" in str(error), (place, other)
            else:
                assert fingerprint(state) == expected or OPTIONS & set(place), (place, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_entry_of_the_values_ends_in_an_error_of_another_kind(kind: str, tmp_path: Path) -> None:
    file, load = saved(kind, tmp_path)
    values = tmp_path / json.loads(file.read_text())["data"] / "values.json"
    whole = json.loads(values.read_text())
    for number, place in enumerate(places_in(whole)):
        other = STRANGE[number % len(STRANGE)]
        forge_values(file, lambda _, place=place, other=other: with_other(whole, place, other))
        try:
            load(tmp_path)
        except DamagedFileError:
            continue
        except ValueError as error:
            assert kind == "levels", (place, error)


@pytest.mark.parametrize("kind", ["uniform", "levels"])
@pytest.mark.parametrize(
    "text", ["{}", "[]", "3", '{"version": 1}', "[" * 100_000, '{"a":' * 100_000, "", "\0"], ids=len
)
def test_what_is_no_manifest_at_all_is_damaged(kind: str, text: str, tmp_path: Path) -> None:
    file, load = saved(kind, tmp_path)
    file.write_text(text)
    with pytest.raises(DamagedFileError, match="damaged"):
        load(tmp_path)


def nested(depth: int) -> Any:
    value: Any = 3
    for _ in range(depth):
        value = {"tuple": [value]}
    return value


@pytest.mark.parametrize(
    "built_by",
    [
        nested(400),
        {"class": "lightning_replay.replay:Replay"},
        {"class": "lightning_replay.replay:Replay", "arguments": []},
        {"class": "lightning_replay.replay:Replay", "arguments": {"storage": nested(3)}},
        {"class": "lightning_replay.schedules:Linear", "arguments": {"start": 0.0, "end": 1.0, "duration": 5}},
        {"import": "lightning_replay.samplers:mixture"},
        {"tuple": 3},
        {"dict": []},
        {"device": "nowhere"},
        {"class": 3},
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_description_of_something_else_is_damaged(built_by: Any, tmp_path: Path) -> None:
    file, load = saved("uniform", tmp_path)
    forge(file, built_by=built_by)
    with pytest.raises(DamagedFileError, match="does not describe the buffer"):
        load(tmp_path)


@pytest.mark.parametrize("shape", [[2**32, 2**32], [10**15], [-1024, -1024], [2**31, 2**32, 2], [2**64], ["12"], 12])
def test_a_tensor_of_another_size_than_its_files_takes_no_memory(shape: Any, tmp_path: Path) -> None:
    """The product of the first shape is 2^64, which is 0 in 64 bits."""
    write_state(tmp_path, {"rows": torch.zeros(1 << 20, dtype=torch.uint8)})
    file = tmp_path / "state.json"
    for changed in ({"shape": shape}, {"shape": shape, "files": []}):

        def change(content: Any, changed: Any = changed) -> Any:
            content["chunked"]["rows"] |= changed
            return content

        forge_values(file, change)
        with pytest.raises(DamagedFileError, match="chunks of rows"):
            read_state(tmp_path)


@pytest.mark.parametrize("name", ["..", ".", "", "/", "../..", "a/..", 3, None])
@pytest.mark.parametrize("has_locks", [True, False])
def test_a_manifest_names_no_other_folder(name: Any, has_locks: bool, tmp_path: Path, monkeypatch) -> None:
    """It is not read, and not removed by the next save, which without locks removes what the last one named."""
    if not has_locks:
        monkeypatch.setattr("lightning_replay.saving.directory.fcntl", None)
    folder = tmp_path / "folder" / "save"
    write_state(folder, {"a": 1})
    (folder.parent / "mine").touch()
    forge(folder / "state.json", data=name)
    with pytest.raises(DamagedFileError, match="names no folder of data"):
        read_state(folder)
    write_state(folder, {"a": 2})
    assert read_state(folder) == {"a": 2} and (folder.parent / "mine").exists()


@pytest.mark.parametrize(
    ("take", "num_bytes"),
    [
        (lambda: PriorityTree(10**8, backend="numba"), 400_000_000),
        (lambda: PriorityTree(10**8, backend="torch"), 400_000_000),
        (lambda: LeavingOrder(10**8), 800_000_000),
        (lambda: Tables({"a": 10**7, "b": 10**7}, extra_slots=10), 160_000_000 + 28 * 20_000_010),
        (lambda: recipes.prioritized(10**15, 4), 4 * 10**15),
    ],
    ids=["numba", "torch", "order", "tables", "recipe"],
)
def test_what_does_not_fit_is_refused_before_memory_is_taken(take, num_bytes: int, monkeypatch) -> None:
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: 10**8)
    with pytest.raises(MemoryError, match=f"{num_bytes:,} bytes are needed for .*, and 100,000,000 are free on cpu"):
        take()


def parts() -> dict[str, Callable[[], Any]]:
    """What is written by ``dumps`` and read by ``loads``, used a little."""

    def of(kind: str, name: str) -> Callable[[], Any]:
        def build() -> Any:
            replay = built(kind, capacity=12, batch_size=4, seed=0)
            replay.extend(fitting(replay, numbered_steps(0, 9)))
            return getattr(replay, name)

        return build

    samplers = {f"sampler of {kind}": of(kind, "sampler") for kind in sorted(recipes.known())}
    kinds = ("uniform", "event_tables", "parallel_curriculum", "surprise_retention")
    writers = {f"writer of {kind}": of(kind, "writer") for kind in kinds}
    levels = {"levels": levels_of, "sampler of levels": LevelSampler}
    return samplers | writers | levels | {"storage": of("uniform", "storage")}


@pytest.mark.parametrize("build", list(parts().values()), ids=list(parts()))
def test_every_parts_save_is_replaced_as_a_whole_and_refused_if_it_is_anothers(build, tmp_path, monkeypatch) -> None:
    part = build()
    dumps, loads = (part.save, part.load) if isinstance(part, LevelBuffer) else (part.dumps, part.loads)
    dumps(tmp_path)
    before = fingerprint(part.state_dict())

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as now, pytest.raises(OSError, match="No space left"):
        now.setattr("os.replace", full)
        dumps(tmp_path)
    loads(tmp_path)
    if not isinstance(part, PackedStorage):  # whose rows are of a later generation after a load
        assert fingerprint(part.state_dict()) == before
    write_state(tmp_path, {"something": torch.zeros(3)})
    with pytest.raises((DamagedFileError, ValueError)):
        loads(tmp_path)


@pytest.mark.parametrize(
    ("place", "other", "error"),
    [
        (["writer", "$dict"], {}, "KeyError"),
        (["sampler", "$dict"], {}, "KeyError"),
        (["sampler", "$dict", "rows_drawn"], 10**30, "OverflowError"),
        (["feedback"], 3, "TypeError"),
        (["storage", "$dict"], {}, "KeyError"),
        (["storage", "$dict", "layout"], 3, "TypeError"),
        (["prefetched"], [3], "TypeError"),
    ],
    ids=str,
)
def test_a_state_of_other_parts_is_refused_by_a_buffer_and_changes_nothing(place, other, error, tmp_path: Path) -> None:
    replay = built("event_tables", capacity=12, batch_size=4, seed=0)
    replay.extend(numbered_steps(0, 9))
    replay.save(tmp_path)
    before = fingerprint(replay.state_dict())
    forge_values(tmp_path / "replay.json", lambda content: with_other(content, ("state", "$dict", *place), other))
    with pytest.raises(DamagedFileError, match=rf"is not one of what it is loaded into \({error}.*nothing was loaded"):
        replay.load(tmp_path)
    assert fingerprint(replay.state_dict()) == before


def test_a_chunk_that_is_named_twice_takes_no_memory(tmp_path: Path) -> None:
    write_state(tmp_path, {"rows": torch.zeros(1 << 20, dtype=torch.uint8)})

    def change(content: Any) -> Any:
        rows = content["chunked"]["rows"]
        return content | {"chunked": {"rows": rows | {"shape": [1 << 22], "files": rows["files"] * 4}}}

    forge_values(tmp_path / "state.json", change)
    with pytest.raises(DamagedFileError, match="named twice"):
        read_state(tmp_path)


def test_another_capacity_is_refused_before_a_buffer_is_built(tmp_path: Path, monkeypatch) -> None:
    file, load = saved("surprise_retention", tmp_path)
    built_by = json.loads(file.read_text())["built_by"]
    built_by["arguments"]["storage"]["arguments"]["capacity"] = 10**8
    forge(file, built_by=built_by)
    monkeypatch.setattr("lightning_replay.loading.build", lambda *args, **options: pytest.fail("it was built"))
    with pytest.raises(DamagedFileError, match="capacity is 100000000, and the state has 12"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["frame_shape", "image_keys", "live", "rows", "frames"])
def test_frames_that_do_not_fit_their_rows_are_refused(name: str) -> None:
    def buffer() -> Any:
        return recipes.uniform(12, 4, frame_stack=2, frame_capacity=30, seed=0)

    replay, other = buffer(), buffer()
    replay.extend(World(1, has_frames=True).take(9))
    state = replay.state_dict()
    storage = state["storage"]
    storage |= {
        "frame_shape": {"frame_shape": [[2**44, 4]]},
        "image_keys": {"image_keys": []},
        "live": {"live": torch.tensor([-1])},
        "rows": {"rows": torch.full_like(storage["rows"], 2**62 + 2**30)},
        "frames": {"frames": None},
    }[name]
    with pytest.raises(ValueError, match="load another save"):
        other.load_state_dict(state)
    assert not len(other)


def test_an_inspection_makes_no_array_as_long_as_a_file_says(tmp_path: Path) -> None:
    file, _ = saved("event_tables", tmp_path)
    for tables in ([["default", 10**12]], [["default", 2 * 10**12], ["goal", -(10**12)]]):

        def change(content: Any, tables: Any = tables) -> Any:
            return with_other(content, ("state", "$dict", "built_from", "$dict", "tables"), tables)

        forge_values(file, change)
        with pytest.raises(DamagedFileError, match="do not have the entries"):
            [*read_buffers(tmp_path)]
