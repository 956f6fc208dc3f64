# SPDX-License-Identifier: Apache-2.0
"""A drawn batch as RLlib's learner connectors read it, and the order in which its rows come back from the Learners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import tree
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

from rllib_ext.episodes import Columns

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class TransitionBlock(SingleAgentEpisode):
    """Unrelated transitions in one object that the learner connectors read as an episode.

    They call only ``get_*(slice(0, n))`` and ``get_observations(slice(1, n + 1))`` of an episode, and build rows
    ``(observation, action, reward, next observation)`` of the results. A block returns its columns for these two, and
    raises an error for other indices: row ``i + 1`` does not follow row ``i`` in time. Only the last row can be
    terminated or truncated, as in an episode.

    Blocks reach remote Learners through Ray's object store, without copies there: their columns are then read-only.
    """

    def __init__(
        self,
        # RLlib renames names without an underscore.
        name: str,
        columns: Sequence[Any],  # observations, next observations and actions, nested [n, ...], and rewards, [n]
        outputs: dict[str, np.ndarray],  # further columns of the train batch, [n] each
        terminated: Any = False,
        truncated: Any = False,
        # Set in environments of several agents.
        module_id: str | None = None,
    ) -> None:
        # The constructor of the base class would wrap every column in a lookback buffer.
        self.id_ = name
        self._columns = columns
        self.extra_model_outputs = outputs
        self.ends: tuple[Any, Any] = (terminated, truncated)
        self.module_id = module_id
        # RLlib files rows under (episode, agent, module) if there are several agents.
        self.agent_id: str | None = None if module_id is None else name
        self.multi_agent_episode_id: str | None = self.agent_id
        self._observation_space = self._action_space = None
        self._start_time = self._last_step_time = self._last_added_observation = self._last_added_infos = None
        self._custom_data: dict[str, Any] = {}
        self.t_started: int = 0
        self.t: int = len(columns[3])

    def __len__(self) -> int:
        return self.t

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle protocol 5 sends contiguous arrays out of band, and drawn columns are views of packed rows.
        columns, outputs, ends = tree.map_structure(_contiguous, self.content)
        return type(self), (self.id_, columns, outputs, *ends, self.module_id)

    @property
    def content(self) -> tuple[Sequence[Any], dict[str, np.ndarray], tuple[Any, Any]]:
        """Columns, extra outputs, and ends of the rows."""
        return self._columns, self.extra_model_outputs, self.ends

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id_={self.id_!r}, {self.t} rows)"

    is_numpy = True
    is_reset = True

    @property
    def is_terminated(self) -> bool:
        """Whether the last row is terminated."""
        return self.ends[0]

    @property
    def is_truncated(self) -> bool:
        """Whether the last row is truncated."""
        return self.ends[1]

    def slice(self, slice_: Any, *, len_lookback_buffer: int | None = None) -> TransitionBlock:
        """Returns the rows of a slice with step 1, without a copy."""
        start, stop, step = slice_.indices(self.t)
        if step != 1:
            self._refuse(f"slice with step {step}")
        rows = np.s_[start:stop]
        columns = [tree.map_structure(lambda array: array[rows], column) for column in self._columns]
        outputs = {key: column[rows] for key, column in self.extra_model_outputs.items()}
        return type(self)(f"{self.id_}_{start}", columns, outputs, *self._ends_of(rows), self.module_id)

    def to_numpy(self) -> TransitionBlock:
        """Returns this block, which holds arrays already."""
        return self

    def validate(self) -> None:
        """Does nothing, because the rows of a block do not follow each other."""
        pass

    def get_observations(self, indices: Any = None, **options: Any) -> Any:
        """Returns the observations of all rows, or, for ``slice(1, n + 1)``, their next observations."""
        if indices == slice(1, self.t + 1) and not _active(options):
            return self._columns[1]
        return self._all_rows("get_observations", indices, options, self._columns[0])

    def get_actions(self, indices: Any = None, **options: Any) -> Any:
        """Returns the actions of all rows."""
        return self._all_rows("get_actions", indices, options, self._columns[2])

    def get_rewards(self, indices: Any = None, **options: Any) -> Any:
        """Returns the rewards of all rows."""
        return self._all_rows("get_rewards", indices, options, self._columns[3])

    def get_infos(self, indices: Any = None, **options: Any) -> Any:
        """Returns an empty info for each row."""
        return self._all_rows("get_infos", indices, options, [{} for _ in range(self.t)])

    def get_extra_model_outputs(self, key: str, indices: Any = None, **options: Any) -> Any:
        """Returns an extra output of all rows."""
        return self._all_rows("get_extra_model_outputs", indices, options, self.extra_model_outputs[key])

    def _ends_of(self, rows: Any) -> tuple[Any, Any]:
        return self.ends if rows.stop == self.t else (False, False)

    def _all_rows(self, method: str, indices: Any, options: dict[str, Any], column: Any) -> Any:
        if indices != slice(0, self.t) or _active(options):
            given = "".join(f", {key}={value!r}" for key, value in options.items())
            self._refuse(f"{method}({indices}{given})")
        return column

    def __getattr__(self, name: str) -> NoReturn:
        # Reached for what the base class's constructor sets, through its methods that change or read an episode.
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse(name)

    def _refuse(self, request: str) -> NoReturn:
        raise ValueError(
            f"{request} was called on a block of {self.t} rows that do not follow each other in time; a block accepts "
            f"slice(0, {self.t}), and slice(1, {self.t + 1}) for next observations. A connector that needs real "
            'episodes works with replay_config(..., layout="rows").'
        )


class FlaggedBlock(TransitionBlock):
    """Unrelated transitions of which any can be terminated or truncated: ``ends`` are flags of rows, bool ``[n]``."""

    @property
    def is_terminated(self) -> bool:
        """Raises ``ValueError``, because each row has its own flag."""
        self._refuse_one_end("is_terminated")

    @property
    def is_truncated(self) -> bool:
        """Raises ``ValueError``, because each row has its own flag."""
        self._refuse_one_end("is_truncated")

    def _ends_of(self, rows: Any) -> tuple[Any, Any]:
        return self.ends[0][rows], self.ends[1][rows]

    def _refuse_one_end(self, name: str) -> NoReturn:
        raise ValueError(
            f"{name} was read from {self!r}, in which every row has its own; the Learner's connectors lack the piece "
            'that reads them. Let rllib_ext.configure(config) add it, or use replay_config(..., layout="blocks").'
        )


def _contiguous(leaf: Any) -> Any:
    return np.ascontiguousarray(leaf) if isinstance(leaf, np.ndarray) else leaf


def _active(options: dict[str, Any]) -> bool:
    return any(value is not None and value is not False for value in options.values())


class Piece(NamedTuple):
    """Rows that travel together."""

    episode: SingleAgentEpisode  #: Rows in the form that a Learner reads.
    places: np.ndarray  #: int64 ``[n]``, the position of each row in the drawn batch.


class BatchCutter:
    """Columns of a drawn batch as NumPy arrays, from which blocks or single-row episodes are cut."""

    def __init__(
        self, batch: TensorDictBase, observation: Columns, action: Columns, module_id: str | None = None
    ) -> None:
        def leaf(*key: str) -> np.ndarray:
            return batch.get(key).cpu().numpy()

        self._module_id = module_id
        rewards, terminated, truncated = (
            leaf("next", name).reshape(-1) for name in ("reward", "terminated", "truncated")
        )
        # Columns are read once and nested for each piece, because tree.map_structure takes longer than a draw.
        read = [
            [leaf(*part.key) for part in observation.leaves],
            [leaf("next", *part.key) for part in observation.leaves],
            [leaf(*part.key) for part in action.leaves],
        ]
        self._columns = list(zip((observation, observation, action), read, strict=True))
        self._count = len(rewards)
        self._rewards = rewards
        self._ends = (terminated, truncated)
        present = batch.keys()
        steps = leaf("steps_to_next_obs").reshape(-1) if "steps_to_next_obs" in present else np.ones(len(rewards), int)
        weights = leaf("priority_weight") if "priority_weight" in present else np.ones(self._count, np.float32)
        self._outputs = {"weights": weights, "n_step": steps}
        self.mean_n_step: float = float(steps.mean())

    def flagged(self) -> list[Piece]:
        """Returns all rows as one block with a flag for each row."""
        block = FlaggedBlock(self._name("rows"), *self._rows(), *self._ends, self._module_id)
        return [Piece(block, np.arange(self._count))]

    def blocks(self) -> list[Piece]:
        """Returns one block of rows that are not done and one done row at its end, and a block for each further one."""
        done = np.logical_or(*self._ends)
        done_rows = np.flatnonzero(done)
        if len(done_rows) == 0:  # views of the drawn columns
            block = TransitionBlock(self._name("rows"), *self._rows(), module_id=self._module_id)
            return [Piece(block, np.arange(self._count))]
        others = [self._block(f"row_{row}", np.array([row])) for row in done_rows[1:].tolist()]
        return [self._block("rows", np.append(np.flatnonzero(~done), done_rows[0])), *others]

    def episodes(self) -> list[Piece]:
        """Returns an episode of a single step for each row: slow, for connectors that do more than read columns."""
        return [Piece(self._episode(row), np.array([row])) for row in range(self._count)]

    def _episode(self, row: int) -> SingleAgentEpisode:
        name = self._name(f"row_{row}")
        agent = None if self._module_id is None else name
        (observation, following, action, reward), outputs = self._rows(row)
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
            extra_model_outputs={key: [value] for key, value in outputs.items()},
            len_lookback_buffer=0,
        )

    def _block(self, name: str, places: np.ndarray) -> Piece:
        terminated, truncated = (bool(flags[places[-1]]) for flags in self._ends)
        block = TransitionBlock(self._name(name), *self._rows(places), terminated, truncated, self._module_id)
        return Piece(block, places)

    def _rows(self, places: Any = None) -> tuple[list[Any], dict[str, Any]]:
        if places is None:  # all, as they were drawn
            whole = [columns.unflatten(arrays) for columns, arrays in self._columns]
            return [*whole, self._rewards], self._outputs
        cut = [columns.unflatten([array[places] for array in arrays]) for columns, arrays in self._columns]
        return [*cut, self._rewards[places]], {key: column[places] for key, column in self._outputs.items()}

    def _name(self, rows: str) -> str:
        # Unique among all modules' pieces, with an underscore: RLlib changes others.
        return f"{rows}_of_{self._module_id or 'batch'}"


LAYOUTS: dict[str, Callable[[BatchCutter], list[Piece]]] = {
    "flagged": BatchCutter.flagged,
    "blocks": BatchCutter.blocks,
    "rows": BatchCutter.episodes,
}


Owned = tuple[str, Piece]  # a module and a piece of its rows


def deal(pieces: Mapping[str, list[Piece]], num_learners: int) -> tuple[list[Owned], dict[str, np.ndarray]]:
    """Returns pieces in the order for RLlib, and the places of each module's rows as their TD errors come back.

    RLlib sorts episodes by length, deals them out to the Learners, and cuts some. The TD errors of a module come back
    Learner after Learner. The longest piece of each module comes first. With 0 or 1 Learners the order stays.
    """
    if num_learners > 1 and len(pieces) > 1:
        owned = _in_rounds(pieces, num_learners)
    else:
        owned = [(module, piece) for module, parts in pieces.items() for piece in parts]
    if num_learners <= 1 or len(owned) == 1:  # each module's pieces are sorted already, and one piece is cut in order
        return owned, {
            module: np.concatenate([piece.places for piece in parts]) if len(parts) > 1 else parts[0].places
            for module, parts in pieces.items()
        }
    order = learner_order([len(piece.places) for _, piece in owned], num_learners)
    places = np.concatenate([piece.places for _, piece in owned])[order]
    owner = np.concatenate([[module] * len(piece.places) for module, piece in owned])[order]
    return owned, {module: places[owner == module] for module in pieces}


def learner_order(lengths: list[int], num_learners: int) -> np.ndarray:
    """Returns the order in which the rows of episodes of these lengths come back from ``num_learners`` Learners."""
    return np.concatenate([rows for of_learner in dealt_rows(lengths, num_learners) for rows in of_learner])


def dealt_rows(lengths: list[int], num_learners: int) -> list[list[np.ndarray]]:
    """Returns for each Learner the rows of the episodes and parts of episodes that it gets, int64 ``[n]`` each."""
    # For each Learner the rows of the episodes and parts of episodes it gets, int64 [n] each.
    starts = np.cumsum([0, *lengths])
    spans = [_Span(np.arange(start, stop)) for start, stop in pairwise(starts.tolist())]
    return [[span.rows for span in of_learner] for of_learner in ShardEpisodesIterator(spans, num_shards=num_learners)]


class _Span:
    """A stand-in for an episode, by the places of its rows, so that RLlib's own sharding determines the order."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, rows: slice, *, len_lookback_buffer: int | None = None) -> _Span:
        """Returns a part of the rows."""
        return _Span(self.rows[rows])

    __getitem__ = slice


def _in_rounds(pieces: Mapping[str, list[Piece]], num_learners: int) -> list[Owned]:
    # Each module gets as many pieces of one length as there are Learners, because RLlib deals these out evenly. Single
    # rows follow, which may go to any Learner. Learners average gradients by position, and not by module. Each Learner
    # therefore needs rows of each module in the same order. Otherwise the weights of Learners drift apart silently.
    rounds: list[Owned] = []
    others: list[Owned] = []
    for module, (longest, *singles) in pieces.items():
        parts = [*_cut(longest, num_learners), *singles]
        rounds += [(module, part) for part in parts[:num_learners]]
        others += [(module, part) for part in parts[num_learners:]]
    return rounds + others


def _cut(piece: Piece, parts: int) -> list[Piece]:
    # As many pieces of one length, if there are rows enough, and one row each of the rest.
    count = len(piece.places)
    if count == 1:
        return [piece]
    size = count // parts
    bounds = [*range(0, size * parts, size or 1), *range(size * parts, count + 1)]
    return [Piece(piece.episode[start:stop], piece.places[start:stop]) for start, stop in pairwise(bounds)]
