# SPDX-License-Identifier: Apache-2.0
"""Pictures of a buffer as arrays, for loggers that take images."""

from __future__ import annotations

import numpy as np

from lightning_replay.report.contents import ReplayContents
from lightning_replay.report.episodes import highest_episodes, shown_rows
from lightning_replay.report.levels import LevelContents

_STRIPS, _FRAMES = 3, 10  # episodes, and images of each
_GAP = 2  # pixels
_CELL = 12
_LEAST, _MOST = np.array([237.0, 244.0, 250.0]), np.array([0.0, 84.0, 140.0])  # from light to blue
_BACKGROUND = 128


def pictures_of(contents: ReplayContents | LevelContents) -> dict[str, np.ndarray]:
    """Returns pictures by name, uint8 ``[H, W, 3]`` each, as far as there are any.

    Of a replay with images ``film_strips``, a line for each of the three episodes of the highest priority, see
    :func:`~lightning_replay.report.episodes.highest_episodes`. Of levels ``score_by_level`` and ``staleness_by_level``,
    a cell for each level in the order of their ids, darker for a higher value.
    """
    if isinstance(contents, LevelContents):
        named = {"score_by_level": contents.score, "staleness_by_level": contents.staleness}
        return {name: heat_map(values) for name, values in named.items() if len(values)}
    ranked = None if contents.images is None else highest_episodes(contents, _STRIPS)
    if ranked is None or contents.images is None:
        return {}
    strips = []
    for episode in ranked.episodes:
        slots = contents.slots[episode.places[shown_rows(episode, _FRAMES)]]
        strips.append(_side_by_side(contents.images.of_rows(slots)))
    return {"film_strips": np.concatenate(strips)}


def heat_map(values: np.ndarray) -> np.ndarray:
    """Returns a grid of cells, uint8 ``[H, W, 3]``, row after row one for each of ``values``, ``[L]``, L > 0."""
    columns = int(np.ceil(np.sqrt(len(values) * 2.0)))
    rows = -(-len(values) // columns)
    low, high = float(values.min()), float(values.max())
    share = (values - low) / (high - low) if high > low else np.full(len(values), 0.5)
    colors = np.full((rows * columns, 3), float(_BACKGROUND))
    colors[: len(values)] = _LEAST + share[:, None] * (_MOST - _LEAST)
    grid = colors.reshape(rows, columns, 3).astype(np.uint8)
    return grid.repeat(_CELL, 0).repeat(_CELL, 1)


def _side_by_side(images: list[np.ndarray]) -> np.ndarray:
    """Returns up to ten images of equal shape in a line, with room for ten."""
    height, width, _ = images[0].shape
    line = np.full((height + _GAP, _FRAMES * (width + _GAP), 3), _BACKGROUND, np.uint8)
    for place, image in enumerate(images):
        line[:height, place * (width + _GAP) : place * (width + _GAP) + width] = image
    return line
