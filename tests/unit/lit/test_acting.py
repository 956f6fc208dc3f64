# SPDX-License-Identifier: Apache-2.0
"""What an agent of the user's own may return as actions and values, and how anything else is refused."""

from __future__ import annotations

import re

import lightning as L
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Tuple
from tensordict import TensorDict

from lightning_replay.levels import UniformLevels
from lightning_replay.levels.environments import make_level_vector
from lightning_replay.lit.collection import Collection
from lightning_replay.lit.level_collection import LevelCollection
from lightning_replay.lit.rollouts import (
    ActionReader,
    episode_returns,
    level_returns,
    make_environments,
    stochastic_policy,
)
from tests.unit.lit.level_toys import Stairs, Valuer
from tests.unit.lit.toys import Counting, Tiny, make_replay

BOX = Box(-1.0, 1.0, (1,), np.float32)
VECTOR = Box(-1.0, 1.0, (2,), np.float32)
COUNTED_FROM_ONE = Discrete(3, start=1)


@pytest.mark.parametrize(
    ("space", "count", "returned", "expected"),
    [
        (Discrete(3), 2, torch.tensor([0, 2]), [0, 2]),
        (Discrete(3), 2, [0, 2], [0, 2]),
        (Discrete(3), 2, torch.tensor([[0], [2]]), [0, 2]),
        (Discrete(3), 2, torch.tensor([0, 2], dtype=torch.int32), [0, 2]),
        (Discrete(2), 2, torch.tensor([False, True]), [0, 1]),
        (Discrete(3), 1, 2, [2]),
        (Discrete(3), 1, torch.tensor(2), [2]),
        (COUNTED_FROM_ONE, 1, 3, [3]),
        (BOX, 1, 0.5, [[0.5]]),
        (BOX, 2, torch.tensor([0.5, 1.0]), [[0.5], [1.0]]),
        (BOX, 1, 1, [[1.0]]),
        (BOX, 1, torch.nn.Parameter(torch.tensor([0.5])), [[0.5]]),
        (BOX, 1, torch.tensor([[0.5]], dtype=torch.bfloat16), [[0.5]]),
        (VECTOR, 2, torch.tensor([[0.5, 1.0], [0.0, 1.0]]), [[0.5, 1.0], [0.0, 1.0]]),
        (MultiDiscrete([2, 3]), 1, np.array([1, 2]), [[1, 2]]),
    ],
)
def test_whatever_has_one_meaning_is_an_action(space, count, returned, expected) -> None:
    action = ActionReader(space)(returned, count, "Own.act")
    assert action.tolist() == expected
    assert action.dtype == space.dtype and action.shape == (count, *space.shape)
    assert space.contains(action[0])


@pytest.mark.parametrize(
    ("space", "count", "returned", "error", "message"),
    [
        (Discrete(2), 1, None, TypeError, "NoneType None for a batch of 1 .* integers [1] from 0 to 1, as"),
        (Discrete(2), 1, torch.tensor([1.0]), TypeError, "float32 of shape [1] for a batch of 1"),
        (Discrete(2), 3, 1, ValueError, "int 1 for a batch of 3 .* return integers [3] from 0 to 1"),
        (Discrete(2), 3, [0, 1], ValueError, "list [0, 1] for a batch of 3"),
        (Discrete(2), 3, [[0], [1, 0]], TypeError, "list [[0], [1, 0]] for a batch of 3"),
        (Discrete(2), 2, torch.zeros(2, 2), TypeError, "float32 of shape [2, 2] .* take the argmax(-1)."),
        (Discrete(2), 2, torch.zeros(2, 2).long(), ValueError, "int64 of shape [2, 2] .* take the argmax(-1)."),
        (Discrete(2), 1, 2, ValueError, "list [2] for .* Discrete(2); return integers [1] from 0 to 1"),
        (COUNTED_FROM_ONE, 1, 0, ValueError, "list [0] .* return integers [1] from 1 to 3"),
        (MultiDiscrete([3, 2]), 1, [[0, 2]], ValueError, "list [[0, 2]] .* integers [1, 2] from [0 0] to [2 1]"),
        (VECTOR, 2, torch.zeros(2), ValueError, "float32 of shape [2] for a batch of 2 .* return floats [2, 2], as"),
        (VECTOR, 2, torch.zeros(2, 3), ValueError, "float32 of shape [2, 3] .* Box(-1.0, 1.0, (2,), float32); return"),
        (VECTOR, 1, "left", TypeError, "str 'left' for"),
        (Discrete(2), 1, (torch.zeros(1), None), TypeError, "tuple (tensor([0.]), None) for"),
        (BOX, 1, torch.zeros(1, 1, dtype=torch.complex64), TypeError, "complex64 of shape [1, 1]"),
    ],
)
def test_what_is_no_action_is_refused_with_what_is(space, count, returned, error, message) -> None:
    pattern = ".*".join(re.escape(part) for part in ("Own.act returned " + message).split(" .* "))
    with pytest.raises(error, match=pattern):
        ActionReader(space)(returned, count, "Own.act")


def test_actions_with_parameters_are_a_pair() -> None:
    read = ActionReader(Tuple([Discrete(2), Box(0.0, 1.0, (1,)), Box(0.0, 9.0, (2,))]))
    discrete, parameters = read(([1], [0.5, 3.0, 4.0]), 1, "Own.act")
    assert discrete.tolist() == [1] and parameters.tolist() == [[0.5, 3.0, 4.0]]
    assert parameters.dtype == np.float32
    with pytest.raises(TypeError, match=r"Own.act returned int 1 .* pair \(discrete, parameters\): .*\[1\].*\[1, 3\]"):
        read(1, 1, "Own.act")
    with pytest.raises(ValueError, match=r"float32 of shape \[1, 2\] .* return floats \[1, 3\]"):
        read((torch.tensor([1]), torch.zeros(1, 2)), 1, "Own.act")


class Own(Tiny):
    def __init__(self, returned) -> None:
        super().__init__()
        self.returned = returned

    def act(self, observation, explore):
        return self.returned


@pytest.mark.parametrize("returned", [1, [1], np.array([1]), torch.tensor(1)])
def test_collection_and_evaluation_take_what_one_environment_is_given(returned) -> None:
    replay, make = make_replay(), lambda: make_environments(Counting, {"num_actions": 3}, 1, asynchronous=False)
    Collection(replay, make, warmup_steps=5, env_steps=10, seed=0).collect_until(10, Own(returned))
    actions = replay[:]["action"]
    assert actions.shape == (10,) and actions.dtype == torch.int64 and actions[5:].tolist() == [1] * 5
    assert list(episode_returns(Own(returned), Counting(num_actions=3), episodes=2, seed=0)) == [15.0, 15.0]


def test_collection_and_evaluation_name_the_agent_and_the_action_space() -> None:
    make = lambda: make_environments(Counting, {"num_actions": 3}, 2, asynchronous=False)  # noqa: E731
    collection = Collection(make_replay(), make, warmup_steps=2, env_steps=10, seed=0)
    with pytest.raises(ValueError, match=r"^Own.act returned int 1 for a batch of 2 .*Discrete\(3\)"):
        collection.collect_until(10, Own(1))
    with pytest.raises(ValueError, match=r"^Own.act returned list \[3\] for a batch of 1 .*Discrete\(3\)"):
        list(episode_returns(Own(3), Counting(num_actions=3), episodes=1, seed=0))


def test_levels_are_tested_with_whatever_is_an_action() -> None:
    with stochastic_policy(Own([0, 1]), seed=0) as policy:
        returns = level_returns(policy, Stairs, [4, 5], num_envs=2)
    assert returns.tolist() == pytest.approx([4.1, 5.1 + 5.2])
    with pytest.raises(ValueError, match=r"^policy returned int64 of shape \[3\] for a batch of 2 .*Discrete\(3\)"):
        level_returns(lambda observations: torch.zeros(3).long(), Stairs, [4, 5], num_envs=2)
    with (
        stochastic_policy(Own("left"), seed=0) as policy,
        pytest.raises(TypeError, match="^policy returned str 'l"),
    ):
        level_returns(policy, Stairs, [4, 5], num_envs=2)


class Recorded(Valuer):
    def __init__(self, change) -> None:
        super().__init__()
        self.change = change

    def act_with_value(self, observation):
        return self.change(super().act_with_value(observation))


def collect(agent, num_envs: int = 2):
    levels = UniformLevels(8, seed=0)
    make = lambda seed: make_level_vector(Stairs, num_envs, levels, seed=seed)  # noqa: E731
    collection = LevelCollection(levels, make, seed=0)
    try:
        return collection.collect(agent, 3)
    finally:
        collection.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda recorded: recorded.to_dict(),
        lambda recorded: {key: column.numpy() for key, column in recorded.items()},
        lambda recorded: recorded.set("action", recorded["action"].unsqueeze(-1)),
        lambda recorded: recorded.set("action", recorded["action"].int()),
        lambda recorded: recorded.set("state_value", recorded["state_value"].squeeze(-1)),
        lambda recorded: recorded.set("state_value", recorded["state_value"].requires_grad_()),
    ],
)
def test_rollouts_take_dictionaries_and_the_shapes_of_one_meaning(change) -> None:
    torch.manual_seed(0)
    expected = collect(Valuer())
    torch.manual_seed(0)
    rollout = collect(Recorded(change))
    assert (rollout == expected).all()
    assert rollout["action"].dtype == torch.int64 and rollout["action"].shape == (2, 3)
    assert rollout["state_value"].shape == rollout["next", "state_value"].shape == (2, 3, 1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda recorded: recorded["action"], ValueError, r"int64 of shape \[2\] for a batch of 2; return a Tens"),
        (lambda recorded: (recorded["action"], 1.0), ValueError, r"tuple \(tensor\(.*with action, state_value"),
        (lambda recorded: recorded.exclude("action"), ValueError, r"columns of .*'action_log_prob': \[2\].* with act"),
        (lambda recorded: recorded.exclude("state_value"), ValueError, "with action, state_value"),
        (lambda recorded: recorded[:1], ValueError, r"columns of .*'action': \[1\].* for a batch of 2"),
        (lambda recorded: recorded.to_dict() | {"logits": torch.zeros(3, 3)}, ValueError, r"columns of .*\[3, 3\]"),
        (lambda recorded: recorded.set("action", recorded["logits"]), TypeError, r"\[2, 3\] .*Disc.*integers \[2\]"),
        (lambda recorded: recorded.set("state_value", torch.zeros(2, 2)), ValueError, r"\[2, 2\] .*floats \[2, 1\]"),
    ],
)
def test_rollouts_name_what_act_with_value_must_record(change, error, message) -> None:
    with pytest.raises(error, match="^Recorded.act_with_value returned .*" + message):
        collect(Recorded(change))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.mean, r"float32 of shape \[\] for a batch of \d; accepted are floats \[\d, 1\]"),
        (lambda found: 3.0, r"float 3.0 for a batch of \d; accepted are floats"),
    ],
)
def test_rollouts_name_what_value_must_return(value, message) -> None:
    agent = Valuer()
    recorded, agent.value = agent.value, lambda observation: value(recorded(observation))
    agent.act_with_value = lambda observation: TensorDict(
        {"action": agent.act(observation, True), "state_value": recorded(observation)}, [len(observation)]
    )
    with pytest.raises(ValueError, match=f"^Valuer.value returned .*{message}"):
        collect(agent)


class Scaled(torch.nn.Module):
    """Computes a factor where the mode is switched."""

    def train(self, mode: bool = True):
        self.factor = 1 if mode else 2
        return super().train(mode)


class Watched(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(torch.nn.Dropout())
        self.frozen = torch.nn.Sequential(torch.nn.Dropout()).eval()
        self.network = torch.nn.Sequential(torch.nn.Dropout(), Scaled())

    def act(self, observation, explore):
        assert not any(part.training for part in self.modules()) and self.network[1].factor == 2
        assert self.scripted(torch.ones(100)).sum() == 100
        return torch.zeros(len(observation), 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_collection_switches_the_mode_of_every_part_and_back() -> None:
    agent = Watched()
    collection = Collection(
        make_replay(), lambda: make_environments(Counting, {}, 1, False), warmup_steps=1, env_steps=100, seed=0
    )
    collection.collect_until(3, agent)
    agent.network.append(torch.nn.Dropout())
    collection.collect_until(4, agent)
    frozen = set(agent.frozen.modules())
    assert all(part.training is (part not in frozen) for part in agent.modules()) and agent.network[1].factor == 1
