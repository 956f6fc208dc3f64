# SPDX-License-Identifier: Apache-2.0
"""Observations stored once: bytes, draws of 256 and inserts, beside the same recipe that stores them twice.

TorchRL's compact rows, whose next observations are reconstructed, stand beside both: bytes, and the share of next
observations that are NaN in uniform draws of 256.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from peers import arguments
from tensordict import TensorDict
from timing import Table
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs.transforms import NextStateReconstructor

from lightning_replay import Replay, recipes

SIZES = (17, 98, 348)  # numbers of an observation
ACTIONS = 6
EPISODE = 1000


def steps(count: int, size: int) -> TensorDict:
    """Steps of one environment, float32, in episodes of 1,000 that end with an observation that begins no other."""
    states = torch.randn(count + 1, size)
    after = states[1:].clone()
    done = (torch.arange(count) % EPISODE == EPISODE - 1).unsqueeze(1)
    after[done.squeeze(1)] = torch.randn(int(done.sum()), size)
    following = {"observation": after, "reward": torch.randn(count, 1), "done": done, "terminated": done}
    return TensorDict(
        {
            "observation": states[:-1],
            "action": torch.randn(count, ACTIONS),
            "trajectory": torch.arange(count) // EPISODE,
            "next": following | {"truncated": torch.zeros_like(done)},
        },
        [count],
    )


def reconstructed(rows: TensorDict) -> tuple[float, float]:
    """Returns bytes per row and the share of NaN of TorchRL's buffer, which stores no next observations."""
    compact = rows.exclude("trajectory", ("next", "observation"))
    compact["collector", "traj_ids"] = rows["trajectory"]
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(len(rows)), batch_size=256)
    buffer.append_transform(NextStateReconstructor())
    buffer.extend(compact)
    shares = [buffer.sample()["next", "observation"].isnan().any(-1).float().mean() for _ in range(20)]
    return compact.bytes() / len(rows), float(torch.stack(shares).mean())


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    options = arguments(__doc__)
    rows = min(options.rows, 50_000)
    table = Table("Observations stored once")
    for size in SIZES:
        data = steps(rows, size)
        replays = {
            kind: recipes.uniform(capacity=rows, batch_size=256, seed=0, observations=kind)
            for kind in ("twice", "once")
        }
        for replay in replays.values():
            for start in range(0, rows, 64):
                replay.extend(data[start : start + 64])
        twice, once = (replay.nbytes / rows for replay in replays.values())
        peer, missing = reconstructed(data)
        print(
            f"{size} numbers: {twice:.0f} bytes a row, once {once:.0f}; TorchRL {peer:.0f}, {missing:.1%} of them NaN"
        )

        def writer(replay: Replay, count: int) -> Callable[[], object]:
            parts = itertools.cycle(data[start : start + count] for start in range(0, 4096, count))  # noqa: B023
            return lambda: replay.extend(next(parts))

        works = {f"draw 256, {size} numbers": {kind: replay.sample for kind, replay in replays.items()}}
        for count in (1, 64):
            works[f"insert {count}, {size} numbers"] = {kind: writer(replay, count) for kind, replay in replays.items()}
        for work, contenders in works.items():
            table.measure_in_turns(work, contenders, rounds=options.rounds)
        if size < 98:
            continue
        table.at_most(f"bytes, {size} numbers: once over twice", once / twice, 0.55)
        for work, limit in zip(works, (1.3, 1.5, 1.5), strict=True):
            times = table.times[work]
            table.at_most(f"{work}: once over twice", times["once"] / times["twice"], limit)
    table.finish(save=options.save, name="observations_once")


if __name__ == "__main__":
    main()
