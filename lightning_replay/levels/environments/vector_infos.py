# SPDX-License-Identifier: Apache-2.0
"""Infos of Gymnasium's vector environments, cut by sub-environment and laid over each other."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["everywhere", "of_rows", "overlaid"]


def of_rows(infos: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """What the infos say of some sub-environments: each mask ``_key`` restricted to them.

    Args:
        infos: as a vector environment returns them; a key without its mask holds for all.
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
    """Both infos as one; of a sub-environment that both speak of, ``above`` counts. Neither is changed."""
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
    """Entries of vector infos that hold for every sub-environment."""
    return values | {f"_{key}": np.ones(len(value), np.bool_) for key, value in values.items()}
