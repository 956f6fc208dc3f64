# SPDX-License-Identifier: Apache-2.0
"""Exploration of Ape-X: each environment keeps an epsilon of its own; light, because EnvRunners import it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.dqn.default_dqn_rl_module import DefaultDQNRLModule
from ray.rllib.utils.schedules.scheduler import Scheduler


def epsilons(num_environments: int, epsilon: float, exponent: float) -> np.ndarray:
    """Returns the probability of a random action in each environment, ``epsilon ** (1 + exponent * i / (N - 1))``.

    Section 4 of Horgan et al. 2018, https://arxiv.org/abs/1803.00933, with ε = 0.4 and α = 7.

    Args:
        num_environments: N; one alone gets ``epsilon``.
        epsilon: ε, of the first environment.
        exponent: α; the last environment gets ``epsilon ** (1 + exponent)``.

    Example:
        >>> epsilons(3, epsilon=0.5, exponent=2.0).tolist()
        [0.5, 0.25, 0.125]
    """
    place = np.arange(num_environments) / max(num_environments - 1, 1)
    result: np.ndarray = epsilon ** (1 + exponent * place)
    return result


def set_epsilons(env_runner: Any, *, epsilon: float, exponent: float) -> list[str]:
    """Gives each environment of an EnvRunner its epsilon, in place of the module's schedule.

    Environments are numbered over all EnvRunners. A module of several agents gets one value for the EnvRunner, because
    the rows of its batches are agents that act, and not environments. Returns the class names of modules that have no
    such schedule, and stay as they are.
    """
    config, module = env_runner.config, env_runner.module
    if env_runner.env is None or module is None:
        return []
    runners = max(config.num_env_runners, 1)
    place = max(env_runner.worker_index - 1, 0)  # 0 is the EnvRunner in the algorithm's process
    if config.is_multi_agent:
        value: Any = float(epsilons(runners, epsilon, exponent)[place])
        modules = [one.unwrapped() for _, one in module.items()]
    else:
        own = epsilons(runners * env_runner.num_envs, epsilon, exponent).reshape(runners, -1)[place]
        device = next(module.parameters()).device
        value, modules = torch.as_tensor(own, dtype=torch.float32, device=device), [module.unwrapped()]
    others = [one for one in modules if not isinstance(one, DefaultDQNRLModule)]
    for one in modules:
        if isinstance(one, DefaultDQNRLModule):
            one.epsilon_schedule = Scheduler(value, framework=one.framework)
    return [type(one).__name__ for one in others]
