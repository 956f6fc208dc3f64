# SPDX-License-Identifier: Apache-2.0
"""T10: bytes per transition of stacks of 4 images, and drawing them, against a plain gather and TorchRL."""

from __future__ import annotations

import argparse
import itertools

import torch
from tensordict import TensorDict
from timing import Table, burst_of
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay import recipes
from lightning_replay.replay import Replay

STACK = 4
SIDE = 84
FRAME_BYTES = SIDE * SIDE
LIMIT_BYTES = 8_467  # 1.2 frames
EPISODE = 500


def steps(first: int, count: int) -> TensorDict:
    """One stretch of an episode that begins with step ``first``; every frame has its number in its first 8 bytes."""
    generator = torch.Generator().manual_seed(first)
    numbers = torch.arange(first, first + count + 1)
    frames = torch.randint(256, (1, SIDE, SIDE), dtype=torch.uint8, generator=generator).repeat(count + 1, 1, 1)
    frames.view(count + 1, -1).view(torch.int64)[:, 0] = numbers
    seen = torch.cat((frames[:1].expand(STACK - 1, -1, -1), frames))
    stacks = seen.unfold(0, STACK, 1).permute(0, 3, 1, 2)
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[-1] = True
    rows = {
        "pixels": stacks[:-1].contiguous(),
        "action": torch.arange(first, first + count) % 6,
        "next": {
            "pixels": stacks[1:].contiguous(),
            "reward": torch.randn(count, 1, generator=generator),
            "terminated": done,
            "truncated": torch.zeros_like(done),
            "done": done.clone(),
        },
    }
    return TensorDict(rows, [count])


def fill(buffer: TensorDictReplayBuffer, rows: int) -> None:
    """Extends by ``rows`` transitions of whole episodes, 50 steps a batch."""
    for first in range(0, rows, EPISODE):
        for part in steps(10 * first, EPISODE).split(50):
            buffer.extend(part)


class Stream:
    """Batches of steps that never come twice: each time around their frames get other numbers."""

    def __init__(self, count: int) -> None:
        self._parts = itertools.cycle(part.clone() for part in steps(10**9, EPISODE).split(count))

    def next(self) -> TensorDict:
        """The next batch."""
        part = next(self._parts)
        for stacks in (part["pixels"], part["next", "pixels"]):
            stacks.view(-1, FRAME_BYTES).view(torch.int64)[:, 0] += 10**6
        return part


def retention(rows: int, n_steps: int) -> Replay:
    """A buffer in which the row of the smallest squared reward leaves: what stays is scattered."""
    return recipes.surprise_retention(
        rows,
        32,
        initial_surprise=lambda new: new["next", "reward"].flatten() ** 2,
        priority_exponent=0,
        n_steps=n_steps,
        frame_stack=STACK,
        seed=0,
    )


def distinct_frames(replay: Replay) -> int:
    """Different frames in the stored rows, by what is in them."""
    seen: set[int] = set()
    for slots in torch.arange(len(replay)).split(500):
        rows = replay.storage.get(slots)
        for stacks in (rows["pixels"], rows["next", "pixels"]):
            seen.update(stacks.reshape(-1, FRAME_BYTES)[:, :8].contiguous().view(torch.int64).flatten().tolist())
    return len(seen)


def report_bytes(table: Table, rows: int) -> Replay:
    """Bytes and frames per transition of every kind; returns the ring."""
    ring = recipes.uniform(rows, 32, frame_stack=STACK, image_key="pixels", seed=0)
    fill(ring, rows + rows // 2)
    kinds = {"first in first out": ring}
    for n_steps in (1, 5):
        kinds[f"retention, {n_steps}-step"] = retention(rows, n_steps)
        fill(kinds[f"retention, {n_steps}-step"], 5 * rows)
    for name, replay in kinds.items():
        stats, held = replay.stats(), replay.storage.frames_held
        distinct = distinct_frames(replay)
        used = replay.storage.nbytes
        print(f"{name}: {stats['frames_per_transition']:.3f} frames and {used / len(replay):,.0f} bytes per transition")
        table.at_most(f"T10 {name}: frames held over distinct frames", held / distinct, 1.0)
        table.at_most(f"T10 {name}: bytes held over those of distinct frames", used / (distinct * FRAME_BYTES), 1.1)
    table.at_most("T10 first in first out: bytes per transition", ring.stats()["bytes_per_transition"], LIMIT_BYTES)
    return ring


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000, help="transitions stored; TorchRL takes 56 kB for each")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--save", action="store_true", help="write results/frames.json")
    options = parser.parse_args()
    table = Table("Stacks of images")
    rows = options.rows
    ring = report_bytes(table, rows)
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=32)
    fill(theirs, rows)
    transition = 2 * STACK * FRAME_BYTES
    arena = torch.zeros(
        ring.storage._images[0].pool.frames.numel() // transition, transition // 8, dtype=torch.int64
    ).random_()
    for batch_size in (32, 256):
        indices = itertools.cycle(torch.randint(len(arena), (1024, batch_size)).unbind())
        kept = arena.new_empty(batch_size, arena.shape[1])
        contenders = {
            "gather": lambda: arena.index_select(0, next(indices)),  # noqa: B023
            "gather into kept memory": lambda: torch.index_select(arena, 0, next(indices), out=kept),  # noqa: B023
            "ours": lambda: ring.sample(batch_size),  # noqa: B023
            "torchrl": lambda: theirs.sample(batch_size),  # noqa: B023
        }
        work = f"sample {batch_size}"
        table.measure_in_turns(work, contenders, rounds=options.rounds)
        times = table.times[work]
        for name in ("gather", "gather into kept memory"):
            table.at_most(f"T10 {work}: ours over a {name} of the same bytes", times["ours"] / times[name], 1.2)
        table.faster("T10", work, "ours", "torchrl", 8)
    for count in (1, 50):
        contestants = {}
        for name, buffer in (("ours", ring), ("torchrl", theirs)):
            new = Stream(count)
            contestants[name] = burst_of(lambda b=buffer, n=new: b.extend(n.next()))
        table.measure(f"insert {count}", contestants, rounds=options.rounds)
    table.finish(save=options.save, name="frames")


if __name__ == "__main__":
    main()
