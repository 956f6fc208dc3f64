# SPDX-License-Identifier: Apache-2.0
"""Episodes that PPO scores and does not learn from: robust PLR's new levels, ACCEL's children."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_ext.levels.scoring import score_only
from rllib_ext.rllib_compat import call_one_learner


class ScoredOnly:
    """Replaces the ``update`` of a LearnerGroup: removes such episodes, and values them on one Learner.

    Args:
        learner_group: of PPO.
        server: the actor of a :class:`~rllib_ext.levels.server.LevelServer`.
    """

    def __init__(self, learner_group: Any, server: Any) -> None:
        self._learner_group, self._server = learner_group, server
        self._update = learner_group.update

    def install(self) -> None:
        """Replaces the method."""
        self._learner_group.update = self.update

    def update(self, *, episodes: Sequence[Any], **options: Any) -> list[dict[str, Any]]:
        """Updates the Learners with the other episodes; without any, nothing is learned.

        Args:
            episodes: of a train batch.
            options: RLlib's.
        """
        trains = ray.get(self._server.trains_on.remote([episode.id_ for episode in episodes]))
        others = [episode for episode, flag in zip(episodes, trains, strict=True) if not flag]
        if others:
            call_one_learner(self._learner_group, score_only, episodes=others)
        learned = [episode for episode, flag in zip(episodes, trains, strict=True) if flag]
        # Every Learner needs a step of its own, or they wait for each other for ever.
        if sum(map(len, learned)) < max(len(self._learner_group), 1):
            return [{DEFAULT_MODULE_ID: {}}]
        results: list[dict[str, Any]] = self._update(episodes=learned, **options)
        return results
