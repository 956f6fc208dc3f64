# SPDX-License-Identifier: Apache-2.0
"""Of every process that the tests start: garbage is collected less often, which takes a sixth off the imports.

Those of Ray are forked from one that has imported what they need.
"""

import gc
import inspect
import os
import sys

import frames

gc.set_threshold(50_000, 10, 10)
inspect.stack = frames.stack
if "TESTS_RAY_WORKERS" in os.environ and any(word.endswith("default_worker.py") for word in sys.orig_argv):
    import ray_workers

    ray_workers.hand_over()
