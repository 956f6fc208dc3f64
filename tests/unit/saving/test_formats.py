# SPDX-License-Identifier: Apache-2.0
"""Saves on disk give back what is known by hand; ``tests/saved_formats.py`` has their contents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_replay import load_replay
from lightning_replay.levels import LevelBuffer
from lightning_replay.replay import Replay
from lightning_replay.saves import verify_replay
from tests.level_steps import column, segment
from tests.saved_formats import empty_levels

NEXT_DRAWS = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "saves_before_the_move" / "next_draws.json").read_text()
)


@pytest.fixture
def saves(fixtures: Path) -> Path:
    return fixtures / "saves_3"


def numbers(rows) -> list[int]:
    return rows["observation"][:, 0].int().tolist()


def again(replay: Replay, folder: Path) -> Replay:
    """What was loaded, saved in the format of now and loaded again."""
    replay.save(folder)
    return load_replay(folder, trust=["tests"])


@pytest.mark.parametrize("saved_anew", [False, True])
def test_a_prioritized_buffer(saves: Path, saved_anew: bool, tmp_path: Path) -> None:
    assert verify_replay(saves / "prioritized")["length"] == 16
    replay = load_replay(saves / "prioritized")
    replay = again(replay, tmp_path) if saved_anew else replay
    rows = replay.storage.get(torch.arange(16))
    assert numbers(rows) == [16, 17, 18, 19, *range(4, 16)]
    assert torch.equal(rows["action"], rows["observation"][:, :2] / 16)
    assert rows["generation"].tolist() == [2] * 4 + [1] * 12
    assert replay.sampler.state_dict()["tree"]["leaves"].tolist() == list(range(1, 17))
    batch = replay.sample()
    assert batch["index"].tolist() == [2, 8, 14, 6]
    # slot 2 holds row 18, which only row 19 follows; the others 8, 14 and 6, with 2 more steps
    assert batch["next", "reward"].flatten().tolist() == [18 + 9.5, 8 + 4.5 + 2.5, 14 + 7.5 + 4, 6 + 3.5 + 2]
    assert batch["steps_to_next_obs"].flatten().tolist() == [2, 3, 3, 3]


@pytest.mark.parametrize("saved_anew", [False, True])
def test_event_tables(saves: Path, saved_anew: bool, tmp_path: Path) -> None:
    replay = load_replay(saves / "event_tables")
    replay = again(replay, tmp_path) if saved_anew else replay
    contents = {name: numbers(replay.table(name)) for name in replay.tables.names}
    assert contents == {"default": [6, 7, 8, 9, 10, 11], "high": [8, 9, 10, 11], "twice": [10, 11]}
    drawn = [set(numbers(replay.sample())) for _ in range(3)]
    assert drawn[0] <= set(range(8)) and drawn[1] <= set(range(12)) and drawn[2] <= set(range(6, 12))
    assert drawn[0] & set(range(6)), "this batch was drawn ahead, when rows 0 to 5 were there"
    steps = replay.storage.get(torch.tensor([11]))
    assert replay.writer.state_dict()["histories"]["slots"].tolist() == [11] and numbers(steps) == [11]
    replay.extend(steps.exclude("generation"))  # the third in a row above 10, of the same episode
    assert numbers(replay.table("high")) == [9, 10, 11, 11] and numbers(replay.table("twice")) == [10, 11]


@pytest.mark.parametrize("saved_anew", [False, True])
def test_retained_rows(saves: Path, saved_anew: bool, tmp_path: Path) -> None:
    replay = load_replay(saves / "retention", trust=["tests"])
    replay = again(replay, tmp_path) if saved_anew else replay
    rows = replay.storage.get(torch.arange(4))
    assert numbers(rows) == [0, 1, 2, 4] and rows["generation"].tolist() == [1, 1, 1, 2]
    assert replay.writer.retention_priority(torch.arange(4)).tolist() == [1.0, 4.0, 2.0, 3.0]
    stats = replay.stats()
    assert [stats[name] for name in ("admitted", "refused", "evicted", "priorities_updated")] == [5, 1, 1, 4]
    assert replay.sample()["index"].tolist() == [2, 0, 1, 3]


@pytest.mark.parametrize("saved_anew", [False, True])
def test_levels(saved_anew: bool, tmp_path: Path) -> None:
    levels = _loaded(Path(__file__).parents[2] / "fixtures" / "saves_3" / "levels")
    if saved_anew:
        levels.save(tmp_path)
        levels = _loaded(tmp_path)
    assert column(levels, "score") == {0: 0.25, 1: 0.5, 2: 1.0}
    assert column(levels, "staleness") == {0: 3, 1: 2, 2: 1}
    # half by the staleness 3 2 1 in sixths; half by the rank of the score, which almost always takes level 2
    ranks = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64) ** -10
    expected = 0.5 * torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64) / 6 + 0.5 * ranks / ranks.sum()
    assert torch.allclose(levels.probabilities()["probability"], expected)
    assert [levels.next_level(0) for _ in range(5)] == [1, 2, 0, 2, 3]
    assert levels.in_flight("away") == [5]
    assert levels.update("away", 5, segment([1.0]), episode_done=True) == 1.5, "the mean of 2 and 1"


def _loaded(folder: Path) -> LevelBuffer:
    levels = empty_levels()
    levels.load(folder)
    return levels


@pytest.mark.parametrize("name", sorted(NEXT_DRAWS))
def test_a_saved_recipe_goes_on_with_the_recorded_draws(name: str, fixtures: Path) -> None:
    """The import paths in these saves are of modules that have moved since."""
    replay = load_replay(fixtures / "saves_before_the_move" / name, trust=["tests"])
    assert [replay.sample()["index"].tolist() for _ in range(3)] == NEXT_DRAWS[name]
