# SPDX-License-Identifier: Apache-2.0
"""Environments whose steps are numbered, and what rows of a buffer must be by the numbers they carry."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

REWARDS = 8  # rewards are small whole numbers: sums with powers of a half are exact
IMAGE = (2, 4)


@dataclass
class Step:
    """One step, and the numbers of those before and after it in its episode, as soon as they were taken."""

    trajectory: int
    task: int
    frames: tuple[int, int, int]
    terminated: bool
    truncated: bool
    before: int | None = None
    following: int | None = None

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class World:
    """Environments side by side, stepped in any order; step number n has n in all of its columns.

    The task of environment i is ``i % tasks``; 0 is for no column ``task``.
    """

    def __init__(
        self, seed: int, *, tasks: int = 0, has_frames: bool = False, has_wrist: bool = False, environments: int = 3
    ) -> None:
        self.steps: list[Step] = []
        self.tasks, self.has_frames, self.has_wrist = tasks, has_frames, has_wrist
        self._random = random.Random(seed)
        self._newest: list[int | None] = [None] * environments
        self._trajectories = self._frames = 0

    def reward(self, number: int) -> float:
        return float(number * 5 % REWARDS)

    def take(self, count: int) -> TensorDict:
        """The next ``count`` steps."""
        for _ in range(count):
            self._take_one(self._random.randrange(len(self._newest)))
        return self.rows(range(len(self.steps) - count, len(self.steps)))

    def _take_one(self, environment: int) -> None:
        before = self._newest[environment]
        if before is None:
            self._trajectories += 1
            trajectory, seen = self._trajectories, (self._new_frame(), self._new_frame())
        else:
            step = self.steps[before]
            step.following = len(self.steps)
            trajectory, seen = step.trajectory, step.frames[1:]
        ends = self._random.random()
        step = Step(
            trajectory,
            environment % max(self.tasks, 1),
            (*seen, self._new_frame()),
            terminated=ends < 0.08,
            truncated=0.08 <= ends < 0.12,
            before=before,
        )
        self._newest[environment] = None if step.done else len(self.steps)
        self.steps.append(step)

    def _new_frame(self) -> int:
        self._frames += 1
        return self._frames

    def restart(self) -> None:
        """Begins new episodes everywhere."""
        self._newest = [None] * len(self._newest)

    def rows(self, numbers: Iterable[int]) -> TensorDict:
        """The steps of these numbers as rows to be stored."""
        numbers = list(numbers)
        steps = [self.steps[number] for number in numbers]
        number = torch.tensor(numbers).unsqueeze(1)
        # What the step before ended with; an episode begins with a number of its own.
        seen = torch.tensor(
            [one - 0.25 if step.before is None else step.before for one, step in zip(numbers, steps, strict=True)]
        )
        terminated = torch.tensor([[step.terminated] for step in steps])
        truncated = torch.tensor([[step.truncated] for step in steps])
        following = {
            "observation": number + torch.tensor([0.5, 1.5, 2.5]),
            "last_number": number.clone(),
            "reward": torch.tensor([[self.reward(one)] for one in numbers]),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        }
        columns = {
            "observation": seen.unsqueeze(1) + torch.tensor([0.5, 1.5, 2.5]),
            "action": number.float() / 4096,
            "number": number,
            "trajectory": torch.tensor([step.trajectory for step in steps]),
            "next": following,
        }
        if self.tasks:
            columns["task"] = torch.tensor([step.task for step in steps])
        if self.has_frames:
            del columns["observation"], following["observation"]
            columns["pixels"] = torch.stack([_images(step.frames[:2]) for step in steps])
            following["pixels"] = torch.stack([_images(step.frames[1:]) for step in steps])
        if self.has_wrist:  # which shows a part of it, upside down
            for branch in (columns, following):
                branch["arm"] = {"wrist": branch["pixels"][:, :, 1:].flip(-1)}
        return TensorDict(columns, [len(numbers)])

    def chain(self, number: int, n_steps: int) -> list[int]:
        """The numbers of the steps that a return over ``n_steps`` from ``number`` on may sum, as far as taken."""
        chain = [number]
        while len(chain) < n_steps and not self.steps[chain[-1]].done:
            following = self.steps[chain[-1]].following
            if following is None:
                break
            chain.append(following)
        return chain

    def check(self, rows: TensorDict, discount: float = 1.0, *, mixed: bool = False) -> list[int]:
        """Asserts that rows, of one step or several each, are exactly what these steps were; returns their numbers.

        Mixed observations, actions and rewards are what a transform made of them.
        """
        firsts, lasts = rows["number"].flatten().tolist(), rows["next", "last_number"].flatten().tolist()
        assert not [one for one in firsts if not 0 <= one < len(self.steps)], f"rows of steps never taken: {firsts}"
        counts = rows["steps_to_next_obs"].flatten().tolist() if "steps_to_next_obs" in rows else [1] * len(rows)
        chains = [self.chain(first, count) for first, count in zip(firsts, counts, strict=True)]
        wrong = [row for row in zip(chains, lasts, counts, strict=True) if (row[0][-1], len(row[0])) != row[1:]]
        assert not wrong, f"returns that are none, as steps of the episode, last step stored, their number: {wrong}"
        expected = self.rows(firsts)
        expected["next"] = self.rows(lasts)["next"]
        sums = [sum(discount**place * self.reward(one) for place, one in enumerate(chain)) for chain in chains]
        expected["next", "reward"] = torch.tensor(sums).unsqueeze(1)
        if "discount" in rows:
            ends = zip(lasts, counts, strict=True)
            left = [0.0 if self.steps[last].terminated else discount**count for last, count in ends]
            expected["discount"] = torch.tensor(left).unsqueeze(1)
        for key, value in expected.items(True, True):
            name = key if isinstance(key, str) else key[-1]
            if mixed and name in ("observation", "action", "reward"):
                continue
            same = (rows[key] == value).flatten(1).all(1) if value.ndim > 1 else rows[key] == value
            assert same.all(), f"{key} of the rows of {chains[int((~same).nonzero()[0])]} is not that of these steps"
        return firsts


def _images(frames: Iterable[int]) -> Tensor:
    """A stack, uint8 ``[2, 2, 4]``, of frames that have their number in their bytes."""
    return torch.stack(
        [torch.tensor([frame % 256, frame // 256 % 256, 7, 255 - frame % 256] * 2).view(IMAGE) for frame in frames]
    ).to(torch.uint8)
