# SPDX-License-Identifier: Apache-2.0
"""Trials of Ray Tune, each built as its process does: with the values drawn, and refusing those that do not fit.

A whole search, in processes of its own, is the example in ``test_rllib_examples.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import rllib_ext
from rllib_ext.environments import samples_of
from rllib_ext.sharded.routing import check_trial

from .rllib_algorithms import SMALL, small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
GOAL = {"class_path": "lightning_replay.events.reward_at_least", "init_args": {"threshold": 1.0}}


def trial(config: AlgorithmConfig, place: int = 0) -> Algorithm:
    """What the process of a trial builds."""
    return config.algo_class(config=samples_of(config.to_dict())[place])


def test_a_trial_has_the_values_that_were_drawn() -> None:
    options = {"capacity": tune.choice([300, 400]), "priority_exponent": tune.uniform(0.0, 1.0)}
    config = small(DQNConfig, "CartPole-v1", tune.choice(["prioritized"]), **options)
    config.training(lr=tune.loguniform(1e-4, 1e-2), n_step=tune.grid_search([2, 3]))
    algorithm = trial(rllib_ext.configure(config), 1)
    result = algorithm.train()
    replay, drawn = algorithm.local_replay_buffer.replay, algorithm.config
    given = drawn.replay_buffer_config
    assert (replay.capacity, replay.sampler.priority_exponent) == (given["capacity"], given["priority_exponent"])
    assert given["capacity"] in (300, 400) and 0.0 < given["priority_exponent"] < 1.0
    assert drawn.n_step == 3 and 2 < result["replay_buffer"]["actual_n_step"] <= 3 and 1e-4 < drawn.lr < 1e-2
    assert result["learners"]["default_policy"]["default_optimizer_learning_rate"] == drawn.lr


def test_levels_are_built_from_the_values_of_the_trial() -> None:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).rl_module(model_config=SMALL)
    config.training(
        gamma=tune.grid_search([0.9, 0.8]), train_batch_size_per_learner=60, minibatch_size=30, num_epochs=2
    )
    config.debugging(seed=tune.sample_from(lambda spec: round(10 * spec.config.gamma)))
    rllib_ext.configure(config, levels={"levels": 20, "staleness_weight": tune.uniform(0.1, 0.5)})
    algorithm = trial(config, 1)
    result = algorithm.train()
    levels = rllib_ext.level_buffer(algorithm).state_dict()
    staleness_weight = algorithm.config.levels["staleness_weight"]
    assert (algorithm.config.gamma, algorithm.config.seed) == (0.8, 8) and 0.1 <= staleness_weight <= 0.5
    assert result["timesteps_total"] == result["num_env_steps_sampled_lifetime"] == 60
    assert result["num_updates_lifetime"] >= 4
    assert levels["kind"] == "LevelBuffer"


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("uniform", {"train_batch_size_per_learner": tune.grid_search([16, 2000])}, "capacity is 1000, below the 2000"),
        ("surprise_retention", {"n_step": tune.grid_search([3, (1, 3)])}, r"n_step is \(1, 3\), an interval to draw"),
    ],
)
def test_a_trial_whose_values_do_not_fit_fails_with_the_reason(recipe: str, settings: Any, message: str) -> None:
    config = rllib_ext.configure(small(DQNConfig, "CartPole-v1", recipe).training(**settings))
    with pytest.raises(ValueError, match=message):
        trial(config, 1)


def test_a_trial_whose_levels_do_not_fit_fails_with_the_reason() -> None:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).rl_module(model_config=SMALL)
    rllib_ext.configure(config, levels={"levels": 20, "staleness_weight": tune.grid_search([0.3, 3.0])})
    with pytest.raises(ValueError, match="staleness_weight is 3.0; it must be a number in"):
        trial(config, 1)


def test_the_process_of_a_trial_counts_as_a_cpu() -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    config = small(DQNConfig, "CartPole-v1", "uniform").env_runners(num_env_runners=cpus)
    rllib_ext.configure(config)
    with pytest.raises(ValueError, match=f"need {cpus + 1} CPUs and Ray has {cpus}: the trial would wait for ever"):
        rllib_ext.configure(config.training(lr=tune.loguniform(1e-4, 1e-2)))


class PauseOnce(FIFOScheduler):
    """Stops the first trial's actor after its second iteration; Tune restores it from its checkpoint in a new one."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        due = result["training_iteration"] == result["iterations_since_restore"] == 2
        return TrialScheduler.PAUSE if due and trial.trial_id.endswith("00000") else TrialScheduler.CONTINUE


def group_of(_: Any = None) -> str | None:
    group = ray.util.get_current_placement_group()
    return None if group is None else group.id.hex()


def note_groups(*, algorithm: Algorithm, result: dict[str, Any], **ignored: Any) -> None:
    handles = algorithm.local_replay_buffer.shards.handles
    of_shards = ray.get([handle.__ray_call__.remote(group_of) for handle in handles])
    result["shards_in_group"] = sum(group == group_of() for group in of_shards)


def sharded(**options: Any) -> AlgorithmConfig:
    given = {"num_shards": 2, "num_cpus_per_shard": 2, **options}
    return small(DQNConfig, "CartPole-v1", "prioritized", **given).env_runners(num_env_runners=0)


def test_trials_wait_for_the_cpus_of_their_shards_and_are_restored_with_them(tmp_path: Path) -> None:
    """Each takes five of the eight CPUs; counted without shards both would begin, and wait for ever."""
    space = rllib_ext.configure(sharded().callbacks(on_train_result=note_groups).training(lr=tune.grid_search([0, 1])))
    kept = tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=1)
    run = {"stop": {"training_iteration": 3}, "storage_path": str(tmp_path), "checkpoint_config": kept}
    results = tune.Tuner(
        space.algo_class,
        param_space=space,
        run_config=tune.RunConfig(name="run", verbose=0, **run),
        tune_config=tune.TuneConfig(scheduler=PauseOnce()),
    ).fit()
    assert len(results) == 2 and not results.errors
    for result, iterations in zip(results, ([1, 2, 1], [1, 2, 3]), strict=True):
        history = result.metrics_dataframe
        assert history["iterations_since_restore"].tolist() == iterations
        stored = history["replay_buffer/num_env_steps_stored"].tolist()
        assert stored == history["num_env_steps_sampled_lifetime"].tolist() and len(set(stored)) == 3
        assert history["shards_in_group"].tolist() == [2, 2, 2]
        assert len(list(Path(result.path).glob("checkpoint_*"))) == 1
    again = Algorithm.from_checkpoint(results[0].checkpoint.path)
    rows = len(again.local_replay_buffer)
    assert rows == results[0].metrics["replay_buffer"]["num_env_steps_stored"]


def test_a_trial_whose_cpus_were_counted_without_shards_is_refused() -> None:
    config = rllib_ext.configure(sharded())
    group = ray.util.placement_group([{"CPU": 1}])
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    refused = ray.remote(check_trial).options(scheduling_strategy=inside, num_cpus=1).remote(config)
    with pytest.raises(ValueError, match="the trial has 1 CPUs, and it needs 5 with those of 2 shards"):
        ray.get(refused)
    ray.util.remove_placement_group(group)
    assert config.algo_class.__name__ == "ShardedDQN" and rllib_ext.configure(config).algo_class is config.algo_class
    bundles = config.algo_class.default_resource_request(config.to_dict()).bundles
    assert bundles == [{"CPU": 1}, {"CPU": 2}, {"CPU": 2}]


def test_a_search_over_the_number_of_shards_counts_those_of_each_trial() -> None:
    config = rllib_ext.configure(sharded(num_shards=tune.grid_search([2, 3])))
    of_trials = [config.algo_class.default_resource_request(values) for values in samples_of(config.to_dict())]
    assert [len(request.bundles) for request in of_trials] == [3, 4]
    rllib_ext.configure(config.training(replay_buffer_config=rllib_ext.replay_config("uniform", capacity=100)))
    assert config.algo_class.default_resource_request(config).bundles == [{"CPU": 1}]
