# SPDX-License-Identifier: Apache-2.0
"""The command line ``lightning-replay``: Lightning's subcommands on our classes, and ``configs``."""

from __future__ import annotations

import inspect
import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any, NoReturn

__all__ = ["main"]

_DESCRIPTION = """Trains an agent with a replay method; every choice is a class path in a YAML file.

  lightning-replay configs                                       lists the files that come with the library
  lightning-replay fit -c configs/lightning/per_dqn_cartpole.yaml
  lightning-replay fit -c FILE --data.init_args.env_steps=3000 --print_config
  lightning-replay fit -c FILE --data.init_args.replay=uniform
  lightning-replay fit -c configs/lightning/plr_ppo_multiroom.yaml --data.init_args.levels=UniformLevels
  lightning-replay fit --data.help=LevelDataModule                lists the options of a class

A recipe's name stands for its class path, lightning_replay.recipes.NAME, and so does the name of a score of levels. One
numerical thread is used unless OMP_NUM_THREADS is set: networks this small gain nothing from more, and lose much where
cores are shared.
"""

_REPLAY, _SCORE = "--data.replay", "--data.levels.score"  # init_args may be left out


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
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    _import_classes()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    sys.argv = ["lightning-replay", *arguments]  # LightningCLI warns when it is given arguments beside the process's

    is_begun = False  # what a run that is begun refuses keeps its traceback

    class ReplayCLI(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.set_defaults({"data": {"class_path": "lightning_replay.lit.ReplayDataModule"}})

        def after_instantiate_classes(self) -> None:
            nonlocal is_begun
            is_begun = True

    said = (ArgumentError, ValueError, MisconfigurationException)
    try:
        ReplayCLI(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "lightning-replay", "description": _DESCRIPTION, "exit_on_error": False},
            trainer_defaults={"max_epochs": -1},
        )
    except (*said, TypeError) as error:
        key, root = _option_and_cause(error)
        is_ours = isinstance(root, TypeError) and _is_of("lightning_replay", root)
        if is_begun or not (is_ours or isinstance(root, said) or isinstance(error, ArgumentError)):
            raise
        _refuse(key + " ".join(str(root).split()))


def _import_classes() -> None:
    """Imports what may be named without its path."""
    import lightning_replay.agents
    import lightning_replay.lit.callbacks
    import lightning_replay.lit.datamodule
    import lightning_replay.lit.level_datamodule  # noqa: F401


def _option_and_cause(error: BaseException) -> tuple[str, BaseException]:
    """What a class or jsonargparse said first, and of which option, ``"data.levels: "``.

    jsonargparse raises errors from errors, one for each level of nesting, ``Parser key "data": ...``.
    """
    keys: list[str] = []
    while _is_of("jsonargparse", error):
        found = re.match(r'Parser key "([^"]+)":', str(error))
        if found and keys[-1:] != [found[1]]:
            keys.append(found[1])
        following = error.__cause__ or error.__context__
        if following is None:
            break
        error = following
    return ".".join(keys) + ": " if keys else "", error


def _is_of(package: str, error: BaseException) -> bool:
    """Whether the line that raised it is of a package."""
    return any(package in Path(frame.filename).parts for frame in extract_tb(error.__traceback__)[-1:])


def _refuse(sentence: str) -> NoReturn:
    print(f"lightning-replay: error: {sentence.rstrip('.')} (see lightning-replay --help)", file=sys.stderr)
    raise SystemExit(2)


def _list_configs() -> None:
    from lightning_replay.shipped_configs import config_directory, config_files

    directory = config_directory()
    for name in config_files():
        print(directory / name)


def _with_class_paths(arguments: Sequence[str]) -> list[str]:
    """Replaces the name of a recipe or of a score by its class path; an unknown recipe lists the known ones."""
    expanded: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if equals:
            expanded.append(f"{option}={_class_path(option, value)}")
        else:  # perhaps the value of the option before
            expanded.append(_class_path(expanded[-1], argument) if expanded else argument)
    return expanded


def _class_path(option: str, value: str) -> str:
    option = option.replace(".init_args", "")
    if option == _REPLAY and value.isidentifier():
        from lightning_replay import recipes

        try:
            recipes.by_name(value)
        except ValueError as error:
            _refuse(str(error))
        return f"lightning_replay.recipes.{value}"
    if option == _SCORE and value.isidentifier():
        from lightning_replay.levels import scores

        kind = getattr(scores, value, None)
        if inspect.isclass(kind) and not inspect.isabstract(kind):
            return f"lightning_replay.levels.scores.{value}"
    return value
