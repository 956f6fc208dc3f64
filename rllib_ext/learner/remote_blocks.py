# SPDX-License-Identifier: Apache-2.0
"""A drawn batch by reference: a Learner fetches its rows from where they were drawn."""

from __future__ import annotations

import logging
from collections.abc import MutableSequence, Sequence
from typing import Any

import numpy as np
import ray
import tree
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns

from lightning_replay.sharded.rows import Block, cut_blocks, fetched
from rllib_ext.learner.blocks import FlaggedBlock

logger: logging.Logger = logging.getLogger(__name__)


class RemoteBlock:
    """The rows of one module in a batch, by reference. The driver slices it as it does episodes, and moves no rows."""

    def __init__(
        self,
        name: str,
        spans: Sequence[Block],
        weights: np.ndarray,
        module_id: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.id_: str = name
        self.spans: list[Block] = list(spans)
        self.weights: np.ndarray = weights
        self.module_id: str | None = module_id
        self.timeout_s: float = timeout_s

    def __len__(self) -> int:
        return len(self.weights)

    def __repr__(self) -> str:
        return f"RemoteBlock(id_={self.id_!r}, {len(self)} rows in {len(self.spans)} parts)"

    def slice(self, slice_: Any, *, len_lookback_buffer: int | None = None) -> RemoteBlock:
        """Returns a part of the rows, which are not fetched."""
        start, stop, _ = slice_.indices(len(self))
        spans = cut_blocks(self.spans, start, stop)
        return RemoteBlock(f"{self.id_}_{start}", spans, self.weights[start:stop], self.module_id, self.timeout_s)

    __getitem__ = slice


class BlockReader:
    """Fetches the rows of remote blocks in a Learner. Lost rows are replaced by other rows of weight 0."""

    def __init__(self) -> None:
        self.num_lost: int = 0
        self._rows: dict[str | None, Any] = {}  # one of each module, the last that was read

    def read(self, episodes: MutableSequence[Any]) -> None:
        """Replaces remote blocks among the episodes by blocks with the fetched rows."""
        remote = [one for one in episodes if isinstance(one, RemoteBlock)]
        if not remote:
            return
        references = list(dict.fromkeys(span.reference for block in remote for span in block.spans))
        found = fetched(references, max(block.timeout_s for block in remote))
        blocks = dict(zip(references, found, strict=True))
        for place, block in enumerate(episodes):
            if isinstance(block, RemoteBlock):
                episodes[place] = self._block(block, blocks)

    def _block(self, remote: RemoteBlock, blocks: dict[ray.ObjectRef[Any], FlaggedBlock | None]) -> FlaggedBlock:
        weights = remote.weights
        held = [(blocks[span.reference], span) for span in remote.spans]
        parts: list[Any] = [block and block.slice(slice(span.start, span.stop)) for block, span in held]
        found = [part for part in parts if part is not None]
        if found:
            row = found[0].slice(slice(0, 1))
            # A copy: a view would keep the whole block in the object store.
            columns, outputs, (terminated, truncated) = tree.map_structure(np.copy, row.content)
            kept = FlaggedBlock(row.id_, columns, outputs, terminated, truncated, row.module_id)
            self._rows[remote.module_id] = kept
        if len(found) < len(parts):
            parts, weights = self._filled(remote, parts)
        content = [part.content for part in parts]
        joined = content[0] if len(parts) == 1 else tree.map_structure(lambda *each: np.concatenate(each), *content)
        columns, outputs, (terminated, truncated) = joined
        outputs = outputs | {"weights": weights}
        return FlaggedBlock(remote.id_, columns, outputs, terminated, truncated, remote.module_id)

    def _filled(self, remote: RemoteBlock, parts: list[Any]) -> tuple[list[Any], np.ndarray]:
        row = self._rows.get(remote.module_id)
        if row is None:
            raise RuntimeError(
                f"all {len(remote)} rows of {remote!r} were lost with the shards that held them, before this Learner "
                "had learned anything. Restore a checkpoint, or start again"
            )
        weights = remote.weights.copy()
        position = 0
        filled: list[Any] = []
        for (_, start, stop), part in zip(remote.spans, parts, strict=True):
            if part is None:
                weights[position : position + stop - start] = 0.0
                self.num_lost += stop - start
                filled += [row] * (stop - start)
            else:
                filled.append(part)
            position += stop - start
        logger.warning("rows of a batch were lost with a shard; %d so far have a weight of 0 instead", self.num_lost)
        return filled, weights


class AddFlagsFromBlocks(ConnectorV2):
    """Adds terminated and truncated of every row to the train batch. RLlib's piece reads only an episode's end."""

    # The first piece of a Learner's pipeline: RLlib's own pieces then leave these two columns out.

    def __init__(self, *spaces: Any, **options: Any) -> None:
        super().__init__(*spaces, **options)
        self._reader = BlockReader()

    def __call__(self, *, batch: dict[str, Any], episodes: list[Any], **rest: Any) -> dict[str, Any]:
        self._reader.read(episodes)  # blocks by reference take the places of the references
        if not all(isinstance(episode, FlaggedBlock) for episode in episodes):
            return batch
        for block in episodes:
            for column, flags in zip((Columns.TERMINATEDS, Columns.TRUNCATEDS), block.ends, strict=True):
                self.add_n_batch_items(
                    batch, column, items_to_add=flags, num_items=len(block), single_agent_episode=block
                )
        return batch


def flags_connector(observation_space: Any, action_space: Any) -> AddFlagsFromBlocks:
    """Returns the connector for ``AlgorithmConfig.learners(learner_connector=...)``.

    A pickled config finds this function by its name.
    """
    return AddFlagsFromBlocks(observation_space, action_space)
