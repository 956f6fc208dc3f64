# SPDX-License-Identifier: Apache-2.0
"""Combination locks: levels of 1 to 8 stages that share their stages, and an actor-critic with tables to open them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

LEVELS, DIFFICULTIES, VARIANTS, NUM_ACTIONS = 400, 8, 5, 4
DISCOUNT, GAE_LAMBDA = 0.999, 0.95
ACTOR_STEP_SIZE = 2.0  # of the logits, per episode of a batch
CRITIC_STEP_SIZE = 0.3  # share of the way to the mean return of a batch
ENTROPY_WEIGHT = 0.01


@dataclass
class Episodes:
    """One finished episode per row, ``[B, T]`` with T the most stages a lock has; what is past an end is 0.

    Args:
        stage: the stage the player stood at, int64.
        remaining: stages to go at that step, this one included, int64.
        action: int64.
        reward: 1 where the last stage opened.
        state_value: of the critic, before it learned from these episodes.
        length: steps of each episode, int64 ``[B]``.
    """

    stage: np.ndarray
    remaining: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    state_value: np.ndarray
    length: np.ndarray

    @property
    def played(self) -> np.ndarray:
        """Whether each entry is a step that was played, bool ``[B, T]``."""
        return np.arange(self.stage.shape[1]) < self.length[:, None]

    def segments(self) -> list[TensorDict]:
        """Returns each episode as a segment for a level buffer, TensorDict ``[T]`` with T its own length."""
        rewards, values = torch.from_numpy(self.reward), torch.from_numpy(self.state_value)
        segments = []
        for row, steps in enumerate(self.length.tolist()):
            value, ended = values[row, :steps], torch.zeros(steps, dtype=torch.bool)
            ended[-1] = True
            following = {
                "reward": rewards[row, :steps],
                "state_value": torch.cat([value[1:], value.new_zeros(1)]),
                "terminated": ended,
                "truncated": torch.zeros_like(ended),
                "done": ended,
            }
            columns = {"state_value": value, "next": TensorDict(following, batch_size=[steps])}
            segments.append(TensorDict(columns, batch_size=[steps]))
        return segments


class CombinationLocks:
    """400 locks of 1 to 8 stages; a wrong action ends the episode, and the last right one is worth 1.

    A lock's n-th stage is one of 5 that the n-th stages of all locks are drawn from, and a stage opens to the same
    action in every lock. So short locks teach the first stages of long ones, which chance almost never opens: it opens
    a lock of d stages once in 4 ** d episodes.

    Args:
        seed: of the stages of each lock and of the action each stage opens to.
    """

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.difficulty = 1 + np.arange(LEVELS) % DIFFICULTIES  # [L]
        variant = generator.integers(0, VARIANTS, (LEVELS, DIFFICULTIES))
        self.stage = variant + np.arange(DIFFICULTIES) * VARIANTS  # [L, T]
        self.opens = generator.integers(0, NUM_ACTIONS, DIFFICULTIES * VARIANTS)  # [stages]

    def remaining(self, level: np.ndarray) -> np.ndarray:
        """Stages to go at each step in levels ``[B]``, that step's included, int64 ``[B, T]``; 0 past the last."""
        return np.maximum(self.difficulty[level][:, None] - np.arange(DIFFICULTIES), 0)

    def play(self, level: np.ndarray, player: TabularActorCritic, generator: np.random.Generator) -> Episodes:
        """Plays levels ``[B]``, each once, with actions drawn from the player's policy."""
        stage = self.stage[level]
        draw = generator.random((len(level), DIFFICULTIES, 1))
        # At most the last action: the sum of its row may be a little below 1.
        action = np.minimum((player.probabilities()[stage].cumsum(-1) <= draw).sum(-1), NUM_ACTIONS - 1)
        return self.episodes(level, action, player.values[player.distance(self.remaining(level)), stage])

    def episodes(self, level: np.ndarray, action: np.ndarray, state_value: np.ndarray) -> Episodes:
        """Ends an episode of each level ``[B]`` at its first wrong action or its last stage.

        Args:
            level: of each episode.
            action: at each stage, ``[B, T]``; those after the end have no effect.
            state_value: of the critic at each stage, ``[B, T]``.
        """
        stage, difficulty = self.stage[level], self.difficulty[level]
        is_wrong = action != self.opens[stage]
        opened = np.where(is_wrong.any(1), is_wrong.argmax(1), DIFFICULTIES)
        length = np.minimum(opened + 1, difficulty)
        step = np.arange(DIFFICULTIES)
        reward = (step == difficulty[:, None] - 1) & (opened >= difficulty)[:, None]
        value = state_value * (step < length[:, None])
        return Episodes(stage, self.remaining(level), action, reward.astype(np.float64), value, length)

    def success(self, player: TabularActorCritic) -> np.ndarray:
        """Returns the probability that the player opens each lock, ``[L]``."""
        stages = np.arange(len(self.opens))
        right = player.probabilities()[stages, self.opens][self.stage]
        return np.where(np.arange(DIFFICULTIES) < self.difficulty[:, None], right, 1.0).prod(1)


class TabularActorCritic:
    """A softmax over the actions of each stage, and a value for each stage and number of stages to go.

    The critic sees how far the end is; the actor need not, as a stage opens to the same action everywhere.

    Args:
        sees_end: whether values differ by the number of stages to go. If not, it has one value for each stage, and the
            same stage of a short and of a long lock leaves errors that no learning removes.
    """

    def __init__(self, sees_end: bool = True) -> None:
        self.logits = np.zeros((DIFFICULTIES * VARIANTS, NUM_ACTIONS))
        self.values = np.zeros((DIFFICULTIES + 1, DIFFICULTIES * VARIANTS))
        self._sees_end = sees_end

    def distance(self, remaining: np.ndarray) -> np.ndarray:
        """Returns what the critic observes of the stages to go, of the same shape: all, or whether there are any."""
        return remaining if self._sees_end else np.minimum(remaining, 1)

    def probabilities(self) -> np.ndarray:
        """Returns the policy's probability of each action at each stage, ``[stages, actions]``."""
        weight = np.exp(self.logits - self.logits.max(1, keepdims=True))
        return weight / weight.sum(1, keepdims=True)

    def learn(self, episodes: Episodes) -> None:
        """Makes one step along the policy gradient, and one of the values towards the returns."""
        played, stage = episodes.played, episodes.stage
        advantage = advantages(episodes)
        probability = self.probabilities()[stage]
        logarithm = np.log(np.maximum(probability, 1e-12))
        entropy = -(probability * logarithm).sum(-1, keepdims=True)
        gradient = advantage[..., None] * (np.eye(NUM_ACTIONS)[episodes.action] - probability)
        gradient -= ENTROPY_WEIGHT * probability * (logarithm + entropy)
        step = np.zeros_like(self.logits)
        np.add.at(step, stage[played], gradient[played])
        self.logits += ACTOR_STEP_SIZE * step / len(stage)
        where = (self.distance(episodes.remaining[played]), stage[played])
        error, visits = np.zeros_like(self.values), np.zeros_like(self.values)
        np.add.at(error, where, advantage[played])  # the advantage is the return less the value
        np.add.at(visits, where, 1.0)
        self.values += CRITIC_STEP_SIZE * error / np.maximum(visits, 1.0)


def advantages(episodes: Episodes) -> np.ndarray:
    """Returns generalised advantages of the steps played, ``[B, T]``."""
    value, played = episodes.state_value, episodes.played
    following = np.concatenate([value[:, 1:], np.zeros((len(value), 1))], axis=1)  # 0 past the end
    td_error = (episodes.reward + DISCOUNT * following - value) * played
    advantage, ahead = np.zeros_like(value), np.zeros(len(value))
    for step in reversed(range(value.shape[1])):
        ahead = (td_error[:, step] + DISCOUNT * GAE_LAMBDA * ahead) * played[:, step]
        advantage[:, step] = ahead
    return advantage
