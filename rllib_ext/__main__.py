# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m rllib_ext FILE.yaml``: trains the algorithm of a file."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_replay.saving import DamagedFileError
from lightning_replay.saving.files import check_writable

_DESCRIPTION = """Trains an RLlib algorithm with a replay method, both described by a YAML file.

  python -m rllib_ext configs/rllib/per_dqn_cartpole.yaml
  python -m rllib_ext configs/rllib/plr_ppo_multiroom.yaml
  python -m rllib_ext FILE --set training.gamma=0.98 --set replay.recipe=uniform
  python -m rllib_ext FILE --restore runs/rllib/per_dqn_cartpole --set stop.env_steps=40_000

Environments, recipes, conditions and classes of your own, in modules of the current folder, are named by import path.
Ctrl-C ends training after the current iteration, and writes the checkpoint.
"""
_SMALLEST_CLUSTER = 8
_SECONDS_BETWEEN_CHECKPOINTS = 600.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, of these arguments or of the process's."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.num_cpus is not None and options.num_cpus < 1:
        parser.error(f"argument --num-cpus: {options.num_cpus} is below 1; give the CPUs that actors may ask for")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # networks this small lose by more
    try:
        import ray.rllib
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"python -m rllib_ext needs Ray RLlib, and {error.name} is not installed: "
            "pip install 'lightning-replay[rllib]'"
        ) from error

    from rllib_ext.config_file import read_sections

    with _one_line():  # a wrong file is reported before Ray has started
        sections = read_sections(options.file, _overrides(options))
    started = not ray.is_initialized()
    if started and os.environ.get("RAY_ADDRESS", "local") != "local":
        ray.init()  # a running cluster
    elif started:
        # An EnvRunner or Learner takes one CPU each, and small ones share a core well.
        count = options.num_cpus or max(_SMALLEST_CLUSTER, os.cpu_count() or 1)
        ray.init("local", num_cpus=count, include_dashboard=False, log_to_driver=False)
    try:
        _train(sections, options.restore)
    finally:
        if started:
            ray.shutdown()


def _parser() -> argparse.ArgumentParser:
    from lightning_replay.options import config_directory, config_files

    shipped = [f"  {config_directory() / name}" for name in config_files() if name.startswith("rllib/")]
    parser = argparse.ArgumentParser(
        prog="python -m rllib_ext",
        description=_DESCRIPTION,
        epilog="\n".join(["files that come with the library:", *shipped]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", help="YAML; see docs/rllib-yaml-and-tune.md")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in place of the file's value")
    parser.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="folder of two checkpoints, written in turns every ten minutes and at the end, or after Ctrl-C or SIGTERM",
    )
    parser.add_argument(
        "--restore", metavar="PATH", help="checkpoint to resume from with its buffer, or folder of --checkpoint"
    )
    parser.add_argument(
        "--num-cpus", type=int, help="of the local Ray that is started; actors are counted, not pinned to them"
    )
    return parser


def _train(sections: dict[str, Any], restore: str | None) -> None:
    from lightning_replay.saving.folders import Folder
    from rllib_ext.config_file import configured, updates_per_env_step
    from rllib_ext.interruption import Interruption
    from rllib_ext.turns import newest_in, save_in_turns

    with _one_line():
        config, settings = configured(sections)
        if settings.checkpoint is not None:
            folder = Folder.of_user(settings.checkpoint)
            newest_in(folder)  # raises now what it would raise after the training
            if folder.local is not None:
                check_writable("--checkpoint", folder.local)
        if restore is not None and "://" not in restore and not Path(restore).is_dir():
            raise ValueError(f"--restore {restore} is no folder; give that of a checkpoint")
    algorithm = config.build_algo()
    try:
        if restore is not None:
            with _one_line():
                whole = newest_in(Folder.of_user(restore))
                algorithm.restore_from_path(whole.path, filesystem=whole.filesystem)
        levels = algorithm.local_replay_buffer is None
        columns = ("levels", "episodes") if levels else ("stored", "drawn")
        test = (("held_out", "gap") if levels else ("eval",)) if config.evaluation_interval else ()
        rate = updates_per_env_step(config)
        print(f"updates per environment step: {'not fixed' if math.isnan(rate) else f'{rate:.4g}'}")
        print(f"{_row(('env_steps', 'updates', 'return', columns[0]))}{columns[1]:>10}{_row(test)}", flush=True)
        with Interruption() as interruption:
            is_over = False
            saved_at = time.monotonic()
            while not (is_over or interruption.requested):
                if settings.checkpoint is not None and time.monotonic() - saved_at > _SECONDS_BETWEEN_CHECKPOINTS:
                    save_in_turns(algorithm, folder)
                    saved_at = time.monotonic()
                try:
                    result = algorithm.train()
                except Exception:
                    # An iteration broke off in this state, so it is saved beside the last checkpoint.
                    if settings.checkpoint is not None:
                        print(
                            "checkpoint:",
                            save_in_turns(algorithm, Folder.of_user(f"{settings.checkpoint}-after-error")),
                        )
                    raise
                drawn = result.get("replay_buffer", {}).get("num_env_steps_sampled_lifetime", 0)
                held = result["levels"]["levels"] if levels else len(algorithm.local_replay_buffer)
                count = result["levels"]["episodes"] if levels else drawn
                _print(result, held, count, config.evaluation_interval)
                is_over = settings.stop.is_reached(result)
            if settings.checkpoint is not None:
                kind = "level" if levels else "replay"
                print(f"checkpoint with the {kind} buffer: {save_in_turns(algorithm, folder)}")
        if interruption.signal_number is not None:
            raise SystemExit(128 + interruption.signal_number)
    finally:
        algorithm.stop()


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Context manager that ends the command with the message of an error of the user's input."""
    try:
        yield
    except (ValueError, TypeError, OSError, ModuleNotFoundError, DamagedFileError) as error:
        raise SystemExit(f"python -m rllib_ext: error: {error}") from error


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    import yaml

    from rllib_ext.config_file import parse

    given = {}
    for text in options.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text} has no value; give --set {text}=VALUE")
        try:
            given[key] = parse(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {text}: the value is no YAML ({error})") from error
    if options.checkpoint is not None:
        given["checkpoint"] = options.checkpoint
    return given


def _row(values: Sequence[object]) -> str:
    return "".join(f"{value:>9}" for value in values)


def _print(result: dict[str, Any], held: int, drawn: float, interval: int | None) -> None:
    from rllib_ext.hooks import NUM_UPDATES_LIFETIME

    episode_return = result["env_runners"].get("episode_return_mean", float("nan"))
    clocks = result["timesteps_total"], result[NUM_UPDATES_LIFETIME]
    # RLlib repeats the last evaluation in the results of iterations without one.
    evaluation = result.get("evaluation", {}) if interval and result["training_iteration"] % interval == 0 else {}
    if "levels" in evaluation:
        found = [evaluation["levels"].get(name) for name in ("held_out_return_mean", "generalization_gap")]
    else:
        found = [evaluation.get("env_runners", {}).get("episode_return_mean")]
    test = [f"{value:.2f}" for value in found if value is not None]
    print(f"{_row((*clocks, f'{episode_return:.1f}', held))}{drawn:>10.0f}{_row(test)}", flush=True)


if __name__ == "__main__":
    if sys.path[0] == os.getcwd():  # a file of the user's must not stand in for a module of a library
        sys.path.append(sys.path.pop(0))
    main()
