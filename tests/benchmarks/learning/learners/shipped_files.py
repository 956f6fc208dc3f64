# SPDX-License-Identifier: Apache-2.0
"""Runs of the configuration files that come with the library, from the command line as users start them."""

from __future__ import annotations

import contextlib
import csv
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import yaml

from lightning_replay.options import config_directory


def seeded(seed: int) -> list[str]:
    """Returns the arguments that give a run of any file of ``configs/lightning`` this seed."""
    return [f"--seed_everything={seed}", f"--data.init_args.seed={seed}"]


def contents(file: str) -> dict[str, Any]:
    """Returns what a file of ``configs`` holds."""
    return yaml.safe_load((config_directory() / file).read_text())


def evaluations(file: str, arguments: Sequence[str] = (), folder: Path | None = None) -> list[tuple[int, float]]:
    """Runs ``lightning-replay fit -c configs/FILE ARGUMENTS`` on the CPU, or ``python -m rllib_ext``.

    Args:
        file: of ``configs``, such as ``"lightning/per_dqn_cartpole.yaml"``.
        arguments: of its command.
        folder: working directory, where a run that was interrupted there goes on; a temporary one by default.

    Returns:
        Steps and returns of the evaluations after the random steps; updates in place of steps where none are collected.
        A file of RLlib without an evaluation has the mean return of the last episodes in training.
    """
    with contextlib.ExitStack() as stack:
        here = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(contextlib.chdir(here))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        run = _rllib_returns if file.startswith("rllib/") else _lightning_returns
        return sorted(run(file, arguments, here).items())


def random_return(file: str, seed: int, episodes: int = 20) -> float:
    """Returns the mean return of random actions in the file's environment, as it is evaluated in."""
    import gymnasium

    import lightning_replay.envs  # noqa: F401  registers the library's own

    name, options = _environment(contents(file))
    if isinstance(name, dict):
        return _random_return_of_simulator(name, options | {"num_envs": episodes}, seed)
    with closing(gymnasium.make(name, **options)) as environment:
        environment.action_space.seed(seed)
        return float(np.mean([_played(environment, seed + episode) for episode in range(episodes)]))


def _environment(content: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if "environment" in content:
        return content["environment"]["env"], content["environment"].get("env_config", {})
    given = content["data"]["init_args"]
    return given["env"], given.get("env_kwargs", {}) | given.get("evaluation_env_kwargs", {})


def _random_return_of_simulator(env: dict[str, Any], options: dict[str, Any], seed: int) -> float:
    import torch

    from lightning_replay.lit.simulators import TensorActions, simulator_class

    simulator = simulator_class(env)(**options)
    actions = TensorActions(simulator.single_action_space, torch.device("cpu"))
    simulator.reset(seed=seed)
    total = torch.zeros(simulator.num_envs)
    is_first = torch.ones(simulator.num_envs, dtype=torch.bool)
    draws = iter(range(seed, seed + 1_000_000))
    while is_first.any():
        _, reward, terminated, truncated, _ = simulator.step(actions.random(simulator.num_envs, next(draws)))
        total += reward * is_first
        is_first &= ~(terminated | truncated)
    return float(total.mean())


def _played(environment: Any, seed: int) -> float:
    environment.reset(seed=seed)
    total, is_over = 0.0, False
    while not is_over:
        _, reward, terminated, truncated, _ = environment.step(environment.action_space.sample())
        total, is_over = total + float(reward), terminated or truncated
    return total


def _lightning_returns(file: str, arguments: Sequence[str], here: Path) -> dict[int, float]:
    from lightning_replay.lit.cli import main
    from tests.benchmarks.learning.learners.trainers import quiet_lightning

    quiet_lightning()
    given = ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir=."]
    given += ["--ckpt_path=last"] if list(here.rglob("last.ckpt")) else []
    program = sys.argv
    try:
        with open(here / "printed.txt", "a", buffering=1) as printed:
            _run(
                main,
                ["fit", f"-c={config_directory() / file}", *given, "--trainer.accelerator=cpu", *arguments],
                printed,
            )
    finally:
        sys.argv = program  # the command line replaces it
    logs = sorted(here.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime)
    rows = [row for log in logs for row in csv.DictReader(log.open()) if row.get("eval/return")]
    return {int(row["step"]): float(row["eval/return"]) for row in rows if int(row["step"]) > 0}


def _rllib_returns(file: str, arguments: Sequence[str], here: Path) -> dict[int, float]:
    from rllib_ext.__main__ import main

    checkpoint = here / contents(file)["checkpoint"]
    given = [f"--restore={checkpoint}"] if checkpoint.exists() else []
    with open(here / "printed.txt", "a" if given else "w", buffering=1) as printed:  # rows of a lost run are no part
        _run(main, [str(config_directory() / file), *given, *arguments], printed)
    return returns_in((here / "printed.txt").read_text())


def returns_in(printed: str) -> dict[int, float]:
    """Returns the return at each step from the table that ``python -m rllib_ext`` prints.

    Where it has a column of held-out levels or of evaluations, that one; rows without a number are left out.
    """
    returns: dict[int, float] = {}
    header: list[str] = []
    for words in map(str.split, printed.splitlines()):
        if words[:1] == ["env_steps"]:
            header = words
        elif words and words[0].isdigit() and len(words) == len(header):  # others have no evaluation
            row = dict(zip(header, words, strict=True))
            value = float(row.get("held_out", row.get("eval", row["return"])))
            returns |= {int(row["env_steps"]): value} if np.isfinite(value) else {}
    return returns


def _run(main: Callable[[list[str]], None], arguments: list[str], printed: TextIO) -> None:
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            main(arguments)
        except SystemExit as end:
            if end.code == 128 + 15:
                raise  # SIGTERM, after which the run can be resumed
            printed.flush()
            said = Path(printed.name).read_text().splitlines()[-1:]
            raise ValueError(f"{arguments} was refused: {end.code} {''.join(said)}") from end
