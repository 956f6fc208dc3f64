# SPDX-License-Identifier: Apache-2.0
"""Prioritized Level Replay around any Gymnasium environment and a PPO loop of plain PyTorch.

python examples/plr_any_gymnasium_env.py [--fast] [--uniform | --no-replay-in-flight]

A level is the number of a maze. 32 are played at once; the level buffer chooses the next when an episode ends, and is
updated with the steps before each policy update. Prints returns on held-out mazes; draws each score against the
staleness of its maze. All mazes this small teach something, so that uniform draws learn as fast.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical

from lightning_replay.inspection.plotting import make_figure, save_figure
from lightning_replay.levels import LevelBuffer, LevelSelector, SequentialLevels, UniformLevels, scores, update_rollout
from lightning_replay.levels.environments import LevelVectorWrapper, make_level_vector

DISCOUNT, GAE_LAMBDA, ENVS, ROLLOUT = 0.95, 0.95, 32, 32
TRAINING_LEVELS, HELD_OUT_LEVELS = range(500), range(10_000, 10_100)
SIZE, MOVES = 7, ((0, 1), (0, -1), (1, 0), (-1, 0))


@cache
def make_maze(level_id: int) -> tuple[np.ndarray, tuple[int, int], tuple[int, int], int]:
    """Returns free cells, start, goal and the steps between them, all determined by the level's number."""
    generator = np.random.default_rng(level_id)
    while True:
        free = generator.random((SIZE, SIZE)) > generator.uniform(0.0, 0.45)
        start, goal = (tuple(generator.integers(SIZE, size=2).tolist()) for _ in range(2))
        steps, reached = {start: 0}, [start]
        for cell in reached:
            for one in ((cell[0] + x, cell[1] + y) for x, y in MOVES):
                if min(one) >= 0 and max(one) < SIZE and free[one] and one not in steps:
                    steps[one] = steps[cell] + 1
                    reached.append(one)
        if free[start] and steps.get(goal, 0) > 0:
            return free, start, goal, steps[goal]


class Maze(gymnasium.Env):
    """Go from start to goal: the reward there is ``1 - 0.9 * steps / 40``."""

    level_id, max_steps = 0, 40
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (3, SIZE, SIZE), np.float32)
    action_space = gymnasium.spaces.Discrete(len(MOVES))

    def set_level(self, level_id: int) -> None:  # without this method, a level is played by reset(seed=level_id)
        self.level_id = level_id

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        (self.free, self.place, self.goal, _), self.steps = make_maze(self.level_id), 0
        return self.look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        x, y = self.place[0] + MOVES[action][0], self.place[1] + MOVES[action][1]
        if 0 <= x < SIZE and 0 <= y < SIZE and self.free[x, y]:
            self.place = (x, y)
        is_there = self.place == self.goal
        reward = 1.0 - 0.9 * self.steps / self.max_steps if is_there else 0.0
        return self.look(), reward, is_there, self.steps >= self.max_steps and not is_there, {}

    def look(self) -> np.ndarray:
        picture = np.zeros((3, SIZE, SIZE), np.float32)
        picture[0], picture[1][self.place], picture[2][self.goal] = self.free, 1.0, 1.0
        return picture


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        eyes = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten())
        self.body = nn.Sequential(eyes, nn.Linear(32 * (SIZE - 2) ** 2, 128), nn.ReLU())
        self.actor, self.critic = nn.Linear(128, len(MOVES)), nn.Linear(128, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(observation)
        return self.actor(features), self.critic(features).squeeze(-1)


@torch.no_grad()
def collect(envs: LevelVectorWrapper, model: nn.Module, observation: np.ndarray) -> tuple[TensorDict, np.ndarray]:
    """Plays a rollout ``[envs, ROLLOUT]`` and returns it with the last observations."""
    steps = []
    for _ in range(ROLLOUT):
        logits, value = model(torch.from_numpy(observation))
        acted = {"logits": logits, "state_value": value, "action": Categorical(logits=logits).sample()}
        seen = {"observation": observation, "level_id": envs.level_ids}
        observation, reward, terminated, truncated, infos = envs.step(acted["action"].numpy())
        after = {"observation": observation.copy(), "reward": reward.astype(np.float32)}
        for row in np.flatnonzero(terminated | truncated):
            after["observation"][row] = infos["final_obs"][row]  # in place of the next episode's first one
        ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        steps.append(TensorDict(seen | acted | {"next": after | ends}, [envs.num_envs]))
    rollout = torch.stack(steps, 1).contiguous()
    _, value = model(rollout["next", "observation"].flatten(0, 1))
    rollout["next", "state_value"] = value.view(rollout.shape)
    return rollout, observation


def improve(model: nn.Module, optimizer: torch.optim.Adam, rollout: TensorDict, discount: float = DISCOUNT) -> None:
    """Minimises PPO's clipped loss for three epochs in minibatches of 256 steps."""
    rollout["advantage"] = gae(rollout, discount)
    rollout["log_probability"] = Categorical(logits=rollout["logits"]).log_prob(rollout["action"])
    steps = rollout.flatten(0, 1)
    for index in torch.cat([torch.randperm(len(steps)) for _ in range(3)]).split(256):
        batch = steps[index]
        logits, value = model(batch["observation"])
        policy = Categorical(logits=logits)
        ratio = (policy.log_prob(batch["action"]) - batch["log_probability"]).exp()
        advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        error = (value - batch["advantage"] - batch["state_value"]).square().mean()
        optimizer.zero_grad()
        (0.5 * error - gain - 0.01 * policy.entropy().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def gae(rollout: TensorDict, discount: float) -> Tensor:
    """Returns generalized advantages ``[envs, ROLLOUT]``: only after termination the next value is 0."""
    after = rollout["next"]
    bootstrap = discount * after["state_value"] * ~after["terminated"]
    advantage = after["reward"] + bootstrap - rollout["state_value"]
    for step in reversed(range(ROLLOUT - 1)):
        advantage[:, step] += discount * GAE_LAMBDA * ~after["done"][:, step] * advantage[:, step + 1]
    return advantage


@torch.no_grad()
def mean_return(model: nn.Module, envs: LevelVectorWrapper) -> float:
    """Plays one episode in each sub-environment, with actions drawn as in training."""
    observation, _ = envs.reset()
    returns, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
    while running.any():
        action = Categorical(logits=model(torch.from_numpy(observation))[0]).sample()
        observation, reward, terminated, truncated, _ = envs.step(action.numpy())
        returns += reward * running
        running &= ~(terminated | truncated)
    return float(returns.mean())


def draw(levels: LevelBuffer, path: Path) -> None:
    table = levels.probabilities()
    distance = [make_maze(level_id)[3] for level_id in table["level_id"].tolist()]
    figure, panels = make_figure("the picture of scores")
    axes = panels[0, 0]
    points = axes.scatter(table["staleness"], table["score"], c=distance, s=4 + 3000 * table["probability"], alpha=0.7)
    axes.set(xlabel="staleness (episodes since the maze was played)", ylabel="score of the maze")
    axes.set_title(f"Scores of {len(table)} mazes; area: probability of replay")
    axes.margins(0.15)  # half of the largest area
    figure.colorbar(points, label="shortest way (steps)")
    save_figure(figure, path)
    print(f"written: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="half a minute")
    parser.add_argument("--uniform", action="store_true", help="every level with the same chance")
    in_flight = {"action": argparse.BooleanOptionalAction, "default": True}
    parser.add_argument("--replay-in-flight", **in_flight, help="whether a maze that is being played may be replayed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs/plr_any_gymnasium_env"))
    options = parser.parse_args()
    torch.manual_seed(options.seed)

    levels: LevelSelector = UniformLevels(TRAINING_LEVELS, seed=options.seed)
    if not options.uniform:
        levels = LevelBuffer(
            TRAINING_LEVELS,
            score=scores.L1ValueLoss(DISCOUNT, GAE_LAMBDA),
            score_temperature=0.5,
            staleness_weight=0.3,
            replay_in_flight=options.replay_in_flight,
            seed=options.seed,
        )
    envs = make_level_vector(Maze, ENVS, levels)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-5)
    observation, _ = envs.reset()
    updates = 100 if options.fast else 1_000
    tests = [make_level_vector(Maze, 100, SequentialLevels(ids)) for ids in (HELD_OUT_LEVELS, TRAINING_LEVELS[:100])]
    for update in range(updates + 1):
        if update % (updates // 4) == 0:
            held_out, trained = (mean_return(model, test) for test in tests)
            print(f"{update * ENVS * ROLLOUT:>9,} steps: return {held_out:.2f} held out, {trained:.2f} trained on")
        rollout, observation = collect(envs, model, observation)
        update_rollout(levels, rollout, rollout["level_id"])  # with the values recorded during collection
        improve(model, optimizer, rollout)
    if isinstance(levels, LevelBuffer):
        draw(levels, options.directory / "score_against_staleness.png")


if __name__ == "__main__":
    main()
