# SPDX-License-Identifier: Apache-2.0
"""Runs of the configuration files that come with the library, from the command line as users start them."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from lightning_replay.options import config_directory


def seeded(seed: int) -> list[str]:
    """Returns the arguments that give a run of any file of ``configs/lightning`` this seed."""
    return [f"--seed_everything={seed}", f"--data.init_args.seed={seed}"]


def evaluations(file: str, arguments: Sequence[str] = ()) -> list[tuple[int, float]]:
    """Runs ``lightning-replay fit -c configs/FILE ARGUMENTS`` on the CPU.

    Returns:
        Steps and returns of the evaluations after the random steps; updates in place of steps where none are collected.
    """
    from lightning_replay.lit.cli import main
    from tests.benchmarks.learning.learners.trainers import quiet_lightning

    quiet_lightning()
    logger = ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir=."]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = sys.argv
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                main(["fit", f"-c={config_directory() / file}", *logger, "--trainer.accelerator=cpu", *arguments])
        finally:
            sys.argv = given  # the command line replaces it
        (metrics,) = Path(folder).rglob("metrics.csv")
        rows = [row for row in csv.DictReader(metrics.open()) if row.get("eval/return")]
    return [(int(row["step"]), float(row["eval/return"])) for row in rows if int(row["step"]) > 0]
