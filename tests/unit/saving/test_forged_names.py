# SPDX-License-Identifier: Apache-2.0
"""Names in forged files: nothing that they name is imported, looked up, or called without ``trust``."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy
import pytest
import tensordict
import torch
import torchrl
from tensordict import TensorDict
from torchrl.data import StoreStorage

import lightning_replay
import rllib_ext
from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.options import accepted_names
from lightning_replay.replay import Replay
from lightning_replay.saving import DamagedFileError, chunks, read_state, write_state
from lightning_replay.saving.spec import ENVIRONMENTS, FUNCTIONS, NotRebuildableError, build, describe
from lightning_replay.storage.rows import RowLayout
from tests.event_steps import IsTrue
from tests.saves import forge, recorded_classes
from tests.transitions import numbered_steps

HOSTS = [torch, tensordict, torchrl, gymnasium, numpy]
# Each runs what it is given, or does something when it is called without arguments.
FORGED = (
    "torch._dynamo.aot_compile:AOTCompiledFunction.deserialize",
    "torch:load",
    "torch.hub:load",
    "torch.utils.collect_env:main",
    "lightning_replay:load_replay",
    "lightning_replay.lit.cli:main",
    "lightning_replay.envs.bit_flipping:BitFlipping",
    "rllib_ext.__main__:main",
    "builtins:eval",
    "os:system",
)


def import_all(package: ModuleType) -> None:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError:  # of an extra that is not installed
                continue


def names_of(package: ModuleType) -> Iterator[tuple[str, str]]:
    """Every attribute of the imported modules of a package, every member of their classes, and ``main`` of the rest."""
    root = package.__name__
    loaded = {name: module for name, module in [*sys.modules.items()] if name == root or name.startswith(f"{root}.")}
    for name, module in loaded.items():
        for attribute, value in [*vars(module).items()] if isinstance(module, ModuleType) else ():
            yield name, attribute
            if isinstance(value, type):
                yield from ((name, f"{attribute}.{member}") for member in vars(value))
    for place in package.__path__:
        for file in Path(place).rglob("*.py"):
            parts = file.relative_to(place).with_suffix("").parts
            dotted = ".".join((root, *parts)).removesuffix(".__init__")
            if dotted not in loaded:
                yield dotted, "main"


@pytest.mark.slow
def test_no_name_of_any_package_is_reached_but_recorded_classes_and_the_listed_functions() -> None:
    """Without an import of it, whether the module was imported before or not."""
    recorded = {cls.__qualname__ for cls in recorded_classes()}
    own = [lightning_replay, rllib_ext]
    with warnings.catch_warnings(action="ignore"):
        for package in own:
            import_all(package)
        before, count, reached = set(sys.modules), 0, set()
        for package in (*own, *HOSTS):
            for module, name in {*names_of(package)}:
                for kind, known in (("class", recorded), ("import", FUNCTIONS)):
                    if package is lightning_replay and name in known:
                        continue
                    count += 1
                    try:
                        build({kind: f"{module}:{name}", "arguments": {}})
                        refusal = ""
                    except BaseException as error:
                        refusal = repr(error)
                    # Any other error would come after an import.
                    if "is not imported because a file names it: a forged file" not in refusal:
                        reached.add(f"{module}:{name} {refusal}")
    assert not reached, sorted(reached)[:5]
    assert count > 100_000 and set(sys.modules) == before


def test_what_a_save_may_name_is_reached() -> None:
    for cls in recorded_classes():
        with pytest.raises(TypeError, match="has no argument 'no_such_argument'"):
            build({"class": describe(cls)["import"], "arguments": {"no_such_argument": 1}})
    for name in FUNCTIONS:
        assert build({"import": f"lightning_replay.samplers:{name}"}).__name__ == name


def forms(name: str) -> list[Any]:
    """Descriptions of an option that name a function, as a forged file may hold them."""
    named: list[Any] = [{"import": name}, {"class": name, "arguments": {}}]
    return [*named, *([one] for one in named), *({"tuple": [one]} for one in named), {"dict": {"a": named[0]}}]


@pytest.mark.parametrize("cls", recorded_classes(), ids=lambda cls: cls.__name__)
def test_no_option_of_a_recorded_class_takes_a_name_that_is_not_listed(cls: type) -> None:
    before = set(sys.modules)
    path, accepted = describe(cls)["import"], accepted_names(cls.__init__)
    assert accepted is not None
    for option in {*accepted} - {*cls._record.chosen_when_loaded}:  # which are not read from a file
        for name in FORGED:
            for form in forms(name):
                with pytest.raises(NotRebuildableError, match=rf"replay\.{option}.* a forged file could run code"):
                    build({"class": path, "arguments": {option: form}})
    assert set(sys.modules) == before


@pytest.mark.parametrize("option", ["service_backend", "use_ray_service", "service_backend_options", "replacement"])
def test_the_options_of_torchrls_metaclasses_are_not_read_from_a_file(option: str) -> None:
    """One of them starts Ray with the addresses and programs that it is given."""
    for cls in recorded_classes():
        with pytest.raises(TypeError, match=f"{cls.__name__} has no argument '{option}'"):
            build({"class": describe(cls)["import"], "arguments": {option: "nowhere"}})


@pytest.mark.parametrize(
    "env", ["torch.utils.collect_env:x", "os:x", "lightning_replay.lit.cli:x", "lightning_replay.envs.x:x", ":x"]
)
def test_the_id_of_an_environment_imports_no_module(env: str) -> None:
    before = set(sys.modules)
    goals = {"class": "lightning_replay.transforms:RelabelGoals", "arguments": {"env": env}}
    with pytest.raises(NotRebuildableError, match=r"replay\.env is .* is not imported because a file names it"):
        build(goals)
    assert set(sys.modules) == before
    goals["arguments"] = {"env": "lightning_replay.envs:BitFlipping-v0"}
    assert type(build(goals)).__name__ == "RelabelGoals"


def never() -> Any:
    raise AssertionError("the environment was built")


@pytest.fixture
def registered() -> Iterator[None]:
    """Environments of a module of the user's, by a function and by its path."""
    gymnasium.register("ByFunction-v1", entry_point=never)
    gymnasium.register("tests/ByPath-v1", entry_point=f"{__name__}:never")
    gymnasium.register("WithoutOne-v1", vector_entry_point=never)
    yield
    for name in ("ByFunction-v1", "tests/ByPath-v1", "WithoutOne-v1"):
        del gymnasium.registry[name]


@pytest.mark.filterwarnings("ignore:.*unversioned environment:UserWarning")  # Gymnasium
@pytest.mark.parametrize("module", ["", "lightning_replay.envs:", "gymnasium.envs:"])
@pytest.mark.parametrize("env", ["ByFunction-v1", "ByFunction", "tests/ByPath-v1", "tests/ByPath", "WithoutOne-v1"])
def test_an_environment_of_another_module_is_not_built(module: str, env: str, registered: None) -> None:
    goals = {"class": "lightning_replay.transforms:RelabelGoals", "arguments": {"env": module + env}}
    with pytest.raises(NotRebuildableError, match=r"env is .* is not imported because a file names it: a forged"):
        build(goals)
    if env != "WithoutOne-v1":
        with pytest.raises(AssertionError, match="the environment was built"):
            build(goals, trust=["tests"])
    assert {*ENVIRONMENTS} == {"gymnasium.envs", "gymnasium_robotics", "lightning_replay.envs"}


# Calls that import, unpickle, or look up what a variable names, by file. Only spec.py reads names of a save.
CALLS = {
    "lightning_replay/lazy.py": {"import_module"},  # of this file and the next, the names of the package itself
    "rllib_ext/__init__.py": {"import_module"},
    "lightning_replay/dataset_files.py": {"import_module"},  # of an extra
    "lightning_replay/envs/atari.py": {"import_module"},  # of an extra
    "lightning_replay/lit/checkpoint_files.py": {"torch.load"},  # weights only
    "lightning_replay/lit/checkpoints.py": {"torch.load"},  # weights only
    "lightning_replay/saving/spec.py": {"import_module"},  # of what load_replay may import
    "rllib_ext/buffer/building.py": {"import_module"},  # of a config
    "rllib_ext/config_file.py": {"yaml.load"},  # with a loader of plain values
    "rllib_ext/hooks.py": {"cloudpickle.loads"},  # of a config
    "rllib_ext/levels/checks.py": {"cloudpickle.loads"},  # of what it has pickled itself
    "rllib_ext/levels/server.py": {"cloudpickle.loads"},  # of a config
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
READERS = {
    f"{module}.{name}" for module in ("pickle", "cloudpickle", "torch", "np", "yaml") for name in ("load", "loads")
}


def calls_in(file: Path) -> set[str]:
    """Of functions that run or import what they are given, unless that is written in the call."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and not (node.args and isinstance(node.args[0], ast.Constant)):
            name = ast.unparse(node.func)
            if name in BUILTINS | READERS or name.endswith("load_memmap"):
                found.add(name)
            if name.endswith("import_module"):
                found.add("import_module")
            if name == "getattr" and ast.unparse(node.args[0]) in ("torch", "np"):
                found.add(name)
            if name == "torch.load":
                assert "weights_only=True" in ast.unparse(node)
    return found


@pytest.mark.slow
def test_no_other_call_of_these_packages_imports_or_unpickles_what_it_is_given() -> None:
    found = {}
    for package in (lightning_replay, rllib_ext):
        root = Path(package.__path__[0])
        found |= {file.relative_to(root.parent).as_posix(): calls_in(file) for file in root.rglob("*.py")}
    assert {file: calls for file, calls in found.items() if calls} == CALLS


def test_a_file_names_no_server_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A StoreStorage connects to the address in its state, and unpickles what is there."""
    monkeypatch.setattr("torchrl.data.replay_buffers.storages.store._has_store", True)
    replay = Replay(storage=StoreStorage(10), batch_size=2)
    save_replay(replay, tmp_path)
    manifest = json.loads((tmp_path / "replay.json").read_text())
    values = tmp_path / manifest["data"] / "values.json"
    content = json.loads(values.read_text())
    content["state"]["$dict"]["storage"]["$dict"] |= {"initialized": True, "_td_id": "rows", "_host": "nowhere.invalid"}
    values.write_text(json.dumps(content))
    forge(tmp_path / "replay.json", files=manifest["files"] | {"values.json": chunks.fingerprint(values)._asdict()})
    with pytest.raises(ValueError, match=r"the rows of a StoreStorage are on a server, .* Nothing was loaded"):
        replay.load(tmp_path)


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


def reward(achieved: Any, desired: Any, info: Any) -> Any:
    return -(achieved != desired).any(-1).astype("float32")


@pytest.mark.parametrize("option", ["reward", "terminated", "env"])
@pytest.mark.parametrize("name", FORGED)
def test_the_rows_of_a_forged_save_are_given_to_no_function(option: str, name: str, tmp_path: Path) -> None:
    """One of them unpickles an array; the rows of this save are a pickle that creates a file."""
    ran = tmp_path / "ran"
    payload = torch.frombuffer(bytearray(pickle.dumps(Payload(ran))), dtype=torch.uint8)[None].expand(6, -1).clone()
    goals = {"observation": torch.zeros(6, 1), "achieved_goal": payload, "desired_goal": payload.clone()}
    ends = torch.zeros(6, 1, dtype=torch.bool)
    after = {"observation": goals, "reward": torch.zeros(6, 1), "terminated": ends, "truncated": ends, "done": ends}
    replay = recipes.hindsight(capacity=10, batch_size=2, reward=reward, seed=0)
    replay.extend(TensorDict({"observation": goals, "next": after}, [6]))
    save_replay(replay, tmp_path / "save")
    built_by = json.loads((tmp_path / "save" / "replay.json").read_text())["built_by"]
    relabel = built_by["arguments"]["transform"]["arguments"]
    forge(tmp_path / "save" / "replay.json", built_by=built_by)
    assert len(load_replay(tmp_path / "save", trust=["tests"]).sample()) == 2
    relabel |= {"reward": None} | {option: {"import": name}}
    forge(tmp_path / "save" / "replay.json", built_by=built_by)
    with pytest.raises(NotRebuildableError, match=f"transform.{option} is {name}"):
        load_replay(tmp_path / "save").sample()
    assert not ran.exists()


@pytest.mark.parametrize("correction", ["mixture", "lemma2", "lemma2_exact"])
def test_options_of_the_recipes_own_need_no_trust(correction: str, tmp_path: Path) -> None:
    table = EventTable("high", condition=reward_at_least(3.0), history_length=3, capacity=10, min_size=1)
    replay = recipes.event_tables(50, 4, tables=[table], correction=correction, seed=0)
    replay.extend(numbered_steps(0, 20))
    save_replay(replay, tmp_path)
    again = load_replay(tmp_path)
    assert torch.equal(replay.sample()["priority_weight"], again.sample()["priority_weight"])


@pytest.mark.parametrize(
    "name", ["load", "hub", "_dynamo", "_inductor", "save", "dtype", "float", "", "__class__", "x.y"]
)
def test_a_dtype_is_one_of_torch(name: str, tmp_path: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(TypeError, match="the column a has no dtype of torch"):
        RowLayout.from_description([{"key": ["a"], "dtype": name, "shape": [1]}])
    write_state(tmp_path, {"rows": torch.zeros(1 << 20, dtype=torch.uint8)})
    manifest = json.loads((tmp_path / "state.json").read_text())
    values = tmp_path / manifest["data"] / "values.json"
    values.write_text(values.read_text().replace('"uint8"', json.dumps(name)))
    forge(tmp_path / "state.json", files=manifest["files"] | {"values.json": chunks.fingerprint(values)._asdict()})
    with pytest.raises(DamagedFileError, match="chunks of rows"):
        read_state(tmp_path)
    assert set(sys.modules) == before


def test_the_error_names_the_least_that_has_to_be_trusted(tmp_path: Path) -> None:
    """For a package of the user's the package, for this library and its hosts the module alone."""
    for path, trust in (
        ("my_package.rewards:reward", "my_package"),
        ("torch.nn.functional:relu", "torch.nn.functional"),
        ("lightning_replay.envs.bit_flipping:BitFlipping", "lightning_replay.envs.bit_flipping"),
    ):
        with pytest.raises(
            NotRebuildableError, match=rf"If you know who wrote the file, load with trust=\['{trust}'\]"
        ):
            build({"import": path})
    assert build({"import": "torch.nn.functional:relu"}, trust=["torch.nn.functional"]) is torch.nn.functional.relu
    assert isinstance(build(json.loads(json.dumps(describe(IsTrue("one")))), trust=["tests"]), IsTrue)
