# SPDX-License-Identifier: Apache-2.0
"""The command line on every shipped file, from Python's side of the console script."""

from __future__ import annotations

import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from tensordict import TensorDict

import lightning_replay
from lightning_replay import load_replay, recipes
from lightning_replay.agents import DQN
from lightning_replay.datasets import fill, from_d4rl
from lightning_replay.lit.cli import main
from lightning_replay.options import config_directory, config_files
from lightning_replay.transforms import PotentialShaping

ENDS = ("terminated", "truncated", "done")
LIGHTNING_CONFIGS = [name for name in config_files() if name.startswith("lightning/")]
# those of levels have other options, and are tried in test_lightning_levels.py
WITH_REPLAY = [name for name in LIGHTNING_CONFIGS if "LevelDataModule" not in (config_directory() / name).read_text()]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("in_an_empty_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Lightning's use of jsonargparse
]


def run_tiny(name: str, *more: str) -> None:
    given = {"env_steps": 330, "warmup_steps": 300, "updates_per_env_step": 1}
    data = [f"--data.init_args.{option}={value}" for option, value in given.items()]
    main(["fit", f"-c={config_directory() / name}", *data, "--trainer.accelerator=cpu", *more])


DATA, REPLAY, MODEL = "--data.init_args.evaluation_env_kwargs", "--data.init_args.replay.init_args", "--model.init_args"
SMALL_MUJOCO = [f"{DATA}.max_episode_steps=30", f"{REPLAY}.batch_size=16", f"{MODEL}.hidden_sizes=[16, 16]"]
MUJOCO = (
    "nmer_sac_halfcheetah",
    "nmer_td3_halfcheetah",
    "ct_td3_halfcheetah",
    "uniform_td3_halfcheetah",
    "hindsight_sac_point_maze",
)
FALLING = "{class_path: lightning_replay.schedules.Linear, init_args: {start: 1, end: 0, duration: 9, clock: updates}}"
SMALL_ATARI = [f"{DATA}.max_frames=60", f"{REPLAY}.capacity=300", f"{REPLAY}.batch_size=4", f"{MODEL}.hidden_size=16"]
# large networks and images, long episodes, and whole games of an untrained agent that may never fire
SHORTENED = {
    **{f"lightning/{name}.yaml": SMALL_MUJOCO for name in MUJOCO},
    "lightning/nmer_sac_halfcheetah.yaml": [*SMALL_MUJOCO, "--trainer.gradient_clip_val=40"],
    "lightning/nmer_td3_halfcheetah.yaml": [*SMALL_MUJOCO, f"{REPLAY}.fraction={FALLING}"],
    "lightning/dpcer_mpdqn_half_field.yaml": [f"{DATA}.max_steps=10", f"{MODEL}.hidden_sizes=[16]"],
    "lightning/retention_rainbow_atari.yaml": SMALL_ATARI,
}


def demonstrate(folder: Path) -> None:
    """What the example of the same name writes: one step of the car."""
    observation, action = torch.tensor([[-0.5, 0.0]]), torch.ones(1, 1)
    flag = torch.zeros(1, 1, dtype=torch.bool)
    following = {"observation": observation, "reward": torch.zeros(1, 1)} | dict.fromkeys(ENDS, flag)
    replay = recipes.uniform(capacity=10, batch_size=4)
    replay.extend(TensorDict({"observation": observation, "action": action, "next": following}, [1]))
    replay.save(folder / "runs/lightning_halves/demonstrations")


@pytest.mark.parametrize("name", WITH_REPLAY)
def test_each_file_trains_and_leaves_checkpoint_replay_and_picture(name: str, tmp_path: Path) -> None:
    if "offline" in (config_directory() / name).read_text():
        demonstrate(tmp_path)
    run_tiny(name, *SHORTENED.get(name, []))
    (run,) = (tmp_path / "lightning_logs").iterdir()
    assert (run / "checkpoints" / "best.ckpt").exists() and (run / "checkpoints" / "last.ckpt").exists()
    assert (run / "checkpoints" / "best.30.replay").is_dir()
    assert (run / "learning_curve.png").exists()
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["init_args"]["env_steps"] == 330


@pytest.mark.parametrize("name", LIGHTNING_CONFIGS)
def test_each_file_begins_with_its_command(name: str) -> None:
    assert (config_directory() / name).read_text().startswith(f"# lightning-replay fit -c configs/{name}\n# ")


def test_a_file_names_a_data_set_or_a_saved_replay(tmp_path: Path) -> None:
    with h5py.File("steps.hdf5", "w") as file:
        file["observations"], file["actions"] = np.zeros((60, 3)), np.zeros((60, 1))
        file["rewards"], file["terminals"], file["timeouts"] = np.zeros((3, 60))
    made = {"class_path": "lightning_replay.recipes.uniform", "init_args": {"capacity": 100, "batch_size": 8}}
    rows = {"class_path": "lightning_replay.datasets.from_d4rl", "init_args": {"path": "steps.hdf5"}}
    filled = {"class_path": "lightning_replay.datasets.fill", "init_args": {"replay": made, "rows": rows}}
    saved = {"class_path": "lightning_replay.load_replay", "init_args": {"path": "saved"}}
    fill(recipes.uniform(capacity=100, batch_size=8), from_d4rl("steps.hdf5")).save("saved")
    sizes = {"observation_size": 3, "action_low": [-2.0], "action_high": [2.0], "hidden_sizes": [8]}
    for folder, replay in (("first", filled), ("second", saved)):
        data = {"class_path": "ReplayDataModule", "init_args": {"updates": 12, "replay": replay}}
        callbacks = [{"class_path": "ReplayCheckpoint", "init_args": {"monitor": None, "dirpath": folder}}]
        trainer = {"logger": False, "accelerator": "cpu", "callbacks": callbacks}
        model = {"class_path": "SAC", "init_args": sizes}
        Path("offline.yaml").write_text(
            yaml.safe_dump({"seed_everything": 0, "model": model, "data": data, "trainer": trainer})
        )
        main(["fit", "-c=offline.yaml"])
        main(["fit", "-c=offline.yaml", "--data.init_args.updates=15", f"--ckpt_path={folder}/last.ckpt"])
        assert {path.name for path in Path(folder).glob("last*")} == {"last.15.replay", "last.ckpt"}


def test_agents_trained_by_the_command_line_load_and_go_on(tmp_path: Path) -> None:
    run_tiny("lightning/per_dqn_cartpole.yaml")
    (checkpoint,) = (tmp_path / "lightning_logs").glob("*/checkpoints/best.ckpt")
    agent = DQN.load_from_checkpoint(checkpoint)
    assert agent.hparams["num_actions"] == 2 and agent.is_built
    run_tiny("lightning/per_dqn_cartpole.yaml", "--data.init_args.env_steps=350", "--ckpt_path=last")
    assert (tmp_path / "lightning_logs/version_1/checkpoints/last.50.replay").is_dir()


def test_one_word_swaps_the_method_and_validate_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay = "--data.init_args.replay"
    run_tiny("lightning/per_dqn_cartpole.yaml", f"{replay}=uniform", f"{replay}.capacity=999")
    config = yaml.safe_load((tmp_path / "lightning_logs/version_0/config.yaml").read_text())
    replay = config["data"]["init_args"]["replay"]
    assert replay["class_path"] == "lightning_replay.recipes.uniform" and replay["init_args"]["capacity"] == 999
    run = "lightning_logs/version_0"
    checkpoint = f"--ckpt_path={run}/checkpoints/last.ckpt"
    main(["validate", f"-c={run}/config.yaml", checkpoint, "--trainer.logger=false"])
    assert "eval/return" in capsys.readouterr().out


def test_every_offered_subcommand_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The help names the subcommands; each runs on what the one before it left."""
    with pytest.raises(SystemExit):
        main(["--help"])
    offered = re.match(r"usage: lightning-replay \{([a-z,]+)\}", capsys.readouterr().out)[1].split(",")
    run = "lightning_logs/version_0"
    name = "lightning/per_dqn_cartpole.yaml"
    given = {
        "configs": ([], str(config_directory() / name)),
        "fit": ([f"-c={config_directory() / name}", "--data.init_args.env_steps=330", "--data.warmup_steps=300"], ""),
        "validate": ([f"-c={run}/config.yaml", f"--ckpt_path={run}/checkpoints/last.ckpt"], "eval/return"),
        "inspect": ([f"{run}/checkpoints/last.ckpt", "--output=page.html"], "330 transitions"),
    }
    assert set(offered) == set(given)
    for subcommand, (arguments, shown) in given.items():
        main([subcommand, *arguments])
        assert shown in capsys.readouterr().out, subcommand
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize("name", ["hindsight_sac_point_maze", "plr_ppo_multiroom"])
def test_validate_plays_episodes_of_goals_and_of_levels(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kwargs = ["--data.init_args.evaluation_env_kwargs.max_episode_steps=9"] if name.startswith("hindsight") else []
    logs = ["--trainer.logger=false", "--trainer.accelerator=cpu"]
    main(["validate", f"-c={config_directory() / 'lightning' / name}.yaml", *kwargs, *logs])
    assert "eval/return" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("replay=neighbourhood_mixup", ["there is no recipe 'neighbourhood_mixup'", "neighborhood_mixup, noisy"]),
        ("replay=lightning_replay.recipes.neighbourhood_mixup", ["no recipe 'neighbourhood_mixup'", "mixup, noisy"]),
        ("replay.priority_exponnent=0.5", ["priority_exponnent"]),
    ],
)
def test_misspelt_recipes_and_options_are_refused(option: str, named: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as end:
        run_tiny("lightning/per_dqn_cartpole.yaml", f"--data.init_args.{option}")
    message = f"{capsys.readouterr().err}{end.value.code}"
    assert all(one in message for one in named)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("data.init_args.replay.importance_exponent=7", "importance_exponent is 7"),
        ("data.init_args.env_steps=-5", "env_steps is -5; it must be a whole number from 1 on"),
        ("model.init_args.discount=1.5", "discount is 1.5; it must be a number in [0, 1]"),
        ("data.init_args.replay.age={half_life: 0}", "half_life is 0.0; it must be a finite number above 0"),
        ("data.init_args.replay.age={half_life: 9, floor: 2}", "floor is 2.0; it must be a number in [0, 1]"),
        ("data.init_args.replay.age={half_live: 9}", "Age has no argument 'half_live'. Did you mean 'half_life'?"),
        (
            "data.init_args.replay.age={class_path: lightning_replay.Age, init_args: {half_live: 9}}",
            "Age has no argument 'half_live'. Did you mean 'half_life'?",
        ),
    ],
)
def test_a_value_that_is_refused_ends_in_one_line(option: str, message: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fit", f"-c={config_directory() / 'lightning/per_dqn_cartpole.yaml'}", f"--{option}"])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"lightning-replay: error: {message}")


def test_an_agent_takes_a_schedule_by_its_class_path(tmp_path: Path) -> None:
    option = "--model.init_args.conflict_aversion"
    condition = "{class_path: lightning_replay.events.reward_at_least, init_args: {threshold: 1.0}}"
    options = f"{{name: upright, condition: {condition}, history_length: 5, capacity: 100}}"
    table = f"{{class_path: lightning_replay.events.EventTable, init_args: {options}}}"
    replay = f"{{capacity: 500, batch_size: 16, tables: [{table}]}}"
    run_tiny(
        "lightning/per_dqn_cartpole.yaml",
        f"--data.init_args.replay={{class_path: lightning_replay.recipes.event_tables, init_args: {replay}}}",
        f"{option}=lightning_replay.schedules.Linear",
        *(f"{option}.{name}" for name in ("start=0.5", "end=0.0", "duration=20", "clock=updates")),
    )
    assert list((tmp_path / "lightning_logs").glob("*/checkpoints/*.ckpt"))


def test_rewards_are_shaped_as_a_file_says(tmp_path: Path) -> None:
    """The option that stands in the file as a comment."""
    text = (config_directory() / "lightning/sset_ddqn_three_rooms.yaml").read_text()
    file = tmp_path / "shaped.yaml"
    file.write_text(re.sub(r"(?m)^( +)# (transform:|  )", r"\1\2", text))
    run_tiny(str(file))
    (saved,) = (tmp_path / "lightning_logs").glob("*/checkpoints/last.30.replay")
    (shaping,) = load_replay(saved).transform
    assert type(shaping) is PotentialShaping and repr(shaping.potential) == "OneAt(low=[1.0], high=[1.0])"


def test_a_potential_may_be_a_function_by_its_import_path() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PotentialShaping, "shaping")
    given = parser.parse_args(["--shaping.potential=torch.sum", "--shaping.discount=0.9"])
    assert parser.instantiate_classes(given).shaping.potential is torch.sum
    with pytest.raises(ArgumentError, match="has no attribute .OneAtt"):
        parser.parse_args(["--shaping.potential=lightning_replay.transforms.OneAtt", "--shaping.discount=0.9"])


def test_configs_lists_existing_files(capsys: pytest.CaptureFixture[str]) -> None:
    main(["configs"])
    listed = capsys.readouterr().out.split()
    assert len(listed) == len(config_files()) and all(Path(path).is_file() for path in listed)


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_configs_has_a_help(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["configs", option])
    assert capsys.readouterr().out.startswith("usage: lightning-replay configs\n")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"{lightning_replay.__version__}\n"
