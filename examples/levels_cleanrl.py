# SPDX-License-Identifier: Apache-2.0
"""Level replay in PPO in one file, as CleanRL writes it: two calls, one for each rollout's levels and scores.

python examples/levels_cleanrl.py [--fast]

Prints the held-out return with uniform levels and with level replay.
"""

from __future__ import annotations

import numpy as np
import torch
from locks import DISCOUNT, ENVS, GAE_LAMBDA, LOCKS, ROLLOUT, ActorCritic, Lock, compare, held_out_return, update_levels
from torch import nn
from torch.distributions import Categorical

from lightning_replay.levels import LevelSelector
from lightning_replay.levels.environments import LevelWrapper, make_level_vector


def train(levels: LevelSelector, total_steps: int) -> float:
    agent = ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    # before: envs = gym.vector.SyncVectorEnv([make_env for _ in range(ENVS)]), and no other level
    envs = make_level_vector(lambda: LevelWrapper(Lock(), level_option="level", level_set=LOCKS), ENVS, levels)
    seen = envs.single_observation_space.shape
    obs = torch.zeros(ROLLOUT, ENVS, *seen)
    actions, level_ids = torch.zeros(2, ROLLOUT, ENVS, dtype=torch.int64)
    logprobs, rewards, dones, values = torch.zeros(4, ROLLOUT, ENVS)
    next_obs = torch.from_numpy(envs.reset()[0])
    for _ in range(max(1, total_steps // (ENVS * ROLLOUT))):
        for step in range(ROLLOUT):
            obs[step] = next_obs
            with torch.no_grad():
                logits, values[step] = agent(next_obs)
                policy = Categorical(logits=logits)
                actions[step] = policy.sample()
                logprobs[step] = policy.log_prob(actions[step])
            observation, reward, terminated, truncated, infos = envs.step(actions[step].numpy())
            next_obs, rewards[step] = torch.from_numpy(observation), torch.as_tensor(reward)
            dones[step] = torch.from_numpy(np.logical_or(terminated, truncated))
            level_ids[step] = torch.from_numpy(infos["step_level_id"])  # added: the level of each step
        with torch.no_grad():
            next_value = agent(next_obs)[1]
            advantages, last = torch.zeros_like(rewards), torch.zeros(ENVS)
            for t in reversed(range(ROLLOUT)):
                following = next_value if t == ROLLOUT - 1 else values[t + 1]
                delta = rewards[t] + DISCOUNT * following * (1 - dones[t]) - values[t]
                advantages[t] = last = delta + DISCOUNT * GAE_LAMBDA * (1 - dones[t]) * last
            returns = advantages + values
        update_levels(levels, rewards, values, next_value, dones, level_ids)  # added: scores, before the update
        flat = [one.flatten(0, 1) for one in (obs, actions, logprobs, advantages, returns)]
        for index in torch.cat([torch.randperm(ENVS * ROLLOUT) for _ in range(4)]).split(256):
            b_obs, b_actions, b_logprobs, b_advantages, b_returns = (one[index] for one in flat)
            logits, newvalue = agent(b_obs)
            policy = Categorical(logits=logits)
            ratio = (policy.log_prob(b_actions) - b_logprobs).exp()
            b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)
            pg_loss = torch.max(-b_advantages * ratio, -b_advantages * ratio.clamp(0.8, 1.2)).mean()
            loss = pg_loss - 0.01 * policy.entropy().mean() + 0.5 * 0.5 * (newvalue - b_returns).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    envs.close()
    return held_out_return(lambda observation: agent(observation)[0].softmax(-1))


if __name__ == "__main__":
    compare(train, __doc__)
