# SPDX-License-Identifier: Apache-2.0
"""Options of TD3 and SAC for thousands of environments: numbers by hand, gradients, statistics, saves, refusals."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from scipy import stats
from tensordict import TensorDict
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_replay import recipes
from lightning_replay.agents import DQN, MPDQN, SAC, TD3
from lightning_replay.agents.networks import TwoCritics, project
from lightning_replay.envs.pendulums import Pendulums
from lightning_replay.lit import Evaluate, ReplayDataModule
from tests.unit.agents.toys import fit, flags, make_rows
from tests.unit.lit.toys import Counting, make_trainer

# fitted without a data module here
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES: dict[str, Any] = {"observation_size": 3, "action_low": [-2.0], "action_high": [2.0], "hidden_sizes": (8,)}
ATOMS: dict[str, Any] = {"distributional": True, "atoms": 3, "value_low": -1.0, "value_high": 1.0}
KINDS = pytest.mark.parametrize("kind", [TD3, SAC])


def without_trainer(agent: Any) -> Any:
    optimizers = agent.configure_optimizers()
    agent.optimizers = lambda use_pl_optimizer=True: optimizers
    agent.take_gradients = torch.Tensor.backward
    return agent


# Distributions


@pytest.mark.parametrize(
    ("reward", "discount", "expected"),
    [
        (0.5, 0.5, [0.0, 0.5, 0.5]),  # The atoms -1, 0, 1 move to 0, 0.5, 1.
        (1.0, 1.0, [0.0, 0.25, 0.75]),  # They move to 0, 1, 2.
        (-3.0, 1.0, [1.0, 0.0, 0.0]),  # They move to -4, -3, -2.
        (0.25, 0.0, [0.0, 0.75, 0.25]),  # All of them move to 0.25.
        (0.0, 1.0, [0.25, 0.5, 0.25]),
    ],
)
def test_a_distribution_is_projected_onto_three_atoms(reward: float, discount: float, expected: list[float]) -> None:
    probabilities, support = torch.tensor([[0.25, 0.5, 0.25]]), torch.tensor([-1.0, 0.0, 1.0])
    projected = project(probabilities, torch.tensor([reward]), torch.tensor([discount]), support)
    assert projected.tolist() == [pytest.approx(expected)]


def certain(agent: TD3 | SAC, first: list[float], second: list[float], critics: str) -> None:
    """Gives the critics these probabilities at every observation and action."""
    network = getattr(agent, critics)
    for parameter in network.parameters():
        parameter.data.zero_()
    biases = [parameter for name, parameter in network.named_parameters() if name.startswith("bias")]
    biases[-1].data.copy_(torch.tensor([first, second]).log())


def rows_of(reward: list[float], terminated: list[bool], **columns: Any) -> TensorDict:
    size = len(reward)
    batch = make_rows(torch.rand(size, 1), **columns)
    batch["next", "reward"] = torch.tensor(reward).unsqueeze(1)
    batch["next", "terminated"] = torch.tensor(terminated).unsqueeze(1)
    return batch


def test_the_target_is_the_distribution_with_the_smaller_mean() -> None:
    agent = TD3(**SIZES, **ATOMS, discount=0.5)
    certain(agent, [0.2, 0.2, 0.6], [0.5, 0.25, 0.25], "target_critics")  # Their means are 0.4 and -0.25.
    certain(agent, [0.25, 0.5, 0.25], [0.25, 0.25, 0.5], "critics")
    batch = rows_of([0.5, 0.5, 0.0, 0.0], [False, True, False, False], steps_to_next_obs=torch.tensor([1, 1, 2, 1]))
    # -1, 0, 1 move to 0, 0.5, 1; all to 0.5; to -0.25, 0, 0.25; to -0.5, 0, 0.5.
    expected = torch.tensor([[0.0, 0.625, 0.375], [0.0, 0.5, 0.5], [0.125, 0.8125, 0.0625], [0.25, 0.625, 0.125]])
    torch.testing.assert_close(agent.target(batch), expected)
    distances = torch.tensor([[0.0], [0.25]]) - torch.tensor([0.375, 0.5, -0.0625, -0.125])
    torch.testing.assert_close(agent.distances(batch), distances)
    rows, found = agent.critic_losses(batch)
    torch.testing.assert_close(found, distances)
    logits = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]).log().expand(4, 2, 3)
    losses = [nn.functional.cross_entropy(logits[:, one], expected, reduction="none") for one in (0, 1)]
    torch.testing.assert_close(rows, losses[0] + losses[1])


def test_the_other_critic_may_have_the_smaller_mean() -> None:
    agent = TD3(**SIZES, **ATOMS, discount=1.0)
    certain(agent, [0.5, 0.25, 0.25], [0.2, 0.2, 0.6], "target_critics")
    torch.testing.assert_close(agent.target(rows_of([0.0], [False])), torch.tensor([[0.5, 0.25, 0.25]]))


def test_entropy_moves_the_distribution_of_sac() -> None:
    agent = SAC(**SIZES, **ATOMS, discount=0.5, initial_entropy_coefficient=0.5)
    certain(agent, [0.25, 0.5, 0.25], [0.25, 0.5, 0.25], "target_critics")
    agent.draw = lambda features: (torch.zeros(len(features), 1), torch.full((len(features),), -1.0))
    # To 0.5 (Z + 0.5 * 1) = -0.25, 0.25, 0.75, and after a termination to 0
    expected = torch.tensor([[0.0625, 0.625, 0.3125], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(agent.target(rows_of([0.0, 0.0], [False, True])), expected)


@KINDS
def test_updates_return_the_larger_difference_of_means(kind) -> None:
    agent = without_trainer(kind(**SIZES, **ATOMS))
    batch = rows_of([0.5, -0.5], [False, True])
    torch.manual_seed(0)
    expected = agent.distances(batch).abs().amax(0).detach()
    torch.manual_seed(0)
    torch.testing.assert_close(agent.update(batch)["td_error"], expected)


@KINDS
def test_a_policy_learns_from_means_of_distributions(kind) -> None:
    """One step per episode; the reward is highest for an action that equals the observation, whose unit is 1,000."""
    torch.manual_seed(0)
    noise = {"exploration_noise_high": 0.5} if kind is TD3 else {"initial_entropy_coefficient": 0.02}
    rates = {"actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "target_update_rate": 0.05}
    options = {"atoms": 21, "value_low": -4.0, "value_high": 0.5, "layer_norm": True, "normalize_observations": True}
    agent = without_trainer(
        kind(1, [-1.0], [1.0], (32,), distributional=True, discount=0.5, **rates, **options, **noise)
    )
    wanted = torch.rand(2_048, 1) * 1.6 - 0.8
    for _ in range(150):
        observation = wanted * 1_000.0 + 5_000.0
        with torch.no_grad():
            action = agent.act(observation, explore=True)
        following = {"observation": observation, "reward": -(action - wanted).square(), **flags(2_048)}
        following["terminated"] = torch.ones(2_048, 1, dtype=torch.bool)
        batch = TensorDict({"observation": observation, "action": action, "next": following}, [2_048])
        agent.update(batch[torch.randint(2_048, (256,))])
        wanted = torch.rand(2_048, 1) * 1.6 - 0.8
    error = agent.act(wanted * 1_000.0 + 5_000.0, explore=False) - wanted
    assert error.abs().mean() < 0.15  # Without learning, it is about 0.4.


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
@KINDS
def test_other_precisions_learn(kind, precision: str, tmp_path: Path) -> None:
    agent = kind(**SIZES, **ATOMS, layer_norm=True, normalize_observations=True)
    batch = make_rows(torch.rand(64, 1))
    if precision == "64-true":
        batch = batch.apply(lambda column: column.double() if column.is_floating_point() else column)
    _, record = fit(agent, [batch] * 2, tmp_path, precision=precision)
    td_error = record[1]["td_error"]
    assert td_error.dtype == (torch.float64 if precision == "64-true" else torch.float32)
    assert ((td_error * 64).round() != td_error * 64).any()  # bfloat16 has eight digits.


# Layer normalization


@pytest.mark.parametrize("support", [None, torch.linspace(-1.0, 1.0, 5)])
def test_critics_normalize_as_layers_of_torch_do(support: torch.Tensor | None) -> None:
    critics = TwoCritics(3, 2, (16, 8), has_norms=True, support=support)
    for name, parameter in critics.named_parameters():
        if name.startswith("norm"):
            nn.init.uniform_(parameter, -1.0, 2.0)
    inputs = torch.randn(7, 5)
    observation, action = inputs.split([3, 2], 1)
    values = critics.values(observation, action)
    values.sum().backward()
    for number in (0, 1):
        layers: list[nn.Module] = []
        for place, sizes in enumerate(((5, 16), (16, 8), (8, 1 if support is None else 5))):
            layer = nn.Linear(*sizes)
            norm = nn.LayerNorm(sizes[1])
            for part, name in ((layer, ""), (norm, "norm_")):
                for kind in ("weight", "bias") if place < 2 or not name else ():
                    getattr(part, kind).data.copy_(critics.get_parameter(f"{name}{kind}{place}")[number])
            layers += [layer, norm, nn.ReLU()] if place < 2 else [layer]
        network = nn.Sequential(*layers)
        outputs = network(inputs)
        expected = outputs[:, 0] if support is None else outputs.softmax(1) @ support
        torch.testing.assert_close(values[number], expected)
        expected.sum().backward()
        for place in (0, 1):
            for name, layer in (("weight", layers[3 * place]), ("norm_weight", layers[3 * place + 1])):
                torch.testing.assert_close(critics.get_parameter(f"{name}{place}").grad[number], layer.weight.grad)
    torch.testing.assert_close(critics.first(observation, action).flatten(), values[0])
    torch.testing.assert_close(critics.values(observation.expand(4, 7, 3), action.expand(4, 7, 2))[:, 3], values)


def test_the_network_of_dqn_normalizes_as_layers_of_torch_do() -> None:
    torch.manual_seed(0)
    plain = DQN(observation_size=3, num_actions=2, hidden_sizes=(16, 8))
    torch.manual_seed(0)
    agent = DQN(observation_size=3, num_actions=2, hidden_sizes=(16, 8), layer_norm=True).double()
    parameters = dict(agent.network.named_parameters())
    assert [*parameters][6:] == ["norm_weight0", "norm_bias0", "norm_weight1", "norm_bias1"]
    for name, parameter in plain.network.named_parameters():  # The option changes no first weight.
        assert torch.equal(parameter.double(), parameters[name])
    layers = [nn.Linear(3, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(8, 2)).double()
    theirs = dict(zip([*parameters][:6], [p for place in (0, 3, 6) for p in network[place].parameters()], strict=True))
    theirs |= zip([*parameters][6:], [p for place in (1, 4) for p in network[place].parameters()], strict=True)
    for name, parameter in parameters.items():
        if name.startswith("norm"):
            nn.init.uniform_(parameter, -1.0, 2.0)
        theirs[name].data.copy_(parameter)
    inputs = torch.randn(4, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(agent.network(inputs), network(inputs))
    agent.network(inputs).square().sum().backward()
    network(inputs).square().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad)


@KINDS
def test_targets_move_with_all_parameters(kind) -> None:
    agent = kind(**SIZES, **ATOMS, layer_norm=True, target_update_rate=1.0)
    assert sum(name.startswith("norm") for name, _ in agent.critics.named_parameters()) == 2
    for parameter in agent.critics.parameters():
        nn.init.normal_(parameter)
    agent.target_update.step()
    for name, parameter in agent.critics.named_parameters():
        assert torch.equal(agent.target_critics.get_parameter(name), parameter)


# Normalization of observations


@KINDS
def test_actions_and_targets_are_those_of_normalized_observations(kind) -> None:
    torch.manual_seed(0)
    agent = kind(**SIZES, normalize_observations=True)
    torch.manual_seed(0)
    plain = kind(**SIZES)
    observed = 3.0 * torch.randn(500, 3) + 10.0

    def scaled(observation: torch.Tensor) -> torch.Tensor:
        return (observation - observed.mean(0)) / (observed.std(0, correction=0) + 0.01)

    torch.manual_seed(1)
    action = agent.act(observed, explore=True)
    torch.manual_seed(1)
    torch.testing.assert_close(action, plain.act(scaled(observed), explore=True), atol=1e-4, rtol=1e-4)
    before = copy.deepcopy(agent.state_dict())
    agent.act(torch.randn(9, 3), explore=False)
    batch = make_rows(torch.rand(16, 1))
    unscaled = batch.clone()
    batch["observation"], batch["next", "observation"] = (
        scaled(batch["observation"]),
        scaled(batch["next", "observation"]),
    )
    outputs = []
    for one, rows in ((agent, unscaled), (plain, batch)):
        torch.manual_seed(2)
        outputs.append(without_trainer(one).update(rows))
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
    after = agent.state_dict()
    for name in ("mean", "variance", "count"):
        assert torch.equal(after[f"observation_encoder.parts.0.{name}"], before[f"observation_encoder.parts.0.{name}"])


def statistics_of(agent: Any) -> list[Any]:
    part = agent.observation_encoder.parts[0]
    return [part.mean.tolist(), part.variance.tolist(), part.count.item()]


def test_frozen_statistics_stay_until_they_are_released() -> None:
    agent = TD3(**SIZES, normalize_observations=True)
    agent.observe(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]))
    expected = [[2.0, 2.0, 2.0], [1.0, 0.0, 1.0], 2]
    assert statistics_of(agent) == expected
    agent.freeze_normalization()
    agent.act(torch.randn(5, 3), explore=True)
    agent.observe(torch.full((4, 3), math.nan))
    assert statistics_of(agent) == expected
    agent.freeze_normalization(False)
    agent.observe(torch.full((2, 3), 4.0))
    assert statistics_of(agent) == [[3.0, 3.0, 3.0], [1.5, 1.0, 1.5], 4]


def test_rows_that_are_not_finite_are_left_out_of_the_statistics() -> None:
    agent = TD3(**SIZES, normalize_observations=True)
    agent.observe(torch.tensor([[math.nan, 0.0, 0.0]]))
    assert statistics_of(agent) == [[0.0] * 3, [1.0] * 3, 0]
    agent.observe(torch.tensor([[1.0, 2.0, 3.0], [math.nan, 9.0, 9.0], [3.0, 2.0, 1.0], [9.0, math.inf, 9.0]]))
    assert statistics_of(agent) == [[2.0, 2.0, 2.0], [1.0, 0.0, 1.0], 2]


def test_vectors_of_dictionaries_are_normalized_and_other_entries_are_not() -> None:
    size = {"state": 2, "room": {"encoder": "one_hot", "low": 0, "high": 1}}
    agent = SAC(**SIZES | {"observation_size": size}, normalize_observations=True)
    observation = TensorDict({"state": torch.tensor([[1.0, 5.0], [3.0, 5.0]]), "room": torch.tensor([0, 1])}, [2])
    agent.act(observation, explore=True)
    expected = [[1.0, 0.0, -1 / 1.01, 0.0], [0.0, 1.0, 1 / 1.01, 0.0]]  # "room" comes first.
    for target in (False, True):
        torch.testing.assert_close(agent.features_of(observation, target=target), torch.tensor(expected))


@KINDS
def test_statistics_come_back_with_a_checkpoint_and_with_a_copy(kind, tmp_path: Path) -> None:
    agent = kind(**SIZES, normalize_observations=True)
    agent.observe(torch.randn(20, 3))
    agent.freeze_normalization()
    trainer, _ = fit(agent, [make_rows(torch.rand(8, 1))], tmp_path)
    trainer.save_checkpoint(tmp_path / "agent.ckpt")
    for restored in (kind.load_from_checkpoint(tmp_path / "agent.ckpt"), copy.deepcopy(agent)):
        assert statistics_of(restored) == statistics_of(agent)
        assert restored.observation_encoder.parts[0].is_frozen
        assert restored.target_observation_encoder.parts[0] is restored.observation_encoder.parts[0]
        restored.freeze_normalization(False)
        restored.observe(torch.randn(20, 3))
        assert statistics_of(restored)[2] == 40 and statistics_of(agent)[2] == 20


# Noise of each environment


def test_each_environment_draws_its_deviation() -> None:
    torch.manual_seed(0)
    agent = TD3(**SIZES, exploration_noise=0.1, exploration_noise_high=0.3)
    observation = torch.zeros(20_000, 3)
    agent.act(observation, explore=True)
    deviations = agent._deviations
    assert deviations.shape == (20_000, 1)
    assert stats.kstest(deviations[:, 0].numpy(), stats.uniform(0.1, 0.2).cdf).pvalue > 1e-4
    noise = (agent.act(observation, explore=True) - agent.act(observation, explore=False)) / 2.0
    assert stats.kstest((noise / deviations)[:, 0].detach().numpy(), "norm").pvalue > 1e-4
    assert torch.equal(agent._deviations, deviations)


def test_deviations_are_drawn_again_where_an_episode_ended() -> None:
    torch.manual_seed(0)
    agent = TD3(**SIZES, exploration_noise_high=0.4)
    agent.end_episodes(torch.ones(8, dtype=torch.bool))  # No action was taken yet.
    agent.act(torch.zeros(20_000, 3), explore=True)
    before = agent._deviations
    done = torch.arange(20_000) % 2 == 0
    agent.end_episodes(done)
    after = agent._deviations
    assert torch.equal(after[~done], before[~done])
    assert (after[done] != before[done]).float().mean() > 0.99
    assert stats.kstest(after[done][:, 0].numpy(), stats.uniform(0.1, 0.3).cdf).pvalue > 1e-4
    assert stats.pearsonr(after[done][:, 0], before[done][:, 0]).pvalue > 1e-4
    agent.end_episodes(done[:, None].numpy())
    agent.act(torch.zeros(5, 3), explore=True)
    assert agent._deviations.shape == (5, 1)


# Asymmetric critics


def asymmetric(kind: Callable[..., Any], **options: Any) -> tuple[Any, TensorDict]:
    agent = kind(**SIZES, critic_observation="state", critic_observation_size=5, **options)
    batch = make_rows(torch.rand(16, 1), state=torch.randn(16, 5))
    batch["next", "state"] = torch.randn(16, 5)
    return agent, batch


@pytest.mark.parametrize("options", [{}, ATOMS | {"layer_norm": True}, {"normalize_observations": True}])
@KINDS
def test_critics_read_their_column_and_the_policy_reads_the_observation(kind, options: dict[str, Any]) -> None:
    agent, batch = asymmetric(kind, **options)
    for key in ("observation", "state"):
        batch[key].requires_grad_()
    agent.critic_losses(batch)[0].sum().backward()
    assert batch["observation"].grad is None and batch["state"].grad.abs().min() > 0
    batch["state"].grad = None
    loss = agent.actor_loss(batch)
    (loss if isinstance(loss, torch.Tensor) else loss[0]).backward()
    assert batch["state"].grad is None and batch["observation"].grad.abs().max() > 0
    outputs = without_trainer(agent).update(batch.detach())
    assert outputs["td_error"].shape == (16,)


@KINDS
def test_equal_columns_give_the_agent_without_the_option(kind) -> None:
    torch.manual_seed(0)
    agent = kind(**SIZES, critic_observation="state", critic_observation_size=3)
    torch.manual_seed(0)
    plain = kind(**SIZES)
    for _ in range(3):
        batch = make_rows(torch.rand(16, 1))
        batch["state"], batch["next", "state"] = batch["observation"], batch["next", "observation"]
        for one in (agent, plain):
            torch.manual_seed(1)
            without_trainer(one).update(batch.clone())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(agent.state_dict()[name], value)


@KINDS
def test_statistics_of_the_critics_column_come_from_batches(kind) -> None:
    agent, batch = asymmetric(kind, normalize_observations=True)
    without_trainer(agent).update(batch)
    part = agent.critic_encoder.parts[0]
    torch.testing.assert_close(part.mean, batch["state"].mean(0))
    assert part.count == 16 and agent.observation_encoder.parts[0].count == 0
    agent.freeze_normalization()
    agent.update(batch)
    assert part.count == 16


@KINDS
def test_the_policy_trains_its_encoder_of_images(kind) -> None:
    camera = {"encoder": "convolutions", "shape": [8, 8], "high": 255.0, "channels_first": False}
    sizes = {"observation_size": camera, "critic_observation": "state", "critic_observation_size": 2}
    agent = without_trainer(kind(**SIZES | sizes, **({"policy_delay": 1} if kind is TD3 else {})))
    batch = make_rows(torch.rand(16, 1), state=torch.randn(16, 2))
    for columns in (batch, batch["next"]):
        columns["observation"] = torch.randint(255, (16, 8, 8), dtype=torch.uint8)
    batch["next", "state"] = torch.randn(16, 2)
    before = copy.deepcopy(agent.state_dict())
    agent.update(batch)
    for name, value in agent.state_dict().items():
        moves = "encoder" in name or name.startswith(("actor", "critics"))
        assert not moves or not torch.equal(value, before[name]) or value.numel() == 0, name


@KINDS
def test_targets_come_from_the_target_encoder_of_the_critics(kind) -> None:
    camera = {"encoder": "convolutions", "shape": [8, 8], "high": 255.0, "channels_first": False}
    agent = kind(**SIZES, critic_observation="state", critic_observation_size=camera)
    batch = make_rows(torch.rand(16, 1), state=torch.randint(255, (16, 8, 8)))
    batch["next", "state"] = torch.randint(255, (16, 8, 8))
    found = []
    for network in (None, agent.critic_encoder, agent.target_critic_encoder):
        for parameter in [] if network is None else network.parameters():
            parameter.data.mul_(0.5)
        torch.manual_seed(0)
        found.append(agent.target(batch))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


# Under a trainer


FULL: dict[str, Any] = {
    "hidden_sizes": (8,),
    "layer_norm": True,
    **ATOMS,
    "normalize_observations": True,
    "critic_observation": "critic_observation",
}


@KINDS
def test_a_simulator_feeds_all_options(kind, tmp_path: Path) -> None:
    noise = {"exploration_noise_high": 0.4} if kind is TD3 else {}
    agent = kind(**FULL, **noise)
    columns = {"observation": "observation", "critic_observation": "critic_observation"}
    replay = recipes.prioritized(capacity=1_000, batch_size=16, n_steps=3, discount=0.99)
    data = ReplayDataModule(
        partial(Pendulums, noise=0.1, max_steps=4),
        replay,
        env_kwargs={"num_envs": 10},
        observation_columns=columns,
        env_steps=200,
        warmup_steps=100,
        updates_per_env_step=0.1,
        updates_per_training_step=2,
        seed=0,
    )
    make_trainer(tmp_path, callbacks=[Evaluate(every_n_env_steps=100, episodes=3)]).fit(agent, datamodule=data)
    assert agent.hparams["critic_observation_size"] == 3 and agent.hparams["observation_size"] == 3
    assert data.updates_done == 10
    rows = data.replay[:]
    normalization = agent.observation_encoder.parts[0]
    assert normalization.count == 200  # The warm-up counts, and evaluations do not.
    torch.testing.assert_close(normalization.mean, rows["observation"].mean(0), atol=1e-5, rtol=1e-4)
    assert agent.critic_encoder.parts[0].count == 10 * 16
    if kind is TD3:
        assert agent._deviations.shape == (10, 1)


@pytest.mark.parametrize(
    ("env", "options"),
    [
        (Counting, {"env_kwargs": {"length": 3}, "num_envs": 2}),
        (Pendulums, {"env_kwargs": {"num_envs": 2, "max_steps": 3}}),
    ],
    ids=["vector", "simulator"],
)
def test_collection_tells_the_ends_of_episodes(env, options: dict[str, Any], tmp_path: Path) -> None:
    told = []

    class Watched(TD3):
        def end_episodes(self, done):
            told.append(torch.as_tensor(done).tolist())
            super().end_episodes(done)

    replay = recipes.uniform(capacity=100, batch_size=4)
    data = ReplayDataModule(env, replay, env_steps=12, warmup_steps=6, seed=0, **options)
    agent = Watched(hidden_sizes=(8,), normalize_observations=True)
    make_trainer(tmp_path).fit(agent, datamodule=data)
    assert told == [[False, False], [False, False], [True, True]] * 2
    torch.testing.assert_close(agent.observation_encoder.parts[0].mean, data.replay[:]["observation"].mean(0).float())


def test_collection_does_not_ask_an_agent_without_these_options(tmp_path: Path) -> None:
    class Watched(TD3):
        def observe(self, observation):
            raise AssertionError

        end_episodes = observe

    data = ReplayDataModule(Counting, recipes.uniform(capacity=100, batch_size=4), env_steps=12, warmup_steps=6, seed=0)
    make_trainer(tmp_path).fit(Watched(hidden_sizes=(8,)), datamodule=data)


class Waits(TorchDispatchMode):
    """Notes calls whose results the CPU would have to read from a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique_dim", "_unique2"):
            self.found.append(name)
        return function(*args, **kwargs or {})


@KINDS
def test_acting_and_learning_read_nothing_from_the_device(kind) -> None:
    noise = {"exploration_noise_high": 0.4} if kind is TD3 else {}
    agent = without_trainer(kind(**SIZES | FULL, critic_observation_size=5, **noise))
    batch = make_rows(torch.rand(64, 1), critic_observation=torch.randn(64, 5))
    batch["next", "critic_observation"] = torch.randn(64, 5)
    agent.update(batch)  # The optimizers create their states.
    done = torch.rand(64) < 0.5
    with Waits() as waits:
        with torch.no_grad():
            agent.act(batch["observation"], explore=True)
            agent.observe(batch["observation"])
            agent.end_episodes(done)
        agent.update(batch)
        agent.update(batch)
    assert waits.found == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TD3, SIZES),
        (TD3, SIZES | {"normalize_observations": True, "exploration_noise_high": 0.4}),
        (SAC, SIZES | {"normalize_observations": True}),
        (DQN, {"observation_size": 3, "num_actions": 4}),
        (MPDQN, {"observation_size": 3, "parameter_sizes": [1], "parameter_low": [0.0], "parameter_high": [1.0]}),
    ],
)
def test_actions_are_chosen_where_no_value_can_be_read(kind, options: dict[str, Any]) -> None:
    agent = kind(**options).to("meta")  # Tensors on this device have no values.
    for explore in (True, False):
        with torch.no_grad():
            action = agent.act(torch.zeros(4_096, 3, device="meta"), explore=explore)
        for part in action if isinstance(action, tuple) else (action,):
            assert part.device.type == "meta" and len(part) == 4_096
    if kind is TD3:
        agent.end_episodes(torch.ones(4_096, dtype=torch.bool, device="meta"))


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_low": 1.0, "value_high": 1.0}, "value_low is 1.0 and value_high 1.0; give the least return, and"),
        ({"atoms": 1}, "atoms is 1; it must be a whole number from 2 on"),
        ({"exploration_noise": 0.5, "exploration_noise_high": 0.4}, "exploration_noise is 0.5 and .* least deviation"),
        ({"critic_observation": "state"}, "critic_observation is 'state' without critic_observation_size, .*; give"),
        ({"critic_observation_size": 3}, "critic_observation_size is 3 without critic_observation; give also"),
        ({"critic_observation": "state", "critic_observation_size": 0}, "critic_observation_size is 0; it must be"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        TD3(**SIZES, **options)


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("place", ["root", "next"])
@KINDS
def test_rows_without_the_critics_column_are_refused(kind, place: str, normalizes: bool) -> None:
    agent, batch = asymmetric(kind, normalize_observations=normalizes)
    del batch["state" if place == "root" else ("next", "state")]
    message = r"rows have the columns \[.*\], at the root or under 'next', and critic_observation is 'state'; store"
    with pytest.raises(ValueError, match=message):
        without_trainer(agent).update(batch)


def test_a_module_without_the_space_of_the_column_is_refused(tmp_path: Path) -> None:
    data = ReplayDataModule(Counting, recipes.uniform(capacity=100), env_steps=12, warmup_steps=6)
    with pytest.raises(ValueError, match=r"critic_observation is 'state' without .* no data module has a space"):
        make_trainer(tmp_path).fit(TD3(critic_observation="state"), datamodule=data)


def test_a_run_with_all_options_is_resumed_as_one_without_a_break(tmp_path: Path) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if trainer.datamodule.updates_done == 5:
                trainer.save_checkpoint(tmp_path / "five.ckpt")

    def data_of() -> ReplayDataModule:
        replay = recipes.uniform(capacity=1_000, batch_size=16)
        options = {"env_steps": 200, "warmup_steps": 100, "updates_per_env_step": 0.1, "seed": 0}
        return ReplayDataModule(partial(Pendulums, num_envs=10, max_steps=4), replay, **options)

    options = {name: value for name, value in FULL.items() if name != "critic_observation"}
    make_trainer(tmp_path, callbacks=[Save()]).fit(TD3(**options, exploration_noise_high=0.4), datamodule=data_of())
    resumed = []
    for _ in range(2):
        agent, data = TD3(**options, exploration_noise_high=0.4), data_of()
        torch.manual_seed(9)
        make_trainer(tmp_path).fit(agent, datamodule=data, ckpt_path=tmp_path / "five.ckpt")
        assert agent.observation_encoder.parts[0].count == 200 and data.updates_done == 10
        resumed.append((agent.state_dict(), data.replay[:]["action"]))
    assert torch.equal(resumed[0][1], resumed[1][1])
    for name, value in resumed[0][0].items():
        assert torch.equal(resumed[1][0][name], value)
