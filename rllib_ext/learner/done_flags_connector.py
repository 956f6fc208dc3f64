# SPDX-License-Identifier: Apache-2.0
"""The Learner's connector for batches that travel as one block, or by reference."""

from __future__ import annotations

from typing import Any

from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns

from rllib_ext.learner.blocks import FlaggedBlock
from rllib_ext.learner.remote_blocks import BlockReader


class AddFlagsFromBlocks(ConnectorV2):
    """Adds terminated and truncated of every row to the train batch; RLlib's piece reads an episode's end alone.

    The first piece of a Learner's pipeline: RLlib's own pieces then leave these two columns out. Batches of other
    episodes pass unchanged. Blocks by reference are fetched first, and take the places of the references.
    """

    def __init__(self, *spaces: Any, **options: Any) -> None:
        super().__init__(*spaces, **options)
        self._reader = BlockReader()

    def __call__(self, *, batch: dict[str, Any], episodes: list[Any], **rest: Any) -> dict[str, Any]:
        self._reader.read(episodes)
        if not all(isinstance(episode, FlaggedBlock) for episode in episodes):
            return batch
        for block in episodes:
            for column, flags in zip((Columns.TERMINATEDS, Columns.TRUNCATEDS), block.ends, strict=True):
                self.add_n_batch_items(
                    batch, column, items_to_add=flags, num_items=len(block), single_agent_episode=block
                )
        return batch


def flags_connector(observation_space: Any, action_space: Any) -> AddFlagsFromBlocks:
    """Builds the piece for ``AlgorithmConfig.learners(learner_connector=...)``; importable, for pickled configs."""
    return AddFlagsFromBlocks(observation_space, action_space)
