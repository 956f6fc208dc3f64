# SPDX-License-Identifier: Apache-2.0
"""The k nearest stored rows of any stored row: cached lists, kept up as rows arrive."""

from lightning_replay.neighbors.lists import NeighborLists, SameActionLists

__all__ = ["NeighborLists", "SameActionLists"]
