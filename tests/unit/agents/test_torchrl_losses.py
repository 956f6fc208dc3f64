# SPDX-License-Identifier: Apache-2.0
"""DQN, TD3, SAC, IQL and CQL learn what TorchRL's losses with its target update learn, to the last digits."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import IndependentNormal, ProbabilisticActor, QValueActor, TanhNormal
from torchrl.objectives import CQLLoss, DQNLoss, IQLLoss, LossModule, SACLoss, SoftUpdate, TD3Loss

from lightning_replay.agents import CQL, DQN, IQL, SAC, TD3, OffPolicyAgent
from lightning_replay.agents.agent import weighted_mean
from lightning_replay.agents.cagrad import ConflictAverseStep
from lightning_replay.agents.networks import Layers

BOUNDS = {"action_low": [-2.0, 0.0], "action_high": [2.0, 3.0]}
CONTINUOUS = {"observation_size": 3, "hidden_sizes": (32, 24), "target_update_rate": 0.05, **BOUNDS}
DISCRETE = {"observation_size": 3, "num_actions": 4, "hidden_sizes": (32, 24), "target_update_rate": 0.05}
AGENTS = {
    "dqn": lambda: DQN(**DISCRETE),
    "dqn-averse": lambda: DQN(**DISCRETE, conflict_aversion=0.4),
    "dqn-one-layer": lambda: DQN(**DISCRETE | {"hidden_sizes": (7,)}),
    "dqn-twelve-layers": lambda: DQN(**DISCRETE | {"hidden_sizes": (9,) * 12}),
    "td3": lambda: TD3(**CONTINUOUS),
    "td3-averse": lambda: TD3(**CONTINUOUS, conflict_aversion=0.4),
    "td3-delay": lambda: TD3(**CONTINUOUS, policy_delay=3, target_noise=0.8, target_noise_clip=1.5),
    "sac": lambda: SAC(**CONTINUOUS, initial_entropy_coefficient=0.3, entropy_learning_rate=0.01),
    "sac-averse": lambda: SAC(**CONTINUOUS, conflict_aversion=0.4),
    "sac-regularized": lambda: SAC(**CONTINUOUS, actor_regularization=0.1, target_entropy=-1.0),
}


def batches(agent: OffPolicyAgent, columns: str, shape: tuple[int, ...], count: int) -> list[TensorDict]:
    """Batches; every fourth row is terminal, every fifth truncated."""
    dtype = torch.get_default_dtype()
    number = torch.arange(torch.Size(shape).numel()).reshape(*shape, 1)
    found = []
    for _ in range(count):
        following = {"observation": torch.randn(*shape, 3), "reward": torch.randn(*shape, 1)}
        following |= {"terminated": number % 4 == 0, "truncated": number % 5 == 0}
        following["done"] = following["terminated"] | following["truncated"]
        low, high = (torch.tensor(BOUNDS[name]) for name in ("action_low", "action_high"))
        action = torch.randint(4, shape) if isinstance(agent, DQN) else low + (high - low) * torch.rand(*shape, 2)
        batch = TensorDict({"observation": torch.randn(*shape, 3), "action": action, "next": following}, shape)
        batch["table"] = torch.randint(3, shape)
        if "weights" in columns:
            batch["priority_weight"] = torch.rand(shape, dtype=dtype)
        if "steps" in columns:
            batch["steps_to_next_obs"] = torch.randint(1, 4, (*shape, 1))
            batch["discount"] = torch.rand(*shape, 1)  # the agents compute it from the steps
        found.append(batch)
    return found


def without_trainer(agent: OffPolicyAgent) -> OffPolicyAgent:
    optimizers = agent.configure_optimizers()
    agent.optimizers = lambda use_pl_optimizer=True: optimizers
    agent.take_gradients = torch.Tensor.backward
    return agent


def plain(layers: Layers) -> nn.Sequential:
    parts = []
    for weight, bias in layers:
        layer = nn.Linear(*weight.shape[::-1])
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(bias)
        parts += [layer, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


class BoundedActor(nn.Module):
    def __init__(self, agent: TD3) -> None:
        super().__init__()
        self.network = plain(agent.actor.layers())
        self.register_buffer("center", agent.action_center)
        self.register_buffer("half_range", agent.action_half_range)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.center + self.half_range * torch.tanh(self.network(observation))


class Critic(nn.Module):
    def __init__(self, agent: TD3 | SAC, number: int) -> None:
        super().__init__()
        self.network = plain([(weight[number], bias[number]) for weight, bias in agent.critics.layers()])

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.network(torch.cat([observation, action], dim=-1))


class ImitatingActor(nn.Module):
    def __init__(self, agent: IQL) -> None:
        super().__init__()
        self.network = plain(agent.actor.layers())
        self.bias = nn.Parameter(agent.log_deviation.detach().clone())

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = torch.tanh(self.network(observation))
        return mean, self.bias.exp().expand_as(mean)


class ScaledNormal(IndependentNormal):
    """Of actions scaled to [-1, 1]."""

    def __init__(self, loc: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        super().__init__(loc, scale)
        self.low, self.high = low, high

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        return super().log_prob((2 * value - self.high - self.low) / (self.high - self.low))


class ScaledTanhNormal(TanhNormal):
    """Its density is that of the action scaled to [-1, 1], whatever the bounds."""

    def rsample_and_log_prob(self, sample_shape=()):
        action, log_density = super().rsample_and_log_prob(sample_shape)
        return action, log_density + ((self.high - self.low) / 2).log().sum()


def torchrl_loss(agent: OffPolicyAgent) -> LossModule:
    options, common = agent.hparams, {"reduction": "none", "use_prioritized_weights": False}
    if isinstance(agent, DQN):
        network = QValueActor(plain(agent.network.layers()), in_keys=["observation"], action_space="categorical")
        loss = DQNLoss(
            network, loss_function="smooth_l1", delay_value=True, double_dqn=True, action_space="categorical", **common
        )
    else:
        bounds = {"low": agent.action_low, "high": agent.action_high}
        critics = [
            TensorDictModule(Critic(agent, i), ["observation", "action"], ["state_action_value"]) for i in (0, 1)
        ]
        if isinstance(agent, TD3):
            actor = TensorDictModule(BoundedActor(agent), ["observation"], ["action"])
            loss = TD3Loss(actor, critics, bounds=tuple(bounds.values()), loss_function="l2", **common)
            del loss.policy_noise, loss.noise_clip
            loss.register_buffer("policy_noise", options["target_noise"] * agent.action_half_range)
            loss.register_buffer("noise_clip", options["target_noise_clip"] * agent.action_half_range)
        elif isinstance(agent, IQL):
            actor = ProbabilisticActor(
                TensorDictModule(ImitatingActor(agent), in_keys=["observation"], out_keys=["loc", "scale"]),
                in_keys=["loc", "scale"],
                distribution_class=ScaledNormal,
                distribution_kwargs=bounds,
            )
            value = TensorDictModule(plain(agent.value.layers()), ["observation"], ["state_value"])
            beta = options["inverse_temperature"]
            common |= {"temperature": beta, "expectile": options["expectile"], "scalar_output_mode": "exclude"}
            common.pop("use_prioritized_weights")
            loss = IQLLoss(actor, critics, value, loss_function="l2", **common)
            loss.use_prioritized_weights = False
        else:
            network = nn.Sequential(plain(agent.actor.layers()), NormalParamExtractor())
            actor = ProbabilisticActor(
                TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
                in_keys=["loc", "scale"],
                distribution_class=ScaledTanhNormal,
                distribution_kwargs=bounds,
                return_log_prob=True,
            )
            common["alpha_init"], entropy = options["initial_entropy_coefficient"], options["target_entropy"]
            common |= {"target_entropy": -2.0 if entropy is None else entropy, "scalar_output_mode": "exclude"}
            if isinstance(agent, CQL):
                common.pop("use_prioritized_weights")
                loss = CQLLoss(actor, critics, loss_function="l2", num_random=1, **common)
            else:
                loss = SACLoss(actor, critics, loss_function="l2", **common)
    loss.make_value_estimator(gamma=options["discount"])
    return loss


class Oracle:
    """An agent's updates with a loss of TorchRL."""

    def __init__(self, agent: OffPolicyAgent) -> None:
        self.agent, self.loss, self.updates = agent, torchrl_loss(agent), 0
        self.targets = SoftUpdate(self.loss, tau=agent.hparams["target_update_rate"])
        if isinstance(agent, DQN):
            self.critic = agent.adam(self.parameters("value"))
            return
        self.critic = agent.adam(self.parameters("qvalue"), "critic_learning_rate")
        self.others = [agent.adam(self.parameters("actor"), "actor_learning_rate")]
        if isinstance(agent, IQL):
            self.others.append(agent.adam(self.parameters("value"), "value_learning_rate"))
        if isinstance(agent, SAC):
            self.others.append(agent.adam([self.loss.log_alpha], "entropy_learning_rate"))

    def parameters(self, name: str) -> list[torch.Tensor]:
        found = getattr(self.loss, f"{name}_network_params").items(True, True)
        return [value for key, value in found if key[-1] in ("weight", "bias")]

    def state(self) -> list[torch.Tensor]:
        """In the order of :func:`state_of`."""
        if isinstance(self.agent, DQN):
            return [*self.parameters("value"), *self.parameters("target_value")]
        networks = [*self.parameters("actor"), *self.parameters("qvalue")]
        if isinstance(self.agent, TD3):
            return [*networks, *self.parameters("target_actor"), *self.parameters("target_qvalue")]
        if isinstance(self.agent, IQL):
            return [*networks, *self.parameters("target_qvalue"), *self.parameters("value")]
        return [*networks, *self.parameters("target_qvalue"), self.loss.log_alpha]

    def learn(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def learn_rows(self, rows: torch.Tensor, batch: TensorDict) -> torch.Tensor:
        loss = weighted_mean(rows, batch)
        if self.agent.hparams.get("conflict_aversion", 0.0) == 0:
            self.learn(self.critic, loss)
            return loss
        weight = batch.get("priority_weight", torch.ones(rows.shape))
        parameters = [p for group in self.critic.param_groups for p in group["params"]]
        ConflictAverseStep(parameters, 0.4).backward(rows * weight, batch["table"])
        self.critic.step()
        return loss

    def update(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        self.updates += 1
        batch = batch.copy()
        updates = {DQN: self.update_dqn, TD3: self.update_td3, IQL: self.update_iql}
        update = updates.get(type(self.agent), self.update_sac)
        loss, td_error = update(batch)
        return {"loss": loss.detach(), "td_error": td_error.detach()}

    def update_dqn(self, batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.learn_rows(self.loss(batch)["loss"], batch)
        self.targets.step()
        return loss, batch["td_error"].squeeze(-1).sqrt()

    def update_td3(self, batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        rows, details = self.loss.value_loss(batch)
        loss = self.learn_rows(rows, batch)
        if self.updates % self.agent.hparams["policy_delay"] == 0:
            self.learn(self.others[0], self.loss.actor_loss(batch)[0].mean())
            self.targets.step()
        return loss, details["td_error"].amax(0).sqrt()

    def update_iql(self, batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        self.learn(self.others[1], weighted_mean(self.loss.value_loss(batch)[0], batch))
        self.learn(self.others[0], weighted_mean(self.loss.actor_loss(batch)[0], batch))
        rows, details = self.loss.qvalue_loss(batch)
        loss = weighted_mean(rows, batch)
        self.learn(self.critic, loss)
        self.targets.step()
        return loss, details["td_error"].amax(0).sqrt()

    def update_sac(self, batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(self.agent, CQL):
            rows, details = self.loss.q_loss(batch)
            loss = rows.mean() + self.agent.hparams["conservative_weight"] * self.loss.cql_loss(batch)[0].mean()
            self.learn(self.critic, loss)
            details["td_error"] = details["td_error"].amax(0).sqrt()
        else:
            rows, details = self.loss.qvalue_v2_loss(batch)
            loss = self.learn_rows(rows, batch)
        rows, found = self.loss.actor_loss(batch)
        layers = [p for name, p in self.loss.actor_network_params.flatten_keys(".").items() if name.endswith("weight")]
        penalty = self.agent.hparams["actor_regularization"] / 2 * sum(p.square().sum() for p in layers)
        self.learn(self.others[0], rows.mean() + penalty)
        if isinstance(self.agent, CQL):
            self.learn(self.others[1], self.loss.alpha_loss(found)[0].mean())
        else:
            self.learn(self.others[1], self.loss.alpha_loss(found["log_prob"]).mean())
        self.targets.step()
        return loss, details["td_error"]


def state_of(agent: OffPolicyAgent) -> list[torch.Tensor]:
    if isinstance(agent, DQN):
        return [*agent.network.parameters(), *agent.target_network.parameters()]
    networks = [*agent.actor.parameters(), *agent.critics.parameters()]
    if isinstance(agent, TD3):
        return [*networks, *agent.target_actor.parameters(), *agent.target_critics.parameters()]
    if isinstance(agent, IQL):  # the deviation stands first in the oracle
        targets = agent.target_critics.parameters()
        return [agent.log_deviation, *networks, *targets, *agent.value.parameters()]
    return [*networks, *agent.target_critics.parameters(), agent.log_alpha]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "shape"),
    [("plain", (32,)), ("weights and steps", (32,)), ("steps", (4, 8))],
    ids=["plain", "both", "sequences"],
)
@pytest.mark.parametrize("kind", AGENTS)
def test_updates_equal_those_with_torchrl(kind, columns, shape, dtype) -> None:
    check_updates(AGENTS[kind], columns, shape, dtype)


# Its loss leaves out the number of steps of a return.
@pytest.mark.parametrize("columns", ["plain", "weights"])
def test_updates_of_iql_equal_those_with_torchrl(columns, dtype) -> None:
    options = {"expectile": 0.8, "inverse_temperature": 2.0, "actor_learning_rate": 0.01}
    check_updates(lambda: IQL(**CONTINUOUS, **options), columns, (32,), dtype)


# Its loss mixes the rows of a batch, sums over three of several sampled actions at a time, draws random actions between
# -1 and 1, and evaluates the policy's actions of the next state in that state; the authors' code in the state itself.
@pytest.mark.parametrize("columns", ["plain", "steps"])
def test_updates_of_cql_equal_those_with_torchrl(columns, dtype) -> None:
    bounds = {"action_low": [-1.0, -1.0], "action_high": [1.0, 1.0]}

    def build() -> CQL:
        return CQL(**CONTINUOUS | bounds, conservative_weight=0.7, sampled_actions=1)

    check_updates(build, columns, (32,), dtype, stays=True)


def check_updates(build, columns, shape, dtype, *, stays: bool = False) -> None:
    torch.manual_seed(5)
    agent = without_trainer(build())
    torch.manual_seed(5)
    oracle = Oracle(build())
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    for number, batch in enumerate(batches(agent, columns, shape, 7)):  # the policy moves twice with a delay of 3
        if stays:
            batch["next", "observation"] = batch["observation"].clone()
        torch.manual_seed(number)
        found = agent.update(batch.copy())
        torch.manual_seed(number)
        expected = oracle.update(batch)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)
            assert not found[name].requires_grad
    for value, expected in zip(state_of(agent), oracle.state(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=tolerance)
