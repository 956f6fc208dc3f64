# SPDX-License-Identifier: Apache-2.0
"""Figures of a buffer by name: what is printed, shown as tiles, and logged during training."""

from __future__ import annotations

import numpy as np

from lightning_replay.inspection.contents import LevelContents, ReplayContents

_TOP = 0.1  # the likeliest tenth of the rows


def figures_of(contents: ReplayContents | LevelContents) -> dict[str, float]:
    """Returns plain numbers by path, as far as they are known.

    Of a replay ``size``, ``capacity``, ``fill``, ``age_mean``, ``age_max``; where the probabilities of a draw are known
    ``effective_sample_size`` and ``effective_share`` (of the rows); with priorities ``priority_mean``, ``priority_max``
    and ``draws_of_top_tenth``, the share of draws that go to the likeliest tenth of the rows; ``tables/NAME/fill`` and
    ``tables/NAME/share_drawn``; with retention ``refused`` and ``evicted``.

    Of levels ``levels``, ``score_mean``, ``score_max``, ``staleness_mean`` and ``effective_levels``.
    """
    return _of_levels(contents) if isinstance(contents, LevelContents) else _of_replay(contents)


def _of_replay(contents: ReplayContents) -> dict[str, float]:
    count = len(contents)
    figures: dict[str, float] = {"size": count, "capacity": contents.capacity, "fill": count / contents.capacity}
    ages, draws = contents.ages, contents.draws
    if ages is not None and count:
        figures |= {"age_mean": float(ages.mean()), "age_max": int(ages.max())}
    if draws is not None:
        effective = draws.effective_rows
        figures |= {"effective_sample_size": effective, "effective_share": effective / count}
        if draws.priority is not None:
            figures |= {"priority_mean": float(draws.priority.mean()), "priority_max": float(draws.priority.max())}
            figures["draws_of_top_tenth"] = draws.share_of_top(_TOP)
    drawn = max(sum(table.drawn for table in contents.tables), 1)
    for table in contents.tables:
        figures |= {f"tables/{table.name}/fill": table.fill, f"tables/{table.name}/share_drawn": table.drawn / drawn}
    if contents.retained is not None:
        figures |= {"refused": contents.retained.refused, "evicted": contents.retained.evicted}
    return figures


def _of_levels(contents: LevelContents) -> dict[str, float]:
    figures: dict[str, float] = {"levels": len(contents)}
    if len(contents):
        figures |= {"score_mean": float(contents.score.mean()), "score_max": float(contents.score.max())}
        figures["staleness_mean"] = float(contents.staleness.mean())
        if contents.effective_levels is not None:
            figures["effective_levels"] = contents.effective_levels
    return figures


def edges_of(values: np.ndarray, most: int = 40, *, has_log: bool = True) -> tuple[np.ndarray, bool]:
    """Returns the edges of a histogram, ``[P + 1]``, and whether they lie on a logarithmic scale.

    They do if all values are positive and the largest is more than 100 times the smallest. Whole numbers of a small
    range have a bar each.

    Args:
        values: ``[N]``, finite, N > 0.
        most: bars.
        has_log: whether the scale may be logarithmic.

    Example:
        >>> edges_of(np.array([0, 1, 2]))
        (array([-0.5,  0.5,  1.5,  2.5]), False)
    """
    low, high = float(values.min()), float(values.max())
    if has_log and low > 0 and high > 100 * low:
        return np.geomspace(low, high * (1 + 1e-9), most + 1), True
    if high <= low:
        width = max(abs(low) * 0.05, 0.5)
        return np.array([low - width, low + width]), False
    if values.dtype.kind in "iub" and high - low < most:
        return np.arange(low, high + 2) - 0.5, False
    return np.linspace(low, high, most + 1), False
