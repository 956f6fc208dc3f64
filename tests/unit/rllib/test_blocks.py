# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.learner.blocks import TransitionBlock

from .episodes import numbered


@pytest.fixture
def block() -> TransitionBlock:
    return TransitionBlock(
        "rows_0",
        [
            {"arm": np.arange(4.0), "goal": (np.arange(4),)},
            {"arm": np.arange(4.0) + 10, "goal": (np.arange(4) + 10,)},
            np.arange(4) + 20,
            np.arange(4.0) + 30,
        ],
        {"weights": np.arange(4.0) + 40},
        terminated=True,
    )


def test_columns_are_answered_as_the_connectors_ask(block: TransitionBlock) -> None:
    assert isinstance(block, SingleAgentEpisode)
    assert len(block) == block.env_steps() == block.agent_steps() == 4
    assert block.get_observations(slice(0, 4))["arm"].tolist() == [0, 1, 2, 3]
    assert block.get_observations(slice(1, 5))["goal"][0].tolist() == [10, 11, 12, 13]
    assert block.get_actions(slice(0, 4)).tolist() == [20, 21, 22, 23]
    assert block.get_rewards(slice(0, 4)).tolist() == [30, 31, 32, 33]
    assert block.get_extra_model_outputs(key="weights", indices=slice(0, 4)).tolist() == [40, 41, 42, 43]
    assert block.get_infos(slice(0, 4)) == [{}] * 4
    assert (block.is_terminated, block.is_truncated, block.is_done, block.is_numpy) == (True, False, True, True)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda block: block.get_observations(),
        lambda block: block.get_observations(0),
        lambda block: block.get_observations(-1),
        lambda block: block.get_observations([0, 1]),
        lambda block: block.get_observations(slice(0, 5)),
        lambda block: block.get_observations(slice(-2, 4), neg_index_as_lookback=True),
        lambda block: block.get_observations(slice(0, 4), fill=0.0),
        lambda block: block.get_actions(slice(0, 2)),
        lambda block: block.get_rewards(slice(1, 4)),
        lambda block: block.get_extra_model_outputs("weights"),
        lambda block: block.get_return(),
        lambda block: block.get_state(),
        lambda block: block.rewards,
        lambda block: block.set_rewards(new_data=np.zeros(4)),
        lambda block: block[::2],
    ],
)
def test_everything_that_means_steps_in_a_row_is_refused(block: TransitionBlock, request_of: Any) -> None:
    with pytest.raises(ValueError, match=r"4 rows that do not follow each other in time.*layout=\"rows\""):
        request_of(block)


def test_a_slice_keeps_the_end_only_with_the_last_row(block: TransitionBlock) -> None:
    first, second = block[:3], block.slice(slice(3, None), len_lookback_buffer=1)
    assert (len(first), first.is_done, len(second), second.is_terminated) == (3, False, 1, True)
    assert first.get_observations(slice(1, 4))["arm"].tolist() == [10, 11, 12]
    assert second.get_observations(slice(0, 1))["goal"][0].tolist() == [3]
    assert second.get_extra_model_outputs("weights", slice(0, 1)).tolist() == [43]
    assert len({block.id_, first.id_, second.id_}) == 3 and all("_" in part.id_ for part in (first, second))


@pytest.mark.parametrize("layout", ["flagged", "blocks"])
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_no_row_of_a_drawn_batch_is_pickled_in_band(layout: str, recipe: str) -> None:
    """Drawn columns are views of packed rows; in band are names, dtypes and shapes, whatever the number of rows."""
    buffer = RecipeEpisodeReplayBuffer(recipe, capacity=1000, layout=layout, seed=0)
    buffer.add(numbered("a", 900))
    in_band = []
    for count in (8, 512):
        (block,) = buffer.sample(num_items=count, n_step=1)
        assert not block.get_observations(slice(0, count)).flags.c_contiguous
        buffers: list[pickle.PickleBuffer] = []
        in_band.append(len(cloudpickle.dumps(block, protocol=5, buffer_callback=buffers.append)))
        columns = 6 if layout == "blocks" else 8
        row = 2 * 8 + 8 + 4 + 4 + 8 + (2 if layout == "flagged" else 0)
        assert len(buffers) == columns and sum(len(one.raw()) for one in buffers) == count * row
    assert abs(in_band[0] - in_band[1]) < 32 and in_band[1] < 1200
