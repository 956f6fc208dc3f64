# SPDX-License-Identifier: Apache-2.0
"""Data sets that a stranger made: none may run code, read another file, wait, or give rows that were not recorded."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
from tensordict import TensorDict

from lightning_replay.dataset_files import DatasetError
from tests.attack.report import Report
from tests.recordings import Recording, wrong_rows

PATIENCE = 30  # seconds; a pipe is waited for without end
SECRET = 4242.0
SENTENCES = (DatasetError, FileNotFoundError, MemoryError)
# What a stranger writes in place of a value of a description.
VALUES = (
    -1,
    0,
    10**12,
    1.5,
    "",
    "../../secret",
    [],
    [10**6] * 3,
    {},
    None,
    True,
    "video",
    "tests.attack.datasets:Trap",
)
SPEC = {"id": "Trap-v0", "entry_point": "tests.attack.datasets:Trap", "additional_wrappers": [], "kwargs": {}}
called: list[str] = []


class Trap(gymnasium.Env):
    """An environment that a data set names."""

    def __init__(self) -> None:
        called.append("the environment that a data set names was built")


class Late(BaseException):
    """No ``Exception``, which a reader would put into a sentence."""


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Stranger:
    """Changes one file of a data set at a time."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random, self.place, self.secrets = random.Random(seed), folder / "set", folder / "secret"
        self.secrets.mkdir()
        numbers = np.full((100, 2), SECRET, np.float32)
        (self.secrets / "raw").write_bytes(numbers.tobytes())
        with h5py.File(self.secrets / "secret.hdf5", "w") as file:
            for name in ("observations", "actions", "rewards", "terminals", "timeouts"):
                file[name] = numbers[:15]
        table = pyarrow.table({"observation.state": numbers[:15].tolist(), "index": range(100, 115)})
        pyarrow.parquet.write_table(table, self.secrets / "secret.parquet")
        (self.secrets / "secret.json").write_text("{}")

    def change(self) -> str:
        files = sorted(path for path in self.place.rglob("*") if path.is_file())
        file = self.random.choice(files)
        ways = [self.flip, self.cut, self.pipe, self.device, self.link_out, self.link_folder, self.exchange]
        special = {".hdf5": self.array, ".parquet": self.column, ".json": self.value, ".jsonl": self.value}
        if file.suffix in special:
            ways += 7 * [special[file.suffix]]
        way = self.random.choice(ways)
        return f"{way.__name__} {file.relative_to(self.place)}{way(file) or ''}"

    def flip(self, file: Path) -> None:
        content = bytearray(file.read_bytes())
        for _ in range(self.random.choice([1, 1, 20])):
            content[self.random.randrange(len(content))] = self.random.randrange(256)
        file.write_bytes(bytes(content))

    def cut(self, file: Path) -> None:
        file.write_bytes(file.read_bytes()[: self.random.randrange(file.stat().st_size)])

    def pipe(self, file: Path) -> None:
        file.unlink()
        os.mkfifo(file)

    def device(self, file: Path) -> None:
        file.unlink()
        file.symlink_to("/dev/zero")

    def link_out(self, file: Path) -> None:
        file.unlink()
        file.symlink_to(self.secrets / f"secret{file.suffix}")

    def link_folder(self, file: Path) -> None:
        (file.parent / "again").symlink_to(self.random.choice([file.parent, self.secrets]))

    def exchange(self, file: Path) -> None:
        others = [path for path in self.place.rglob(f"*{file.suffix}") if path != file]
        shutil.copy(self.random.choice([*others, self.secrets / "raw"]), file)

    def array(self, file: Path) -> str:
        """Puts something else in place of an array of an HDF5 file."""
        with h5py.File(file, "a") as content:
            names: list[str] = []
            content.visit(names.append)
            name = self.random.choice([name for name in names if isinstance(content[name], h5py.Dataset)])
            before = content[name][()]
            del content[name]
            secret = self.secrets / "secret.hdf5"
            shape = before.shape
            kind = self.random.choice(
                ["link", "soft", "loop", "raw", "virtual", "group", "short", "long", "text", "sparse"]
            )
            if kind == "link":
                content[name] = h5py.ExternalLink(secret, "observations")
            elif kind in ("soft", "loop"):
                content[name] = h5py.SoftLink(f"/{name if kind == 'loop' else names[0]}")
            elif kind == "raw":
                content.create_dataset(name, shape, "f4", external=[(self.secrets / "raw", 0, 400)])
            elif kind == "virtual":
                layout = h5py.VirtualLayout(shape, "f4")
                layout[...] = h5py.VirtualSource(secret, "observations", shape)
                content.create_virtual_dataset(name, layout)
            elif kind == "group":
                content[f"{name}/state"] = before
            elif kind == "sparse":
                content.create_dataset(name, (10**12,), "f4", chunks=(1_024,))
            else:
                content[name] = {"short": before[:-1], "long": np.concatenate([before, before]), "text": ["a"] * 15}[
                    kind
                ]
            return f" {name}: {kind}"

    def column(self, file: Path) -> str:
        """Puts something else in place of a column of a parquet file, or of its rows."""
        table = pyarrow.parquet.read_table(file)
        name = self.random.choice(table.column_names)
        values = table[name].to_pylist()
        place = self.random.randrange(len(values))
        kind = self.random.choice(
            ["null", "ragged", "shifted", "text", "dropped", "twice", "reversed", "hole", "moved"]
        )
        if kind == "dropped":
            table = table.drop_columns([name])
        elif kind == "twice":
            table = pyarrow.concat_tables([table, table])
        elif kind == "reversed":
            table = table.take(list(range(len(values)))[::-1])
        elif kind == "hole":
            table = pyarrow.concat_tables([table.slice(0, place), table.slice(place + 1)])
        elif kind == "moved":  # a second recording, of other numbers, but numbered as this one
            moved = pyarrow.array([[700.0 + number, 7.0] for number in range(len(values))])
            more = table
            if "observation.state" in table.column_names:
                more = table.set_column(table.column_names.index("observation.state"), "observation.state", moved)
            pyarrow.parquet.write_table(more, file.with_name("more.parquet"))
        else:
            if kind == "null":
                values[place] = None
            elif kind == "ragged":
                values[place] = values[place][:-1] if isinstance(values[place], list) else values[place]
            elif kind == "shifted":  # the total stays
                lists = [[1.0, 2.0, 3.0] if number % 2 else [1.0] for number in range(len(values) // 2 * 2)]
                values = lists + values[len(lists) :] if name in ("observation.state", "action") else values
            elif kind == "text":
                values = ["a"] * len(values)
            table = table.set_column(table.column_names.index(name), name, pyarrow.array(values))
        pyarrow.parquet.write_table(table, file)
        return f" {name}: {kind}"

    def value(self, file: Path) -> str:
        """Changes or removes a value of a description, or lets it name an environment in place of spaces."""
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        content = self.random.choice(lines)
        if not content:  # of a namespace of Minari
            return ""
        name = self.random.choice([*content])
        value = self.random.choice(VALUES)
        if self.random.random() < 0.2 and "env_spec" in content:
            name, value = "env_spec", json.dumps(SPEC)
            for space in ("observation_space", "action_space"):
                content.pop(space, None)
        if isinstance(content.get(name), dict) and content[name] and self.random.random() < 0.8:
            content, name = content[name], self.random.choice([*content[name]])
        content[name] = value
        if self.random.random() < 0.2:
            del content[name]
        file.write_text("\n".join(map(json.dumps, lines)))
        return f" {name}: {value}"


def _check(rows: TensorDict, what: str) -> None:
    assert not any((column == SECRET).any() for column in rows.values(True, True)), "another file was read"
    if not what.startswith("flip"):  # a layout without checksums cannot tell what a number was
        assert not wrong_rows(rows), f"{wrong_rows(rows)} rows were not recorded"


def attack(recording: Recording, seed: int, count: int) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stranger = Stranger(Path(folder), seed)
        whole = Path(folder) / "whole"
        whole.mkdir()
        recording.write(whole)
        _check(recording.read(whole), "")
        for number in range(count):
            with report.round(f"hostile {recording.name} {number}"):
                shutil.copytree(whole, stranger.place)
                what = ""
                try:
                    what = stranger.change()
                    with limited():
                        rows = recording.read(stranger.place)
                    _check(rows, what)
                    report.count("without effect")
                except SENTENCES:
                    report.count("refused in a sentence")
                except Late:
                    raise AssertionError(f"{what} is waited for") from None
                except Exception as error:
                    raise AssertionError(f"{what} ends in {type(error).__name__}: {error}") from error
                finally:
                    shutil.rmtree(stranger.place)
                assert not called, f"{called.pop()} by {what}"
    return report
