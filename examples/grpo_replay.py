# SPDX-License-Identifier: Apache-2.0
"""GRPO on sums in plain torch: groups without a gradient stay, are drawn again, or are refilled from a replay.

python examples/grpo_replay.py [--fast] [--filling plain "drawn again" refilled]
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import lightning as L
import torch
from lightning_prompts import Adder, encode, questions
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_replay import Age, recipes
from lightning_replay.levels import LevelBatchSampler, LevelSelector, LevelSet, UniformLevels

GROUP_SIZE = 8


class Prompts(L.LightningDataModule):
    """Batches of questions that ``levels`` chooses, for a Trainer or for your own loop."""

    def __init__(self, prompts: LevelSet, levels: LevelSelector, batch_size: int = 64):
        super().__init__()
        self.loader = DataLoader(prompts, batch_sampler=LevelBatchSampler(levels, batch_size), collate_fn=encode)

    def train_dataloader(self) -> DataLoader:
        return self.loader


@dataclass
class Generator:
    """Generates groups of answers of the newest policy, and counts them."""

    model: Adder
    batches: Iterator[dict[str, Tensor]]
    groups: int = 0
    version: int = 0

    @torch.no_grad()
    def __call__(self) -> TensorDict:
        """Answers each question of the next batch eight times, rows ``[G * 8]``, group after group."""
        batch = next(self.batches)
        question, answer = (batch[key].repeat_interleave(GROUP_SIZE, 0) for key in ("question", "answer"))
        written = self.model.write(question)
        reward = (written == answer).all(1).float().view(-1, GROUP_SIZE)
        self.model.levels.record(batch["level_id"], outcomes=reward)
        self.groups += len(reward)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        rows = TensorDict({"question": question, "written": written, "advantage": advantage.flatten()}, [len(question)])
        rows["log_prob"] = self.model.log_probability(question, written)
        rows["version"] = torch.full((len(question),), self.version)
        return rows


def has_gradient(rows: TensorDict) -> Tensor:
    """Returns which groups have right and wrong answers, bool ``[G]``; the advantages of others are 0."""
    return rows["advantage"].view(-1, GROUP_SIZE).abs().amax(1) > 0


def informative_first(rows: TensorDict, num_groups: int) -> TensorDict:
    """Returns ``num_groups`` groups: those with a gradient in their order, and then the others."""
    order = has_gradient(rows).sort(descending=True, stable=True).indices
    return rows.view(-1, GROUP_SIZE)[order[:num_groups]].reshape(-1)


def drawn_again(generate: Generator, most_draws: int = 8) -> TensorDict:
    """Generates until the batch is full of groups with a gradient (DAPO, https://arxiv.org/abs/2503.14476)."""
    parts = [generate()]
    num_groups = len(parts[0]) // GROUP_SIZE
    while has_gradient(torch.cat(parts)).sum() < num_groups and len(parts) < most_draws:
        parts.append(generate())
    return informative_first(torch.cat(parts), num_groups)


class Refilled:
    """Replaces groups without a gradient by groups of the last ``max_age`` policies, as far as the replay has any."""

    def __init__(self, max_age: int = 8, capacity: int = 8_192, seed: int = 0):
        self.held: deque[int] = deque(maxlen=max_age)  # the number of groups with a gradient, by version
        priorities = {"priority_exponent": 1.0, "priority_offset": 0.0, "importance_exponent": 0.0}
        age = Age(max_age=max_age - 1, version_key="version")  # The newest stored version is 1 behind.
        self.replay = recipes.groups(capacity, group_size=GROUP_SIZE, replace=False, age=age, seed=seed, **priorities)

    def __call__(self, generate: Generator) -> TensorDict:
        fresh = generate()
        informative = has_gradient(fresh)
        parts = [fresh]
        if count := min(int((~informative).sum()), sum(self.held)):
            parts.append(self.replay.sample(count * GROUP_SIZE).select(*fresh.keys()))
        self.held.append(int(informative.sum()))
        # Groups without a gradient have the priority 0, and are never drawn.
        self.replay.extend(fresh.copy().set("td_error", fresh["advantage"]))
        return informative_first(torch.cat(parts), len(informative))


def learn(generate: Generator, fill: Callable, learning_rate: float, updates: int = 1) -> Iterator[TensorDict]:
    """Learns without an end, and yields each batch after its ``updates``."""
    optimizer = torch.optim.Adam(generate.model.parameters(), learning_rate)
    while True:
        batch = fill(generate)
        for _ in range(updates):
            log_prob = generate.model.log_probability(batch["question"], batch["written"])
            ratio = torch.exp(log_prob - batch["log_prob"])  # corrects for the policy that wrote the answer
            gain = torch.min(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"])
            optimizer.zero_grad()
            (-gain.mean()).backward()
            optimizer.step()
        generate.version += 1
        yield batch


def main() -> None:
    fillings = {"plain": Generator.__call__, "drawn again": drawn_again, "refilled": Refilled()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a few updates only")
    parser.add_argument("--filling", nargs="+", choices=list(fillings), default=list(fillings))
    options = parser.parse_args()
    budget, share = (512, 0.0) if options.fast else (6_400, 0.1)
    prompts, held_out = questions(1_000, seed=0)
    asked, others = encode(list(prompts)), encode(list(held_out))
    for name in options.filling:
        torch.manual_seed(0)
        levels = UniformLevels(prompts, seed=0)
        model = Adder(levels)
        model.imitate(asked, others, share)
        generate = Generator(model, iter(Prompts(prompts, levels).train_dataloader()))
        print(f"{name}: {model.success(others):.1%} of other questions answered")
        loop = learn(generate, fillings[name], learning_rate=1e-3)
        while generate.groups < budget:
            batch = next(loop)
        print(f"  {model.success(others):.1%} after {generate.groups:,} groups and {generate.version} updates")
        print(f"  {has_gradient(batch).float().mean():.0%} of the groups in the last batch have a gradient")


if __name__ == "__main__":
    main()
