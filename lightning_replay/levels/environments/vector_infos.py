# SPDX-License-Identifier: Apache-2.0
"""Infos of Gymnasium's vector environments: restricted to some sub-environments, and merged."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["everywhere", "of_rows", "overlaid"]


def of_rows(infos: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Restricts infos to some sub-environments, by their masks ``_key``.

    Args:
        infos: of a vector environment; a key without a mask is of all sub-environments.
        rows: bool ``[num_envs]``, the sub-environments to keep.
    """
    kept: dict[str, Any] = {}
    for key, value in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        mask = rows & infos.get(f"_{key}", True)
        if mask.any():
            kept[key] = of_rows(value, rows) if isinstance(value, dict) else value
            kept[f"_{key}"] = mask
    return kept


def overlaid(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merges two infos; ``above`` takes precedence where both have a sub-environment. Neither is changed."""
    merged = dict(below)
    for key, value in above.items():
        if key.startswith("_") and key[1:] in above:
            continue
        mask = above.get(f"_{key}")
        if mask is None or key not in below or not isinstance(value, dict | np.ndarray):
            merged[key] = value
        elif isinstance(value, dict):
            merged[key] = overlaid(below[key], value)
        else:
            merged[key] = below[key].astype(np.result_type(below[key], value))
            merged[key][mask] = value[mask]
        if mask is not None:
            merged[f"_{key}"] = mask | below.get(f"_{key}", False)
    return merged


def everywhere(**values: np.ndarray) -> dict[str, np.ndarray]:
    """Builds entries of vector infos with a mask of all sub-environments."""
    return values | {f"_{key}": np.ones(len(value), np.bool_) for key, value in values.items()}
