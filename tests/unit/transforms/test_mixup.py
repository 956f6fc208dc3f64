# SPDX-License-Identifier: Apache-2.0
"""Mixed transitions, leaf by leaf."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay import load_replay, recipes
from lightning_replay.samplers.pairs import RandomPairSampler
from lightning_replay.schedules import Linear
from lightning_replay.transforms import MixPairs, MixStates, mixup_coefficients
from tests.transitions import numbered_steps


def make_pairs(count: int = 64, **flags: torch.Tensor) -> TensorDict:
    """Random pairs ``[count, 2]``; ``flags`` replaces entries under "next"."""
    zeros = torch.zeros(count, 2, 1, dtype=torch.bool)
    following = {"terminated": zeros, "truncated": zeros, "done": zeros, **flags}
    following |= {"observation": torch.randn(count, 2, 3), "reward": torch.randn(count, 2, 1)}
    return TensorDict(
        {
            "observation": torch.randn(count, 2, 3),
            "action": torch.randn(count, 2, 2),
            "next": following,
            "generation": torch.randint(9, (count, 2)),
            "trajectory": torch.randint(9, (count, 2)),
            "priority_weight": torch.rand(count, 2),
        },
        [count, 2],
    )


def flags(count: int, *pairs: tuple[int, int]) -> torch.Tensor:
    """All False but at these (pair, which of the two)."""
    result = torch.zeros(count, 2, 1, dtype=torch.bool)
    for pair, which in pairs:
        result[pair, which] = True
    return result


MIXED = ["observation", "action", ("next", "observation"), ("next", "reward")]
KEPT = ["generation", "trajectory", "priority_weight", ("next", "terminated"), ("next", "truncated"), ("next", "done")]


def test_floating_parts_of_a_transition_are_mixed_with_one_coefficient_and_the_rest_is_of_the_first() -> None:
    pairs = make_pairs()
    batch = MixPairs(seed=0)(pairs)
    assert batch.batch_size == torch.Size([64])
    weight = batch["mixup_coefficient"]
    assert weight.dtype == torch.float32 and weight.shape == (64,)
    assert weight.min() > 0.0 and weight.max() < 1.0 and weight.unique().numel() == 64
    for key in MIXED:
        first, second = pairs[key].unbind(1)
        expected = weight.unsqueeze(1) * first + (1 - weight.unsqueeze(1)) * second
        torch.testing.assert_close(batch[key], expected)
    for key in KEPT:
        assert torch.equal(batch[key], pairs[key][:, 0])
    assert set(batch.keys(True, True)) == set(pairs.keys(True, True)) | {"mixup_coefficient"}


def test_a_pair_with_a_terminal_step_on_either_side_is_its_first_transition_bit_for_bit() -> None:
    pairs = make_pairs(8, terminated=flags(8, (1, 0), (2, 1), (3, 0), (3, 1)))
    pairs["next", "observation"][2, 1] = float("nan")  # as some collectors leave the state after the last
    pairs["observation"][1, 1] = float("inf")
    batch = MixPairs(seed=0)(pairs)
    assert batch["mixup_coefficient"][1:4].tolist() == [1.0, 1.0, 1.0]
    for key in MIXED:
        assert torch.equal(batch[key][1:4], pairs[key][1:4, 0])
        assert not (batch[key][4:] == pairs[key][4:, 0]).any()
    assert batch["next", "terminated"].squeeze(1).tolist() == [False, True, False, True] + [False] * 4


def test_truncated_steps_are_mixed() -> None:
    pairs = make_pairs(4, truncated=flags(4, (0, 0), (1, 1)), done=flags(4, (0, 0), (1, 1)))
    batch = MixPairs(seed=0)(pairs)
    assert (batch["mixup_coefficient"] < 1).all()
    assert batch["next", "truncated"].squeeze(1).tolist() == [True, False, False, False]


def test_rows_of_different_discount_are_not_mixed() -> None:
    pairs = make_pairs(3)
    pairs["discount"] = torch.tensor([[0.9, 0.9], [0.9, 0.81], [0.81, 0.81]]).unsqueeze(2)
    pairs["steps_to_next_obs"] = torch.tensor([[1, 1], [1, 2], [2, 2]]).unsqueeze(2)
    batch = MixPairs(seed=0)(pairs)
    assert (batch["mixup_coefficient"] == 1).tolist() == [False, True, False]
    assert torch.equal(batch["observation"][1], pairs["observation"][1, 0])
    torch.testing.assert_close(batch["discount"], torch.tensor([[0.9], [0.9], [0.81]]))
    assert batch["steps_to_next_obs"].flatten().tolist() == [1, 1, 2]


@pytest.mark.parametrize("terminated", [flags(4), flags(4, (0, 1))])
def test_a_row_paired_with_itself_has_coefficient_1(terminated) -> None:
    """With the shortcut of a batch without terminal steps and without it."""
    pairs = make_pairs(4, terminated=terminated)
    pairs["index"] = torch.tensor([[3, 5], [2, 2], [7, 1], [0, 0]])
    batch = MixPairs(seed=0)(pairs)
    assert (batch["mixup_coefficient"] == 1).tolist() == [bool(terminated.any()), True, False, True]


def test_fraction_is_the_share_of_mixed_pairs() -> None:
    share = (MixPairs(fraction=0.25, seed=0)(make_pairs(4000))["mixup_coefficient"] < 1).float().mean()
    assert abs(float(share) - 0.25) < 0.03
    assert (MixPairs(fraction=0.0, seed=0)(make_pairs())["mixup_coefficient"] == 1).all()


def share_of(batch: TensorDict) -> float:
    return float((batch["mixup_coefficient"] < 1).float().mean())


def test_the_fraction_follows_its_clock() -> None:
    of_draws = MixPairs(fraction=Linear(1.0, 0.0, duration=2), seed=0)
    found = [(of_draws.fraction, share_of(of_draws(make_pairs(2_000)))) for _ in range(4)]
    assert [fraction for fraction, _ in found] == [1.0, 0.5, 0.0, 0.0]
    assert all(share == pytest.approx(fraction, abs=0.05) for fraction, share in found)
    for clock in ("updates", "env_steps"):
        schedule = Linear(0.0, 1.0, duration=8, clock=clock)
        replay = recipes.neighborhood_mixup(capacity=512, batch_size=512, num_neighbors=3, fraction=schedule, seed=0)
        replay.extend(numbered_steps(0, 512))
        for reading in (0, 2, 8):
            other = "updates" if clock == "env_steps" else "env_steps"
            replay.advance(**{clock: reading, other: 99})
            assert share_of(replay.sample()) == pytest.approx(reading / 8, abs=0.08)


@pytest.mark.parametrize("clock", ["draws", "updates"])
def test_a_saved_buffer_goes_on_with_the_fraction(clock: str, tmp_path) -> None:
    schedule = Linear(1.0, 0.0, duration=8, clock=clock)
    replay = recipes.neighborhood_mixup(capacity=64, batch_size=8, num_neighbors=3, fraction=schedule, seed=0)
    replay.extend(numbered_steps(0, 64))
    for number in range(5):
        replay.advance(updates=number)
        replay.sample()
    replay.save(tmp_path)
    built = recipes.neighborhood_mixup(capacity=64, batch_size=8, num_neighbors=3, fraction=schedule, seed=1)
    built.load(tmp_path)
    for again in (built, load_replay(tmp_path)):
        copied, original = copy.deepcopy(again), copy.deepcopy(replay)
        for _ in range(5):
            one, other = original.sample(), copied.sample()
            assert torch.equal(one["index"], other["index"])
            assert torch.equal(one["mixup_coefficient"], other["mixup_coefficient"])


def test_integers_are_refused_unless_keys_leave_them_out_and_other_dtypes_are_kept() -> None:
    pairs = make_pairs(4)
    pairs["action"] = torch.randint(5, (4, 2))
    pairs["observation"] = pairs["observation"].double()
    pairs["next", "observation"] = pairs["next", "observation"].half()
    with pytest.raises(ValueError, match=r"'action' has dtype torch.int64; MixPairs mixes floating columns"):
        MixPairs(seed=0)(pairs)
    batch = MixPairs(seed=0, keys=["observation", ("next", "observation"), ("next", "reward")])(pairs)
    assert torch.equal(batch["action"], pairs["action"][:, 0])
    assert batch["observation"].dtype == torch.float64 and batch["next", "observation"].dtype == torch.float16


def test_everything_under_a_key_is_mixed_and_the_index_keeps_both() -> None:
    pairs = make_pairs(4)
    pairs["observation"] = TensorDict(
        {"arm": torch.randn(4, 2, 3), "is_held": torch.ones(4, 2, dtype=torch.bool)}, [4, 2]
    )
    pairs["index"] = torch.arange(8).reshape(4, 2)
    batch = MixPairs(seed=0)(pairs)
    assert not (batch["observation", "arm"] == pairs["observation", "arm"][:, 0]).any()
    assert batch["observation", "is_held"].tolist() == [True] * 4
    assert torch.equal(batch["index"], pairs["index"])
    pairs["observation", "step"] = torch.ones(4, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\('observation', 'step'\) has dtype torch.int64"):
        MixPairs(seed=0)(pairs)


def test_coefficients_of_extreme_concentrations_are_numbers_in_the_unit_interval() -> None:
    for concentration in (1e-3, 1e3):
        drawn = mixup_coefficients(concentration, 10_000, torch.Generator().manual_seed(0))
        assert ((drawn >= 0) & (drawn <= 1)).all()


def test_bad_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batch of size \[64\]; it mixes pairs.*NeighborhoodMixupSampler"):
        MixPairs()(make_pairs()[:, 0])
    with pytest.raises(ValueError, match=r'no \("next", "terminated"\)'):
        MixPairs()(make_pairs().exclude(("next", "terminated")))


def test_the_stored_rows_are_not_changed() -> None:
    rows = make_pairs(32)[:, 0]
    for transform, sampler in ((MixPairs(seed=0), RandomPairSampler(seed=0)), (MixStates(seed=0), None)):
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(32), sampler=sampler, transform=transform, batch_size=16
        )
        buffer.extend(rows.clone())
        buffer.sample()
        assert torch.equal(buffer.storage.get(slice(0, 32))["observation"], rows["observation"])


def test_states_move_towards_their_next_states_and_nothing_else_changes() -> None:
    steps = make_pairs(16, terminated=flags(16, (0, 0)))[:, 0].clone()
    before = steps.clone()
    batch = MixStates(seed=0)(steps)
    weight = batch["mixup_coefficient"].unsqueeze(1)
    expected = weight * before["observation"] + (1 - weight) * before["next", "observation"]
    torch.testing.assert_close(batch["observation"], expected)
    assert weight[0] < 1  # a terminal step is no exception
    for key in (key for key in before.keys(True, True) if key != "observation"):
        assert torch.equal(batch[key], before[key])


def test_every_state_under_a_key_is_mixed_with_its_next_one() -> None:
    before = {"near": torch.randn(4, 2), "far": torch.randn(4, 3)}
    after = {name: torch.randn_like(state) for name, state in before.items()}
    replay = recipes.s4rl(10, 4, keys=["sensors"], seed=0)
    replay.extend(TensorDict({"sensors": before, "next": {"sensors": after}}, [4]))
    batch = replay.sample()
    weight, index = batch["mixup_coefficient"].unsqueeze(1), batch["index"]
    for name in before:
        expected = weight * before[name][index] + (1 - weight) * after[name][index]
        torch.testing.assert_close(batch["sensors", name], expected)
    before["goal"] = torch.zeros(4, 1, dtype=torch.int64)
    replay = recipes.s4rl(10, 4)
    replay.extend(TensorDict({"observation": before, "next": {"observation": before}}, [4]))
    with pytest.raises(ValueError, match=r"'goal'\) has dtype torch.int64; MixStates changes floating columns"):
        replay.sample()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.exclude("observation"), "the batch has no 'observation'; name the columns of MixStates"),
        (
            lambda rows: rows.exclude(("next", "observation")),
            r"the batch has no \('next', 'observation'\); name the columns of",
        ),
        (
            lambda rows: rows.set(("next", "observation"), rows["next", "observation"].double()),
            "'observation' is torch.float32 .* and the next one torch.float64",
        ),
        (
            lambda rows: rows.set(("next", "observation"), rows["next", "observation"][:, :1]),
            r"'observation' is torch.float32 \[2, 3\] and the next one torch.float32 \[2, 1\]",
        ),
        (lambda rows: rows.set("observation", rows["observation"].long()), "'observation' has dtype torch.int64"),
    ],
)
def test_observations_that_cannot_be_mixed_with_the_next_are_refused_when_first_drawn(change, message) -> None:
    replay = recipes.s4rl(10, 2)
    replay.extend(change(numbered_steps(0, 4)))
    with pytest.raises(ValueError, match=message):
        replay.sample()


def test_indexing_a_buffer_of_pairs_reads_rows_as_they_are_stored() -> None:
    replay = recipes.mixup(10, 2)
    replay.extend(numbered_steps(0, 4))
    assert replay[:]["next", "reward"].flatten().tolist() == [0, 1, 2, 3]
