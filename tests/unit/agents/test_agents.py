# SPDX-License-Identifier: Apache-2.0
"""The three agents on batches worked out by hand: sizes, targets, weights, feedback, clocks, checkpoints."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import lightning as L
import pytest
import torch
from tensordict import TensorDict

from lightning_replay.agents import CQL, DQN, IQL, SAC, TD3, OffPolicyAgent
from lightning_replay.agents.agent import weighted_mean
from tests.unit.agents.toys import Batches, fit, make_rows

# fitted without a data module here
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

CONTINUOUS = {"observation_size": 3, "action_low": [-2.0, 0.0], "action_high": [2.0, 1.0], "hidden_sizes": (8,)}
DISCRETE = {"observation_size": 3, "num_actions": 4, "hidden_sizes": (8,)}
AGENTS = [
    pytest.param(lambda **options: TD3(**CONTINUOUS, **options), id="td3"),
    pytest.param(lambda **options: SAC(**CONTINUOUS, **options), id="sac"),
    pytest.param(lambda **options: IQL(**CONTINUOUS, **options), id="iql"),
    pytest.param(lambda **options: CQL(**CONTINUOUS, **options), id="cql"),
    pytest.param(lambda **options: DQN(**DISCRETE, **options), id="dqn"),
]


def make_batch(agent: OffPolicyAgent, size: int = 16) -> TensorDict:
    return make_rows(torch.randint(4, (size,)) if isinstance(agent, DQN) else torch.rand(size, 2))


class Before(L.Callback):
    def __init__(self) -> None:
        self.gradients = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.gradients.append(optimizer.param_groups[0]["params"][0].grad.abs().max().item())


@pytest.mark.parametrize("make", AGENTS)
def test_callbacks_before_a_step_are_called_and_change_nothing(make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    hooked = make()
    torch.manual_seed(0)
    plain = make()
    batches, callback = [make_batch(plain) for _ in range(5)], Before()
    torch.manual_seed(1)
    trainer, _ = fit(hooked, batches, tmp_path, callbacks=(callback,))
    torch.manual_seed(1)
    fit(plain, batches, tmp_path)
    assert trainer.global_step == len(callback.gradients) == 5 and min(callback.gradients) > 0
    assert not hooked._steps_directly and plain._steps_directly
    for value, expected in zip(hooked.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_steps_are_counted_for_limits_and_checkpoints(tmp_path: Path) -> None:
    agent = DQN(**DISCRETE)
    save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_steps=5, callbacks=[save], **options)
    trainer.fit(agent, Batches([make_batch(agent) for _ in range(9)]))
    assert agent._steps_directly and trainer.global_step == 5
    assert sorted(path.stem for path in tmp_path.glob("*.ckpt")) == ["step=2", "step=4"]


def test_weights_multiply_rows_and_the_sum_is_divided_by_the_batch() -> None:
    rows = torch.tensor([1.0, 2.0, 4.0])
    batch = TensorDict({"priority_weight": torch.tensor([1.0, 0.5, 0.25])}, [3])
    assert weighted_mean(rows, batch) == 1.0
    assert weighted_mean(rows, TensorDict({}, [3])) == rows.mean()


@pytest.mark.parametrize("make", AGENTS)
def test_actions_stay_in_the_space(make) -> None:
    agent = make()
    observation = 10 * torch.randn(200, 3)
    for explore in (False, True):
        action = agent.act(observation, explore=explore)
        if isinstance(agent, DQN):
            assert action.dtype == torch.int64 and action.min() >= 0 and action.max() < 4
        else:
            low, high = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])
            assert action.shape == (200, 2) and (action >= low).all() and (action <= high).all()
    assert torch.equal(agent.act(observation, explore=False), agent.act(observation, explore=False))


def test_td3_exploration_noise_is_measured_in_half_ranges() -> None:
    agent = TD3(**CONTINUOUS, exploration_noise=0.1)
    observation = torch.zeros(50_000, 3)
    noise = agent.act(observation, explore=True) - agent.act(observation, explore=False)
    torch.testing.assert_close(noise.std(0), torch.tensor([0.2, 0.05]), rtol=0.05, atol=0)


def test_dqn_explores_less_and_less() -> None:
    agent = DQN(**DISCRETE, exploration_start=1.0, exploration_end=0.2, exploration_steps=1_000)
    assert agent.exploration_rate == 1.0
    agent.act(torch.zeros(500, 3), explore=True)
    assert agent.exploration_rate == pytest.approx(0.6)
    agent.act(torch.zeros(5_000, 3), explore=False)
    assert agent.exploration_rate == pytest.approx(0.6)
    agent.act(torch.zeros(5_000, 3), explore=True)
    assert agent.exploration_rate == pytest.approx(0.2)
    observation = torch.zeros(20_000, 3)
    differs = agent.act(observation, explore=True) != agent.act(observation, explore=False)
    assert differs.float().mean().item() == pytest.approx(0.2 * 3 / 4, abs=0.02)


@pytest.mark.parametrize(
    ("kind", "env", "names"),
    [
        (TD3, "Pendulum-v1", {"observation_size": 3, "action_low": [-2.0], "action_high": [2.0]}),
        (SAC, "Pendulum-v1", {"observation_size": 3, "action_low": [-2.0], "action_high": [2.0]}),
        (DQN, "CartPole-v1", {"observation_size": 4, "num_actions": 2}),
    ],
)
def test_for_env_reads_ids_callables_environments_and_vectors(kind, env, names) -> None:
    environment, vector = gymnasium.make(env), gymnasium.make_vec(env, num_envs=2)
    for given in (env, lambda: gymnasium.make(env), environment, vector):
        agent = kind.for_env(given, hidden_sizes=(4,))
        assert {name: agent.hparams[name] for name in names} == names
        assert agent.is_built
    environment.close()
    vector.close()


def test_sac_acts_as_the_loss_draws() -> None:
    agent = SAC(**CONTINUOUS)
    observation = torch.randn(1, 3).expand(40_000, 3)
    with torch.no_grad():
        drawn, _ = agent.draw(observation)
        acted = agent.act(observation, explore=True)
    torch.testing.assert_close(acted.mean(0), drawn.mean(0), rtol=0.05, atol=0.02)
    torch.testing.assert_close(acted.std(0), drawn.std(0), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("make", AGENTS)
def test_what_acts_moves_with_the_module(make) -> None:
    agent = make().double()  # stands for another device
    batch = make_batch(agent)
    batch = batch.apply(lambda column: column.double() if column.is_floating_point() else column)
    action = agent.act(batch["observation"], explore=True)
    assert action.dtype == (torch.int64 if isinstance(agent, DQN) else torch.float64)
    td_error = agent.losses(batch)[1] if isinstance(agent, DQN) else agent.distances(batch)
    assert td_error.dtype == torch.float64
    assert all(t.dtype == torch.float64 for t in agent.state_dict().values() if t.is_floating_point())


def test_a_subclass_of_dqn_may_have_another_network_and_losses(tmp_path: Path) -> None:
    class Own(DQN):
        def build(self) -> None:
            super().build()
            self.network = torch.nn.Sequential(self.network)  # has no layers()

        def losses(self, batch):
            value = self.network(batch["observation"]).gather(-1, batch["action"].reshape(-1, 1)).squeeze(-1)
            error = value - batch["next", "reward"].squeeze(-1)
            return error.square(), error.detach().abs()

        def on_train_batch_start(self, *given) -> None:
            self.target_update.step = lambda: None

    trainer, _ = fit(Own(**DISCRETE), [make_batch(DQN(**DISCRETE)) for _ in range(3)], tmp_path)
    assert trainer.global_step == 3
