# SPDX-License-Identifier: Apache-2.0
"""Level buffers from the option ``levels`` of :func:`rllib_ext.configure`: built, and tried with the algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray import cloudpickle
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig

from lightning_replay.levels.environments.level_check import LEVEL_IDS
from rllib_ext.class_paths import built, class_and_arguments
from rllib_ext.levels.checks import check_algorithm, check_environment, check_score

if TYPE_CHECKING:
    from lightning_replay.levels import LevelSelector

_DRAWN = 64  # levels of a copy, of which the environment plays the first distinct ones
_PROBED = 8
_EXAMPLE = "lightning_replay.levels.UniformLevels"  # of a class path
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
    """Builds a level buffer and checks on a copy that the algorithm can play and score its levels.

    Arguments and errors are those of :func:`rllib_ext.configure`; the config has no search spaces.
    """
    source = built_levels(levels, config)
    check_algorithm(config, source.plays_unlearned, flush)
    source.check_held_out(held_out)  # evaluation warns of those that an unbounded level set reached
    trial = cloudpickle.loads(cloudpickle.dumps(source))
    drawn = [trial.next_level(actor) for actor in range(_DRAWN)]
    if max(drawn) >= LEVEL_IDS:
        raise ValueError(f"level {max(drawn)} is drawn; the ids of levels are integers from 0 to 2**31 - 1")
    probes = list(dict.fromkeys(drawn))[:_PROBED]
    actions = check_environment(config, probes, held_out) if check_environments else config.action_space
    check_score(trial, drawn[0], actions)
    return source


def built_levels(levels: LevelSelector | Mapping[str, Any], config: AlgorithmConfig) -> LevelSelector:
    """Builds the level buffer, unless an object was given; arguments and errors as :func:`rllib_ext.configure`."""
    from lightning_replay.levels import LevelBuffer, LevelSelector
    from lightning_replay.levels.scores import L1ValueLoss

    source: Any = levels
    if isinstance(levels, Mapping):
        kind: Any = LevelBuffer
        options = dict(levels)
        if "class_path" in options:
            kind, options = class_and_arguments(options, "levels", _EXAMPLE)
        accepted = inspect.signature(kind).parameters
        if "seed" in accepted:
            options.setdefault("seed", config.seed)
        if "score" in accepted and options.get("score") is None:
            options["score"] = L1ValueLoss(config.gamma, config.lambda_ if isinstance(config, PPOConfig) else 0.95)
        arguments = {
            name: built(value, f"levels.{name}", functions=True, example=_EXAMPLE, examples=_EXAMPLES)
            for name, value in options.items()
        }
        source = kind(**arguments)
    if not isinstance(source, LevelSelector):
        raise TypeError(
            f"levels is {levels!r}; accepted are LevelBuffer(...), UniformLevels(...) and SequentialLevels(...) of "
            "lightning_replay.levels, or the arguments of LevelBuffer by name"
        )
    return source
