# SPDX-License-Identifier: Apache-2.0
"""Every part in TorchRL's buffers and storages: what works there as in a ``Replay``, and what is refused and why.

``python -m tests.torchrl_parts`` writes the table into ``docs/torchrl.md``. ``python -m tests.torchrl_parts NAME`` runs
the cells of one buffer, as for ``TensorDictPrioritizedReplayBuffer`` in the environment of ``make bench-torchrl``.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

from lightning_replay import PackedStorage, Replay
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.levels import LevelSampler, LevelWriter
from lightning_replay.samplers import (
    ContinuousCorrectionSampler,
    ContinuousTransitionSampler,
    GroupSampler,
    NeighborhoodMixupSampler,
    PrioritizedSampler,
    RandomPairSampler,
    RecencySampler,
    ReshuffledSampler,
    ReverseSweepSampler,
    ScheduledSampler,
    SequenceSampler,
    TableShares,
    UniformSampler,
)
from lightning_replay.schedulers import UniformTasks
from lightning_replay.transforms import (
    GaussianNoise,
    ManhattanDistance,
    MixMinibatch,
    MixPairs,
    MixStates,
    NStepTransitions,
    PotentialShaping,
    RelabelGoals,
    UCBAugmentation,
)
from lightning_replay.writers import (
    EventTableWriter,
    FirstInFirstOutWriter,
    OldestLeaves,
    OnPolicynessOnly,
    RetentionWriter,
    SurpriseOnly,
    TaskTableWriter,
)
from tests.goal_steps import goal_rows, reached
from tests.transitions import numbered_steps

CAPACITY, BATCH, ROUNDS = 48, 8, 6
PAGE = Path(__file__).resolve().parents[1] / "docs" / "torchrl.md"
BEGIN = "<!-- The table begins here; python -m tests.torchrl_parts writes it. -->\n"
END = "<!-- The table ends here. -->\n"
STORAGES: dict[str, Callable[[int], Any]] = {
    "PackedStorage": PackedStorage,
    "LazyTensorStorage": LazyTensorStorage,
    "LazyMemmapStorage": LazyMemmapStorage,
    "ListStorage": ListStorage,
}
BUFFERS: dict[str, Any] = {
    "Replay": Replay,
    "ReplayBuffer": ReplayBuffer,
    "TensorDictReplayBuffer": TensorDictReplayBuffer,
    "TensorDictPrioritizedReplayBuffer": TensorDictPrioritizedReplayBuffer,
}
PRIORITIZED = "TensorDictPrioritizedReplayBuffer"


def steps_of(round_: int) -> TensorDict:
    """Twenty steps of two environments, of two tasks; an episode ends every seventh step."""
    steps = numbered_steps(20 * round_, 20, done_every=7)
    return steps.set("task", steps["observation"][:, 0].long() % 2)


def events() -> EventTableWriter:
    table = EventTable("third", reward_at_least(100.0), history_length=3, capacity=8)
    return EventTableWriter(24, [table], max_trajectories=2)


def shares(priority_exponent: float = 0.6) -> TableShares:
    return TableShares({"default": 0.5, "third": 0.5}, priority_exponent=priority_exponent, seed=3)


def prioritized() -> PrioritizedSampler:
    return PrioritizedSampler(CAPACITY, priority_exponent=0.6, seed=3)


@dataclass(frozen=True)
class Part:
    """A part and those that it needs."""

    shown: str
    sampler: Callable[[], Any] | None = None  #: Uniform in a ``Replay``, and TorchRL's own elsewhere, where ``None``.
    writer: Callable[[], Any] = FirstInFirstOutWriter
    transform: Callable[[], Any] | None = None
    rows: Callable[[int], TensorDict] = steps_of
    shows: Any = "observation"  #: A column of batches that is compared, beside the reward.
    refused: Mapping[str, str] = field(default_factory=dict)  #: Entries of ``REASONS`` by buffer.
    reads_columns: bool = False  #: Whether a ``ListStorage`` is refused, too.


def sampling(sampler: Callable[[], Any], reads_columns: bool = False) -> Part:
    return Part(
        f"`{type(sampler()).__name__}`", sampler, refused={PRIORITIZED: "own sampler"}, reads_columns=reads_columns
    )


def changing(transform: Callable[[], Any], **others: Any) -> Part:
    return Part(f"`{type(transform()).__name__}`", **{"sampler": uniform, **others}, transform=transform)


def tables(shown: str, sampler: Callable[[], Any], writer: Callable[[], Any], **others: Any) -> Part:
    return Part(shown, sampler, writer, refused={PRIORITIZED: "tables"}, **others)


def retention(shown: str, sampler: Callable[[], Any] | None, rule: Callable[[], Any], **refused: str) -> Part:
    refusing = {PRIORITIZED: "feedback", **refused} if rule().learns else refused
    return Part(shown, sampler, lambda: RetentionWriter(rule(), seed=4), refused=refusing)


def uniform() -> UniformSampler:
    return UniformSampler(seed=3)


def images(round_: int) -> TensorDict:
    steps = steps_of(round_)
    for key in ("observation", ("next", "observation")):
        steps[key] = (steps[key][:, :1] % 1.0).reshape(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone()
    return steps


def goals(round_: int) -> TensorDict:
    return goal_rows(range(20 * round_, 20 * round_ + 20), done=True)


PARTS: dict[str, Part] = {
    "uniform": sampling(uniform),
    "prioritized": sampling(prioritized),
    "recency": sampling(lambda: RecencySampler(CAPACITY, {"half_life": 20}, seed=3)),
    "reshuffled": sampling(lambda: ReshuffledSampler(seed=3)),
    "groups": sampling(lambda: GroupSampler(2, base_sampler=PrioritizedSampler(CAPACITY // 2, seed=3), seed=4)),
    "reverse sweeps": sampling(lambda: ReverseSweepSampler(reward_at_least(0.0), seed=3), True),
    "neighbors": sampling(lambda: NeighborhoodMixupSampler(3, base_sampler=prioritized(), seed=4), True),
    "random pairs": sampling(lambda: RandomPairSampler(base_sampler=prioritized(), seed=4), True),
    "consecutive pairs": sampling(lambda: ContinuousTransitionSampler(base_sampler=prioritized(), seed=4), True),
    "sequences": sampling(lambda: SequenceSampler(2, priority_exponent=0.6, seed=3), True),
    "first in, first out": Part("`FirstInFirstOutWriter`", uniform),
    "event tables": tables("`EventTableWriter` with `TableShares`", shares, events),
    "pairs of event tables": tables(
        "`EventTableWriter` with `TableShares` of pairs",
        lambda: RandomPairSampler(base_sampler=shares(), seed=4),
        events,
        reads_columns=True,
    ),
    "corrected event tables": tables(
        "`EventTableWriter` with `ContinuousCorrectionSampler`",
        lambda: ContinuousCorrectionSampler(0.5, seed=3),
        events,
    ),
    "event tables alone": Part(
        "`EventTableWriter` with another sampler", prioritized, events, refused=dict.fromkeys(BUFFERS, "tables")
    ),
    "tasks": tables(
        "`TaskTableWriter` with `ScheduledSampler`",
        lambda: ScheduledSampler(["even", "odd"], UniformTasks(), priority_exponent=0.6, seed=3),
        lambda: TaskTableWriter(["even", "odd"], 20),
    ),
    "retention": retention("`RetentionWriter` with `PrioritizedSampler`", prioritized, SurpriseOnly),
    "uniform retention": retention(
        "`RetentionWriter` with `UniformSampler`", uniform, SurpriseOnly, TensorDictReplayBuffer="feedback"
    ),
    "retention alone": retention(
        "`RetentionWriter` with TorchRL's sampler",
        None,
        SurpriseOnly,
        ReplayBuffer="feedback",
        TensorDictReplayBuffer="feedback",
    ),
    "retention by actions": retention(
        "`RetentionWriter` with `OnPolicynessOnly`",
        prioritized,
        OnPolicynessOnly,
        ReplayBuffer="actions",
        TensorDictReplayBuffer="actions",
    ),
    "retention without feedback": retention("`OldestLeaves` in a `RetentionWriter`", uniform, OldestLeaves),
    "levels": Part("`LevelWriter` with `LevelSampler`", refused={"Replay": "levels", PRIORITIZED: "own sampler"}),
    "mixed pairs": changing(
        lambda: MixPairs(seed=5),
        sampler=lambda: RandomPairSampler(seed=4),
        refused={PRIORITIZED: "pairs"},
        reads_columns=True,
    ),
    "mixed states": changing(lambda: MixStates(seed=5)),
    "mixed minibatches": changing(lambda: MixMinibatch(seed=5)),
    "noise": changing(lambda: GaussianNoise(seed=5)),
    "augmentation": changing(lambda: UCBAugmentation(["flip"], seed=5), rows=images),
    "shaping": changing(lambda: PotentialShaping(ManhattanDistance([0.0, 0.0, 0.0]), discount=0.9)),
    "goals": changing(
        lambda: RelabelGoals(reward=reached, seed=5),
        rows=goals,
        shows=("observation", "desired_goal"),
        refused=dict.fromkeys(("ReplayBuffer", "TensorDictReplayBuffer", PRIORITIZED), "links"),
        reads_columns=True,
    ),
    "formed returns": changing(lambda: NStepTransitions(3, 0.9)),
}


def errors_of(index: torch.Tensor) -> torch.Tensor:
    """Returns a TD error for each drawn row, ``[B]``, by its slot, or that of the first row of a pair or sequence."""
    return index.reshape(BATCH, -1)[:, 0] * 7 % 5 + 0.5


def built(buffer: str, part: Part, storage: str, capacity: int = CAPACITY) -> Any:
    """Returns an empty buffer with the part."""
    torch.manual_seed(0)  # The samplers of TorchRL draw from torch's generator.
    others = {"storage": STORAGES[storage](capacity), "batch_size": BATCH}
    if part.transform is not None:
        others["transform"] = part.transform()
    if buffer == PRIORITIZED and part.refused.get(buffer) != "own sampler":
        replay = BUFFERS[buffer](alpha=0.6, beta=0.4, **others)
        replay.set_writer(part.writer())
        return replay
    if part.sampler is not None:
        others["sampler"] = part.sampler()
    return BUFFERS[buffer](writer=part.writer(), **others)


def played(buffer: Any, part: Part, rounds: range = range(ROUNDS)) -> list[Any]:
    """Stores rows, draws, and gives feedback; returns the slots that were written, the draws, and their weights."""
    record: list[Any] = []
    is_own = not isinstance(buffer, TensorDictPrioritizedReplayBuffer)
    for number in rounds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A condition is nearly always true; the slots wrap.
            written = buffer.extend(part.rows(number))
        if isinstance(buffer, Replay):
            written = buffer.last_insertion.slots
        record.append([slot for slot in written.tolist() if slot >= 0][-CAPACITY:])
        batch, info = buffer.sample(return_info=True)
        index = torch.as_tensor(info["index"])
        errors = errors_of(index)
        if is_own:
            read = [batch[key].tolist() for key in (part.shows, ("next", "reward"))]
            weights = torch.as_tensor(info.get("priority_weight", torch.ones(BATCH)))
            record.append((index.tolist(), weights.tolist(), read))
        give(buffer, batch, index, errors)
    return record


def give(buffer: Any, batch: TensorDict, index: torch.Tensor, errors: torch.Tensor) -> None:
    """Returns TD errors of a batch by the way of its buffer."""
    if isinstance(buffer, TensorDictReplayBuffer) and not isinstance(buffer, Replay):
        errors = errors.reshape(BATCH, *[1] * (batch.ndim - 1)).expand(batch.shape).clone()
        buffer.update_tensordict_priority(batch.set("td_error", errors))
    elif isinstance(buffer, Replay):
        is_sequence = buffer.sequence_length is not None
        errors = errors.unsqueeze(1).expand(index.shape) if is_sequence else errors
        signals = {"action_values": torch.zeros(BATCH, 2), "action": torch.zeros(BATCH, dtype=torch.int64)}
        buffer.update_priority(index, errors, **signals)
    else:
        is_sequence = getattr(buffer.sampler, "sequence_length", None) is not None
        buffer.update_priority(index[:, 0] if is_sequence else index, errors)


def levels_drawn(buffer: str, storage: str) -> list[int]:
    """Stores three levels and draws by scores; returns the levels."""
    sampler = LevelSampler(score_temperature=0.1, staleness_weight=0.0, seed=0)
    others = {"storage": STORAGES[storage](4), "batch_size": 2}
    levels = BUFFERS[buffer](sampler=sampler, writer=LevelWriter(sampler), **others)
    levels.extend(TensorDict({"level_id": [7, 8, 9], "score": [0.5, 0.5, 0.5]}, [3]))
    levels.update_priority(torch.tensor([0, 1, 2]), torch.tensor([0.0, 9.0, 0.0]))
    drawn: list[int] = levels.sample()["level_id"].tolist()
    return drawn


def outcome(buffer: str, name: str, storage: str) -> Any:
    """Returns what was played with a part in a buffer over a storage, or the error that refused it."""
    try:
        if name == "levels":
            return levels_drawn(buffer, storage)
        return played(built(buffer, PARTS[name], storage), PARTS[name])
    except (TypeError, ValueError, RuntimeError) as error:
        return error


REASONS: dict[str, tuple[str, str]] = {
    "columns": (
        "reads columns of rows, and a ListStorage has none|columns cannot be read from a ListStorage",
        "Not with a `ListStorage`, which has no columns.",
    ),
    "own sampler": (
        "unexpected keyword argument '(sampler|writer)'",
        "This buffer builds its own sampler. Use a `TensorDictReplayBuffer`.",
    ),
    "tables": (
        "which would draw slots that no table of .* holds any more; use TableShares or ScheduledSampler",
        "The sampler would draw slots that no table holds. Use `TableShares`, `ScheduledSampler`, or "
        "`ContinuousCorrectionSampler`, in any buffer but the last one.",
    ),
    "feedback": (
        "decides by the TD errors of drawn rows which rows stay, and .* passes it none; use",
        "No TD error would reach the writer. Use a `ReplayBuffer` with any sampler of this library, or a "
        "`TensorDictReplayBuffer` with this library's `PrioritizedSampler`, which draws uniformly if "
        "`priority_exponent=0`.",
    ),
    "actions": (
        "learns from action_values and action, and .* passes TD errors only; use",
        "The rule needs action values. Use a `Replay`, or another rule.",
    ),
    "links": (
        "reads stored rows and the links of their episodes, which only a lightning_replay.Replay gives it",
        "It follows episodes. Use a `Replay`.",
    ),
    "pairs": (
        "mixes pairs, a batch of size .B, 2.. Use a sampler that draws pairs",
        "It mixes pairs, and this buffer draws single rows. Use a `TensorDictReplayBuffer` with a sampler of pairs.",
    ),
    "levels": (
        "keep scores of levels, and a Replay returns TD errors of rows; use",
        "A `Replay` passes on TD errors, and this sampler needs scores of levels. Use a `TensorDictReplayBuffer`, or a "
        "`LevelBuffer`.",
    ),
}


def refusal(buffer: str, name: str, storage: str) -> str | None:
    """Returns the entry of ``REASONS`` for which the table refuses a part in a buffer over a storage."""
    part = PARTS[name]
    return part.refused.get(buffer) or ("columns" if part.reads_columns and storage == "ListStorage" else None)


def reference(name: str) -> Any:
    """Returns what was played with a part in a ``Replay`` over a ``PackedStorage``; drawn levels for those."""
    return [8, 8] if name == "levels" else outcome("Replay", name, "PackedStorage")


def difference(buffer: str, name: str, storage: str, expected: Any) -> str | None:
    """Returns how a cell differs from the table; ``expected`` is the reference."""
    found, reason = outcome(buffer, name, storage), refusal(buffer, name, storage)
    if reason is not None:
        fits = isinstance(found, Exception) and re.search(REASONS[reason][0], str(found))
        return None if fits else f"{name} in {buffer} over {storage}: not refused as {reason!r}, {found!r}"
    if buffer == PRIORITIZED and not isinstance(expected, Exception):
        expected = expected[::2]  # It draws by a sampler of TorchRL's.
    return None if found == expected else f"{name} in {buffer} over {storage}: not as in a Replay, {found!r}"


def table() -> str:
    """Returns the table of the page, with the reasons below it. Parts with the same cells share a row."""
    numbers = {reason: place for place, reason in enumerate(REASONS, 1)}
    lines = ["| part | " + " | ".join(f"`{buffer}`" for buffer in BUFFERS) + " |", "|---" * 5 + "|"]
    parts_by_cells: dict[tuple[str, ...], list[str]] = {}
    for name, part in PARTS.items():
        cells = []
        for buffer in BUFFERS:
            by_storage = {storage: refusal(buffer, name, storage) for storage in STORAGES}
            works = [storage for storage, reason in by_storage.items() if reason is None]
            refused = {numbers[reason] for reason in by_storage.values() if reason is not None}
            cells.append("works" if not refused else f"{'works' if works else 'no'} ({min(refused)})")
        parts_by_cells.setdefault(tuple(cells), []).append(part.shown)
    lines += [f"| {', '.join(parts)} | " + " | ".join(cells) + " |" for cells, parts in parts_by_cells.items()]
    reasons = [f"{numbers[reason]}. {sentence}" for reason, (_, sentence) in REASONS.items()]
    return "\n".join([*lines, "", *reasons, ""])


def table_on_the_page() -> str:
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    if sys.argv[1:]:
        expected = {name: reference(name) for name in PARTS}
        found = [difference(sys.argv[1], name, storage, expected[name]) for name in PARTS for storage in STORAGES]
        print("\n".join(filter(None, found)) or f"{sys.argv[1]}: {len(found)} cells as in the table")
        sys.exit(any(found))
    before, _, after = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + after.partition(END)[2])
