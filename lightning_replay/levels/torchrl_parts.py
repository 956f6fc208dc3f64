# SPDX-License-Identifier: Apache-2.0
"""The TorchRL sampler and writer over the scores and the staleness of levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage, TensorDictRoundRobinWriter

from lightning_replay.levels.table import REFUSED, LevelTable
from lightning_replay.options import check_kind
from lightning_replay.parts import BufferHooks, PartHooks
from lightning_replay.torchrl_compat import attached_buffers

__all__ = ["LevelSampler", "LevelWriter"]


class LevelSampler(LevelTable, PartHooks, Sampler):
    """Draws level i with probability ``(1 - staleness_weight) P_S(i) + staleness_weight P_C(i)``.

    P_S comes from the scores, which may be negative. P_C is proportional to the staleness: the number of episodes since
    the level was last drawn. Each drawn level counts as one episode and then has staleness 0. Give the same sampler to
    the buffer and to its :class:`~lightning_replay.levels.LevelWriter`. To update the score of a drawn level, set
    ``score`` of the batch and ``extend`` the buffer with its ``level_id``, ``score`` and ``timestamp``.

    Jiang et al. 2021, "Prioritized Level Replay", equations 2 to 4, https://arxiv.org/abs/2010.03934. Names:
    ``score_temperature`` is β, ``staleness_weight`` ρ.

    Args:
        prioritization: Object that turns scores into probabilities: ``Rank()`` if absent, ``Proportional()``,
            ``Greedy()``, or ``Boltzmann()``.
        score_temperature: Temperature above 0 that flattens the distribution of scores. With ``Rank()`` at 0.1, the
            paper's, the level of the highest score has 99.9 % of P_S, at 1 about 15 % among 400 levels.
        staleness_weight: Share of probability given to staleness, in [0, 1].
        seed: Seed for the generator, whose state is part of :meth:`state_dict`. ``None`` seeds it from torch's
            global generator.

    Sampled keys:
        index: int64 ``[B]``.
        score: float64 ``[B]``.
        staleness: int64 ``[B]``, before the draw.
        timestamp: int64 ``[B]``, number of the episode that each level was drawn for.
        generation: int64 ``[B]``, number of levels each row held before.

    Raises:
        TypeError: An option of another kind.
        ValueError: A temperature that is not above 0, or a share outside of [0, 1].
        RuntimeError: At the draw, while no level has a score.

    Warns:
        UserWarning: Once, if of 1,000 replays more than one in five repeat the level of the replay before. This is as
            if fewer than 5 levels were drawn, although 20 or more have a score. Never with ``Greedy``.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from lightning_replay.levels import LevelWriter
        >>> sampler = LevelSampler(score_temperature=0.1, staleness_weight=0.0, seed=0)
        >>> levels = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(2), sampler=sampler, writer=LevelWriter(sampler), batch_size=1)
        >>> levels.extend(TensorDict({"level_id": [7, 8, 9], "score": [0.5, 0.4, 0.3]}, [3])).tolist()
        [0, 1, -1]
        >>> levels.sample()["level_id"].item()
        7
    """

    dropped: int  # declared again, since pyright reads the assignment below as another attribute of TorchRL's Sampler

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws levels for ``batch_size`` episodes, one by one, and returns rows ``[B]`` and the sampled keys."""
        rows, staleness, episodes = [], [], []
        for _ in range(batch_size):
            row = self.draw()
            rows.append(row)
            staleness.append(self.episodes - int(self._timestamps[row]))
            episodes.append(self.begin_episode(row))
        information = {
            "score": torch.from_numpy(self._scores[rows]),
            "staleness": torch.tensor(staleness, device="cpu"),
            "timestamp": torch.tensor(episodes, device="cpu"),
            "generation": torch.from_numpy(self._generations[rows]),
        }
        return torch.tensor(rows, device="cpu"), information

    def extend(self, index: Any) -> None:
        """Checks that the writer, a ``LevelWriter`` of this sampler, has set the scores of stored rows."""
        newest = int(torch.as_tensor(index, device="cpu").max()) if len(index) else -1
        if newest >= self._count:
            raise RuntimeError(f"row {newest} was stored without a score; the writer must be LevelWriter(sampler)")

    def add(self, index: int) -> None:
        """Checks one stored row, see :meth:`extend`."""
        self.extend([index])

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Does nothing: a changed row keeps its score."""

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None, generation: Any = None
    ) -> None:
        """Sets the scores of the levels that rows hold. Their staleness is unchanged.

        Args:
            index: Rows ``[N]``. Rows below 0, of refused levels, are skipped.
            priority: Scores ``[N]``, finite, of any sign.
            storage: ignored.
            generation: Generations ``[N]`` of the drawn rows. Scores of levels evicted since are dropped and
                counted in ``dropped``. Without it a score may go to another level that took the row.
        """
        rows: Sequence[int] = torch.as_tensor(index, device="cpu").reshape(-1).tolist()
        scores = torch.as_tensor(priority, dtype=torch.float64, device="cpu").reshape(-1).tolist()
        if len(rows) != len(scores) or not all(map(math.isfinite, scores)):
            raise ValueError(f"{len(rows)} rows got the scores {scores}; give one finite score per row")
        if rows and max(rows) >= self._count:
            raise IndexError(f"row {max(rows)} holds no level; {self._count} do")
        drawn = None if generation is None else torch.as_tensor(generation, device="cpu").reshape(-1).tolist()
        for n, (row, score) in enumerate(zip(rows, scores, strict=True)):
            if row >= 0 and drawn is not None and drawn[n] != self._generations[row]:
                self.dropped += 1
            elif row >= 0:
                self.put(row, score, int(self._timestamps[row]))

    def _empty(self) -> None:
        self.clear()


class LevelWriter(PartHooks, TensorDictRoundRobinWriter):
    """Stores levels with their scores. A stored level gets its new score in the row it has.

    A new level takes a free row. In a full storage it replaces the level of least replay probability if that level's
    score is lower than its own. Otherwise, it is refused, and its row is -1.

    Algorithm 2 of Jiang et al. 2021, "Prioritized Level Replay", appendix, https://arxiv.org/abs/2010.03934.

    Args:
        sampler: Sampler of the same buffer, which has the scores.

    ``extend`` takes rows, ``TensorDict [N]``, in the order in which the episodes ended. Further columns are stored
    unchanged. Later rows must have the same keys, shapes and dtypes.

    Stored keys:
        level_id: int64 ``[N]``, not negative.
        score: Floating ``[N]``, finite.
        timestamp: int64 ``[N]``, number of the episode in which the level was begun, at most the sampler's
            ``episodes``. If absent, each row is one more episode.

    Raises:
        ValueError: In ``extend``, ids, scores or timestamps that are missing, negative, NaN or of another shape, and
            data that does not fit what is stored. Nothing is stored then.
    """

    def __init__(self, sampler: LevelSampler) -> None:
        super().__init__()
        check_kind("sampler", sampler, LevelSampler, "the LevelSampler of the same buffer")
        self.sampler = sampler

    def register_storage(self, storage: Storage) -> None:
        """Attaches a storage. A ``Replay``'s storage, whose feedback is TD errors and no scores, is a ``TypeError``.

        :meta private:
        """
        if any(isinstance(buffer, BufferHooks) for buffer in attached_buffers(storage)):
            raise TypeError(
                "LevelSampler and LevelWriter keep scores of levels, and a Replay returns TD errors of rows; use "
                "torchrl.data.TensorDictReplayBuffer(storage=..., sampler=..., writer=...), or a LevelBuffer"
            )
        super().register_storage(storage)

    def extend(self, data: TensorDictBase) -> Tensor:
        """Stores levels ``[N]``, one after another, and returns the row of each, int64 ``[N]``, -1 if not stored."""
        level_ids = _column(data, "level_id", is_whole=True)
        scores = _column(data, "score", is_whole=False)
        timestamps = None if data.get("timestamp", None) is None else _column(data, "timestamp", is_whole=True)
        if level_ids and min(level_ids) < 0:
            raise ValueError(f"level ids must not be negative; got {min(level_ids)}")
        if not all(map(math.isfinite, scores)):
            raise ValueError(f"scores must be finite; got {next(one for one in scores if not math.isfinite(one))}")
        if timestamps and not 0 <= min(timestamps) <= max(timestamps) <= self.sampler.episodes:
            raise ValueError(f"timestamps are {timestamps}; give numbers of episodes, 0 to {self.sampler.episodes}")
        stored = data.select(*(key for key in sorted(data.keys()) if key not in ("score", "timestamp")))
        if len(self._storage) and len(data):
            _check_fits(self._storage.get(0), stored[0])
        newest: dict[int, int] = {}
        placed = []
        for n, (level_id, score) in enumerate(zip(level_ids, scores, strict=True)):
            episode = self.sampler.begin_episode() if timestamps is None else timestamps[n]
            placed.append(self.sampler.place(level_id, score, episode, int(self._storage.max_size))[0])
            newest[placed[n]] = n
        newest.pop(REFUSED, None)
        if newest:  # one write: of a row that was placed twice the later level
            rows, positions = torch.tensor(sorted(newest.items()), device="cpu").unbind(-1)
            self._storage.set(rows, stored[positions])
        # A level placed first may have been evicted by a later one.
        index = [row if self.sampler.row_of(level_ids[n]) == row else REFUSED for n, row in enumerate(placed)]
        return torch.tensor(index, dtype=torch.int64, device="cpu")

    def add(self, data: TensorDictBase) -> int:
        """Stores one level and returns its row, or -1."""
        return int(self.extend(data.unsqueeze(0)))

    def state_dict(self) -> dict[str, Any]:
        """Ids in the order of their rows, and counters."""
        return self.sampler.stored_levels()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, and refuses more levels than the storage has rows by a ``ValueError``."""
        count = len(state_dict["level_id"])
        if count > self._storage.max_size:
            raise ValueError(f"{count} levels are saved; the storage keeps {self._storage.max_size}")
        self.sampler.set_stored_levels(state_dict)

    def _empty(self, empty_write_count: bool = True) -> None:
        self.sampler.set_stored_levels(
            self.state_dict() | {"level_id": torch.zeros(0, dtype=torch.int64, device="cpu")}
        )


def _column(data: TensorDictBase, key: str, *, is_whole: bool) -> list[Any]:
    column = data.get(key, None)
    if column is None or column.numel() != data.shape[0] or (is_whole and column.is_floating_point()):
        found = "no" if column is None else f"a {column.dtype} {list(column.shape)}"
        accepted = "one whole number each, int64 [N]" if is_whole else "one number each, floating [N]"
        raise ValueError(f"rows of shape {list(data.shape)} have {found} {key!r}; give {accepted}")
    return list(column.reshape(-1).tolist())


def _check_fits(stored: TensorDictBase, given: TensorDictBase) -> None:
    before, now = (  # but for the buffer's own index
        {key: f"shape {list(leaf.shape)}, {leaf.dtype}" for key, leaf in row.items(True, True) if key != "index"}
        for row in (stored, given)
    )
    for key in sorted({*before, *now}, key=str):
        if before.get(key) != now.get(key):
            raise ValueError(
                f"levels are stored with {key!r} of {before.get(key, 'nothing')}, got {now.get(key, 'nothing')}; give "
                "the same keys, shapes and dtypes each time"
            )
