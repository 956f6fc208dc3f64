# SPDX-License-Identifier: Apache-2.0
"""Draws by age in RLlib: ages are those of the rows, results show them, and a restore draws the same rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig

import rllib_ext

from .rllib_algorithms import Counting, built, small
from .shard_contents import observations, on_shards

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Versioned(Counting):
    """Each info has the version of a policy, which rises with every fifth step."""

    def step(self, action: Any) -> Any:
        *found, _ = super().step(action)
        return *found, {"policy": self.count // 5, "falls": 1000 - self.count}


RISING = {
    "class_path": "lightning_replay.schedules.Linear",
    "init_args": {"start": 10.0, "end": 60.0, "duration": 50, "clock": "updates"},
}
AGES: dict[str, dict[str, Any]] = {
    "rows": {"half_life": 20, "max_age": 60},
    "env_steps": {"half_life": RISING, "floor": 0.01, "clock": "env_steps"},
    "updates": {"half_life": 15, "clock": "updates"},
    "versions": {"half_life": 4, "version_key": ["next", "policy"]},
}


def algorithm_of(recipe: str, age: dict[str, Any], **options: Any) -> Algorithm:
    return built(small(DQNConfig, Versioned, recipe, age=age, info_keys=["policy"], seed=3, **options))


def ages_of(replay: Any) -> list[tuple[float, float, float]]:
    """Observation, version and birth of each row, as a save holds them."""
    slots = replay.oldest_first()
    rows = replay.storage.get(slots)
    births = replay.state_dict()["sampler"]["ages"]["births"][slots]
    columns = rows["observation"][:, 0], rows["next", "policy"].flatten(), births
    return [*zip(*(column.tolist() for column in columns), strict=True)]


def ages_of_shard(shard: Any) -> list[tuple[float, float, float]]:
    return ages_of(shard.held.replay)


def half_life_of(replay: Any) -> float:
    return replay.state_dict()["sampler"]["ages"]["half_life"]


class Watched:
    """Notes the clocks of a buffer before each of its rows is added."""

    def __init__(self, buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.env_steps: list[int] = []
        self.updates: list[int] = []
        self.draws = 0
        self._add, self._sample = buffer.add, buffer.sample
        monkeypatch.setattr(buffer, "add", self.add)
        monkeypatch.setattr(buffer, "sample", self.sample)

    def add(self, episodes: list[Any]) -> None:
        steps = sum(getattr(one, "num_steps", None) or len(one) for one in episodes)
        self.env_steps += [len(self.env_steps)] * steps
        self.updates += [self.draws] * steps
        self._add(episodes)

    def sample(self, *arguments: Any, **options: Any) -> Any:
        self.draws += 1
        return self._sample(*arguments, **options)

    def births(self, age: str, rows: list[tuple[float, float, float]]) -> list[float]:
        """The births that rows in the order of their steps are to have."""
        expected = {"rows": [*range(len(rows))], "env_steps": self.env_steps, "updates": self.updates}
        return expected.get(age) or [version for _, version, _ in rows]


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_ages_are_those_of_the_rows_and_are_restored(
    recipe: str, age: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = algorithm_of(recipe, AGES[age])
    buffer = algorithm.local_replay_buffer
    watched = Watched(buffer, monkeypatch)
    for _ in range(3):
        result = algorithm.train()
    rows = ages_of(buffer.replay)
    if recipe == "prioritized" or age != "rows":  # otherwise the number of rows says it
        assert [birth for *_, birth in rows] == watched.births(age, rows)
        assert len({birth for *_, birth in rows}) > 15
    figures = result["replay_buffer"]
    assert 0 <= figures["drawn_age_mean"] <= figures["drawn_age_max"] < len(rows)
    assert age != "rows" or figures["drawn_age_max"] <= 60 + 3
    assert 1 <= figures["priorities"]["effective_sample_size"] < 0.9 * len(rows)

    path = algorithm.save_to_path(tmp_path / "saved")
    drawn = [observations(buffer.sample(num_items=16)) for _ in range(5)]
    again = Algorithm.from_checkpoint(path).local_replay_buffer
    assert ages_of(again.replay) == rows
    assert half_life_of(again.replay) == half_life_of(buffer.replay)
    for expected in drawn:
        np.testing.assert_array_equal(observations(again.sample(num_items=16)), expected)


def test_a_half_life_follows_its_schedule() -> None:
    algorithm = algorithm_of("uniform", AGES["env_steps"])
    buffer = algorithm.local_replay_buffer
    found = []
    for _ in range(3):
        algorithm.train()
        found.append(half_life_of(buffer.replay))
        # It moves in steps of 1 %.
        expected = 10.0 + min(buffer.get_sampled_timesteps() / 16, 50)
        assert found[-1] == pytest.approx(expected, rel=0.011)
    assert found[0] < 30 and found[-1] > 58


@pytest.mark.parametrize("age", ["env_steps", "updates"])
def test_ages_in_shards_count_from_the_clocks_of_all_shards(
    age: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = algorithm_of("prioritized", AGES[age], num_shards=2)
    buffer = algorithm.local_replay_buffer
    watched = Watched(buffer, monkeypatch)
    for _ in range(3):
        result = algorithm.train()
    assert len(buffer) == len(watched.env_steps)
    parts = on_shards(buffer, ages_of_shard)
    rows = sorted(row for part in parts for row in part)
    assert all(parts) and [birth for *_, birth in rows] == watched.births(age, rows)
    assert len({birth for *_, birth in rows}) > 15
    figures = result["replay_buffer"]
    assert 0 <= figures["drawn_age_mean"] <= figures["drawn_age_max"] < len(rows)

    path = algorithm.save_to_path(tmp_path / "saved")
    drawn = [observations(buffer.sample(num_items=16)) for _ in range(5)]
    algorithm.train()
    assert on_shards(buffer, ages_of_shard) != parts
    algorithm.restore_from_path(path)
    assert on_shards(buffer, ages_of_shard) == parts
    for expected in drawn:
        np.testing.assert_array_equal(observations(buffer.sample(num_items=16)), expected)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"half_life": 0}, "half_life is 0; it must be a finite number above 0"),
        ({"half_life": 9, "floor": 2}, "floor is 2; it must be a number in"),
        ({"half_live": 9}, "Age has no argument 'half_live'. Did you mean 'half_life'"),
        (
            {"half_life": RISING | {"init_args": {"start": 0.0, "end": 6.0, "duration": 9}}},
            r"half_life at reading 0 of Linear\(0.0, 6.0",
        ),
        (
            {"half_life": {"class_path": "lightning_replay.schedules.Linea"}},
            "age.half_life names 'lightning_replay.schedules.Linea'",
        ),
    ],
)
def test_a_wrong_age_is_refused_before_the_algorithm_is_built(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        rllib_ext.replay_config("uniform", capacity=100, age=wrong)


@pytest.mark.parametrize(
    ("key", "told"),
    [("policy", r"rows have .*\('next', 'policy'\)"), (["next", "falls"], r"of new row 0 is \[998.0\] after 999.0")],
)
def test_a_missing_or_falling_version_is_refused_with_the_first_rows(key: Any, told: str) -> None:
    age = {"half_life": 9, "version_key": key}
    config = small(DQNConfig, Versioned, "uniform", age=age, info_keys=["policy", "falls"])
    algorithm = built(config)
    with pytest.raises(ValueError, match=told):
        algorithm.train()
