# SPDX-License-Identifier: Apache-2.0
"""PPO on many MultiRoom environments, whose levels are chosen and scored by a source of levels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from minigrid.core.constants import OBJECT_TO_IDX
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_replay.levels import LevelSelector, update_rollout
from tests.benchmarks.learning.learners.vector_multi_room import (
    AGENT,
    DOOR,
    GOAL,
    MAX_STEPS,
    NUM_ACTIONS,
    OPEN,
    SIDE,
    Grids,
    VectorMultiRoom,
)

VIEW = 7  # cells that are seen in each direction
WALL, OPEN_DOOR = OBJECT_TO_IDX["wall"], 255  # a shut door keeps MiniGrid's number
KINDS = (WALL, DOOR, OPEN_DOOR, GOAL)


@dataclass(frozen=True)
class Settings:
    """Of PPO; those of the paper (Jiang et al. 2021, appendix A) but for the sizes, which a run is given.

    Args:
        envs: N.
        rollout_steps: T, of each environment between two updates.
        minibatches: a rollout is cut into.
        epochs: how often each step of a rollout is learned from.
    """

    envs: int
    rollout_steps: int
    minibatches: int = 8
    epochs: int = 4
    learning_rate: float = 7e-4
    discount: float = 0.999
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_gradient_norm: float = 0.5

    @property
    def steps(self) -> int:
        """Environment steps between two updates."""
        return self.envs * self.rollout_steps


class ActorCritic(nn.Module):
    """Layers of 128 and 64 units over the cells around the agent, for logits of the actions and a value.

    The full observation comes in; what the first layer gets is the 15 x 15 cells with the agent in their middle, a
    plane for each kind of thing, and the agent's direction. A tenth of the paper's convolutions in work, and what is
    learned in one place holds in all; cells more than 7 away are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", window())
        inputs = len(KINDS) * self.window.shape[1] + 4
        self.features = nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.policy, self.critic = nn.Linear(64, NUM_ACTIONS), nn.Linear(64, 1)
        gains = {self.features[0]: 2.0**0.5, self.features[2]: 2.0**0.5, self.policy: 0.01, self.critic: 1.0}
        for layer, gain in gains.items():
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Full observations, uint8 ``[B, 14, 14, 3]``, to logits ``[B, 4]`` and values ``[B]``."""
        features = self.features(self._surroundings(image))
        return self.policy(features), self.critic(features).squeeze(1)

    def _surroundings(self, image: Tensor) -> Tensor:
        """What is around the agent and where it looks, float32 ``[B, 904]``."""
        thing, state = image[..., 0].flatten(1), image[..., 2].flatten(1)
        agent = (thing == AGENT).to(torch.uint8).argmax(1, keepdim=True)
        direction = state.gather(1, agent)
        kind = torch.where((thing == DOOR) & (state == OPEN), OPEN_DOOR, thing)
        kind = nn.functional.pad(kind, (0, 1))  # what lies outside the grid
        around = kind.gather(1, self.window[agent.squeeze(1)])
        planes = [around == kind_of for kind_of in KINDS]
        facing = direction == torch.arange(4, device=image.device)
        return torch.cat([*planes, facing], dim=1).float()


def window() -> Tensor:
    """Cells around each cell, int64 ``[196, 225]``, as places in the flattened grid; 196 is outside of it."""
    offset = torch.arange(-VIEW, VIEW + 1)
    x, y = (torch.arange(SIDE).reshape(shape) for shape in ((-1, 1, 1, 1), (1, -1, 1, 1)))
    x, y = x + offset.reshape(-1, 1), y + offset
    is_inside = (x >= 0) & (x < SIDE) & (y >= 0) & (y < SIDE)
    return torch.where(is_inside, x * SIDE + y, SIDE * SIDE).reshape(SIDE * SIDE, -1)


class Collector:
    """Plays levels that a source chooses.

    80 steps end an episode for good: the reward counts them, so the limit is of the task, as in the paper's code.

    Args:
        env: whose rows are the actors.
        num_envs: of them.
        levels: chooses; its level ids are rows of the environment's grids.
        seed: of the actions.
        device: of the environment.
    """

    def __init__(
        self, env: VectorMultiRoom, num_envs: int, levels: LevelSelector, seed: int, device: torch.device
    ) -> None:
        self._env, self._levels, self._device = env, levels, device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._level_id = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._next_levels(torch.arange(num_envs, device=device))
        self._image = env.observation()
        self.returns: list[float] = []

    @torch.no_grad()
    def rollout(self, network: ActorCritic, steps: int) -> TensorDict:
        """The next steps of all environments, TensorDict ``[N, T]``, with the values the network gives now."""
        rows: list[dict[str, Tensor]] = []
        for _ in range(steps):
            logits, value = network(self._image)
            log_probabilities = logits.log_softmax(1)
            action = torch.multinomial(log_probabilities.exp(), 1, generator=self._generator)
            row = {"image": self._image, "level_id": self._level_id.clone(), "state_value": value, "logits": logits}
            row |= {"action": action.squeeze(1), "log_probability": log_probabilities.gather(1, action).squeeze(1)}
            reward, terminated, truncated = self._env.step(action.squeeze(1))
            done = terminated | truncated
            rows.append(row | {"reward": reward, "done": done})
            ended = done.nonzero().squeeze(1)
            if len(ended):
                self.returns += reward[ended].tolist()
                self._next_levels(ended)
            self._image = self._env.observation()
        columns = {key: torch.stack([row[key] for row in rows], dim=1) for key in rows[0]}
        value, done = columns["state_value"], columns.pop("done")
        after = {
            "reward": columns.pop("reward"),
            # at an end it is of the next level's start, and counts for nothing
            "state_value": torch.cat([value[:, 1:], network(self._image)[1].unsqueeze(1)], dim=1),
            "terminated": done,
            "truncated": torch.zeros_like(done),
            "done": done,
        }
        return TensorDict({**columns, "next": TensorDict(after, batch_size=done.shape)}, batch_size=done.shape)

    def _next_levels(self, ended: Tensor) -> None:
        chosen = torch.tensor([self._levels.next_level(actor) for actor in ended.tolist()], device=self._device)
        self._level_id[ended] = chosen
        self._env.reset(ended, chosen)


def score(levels: LevelSelector, rollout: TensorDict) -> None:
    """Gives the levels of a rollout their scores."""
    seen = rollout.select("state_value", "logits", "next").cpu()
    update_rollout(levels, seen, rollout["level_id"].cpu())


def advantages(rollout: TensorDict, settings: Settings) -> Tensor:
    """Generalised advantages, ``[N, T]``."""
    following = rollout["next"]
    going_on = (~following["terminated"]).float()
    td_error = following["reward"] + settings.discount * going_on * following["state_value"] - rollout["state_value"]
    decay = settings.discount * settings.gae_lambda * going_on
    advantage, ahead = torch.empty_like(td_error), torch.zeros_like(td_error[:, 0])
    for step in reversed(range(td_error.shape[1])):
        ahead = td_error[:, step] + decay[:, step] * ahead
        advantage[:, step] = ahead
    return advantage


class PPO:
    """Clipped policy gradients (Schulman et al. 2017, https://arxiv.org/abs/1707.06347)."""

    def __init__(self, settings: Settings, seed: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        self.network = ActorCritic().to(device)
        self.settings = settings
        self._optimizer = torch.optim.Adam(self.network.parameters(), lr=settings.learning_rate, eps=1e-5, fused=True)
        self._generator = torch.Generator(device).manual_seed(seed)

    def learn(self, rollout: TensorDict) -> None:
        """All updates of one rollout."""
        advantage = advantages(rollout, self.settings)
        rollout.set("return", advantage + rollout["state_value"])
        rollout.set("advantage", (advantage - advantage.mean()) / (advantage.std() + 1e-5))
        columns = {key: column.flatten(0, 1) for key, column in rollout.items() if key != "next"}
        for index in self._minibatches(len(columns["action"])):
            self._update({key: column[index] for key, column in columns.items()})

    def _minibatches(self, rows: int) -> Iterator[Tensor]:
        for _ in range(self.settings.epochs):
            order = torch.randperm(rows, generator=self._generator, device=self._generator.device)
            yield from order.chunk(self.settings.minibatches)

    def _update(self, batch: dict[str, Tensor]) -> None:
        settings = self.settings
        logits, value = self.network(batch["image"])
        log_probabilities = logits.log_softmax(1)
        log_probability = log_probabilities.gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        ratio = (log_probability - batch["log_probability"]).exp()
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gain = torch.minimum(ratio * batch["advantage"], clipped * batch["advantage"]).mean()
        near = batch["state_value"] + (value - batch["state_value"]).clamp(-settings.clip, settings.clip)
        errors = (value - batch["return"]).square(), (near - batch["return"]).square()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(1).mean()
        loss = settings.value_weight * 0.5 * torch.maximum(*errors).mean() - gain - settings.entropy_weight * entropy
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), settings.max_gradient_norm)
        self._optimizer.step()


@torch.no_grad()
def test_returns(network: ActorCritic, grids: Grids, seed: int) -> Tensor:
    """Returns of one episode on each level ``[L]``, actions drawn from the policy, as in the paper."""
    device = grids.image.device
    generator = torch.Generator(device).manual_seed(seed)
    playing = torch.arange(len(grids.rooms), device=device)
    env = VectorMultiRoom(grids, len(playing))
    env.reset(playing, playing)
    returns = torch.zeros(len(playing), device=device)
    for _ in range(MAX_STEPS):
        action = torch.zeros_like(env.direction)
        logits, _ = network(env.observation()[playing])
        action[playing] = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
        reward, terminated, truncated = env.step(action)
        returns[playing] += reward[playing]
        playing = playing[~(terminated | truncated)[playing]]
        if not len(playing):
            break
    return returns
