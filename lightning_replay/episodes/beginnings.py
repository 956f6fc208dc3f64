# SPDX-License-Identifier: Apache-2.0
"""How the first episodes that a buffer gets begin: rows that follow no others, and ends that begin other episodes."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_replay.episodes.links import comparable
from lightning_replay.storage.columns import TRAJECTORIES, Column
from lightning_replay.storage.rows import Key, observation_keys

_MOST_READ = 16_384  # So many rows of a call are read.
_MOST_COMPARED = 64  # Rows are refused if none of so many continues another.
_MOST_RUNNING = 4_096  # If more episodes run, and twice as many as a call has rows, rows are no longer compared.
_MOST_ENDS = 64
_LEAST_REPEATED = 8
_MOST_CALLS = 16  # An end waits so many calls for the next episode.
_MOST_STATES = 4_096
_DONE = ("next", "done")


class Beginnings:
    """Compares the beginnings of the first episodes before any part of a buffer stores their rows.

    * Rows are refused if 64 of them follow another row of their trajectory and none continues it. Each return over
      several steps would be the reward of one step, and each pair or sequence a single row.
    * Of the first 64 ends that are not terminated, those are reported whose last observation is the one that another
      episode begins with, if they are the majority and at least eight. Targets at terminated ends use no next
      observation. Observations that are also found within episodes do not count: in an environment with few states
      they recur by chance.

    Observations are compared as by :class:`~lightning_replay.episodes.links.Continuity`. :meth:`after` changes nothing
    and returns another object, which is kept once the rows are stored.

    Args:
        compares: Whether a part joins rows only if they continue each other.
        is_silent: Whether ends are not reported, because they have been, or because the buffer does not compare rows.
    """

    def __init__(self, compares: bool, is_silent: bool) -> None:
        self._compares = compares  # Rows are compared until a row continues another.
        self._num_compared = 0
        self._last: dict[int, int] = {}  # The last observation of each running episode, as a hash.
        self.is_silent: bool = is_silent
        self._num_ends = 0
        self._waiting: set[int] = set()  # No row has begun with these last observations.
        self._calls_left = 0  # They wait for so many calls.
        self._repeated: set[int] = set()  # A row that continues no other began with these last observations.
        self._states: set[int] = set()  # Observations within episodes; an end among them recurs by itself.
        self._running: set[int] = set()  # Trajectories of the rows before.

    def after(self, values: Sequence[Column], columns: Iterable[Key]) -> Beginnings:
        """Returns these beginnings with those in rows with the values ``[N, ...]`` of these columns.

        Raises:
            ValueError: 64 rows, none of which continues another.
        """
        is_judged = self.is_silent or (self._num_ends == _MOST_ENDS and not self._waiting)
        if is_judged and not self._compares:
            return self
        given = dict(zip(columns, values, strict=True))
        done: Any = given.get(_DONE)
        # The usual way: no episode ended, and nothing waits for the rows.
        if type(done) is np.ndarray and not (self._compares or self._waiting or np.count_nonzero(done)):
            return self
        if done is None or done.shape[1:] not in ((), (1,)) or not str(done.dtype).endswith("bool"):
            return self  # A part that needs the column refuses the rows.
        terminated = given.get(("next", "terminated"))
        cut = done if terminated is None or terminated.shape != done.shape else done > terminated
        if not (self._compares or self._waiting or bool(cut.any())):
            return self
        further = copy.copy(self)
        further._read({key: value[:_MOST_READ] for key, value in given.items()}, cut[:_MOST_READ].reshape(-1).tolist())
        return further

    def warn(self) -> None:
        """Reports ends once; call it when all parts have the rows."""
        is_majority = 2 * len(self._repeated) > self._num_ends and len(self._repeated) >= _LEAST_REPEATED
        if is_majority and not self.is_silent:
            self.is_silent = True
            warnings.warn(
                f"{len(self._repeated)} of {self._num_ends} truncated episodes end with the observation that another "
                "episode begins with. If your environment goes on there without a reset, the rows are right: build the "
                "buffer with check_continuity=False, or ignore this warning by warnings.filterwarnings. Otherwise, "
                "targets at these ends use the value of the other episode. Simulators that reset in the step that ends "
                "an episode return the new observation. So do environments that write each observation into the same "
                "array. Store the observation before the reset as ('next', 'observation') of the last row, for example "
                "infos['final_obs']. If your loop stores resets as rows (AutoresetMode.NEXT_STEP), leave these rows "
                "out. lightning_replay.collecting.VectorSteps does both",
                stacklevel=2,
            )

    def _read(self, columns: Mapping[Key, Column], cut: list[bool]) -> None:
        keys = observation_keys({key: (one.dtype, one.shape[1:]) for key, one in columns.items()})
        if not keys:
            return
        owns, lasts = (_hashes([columns[*branch, *key] for key in keys]) for branch in ((), ("next",)))
        ended = columns[_DONE].reshape(-1).tolist()
        named = next((key for key in TRAJECTORIES if key in columns), None)
        names = [0] * len(ended) if named is None else columns[named].reshape(-1).tolist()
        if self._compares:
            self._compare(owns, lasts, ended, names)
        # A collector of TorchRL may mark the last row of each batch as an end, and goes on with the same number.
        going_on = self._running if named == TRAJECTORIES[1] else set()
        self._running = set(names)
        begun = {own for own, name in zip(owns, names, strict=False) if name not in going_on}
        # States within episodes: those that a row led to, or of the last row the one before.
        states = {own if is_end else last for own, last, is_end in zip(owns, lasts, ended, strict=True)}
        self._judge(begun, states, [*itertools.compress(lasts, cut)])

    def _compare(self, owns: list[int], lasts: list[int], ended: list[bool], names: list[int]) -> None:
        self._last = dict(self._last)
        for own, last, is_end, name in zip(owns, lasts, ended, names, strict=False):
            before = self._last.pop(name, None)
            self._num_compared += before is not None
            if before == own:
                self._compares = False
                self._last = {}
                return
            if self._num_compared == _MOST_COMPARED:
                raise ValueError(
                    f"none of {_MOST_COMPARED} rows starts with the observation that the row before ended with, so "
                    "that returns, pairs and sequences would be of single steps. Nothing was stored. If observations "
                    "change between two steps, by noise or by statistics that move on, build the buffer with "
                    "check_continuity=False. If rows of several environments share a number or have none, give each "
                    "row the number of its running episode in the column 'trajectory', int64 [N]. If rows are "
                    "shuffled, store them in the order of their steps"
                )
            if not is_end:
                self._last[name] = last
        # Most of them will never go on.
        self._compares = len(self._last) <= max(_MOST_RUNNING, 2 * len(owns))

    def _judge(self, begun: set[int], states: set[int], ends: list[int]) -> None:
        ends = [*dict.fromkeys(ends)][: _MOST_ENDS - self._num_ends]
        self._states = states | (self._states if len(self._states) < _MOST_STATES else set())
        self._num_ends += len(ends)
        self._calls_left = _MOST_CALLS if ends else self._calls_left - 1
        waiting = self._waiting.union(ends) - self._states
        self._repeated = self._repeated | (waiting & begun)
        self._waiting = waiting - begun if self._calls_left else set()


def _hashes(columns: Sequence[Any]) -> list[int]:
    # Of the numbers of all columns [N, ...] in each row; by rows, because images would be copied whole.
    parts = [np.ascontiguousarray(comparable(column, "cpu")) for column in columns]
    return [hash(b"".join([part[row].tobytes() for part in parts])) for row in range(len(parts[0]))]
