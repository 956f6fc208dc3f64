# SPDX-License-Identifier: Apache-2.0
"""A drawn TensorDict as the episodes RLlib's learners take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_ext.episodes.columns import Columns
from rllib_ext.learner.blocks import FlaggedBlock, TransitionBlock

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class Piece(NamedTuple):
    """Rows that travel together: as the Learner gets them, and the place in the drawn batch of each, int64 ``[n]``."""

    episode: SingleAgentEpisode
    places: np.ndarray


class DrawnRows:
    """Columns of a drawn batch as NumPy arrays, from which blocks or single-row episodes are cut.

    Args:
        batch: what ``Replay.sample`` returned, ``[B]``.
        observation, action: how their columns nest.
        module_id: the module that learns from the rows, where there are several agents.
    """

    def __init__(
        self, batch: TensorDictBase, observation: Columns, action: Columns, module_id: str | None = None
    ) -> None:
        def leaf(*key: str) -> np.ndarray:
            return batch.get(key).cpu().numpy()

        self._module_id = module_id
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

    def __len__(self) -> int:
        return len(self._rewards)

    @property
    def mean_n_step(self) -> float:
        """Steps per row, on average."""
        return float(self._outputs["n_step"].mean())

    def flagged(self) -> list[Piece]:
        """Returns all rows in one block, in the order they were drawn; read by
        :class:`~rllib_ext.learner.done_flags_connector.AddFlagsFromBlocks`."""
        everything = slice(None)
        block = FlaggedBlock(
            self._name("rows"),
            self._columns_of(everything),
            self._outputs,
            self._terminated,
            self._truncated,
            self._module_id,
        )
        return [Piece(block, np.arange(len(self)))]

    def blocks(self) -> list[Piece]:
        """Returns one block of rows that are not done and one done row at its end, and a block for each further one."""
        done = self._terminated | self._truncated
        done_rows = np.flatnonzero(done)
        if len(done_rows) == 0:
            return [self._block("rows", np.arange(len(done)), slice(None))]
        first = np.append(np.flatnonzero(~done), done_rows[0])
        others = [self._block(f"row_{row}", np.array([row]), slice(row, row + 1)) for row in done_rows[1:].tolist()]
        return [self._block("rows", first, first), *others]

    def episodes(self) -> list[Piece]:
        """Returns an episode of a single step for each row: slow, for connectors that do more than read columns."""
        columns = [[self._struct(place, slice(row, row + 1)) for row in range(len(self))] for place in range(3)]
        return [
            Piece(self._episode(row, *(column[row] for column in columns)), np.array([row])) for row in range(len(self))
        ]

    def _episode(self, row: int, observation: Any, following: Any, action: Any) -> SingleAgentEpisode:
        name = self._name(f"row_{row}")
        return SingleAgentEpisode(
            id_=name,
            agent_id=None if self._module_id is None else name,
            module_id=self._module_id,
            multi_agent_episode_id=None if self._module_id is None else name,
            observations=[_only(observation), _only(following)],
            actions=[_only(action)],
            rewards=[self._rewards[row]],
            terminated=bool(self._terminated[row]),
            truncated=bool(self._truncated[row]),
            extra_model_outputs={key: [column[row]] for key, column in self._outputs.items()},
            len_lookback_buffer=0,
        )

    def _block(self, name: str, places: np.ndarray, rows: Any) -> Piece:
        outputs = {key: column[rows] for key, column in self._outputs.items()}
        ends = bool(self._terminated[places[-1]]), bool(self._truncated[places[-1]])
        block = TransitionBlock(self._name(name), self._columns_of(rows), outputs, *ends, self._module_id)
        return Piece(block, places)

    def _columns_of(self, rows: Any) -> list[Any]:
        return [*(self._struct(place, rows) for place in range(3)), self._rewards[rows]]

    def _struct(self, place: int, rows: Any) -> Any:
        return self._spaces[place].unflatten([array[rows] for array in self._columns[place]])

    def _name(self, rows: str) -> str:
        """Contains an underscore (other names RLlib changes) and is its own among all modules' pieces."""
        return f"{rows}_of_{self._module_id or 'batch'}"


LAYOUTS: dict[str, Callable[[DrawnRows], list[Piece]]] = {
    "flagged": DrawnRows.flagged,
    "blocks": DrawnRows.blocks,
    "rows": DrawnRows.episodes,
}


def _only(struct: Any) -> Any:
    """Returns the one row of a batch of one."""
    if isinstance(struct, dict):
        return {key: _only(part) for key, part in struct.items()}
    if isinstance(struct, tuple):
        return tuple(_only(part) for part in struct)
    return struct[0]
