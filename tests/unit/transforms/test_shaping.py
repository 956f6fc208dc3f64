# SPDX-License-Identifier: Apache-2.0
"""Rewards shaped by a potential."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import Compose

from lightning_replay.replay import Replay
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.transforms import ManhattanDistance, NStepTransitions, OneAt, PotentialShaping
from tests.transitions import numbered_steps


def make_batch() -> TensorDict:
    """A corridor: 0 -> 1, 1 -> 2 truncated, 2 -> 3 terminated; rewards 10, 20, 30."""
    column = torch.tensor([[0.0], [1.0], [2.0]])
    following = {
        "observation": column + 1,
        "reward": torch.tensor([[10.0], [20.0], [30.0]]),
        "terminated": torch.tensor([[False], [False], [True]]),
        "truncated": torch.tensor([[False], [True], [False]]),
        "done": torch.tensor([[False], [True], [True]]),
    }
    return TensorDict({"observation": column, "next": following}, [3])


def squared(observation: torch.Tensor) -> torch.Tensor:
    return observation[:, 0].square() + 1


def test_by_hand_terminal_potential_is_zero_and_truncation_keeps_it() -> None:
    batch = PotentialShaping(squared, discount=0.5)(make_batch())
    # potentials 1 2 5 (10): 10 + 2/2 - 1, 20 + 5/2 - 2, 30 + 0 - 5
    assert batch["next", "reward"].tolist() == [[10.0], [20.5], [25.0]]


def test_n_step_rows_use_their_own_discount() -> None:
    batch = make_batch().set("discount", torch.tensor([[0.125], [0.25], [0.0]]))
    shaped = PotentialShaping(squared, discount=0.5)(batch)
    # 10 + 2/8 - 1, 20 + 5/4 - 2, 30 - 5
    assert shaped["next", "reward"].tolist() == [[9.25], [19.25], [25.0]]


@pytest.mark.parametrize("n_steps", [1, 3])
def test_shaping_a_drawn_return_equals_summing_shaped_rewards(n_steps: int) -> None:
    discount = 0.9
    steps = numbered_steps(0, 30, done_every=7)
    plain = Replay(storage=PackedStorage(30), batch_size=20, n_steps=n_steps, discount=discount, seed=0)
    shaping = PotentialShaping(squared, discount)
    late = Replay(
        storage=PackedStorage(30), batch_size=20, n_steps=n_steps, discount=discount, transform=shaping, seed=0
    )
    late.extend(steps)
    plain.extend(shaping(steps.clone()))  # shaped before it is stored, summed when it is drawn
    drawn, expected = late.sample()["next", "reward"], plain.sample()["next", "reward"]
    torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-3)  # rewards of hundreds cancel
    assert torch.equal(late.storage.all_rows["next", "reward"], steps["next", "reward"])


def test_steps_of_rows_without_discount_and_discounts_that_differ() -> None:
    batch = make_batch().set("steps_to_next_obs", torch.tensor([[3], [2], [1]]))
    expected = make_batch().set("discount", torch.tensor([[0.125], [0.25], [0.0]]))
    shaping = PotentialShaping(squared, discount=0.5)
    assert torch.equal(shaping(batch)["next", "reward"], shaping(expected)["next", "reward"])
    replay = Replay(storage=PackedStorage(9), transform=shaping)
    assert replay.returns == [(1, 0.5)]
    for returns in ({"n_steps": 2, "discount": 0.9}, {"transform": Compose(shaping, NStepTransitions(2, 0.9))}):
        with pytest.raises(ValueError, match=r"has the discount 0.5 and the returns of the buffer 0.9"):
            Replay(storage=PackedStorage(9), **{"transform": shaping, **returns})


def test_other_batch_shapes_keys_and_reward_shapes() -> None:
    batch = make_batch()
    expected = PotentialShaping(squared, 0.5)(make_batch())["next", "reward"]
    pairs = torch.stack([batch, batch], dim=1)
    assert torch.equal(PotentialShaping(squared, 0.5)(pairs)["next", "reward"], torch.stack([expected, expected], 1))
    wide = make_batch().apply(lambda column: column.expand(3, 2) if column.is_floating_point() else column)
    assert torch.equal(PotentialShaping(squared, 0.5)(wide[0])["next", "reward"], expected[0].expand(2))
    flat = make_batch()
    flat["next", "reward"] = flat["next", "reward"].long().flatten()
    assert PotentialShaping(squared, 0.5)(flat)["next", "reward"].tolist() == expected.flatten().tolist()
    named = TensorDict({"state": {"x": batch["observation"]}, "next": batch["next"].clone()}, [3])
    named["next", "state", "x"] = batch["next", "observation"]
    shaping = PotentialShaping(squared, 0.5, observation_key=["state", "x"])
    assert torch.equal(shaping(named)["next", "reward"], expected)


def test_potentials() -> None:
    grid = torch.tensor([[0, 0, 9], [2, 5, 9], [6, 1, 9]])
    assert ManhattanDistance([2, 5], scale=0.5, components=[0, 1])(grid).tolist() == [-3.5, 0.0, -4.0]
    assert ManhattanDistance([2, 5, 8])(grid.double()).tolist() == [-8.0, -1.0, -9.0]
    assert OneAt([6, None], [None, 1], components=[0, -2])(grid).tolist() == [0.0, 0.0, 1.0]
    assert OneAt([2, 0, 9], [2, 5, 9])(grid.reshape(3, 3, 1)).tolist() == [0.0, 1.0, 0.0]


def test_a_terminal_state_may_have_any_potential_and_others_not() -> None:
    def undefined_at_the_end(observation: torch.Tensor) -> torch.Tensor:
        return torch.where(observation[:, 0] == 3, math.nan, observation[:, 0])

    assert PotentialShaping(undefined_at_the_end, 1.0)(make_batch())["next", "reward"].tolist() == [[11], [21], [28]]
    with pytest.raises(ValueError, match=r"NaN or infinite, for example at the observation \[1.0\]"):
        PotentialShaping(lambda observation: 1 / (observation[:, 0] - 1), 1.0)(make_batch())


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of 6 observations is a tensor \[6\];.*returned shape \[6, 1\]"):
        PotentialShaping(lambda observation: observation, 0.9)(make_batch())
    with pytest.raises(ValueError, match="returned float"):
        PotentialShaping(lambda observation: 1.0, 0.9)(make_batch())  # type: ignore[arg-type, return-value]
    batch = make_batch()
    del batch["next", "terminated"]
    with pytest.raises(ValueError, match="potential of a terminal state is 0"):
        PotentialShaping(squared, 0.9)(batch)
    with pytest.raises(ValueError, match=r"the batch has no \('state',\).*observation_key="):
        PotentialShaping(squared, 0.9, observation_key="state")(make_batch())
    batch = make_batch()
    del batch["next", "observation"]
    with pytest.raises(ValueError, match=r"the batch has no \('next', 'observation'\)"):
        PotentialShaping(squared, 0.9)(batch)


def test_bad_potentials_are_refused() -> None:
    for goal, message in (([], "goal is"), ([math.nan], r"goal\[0\] is nan")):
        with pytest.raises(ValueError, match=message):
            ManhattanDistance(goal)
    with pytest.raises(ValueError, match="low has 1 bounds and high 2"):
        OneAt([1.0], [1.0, 2.0])
    for low, message in ((3.0, "every low must be at most its high"), (math.nan, r"low\[0\] is nan")):
        with pytest.raises(ValueError, match=message):
            OneAt([low], [2.0])
    with pytest.raises(ValueError, match=r"components is \[0\]; name as many"):
        ManhattanDistance([1.0, 2.0], components=[0])
    with pytest.raises(ValueError, match="goal has 1 numbers and an observation 3 components"):
        ManhattanDistance([1.0])(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"components is \[3\]; an observation has 3 components"):
        OneAt([1.0], [1.0], components=[3])(torch.zeros(2, 3))
