# SPDX-License-Identifier: Apache-2.0
"""Saves, pickles and code from before the files moved: every import path of then leads to what it named."""

from __future__ import annotations

import importlib
import json
import pickle
from pathlib import Path

import pytest

from lightning_replay import load_replay
from lightning_replay.moved import MOVED

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
NEXT_DRAWS = json.loads((FIXTURES / "saves_before_the_move" / "next_draws.json").read_text())
IMPORT_PATHS = json.loads((FIXTURES / "import_paths_before_the_move.json").read_text())


@pytest.mark.parametrize("name", sorted(NEXT_DRAWS))
def test_a_save_of_then_goes_on_with_the_draws_of_then(name: str) -> None:
    replay = load_replay(FIXTURES / "saves_before_the_move" / name, trust=["tests"])
    assert [replay.sample()["index"].tolist() for _ in range(3)] == NEXT_DRAWS[name]


@pytest.mark.filterwarnings("ignore:.* has moved:DeprecationWarning")
@pytest.mark.parametrize("path", IMPORT_PATHS)
def test_what_was_public_is_imported_from_where_it_was(path: str) -> None:
    module, _, name = path.partition(":")
    assert getattr(importlib.import_module(module), name, None) or importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("former", sorted(MOVED))
def test_a_module_has_moved_to_one_that_exists(former: str) -> None:
    assert importlib.util.find_spec(MOVED[former]) is not None
    assert MOVED[former] not in MOVED


def test_a_former_path_warns_and_names_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match=r"import MeanReturn from lightning_replay\.schedulers"):
        from lightning_replay.progress import MeanReturn
    assert MeanReturn.__module__ == "lightning_replay.schedulers.progress"


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ImportError):
        from lightning_replay.progress import Nothing  # noqa: F401


def test_a_pickle_finds_a_class_under_its_former_module() -> None:
    former = b"clightning_replay.frames.storage\nFrameStorage\n."
    with pytest.warns(DeprecationWarning, match=r"lightning_replay\.storage\.frames"):
        assert pickle.loads(former).__name__ == "FrameStorage"


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("checkpoint", "load_replay"),
        ("episodes", "n_step_returns"),
        ("tables", "Tables"),
        ("storage", "MissingDeviceError"),
    ],
)
def test_a_name_of_a_module_that_is_a_package_now(package: str, name: str) -> None:
    module = importlib.import_module(f"lightning_replay.{package}")
    with pytest.warns(DeprecationWarning, match=f"import {name} from lightning_replay"):
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018
