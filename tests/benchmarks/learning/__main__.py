# SPDX-License-Identifier: Apache-2.0
"""Runs experiments on learning: what is kept of earlier commands is not computed again.

    python -m tests.benchmarks.learning                                   # all of them
    python -m tests.benchmarks.learning --only locks rooms --processes 2  # two of them, in two processes
    python -m tests.benchmarks.learning --only nmer --budget-minutes 50   # all of nmer-…; later commands go on
    python -m tests.benchmarks.learning --only nmer-short --fast          # does it run?
    python -m tests.benchmarks.learning --redraw                          # pages and pictures from results/*.json

Results of a complete experiment are written to ``tests/benchmarks/results``, others are printed only. A unit is an arm
with some of its seeds; units are kept in ``.experiments``, and several commands may run side by side, each takes units
that no other has. ``experiment.py`` describes how to add an experiment.
"""

import argparse
import os
import signal
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread, and equal sums on every machine

from tests.benchmarks.learning.command import parser_of
from tests.benchmarks.learning.runner import main
from tests.benchmarks.learning.units import UsageError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "python -m tests.benchmarks.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the processes it started as well
    options = parser_of(parser).parse_args()
    try:
        status = main(options)
    except UsageError as error:
        parser.error(str(error))
    sys.exit(status)
