# SPDX-License-Identifier: Apache-2.0
"""The cards of a page about a replay buffer: fill and age, draws, tables, timeline, retention, episodes."""

from __future__ import annotations

from base64 import b64encode
from html import escape

import numpy as np

from lightning_replay.report.cards import Card, legend, number, table
from lightning_replay.report.charts import concentration, histogram, lanes, short
from lightning_replay.report.contents import REWARD, TERMINATED, ReplayContents
from lightning_replay.report.episodes import RankedEpisodes, highest_episodes, shown_rows
from lightning_replay.report.figures import edges_of
from lightning_replay.report.images import RowImages, png_of

_EPISODES = 5  # listed
_STRIPS, _FRAMES = 3, 10  # episodes shown as film strips, and images of each
_PARTS = 120  # of the timeline
_GIVEN = "transitions given so far"


def cards_of(contents: ReplayContents) -> list[Card]:
    """Returns the cards of what a buffer holds; of an empty one those of its options."""
    if not len(contents):
        return []
    found = [
        _ages(contents),
        _rewards(contents),
        _priorities(contents),
        _concentration(contents),
        _retention_priorities(contents),
        _kept(contents),
        _tables(contents),
        _timeline(contents),
    ]
    ranked = highest_episodes(contents, _EPISODES)
    if ranked is not None:
        found += [_film_strips(contents, contents.images, ranked), _episodes(contents, ranked)]
    return [card for card in found if card is not None]


def _ages(contents: ReplayContents) -> Card | None:
    ages = contents.ages
    if ages is None:
        return None
    edges, is_log = edges_of(ages)
    counts, _ = np.histogram(ages, edges)
    line, note = None, ""
    if contents.draws is not None:
        drawn, _ = np.histogram(ages, edges, weights=contents.draws.probability)
        line = drawn
        note = legend("rows stored", "rows of the next draws, as expected")
    picture = histogram(
        edges,
        counts / len(ages),
        "age: transitions given since",
        "share of rows",
        "Histogram of the ages of the stored rows",
        line,
        is_log=is_log,
    )
    return Card("Age", picture, note)


def _rewards(contents: ReplayContents) -> Card | None:
    reward = contents.columns.get(REWARD)
    if reward is None:
        return None
    finite = reward[np.isfinite(reward)]
    if not len(finite):
        return None
    edges, _ = edges_of(finite, has_log=False)
    counts, _ = np.histogram(finite, edges)
    picture = histogram(edges, counts / len(finite), "reward", "share of rows", "Histogram of the stored rewards")
    return Card("Rewards", picture)


def _priorities(contents: ReplayContents) -> Card | None:
    draws = contents.draws
    if draws is None or draws.priority is None:
        return None
    positive = draws.priority[draws.priority > 0]
    if not len(positive):
        return None
    edges, is_log = edges_of(positive)
    counts, _ = np.histogram(positive, edges)
    picture = histogram(
        edges,
        counts / len(draws.priority),
        "priority, before its exponent" + (" (logarithmic)" if is_log else ""),
        "share of rows",
        "Histogram of the priorities",
        is_log=is_log,
    )
    notes = [f"New rows get {short(draws.default_priority or 1.0)}."]
    zero = len(draws.priority) - len(positive)
    if zero:
        notes.append(f"{zero:,} rows have priority 0 and are not in the picture.")
    return Card("Priorities", picture, escape(" ".join(notes)))


def _concentration(contents: ReplayContents) -> Card | None:
    draws = contents.draws
    if draws is None:
        return None
    count = len(draws.probability)
    picture = concentration(draws.probability, "draws", "rows")
    what = "priorities" if draws.priority is not None else "probabilities"
    notes = [
        f"Expected from the {what} at this moment; how often each row was drawn is not stored.",
        f"Effective sample size {draws.effective_rows:,.0f} of {count:,} rows: this many equally likely rows would "
        "repeat as often. The dashed line is a uniform draw.",
    ]
    if draws.of_tables is not None and any(one.share is None for one in contents.tables):
        notes.append("Tables have the shares that were drawn from them so far.")
    return Card("Expected draws", picture, escape(" ".join(notes)))


def _retention_priorities(contents: ReplayContents) -> Card | None:
    retained = contents.retained
    if retained is None:
        return None
    known = retained.surprise[~np.isnan(retained.surprise)]
    if not len(known):
        return Card(
            "Surprise",
            "",
            "No surprise is known yet: no row has had feedback, and there is no function for the first.",
        )
    both = np.sqrt(np.concatenate((known, retained.newest_surprise)))
    positive = both[both > 0]
    if not len(positive):
        return None
    edges, is_log = edges_of(positive)
    stored, _ = np.histogram(np.sqrt(known), edges)
    newest, _ = np.histogram(np.sqrt(retained.newest_surprise), edges)
    picture = histogram(
        edges,
        stored / max(len(known), 1),
        "root of the surprise: the magnitude of a TD error",
        "share of rows",
        "Histogram of the surprise of stored rows and of the newest",
        newest / max(len(retained.newest_surprise), 1),
        is_log=is_log,
    )
    return Card("Surprise", picture, legend("rows stored", "newest rows, as first in, first out would hold"))


def _kept(contents: ReplayContents) -> Card | None:
    retained = contents.retained
    if retained is None or not retained.offered:
        return None
    edges, kept = retained.kept_by_arrival(_PARTS // 2)
    picture = histogram(
        edges, kept, _GIVEN, "share still stored", "Share of rows still stored, by when they were offered"
    )
    left = retained.offered - len(contents)
    note = (
        f"{retained.offered:,} rows were offered; {left:,} of them are not stored: {retained.refused:,} were refused "
        f"at once and {retained.evicted:,} evicted later. Of those that left only these counts and times are known."
    )
    return Card("Who stayed", picture, escape(note))


def _tables(contents: ReplayContents) -> Card | None:
    if not contents.tables:
        return None
    drawn = sum(one.drawn for one in contents.tables)
    rows = []
    for one in contents.tables:
        share_drawn = one.drawn / drawn if drawn else None
        rows.append(
            [
                escape(one.name),
                number(f"{len(one.slots):,} of {one.capacity:,}", one.fill),
                "–" if one.share is None else number(f"{one.share:.1%}", one.share),
                "–" if share_drawn is None else number(f"{share_drawn:.1%}", share_drawn),
                f"{one.appended - len(one.slots):,}",
                "–" if one.events is None else f"{one.events:.2%}",
            ]
        )
    heads = [
        "table",
        "entries",
        "share of a batch",
        "share drawn so far",
        "entries that left",
        "steps that were events",
    ]
    note = "" if drawn else "Nothing was drawn yet."
    return Card("Tables", table(heads, rows), note, is_wide=True)


def _timeline(contents: ReplayContents) -> Card | None:
    written, given = contents.written, contents.given
    if written is None or not given:
        return None
    first = 0 if contents.retained is not None else int(written.min())
    edges = np.unique(np.linspace(first, given, _PARTS + 1).round().astype(np.int64))
    if len(edges) < 2:
        return None
    there = np.diff(edges)
    shares: dict[str, np.ndarray] = {}
    for one in contents.tables:
        counts, _ = np.histogram(written[contents.places_of(one.slots)], edges)
        shares[one.name] = counts / there
    if not shares:
        shares["stored"] = np.histogram(written, edges)[0] / there
    ended, terminated = contents.ended, contents.columns.get(TERMINATED)
    notes = ["Stronger colour: a larger share of the transitions of that time is stored (in a table)."]
    if ended is not None:
        notes.append("Of ends, rewards above and below 0 the strongest part has the most.")
        if terminated is not None:
            shares["terminated"] = _relative(written[terminated], edges)
            ended = ended & ~terminated
            shares["truncated"] = _relative(written[ended], edges)
        else:
            shares["episode ends"] = _relative(written[ended], edges)
    reward = contents.columns.get(REWARD)
    if reward is not None and 0 < np.count_nonzero(reward) < 0.5 * len(reward):  # else every part has some
        shares["reward > 0"], shares["reward < 0"] = (
            _relative(written[which], edges) for which in (reward > 0, reward < 0)
        )
    kept = {name: values for name, values in shares.items() if values.any()}
    picture = lanes(edges, kept, _GIVEN, "Timeline of the stored rows")
    return Card("Timeline", picture, escape(" ".join(notes)), is_wide=True)


def _relative(written: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns how many rows were written in each part, over the most of a part."""
    counts, _ = np.histogram(written, edges)
    return counts / max(int(counts.max()), 1)


def _episodes(contents: ReplayContents, ranked: RankedEpisodes) -> Card:
    assert contents.written is not None and contents.given is not None
    rows = []
    for one in ranked.episodes:
        written = contents.written[one.places]
        rows.append(
            [
                f"{int(written.min()):,} to {int(written.max()):,}",
                f"{len(one.places):,}",
                *([] if ranked.by == "return" else [short(one.rank)]),
                "–" if one.episode_return is None else short(one.episode_return),
                f"{contents.given - 1 - int(written.max()):,}",
            ]
        )
    ranks = [] if ranked.by == "return" else [ranked.by]
    heads = ["number of its rows", "rows stored", *ranks, "sum of their rewards", "age of the last"]
    note = f"The first of {ranked.total:,} episodes, ranked by {ranked.by}; of an episode, the rows that are stored."
    return Card(_title(ranked), table(heads, rows), escape(note), is_wide=True)


def _title(ranked: RankedEpisodes) -> str:
    return "Episodes of the highest return" if ranked.by == "return" else f"Episodes of the highest {ranked.by}"


def _film_strips(contents: ReplayContents, images: RowImages | None, ranked: RankedEpisodes) -> Card | None:
    if images is None or contents.written is None:
        return None
    strips = []
    for one in ranked.episodes[:_STRIPS]:
        shown = shown_rows(one, _FRAMES)
        highest = int(np.argmax(one.value))
        figures = []
        for row, image in zip(shown.tolist(), images.of_rows(contents.slots[one.places[shown]]), strict=True):
            source = b64encode(png_of(image)).decode()
            mark = ' class="highest"' if row == highest else ""
            step = f"row {row + 1} of {len(one.places)}"
            figures.append(
                f'<figure{mark}><img alt="{step}" src="data:image/png;base64,{source}">'
                f"<figcaption>{row + 1}: {short(float(one.value[row]))}</figcaption></figure>"
            )
        strips.append(f'<div class="strip">{"".join(figures)}</div>')
    what = "reward" if ranked.by == "return" else ranked.by.removeprefix("mean ")
    note = f"A line for each episode; below an image the number of its row and the {what}. The highest is framed."
    return Card(f"Film strips: {_title(ranked).lower()}", "".join(strips), escape(note), is_wide=True)
