# SPDX-License-Identifier: Apache-2.0
"""Nearest stored rows: exact in torch, or by a Faiss index."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from lightning_replay.options import checked_choice, missing_extra

# Groups of this many rows are ranked by their smallest distance. Then the rows of the best groups are compared.
_GROUP = 16
# One product has this many queries.
_BLOCK = 256
# The direct search holds this many float64 distances at once.
_DIRECT_ELEMENTS = 2**22
_EXACT = "or use backend='exact'"


class PointTable:
    """Standardized rows of ``capacity`` slots, laid out so that a matrix product gives squared distances.

    Row i is ``[z, |z|², 1]`` and a query is ``[-2z, 1, |z|²]``. A row that is not stored has an infinite square, so
    it is infinitely far from everything. Row ``capacity`` is never stored: short lists refer to it.
    """

    def __init__(self, capacity: int, width: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.width = width
        self.rows: Tensor = torch.zeros(_whole_groups(capacity + 1), width + 2, dtype=torch.float32, device=device)
        self.rows[:, width] = torch.inf
        self.rows[:, width + 1] = 1
        self._steps = torch.arange(_GROUP, device=device)
        # Distances of one tile stay in the processor's second cache. A GPU needs more work per call.
        self._tile_elements = 2**18 if self.rows.device.type == "cpu" else 2**26

    @property
    def nbytes(self) -> int:
        """Size of the table in bytes."""
        return self.rows.nbytes

    def place(self, slots: Tensor, points: Tensor) -> None:
        """Stores the standardized rows ``points`` ``[n, d]`` at ``slots`` ``[n]``."""
        square = points.square().sum(1, keepdim=True)
        self.rows[slots] = torch.cat([points, square, torch.ones_like(square)], 1)

    def points(self, slots: Tensor) -> Tensor:
        """Returns the standardized features of ``slots``, float32 ``[n, d]``."""
        return self.rows.index_select(0, slots)[:, : self.width]

    def nearest(self, slots: Tensor, count: int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Finds the ``count`` other rows below ``limit`` that are nearest to each of the stored rows ``slots`` ``[q]``.

        Returns squared distances, nearest first, and slots ``[q, count]``. If there are fewer, the distances are
        infinite. For each searched slot, also returns its squared distance to the closest query ``[limit]``.
        """
        query = self.rows.index_select(0, slots)
        point, square, one = query.split([self.width, 1, 1], 1)
        factors = torch.cat([-2 * point, one, square], 1)
        table = self.rows[: _whole_groups(limit)]
        tile = min(max(1, self._tile_elements // len(slots) // _GROUP) * _GROUP, len(table))
        # One buffer for all tiles: memory fresh from the system costs more than the product.
        buffer = torch.empty(len(slots) * tile, dtype=torch.float32, device=table.device)
        closest = []
        minimum = []
        for rows in table.split(tile):
            distance = torch.mm(factors, rows.T, out=buffer[: len(slots) * len(rows)].view(len(slots), len(rows)))
            closest.append(distance.amin(0))
            # A group is strided over the tile, so that the minimum runs over contiguous columns.
            minimum.append(distance.view(len(slots), _GROUP, -1).amin(1))
        member = self._members(torch.cat(minimum, 1), count, tile, len(table))
        distance = self._direct(point, member).masked_fill(member == slots.unsqueeze(1), torch.inf)
        distance, position = distance.topk(min(count, member.shape[1]), dim=1, largest=False)
        missing = (0, count - position.shape[1])
        distance = functional.pad(distance, missing, value=torch.inf)
        return (
            distance,
            functional.pad(member.gather(1, position), missing, value=self.capacity),
            torch.cat(closest)[:limit],
        )

    def _members(self, minimum: Tensor, count: int, tile: int, length: int) -> Tensor:
        # The count + 1 nearest rows, the query among them, lie in the count + 1 groups of the smallest minima.
        group = minimum.topk(min(count + 1, minimum.shape[1]), dim=1, largest=False, sorted=False).indices
        start = group // (tile // _GROUP) * tile
        stride = (length - start).clamp_(max=tile) // _GROUP
        first = start + group % (tile // _GROUP)
        return (first.unsqueeze(2) + stride.unsqueeze(2) * self._steps).flatten(1)

    def _direct(self, point: Tensor, member: Tensor) -> Tensor:
        # Differences keep the digits in which very close rows differ. Matrix products lose them.
        rows = self.rows.index_select(0, member.flatten()).view(*member.shape, -1)
        distance = (rows[..., : self.width] - point.unsqueeze(1)).square_().sum(-1)
        return distance.masked_fill_(rows[..., self.width].isinf(), torch.inf)

    def distances(self, slots: Tensor, others: Tensor) -> Tensor:
        """Squared distances ``[n, m]`` of ``slots`` ``[n]`` to ``others`` ``[n, m]``."""
        return self._direct(self.points(slots), others)


#: A function of a table, the slots of all N stored rows, a count, and a limit. It returns squared distances and slots
#: of neighbors, ``[N, count]``.
Search = Callable[[PointTable, Tensor, int, int], tuple[Tensor, Tensor]]


def exact_search(table: PointTable, slots: Tensor, count: int, limit: int) -> tuple[Tensor, Tensor]:
    """Compares every pair of rows, in blocks, on the device of the table."""
    blocks = [table.nearest(block, count, limit)[:2] for block in slots.split(_BLOCK)]
    distance, slot = zip(*blocks, strict=True)
    return torch.cat(distance), torch.cat(slot)


def faiss_search(
    table: PointTable, slots: Tensor, count: int, limit: int, *, inverted_file: bool
) -> tuple[Tensor, Tensor]:
    """Builds a Faiss index over all rows and queries it for all of them, on the device of the table."""
    points = table.points(slots).contiguous()
    distance, position = _faiss_index(points, inverted_file).search(points, count + 1)
    itself = torch.arange(len(slots), device=points.device).unsqueeze(1)
    distance = distance.masked_fill((position < 0) | (position == itself), torch.inf)
    distance, order = distance.topk(count, dim=1, largest=False)
    return distance, slots[position.gather(1, order).clamp_(min=0)].masked_fill(distance.isinf(), table.capacity)


def _faiss_index(points: Tensor, inverted_file: bool) -> Any:
    faiss = _import_faiss()
    number, width = points.shape
    index = faiss.IndexFlatL2(width)
    # A tenth of the cells of similar rows is searched: faster above about 100,000 rows, and no longer exact. Faiss
    # needs 39 rows a cell to train on. With fewer cells than 8 the flat index is as fast.
    cells = min(round(4 * number**0.5), number // 39)
    if inverted_file and cells >= 8:
        index = faiss.IndexIVFFlat(index, width, cells)
        index.nprobe = max(1, round(0.1 * cells))
    if points.device.type == "cuda":
        if not hasattr(faiss, "StandardGpuResources"):
            raise missing_extra("a Faiss index on a GPU", "Faiss with GPU support", _extra(), _EXACT)
        index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), points.device.index or 0, index)
    if not index.is_trained:
        index.train(points)
    index.add(points)
    return index


def search_by_name(backend: str) -> Search:
    """Returns the search of a backend. Raises ``ModuleNotFoundError`` if Faiss is needed and missing."""
    checked_choice("backend", backend, ("exact", "faiss_flat", "faiss_ivf"))
    if backend == "exact":
        return exact_search
    # A missing Faiss raises its error here and not at the first search.
    _import_faiss()
    return partial(faiss_search, inverted_file=backend == "faiss_ivf")


def direct_neighbors(rows: Tensor, std: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns distances and positions ``[q, count]`` of the rows nearest to those at ``index``, in float64."""
    scale = torch.where(std > 0, 1 / std, 0.0)
    points = (rows.double() - rows[0].double()) * scale
    blocks = []
    for block in index.split(max(1, _DIRECT_ELEMENTS // len(rows))):
        distance = torch.cdist(points[block], points, compute_mode="donot_use_mm_for_euclid_dist")
        distance.scatter_(1, block.unsqueeze(1), torch.inf)
        blocks.append(distance.topk(count, dim=1, largest=False))
    return torch.cat([block.values for block in blocks]), torch.cat([block.indices for block in blocks])


def blocks_of(slots: Tensor, length: int) -> tuple[Tensor, ...]:
    """Returns ``slots`` in blocks of at most ``length``, or no block if there are no slots."""
    return slots.split(length) if len(slots) else ()


def _whole_groups(rows: int) -> int:
    return -(-rows // _GROUP) * _GROUP


def _import_faiss() -> ModuleType:
    try:
        import faiss

        # With this module, indices accept tensors on their device.
        import faiss.contrib.torch_utils
    except ModuleNotFoundError as error:
        raise missing_extra("a Faiss backend", "Faiss", _extra(), _EXACT) from error
    return faiss


def _extra() -> str:
    """Returns the extra whose Faiss fits this machine and the CUDA version of torch."""
    if not torch.cuda.is_available():
        return "faiss-cpu"
    return "faiss-gpu-cu13" if str(torch.version.cuda).startswith("13") else "faiss-gpu"
