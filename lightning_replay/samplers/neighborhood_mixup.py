# SPDX-License-Identifier: Apache-2.0
"""Pairs of neighbors in state-action space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from lightning_replay.neighbors import NeighborLists, SameActionLists
from lightning_replay.options import checked_choice, checked_keys
from lightning_replay.samplers.pairs import PairSampler
from lightning_replay.saving.spec import rebuildable
from lightning_replay.storage.packed import device_of, read_columns

FEATURE_KEYS: tuple[NestedKey, ...] = ("observation", "action")


@rebuildable
class NeighborhoodMixupSampler(PairSampler):
    """Pairs each drawn row with one of its k nearest other rows, all k equally likely.

    Distances are Euclidean between standardized observations and actions. See
    :class:`~lightning_replay.neighbors.NeighborLists` for how the lists are kept. Put
    :class:`~lightning_replay.transforms.MixPairs` behind it. Neighborhood Mixup Experience Replay, Sander et al. 2022,
    https://arxiv.org/abs/2205.09117. With a prioritized ``base_sampler`` it is the paper's combination with prioritized
    replay.

    Args:
        num_neighbors: Number k of neighbors. The paper uses 10, and 25 for Ant.
        refresh_interval: Number of new rows that may wait before they enter the neighbor lists. 1 is the paper's
            definition.
        backend: Search that builds the lists: ``exact``, ``faiss_flat`` or ``faiss_ivf``.
        discrete: Rule for discrete actions. ``"same_action"`` restricts neighbors to the same integer action, and
            ``None`` refuses integer actions.
        feature_keys: Columns that the distance is taken in, joined to one vector. Nested columns, such as Dict
            observations, include all columns under them. All are floating, the last one may be a discrete action.
        base_sampler, update_partners, seed: as in :class:`PairSampler`, and so are the sampled keys.

    Raises:
        ValueError: integer, bool or image features, NaN or infinite features, before ``Replay`` stores anything.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> sampler = NeighborhoodMixupSampler(num_neighbors=1, seed=0)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=2)
        >>> steps = {"observation": torch.tensor([[0.0], [1.0], [5.0]]), "action": torch.zeros(3, 1)}
        >>> _ = buffer.extend(TensorDict(steps, [3]))
        >>> sampler.partners(torch.tensor([0, 1, 2]), buffer.storage)
        tensor([1, 0, 1])
    """

    stored_options: tuple[str, ...] = ("_feature_keys", "discrete")

    def __init__(
        self,
        num_neighbors: int = 10,
        base_sampler: Sampler | None = None,
        refresh_interval: int = 64,
        backend: str = "exact",
        discrete: str | None = None,
        update_partners: bool = False,
        feature_keys: Sequence[NestedKey] = FEATURE_KEYS,
        seed: int | None = None,
    ) -> None:
        super().__init__(base_sampler=base_sampler, update_partners=update_partners, seed=seed)
        self.num_neighbors = num_neighbors
        self.discrete: Any = checked_choice("discrete", discrete, (None, "same_action"))
        self._options: dict[str, Any] = {"refresh_interval": refresh_interval, "backend": backend}
        self._feature_keys: list[NestedKey] = [unravel_key(key) for key in checked_keys("feature_keys", feature_keys)]
        self._lists: NeighborLists | SameActionLists | None = None
        # Bad options raise their errors here and not at the first row.
        self._new_lists(capacity=1)

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses rows ``[N]`` whose features are missing, NaN, infinite, or of an integer type."""
        super().check_rows(rows)
        columns: list[Tensor | TensorDictBase] = []
        for key in self._feature_keys:
            column = rows.get(key, None)
            if column is None:
                stored = sorted(map(repr, rows.keys(True, True)))
                raise ValueError(
                    f"the transitions have no {key!r}; neighbors are found in {self._feature_keys}. "
                    f"Name keys of your transitions with feature_keys=, out of {', '.join(stored)}."
                )
            columns.append(column)
        features, _ = self._features(columns, rows.batch_size[0])
        # A row with NaN would be at distance NaN from every row.
        finite = features.isfinite().all(1)
        if not bool(finite.all()):
            raise ValueError(
                f"rows {(~finite).nonzero().flatten().tolist()[:10]} have NaN or infinite {self._feature_keys}; "
                "distances need finite ones. Nothing was stored. Look for a diverging policy or environment."
            )

    def on_insert(self, index: Tensor, storage: Storage) -> None:
        """Enters new rows into the neighbor lists. They wait there until a search includes them.

        :meta private:
        """
        columns: list[Tensor | TensorDictBase] = [*read_columns(storage, index, self._feature_keys)]
        features, action = self._features(columns, len(index))
        if self._lists is None:
            self._lists = self._new_lists(storage.max_size)
        if isinstance(self._lists, SameActionLists):
            assert action is not None
            self._lists.write(index, features, action)
        else:
            self._lists.write(index, features)

    def partners(self, index: Tensor, storage: Storage) -> Tensor:
        """Returns one of the nearest other rows of each row, int64 ``[B]``."""
        assert self._lists is not None
        device = device_of(storage) or index.device
        self._lists.to(device)
        return self._lists.draw(index.to(device), self._generator).cpu()

    def recall_at(self, k: int | None = None, sample: int = 1000) -> float:
        """Returns the share of the true k nearest rows in the lists, over ``sample`` random rows. 1 is exact.

        :meta private:
        """
        if self._lists is None:
            raise RuntimeError("recall_at needs stored rows; call extend first.")
        generator = torch.Generator().manual_seed(0)
        return self._lists.recall_at(self.num_neighbors if k is None else k, sample=sample, generator=generator)

    @property
    def nbytes(self) -> int:
        """Size of ``base_sampler`` and of the neighbor lists in bytes."""
        return super().nbytes + (0 if self._lists is None else self._lists.nbytes)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of ``base_sampler`` and of the neighbor lists."""
        lists = self._lists
        capacity, state = (0, {}) if lists is None else (lists.capacity, lists.state_dict())
        return super().state_dict() | {"learned": {"capacity": capacity, "lists": state}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a saved state, with lists of the saved capacity."""
        super().load_state_dict(state_dict)
        self._lists = None
        learned = state_dict["learned"]
        if learned["capacity"]:
            self._lists = self._new_lists(learned["capacity"])
            self._lists.load_state_dict(learned["lists"])

    def _empty(self) -> None:
        super()._empty()
        self._lists = None

    def _new_lists(self, capacity: int) -> NeighborLists | SameActionLists:
        lists = NeighborLists if self.discrete is None else SameActionLists
        return lists(capacity, self.num_neighbors, **self._options)

    def _features(self, columns: list[Tensor | TensorDictBase], count: int) -> tuple[Tensor, Tensor | None]:
        action = columns.pop() if self.discrete is not None else None
        if action is not None and (not isinstance(action, Tensor) or action.is_floating_point()):
            given = f"dtype {action.dtype}" if isinstance(action, Tensor) else "several columns"
            needed = "discrete='same_action' needs integer actions. Leave discrete=None for continuous ones"
            raise ValueError(f"{self._feature_keys[-1]!r} has {given}; {needed}")
        features = []
        for place, column in enumerate(columns):
            for key, leaf in _leaves(self._feature_keys[place], column):
                if not leaf.is_floating_point():
                    raise _refused(key, leaf, may_be_action=place == len(self._feature_keys) - 1)
                features.append(leaf.reshape(count, -1).float())
        return torch.cat(features, dim=1), action


def _leaves(key: NestedKey, column: Tensor | TensorDictBase) -> list[tuple[NestedKey, Tensor]]:
    # Columns are sorted by name, so that the features do not depend on the order in which they were stored.
    if isinstance(column, Tensor):
        return [(key, column)]
    return sorted((unravel_key((key, name)), leaf) for name, leaf in column.items(True, True))


def _refused(key: NestedKey, column: Tensor, *, may_be_action: bool) -> ValueError:
    given = f"{key!r} has dtype {column.dtype} and shape {list(column.shape[1:])}"
    others = "Name other columns with feature_keys="
    if column.dtype == torch.uint8 and column.ndim > 2:
        return ValueError(
            f"{given}, an image; distances of pixels do not measure which states are near, and images are not mixed. "
            f"{others} and, of the recipe or of MixPairs, keys=: feature_keys=[('observation', 'state'), 'action'], "
            "keys=[('observation', 'state'), ('next', 'observation', 'state'), 'action', ('next', 'reward')], where "
            "'state' is a floating column beside the image. Or use another sampler."
        )
    remedy = f"{others}, store it as floats"
    if may_be_action:
        remedy = "For discrete actions pass discrete='same_action', which pairs rows of the same action"
    return ValueError(f"{given}; neighborhood mixup interpolates floating columns. {remedy}, or use another sampler.")
