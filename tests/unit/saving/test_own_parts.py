# SPDX-License-Identifier: Apache-2.0
"""Samplers, writers, transforms and storages of the user's own: each error names the step that comes next."""

from __future__ import annotations

import functools
import importlib
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType

import gymnasium
import pytest
import torch
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import RandomSampler
from torchrl.envs import Transform

from lightning_replay import PackedStorage, Replay, load_replay, recipes, save_replay
from lightning_replay.saving.spec import NotRebuildableError, rebuildable
from tests.transitions import numbered_steps

PARTS = """
import torch
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import Sampler, TensorDictRoundRobinWriter
from torchrl.envs import Transform
from lightning_replay import PackedStorage

class Newest(Sampler):
    "Draws among the newest rows."

    def __init__(self, count=10, seed=0):
        super().__init__()
        self.count = count
        self.generator = torch.Generator().manual_seed(seed)

    def sample(self, storage, batch_size):
        first = max(0, len(storage) - self.count)
        return torch.randint(first, len(storage), (batch_size,), generator=self.generator), {}

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])

    def dumps(self, path): pass
    def loads(self, path): pass
    def _empty(self): pass

class Writer(TensorDictRoundRobinWriter):
    pass

class Scale(Transform):
    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = factor

    def forward(self, tensordict):
        return tensordict.set("observation", tensordict["observation"] * self.factor)

class Rows(PackedStorage):
    def __init__(self, rows):
        super().__init__(rows)
"""


@rebuildable
class FunctionOf(Transform):
    """Applies a function to each batch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, tensordict):
        return self.function(tensordict)


NAMES = ("Newest", "Writer", "Scale", "Rows")
RECORDED = "from lightning_replay.saving.spec import rebuildable\n" + PARTS.replace(
    "\nclass ", "\n@rebuildable\nclass "
)


@pytest.fixture
def module(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Imports the source of a module of the user's own."""

    def imported(source: str, name: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        request.addfinalizer(lambda: sys.modules.pop(name, None))
        return importlib.import_module(name)

    return imported


def options_of(parts: ModuleType, name: str) -> dict:
    part = {"Newest": {"sampler": parts.Newest(5)}, "Writer": {"writer": parts.Writer()}}
    part |= {"Scale": {"transform": parts.Scale(3.0)}, "Rows": {"storage": parts.Rows(50)}}
    return {"storage": PackedStorage(50), "batch_size": 4, "seed": 0} | part[name]


def filled(**options) -> Replay:
    replay = Replay(**options)
    replay.extend(numbered_steps(0, 20))
    replay.sample()
    return replay


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_ones_own_is_saved_and_the_error_leads_to_a_load(name, module, tmp_path: Path) -> None:
    plain = module(PARTS, "plain_parts")
    replay = filled(**options_of(plain, name))
    save_replay(replay, tmp_path / "first")
    with pytest.raises(NotRebuildableError) as error:
        load_replay(tmp_path / "first")
    for advice in (
        f"was a {name},",
        "replay.load(path)",
        "classes with the decorator lightning_replay.saving.spec.rebuildable",
    ):
        assert advice in str(error.value)
    assert "trust" not in str(error.value)
    again = Replay(**options_of(plain, name))
    again.load(tmp_path / "first")
    assert torch.equal(again.sample()["observation"], replay.sample()["observation"])

    replay = filled(**options_of(module(RECORDED, "recorded_parts"), name))
    save_replay(replay, tmp_path / "second")
    with pytest.raises(
        NotRebuildableError, match=r"recorded_parts is not imported .* load with trust=\['recorded_parts'\]"
    ):
        load_replay(tmp_path / "second")
    again = load_replay(tmp_path / "second", trust=["recorded_parts"])
    assert torch.equal(again.sample()["observation"], replay.sample()["observation"])


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (None, "changing_parts:Newest, which cannot be imported here: No module named .*PYTHONPATH"),
        (PARTS, "decorator lightning_replay.saving.spec.rebuildable"),
    ],
    ids=["gone", "lost its decorator"],
)
def test_a_module_that_changed_since_the_save(later, message: str, module, tmp_path: Path) -> None:
    save_replay(filled(**options_of(module(RECORDED, "changing_parts"), "Newest")), tmp_path / "buffer")
    source = tmp_path / "changing_parts.py"
    source.unlink() if later is None else source.write_text(later)
    importlib.invalidate_caches()
    del sys.modules["changing_parts"]
    with pytest.raises(NotRebuildableError, match=message) as error:
        load_replay(tmp_path / "buffer", trust=["changing_parts"])
    assert ("rebuilt neither" in str(error.value)) == (later is not None)


def part_of_the_script(folder: Path) -> object:
    (folder / "script.py").write_text(f"{PARTS}\nsampler = Newest()\n")
    return runpy.run_path(str(folder / "script.py"), run_name="__main__")["sampler"]


@pytest.mark.parametrize(
    "part",
    [
        {"sampler": RandomSampler()},
        {"storage": LazyTensorStorage(50)},
        {"transform": lambda batch: batch},
        {"transform": functools.partial(lambda batch: batch)},
        {"transform": FunctionOf(lambda batch: batch)},
        {"sampler": part_of_the_script},
    ],
    ids=[
        "sampler of TorchRL",
        "storage of TorchRL",
        "function",
        "partial",
        "function in a part",
        "class of the script",
    ],
)
def test_what_cannot_be_rebuilt_is_said_with_what_can_and_without_trust(part, tmp_path: Path) -> None:
    part = {name: one(tmp_path) if one is part_of_the_script else one for name, one in part.items()}
    save_replay(filled(**{"storage": PackedStorage(50), "batch_size": 4} | part), tmp_path / "save")
    advice = r"and call replay.load\(path\). .* functions, defined at the top level of a module that can be imported$"
    with pytest.raises(NotRebuildableError, match=advice):
        load_replay(tmp_path / "save", trust=["tests", "__main__"])


def test_the_error_lists_the_modules_given_with_the_one_that_is_missing(module, request, tmp_path: Path) -> None:
    """An environment's id can name one module, which registers a class of another."""
    module("from lightning_replay.envs.bit_flipping import BitFlipping\nclass Own(BitFlipping): pass\n", "own_classes")
    module("import gymnasium, own_classes\ngymnasium.register('OwnBits-v0', own_classes.Own)\n", "own_ids")
    request.addfinalizer(lambda: gymnasium.registry.pop("OwnBits-v0"))
    save_replay(recipes.hindsight(50, 4, env="own_ids:OwnBits-v0"), tmp_path / "save")
    for given, advised in (
        ([], r"\['own_ids'\]"),
        (["own_ids"], r"\['own_ids', 'own_classes'\]"),
        (("own_classes",), r"\['own_classes', 'own_ids'\]"),
    ):
        with pytest.raises(NotRebuildableError, match=rf"load with trust={advised}; or build"):
            load_replay(tmp_path / "save", trust=given)
    load_replay(tmp_path / "save", trust=["own_classes", "own_ids"])


def test_what_cannot_or_was_not_saved_is_named(module, tmp_path: Path) -> None:
    parts = module(PARTS.replace("self.generator.get_state()}", "self.generator}"), "parts_with_a_generator")
    with pytest.raises(TypeError, match=r"'sampler.generator' is a Generator; .* of a generator its get_state\(\)"):
        save_replay(filled(**options_of(parts, "Newest")), tmp_path / "buffer")
    save_replay(filled(**options_of(module(PARTS, "described_parts"), "Newest")), tmp_path / "buffer")
    sampler = json.loads((tmp_path / "buffer" / "replay.json").read_text())["built_by"]["arguments"]["sampler"]
    assert list(sampler.items()) == [("not_saved", "a Newest"), ("defined", "described_parts:Newest")]
