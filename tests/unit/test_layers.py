# SPDX-License-Identifier: Apache-2.0
"""The direction of imports: the core imports neither Lightning nor Ray, the integrations not each other."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from lightning_replay import levels

ROOT = Path(__file__).resolve().parents[2]
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities", "jsonargparse"}
# Lowest first: what stands here may import from what stands before it, at any place in a file.
ORDER = (
    "torchrl_compat",
    *("lazy", "fast_path", "hooks", "forking", "options", "envs", "free_memory", "saving", "state", "jit"),
    *("deferred_checks", "parts"),
    *("storage", "schedules", "ages", "levels"),
    *("divided_draws", "episodes", "tables", "feedback", "events", "neighbors", "priority_tree", "schedulers"),
    *("losses", "samplers", "training_replay", "prefetch", "saves", "retention", "writers"),
    *("replay_parts", "episode_ends", "static_draws", "replay", "transforms", "lightning_compat", "agents"),
    *("simulators", "step_columns", "collecting", "loading"),
    *("inspection", "table_replay", "mixed_replay", "recipes", "lit", "__main__"),
    *("dataset_files", "datasets", "sb3", "sharded", "start_method"),
)
#: The files that a prioritized replay loads, apart from those that only import others: no method is among them.
CORE = (
    "torchrl_compat",
    *("divided_draws", "fast_path", "feedback", "forking", "free_memory", "jit", "lazy", "options", "parts"),
    *("deferred_checks", "episode_ends", "hooks", "prefetch", "replay_parts"),
    *("replay", "saves", "schedules", "start_method", "state", "training_replay", "priority_tree.numba_kernels"),
    *(
        "priority_tree.cumulative_sums",
        "priority_tree.numba_tree",
        "priority_tree.tree",
        "episodes.beginnings",
        "episodes.groups",
        "episodes.kernels",
    ),
    *(
        "episodes.links",
        "episodes.returns",
        "episodes.running",
        "samplers.distinct",
        "samplers.prioritized",
        "samplers.slice_check",
    ),
    *("samplers.uniform", "saving.chunks", "saving.directory", "saving.files", "saving.snapshot", "saving.spec"),
    *("saving.states", "storage.columns", "storage.occupancy", "storage.packed", "storage.rows"),
    *("writers.first_in_first_out",),
)
RLLIB_ORDER = (
    *("interruption", "rllib_compat", "apex", "episodes", "learner", "tasks", "buffer", "checkpoints"),
    *("sharded", "cql", "checks", "environments", "levels", "hooks", "api", "config_file", "turns", "__main__"),
)
ORDERS = {"lightning_replay": ORDER, "rllib_ext": RLLIB_ORDER}


def _modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def _imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Every statement of a file that imports, also in functions and for type checkers."""
    tree = ast.parse(path.read_text(), filename=str(path))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


@cache
def _imported(path: Path) -> set[str]:
    """Dotted names that a file imports; relative ones made absolute."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names: set[str] = set()
    for node in _imports(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        else:
            prefix = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (prefix, node.module) if part)
            names.update({origin} | {f"{origin}.{alias.name}" for alias in node.names})
    return names


def _top_levels(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def _is_of_lightning_integration(path: Path) -> bool:
    files = {"agents", "lit", "lightning_compat.py", "__main__.py"}
    return path.relative_to(ROOT / "lightning_replay").parts[0] in files


def _unit(name: str) -> str | None:
    """The folder or file of a dotted name in its package: ``lightning_replay.samplers.uniform`` is ``samplers``."""
    parts = name.split(".")
    return parts[1] if parts[0] in ORDERS and len(parts) > 1 else None


@pytest.mark.parametrize("path", _modules("lightning_replay"), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_only_the_lightning_integration_imports_lightning_and_only_shards_import_ray(path: Path) -> None:
    imported = _top_levels(_imported(path))
    assert "rllib_ext" not in imported
    if path.parent.name != "sharded":
        assert "ray" not in imported
        assert not {name for name in _imported(path) if _unit(name) == "sharded"}
    if not _is_of_lightning_integration(path):
        assert not imported & LIGHTNING
        assert not {name for name in _imported(path) if _unit(name) in {"agents", "lit"}} or path.name == "__init__.py"


@pytest.mark.parametrize("path", _modules("rllib_ext"), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_rllib_integration_does_not_import_the_lightning_integration(path: Path) -> None:
    imported = _imported(path)
    assert not _top_levels(imported) & LIGHTNING
    assert not {name for name in imported if _unit(name) in {"agents", "lit"}}


def test_every_folder_and_file_stands_in_the_table() -> None:
    for package, order in ORDERS.items():
        found = {path.relative_to(ROOT / package).parts[0].removesuffix(".py") for path in _modules(package)}
        assert sorted(order) == sorted(found - {"__init__"})


IN_ORDER = [path for package in ORDERS for path in _modules(package)]


@pytest.mark.parametrize("path", IN_ORDER, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_downwards(path: Path) -> None:
    package, *rest = path.relative_to(ROOT).with_suffix("").parts
    if rest == ["__init__"]:  # exports names from anywhere below, once they are used
        return
    order = ORDERS[package]
    above = order[order.index(rest[0]) + 1 :]
    wrong = {name for name in _imported(path) if name.startswith(f"{package}.") and _unit(name) in above}
    assert not wrong


@pytest.mark.parametrize("path", [*_modules("lightning_replay"), *_modules("rllib_ext")], ids=lambda path: path.name)
def test_torchrl_is_imported_from_its_public_packages(path: Path) -> None:
    public = ("data", "data.replay_buffers", "objectives", "envs", "collectors", "modules", "objectives.value")
    origins = {node.module for node in _imports(path) if isinstance(node, ast.ImportFrom) and node.module}
    origins |= {alias.name for node in _imports(path) if isinstance(node, ast.Import) for alias in node.names}
    deep = {origin for origin in origins if origin.startswith("torchrl.") and origin[8:] not in public}
    assert not deep


def test_no_import_cycle() -> None:
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in ORDERS
        for path in _modules(package)
    }
    graph = {name: _imported(path) & paths.keys() for name, path in paths.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for target in sorted(graph[name] - {name}):
            if paths[target].name != "__init__.py":  # which exports names from modules that may import its others
                visit(target, (*trail, name))
        done.add(name)

    for name in sorted(paths):
        visit(name, ())


@pytest.mark.slow
def test_the_core_loads_no_method() -> None:
    code = (
        "import sys\n"
        "from lightning_replay import PackedStorage, Replay\n"
        "from lightning_replay.samplers import PrioritizedSampler\n"
        "own = [name for name in sys.modules if name.startswith('lightning_replay.')]\n"
        "print(*(name[17:] for name in own if not sys.modules[name].__file__.endswith('__init__.py')))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert sorted(result.stdout.split()) == sorted(CORE)


@pytest.mark.slow
def test_the_core_works_where_neither_lightning_nor_ray_nor_gymnasium_is_installed() -> None:
    """TorchRL itself imports Ray where it is found, so the test hides these packages instead of looking for them."""
    code = (
        "import sys\n"
        f"hidden = {sorted({*LIGHTNING, 'ray', 'gymnasium', 'matplotlib'})}\n"
        "sys.modules.update(dict.fromkeys(hidden))\n"
        "import importlib.util; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name in hidden else find(name, package)\n"
        "import lightning_replay.samplers, lightning_replay.transforms\n"
        "from lightning_replay import load_replay, recipes, save_replay\n"
        "from lightning_replay.retention.surprise import categorical_projection, distributional_surprise\n"
        "from tests.recipe_options import built\n"
        "for name in recipes.known(): built(name, capacity=100, batch_size=4)\n"
        "assert not any(sys.modules[name] for name in hidden)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


def test_environments_of_levels_need_neither_torch_nor_the_level_buffer() -> None:
    """They are what an EnvRunner imports, and each of many does."""
    code = (
        "import sys\n"
        "import lightning_replay.levels.environments\n"
        "assert not {'torch', 'tensordict', 'torchrl'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


def test_names_of_levels_are_imported_when_they_are_used() -> None:
    for name in levels.__all__:
        assert getattr(levels, name)


@pytest.mark.parametrize("module", ["lightning_replay", "lightning_replay.levels", "rllib_ext"])
def test_a_package_imports_no_library_before_one_of_its_names_is_used(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "libraries = {'torch', 'tensordict', 'torchrl', 'numba', 'lightning', 'ray', 'gymnasium'}\n"
        "print(sorted(libraries & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout == "[]\n"


def test_levels_are_selected_scored_saved_and_loaded_without_torchrl(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from tensordict import TensorDict\n"
        "import lightning_replay.levels as package\n"
        "for name in {*package.__all__} - {'LevelSampler', 'LevelWriter'}: getattr(package, name)\n"
        "levels = package.plr(levels=range(8), seed=0)\n"
        "batches = iter(package.LevelBatchSampler(levels, batch_size=2))\n"
        "level_id = levels.next_level(actor=0)\n"
        "done = torch.tensor([[False], [True]])\n"
        "after = {'reward': torch.ones(2, 1), 'done': done, 'terminated': done, 'state_value': torch.zeros(2, 1)}\n"
        "steps = TensorDict({'state_value': torch.zeros(2, 1), 'next': after}, [2])\n"
        "assert levels.update(0, level_id, steps, episode_done=True) > 0.0\n"
        "assert len(next(batches)) == 2\n"
        f"levels.save({str(tmp_path / 'levels')!r})\n"
        f"levels.load({str(tmp_path / 'levels')!r})\n"
        "print(sorted({'torchrl', 'numba', 'lightning_replay.parts'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.slow
def test_imports_leave_the_start_method_of_processes_as_it_was() -> None:
    """The program has no main guard: where processes are spawned, they would run it again."""
    code = (
        "import multiprocessing, gymnasium\n"
        "import lightning_replay.lit, lightning_replay.agents\n"
        "from lightning_replay import recipes\n"
        "recipes.uniform(capacity=10, batch_size=2)\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
        "envs = gymnasium.make_vec('CartPole-v1', num_envs=2, vectorization_mode='async')\n"
        "assert envs.reset(seed=0)[0].shape == (2, 4)\n"
        "envs.close()\n"
        "import importlib.resources, torchrl\n"
        "assert importlib.resources.files(torchrl).is_dir()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("hooks", "first", "method"),
    [("1", "lightning_replay.replay", None), ("0", "lightning_replay.replay", "spawn"), ("1", "torchrl", "spawn")],
    ids=["by this library", "turned off", "by the program"],
)
def test_only_an_import_of_torchrl_by_this_library_leaves_the_start_method(
    hooks: str, first: str, method: str | None
) -> None:
    code = (
        "import importlib, multiprocessing, lightning_replay\n"
        f"importlib.import_module({first!r})\n"
        "print(multiprocessing.get_start_method(allow_none=True))\n"
    )
    environment = {**os.environ, "LIGHTNING_REPLAY_HOOKS": hooks}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, env=environment
    )
    assert result.stdout.split() == [str(method)]


def test_an_import_of_the_package_alone_sets_no_hook_around_forks() -> None:
    code = "import sys, lightning_replay, lightning_replay.schedules; print('lightning_replay.forking' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.split() == ["False"]
