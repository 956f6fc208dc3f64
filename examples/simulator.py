# SPDX-License-Identifier: Apache-2.0
"""TD3 in plain torch swings up a thousand pendulums of one tensor: rows and draws stay on the device of the simulator.

python examples/simulator.py [--fast] [--envs 1024] [--device cuda]
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from torch import Tensor, nn

from lightning_replay import recipes
from lightning_replay.collecting import VectorSteps
from lightning_replay.envs.pendulums import Pendulums

DISCOUNT, MAX_TORQUE = 0.97, 2.0
REWARD_SCALE = 0.1  # Values of some hundreds are learned far more slowly.


def network(inputs: int, outputs: int) -> nn.Sequential:
    hidden = [nn.Linear(inputs, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(128, outputs))


class Agent(nn.Module):
    """An actor and two critics, which learn from n-step returns."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = network(3, 1)
        self.critics = nn.ModuleList([network(4, 1), network(4, 1)])

    def act(self, observation: Tensor) -> Tensor:
        return MAX_TORQUE * self.actor(observation).tanh()

    def values(self, observation: Tensor, action: Tensor) -> Tensor:
        rows = torch.cat([observation, action], 1)
        return torch.cat([critic(rows) for critic in self.critics], 1)


def mean_return(agent: Agent, envs: Pendulums) -> float:
    """Mean return of one episode of each environment without noise."""
    observation, _ = envs.reset(seed=1)
    total = torch.zeros(envs.num_envs, device=envs.device)
    with torch.no_grad():
        for _ in range(envs.max_steps):
            observation, reward, *_ = envs.step(agent.act(observation))
            total += reward
    return total.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a few steps only")
    parser.add_argument("--envs", type=int, default=1_024)
    parser.add_argument("--steps", type=int, default=400, help="steps of all environments")
    parser.add_argument("--updates", type=int, default=4, help="for each step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.fast:
        options.envs, options.steps = 64, 30
    torch.manual_seed(0)

    envs = VectorSteps(Pendulums(options.envs, options.device, staggered=True))
    capacity, batch_size = options.envs * 256, min(4_096, 2 * options.envs)
    replay = recipes.prioritized(
        capacity, batch_size, n_steps=3, discount=DISCOUNT, device=options.device, draws_on="device", seed=0
    )
    agent = Agent().to(options.device)
    target = copy.deepcopy(agent)
    actor_optimizer = torch.optim.Adam(agent.actor.parameters(), 1e-3)
    critic_optimizer = torch.optim.Adam(agent.critics.parameters(), 1e-3)
    noise = torch.rand(options.envs, 1, device=options.device)  # Each environment has its own.

    start = time.perf_counter()
    observation, _ = envs.reset(seed=0)
    for step in range(1, options.steps + 1):
        with torch.no_grad():
            action = agent.act(observation)
            action = (action + noise * torch.randn_like(action)).clamp(-MAX_TORQUE, MAX_TORQUE)
        observation, *_ = envs.step(action)
        envs.store(replay)
        for _ in range(options.updates if step > 10 else 0):
            batch = replay.sample()
            following = batch["next", "observation"]
            with torch.no_grad():
                value = target.values(following, target.act(following)).min(1, keepdim=True).values
                goal = REWARD_SCALE * batch["next", "reward"] + batch["discount"] * value
            errors = goal - agent.values(batch["observation"], batch["action"])
            critic_optimizer.zero_grad()
            (batch["priority_weight"].unsqueeze(1) * errors.square()).mean().backward()
            critic_optimizer.step()
            replay.update_priority(batch, errors.detach().abs().mean(1))
            actor_optimizer.zero_grad()
            (-agent.values(batch["observation"], agent.act(batch["observation"]))[:, 0].mean()).backward()
            actor_optimizer.step()
            with torch.no_grad():
                for old, new in zip(target.parameters(), agent.parameters(), strict=True):
                    old.lerp_(new, 0.05)
        if step % 100 == 0 or step == options.steps:
            steps_per_second = step * options.envs / (time.perf_counter() - start)
            score = mean_return(agent, Pendulums(64, options.device))
            print(f"{step * options.envs:>9,} steps: return {score:8.1f}, {steps_per_second:,.0f} steps/s", flush=True)


if __name__ == "__main__":
    main()
