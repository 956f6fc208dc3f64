# SPDX-License-Identifier: Apache-2.0
"""What is shipped and published: pins, typed packages, the licence, configuration files, the README on PyPI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lightning_replay.options import config_directory, config_files
from tests.install import Progress, installed_since
from tests.release import check_page, check_wheel

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
    names = zipfile.ZipFile(wheel).namelist()
    check_wheel(names)
    for lacking in (
        "lightning_replay/py.typed",
        "rllib_ext/py.typed",
        "lightning_replay/replay.py",
        "lightning_replay/_configs/lightning/per_dqn_cartpole.yaml",
    ):
        with pytest.raises(AssertionError, match=f"the wheel lacks .*{lacking}"):
            check_wheel(set(names) - {lacking})
    for foreign in ("tests/matrix.py", "lightning_replay/tests/test_replay.py", "docs/readme_links.py"):
        with pytest.raises(AssertionError, match=f"the wheel contains .*{foreign}"):
            check_wheel([*names, foreign])


@pytest.mark.slow
def test_the_readme_of_the_wheel_has_no_relative_address(wheel: Path) -> None:
    """PyPI shows the text without the files of the repository."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode().partition("\n\n")[2]
    assert text.startswith("# lightning-replay\n")
    targets = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text)
    assert len(targets) > 40 and [target for target in targets if not target.startswith("https://")] == []
    source = f"https://github.com/lightning-replay/lightning-replay/blob/v{PROJECT['project']['version']}/"
    ours = [target.removeprefix(source).partition("#")[0] for target in targets if target.startswith(source)]
    assert len(ours) > 20 and [target for target in ours if not (ROOT / target).exists()] == []


@pytest.mark.parametrize(
    ("html", "refused"),
    [
        ('<a href="https://doi.org/1"></a><img src="docs/demo.png">', "docs/demo.png"),
        ('<a href="docs/lightning.md"></a>', "docs/lightning.md"),
        ('<a href="#installation"></a><table></table><pre></pre>', "tables or code are not shown"),
    ],
)
def test_a_page_with_an_address_that_leads_nowhere_is_refused(html: str, refused: str) -> None:
    with pytest.raises(AssertionError, match=refused):
        check_page(html)


def test_every_action_is_pinned_by_a_hash_with_its_version() -> None:
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    used = [line for path in files for line in re.findall(r"uses: (.+)", path.read_text())]
    assert len(used) > 10
    ours = [line for line in used if line.startswith("./")]
    pinned = [line for line in used if re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line)]
    assert len(ours) == 1 and sorted(ours + pinned) == sorted(used)
    hashes = {tuple(line.split("@")) for line in pinned}
    assert len(hashes) == len({name for name, _ in hashes}), "an action is pinned to two versions"


def test_a_tag_is_published_after_its_tests() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    jobs = release["jobs"]
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key "on" as true
    assert jobs["tests"]["uses"].startswith("./.github/workflows/tests.yml")
    assert set(jobs["publish"]["needs"]) == {"tests", "build"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and "password" not in str(jobs["publish"])
    assert [step.get("run") for step in jobs["build"]["steps"]].count("make release PYTHON=python") == 1
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert "workflow_call" in tests[True]


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == version


def test_the_changelog_of_a_version_is_one_page() -> None:
    for text in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        assert len(text.splitlines()) <= 60 and len(text.split()) <= 800, text.splitlines()[0]


def _installed_by(target: str, folder: Path, ages: dict[str, int]) -> str:
    """The extras that ``make`` would install for a target if files have the given ages in seconds."""
    now = time.time()
    for name, age in ages.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (now - age, now - age))
    command = ["make", "-n", "-f", str(ROOT / "Makefile"), target]
    variables = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    result = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=True)
    return " ".join(re.findall(r"--editable '\.\[(\S+)\]'", result.stdout))


@pytest.mark.parametrize(
    ("stamps", "demo", "environment"),
    [
        ({}, "lightning,grids,plots", "all,docs,dev"),
        ({".venv/.demo": 1}, "", "all,docs,dev"),
        ({".venv/.demo": 1, ".venv/.stamp": 1}, "", ""),
        ({".venv/.demo": 9, ".venv/.stamp": 9}, "lightning,grids,plots", "all,docs,dev"),
        ({".venv/.demo": 1, ".venv/.stamp": 9}, "", "all,docs,dev"),
    ],
)
@pytest.mark.parametrize("newest", ["pyproject.toml", "constraints.txt"])
def test_make_installs_what_a_target_needs(
    stamps: dict[str, int], demo: str, environment: str, newest: str, tmp_path: Path
) -> None:
    ages = {"pyproject.toml": 20, "constraints.txt": 20} | {newest: 5} | stamps
    assert _installed_by("demo", tmp_path, ages) == demo
    assert _installed_by("environment", tmp_path, ages) == environment


def test_the_whole_installation_serves_the_demo() -> None:
    assert re.search(r"^\t@touch \.venv/\.demo \$@$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_progress_of_pip_is_told_in_a_line() -> None:
    installed = iter([0, 1, 2, 6])
    moments: list[float] = []
    progress = Progress(lambda moment: moments.append(moment) or next(installed))
    assert str(progress) == "0 packages found"
    progress.read("Collecting torch<2.16,>=2.11 (from lightning-replay==0.1.0)")
    progress.read("  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl.metadata (30 kB)")
    progress.read("Processing /wheels/numpy-2.4.0-py3-none-any.whl (from lightning-replay==0.1.0)")
    assert str(progress) == "2 packages found"
    progress.read("Downloading https://example.org/torch-2.13.0-cp311-cp311-linux_x86_64.whl (190.1 MB)")
    assert str(progress) == "2 packages found, downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (190.1 MB)"
    progress.read("Installing collected packages: numpy, torch")
    shown = [str(progress) for _ in range(4)]  # Another process installs more.
    assert shown == [
        "[                    ] 0 of 2 packages installed",
        "[##########          ] 1 of 2 packages installed",
        "[####################] 2 of 2 packages installed",
        "[####################] 2 of 2 packages installed",
    ]

    assert len(set(moments)) == 1 and 0 <= time.time() - moments[0] < 60


def test_a_renewed_package_counts_as_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    for name, moment in (("a-1.dist-info", 100), ("b-1.dist-info", 300), ("c-1.dist-info", 200), ("c", 300)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (moment, moment))
    assert [installed_since(moment) for moment in (0, 200, 201, 301)] == [3, 2, 1, 0]


def test_a_failed_installation_shows_what_pip_said(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tests" / "install.py", "--no-index", "--find-links", tmp_path, "no-such-package"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "No matching distribution found for no-such-package" in result.stderr


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
