# SPDX-License-Identifier: Apache-2.0
"""PPO does not learn from episodes that are played for their score alone: robust PLR's new levels, ACCEL's children."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import ray
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_ext.levels.scoring import score_only


class ScoredOnly:
    """Takes the place of the Learners' ``update``: takes such episodes out, and has one Learner value them.

    Args:
        learner_group: of PPO.
        server: the actor of a :class:`~rllib_ext.levels.server.LevelServer`.
    """

    def __init__(self, learner_group: Any, server: Any) -> None:
        self._learner_group, self._server = learner_group, server
        self._update = learner_group.update

    def install(self) -> None:
        """From now on such episodes give no gradients."""
        self._learner_group.update = self.update

    def update(self, *, episodes: Sequence[Any], **options: Any) -> list[dict[str, Any]]:
        """``LearnerGroup.update`` with the other episodes; without any, nothing is learned.

        Args:
            episodes: of a train batch.
            options: RLlib's.
        """
        trains = ray.get(self._server.trains_on.remote([episode.id_ for episode in episodes]))
        others = [episode for episode, flag in zip(episodes, trains, strict=True) if not flag]
        if others:
            self._score(others)
        learned = [episode for episode, flag in zip(episodes, trains, strict=True) if flag]
        # Every Learner needs a step of its own, or they wait for each other for ever.
        if sum(map(len, learned)) < max(len(self._learner_group), 1):
            return [{DEFAULT_MODULE_ID: {}}]
        results: list[dict[str, Any]] = self._update(episodes=learned, **options)
        return results

    def _score(self, episodes: Sequence[Any]) -> None:
        group = self._learner_group
        if group.is_local:
            score_only(group._learner, episodes=episodes)
            return
        first = group._worker_manager.healthy_actor_ids()[:1]
        for result in group.foreach_learner(functools.partial(score_only, episodes=episodes), remote_actor_ids=first):
            if not result.ok:
                raise result.get()
