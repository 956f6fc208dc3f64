# SPDX-License-Identifier: Apache-2.0
"""How the first episodes that a buffer gets begin: rows that follow no others, and ends that begin other episodes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_replay.episodes.links import comparable, row_digests
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
_NOTHING = np.zeros(0, dtype=np.int64)


class Beginnings:
    """Compares the beginnings of the first episodes before any part of a buffer stores their rows.

    * Rows are refused if 64 of them follow another row of their trajectory and none continues it. Each return over
      several steps would be the reward of one step, and each pair or sequence a single row.
    * Among the first 64 ends that are not terminated, an end counts if another episode begins with its last
      observation. Such ends are reported if they are the majority and at least eight. Targets at terminated ends use no
      next observation. Observations that are also found within episodes do not count: in an environment with few states
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
        self._names = _NOTHING  # Running episodes, and digests of their last observations.
        self._last = _NOTHING
        self.is_silent: bool = is_silent
        self._num_ends = 0
        self._waiting = _NOTHING  # No row has begun with these last observations.
        self._calls_left = 0  # They wait for so many calls.
        self._repeated = _NOTHING  # A row that continues no other began with these last observations.
        self._states = _NOTHING  # Observations within episodes. An end among them recurs by itself.
        self._running = _NOTHING  # Trajectories of the rows before.

    @property
    def may_refuse(self) -> bool:
        """Whether rows are compared, so that :meth:`after` may refuse them.

        :meta private:
        """
        return self._compares

    def after(self, values: Sequence[Column], columns: Iterable[Key]) -> Beginnings:
        """Returns these beginnings with those in rows with the values ``[N, ...]`` of these columns.

        Raises:
            ValueError: 64 rows, none of which continues another.
        """
        is_judged = self.is_silent or (self._num_ends == _MOST_ENDS and not len(self._waiting))
        if is_judged and not self._compares:
            return self
        given = dict(zip(columns, values, strict=True))
        done: Any = given.get(_DONE)
        # The usual way: no episode ended, and nothing waits for the rows.
        if type(done) is np.ndarray and not (self._compares or len(self._waiting) or np.count_nonzero(done)):
            return self
        if done is None or not len(done) or done.shape[1:] not in ((), (1,)) or not str(done.dtype).endswith("bool"):
            return self  # A part that needs the column refuses the rows. All rows may have been padding.
        terminated = given.get(("next", "terminated"))
        cut = done if terminated is None or terminated.shape != done.shape else done > terminated
        if not (self._compares or len(self._waiting) or bool(cut.any())):
            return self
        further = copy.copy(self)
        further._read(
            {key: value[:_MOST_READ] for key, value in given.items()}, comparable(cut[:_MOST_READ], "cpu")[:, 0]
        )
        return further

    def warn(self) -> None:
        """Reports ends once. Call it when all parts have the rows."""
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

    def _read(self, columns: Mapping[Key, Column], cut: np.ndarray) -> None:
        keys = observation_keys({key: (one.dtype, one.shape[1:]) for key, one in columns.items()})
        if not keys:
            return
        owns, lasts = row_digests([(columns[key], columns["next", *key]) for key in keys])
        ended = comparable(columns[_DONE], "cpu")[:, 0]
        named = next((key for key in TRAJECTORIES if key in columns), None)
        names = np.zeros(len(ended), dtype=np.int64) if named is None else comparable(columns[named], "cpu")[:, 0]
        if self._compares:
            self._compare(owns, lasts, ended, names)
        begun = owns
        # A collector of TorchRL may mark the last row of each batch as an end, and goes on with the same number.
        if named == TRAJECTORIES[1]:
            begun = owns[~np.isin(names, self._running)]
        self._running = np.unique(names)
        # States within episodes: the state that a row led to, or for the last row the state before.
        self._judge(begun, np.where(ended, owns, lasts), lasts[cut])

    def _compare(self, owns: np.ndarray, lasts: np.ndarray, ended: np.ndarray, names: np.ndarray) -> None:
        # Each row, after the last ones of the calls before, follows the row of its name before it that did not end.
        num_old = len(self._names)
        names = np.concatenate((self._names, names))
        lasts = np.concatenate((self._last, lasts))
        goes_on = np.concatenate((np.ones(num_old, dtype=np.bool_), ~ended))
        order = names.argsort(kind="stable")
        is_same = names[order[1:]] == names[order[:-1]]
        follows = is_same & goes_on[order[:-1]]
        before, after = order[:-1][follows], order[1:][follows]
        is_compared = np.zeros(len(names), dtype=np.bool_)
        is_compared[after] = True
        counts = self._num_compared + np.cumsum(is_compared)
        continued = after[lasts[before] == owns[after - num_old]]
        # Rows after the first that continues another are not counted.
        first = int(continued.min(initial=len(names) - 1))
        if counts[first] - bool(len(continued)) >= _MOST_COMPARED:
            raise ValueError(
                f"none of {_MOST_COMPARED} rows starts with the observation that the row before ended with, so "
                "that returns, pairs and sequences would be of single steps. Nothing was stored. If observations "
                "change between two steps, by noise or by statistics that move on, build the buffer with "
                "check_continuity=False. If rows of several environments share a number or have none, give each "
                "row the number of its running episode in the column 'trajectory', int64 [N]. If rows are "
                "shuffled, store them in the order of their steps"
            )
        kept = order[np.append(~is_same, [True])]
        kept = kept[goes_on[kept]]
        self._names, self._last = names[kept], lasts[kept]
        self._num_compared = int(counts[-1])
        # If more episodes run, most of them will never go on.
        self._compares = not len(continued) and len(kept) <= max(_MOST_RUNNING, 2 * len(owns))

    def _judge(self, begun: np.ndarray, states: np.ndarray, ends: np.ndarray) -> None:
        ends = ends[np.sort(np.unique(ends, return_index=True)[1])][: _MOST_ENDS - self._num_ends]
        self._states = np.unique(np.append(states, self._states if len(self._states) < _MOST_STATES else _NOTHING))
        self._num_ends += len(ends)
        self._calls_left = _MOST_CALLS if len(ends) else self._calls_left - 1
        waiting = np.setdiff1d(np.append(self._waiting, ends), self._states)
        has_begun = np.isin(waiting, begun)
        self._repeated = np.union1d(self._repeated, waiting[has_begun])
        self._waiting = waiting[~has_begun] if self._calls_left else _NOTHING
