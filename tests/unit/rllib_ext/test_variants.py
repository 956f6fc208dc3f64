# SPDX-License-Identifier: Apache-2.0
"""Samplers by class path and by option, as a config of RLlib names them."""

from __future__ import annotations

from typing import Any

import pytest

import rllib_ext
from rllib_ext.checks import trial_buffer

SAMPLERS = "lightning_replay.samplers."


@pytest.mark.parametrize(
    ("options", "described"),
    [
        ({"recipe": "prioritized", "min_priority": 1.0}, "PrioritizedSampler(capacity=100"),
        ({"sampler": f"{SAMPLERS}ReshuffledSampler"}, "ReshuffledSampler("),
        ({"sampler": f"{SAMPLERS}PrioritizedSampler"}, "PrioritizedSampler(capacity=100"),
        ({"sampler": f"{SAMPLERS}RandomPairSampler"}, "RandomPairSampler(base_sampler=UniformSampler("),
        (
            {
                "sampler": {
                    "class_path": f"{SAMPLERS}RandomPairSampler",
                    "init_args": {"base_sampler": {"class_path": f"{SAMPLERS}PrioritizedSampler"}},
                }
            },
            "RandomPairSampler(base_sampler=PrioritizedSampler(capacity=100",
        ),
    ],
)
def test_a_variant_is_built_from_a_config(options: dict[str, Any], described: str) -> None:
    config = rllib_ext.replay_config(capacity=100, **options)
    buffer = trial_buffer(**{name: value for name, value in config.items() if name != "type"})
    assert repr(buffer.options.build("one").replay.sampler).startswith(described)
