# SPDX-License-Identifier: Apache-2.0
"""Convex combinations of two transitions, or of the two states of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor

from lightning_replay.jit import compiled
from lightning_replay.options import ABOVE_ZERO, checked_keys, checked_number
from lightning_replay.parts import ReplayTransform
from lightning_replay.saving.spec import rebuildable
from lightning_replay.schedules import Schedule, checked_schedule
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.storage.rows import WORD_BYTES, Key, RowLayout, nest
from lightning_replay.torchrl_compat import assemble_unchecked

_LINE_ELEMENTS = 16  # float32 in a cache line
_NOTHING: dict[str, Any] = {}
_TERMINATED: Key = ("next", "terminated")
MIXED_KEYS: tuple[NestedKey, ...] = ("observation", "action", ("next", "observation"), ("next", "reward"))
_BLOCK = 4096


@compiled
def mix_pairs(rows, flags, index, blocks, terminated, coefficient, mixed):  # type: ignore[no-untyped-def]
    """Gathers pairs of rows and mixes each into one row, and returns whether all slots are rows, else nothing is mixed.

    Of packed ``rows``, float32, which ``flags`` are as bytes, the elements in ``blocks``, int64 ``[K, 2]``, are mixed.
    The ``coefficient`` of a pair is set to 1 if the bytes ``terminated`` of one are set, or both are the same row.
    """
    begin, end = terminated
    # Rows are scattered in memory: loads of all their cache lines, which depend on nothing, overlap. Copies hardly do.
    touched = np.float32(0)
    for pair in range(index.shape[0]):
        for place in range(2):
            if not 0 <= index[pair, place] < rows.shape[0]:
                return False
        for element in range(0, rows.shape[1], _LINE_ELEMENTS):
            touched += rows[index[pair, 0], element]
            touched += rows[index[pair, 1], element]
    mixed[0, 0] = touched  # overwritten below. Without a use the loads would be left out
    for pair in range(index.shape[0]):
        first, second = index[pair, 0], index[pair, 1]
        is_left = first == second
        for place in range(begin, end):
            is_left |= (flags[first, place] | flags[second, place]) != 0
        for element in range(rows.shape[1]):
            mixed[pair, element] = rows[first, element]
        if is_left:
            coefficient[pair] = 1
            continue
        weight = coefficient[pair]
        rest = np.float32(1) - weight
        for block in range(blocks.shape[0]):
            for element in range(blocks[block, 0], blocks[block, 1]):
                one, other = rows[first, element], rows[second, element]
                # The nearer of the two is the start, as in torch.lerp: 1 returns the first exactly, 0 the second.
                step = one - other
                mixed[pair, element] = other + weight * step if weight < np.float32(0.5) else one - rest * step
    return True


class Mixing:
    """Mixes the leaves ``[B, 2, ...]`` of a batch into ``[B, ...]``."""

    def __init__(self, coefficient: Tensor, untouched: Tensor | None) -> None:
        # The number of keys of the tree that the batch has.
        self.found: int = 0
        # Whether columns at or under the keys are not floating.
        self.has_others: bool = False
        self._coefficient = coefficient
        self._untouched = untouched
        self._shaped: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor | None]] = {}

    def mix(self, node: TensorDictBase, tree: dict[str, Any] | None, source: dict[str, Any]) -> TensorDictBase:
        """Mixes the columns of ``tree``, all if it is None, into ``source``. Others come from the first rows."""
        for name, value in node.items():
            inner = None if tree is None else tree.get(name, _NOTHING)
            if type(inner) is tuple:  # one of the keys
                inner = None
                self.found = self.found + 1
            if name == "index":
                source[name] = value
            elif isinstance(value, Tensor):
                mixes = inner is None and value.is_floating_point()
                self.has_others |= inner is None and not mixes
                source[name] = self._mix_leaf(value) if mixes else value.select(1, 0)
            elif isinstance(value, TensorDictBase):
                source[name] = self.mix(value, inner, {})
            else:
                source[name] = value[:, 0]
        return assemble_unchecked(source, node.batch_size[:1], node.device)

    def _mix_leaf(self, pairs: Tensor) -> Tensor:
        kind = (pairs.dtype, pairs.ndim)
        if kind not in self._shaped:
            shape = (-1,) + (1,) * (pairs.ndim - 2)
            untouched = None if self._untouched is None else self._untouched.reshape(shape)
            self._shaped[kind] = self._coefficient.to(pairs.dtype).reshape(shape), untouched
        weight, untouched = self._shaped[kind]
        first, second = pairs.unbind(1)
        # This order returns the first row exactly if its weight is 1, and if both rows are equal.
        mixed = torch.lerp(second, first, weight)
        # A weight of 1 does not remove the NaN or infinity of a partner.
        return mixed if untouched is None else torch.where(untouched, first, mixed)


class _Place(NamedTuple):  # elements of one dtype in a row
    dtype: torch.dtype
    start: int
    length: int


class PackedMixing:
    """Mixes the columns under ``keys`` of pairs of packed rows in a compiled loop, those side by side as one block."""

    def __init__(self, layout: RowLayout, keys: set[Key]) -> None:
        self.layout = layout
        is_under = {(column, key): column[: len(key)] == key for column in layout.columns for key in keys}
        under = {column: any(is_under[column, key] for key in keys) for column in layout.columns}
        row = layout.leaves(
            torch.empty(1, layout.row_bytes // WORD_BYTES, dtype=torch.int64, device="cpu"), torch.Size([1])
        )
        self._places = {key: _Place(leaf.dtype, int(leaf.storage_offset()), leaf.numel()) for key, leaf in row.items()}
        mixed = [place for key, place in self._places.items() if under[key] and place.dtype.is_floating_point]
        self._blocks: list[_Place] = []
        for place in sorted(mixed, key=lambda place: (str(place.dtype), place.start)):
            last = self._blocks[-1] if self._blocks else None
            if last is not None and (last.dtype, last.start + last.length) == place[:2]:
                place = _Place(last.dtype, last.start, last.length + place.length)
                self._blocks.pop()
            self._blocks.append(place)
        # The loop does not refuse columns, compare the stored discounts of returns, or mix other floats than float32.
        self.is_covered: bool = (
            all(any(is_under[column, key] for column in layout.columns) for key in keys)
            and all(can_be_mixed(key, place.dtype, keys) for key, place in self._places.items() if under[key])
            and (_TERMINATED in self._places and ("discount",) not in self._places)
            and {place.dtype for place in self._blocks} <= {torch.float32}
        )
        self._bounds = np.array([[place.start, place.start + place.length] for place in self._blocks], dtype=np.int64)

    def gather_mixed(self, rows: Tensor, index: Tensor, coefficient: Tensor) -> tuple[Tensor, Tensor]:
        """Returns pairs ``[B, 2]`` of rows, int64 ``[N, words]``, mixed, and the coefficients, 1 for pairs left so."""
        mixed = rows.new_empty(len(index), rows.shape[1])
        coefficient = coefficient.clone()
        stored = rows.numpy()
        _, start, length = self._places[_TERMINATED]
        is_mixed = mix_pairs(
            stored.view(np.float32),
            stored.view(np.uint8),
            index.numpy(),
            self._bounds.reshape(-1, 2),
            (start, start + length),
            coefficient.numpy(),
            mixed.numpy().view(np.float32),
        )
        if not is_mixed:
            lowest, highest = (int(bound) for bound in index.aminmax())
            raise IndexError(
                f"pairs were drawn of slots from {lowest} to {highest}, of a storage with slots from 0 to "
                f"{len(rows) - 1}; nothing was mixed. Let the sampler draw slots below len(storage)"
            )
        return mixed, coefficient


def can_be_mixed(column: Key, dtype: torch.dtype, keys: set[Key]) -> bool:
    """Returns whether a column at or under one of ``keys`` can be mixed, or is a flag under it, which stays."""
    return dtype.is_floating_point or (dtype == torch.bool and column not in keys)


def columns_under(batch: TensorDictBase, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """Returns the columns at or under ``path``, each with its own path, or none if it is missing."""
    found = batch.get(path, None)
    if isinstance(found, TensorDictBase):
        return [(unravel_key((*path, key)), value) for key, value in found.items(True, True)]
    return [] if found is None else [(path, found)]


def floating_columns(batch: TensorDictBase, paths: Iterable[tuple[str, ...]], reader: str) -> dict[Key, Tensor]:
    """Returns the columns at or under ``paths`` by key.

    Raises ``ValueError`` if there is none, or one is not floating.
    """
    columns: dict[Key, Tensor] = {}
    for path in paths:
        found = columns_under(batch, path)
        if not found:
            raise ValueError(f"the batch has no {listed([path])}; name the columns of {reader} with keys=")
        columns.update(found)
    for key, column in columns.items():
        if not column.is_floating_point():
            raise ValueError(
                f"{listed([key])} has dtype {column.dtype}; {reader} changes floating columns. Convert it before it is "
                "stored, or name other keys with keys="
            )
    return columns


def listed(paths: Iterable[tuple[str, ...]]) -> str:
    """Returns keys as a sorted text for a message."""
    return ", ".join(repr(path if len(path) > 1 else path[0]) for path in sorted(paths))


def mixup_coefficients(concentration: float, count: int, generator: torch.Generator) -> Tensor:
    """Draws ``count`` coefficients λ ~ Beta(concentration, concentration), float32, from ``generator``.

    Exact for every concentration. With ν = 2 concentration, Bailey's T = sqrt(ν (U**(-2/ν) - 1)) cos(2 π V) has
    Student's t distribution. Then (1 + T / sqrt(ν + T²)) / 2 is Beta(ν/2, ν/2). Bailey 1994,
    https://doi.org/10.2307/2153537. (torch's Beta distribution has no generator argument.)
    """
    checked_number("concentration", concentration, ABOVE_ZERO)
    uniform, angle = torch.rand((2, count), generator=generator, dtype=torch.float64, device=generator.device).unbind(0)
    cosine = angle.mul_(2 * math.pi).cos_()
    squared = uniform.pow_(-1 / concentration).sub_(1).mul_(cosine.square())
    # 1 / sqrt(1 + 1/x) and not sqrt(x / (1 + x)): small concentrations overflow to infinity, which is right here.
    distance = squared.reciprocal_().add_(1).rsqrt_()
    return torch.copysign(distance, cosine).add_(1).mul_(0.5).float()


@rebuildable
class MixPairs(ReplayTransform):
    """Mixes each pair of transitions into one: ``λ * first + (1 - λ) * second`` with λ ~ Beta(α, α), one λ per pair.

    Put it behind a sampler that draws pairs (an index ``[B, 2]``). The batch goes in as ``[B, 2]`` and comes out as
    ``[B]``. The columns at or under ``keys`` are mixed, on raw values. Integers are refused, and flags below a key
    stay. All others (``generation``, ``trajectory``, ``priority_weight``, ``discount``, ...) come from the first, and
    ``index`` keeps both. A pair is left as its first transition, bit for bit, when one of the two terminated or when
    their n-step ``discount`` differs. It is also left when the sampler paired a row with itself. Truncated rows mix
    like any other.
    Neighborhood Mixup Experience Replay, Sander et al. 2022, https://arxiv.org/abs/2205.09117.

    Args:
        mixup_concentration: Parameter α of the Beta distribution. The paper does not state it, 0.75 is the default of
            the authors' command line.
        fraction: Share of the pairs that are mixed at all, drawn per pair. A schedule follows its clock, of which
            "draws" are the batches mixed.
        keys: Floating columns to mix. A nested key stands for all under it. If others are integers, such as discrete
            actions, name the columns to mix. The integers then come from the first.
        seed: Seed for the transform's own generator, whose state is part of :meth:`state_dict`.

    Sampled keys:
        mixup_coefficient: float32 ``[B]``, the weight of the first transition. It is 1 if that is left as it is.

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

    exact: bool = True
    takes_sequences = False
    saved_attributes: tuple[str, ...] = ("_ahead", "_clocks")

    def __init__(
        self,
        mixup_concentration: float = 0.75,
        fraction: float | Schedule = 1.0,
        keys: Sequence[NestedKey] = MIXED_KEYS,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self._seed_generator(seed)
        self.mixup_concentration: float = checked_number("mixup_concentration", mixup_concentration, ABOVE_ZERO)
        self._fraction = checked_schedule("fraction", fraction, highest=1.0)
        self._clocks = {"draws": 0, "updates": 0, "env_steps": 0}
        self._mixed_keys = set(checked_keys("keys", keys))
        self._mixed_tree = nest(self._mixed_keys)
        # These coefficients were drawn and are not used yet.
        self._ahead = torch.empty(0, dtype=torch.float32, device="cpu")
        # The compiled mixing for the layout of the last batch.
        self._packed: PackedMixing | None = None

    @property
    def fraction(self) -> float:
        """Present share of the pairs that are mixed."""
        return self._fraction(self._clocks[self._fraction.clock])

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of environment steps and updates, which the schedule of ``fraction`` reads."""
        given = {"env_steps": env_steps, "updates": updates}
        self._clocks.update({name: reading for name, reading in given.items() if reading is not None})

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Mixes a batch of pairs ``[B, 2]`` into a batch ``[B]``."""
        size = tensordict.batch_size
        if len(size) != 2 or size[1] != 2:
            raise ValueError(
                f"MixPairs got a batch of size {list(size)}; it mixes pairs, a batch of size [B, 2]. Use a sampler "
                "that draws pairs: NeighborhoodMixupSampler, ContinuousTransitionSampler or RandomPairSampler"
            )
        following = tensordict.get("next", None)
        terminated = None if following is None else following.get("terminated", None)
        untouched = self._untouched(terminated, tensordict.get("discount", None))
        coefficient = self._draw(size[0], untouched, tensordict.get("index", None))
        mixing = Mixing(coefficient, untouched)
        mixed = mixing.mix(tensordict, self._mixed_tree, {"mixup_coefficient": coefficient})
        if mixing.found != len(self._mixed_keys):
            missing = {path for path in self._mixed_keys if tensordict.get(path, None) is None}
            raise ValueError(
                f"the batch has no {listed(missing)}; MixPairs mixes {listed(self._mixed_keys)}. Name the keys of your "
                "transitions with keys=."
            )
        if mixing.has_others:
            columns = {leaf: value for path in self._mixed_keys for leaf, value in columns_under(tensordict, path)}
            dtypes = {leaf: value.dtype for leaf, value in columns.items()}
            unmixable = [leaf for leaf, one in dtypes.items() if not can_be_mixed(leaf, one, self._mixed_keys)]
            if unmixable:
                found = ", ".join(f"{listed([leaf])} has dtype {dtypes[leaf]}" for leaf in sorted(unmixable))
                raise ValueError(
                    f"{found}; MixPairs mixes floating columns, and where others stay as they were, the mixed row is "
                    "none of the environment. Convert them before they are stored, or name the columns that are mixed "
                    "with keys=. For discrete actions use neighborhood_mixup with discrete='same_action', or another "
                    "recipe."
                )
        return mixed

    def _mix_stored(self, storage: PackedStorage, index: Tensor) -> TensorDictBase:
        # The result is that of forward on the pairs of rows. Float32 columns on a CPU are mixed in packed rows, in 40%
        # of the time. The columns of the batch are views.
        layout, stored, places = storage.read_in_place(index)
        packed = self._packed
        if packed is None or packed.layout is not layout:
            packed = self._packed = PackedMixing(layout, self._mixed_keys)
        if not packed.is_covered or self.fraction < 1.0 or stored.device.type != "cpu":
            return self.forward(storage.get(index, {"index": index}))
        # A batch of 256 takes 73 us. It takes 186 us from columns, and 173 us from packed rows with torch.
        rows, coefficient = packed.gather_mixed(stored, places, self._draw(len(index), None, None))
        storage.check_read()
        return layout.unpack(rows, index.shape[:1], {"index": index, "mixup_coefficient": coefficient})

    def _draw(self, count: int, untouched: Tensor | None, index: Tensor | None) -> Tensor:
        self._clocks["draws"] += 1
        # Coefficients are drawn in blocks, at a quarter of the cost of single batches.
        if self._ahead.numel() < count:
            block = mixup_coefficients(self.mixup_concentration, max(count, _BLOCK), self._rng).cpu()
            self._ahead = torch.cat((self._ahead, block))
        # Writing to __dict__ avoids __setattr__ of torch.nn.Module, which takes as long as the draw.
        coefficient, self.__dict__["_ahead"] = self._ahead.split_with_sizes((count, self._ahead.numel() - count))
        if untouched is not None:
            coefficient = coefficient.to(untouched.device, non_blocking=True).masked_fill(untouched, 1.0)
        if index is not None:
            coefficient = coefficient.to(index.device, non_blocking=True).masked_fill(torch.eq(*index.unbind(1)), 1.0)
        return coefficient

    def reseed(self, seed: int) -> None:
        """Seeds the generator and discards the coefficients that were drawn ahead.

        :meta private:
        """
        super().reseed(seed)
        self._ahead = self._ahead[:0]

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the generator's state, the coefficients drawn ahead and the clocks."""
        return super().get_extra_state() | {"concentration": self.mixup_concentration}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`get_extra_state` returned."""
        super().set_extra_state(state)
        if state["concentration"] != self.mixup_concentration:
            # The saved coefficients have another distribution.
            self._ahead = self._ahead[:0]

    def _untouched(self, terminated: Tensor | None, discount: Tensor | None) -> Tensor | None:
        # The result is the pairs [B] that are left as their first transition. None means no pair.
        if terminated is None:
            raise ValueError(
                'the batch has no ("next", "terminated"); MixPairs never mixes across a terminal step. '
                "Store terminated, truncated and done with every transition."
            )
        fraction = self.fraction
        if discount is None and fraction == 1.0 and terminated.device.type == "cpu" and not bool(terminated.any()):
            return None  # Reading a flag of a GPU would wait for it.
        untouched = terminated.flatten(1).any(1)
        if discount is not None:
            untouched = untouched | (discount[:, 0] != discount[:, 1]).flatten(1).any(1)
        if fraction < 1.0:
            generator = self._rng
            points = torch.rand(untouched.shape, dtype=torch.float32, generator=generator, device=generator.device)
            untouched = untouched | (points >= fraction).to(untouched.device)
        return untouched


@rebuildable
class MixStates(ReplayTransform):
    """Moves each state towards its next state: ``observation <- λ * observation + (1 - λ) * next observation``.

    Nothing else changes, and terminal steps are no exception. λ ~ Beta(α, α), one per transition.
    State mix-up of S4RL, Sinha et al. 2021, https://arxiv.org/abs/2103.06326.

    Args:
        mixup_concentration: Parameter α of the Beta distribution.
        keys: Observations, each mixed with the entry of the same name under ``"next"``. A nested key stands for all.
        seed: Seed for the transform's own generator, whose state is part of :meth:`state_dict`.

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

    takes_sequences = False

    def __init__(
        self, mixup_concentration: float = 0.75, keys: Sequence[NestedKey] = ("observation",), seed: int | None = None
    ) -> None:
        super().__init__()
        self._seed_generator(seed)
        self.mixup_concentration: float = checked_number("mixup_concentration", mixup_concentration, ABOVE_ZERO)
        self._paths = checked_keys("keys", keys)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Mixes the states of a batch. The batch itself is changed, the stored rows are not."""
        shape = tensordict.batch_size
        coefficient = mixup_coefficients(self.mixup_concentration, shape.numel(), self._rng).reshape(shape)
        columns = floating_columns(tensordict, self._paths, "MixStates")
        after = floating_columns(tensordict, [("next", *path) for path in columns], "MixStates")
        for (path, observation), following in zip(columns.items(), after.values(), strict=True):
            if following.dtype != observation.dtype or following.shape != observation.shape:
                raise ValueError(
                    f"{path[-1]!r} is {observation.dtype} {list(observation.shape)} and the next one {following.dtype} "
                    f"{list(following.shape)}; MixStates mixes observations of one dtype and shape."
                )
            weight = coefficient.to(observation).reshape(shape + (1,) * (observation.ndim - len(shape)))
            tensordict.set(path, torch.lerp(following, observation, weight))
        return tensordict.set("mixup_coefficient", coefficient.to(observation.device))
