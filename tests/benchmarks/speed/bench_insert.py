# SPDX-License-Identifier: Apache-2.0
"""T5: inserting 1, 64 and 1000 rows with priorities into a full buffer of a million; what the checks of rows cost."""

from __future__ import annotations

import contenders
import torch
from peers import arguments, bursts, start_peers
from timing import Table, burst_of
from transitions import half_cheetah

from lightning_replay import recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.replay import Replay
from lightning_replay.storage.frames import FrameStorage

LIMITS = {1: 40, 1000: 60}  # microseconds, where there is one
COLUMNS_LIMIT = 10  # of one row with priorities, given as columns
CHECK_LIMIT = 1.05  # of the time without the check for NaN and infinity, at 64 rows, or without that of continuity


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    options = arguments(__doc__)
    table = Table("Inserting")
    peers = {} if options.no_peers else start_peers(table.missing, ("cpprb",))
    replays = {"uniform": contenders.uniform(options.rows, 256)}
    replays["prioritized"] = contenders.prioritized(options.rows, 256, "auto")
    replays["prioritized, torch tree"] = contenders.prioritized(options.rows, 256, "torch")
    theirs = {"torchrl uniform": contenders.torchrl_uniform(options.rows)}
    try:
        theirs["torchrl"] = contenders.torchrl_prioritized(options.rows)
    except Exception as error:  # whatever its missing extension raises
        table.missing["torchrl"] = f"its C++ extension does not load beside torch {torch.__version__}: {error}"[:200]
    for count in (1, 64, 1000):
        work = f"insert {count}"
        new = half_cheetah(count)
        contestants = {name: burst_of(lambda b=buffer: b.extend(new)) for name, buffer in replays.items()}  # noqa: B023
        contestants |= {name: burst_of(lambda b=buffer: b.extend(new)) for name, buffer in theirs.items()}  # noqa: B023
        columns = {key: value.numpy() for key, value in new.items(True, True)}
        contestants |= {
            f"{name}, columns": burst_of(lambda b=replays[name]: b.extend_columns(columns))  # noqa: B023
            for name in ("uniform", "prioritized")
        }
        contestants |= bursts(peers, table.missing, "insert prioritized", rows=options.rows, batch_size=count)
        table.measure(work, contestants, rounds=options.rounds)
        times = table.times[work]
        if count in LIMITS:
            table.at_most(f"T5 {work}: microseconds on this machine, now", times["prioritized"], LIMITS[count])
        if count == 1:
            table.at_most(f"{work} as columns: microseconds, now", times["prioritized, columns"], COLUMNS_LIMIT)
        table.faster("T5", work, "prioritized", "torchrl", 8)
        if "torchrl" not in times:
            # Its prioritized buffer costs more than its uniform one, so this ratio is a lower bound.
            table.faster("T5", work, "prioritized", "torchrl uniform", 8)
    _measure_the_check(table, replays["uniform"])
    _measure_continuity(table)
    for peer in peers.values():
        peer.close()
    table.finish(save=options.save, name="insert")


def _measure_the_check(table: Table, checked: Replay) -> None:
    """What looking for NaN and infinity adds to an insert of 64."""
    new = half_cheetah(64)
    replays = {"uniform": checked, "check_finite=False": contenders.uniform(checked.capacity, 256, check_finite=False)}
    work = "insert 64, in turns"
    table.measure_in_turns(work, {name: lambda replay=replay: replay.extend(new) for name, replay in replays.items()})
    times = table.times[work]
    table.at_most(f"{work}: check_finite", times["uniform"] / times["check_finite=False"], CHECK_LIMIT)


def _measure_continuity(table: Table) -> None:
    """What the comparison of each row with the one before adds, where something follows episodes."""
    goal = EventTable("goal", condition=reward_at_least(3.0), history_length=20, capacity=1_000)
    kinds = {
        "returns of 3 steps": lambda checks: recipes.uniform(20_000, n_steps=3, check_continuity=checks),
        "event tables": lambda checks: recipes.event_tables(20_000, tables=[goal], check_continuity=checks),
        "frames": lambda checks: Replay(
            storage=FrameStorage(2_000, 4, frame_capacity=4_000), n_steps=3, check_continuity=checks
        ),
    }
    for kind, build in kinds.items():
        for count in (1, 64, 1000):
            rows = half_cheetah(10 * count)
            if kind == "frames":
                frames = torch.randint(256, (10 * count + 4, 84, 84), dtype=torch.uint8)
                stacks = frames.unfold(0, 4, 1).movedim(-1, 1)
                rows = rows.exclude("observation", ("next", "observation")).set("pixels", stacks[:-1])
                rows["next", "pixels"] = stacks[1:]
            parts = list(rows.split(count))
            contestants = {}
            for name, checks in ((kind, True), ("check_continuity=False", False)):
                replay, place = build(checks), iter(range(10**9))
                contestants[name] = lambda replay=replay, place=place, parts=parts: replay.extend(
                    parts[next(place) % len(parts)]
                )
            work = f"{kind}, insert {count}, in turns"
            table.measure_in_turns(work, contestants)
            times = table.times[work]
            table.at_most(f"{work}: check_continuity", times[kind] / times["check_continuity=False"], CHECK_LIMIT)


if __name__ == "__main__":
    main()
