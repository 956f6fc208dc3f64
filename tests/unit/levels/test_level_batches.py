# SPDX-License-Identifier: Apache-2.0
"""Batches of levels in DataLoaders: prefetching workers, several iterations, resume, torchdata, Lightning."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_replay.levels import (
    LevelBatchSampler,
    LevelBuffer,
    LevelSelector,
    LevelSet,
    SequentialLevels,
    Top,
    UniformLevels,
    scores,
    tscl,
)
from tests.unit.lit.toys import make_trainer

PROMPTS = LevelSet([{"question": f"{n} + 1 ="} for n in range(60)])
SELECTORS: dict[str, Callable[[], LevelSelector]] = {
    "learnability": lambda: LevelBuffer(PROMPTS, score=scores.Learnability(window=4), seed=0),
    "uniform": lambda: UniformLevels(PROMPTS, seed=0),
    "sequential": lambda: SequentialLevels(PROMPTS),
}

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata on torch 2.13


class Run:
    """A loop that reads batches and records outcomes that follow from the levels, and its saves."""

    def __init__(self, make: Callable[[], LevelSelector], kind: str, num_workers: int, num_batches: int | None = 9):
        self.levels = make()
        self.sampler = LevelBatchSampler(self.levels, batch_size=6, num_batches=num_batches)
        options: dict[str, Any] = {"batch_sampler": self.sampler, "collate_fn": list, "num_workers": num_workers}
        if num_workers:
            options["multiprocessing_context"] = "fork"  # Otherwise each worker of a few batches imports torch.
        self.is_torchdata = kind == "torchdata"
        if self.is_torchdata:
            loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
            self.loader = loader(PROMPTS, **options)
        else:
            self.loader = DataLoader(PROMPTS, **options)
        self._seen = 0

    def read(self, batches: Iterable[list[dict[str, Any]]], record: bool = True) -> list[list[int]]:
        read = []
        for batch in batches:
            read.append([item["level_id"] for item in batch])
            assert all(PROMPTS[item["level_id"]] == item for item in batch)
            if record:
                self.record(read[-1])
        return read

    def record(self, ids: list[int]) -> None:
        if isinstance(self.levels, LevelBuffer):
            self.levels.record(ids, outcomes=torch.tensor([[one % 2, one % 3 > 0] for one in ids]).float())
        else:
            self.levels.record(ids)

    def state(self) -> dict[str, Any]:
        return {
            "levels": self.levels.state_dict(),
            "loader": self.loader.state_dict() if self.is_torchdata else self.sampler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.levels.load_state_dict(state["levels"])
        (self.loader if self.is_torchdata else self.sampler).load_state_dict(state["loader"])


def batches_of(run: Run) -> Iterator[Any]:
    return iter(run.loader)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_workers", "at", "make"),
    [
        *itertools.product(("torch", "torchdata"), (0,), (0, 4, 9), [SELECTORS["learnability"]]),
        *itertools.product(("torch", "torchdata"), (2,), (4,), [SELECTORS["learnability"]]),
        ("torch", 2, 9, SELECTORS["learnability"]),
        ("torchdata", 2, 0, SELECTORS["learnability"]),
        # How they choose is no matter of the loader.
        ("torch", 2, 4, SELECTORS["uniform"]),
        ("torchdata", 2, 4, SELECTORS["sequential"]),
    ],
)
def test_a_resumed_run_reads_the_batches_of_one_without_a_break(
    kind: str, num_workers: int, at: int, make: Any
) -> None:
    whole, stopped, resumed = (Run(make, kind, num_workers) for _ in range(3))
    both = whole.read(whole.loader) + whole.read(whole.loader)
    before = stopped.read(itertools.islice(batches_of(stopped), at)) if at else []
    state = stopped.state()
    resumed.load(state)
    after = resumed.read(resumed.loader)
    assert before + after == both[: at + len(after)]
    assert len(after) == (9 - at or 9)  # after the last batch another iteration begins
    if at == 4:
        assert before + after + resumed.read(resumed.loader) == both
    assert resumed.levels.stats()["in_flight"] == 0


@pytest.mark.parametrize(("kind", "num_workers"), [("torch", 0), ("torchdata", 2)])
def test_a_batch_without_its_scores_comes_again(kind: str, num_workers: int) -> None:
    stopped, resumed, whole = (Run(SELECTORS["learnability"], kind, num_workers) for _ in range(3))
    batches = batches_of(stopped)
    stopped.read(itertools.islice(batches, 3))
    (lost,) = stopped.read(itertools.islice(batches, 1), record=False)
    resumed.load(stopped.state())
    after = resumed.read(resumed.loader)
    assert after[0] == lost and len(after) == 6
    assert resumed.levels.episodes == 9 * 6
    assert whole.read(whole.loader)[3:] == after


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_workers"), [("torch", 2), ("torchdata", 2)])
def test_a_second_save_after_the_first_resume(kind: str, num_workers: int) -> None:
    whole, *stopped = (Run(SELECTORS["learnability"], kind, num_workers) for _ in range(4))
    expected, read = whole.read(whole.loader), []
    for first, second in itertools.pairwise([*stopped, None]):
        read += first.read(itertools.islice(batches_of(first), 2) if second else first.loader)
        if second:
            second.load(first.state())
    assert read == expected


def test_feedback_in_another_order_and_in_part() -> None:
    run = Run(SELECTORS["learnability"], "torch", 0)
    batches = batches_of(run)
    first, second, third = run.read(itertools.islice(batches, 3), record=False)
    run.record(second[::-1])
    run.record(first[:2])
    assert run.levels.stats()["in_flight"] == 6 + 4
    again = Run(SELECTORS["learnability"], "torch", 0)
    again.load(run.state())
    assert again.levels.stats()["in_flight"] == 6 + 4
    read = again.read(itertools.islice(batches_of(again), 2))
    assert read[0] == third  # the rest of the first is given up
    assert again.levels.stats()["in_flight"] == 0
    assert len(again.levels) == 6 + 2 + 6 + len(set(read[1]) - {*first[:2], *second, *third})


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "make"), [(0, SELECTORS["uniform"]), (2, SELECTORS["learnability"])])
def test_an_iteration_that_was_left_begins_anew_and_keeps_no_level_in_flight(num_workers: int, make: Any) -> None:
    run = Run(make, "torch", num_workers)
    run.load(run.state())  # which is of the first iteration alone
    for _ in range(3):
        assert len(run.read(itertools.islice(batches_of(run), 2))) == 2
    # the batches that were drawn ahead and the one that is drawn when the loop is left
    assert run.levels.stats()["in_flight"] <= 4 * 6
    assert len(run.read(run.loader)) == 9
    assert run.levels.stats()["in_flight"] == 0


def test_a_state_of_a_new_iteration_has_no_batch_of_one_that_was_left() -> None:
    run, resumed = (Run(SELECTORS["learnability"], "torch", 0) for _ in range(2))
    (left,) = run.read(itertools.islice(batches_of(run), 1), record=False)
    iter(run.sampler)  # as a StatefulDataLoader does before it takes the state of an iteration
    resumed.load(run.state())
    read = resumed.read(resumed.loader)
    assert read[0] != left and len(read) == 9 and resumed.levels.stats()["in_flight"] == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_an_end(num_workers: int) -> None:
    run, resumed = (Run(SELECTORS["learnability"], "torch", num_workers, num_batches=None) for _ in range(2))
    batches = batches_of(run)
    assert len(run.read(itertools.islice(batches, 25))) == 25
    resumed.load(run.state())
    expected = run.read(itertools.islice(batches, 10))
    assert resumed.read(itertools.islice(batches_of(resumed), 10)) == expected
    with pytest.raises(TypeError, match="num_batches is None: the batches have no end"):
        len(run.sampler)


@pytest.mark.parametrize("levels", [UniformLevels(3, seed=0), LevelBuffer(None, capacity=9, seed=0)])
def test_levels_that_are_never_recorded_do_not_pile_up(levels: LevelSelector) -> None:
    levels.expire_after = 9
    for _ in range(300):
        levels.next_levels(3)
    assert levels.running.num_draws == len(levels.running.draws()) == levels.stats()["in_flight"] == 12
    assert {batch for batch, *_ in levels.running.draws()} == {889, 892, 895, 898}  # the oldest ended
    assert levels.stats()["expired"] == 888


def test_a_level_of_two_batches_is_recorded_once_for_each() -> None:
    levels = UniformLevels(4, seed=0)
    for _ in range(2):
        levels.next_levels(4)
    levels.record([0, 0, 1])  # as of two answers to one prompt
    draws = levels.running.draws()
    assert sorted((batch, level) for batch, _, level in draws) == [(1, 2), (1, 3), (5, 0), (5, 1), (5, 2), (5, 3)]


def test_made_levels_that_run_out_are_completed_by_replays() -> None:
    def one_of_ten(generator: torch.Generator) -> int:
        return int(torch.randint(10, (), generator=generator))

    levels = LevelBuffer(None, capacity=10, generate=one_of_ten, replay_probability=0.1, seed=0)
    for _ in range(40):
        drawn = levels.next_levels(5).tolist()
        assert len({*drawn}) == 5
        levels.record(drawn, torch.rand(5))
    with pytest.raises(ValueError, match="generate made .* new levels and .* have a score"):
        levels.next_levels(11)
    with pytest.raises(ValueError, match="ids are from 0 to"):
        levels.record([2**40], [1.0])


def test_idle_levels_come_before_those_in_flight() -> None:
    levels = LevelBuffer(1_000, score=scores.Learnability(), replay_probability=0.5, staleness_weight=0.0, seed=0)
    levels.record(range(64), outcomes=torch.tensor([0.0, 1.0]).expand(64, 2))
    batches = [levels.next_levels(100).tolist() for _ in range(5)]
    assert len({level for batch in batches for level in batch}) == 500
    top = LevelBuffer(1_000, prioritization=Top(10), replay_in_flight=False, staleness_weight=0.0, seed=0)
    top.record(range(1_000), torch.arange(1_000.0))
    assert not {*top.next_levels(200).tolist()} & {*top.next_levels(200).tolist()}


def test_forgotten_levels_are_measured_anew() -> None:
    levels = LevelBuffer(3, score=scores.Learnability(window=8), seed=0)
    levels.record([0], outcomes=[[1.0] * 8])
    levels.forget()
    levels.record([0], outcomes=[[0.0, 0.0, 0.0, 1.0]])
    assert levels.probabilities()["outcomes"].tolist() == [4.0] and levels.probabilities()["score"].tolist() == [0.1875]
    progress = tscl(3)
    before = progress.table.scores.tolist()
    progress.record([0, 1], [0.5, 0.1])
    progress.forget()
    assert progress.table.scores.tolist() == before


def test_nothing_and_wrong_states_are_no_errors_of_numpy() -> None:
    levels = LevelBuffer(3, score=scores.Learnability(), seed=0)
    assert len(levels.record([], outcomes=torch.zeros(0, 2))) == len(levels.record([], [])) == 0
    state = levels.state_dict()
    with pytest.raises(ValueError, match="lacks"):
        levels.load_state_dict(state | {"scoring": {**state["scoring"], "of_episodes": tscl(3).score.state_dict()}})
    levels.load_state_dict(state | {"running": {**state["running"], "awaited": torch.tensor([[7, 1, 1]])}})
    assert levels.stats()["in_flight"] == 0, "a draw on a level that there is not"
    nan = {"level_id": torch.tensor([0]), "outcomes": torch.full((1, 8), torch.nan), "counts": torch.tensor([1])}
    with pytest.raises(ValueError, match=r"not all in \[0, 1\]"):
        levels.load_state_dict(state | {"scoring": {**state["scoring"], "of_episodes": nan}})
    sampler = LevelBatchSampler(levels, 2)
    for state in ({}, LevelBatchSampler(levels, 3).state_dict()):
        with pytest.raises(ValueError, match="the batches of all processes together have 2 levels here"):
            sampler.load_state_dict(state)
    sampler.load_state_dict({"begun": 8, "batch_size": 2})
    with pytest.raises(ValueError, match="load both"):
        next(iter(sampler))


def test_a_set_of_arrays_and_paths_is_saved(tmp_path: Path) -> None:
    maps = LevelSet([{"map": np.eye(3), "file": Path("maze.txt"), "size": (3, 3)}, {"map": np.zeros((3, 3))}], key=str)
    maps.save(tmp_path)
    again = LevelSet.load(tmp_path)
    assert torch.equal(again[0]["map"], torch.eye(3, dtype=torch.float64)) and again[0]["file"] == "maze.txt"
    assert again.digest == LevelSet([maps.level(0), maps.level(1)]).digest != maps.digest
    for wrong in ({1: "a"}, {"a": {2}}, b"bytes", object()):
        with pytest.raises(TypeError, match="level 0 is .* give key="):
            LevelSet([wrong]).save(tmp_path)
    for given, options in (([1], {"key": 3}), (["a", "b"], {"groups": "ab"}), ([{"level_id": 77}], {})):
        with pytest.raises((TypeError, ValueError), match="key is 3|groups is 'ab'|an entry 'level_id'"):
            LevelSet(given, **options)
    with pytest.raises(TypeError, match="put objects into LevelSet"):
        LevelBuffer(["a", "b"])


def test_scores_and_outcomes_that_cannot_be_rates() -> None:
    levels = LevelBuffer(9, score=scores.Learnability(window=2), seed=0)
    for give in (lambda: levels.record([3, 4], [0.5, -3.0]), lambda: levels.record([3, 4], outcomes=[1.0, 1.5])):
        with pytest.raises(ValueError, match="of level 4 is .*; it must be in"):
            give()
    with pytest.raises(TypeError, match="level_id is .'x1'.; give ids, integers"):
        levels.record(["x1"], [0.5])
    with pytest.warns(UserWarning, match=r"a level got 3 outcomes .* Learnability\(window=3\)"):
        levels.record([1], outcomes=[[0.0, 1.0, 1.0]])
    levels.record([1], outcomes=[[0.0, 1.0, 1.0]])  # once


GROUPS = [[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    "outcomes",
    [
        GROUPS,
        tuple(map(tuple, GROUPS)),
        torch.tensor(GROUPS, dtype=torch.bfloat16, requires_grad=True),
        np.array(GROUPS, np.float16),
        [torch.tensor(group) for group in GROUPS],
        [torch.tensor(group, requires_grad=True) for group in GROUPS],
        tuple(np.array(group, np.float32) for group in GROUPS),
        [torch.tensor(GROUPS[0]), GROUPS[1]],
        [torch.tensor(group).bool() for group in GROUPS],
        [[torch.tensor(one) for one in group] for group in GROUPS],
    ],
    ids=str,
)
def test_outcomes_as_trainers_hold_them(outcomes: Any) -> None:
    levels = LevelBuffer(30, score=scores.Learnability(), seed=0)
    assert levels.record([4, 9], outcomes=outcomes).tolist() == [0.25, 0.1875]
    own = LevelBuffer(30, score=lambda steps: 0.0, seed=0)
    assert own.record([4, 9], [torch.tensor(0.5), np.float32(0.25)]).tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    "outcomes",
    [
        [[1.0, 0.0], [1.0, 1.0, 1.0, 0.0]],
        [torch.ones(2), torch.ones(4)],
        [np.ones(2), [1.0, 0.0, 1.0]],
        [1.0, [1.0, 0.0]],
        [torch.tensor(1.0), torch.ones(2)],
        ["right", "wrong"],
        [None, 1.0],
        "10",
    ],
    ids=str,
)
def test_outcomes_that_are_no_array_are_refused_in_words(outcomes: Any) -> None:
    levels = LevelBuffer(30, score=scores.Learnability(), seed=0)
    with pytest.raises(ValueError, match=r"outcomes is no array of numbers .*repeat each id: record\(\[4, 4, 9\]"):
        levels.record([4, 9], outcomes=outcomes)
    assert len(levels) == 0
    assert levels.record([4, 4, 9], outcomes=[1.0, 0.0, 1.0]).tolist() == [0.25, 0.25, 0.0], "as the error says"


def test_the_top_and_any_other() -> None:
    levels = LevelBuffer(100, prioritization=Top(10, epsilon=0.5), staleness_weight=0.0, seed=0)
    levels.record(range(100), torch.arange(100.0))
    assert levels.probabilities()["probability"][90:].sum().item() == pytest.approx(0.5 + 0.05)
    drawn = levels.next_levels(4_000, replace=True)
    assert abs((drawn >= 90).float().mean().item() - 0.55) < 0.04 and len(drawn.unique()) == 100


def test_abandoned_levels_are_new_again() -> None:
    levels = LevelBuffer(4, score=scores.Learnability(), seed=0)
    drawn = levels.next_levels(4)
    levels.record(drawn[:2], outcomes=[0.0, 1.0])
    levels.abandon_levels(drawn[2:])
    assert levels.stats()["in_flight"] == 0
    assert set(levels.next_levels(2).tolist()) <= set(range(4))
    with pytest.raises(ValueError, match="none of the 4 levels"):
        levels.abandon_levels([7])


@pytest.mark.parametrize("scored", [0, 50])
def test_an_empty_batch_changes_nothing(scored: int) -> None:
    levels = LevelBuffer(100, score=scores.Learnability(), seed=0)
    levels.record(range(scored), torch.rand(scored))
    none = torch.zeros(0, dtype=torch.int64)
    for given in ({"score": []}, {"outcomes": []}, {"outcomes": torch.zeros(0, 3)}):
        assert levels.record([], **given).shape == levels.record(none, **given).shape == (0,)
    levels.abandon_levels([])
    assert len(levels) == scored


def test_levels_without_an_outcome_get_no_score() -> None:
    levels = LevelBuffer(4, score=scores.Learnability(), seed=0)
    with pytest.raises(ValueError, match=r"outcomes has shape \[2, 0\] for 2 ids; give \[2\] or \[2, k\]"):
        levels.record([0, 1], outcomes=torch.zeros(2, 0))
    assert len(levels) == 0


def test_forgetting_keeps_the_order_in_which_ids_were_given() -> None:
    levels, again = (LevelBuffer([5, 3, 1], score=scores.Learnability(), seed=seed) for seed in range(2))
    levels.record([3], [0.1])
    levels.forget()
    again.load_state_dict(levels.state_dict())
    assert torch.equal(levels.next_levels(3), again.next_levels(3))


def test_forgetting_after_a_load_keeps_the_order_of_levels_in_flight() -> None:
    levels, again = (LevelBuffer(6, score=scores.Learnability(), seed=seed) for seed in range(2))
    for actor in range(3):
        levels.next_level(actor)
    levels.next_levels(3)  # a load begins these before those of actors
    again.load_state_dict(levels.state_dict())
    levels.forget()
    again.forget()
    assert [levels.next_level(0) for _ in range(9)] == [again.next_level(0) for _ in range(9)]


class Counting(L.LightningModule):
    """Records outcomes of the batches of a loader that the trainer is given, and saves levels and sampler."""

    def __init__(self, run: Run, stop_at: int = 10**9) -> None:
        super().__init__()
        self.run, self.stop_at, self.read = run, stop_at, []
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: list[dict[str, Any]], _: int) -> torch.Tensor:
        self.read += self.run.read([batch])
        return self.weight * 1.0

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == self.stop_at:
            self.trainer.save_checkpoint(self.trainer.default_root_dir + "/stopped.ckpt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["levels"], checkpoint["sampler"] = self.run.levels.state_dict(), self.run.sampler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.run.levels.load_state_dict(checkpoint["levels"])
        if not self.run.is_torchdata:  # Lightning saves the state of a loader that has one
            self.run.sampler.load_state_dict(checkpoint["sampler"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The '.*' does not have many workers")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before:UserWarning")
@pytest.mark.parametrize(("kind", "num_workers"), [("torch", 0), ("torchdata", 2)])
@pytest.mark.parametrize("stop_at", [4, 9])
def test_a_fit_that_is_resumed_reads_the_batches_of_one_without_a_break(
    tmp_path: Any, kind: str, num_workers: int, stop_at: int
) -> None:
    whole, stopped, resumed = (Run(SELECTORS["learnability"], kind, num_workers) for _ in range(3))
    expected = Counting(whole)
    make_trainer(tmp_path, max_epochs=2).fit(expected, whole.loader)
    assert len(expected.read) == 18
    first, second = Counting(stopped, stop_at), Counting(resumed)
    make_trainer(tmp_path, max_epochs=2).fit(first, stopped.loader)
    make_trainer(tmp_path, max_epochs=2).fit(second, resumed.loader, ckpt_path=tmp_path / "stopped.ckpt")
    assert first.read == expected.read and second.read == expected.read[stop_at:]
    assert resumed.levels.stats()["in_flight"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The '.*' does not have many workers")
def test_a_trainer_that_leaves_epochs_early() -> None:
    run = Run(SELECTORS["learnability"], "torch", 2)
    module = Counting(run)
    make_trainer(None, max_epochs=4, limit_train_batches=3, barebones=True).fit(module, run.loader)
    assert len(module.read) == 12 and run.levels.stats()["in_flight"] <= 5 * 6
