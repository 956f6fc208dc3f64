# SPDX-License-Identifier: Apache-2.0
"""The cards of a page about levels: heat maps of scores, staleness and probabilities."""

from __future__ import annotations

from html import escape

import numpy as np

from lightning_replay.report.cards import Card, table
from lightning_replay.report.charts import cells, concentration, histogram, short
from lightning_replay.report.figures import edges_of
from lightning_replay.report.levels import LevelContents

_MOST_CELLS = 1_200  # beyond that a cell has several levels
_LISTED = 10
_MOST_DECADES = 6  # of a logarithmic scale of colours


def cards_of(contents: LevelContents) -> list[Card]:
    """Returns the cards of what a level buffer holds."""
    if not len(contents):
        return []
    probability = contents.probability
    maps = [
        Card("Scores by level", *_heat_map(contents, contents.score, "score")),
        Card("Staleness by level", *_heat_map(contents, contents.staleness, "staleness, in episodes")),
    ]
    if probability is not None:
        # one level may have nearly all of it
        clipped = np.log10(probability.clip(min=probability.max() * 10.0**-_MOST_DECADES))
        maps.append(
            Card(
                "Replay probability by level", *_heat_map(contents, clipped, "logarithm of the probability to base 10")
            )
        )
        maps.append(_concentration(contents, probability))
    edges, is_log = edges_of(contents.score)
    counts, _ = np.histogram(contents.score, edges)
    picture = histogram(
        edges, counts, "score" + (" (logarithmic)" if is_log else ""), "levels", "Histogram of scores", is_log=is_log
    )
    return [*maps, Card("Scores", picture), _listed(contents)]


def _heat_map(contents: LevelContents, values: np.ndarray, what: str) -> tuple[str, str]:
    """Returns a heat map over the levels in the order of their ids, and a note."""
    ids, count = contents.level_ids, len(contents)
    groups = np.array_split(np.arange(count), min(count, _MOST_CELLS))
    means = np.array([values[group].mean() for group in groups])
    names = [
        f"level {ids[group[0]]}" if len(group) == 1 else f"levels {ids[group[0]]} to {ids[group[-1]]}"
        for group in groups
    ]
    each = "A cell for each level" if len(groups) == count else f"A cell for about {count / len(groups):.0f} levels"
    values_shown = f"{what} from {short(means.min())} to {short(means.max())}"
    note = f"{each} with a score, ascending by id: {values_shown}, stronger colour is more."
    return cells(means, names, f"Heat map of levels: {what}"), escape(note)


def _concentration(contents: LevelContents, probability: np.ndarray) -> Card:
    count = len(contents)
    picture = concentration(probability, "replays", "levels")
    effective = contents.effective_levels
    note = "" if effective is None else f"As if {effective:,.1f} of {count:,} levels were equally likely."
    return Card("Expected replays", picture, escape(note))


def _listed(contents: LevelContents) -> Card:
    by = contents.score if contents.probability is None else contents.probability
    rows = []
    for place in np.argsort(-by, kind="stable")[:_LISTED].tolist():
        likely = [] if contents.probability is None else [f"{contents.probability[place]:.2%}"]
        rows.append(
            [
                f"{contents.level_ids[place]}",
                short(float(contents.score[place])),
                f"{contents.staleness[place]:,}",
                *likely,
            ]
        )
    heads = ["level", "score", "staleness", *([] if contents.probability is None else ["replay probability"])]
    title = "Levels of the highest score" if contents.probability is None else "Likeliest levels"
    return Card(title, table(heads, rows))
