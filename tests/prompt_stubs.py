# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the classes of verl and prime-rl that choose prompts, with the signatures of their sources.

verl: commit b178a3c of 2026-01-29. prime-rl: the task sampler of commit 559b447 of 2026-08-21, the buffer of 0.5.0.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import Sampler


class AbstractSampler(Sampler[int]):
    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    @abstractmethod
    def update(self, batch: DataProto) -> None: ...


@dataclass
class DataProto:
    """A batch of verl: tensors, and arrays of objects."""

    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)


class DictConfig(dict[str, Any]):
    """Settings, which are entries and attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass
class Task:
    key: str | None


@dataclass
class Agent:
    trainable: bool = True


@dataclass
class Trace:
    reward: float
    has_error: bool = False
    agent: Agent = field(default_factory=Agent)


@dataclass
class Episode:
    task: Task
    traces: list[Trace]


class TaskSampler(Iterator[Task], ABC):
    @abstractmethod
    def __next__(self) -> Task: ...

    def observe(self, group: list[Episode]) -> None:
        """Takes a finished group."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a checkpoint."""

    def metrics(self) -> dict[str, float]:
        return {}


class Buffer:
    def __init__(self, dataset: Any, env_names: list[str], buffer_config: Any) -> None:
        self.dataset = dataset
        self.rollouts: list[dict[str, Any]] = []

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "rollouts.json").write_text(json.dumps(self.rollouts))

    def load(self, path: Path) -> None:
        self.rollouts = json.loads((path / "rollouts.json").read_text())

    def sample_examples(self, n: int) -> list[dict[str, Any]]:
        raise NotImplementedError

    def update(self, rollouts: list[dict[str, Any]]) -> None:
        self.rollouts += rollouts


def modules() -> dict[str, ModuleType]:
    """The stand-ins by the names of their modules."""

    def module(name: str, **members: Any) -> ModuleType:
        found = ModuleType(name)
        vars(found).update(members)
        return found

    samplers = module("prime_rl.orchestrator.curriculum.samplers", TaskSampler=TaskSampler, StandardSampler=None)
    buffer = module("prime_rl.orchestrator.buffer", Buffer=Buffer)
    of_verl = {"AbstractSampler": AbstractSampler, "AbstractCurriculumSampler": AbstractCurriculumSampler}
    found = [
        module("verl"),
        module("verl.experimental"),
        module("verl.experimental.dataset"),
        module("verl.experimental.dataset.sampler", **of_verl),
        module("prime_rl"),
        module("prime_rl.orchestrator", buffer=buffer),
        module("prime_rl.orchestrator.curriculum", samplers=samplers),
        samplers,
        buffer,
    ]
    return {one.__name__: one for one in found}


def install(monkeypatch: Any) -> None:
    """Puts the stand-ins in place of modules that are not installed here."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
