# SPDX-License-Identifier: Apache-2.0
"""Saves that name functions and modules anywhere in their files: none may be called or imported."""

from __future__ import annotations

import builtins
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy
import tensordict
import torch
import torchrl
from torchrl.data import ReplayBuffer

import lightning_replay.envs
import rllib_ext
from lightning_replay import load_replay, recipes
from lightning_replay.replay import Replay
from lightning_replay.saving import DamagedFileError, chunks
from lightning_replay.saving.spec import NotRebuildableError
from tests.attack.report import Report
from tests.attack.subjects import RecipeSubject, Subject
from tests.attack.variants import VARIANTS, Variant
from tests.goal_steps import goal_rows, reached
from tests.saves import files_of, forge

HOSTS = (lightning_replay.envs, rllib_ext, torch, tensordict, torchrl, numpy, gymnasium, builtins)
# Which nothing here imports; each does something when it is imported or its main is called.
MODULES = ("torch.utils.collect_env", "lightning_replay.lit.cli", "rllib_ext.__main__", "colorsys", "tabnanny")
NAMES = (*(f"{host.__name__}:trap" for host in HOSTS), *(f"{module}:main" for module in MODULES))
OPTIONS = ("service_backend", "use_ray_service", "replacement")  # of TorchRL's metaclasses
REFUSED = (NotRebuildableError, DamagedFileError)


@contextmanager
def traps() -> Iterator[list[str]]:
    """Context manager for a function ``trap`` in every host, and in place of TorchRL's services; lists the calls."""
    called: list[str] = []

    def trap_of(module: str) -> Callable[..., None]:
        def trap(*args: Any, **kwargs: Any) -> None:
            called.append(f"{module}:trap was called")

        trap.__module__, trap.__qualname__ = module, "trap"
        return trap

    services = ReplayBuffer._ServiceClass
    ReplayBuffer._ServiceClass = trap_of("a service")
    for host in HOSTS:
        host.trap = trap_of(host.__name__)
    try:
        yield called
    finally:
        ReplayBuffer._ServiceClass = services
        for host in HOSTS:
            del host.trap


class UsedReplay(RecipeSubject):
    """A buffer of any recipe, which draws and stores after it is loaded."""

    def load(self) -> str:
        replay = load_replay(self.place, trust=["tests"])
        replay.sample()
        replay.extend(self.world.take(3))
        replay.sample()
        return ""


class Goals:
    """Steps of a goal environment."""

    def take(self, count: int) -> Any:
        rows = goal_rows(range(count))
        rows["next", "reward"].zero_()  # as :func:`reached` has it
        return rows


class UsedGoals(UsedReplay):
    """A buffer that gives every drawn row to the functions of its goals."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed, Variant("hindsight", ()))

    def build(self, folder: Path, seed: int) -> tuple[Any, Replay]:
        replay = recipes.hindsight(24, 6, reward=reached, terminated=reached, share=1.0, seed=seed)
        replay.extend(Goals().take(24))
        return Goals(), replay


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every dictionary and list within JSON, with each of its keys or places."""
    for key in range(len(value)) if isinstance(value, list) else [*value] if isinstance(value, dict) else ():
        yield value, key
        yield from _places(value[key])


class Forger:
    """Puts names into the JSON of a save, with all checksums as they have to be."""

    def __init__(self, subject: Subject, folder: Path, seed: int) -> None:
        self.subject, self.random = subject, random.Random(seed)
        subject.save()
        subject.load()  # what is imported and compiled at a first use is there by now
        self.files = [file for file in files_of(folder) if file.suffix == ".json"]
        self.before = {file: file.read_text() for file in self.files}

    def forge(self) -> str:
        """Changes one file; returns what was put in, and where."""
        file = self.random.choice(self.files)
        content = json.loads(self.before[file])
        container, key = self.random.choice([*_places(content)])
        name = self.random.choice(NAMES)
        if key == "arguments":
            container[key] = container[key] | {self.random.choice(OPTIONS): "ray"}
        else:
            named = {"import": name}
            others = [name, {"class": name, "arguments": {}}, {"tuple": [named]}, [named], {"dict": {"a": named}}]
            container[key] = self.random.choice([named, self.random.choice(others)])
        file.write_text(json.dumps(content))
        if "checksum" in content:
            forge(file, **content)
        for manifest in file.parent.parent.glob("*.json"):  # of which the file is a part
            listed = json.loads(manifest.read_text()).get("files", {})
            if file.name in listed:
                forge(manifest, files=listed | {file.name: chunks.fingerprint(file)._asdict()})
        return f"{json.dumps(container[key])} as {key} in {file.name}"

    def restore(self) -> None:
        for file, content in self.before.items():
            file.write_text(content)


def attack(build: Callable[[Path], Subject], name: str, count: int, seed: int = 1) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as folder, traps() as called:
        place = Path(folder) / "saves"
        place.mkdir()
        subject = build(place)
        try:
            forger = Forger(subject, place, seed)
            for number in range(count):
                with report.round(f"forged names {number} of {name}"):
                    before = {module for module in MODULES if module in sys.modules}
                    what = forger.forge()
                    try:
                        subject.load()
                        report.count("without effect")
                    except REFUSED:
                        report.count("refused")
                    except (Exception, SystemExit):  # of what a state holds in place of a number, or of a command
                        report.count("refused in other words")
                    finally:
                        forger.restore()
                    imported = [f"{module} was imported" for module in MODULES if module in sys.modules]
                    done = [*called, *(one for one in imported if one.split()[0] not in before)]
                    called.clear()
                    assert not done, f"{', '.join(done)} by {what}"
        finally:
            subject.close()
    return report


def attack_recipes(seed: int, count: int, variants: list[Variant] = VARIANTS) -> Report:
    report = attack(partial(UsedGoals, seed=seed), "goals", count, seed)
    for place, variant in enumerate(variants):
        build = partial(UsedReplay, seed=1_000 * seed + place, variant=variant)
        report.add(attack(build, str(variant), count, 1_000 * seed + place))
    return report
