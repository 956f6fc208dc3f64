# SPDX-License-Identifier: Apache-2.0
"""Contents of a buffer, live or saved: rows and ages, draws, tables, episodes, retention, levels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_replay.inspection.rows import PackedColumns, RowImages, array_of, images_of
from lightning_replay.levels.prioritization import effective_number
from lightning_replay.options import check_kind
from lightning_replay.saving.chunks import ChunkedTensor
from lightning_replay.storage.rows import Key, RowLayout, frames_by_column

if TYPE_CHECKING:
    from lightning_replay.levels.selector import LevelSelector
    from lightning_replay.replay import Replay

_SHOWN_OPTIONS = ("batch_size", "n_steps", "discount", "prefetch")
_UNIFORM = ("UniformSampler", "RandomSampler")
_TOP = 0.1  # the likeliest tenth of the rows

REWARD: Key = ("next", "reward")
TERMINATED: Key = ("next", "terminated")
TRUNCATED: Key = ("next", "truncated")
DONE: Key = ("next", "done")
TRAJECTORY: Key = ("trajectory",)


class Table(NamedTuple):
    """A table of a buffer."""

    name: str
    slots: np.ndarray  # int64 [n], oldest first
    capacity: int
    appended: int  # entries that ever came
    share: float | None  # The share of a batch that the options fix; None if they fix no share.
    drawn: int  # Rows drawn so far.
    events: float | None = None  # Share of all steps that were its events; None for other tables.

    @property
    def fill(self) -> float:
        """Entries over the capacity."""
        return len(self.slots) / self.capacity


class Draws(NamedTuple):
    """Probabilities and priorities of stored rows, float64 ``[N]``."""

    probability: np.ndarray  # The next draw of one row, or of the first row of a pair; sums to 1.
    priority: np.ndarray | None = None  # Raw, without an exponent; None for samplers without priorities.
    default_priority: float | None = None  # New rows get this priority.
    of_tables: list[float] | None = None  # Shares that the probabilities presume; None without tables

    @property
    def effective_rows(self) -> float:
        """Effective sample size ``1 / Σ p²``: the number of equally likely rows that would repeat as often."""
        return effective_number(self.probability)

    def share_of_top(self, top: float) -> float:
        """Returns the share of all draws that go to the likeliest ``top`` of the rows, such as 0.1 for a tenth.

        Example:
            >>> round(Draws(np.array([0.7, 0.1, 0.1, 0.1])).share_of_top(0.25), 3)
            0.7
        """
        count = max(1, round(top * len(self.probability)))
        return float(np.partition(self.probability, -count)[-count:].sum())


class Retained(NamedTuple):
    """Rows kept by importance."""

    slots: np.ndarray  # int64 [N], ascending; other arrays [N] are of these rows
    arrival: np.ndarray  # int64 [N], the number of each among all rows that were offered
    priority: np.ndarray  # float32 [N], by which they are kept
    surprise: np.ndarray  # float32 [N], the latest, NaN where unknown
    newest_surprise: np.ndarray  # float32, of the newest rows offered, which a first-in-first-out buffer would hold
    offered: int
    refused: int
    evicted: int

    def kept_by_arrival(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the share of rows still stored, of at most ``most`` equal stretches of all rows offered.

        The first number of each stretch, with the end, int64 ``[P + 1]``, and the shares, float64 ``[P]``.
        """
        edges = np.unique(np.linspace(0, max(self.offered, 1), most + 1).round().astype(np.int64))
        return edges, np.histogram(self.arrival, edges)[0] / np.diff(edges)


@dataclass(frozen=True)
class ReplayContents:
    """A replay buffer at one moment."""

    capacity: int
    given: int | None  # rows ever given, refused ones included; None if the writer does not count them
    slots: np.ndarray  # int64 [N], ascending, that hold a row; other arrays [N] are of these rows
    written: np.ndarray | None  # int64 [N], the number of each row in the order given; None if there is no order
    draws: Draws | None  # The next batch; None for samplers whose rule is not known here.
    tables: list[Table]  # Ordered by their numbers.
    retained: Retained | None  # None for buffers that do not keep rows by importance.
    columns: Mapping[Key, np.ndarray]  # [N], read whole: reward, episode ends, trajectory, as far as they are stored
    layout: Mapping[str, str]  # dtype and shape by column
    images: Mapping[str, RowImages]  # Keys are names of columns.
    options: Mapping[str, str]  # parts of the buffer and their options, as text
    counters: Mapping[str, int] = field(default_factory=dict)  # rows given, batches drawn and the like

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def ages(self) -> np.ndarray | None:
        """Rows given after each row, int64 ``[N]``."""
        return None if self.written is None or self.given is None else self.given - 1 - self.written

    @property
    def ended(self) -> np.ndarray | None:
        """Whether each row is the last of its episode, bool ``[N]``, or ``None`` if that is not stored."""
        if DONE in self.columns:
            return self.columns[DONE]
        found = [self.columns[key] for key in (TERMINATED, TRUNCATED) if key in self.columns]
        return np.logical_or.reduce(found) if found else None

    def figures(self) -> dict[str, float]:
        """Returns plain numbers by path, as far as they are known.

        ``size``, ``capacity``, ``fill``, ``age_mean``, ``age_max``. If the probabilities of a draw are known, it
        contains ``effective_sample_size`` and ``effective_share`` (of the rows). With priorities, it contains
        ``priority_mean``, ``priority_max`` and ``draws_of_top_tenth``, the share of draws that go to the likeliest
        tenth of the rows. With tables, it contains ``tables/NAME/fill`` and ``tables/NAME/share_drawn``, and with
        retention ``refused`` and ``evicted``.
        """
        count = len(self)
        ages = self.ages
        draws = self.draws
        figures: dict[str, float] = {"size": count, "capacity": self.capacity, "fill": count / self.capacity}
        if ages is not None and count:
            figures |= {"age_mean": float(ages.mean()), "age_max": int(ages.max())}
        if draws is not None:
            effective = draws.effective_rows
            figures |= {"effective_sample_size": effective, "effective_share": effective / count}
            if draws.priority is not None:
                figures |= {"priority_mean": float(draws.priority.mean()), "priority_max": float(draws.priority.max())}
                figures["draws_of_top_tenth"] = draws.share_of_top(_TOP)
        drawn = max(sum(table.drawn for table in self.tables), 1)
        for table in self.tables:
            name = f"tables/{table.name}"
            figures |= {f"{name}/fill": table.fill, f"{name}/share_drawn": table.drawn / drawn}
        if self.retained is not None:
            figures |= {"refused": self.retained.refused, "evicted": self.retained.evicted}
        return figures


class LevelContents(NamedTuple):
    """The levels that have a score, ascending by id. Arrays are ``[L]``."""

    kind: str  # the class
    capacity: int | None
    level_ids: np.ndarray
    score: np.ndarray
    staleness: np.ndarray  # episodes since each level was played
    probability: np.ndarray  # The probability that each level is replayed next.
    counters: dict[str, int]  # episodes, replays and the like

    def __len__(self) -> int:
        return len(self.level_ids)

    @property
    def effective_levels(self) -> float | None:
        """Effective number of levels that are replayed, or ``None`` if no level can be replayed."""
        return effective_number(self.probability) if self.probability.sum() > 0 else None

    def figures(self) -> dict[str, float]:
        """Returns ``levels``, ``score_mean``, ``score_max``, ``staleness_mean`` and ``effective_levels``, as known."""
        figures: dict[str, float] = {"levels": len(self)}
        if len(self):
            figures |= {"score_mean": float(self.score.mean()), "score_max": float(self.score.max())}
            figures["staleness_mean"] = float(self.staleness.mean())
            if self.effective_levels is not None:
                figures["effective_levels"] = self.effective_levels
        return figures


def look_at(buffer: Replay | LevelSelector) -> ReplayContents | LevelContents:
    """Returns what a buffer in use holds. Other threads wait meanwhile, and the buffer is not changed.

    Reads rewards, ends, and trajectories of all rows once, O(N).

    Raises:
        TypeError: The buffer is neither a replay nor a level source.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from lightning_replay import recipes
        >>> replay = recipes.uniform(capacity=4, batch_size=2)
        >>> _ = replay.extend(TensorDict({"observation": torch.zeros(6, 3)}, [6]))
        >>> contents = look_at(replay)
        >>> contents.ages, contents.draws.effective_rows
        (array([1, 0, 3, 2]), 4.0)
    """
    # Imported here: a saved buffer is read without TorchRL, which takes seconds to import.
    from lightning_replay.levels.selector import LevelSelector
    from lightning_replay.replay import Replay
    from lightning_replay.saves import present_state
    from lightning_replay.saving.spec import describe

    if isinstance(buffer, LevelSelector):
        return levels_of(buffer.state_dict())
    check_kind("buffer", buffer, Replay, "a Replay or a level source, of a MixedReplay its online or offline")
    with present_state(buffer) as state:
        return contents_of(state, describe(buffer))


def contents_of(state: Mapping[str, Any], built_by: object) -> ReplayContents:
    """Returns what a buffer holds, from its ``state``, whose tensors may be in chunk files, and its description."""
    retained = _retained_of(state["writer"])
    slots, written, given = _rows_held(state, retained)
    arguments = _entry(built_by, "arguments")
    tables = _tables_of(state, arguments)
    columns, layout, packed = _columns_of(state["storage"], slots)
    return ReplayContents(
        capacity=int(state["built_from"]["capacity"]),
        given=given,
        slots=slots,
        written=written,
        draws=_draws_of(state, slots, tables),
        tables=tables,
        retained=retained,
        columns=columns,
        layout=layout,
        images={} if packed is None else images_of(state["storage"], packed),
        options=_options_of(state["built_from"], arguments),
        counters=_counters_of(state, given),
    )


def _entry(described: object, name: str) -> Mapping[str, Any]:
    """Returns a dictionary in a description, which a file may have in any shape, or an empty one in place of others."""
    entry = described.get(name) if isinstance(described, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def _options_of(built_from: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns the parts of a buffer and their options as text."""
    shown = {}
    # Only the name of the class is known of a part that was not built by its class.
    for part in ("storage", "sampler", "writer", "transform"):
        names = built_from.get("transforms" if part == "transform" else part)
        names = names if isinstance(names, list) else [names]
        if arguments.get(part) is not None:
            shown[part] = text_of(arguments[part])
        elif any(names):
            shown[part] = ", ".join(str(name) for name in names if name)
    return shown | {name: text_of(arguments[name]) for name in _SHOWN_OPTIONS if arguments.get(name) is not None}


def text_of(described: object) -> str:
    """Returns a described object as a call: ``PrioritizedSampler(capacity=100, priority_exponent=0.6)``.

    Options that are ``None`` are left out.

    Example:
        >>> text_of({"class": "lightning_replay.samplers.uniform:UniformSampler", "arguments": {"seed": None}})
        'UniformSampler()'
    """
    if isinstance(described, list):
        return f"[{', '.join(map(text_of, described))}]"
    if not isinstance(described, dict):
        return repr(described) if isinstance(described, str) else str(described)
    kind, content = next(iter(described.items()))
    name = str(content).rpartition(":")[2]
    if kind == "class":
        given = described.get("arguments", {}).items()
        return f"{name}({', '.join(f'{key}={text_of(one)}' for key, one in given if one is not None)})"
    if kind == "dict":
        return f"{{{', '.join(f'{key}: {text_of(one)}' for key, one in content.items())}}}"
    if kind == "tuple":
        return f"({', '.join(map(text_of, content))})"
    return name if kind == "import" else str(content)


def _counters_of(state: Mapping[str, Any], given: int | None) -> dict[str, int]:
    """Returns rows given, batches drawn, and TD errors returned, as far as the state has them, by name."""
    writer = state["writer"]
    feedback = state["feedback"]
    counters: dict[str, int] = {} if given is None else {"rows given": given}
    if "refused" in writer:
        counters |= {"rows refused": int(writer["refused"]), "rows evicted": int(writer["evicted"])}
    clocks = next((one["clocks"] for one in _samplers(state) if "clocks" in one), None)
    if clocks is not None:
        counters["batches drawn"] = int(clocks["draws"])
    if "received" in feedback:
        counters |= {
            "TD errors returned": int(feedback["received"]),
            "stale TD errors dropped": int(feedback["stale"]),
        }
    return counters


def _samplers(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the state of the sampler, and of the one that it draws its first rows from."""
    sampler: Any = state["sampler"]  # samplers of pairs keep the state of another under "base_sampler"
    while isinstance(sampler, Mapping):
        yield sampler
        sampler = sampler.get("base_sampler")


def _tables_of(state: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[Table]:
    """Returns the tables of a buffer in the order of their numbers, and none of a buffer without."""
    writer = state["writer"]
    if "tables" not in writer:
        return []
    saved = writer["tables"]
    named: list[tuple[str, int]] = [(str(name), int(capacity)) for name, capacity in state["built_from"]["tables"]]
    entries, appended, first = (array_of(saved[name]) for name in ("entries", "appended", "first"))
    capacities = [capacity for _, capacity in named]
    is_sound = min(capacities) > 0 and sum(capacities) == len(entries)
    if not (is_sound and ((first >= 0) & (first <= appended)).all()):  # arrays would be as long as the file says
        raise ValueError(f"the tables {named} do not have the entries that are saved; load another save")
    drawn = state["sampler"].get("rows_drawn", [])
    sampler = _entry(arguments.get("sampler"), "arguments")
    shares = _entry(sampler.get("table_shares"), "dict")  # absent where shares are not fixed
    fired = writer.get("fired", [])
    tested = int(writer.get("rows_tested", 0))
    counts_events = len(fired) == len(named) - 1 and tested > 0  # not with several kinds of events into one table
    tables = []
    offset = 0
    for number, (name, capacity) in enumerate(named):
        # a ring of slots: entry k lies at place k modulo the capacity
        oldest = max(int(first[number]), int(appended[number]) - capacity)
        slots = entries[offset + np.arange(oldest, int(appended[number])) % capacity]
        so_far = int(drawn[number]) if len(drawn) == len(named) else 0
        events = fired[number - 1] / tested if counts_events and number else None
        tables.append(Table(name, slots, capacity, int(appended[number]), shares.get(name), so_far, events))
        offset += capacity
    return tables


def _draws_of(state: Mapping[str, Any], slots: np.ndarray, tables: list[Table]) -> Draws | None:
    """Returns how rows are drawn, or ``None`` for an empty buffer and for samplers whose rule is not known here."""
    if not len(slots):
        return None
    *_, sampler = _samplers(state)
    if tables:
        return _draws_from_tables(sampler, slots, tables)
    if "tree" in sampler and "priority_exponent" in sampler:
        group_size = int(state["built_from"].get("group_size of GroupSampler", 1))
        leaves = array_of(sampler["tree"]["leaves"])[slots // group_size].astype(np.float64)
        total = leaves.sum()
        exponent = float(sampler["priority_exponent"])
        if not total > 0:
            return None
        if not exponent > 0:
            return Draws(leaves / total)
        # a leaf is (priority + offset) ** exponent, in float32
        priority = np.maximum(leaves ** (1 / exponent) - float(sampler["priority_offset"]), 0.0)
        return Draws(leaves / total, priority, _default_priority(sampler))
    if state["built_from"]["sampler"][-1] in _UNIFORM:
        return Draws(np.full(len(slots), 1 / len(slots)))
    return None


def _draws_from_tables(sampler: Mapping[str, Any], slots: np.ndarray, tables: list[Table]) -> Draws | None:
    """Returns probabilities over all tables: by fixed shares, else by the shares drawn so far."""
    if "rows_drawn" not in sampler:  # draws among all slots
        return None
    filled = np.array([len(table.slots) > 0 for table in tables], dtype=np.float64)
    is_fixed = all(table.share is not None for table in tables)
    shares = filled * [float(table.share or 0.0) if is_fixed else table.drawn for table in tables]
    shares = shares if shares.sum() > 0 else filled  # nothing was drawn yet
    shares /= max(shares.sum(), 1e-300)  # no table may have a row
    exponent = float(sampler["priority_exponent"])
    offset = float(sampler["priority_offset"])
    by_slot = None
    if exponent > 0 and len(sampler["priority"]):
        by_slot = array_of(sampler["priority"]).astype(np.float64)
    probability = np.zeros(len(slots))
    for table, share in zip(tables, shares.tolist(), strict=True):
        weight = np.ones(len(table.slots)) if by_slot is None else (by_slot[table.slots] + offset) ** exponent
        if share > 0 and weight.sum() > 0:
            probability[np.searchsorted(slots, table.slots)] += share * weight / weight.sum()
    if not probability.any():
        return None
    probability /= probability.sum()
    if by_slot is None:
        return Draws(probability, of_tables=shares.tolist())
    return Draws(probability, by_slot[slots], _default_priority(sampler), shares.tolist())


def _default_priority(sampler: Mapping[str, Any]) -> float:
    largest = float(sampler["max_priority"])
    return largest if largest > 0 else 1.0  # It is below 0 while no row has a priority.


def _retained_of(writer: Mapping[str, Any]) -> Retained | None:
    """Returns the rows of a :class:`~lightning_replay.writers.RetentionWriter` from its state, and ``None`` for other
    writers.
    """
    rows = writer.get("rows")
    if not isinstance(rows, Mapping) or "keys" not in rows:
        return None
    # Here: other buffers are read without numba.
    from lightning_replay.retention.eviction import ARRIVALS, priority_of

    keys = array_of(rows["keys"])  # the priority in the upper bits, the number of the arrival in the lower ones
    slots = np.delete(np.arange(len(keys)), rows["holes"])
    surprise = array_of(rows["surprise"])
    newest = array_of(writer["diagnostics"]["newest"]["surprise"])
    counts = (int(writer[name]) for name in ("offered", "refused", "evicted"))
    known = newest[~np.isnan(newest)]
    return Retained(slots, (keys & ARRIVALS)[slots], priority_of(keys[slots]), surprise[slots], known, *counts)


def _rows_held(state: Mapping[str, Any], retained: Retained | None) -> tuple[np.ndarray, np.ndarray | None, int | None]:
    """Returns the slots that hold a row, the number of each in the order given, and how many were given."""
    writer = state["writer"]
    storage = state["storage"]
    if retained is not None:
        return retained.slots, retained.arrival, retained.offered
    if "tables" in writer:
        tables = writer["tables"]
        slots = np.flatnonzero(array_of(tables["slots"]["references"]) > 0)
        return slots, array_of(tables["written_at"])[slots], int(tables["rows_written"])
    length = int(state["length"])
    if not 0 <= length <= _most_rows(storage):
        raise ValueError(f"{length:,} rows are claimed, more than are stored")
    slots = np.arange(length)
    if storage.get("live") is not None:  # rows left for others' frames
        slots = np.sort(array_of(storage["live"]))
    if "cursor" not in writer:
        return slots, None, None
    # The cursor is the slot of the next row: the one before it holds the newest
    capacity = int(state["built_from"]["capacity"])
    given = int(writer["write_count"])
    return slots, given - 1 - (int(writer["cursor"]) - 1 - slots) % capacity, given


def _most_rows(stored: object) -> int:
    """Returns the length of the longest tensor or list in the state of a storage."""
    if isinstance(stored, Mapping):
        return max(map(_most_rows, stored.values()), default=0)
    if isinstance(stored, list):
        return max(len(stored), *map(_most_rows, stored[:1]), 0)
    return int(stored.shape[0]) if isinstance(stored, Tensor | ChunkedTensor) and len(stored.shape) else 0


def _columns_of(
    storage: Mapping[str, Any], slots: np.ndarray
) -> tuple[dict[Key, np.ndarray], dict[str, str], PackedColumns | None]:
    """Returns the columns that are read whole, of the rows in ``slots``, a text for every column, and all of them."""
    described = storage.get("layout")
    if described is None or storage.get("rows") is None:
        return {}, {}, None
    packed = PackedColumns(storage["rows"], RowLayout.from_description(described))
    whole = packed.whole((REWARD, TERMINATED, TRUNCATED, DONE, TRAJECTORY))
    columns = {key: values[slots].reshape(len(slots), -1)[:, 0] for key, values in whole.items() if values[:1].size}
    layout = {".".join(leaf["key"]): f"{leaf['dtype']} {leaf['shape']}" for leaf in described}
    for key, frames, shape in frames_by_column(storage):
        size = f"{frames.shape[0] - 1:,} frames of {frames.shape[1]:,} bytes"  # frame 0 is none
        layout[".".join(key)] = f"stacks of uint8 {list(shape)}, {size}, each stored once"
    return columns, layout, packed


class StoredEpisode(NamedTuple):
    """The stored rows of an episode."""

    places: np.ndarray  # int64 [n], in ReplayContents.slots, in order of time
    rank: float  # the mean of what episodes are ranked by
    value: np.ndarray  # float64 [n], that of each row
    episode_return: float | None


class RankedEpisodes(NamedTuple):
    """Episodes in the order of ``by``, the highest first, and the ``total`` number of all."""

    by: str
    episodes: list[StoredEpisode]
    total: int


def highest_episodes(contents: ReplayContents, most: int) -> RankedEpisodes | None:
    """Returns the episodes whose stored rows have the highest mean priority.

    By retention priority if rows are drawn without priorities but kept by them, and by return if there is
    neither. Episodes are rows of one ``trajectory``. Without this column, they are rows between two ends in the order
    in which they were given. Of equal episodes the newer comes first. At most ``most``, or ``None`` if the buffer is
    empty, keeps no order of rows, or stores neither trajectories nor ends.
    """
    written = contents.written
    columns = contents.columns
    if written is None or not len(contents):
        return None
    trajectory = columns.get(TRAJECTORY)
    ended = contents.ended
    if trajectory is not None:
        in_order = np.lexsort((written, trajectory))
        starts = np.flatnonzero(np.diff(trajectory[in_order], prepend=trajectory[in_order[0]] - 1))
    elif ended is not None:
        in_order = np.argsort(written)
        starts = np.concatenate(([0], np.flatnonzero(ended[in_order[:-1]]) + 1))
    else:
        return None
    reward = columns.get(REWARD)
    draws = contents.draws
    if draws is not None and draws.priority is not None:
        by = "mean priority"
        value = draws.priority
    elif contents.retained is not None:
        by = "mean retention priority"
        value = contents.retained.priority.astype(np.float64)
    elif reward is not None:
        by = "return"
        value = reward.astype(np.float64)
    else:
        return None
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


def levels_of(state: Mapping[str, Any]) -> LevelContents:
    """Returns what a level source holds, from its ``state_dict()``. A source without scores has no levels."""
    kind = str(state["kind"])
    sampler = state.get("sampler")
    writer = state.get("writer")
    counters = {"episodes in flight": len(state["running"]["actors"])} if "running" in state else {}
    if not isinstance(sampler, Mapping) or not isinstance(writer, Mapping):
        none = np.zeros(0)
        return LevelContents(kind, state.get("capacity"), none.astype(np.int64), none, none, none, counters)
    level_ids = array_of(writer["level_id"])
    order = np.argsort(level_ids, kind="stable")
    episodes = int(sampler["episodes"])
    return LevelContents(
        kind=kind,
        capacity=int(state["capacity"]),
        level_ids=level_ids[order],
        score=array_of(sampler["score"])[order],
        staleness=(episodes - array_of(sampler["timestamp"]))[order],
        probability=array_of(sampler["probability"])[order],
        counters={
            "episodes": episodes,
            "episodes that replayed a level": int(state["replayed"]),
            **counters,
            "levels refused": int(writer["refused"]),
            "levels replaced": int(writer["replaced"]),
        },
    )
