# SPDX-License-Identifier: Apache-2.0
"""Tables of a page by hand, and what a recorder writes at checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.benchmarks.learning.experiment import Experiment, final
from tests.benchmarks.learning.page import Results
from tests.benchmarks.learning.recorder import Recorder

EXPERIMENT = Experiment(
    name="two-arms",
    title="title",
    claim="",
    task="",
    length="{steps} steps",
    arms={"one": {}, "two": {}},
    settings={"steps": 3},
    seeds=range(2),
    pilot_seeds=(),
    measure=final("score", "score", digits=1),
    also=(final("time", "time", digits=0),),
    run=lambda settings, seeds, out: None,
)


def unit(arm: str, seeds: list[int], seconds: float, **numbers: list[float]) -> dict[str, Any]:
    kept = {"steps": [], "curves": {}, "final": numbers}
    return {"arm": arm, "seeds": seeds, "seconds": seconds, "commit": "abc", **kept}


def test_tables_have_the_seeds_that_count_and_their_pairs() -> None:
    units = [
        unit("one", [0, 1], 30.0, score=[1.0, 3.0], time=[10.0, 20.0]),
        unit("one", [2], 30.0, score=[99.0], time=[99.0]),  # a seed that no longer counts
        unit("two", [0], 200.0, score=[2.0], time=[40.0]),
        unit("two", [1], 100.0, score=[7.0], time=[40.0]),
    ]
    page = Results(EXPERIMENT, units, [0, 1]).page({"command": "", "versions": {}})
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    # of two seeds an interval is Student's of one degree: 12.706 times half of the difference, on each side
    assert rows[1:3] == [
        "| one | 2 | 2.0 [-10.7, 14.7] | 2.0 | 2.0 | 15 [-49, 79] | 20.0 |",
        "| two | 2 | 4.5 [-27.3, 36.3] | 4.5 | 4.5 | 40 [40, 40] | 150 |",
    ]
    # 2 is above 1, 7 above 1 and 3: three of four pairs
    assert rows[-1] == "| two with one | +2.5 [-16.6, +21.6] | +25 [-39, +89] | 0.75 [0.00, 1.00] | 2 of 2 |"
    assert "no verdict from so few seeds" in page


def test_a_checkpoint_is_written_when_the_last_one_is_old(tmp_path: Path) -> None:
    out, saves = Recorder((0,), tmp_path, checkpoint_seconds=60.0), []
    out.checkpoint(saves.append)
    assert not saves
    out._saved_at -= 61.0
    out.checkpoint(saves.append)
    out.checkpoint(saves.append)
    assert len(saves) == 1


def test_cpu_seconds_of_earlier_processes_are_added(tmp_path: Path) -> None:
    out = Recorder((0,), tmp_path, checkpoint_seconds=0.0)
    out.checkpoint(lambda folder: None)
    path = tmp_path / "000000" / "recorded.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 100.0}))
    assert 100.0 < Recorder((0,), tmp_path).content["seconds"] < 200.0
