# SPDX-License-Identifier: Apache-2.0
"""Saves beside files of a user's whose names look like a save's, in folders and at URLs: each of them stays."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.levels import LevelBuffer
from lightning_replay.samplers import PrioritizedSampler
from lightning_replay.saving import DamagedFileError
from lightning_replay.saving.directory import checksum_of
from lightning_replay.saving.files import DATA_FOLDERS, is_saved
from tests.attack.report import Report
from tests.level_steps import scored
from tests.transitions import numbered_steps

Save = Callable[[str], None]
_FILES = ("model.ckpt", "notes.txt", "000000.chunk", "values.json", "tensors.safetensors", "state.json", "x.tmp")


class Neighbors:
    """A place with files of the user's, whose saves are replaced again and again."""

    def __init__(self, place: str, seed: int) -> None:
        self.place = place
        self.random = random.Random(seed)
        self.filesystem, self.root = fsspec.core.url_to_fs(place)
        self.filesystem.makedirs(self.root, exist_ok=True)
        self.replay = recipes.prioritized(capacity=20, batch_size=4, seed=seed)
        self.replay.extend(numbered_steps(0, 12))
        self.levels = LevelBuffer(levels=10, seed=seed)
        self.saves: list[Save] = [
            lambda path: save_replay(self.replay, path),
            self.levels.save,
            PrioritizedSampler(20).dumps,
        ]
        self.mine: dict[str, bytes] = {}
        self.forged: list[str] = []
        self.links: list[Path] = []

    def _hexadecimal(self) -> str:
        return f"{self.random.randrange(16**12):012x}"

    def add(self) -> None:
        """Adds a file of the user's at a name of its own."""
        prefix = self.random.choice([*DATA_FOLDERS.values(), "data", "state", "seed", "my.replay"])
        folder = self.random.choice(
            [
                f"{prefix}-{self._hexadecimal()}",
                f"{prefix}-2026/module-a",
                "best.40.replay",
                "deep/data-0/levels",
                ".",
                ".",
            ]
        )
        manifest = self.random.choice([*DATA_FOLDERS])
        loose = (manifest, f"{Path(manifest).stem}.{self._hexadecimal()[:8]}.tmp", f"{prefix}.unfinished")
        name = self.random.choice(loose if folder == "." else _FILES)
        content = self.random.choice(["mine", "{}", json.dumps({"data": f"{prefix}-{self._hexadecimal()}"})])
        self.write(PurePosixPath(folder, name).as_posix(), content.encode())

    def write(self, name: str, content: bytes) -> None:
        file = f"{self.root}/{name}"
        if self.filesystem.exists(file):
            return
        self.filesystem.makedirs(file.rpartition("/")[0], exist_ok=True)
        self.filesystem.pipe_file(file, content)
        self.mine[name] = content

    def forge(self) -> None:
        """Lets a manifest of a save name a folder of the user's."""
        name, folder = self.random.choice([*DATA_FOLDERS.items()])
        file = f"{self.root}/{name}"
        if name in self.mine or not self.filesystem.exists(file):
            return
        manifest = json.loads(self.filesystem.cat_file(file))
        places = [one.partition("/")[0] for one in self.mine if "/" in one] or ["none"]
        alike = [one for one in places if one.startswith(f"{folder}-")] or places
        others = [*places, *(f"../{one}" for one in places), "..", ".", "", "/", folder]
        manifest["data"] = self.random.choice(self.random.choice([alike, others]))
        manifest["checksum"] = checksum_of(manifest)
        self.filesystem.pipe_file(file, json.dumps(manifest).encode())
        self.forged.append(manifest["data"])

    def link(self) -> None:
        """Lets a name of a save's lead out of the place, to a file of the user's, until the next step."""
        name = self.random.choice([*DATA_FOLDERS, f"{self.random.choice([*DATA_FOLDERS.values()])}-0123456789ab"])
        link = Path(self.root, name)
        if not isinstance(self.filesystem, LocalFileSystem) or name in self.mine:
            return
        link.unlink(missing_ok=True)
        self.write("../outside.txt", b"mine")
        link.symlink_to("../outside.txt")
        self.links.append(link)

    def is_mine(self, name: str) -> bool:
        # A file named as a save's, in a folder that a manifest of a save names as its data, is the save's.
        folder = name.partition("/")[0]
        return not (folder in self.forged and is_saved(PurePosixPath(name).name))

    def step(self, report: Report) -> None:
        self.random.choice([self.add, self.add, self.forge, self.change, self.link])()
        try:
            self.random.choice(self.saves)(self.place)
            report.count("saves")
        except (FileExistsError, ValueError):  # a name of the user's, or another part's state
            report.count("refused saves")
        with suppress(FileNotFoundError, DamagedFileError, ValueError):
            load_replay(self.place)
        for name, content in self.mine.items():
            file = f"{self.root}/{name}"
            if self.is_mine(name):
                assert self.filesystem.exists(file), f"a save in {self.place} removed {name}"
                assert self.filesystem.cat_file(file) == content, f"a save in {self.place} changed {name}"
        while self.links:
            link = self.links.pop()
            if link.is_symlink():
                link.unlink()

    def change(self) -> None:
        self.replay.update_priority(self.replay.sample(), torch.rand(4))
        self.levels.update(0, self.levels.next_level(0), scored(self.random.random()), episode_done=True)


def attack(seed: int, count: int, steps: int = 60) -> Report:
    """``count`` places of each kind, with saves of a replay, levels and a sampler in each."""
    report = Report()
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            for place in (f"{folder}/here/a", f"file://{folder}/there/a", f"memory://attack/{seed}/{number}"):
                with report.round(f"neighbors {seed}+{number} in {place}"):
                    neighbors: Any = Neighbors(place, 1_000 * seed + number)
                    for _ in range(steps):
                        neighbors.step(report)
    with suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/attack", recursive=True)
    assert not Path("memory:").exists()
    return report
