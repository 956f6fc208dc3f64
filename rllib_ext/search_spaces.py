# SPDX-License-Identifier: Apache-2.0
"""Search spaces of Ray Tune in an algorithm's config, and samples of them by which the config is checked.

A config with ``tune.loguniform(...)`` or ``tune.grid_search([...])`` has no values yet. The checks run on a few
samples, drawn as Tune draws them; each trial checks its own values when it is built.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.tune.search.variant_generator import RecursiveDependencyError, generate_variants, parse_spec_vars

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")
_SAMPLES = 8


def has_search_space(values: Mapping[str, Any]) -> bool:
    """Returns whether a value, or an entry of one, is a search space of Tune.

    Example:
        >>> from ray import tune
        >>> has_search_space({"lr": [1e-3, {"grid_search": [1, 2]}]}), has_search_space({"lr": 1e-3})
        (True, False)
    """
    _, sampled, grids = parse_spec_vars(dict(values))
    return bool(sampled or grids)


def samples_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns up to eight samples of values by name, the same in every process; the values if nothing is searched.

    Raises:
        ValueError: a function given to ``tune.sample_from`` raised an exception.
    """
    _, sampled, grids = parse_spec_vars(dict(values))
    if not sampled and not grids:
        return [dict(values)]
    generator = np.random.default_rng(0)
    # Without anything to draw, one pass has the whole grid.
    passes = (
        generate_variants({"config": dict(values)}, random_state=generator) for _ in range(_SAMPLES if sampled else 1)
    )
    try:
        variants = itertools.islice(itertools.chain.from_iterable(passes), _SAMPLES)
        return [spec["config"] for _, spec in variants]
    except RecursiveDependencyError as error:
        raise ValueError(str(error)) from error


def sampled_configs(config: AlgorithmConfig) -> list[AlgorithmConfig]:
    """Returns samples of a config as Tune's trials get them; the config itself if nothing is searched."""
    if not has_search_space(vars(config)):
        return [config]
    try:
        samples = samples_of(config.to_dict())
    except ValueError as error:
        raise ValueError(
            f"the search spaces of the config cannot be sampled: {error}. Functions of tune.sample_from read the "
            "config as spec.config, such as lambda spec: spec.config.lr / 10"
        ) from error
    return [config.algo_class.get_default_config().update_from_dict(sample) for sample in samples]


def accepted(samples: list[T], check: Callable[[T], object]) -> list[T]:
    """Returns the samples for which a check raises nothing, and warns of the others; raises if there are none."""
    passed, refusals = [], []
    for sample in samples:
        try:
            check(sample)
            passed.append(sample)
        except Exception as error:
            refusals.append(error)
    if not passed:
        raise refusals[0]
    if refusals:
        logger.warning(
            "%d of %d samples of the search space are refused, and such trials will fail: %s",
            len(refusals),
            len(samples),
            refusals[0],
        )
    return passed
