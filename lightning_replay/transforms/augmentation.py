# SPDX-License-Identifier: Apache-2.0
"""Augmented images and mixed minibatches for on-policy learners: UCB-DrAC and mixreg."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.nn.functional import conv2d

from lightning_replay.options import ABOVE_ZERO, checked_count, checked_key, checked_names, checked_number
from lightning_replay.parts import ReplayTransform
from lightning_replay.saving.spec import rebuildable
from lightning_replay.transforms.mixup import mixup_coefficients


def _uniform(images: Tensor, rng: torch.Generator, *shape: int) -> Tensor:
    # Numbers are drawn on the generator's device, so that they are the same on every device.
    return torch.rand(len(images), *shape, dtype=torch.float32, generator=rng, device=rng.device).to(images.device)


def _crop(images: Tensor, rng: torch.Generator) -> Tensor:
    for dim, shape in ((2, (-1, 1, images.shape[2], 1)), (3, (-1, 1, 1, images.shape[3]))):
        side = images.shape[dim]
        most = max(1, side * 3 // 16)
        shift = (_uniform(images, rng, 1) * (2 * most + 1)).long() - most
        place = (torch.arange(side, device=images.device) + shift).clamp(0, side - 1)
        images = images.gather(dim, place.view(shape).expand_as(images))
    return images


def _cutout_color(images: Tensor, rng: torch.Generator) -> Tensor:
    inside = []
    for side in images.shape[2:]:
        length = (side * (1 + 2 * _uniform(images, rng, 1)) / 9).ceil()
        first = (_uniform(images, rng, 1) * (side - length + 1)).floor()
        place = torch.arange(side, device=images.device)
        inside.append((place >= first) & (place < first + length))
    color = _uniform(images, rng, images.shape[1], 1, 1).to(images)
    return torch.where(inside[0][:, None, :, None] & inside[1][:, None, None], color, images)


def _random_conv(images: Tensor, rng: torch.Generator) -> Tensor:
    count, channels, *sides = images.shape
    shape = (count * channels, channels, 3, 3)
    kernels = torch.randn(shape, dtype=torch.float32, generator=rng, device=rng.device) / (3 * channels**0.5)
    return conv2d(images.reshape(1, -1, *sides), kernels.to(images), padding=1, groups=count).view_as(images)


#: Functions of float images ``[B, C, H, W]`` in [0, 1] and a generator, by name. You may add functions. Some functions
#: here shift images by up to 3/16 of their sides with the edge repeated. Others cover them by a rectangle of 1/9 to 1/3
#: of their sides in one color, or mirror each with probability 1/2 from left to right. The rest gray them by the mean
#: of their channels, or convolve them with random 3 x 3 weights.
AUGMENTATIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "crop": _crop,
    "cutout_color": _cutout_color,
    "flip": lambda images, rng: torch.where(_uniform(images, rng, 1, 1, 1) < 0.5, images.flip(-1), images),
    "grayscale": lambda images, rng: images.mean(1, keepdim=True).expand_as(images),
    "random_conv": _random_conv,
}


@rebuildable
class UCBAugmentation(ReplayTransform):
    """Augments images by the augmentation with the largest ``mean(R) + c sqrt(log N / n)``.

    R are the mean returns after the last ``window`` updates with an augmentation, n is the number of its updates, and N
    is the number of updates with any. Each augmentation is used once first. UCB-DrAC, Raileanu et al. 2021, algorithm
    2, https://arxiv.org/abs/2006.12862. Call :meth:`choose` once for each rollout, draw its minibatches through the
    transform, and add :func:`~lightning_replay.losses.invariance_loss`, weighted by 0.1, to the loss.

    Args:
        augmentations: Names of :data:`~lightning_replay.transforms.augmentation.AUGMENTATIONS`.
        exploration_coefficient: Coefficient c, in the unit of the returns.
        window: Number of returns of an augmentation that count.
        image_key: Key of float images ``[..., C, H, W]`` in [0, 1]. The augmented ones get this key under
            ``"augmented"``.
        seed: Seed for the transform's own generator, on the CPU. Images on other devices get the same numbers.

    Raises:
        ValueError: unknown or no augmentations, an option out of range, or a ``mean_return`` that is not finite.
        TypeError: images that are no floats or have fewer than three dimensions.

    Example:
        >>> from tensordict import TensorDict
        >>> augmentation = UCBAugmentation(["crop", "flip"], seed=0)
        >>> batch = augmentation(TensorDict({"observation": torch.rand(5, 3, 8, 8)}, [5]))
        >>> batch["augmented", "observation"].shape, augmentation.choose(mean_return=1.0)
        (torch.Size([5, 3, 8, 8]), 'flip')
    """

    saved_attributes: tuple[str, ...] = ("chosen", "_counts", "_returns", "_is_applied")
    stored_options: tuple[str, ...] = ("augmentations",)

    def __init__(
        self,
        augmentations: Sequence[str] = tuple(AUGMENTATIONS),
        exploration_coefficient: float = 0.1,
        window: int = 10,
        image_key: NestedKey = "observation",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self._seed_generator(seed)
        self.augmentations: list[str] = checked_names("augmentations", augmentations, "augmentation", AUGMENTATIONS)
        self.exploration_coefficient: float = checked_number("exploration_coefficient", exploration_coefficient, 0.0)
        self.window: int = checked_count("window", window)
        self.image_key: tuple[str, ...] = checked_key("image_key", image_key)
        self.chosen: str = self.augmentations[0]  #: The augmentation in use.
        # Whether images were augmented since the choice.
        self._is_applied = False
        self._counts: dict[str, int] = {}
        self._returns: dict[str, list[float]] = {}

    def choose(self, mean_return: float) -> str:
        """Credits a rollout's mean return to the augmentation of the update before it, if any. Returns the next one."""
        value = checked_number("mean_return", mean_return)
        if self._is_applied:
            self._counts[self.chosen] = self._counts.get(self.chosen, 0) + 1
            self._returns[self.chosen] = [*self._returns.get(self.chosen, []), value][-self.window :]
        total = math.log(max(1, sum(self._counts.values())))
        bounds = dict.fromkeys(self.augmentations, math.inf)
        for name, count in self._counts.items():
            mean = sum(self._returns[name]) / len(self._returns[name])
            bounds[name] = mean + self.exploration_coefficient * math.sqrt(total / count)
        self.chosen = max(self.augmentations, key=bounds.__getitem__)
        self._is_applied = False
        return self.chosen

    def augment(self, images: Tensor) -> Tensor:
        """Returns float images ``[..., C, H, W]`` with the chosen augmentation, each with separate draws."""
        if not images.is_floating_point() or images.ndim < 3:
            raise TypeError(f"images are {images.dtype} {list(images.shape)}; give floats in [0, 1], [..., C, H, W]")
        self._is_applied = True
        return AUGMENTATIONS[self.chosen](images.reshape(-1, *images.shape[-3:]), self._rng).view_as(images)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Adds the augmented images to a batch."""
        return tensordict.set(("augmented", *self.image_key), self.augment(tensordict.get(self.image_key)))


@rebuildable
class MixMinibatch(ReplayTransform):
    """Mixes each row of a minibatch with another one, ``λ x + (1 - λ) x'``, λ ~ Beta(α, α), for losses such as PPO's.

    Mixed are floats, and images of bytes as float32: observation, old value and log-probability, advantage and return.
    ``action``, integers and flags come from the row with the larger weight. The other rows are the minibatch in a
    random order. mixreg, Wang et al. 2020, https://arxiv.org/abs/2010.10814.

    Args:
        mixup_concentration: Parameter α of the Beta distribution.
        seed: Seed for the transform's own generator.

    Raises:
        ValueError: α that is not above 0.
        TypeError: an ``observation`` (RLlib's ``obs``) of flags or of integers other than bytes.

    Example:
        >>> from tensordict import TensorDict
        >>> rows = TensorDict({"observation": torch.eye(2), "action": torch.tensor([0, 1])}, [2])
        >>> MixMinibatch(seed=0)(rows)["observation"].sum(-1)
        tensor([1., 1.])
    """

    takes_sequences = False

    def __init__(self, mixup_concentration: float = 0.2, seed: int | None = None) -> None:
        super().__init__()
        self._seed_generator(seed)
        self.mixup_concentration: float = checked_number("mixup_concentration", mixup_concentration, ABOVE_ZERO)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns a mixed minibatch ``[B, ...]``. The given one stays."""
        count = len(tensordict)
        generator = self._rng
        weights = mixup_coefficients(self.mixup_concentration, count, generator)
        others = tensordict[torch.randperm(count, generator=generator, device=generator.device)]

        def mix(key: str, own: Tensor, other: Tensor) -> Tensor:
            """Mixes a column with the column of the other rows, ``[B, ...]`` each."""
            weight = weights.view(-1, *[1] * (own.ndim - 1)).to(own.device)
            if key == "action" or not (own.is_floating_point() or own.dtype == torch.uint8):
                # The return would be mixed, and belong to no observation.
                if key in ("observation", "obs"):
                    raise TypeError(f"{key} is {own.dtype}; floats and uint8 are mixed, so convert it to float32")
                return torch.where(weight >= 0.5, own, other)
            dtype = torch.promote_types(own.dtype, torch.float32)
            return torch.lerp(other.to(dtype), own.to(dtype), weight.to(dtype))

        return tensordict.named_apply(mix, others)
