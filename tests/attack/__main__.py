# SPDX-License-Identifier: Apache-2.0
"""Every attack in its long form, in two processes; prints figures and findings, and exits with 1 if there are any.

.. code-block:: shell

    python -m tests.attack                          # all of them: about an hour on two cores
    python -m tests.attack kills damages --share 0.1
    python -m tests.attack endurance --rows 1e8     # a day of training through every kind of buffer
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.attack.plan import ROWS, planned, run
from tests.attack.report import Report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack")
    parser.add_argument("attacks", nargs="*", help="names; all without any")
    parser.add_argument("--share", type=float, default=1.0, help="of the long form's counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=float, help=f"of each kind in endurance ({ROWS:g} times the share)")
    options = parser.parse_args()
    plan = planned(options.share, options.seed, options.rows or ROWS * options.share)
    if unknown := set(options.attacks) - set(plan):
        parser.error(f"no attack is named {', '.join(sorted(unknown))}; there are {', '.join(plan)}")

    reports: defaultdict[str, Report] = defaultdict(Report)
    seconds: defaultdict[str, float] = defaultdict(float)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as pool:
        tasks = [(name, task) for name in options.attacks or plan for task in plan[name]]
        for done in as_completed([pool.submit(run, *one) for one in tasks]):
            name, report, took = done.result()
            reports[name].add(report)
            seconds[name] += took
            print(f"{name} ({took:.0f} s): {report}", flush=True)
    print("\nIn all, with seed", options.seed)
    for name, report in reports.items():
        print(f"{name} ({seconds[name] / 60:.0f} min): {report}")
    return int(any(report.findings for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main())
