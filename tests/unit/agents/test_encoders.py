# SPDX-License-Identifier: Apache-2.0
"""Encoders of the entries of an observation, and the agents that learn through them."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from gymnasium.spaces.utils import flatten
from gymnasium.vector.utils import concatenate, create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay.agents import CQL, DQN, IQL, MPDQN, SAC, TD3
from lightning_replay.agents.encoders import Encoder, described_image
from lightning_replay.agents.spaces import observation_size
from lightning_replay.lit.rollouts import as_input
from tests.unit.agents.toys import fit, flags, make_actions

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SHAPES = st.sampled_from([(), (1,), (3,), (2, 3), (2, 3, 2)])
LEAVES = st.one_of(
    SHAPES.map(lambda shape: Box(-1.0, 1.0, shape, np.float64)),
    SHAPES.map(lambda shape: Box(-9, 9, shape, np.int32)),
    st.builds(lambda count, start: Discrete(count, start=start), st.integers(1, 5), st.integers(-3, 3)),
    st.sampled_from([[2], [3, 1, 2], [[2, 3], [4, 1]]]).map(MultiDiscrete),
    st.integers(1, 4).map(MultiBinary),
)
SPACES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.dictionaries(st.sampled_from("abcde"), parts, min_size=1, max_size=3).map(Dict),
        st.lists(parts, min_size=1, max_size=3).map(Tuple),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(space=SPACES, count=st.integers(1, 4), seed=st.integers(0, 99))
def test_features_without_images_are_those_of_gymnasium(space: Space[Any], count: int, seed: int) -> None:
    space.seed(seed)
    samples = [space.sample() for _ in range(count)]
    observation = as_input(concatenate(space, samples, create_empty_array(space, count)))
    described = observation_size(space)
    encoder = Encoder(described)
    features = encoder(observation)
    expected = np.stack([flatten(space, sample) for sample in samples])
    assert features.dtype == torch.float32 and features.shape == (count, encoder.size)
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-6)
    assert isinstance(described, int) == (isinstance(space, Box) and len(space.shape) == 1 and space.dtype.kind == "f")
    assert torch.equal(encoder(observation.unsqueeze(0))[0], features)


def test_bytes_that_are_no_image_are_scaled() -> None:
    assert observation_size(Box(0, 255, (128,), np.uint8)) == {"encoder": "flat", "shape": [128], "high": 255.0}
    encoder = Encoder({"encoder": "flat", "shape": [2], "high": 255.0})
    assert encoder(torch.tensor([[0, 51]], dtype=torch.uint8)).tolist() == [[0.0, pytest.approx(0.2)]]


@pytest.mark.parametrize(
    ("shape", "dtype", "channels_first", "kernel_size"),
    [
        ((84, 84, 3), np.uint8, False, 8),
        ((4, 84, 84), np.uint8, True, 8),
        ((10, 10, 10), np.uint8, True, 2),  # MinAtar-v0, Seaquest
        ((7, 7, 3), np.uint8, False, 2),
        ((3, 8, 8), np.float32, True, 2),
        ((40, 36), np.uint8, False, 8),
    ],
)
def test_images_by_their_shape(shape: tuple[int, ...], dtype: type, channels_first: bool, kernel_size: int) -> None:
    image = observation_size(Box(0, 9, shape, dtype))
    assert image["encoder"] == "convolutions" and image["channels_first"] is channels_first and image["high"] == 9.0
    assert image["kernel_sizes"][0] == kernel_size
    encoder = Encoder(image)
    assert encoder(torch.zeros(5, *shape, dtype=torch.uint8)).shape == (5, 64)


def test_layouts_of_one_image_have_the_same_features() -> None:
    images = torch.randint(256, (2, 3, 9, 11, 3), dtype=torch.uint8)  # [B, T] of them
    last, first = (Encoder(described_image(shape, 255.0, shape[0] == 3)) for shape in ((9, 11, 3), (3, 9, 11)))
    first.load_state_dict(last.state_dict())
    features = last(images)
    assert features.shape == (2, 3, 64)
    torch.testing.assert_close(first(images.movedim(-1, 2)), features)
    torch.testing.assert_close(last(images.float()), features)
    assert not torch.allclose(features[0, 0], features[0, 1])


def test_the_order_of_entries_does_not_matter() -> None:
    one, other = ({"b": 2, "a": {"d": 1, "c": 1}}, {"a": {"c": 1, "d": 1}, "b": 2})
    inner = {"d": torch.ones(1, 1), "c": torch.zeros(1, 1)}
    observation = TensorDict({"b": torch.tensor([[3.0, 4.0]]), "a": inner}, [1])
    assert Encoder(one)(observation).tolist() == Encoder(other)(observation).tolist() == [[0.0, 1.0, 3.0, 4.0]]


STATE = {"position": 2, "room": {"encoder": "one_hot", "low": 0, "high": 1}}
SEEN = {**STATE, "camera": described_image((6, 6, 3), 255.0, False)}
BOUNDS: dict[str, Any] = {"action_low": [-2.0], "action_high": [1.0], "hidden_sizes": (8,)}
PARAMETERS = {"parameter_sizes": [1, 1], "parameter_low": [-1.0, 0.0], "parameter_high": [1.0, 2.0]}
AGENTS = {
    "dqn": lambda size, **options: DQN(size, 2, hidden_sizes=(8,), **options),
    "averse": lambda size, **options: DQN(size, 2, hidden_sizes=(8,), conflict_aversion=0.5, **options),
    "td3": lambda size, **options: TD3(size, **BOUNDS, policy_delay=1, **options),
    "sac": lambda size, **options: SAC(size, **BOUNDS, **options),
    "iql": lambda size, **options: IQL(size, **BOUNDS, **options),
    "cql": lambda size, **options: CQL(size, **BOUNDS, sampled_actions=2, **options),
    "mpdqn": lambda size, **options: MPDQN(size, **PARAMETERS, hidden_sizes=(8,), **options),
}


def seen(count: int, size: Any = SEEN) -> TensorDict:
    everything = {
        "position": torch.randn(count, 2),
        "room": torch.randint(2, (count,)),
        "camera": torch.randint(256, (count, 6, 6, 3), dtype=torch.uint8),
    }
    return TensorDict({name: everything[name] for name in size}, [count])


def make_batch(agent: Any, size: Any = SEEN, count: int = 8) -> TensorDict:
    action = make_actions(agent, count)
    following = {"observation": seen(count, size), "reward": torch.randn(count, 1), **flags(count)}
    columns = {"observation": seen(count, size), "action": action, "next": following, "table": torch.arange(count) % 2}
    return TensorDict(columns | {"priority_weight": torch.rand(count)}, [count])


def joined(batch: TensorDict, encoder: Encoder) -> TensorDict:
    """The batch with features in place of observations."""
    batch = batch.clone()
    for part in (batch, batch["next"]):
        part["observation"] = encoder(part["observation"])
    return batch


@pytest.mark.parametrize("name", AGENTS)
def test_entries_without_images_are_learned_from_as_their_concatenation(name: str, tmp_path: Path) -> None:
    agent, plain = AGENTS[name](STATE), AGENTS[name](4)
    assert agent.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(agent.state_dict())
    batches = [make_batch(agent, STATE) for _ in range(3)]
    _, outputs = fit(agent, batches, tmp_path, seed=1)
    _, expected = fit(plain, [joined(batch, agent.observation_encoder) for batch in batches], tmp_path, seed=1)
    for mine, others in zip(outputs, expected, strict=True):
        torch.testing.assert_close(mine["td_error"], others["td_error"], rtol=0, atol=0)
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in agent.state_dict().items())


@pytest.mark.parametrize("name", AGENTS)
def test_an_encoder_of_images_learns_and_its_target_follows(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    agent = AGENTS[name](SEEN, target_update_rate=0.25)
    before = copy.deepcopy(agent.observation_encoder)
    fit(agent, [make_batch(agent)], tmp_path, seed=1)
    encoder, target = agent.observation_encoder, agent.target_observation_encoder
    assert encoder.size == 64 + 4
    changed = [not torch.equal(old, new) for old, new in zip(before.parameters(), encoder.parameters(), strict=True)]
    assert all(changed)
    for old, new, kept in zip(before.parameters(), encoder.parameters(), target.parameters(), strict=True):
        torch.testing.assert_close(kept, old + 0.25 * (new - old))
    actions = agent.act(seen(5), explore=False)
    assert len(actions[0] if isinstance(actions, tuple) else actions) in (5, 2)


@pytest.mark.parametrize("name", ["td3", "sac"])
def test_the_loss_of_the_critics_alone_trains_the_encoder(name: str) -> None:
    agent = AGENTS[name](SEEN)
    batch, parameters = make_batch(agent), [*agent.observation_encoder.parameters()]
    loss = agent.actor_loss(batch)
    (loss[0] if isinstance(loss, tuple) else loss).backward()
    assert all(one.grad is None for one in parameters) and all(one.grad is not None for one in agent.actor.parameters())
    agent.distances(batch).square().sum().backward()
    assert all(one.grad.abs().sum() > 0 for one in parameters)
    critic, actor = agent.configure_optimizers()[:2]
    owned = [{id(one) for group in each.param_groups for one in group["params"]} for each in (critic, actor)]
    assert all(id(one) in owned[0] and id(one) not in owned[1] for one in parameters)


def test_the_loss_of_the_values_alone_trains_the_encoder_of_mpdqn() -> None:
    agent = AGENTS["mpdqn"](SEEN)
    values, parameters, _ = agent.losses(make_batch(agent))
    parameters.backward(retain_graph=True)
    assert all(one.grad is None for one in agent.observation_encoder.parameters())
    values.backward()
    assert all(one.grad is not None for one in agent.observation_encoder.parameters())


@pytest.mark.parametrize("name", AGENTS)
def test_targets_are_those_of_the_target_encoder(name: str, tmp_path: Path) -> None:
    agent, other = AGENTS[name](SEEN), AGENTS[name](SEEN)
    other.load_state_dict(agent.state_dict())
    with torch.no_grad():
        for parameter in other.target_observation_encoder.parameters():
            parameter.mul_(2.0)
    batch = make_batch(agent)
    outputs, others = (fit(one, [batch], tmp_path, seed=1)[1][0]["td_error"] for one in (agent, other))
    assert not torch.equal(outputs, others)


@pytest.mark.parametrize("name", AGENTS)
def test_a_checkpoint_of_plain_values_holds_the_description(name: str, tmp_path: Path) -> None:
    agent = AGENTS[name](SEEN)
    trainer, _ = fit(agent, [make_batch(agent)], tmp_path)
    trainer.save_checkpoint(tmp_path / "agent.ckpt")
    again = type(agent).load_from_checkpoint(tmp_path / "agent.ckpt", weights_only=True)
    assert again.hparams["observation_size"] == SEEN
    observation = seen(9)
    for mine, other in zip(agent.act(observation, explore=False), again.act(observation, explore=False), strict=True):
        assert torch.equal(mine, other)


OWN = {"encoder": "convolutions", "shape": [6, 6, 3], "high": 10, "channels_first": False, "channels": [4]}
OWN |= {"kernel_sizes": [3], "strides": [3], "features": 5}
SIZES = DQN.sizes_from(
    Dict({"camera": Box(0, 255, (6, 6, 3), np.uint8), "position": Box(-1, 1, (2,)), "room": Discrete(2)}), Discrete(2)
)


@pytest.mark.parametrize(("camera", "features"), [(OWN, 5), ({"encoder": "flat", "shape": [6, 6, 3]}, 108)])
def test_encoders_of_ones_own_fit_an_environment_of_the_same_shapes(camera: dict[str, Any], features: int) -> None:
    agent = DQN(STATE | {"camera": camera}, 2)
    agent._refuse_other_sizes(SIZES, DQN)
    assert agent.network.layers()[0][0].shape[1] == features + 4


@pytest.mark.parametrize(
    ("other", "ours", "theirs"),
    [
        (4, "=4", "['camera']=[6, 6, 3], observation_size['position']=2, observation_size['room']=[0, 1]"),
        (STATE, None, "['camera']=[6, 6, 3]"),
        (SEEN | {"room": 2}, "['room']=2", "['room']=[0, 1]"),
        (SEEN | {"position": 3}, "['position']=3", "['position']=2"),
        (SEEN | {"camera": OWN | {"shape": [6, 5, 3]}}, "['camera']=[6, 5, 3]", "['camera']=[6, 6, 3]"),
    ],
)
def test_entries_in_which_an_environment_differs_are_named(other: Any, ours: str | None, theirs: str) -> None:
    built = "no such entry" if ours is None else f"observation_size{ours}"
    message = f"DQN was built with {built}, and the environment of DQN has observation_size{theirs}. Give both"
    with pytest.raises(ValueError, match=re.escape(message)):
        DQN(other, 2)._refuse_other_sizes(SIZES, DQN)


def test_the_number_of_actions_of_an_environment_is_compared_and_not_their_bounds() -> None:
    agent = SAC(3, [-1.0], [1.0])
    agent._refuse_other_sizes({"observation_size": 3, "action_low": [-2.0], "action_high": [2.0]}, SAC)
    message = "SAC was built with action_low=1 number(s), and the environment of SAC has action_low=2 number(s). Give"
    with pytest.raises(ValueError, match=re.escape(message)):
        agent._refuse_other_sizes({"observation_size": 3, "action_low": [-2.0] * 2, "action_high": [2.0]}, SAC)


@pytest.mark.parametrize("name", AGENTS)
def test_flat_observations_are_not_passed_through_an_encoder(name: str, monkeypatch) -> None:
    """And weights have the names that they had, with an encoder and without."""
    agent, seeing = AGENTS[name](4), AGENTS[name](SEEN)
    images = {key for key in seeing.state_dict() if "encoder" in key}
    assert images == {
        f"{kind}observation_encoder.parts.0.body.{part}.{weights}"
        for kind in ("", "target_")
        for part in ("0.0", "0.2", "0.4", "1", "2")
        for weights in ("weight", "bias")
    }
    assert seeing.state_dict().keys() - images == agent.state_dict().keys()
    monkeypatch.setattr(torch.nn.Identity, "forward", None)
    agent.act(torch.zeros(3, 4), explore=True)
