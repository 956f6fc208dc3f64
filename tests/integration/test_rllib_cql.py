# SPDX-License-Identifier: Apache-2.0
"""RLlib's CQL on rows that another run has collected: its batches are those rows, and checkpoints hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.cql import CQL, CQLConfig
from ray.rllib.core.columns import Columns

import rllib_ext
from lightning_replay import recipes
from tests.transitions import numbered_steps

from .rllib_algorithms import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]


def config(recipe: str = "uniform", n_step: int = 1, **options: Any) -> CQLConfig:
    return (
        CQLConfig()
        .environment("Pendulum-v1")
        .training(
            replay_buffer_config=rllib_ext.replay_config(recipe, capacity=100, seed=0, **options),
            train_batch_size_per_learner=16,
            lr=None,
            bc_iters=0,
            n_step=n_step,
        )
        .rl_module(model_config=SMALL)
        .reporting(min_time_s_per_iteration=0, min_train_timesteps_per_iteration=16)
        .debugging(log_sys_usage=False)
    )


def demonstrations() -> recipes.Replay:
    replay, steps = recipes.uniform(capacity=100), numbered_steps(0, 60, done_every=20)
    steps["action"] = steps["action"][:, :1] * 2  # of Pendulum, whose module computes half of it
    replay.extend(steps)
    return replay


def note_batches(learner: Any) -> None:
    compute, learner.batches = learner.compute_loss_for_module, []

    def noted(*, batch: Any, **rest: Any) -> Any:
        learner.batches.append({key: batch[key].numpy().copy() for key in batch})
        return compute(batch=batch, **rest)

    learner.compute_loss_for_module = noted


def test_it_learns_from_the_rows_of_its_buffer(tmp_path: Path) -> None:
    algorithm = rllib_ext.configure(config()).build_algo()
    with pytest.raises(RuntimeError, match=r"call rllib_ext.fill\(algorithm, replay\)"):
        algorithm.train()
    assert rllib_ext.fill(algorithm, demonstrations()) == 60
    algorithm.learner_group.foreach_learner(note_batches)
    before = algorithm.get_module().get_state()
    result = algorithm.train()
    assert result["num_updates_lifetime"] >= 1
    assert np.isfinite(result["learners"]["default_policy"]["cql_loss"])
    batches = algorithm.learner_group._learner.batches
    assert len(batches) == result["num_updates_lifetime"]
    for batch in batches:
        number = batch[Columns.OBS][:, 0]
        assert len(number) == 16
        np.testing.assert_array_equal(batch[Columns.NEXT_OBS][:, 0], number + 1)
        np.testing.assert_array_equal(batch[Columns.REWARDS], number)
        np.testing.assert_array_equal(batch[Columns.TERMINATEDS], (number + 1) % 20 == 0)
        actions = numbered_steps(0, 60)["action"][number.astype(int), :1]
        np.testing.assert_allclose(batch[Columns.ACTIONS], actions, atol=1e-6)
    after = algorithm.learner_group.get_weights()["default_policy"]
    assert any(not np.array_equal(before[name], after[name]) for name in before)
    update, steps = algorithm.learner_group.update, []  # by which schedules and the target network go
    algorithm.learner_group.update = lambda **given: steps.extend(given["timesteps"].values()) or update(**given)
    algorithm.train()
    assert steps == [16 * (len(batches) - len(steps) + place) for place in range(len(steps))]
    again = Algorithm.from_checkpoint(algorithm.save_to_path(tmp_path / "saved"))
    buffers = [one.local_replay_buffer for one in (algorithm, again)]
    assert len(buffers[1]) == 60
    drawn = [buffer.sample(16)[0].get_observations(slice(0, 16)) for buffer in buffers]
    np.testing.assert_array_equal(*drawn)


class OwnCQL(CQL):
    """Whose training step reads files."""


def test_configs_that_cannot_learn_are_refused() -> None:
    of_files = config()
    of_files.algo_class = OwnCQL
    for wrong, message in (
        (of_files, "OwnCQL learns from files of a data set; derive it from rllib_ext.cql.ReplayCQL"),
        (config("prioritized"), "returns no TD errors of single rows"),
        (config(n_step=3), "n_step is 3"),
        (config().offline_data(input_=["rows"]), "rllib_ext.fill"),
        (config().reporting(min_sample_timesteps_per_iteration=10), "would never end"),
        (CQLConfig().environment("Pendulum-v1").training(lr=None), "replay_config"),
        (config(modules={"a": {"recipe": "prioritized"}}), "returns no TD errors of single rows"),
        (config(num_shards=2, num_cpus_per_shard=0), "fills no shards. Leave num_shards out"),
    ):
        kind = wrong.algo_class
        with pytest.raises(ValueError, match=message):
            rllib_ext.configure(wrong)
        assert wrong.algo_class is kind, "it trains as before"
    with pytest.raises(ValueError, match="joins two buffers"):
        rllib_ext.replay_config("mixed", capacity=100)
