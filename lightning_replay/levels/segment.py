# SPDX-License-Identifier: Apache-2.0
"""Steps of one episode, checked before anything is learned from them."""

from __future__ import annotations

import math
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.levels.key_names import key_names
from lightning_replay.levels.value_columns import ValueColumns

__all__ = ["Segment"]


class Segment:
    """Consecutive steps of one episode, checked.

    Args:
        steps: TensorDict ``[T]`` in TorchRL's layout.
        episode_done: whether the episode ended with the last of them.

    Attributes:
        steps: the same.
        length: T.
        reward_sum: of all steps.
        columns: rewards and values, ``None`` where the steps have not all of them, one number each.

    Raises:
        TypeError: no TensorDict.
        ValueError: no steps, no ``done`` or reward, NaN, an end before the last step, or another end than said;
            a last step that is done, but neither terminated nor truncated, where both columns are there.
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
        done = None if following is None else _numbers(following, "done")
        reward = None if following is None else _numbers(following, "reward")
        if done is None or reward is None:
            raise ValueError(
                f"steps have the keys {key_names(steps)}; ('next', 'done') and ('next', 'reward') are needed, in "
                "TorchRL's layout"
            )
        terminated, truncated = _numbers(following, "terminated"), _numbers(following, "truncated")
        for name, column in (("done", done), ("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            if column is not None and len(column) != self.length:
                shape = list(following[name].shape)
                raise ValueError(f"of {self.length} steps {name} has shape {shape}; give [T] or [T, 1]")
        _check_ends(done, {"terminated": terminated, "truncated": truncated}, episode_done)
        value, next_value = _numbers(steps, "state_value"), _numbers(following, "state_value")
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


def _numbers(steps: TensorDictBase, key: str) -> list[Any] | None:
    """All numbers of a leaf, whatever its shape."""
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
