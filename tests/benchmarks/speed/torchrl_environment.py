# SPDX-License-Identifier: Apache-2.0
"""T1 to T3 and T5 in ``.bench-torchrl``, an environment whose torch loads TorchRL's C++ extension."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FOLDER = ROOT / ".bench-torchrl"
# torchrl 0.14.1 is compiled against the newer signature of torch::autograd::_wrap_outputs; torch 2.13 has the older.
TORCH = os.environ.get("BENCH_TORCH", "torch==2.14.0")
PINNED = ("torchrl", "tensordict", "numpy", "numba", "safetensors", "sortedcontainers")
BENCHMARKS = ("bench_uniform.py", "bench_prioritized.py", "bench_insert.py")


def build() -> Path:
    """Returns the interpreter of the environment, which is built when it is not there."""
    python = FOLDER / "bin" / "python"
    if (FOLDER / ".complete").exists():
        return python
    print(f"building {FOLDER.name} with {TORCH} (once, several GB)", flush=True)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    others = [pin for pin in pins if pin.split("==")[0] in PINNED]
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*install, TORCH, *others, "hatchling", "editables"], check=True)
    subprocess.run([*install, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], check=True)
    subprocess.run([str(python), "-c", "import torchrl._torchrl"], check=True)
    (FOLDER / ".complete").touch()
    return python


def main() -> None:
    """Builds the environment and runs the benchmarks in it; further options go to each of them."""
    python = build()
    for name in BENCHMARKS:
        print(f"\n== {name}, {TORCH}", flush=True)
        subprocess.run([str(python), str(HERE / name), *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()
