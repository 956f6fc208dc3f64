# SPDX-License-Identifier: Apache-2.0
"""Prioritized Level Replay under Lightning as a user starts it: learning, the command line, the example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml

from lightning_replay.agents import PPO
from lightning_replay.levels import LevelBuffer, LevelSet, UniformLevels, scores
from lightning_replay.lit import GeneralizationGap, LevelDataModule, ReturnNormalization
from lightning_replay.lit.cli import main
from lightning_replay.options import config_directory
from tests.unit.lit.level_toys import Doors
from tests.unit.lit.toys import make_trainer

FILE = "lightning/plr_ppo_multiroom.yaml"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("in_an_empty_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Lightning's use of jsonargparse
]


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param(lambda: LevelBuffer(60, staleness_weight=0.3, seed=0), id="plr"),
        pytest.param(lambda: LevelBuffer(None, capacity=30, train_on_new_levels=False, seed=0), id="robust"),
        pytest.param(lambda: UniformLevels(60, seed=0), id="uniform"),
    ],
)
def test_ppo_learns_and_generalises(tmp_path: Path, levels) -> None:
    L.seed_everything(0, verbose=False)
    options = {"num_envs": 8, "rollout_length": 32, "return_normalization": ReturnNormalization()}
    data = LevelDataModule(Doors, levels(), env_steps=4_096, held_out_levels=12, **options)
    gap = GeneralizationGap(every_n_env_steps=4_096)
    make_trainer(tmp_path, [gap]).fit(PPO(learning_rate=3e-3), datamodule=data)
    before, after = gap.history[0][1], gap.history[-1][1]
    assert before < 2.5 < 3.3 < after and abs(gap.gap) < 0.5  # of 4; chance is 4/3


def run_tiny(*more: str, file: str = FILE) -> None:
    given = {"env_steps": 128, "num_envs": 4, "rollout_length": 16, "held_out_levels": 2}
    data = [f"--data.init_args.{option}={value}" for option, value in given.items()]
    main(["fit", f"-c={config_directory() / file}", *data, "--trainer.accelerator=cpu", *more])


def test_the_file_trains_resumes_and_leaves_pictures(tmp_path: Path) -> None:
    run_tiny()
    run = tmp_path / "lightning_logs" / "version_0"
    assert (run / "checkpoints" / "best.ckpt").exists() and (run / "learning_curve.png").exists()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["data"]["init_args"]["levels"]["init_args"]["levels"] == 4_000
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["LevelDataModule"]
    assert saved["updates"] == 2 and saved["collection"]["env_steps"] == 128

    run_tiny("--data.init_args.env_steps=192", "--ckpt_path=last")
    again = tmp_path / "lightning_logs" / "version_1"
    agent = PPO.load_from_checkpoint(again / "checkpoints" / "last.ckpt")
    assert list(agent.hparams["observation_shape"]) == [7, 7, 3] and agent.is_built


def test_the_file_without_levels_in_flight_trains_and_differs_in_little(tmp_path: Path) -> None:
    file = "lightning/plr_not_in_flight_ppo_multiroom.yaml"
    run_tiny(file=file)
    used = yaml.safe_load((tmp_path / "lightning_logs/version_0/config.yaml").read_text())
    assert used["data"]["init_args"]["levels"]["init_args"]["replay_in_flight"] is False
    plain, changed = (yaml.safe_load((config_directory() / name).read_text()) for name in (FILE, file))
    plain["data"]["init_args"] |= {"num_envs": 64, "rollout_length": 128}
    assert plain["data"]["init_args"]["levels"]["init_args"]["score_temperature"] == 1.0  # the paper's is 0.1
    plain["data"]["init_args"]["levels"]["init_args"] |= {"replay_in_flight": False, "score_temperature": 0.1}
    assert changed == plain


def test_the_file_with_augmented_images_trains_and_resumes(tmp_path: Path) -> None:
    options = ["env_steps=16", "num_envs=2", "rollout_length=4", "asynchronous=false", "check=false"]
    options += ["held_out_levels=[100000]", "evaluation_env_kwargs.max_episode_steps=2"]
    more = [*(f"--data.init_args.{one}" for one in options), "--model.init_args.channels=[2]", "--model.epochs=1"]
    run_tiny(*more, file="lightning/plr_ucb_drac_ppo_car_racing.yaml")
    saved = torch.load(tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["residual"]
    assert saved["state_dict"]["augmentation._extra_state"]["chosen"] == "cutout_color"  # of the second rollout


def test_the_file_with_learnability_trains_resumes_and_differs_in_little(tmp_path: Path) -> None:
    file = "lightning/plr_learnability_ppo_multiroom.yaml"
    run_tiny(file=file)
    plain, changed = (yaml.safe_load((config_directory() / name).read_text()) for name in (FILE, file))
    levels = changed["data"]["init_args"].pop("levels")["init_args"]
    assert [levels[name] for name in ("prioritization", "score_temperature", "replay_in_flight")] == [None] * 3
    assert plain["data"]["init_args"].pop("levels")["init_args"]["levels"] == levels["levels"] and changed == plain
    run_tiny("--data.init_args.env_steps=192", "--ckpt_path=last", file=file)
    saved = torch.load(tmp_path / "lightning_logs/version_1/checkpoints/last.ckpt", weights_only=True)[
        "LevelDataModule"
    ]
    scored, outcomes = saved["levels"]["writer"]["level_id"], saved["levels"]["scoring"]["of_episodes"]
    assert saved["updates"] == 3 and set(scored.tolist()) == set(outcomes["level_id"].tolist())


@pytest.mark.parametrize("clip", [None, 0.1])  # so that no normalised return would be a success
def test_levels_of_a_set_are_scored_by_the_success_of_their_episodes(tmp_path: Path, clip: float | None) -> None:
    doors = LevelSet([f"door {number % 3}" for number in range(12)], groups=lambda door: door)
    levels = LevelBuffer(doors, score=scores.Learnability(window=4, success=2), staleness_weight=0.1, seed=0)
    outcomes: dict[int, list[bool]] = {level_id: [] for level_id in range(12)}
    options = {"num_envs": 4, "rollout_length": 16}
    options["return_normalization"] = None if clip is None else ReturnNormalization(clip=clip)
    data = LevelDataModule(lambda: Noted(outcomes), levels, env_steps=512, **options)
    make_trainer(tmp_path, []).fit(PPO(), datamodule=data)
    rows = levels.probabilities()
    assert len(rows) == 12 and rows["score"].sum() > 0
    for row in rows:
        last = outcomes[int(row["level_id"])][-4:]
        assert (float(row["successes"]), float(row["outcomes"])) == (sum(last), len(last))
        assert float(row["score"]) == pytest.approx(sum(last) / len(last) * (1 - sum(last) / len(last)))
    assert sum(group["levels"] for group in levels.group_stats().values()) == 12


class Noted(Doors):
    """Notes whether the return of an episode is at least 2."""

    def __init__(self, outcomes: dict[int, list[bool]]) -> None:
        super().__init__()
        self.outcomes = outcomes

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self.total = result[1] + (self.total if self.count > 1 else 0.0)
        if result[2] or result[3]:
            self.outcomes[self.level].append(self.total >= 2)
        return result


def test_one_word_swaps_the_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_tiny("--data.init_args.levels=UniformLevels")
    config = yaml.safe_load((tmp_path / "lightning_logs/version_0/config.yaml").read_text())
    levels = config["data"]["init_args"]["levels"]
    assert levels == {"class_path": "lightning_replay.levels.UniformLevels", "init_args": {"levels": 4_000, "seed": 0}}
    levels = printed(capsys, "--data.levels=lightning_replay.levels.tscl", "--data.levels.epsilon=0.4")
    levels = levels["data"]["init_args"]["levels"]
    assert levels["class_path"] == "lightning_replay.levels.tscl" and levels["init_args"]["levels"] == 4_000
    # The file's temperature and staleness weight are left out, so that the options are the paper's.
    levels = printed(capsys, "--data.levels=lightning_replay.levels.plr")["data"]["init_args"]["levels"]
    assert levels["init_args"] == {"levels": 4_000, "score": None, "seed": 0}


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    capsys.readouterr()  # of a run before
    with pytest.raises(SystemExit) as end:
        main(["fit", "-c", str(config_directory() / FILE), *options, "--print_config"])
    output = capsys.readouterr()
    assert end.value.code == 0, output.err
    return yaml.safe_load(output.out)


def test_score_prioritization_and_difficulty_are_class_paths(capsys: pytest.CaptureFixture[str]) -> None:
    given = "score=lightning_replay.levels.scores.PositiveValueLoss score.gae_lambda=0.9 first_score=smooth"
    given += " prioritization=lightning_replay.levels.Greedy prioritization.epsilon=0.2"
    shown = ["--trainer.callbacks=lightning_replay.lit.LevelCurriculum", "--trainer.callbacks.difficulty=math.sqrt"]
    config = printed(capsys, *(f"--data.init_args.levels.{one}" for one in given.split()), *shown)
    found = config["data"]["init_args"]["levels"]["init_args"]
    assert found["score"]["class_path"].endswith("PositiveValueLoss")
    assert found["score"]["init_args"] == {"discount": 0.999, "gae_lambda": 0.9}
    assert found["prioritization"]["init_args"] == {"epsilon": 0.2} and found["first_score"] == "smooth"
    assert config["trainer"]["callbacks"][0]["init_args"]["difficulty"] == "math.sqrt"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("data.levels.staleness_wait=0.5", "data.levels: Option 'staleness_wait' is not accepted"),
        ("data.levels.score_temperature=0", "score_temperature is 0.0; it must be"),
        ("data.levels.score_temperature=hot", "data.levels.score_temperature: Expected a <class 'float'>. Got value"),
        ("data.levels=Nope", "data.levels: Expected a dot import path string: Nope"),
        ("data.levels.score=Nope", "data.levels.score: Expected a dot import path string: Nope"),
        ("data.num_envs=0", "num_envs is 0; it must be a whole number from 1 on (see lightning-replay --help)"),
        ("data.no_option=1", "data: Option 'no_option' is not accepted"),
        ("no_option=1", "unrecognized arguments: --no_option=1"),
        ("model=lightning_replay.agents.PPPO", "model: module 'lightning_replay.agents' has no attribute 'PPPO'"),
        ("config=missing.yaml", "config: File does not exist"),
        ("data.levels.score=lightning_replay.levels.scores.l1_value_loss", "score is <function l1_value_loss"),
        ("trainer.accelerator=abacus", "You selected an invalid accelerator name"),
    ],
)
def test_bad_options_end_in_one_line(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fit", "-c", str(config_directory() / FILE), f"--{option}"])
    errors = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert [line for line in errors if not line.startswith("Seed set")] == errors[-1:]
    assert errors[-1].startswith(f"lightning-replay: error: {message}")


def test_options_that_are_refused_in_the_run_end_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_tiny("--data.init_args.held_out_levels=[5]")
    assert end.value.code
    assert "error: 1 of held_out_levels are trained on" in capsys.readouterr().err.splitlines()[-1]


def test_a_mistake_in_a_class_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = "from lightning_replay.levels import UniformLevels\nclass Mine(UniformLevels):\n"
    code += "    def __init__(self, levels: int = 3):\n        super().__init__(levels.count)\n"
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(AttributeError, match="'int' object has no attribute 'count'") as raised:
        run_tiny("--data.init_args.levels=mine.Mine")
    assert "mine.py" in str(raised.getrepr())


def test_levels_without_end_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    option = "--data.init_args.levels={class_path: LevelBuffer, init_args: {levels: null, capacity: 100}}"
    levels = printed(capsys, option)["data"]["init_args"]["levels"]["init_args"]
    assert levels["levels"] is None and levels["capacity"] == 100 and levels["staleness_weight"] == 0.3


@pytest.mark.parametrize("given", [["--data.levels.score=MaxMC"], ["--data.init_args.levels.init_args.score", "MaxMC"]])
def test_a_score_by_its_name(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    levels = printed(capsys, *given)["data"]["init_args"]["levels"]["init_args"]
    assert levels["score"]["class_path"] == "lightning_replay.levels.scores.MaxMC"


def test_without_a_class_path_the_data_module_is_that_of_replay(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--model=DQN", "--data.replay=uniform", "--data.env=CartPole-v1", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["data"]["class_path"] == "lightning_replay.lit.ReplayDataModule"


def test_the_example(run_script: Any, tmp_path: Path) -> None:
    printed = "\n".join(run_script("lightning_plr.py", "--directory", str(tmp_path)))
    assert "4096 steps" in printed and "on held-out levels" in printed
    assert (tmp_path / "level_curriculum.png").is_file() and (tmp_path / "best.ckpt").is_file()
