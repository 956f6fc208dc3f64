# SPDX-License-Identifier: Apache-2.0
"""Draws without replacement in Lightning, RLlib and Stable-Baselines3: no row is twice in a batch, also resumed."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import yaml
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig
from stable_baselines3 import DQN

import rllib_ext
from lightning_replay import recipes
from lightning_replay.lit import ReplayDataModule
from lightning_replay.lit.cli import main
from lightning_replay.options import config_directory
from lightning_replay.samplers import ReshuffledSampler
from lightning_replay.sb3 import RecipeBuffer
from tests.unit.lit.stopped_runs import RUN, Agent, CloseAt, fit
from tests.unit.lit.toys import Counting

from .rllib_algorithms import Counting as CountingOfRllib
from .rllib_algorithms import built, small
from .shard_contents import observations

pytestmark = pytest.mark.slow
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

RECIPES = {"uniform": False, "prioritized": False, "pass": "pass"}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_resumed_lightning_run_draws_the_rows_of_one_that_did_not_stop(tmp_path: Path, kind: str) -> None:
    def data(env_steps: int) -> ReplayDataModule:
        recipe = recipes.prioritized if kind == "prioritized" else recipes.uniform
        replay = recipe(500, 16, replace=RECIPES[kind], seed=0)
        return ReplayDataModule(Counting, replay, **(RUN | {"env_steps": env_steps}))

    fit(tmp_path / "first", Agent(), data(44))
    path = tmp_path / "first" / "run" / "last.ckpt"
    update = torch.load(path)["ReplayDataModule"]["updates"]
    fit(tmp_path / "again", agent := Agent(), data(RUN["env_steps"]), ckpt_path=path)
    fit(tmp_path / "whole", whole := Agent(), data(RUN["env_steps"]), [CloseAt(update)])
    assert agent.seen == whole.seen[update:] and len(agent.seen) == RUN["env_steps"] - 44
    if kind != "pass":
        assert all(len(set(slots)) == 16 for slots in whole.seen)


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's use of jsonargparse
@pytest.mark.parametrize("replace", [False, "pass", "passes"])
def test_a_file_names_the_option(tmp_path: Path, replace: bool | str, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load((config_directory() / "lightning/per_dqn_cartpole.yaml").read_text())
    config["data"]["init_args"] |= {"warmup_steps": 100, "updates_per_env_step": 1, "env_steps": 110}
    of_replay = {"capacity": 500, "batch_size": 64, "replace": replace}
    config["data"]["init_args"]["replay"] = {"class_path": "lightning_replay.recipes.uniform", "init_args": of_replay}
    config["trainer"] = {"accelerator": "cpu", "callbacks": [{"class_path": "ReplayCheckpoint"}]}
    Path("different.yaml").write_text(yaml.safe_dump(config))
    if replace == "passes":
        with pytest.raises(SystemExit):
            main(["fit", "-c=different.yaml"])
        assert "replace is 'passes'; it must be True, False, or, of a recipe that" in capsys.readouterr().err
        return
    main(["fit", "-c=different.yaml"])
    (saved,) = (tmp_path / "lightning_logs" / "version_0" / "checkpoints").glob("last.*.replay")
    replay = recipes.uniform(500, 64, replace=replace)
    replay.load(saved)
    assert isinstance(replay.sampler, ReshuffledSampler) == (replace == "pass")
    assert len(replay.sample()["index"].unique()) == 64


@pytest.mark.usefixtures("shared_ray", "algorithms_end")
@pytest.mark.parametrize("options", [{}, {"num_shards": 2}], ids=["one buffer", "shards"])
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_rllib_trains_on_different_rows_and_restores_the_draws(
    recipe: str, options: dict[str, Any], tmp_path: Path
) -> None:
    algorithm = built(small(DQNConfig, CountingOfRllib, recipe, replace=False, seed=3, **options))
    for _ in range(2):
        algorithm.train()
    buffer = algorithm.local_replay_buffer
    path = algorithm.save_to_path(tmp_path / "saved")
    drawn = [observations(buffer.sample(num_items=12)) for _ in range(5)]
    assert all(len(np.unique(one, axis=0)) == 12 for one in drawn)
    if options:
        algorithm.restore_from_path(path)
        again = buffer
    else:
        again = Algorithm.from_checkpoint(path).local_replay_buffer
    for expected in drawn:
        np.testing.assert_array_equal(observations(again.sample(num_items=12)), expected)


def test_rllib_refuses_a_pass_by_priority() -> None:
    with pytest.raises(ValueError, match="replace is 'pass', and a pass draws rows or groups uniformly"):
        rllib_ext.replay_config("prioritized", capacity=100, replace="pass")


@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_stable_baselines3_trains_on_different_rows(recipe: str) -> None:
    of_buffer = {"recipe": partial(recipes.by_name(recipe), replace=False), "seed": 0}
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_starts=40,
        train_freq=1,
        batch_size=32,
        buffer_size=64,
        seed=0,
        device="cpu",
        policy_kwargs={"net_arch": [8]},
        replay_buffer_class=RecipeBuffer,
        replay_buffer_kwargs=of_buffer,
    )
    model.learn(80)
    buffer: Any = model.replay_buffer
    for _ in range(10):
        assert len(buffer.replay.sample(32)["index"].unique()) == 32
