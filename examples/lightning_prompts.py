# SPDX-License-Identifier: Apache-2.0
"""A transformer learns arithmetic by a group-relative policy gradient in Lightning; a level buffer chooses questions.

python examples/lightning_prompts.py [--fast]
"""

from __future__ import annotations

import argparse
import logging
import random

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_replay.levels import LevelBatchSampler, LevelBuffer, LevelSet, UniformLevels, scores

SYMBOLS = "0123456789+="
QUESTION, ANSWER = 6, 3  # symbols of "07+58=", and digits of an answer, the last one first: "560"


def questions(count: int, seed: int, held_out: int = 500) -> tuple[LevelSet, LevelSet]:
    """Different sums of two numbers below 100: to train on, and held out."""
    pairs = [divmod(pair, 100) for pair in random.Random(seed).sample(range(10_000), count + held_out)]
    asked = [{"question": f"{a:02}+{b:02}=", "answer": a + b} for a, b in pairs]
    return LevelSet(asked[:count]), LevelSet(asked[count:])


def encode(batch: list[dict]) -> dict[str, Tensor]:
    ids, symbols = [item["level_id"] for item in batch], [list(map(SYMBOLS.index, item["question"])) for item in batch]
    digits = [[item["answer"] // 10**place % 10 for place in range(ANSWER)] for item in batch]
    return {"level_id": torch.tensor(ids), "question": torch.tensor(symbols), "answer": torch.tensor(digits)}


class Adder(L.LightningModule):
    """A transformer, learned by GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300) with one update a batch."""

    def __init__(self, levels, learning_rate: float = 1e-3, group_size: int = 8, width: int = 48):
        super().__init__()
        self.levels, self.learning_rate, self.group_size = levels, learning_rate, group_size
        self.symbols, self.places = nn.Embedding(len(SYMBOLS), width), nn.Embedding(QUESTION + ANSWER, width)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, **options)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.learning_rate)

    def forward(self, text: Tensor) -> Tensor:  # logits of the digits that follow the question
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        inputs = self.symbols(text) + self.places.weight[: text.shape[1]]
        return self.head(self.blocks(inputs, mask=mask, is_causal=True)[:, QUESTION - 1 :])

    @torch.no_grad()
    def write(self, question: Tensor, greedy: bool = False) -> Tensor:
        text = question
        for _ in range(ANSWER):
            logits = self(text)[:, -1]
            digit = logits.argmax(-1, keepdim=True) if greedy else torch.multinomial(logits.softmax(-1), 1)
            text = torch.cat([text, digit], 1)
        return text[:, QUESTION:]

    def log_probability(self, question: Tensor, answer: Tensor) -> Tensor:
        logits = self(torch.cat([question, answer[:, :-1]], 1))
        return logits.log_softmax(-1).gather(-1, answer[..., None]).sum((1, 2))

    def success(self, items: dict[str, Tensor]) -> float:
        return float((self.write(items["question"], greedy=True) == items["answer"]).all(1).float().mean())

    def imitate(self, items: dict[str, Tensor], judged: dict[str, Tensor], share: float) -> None:
        """Learns from right answers until a share of other questions is answered: without any there is no reward."""
        optimizer = torch.optim.Adam(self.parameters(), 2e-3)
        while self.success(judged) < share:
            for chosen in torch.randint(len(items["answer"]), (10, 256)):
                loss = -self.log_probability(items["question"][chosen], items["answer"][chosen]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        question, answer = (batch[key].repeat_interleave(self.group_size, 0) for key in ("question", "answer"))
        written = self.write(question)
        outcome = (written == answer).all(1).float().view(-1, self.group_size)
        self.levels.record(batch["level_id"], outcomes=outcome)
        advantage = (outcome - outcome.mean(1, keepdim=True)) / (outcome.std(1, keepdim=True) + 1e-4)
        return -(advantage.flatten() * self.log_probability(question, written)).mean()


def train(model: Adder, prompts: LevelSet, updates: int, batch_size: int = 64, callbacks=()) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader = DataLoader(prompts, batch_sampler=LevelBatchSampler(model.levels, batch_size, updates), collate_fn=encode)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    L.Trainer(max_epochs=1, accelerator="cpu", callbacks=list(callbacks), **quiet).fit(model, loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a few updates only")
    updates, share = (3, 0.0) if parser.parse_args().fast else (200, 0.1)
    prompts, held_out = questions(1_000, seed=0)
    asked, others = encode(list(prompts)), encode(list(held_out))
    kinds = {"uniform": UniformLevels(prompts, seed=0)}
    for weight in (0.0, 0.3):
        options = {"score": scores.Learnability(window=16), "staleness_weight": weight, "replay_probability": 0.8}
        kinds[f"learnability, staleness weight {weight:g}"] = LevelBuffer(prompts, **options, seed=0)
    for name, levels in kinds.items():
        L.seed_everything(0, verbose=False)
        model = Adder(levels)
        model.imitate(asked, others, share)
        before = model.success(others)
        train(model, prompts, updates)
        print(f"{name}: {before:.1%} of other questions answered, after {updates} updates {model.success(others):.1%}")


if __name__ == "__main__":
    main()
