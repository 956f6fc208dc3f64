# SPDX-License-Identifier: Apache-2.0
"""DQN's gradients without autograd's graph: equal to autograd's, or left to it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay.agents import DQN
from lightning_replay.agents import dqn as dqn_module

OPTIONS = {"observation_size": 3, "num_actions": 4, "target_update_rate": 0.05, "learning_rate": 0.01}
ANOMALY = partial(torch.autograd.set_detect_anomaly, True)
AUTOCAST = partial(torch.autocast, "cpu", torch.bfloat16)


class Bare(DQN):
    """Updates outside a trainer."""

    exact = True
    takes_plain_gradients = True


def bare(kind: type[DQN] = Bare, *, seed: int = 0, **options) -> DQN:
    torch.manual_seed(seed)
    agent = kind(**OPTIONS | options)
    optimizer = agent.configure_optimizers()
    agent.optimizers = lambda use_pl_optimizer=True: optimizer
    return agent


def by_autograd(**options) -> DQN:
    agent = bare(**options)
    agent.take_gradients = torch.Tensor.backward
    return agent


def make_batch(size: int, seed: int, *, weights: bool = False, steps: bool = False) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    flags = torch.rand(size, 1, generator=generator) < 0.3
    before, after = torch.randn(2, size, 3, generator=generator)
    reward = 3 * torch.randn(size, 1, generator=generator)
    following = {"observation": after, "reward": reward, "terminated": flags, "done": flags}
    columns = {"observation": before, "next": following}
    columns["action"] = torch.randint(4, (size,), generator=generator)
    if weights:
        columns["priority_weight"] = torch.rand(size, generator=generator)
    if steps:
        columns["steps_to_next_obs"] = torch.randint(1, 4, (size, 1), generator=generator)
    return TensorDict(columns, [size])


@pytest.fixture
def set_directly(monkeypatch) -> list[int]:
    """Grows with every update whose gradients are set without autograd."""
    calls: list[int] = []
    original = dqn_module.set_gradients

    def counted(*arguments):
        found = original(*arguments)
        calls.extend([] if found is None else [len(calls)])
        return found

    monkeypatch.setattr(dqn_module, "set_gradients", counted)
    return calls


@settings(max_examples=30, deadline=None)
@given(
    size=st.sampled_from([1, 2, 7, 64, 128]),
    hidden_sizes=st.lists(st.integers(1, 40), max_size=4).map(tuple),
    weights=st.booleans(),
    steps=st.booleans(),
    seed=st.integers(0, 1_000),
)
def test_updates_are_those_of_autograd(size, hidden_sizes, weights, steps, seed):
    direct, oracle = (make(seed=seed, hidden_sizes=hidden_sizes) for make in (bare, by_autograd))
    for number in range(4):
        batch = make_batch(size, seed + number, weights=weights, steps=steps)
        found, expected = direct.update(batch), oracle.update(batch)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)
            assert not found[name].requires_grad
        for ours, theirs in zip(direct.network.parameters(), oracle.network.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_direct_way_is_taken_and_targets_get_no_gradient(set_directly):
    agent = bare()
    agent.update(make_batch(8, 0))
    assert set_directly
    trained = {id(parameter) for parameter in agent.network.parameters()}
    assert all((parameter.grad is not None) == (id(parameter) in trained) for parameter in agent.parameters())
    set_directly.clear()
    by_autograd().update(make_batch(8, 0))
    assert not set_directly


def test_own_losses_are_used(set_directly):
    class Doubled(Bare):
        def losses(self, batch):
            rows, td_error = super().losses(batch)
            return 2 * rows, td_error

    batch = make_batch(8, 0)
    loss = bare(Doubled).update(batch)["loss"]
    assert not set_directly
    torch.testing.assert_close(loss, 2 * bare().update(batch)["loss"])


def test_own_distances_are_used_and_are_of_encoded_observations(set_directly):
    class Halved(Bare):
        def distances(self, batch):
            return super().distances(batch) / 2

    batch = make_batch(8, 0)
    td_error = bare(Halved).update(batch)["td_error"]
    assert not set_directly
    torch.testing.assert_close(2 * td_error, bare().update(batch)["td_error"])
    for key in ("observation", ("next", "observation")):
        batch[key] = TensorDict({"a": batch[key][:, :1], "b": batch[key][:, 1:]}, [8])
    torch.testing.assert_close(bare(observation_size={"a": 1, "b": 2}).distances(batch).abs(), 2 * td_error)


@pytest.mark.parametrize("name", ["descend", "take_gradients"])
def test_own_steps_of_learning_are_called(name):
    called = []

    def own(self, *arguments):
        called.append(name)
        return getattr(DQN, name)(self, *arguments)

    bare(type("Own", (Bare,), {name: own})).update(make_batch(8, 0))
    assert called == [name]


def test_a_hook_of_a_gradient_is_called(set_directly):
    agent, seen = bare(), []
    agent.network.weight0.register_hook(lambda gradient: seen.append(gradient.shape))
    agent.network.bias0.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.shape))
    agent.update(make_batch(8, 0))
    assert sorted(map(len, seen)) == [1, 2]
    assert not set_directly


def test_a_frozen_layer_stays_as_it_is(set_directly):
    agent = bare()
    agent.network.weight0.requires_grad_(False)
    before = agent.network.weight0.clone()
    for seed in range(3):
        agent.update(make_batch(8, seed))
    assert torch.equal(before, agent.network.weight0) and agent.network.weight0.grad is None
    assert not set_directly


@pytest.mark.parametrize("mode", [ANOMALY, AUTOCAST], ids=["anomaly", "autocast"])
def test_modes_of_autograd_are_left_to_it(mode, set_directly):
    agent, oracle = bare(), by_autograd()
    with mode():
        agent.update(make_batch(8, 0))
        oracle.update(make_batch(8, 0))
    assert not set_directly
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(agent.parameters(), oracle.parameters(), strict=True))


def test_sequences_are_left_to_autograd(set_directly):
    batch = make_batch(12, 0).reshape(3, 4)
    bare().update(batch)
    assert not set_directly


def test_normalized_layers_are_left_to_autograd(set_directly):
    agent, oracle = (bare(layer_norm=True, target_update_rate=0.5) for _ in range(2))
    oracle.take_gradients = torch.Tensor.backward
    before = agent.network.norm_weight0.clone()
    for seed in range(3):
        agent.update(make_batch(8, seed))
        oracle.update(make_batch(8, seed))
    assert not set_directly
    assert not torch.equal(before, agent.network.norm_weight0)
    assert not torch.equal(before, agent.target_network.norm_weight0)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(agent.parameters(), oracle.parameters(), strict=True))
