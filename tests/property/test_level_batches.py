# SPDX-License-Identifier: Apache-2.0
"""Any sequence of batches, records, forgetting, saves and refused calls against the rules over dictionaries."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay.levels import LevelBuffer, LevelSet, Proportional, Top, scores
from tests.attack.states import fingerprint
from tests.level_steps import first_reward


@dataclass
class Oracle:
    """What a buffer with known levels must hold, whatever it draws."""

    window: int | None
    step: float
    smooth: bool
    clock: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    timestamps: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, list[float]] = field(default_factory=dict)
    awaited: dict[int, list[list[int]]] = field(default_factory=dict)  # the draws of each batch
    members: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)  # and not drawn yet

    def draw(self, drawn: list[int]) -> None:
        batch: dict[int, list[int]] = {}
        for level in drawn:
            self.clock += 1
            batch.setdefault(level, []).append(self.clock)
            if level in self.scores:
                self.timestamps[level] = self.clock
            if level in self.added:
                self.added.remove(level)
        for level, draws in batch.items():
            self.awaited.setdefault(level, []).append(draws)

    def record(self, ids: list[int], rows: list[Any]) -> list[float]:
        given: dict[int, list[Any]] = {}
        started: dict[int, int] = {}
        for level, row in zip(ids, rows, strict=True):
            given.setdefault(level, []).append(row)
            if level not in started:
                draws = self.awaited.get(level, [])
                started[level] = draws.pop(0)[-1] if draws else self.clock
        for level, rows_of_level in given.items():
            if level in self.added:
                self.added.remove(level)
            if self.window is None:
                score = sum(rows_of_level) / len(rows_of_level)
            else:
                kept = self.outcomes[level] = [*self.outcomes.get(level, []), *chain.from_iterable(rows_of_level)][
                    -self.window :
                ]
                rate = sum(kept) / len(kept)
                score = rate * (1 - rate)
            if level in self.scores or self.smooth:
                score = (1 - self.step) * self.scores.get(level, 0.0) + self.step * score
            self.scores[level] = score
            self.timestamps[level] = max(started[level], self.timestamps.get(level, 0))
        return [self.scores[level] for level in ids]

    def retire(self, level: int) -> None:
        self.members.remove(level)
        for kept in (self.scores, self.timestamps, self.outcomes, self.awaited):
            kept.pop(level, None)
        if level in self.added:
            self.added.remove(level)

    def forget(self) -> None:
        self.added.clear()
        self.scores.clear()
        self.timestamps.clear()
        self.outcomes.clear()


eighths = st.integers(0, 8).map(lambda one: one / 8)
call = st.one_of(
    st.tuples(st.just("draw"), st.integers(1, 6), st.booleans()),
    st.tuples(st.just("record"), st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 4), st.randoms()),
    st.tuples(st.sampled_from(["forget", "save", "refused", "add"])),
    st.tuples(st.just("retire"), st.integers(0, 7)),
)


@settings(max_examples=60)
@pytest.mark.filterwarnings("ignore:a level got:UserWarning")
@given(
    size=st.integers(1, 6),
    window=st.sampled_from([None, 1, 3]),
    step=st.sampled_from([1.0, 0.25]),
    smooth=st.booleans(),
    weights=st.booleans(),
    rho=st.sampled_from([0.0, 0.3]),
    calls=st.lists(call, min_size=1, max_size=25),
)
def test_contents_and_draws_are_those_of_the_rules(size, window, step, smooth, weights, rho, calls):
    own = [1.0 + number for number in range(size)] if weights else None
    groups = [("even", "odd")[number % 2] for number in range(size)] if size % 2 else None
    prompts = LevelSet([f"prompt {n}" for n in range(size)], groups=groups, weights=own)
    score = first_reward if window is None else None

    def build(seed: int) -> LevelBuffer:
        return LevelBuffer(
            prompts,
            score=scores.Learnability(window) if score is None else score,
            prioritization=Proportional(),
            score_temperature=1.0,
            staleness_weight=rho,
            score_step_size=step,
            first_score="smooth" if smooth else "replace",
            seed=seed,
        )

    levels, oracle = build(1), Oracle(window, step, smooth, members=[*range(size)])
    retired: list[int] = []
    for what, *rest in calls:
        members = oracle.members
        if what == "draw":
            count, replace = rest
            count = count if replace else min(count, len(members))
            first = oracle.added[:count]
            drawn = levels.next_levels(count, replace=replace).tolist()
            assert {*drawn} <= {*members} and (replace or len({*drawn}) == count)
            assert {*first} <= {*drawn}, "added levels have their turn at once"
            idle = {*members} - {*oracle.scores} - {level for level, draws in oracle.awaited.items() if draws}
            if not oracle.scores and not replace and count <= len(idle):
                assert {*drawn} <= idle, "new levels that nobody plays come first"
            oracle.draw(drawn)
        elif what == "record":
            ids, width, random = [members[one % len(members)] for one in rest[0]], *rest[1:]
            if retired:  # a late outcome, which changes nothing
                late = {"score": [0.5]} if window is None else {"outcomes": [1.0]}
                assert levels.record(retired[:1], **late).isnan().all()
            if window is None:
                given: Any = [random.randrange(9) / 8 for _ in ids]
                returned = levels.record(torch.tensor(ids), torch.tensor(given, dtype=torch.float64))
            else:
                given = [[float(random.randrange(2)) for _ in range(width)] for _ in ids]
                returned = levels.record(ids, outcomes=given)
            assert returned.tolist() == pytest.approx(oracle.record(ids, given), abs=1e-12)
        elif what == "forget":
            levels.forget()
            oracle.forget()
        elif what == "refused":
            refused(levels, len(members), window)
        elif what == "add":
            more = {"groups": None if groups is None else ["odd"], "weights": None if own is None else [2.5]}
            new = levels.add([f"prompt {len(prompts)}"], **more)
            members += new
            oracle.added += new
        elif what == "retire":
            if len(members) > 1:
                level = members[rest[0] % len(members)]
                levels.retire([level])
                oracle.retire(level)
                retired.append(level)
        else:
            with tempfile.TemporaryDirectory() as directory:
                levels.save(directory)
                other = build(2)
                other.load(directory)
            state = levels.state_dict()
            for count, replace in ((len(members), False), (3, True), (1, False)):
                assert torch.equal(
                    levels.next_levels(count, replace=replace), other.next_levels(count, replace=replace)
                )
            other.load_state_dict(state)
            levels = other
        compare(levels, oracle, prompts, rho)


def refused(levels: LevelBuffer, size: int, window: int | None) -> None:
    """Nothing of this changes anything."""
    before = fingerprint(levels.state_dict())
    wrong = [
        lambda: levels.next_levels(size + 1),
        lambda: levels.next_levels(0),
        lambda: levels.record([0, 99], [0.5, 0.5]),
        lambda: levels.record([-1], [0.5]),
        lambda: levels.retire([99]),
        lambda: levels.retire(levels.known.ids),
        lambda: levels.add([]),
        lambda: levels.record([0.5], [0.5]),
        lambda: levels.record([0], [torch.nan]),
        lambda: levels.record([0, 0], [0.5]),
        lambda: levels.record([0]),
        lambda: levels.record([0], [0.5], outcomes=[1.0]),
        lambda: levels.record([0], outcomes=[1.5]),
        lambda: levels.record([0, 0], outcomes=[[1.0, 0.0], [0.0, -0.1]]),
        lambda: levels.record([0], outcomes=[torch.nan]),
        lambda: levels.record([0], outcomes=[[[1.0]]]),
        lambda: levels.load_state_dict(LevelBuffer(LevelSet([f"other {n}" for n in range(9)])).state_dict()),
    ]
    for one in wrong:
        with pytest.raises((ValueError, TypeError)):
            one()
    assert fingerprint(levels.state_dict()) == before


def compare(levels: LevelBuffer, oracle: Oracle, prompts: LevelSet, rho: float) -> None:
    shown = levels.probabilities()
    ids = shown["level_id"].tolist()
    assert levels.episodes == oracle.clock
    assert dict(zip(ids, shown["score"].tolist(), strict=True)) == pytest.approx(oracle.scores, abs=1e-12)
    stale = {level: oracle.clock - timestamp for level, timestamp in oracle.timestamps.items()}
    assert dict(zip(ids, shown["staleness"].tolist(), strict=True)) == stale
    waiting = {level: len(draws) for level, draws in oracle.awaited.items() if draws}
    assert {level: len(own) for level, own in levels.running.played.items()} == waiting
    assert len(levels.running) == sum(waiting.values())
    if oracle.window is not None:
        for level, successes, count in zip(ids, shown["successes"].tolist(), shown["outcomes"].tolist(), strict=True):
            assert (successes, count) == (sum(oracle.outcomes[level]), len(oracle.outcomes[level]))
    if not ids:
        return
    out = {*waiting} if not levels.replay_in_flight and not {*ids} <= {*waiting} else set()
    weights = np.ones(len(prompts)) if prompts.weights is None else prompts.weights
    by_score = np.array([0.0 if level in out else max(oracle.scores[level], 0.0) for level in ids])
    if not by_score.any():  # no score is above 0: uniform
        by_score = np.array([float(level not in out) for level in ids])
    by_score *= weights[ids]
    times = np.array([stale[level] for level in ids], np.float64)
    times = times / times.sum() if times.any() else np.full(len(ids), 1 / len(ids))
    expected = (1 - rho) * by_score / by_score.sum() + rho * times
    np.testing.assert_allclose(shown["probability"].numpy(), expected, atol=1e-12)
    if prompts.groups is not None:
        for name, stats in levels.group_stats().items():
            mine = [row for row, level in enumerate(ids) if prompts.groups[level] == name]
            in_group = Counter(prompts.groups[level] for level in oracle.members)
            assert stats["levels"] == in_group[name] and stats["scored"] == len(mine)
            assert stats["share"] == pytest.approx(expected[mine].sum())


def test_forgotten_levels_are_new_and_windows_go_on():
    levels = LevelBuffer(4, score=scores.Learnability(4), prioritization=Top(2), seed=0)
    drawn = levels.next_levels(4)
    levels.record(drawn, outcomes=torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]))
    assert sorted(levels.next_levels(2).tolist()) == sorted([int(drawn[0]), int(drawn[3])])
    levels.forget()
    assert len(levels) == 0 and levels.replay_chance() == 0.0


def test_objects_without_a_value_are_refused_where_they_are_saved(tmp_path):
    levels = LevelSet([object(), object()])
    with pytest.raises(TypeError, match="level 0 is <object.*give key="):
        LevelBuffer(levels)
    with pytest.raises(TypeError):
        levels.save(tmp_path / "levels")
    with pytest.raises(FileNotFoundError):
        LevelSet.load(tmp_path / "levels")
    assert LevelBuffer(LevelSet([object()], key=repr)).count == 1
