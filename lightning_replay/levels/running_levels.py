# SPDX-License-Identifier: Apache-2.0
"""Levels in play: who plays which, since when, and the score so far of episodes that span several rollouts."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["Actor", "RunningLevel", "RunningLevels", "Segment"]

Actor = int | str


@dataclass
class RunningLevel:
    """An episode that an actor began and that has no score yet.

    Attributes:
        level_id: what is played.
        started: number of the episode, among all of all actors.
        replayed: whether the level had a score when the episode began.
        trains: whether the learner learns from it, or it is scored only.
        mean: of the steps seen so far, what the score is made of.
        steps: how many these are.
        episode_return: sum of all rewards so far.
    """

    level_id: int
    started: int
    replayed: bool
    trains: bool
    mean: float = 0.0
    steps: int = 0
    episode_return: float = 0.0

    def merge(self, mean: float, steps: int) -> None:
        """Adds the mean over ``steps`` more steps (paper, appendix C)."""
        self.mean = (mean * steps + self.mean * self.steps) / (steps + self.steps)
        self.steps += steps


class RunningLevels:
    """The episodes in flight of every actor, oldest first; an actor may have several, also on one level."""

    def __init__(self) -> None:
        self._of: dict[Actor, list[RunningLevel]] = {}
        self._times: dict[int, int] = {}

    def __len__(self) -> int:
        """Episodes in flight."""
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Any:
        """All of them, actor after actor."""
        return (episode for episodes in self._of.values() for episode in episodes)

    def plays(self, level_id: int) -> bool:
        """Whether anybody plays a level."""
        return level_id in self._times

    def of(self, actor: Actor) -> list[RunningLevel]:
        """Those of an actor, oldest first."""
        return self._of.get(actor, [])

    def begin(self, actor: Actor, episode: RunningLevel) -> None:
        """An actor begins an episode."""
        self._of.setdefault(actor, []).append(episode)
        self._times[episode.level_id] = self._times.get(episode.level_id, 0) + 1

    def oldest(self, actor: Actor, level_id: int) -> RunningLevel:
        """The episode that an actor has played longest on a level.

        Raises:
            ValueError: there is none.
        """
        episodes = self._of.get(actor)
        for episode in episodes or ():
            if episode.level_id == level_id:
                return episode
        if episodes is None:
            raise ValueError(
                f"actor {actor!r} plays no level; those that do are {_some(self._of)}. Call next_level(actor) when an "
                "episode starts"
            )
        raise ValueError(
            f"actor {actor!r} does not play level {level_id}; it plays {[one.level_id for one in episodes]}. Name the "
            "level under which the steps were made, and give each episode's end once"
        )

    def end(self, actor: Actor, episode: RunningLevel) -> None:
        """An episode is scored or abandoned."""
        episodes = self._of[actor]
        del episodes[next(place for place, one in enumerate(episodes) if one is episode)]
        if not episodes:
            del self._of[actor]
        self._times[episode.level_id] -= 1
        if not self._times[episode.level_id]:
            del self._times[episode.level_id]

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "actors": list(self._of),
            "episodes": [[list(astuple(episode)) for episode in episodes] for episodes in self._of.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self._of, self._times = {}, {}
        for actor, episodes in zip(state["actors"], state["episodes"], strict=True):
            for episode in episodes:
                self.begin(actor, RunningLevel(*episode))


class Segment:
    """Consecutive steps of one episode, checked.

    Args:
        steps: TensorDict ``[T]`` in TorchRL's layout.
        episode_done: whether the episode ended with the last of them.

    Attributes:
        steps: the same.
        length: T.
        reward_sum: of all steps.

    Raises:
        ValueError: no steps, no ``done`` or reward, NaN, an end before the last step, or another end than said.
    """

    def __init__(self, steps: TensorDictBase, episode_done: bool) -> None:
        if steps.ndim != 1 or steps.shape[0] == 0:
            raise ValueError(
                f"steps have shape {list(steps.shape)}; give a TensorDict [T] of at least one step of one episode"
            )
        following = steps.get("next", None)
        done = None if following is None else following.get("done", None)
        reward = None if following is None else following.get("reward", None)
        if done is None or reward is None:
            raise ValueError(
                f"steps have the keys {sorted(map(str, steps.keys(True)))}; ('next', 'done') and ('next', 'reward') "
                "are needed, in TorchRL's layout"
            )
        length = steps.shape[0]
        if done.numel() != length or reward.numel() != length:
            raise ValueError(
                f"of {length} steps done has shape {list(done.shape)}, reward {list(reward.shape)}; give [T] or [T, 1]"
            )
        ends = done.reshape(-1).tolist()
        _check_ends(ends, following)
        if bool(ends[-1]) != bool(episode_done):
            raise ValueError(f"episode_done is {episode_done}, but the last step's done is {bool(ends[-1])}")
        if any(ends[:-1]):
            raise ValueError(
                f"an episode ends at step {ends.index(True)} of {len(ends)}; the steps after it belong to another "
                "episode. Cut there, or give whole rollouts to update_rollout"
            )
        columns = {
            "state_value": steps.get("state_value", None),
            "next state_value": following.get("state_value", None),
        }
        _check_finite({"reward": reward} | columns)
        logits = steps.get("logits", None)
        if logits is not None and not logits.max() < math.inf:  # NaN is the largest; -inf is an action without a chance
            raise ValueError("logits of the segment are NaN or infinite; the level's score would be so too")
        self.steps = steps
        self.length = len(ends)
        self.reward_sum = float(reward.sum(dtype=torch.float64))


def _check_ends(ends: list[bool], following: TensorDictBase) -> None:
    flags = {name: following.get(name, None) for name in ("terminated", "truncated")}
    for name, column in flags.items():
        if column is not None and any(
            flag and not end for flag, end in zip(column.reshape(-1).tolist(), ends, strict=True)
        ):
            raise ValueError(f"a step is {name} and not done; done is terminated or truncated")


def _check_finite(columns: dict[str, Tensor | None]) -> None:
    for name, column in columns.items():
        # one number that is not finite makes the sum so; float64 holds the sum of any float32
        if column is not None and not math.isfinite(column.detach().sum(dtype=torch.float64)):
            raise ValueError(f"{name} of the segment is NaN or infinite; the level's score would be so too")


def _some(actors: Any) -> str:
    named = list(actors)
    return f"{named[:8]}{' and more' if len(named) > 8 else ''}" if named else "none"
