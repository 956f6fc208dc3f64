# SPDX-License-Identifier: Apache-2.0
"""Rows kept by importance behind RLlib's interface: signals by hand, returns formed on the way in, what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import TD_ERROR_KEY
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.n_step import MAX_LAG
from rllib_ext.learner.blocks import learner_order
from rllib_ext.learner.signals import add_signals
from tests.unit.rllib_ext.episodes import column, numbered, numbers
from tests.unit.rllib_ext.recurrent_episodes import recurrent

GAMMA = 0.5  # whose powers are exact
FIXTURE = json.loads((Path(__file__).parents[3] / "fixtures" / "retention_priority.json").read_text())


def retaining(capacity: int = 100, n_step: int = 1, **options: Any) -> RecipeEpisodeReplayBuffer:
    buffer = RecipeEpisodeReplayBuffer("surprise_retention", **{"capacity": capacity, "seed": 0, **options})
    buffer.form_returns(n_step, GAMMA)
    return buffer


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def stored_rows(buffer: RecipeEpisodeReplayBuffer) -> Counter[tuple[float, ...]]:
    """Observation, return, next observation, steps and terminated of every stored row."""
    rows = buffer.replay.storage.get(slice(0, len(buffer)))
    steps = rows.get("steps_to_next_obs", torch.ones(len(rows), 1))
    columns = (rows["observation"][:, :1], rows["next", "reward"], rows["next", "observation"][:, :1], steps)
    return Counter(map(tuple, torch.cat([*columns, rows["next", "terminated"]], 1).tolist()))


def expected_rows(first: int, last: int, n_step: int, terminated: bool) -> Counter[tuple[float, ...]]:
    """The same of an episode ``first .. last`` whose reward in a row is its number, added up."""
    rows: Counter[tuple[float, ...]] = Counter()
    for number in range(first, last):
        steps = min(n_step, last - number)
        summed = sum(GAMMA**step * (number + step) for step in range(steps))
        rows[number, summed, number + steps, steps, terminated and number + steps == last] += 1
    return rows


@pytest.mark.parametrize("case", FIXTURE["cases"], ids=lambda case: case["name"])
def test_the_papers_priority_arrives_through_the_signals(case: dict[str, Any]) -> None:
    given, expected = case["inputs"], case["expected"]
    buffer = retaining(q_inverse_temperature=given.get("temperature_beta", 1.0))
    buffer.add(numbered("a", 1, actions=[np.int64(given["action"])], terminated=True))
    buffer.sample(num_items=1)
    buffer.update_priorities(np.array([[7.0, given["surprise"], *given["q_values"]]]))
    priority = buffer.replay.writer.retention_priority(torch.tensor([0]))
    assert priority.item() == pytest.approx(expected["priority"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_learners", [0, 2, 3])
@pytest.mark.parametrize("layout", ["flagged", "blocks", "rows"])
@pytest.mark.parametrize("priority_exponent", [0.0, 0.5])
def test_every_signal_reaches_its_row(layout: str, num_learners: int, priority_exponent: float) -> None:
    buffer = retaining(layout=layout, num_learners=num_learners, priority_exponent=priority_exponent)
    buffer.add([numbered(f"e{number}", 2, offset=10 * number, terminated=number % 3 > 0) for number in range(20)])
    values = np.random.default_rng(0).normal(size=(400, 2))
    given: dict[int, float] = {}
    for _ in range(3):
        episodes = buffer.sample(num_items=30)
        drawn = numbers(episodes)
        signals = np.column_stack((-drawn, drawn + 0.5, values[drawn]))  # the TD error is no surprise here
        order = learner_order([len(episode) for episode in episodes], num_learners) if num_learners > 1 else slice(None)
        buffer.update_priorities(signals[order])
        given |= {int(number): number + 0.5 for number in drawn}
    observed = buffer.replay.storage.all_rows["observation"][:40, 0].int().tolist()
    priority = buffer.replay.writer.retention_priority(torch.arange(40)).tolist()
    weight = softmax(values)
    for number, kept_for in zip(observed, priority, strict=True):
        if number in given:
            assert kept_for == pytest.approx(given[number] * weight[number, number % 10 % 2], rel=1e-5)
        else:
            assert kept_for == 1.0  # before any surprise is known
    if priority_exponent:  # draws go by the TD errors
        drawn = numbers([episode for _ in range(50) for episode in buffer.sample(num_items=40)])
        assert np.bincount(drawn)[190] > 4 * max(np.bincount(drawn)[10], 1)


@pytest.mark.parametrize("n_step", [2, 3, 5])
@pytest.mark.parametrize("fragment", [1, 2, 4])
def test_formed_returns_are_those_of_whole_episodes(n_step: int, fragment: int) -> None:
    buffer = retaining(n_step=n_step)
    ends = {"a": (0, 9, True), "b": (100, 107, False), "c": (200, 203, True)}
    for start in range(0, 9, fragment):
        sent = []
        for name, (offset, last, terminated) in ends.items():
            length = min(fragment, last - offset - start)
            if length > 0:
                over = start + length == last - offset
                flags = {"terminated": over and terminated, "truncated": over and not terminated}
                sent.append(numbered(name, length, start=start, offset=offset, lookback=min(start, 1), **flags))
        buffer.add(sent)
    expected: Counter[tuple[float, ...]] = Counter()
    for first, last, terminated in ends.values():
        expected += expected_rows(first, last, n_step, terminated)
    assert stored_rows(buffer) == expected
    episodes = buffer.sample(num_items=50, n_step=n_step, gamma=GAMMA)
    drawn, steps = numbers(episodes), column(episodes, "get_extra_model_outputs", "n_step")
    following = np.concatenate([e.get_observations(slice(1, len(e) + 1)) for e in episodes])[:, 0]
    np.testing.assert_array_equal(drawn + steps, following)
    assert buffer.modules["default_policy"].mean_n_step == steps.mean()


@pytest.mark.parametrize(("n_step", "gamma"), [(1, GAMMA), (2, GAMMA), (3, 0.9), ((1, 3), GAMMA)])
def test_other_returns_than_the_formed_ones_are_refused(n_step: Any, gamma: float) -> None:
    buffer = retaining(n_step=3)
    buffer.add(numbered("a", 5))
    with pytest.raises(ValueError, match=r"over 3 steps with gamma 0.5. Call rllib_ext.configure\(config\) last"):
        buffer.sample(num_items=3, n_step=n_step, gamma=gamma)


@pytest.mark.parametrize("options", [{}, {"recipe": None, "writer": "lightning_replay.writers.RetentionWriter"}])
def test_an_interval_of_lengths_is_refused(options: dict[str, Any]) -> None:
    buffer = RecipeEpisodeReplayBuffer(**{"recipe": "surprise_retention", "capacity": 10, **options})
    with pytest.raises(ValueError, match=r"n_step is \(1, 5\), an interval .* Give one length"):
        buffer.form_returns((1, 5), GAMMA)


def test_retention_put_together_from_parts_forms_returns() -> None:
    writer = {
        "class_path": "lightning_replay.writers.RetentionWriter",
        "init_args": {"rule": {"class_path": "lightning_replay.writers.SurpriseOnly"}},
    }
    buffer = RecipeEpisodeReplayBuffer(None, capacity=50, writer=writer, seed=0)
    buffer.form_returns(3, GAMMA)
    buffer.add(numbered("a", 9, terminated=True))
    assert buffer.options.modules_with_retention() and stored_rows(buffer) == expected_rows(0, 9, 3, True)


def test_steps_of_an_episode_that_broke_off_are_stored_after_a_while() -> None:
    buffer = retaining(n_step=3)
    buffer.add([numbered("goes on", 4, offset=100), numbered("lost", 4)])
    for call in range(1, MAX_LAG + 1):
        assert max(row[0] for row in stored_rows(buffer) if row[0] < 100) == 1  # the others wait
        buffer.add(numbered("goes on", 1, start=3 + call, offset=100))
    running = 104 + MAX_LAG
    waits = expected_rows(running - 2, running, 3, False)
    assert stored_rows(buffer) == expected_rows(0, 4, 3, False) + expected_rows(100, running, 3, False) - waits
    assert len(buffer.replay.transform[0].get_extra_state()["waiting"]["trajectory"]) == 2  # of the one that goes on
    # should it go on after all, its returns are formed as ever
    buffer.add(numbered("lost", 3, start=4, terminated=True))
    assert expected_rows(4, 7, 3, True) <= stored_rows(buffer)


def test_no_return_goes_over_steps_that_could_not_be_measured() -> None:
    def measure(module_id: str, episodes: list[SingleAgentEpisode]) -> np.ndarray:
        if 4 in numbers(episodes):
            raise RuntimeError("the Learner was lost")
        return np.ones(sum(map(len, episodes)))

    buffer = retaining(n_step=3)
    buffer.set_initial_surprise(measure)
    buffer.add(numbered("a", 4))
    with pytest.raises(RuntimeError, match="the Learner was lost"):
        buffer.add(numbered("a", 3, start=4))
    buffer.add(numbered("a", 4, start=7, terminated=True))
    for call in range(MAX_LAG):
        buffer.add(numbered(f"other {call}", 1, offset=100 + 10 * call, terminated=True))
    own = Counter({row: count for row, count in stored_rows(buffer).items() if row[0] < 100})
    assert own == expected_rows(0, 4, 3, False) + expected_rows(7, 11, 3, True)


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_restored_buffer_draws_alike_and_stores_what_waited_once_steps_arrive(n_step: int) -> None:
    buffer = retaining(n_step=n_step)
    buffer.add([numbered("a", 6), numbered("b", 5, offset=100, terminated=True)])
    drawn = numbers(buffer.sample(num_items=20, n_step=n_step, gamma=GAMMA))
    buffer.update_priorities(np.column_stack((drawn, drawn**2, drawn, -drawn)))
    again = retaining(n_step=n_step, seed=5)
    again.set_state(buffer.get_state())
    for _ in range(3):
        expected, restored = (one.sample(num_items=20, n_step=n_step, gamma=GAMMA) for one in (buffer, again))
        for method in ("get_observations", "get_actions", "get_rewards"):
            np.testing.assert_array_equal(column(restored, method), column(expected, method))
    index = torch.arange(len(buffer))
    priority = [one.replay.writer.retention_priority(index) for one in (buffer, again)]
    assert torch.equal(*priority)
    assert stored_rows(again) == stored_rows(buffer)
    again.add(numbered("a", 3, start=6))  # an episode of its own now: the one that ran was interrupted
    waits = expected_rows(7, 9, n_step, False) if n_step > 1 else Counter()
    whole = expected_rows(0, 6, n_step, False) + expected_rows(100, 105, n_step, True)
    assert stored_rows(again) == whole + expected_rows(6, 9, n_step, False) - waits
    # where rows may be refused, the newest stored one need not be the last of its episode: it is not marked
    assert not again.replay.storage.get(slice(0, len(again)))["next", "truncated"].any()


def test_rows_that_are_refused_are_counted_as_such() -> None:
    #  surprise 10 - t: the first five stay, and those with 5 and less are refused
    surprise = {"class_path": "lightning_replay.writers.RetentionWriter"}
    buffer = RecipeEpisodeReplayBuffer(None, capacity=5, writer=surprise, seed=0)
    buffer.replay.writer.initial_surprise = lambda rows: 10.0 - rows["observation"][:, 0]
    buffer.add(numbered("a", 5))
    buffer.add(numbered("a", 4, start=5))
    assert sorted(buffer.replay.storage.all_rows["observation"][:, 0].tolist()) == [0, 1, 2, 3, 4]
    buffer.add([numbered("b", 1, offset=-100), numbered("d", 1, offset=9.5)])  # more surprising than all, and less
    buffer.sample(num_items=4)
    root = MetricsLogger(root=True)
    root.aggregate([buffer.get_metrics()], key="replay_buffer")
    result = root.compile()["replay_buffer"]
    assert (result["num_env_steps_added_lifetime"], result["num_env_steps_stored"]) == (11, 5)
    assert result["num_env_steps_evicted_lifetime"] == 1
    retention = result["retention"]
    assert (retention["admitted"], retention["refused"], retention["evicted"]) == (6, 5, 1)
    # kept are the first four rows and the last but one, the newest are the last five, and no episode has ended
    kept, newest = ([surprise**0.5 for surprise in part] for part in ((10, 9, 8, 7, 110), (4, 3, 2, 110, 0.5)))
    assert retention["td_error_over_newest"] == pytest.approx(sum(kept) / sum(newest))
    assert retention["age_over_capacity"] == pytest.approx((10 + 9 + 8 + 7 + 1) / 25)
    assert (retention["terminal_share"], retention["terminal_over_newest"]) == (0.0, 0.0)
    assert result["bytes_stored"] == buffer.replay.nbytes


@pytest.mark.parametrize("layout", ["flagged", "blocks", "rows"])
def test_candidates_are_measured_in_the_form_in_which_they_would_be_drawn(layout: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("rllib_ext.buffer.buffer.ROWS_PER_PASS", 7)
    sizes = []

    def measure(module_id: str, episodes: list[SingleAgentEpisode]) -> np.ndarray:
        assert module_id == "default_policy"
        sizes.append(sum(map(len, episodes)))
        steps = column(episodes, "get_extra_model_outputs", "n_step")
        surprise = numbers(episodes) + 0.1 * steps
        for episode in episodes:  # as connectors may, which are given the batch to change it
            for observation in episode.get_observations(slice(0, len(episode))):
                observation[:] = -1.0
        return surprise

    buffer = retaining(n_step=2, layout=layout)
    buffer.set_initial_surprise(measure)
    buffer.add([numbered(f"e{number}", 3, offset=10 * number, terminated=True) for number in range(5)])
    rows = buffer.replay.storage.get(slice(0, 15))
    steps = torch.tensor([2, 2, 1] * 5)
    priority = buffer.replay.writer.retention_priority(torch.arange(15))
    torch.testing.assert_close(priority, rows["observation"][:, 0] + 0.1 * steps)
    assert sizes == [7, 7, 1]


def test_a_measure_of_the_users_own_stays_and_rules_without_surprise_need_none() -> None:
    options = [
        {"initial_surprise": lambda rows: torch.full((len(rows),), 3.0)},
        {"rule": {"class_path": "lightning_replay.writers.OldestLeaves"}},
    ]
    for option, priority in zip(options, (3.0, 0.0), strict=True):
        buffer = retaining(**option)
        buffer.set_initial_surprise(lambda module_id, episodes: 1 / 0)
        buffer.add(numbered("a", 2))
        assert buffer.replay.writer.retention_priority(torch.arange(2)).tolist() == [priority] * 2


def test_a_recurrent_module_is_refused_before_anything_is_stored() -> None:
    buffer = retaining()
    with pytest.raises(ValueError, match="RetentionWriter keeps single .* learns from sequences as they were played"):
        buffer.add(recurrent("a", 4))
    assert len(buffer) == 0
    buffer.add(numbered("a", 4))
    assert len(buffer) == 4


def test_signals_of_another_shape_are_refused_and_change_nothing() -> None:
    buffer = retaining()
    buffer.add(numbered("a", 4))
    buffer.sample(num_items=3)
    with pytest.raises(ValueError, match=r"td_error must hold one value|surprise is \[2\] for 3 rows"):
        buffer.update_priorities(np.ones((2, 4)))
    with pytest.raises(ValueError, match="surprise is nan in rows"):
        buffer.update_priorities(np.array([[1.0, np.nan, 0.0, 0.0]] * 3))
    buffer.update_priorities(np.array([[1.0, 4.0, -np.inf, 0.0]] * 3))  # an action that is not allowed
    assert set(buffer.replay.writer.retention_priority(torch.arange(4)).tolist()) <= {0.0, 1.0, 4.0}


def test_a_module_without_action_values_is_named_with_the_way_out():
    metrics = MetricsLogger(root=False)
    metrics.log_value(("mine", TD_ERROR_KEY), torch.zeros(3), reduce="item_series")
    with pytest.raises(ValueError, match=r"module 'mine' returns no action values.*modules=\{'mine': None\}"):
        add_signals(metrics, "mine", None, {}, {"embedding": torch.zeros(3)})
