# SPDX-License-Identifier: Apache-2.0
"""Partners that are near in observations and actions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay import load_replay, recipes
from lightning_replay.replay import Replay
from lightning_replay.samplers import NeighborhoodMixupSampler
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.transforms import MixPairs
from lightning_replay.transforms.mixup import MIXED_KEYS
from tests.stored import stored_rows
from tests.transitions import connected

FIXTURE = json.loads((Path(__file__).parents[2] / "fixtures" / "nmer_neighbours.json").read_text())


def make_steps(observation: Any, action: Any) -> TensorDict:
    observation, action = torch.as_tensor(observation), torch.as_tensor(action)
    count = len(observation)
    flags = torch.zeros(count, 1, dtype=torch.bool)
    following = {"observation": observation.clone(), "reward": torch.zeros(count, 1)}
    following |= {"terminated": flags, "truncated": flags, "done": flags}
    return TensorDict({"observation": observation, "action": action, "next": following}, [count])


def random_steps(count: int) -> TensorDict:
    return make_steps(torch.randn(count, 3), torch.rand(count, 2))


def make_buffer(sampler: NeighborhoodMixupSampler, capacity: int = 64, **options: Any) -> TensorDictReplayBuffer:
    keys = [key for key in MIXED_KEYS if sampler.discrete is None or key != "action"]
    transform = MixPairs(seed=0, keys=keys)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=32, transform=transform, **options
    )


def candidates(buffer: TensorDictReplayBuffer, slot: int, draws: int = 400) -> set[int]:
    index = torch.full((draws,), slot)
    return set(buffer.sampler.partners(index, buffer.storage).tolist())


@pytest.mark.parametrize("case", FIXTURE["cases"], ids=lambda case: case["name"])
def test_partners_are_the_worked_neighbours(case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    sampler = NeighborhoodMixupSampler(num_neighbors=inputs["k"], refresh_interval=1, seed=0)
    buffer = make_buffer(sampler)
    steps = make_steps(torch.tensor(inputs["states"]).double(), torch.tensor(inputs["actions"]).double())
    buffer.extend(steps)
    lists = expected.get("neighbour_sets") or dict(enumerate(expected["neighbours_nearest_first"]))
    for slot, neighbors in lists.items():
        assert candidates(buffer, int(slot)) == set(neighbors)


def test_a_lone_row_is_its_own_partner() -> None:
    buffer = make_buffer(NeighborhoodMixupSampler(seed=0))
    buffer.extend(random_steps(1))
    assert buffer.sample()["index"].tolist() == [[0, 0]] * 32


def test_overwritten_rows_are_forgotten() -> None:
    buffer = make_buffer(NeighborhoodMixupSampler(num_neighbors=1, refresh_interval=1, seed=0), capacity=3)
    action = torch.zeros(3, 1)
    buffer.extend(make_steps([[0.0], [1.0], [5.0]], action))
    assert [candidates(buffer, slot) for slot in range(3)] == [{1}, {0}, {1}]
    buffer.extend(make_steps([[4.0]], action[:1]))
    # slot 0 moved to 4: it is now near slot 2
    assert [candidates(buffer, slot) for slot in range(3)] == [{2}, {0}, {0}]


def test_several_nested_observations() -> None:
    keys = [("sensors", "near"), ("sensors", "far"), "action"]
    buffer = make_buffer(NeighborhoodMixupSampler(num_neighbors=1, feature_keys=keys, seed=0))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=buffer.sampler, batch_size=4)
    sensors = {"near": torch.tensor([[0.0], [9.0], [0.1]]), "far": torch.zeros(3, 2, 2)}
    buffer.extend(TensorDict({"sensors": sensors, "action": torch.zeros(3, 1)}, [3]))
    assert candidates(buffer, 0) == {2}


def nested_steps(observation: dict[str, torch.Tensor], action: torch.Tensor) -> TensorDict:
    steps = make_steps(torch.zeros(len(action), 1), action)
    steps["observation"] = TensorDict(observation, [len(action)])
    steps["next", "observation"] = steps["observation"].apply(lambda column: column + 1)
    return steps


def test_dict_observations_are_joined_and_mixed_as_one_vector() -> None:
    near, far, action = torch.randn(20, 2), torch.randn(20, 1, 2), torch.rand(20, 1)
    options = {"capacity": 50, "batch_size": 8, "num_neighbors": 2, "refresh_interval": 1, "seed": 0}
    nested, flat = recipes.neighborhood_mixup(**options), recipes.neighborhood_mixup(**options)
    nested.extend(nested_steps({"near": near, "far": far}, action))
    joined = torch.cat((far.flatten(1), near), 1)  # in the order of the names
    flat.extend(make_steps(joined, action))
    batch, expected = nested.sample(), flat.sample()
    assert torch.equal(batch["index"], expected["index"])
    observation = torch.cat((batch["observation", "far"].flatten(1), batch["observation", "near"]), 1)
    assert torch.equal(observation, expected["observation"])
    torch.testing.assert_close(batch["next", "observation", "near"], batch["observation", "near"] + 1)
    assert (batch["mixup_coefficient"] < 1).any()


def test_the_order_in_which_nested_columns_are_stored_changes_nothing() -> None:
    near, far, action = torch.tensor([[0.0], [5.0]]), torch.tensor([[5.0], [0.0]]), torch.zeros(2, 1)
    one, other = (make_buffer(NeighborhoodMixupSampler(num_neighbors=1, refresh_interval=1, seed=0)) for _ in range(2))
    one.extend(nested_steps({"near": near, "far": far}, action))
    other.extend(nested_steps({"far": far, "near": near}, action))
    other.sampler.load_state_dict(one.sampler.state_dict())
    other.extend(nested_steps({"far": far[1:], "near": near[1:] + 0.1}, action[1:]))
    assert candidates(other, 2) == {1}


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (
            {"near": torch.zeros(4, 2), "pixels": torch.zeros(4, 1, 8, 8, dtype=torch.uint8)},
            r"\('observation', 'pixels'\) has dtype torch.uint8 .*an image; .*columns with feature_keys= and.* keys=",
        ),
        (
            {"near": torch.zeros(4, 2, dtype=torch.int64)},
            r"\('observation', 'near'\) has dtype torch.int64 .* Name other columns with feature_keys=, store",
        ),
    ],
)
def test_nested_columns_that_are_no_numbers_to_mix_are_named(observation, message) -> None:
    replay = recipes.neighborhood_mixup(50, 8)
    with pytest.raises(ValueError, match=message):
        replay.extend(nested_steps(observation, torch.zeros(4, 1)))
    assert len(replay) == 0


def test_a_recipe_takes_the_keys_that_the_errors_name(tmp_path: Path) -> None:
    steps = connected(make_steps(torch.randn(20, 2), torch.rand(20, 1)))
    for place in ((), ("next",)):
        steps.rename_key_((*place, "observation"), (*place, "position"))
    with pytest.raises(
        ValueError, match="no 'observation'.*with feature_keys=, out of 'action', 'position', \\('next', 'done"
    ):
        recipes.neighborhood_mixup(50, 8).extend(steps)
    replay = recipes.neighborhood_mixup(50, 8, feature_keys=["position", "action"])
    replay.extend(steps)
    with pytest.raises(ValueError, match=r"no \('next', 'observation'\), 'observation'; MixPairs .* with keys="):
        replay.sample()
    keys = ["position", "action", ["next", "position"], ("next", "reward")]  # a list, as in YAML, is a nested key too
    replay = recipes.neighborhood_mixup(50, 8, feature_keys=["position", "action"], keys=keys, seed=0)
    replay.extend(steps)
    batch = replay.sample()
    weight = batch["mixup_coefficient"].unsqueeze(1)
    first, second = steps["position"][batch["index"]].unbind(1)
    torch.testing.assert_close(batch["position"], weight * first + (1 - weight) * second)
    assert (weight < 1).any()
    replay.save(tmp_path)
    assert torch.equal(load_replay(tmp_path).sample()["position"], replay.sample()["position"])
    for other in (recipes.mixup, recipes.continuous_transition):
        replay = other(50, 8, keys=keys, seed=0)
        replay.extend(steps)
        assert (replay.sample()["mixup_coefficient"] < 1).any()


def test_discrete_actions_are_refused_before_anything_is_stored() -> None:
    for action in (torch.zeros(4, dtype=torch.int64), torch.ones(4, 2, dtype=torch.bool)):
        sampler = NeighborhoodMixupSampler()
        replay = Replay(storage=PackedStorage(8), sampler=sampler, transform=MixPairs(), batch_size=4)
        with pytest.raises(ValueError, match=r"'action' has dtype .*discrete='same_action'"):
            replay.extend(make_steps(torch.randn(4, 2), action))
        assert len(replay) == 0
        with pytest.raises(ValueError, match=r"discrete='same_action'"):
            make_buffer(NeighborhoodMixupSampler()).extend(make_steps(torch.randn(4, 2), action))


def test_images_missing_keys_and_nan_are_refused_before_anything_is_stored() -> None:
    replay = Replay(storage=PackedStorage(8), sampler=NeighborhoodMixupSampler(), transform=MixPairs(), batch_size=4)
    with pytest.raises(ValueError, match="an image; distances of pixels do not measure"):
        replay.extend(make_steps(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.rand(4, 1)))
    with pytest.raises(ValueError, match="have no 'action'"):
        replay.extend(random_steps(4).exclude("action"))
    steps = random_steps(4)
    steps["observation"][2, 1] = float("nan")
    with pytest.raises(ValueError, match=r"nan in rows \[2\] of 4"):
        replay.extend(steps)
    assert len(replay) == 0
    replay.extend(random_steps(4))
    assert len(replay) == 4


def test_bad_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="needs integer actions"):
        make_buffer(NeighborhoodMixupSampler(discrete="same_action")).extend(random_steps(4))
    with pytest.raises(RuntimeError, match="needs stored rows"):
        NeighborhoodMixupSampler().recall_at()


@pytest.mark.parametrize("one_hot", [False, True])
def test_same_action_restricts_partners_and_copies_the_action(one_hot: bool) -> None:
    action = torch.arange(40) % 3
    stored = torch.nn.functional.one_hot(action) if one_hot else action
    buffer = make_buffer(NeighborhoodMixupSampler(num_neighbors=4, discrete="same_action", seed=0))
    buffer.extend(make_steps(torch.randn(40, 2), stored))
    for _ in range(3):  # the ring wraps, slots change their action
        buffer.extend(make_steps(torch.randn(17, 2), stored[:17]))
    batch = torch.cat([buffer.sample() for _ in range(16)])
    rows = stored_rows(buffer)
    first, second = batch["index"].unbind(1)
    assert torch.equal(rows["action"][first], rows["action"][second])
    assert torch.equal(batch["action"], rows["action"][first])
    assert (first != second).float().mean() > 0.8


def test_same_action_state_goes_on() -> None:
    def make() -> TensorDictReplayBuffer:
        return make_buffer(NeighborhoodMixupSampler(num_neighbors=4, discrete="same_action"), capacity=30)

    buffer, again = make(), make()
    steps = make_steps(torch.randn(80, 2), torch.randint(3, (80,)))
    buffer.extend(steps[:40])
    buffer.sample()
    again.load_state_dict(buffer.state_dict())
    assert torch.equal(buffer.sample()["index"], again.sample()["index"])
    for each in (buffer, again):
        each.extend(steps[40:])
    assert torch.equal(buffer.sample()["index"], again.sample()["index"])


def test_recall_bytes_and_emptying() -> None:
    sampler = NeighborhoodMixupSampler(num_neighbors=5, seed=0)
    buffer = make_buffer(sampler)
    buffer.extend(random_steps(64))
    buffer.sample()
    assert sampler.recall_at() == sampler.recall_at(5) == 1.0
    assert sampler.nbytes > 0
    buffer.empty()
    assert sampler.nbytes == 0
