# SPDX-License-Identifier: Apache-2.0
"""Steps of one episode: checked before anything is learned from them, and read as lists of rewards and values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.validation import checked_share

__all__ = ["Segment", "ValueColumns", "generalized_advantages", "key_names", "numbers", "td_errors"]


class ValueColumns(NamedTuple):
    """Rewards and values of each step as lists, whose loops take a twentieth of torch's time on so few numbers.

    Attributes:
        reward: of the step.
        state_value: V of the observation acted on.
        next_state_value: V of the observation that followed; after an episode's last step, of its final observation.
        terminated: whether the step ended the episode by termination.
        done: whether the step ended the episode, by termination or truncation.
    """

    reward: list[float]
    state_value: list[float]
    next_state_value: list[float]
    terminated: list[bool]
    done: list[bool]

    @classmethod
    def of(cls, *tensors: Tensor) -> Self:
        """Converts tensors ``[T]`` or ``[T, 1]`` in the order of the attributes; without ``done`` it is ``terminated``.

        Raises:
            ValueError: no step, or tensors of different lengths.
        """
        columns: list[list[Any]] = [numbers(tensor) for tensor in tensors]
        lengths = [len(column) for column in columns]
        if len(set(lengths)) > 1:
            steps = ", ".join(f"{name} has {length}" for name, length in zip(cls._fields, lengths, strict=False))
            raise ValueError(f"of steps, {steps}; give one value per step")
        return cls._make([*columns[:4], columns[-1]])

    def td_errors(self, discount: float) -> list[float]:
        """δ_t = r_t + γ V(s_{t+1}) - V(s_t); bootstraps after a truncation, not after a termination."""
        return [
            reward + (0.0 if terminated else discount * following) - value
            for reward, value, following, terminated, _ in zip(*self, strict=True)
        ]

    def advantages(self, discount: float, gae_lambda: float) -> list[float]:
        """A_t = Σ_k (γλ)^k δ_{t+k}, summed up to the episode's last step."""
        advantages = self.td_errors(discount)
        decay, following = discount * gae_lambda, 0.0
        for t in range(len(advantages) - 1, -1, -1):
            following = advantages[t] if self.done[t] else advantages[t] + decay * following
            advantages[t] = following
        return advantages


class Segment:
    """Consecutive steps of one episode, checked.

    Args:
        steps: TensorDict ``[T]`` in TorchRL's layout.
        episode_done: whether the episode ended with the last of them.

    Attributes:
        steps: as given.
        length: T.
        reward_sum: over all steps.
        columns: rewards and values; ``None`` unless the steps have all of them, one number each.

    Raises:
        TypeError: ``steps`` is not a TensorDict.
        ValueError: no steps, no ``done`` or reward, NaN, an end before the last step, a last ``done`` that is not
            ``episode_done``; a last step that is done, but neither terminated nor truncated, where both columns exist.
    """

    def __init__(self, steps: TensorDictBase, episode_done: bool) -> None:
        if not isinstance(steps, TensorDictBase):
            raise TypeError(f"steps are a {type(steps).__name__}; give a TensorDict [T] of steps of one episode")
        if steps.ndim != 1 or steps.shape[0] == 0:
            raise ValueError(
                f"steps have shape {list(steps.shape)}; give a TensorDict [T] of at least one step of one episode"
            )
        self.steps = steps
        self.length = steps.shape[0]
        following = steps.get("next", None)
        done = None if following is None else _flat(following, "done")
        reward = None if following is None else _flat(following, "reward")
        if done is None or reward is None:
            raise ValueError(
                f"steps have the keys {key_names(steps)}; ('next', 'done') and ('next', 'reward') are needed, in "
                "TorchRL's layout"
            )
        terminated, truncated = _flat(following, "terminated"), _flat(following, "truncated")
        for name, column in (("done", done), ("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            if column is not None and len(column) != self.length:
                shape = list(following[name].shape)
                raise ValueError(f"of {self.length} steps {name} has shape {shape}; give [T] or [T, 1]")
        _check_ends(done, {"terminated": terminated, "truncated": truncated}, episode_done)
        value, next_value = _flat(steps, "state_value"), _flat(following, "state_value")
        self.reward_sum = _finite_sum("reward", reward)
        for name, column in (("state_value", value), ("next state_value", next_value)):
            if column is not None:
                _finite_sum(name, column)
        logits = steps.get("logits", None)
        if logits is not None and not logits.max() < math.inf:  # NaN is the largest; -inf is an action without a chance
            raise ValueError("logits of the segment are NaN or infinite; the level's score would be so too")
        columns: list[Any] = [reward, value, next_value, terminated, done]
        are_whole = all(column is not None and len(column) == self.length for column in columns)
        self.columns = ValueColumns(*columns) if are_whole else None


def _flat(steps: TensorDictBase, key: str) -> list[Any] | None:
    """Returns all numbers of a leaf of any shape."""
    leaf: Tensor | None = steps.get(key, None)
    if leaf is None:
        return None
    return (leaf if leaf.ndim == 1 else leaf.reshape(-1)).tolist()


def _check_ends(done: list[bool], flags: dict[str, list[bool] | None], episode_done: bool) -> None:
    for name, column in flags.items():
        if column is not None and any(flag and not end for flag, end in zip(column, done, strict=True)):
            raise ValueError(f"a step is {name} and not done; done is terminated or truncated")
    if bool(done[-1]) != bool(episode_done):
        raise ValueError(f"episode_done is {episode_done}, but the last step's done is {bool(done[-1])}")
    if done[-1] and not any(column is None or column[-1] for column in flags.values()):
        raise ValueError(
            "the last step is done and neither terminated nor truncated; say which, for only after a truncation does "
            "the value of what follows count"
        )
    if any(done[:-1]):
        raise ValueError(
            f"an episode ends at step {done.index(True)} of {len(done)}; the steps after it belong to another episode. "
            "Cut there, or give whole rollouts to update_rollout"
        )


def _finite_sum(name: str, column: list[float]) -> float:
    total = float(sum(column))  # one number that is not finite makes the sum so
    if not math.isfinite(total):
        raise ValueError(f"{name} of the segment is NaN or infinite; the level's score would be so too")
    return total


def td_errors(
    reward: Tensor, state_value: Tensor, next_state_value: Tensor, terminated: Tensor, *, discount: float
) -> Tensor:
    """δ_t = r_t + γ V(s_{t+1}) - V(s_t), float64 ``[T]``; bootstraps after a truncation, not after a termination.

    Args:
        reward: of each step, ``[T]`` or ``[T, 1]``, as all others.
        state_value: V of the observation acted on.
        next_state_value: V of the observation that followed; after an episode's last step, of its final observation.
        terminated: whether the step ended the episode by termination.
        discount: γ.

    Raises:
        ValueError: no step, or tensors of different lengths.
    """
    checked_share("discount", discount)
    columns = ValueColumns.of(reward, state_value, next_state_value, terminated)
    return torch.tensor(columns.td_errors(discount), dtype=torch.float64)


def generalized_advantages(
    reward: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    discount: float,
    gae_lambda: float,
) -> Tensor:
    """A_t = Σ_k (γλ)^k δ_{t+k} up to the episode's last step, float64 ``[T]`` (Schulman et al. 2016).

    Arguments as :func:`td_errors`; ``done`` marks an episode's last step, ``gae_lambda`` is λ.
    """
    checked_share("discount", discount)
    checked_share("gae_lambda", gae_lambda)
    columns = ValueColumns.of(reward, state_value, next_state_value, terminated, done)
    return torch.tensor(columns.advantages(discount, gae_lambda), dtype=torch.float64)


def numbers(column: Tensor) -> list[float]:
    """Converts a column ``[T]`` or ``[T, 1]``.

    Raises:
        ValueError: another shape, or no step.
    """
    if column.ndim > 1 and column.shape[1:].numel() != 1:
        raise ValueError(f"a column of a segment has shape {list(column.shape)}; give [T] or [T, 1] of one episode")
    values: list[float] = (column if column.ndim == 1 else column.reshape(-1)).tolist()
    if not values:
        raise ValueError("a segment has no step; give at least one")
    return values


def key_names(data: TensorDictBase) -> str:
    """Lists the keys of all leaves for an error, such as ``logits, ('next', 'done')``."""
    keys = sorted(data.keys(True, True), key=lambda key: (isinstance(key, tuple), str(key)))
    return ", ".join(map(str, keys))
