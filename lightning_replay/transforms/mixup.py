# SPDX-License-Identifier: Apache-2.0
"""Convex combinations of two transitions, or of the two states of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay.saving.spec import recorded
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.transforms.mixing import Mixing, PackedMixing, can_be_mixed, columns_under, listed, tree_of
from lightning_replay.transforms.random_transform import RandomTransform
from lightning_replay.validation import ABOVE_ZERO, checked_keys, checked_number, checked_share

MIXED_KEYS: tuple[NestedKey, ...] = ("observation", "action", ("next", "observation"), ("next", "reward"))

_BLOCK = 4096


def mixup_coefficients(concentration: float, count: int, generator: torch.Generator) -> Tensor:
    """Draws ``count`` coefficients λ ~ Beta(concentration, concentration), float32, from ``generator``.

    Exact for every concentration: with ν = 2 concentration, Bailey's T = sqrt(ν (U**(-2/ν) - 1)) cos(2 π V) has
    Student's t distribution, and (1 + T / sqrt(ν + T²)) / 2 is Beta(ν/2, ν/2). Bailey 1994,
    https://doi.org/10.2307/2153537. (torch's Beta distribution has no generator argument.)
    """
    checked_number("concentration", concentration, ABOVE_ZERO)
    uniform, angle = torch.rand((2, count), generator=generator, dtype=torch.float64, device=generator.device).unbind(0)
    cosine = angle.mul_(2 * math.pi).cos_()
    squared = uniform.pow_(-1 / concentration).sub_(1).mul_(cosine.square())
    # 1 / sqrt(1 + 1/x) and not sqrt(x / (1 + x)): small concentrations overflow to infinity, which is right here.
    distance = squared.reciprocal_().add_(1).rsqrt_()
    return torch.copysign(distance, cosine).add_(1).mul_(0.5).float()


@recorded
class MixPairs(RandomTransform):
    """Mixes each pair of transitions into one: ``λ * first + (1 - λ) * second`` with λ ~ Beta(α, α), one λ per pair.

    Put it behind a sampler that draws pairs (an index ``[B, 2]``); the batch goes in as ``[B, 2]`` and comes out as
    ``[B]``. The columns at or under ``keys`` are mixed, on raw values; integers are refused, flags below a key stay.
    All others (``generation``, ``trajectory``, ``priority_weight``, ``discount``, ...) are those of the first,
    ``index`` keeps both. A pair is left as its first transition, bit for bit, when one of the two terminated, when
    their n-step ``discount`` differs, or when the sampler paired a row with itself; truncated rows mix like any other.
    Neighborhood Mixup Experience Replay, Sander et al. 2022, https://arxiv.org/abs/2205.09117.

    Args:
        mixup_concentration: α; the paper does not state it, 0.75 is the default of the authors' command line.
        fraction: share of the pairs that are mixed at all, drawn per pair.
        keys: floating columns to mix; a nested key stands for all under it. Name those that are mixed where others are
            integers, such as discrete actions, which are then those of the first.
        seed: of the transform's own generator, whose state is part of :meth:`state_dict`.

    Sampled keys:
        mixup_coefficient: float32 ``[B]``, the weight of the first transition; 1 where that is left as it is.

    Raises:
        ValueError: the batch is not one of pairs, lacks a key to be mixed or ``("next", "terminated")``, or has
            integers at or under a key.

    Example:
        >>> from tensordict import TensorDict
        >>> pair = {"observation": torch.tensor([[[0.0], [1.0]]]), "action": torch.zeros(1, 2, 1)}
        >>> pair["next"] = {"observation": torch.ones(1, 2, 1), "reward": torch.zeros(1, 2, 1)}
        >>> pair["next"]["terminated"] = torch.zeros(1, 2, 1, dtype=torch.bool)
        >>> batch = MixPairs(seed=0)(TensorDict(pair, [1, 2]))
        >>> bool((batch["observation"].squeeze(1) == 1 - batch["mixup_coefficient"]).all())
        True
    """

    def __init__(
        self,
        mixup_concentration: float = 0.75,
        fraction: float = 1.0,
        keys: Sequence[NestedKey] = MIXED_KEYS,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        self.mixup_concentration: float = checked_number("mixup_concentration", mixup_concentration, ABOVE_ZERO)
        self.fraction: float = checked_share("fraction", fraction)
        self._mixed_keys = set(checked_keys("keys", keys))
        self._mixed_tree = tree_of(self._mixed_keys)
        self._coefficients = _CoefficientStream(self.mixup_concentration)
        self._packed: PackedMixing | None = None  # of the rows that were mixed last

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Mixes a batch of pairs ``[B, 2]`` into a batch ``[B]``."""
        size = tensordict.batch_size
        if len(size) != 2 or size[1] != 2:
            raise ValueError(
                f"MixPairs got a batch of size {list(size)}; it mixes pairs, a batch of size [B, 2]. Use a sampler "
                "that draws pairs: NeighborhoodMixupSampler, ContinuousTransitionSampler or RandomPairSampler. "
                "Indexing a buffer reads single rows: use sample(), or replay.storage[...] for stored rows."
            )
        following = tensordict.get("next", None)
        terminated = None if following is None else following.get("terminated", None)
        untouched = self._untouched(terminated, tensordict.get("discount", None))
        coefficient = self._draw(size[0], untouched, tensordict.get("index", None))
        mixing = Mixing(coefficient, untouched)
        mixed = mixing.mix(tensordict, self._mixed_tree, {"mixup_coefficient": coefficient})
        if mixing.found != len(self._mixed_keys):
            raise self._lacking({path for path in self._mixed_keys if tensordict.get(path, None) is None})
        if mixing.has_others:
            columns = {leaf: value for path in self._mixed_keys for leaf, value in columns_under(tensordict, path)}
            dtypes = {leaf: value.dtype for leaf, value in columns.items()}
            unmixable = {leaf: one for leaf, one in dtypes.items() if not can_be_mixed(leaf, one, self._mixed_keys)}
            if unmixable:
                raise _not_floating(unmixable)
        return mixed

    def mix_stored(self, storage: PackedStorage, index: Tensor) -> TensorDictBase:
        """Returns what :meth:`forward` makes of the pairs of rows at ``index``, int64 ``[B, 2]``.

        Float32 columns on a CPU are mixed as they are packed, in 40 % of the time; the columns of the batch are views.
        """
        layout = storage.layout
        if layout is None:
            raise RuntimeError("the storage is empty; call extend first")
        packed = self._packed
        if packed is None or packed.layout is not layout:
            packed = self._packed = PackedMixing(layout, self._mixed_keys)
        if not packed.is_covered or self.fraction < 1.0 or storage.all_packed.device.type != "cpu":
            return self.forward(storage.get(index, {"index": index}))
        # A batch of 256 in 73 us, beside 186 from columns and 173 from packed rows by torch.
        drawn = self._coefficients.draw(len(index), self._rng)
        rows, coefficient = packed.gather_mixed(storage.all_packed, index, drawn)
        storage.check_read()
        return layout.unpack(rows, index.shape[:1], {"index": index, "mixup_coefficient": coefficient})

    def _draw(self, count: int, untouched: Tensor | None, index: Tensor | None) -> Tensor:
        """Draws the coefficients of the pairs ``index``; 1 for untouched pairs, and for those of a row and itself."""
        coefficient = self._coefficients.draw(count, self._rng)
        if untouched is not None:
            coefficient = coefficient.to(untouched.device).masked_fill(untouched, 1.0)
        if index is not None:
            coefficient = coefficient.to(index.device).masked_fill(torch.eq(*index.unbind(1)), 1.0)
        return coefficient

    def _lacking(self, missing: set[tuple[str, ...]]) -> ValueError:
        return ValueError(
            f"the batch has no {listed(missing)}; MixPairs mixes {listed(self._mixed_keys)}. "
            "Name the keys of your transitions with keys=."
        )

    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self._coefficients.ahead = torch.empty(0, device="cpu")

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the generator's state and the coefficients drawn ahead."""
        ahead = {"ahead": self._coefficients.ahead.clone(), "concentration": self.mixup_concentration}
        return super().get_extra_state() | ahead

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`get_extra_state` returned."""
        super().set_extra_state(state)
        is_own = state.get("concentration", self.mixup_concentration) == self.mixup_concentration
        self._coefficients.ahead = state["ahead"].clone() if is_own else torch.empty(0, device="cpu")

    def _untouched(self, terminated: Tensor | None, discount: Tensor | None) -> Tensor | None:
        """Returns which pairs are left as their first transition, bool ``[B]``; ``None`` where it is known of none.

        ``terminated`` and ``discount`` are columns ``[B, 2, ...]`` of the pairs.
        """
        if terminated is None:
            raise ValueError(
                'the batch has no ("next", "terminated"); MixPairs never mixes across a terminal step. '
                "Store terminated, truncated and done with every transition."
            )
        if discount is None and self.fraction == 1.0 and terminated.device.type == "cpu" and not bool(terminated.any()):
            return None  # most batches; not on a GPU, where reading a flag would synchronise
        untouched = terminated.flatten(1).any(1)
        if discount is not None:
            untouched = untouched | (discount[:, 0] != discount[:, 1]).flatten(1).any(1)
        if self.fraction < 1.0:
            generator = self._rng
            drawn = torch.rand(untouched.shape, generator=generator, device=generator.device) >= self.fraction
            untouched = untouched | drawn.to(untouched.device)
        return untouched


@recorded
class MixStates(RandomTransform):
    """Moves each state towards its next state: ``observation <- λ * observation + (1 - λ) * next observation``.

    Nothing else changes, and terminal steps are no exception. λ ~ Beta(α, α), one per transition.
    State mix-up of S4RL, Sinha et al. 2021, https://arxiv.org/abs/2103.06326.

    Args:
        mixup_concentration: α.
        keys: observations, each mixed with the entry of the same name under ``"next"``; a nested key stands for all.
        seed: of the transform's own generator, whose state is part of :meth:`state_dict`.

    Sampled keys:
        mixup_coefficient: float32 ``[B]``, the weight of the state.

    Raises:
        ValueError: an observation or its next one is missing, not floating, or of another dtype or shape.

    Example:
        >>> from tensordict import TensorDict
        >>> step = TensorDict({"observation": torch.zeros(2, 3), "next": {"observation": torch.ones(2, 3)}}, [2])
        >>> batch = MixStates(seed=0)(step)
        >>> bool((batch["observation"][:, 0] == 1 - batch["mixup_coefficient"]).all())
        True
    """

    def __init__(
        self, mixup_concentration: float = 0.75, keys: Sequence[NestedKey] = ("observation",), seed: int | None = None
    ) -> None:
        super().__init__(seed)
        self.mixup_concentration: float = checked_number("mixup_concentration", mixup_concentration, ABOVE_ZERO)
        self._paths = checked_keys("keys", keys)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Mixes the states of a batch; the batch itself is changed, the stored rows are not."""
        shape = tensordict.batch_size
        observation: Any = None
        coefficient = mixup_coefficients(self.mixup_concentration, shape.numel(), self._rng).reshape(shape)
        columns = [found for path in self._paths for found in columns_under(tensordict, path) or [(path, None)]]
        for path, observation in columns:
            following = tensordict.get(("next", *path), None)
            missing = [key for key, value in ((path, observation), (("next", *path), following)) if value is None]
            if missing:
                raise ValueError(
                    f"the batch has no {listed(missing)}; MixStates mixes each observation with the next one. Name "
                    "the keys of your observations with keys=."
                )
            if not observation.is_floating_point():
                raise ValueError(
                    f"{path[-1]!r} has dtype {observation.dtype}; MixStates mixes floating observations. "
                    "Convert it before it is stored, or name other keys with keys=."
                )
            if following.dtype != observation.dtype or following.shape != observation.shape:
                raise ValueError(
                    f"{path[-1]!r} is {observation.dtype} {list(observation.shape)} and the next one {following.dtype} "
                    f"{list(following.shape)}; MixStates mixes observations of one dtype and shape."
                )
            weight = coefficient.to(observation).reshape(shape + (1,) * (observation.ndim - len(shape)))
            tensordict.set(path, torch.lerp(following, observation, weight))
        return tensordict.set("mixup_coefficient", coefficient.to(observation.device))


def _not_floating(dtypes: dict[tuple[str, ...], torch.dtype]) -> ValueError:
    found = ", ".join(f"{listed([leaf])} has dtype {dtypes[leaf]}" for leaf in sorted(dtypes))
    return ValueError(
        f"{found}; MixPairs mixes floating columns, and where others stay as they were, the mixed row is none of the "
        "environment. Convert them before they are stored, or name the columns that are mixed with keys=. For discrete "
        "actions use neighborhood_mixup with discrete='same_action', or another recipe."
    )


class _CoefficientStream:
    """Draws coefficients in blocks, at a quarter of the cost of single batches; ``ahead`` are the unused ones."""

    def __init__(self, concentration: float) -> None:
        self.ahead = torch.empty(0, device="cpu")
        self._concentration = concentration

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        if self.ahead.numel() < count:
            block = mixup_coefficients(self._concentration, max(count, _BLOCK), generator).cpu()
            self.ahead = torch.cat((self.ahead, block))
        drawn, self.ahead = self.ahead.split_with_sizes((count, self.ahead.numel() - count))
        return drawn
