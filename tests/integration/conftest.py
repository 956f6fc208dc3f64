# SPDX-License-Identifier: Apache-2.0
"""One Ray for all files whose tests ask nothing special of it: each start takes seconds."""

from __future__ import annotations

import time

import pytest

NUM_CPUS = 8
SECONDS_TO_FREE = 10.0


@pytest.fixture(scope="module")
def shared_ray() -> None:
    """A Ray of 8 CPUs, all of them free. It stays for the next file; files with a Ray of their own shut it down."""
    import ray

    if ray.is_initialized() and not _becomes_free():  # a test that failed has left its actors
        ray.shutdown()
    if not ray.is_initialized():
        ray.init(num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False)


def _becomes_free() -> bool:
    import ray

    deadline = time.monotonic() + SECONDS_TO_FREE
    while ray.available_resources().get("CPU", 0) != NUM_CPUS:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
