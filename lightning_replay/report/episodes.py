# SPDX-License-Identifier: Apache-2.0
"""Stored rows as episodes, and those of the highest priority."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_replay.report.contents import REWARD, TRAJECTORY, ReplayContents


class StoredEpisode(NamedTuple):
    """The stored rows of an episode: places in ``ReplayContents.slots``, int64 ``[n]``, in order of time.

    ``rank`` is the mean of what episodes are ranked by, ``value`` that of each row, float64 ``[n]``.
    """

    places: np.ndarray
    rank: float
    value: np.ndarray
    episode_return: float | None


class RankedEpisodes(NamedTuple):
    """Episodes in the order of ``by``, the highest first, and the ``total`` number of all."""

    by: str
    episodes: list[StoredEpisode]
    total: int


def highest_episodes(contents: ReplayContents, most: int) -> RankedEpisodes | None:
    """Returns the episodes whose stored rows have the highest mean priority.

    By retention priority where rows are drawn without priorities but kept by them, and by return where there is
    neither. Episodes are rows of one ``trajectory``; without this column, rows between two ends in the order in which
    they were given. Of equal episodes the newer comes first.

    Args:
        contents: of a buffer.
        most: number of episodes returned.

    Returns:
        ``None`` if the buffer is empty, keeps no order of rows, or stores neither trajectories nor ends.
    """
    written, columns = contents.written, contents.columns
    if written is None or not len(contents):
        return None
    trajectory, ended = columns.get(TRAJECTORY), contents.ended
    if trajectory is not None:
        in_order = np.lexsort((written, trajectory))
        starts = np.flatnonzero(np.diff(trajectory[in_order], prepend=trajectory[in_order[0]] - 1))
    elif ended is not None:
        in_order = np.argsort(written)
        starts = np.concatenate(([0], np.flatnonzero(ended[in_order[:-1]]) + 1))
    else:
        return None
    reward = columns.get(REWARD)
    ranked = _ranked_by(contents, reward)
    if ranked is None:
        return None
    by, value = ranked
    lengths = np.diff(starts, append=len(in_order))
    sums = np.add.reduceat(value[in_order], starts)
    rank = sums if by == "return" else sums / lengths
    newest = np.maximum.reduceat(written[in_order], starts)
    returns = None if reward is None else np.add.reduceat(reward[in_order].astype(np.float64), starts)
    episodes = []
    for number in np.lexsort((-newest, -rank))[:most].tolist():
        places = in_order[starts[number] : starts[number] + lengths[number]]
        total = None if returns is None else float(returns[number])
        episodes.append(StoredEpisode(places, float(rank[number]), value[places], total))
    return RankedEpisodes(by, episodes, len(starts))


def shown_rows(episode: StoredEpisode, most: int) -> np.ndarray:
    """Returns which rows of an episode to show, int64 ``[<= most]`` ascending: the highest and others evenly apart."""
    count = len(episode.places)
    chosen = np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(np.int64))
    highest = int(np.argmax(episode.value))
    chosen[int(np.argmin(np.abs(chosen - highest)))] = highest
    return chosen


def _ranked_by(contents: ReplayContents, reward: np.ndarray | None) -> tuple[str, np.ndarray] | None:
    draws = contents.draws
    if draws is not None and draws.priority is not None:
        return "mean priority", draws.priority
    if contents.retained is not None:
        return "mean retention priority", contents.retained.priority.astype(np.float64)
    return None if reward is None else ("return", reward.astype(np.float64))
