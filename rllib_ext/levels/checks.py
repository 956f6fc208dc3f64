# SPDX-License-Identifier: Apache-2.0
"""Level buffers from the option ``levels`` of :func:`rllib_ext.configure`, tried with the algorithm."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import torch
from ray import cloudpickle
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.impala import IMPALA
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from tensordict import TensorDict

from lightning_replay.levels import LevelSelector, LevelSet
from lightning_replay.levels.environments import LEVEL_IDS, LevelWrapper, check_set
from lightning_replay.levels.scores import L1ValueLoss, discounts_of
from lightning_replay.options import check_kind
from rllib_ext.buffer.building import built
from rllib_ext.checks import check_api_stack
from rllib_ext.environments import check_observations, make_environment
from rllib_ext.rllib_compat import algorithm_name

logger: logging.Logger = logging.getLogger(__name__)
_DRAWN = 64  # levels of a copy, of which the environment plays the first distinct ones
_PROBED = 8
_LEVEL_BUFFER = "lightning_replay.levels.LevelBuffer"
# Example of a class path.
_EXAMPLE = "lightning_replay.levels.UniformLevels"
_EXAMPLES = {
    "levels.score": "lightning_replay.levels.scores.L1ValueLoss",
    "levels.prioritization": "lightning_replay.levels.Rank",
    "levels.editor": "my_project.my_module.edited",
    "levels.generate": "my_project.my_module.new_level",
}


def checked_levels(
    levels: LevelSelector | Mapping[str, Any],
    config: AlgorithmConfig,
    held_out: Sequence[int],
    *,
    flush: bool,
    check_environments: bool,
) -> LevelSelector:
    """Builds a level buffer and checks on a copy that the algorithm can play and score its levels."""
    source = built_levels(levels, config)
    check_algorithm(config, source.plays_unlearned, flush)
    source.check_held_out(
        held_out
    )  # The evaluation warns of held-out levels that an unbounded set of levels has reached.
    trial = cloudpickle.loads(cloudpickle.dumps(source))
    trial.claim()  # Tune builds the algorithm in another process than the config
    drawn = [trial.next_level(actor) for actor in range(_DRAWN)]
    if max(drawn) >= LEVEL_IDS:
        raise ValueError(f"level {max(drawn)} is drawn; the ids of levels are integers from 0 to 2**31 - 1")
    probes = list(dict.fromkeys(drawn))[:_PROBED]
    actions = check_environment(config, probes, held_out, source.levels) if check_environments else config.action_space
    check_score(trial, drawn[0], actions)
    return source


def built_levels(levels: LevelSelector | Mapping[str, Any], config: AlgorithmConfig) -> LevelSelector:
    """Builds the level buffer, unless an object was given.

    Arguments and errors are as of :func:`rllib_ext.configure`.
    """
    source: Any = levels
    if isinstance(levels, Mapping):
        given = levels if "class_path" in levels else {"class_path": _LEVEL_BUFFER, "init_args": levels}
        score = L1ValueLoss(config.gamma, config.lambda_ if isinstance(config, PPOConfig) else 0.95)
        defaults = {"seed": config.seed, "score": score}
        source = built(given, "levels", defaults=defaults, functions=True, example=_EXAMPLE, examples=_EXAMPLES)
    accepted = "LevelBuffer(...), UniformLevels(...) or SequentialLevels(...) of lightning_replay.levels, or arguments"
    check_kind("levels", source, LevelSelector, f"{accepted} of LevelBuffer by name")
    return source


def check_algorithm(config: AlgorithmConfig, only_scores: bool, flush: bool) -> None:
    """Refuses algorithms in which levels cannot be scored. With ``only_scores``, some episodes are not learned from."""
    algorithm = config.algo_class
    name = algorithm_name(config)
    if not (isinstance(algorithm, type) and issubclass(algorithm, PPO | IMPALA)):
        raise ValueError(
            f"{name} does not learn from whole episodes with a value function; levels are replayed with PPO, APPO and "
            "IMPALA"
        )
    check_api_stack(config, "which has no callback before an episode's reset")
    mode = gymnasium.VectorizeMode(config.gym_env_vectorize_mode)
    aggregators = getattr(config, "num_aggregator_actors_per_learner", 0)
    is_ppo = issubclass(algorithm, PPO)
    refused = {
        "the config has no environment; call .environment(...) before configure": config.env is None,
        "levels are replayed for one agent; the config has several, .multi_agent(...)": config.is_multi_agent,
        f"num_aggregator_actors_per_learner is {aggregators}; the modules of aggregators are never updated, so they "
        "cannot score. Give 0, and batches are built by the Learners": aggregators > 0,
        "add_default_connectors_to_learner_pipeline is False; levels are scored from the batch that RLlib's connectors "
        "make. Leave them in, .learners(learner_connector=...) adds to "
        "them": not config.add_default_connectors_to_learner_pipeline,
        f"gym_env_vectorize_mode is {mode.value!r}; each environment gets its level in the EnvRunner's process: give "
        '"sync", and more EnvRunners where environments are slow': mode is not gymnasium.VectorizeMode.SYNC,
        f"train_on_new_levels=False and editors play episodes that must not be learned from; {name} builds its batches "
        "from all of them. Use PPO, or train on all levels": only_scores and not is_ppo,
        "flush=True makes scores of unfinished episodes after every update, which needs PPO with one Learner: others "
        "get pieces of one episode in several updates at once. Leave it "
        "out": flush and (config.num_learners > 1 or not is_ppo),
    }
    for reason, is_refused in refused.items():
        if is_refused:
            raise ValueError(reason)


def check_environment(
    config: AlgorithmConfig, level_ids: Sequence[int], held_out: Sequence[int], levels: LevelSet | None = None
) -> gymnasium.Space[Any]:
    """Makes the environment once, begins these levels, and returns its action space. Refuses one that ignores them."""
    # On an EnvRunner such an error, or a held-out level that cannot be played, would have RLlib restart it endlessly.
    # One level alone cannot show whether the environment follows it.
    environment = LevelWrapper(make_environment(config), check=level_ids if len(level_ids) > 1 else False)
    try:
        if levels is not None:
            check_set(levels, [environment.has_other_set(levels.digest)])
        environment.reset(seed=level_ids[0])
        if _evaluates(config):
            try:
                environment.reset(seed=held_out[-1])
            except Exception as error:
                raise ValueError(
                    f"the environment cannot play level {held_out[-1]}, which evaluation would: {error!r}. Give levels "
                    "that it can, configure(config, levels=..., held_out_levels=[...])"
                ) from error
        check_observations(config, environment)
        return environment.action_space
    finally:
        environment.close()


def check_score(trial: LevelSelector, level_id: int, actions: gymnasium.Space[Any] | None) -> None:
    """Scores an episode on a level, which actor 0 of ``trial`` plays, with the columns that Learners send."""
    two = torch.full((2,), 0.5)  # a return of 1, which is an outcome too
    ends = {name: torch.tensor([False, name != "truncated"]) for name in ("terminated", "truncated", "done")}
    columns = {"state_value": two, "next": {"reward": two, "state_value": two, **ends}}
    if actions is None or isinstance(actions, gymnasium.spaces.Discrete):
        columns["logits"] = torch.zeros(2, 2 if actions is None else int(actions.n))
    try:
        trial.update(0, level_id, TensorDict(columns, [2]), episode_done=True)
    except Exception as error:
        raise ValueError(
            f"the score of the level buffer cannot be computed: {error!r}. Learners give it state_value, ('next', "
            "'reward' | 'state_value' | 'terminated' | 'truncated' | 'done'), and logits only where actions are "
            "discrete"
        ) from error


def check_discount(config: AlgorithmConfig, levels: LevelSelector) -> None:
    """Warns of a score with another discount, or with PPO another λ, than the Learner's."""
    learned = {"discount": config.gamma} | ({"gae_lambda": config.lambda_} if isinstance(config, PPOConfig) else {})
    scored = {name: value for name, value in discounts_of(levels.score).items() if name in learned}
    if any(scored[name] != learned[name] for name in scored):
        name = type(levels.score).__name__
        own, needed = (f"{name}({', '.join(f'{key}={values[key]}' for key in scored)})" for values in (scored, learned))
        logger.warning(
            f"levels are scored with {own}, and the algorithm learns with other values of gamma or lambda_. The score "
            f"is what to change: give the level buffer score={needed}"
        )


def check_evaluated(config: AlgorithmConfig) -> None:
    """Warns of held-out levels if evaluation is off."""
    if not _evaluates(config):
        logger.warning(
            "held_out_levels are played by evaluation, which is off; turn it on before configure, "
            ".evaluation(evaluation_interval=..., evaluation_duration=...)"
        )


def _evaluates(config: AlgorithmConfig) -> bool:
    return bool(config.evaluation_interval or config.evaluation_num_env_runners)
