# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.rllib_compat import complete_results
from tests.unit.rllib_ext.episodes import column, numbered, numbers

GAMMA = 0.9


def filled(recipe: str = "uniform", capacity: int = 100, **options: object) -> RecipeEpisodeReplayBuffer:
    """Rows whose first observation is their number: 0 to 4 terminated, 100 to 106 truncated, 200 to 202 running."""
    buffer = RecipeEpisodeReplayBuffer(recipe, capacity=capacity, seed=0, **options)
    buffer.add([numbered("a", 3), numbered("b", 7, offset=100, truncated=True)])
    buffer.add([numbered("a", 2, start=3, terminated=True), numbered("c", 3, offset=200)])
    return buffer


LAST = {0: 4, 100: 106, 200: 202}


def expected_return(number: int, n_step: int) -> tuple[float, int]:
    """Return from a row and the steps it takes, by adding up; the reward of a row is its number."""
    last = LAST[number // 100 * 100]
    steps = min(n_step, last - number + 1)
    return sum(GAMMA**step * (number + step) for step in range(steps)), steps


@pytest.mark.parametrize("n_step", [1, 2, 3, 10])
def test_returns_stop_where_the_episode_stops(n_step: int) -> None:
    episodes = filled().sample(num_items=200, n_step=n_step, gamma=GAMMA)
    drawn = numbers(episodes)
    assert set(drawn) == {*range(5), *range(100, 107), *range(200, 203)}
    expected = [expected_return(number, n_step) for number in drawn]
    np.testing.assert_allclose(column(episodes, "get_rewards"), [value for value, _ in expected], rtol=1e-6)
    steps = column(episodes, "get_extra_model_outputs", "n_step")
    assert steps.tolist() == [steps for _, steps in expected]
    following = np.concatenate([e.get_observations(slice(1, len(e) + 1)) for e in episodes])[:, 0]
    assert following.tolist() == [number + step for number, (_, step) in zip(drawn, expected, strict=True)]
    for episode in episodes:
        end = numbers([episode])[-1] + episode.get_extra_model_outputs("n_step", slice(0, len(episode)))[-1]
        assert (episode.is_terminated, episode.is_truncated) == (end == 5, end == 107)


def test_random_lengths_cover_the_closed_interval() -> None:
    episodes = filled().sample(num_items=2000, n_step=(2, 4), gamma=GAMMA)
    drawn, steps = numbers(episodes), column(episodes, "get_extra_model_outputs", "n_step")
    # from the first row of the truncated episode every length fits
    counts = np.bincount(steps[drawn == 100], minlength=5)
    assert counts[:2].tolist() == [0, 0] and counts[2:].min() > 20
    expected = [expected_return(number, step)[0] for number, step in zip(drawn, steps, strict=True)]
    np.testing.assert_allclose(column(episodes, "get_rewards"), expected, rtol=1e-6)


def test_n_step_asked_for_late_and_after_the_ring_wrapped() -> None:
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=6, seed=0)
    buffer.add(numbered("a", 5))
    buffer.add(numbered("a", 3, start=5))  # rows 2 to 7 stay
    buffer.sample(num_items=10)
    buffer.add(numbered("a", 1, start=8))  # row 8 overwrites row 2
    episodes = buffer.sample(num_items=100, n_step=3, gamma=1.0)
    drawn = numbers(episodes)
    assert set(drawn) == set(range(3, 9))
    expected = [sum(range(number, min(number + 3, 9))) for number in drawn]
    assert column(episodes, "get_rewards").tolist() == expected
    buffer.add(numbered("a", 1, start=9))  # and goes on linking what arrives
    episodes = buffer.sample(num_items=100, n_step=2, gamma=1.0)
    expected = [sum(range(number, min(number + 2, 10))) for number in numbers(episodes)]
    assert column(episodes, "get_rewards").tolist() == expected


def test_weights_follow_the_recipe_whatever_beta_says() -> None:
    buffer = filled("prioritized", priority_exponent=1.0, importance_exponent=1.0)
    drawn = numbers(buffer.sample(num_items=300, beta=None))
    buffer.update_priorities(np.where(drawn < 100, 4.0, 1.0))
    episodes = buffer.sample(num_items=300, beta=0.0)
    weights = column(episodes, "get_extra_model_outputs", "weights")
    np.testing.assert_allclose(weights, np.where(numbers(episodes) < 100, 0.25, 1.0), rtol=1e-4)
    assert weights.dtype == np.float32


def test_a_number_of_td_errors_that_is_not_that_of_the_rows_is_refused() -> None:
    buffer = filled("prioritized")
    with pytest.raises(ValueError, match="nothing was drawn since the last update"):
        buffer.update_priorities(np.zeros(5))
    buffer.sample(num_items=5)
    with pytest.raises(ValueError, match="5 rows"):
        buffer.update_priorities(np.zeros(4))
    with pytest.raises(ValueError, match="finite"):
        buffer.update_priorities(np.array([0, 1, np.nan, 2, 3]))
    buffer.update_priorities(np.zeros(5))


def test_length_and_counters() -> None:
    buffer = filled(capacity=10)
    assert len(buffer) == buffer.get_num_timesteps() == 10
    buffer.add(numbered("c", 1, start=9, offset=200))  # a gap
    buffer.add(numbered("c", 1, start=9, offset=200))  # a duplicate
    buffer.sample(num_items=7)
    root = MetricsLogger(root=True)
    root.aggregate([buffer.get_metrics()], key="replay_buffer")
    buffer.sample(num_items=5)
    root.aggregate([buffer.get_metrics()], key="replay_buffer")
    result = root.compile()["replay_buffer"]
    assert result["num_env_steps_stored"] == 10
    assert result["num_env_steps_added_lifetime"] == result["num_agent_steps_added_lifetime"]["default_agent"] == 16
    assert result["num_env_steps_evicted_lifetime"] == 6
    assert result["num_episodes_added_lifetime"] == 3
    sampled = result["num_module_steps_sampled_lifetime"]["default_policy"]
    assert result["num_env_steps_sampled_lifetime"] == sampled == 12
    assert (result["num_fragment_gaps_lifetime"], result["num_duplicate_env_steps_lifetime"]) == (1, 1)
    assert result["actual_n_step"] == 1.0
    assert (buffer.get_added_timesteps(), buffer.get_sampled_timesteps()) == (16, 12)


def test_results_are_the_same_with_metrics_of_every_tenth_draw() -> None:
    results: dict[int, list[dict[str, object]]] = {}
    for draws_per_report in (1, 10):
        buffer, root = filled(capacity=10), MetricsLogger(root=True)
        if draws_per_report > 1:
            complete_results(root, buffer)
        reported = []
        results[draws_per_report] = []
        for iteration, draws in enumerate((1, 12, 10, 9, 23, 0, 2)):
            for draw in range(draws):
                buffer.add(numbered(f"{iteration} {draw}", 1, offset=200))
                buffer.sample(num_items=3)
                metrics = buffer.get_metrics()
                reported.append(bool(metrics))
                root.aggregate([metrics], key="replay_buffer")
            results[draws_per_report].append(root.compile()["replay_buffer"])
        assert sum(reported) == {1: 57, 10: 0 + 1 + 1 + 0 + 2}[draws_per_report]
    assert results[10] == results[1]
    assert results[10][1]["num_env_steps_sampled"] == 36 and results[10][1]["drawn_age_mean"] >= 0


@pytest.mark.parametrize("n_step", [1, 3])
def test_interrupted_episodes_are_closed_as_truncated_once_new_steps_arrive(n_step: int) -> None:
    #  row        12..14         15 16
    #  episode    c, running     c again, from a runner that started anew
    buffer = filled()
    buffer.sample(num_items=3, n_step=n_step)
    again = RecipeEpisodeReplayBuffer("uniform", capacity=100)
    again.set_state(buffer.get_state())
    ends = again.replay.storage.all_rows["next", "truncated"].flatten()
    assert ends[:15].nonzero().flatten().tolist() == [9]
    again.add(numbered("c", 2, start=3, offset=200))
    assert ends[:17].nonzero().flatten().tolist() == [9, 14]
    assert again.replay.storage.all_rows["next", "done"].flatten()[14]
    trajectory = again.replay.storage.all_rows["trajectory"].flatten()
    assert trajectory[15] == trajectory[16] != trajectory[14]
    episodes = again.sample(num_items=200, n_step=2, gamma=1.0)
    returns = dict(zip(numbers(episodes), column(episodes, "get_rewards"), strict=True))
    assert (returns[202], returns[203]) == (202.0, 203.0 + 204.0)


def test_seeds_come_from_the_option_or_from_torch() -> None:
    def draws(**options: object) -> list[int]:
        buffer = RecipeEpisodeReplayBuffer("uniform", capacity=100, **options)
        buffer.add(numbered("a", 50))
        return numbers(buffer.sample(num_items=20)).tolist()

    assert draws(seed=1) == draws(seed=1) != draws(seed=2)
    torch.manual_seed(3)
    first = draws()
    torch.manual_seed(3)  # what RLlib does with config.seed just before it builds the buffer
    assert draws() == first


def test_an_empty_buffer_says_so() -> None:
    with pytest.raises(RuntimeError, match="empty"):
        RecipeEpisodeReplayBuffer("uniform", capacity=10).sample(num_items=3)


def test_observations_that_change_are_refused_and_nothing_is_lost() -> None:
    buffer = filled()
    odd = numbered("odd", 1, observations=[np.zeros(9, np.float32)] * 2)
    with pytest.raises(ValueError, match="One buffer stores rows of one space"):
        buffer.add([numbered("c", 1, start=3, offset=200), odd])
    assert len(buffer) == 15
    buffer.add(numbered("c", 1, start=3, offset=200))
    assert len(buffer) == 16
