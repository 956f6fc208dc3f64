# SPDX-License-Identifier: Apache-2.0
"""PPO with augmented images, mixed minibatches and a residual network: its losses, checkpoints and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from tensordict import TensorDict
from torch import nn
from torch.nn.functional import conv2d, max_pool2d, relu

from lightning_replay.agents import PPO
from lightning_replay.losses import invariance_loss
from lightning_replay.transforms import AUGMENTATIONS, MixMinibatch, UCBAugmentation
from tests.unit.agents.toys import fit

# fitted without a data module here
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

IMAGE = {"observation_shape": (6, 6, 3), "num_actions": 3, "hidden_sizes": (8,), "channels": (4,)}
CONVOLUTION = {"kernel_sizes": (3,), "strides": (1,), "epochs": 2, "minibatches": 2}


def make_rollout(reward: float = 0.0) -> TensorDict:
    shape = (2, 8)
    never = torch.zeros(*shape, 1, dtype=torch.bool)
    following = {name: torch.zeros(*shape, 1) + reward for name in ("reward", "state_value")}
    rows = {
        "observation": torch.randint(256, (*shape, 6, 6, 3), dtype=torch.uint8),
        "action": torch.randint(3, shape),
        "action_log_prob": torch.full(shape, 1 / 3).log(),
        "state_value": torch.randn(*shape, 1),
        "next": TensorDict(following | dict.fromkeys(("terminated", "truncated", "done"), never), shape),
    }
    return TensorDict(rows, shape)


def minibatch(agent: PPO) -> dict[str, torch.Tensor]:
    return dict(agent.trained_rows(make_rollout()).items())


def test_the_loss_adds_the_weighted_invariance_of_the_chosen_augmentation() -> None:
    torch.manual_seed(0)
    agent = PPO(**IMAGE, **CONVOLUTION, augmentations=("random_conv", "flip"), augmentation_weight=0.3)
    rows, plain = minibatch(agent), PPO(**IMAGE, **CONVOLUTION)
    plain.load_state_dict(agent.state_dict(), strict=False)
    agent.augmentation.reseed(5)
    total, numbers = agent.losses(rows)
    augmentation = UCBAugmentation(["random_conv"], seed=5)
    images = augmentation.augment(rows["observation"].movedim(-1, 1) / 255.0).movedim(1, -1) * 255.0
    with torch.no_grad():
        (logits, value), (other, other_value) = agent.network(rows["observation"]), agent.network(images)
        expected = 0.3 * invariance_loss(logits.log_softmax(-1), value, other.log_softmax(-1), other_value)
        assert expected > 0
    without, its_numbers = plain.losses(rows)
    torch.testing.assert_close(numbers[-1], expected)
    torch.testing.assert_close(total - without, expected)
    assert its_numbers[-1] == 0 and torch.equal(numbers[1:-1], its_numbers[1:-1])


def test_minibatches_are_mixed_before_the_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    agent, seen = PPO(**IMAGE, kernel_sizes=(3,), strides=(1,), epochs=1, minibatches=1, mixup_concentration=0.3), []
    losses = agent.losses
    agent.losses = lambda rows: (seen.append(rows), losses(rows))[1]
    agent.mixture.reseed(7)
    rollout = make_rollout()
    fit(agent, [rollout], tmp_path, seed=3)
    torch.manual_seed(3)
    order = torch.randperm(16)
    names = ("observation", "action", "action_log_prob", "state_value", "advantage", "value_target")
    expected = MixMinibatch(0.3, seed=7)(agent.trained_rows(rollout).select(*names)[order])
    for name in names:
        torch.testing.assert_close(seen[0][name], expected[name])
    assert seen[0]["observation"].dtype == torch.float32


def saved_choices(agent: PPO) -> dict[str, Any]:
    return agent.augmentation.state_dict()["_extra_state"]


def choices(agent: PPO) -> tuple[str, dict[str, int]]:
    return agent.augmentation.chosen, dict(saved_choices(agent)["counts"])


def test_each_rollout_is_credited_to_the_augmentation_before_it_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    def make() -> PPO:
        torch.manual_seed(0)
        return PPO(**IMAGE, **CONVOLUTION, discount=0.0, mixup_concentration=0.2, augmentations=("crop", "flip"))

    torch.manual_seed(1)
    rollouts = [make_rollout(reward) for reward in (5.0, 0.0, 1.0)]  # the first is of no augmentation
    whole, first, resumed = make(), make(), make()
    _, record = fit(whole, rollouts, tmp_path, choices, epochs=2, seed=7)
    assert record.seen[:3] == [("crop", {}), ("flip", {"crop": 1}), ("flip", {"crop": 1, "flip": 1})]
    returns = saved_choices(whole)["returns"]
    assert returns["crop"] == [0.0] and returns["flip"][0] == 1.0
    fit(first, rollouts, tmp_path, seed=7)[0].save_checkpoint(tmp_path / "agent.ckpt")
    torch.load(tmp_path / "agent.ckpt", weights_only=True)
    _, again = fit(resumed, rollouts, tmp_path, choices, ckpt_path=tmp_path / "agent.ckpt", epochs=2, seed=7)
    assert again.seen == record.seen[3:]
    for (name, value), expected in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(value, expected), name
    assert PPO.load_from_checkpoint(tmp_path / "agent.ckpt").augmentation.chosen == first.augmentation.chosen
    copied = copy.deepcopy(whole)
    copied.augmentation.choose(9.0)
    assert choices(whole) == record.seen[-1] != choices(copied)


def test_an_agent_without_the_options_has_none_of_their_state() -> None:
    assert all(".weight" in name or ".bias" in name for name in PPO(**IMAGE, **CONVOLUTION).state_dict())


def test_a_checkpoint_of_a_plain_agent_leaves_the_state_of_the_options_as_it_is(tmp_path: Path) -> None:
    agent = PPO(**IMAGE, **CONVOLUTION, augmentations=("crop", "flip"), mixup_concentration=0.2)
    fit(agent, [make_rollout()] * 2, tmp_path)
    before, plain = agent.state_dict(), PPO(**IMAGE, **CONVOLUTION)
    agent.load_state_dict(plain.state_dict())
    for name, value in agent.state_dict().items():
        if name in plain.state_dict():
            assert torch.equal(value, plain.state_dict()[name])
        else:
            assert str(value) == str(before[name])
    fit(plain, [make_rollout()], tmp_path)[0].save_checkpoint(tmp_path / "plain.ckpt")
    options = {"augmentations": ("flip",), "mixup_concentration": 0.2}
    loaded = PPO.load_from_checkpoint(tmp_path / "plain.ckpt", **options)
    fit(loaded, [make_rollout()], tmp_path, ckpt_path=tmp_path / "plain.ckpt", epochs=2)
    assert loaded.augmentation.chosen == "flip"


def test_processes_choose_by_the_mean_of_their_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(self, tensor: torch.Tensor, reduce_op: str = "mean") -> torch.Tensor:  # with a process that has 3
        return (tensor + 3.0) / 2 if reduce_op == "mean" else tensor

    monkeypatch.setattr(SingleDeviceStrategy, "reduce", reduce)
    agent = PPO(**IMAGE, **CONVOLUTION, discount=0.0, augmentations=("crop", "flip"))
    fit(agent, [make_rollout(), make_rollout(1.0)], tmp_path)
    assert saved_choices(agent)["returns"] == {"crop": [2.0]}


def test_a_rollout_with_nothing_to_train_on_chooses_nothing(tmp_path: Path) -> None:
    agent, rollout = PPO(**IMAGE, **CONVOLUTION, augmentations=("crop", "flip")), make_rollout()
    rollout["is_trained"] = torch.zeros(2, 8, dtype=torch.bool)
    _, record = fit(agent, [make_rollout(), rollout, make_rollout()], tmp_path, choices)
    assert record.seen == [("crop", {}), ("crop", {}), ("flip", {"crop": 1})]


@pytest.mark.parametrize(
    "options",
    [
        {"observation_shape": (4,), "augmentations": ("crop",)},
        {"observation_shape": (6, 6, 3), "categories": (11, 6, 4), "augmentations": ("crop",)},
        {"observation_shape": (6, 6, 3), "categories": (11, 6, 4), "mixup_concentration": 0.2},
    ],
)
def test_what_cannot_be_augmented_or_mixed_is_refused(options) -> None:
    with pytest.raises(ValueError, match="images of pixels can be augmented"):
        PPO(num_actions=2, **options)


def test_the_residual_network_is_that_of_the_procgen_runs() -> None:
    agent = PPO((64, 64, 3), num_actions=15, hidden_sizes=(256,), residual=True)
    # 448 + 9,280 and 4,640 + 36,992 and 9,248 + 36,992 of the sections, 2,048 x 256 + 256, and the two heads
    assert sum(parameter.numel() for parameter in agent.network.parameters()) == 626_256
    image = torch.randint(256, (2, 64, 64, 3), dtype=torch.uint8)
    weights = dict(agent.network.trunk.named_parameters())
    convolutions = iter(
        [(weight, weights[name.replace("weight", "bias")]) for name, weight in weights.items() if weight.ndim == 4]
    )
    planes = image.movedim(-1, 1) / 255.0
    for _ in range(3):
        planes = max_pool2d(conv2d(planes, *next(convolutions), padding=1), 3, 2, padding=1)
        for _ in range(2):
            inner = conv2d(relu(planes), *next(convolutions), padding=1)
            planes = planes + conv2d(relu(inner), *next(convolutions), padding=1)
    assert planes.shape == (2, 32, 8, 8)
    linear = [layer for layer in agent.network.trunk if isinstance(layer, nn.Linear)]
    hidden = relu(linear[0](relu(planes).flatten(1)))
    torch.testing.assert_close(agent.network.trunk(image), hidden)
    assert 0.1 < hidden.std() < 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_losses_on_a_gpu_are_those_on_the_cpu() -> None:
    agent = PPO(**IMAGE, **CONVOLUTION, augmentations=tuple(AUGMENTATIONS), mixup_concentration=0.2)
    rows, on_gpu = minibatch(agent), copy.deepcopy(agent).cuda()
    expected, found = agent.losses(rows)[1], on_gpu.losses({name: column.cuda() for name, column in rows.items()})[1]
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)
