# SPDX-License-Identifier: Apache-2.0
"""The command line ``lightning-replay``: Lightning's subcommands on our classes, ``configs`` and ``inspect``."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning_replay.extras import missing_extra
from lightning_replay.lit.cli_errors import SEE_HELP, sentence_and_cause
from lightning_replay.validation import did_you_mean

__all__ = ["main"]

_DESCRIPTION = """Trains an agent with a replay method; every choice is a class path in a YAML file.

  lightning-replay configs                                       lists the files that come with the library
  lightning-replay inspect PATH --output page.html               what a saved buffer holds, as text and pictures
  lightning-replay fit -c configs/lightning/per_dqn_cartpole.yaml
  lightning-replay fit -c FILE --data.init_args.env_steps=3000 --print_config
  lightning-replay fit -c FILE --data.init_args.replay=uniform
  lightning-replay fit -c configs/lightning/plr_ppo_multiroom.yaml --data.init_args.levels=UniformLevels
  lightning-replay fit --data.help=LevelDataModule                lists the options of a class

The name of a recipe abbreviates its class path, lightning_replay.recipes.NAME; so does the name of a level score. One
numerical thread is used unless OMP_NUM_THREADS is set: networks this small gain nothing from more, and lose much where
cores are shared.
"""

_SUBCOMMANDS = ("fit", "validate", "test", "predict", "configs", "inspect")
_REPLAY, _SCORE = "--data.replay", "--data.levels.score"  # init_args may be left out


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. Modules of the current folder can be named in the files.

    Args:
        arguments: without the program's name; by default those of the process.

    Raises:
        SystemExit: with status 2 and one line, for what cannot be run; 143 after SIGTERM.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        print(f"usage: lightning-replay {{{','.join(_SUBCOMMANDS)}}} ...\n\n{_DESCRIPTION}", file=sys.stderr)
        raise SystemExit(2)
    if given[0] == "configs":
        from lightning_replay.shipped_configs import config_directory, config_files

        print(*(config_directory() / name for name in config_files()), sep="\n")
        return
    if given[0] == "inspect":  # without Lightning and TorchRL, whose imports take seconds
        from lightning_replay.report.command import main as inspect_save

        inspect_save(given[1:])
        return
    if not given[0].startswith("-") and given[0] not in _SUBCOMMANDS:
        is_file = given[0].endswith((".yaml", ".yml"))
        hint = f". Give a file as fit -c {given[0]}" if is_file else did_you_mean(given[0], _SUBCOMMANDS)
        _refuse(f"there is no subcommand {given[0]!r}; it must be one of {', '.join(_SUBCOMMANDS)}{hint}{SEE_HELP}")
    given = _with_class_paths(given)
    try:
        import gymnasium  # noqa: F401
        import jsonargparse  # noqa: F401
        import lightning.pytorch.cli  # noqa: F401
    except ModuleNotFoundError as error:
        _refuse(str(missing_extra("the command line", str(error.name), "lightning")))
    _add_current_folder()
    _run(given)


def _add_current_folder() -> None:
    """Puts the current folder behind the libraries on the path, unless ``PYTHONSAFEPATH`` or ``-P`` is given.

    Not before them: a file there with the name of a library would be run in its place.
    """
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _run(arguments: Sequence[str]) -> None:
    import lightning as L
    import torch
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    # classes of these modules may be named without their paths
    import lightning_replay.agents
    import lightning_replay.lit.callbacks
    import lightning_replay.lit.datamodules.levels
    import lightning_replay.lit.datamodules.replay  # noqa: F401
    from lightning_replay.lit.checkpoint_io import check_checkpoint
    from lightning_replay.lit.datamodules.env_steps import EnvStepDataModule
    from lightning_replay.lit.stop_signals import SIGTERM_STATUS

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    sys.argv = ["lightning-replay", *arguments]  # LightningCLI warns when it is given arguments beside the process's

    is_begun = False

    class ReplayCLI(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.set_defaults({"data": {"class_path": "lightning_replay.lit.ReplayDataModule"}})

        def _parse_ckpt_path(self) -> None:
            """Checks the file; Lightning would put its hyperparameters in the place of those asked for."""
            check_checkpoint(self.config[self.config.subcommand].get("ckpt_path"))

        def before_fit(self) -> None:
            """Refuses several processes before this object is sent to them, which is not possible."""
            if isinstance(self.datamodule, EnvStepDataModule):
                self.datamodule.check_processes(self.trainer.world_size)

        def after_instantiate_classes(self) -> None:
            nonlocal is_begun
            is_begun = True

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
        return
    except SIGTERMException:
        raise SystemExit(SIGTERM_STATUS) from None
    except Exception as error:
        sentence, cause = sentence_and_cause(error, is_begun)
        if sentence is not None:
            _refuse(sentence)
        if is_begun:
            raise
    raise cause  # outside of the handler, so that the traceback shows the user's code and not all of jsonargparse


def _refuse(sentence: str) -> NoReturn:
    print(f"lightning-replay: error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _with_class_paths(arguments: Sequence[str]) -> list[str]:
    """Replaces the name of a recipe or of a score by its class path; an unknown recipe is refused."""
    expanded: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if not equals:  # may be the value of the previous option
            option, value = expanded[-1] if expanded else "", argument
        path = _class_path(option, value)
        expanded.append(f"{option}={path}" if equals else path)
    return expanded


def _class_path(option: str, value: str) -> str:
    option = option.replace(".init_args", "")
    if option == _REPLAY and value.isidentifier():
        from lightning_replay import recipes

        try:
            recipes.by_name(value)
        except ValueError as error:
            _refuse(f"{str(error).rstrip('.')}{SEE_HELP}")
        return f"lightning_replay.recipes.{value}"
    if option == _SCORE and value.isidentifier():
        from lightning_replay.levels import scores

        kind = getattr(scores, value, None)
        if inspect.isclass(kind) and not inspect.isabstract(kind):
            return f"lightning_replay.levels.scores.{value}"
    return value
