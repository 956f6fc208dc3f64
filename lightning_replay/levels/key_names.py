# SPDX-License-Identifier: Apache-2.0
"""Keys of a TensorDict, named in errors as a user writes them."""

from __future__ import annotations

from tensordict import TensorDictBase

__all__ = ["key_names"]


def key_names(data: TensorDictBase) -> str:
    """Those of all leaves, such as ``logits, ('next', 'done')``."""
    keys = sorted(data.keys(True, True), key=lambda key: (isinstance(key, tuple), str(key)))
    return ", ".join(map(str, keys))
