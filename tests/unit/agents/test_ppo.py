# SPDX-License-Identifier: Apache-2.0
"""PPO on numbers worked out by hand: advantages, clipping, left-out rows, planes, clocks, refusals."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from lightning_replay.agents import PPO
from lightning_replay.agents.networks import ImagePlanes
from tests.unit.agents.toys import fit

# fitted without a data module here
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"observation_shape": (3,), "num_actions": 2, "hidden_sizes": (8,)}
ONE_STEP = {"epochs": 1, "minibatches": 1}


def make_rollout(actors: int, steps: int, **columns: torch.Tensor) -> TensorDict:
    """Random rows; given columns ``[N, T]`` take their place, of ``next`` by the names reward, terminated..."""
    shape = (actors, steps)
    following = {name: torch.randn(shape) for name in ("reward", "state_value")}
    following |= {name: torch.zeros(shape, dtype=torch.bool) for name in ("terminated", "truncated")}
    rows = {
        "observation": torch.randn(*shape, 3),
        "action": torch.randint(2, shape),
        "action_log_prob": torch.full(shape, 0.5).log(),
        "state_value": torch.randn(shape),
        "is_trained": torch.ones(shape, dtype=torch.bool),
    }
    for name, column in columns.items():
        (following if name in following or name == "next_state_value" else rows)[name] = column
    if "next_state_value" in following:
        following["state_value"], rows["state_value"] = following.pop("next_state_value"), columns["value"]
        del rows["value"]
    following["done"] = following["terminated"] | following["truncated"]
    rows["state_value"] = rows["state_value"].unsqueeze(-1)
    rows["next"] = TensorDict({name: column.unsqueeze(-1) for name, column in following.items()}, shape)
    return TensorDict(rows, shape)


def torchrl_loss(agent: PPO) -> ClipPPOLoss:
    network, options = agent.network, agent.hparams
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(network.trunk, ["observation"], ["hidden"]),
        TensorDictModule(network.policy, ["hidden"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True),
    )
    return ClipPPOLoss(
        actor,
        TensorDictModule(network.value, ["hidden"], ["state_value"]),
        clip_epsilon=options["clip_range"],
        clip_value=options["value_clip"],
        entropy_coeff=options["entropy_coefficient"],
        critic_coeff=options["value_coefficient"],
        loss_critic_type="l2",
        functional=False,
    )


def two_actors() -> TensorDict:
    """With γ = λ = 1/2.

    actor 0   r  1     0    2 terminated     actor 1   r  0     1 truncated   0
              V  1/2   1/4  1                          V  1     2             0
              V' 1/4   1    4                          V' 2     8             4
              δ  5/8   1/4  1                          δ  0     3             2
              A  3/4   1/2  1                          A  3/4   3             2
    """
    flags = torch.zeros(2, 3, dtype=torch.bool)
    terminated, truncated = flags.clone(), flags.clone()
    terminated[0, 2] = truncated[1, 1] = True
    return make_rollout(
        2,
        3,
        reward=torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]]),
        value=torch.tensor([[0.5, 0.25, 1.0], [1.0, 2.0, 0.0]]),
        next_state_value=torch.tensor([[0.25, 1.0, 4.0], [2.0, 8.0, 4.0]]),
        terminated=terminated,
        truncated=truncated,
    )


ADVANTAGE = torch.tensor([0.75, 0.5, 1.0, 0.75, 3.0, 2.0])


def test_advantages_stop_at_terminations_and_bootstrap_at_truncations() -> None:
    rollout = two_actors()
    rows = PPO(**SIZES, discount=0.5, gae_lambda=0.5).trained_rows(rollout)
    assert torch.equal(rows["value_target"].flatten(), ADVANTAGE + rollout["state_value"].flatten())
    assert torch.allclose(rows["advantage"].flatten(), (ADVANTAGE - ADVANTAGE.mean()) / (ADVANTAGE.std() + 1e-5))
    assert rollout.get("advantage", None) is None


def test_rows_left_out_take_no_part_in_the_normalisation() -> None:
    rollout = two_actors()
    rollout["is_trained"][1, :2] = False
    rows = PPO(**SIZES, discount=0.5, gae_lambda=0.5).trained_rows(rollout)
    kept = ADVANTAGE[[0, 1, 2, 5]]
    assert torch.allclose(rows["advantage"].flatten(), (kept - kept.mean()) / (kept.std() + 1e-5))
    assert torch.equal(rows["action"], rollout["action"].flatten()[[0, 1, 2, 5]])


def indifferent(**options) -> PPO:
    """Both actions at 1/2 and every value 0, whatever the observation."""
    agent = PPO(**SIZES, **options)
    for layer in (agent.network.policy, agent.network.value):
        nn.init.zeros_(layer.weight)
    return agent


def test_the_ratio_pays_off_up_to_the_clip(tmp_path: Path) -> None:
    # one-step episodes with V = 0: advantages are the rewards, 1 and -1, and normalised 1/√2 and -1/√2
    ended = torch.ones(2, 1, dtype=torch.bool)
    rollout = make_rollout(2, 1, reward=torch.tensor([[1.0], [-1.0]]), terminated=ended)
    rollout["state_value"].zero_()
    # ratios 3/2 and 1/2, of which 1.2 and 0.8 count: min(1.5, 1.2) and min(-0.5, -0.8)
    rollout["action_log_prob"] = torch.tensor([[1 / 3], [1.0]]).log()
    _, (outputs,) = fit(indifferent(**ONE_STEP), [rollout], tmp_path)
    assert outputs["policy_loss"].item() == pytest.approx(-(1.2 - 0.8) / 2 / 2**0.5, abs=1e-5)
    assert outputs["clip_fraction"].item() == 1.0
    assert outputs["entropy_loss"].item() == pytest.approx(-0.01 * np.log(2), abs=1e-6)
    _, (wide,) = fit(indifferent(**ONE_STEP, clip_range=0.6), [rollout], tmp_path)
    assert wide["policy_loss"].item() == pytest.approx(-(1.5 - 0.5) / 2 / 2**0.5, abs=1e-5)


@pytest.mark.parametrize(("value_clip", "squares"), [(None, (4.0, 1.0)), (0.2, (4.0, 3.24))])
def test_the_value_is_clipped_at_the_recorded_one(tmp_path: Path, value_clip, squares) -> None:
    # the network's value is 0 where 1 was recorded: clipped 0.8; targets 2 and -1
    ended = torch.ones(2, 1, dtype=torch.bool)
    rollout = make_rollout(2, 1, reward=torch.tensor([[2.0], [-1.0]]), terminated=ended)
    rollout["state_value"].fill_(1.0)
    _, (outputs,) = fit(indifferent(**ONE_STEP, value_clip=value_clip), [rollout], tmp_path)
    assert outputs["value_loss"].item() == pytest.approx(0.5 * sum(squares) / 2, abs=1e-6)


def trained(rollout: TensorDict, directory: Path, **options) -> torch.Tensor:
    torch.manual_seed(0)
    agent = PPO(**SIZES, **options)
    fit(agent, [rollout], directory)
    return nn.utils.parameters_to_vector(agent.parameters()).detach()


def test_rows_left_out_change_nothing(tmp_path: Path) -> None:
    rollout = make_rollout(2, 8)
    rollout["is_trained"][1] = False
    weights = trained(rollout, tmp_path, minibatches=4)
    # the same minibatches of four rows each
    assert torch.equal(weights, trained(rollout[:1], tmp_path, minibatches=2))
    rollout["is_trained"][1] = True
    assert not torch.equal(weights, trained(rollout, tmp_path, minibatches=4))


def test_a_rollout_with_nothing_to_train_on_is_passed_over(tmp_path: Path) -> None:
    rollout = make_rollout(2, 8)
    nothing = rollout.clone()
    nothing["is_trained"].zero_()
    agent = PPO(**SIZES)
    before = nn.utils.parameters_to_vector(agent.parameters()).clone()
    trainer, (outputs,) = fit(agent, [nothing], tmp_path)
    assert torch.equal(before, nn.utils.parameters_to_vector(agent.parameters()))
    assert trainer.global_step == 0 and outputs["loss"] == 0.0
    trainer, outputs = fit(agent, [nothing, rollout], tmp_path)
    assert trainer.global_step == 1 and outputs[0].keys() == outputs[1].keys()


def test_one_row_trains_without_a_spread(tmp_path: Path) -> None:
    rollout = make_rollout(1, 3)
    rollout["is_trained"][0, :2] = False
    _, (outputs,) = fit(PPO(**SIZES), [rollout], tmp_path)
    assert all(torch.isfinite(value) for value in outputs.values())


def test_every_row_is_seen_once_per_epoch(tmp_path: Path) -> None:
    seen = []

    class Watching(PPO):
        def losses(self, rows):
            seen.append(rows["observation"][:, 0].tolist())
            return super().losses(rows)

    rollout = make_rollout(3, 7)
    trainer, _ = fit(Watching(**SIZES, epochs=2, minibatches=4), [rollout, rollout], tmp_path)
    assert [len(rows) for rows in seen] == [6, 5, 5, 5] * 4
    assert trainer.global_step == 2
    for epoch in range(4):
        drawn = [number for rows in seen[4 * epoch : 4 * epoch + 4] for number in rows]
        assert sorted(drawn) == sorted(rollout["observation"][..., 0].flatten().tolist())
    assert seen[:4] != seen[4:8]


def test_sizes_from_the_environment(tmp_path: Path) -> None:
    agent = PPO.for_env("CartPole-v1", hidden_sizes=(8,))
    assert agent.hparams["observation_shape"] == [4] and agent.hparams["num_actions"] == 2
    rollout = make_rollout(2, 8)
    rollout["observation"] = torch.randn(2, 8, 4)
    trainer, _ = fit(agent, [rollout], tmp_path)
    trainer.save_checkpoint(tmp_path / "agent.ckpt")
    again = PPO.load_from_checkpoint(tmp_path / "agent.ckpt")
    observation = torch.randn(5, 4)
    assert torch.equal(again.value(observation), agent.value(observation))


def test_scaled_gradients_are_refused(tmp_path: Path) -> None:
    agent = PPO(**SIZES)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False)
    trainer.strategy.precision_plugin.scaler = object()
    agent.trainer = trainer
    with pytest.raises(ValueError, match="Use precision 32-true or bf16-mixed"):
        agent.on_fit_start()


def test_one_pass_of_the_trunk_serves_policy_and_value(tmp_path: Path) -> None:
    agent = PPO(**SIZES, **ONE_STEP)
    passes = []
    agent.network.trunk.register_forward_hook(lambda *_: passes.append(1))
    fit(agent, [make_rollout(2, 8)], tmp_path)
    assert len(passes) == 1


@pytest.mark.parametrize("value_clip", [None, 0.1])
def test_losses_and_gradients_are_those_of_torchrl(value_clip) -> None:
    torch.manual_seed(0)
    agent = PPO(**SIZES, value_clip=value_clip, clip_range=0.2, entropy_coefficient=0.1, value_coefficient=0.7)
    with torch.no_grad():
        rows = agent.act_with_value(torch.randn(64, 3))
        rows["observation"] = torch.randn(64, 3)  # others than those acted on: ratios differ from 1
        rows["advantage"], rows["value_target"] = torch.randn(64, 1), rows["state_value"] + torch.randn(64, 1)
        for parameter in agent.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    torchrls = torchrl_loss(agent)
    found = torchrls(rows.clone())
    expected = {name: found[f"loss_{name}"] for name in ("objective", "critic", "entropy")}
    theirs = torch.autograd.grad(sum(expected.values()).squeeze(), list(torchrls.parameters()))
    loss, numbers = agent.losses(dict(rows.items()))
    ours = torch.autograd.grad(loss, list(agent.parameters()))
    expected = [*expected.values(), *(found[name] for name in ("entropy", "clip_fraction", "kl_approx"))]
    torch.testing.assert_close(numbers[1:-1], torch.stack([value.detach().squeeze() for value in expected]))
    assert 0.1 < numbers[5] < 1.0
    for value, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def test_advantages_are_those_of_torchrl() -> None:
    torch.manual_seed(0)
    rollout = make_rollout(3, 40, reward=torch.randn(3, 40), value=torch.randn(3, 40))
    following = rollout["next"]
    following["state_value"] = torch.randn(3, 40, 1)
    following["terminated"] = torch.rand(3, 40, 1) < 0.1
    following["done"] = following["terminated"] | (torch.rand(3, 40, 1) < 0.1)
    expected = GAE(gamma=0.9, lmbda=0.8, value_network=None)(rollout.clone())
    rows = PPO(**SIZES, discount=0.9, gae_lambda=0.8).trained_rows(rollout)
    torch.testing.assert_close(rows["value_target"], expected["value_target"].reshape(-1, 1), rtol=1e-5, atol=1e-6)


def test_actions_are_drawn_as_by_categorical() -> None:
    agent, observation = PPO(**SIZES), torch.randn(1_000, 3)
    torch.manual_seed(1)
    recorded = agent.act_with_value(observation)
    policy = Categorical(logits=recorded["logits"])
    torch.manual_seed(1)
    assert torch.equal(recorded["action"], policy.sample())
    torch.testing.assert_close(recorded["action_log_prob"], policy.log_prob(recorded["action"]))
    torch.manual_seed(1)
    assert torch.equal(agent.act(observation, explore=True), recorded["action"])
    assert torch.equal(agent.act(observation, explore=False), recorded["logits"].argmax(-1))
    assert torch.equal(agent.value(observation), recorded["state_value"])
    assert 0.4 < recorded["action"].float().mean() < 0.6  # indifferent at first


def test_networks_that_are_not_a_number_draw_no_action() -> None:
    agent = PPO(**SIZES)
    nn.init.constant_(agent.network.policy.bias, float("nan"))
    for draw in (agent.act_with_value, lambda observation: agent.act(observation, explore=True)):
        with pytest.raises(RuntimeError, match="nan"):
            draw(torch.randn(2, 3))


def test_planes_of_a_cells_encoding() -> None:
    planes = ImagePlanes(2, 255.0, categories=(3, 2))
    assert planes.count == 5
    image = torch.tensor([[[[0, 1], [2, 0]]]], dtype=torch.uint8)  # one row of two cells
    assert planes(image)[0, :, 0].tolist() == [[1, 0], [0, 0], [0, 1], [0, 1], [1, 0]]
    scaled = ImagePlanes(2, 10.0)
    assert torch.allclose(scaled(image)[0, :, 0], torch.tensor([[0.0, 0.2], [0.1, 0.0]]))


def test_the_network_of_the_paper() -> None:
    agent = PPO(observation_shape=(14, 14, 3), observation_high=10.0, num_actions=7, categories=(11, 6, 4))
    shapes = [list(layer.weight.shape) for layer in agent.network.modules() if hasattr(layer, "weight")]
    assert shapes == [[16, 21, 2, 2], [32, 16, 2, 2], [32, 32, 2, 2], [64, 11 * 11 * 32], [7, 64], [1, 64]]
    images = torch.randint(4, (5, 14, 14, 3), dtype=torch.uint8)
    assert agent.act_with_value(images)["logits"].shape == (5, 7)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((8, 8, 3), {"hidden_sizes": ()}, "hidden_sizes is empty"),
        ((8, 8, 3), {"categories": (11, 6)}, "give one count, at least 1, for each channel"),
        ((4,), {"categories": (11, 6)}, r"categories is \[11, 6\], .* observations have the shape \(4,\)"),
        ((4,), {"residual": True}, r"residual True, and observations have the shape \(4,\); .* Leave them out"),
        ((8, 8, 3), {"residual": True, "channels": ()}, "of which images need at least one"),
    ],
)
def test_bad_networks(shape, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPO(observation_shape=shape, num_actions=2, **options)
