# SPDX-License-Identifier: Apache-2.0
"""Tests at the ends of the ranges in pyproject.toml, and the distributions beside other libraries: ``make matrix``.

.. code-block:: shell

    python -m tests.matrix                        # all of them: about three hours on two cores, 30 GB of disk
    python -m tests.matrix lowest python3.13      # some
    python -m tests.matrix beside                 # the wheel beside LeRobot, Isaac Lab's pins, and others
    python -m tests.matrix distributions          # the wheel and the sdist, with each extra alone
    python -m tests.matrix trl                    # the example with TRL: five minutes
    python -m tests.matrix lowest -- tests/unit   # with other arguments for pytest

Each environment is built with uv in ``.bench-matrix/`` and removed after its tests. The last lines are a table in
Markdown: environment, versions, result.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".bench-matrix"
HOSTS = (
    *("torch", "torchrl", "tensordict", "lightning", "gymnasium", "ray", "numpy", "trl", "transformers"),
    *("lerobot", "stable-baselines3", "tianshou"),
)
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]
# What an extra is for, tried in an environment that has no other.
TRIED = {
    "": "from lightning_replay import recipes; recipes.prioritized(10, 2)",
    "lightning": "import lightning_replay.lit, lightning_replay.agents",
    "rllib": "import rllib_ext; rllib_ext.replay_config('prioritized', capacity=10)",
    "mujoco": "import gymnasium; gymnasium.make('HalfCheetah-v5').reset()",
    "box2d": "import gymnasium; gymnasium.make('LunarLander-v3').reset()",
    "grids": "import gymnasium, lightning_replay.envs; gymnasium.make('ThreeRooms-v0').reset()",
    "mazes": "import gymnasium_robotics",
    "atari": "import ale_py, cv2",
    "minatar": "import minatar",
    "faiss-cpu": "from lightning_replay import recipes; recipes.neighborhood_mixup(10, 2, backend='faiss_flat')",
    "plots": "import matplotlib",
    "demonstrations": "import h5py, minari, PIL.Image, pyarrow.dataset, lightning_replay.datasets",
    "remote": "from lightning_replay.saving.folders import Folder; Folder.at_url('memory://replay')",
    "sb3": "import lightning_replay.sb3",
}


@dataclass(frozen=True)
class Environment:
    """Versions to test."""

    python: str = "3.11"
    resolution: str = "highest"  # of uv, or lowest-direct, the lowest that pyproject.toml allows
    extra: str | None = None  # the only one, of a distribution with the pinned versions; None: the checkout with all
    distribution: str = "wheel"
    example: str | None = None  # file whose first lines say which packages it needs besides
    program: str | None = None  # of tests/beside, run with the wheel and the newest versions that ``packages`` allow
    packages: tuple[str, ...] = ()


# What the setup files of Isaac Lab pin, without what needs its simulator.
ISAAC_LAB = (
    "torch==2.7.0",
    "numpy<2",
    "gymnasium==1.2.1",
    "h5py==3.15.1",
    "onnx>=1.18",
    "packaging<24",
    "pillow==11.3.0",
)
BESIDE = {
    "isaac-lab-pins": Environment(extra="lightning", program="with_isaac_pins.py", packages=ISAAC_LAB),
    "lerobot": Environment("3.12", extra="demonstrations", program="with_lerobot.py", packages=("lerobot[dataset]",)),
    "stable-baselines3": Environment(extra="sb3", program="with_stable_baselines3.py"),
    "tianshou": Environment(extra="", program="with_tianshou.py", packages=("tianshou",)),
}
ENVIRONMENTS = {
    "lowest": Environment(resolution="lowest-direct"),
    "highest": Environment(),
    "python3.12": Environment("3.12"),
    "python3.13": Environment("3.13"),
    "python3.14": Environment("3.14"),
    **BESIDE,
    "trl": Environment(example="trl_prompts.py"),
    "sdist": Environment(extra="", distribution="sdist"),
    **{f"only-{extra or 'core'}": Environment(extra=extra) for extra in TRIED},
    **{f"python3.14-only-{extra or 'core'}": Environment("3.14", extra=extra) for extra in TRIED if extra != "box2d"},
}


def distributions() -> Path:
    folder = FOLDER / "dist"
    shutil.rmtree(folder, ignore_errors=True)  # may hold those of another version
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


def packages_of(example: str) -> list[str]:
    """Returns the packages that an example tells its user to install, with their pins."""
    lines = ast.get_docstring(ast.parse((ROOT / "examples" / example).read_text()))
    (packages,) = re.findall(r"pip install (.+)$", lines, re.MULTILINE)
    return packages.split()


def install(environment: Environment, folder: Path) -> Path:
    """Builds an environment; returns its interpreter."""
    python = folder / "bin" / "python"
    subprocess.run(["uv", "venv", "--quiet", "--seed", "--python", environment.python, str(folder)], check=True)
    if environment.example is not None:
        wanted = ["--editable", str(ROOT), *packages_of(environment.example), "hypothesis", "pytest", "pytest-xdist"]
        wanted += CONSTRAINTS
    elif environment.extra is None:
        wanted = ["--editable", f"{ROOT}[all,docs,dev]"]
    else:
        (file,) = distributions().glob("*.whl" if environment.distribution == "wheel" else "*.tar.gz")
        wanted = [f"lightning-replay[{environment.extra}] @ {file.as_uri()}", *environment.packages]
        wanted += CONSTRAINTS if environment.program is None else []
    command = ["uv", "pip", "install", "--quiet", "--python", str(python), "--resolution", environment.resolution]
    subprocess.run([*command, *wanted], check=True)
    return python


def versions(python: Path) -> str:
    listed = subprocess.run(
        ["uv", "pip", "list", "--python", str(python), "--format", "freeze"], capture_output=True, text=True, check=True
    )
    found = dict(line.split("==", 1) for line in listed.stdout.splitlines() if "==" in line)
    return ", ".join(f"{name} {found[name]}" for name in HOSTS if name in found)


def tested(environment: Environment, python: Path, arguments: list[str]) -> tuple[str, bool]:
    """Runs the tests of an environment; returns the result in a line, and whether it is good."""
    if environment.extra is not None:
        program = ["-c", TRIED[environment.extra]]
        if environment.program is not None:
            program = [str(ROOT / "tests" / "beside" / environment.program)]
        # Isolated, so that the wheel is imported and not the checkout.
        result = subprocess.run([python, "-I", *program], cwd=FOLDER, check=False)
        return "works" if result.returncode == 0 else "fails", result.returncode == 0
    if environment.example is not None and not arguments:
        arguments = ["-m", "trl", "tests/integration/test_trl.py"]
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *arguments]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RL_LOGGING_LEVEL": "WARNING"}
    # Other versions warn of other things; the pinned ones are those whose warnings are errors.
    with subprocess.Popen(
        [*command, "-W", "default"], cwd=ROOT, env=os.environ | threads, stdout=subprocess.PIPE, text=True
    ) as process:
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    summary = [line for line in lines if re.search(r"\d+ (passed|failed|error)", line)]
    shown = summary[-1].strip("= \n") if summary else f"no test ran, exit status {process.returncode}"
    return shown, process.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join(ENVIRONMENTS)}, or distributions, or beside; all without any"
    )
    ours, _, arguments = " ".join(sys.argv[1:]).partition("-- ")
    options = parser.parse_args(ours.split())
    if options.names == ["distributions"]:
        options.names = [name for name, made in ENVIRONMENTS.items() if made.extra is not None and made.program is None]
    if options.names == ["beside"]:
        options.names = [*BESIDE]
    if unknown := set(options.names) - set(ENVIRONMENTS):
        parser.error(f"no environment is named {', '.join(sorted(unknown))}")
    missing = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    missing -= {*TRIED, "all", "dev", "docs", "faiss-gpu", "faiss-gpu-cu13"}
    assert not missing, f"nothing is tried with the extras {sorted(missing)}"
    rows, are_good = [], True
    for name in options.names or ENVIRONMENTS:
        print(f"== {name}", flush=True)
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        try:
            python = install(ENVIRONMENTS[name], folder)
            result, is_good = tested(ENVIRONMENTS[name], python, arguments.split())
            rows.append((name, versions(python), result))
            are_good &= is_good
        except subprocess.CalledProcessError as error:
            rows.append((name, "", f"not installed: {error}"))
            are_good = False
        shutil.rmtree(folder, ignore_errors=True)
    print("\n| environment | versions | result |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return int(not are_good)


if __name__ == "__main__":
    sys.exit(main())
