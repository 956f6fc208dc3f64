# SPDX-License-Identifier: Apache-2.0
"""A drawn TensorDict as episodes for RLlib's Learners."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tree
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
        rewards, terminated, truncated = (
            leaf("next", name).reshape(-1) for name in ("reward", "terminated", "truncated")
        )
        self._ends = terminated, truncated
        self._columns = [
            observation.unflatten([leaf(*part.key) for part in observation.leaves]),
            observation.unflatten([leaf("next", *part.key) for part in observation.leaves]),
            action.unflatten([leaf(*part.key) for part in action.leaves]),
            rewards,
        ]
        count, present = len(rewards), batch.keys()
        steps = leaf("steps_to_next_obs").reshape(-1) if "steps_to_next_obs" in present else np.ones(count, np.int64)
        weights = leaf("priority_weight") if "priority_weight" in present else np.ones(count, np.float32)
        self._outputs = {"weights": weights, "n_step": steps}
        self.mean_n_step: float = float(steps.mean())

    def __len__(self) -> int:
        return len(self._outputs["n_step"])

    def flagged(self) -> list[Piece]:
        """Returns all rows in one block, in the order they were drawn, with the flags of each row."""
        block = FlaggedBlock(self._name("rows"), self._columns, self._outputs, *self._ends, self._module_id)
        return [Piece(block, np.arange(len(self)))]

    def blocks(self) -> list[Piece]:
        """Returns one block of rows that are not done and one done row at its end, and a block for each further one."""
        done = np.logical_or(*self._ends)
        done_rows = np.flatnonzero(done)
        if len(done_rows) == 0:  # views of the drawn columns
            block = TransitionBlock(self._name("rows"), self._columns, self._outputs, module_id=self._module_id)
            return [Piece(block, np.arange(len(done)))]
        others = [self._block(f"row_{row}", np.array([row])) for row in done_rows[1:].tolist()]
        return [self._block("rows", np.append(np.flatnonzero(~done), done_rows[0])), *others]

    def episodes(self) -> list[Piece]:
        """Returns an episode of a single step for each row: slow, for connectors that do more than read columns."""
        return [Piece(self._episode(row), np.array([row])) for row in range(len(self))]

    def _episode(self, row: int) -> SingleAgentEpisode:
        name = self._name(f"row_{row}")
        agent = None if self._module_id is None else name
        observation, following, action, reward = self._columns_of(row)
        terminated, truncated = (bool(flags[row]) for flags in self._ends)
        return SingleAgentEpisode(
            id_=name,
            agent_id=agent,
            module_id=self._module_id,
            multi_agent_episode_id=agent,
            observations=[observation, following],
            actions=[action],
            rewards=[reward],
            terminated=terminated,
            truncated=truncated,
            extra_model_outputs={key: [column[row]] for key, column in self._outputs.items()},
            len_lookback_buffer=0,
        )

    def _block(self, name: str, places: np.ndarray) -> Piece:
        outputs = {key: column[places] for key, column in self._outputs.items()}
        terminated, truncated = (bool(flags[places[-1]]) for flags in self._ends)
        columns = self._columns_of(places)
        block = TransitionBlock(self._name(name), columns, outputs, terminated, truncated, self._module_id)
        return Piece(block, places)

    def _columns_of(self, rows: Any) -> list[Any]:
        return [tree.map_structure(lambda array: array[rows], column) for column in self._columns]

    def _name(self, rows: str) -> str:
        """Returns a name unique among all modules' pieces, with an underscore: RLlib changes others."""
        return f"{rows}_of_{self._module_id or 'batch'}"


LAYOUTS: dict[str, Callable[[DrawnRows], list[Piece]]] = {
    "flagged": DrawnRows.flagged,
    "blocks": DrawnRows.blocks,
    "rows": DrawnRows.episodes,
}
