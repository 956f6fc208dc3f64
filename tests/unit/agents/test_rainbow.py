# SPDX-License-Identifier: Apache-2.0
"""Rainbow on numbers worked out by hand: divergence, double choice, discounts, noise, clocks."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules import DistributionalQValueActor, NoisyLinear, QValueActor
from torchrl.objectives import DistributionalDQNLoss, DQNLoss, HardUpdate

from lightning_replay.agents import Rainbow
from lightning_replay.agents.networks import ImageNetwork, with_noise
from tests.unit.agents.toys import fit, flags

# fitted without a data module here
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

NETWORK = {"channels": (4,), "kernel_sizes": (3,), "strides": (2,), "hidden_size": 8}
SMALL = {"observation_shape": (2, 6, 6), "observation_high": 255.0, "num_actions": 3} | NETWORK
PARTS = ("double", "dueling", "distributional", "noisy")
NO_NOISE = {"noisy": False}
ATOMS = {"atoms": 3, "value_low": -1.0, "value_high": 1.0}


def make_batch(size: int = 8, num_actions: int = 3) -> TensorDict:
    following = {"observation": images(size), "reward": torch.randn(size, 1), **flags(size)}
    action = torch.randint(num_actions, (size,))
    columns = {"observation": images(size), "action": action, "next": following, "index": torch.arange(size)}
    return TensorDict(columns, [size])


def images(count: int) -> torch.Tensor:
    return torch.randint(256, (count, 2, 6, 6), dtype=torch.uint8)


class Table(nn.Module):
    """Row ``observation`` of a table of values ``[S, A]`` or logits ``[S, N, A]``."""

    def __init__(self, table) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor(table))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.table[observation.reshape(-1)]


def one_step(action: int, reward: float, *, terminated: bool = False, **more: float) -> TensorDict:
    columns = {key: torch.tensor([[value]]) for key, value in more.items()}
    following = {
        "observation": torch.tensor([[1]]),
        "reward": torch.tensor([[reward]]),
        "terminated": torch.tensor([[terminated]]),
        "truncated": torch.tensor([[not terminated]]),
        "done": torch.ones(1, 1, dtype=torch.bool),
    }
    start = {"observation": torch.tensor([[0]]), "action": torch.tensor([action])}
    return TensorDict(start | columns | {"next": TensorDict(following, [1])}, [1])


def with_tables(agent: Rainbow, online, target) -> Rainbow:
    agent.network, agent.target_network = Table(online), Table(target)
    return agent


ONLINE = [[1.0, 2.0], [5.0, 4.0]]  # after the step the network prefers action 0
TARGET = [[0.0, 0.0], [3.0, 7.0]]  # and the target network action 1


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize(
    ("double", "step", "td_error"),
    [
        pytest.param(True, one_step(1, 0.5), 0.5 + 0.9 * 3.0 - 2.0, id="double: the target's value of the network's"),
        pytest.param(False, one_step(1, 0.5), 0.5 + 0.9 * 7.0 - 2.0, id="the target's best"),
        pytest.param(True, one_step(0, 0.5, terminated=True), 0.5 - 1.0, id="terminated"),
        pytest.param(True, one_step(0, 0.5, discount=0.25), 0.5 + 0.25 * 3.0 - 1.0, id="the batch's own discount"),
        pytest.param(True, one_step(0, 0.5, discount=0.0), 0.5 - 1.0, id="the batch's own 0"),
    ],
)
def test_scalar_td_errors_by_hand(double, step, td_error, with_gradient):
    agent = with_tables(Rainbow(**SMALL, distributional=False, discount=0.9, double=double), ONLINE, TARGET)
    with torch.set_grad_enabled(with_gradient):
        rows = agent.rows(step)
    torch.testing.assert_close(rows.td_error, torch.tensor([td_error]))
    torch.testing.assert_close(rows.surprise, torch.tensor([td_error**2]))
    huber = td_error**2 / 2 if abs(td_error) < 1 else abs(td_error) - 0.5
    torch.testing.assert_close(rows.loss.detach(), torch.tensor([huber]))
    assert rows.action_values.tolist() == [[1.0, 2.0]]
    assert rows.loss.requires_grad == with_gradient
    assert not any(value.requires_grad for value in rows[1:])


# distributions over -1, 0, 1 as logits [S, N, A]; their means choose
CURRENT = [[[0.25, 0.1], [0.5, 0.8], [0.25, 0.1]], [[0.1, 0.3], [0.2, 0.5], [0.7, 0.2]]]  # next means: 0.6, -0.1
FOLLOWING = [[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [[0.5, 0.0], [0.0, 0.25], [0.5, 0.75]]]  # next means: 0, 0.75


def categorical(**options) -> Rainbow:
    logits = [np.log(np.maximum(np.array(table), 1e-30)).tolist() for table in (CURRENT, FOLLOWING)]
    return with_tables(Rainbow(**SMALL, **ATOMS, discount=0.5, **options), *logits)


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize(
    ("double", "target"),
    [
        # half at -1 and half at 1 go, with reward 0.5 and discount 0.5, to 0 and 1
        pytest.param(True, [0.0, 0.5, 0.5], id="double"),
        # a quarter at 0 and three quarters at 1 go to 0.5 and 1
        pytest.param(False, [0.0, 0.125, 0.875], id="the target's best"),
    ],
)
def test_divergence_and_td_error_of_distributions_by_hand(double, target, with_gradient):
    entropy = -sum(p * math.log(p) for p in target if p)
    cross = -(target[1] * math.log(0.5) + target[2] * math.log(0.25))
    with torch.set_grad_enabled(with_gradient):
        rows = categorical(double=double).rows(one_step(0, 0.5))
        measured = categorical(double=double, cross_entropy=True).rows(one_step(0, 0.5))
    torch.testing.assert_close(rows.surprise, torch.tensor([cross - entropy]))
    torch.testing.assert_close(measured.surprise, torch.tensor([cross]))
    torch.testing.assert_close(rows.loss.detach(), torch.tensor([cross]))
    torch.testing.assert_close(rows.td_error, torch.tensor([target[2]]))  # the current mean is 0
    torch.testing.assert_close(rows.action_values, torch.zeros(1, 2), atol=1e-6, rtol=0)


def test_an_expected_outcome_surprises_by_exactly_zero_though_its_cross_entropy_does_not():
    certain = np.log(np.array([[[0.2], [0.3], [0.5]]] * 2)).tolist()
    rows = with_tables(Rainbow(**SMALL, **ATOMS, discount=1.0), certain, certain).rows(one_step(0, 0.0))
    assert 0 <= rows.surprise.item() < 1e-6
    assert rows.td_error.item() == pytest.approx(0.0, abs=1e-6)
    assert rows.loss.item() == pytest.approx(-sum(p * math.log(p) for p in (0.2, 0.3, 0.5)))


@pytest.mark.parametrize("distributional", [True, False])
@pytest.mark.parametrize("steps", [None, 3])
def test_the_loss_is_torchrls_own(distributional, steps):
    agent = Rainbow(**SMALL, **NO_NOISE, distributional=distributional, discount=0.9)
    batch = make_batch()
    batch["next", "terminated"][:3] = True
    batch["next", "done"][:5] = True  # two of them truncated: they keep their bootstrap
    if steps is not None:
        batch["steps_to_next_obs"] = torch.full((8, 1), steps)
        batch["discount"] = 0.9**steps * (~batch["next", "terminated"]).float()
    network, plain = copy.deepcopy(agent.network), {"reduction": "none", "use_prioritized_weights": False}
    discrete = {"in_keys": ["observation"], "action_space": "categorical"}
    if distributional:
        actor = DistributionalQValueActor(network, agent.support, **discrete)
        loss = DistributionalDQNLoss(actor, gamma=0.9, delay_value=True, **plain)
    else:
        options = {"loss_function": "smooth_l1", "delay_value": True, "double_dqn": True, "action_space": "categorical"}
        loss = DQNLoss(QValueActor(network, **discrete), **options, **plain)
        loss.make_value_estimator(gamma=0.9)
    HardUpdate(loss)
    with torch.no_grad():
        for values in (agent.target_network.parameters(), loss.target_value_network_params.values(True, True)):
            for value in values:
                if value.ndim > 1:
                    value.mul_(1.5)  # unlike the network, to tell them apart
    torch.testing.assert_close(agent.rows(batch).loss, loss(batch.clone())["loss"])


def test_a_training_step_returns_what_the_replay_learns_from(tmp_path: Path):
    agent = Rainbow(**SMALL)
    batches = [make_batch() for _ in range(3)]
    trainer, record = fit(agent, batches, tmp_path)
    assert trainer.global_step == 3
    for outputs, batch in zip(record.outputs, batches, strict=True):
        assert outputs["td_error"].shape == outputs["surprise"].shape == (8,)
        assert outputs["action_values"].shape == (8, 3)
        assert torch.equal(outputs["action"], batch["action"])
        assert (outputs["surprise"] >= 0).all() and not torch.equal(outputs["surprise"], outputs["td_error"].square())
        assert (outputs["td_error"] < 0).any() and (outputs["td_error"] > 0).any()
        assert not any(value.requires_grad for value in outputs.values())


def test_signals_are_those_from_before_the_step_and_equal_the_initial_surprise(tmp_path: Path):
    agent, batch = Rainbow(**SMALL, **NO_NOISE, learning_rate=0.1), make_batch()
    before = agent.initial_surprise(batch)
    _, record = fit(agent, [batch], tmp_path)
    torch.testing.assert_close(record.outputs[0]["surprise"], before)
    assert not torch.allclose(agent.initial_surprise(batch), before)


def test_samples_by_surprise(tmp_path: Path):
    _, record = fit(Rainbow(**SMALL, samples_by_surprise=True), [make_batch()], tmp_path)
    assert torch.equal(record.outputs[0]["td_error"], record.outputs[0]["surprise"])


def test_surprise_is_the_divergence_or_the_cross_entropy_that_is_the_loss(tmp_path: Path):
    torch.manual_seed(0)
    _, record = fit(Rainbow(**SMALL), [make_batch()], tmp_path)
    # of a distribution near the uniform one over 51 atoms
    assert record.outputs[0]["loss"] - record.outputs[0]["surprise"].mean() > 0.5 * math.log(51)
    _, record = fit(Rainbow(**SMALL, cross_entropy=True), [make_batch()], tmp_path)
    torch.testing.assert_close(record.outputs[0]["surprise"].mean(), record.outputs[0]["loss"])


def test_priority_weights_multiply_the_rows(tmp_path: Path):
    agent, batch = Rainbow(**SMALL, **NO_NOISE, cross_entropy=True), make_batch()
    batch["priority_weight"] = torch.linspace(0.1, 1.0, 8)
    rows = agent.initial_surprise(batch)
    _, record = fit(agent, [batch], tmp_path)
    torch.testing.assert_close(record.outputs[0]["loss"], (rows * batch["priority_weight"]).mean())


@pytest.mark.parametrize("off", [(), *[(part,) for part in PARTS], PARTS])
def test_each_part_can_be_switched_off(off, tmp_path: Path):
    agent = Rainbow(**SMALL, **dict.fromkeys(off, False))
    names = [name for name, _ in agent.named_parameters()]
    assert any("sigma" in name for name in names) == ("noisy" not in off)
    assert any("advantage" in name for name in names) == ("dueling" not in off)
    before = [value.clone() for value in agent.network.parameters()]
    _, record = fit(agent, [make_batch(), make_batch()], tmp_path)
    assert all(not torch.equal(value, old) for value, old in zip(agent.network.parameters(), before, strict=True))
    assert torch.isfinite(record.outputs[1]["surprise"]).all()
    assert agent.exploration_rate == (1.0 if "noisy" in off else 0.0)


def test_dueling_adds_the_value_to_advantages_of_mean_0_for_every_atom():
    agent = Rainbow(**SMALL, atoms=5)
    network = agent.network
    with torch.no_grad():
        image = images(1)
        features = network.body.features(image / 255.0)
        value, advantage = network.body.value(features), network.body.advantage(features)
        assert value.shape == (1, 5, 1) and advantage.shape == (1, 5, 3)
        expected = value + advantage - advantage.sum(-1, keepdim=True) / 3
        torch.testing.assert_close(network(image), expected)


def test_pixels_are_divided_by_the_largest():
    settings = NETWORK | {"dueling": True}
    network = ImageNetwork((2, 6, 6), 1.0, (3,), noise_deviation=None, **settings)
    brighter = ImageNetwork((2, 6, 6), 255.0, (3,), noise_deviation=None, **settings)
    brighter.load_state_dict(network.state_dict())
    image = torch.randint(2, (1, 2, 6, 6), dtype=torch.uint8)
    torch.testing.assert_close(network(image), brighter(image * 255))


def test_the_target_network_is_copied_every_so_many_updates_across_a_resume(tmp_path: Path):
    def agree(agent: Rainbow) -> bool:
        pairs = zip(agent.network.parameters(), agent.target_network.parameters(), strict=True)
        return all(torch.equal(*pair) for pair in pairs)

    batches = [make_batch() for _ in range(5)]
    agent = Rainbow(**SMALL, target_update_every=3)
    assert agree(agent)
    trainer, record = fit(agent, batches, tmp_path, look=agree)
    assert record.seen == [False, False, True, False, False]
    trainer.save_checkpoint(tmp_path / "agent.ckpt")
    _, record = fit(Rainbow(**SMALL, target_update_every=3), batches, tmp_path, agree, tmp_path / "agent.ckpt", 2)
    assert record.seen == [True, False, False, True, False]
    agent = Rainbow(**SMALL, target_update_every=1)
    _, record = fit(agent, batches[:2], tmp_path, look=agree)
    assert record.seen == [True, True]


def test_the_norm_of_the_gradient_is_cut(tmp_path: Path):
    def norm(agent: Rainbow) -> float:
        return float(torch.stack([value.grad.norm() for value in agent.parameters() if value.grad is not None]).norm())

    norms = {}
    for limit in (None, 0.01):
        torch.manual_seed(0)
        agent, batch = Rainbow(**SMALL, **NO_NOISE, gradient_norm=limit), make_batch()
        _, record = fit(agent, [batch], tmp_path, look=norm)
        norms[limit] = record.seen[0]
    assert norms[None] > 0.02 and norms[0.01] == pytest.approx(0.01, rel=1e-3)


def noise_of(network: ImageNetwork) -> torch.Tensor:
    return torch.cat([value.flatten() for key, value in network.named_buffers() if key.endswith("weight_epsilon")])


def test_noise_is_drawn_for_every_update_and_exploring_action_and_not_for_greedy_ones(tmp_path: Path):
    agent = Rainbow(**SMALL)
    online, target = agent.network, agent.target_network
    seen = [noise_of(online).clone()]
    agent.act(images(4), explore=False)
    assert torch.equal(noise_of(online), seen[0])
    of_target = noise_of(target).clone()
    agent.act(images(4), explore=True)
    assert not torch.equal(noise_of(online), seen[0]) and torch.equal(noise_of(target), of_target)
    agent.initial_surprise(make_batch())
    seen.append(noise_of(online).clone())
    fit(agent, [make_batch()], tmp_path)
    assert not torch.equal(noise_of(online), seen[1]) and not torch.equal(noise_of(target), of_target)
    assert not torch.equal(noise_of(online), noise_of(target))


def test_only_exploring_actions_and_updates_feel_the_noise():
    agent, many = Rainbow(**SMALL, noise_deviation=5.0), images(1).expand(64, -1, -1, -1)
    greedy = agent.act(many, explore=False)
    assert len(set(greedy.tolist())) == 1 and torch.equal(agent.act(many, explore=False), greedy)
    explored = [set(agent.act(many, explore=True).tolist()) for _ in range(40)]
    assert all(len(actions) == 1 for actions in explored)  # one noise for all environments of a step
    assert len(set.union(*explored)) == 3
    with torch.no_grad(), with_noise():
        noisy = agent.rows(make_batch()).action_values
    assert not torch.allclose(noisy, agent.means(agent.outputs(agent.network, images(8))).detach())


def test_evaluation_noise_is_drawn_anew_for_each_action():
    agent, one = Rainbow(**SMALL, noise_deviation=5.0, evaluation_noise=True), images(1)
    assert len({int(agent.act(one, explore=False)) for _ in range(40)}) == 3
    plain = Rainbow(**SMALL, **NO_NOISE, evaluation_noise=True)  # there is no noise
    assert len({int(plain.act(one, explore=False)) for _ in range(40)}) == 1


def test_initial_surprise_of_many_rows_is_that_of_each_and_leaves_the_agent_alone():
    agent, rows = Rainbow(**SMALL), make_batch(600)
    rows["discount"] = torch.rand(600, 1)
    state = {name: value.clone() for name, value in agent.state_dict().items()}
    generator = torch.get_rng_state()
    together = agent.initial_surprise(rows)
    assert together.shape == (600,) and together.dtype == torch.float32 and not together.requires_grad
    torch.testing.assert_close(torch.cat([agent.initial_surprise(part) for part in rows.split(7)]), together)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, state[name]) for name, value in agent.state_dict().items())
    assert "td_error" not in rows


def test_random_actions_explore_where_no_noise_does():
    agent = Rainbow(**SMALL, **NO_NOISE, exploration_end=0.2, exploration_steps=1_000)
    agent.act(images(500), explore=True)
    assert agent.exploration_rate == pytest.approx(0.6)
    agent.act(images(500), explore=False)
    assert agent.exploration_rate == pytest.approx(0.6)
    agent.act(images(5_000), explore=True)
    image = images(1).expand(20_000, -1, -1, -1)
    differs = agent.act(image, explore=True) != agent.act(image, explore=False)
    assert differs.float().mean().item() == pytest.approx(0.2 * 2 / 3, abs=0.02)


def test_what_acts_and_measures_moves_with_the_module():
    agent = Rainbow(**SMALL).double()  # stands for another device
    assert all(value.dtype == torch.float64 for value in agent.state_dict().values() if value.is_floating_point())
    assert agent.act(images(3), explore=True).dtype == torch.int64
    batch = make_batch()
    batch["next", "reward"] = batch["next", "reward"].double()
    assert agent.initial_surprise(batch).dtype == torch.float64
    agent.rows(batch).loss.sum().backward()


def test_load_from_checkpoint_gives_the_same_actions_and_surprise(tmp_path: Path):
    agent, batch = Rainbow(**SMALL), make_batch()
    trainer, _ = fit(agent, [make_batch() for _ in range(3)], tmp_path)
    trainer.save_checkpoint(tmp_path / "agent.ckpt")
    again = Rainbow.load_from_checkpoint(tmp_path / "agent.ckpt")
    assert torch.equal(again.act(batch["observation"], explore=False), agent.act(batch["observation"], explore=False))
    assert torch.equal(again.initial_surprise(batch), agent.initial_surprise(batch))  # the noise too is the same


def test_noisy_layers_begin_with_the_given_deviation():
    agent = Rainbow(**SMALL, noise_deviation=0.25)
    layers = [layer for layer in agent.network.modules() if isinstance(layer, NoisyLinear)]
    assert len(layers) == 4
    sigma = agent.network.body.value[2].weight_sigma
    torch.testing.assert_close(sigma, torch.full_like(sigma, 0.25 / math.sqrt(8)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"atoms": 1}, "atoms is 1; it must be a whole number from 2 on"),
        ({"value_low": 1.0, "value_high": 1.0}, "value_low is 1.0 and value_high 1.0; give the least return"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Rainbow(**(SMALL | options))


class Images(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 200, (2, 6, 6), np.uint8)
    action_space = gymnasium.spaces.Discrete(5)


def test_for_env_reads_the_images_shape_and_range():
    agent = Rainbow.for_env(Images(), channels=(4,), kernel_sizes=(3,), strides=(1,), hidden_size=4)
    assert agent.is_built and agent.hparams["num_actions"] == 5
    assert agent.hparams["observation_shape"] == [2, 6, 6] and agent.hparams["observation_high"] == 200.0
