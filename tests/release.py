# SPDX-License-Identifier: Apache-2.0
"""Builds the two files of a release into ``dist/``, checks them, installs them, and runs them: ``make release``.

.. code-block:: shell

    python -m tests.release              # everything: about twenty minutes on two cores, 3 GB of disk at a time
    python -m tests.release --check      # builds and checks only, in a minute

Each file is installed by pip and by uv, with the pinned versions, into an empty environment in ``.bench-release/``. The
Python blocks of its README and one configuration file run there, in a folder without the checkout. ``tests/matrix.py``
installs each extra alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.metadata import Metadata

from tests.integration.test_pages import sections, shortened
from tests.matrix import ROOT, versions

FOLDER = ROOT / ".bench-release"
DIST = ROOT / "dist"
CHECKERS = (
    "check-jsonschema==0.39.0",
    "check-wheel-contents==0.6.3",
    "readme-renderer[md]==46.0",
    "twine==7.0.0",
    "zizmor==1.32.0",
)
PACKAGES = ("lightning_replay", "rllib_ext")
INSTALLERS = ("uv", "pip")
EXTRAS = "lightning,mujoco,plots,rllib"  # The blocks of the README and the configuration file need them.
CONFIGURATION = "lightning/per_dqn_cartpole.yaml"
SHORTER = ("--data.init_args.env_steps=1500", "--trainer.enable_model_summary=false")


def build() -> tuple[Path, Path]:
    """Returns the wheel and the source distribution, the only files in ``dist/``."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(DIST)], cwd=ROOT, check=True)
    (wheel,) = DIST.glob("*.whl")
    (sdist,) = DIST.glob("*.tar.gz")
    return wheel, sdist


def check_wheel(names: Iterable[str]) -> None:
    """Raises AssertionError if the files of a wheel are not those of the two packages, their licence and metadata."""
    names = set(names)
    for package in PACKAGES:
        sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
        missing = (sources | {f"{package}/py.typed"}) - names
        assert not missing, f"the wheel lacks {sorted(missing)}"
    files = {
        f"lightning_replay/_configs/{path.relative_to(ROOT / 'configs')}" for path in ROOT.glob("configs/**/*.yaml")
    }
    assert files <= names, f"the wheel lacks {sorted(files - names)}"
    assert any(name.endswith("licenses/LICENSE") for name in names), "the wheel lacks the licence"
    others = {name for name in names if not name.startswith(PACKAGES) or "tests" in name.split("/")}
    assert not others, f"the wheel contains {sorted(others)}"


def check_sdist(names: Iterable[str]) -> None:
    """Raises AssertionError if the wheel, the tests, or the site cannot be built from a source distribution."""
    found = {name.partition("/")[2] for name in names}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    needed = {name for name in tracked if not name.startswith((".ci/", ".git", ".pre-commit"))}
    assert needed <= found, f"the source distribution lacks {sorted(needed - found)}"
    others = found - set(tracked) - {"PKG-INFO"}
    assert not others, f"the source distribution contains {sorted(others)}"


def metadata_of(wheel: Path, sdist: Path) -> Metadata:
    """Returns the metadata, valid and the same in both files."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name)
        check_wheel(archive.namelist())
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert member.read() == text, "the metadata of the two files differ"
        check_sdist(entry.name for entry in archive if entry.isfile())
    return Metadata.from_email(text, validate=True)


def check_page(html: str) -> None:
    """Raises AssertionError if the README, as PyPI shows it, has a link or a picture that leads nowhere."""
    targets = re.findall(r'(?:href|src|srcset)="([^"]*)"', html)
    relative = [target for target in targets if not target.startswith(("https://", "#"))]
    assert targets and not relative, f"relative addresses in the README: {relative}"
    assert html.count("<table") >= 1 and html.count("<pre") >= 4, "tables or code are not shown as such"


def check(wheel: Path, sdist: Path) -> Path:
    """Checks both files, and the workflows that publish them; returns the README of their metadata."""
    readme = FOLDER / "README.md"
    readme.write_text(metadata_of(wheel, sdist).description)
    tools = FOLDER / "tools"
    run("uv", "venv", "--quiet", tools)
    run("uv", "pip", "install", "--quiet", "--python", tools, *CHECKERS)
    run(tools / "bin" / "twine", "--no-color", "check", "--strict", wheel, sdist)
    run(tools / "bin" / "check-wheel-contents", "--toplevel", ",".join(PACKAGES), wheel)
    run(tools / "bin" / "python", "-m", "readme_renderer", "-o", readme.with_suffix(".html"), readme)
    check_page(readme.with_suffix(".html").read_text())
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    run(tools / "bin" / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    run(tools / "bin" / "zizmor", "--offline", "--quiet", *workflows)
    return readme


def run(*command: str | Path, cwd: Path = FOLDER) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, env=environment(), check=True)


def environment() -> dict[str, str]:
    """Returns the variables of a process that does not see the checkout; uv looks where pip was told to look."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "").replace(" ", ",")} | variables


def install(installer: str, file: Path, folder: Path) -> Path:
    """Installs one file and what it requires into an empty environment; returns the environment's interpreter."""
    python = folder / "bin" / "python"
    wanted = [f"lightning-replay[{EXTRAS}] @ {file.as_uri()}", "--constraint", ROOT / "constraints.txt"]
    if installer == "uv":
        run("uv", "venv", "--quiet", "--python", sys.executable, folder)
        run("uv", "pip", "install", "--quiet", "--python", python, *wanted)
    else:
        run(sys.executable, "-m", "venv", folder)
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted)
    run("uv", "pip", "check", "--quiet", "--python", python)
    return python


def use(python: Path, readme: Path, folder: Path) -> None:
    """Runs the blocks of a README and one configuration file, by an interpreter that has the package installed."""
    folder.mkdir()
    for number, (name, code) in enumerate(sections(readme)):
        script = folder / f"block_{number}.py"
        script.write_text(shortened(code))
        print(f"   {name}", flush=True)
        run(python, script, cwd=folder)
    where = "from lightning_replay.options import config_directory; print(config_directory())"
    command = [python, "-c", where]
    directory = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=True
    ).stdout.strip()
    assert Path(directory).is_relative_to(python.parents[1]), f"{directory} is not in the environment"
    print(f"   {CONFIGURATION}", flush=True)
    run(python.with_name("lightning-replay"), "fit", "-c", f"{directory}/{CONFIGURATION}", *SHORTER, cwd=folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.release")
    parser.add_argument("--check", action="store_true", help="builds and checks only")
    options = parser.parse_args()
    started = time.perf_counter()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    wheel, sdist = build()
    readme = check(wheel, sdist)
    rows = [f"built and checked in {time.perf_counter() - started:.0f} s"]
    for file in () if options.check else (wheel, sdist):
        for installer in INSTALLERS:
            begun = time.perf_counter()
            print(f"== {file.name}, installed by {installer}", flush=True)
            folder = FOLDER / installer
            python = install(installer, file, folder)
            seconds = time.perf_counter() - begun
            use(python, readme, FOLDER / "elsewhere")
            total = time.perf_counter() - begun
            rows.append(
                f"{file.name} by {installer}: {seconds:.0f} s to install, {total:.0f} s in all, {versions(python)}"
            )
            shutil.rmtree(FOLDER / "elsewhere")
            shutil.rmtree(folder)
    print(*rows, sep="\n")
    for file in (wheel, sdist):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        print(f"{file.relative_to(ROOT)}  {file.stat().st_size} bytes  sha256 {digest}")
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
