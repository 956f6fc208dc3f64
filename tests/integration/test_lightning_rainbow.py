# SPDX-License-Identifier: Apache-2.0
"""Rainbow with retention on real games: seconds of each, from the shipped files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from lightning_replay import recipes
from lightning_replay.agents import Rainbow
from lightning_replay.lit import Evaluate, ReplayDataModule
from lightning_replay.lit.cli import main
from lightning_replay.options import config_directory
from tests.benchmarks.learning.experiments import retention_kl
from tests.unit.lit.toys import make_trainer

pytestmark = pytest.mark.slow
NETWORK = {"channels": (8,), "kernel_sizes": (3,), "strides": (1,), "hidden_size": 32}


def parsed(game: str, capsys, monkeypatch) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns the options of agent, data and replay of a game's file, defaults included."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        main(["fit", "-c", str(config_directory() / f"lightning/retention_rainbow_{game}.yaml"), "--print_config"])
    assert end.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    agent, data = config["model"]["init_args"], config["data"]["init_args"]
    replay = data["replay"]["init_args"]
    assert [agent[part] for part in ("double", "dueling", "distributional", "noisy", "evaluation_noise")] == [True] * 5
    assert (agent["atoms"], agent["value_low"], agent["value_high"]) == (51, -10.0, 10.0)
    assert (agent["gradient_norm"], agent["noise_deviation"]) == (10.0, 0.5)
    assert replay["discount"] == agent["discount"]
    return agent, data, replay


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's use of jsonargparse
def test_the_atari_file_has_the_papers_numbers(capsys, monkeypatch) -> None:
    agent, data, replay = parsed("atari", capsys, monkeypatch)
    assert (agent["learning_rate"], agent["target_update_every"]) == (1e-4, 2_000)
    assert (replay["batch_size"], replay["n_steps"], replay["capacity"]) == (32, 5, 10_000)
    assert (data["updates_per_env_step"], data["warmup_steps"], data["env_steps"]) == (1.0, 1_000, 1_000_000)
    assert data["evaluation_env_kwargs"] == {"ends_with_life": False, "clips_rewards": False}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's use of jsonargparse
def test_the_minatar_file_has_the_settings_of_the_experiment(capsys, monkeypatch) -> None:
    (experiment,) = retention_kl.EXPERIMENTS
    settings = dict(experiment.settings_of("retention"))
    agent, data, replay = parsed("minatar", capsys, monkeypatch)
    given = agent | data | data["env_kwargs"] | replay
    assert given.pop("updates_per_env_step") * settings.pop("steps_per_update") == 1
    for name in ("check_every", "rule"):  # the return is measured otherwise; the rule is the recipe's
        settings.pop(name)
    assert {name: given[name] for name in settings} == settings and given["env_kwargs"]["game"] == "breakout"
    assert given["rule"] is None and given["samples_by_surprise"]


def test_minatar_fills_a_small_buffer_by_surprise(tmp_path: Path) -> None:
    pytest.importorskip("minatar")
    torch.manual_seed(0)
    replay = recipes.surprise_retention(capacity=150, batch_size=16, n_steps=3, priority_exponent=0.5, seed=0)
    games = {"env_kwargs": {"game": "breakout"}, "num_envs": 2}
    data = ReplayDataModule("MinAtar-v0", replay, 260, warmup_steps=200, seed=0, **games)
    agent = Rainbow(**NETWORK, target_update_every=20)
    trainer = make_trainer(tmp_path)
    trainer.fit(agent, datamodule=data)
    stats = data.replay.stats()
    assert trainer.global_step == data.updates_done == 60 and len(data.replay) == 150
    assert stats["evicted"] + 150 == stats["admitted"] and stats["retention_priority"]["1"] > 0
    assert stats["priorities_updated"] == 60 * 16


def test_noise_of_evaluations_leaves_training_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("minatar")
    weights, returns = [], []
    for noise in (False, True, True):
        torch.manual_seed(0)
        replay = recipes.surprise_retention(capacity=100, batch_size=16, seed=0)
        data = ReplayDataModule("MinAtar-v0", replay, 130, warmup_steps=100, seed=0, env_kwargs={"game": "breakout"})
        agent, scores = Rainbow(**NETWORK, noise_deviation=5.0, evaluation_noise=noise), Evaluate(10, episodes=5)
        make_trainer(tmp_path, callbacks=[scores]).fit(agent, datamodule=data)
        weights.append(nn.utils.parameters_to_vector(agent.network.parameters()))
        returns.append(scores.history)
    assert torch.equal(weights[1], weights[0]) and torch.equal(weights[2], weights[0])
    assert returns[1] == returns[2] != returns[0]  # all from the same seeds


def test_atari_trains_on_images_and_is_evaluated_on_whole_games(tmp_path: Path) -> None:
    for module in ("ale_py", "cv2"):
        pytest.importorskip(module)
    frames = {"frame_stack": 4, "image_key": "observation"}
    replay = recipes.surprise_retention(60, 8, n_steps=5, priority_exponent=0.5, seed=0, **frames)
    games = {"ends_with_life": False, "clips_rewards": False, "max_frames": 60}
    options = {"env_kwargs": {"game": "Breakout"}, "evaluation_env_kwargs": games, "evaluation_episodes": 1, "seed": 0}
    data = ReplayDataModule("Atari-v0", replay, env_steps=84, warmup_steps=80, **options)
    agent = Rainbow(hidden_size=64)
    trainer = make_trainer(tmp_path)
    trainer.fit(agent, datamodule=data)
    assert data.updates_done == 4 and len(replay) == 60 and agent.hparams["observation_shape"] == [4, 84, 84]
    batch = replay.sample()
    assert batch["observation"].dtype == torch.uint8 and batch["observation"].shape == (8, 4, 84, 84)
    assert replay.stats()["frames_held"] < 8 * 60
    assert batch["next", "reward"].abs().max() <= 5 and batch["discount"].max() <= 0.99
    (result,) = trainer.validate(agent, datamodule=data, verbose=False)
    assert result["eval/return"] >= 0
