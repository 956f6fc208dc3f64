# SPDX-License-Identifier: Apache-2.0
"""Waits for the CPUs of actors that have ended, which Ray reports as free a moment later."""

from __future__ import annotations

import time

SECONDS = 10.0


def become_free(num_cpus: int) -> bool:
    """Returns whether so many CPUs, all of the cluster, are free within ten seconds."""
    import ray

    deadline = time.monotonic() + SECONDS
    while ray.available_resources().get("CPU", 0) != num_cpus:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
