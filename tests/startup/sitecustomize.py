# SPDX-License-Identifier: Apache-2.0
"""Of every process that the tests start: garbage is collected less often, which takes a sixth off the imports.

RLlib's connectors look up their caller with ``inspect.stack()``, which by default also searches all modules for the
source lines of every frame: two fifths of what a test of RLlib takes. They are left out.
Those of Ray are forked from one that has imported what they need, where the tests have started it.
"""

import gc
import inspect
import os

gc.set_threshold(50_000, 10, 10)
inspect.stack.__defaults__ = (0,)  # lines of source
if "TESTS_RAY_WORKERS" in os.environ:
    import ray_workers

    ray_workers.hand_over()
