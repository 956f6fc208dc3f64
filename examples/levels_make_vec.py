# SPDX-License-Identifier: Apache-2.0
"""Level replay in 256 environments of gymnasium.make_vec, with an actor-critic of a few lines.

python examples/levels_make_vec.py [--fast]

Prints the held-out return with uniform levels and with level replay.
"""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from locks import DISCOUNT, LOCKS, ActorCritic, compare, held_out_return, update_levels
from torch.distributions import Categorical

from lightning_replay.levels import LevelSelector
from lightning_replay.levels.environments import LevelVectorWrapper, LevelWrapper

ENVS, ROLLOUT = 256, 4


def train(levels: LevelSelector, total_steps: int) -> float:
    play = partial(LevelWrapper, level_option="level", level_set=LOCKS, check=False)
    by_levels = {"autoreset_mode": AutoresetMode.DISABLED}  # the wrapper resets, with the next level
    vector = gymnasium.make_vec("Lock-v0", ENVS, vectorization_mode="sync", vector_kwargs=by_levels, wrappers=[play])
    envs = LevelVectorWrapper(vector, levels)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    observation, _ = envs.reset()
    for _ in range(max(1, total_steps // (ENVS * ROLLOUT))):
        steps = []
        for _ in range(ROLLOUT):
            seen = torch.from_numpy(observation.copy())
            with torch.no_grad():
                action = Categorical(logits=model(seen)[0]).sample()
            observation, reward, terminated, truncated, infos = envs.step(action.numpy())
            ended = np.logical_or(terminated, truncated)
            steps.append([seen, action, *map(torch.from_numpy, (reward, ended, infos["step_level_id"]))])
        seen, action, reward, ended, level_id = map(torch.stack, zip(*steps, strict=True))  # [ROLLOUT, ENVS, ...]
        logits, value = model(seen)
        with torch.no_grad():
            last = following = model(torch.from_numpy(observation))[1]
            targets = torch.zeros_like(value)
            for step in reversed(range(ROLLOUT)):
                targets[step] = following = reward[step] + DISCOUNT * following * ~ended[step]
        update_levels(levels, reward, value.detach(), last, ended, level_id)
        policy, error = Categorical(logits=logits), targets - value
        loss = 0.5 * error.square() - error.detach() * policy.log_prob(action) - 0.01 * policy.entropy()
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    envs.close()
    return held_out_return(lambda observation: model(observation)[0].softmax(-1))


if __name__ == "__main__":
    compare(train, __doc__, steps=60_000)  # one gradient step for each rollout
