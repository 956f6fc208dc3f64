# SPDX-License-Identifier: Apache-2.0
"""Learner connectors that send the values of each fragment to the level buffer before it is learned from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.postprocessing.zero_padding import unpad_data_if_necessary

from rllib_ext.levels.evaluation import EPISODE_RETURN
from rllib_ext.levels.server import Fragment
from rllib_ext.rllib_compat import call_one_learner, learner_connector_of

# Entry in the data that connector pieces share.
_NOTES = "level_notes"


class NoteFragments(ConnectorV2):
    """Notes the fragments, with the logits of the policy that acted. RLlib's next piece adds a step to each of them."""

    def __init__(self, *, with_logits: bool) -> None:
        super().__init__()
        self._with_logits = with_logits

    def __call__(
        self, *, batch: dict[str, Any], episodes: Sequence[Any], shared_data: dict[str, Any], **rest: Any
    ) -> dict[str, Any]:
        notes = shared_data[_NOTES] = []
        for episode in episodes:
            logits = None
            if self._with_logits and Columns.ACTION_DIST_INPUTS in episode.extra_model_outputs:
                logits = np.asarray(episode.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS), np.float32)
            rewards = values = np.empty(len(episode), np.float32)  # not known yet
            ends = bool(episode.is_terminated), bool(episode.is_truncated)
            own = episode.get_infos(-1).get(EPISODE_RETURN, 0.0)
            notes.append(Fragment(episode.id_, episode.t_started, rewards, values, *ends, logits, own))
        return batch


class ScoreFragments(ConnectorV2):
    """Values all observations that the Learner learns from in one pass, as the last piece of a Learner's pipeline."""

    def __init__(self, server: Any) -> None:
        super().__init__()
        self._server = server

    def __call__(
        self, *, rl_module: Any, batch: dict[str, Any], shared_data: dict[str, Any], **rest: Any
    ) -> dict[str, Any]:
        notes: list[Fragment] = shared_data.pop(_NOTES)
        with torch.no_grad():
            values = rl_module[DEFAULT_MODULE_ID].unwrapped().compute_values(batch[DEFAULT_MODULE_ID])
        # RLlib adds a step to each fragment, which holds its last observation.
        lengths = [len(note) + 1 for note in notes]
        columns = (values, batch[DEFAULT_MODULE_ID][Columns.REWARDS])
        rows = [unpad_data_if_necessary(lengths, convert_to_numpy(column)) for column in columns]
        if any(len(column) != sum(lengths) for column in rows):
            raise ValueError(
                f"the train batch has {len(rows[0])} rows of values and {len(rows[1])} rewards, its episodes have "
                f"{sum(lengths)}: a piece of learner_connector adds or takes rows, and levels cannot be scored then"
            )
        cuts = np.cumsum(lengths)[:-1]
        pieces = zip(notes, *(np.split(np.asarray(column, np.float32), cuts) for column in rows), strict=True)
        fragments = [dataclasses.replace(note, reward=reward[:-1], state_value=value) for note, value, reward in pieces]
        ray.get(self._server.score.remote(fragments))
        return batch


def add_scoring(learner: Any, *, server: Any) -> None:
    """Adds the connectors that note fragments and send their values to the level buffer."""
    with_logits = isinstance(learner.module[DEFAULT_MODULE_ID].unwrapped().action_space, gymnasium.spaces.Discrete)
    pipeline = learner_connector_of(learner)
    pipeline.prepend(NoteFragments(with_logits=with_logits))
    pipeline.append(ScoreFragments(server))


def score_only(learner: Any, *, episodes: Sequence[Any]) -> None:
    """Sends fragments to the level buffer that the Learner does not learn from."""
    learner_connector_of(learner)(rl_module=learner.module, batch={}, episodes=list(episodes), shared_data={})


def train_without_scored(learner_group: Any, server: Any) -> None:
    """Replaces the ``update`` of a LearnerGroup, so that episodes played for their score alone give no gradients."""
    update_all = learner_group.update

    def update(*, episodes: Sequence[Any], **options: Any) -> list[dict[str, Any]]:
        """Updates on the episodes that train, and only values the others."""
        trains = ray.get(server.trains_on.remote([episode.id_ for episode in episodes]))
        others = [episode for episode, flag in zip(episodes, trains, strict=True) if not flag]
        if others:  # new levels of robust PLR, children of ACCEL: one Learner values them
            call_one_learner(learner_group, score_only, episodes=others)
        learned = [episode for episode, flag in zip(episodes, trains, strict=True) if flag]
        # Every Learner needs at least one step. Otherwise, they wait for each other endlessly.
        if sum(map(len, learned)) < max(len(learner_group), 1):
            return [{DEFAULT_MODULE_ID: {}}]
        results: list[dict[str, Any]] = update_all(episodes=learned, **options)
        return results

    learner_group.update = update
