# SPDX-License-Identifier: Apache-2.0
"""Augmentations, the choice among them, mixed minibatches and their losses, worked by hand and against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement
from torchrl.objectives import ClipPPOLoss

from lightning_replay.losses import invariance_loss
from lightning_replay.transforms import AUGMENTATIONS, MixMinibatch, UCBAugmentation, mixup_coefficients


def augmented(name: str, images: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return UCBAugmentation([name], seed=seed).augment(images)


@pytest.mark.slow
def test_a_crop_is_a_shift_with_the_edge_repeated() -> None:
    images = torch.rand(80, 1, 16, 11)
    found = set()
    for image, shifted in zip(images, augmented("crop", images), strict=True):
        ways = [
            (down, right)
            for down in range(-3, 4)
            for right in range(-2, 3)
            if torch.equal(
                shifted,
                torch.stack(
                    [
                        torch.stack(
                            [image[:, min(max(i + down, 0), 15), min(max(j + right, 0), 10)] for j in range(11)], 1
                        )
                        for i in range(16)
                    ],
                    1,
                ),
            )
        ]
        assert len(ways) == 1
        found.add(ways[0])
    assert {down for down, _ in found} == set(range(-3, 4)) and {right for _, right in found} == set(range(-2, 3))


def test_a_cutout_is_a_rectangle_of_one_colour() -> None:
    images = torch.full((300, 3, 18, 27), 2.0)  # no colour is 2
    covered = augmented("cutout_color", images) != 2.0
    assert torch.equal(covered[:, 0], covered[:, 2])
    rows, columns = covered[:, 0].any(2), covered[:, 0].any(1)
    assert torch.equal(covered[:, 0], rows[:, :, None] & columns[:, None])
    for inside, least, most in ((rows, 3, 6), (columns, 4, 9)):  # ceil(side * u), u from 1/9 on
        lengths = inside.sum(1)
        assert lengths.min() == least and lengths.max() == most
        ends = (inside[:, 1:] != inside[:, :-1]).sum(1) + inside[:, 0].int() + inside[:, -1].int()
        assert (ends == 2).all()  # in one piece
        assert inside[:, 0].any() and inside[:, -1].any()
    colors = augmented("cutout_color", images)[covered[:, 0].unsqueeze(1).expand_as(images)]
    assert colors.min() >= 0.0 and colors.max() < 1.0


def test_flips_and_gray_images() -> None:
    images = torch.rand(400, 3, 5, 4)
    flipped = augmented("flip", images)
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert ((flipped == images).flatten(1).all(1) ^ mirrored).all() and 140 < mirrored.sum() < 260
    gray = augmented("grayscale", images)
    torch.testing.assert_close(gray, images.mean(1, keepdim=True).repeat(1, 3, 1, 1))


def test_random_kernels_are_of_each_image_and_of_xaviers_deviation() -> None:
    pixel = torch.zeros(500, 3, 5, 5)
    pixel[:, 1, 2, 2] = 1.0  # the kernels of channel 1 show, mirrored
    kernels = augmented("random_conv", pixel)[:, :, 1:4, 1:4]
    assert kernels.std().item() == pytest.approx(math.sqrt(2 / (9 * 3 + 9 * 3)), rel=0.05)
    assert not torch.equal(kernels[0], kernels[1])
    images = torch.rand(6, 3, 7, 9)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(6, 3, 27, generator=generator).view(6, 3, 3, 3, 3) / (3 * math.sqrt(3))
    pairs = zip(images, weights, strict=True)
    expected = [nn.functional.conv2d(image[None], kernel, padding=1)[0] for image, kernel in pairs]
    torch.testing.assert_close(augmented("random_conv", images, seed=3), torch.stack(expected))


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_images_keep_their_shape_and_the_given_stay(name: str) -> None:
    images = torch.rand(2, 4, 3, 8, 10, dtype=torch.float64)
    before = images.clone()
    first, again = augmented(name, images), augmented(name, images)
    assert first.shape == images.shape and first.dtype == images.dtype
    assert torch.equal(images, before) and torch.equal(first, again)


@pytest.mark.parametrize("images", [torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(8, 8)])
def test_other_images_are_refused(images: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"give floats in \[0, 1\]"):
        UCBAugmentation().augment(images)


def test_no_or_unknown_augmentations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"augmentations is \[\]; it must be the names of augmentations, at least one"):
        UCBAugmentation([])
    with pytest.raises(ValueError, match=r"augmentations\[1\] is 'flap'.*Did you mean 'flip'"):
        UCBAugmentation(["crop", "flap"])
    with pytest.raises(ValueError, match="mean_return is nan"):
        UCBAugmentation().choose(math.nan)


IMAGE = torch.zeros(1, 3, 4, 4)


def test_the_choice_by_hand() -> None:
    """With c = 1 and a window of 2: each once, then by mean(R) + sqrt(log N / n).

    N   means          n      bounds                     chosen
    3   1, 0.5, 0      1,1,1  1 + 1.048, ...             crop
    4   (1 - 1) / 2    2,1,1  0.833, 0.5 + 1.177, 1.177  flip
    """
    bandit = UCBAugmentation(["crop", "flip", "grayscale"], exploration_coefficient=1.0, window=2, seed=0)
    assert bandit.choose(9.0) == "crop"  # nothing was applied before
    chosen = []
    for mean_return in (1.0, 0.5, 0.0, -1.0, 0.5):
        bandit.augment(IMAGE)
        chosen.append(bandit.choose(mean_return))
    assert chosen == ["flip", "grayscale", "crop", "flip", "flip"]
    # N = 5, crop: 0 + sqrt(log 5 / 2) = 0.897, flip: 0.5 + 0.897, gray: sqrt(log 5) = 1.269
    assert bandit.choose(0.0) == "flip"  # still unused


@given(
    st.lists(st.integers(-4, 4), min_size=1, max_size=40),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 40),
)
def test_choices_are_those_of_a_plain_loop_also_across_a_save(values, window, exploration, saved_at) -> None:
    names = list(AUGMENTATIONS)[:3]

    def make() -> UCBAugmentation:
        return UCBAugmentation(names, exploration_coefficient=exploration, window=window, seed=0)

    bandit = make()
    history: list[tuple[str, float]] = []
    bandit.choose(0.0)
    for step, value in enumerate(values):
        bandit.augment(IMAGE)
        if step == saved_at:
            state, bandit = bandit.state_dict(), make()
            bandit.load_state_dict(state)
        history.append((bandit.chosen, float(value)))
        bounds = []
        for name in names:
            returns = [one for used, one in history if used == name]
            last = returns[-window:]
            bonus = exploration * math.sqrt(math.log(len(history)) / len(returns)) if returns else math.inf
            bounds.append((sum(last) / len(last) if last else 0.0) + bonus)
        assert bandit.choose(value) == names[bounds.index(max(bounds))]


def test_a_state_of_other_augmentations_leaves_new_ones_untried() -> None:
    bandit, other = UCBAugmentation(["crop", "flip"], seed=0), UCBAugmentation(["crop", "grayscale"], seed=1)
    bandit.augment(IMAGE)
    assert bandit.choose(1.0) == "flip"
    other.load_state_dict(bandit.state_dict())
    assert other.choose(0.0) == "grayscale"
    assert torch.equal(*(one.state_dict()["_extra_state"]["generator"] for one in (other, bandit)))


def test_the_better_augmentation_is_chosen_most_and_the_others_logarithmically() -> None:
    generator = torch.Generator().manual_seed(0)
    means = {"crop": 0.2, "flip": 0.5, "grayscale": 0.4}
    bandit = UCBAugmentation(list(means), exploration_coefficient=0.4, window=1_000, seed=0)
    counts = dict.fromkeys(means, 0)
    for _ in range(2_000):
        bandit.augment(IMAGE)
        counts[bandit.chosen] += 1
        bandit.choose(means[bandit.chosen] + 0.1 * torch.randn((), generator=generator).item())
    # at equal bounds n = c² log N / gap²: 14 of the worst, 122 of the second
    assert 7 <= counts["crop"] < 28 and 60 <= counts["grayscale"] < 240 and counts["flip"] > 1_700


def rows(count: int) -> TensorDict:
    columns = {name: torch.randn(count, 1) for name in ("advantage", "value_target", "state_value")}
    columns |= {"action_log_prob": torch.randn(count), "action": torch.randint(5, (count,))}
    image = torch.randint(256, (count, 4, 4, 3), dtype=torch.uint8)
    nested = TensorDict({"position": torch.randn(count, 2), "is_trained": torch.rand(count) < 0.5}, [count])
    return TensorDict(columns | {"observation": image, "nested": nested}, [count])


@pytest.mark.slow
@given(st.integers(1, 12), st.integers(0, 2**20))
def test_a_minibatch_is_mixed_as_by_a_plain_loop(count: int, seed: int) -> None:
    torch.manual_seed(seed)
    batch = rows(count)
    before = batch.clone()
    mixed = MixMinibatch(0.4, seed=seed)(batch)
    generator = torch.Generator().manual_seed(seed)
    weights = mixup_coefficients(0.4, count, generator).tolist()
    others = torch.randperm(count, generator=generator).tolist()
    for key in (*batch.keys(), ("nested", "position"), ("nested", "is_trained")):
        column = batch[key]
        if key == "nested":
            continue
        for row, (weight, other) in enumerate(zip(weights, others, strict=True)):
            own, partner, found = column[row], column[other], mixed[key][row]
            if key in ("action", ("nested", "is_trained")):
                assert torch.equal(found, own if weight >= 0.5 else partner)
            else:
                expected = weight * own.double() + (1 - weight) * partner.double()
                torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert mixed["observation"].dtype == torch.float32 and mixed["action"].dtype == torch.int64
    assert all((batch[key] == before[key]).all() for key in before.keys(True, True))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("key", ["observation", "obs"])
def test_observations_that_cannot_be_mixed_are_refused(key: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"{key} is {dtype}; .* convert it to float32"):
        MixMinibatch()(TensorDict({key: torch.ones(4, 2, 2, 3, dtype=dtype), "advantage": torch.rand(4, 1)}, [4]))


def test_a_saved_mixture_goes_on_with_the_same_draws() -> None:
    mixture, again = MixMinibatch(seed=0), MixMinibatch(seed=1)
    batch = rows(8)
    mixture(batch)
    again.load_state_dict(mixture.state_dict())
    first, second = mixture(batch), again(batch)
    assert all(torch.equal(first[key], second[key]) for key in ("observation", "action", "advantage"))


def test_the_loss_of_invariance_by_hand() -> None:
    log_probs = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log().requires_grad_()
    other = torch.tensor([[0.25, 0.75], [0.75, 0.25]]).log().requires_grad_()
    value, other_value = torch.tensor([[1.0], [2.0]], requires_grad=True), torch.tensor([[3.0], [2.0]])
    loss = invariance_loss(log_probs, value, other, other_value.requires_grad_())
    divergence = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert loss.item() == pytest.approx((divergence + 4.0) / 2)
    loss.backward()
    assert log_probs.grad is None and value.grad is None
    assert torch.equal(other_value.grad, torch.tensor([[2.0], [0.0]]))
    torch.testing.assert_close(other.grad, -log_probs.detach().exp() / 2)


def test_torchrls_loss_learns_from_mixed_and_augmented_minibatches() -> None:
    torch.manual_seed(0)
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Sequential(nn.Flatten(), nn.Linear(48, 5)), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True),
    )
    critic = TensorDictModule(nn.Sequential(nn.Flatten(), nn.Linear(48, 1)), ["observation"], ["state_value"])
    loss, augmentation = ClipPPOLoss(actor, critic), UCBAugmentation(seed=0)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(32),
        sampler=SamplerWithoutReplacement(),
        batch_size=16,
        transform=MixMinibatch(seed=0),
    )
    buffer.append_transform(augmentation)
    rollout = rows(32).exclude("nested")
    rollout["observation"] = rollout["observation"].movedim(-1, 1) / 255.0
    buffer.extend(rollout)
    augmentation.choose(rollout["value_target"].mean())
    for batch in buffer:
        losses = loss(batch)
        policy = actor.get_dist(batch).logits.log_softmax(-1)
        other = actor.get_dist(batch["augmented"]).logits.log_softmax(-1)
        value = critic(batch["augmented"])["state_value"]
        penalty = invariance_loss(policy, critic(batch.clone())["state_value"], other, value)
        (losses["loss_objective"] + losses["loss_critic"].sum() + losses["loss_entropy"] + 0.1 * penalty).backward()
        assert penalty > 0 and all(parameter.grad.isfinite().all() for parameter in actor.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_images_on_a_gpu_are_augmented_by_the_same_draws() -> None:
    images = torch.rand(32, 3, 12, 12)
    for name in AUGMENTATIONS:
        on_gpu = augmented(name, images.cuda())
        assert on_gpu.is_cuda
        torch.testing.assert_close(on_gpu.cpu(), augmented(name, images), rtol=1e-4, atol=1e-4)
    batch = rows(16)
    first, second = MixMinibatch(seed=0)(batch), MixMinibatch(seed=0)(batch.cuda())
    torch.testing.assert_close(second.cpu()["observation"], first["observation"])
