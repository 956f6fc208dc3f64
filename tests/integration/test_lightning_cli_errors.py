# SPDX-License-Identifier: Apache-2.0
"""Errors of the command line: something missing or misspelt, and a user's own code that fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_replay.lit.cli import main
from lightning_replay.options import config_directory
from tests.hidden_packages import ROOT, run_without

CONFIGS = config_directory() / "lightning"
CARTPOLE = str(CONFIGS / "per_dqn_cartpole.yaml")
TINY = {"data.init_args.env_steps": 330, "data.init_args.warmup_steps": 300, "trainer.accelerator": "cpu"}
TINY |= {"trainer.logger": "false", "trainer.enable_checkpointing": "false"}
TINY |= {"trainer.callbacks": "lightning_replay.lit.ReplayProgressBar"}
KEEP = "[{class_path: lightning_replay.lit.ReplayCheckpoint, init_args: {dirpath: run, monitor: null}}]"
AGENT = """
import lightning as L
import torch

class Agent(L.LightningModule):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        {init}
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def act(self, observation, explore):
        return torch.zeros(len(observation), dtype=torch.int64)

    def training_step(self, batch, batch_idx):
        {step}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("in_an_empty_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Lightning's use of jsonargparse
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`:UserWarning"),
]


def options(**changes: object) -> list[str]:
    return ["fit", "-c", CARTPOLE, *(f"--{name}={value}" for name, value in {**TINY, **changes}.items())]


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The last line that a command prints before it ends with status 2."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_nothing_given_shows_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    shown = capsys.readouterr().err
    usage = "usage: lightning-replay {fit,validate,configs,inspect} ..."
    assert end.value.code == 2 and shown.startswith(usage)
    assert "lightning-replay fit -c configs/lightning/per_dqn_cartpole.yaml" in shown


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_the_help_offers_every_subcommand(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([option])
    shown = capsys.readouterr()
    assert end.value.code == 0 and shown.err == ""
    assert shown.out.startswith("usage: lightning-replay {fit,validate,configs,inspect} ...")
    named = re.findall(r"^  lightning-replay ([a-z]+) ", shown.out, re.MULTILINE)
    assert set(named) == {"fit", "validate", "configs", "inspect"}


def test_a_misspelt_subcommand_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    every = "fit, validate, configs, inspect"
    start = "lightning-replay: error: there is no subcommand"
    assert refused(capsys, ["fti"]).startswith(f"{start} 'fti'; it must be one of {every}. Did you mean 'fit'?")
    for unsupported in ("test", "predict"):
        assert refused(capsys, [unsupported, "-c", CARTPOLE]).startswith(f"{start} '{unsupported}'; it must be one of")
    assert ". Give a file as fit -c my.yaml (" in refused(capsys, ["my.yaml"])
    assert "configs accepts no arguments, and got 'dqn'" in refused(capsys, ["configs", "dqn"])


@pytest.mark.parametrize("module", ["lightning", "jsonargparse", "gymnasium"])
def test_without_the_extra_lightning_one_sentence_names_it(module: str, tmp_path: Path) -> None:
    result = run_without([module], ["-m", "lightning_replay", "fit", "-c", CARTPOLE], tmp_path)
    needs = f"the command line needs {module}, which is not installed: pip install 'lightning-replay[lightning]'"
    assert (result.returncode, result.stderr) == (2, f"lightning-replay: error: {needs}\n")


# what needs an extra: a name of a file or an option on top of CartPole's, and the sentence
NEEDS = {
    "nmer_td3_halfcheetah": ("environment 'HalfCheetah-v5' needs MuJoCo", "mujoco"),
    "sset_sac_lunarlander": ("environment 'LunarLanderContinuous-v3' needs Box2D", "box2d"),
    "plr_ppo_multiroom": ("a grid environment needs MiniGrid", "grids"),
    "retention_rainbow_atari": ("an Atari game needs ale-py", "atari"),
    "retention_rainbow_minatar": ("a MinAtar game needs MinAtar", "minatar"),
    "per_dqn_cartpole": ("the learning curve needs matplotlib", "plots"),
    "--data.init_args.env=ThreeRooms-v0": ("a grid environment needs MiniGrid", "grids"),
    "--data.init_args.env=PointMazeTasks-UMaze-v0": ("a maze environment needs gymnasium-robotics", "mazes"),
    "--data.init_args.replay={class_path: lightning_replay.recipes.neighborhood_mixup, "
    "init_args: {capacity: 500, backend: faiss_flat}}": ("a Faiss backend needs Faiss", "faiss-[cg]pu"),
}
HIDDEN = ["mujoco", "Box2D", "minigrid", "gymnasium_robotics", "ale_py", "minatar", "matplotlib", "faiss"]
HIDDEN += ["tensorboard", "tensorboardX"]
EACH = """
import contextlib, io, json, sys
from lightning_replay.lit.cli import main
for arguments in json.load(open("commands.json")):
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        try:
            main(arguments)
            status = 0
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, shown.getvalue().splitlines()]))
"""


def test_without_an_extra_one_sentence_names_it(tmp_path: Path) -> None:
    commands = [
        ["fit", "-c", CARTPOLE, need] if need.startswith("--") else ["fit", "-c", f"{CONFIGS / need}.yaml"]
        for need in NEEDS
    ]
    board = "{class_path: lightning.pytorch.loggers.TensorBoardLogger, init_args: {save_dir: .}}"
    (tmp_path / "commands.json").write_text(json.dumps([*commands, options(**{"trainer.logger": board})]))
    result = run_without(HIDDEN, ["-c", EACH], tmp_path)
    assert result.returncode == 0, result.stderr
    *found, (status, lines) = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert status == 2 and lines[-1].startswith("lightning-replay: error: Neither `tensorboard` nor `tensorboardX`")
    for (sentence, extra), (status, lines) in zip(NEEDS.values(), found, strict=True):
        expected = rf"{sentence}, which is not installed: pip install 'lightning-replay\[{extra}\]'"
        assert status == 2 and not any(line.startswith("Traceback") for line in lines)
        assert re.match(f"lightning-replay: error: {expected}", lines[-1]), lines[-1]


def write(folder: Path, name: str, init: str = "pass", step: str = "pass", first: str = "") -> str:
    """A module of its own name, because a module is imported once in a process; the class path of its agent."""
    (folder / f"{name}.py").write_text(first + AGENT.format(init=init, step=step))
    return f"{name}.Agent"


@pytest.mark.parametrize(
    ("name", "code", "raised"),
    [
        ("importing", {"first": "import nowhere_to_be_found\n"}, ModuleNotFoundError),
        ("unparsable", {"first": "def (\n"}, SyntaxError),
        ("building", {"init": "self.size = sise"}, NameError),
        ("training", {"step": "return batch['next', 'rewart'].mean() + self.weight"}, KeyError),
        ("refusing", {"step": "raise ValueError('a shape of theirs')"}, ValueError),
    ],
)
def test_errors_in_the_code_of_a_user_keep_their_tracebacks(name, code, raised, tmp_path: Path) -> None:
    agent = write(tmp_path, f"own_{name}", **code)
    with pytest.raises(raised) as found:
        main(options(model=agent))
    named = found.value.filename if raised is SyntaxError else str(found.traceback[-1].path)
    assert name == "training" or Path(named).name == f"own_{name}.py"  # the key is looked up in TensorDict
    assert len(found.traceback) < 60 and "Problem with given class_path" not in str(found.getrepr(style="native"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "nowhere.Agent"}, "model: No module named 'nowhere'"),
        ({"data.init_args.env": "CartPol-v1"}, "environment 'CartPol-v1': Environment `CartPol` doesn't exist. Did"),
        ({"data.init_args.env": "nowhere:Own-v0"}, "environment 'nowhere:Own-v0': No module named 'nowhere'. Give"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_in_one_line(changes, sentence, capsys) -> None:
    assert refused(capsys, options(**changes)).startswith(f"lightning-replay: error: {sentence}")


def test_a_class_that_refuses_its_options_is_heard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = write(tmp_path, "own_refusal", init="raise ValueError('size must be odd')")
    sentence = "lightning-replay: error: size must be odd (see lightning-replay --help)"
    assert refused(capsys, options(model=agent)) == sentence


@pytest.mark.parametrize(("flags", "status"), [([], 0), (["-P"], 1)])
def test_python_p_keeps_the_current_folder_off_the_path(flags: list[str], status: int, tmp_path: Path) -> None:
    (tmp_path / "own_path.py").write_text("")
    code = "import sys; sys.path.remove('') if '' in sys.path else None\n"
    code += "from lightning_replay.lit.cli import _add_current_folder\n"
    code += "_add_current_folder(); import own_path; assert sys.path[-1] in own_path.__file__\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, *flags, "-c", code], cwd=tmp_path, env=environment, capture_output=True)
    assert result.returncode == status


@pytest.mark.parametrize("content", [None, "text", "weights"])
def test_a_checkpoint_that_is_none_is_refused_in_one_line(content: str | None, tmp_path: Path, capsys) -> None:
    if content == "text":
        (tmp_path / "it.ckpt").write_text("no checkpoint")
    elif content == "weights":
        torch.save({"weight": torch.zeros(2)}, tmp_path / "it.ckpt")
    found = refused(capsys, options(ckpt_path="it.ckpt"))
    assert found.startswith("lightning-replay: error: ckpt_path is 'it.ckpt', which ") and "give a .ckpt file" in found


def test_weights_of_another_agent_and_other_hyperparameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep = {"trainer.enable_checkpointing": "true", "trainer.callbacks": KEEP}
    main(options(**keep))
    again = options(**{**keep, "data.init_args.env_steps": 340, "ckpt_path": "run/last.ckpt"})
    main([*again, "--model.init_args.discount=0.5"])
    saved = torch.load("run/last-v1.ckpt" if Path("run/last-v1.ckpt").exists() else "run/last.ckpt")
    assert saved["hyper_parameters"]["discount"] == 0.5  # what is asked for, not what the checkpoint has
    found = refused(capsys, [*again, "--model.init_args.hidden_sizes=[7]"])
    assert found.startswith("lightning-replay: error: ckpt_path is a checkpoint of another agent")


def test_places_that_cannot_be_written_are_refused_in_one_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    callback = KEEP.replace("dirpath: run", "dirpath: file/run")
    found = refused(capsys, options(**{"trainer.enable_checkpointing": "true", "trainer.callbacks": callback}))
    assert found.startswith("lightning-replay: error: dirpath is ") and "where nothing can be written" in found
    several = {"trainer.devices": 2, "trainer.strategy": "ddp_spawn"}
    assert "DataModule supports one" in refused(capsys, options(**several))
