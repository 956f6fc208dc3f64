# SPDX-License-Identifier: Apache-2.0
"""A drawn TensorDict as the list of episodes RLlib's learners take, and the rows in the order they come back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

from rllib_ext.blocks import TransitionBlock
from rllib_ext.columns import Columns

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class DrawnRows:
    """Columns of a drawn batch as NumPy arrays, from which blocks or single-row episodes are cut.

    Args:
        batch: what ``Replay.sample`` returned, ``[B]``.
        observation, action: how their columns nest.
    """

    def __init__(self, batch: TensorDictBase, observation: Columns, action: Columns) -> None:
        def leaf(*key: str) -> np.ndarray:
            return batch.get(key).cpu().numpy()

        self._spaces = (observation, observation, action)
        self._columns = (
            [leaf(*part.key) for part in observation.leaves],
            [leaf("next", *part.key) for part in observation.leaves],
            [leaf(*part.key) for part in action.leaves],
        )
        self._rewards = leaf("next", "reward").reshape(-1)
        self._terminated = leaf("next", "terminated").reshape(-1)
        self._truncated = leaf("next", "truncated").reshape(-1)
        count = len(self._rewards)
        known = batch.keys()
        self._outputs = {
            "weights": leaf("priority_weight") if "priority_weight" in known else np.ones(count, dtype=np.float32),
            "n_step": leaf("steps_to_next_obs").reshape(-1)
            if "steps_to_next_obs" in known
            else np.ones(count, dtype=np.int64),
        }

    @property
    def mean_n_step(self) -> float:
        """Steps per row, on average."""
        return float(self._outputs["n_step"].mean())

    def blocks(self) -> tuple[list[SingleAgentEpisode], np.ndarray | None]:
        """One block of rows that are not done with one done row at its end, and a block for each other done row.

        Returns:
            The blocks, the long one first, and the place in the batch of each of their rows (``None``: unchanged).
        """
        done = self._terminated | self._truncated
        done_rows = np.flatnonzero(done)
        if len(done_rows) == 0:
            return [self._block("rows_0", slice(None), len(done) - 1)], None
        first, others = np.append(np.flatnonzero(~done), done_rows[0]), done_rows[1:]
        blocks = [self._block("rows_0", first, int(done_rows[0]))]
        blocks += [self._block(f"row_{row}", slice(row, row + 1), row) for row in others.tolist()]
        return blocks, np.concatenate([first, others])

    def episodes(self) -> tuple[list[SingleAgentEpisode], np.ndarray | None]:
        """One real episode of a single step for each row: slow, for connectors that do more than read columns."""
        count = len(self._rewards)
        columns = [[self._struct(place, slice(row, row + 1)) for row in range(count)] for place in range(3)]
        return [
            SingleAgentEpisode(
                id_=f"row_{row}",
                observations=[_only(columns[0][row]), _only(columns[1][row])],
                actions=[_only(columns[2][row])],
                rewards=[self._rewards[row]],
                terminated=bool(self._terminated[row]),
                truncated=bool(self._truncated[row]),
                extra_model_outputs={key: [column[row]] for key, column in self._outputs.items()},
                len_lookback_buffer=0,
            )
            for row in range(count)
        ], None

    def _struct(self, place: int, rows: Any) -> Any:
        return self._spaces[place].unflatten([array[rows] for array in self._columns[place]])

    def _block(self, name: str, rows: Any, last_row: int) -> TransitionBlock:
        outputs = {key: column[rows] for key, column in self._outputs.items()}
        columns = [*(self._struct(place, rows) for place in range(3)), self._rewards[rows]]
        ends = bool(self._terminated[last_row]), bool(self._truncated[last_row])
        return TransitionBlock(name, columns, outputs, *ends)


LAYOUTS: dict[str, Callable[[DrawnRows], tuple[list[SingleAgentEpisode], np.ndarray | None]]] = {
    "blocks": DrawnRows.blocks,
    "rows": DrawnRows.episodes,
}


class _Span:
    """Stands for an episode where RLlib shards: only its length and where its rows lie."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> _Span:
        return _Span(self.rows[rows])

    def slice(self, rows: slice, *, len_lookback_buffer: int | None = None) -> _Span:
        return self[rows]


def learner_order(lengths: list[int], num_learners: int) -> np.ndarray:
    """The order in which the rows of episodes of these lengths come back from ``num_learners`` Learners.

    RLlib sorts episodes by length, deals them out and cuts some; the TD errors come back Learner after Learner.
    The iterator that deals is asked itself, with stand-ins, so the order is right by construction.

    Example:
        >>> learner_order([2, 1, 1], num_learners=2).tolist()
        [0, 1, 2, 3]
        >>> learner_order([1, 1, 1, 1], num_learners=2).tolist()
        [0, 2, 1, 3]
    """
    starts = np.cumsum([0, *lengths])
    spans = [_Span(np.arange(start, stop)) for start, stop in pairwise(starts.tolist())]
    shards = ShardEpisodesIterator(spans, num_shards=num_learners)
    return np.concatenate([span.rows for shard in shards for span in shard])


def _only(struct: Any) -> Any:
    """The one row of a batch of one."""
    if isinstance(struct, dict):
        return {key: _only(part) for key, part in struct.items()}
    if isinstance(struct, tuple):
        return tuple(_only(part) for part in struct)
    return struct[0]
