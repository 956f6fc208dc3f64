# SPDX-License-Identifier: Apache-2.0
"""One test per gate of ray 2.60.0 that ``rllib_ext/rllib_compat.py`` lists: a release that moves a gate fails here."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.algorithms.tqc import TQCConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.replay_buffers import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.utils import update_priorities_in_episode_replay_buffer
from ray.tune.registry import register_env

import lightning_replay
import rllib_ext
from rllib_ext import rllib_compat
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.hooks import install_replay
from rllib_ext.rllib_compat import ACCEPTED_NAME, algorithm_being_built, callbacks_on

CONFIG: dict[str, Any] = {"type": RecipeEpisodeReplayBuffer, "recipe": "uniform", "capacity": 1000}
ALGORITHMS = [DQNConfig, SACConfig, TQCConfig]


def configured(algorithm: type[AlgorithmConfig]) -> AlgorithmConfig:
    env = "CartPole-v1" if algorithm is DQNConfig else "Pendulum-v1"
    return algorithm().environment(env).training(replay_buffer_config=dict(CONFIG))


def test_the_release_the_gates_were_measured_on() -> None:
    assert ray.__version__ == "2.60.0"


def test_creation_asks_whether_a_word_is_in_the_type() -> None:
    assert "EpisodeReplayBuffer" in RecipeEpisodeReplayBuffer
    assert "MultiAgentReplayBuffer" not in RecipeEpisodeReplayBuffer
    assert 3 not in RecipeEpisodeReplayBuffer


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_algorithm_that_builds_the_buffer_is_found_and_prepared(algorithm: type[AlgorithmConfig]) -> None:
    config = configured(algorithm)
    config.freeze()
    owner = config.algo_class.__new__(config.algo_class)
    owner.config = config
    buffer = owner._create_local_replay_buffer_if_necessary(config)
    assert type(buffer) is RecipeEpisodeReplayBuffer
    assert "metrics_num_episodes_for_smoothing" in config.replay_buffer_config
    assert owner.config is not config and owner.config._is_frozen
    (hook,) = callbacks_on(owner.config, "on_algorithm_init")
    assert hook.func is install_replay and not callbacks_on(config, "on_algorithm_init")
    assert algorithm_being_built() is None
    given = owner.config
    owner._create_local_replay_buffer_if_necessary(given)  # as after a restore
    assert owner.config is given


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_class_is_accepted_alone_and_survives_a_dictionary(algorithm: type[AlgorithmConfig]) -> None:
    default = algorithm().replay_buffer_config["type"]
    assert default != RecipeEpisodeReplayBuffer and default != ACCEPTED_NAME
    config = configured(algorithm)
    config.validate()
    assert config.replay_buffer_config == CONFIG  # nothing of the default is merged in
    again = algorithm().update_from_dict(config.to_dict())
    assert again.replay_buffer_config["type"] is RecipeEpisodeReplayBuffer
    again.validate()


def test_td_errors_reach_the_buffer() -> None:
    given: list[Any] = []
    buffer = RecipeEpisodeReplayBuffer.__new__(RecipeEpisodeReplayBuffer)
    assert isinstance(buffer, PrioritizedEpisodeReplayBuffer)
    assert issubclass(RecipeEpisodeReplayBuffer, EpisodeReplayBuffer)
    buffer.update_priorities = lambda td_error, module_id: given.append((td_error, module_id))  # type: ignore[method-assign]
    update_priorities_in_episode_replay_buffer(
        replay_buffer=buffer, td_errors={"default_policy": {"td_error": [1.0]}, "__all_modules__": {}}
    )
    assert given == [([1.0], "default_policy")]


@pytest.mark.slow
def test_importing_the_class_does_not_import_torchrl() -> None:
    code = "import sys, rllib_ext.buffer.buffer\nassert not {'torchrl', 'tensordict'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def private_names(tree: ast.AST, own: set[str]) -> set[str]:
    """Private names that a module reads from other packages' objects or imports from them."""
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
    found = {name for name in attributes | imported if name.startswith("_") and not name.startswith("__")}
    return found - own - {"_asdict", "_replace"}  # of named tuples


def names_of(tree: ast.AST) -> set[str]:
    """Names that a module defines: functions, classes, variables, and attributes of its own objects."""
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = [node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store)]
    defined |= {node.id for node in stored if isinstance(node, ast.Name)}
    return defined | {
        node.attr
        for node in stored
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "columns")
    }


@pytest.mark.slow
def test_private_names_of_rllib_stand_in_one_file() -> None:
    root = Path(rllib_ext.__file__).parent
    trees = {file.relative_to(root).as_posix(): ast.parse(file.read_text()) for file in root.rglob("*.py")}
    packages = [ast.parse(file.read_text()) for file in Path(lightning_replay.__file__).parent.rglob("*.py")]
    own = set[str]().union(*map(names_of, [*trees.values(), *packages]))
    found = {name for name, tree in trees.items() if private_names(tree, own)}
    assert found == {"rllib_compat.py"}


@pytest.fixture(scope="module")
def algorithm() -> Any:
    """A DQN whose Learner and EnvRunner are in this process."""
    config = DQNConfig().environment("CartPole-v1").env_runners(num_env_runners=0, num_envs_per_env_runner=2)
    algorithm = config.build_algo()
    yield algorithm
    algorithm.stop()


def test_a_config_keeps_its_connectors_and_its_module_under_these_names() -> None:
    config = AlgorithmConfig()
    assert rllib_compat.learner_connector_of(config) is None and rllib_compat.module_spec_of(config) is None
    assert not rllib_compat.has_own_connectors(config) and not rllib_compat.observes_by_connector(config)
    config.env_runners(env_to_module_connector=lambda *given: None)
    config.learners(learner_connector=len).rl_module(rl_module_spec=RLModuleSpec())
    assert rllib_compat.has_own_connectors(config) and rllib_compat.observes_by_connector(config)
    assert rllib_compat.learner_connector_of(config) is len and rllib_compat.module_spec_of(config) is not None


def test_a_learner_has_its_number_and_its_connectors(algorithm: Any) -> None:
    learner = algorithm.learner_group._learner
    assert rllib_compat.is_first_learner(learner)
    assert rllib_compat.learner_connector_of(learner).connectors
    assert rllib_compat.call_one_learner(algorithm.learner_group, lambda learner: learner) is learner


def test_an_env_runner_has_its_running_episodes_and_the_number_of_its_weights(algorithm: Any) -> None:
    runner = algorithm.env_runner
    runner.sample(num_timesteps=3, random_actions=True)
    assert rllib_compat.ongoing_episode(runner, 1).id_ != rllib_compat.ongoing_episode(runner, 0).id_
    before = rllib_compat.ongoing_episode(runner, 0).id_
    runner.sample(num_timesteps=1, random_actions=True)
    assert rllib_compat.ongoing_episode(runner, 0).id_ == before
    rllib_compat.reset_at_next_sample(runner)
    runner.sample(num_timesteps=1, random_actions=True)
    assert rllib_compat.ongoing_episode(runner, 0).id_ != before
    state = runner.get_state()
    rllib_compat.force_weights(runner, {**state, "weights_seq_no": 5})
    assert runner.get_state()["weights_seq_no"] == 5
    rllib_compat.force_weights(runner, {**state, "weights_seq_no": 3})
    assert runner.get_state()["weights_seq_no"] == 3


def test_an_algorithm_knows_whether_its_module_is_recurrent(algorithm: Any) -> None:
    assert not rllib_compat.has_recurrent_module(algorithm) and hasattr(algorithm, "_module_is_stateful")
    config = AlgorithmConfig()
    assert config._dont_auto_sync_env_runner_states is False
    rllib_compat.leave_runner_states(config)
    assert config._dont_auto_sync_env_runner_states is True


def test_a_group_of_env_runners_has_a_manager_that_probes(algorithm: Any) -> None:
    assert rllib_compat.probe_lost(algorithm.env_runner_group)


def test_names_that_ray_has_registered_are_found() -> None:
    register_env("gate-env", lambda config: "made")
    assert rllib_compat.registered_environment(AlgorithmConfig().environment("gate-env")) == "made"
    assert rllib_compat.registered_environment(AlgorithmConfig().environment("CartPole-v1")) is None
