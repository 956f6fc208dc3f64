# SPDX-License-Identifier: Apache-2.0
"""On the Learners: what each fragment of an episode is worth is told to the level buffer before it is learned from."""

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

from rllib_ext.levels.fragment import Fragment

_NOTES = "level_notes"  # in the data that connector pieces share


@dataclasses.dataclass(frozen=True)
class _Note:
    """What a fragment was before other pieces changed it."""

    episode_id: str
    t_started: int
    length: int
    terminated: bool
    truncated: bool
    logits: np.ndarray | None


class NoteFragments(ConnectorV2):
    """The first piece of a Learner's pipeline: RLlib's next adds a step to each fragment, and another name and end.

    Args:
        with_logits: whether to note the logits of the policy that acted.
    """

    def __init__(self, *, with_logits: bool) -> None:
        super().__init__()
        self._with_logits = with_logits

    def __call__(
        self, *, batch: dict[str, Any], episodes: Sequence[Any], shared_data: dict[str, Any], **rest: Any
    ) -> dict[str, Any]:
        """The batch as it was."""
        shared_data[_NOTES] = [self._note(episode) for episode in episodes]
        return batch

    def _note(self, episode: Any) -> _Note:
        logits = None
        if self._with_logits and Columns.ACTION_DIST_INPUTS in episode.extra_model_outputs:
            logits = np.asarray(episode.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS), np.float32)
        ends = bool(episode.is_terminated), bool(episode.is_truncated)
        return _Note(episode.id_, episode.t_started, len(episode), *ends, logits)


class ScoreFragments(ConnectorV2):
    """The last piece of a Learner's pipeline: the module values all observations of the batch in one forward pass.

    Observations and rewards are therefore those the Learner learns from, whatever other pieces made of them, and the
    values those of the module before it learns from this batch; of APPO and IMPALA, whose Learners change the module
    in another thread, those of some moment before.

    Args:
        server: the actor of a :class:`~rllib_ext.levels.server.LevelServer`.
    """

    def __init__(self, server: Any) -> None:
        super().__init__()
        self._server = server

    def __call__(
        self, *, rl_module: Any, batch: dict[str, Any], shared_data: dict[str, Any], **rest: Any
    ) -> dict[str, Any]:
        """The batch as it was.

        Raises:
            ValueError: another piece of the pipeline changed the number of rows; values or rewards that are NaN.
        """
        notes: list[_Note] = shared_data.pop(_NOTES)
        columns = batch[DEFAULT_MODULE_ID]
        with torch.no_grad():
            values = rl_module[DEFAULT_MODULE_ID].unwrapped().compute_values(columns)
        # RLlib adds a step to each fragment, which holds its last observation.
        lengths = [note.length + 1 for note in notes]
        rows = [
            unpad_data_if_necessary(lengths, convert_to_numpy(column)) for column in (values, columns[Columns.REWARDS])
        ]
        if any(len(column) != sum(lengths) for column in rows):
            raise ValueError(
                f"the train batch has {len(rows[0])} rows of values and {len(rows[1])} rewards, its episodes have "
                f"{sum(lengths)}: a piece of learner_connector adds or takes rows, and levels cannot be scored then"
            )
        cuts = np.cumsum(lengths)[:-1]
        pieces = zip(notes, *(np.split(column, cuts) for column in rows), strict=True)
        ray.get(self._server.score.remote([_fragment(note, value, reward) for note, value, reward in pieces]))
        return batch


def follow(learner: Any, *, server: Any) -> None:
    """From now on a Learner tells the level buffer what it learns from."""
    with_logits = isinstance(learner.module[DEFAULT_MODULE_ID].unwrapped().action_space, gymnasium.spaces.Discrete)
    learner._learner_connector.prepend(NoteFragments(with_logits=with_logits))
    learner._learner_connector.append(ScoreFragments(server))


def score_only(learner: Any, *, episodes: Sequence[Any]) -> None:
    """Tells the level buffer of fragments that the Learner does not learn from."""
    learner._learner_connector(rl_module=learner.module, batch={}, episodes=list(episodes), shared_data={})


def _fragment(note: _Note, value: np.ndarray, reward: np.ndarray) -> Fragment:
    return Fragment(
        note.episode_id,
        note.t_started,
        np.asarray(reward[:-1], np.float32),
        np.asarray(value, np.float32),
        note.terminated,
        note.truncated,
        note.logits,
    )
