# SPDX-License-Identifier: Apache-2.0
"""The command line ``lightning-replay``: Lightning's subcommands on our classes, and ``configs``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]

_DESCRIPTION = """Trains an agent with a replay method; every choice is a class path in a YAML file.

  lightning-replay configs                                       lists the files that come with the library
  lightning-replay fit -c configs/lightning/per_dqn_cartpole.yaml
  lightning-replay fit -c FILE --data.init_args.env_steps=3000 --print_config
  lightning-replay fit -c FILE --data.init_args.replay=uniform
  lightning-replay fit -c configs/lightning/plr_ppo_multiroom.yaml --data.init_args.levels=UniformLevels

A recipe's name stands for its class path, lightning_replay.recipes.NAME. One numerical thread is used unless
OMP_NUM_THREADS is set: networks this small gain nothing from more, and lose much where cores are shared.
"""

_REPLAY_OPTIONS = ("--data.init_args.replay", "--data.replay")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        arguments: without the program's name; those of the process if absent.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["configs"]:
        _list_configs()
        return
    given = _with_class_paths(given)
    try:
        import jsonargparse  # noqa: F401
        import lightning.pytorch.cli  # noqa: F401
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"the command line needs {error.name}, which is not installed: pip install lightning-replay[lightning]"
        ) from error
    _run(given)


def _run(arguments: Sequence[str]) -> None:
    import lightning as L
    import torch
    from lightning.pytorch.cli import LightningCLI

    # so that these classes are known by their short names
    import lightning_replay.agents
    import lightning_replay.levels
    import lightning_replay.lit.callbacks
    import lightning_replay.lit.datamodule
    import lightning_replay.lit.level_datamodule  # noqa: F401

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    sys.argv = ["lightning-replay", *arguments]  # LightningCLI warns when it is given arguments beside the process's

    class ReplayCLI(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.set_defaults({"data": {"class_path": "lightning_replay.lit.ReplayDataModule"}})

    ReplayCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": "lightning-replay", "description": _DESCRIPTION},
        trainer_defaults={"max_epochs": -1},
    )


def _list_configs() -> None:
    from lightning_replay.shipped_configs import config_directory, config_files

    directory = config_directory()
    for name in config_files():
        print(directory / name)


def _with_class_paths(arguments: Sequence[str]) -> list[str]:
    """Replaces ``--data.init_args.replay=NAME`` by the recipe's class path; an unknown name lists the known ones."""
    expanded: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if not equals and expanded and expanded[-1] in _REPLAY_OPTIONS:
            option, value = "", argument
        elif option not in _REPLAY_OPTIONS:
            value = ""
        if value.isidentifier():
            argument = f"{option}{equals}lightning_replay.recipes.{_known_recipe(value)}"
        expanded.append(argument)
    return expanded


def _known_recipe(name: str) -> str:
    from lightning_replay import recipes

    try:
        recipes.by_name(name)
    except ValueError as error:
        raise SystemExit(f"lightning-replay: error: {error}") from None
    return name
