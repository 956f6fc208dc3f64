# SPDX-License-Identifier: Apache-2.0
"""MP-DQN on numbers worked out by hand: passes, inverted gradients, targets, exploration, clocks, spaces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from tensordict import TensorDict

from lightning_replay.agents import MPDQN
from lightning_replay.agents.mpdqn import InvertedGradients
from lightning_replay.agents.spaces import ParameterizedActions
from tests.unit.agents.toys import fit, flags

# fitted without a data module here
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

# three actions with 2, 0 and 1 parameters
SIZES = {
    "observation_size": 2,
    "parameter_sizes": [2, 0, 1],
    "parameter_low": [-1.0, 0.0, 10.0],
    "parameter_high": [1.0, 100.0, 20.0],
}
SPACE = Tuple([Discrete(3), Box(np.float32([-1, 0]), np.float32([1, 100])), Box(-1, 1, (0,)), Box(10, 20, (1,))])


def make_agent(**options) -> MPDQN:
    torch.manual_seed(0)
    return MPDQN(**SIZES, **({"hidden_sizes": (16, 8)} | options))


def make_batch(size: int = 6) -> TensorDict:
    torch.manual_seed(1)
    following = {"observation": torch.randn(size, 2), "reward": torch.randn(size, 1), **flags(size)}
    parameters = torch.rand(size, 3) * torch.tensor([2.0, 100.0, 10.0]) + torch.tensor([-1.0, 0.0, 10.0])
    action = {"discrete": torch.arange(size) % 3, "parameters": parameters}
    columns = {"observation": torch.randn(size, 2), "action": action, "next": following, "index": torch.arange(size)}
    return TensorDict(columns, [size])


def make_linear(agent: MPDQN, value_weight: list[list[float]], parameter_bias: list[float], target_scale: float = 1.0):
    """Q = observation and parameters times ``value_weight``, x = ``parameter_bias``; targets are Q' = scale Q."""
    for name, scale in (("", 1.0), ("target_", target_scale)):
        (value,), (parameters,) = (getattr(agent, f"{name}{kind}_network") for kind in ("value", "parameter"))
        for layer in (value, parameters):
            layer.weight.data.zero_()
            layer.bias.data.zero_()
        value.weight.data.copy_(scale * torch.tensor(value_weight))
        parameters.bias.data.copy_(torch.tensor(parameter_bias))


def linear_agent(**options) -> MPDQN:
    """Q_0 = p_0 + 2 p_1, Q_1 = s_0, Q_2 = 3 p_2 with scaled parameters x = (0.5, -0.5, 2.0); Q' = 10 Q."""
    agent = make_agent(hidden_sizes=(), **options)
    weight = [[0.0, 0.0, 1.0, 2.0, 100.0], [1.0, 0.0, 100.0, 100.0, 100.0], [0.0, 0.0, 100.0, 100.0, 3.0]]
    make_linear(agent, weight, [0.5, -0.5, 2.0], target_scale=10.0)
    return agent


def test_rates_are_those_of_the_authors_unless_given() -> None:
    agent = make_agent()
    rates = [optimizer.param_groups[0]["lr"] for optimizer in agent.configure_optimizers()]
    assert rates == [1e-3, 1e-5] and agent.hparams["target_update_rate"] == 0.001
    before = agent.target_value_network[0].bias.clone()
    agent.value_network[0].bias.data.add_(1.0)
    agent.update_targets()
    torch.testing.assert_close(agent.target_value_network[0].bias, before + 0.001)


def test_each_value_depends_on_its_own_parameters_alone() -> None:
    agent = make_agent()
    observation = torch.randn(4, 2)
    parameters = torch.randn(4, 3, requires_grad=True)
    values = agent.action_values(agent.value_network, observation, parameters)
    assert values.shape == (4, 3)
    reads = torch.stack([torch.autograd.grad(values[:, k].sum(), parameters, retain_graph=True)[0] for k in (0, 1, 2)])
    for action, own in enumerate(([1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0])):
        assert ((reads[action] != 0) == torch.tensor(own).bool()).all()
        alone = torch.cat([observation, parameters * torch.tensor(own)], dim=-1)
        torch.testing.assert_close(values[:, action], agent.value_network(alone)[:, action])


def test_inverted_gradients_by_hand() -> None:
    #   p      gradient of the loss   wants      factor                 result
    #   0      -4                     to rise    (1 - 0) / 2 = 0.5      -2
    #   0.5    -4                     to rise    (1 - 0.5) / 2          -1
    #   0.5     4                     to fall    (0.5 + 1) / 2           3
    #   1      -4                     to rise    0                       0
    #   1.5    -4                     to rise    (1 - 1.5) / 2          +1   turned round
    #   -1.5    4                     to fall    (-1.5 + 1) / 2         -1   turned round
    p = torch.tensor([0.0, 0.5, 0.5, 1.0, 1.5, -1.5], requires_grad=True)
    passed = InvertedGradients.apply(p)
    assert torch.equal(passed, p)
    passed.backward(torch.tensor([-4.0, -4.0, 4.0, -4.0, -4.0, 4.0]))
    assert p.grad.tolist() == [-2.0, -1.0, 3.0, 0.0, 1.0, -1.0]


def test_targets_by_hand() -> None:
    # x' clipped to the bounds: (0.5, -0.5, 1); Q' = 10 (0.5 - 1, s_0, 3) = (-5, 10 s_0, 30)
    agent = linear_agent(discount=0.9)
    batch = make_batch(3)
    batch["next", "observation"] = torch.tensor([[1.0, 0.0], [4.0, 0.0], [1.0, 0.0]])
    batch["next", "reward"] = torch.tensor([[1.0], [1.0], [2.0]])
    batch["next", "truncated"][1] = batch["next", "done"][1] = True  # keeps its bootstrap
    batch["next", "terminated"][2] = batch["next", "done"][2] = True
    torch.testing.assert_close(agent.targets(batch), torch.tensor([1 + 0.9 * 30, 1 + 0.9 * 40, 2.0]))
    clipped = linear_agent(discount=0.9, target_low=2.5, target_high=30.0)
    torch.testing.assert_close(clipped.targets(batch), torch.tensor([28.0, 30.0, 2.5]))
    half_open = linear_agent(discount=0.9, target_high=30.0)
    torch.testing.assert_close(half_open.targets(batch), torch.tensor([28.0, 30.0, 2.0]))


def test_returns_over_several_steps_are_discounted_as_often() -> None:
    agent = linear_agent(discount=0.9)
    batch = make_batch(2)
    batch["next", "observation"] = torch.zeros(2, 2)
    batch["next", "reward"] = torch.zeros(2, 1)
    steps = batch.set("steps_to_next_obs", torch.tensor([[3], [1]]))
    torch.testing.assert_close(agent.targets(steps), torch.tensor([0.9**3 * 30, 0.9 * 30]))


def test_losses_by_hand() -> None:
    # stored (0.5, 75, 12.5) is scaled (0.5, 0.5, -0.5): Q_0 = 1.5, Q_1 = s_0 = 2, Q_2 = -1.5; all rows end at reward 1
    agent = linear_agent()
    batch = make_batch(3)
    batch["observation"] = torch.tensor([[2.0, 0.0]]).expand(3, 2).clone()
    batch["action", "parameters"] = torch.tensor([[0.5, 75.0, 12.5]]).expand(3, 3).clone()
    batch["next", "reward"] = torch.ones(3, 1)
    batch["next", "terminated"][:] = True
    value_loss, parameter_loss, td_error = agent.losses(batch)
    torch.testing.assert_close(td_error, torch.tensor([0.5, 1.0, 2.5]))
    assert value_loss.item() == pytest.approx(0.5 * (0.25 + 1.0 + 6.25) / 3)
    # x = (0.5, -0.5, 2): -(Q_0 + Q_1 + Q_2) = -(-0.5 + 2 + 6)
    assert parameter_loss.item() == pytest.approx(-7.5)
    batch["priority_weight"] = torch.tensor([1.0, 0.5, 0.0])
    assert agent.losses(batch)[0].item() == pytest.approx(0.5 * (0.25 + 0.5) / 3)
    assert agent.losses(batch)[1].item() == pytest.approx(-7.5)


def test_each_loss_moves_its_own_network_and_parameters_by_inverted_gradients() -> None:
    agent = linear_agent()
    values, parameters = ([*one.parameters()] for one in (agent.value_network, agent.parameter_network))
    value_loss, parameter_loss, td_error = agent.losses(make_batch())
    parameter_loss.backward()
    assert all(weight.grad is None for weight in values)
    # d loss / dx = -(1, 2, 3), times (1 - 0.5) / 2, (1 + 0.5) / 2 and (1 - 2) / 2
    bias = next(weight for weight in parameters if weight.ndim == 1)
    torch.testing.assert_close(bias.grad, torch.tensor([-0.25, -1.5, 1.5]))
    before = [weight.grad.clone() for weight in parameters]
    value_loss.backward()
    assert all(weight.grad is not None for weight in values) and not td_error.requires_grad
    assert all(torch.equal(weight.grad, old) for weight, old in zip(parameters, before, strict=True))


def test_the_gradient_of_each_network_is_clipped() -> None:
    agent = make_agent(gradient_clip=1e-3)
    value_loss, parameter_loss, _ = agent.losses(make_batch())
    (value_loss + parameter_loss).backward()
    agent.clip_gradients_of_networks()
    for network in (agent.value_network, agent.parameter_network):
        norm = torch.stack([weight.grad.norm() for weight in network.parameters()]).norm()
        assert norm.item() == pytest.approx(1e-3, rel=1e-2)


def test_a_trainer_and_a_plain_loop_train_alike(tmp_path: Path) -> None:
    batches = [make_batch() for _ in range(5)]
    fitted, plain = make_agent(), make_agent()
    trainer, outputs = fit(fitted, batches, tmp_path)
    assert trainer.global_step == 5
    assert outputs[0]["td_error"].shape == (6,) and not outputs[0]["loss"].requires_grad
    optimizers = plain.configure_optimizers()
    for batch in batches:
        value_loss, parameter_loss, _ = plain.losses(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (value_loss + parameter_loss).backward()
        plain.clip_gradients_of_networks()
        for optimizer in optimizers:
            optimizer.step()
        plain.update_targets()
    for (name, one), other in zip(fitted.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.slow
def test_it_learns_the_best_action_and_its_parameter() -> None:
    # one step: reward is 1 - |p - 15| / 5 for action 2, 0 otherwise; the best is action 2 with 15
    agent = make_agent(parameter_learning_rate=1e-3, target_low=-1.0, target_high=1.0)
    optimizers, agent.take_gradients = agent.configure_optimizers(), torch.Tensor.backward
    agent.optimizers = lambda use_pl_optimizer=True: optimizers
    for seed in range(300):
        batch = make_batch(64)
        batch["action", "parameters"][:, 2] = 10 + 10 * torch.rand(64, generator=torch.Generator().manual_seed(seed))
        reward = (1 - (batch["action", "parameters"][:, 2] - 15).abs() / 5) * (batch["action", "discrete"] == 2)
        batch["next", "reward"] = reward.unsqueeze(-1)
        batch["next", "terminated"][:] = True
        agent.update(batch)
    discrete, parameters = agent.act(torch.randn(20, 2), explore=False)
    assert (discrete == 2).all()
    assert (parameters[:, 2] - 15).abs().max() < 2


def test_actions_lie_in_the_space_and_random_ones_fill_it() -> None:
    agent = make_agent(exploration_start=1.0, exploration_steps=10**9)
    observation = 100 * torch.randn(3_000, 2)
    for explore in (False, True):
        discrete, parameters = agent.act(observation, explore=explore)
        assert discrete.dtype == torch.int64 and parameters.dtype == torch.float32
        joined = ParameterizedActions.of(SPACE).for_environments(discrete.numpy(), parameters.numpy())
        assert all(SPACE.contains(tuple(part[i] for part in joined)) for i in range(100))
    assert torch.bincount(discrete, minlength=3).min() > 900
    expected = torch.tensor([0.0, 50.0, 15.0])
    torch.testing.assert_close(parameters.mean(0), expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(parameters.amax(0), torch.tensor([1.0, 100.0, 20.0]), rtol=0.01, atol=0.01)
    assert not parameters.requires_grad


def test_noise_is_measured_in_half_ranges_and_kept_within_bounds() -> None:
    agent = make_agent(hidden_sizes=(), exploration_start=0.0, exploration_end=0.0, exploration_noise=0.1)
    make_linear(agent, [[0.0] * 5] * 3, [0.0, 1.0, -0.5])
    _, parameters = agent.act(torch.zeros(50_000, 2), explore=True)
    noise = parameters - agent.act(torch.zeros(50_000, 2), explore=False)[1]
    torch.testing.assert_close(noise.std(0)[[0, 2]], torch.tensor([0.1, 0.5]), rtol=0.03, atol=0)
    # x = 1 is the upper bound: half of the noise is cut off there
    assert parameters[:, 1].max() == 100.0 and (noise[:, 1] == 0).float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_it_explores_and_is_saved(tmp_path: Path) -> None:
    agent = make_agent(exploration_start=0.1, exploration_end=0.1)
    observation = torch.zeros(20_000, 2)
    differs = (agent.act(observation, explore=True)[1] != agent.act(observation, explore=False)[1]).any(-1)
    assert differs.float().mean().item() == pytest.approx(0.1, abs=0.01)
    trainer, _ = fit(agent, [make_batch()], tmp_path)
    trainer.save_checkpoint(tmp_path / "agent.ckpt")
    again = MPDQN.load_from_checkpoint(tmp_path / "agent.ckpt")
    assert again.exploration_rate == agent.exploration_rate
    for one, other in zip(again.act(observation[:9], False), agent.act(observation[:9], False), strict=True):
        assert torch.equal(one, other)


def test_what_acts_and_learns_moves_with_the_module() -> None:
    agent = make_agent().double()  # stands for another device
    batch = make_batch()
    batch = batch.apply(lambda column: column.double() if column.is_floating_point() else column)
    assert agent.act(batch["observation"], explore=True)[1].dtype == torch.float64
    assert agent.losses(batch)[2].dtype == torch.float64


def test_a_parameter_that_cannot_vary_is_zero_to_the_networks() -> None:
    options = {**SIZES, "parameter_low": [-1.0, 5.0, 10.0], "parameter_high": [1.0, 5.0, 20.0]}
    agent = MPDQN(**options, hidden_sizes=(4,))
    assert agent.scaled(torch.tensor([[1.0, 5.0, 20.0]])).tolist() == [[1.0, 0.0, 1.0]]
    assert (agent.act(torch.randn(5, 2), explore=True)[1][:, 1] == 5.0).all()


def test_sizes_come_from_the_spaces() -> None:
    observation = Box(-1, 1, (2,))
    assert MPDQN.sizes_from(observation, SPACE) == SIZES
    named = Dict({"which": Discrete(3), "a": SPACE[1], "b": SPACE[2], "c": SPACE[3]})
    assert MPDQN.sizes_from(observation, named) == SIZES


@pytest.mark.parametrize(
    "space",
    [
        Tuple([]),
        Tuple([Discrete(2)]),
        Tuple([Discrete(2), Box(-1, 1, (1,))]),
        Tuple([Discrete(1, start=1), Box(-1, 1, (1,))]),
        Tuple([Discrete(1), Box(-np.inf, np.inf, (1,))]),
        Tuple([Discrete(1), MultiDiscrete([2])]),
        Tuple([Box(-1, 1, (1,)), Discrete(1)]),
        Dict({"a": Box(-1, 1, (1,))}),
    ],
)
def test_other_composite_spaces_are_refused(space) -> None:
    with pytest.raises(ValueError, match=r"got the action space .*one bounded Box per discrete action"):
        ParameterizedActions.of(space)


def test_sizes_and_bounds_must_agree() -> None:
    with pytest.raises(ValueError, match=r"parameter_sizes \[0, 0\] add up to 0.*Use DQN"):
        MPDQN(observation_size=1, parameter_sizes=[0, 0], parameter_low=[], parameter_high=[])
    with pytest.raises(ValueError, match="add up to 2, with 1 lower and 2 upper bounds"):
        MPDQN(observation_size=1, parameter_sizes=[1, 1], parameter_low=[0.0], parameter_high=[1.0, 1.0])
    for low, high, message in (
        (1.0, -1.0, "every parameter needs finite bounds, the lower one at most the upper"),
        (float("-inf"), 0.0, r"parameter_low\[0\] is -inf; it must be a finite number"),
        (0.0, float("nan"), r"parameter_high\[0\] is nan; it must be a finite number"),
    ):
        with pytest.raises(ValueError, match=message):
            MPDQN(observation_size=1, parameter_sizes=[1], parameter_low=[low], parameter_high=[high])
    with pytest.raises(ValueError, match=r"target_low is 5.0 and target_high 0.0; give the least return"):
        MPDQN(target_low=5.0, target_high=0.0)


def test_joint_parameters_become_the_environments_own_structure() -> None:
    discrete, parameters = np.array([2, 0]), np.float32([[0.5, 7, 11], [-0.5, 8, 12]])
    first, *boxes = ParameterizedActions.of(SPACE).for_environments(discrete, parameters)
    assert first.tolist() == [2, 0]
    assert [box.tolist() for box in boxes] == [[[0.5, 7], [-0.5, 8]], [[], []], [[11], [12]]]
    named = Dict({"a": Box(-1, 1, (1, 1)), "which": Discrete(1)})
    one = ParameterizedActions.of(named).for_one(np.array([0]), np.float32([[0.25]]))
    assert set(one) == {"a", "which"} and one["a"].shape == (1, 1) and named.contains(one)


def test_random_actions_cover_the_space() -> None:
    actions = ParameterizedActions.of(SPACE)
    discrete, parameters = actions.random(2_000, np.random.default_rng(0))
    assert set(discrete) == {0, 1, 2} and parameters.dtype == np.float32
    np.testing.assert_allclose(parameters.mean(0), [0, 50, 15], rtol=0.05, atol=0.05)
    assert SPACE.contains(actions.for_one(discrete[:1], parameters[:1]))
