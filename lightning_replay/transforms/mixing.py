# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of mixup over nested batches, leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import unravel_key
from torch import Tensor

from lightning_replay.storage.row_layout import assemble_unchecked

_NOTHING: dict[str, Any] = {}


class Mixing:
    """Mixes the leaves ``[B, 2, ...]`` of a batch into ``[B, ...]``; ``found`` counts the keys of the tree it had."""

    def __init__(self, coefficient: Tensor, untouched: Tensor | None) -> None:
        self.found = 0
        self._coefficient = coefficient
        self._untouched = untouched
        self._shaped: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor | None]] = {}

    def mix(self, node: TensorDictBase, tree: dict[str, Any] | None, source: dict[str, Any]) -> TensorDictBase:
        """Mixes the columns of ``tree``, all where it is None, into ``source``; others are those of the first rows."""
        for name, value in node.items():
            inner = None if tree is None else tree.get(name, _NOTHING)
            self.found += inner is None and tree is not None
            if name == "index":
                source[name] = value
            elif isinstance(value, Tensor):
                mixes = inner is None and value.is_floating_point()
                source[name] = self._mix_leaf(value) if mixes else value.select(1, 0)
            elif isinstance(value, TensorDictBase):
                source[name] = self.mix(value, inner, {})
            else:
                source[name] = value[:, 0]
        return assemble_unchecked(source, batch_size=node.batch_size[:1], device=node.device)

    def _mix_leaf(self, pairs: Tensor) -> Tensor:
        kind = (pairs.dtype, pairs.ndim)
        if kind not in self._shaped:
            shape = (-1,) + (1,) * (pairs.ndim - 2)
            untouched = None if self._untouched is None else self._untouched.reshape(shape)
            self._shaped[kind] = self._coefficient.to(pairs.dtype).reshape(shape), untouched
        weight, untouched = self._shaped[kind]
        first, second = pairs.unbind(1)
        # In this order a weight of 1 returns the first exactly, and so do two equal rows.
        mixed = torch.lerp(second, first, weight)
        # A weight of 1 does not remove the NaN or infinity of a partner.
        return mixed if untouched is None else torch.where(untouched, first, mixed)


def tree_of(paths: set[tuple[str, ...]]) -> dict[str, Any]:
    """Returns the names of all paths as nested dictionaries, ``None`` at the end of each path."""
    tree: dict[str, Any] = {}
    for path in paths:
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = None
    return tree


def columns_under(batch: TensorDictBase, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """Returns the columns at or under ``path``, each with its own path; none where it is missing."""
    found = batch.get(path, None)
    if isinstance(found, TensorDictBase):
        return [(unravel_key((*path, key)), value) for key, value in found.items(True, True)]
    return [] if found is None else [(path, found)]


def listed(paths: Iterable[tuple[str, ...]]) -> str:
    """Returns keys as they appear in errors."""
    return ", ".join(repr(path if len(path) > 1 else path[0]) for path in sorted(paths))
