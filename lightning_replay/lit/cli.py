# SPDX-License-Identifier: Apache-2.0
"""The command line ``lightning-replay``: Lightning's subcommands on our classes, ``configs`` and ``inspect``."""

from __future__ import annotations

import inspect
import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from traceback import walk_tb
from typing import Any, NoReturn

from lightning_replay.options import MissingExtraError, did_you_mean, missing_extra

SEE_HELP = " (see lightning-replay --help)"
_OTHER_WEIGHTS = (
    "ckpt_path is a checkpoint of another agent, or of one with networks of other sizes; give model and data as in "
    "its run"
)
_HOSTS = sys.stdlib_module_names | {"lightning", "lightning_replay", "torch", "fsspec", "jsonargparse"}
_PARSERS = {"importlib", "jsonargparse", "yaml"}  # an option that is not YAML, or that names an unknown module
_DESCRIPTION = """Trains an agent with a replay method; every choice is a class path in a YAML file.

  lightning-replay configs                                       lists the files that come with the library
  lightning-replay inspect PATH --output page.html               what a saved buffer holds, as text and pictures
  lightning-replay fit -c configs/lightning/per_dqn_cartpole.yaml
  lightning-replay fit -c FILE --data.init_args.env_steps=3000 --print_config
  lightning-replay fit -c FILE --data.init_args.replay=uniform
  lightning-replay fit -c configs/lightning/plr_ppo_multiroom.yaml --data.init_args.levels=UniformLevels
  lightning-replay fit --data.help=LevelDataModule                lists the options of a class
  lightning-replay validate -c FILE --ckpt_path PATH              plays the evaluation episodes of a checkpoint
  lightning-replay SUBCOMMAND --help                              lists the options of a subcommand

The name of a recipe abbreviates its class path, lightning_replay.recipes.NAME; so does the name of a level score. One
numerical thread is used unless OMP_NUM_THREADS is set: networks this small gain nothing from more, and lose much where
cores are shared.
"""
_OF_LIGHTNING = ("fit", "validate")  # our data modules have no episodes for Lightning's test and predict
_SUBCOMMANDS = (*_OF_LIGHTNING, "configs", "inspect")
_REPLAY = "--data.replay"  # init_args may be left out
_SCORE = "--data.levels.score"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. Modules of the current folder can be named in the files.

    Args:
        arguments: without the program's name, by default the arguments of the process.

    Raises:
        SystemExit: with status 2 and one line, for what cannot be run, 143 after SIGTERM, and 0 after the help.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        # Lightning's help would list only its own subcommands.
        file = sys.stdout if given else sys.stderr
        print(f"usage: lightning-replay {{{','.join(_SUBCOMMANDS)}}} ...\n\n{_DESCRIPTION}", file=file)
        raise SystemExit(0 if given else 2)
    if given[0] == "--version":
        from lightning_replay import __version__

        print(__version__)
        return
    if given[0] == "configs":
        if given[1:] in (["-h"], ["--help"]):
            print("usage: lightning-replay configs\n\nPrints the path of each configuration file of the library.")
            return
        if given[1:]:
            _refuse(f"configs accepts no arguments, and got {' '.join(given[1:])!r}{SEE_HELP}")
        from lightning_replay.options import config_directory, config_files

        print(*(config_directory() / name for name in config_files()), sep="\n")
        return
    if given[0] == "inspect":  # The imports of Lightning and TorchRL would take seconds.
        from lightning_replay.inspection.command import main as inspect_save

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
    # The folder comes last. In front, a file that is named like a library would replace the library.
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
    import lightning_replay.lit.level_data
    import lightning_replay.lit.replay_data  # noqa: F401
    from lightning_replay.lit.checkpoint_files import check_checkpoint
    from lightning_replay.lit.checkpoints import SIGTERM_STATUS
    from lightning_replay.lit.data import EnvStepDataModule

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    sys.argv = ["lightning-replay", *arguments]  # LightningCLI warns when it is given arguments beside the process's

    is_begun = False

    class ReplayCLI(LightningCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            """Returns the subcommands for which our data modules have episodes."""
            offered = LightningCLI.subcommands()
            return {name: offered[name] for name in _OF_LIGHTNING}

        def add_arguments_to_parser(self, parser: Any) -> None:
            """Makes the replay data module the default."""
            parser.set_defaults({"data": {"class_path": "lightning_replay.lit.ReplayDataModule"}})

        def _parse_ckpt_path(self) -> None:
            # Lightning would put the hyperparameters of the file in the place of the ones that were given.
            check_checkpoint(self.config[self.config.subcommand].get("ckpt_path"))

        def before_fit(self) -> None:
            """Refuses several processes without a shared replay."""
            # Before Lightning sends this object to the other processes, which is not possible.
            if isinstance(self.datamodule, EnvStepDataModule):
                self.datamodule.check_processes(self.trainer.world_size)

        def after_instantiate_classes(self) -> None:
            """Notes that later errors come from the run and not from options."""
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
    expanded: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if not equals:  # may be the value of the previous option
            option = expanded[-1] if expanded else ""
            value = argument
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


def sentence_and_cause(error: Exception, is_begun: bool) -> tuple[str | None, BaseException]:
    """Returns a line for the user, ``None`` if the traceback is needed, and the error that jsonargparse wrapped."""
    from lightning_replay.envs.building import UnknownEnvironmentError

    key, root = _option_and_cause(error)
    sentence = key + " ".join(str(root).split()).rstrip(".")
    is_lightnings = isinstance(root, ModuleNotFoundError) and _origin(root) == "lightning"  # wandb, for its logger
    # At any time: the traceback would lead into libraries, and not to the cause.
    if is_lightnings or isinstance(root, MissingExtraError | UnknownEnvironmentError):
        return sentence, root
    if is_begun and any(frame.f_code.co_name == "restore_model" for frame, _ in walk_tb(root.__traceback__)):
        return _OTHER_WEIGHTS, root
    if is_begun:
        return (sentence if _is_refused_by_hosts(root) else None), root
    # Before the run a ValueError of a class that is built refuses an option. Other errors of the user's code, such as
    # an import that fails in one of its modules, keep their tracebacks.
    return (sentence + SEE_HELP if _is_refusal(root) or isinstance(root, OSError) else None), root


def _is_refused_by_hosts(root: BaseException) -> bool:
    # An error of the system, or of a part of ours, is one line only if none of the user's code took part.
    names = {str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in walk_tb(root.__traceback__)}
    if not names <= _HOSTS:
        return False
    is_ours = isinstance(root, ValueError | TypeError | RuntimeError) and _origin(root) == "lightning_replay"
    return is_ours or isinstance(root, OSError)


def _is_refusal(root: BaseException) -> bool:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    if isinstance(root, ArgumentError | ValueError | MisconfigurationException):
        return True
    origin = _origin(root)
    # importlib raises the SyntaxError of a module that it compiles.
    is_option = origin in _PARSERS and not isinstance(root, SyntaxError)
    # An AttributeError means a class path that a module of this library does not have.
    return is_option or (isinstance(root, TypeError | AttributeError) and origin == "lightning_replay")


def _option_and_cause(error: BaseException) -> tuple[str, BaseException]:
    keys: list[str] = []  # jsonargparse wraps an error once for each level of nesting: Parser key "data": ...
    while _origin(error) == "jsonargparse":
        found = re.match(r'Parser key "([^"]+)":', str(error))
        if found and keys[-1:] != [found[1]]:
            keys.append(found[1])
        following = error.__cause__ or error.__context__
        if following is None:
            break
        error = following
    return ".".join(keys) + ": " if keys else "", error


def _origin(error: BaseException) -> str:
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
    return names[-1].partition(".")[0] if names else ""  # the package whose code raised it
