# SPDX-License-Identifier: Apache-2.0
"""What is shipped: complete pins, typed packages, the licence, configuration files that an installed wheel finds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lightning_replay.options import config_directory, config_files

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def _required(requirement: Requirement, seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """Names of a requirement and of everything it requires here, as installed."""
    name = canonicalize_name(requirement.name)
    key = (name, frozenset(requirement.extras))
    if key in seen:
        return set()
    seen.add(key)
    names = {name}
    for text in metadata.requires(name) or []:
        dependency = Requirement(text)
        if dependency.name.startswith(("cuda-", "nvidia-", "triton")):  # torch's own, as it is built for CUDA
            continue
        environments = [{"extra": extra} for extra in ("", *requirement.extras)]
        if dependency.marker is None or any(dependency.marker.evaluate(each) for each in environments):
            names |= _required(dependency, seen)
    return names


def test_every_line_of_the_constraints_is_an_exact_pin_without_a_local_part() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", line), line


@pytest.mark.skipif(metadata.version("torch").split("+")[0] != _pins()["torch"], reason="not the pinned versions")
def test_the_constraints_pin_all_that_is_installed_with_every_extra_and_the_build_backend() -> None:
    seen: set[tuple[str, frozenset[str]]] = set()
    needed = _required(Requirement("lightning-replay[all,docs,dev]"), seen)
    for text in PROJECT["build-system"]["requires"]:
        needed |= _required(Requirement(text), seen)
    assert not needed - set(_pins()) - {"lightning-replay"}


def test_the_pins_lie_in_the_declared_ranges() -> None:
    pins = _pins()
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    for requirement in (Requirement(text) for group in groups for text in group):
        name = canonicalize_name(requirement.name)
        if name in pins:
            assert requirement.specifier.contains(pins[name]), f"{requirement} against {pins[name]}"


def test_the_extra_all_has_every_extra_a_user_can_install_together() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (requirement,) = extras["all"]
    assert Requirement(requirement).extras == set(extras) - {"all", "dev", "docs", "faiss-gpu", "faiss-gpu-cu13"}


def test_the_console_script_exists() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="lightning-replay")
    assert callable(script.load())


def test_the_checkout_finds_its_configuration_files() -> None:
    assert config_directory() == ROOT / "configs"
    found = (path.relative_to(ROOT / "configs") for path in ROOT.glob("configs/**/*.yaml"))
    assert config_files() == sorted(path.as_posix() for path in found)
    assert any(name.startswith("lightning/") for name in config_files())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    assert PROJECT["build-system"]["build-backend"] == "hatchling.build"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]  # by itself: no other tool
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_both_packages_the_configurations_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"lightning_replay/py.typed", "rllib_ext/py.typed"} <= names
    assert {f"lightning_replay/_configs/{name}" for name in config_files()} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"lightning_replay", "rllib_ext"}
    for package in ("lightning_replay", "rllib_ext"):
        sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
        assert sources <= names


@pytest.mark.slow
def test_an_installed_wheel_lists_its_configurations(wheel: Path, tmp_path: Path) -> None:
    """Unpacked where an installer would put it, before the checkout on the path."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import sys; from lightning_replay.lit.cli import main; sys.argv = ['lightning-replay', 'configs']; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    for name in config_files():
        assert name in result.stdout
    assert str(ROOT) not in result.stdout


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("folder", ["lightning_replay", "rllib_ext", "tests", "examples"])
def test_every_source_file_names_its_licence_first(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        assert not text or text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
