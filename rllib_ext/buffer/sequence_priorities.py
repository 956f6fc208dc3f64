# SPDX-License-Identifier: Apache-2.0
"""One priority for each drawn sequence, from the TD errors of its steps as several Learners return them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rllib_ext.learner.sharding import dealt_rows

# η of R2D2, Kapturowski et al. 2019, section 2.3: priority = η max|δ| + (1 - η) mean|δ|.
SHARE_OF_LARGEST = 0.9


class SequencePriorities:
    """Turns the TD errors of a batch of sequences, ``[chunks, T]`` as they come back, into one for each sequence.

    A Learner pads every sequence to T steps, a chunk; where RLlib cuts a sequence for several Learners, its parts are
    chunks of their own. The priority is ``0.9 * max|δ| + 0.1 * mean|δ|`` of the steps a Learner learned from, without
    the burn-in of each chunk and the padding.

    ::

        sequences                   aaaa bb          (T = 4, burn-in 1, 2 Learners)
        chunks of the first         aaa-
        chunks of the second        a---  bb--
        steps that count            -xx-  ----  -x--

    Args:
        lengths: steps of each sequence, the longest first.
        num_learners: Learners the sequences are dealt out to.
        longest: T, ``max_seq_len`` of the module.
        burn_in: first steps of every chunk from which no Learner learns.

    Example:
        >>> priorities = SequencePriorities([3, 2], num_learners=0, longest=4, burn_in=1)
        >>> priorities.of([[9, -1, 3, 0], [9, 2, 0, 0]])
        (array([0, 1]), array([2.9, 2. ]))
    """

    def __init__(self, lengths: Sequence[int], num_learners: int, longest: int, burn_in: int) -> None:
        shards = dealt_rows(list(lengths), max(num_learners, 1))
        for shard in shards:
            if all(len(part) <= burn_in for part in shard):
                raise ValueError(
                    f"{sum(lengths)} steps for {num_learners} Learners leave one of them with no more than "
                    f"burn_in_len={burn_in} steps of any sequence, so it would learn from none. Set "
                    f"train_batch_size_per_learner to at least max_seq_len={longest}, or lower burn_in_len"
                )
        chunks = [part for shard in shards for part in shard]
        self._sequence = np.repeat(np.arange(len(lengths)), lengths)[[part[0] for part in chunks]]
        step = np.arange(longest)
        self._counts = (step >= burn_in) & (step < np.array([[len(part)] for part in chunks]))
        self._num_sequences = len(lengths)

    def of(self, td_errors: object) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sequences with a step that counts, int64 ``[n]``, and the priority of each."""
        given = np.asarray(td_errors, dtype=np.float64)
        if given.shape != self._counts.shape:
            raise ValueError(
                f"the TD errors have shape {list(given.shape)}; the batch of sequences came back in "
                f"{self._counts.shape[0]} chunks of {self._counts.shape[1]} steps. With several Learners use "
                "rllib_ext.configure(config), or replay_config(num_learners=...); a Learner of your own logs one TD "
                "error per step, padding included"
            )
        if not np.isfinite(given[self._counts]).all():
            raise ValueError(
                "the TD errors of steps that were learned from must be finite; some are NaN or infinite. No priority "
                "was changed. Look for a diverging loss before this update"
            )
        magnitude = np.where(self._counts, np.abs(given), 0.0)
        largest, total, count = (np.zeros(self._num_sequences) for _ in range(3))
        np.maximum.at(largest, self._sequence, magnitude.max(1))
        np.add.at(total, self._sequence, magnitude.sum(1))
        np.add.at(count, self._sequence, self._counts.sum(1))
        learned = np.flatnonzero(count)
        mean = total[learned] / count[learned]
        return learned, SHARE_OF_LARGEST * largest[learned] + (1 - SHARE_OF_LARGEST) * mean
