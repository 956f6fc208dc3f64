# SPDX-License-Identifier: Apache-2.0
"""PPO of several seeds at once on MultiRoom, whose levels are chosen and scored by a level selector of each seed.

Seeds share nothing but the time they take: each has its own weights, random numbers, environments and levels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from lightning_replay.levels import LevelSelector, update_rollout
from tests.benchmarks.learning.learners.stacked_networks import backward, clip_gradients, forward
from tests.benchmarks.learning.learners.vector_multi_room import (
    MAX_STEPS,
    NUM_ACTIONS,
    NUM_FEATURES,
    MultiRoomLevels,
    VectorMultiRoom,
)

Batch = dict[str, Tensor]


class StackedPPO:
    """Clipped policy gradients (Schulman et al. 2017, https://arxiv.org/abs/1707.06347) of R runs.

    Policy and critic of a run are one network with two hidden layers, ReLU between, a logit of each action and a value.

    Args:
        seeds: of weights and minibatches, one for each run.
        hidden_size: of both layers.
        epochs: how often each step of a rollout is learned from.
        minibatch: steps of a run in an update.
        learning_rate: Adam's.
        discount: γ.
        gae_lambda: λ.
        clip: of the ratio of probabilities, and of how far a value moves.
        value_weight: of half the squared error of the value.
        entropy_weight: of the entropy of the policy.
        max_gradient_norm: of each run.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        *,
        hidden_size: int = 64,
        epochs: int = 4,
        minibatch: int = 1_024,
        learning_rate: float = 7e-4,
        discount: float = 0.999,
        gae_lambda: float = 0.95,
        clip: float = 0.2,
        value_weight: float = 0.5,
        entropy_weight: float = 0.01,
        max_gradient_norm: float = 0.5,
    ) -> None:
        self.parameters = nn.ParameterList(first_weights(seeds, hidden_size))
        self._parameters = list(self.parameters)  # faster to read than torch's ParameterList
        self._optimizer = torch.optim.Adam(self._parameters, lr=learning_rate, eps=1e-5, fused=True)
        self._generators = [Generator().manual_seed(seed + 2_000_000) for seed in seeds]
        self._epochs, self._minibatch = epochs, minibatch
        self._discount, self._gae_lambda, self._clip = discount, gae_lambda, clip
        self._value_weight, self._entropy_weight = value_weight, entropy_weight
        self._max_gradient_norm = max_gradient_norm

    @torch.no_grad()
    def predict(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities ``[R, N, 7]`` and values ``[R, N]`` for features ``[R, N, 344]``."""
        output = forward(self._parameters, features)[-1]
        return output[..., :NUM_ACTIONS].log_softmax(-1), output[..., NUM_ACTIONS]

    def learn(self, rollout: Batch) -> None:
        """Makes all updates from the rollouts of all runs, each with columns ``[R, T, N]``."""
        value = rollout["state_value"]
        advantage = advantages(rollout, self._discount, self._gae_lambda)
        spread = advantage.std((1, 2), keepdim=True) + 1e-5
        columns = {key: rollout[key] for key in ("features", "action", "log_probability", "state_value")}
        columns |= {
            "return": advantage + value,
            "advantage": (advantage - advantage.mean((1, 2), keepdim=True)) / spread,
        }
        runs, steps = len(value), value[0].numel()
        rows = {key: column.view(runs * steps, *column.shape[3:]) for key, column in columns.items()}
        for index in self._minibatches(runs, steps):
            drawn = {key: column.index_select(0, index) for key, column in rows.items()}
            self._update({key: column.view(runs, -1, *column.shape[1:]) for key, column in drawn.items()})

    def state_dict(self) -> dict[str, Any]:
        """Returns weights, optimiser and random generators."""
        return {
            "parameters": self.parameters.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generators": [generator.get_state() for generator in self._generators],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self.parameters.load_state_dict(state["parameters"])
        self._optimizer.load_state_dict(state["optimizer"])
        for generator, kept in zip(self._generators, state["generators"], strict=True):
            generator.set_state(kept)

    def _minibatches(self, runs: int, steps: int) -> Iterator[Tensor]:
        """Yields rows ``[R * B]`` of all runs one after another; the minibatches of a run have each step once."""
        first = torch.arange(runs).unsqueeze(1) * steps
        for _ in range(self._epochs):
            order = torch.stack([torch.randperm(steps, generator=generator) for generator in self._generators])
            for index in (order + first).split(self._minibatch, dim=1):
                yield index.flatten()

    @torch.no_grad()
    def _update(self, batch: Batch) -> None:
        outputs = forward(self._parameters, batch["features"])
        output = outputs[-1].requires_grad_()
        with torch.enable_grad():
            self._loss(output, batch).backward()
        assert output.grad is not None
        backward(self._parameters, outputs, output.grad)
        clip_gradients(self._parameters, self._max_gradient_norm)
        self._optimizer.step()

    def _loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Returns the loss of outputs ``[R, B, 8]``, summed over runs, so that each run has its own gradient."""
        log_probabilities, value = output[..., :NUM_ACTIONS].log_softmax(-1), output[..., NUM_ACTIONS]
        log_probability = log_probabilities.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        ratio = (log_probability - batch["log_probability"]).exp()
        clipped = ratio.clamp(1 - self._clip, 1 + self._clip)
        gain = torch.minimum(ratio * batch["advantage"], clipped * batch["advantage"])
        near = batch["state_value"] + (value - batch["state_value"]).clamp(-self._clip, self._clip)
        error = torch.maximum((value - batch["return"]).square(), (near - batch["return"]).square())
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        loss = self._value_weight * 0.5 * error - gain - self._entropy_weight * entropy
        return loss.mean(1).sum()


def first_weights(seeds: Sequence[int], hidden_size: int) -> list[Tensor]:
    """Returns orthogonal weights ``[R, inputs, outputs]`` and zero biases of the layers; logits are nearly equal."""

    def weights(generator: Generator, inputs: int, outputs: int, gain: float = 2.0**0.5) -> Tensor:
        return nn.init.orthogonal_(torch.empty(inputs, outputs), gain, generator)

    drawn: list[list[Tensor]] = []
    for generator in (Generator().manual_seed(seed) for seed in seeds):
        layers = [weights(generator, inputs, hidden_size) for inputs in (NUM_FEATURES, hidden_size)]
        heads = weights(generator, hidden_size, NUM_ACTIONS, 0.01), weights(generator, hidden_size, 1, 1.0)
        layers.append(torch.cat(heads, dim=1))
        drawn.append([each for weight in layers for each in (weight, torch.zeros(1, weight.shape[1]))])
    return [torch.stack(parameters) for parameters in zip(*drawn, strict=True)]


def advantages(rollout: Batch, discount: float, gae_lambda: float) -> Tensor:
    """Returns generalised advantages ``[R, T, N]``."""
    going_on = (~rollout["terminated"]).float()
    td_error = rollout["reward"] + discount * going_on * rollout["next_state_value"] - rollout["state_value"]
    decay = discount * gae_lambda * going_on
    advantage, ahead = torch.empty_like(td_error), torch.zeros_like(td_error[:, 0])
    for step in reversed(range(td_error.shape[1])):
        ahead = td_error[:, step] + decay[:, step] * ahead
        advantage[:, step] = ahead
    return advantage


def drawn_actions(log_probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Returns actions ``[R, N]`` for log-probabilities ``[R, N, 7]`` and uniform draws in [0, 1) ``[R, N]``."""
    passed = log_probabilities.exp().cumsum(-1) <= uniform.unsqueeze(-1)
    return passed.sum(-1).clamp_(max=NUM_ACTIONS - 1)


class Collector:
    """Plays levels chosen by level selectors, with N environments for each of R runs.

    The limit of 120 steps terminates an episode: the reward depends on the time, which the agent observes.

    Args:
        training: levels by id.
        levels: a selector for each run.
        seeds: of the actions, one for each run.
        envs: N.
    """

    def __init__(
        self, training: MultiRoomLevels, levels: Sequence[LevelSelector], seeds: Sequence[int], envs: int
    ) -> None:
        self.levels = list(levels)
        self._envs, self._env = envs, VectorMultiRoom(training, envs * len(levels))
        self._generators = [Generator().manual_seed(seed + 1_000_000) for seed in seeds]
        self._level_id = torch.zeros(envs * len(levels), dtype=torch.int64)
        self._begun: list[Counter[int]] = [Counter() for _ in levels]
        self._next_levels(torch.arange(len(self._level_id)))

    @torch.no_grad()
    def rollout(self, ppo: StackedPPO, steps: int) -> Batch:
        """Plays T steps in all environments; returns columns ``[R, T, N]`` with the present values of the networks."""
        shape = (len(self.levels), steps, self._envs)
        self._begun = [Counter() for _ in self.levels]
        uniform = torch.stack([torch.rand(steps, self._envs, generator=each) for each in self._generators])
        rollout = {"features": torch.empty(*shape, NUM_FEATURES)}
        rollout |= {key: torch.empty(shape) for key in ("log_probability", "state_value", "reward")}
        rollout |= {key: torch.empty(shape, dtype=torch.int64) for key in ("action", "level_id")}
        rollout["terminated"] = torch.empty(shape, dtype=torch.bool)
        for step in range(steps):
            features = self._env.observe().view(shape[0], self._envs, -1)
            log_probabilities, value = ppo.predict(features)
            action = drawn_actions(log_probabilities, uniform[:, step])
            row = {"features": features, "action": action, "state_value": value}
            row["log_probability"] = log_probabilities.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            row["level_id"] = self._level_id.view(action.shape)
            reward, terminated, truncated = self._env.step(action.flatten())
            done = terminated | truncated
            row |= {"reward": reward.view(action.shape), "terminated": done.view(action.shape)}
            for key, column in row.items():
                rollout[key][:, step] = column
            self._next_levels(done.nonzero().squeeze(1))
        value = ppo.predict(self._env.observe().view(shape[0], self._envs, -1))[1].unsqueeze(1)
        # at the end of an episode it is of the next level's start and has no effect
        rollout["next_state_value"] = torch.cat([rollout["state_value"][:, 1:], value], dim=1)
        return rollout

    def score(self, rollout: Batch) -> None:
        """Scores the levels of a rollout."""
        done = rollout["terminated"].transpose(1, 2)
        after = {"reward": rollout["reward"], "state_value": rollout["next_state_value"]}
        following = {key: column.transpose(1, 2) for key, column in after.items()}
        following |= {"terminated": done, "truncated": torch.zeros_like(done), "done": done}
        for run, levels in enumerate(self.levels):
            columns = {"state_value": rollout["state_value"][run].T}
            columns["next"] = TensorDict({key: column[run] for key, column in following.items()}, done[run].shape)
            update_rollout(levels, TensorDict(columns, done[run].shape), rollout["level_id"][run].T)

    def largest_shares(self) -> list[float]:
        """Returns the largest share of one level in the episodes begun in the last rollout, for each run."""
        return [max(begun.values(), default=0) / max(1, begun.total()) for begun in self._begun]

    def save(self, folder: Path) -> None:
        """Writes levels, environments and random generators."""
        for run, levels in enumerate(self.levels):
            levels.save(folder / f"levels_{run}")
        kept = {"env": self._env.state_dict(), "level_id": self._level_id}
        kept["generators"] = [generator.get_state() for generator in self._generators]
        torch.save(kept, folder / "collector.pt")

    def load(self, folder: Path) -> None:
        """Reads what :meth:`save` wrote."""
        for run, levels in enumerate(self.levels):
            levels.load(folder / f"levels_{run}")
        kept = torch.load(folder / "collector.pt")
        self._env.load_state_dict(kept["env"])
        self._level_id = kept["level_id"]
        for generator, state in zip(self._generators, kept["generators"], strict=True):
            generator.set_state(state)

    def _next_levels(self, ended: Tensor) -> None:
        if not len(ended):
            return
        chosen = []
        for row in ended.tolist():
            run, actor = divmod(row, self._envs)
            chosen.append(self.levels[run].next_level(actor))
            self._begun[run][chosen[-1]] += 1
        self._level_id[ended] = torch.tensor(chosen)
        self._env.reset(ended, self._level_id[ended])


@torch.no_grad()
def held_out_returns(ppo: StackedPPO, levels: MultiRoomLevels, seeds: Sequence[int]) -> Tensor:
    """Plays an episode of each run on each level, actions drawn from the policy; returns ``[R, L]`` returns."""
    runs, count = len(seeds), len(levels)
    generators = [Generator().manual_seed(seed) for seed in seeds]
    env = VectorMultiRoom(levels, runs * count)
    env.reset(torch.arange(runs * count), torch.arange(count).repeat(runs))
    returns, is_playing = torch.zeros(runs, count), torch.ones(runs, count, dtype=torch.bool)
    for _ in range(MAX_STEPS):
        log_probabilities, _ = ppo.predict(env.observe().view(runs, count, -1))
        uniform = torch.stack([torch.rand(count, generator=generator) for generator in generators])
        ended = env.step(drawn_actions(log_probabilities, uniform).flatten())
        reward, terminated, truncated = (column.view(runs, count) for column in ended)
        returns += reward * is_playing
        is_playing &= ~(terminated | truncated)
    return returns
