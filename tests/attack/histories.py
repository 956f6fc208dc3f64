# SPDX-License-Identifier: Apache-2.0
"""Random histories of every recipe: rows are compared with the steps taken, and refused calls change nothing."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import load_replay, save_replay
from lightning_replay.replay import Replay
from lightning_replay.storage.packed import occupancy_of
from lightning_replay.table_replay import TableReplay
from tests.attack.refusals import REASONS, refusals
from tests.attack.report import Report
from tests.attack.states import difference, fingerprint
from tests.attack.variants import DISCOUNT, VARIANTS, Variant

CAPACITY, BATCH = 24, 6


class History:
    """One buffer, driven at random, beside a list of all steps and a dictionary of what every slot has ever held."""

    def __init__(self, variant: Variant, seed: int, folder: Path, report: Report) -> None:
        self.variant, self.report, self.folder = variant, report, folder
        self.random = random.Random(seed)
        self.replay: Replay = variant.build(CAPACITY, BATCH, seed, folder / "rows")
        self.world = variant.world(seed)
        self.newest: list[int] = []  # what a ring holds
        self.written: dict[tuple[int, int], int] = {}  # slot and generation: number of the step
        self.held: dict[tuple[int, int], int] = {}
        self.drawn: list[TensorDict] = []
        self.late = 0
        self.saved: tuple[Any, ...] | None = None

    def go(self, count: int) -> None:
        calls = [self.extend, self.sample, self.update, self.refuse, self.save]
        calls += [self.roll_back, self.reload, self.flush, self.empty, self.advance]
        for _ in range(count):
            (call,) = self.random.choices(calls, [8, 6, 5, 6, 2, 1, 2, 1, 0.5, 1])
            call()
            self.report.count("calls")

    def extend(self) -> None:
        rows = self.world.take(self.random.choice([1, 2, 5, 17, 40]))
        if self.random.random() < 0.3:  # the refused call and then the good one
            self.refuse(rows)
        self.replay.extend(rows)
        self.newest = [*self.newest, *rows["number"].flatten().tolist()][-CAPACITY:]
        self.audit(may_change=True)

    def flush(self) -> None:
        self.replay.store_pending()
        self.audit(may_change=True)

    def audit(self, *, may_change: bool = False) -> None:
        """Every row held is a step that was taken, none is held twice, and no slot repeats a generation."""
        slots, held = held_slots(self.replay), self.held
        if not len(slots):
            self.held = {}
            return
        rows = self.replay.storage.get(slots)
        numbers = self.world.check(rows, DISCOUNT)
        assert len(set(numbers)) == len(numbers), "a step is held twice"
        self.held = dict(zip(zip(slots.tolist(), rows["generation"].tolist(), strict=True), numbers, strict=True))
        for place, number in self.held.items():
            assert self.written.setdefault(place, number) == number, f"slot and generation {place} hold another step"
        assert may_change or held == self.held, "rows changed in a call that writes none"
        if self.variant.is_ring and not self.variant.has_frames:
            assert sorted(numbers) == self.newest, f"a ring holds {sorted(numbers)}; the newest are {self.newest}"

    def sample(self) -> None:
        try:
            batch = self.replay.sample()
        except RuntimeError:  # there is nothing to draw
            return
        self.check_batch(batch)
        self.drawn = [*self.drawn, batch][-10:]

    def check_batch(self, batch: TensorDict) -> None:
        numbers = self.world.check(batch, DISCOUNT, mixed=self.variant.is_mixed)
        for number, place in zip(numbers, places_of(batch), strict=True):
            assert self.written.get(place) == number, f"slot and generation {place} never held step {number}"
            assert self.variant.chosen.get("prefetch") or place in self.held, f"step {number} is not held"
        self.report.count("rows drawn", len(numbers))

    def update(self) -> None:
        if not self.drawn or not self.replay.takes_feedback:
            return
        batch = self.random.choice(self.drawn)
        self.late += sum(place not in self.held or not self.is_in_a_table(place[0]) for place in places_of(batch))
        td_error = torch.tensor([self.random.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(len(batch))])
        if self.random.random() < 0.5:
            self.replay.update_priority(batch, td_error)
        else:
            self.replay.update_priority(batch["index"], td_error, generation=batch["generation"])
        late = self.replay.stats()["stale_updates_dropped"]
        assert late == self.late, (
            f"{late} late updates were dropped; {self.late} rows were written since they were drawn"
        )
        self.audit()
        self.report.count("updates")

    def is_in_a_table(self, slot: int) -> bool:
        """False for a row that left every table and is held by the history of an episode that goes on."""
        return not isinstance(self.replay, TableReplay) or bool((self.replay.tables.position[:, slot] >= 0).any())

    def refuse(self, rows: TensorDict | None = None) -> None:
        """Makes a call that must raise; the state afterwards is the state before."""
        name, call = self.random.choice(list(refusals(self.replay, self.variant).items()))
        if rows is None:
            count = len(self.world.steps)
            rows = self.world.rows(range(max(count - 3, 0), count)) if count else self.variant.world(0).take(3)
        before = self.replay.state_dict()
        try:
            call(self.replay, rows)
        except REASONS:
            self.unchanged(before, name)
            self.report.count("refused calls")
        else:
            raise AssertionError(f"{name} was accepted")

    def unchanged(self, before: Any, name: str) -> None:
        after = self.replay.state_dict()
        if fingerprint(before) != fingerprint(after):
            raise AssertionError(f"{name} left a trace: {difference(before, after)}"[:400])

    def save(self) -> None:
        save_replay(self.replay, self.folder / "save", previous=self.folder / "save" if self.saved else None)
        self.saved = (self.newest, dict(self.held), self.late, self.replay.state_dict())
        self.report.count("saves")

    def reload(self) -> None:
        """A buffer loaded from a save of now is this one, and so are its next draws; the history goes on with it."""
        self.save()
        state = self.replay.state_dict()
        self.replay = load_replay(self.folder / "save", trust=["tests"], end_episodes=False)
        self.unchanged(state, "saving and loading")
        other = load_replay(self.folder / "save", trust=["tests"], end_episodes=False)
        for _ in range(3):
            try:
                batches = [one.sample() for one in (self.replay, other)]
            except RuntimeError:
                return
            self.drawn = [*self.drawn, batches[0]][-10:]
            assert fingerprint(batches[0].to_dict()) == fingerprint(batches[1].to_dict()), "draws differ after a load"

    def roll_back(self) -> None:
        """Loads the last save into the buffer that has gone on since."""
        if self.saved is None:
            return
        self.replay.load(self.folder / "save", end_episodes=False)
        self.world.restart()
        self.newest, self.held, self.late, state = self.saved
        self.audit()
        for name in ("sampler", "writer", "prefetched"):
            found = difference(state[name], self.replay.state_dict()[name], name)
            assert found is None, f"rolled back: {found}"

    def empty(self) -> None:
        self.replay.empty()
        self.newest, self.held = [], {}
        self.audit()
        assert len(self.replay) == 0

    def advance(self) -> None:
        self.replay.advance(env_steps=len(self.world.steps), updates=self.random.randrange(1000))


def held_slots(replay: Replay) -> Tensor:
    """Slots of the rows that a buffer holds, int64 ``[n]``."""
    return occupancy_of(replay.storage).slots()


def places_of(batch: TensorDict) -> list[tuple[int, int]]:
    index, generation = batch["index"].reshape(len(batch), -1), batch["generation"].reshape(len(batch), -1)
    return list(zip(index[:, 0].tolist(), generation[:, 0].tolist(), strict=True))


def attack(seed: int, count: int = 60, variants: list[Variant] = VARIANTS) -> Report:
    report = Report()
    for place, variant in enumerate(variants):
        with tempfile.TemporaryDirectory() as folder, report.round(f"history {seed} of {variant}"):
            History(variant, 1000 * seed + place, Path(folder), report).go(count)
            report.count("histories")
    return report
