# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer takes its prompts from a level buffer, on a model that is built from a config, without a download.

python examples/trl_prompts.py [--fast] [--updates 300]

It needs TRL, which no extra of this package installs: pip install trl==1.16.0 transformers==5.24.0 accelerate datasets
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils.data import Sampler

from lightning_replay.levels import LevelBatchSampler, LevelBuffer, LevelSet, UniformLevels, scores

try:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f"this example needs TRL ({error}): pip install trl==1.16.0 transformers==5.24.0 accelerate datasets")

GROUP_SIZE, PROMPTS_PER_BATCH = 8, 8


class LevelGroups(Sampler[int]):
    """Each level of a batch as often as it is answered, and the batch as often as its answers are learned from."""

    def __init__(self, batches: LevelBatchSampler, group_size: int, repeats: int) -> None:
        self.batches, self.group_size, self.repeats = batches, group_size, repeats

    def __len__(self) -> int:
        return len(self.batches) * self.batches.batch_size * self.group_size * self.repeats

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches:
            for _ in range(self.repeats):
                for level_id in batch:
                    yield from [level_id] * self.group_size


class LevelGRPOTrainer(GRPOTrainer):
    """GRPOTrainer in whose train sampler levels stand instead of a shuffled data set."""

    def __init__(self, levels, **options) -> None:
        self.levels = levels
        super().__init__(**options)

    def _get_train_sampler(self, dataset=None) -> Sampler[int]:
        # as TRL's RepeatSampler: groups side by side, and a batch for each of its steps, which reuse its answers
        prompts = self.args.generation_batch_size // self.num_generations
        repeats = self.num_iterations * self.args.steps_per_generation
        batches = LevelBatchSampler(self.levels, prompts, -(-self.args.max_steps // repeats) + 1)
        return LevelGroups(batches, self.num_generations, repeats)


def small_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    symbols = ["<pad>", "<end>", *"0123456789+="]
    tokenizer = Tokenizer(models.WordLevel({symbol: number for number, symbol in enumerate(symbols)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(symbols), max_position_embeddings=32, pad_token_id=0, eos_token_id=1, **size)
    return LlamaForCausalLM(config), words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a few updates only")
    parser.add_argument("--updates", type=int, default=300)
    options = parser.parse_args()
    updates = 2 if options.fast else options.updates

    sums = LevelSet([{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(5) for b in range(5)])
    kinds = {
        "uniform": UniformLevels(sums, seed=0),
        "learnability": LevelBuffer(sums, score=scores.Learnability(), seed=0),
    }
    for name, levels in kinds.items():
        torch.manual_seed(0)
        model, words = small_model()
        successes: list[float] = []

        def reward(completions, answer, level_id, levels=levels, successes=successes, **_) -> list[float]:
            right = [
                float(text.replace(" ", "")[:1] == str(one)) for text, one in zip(completions, answer, strict=True)
            ]
            levels.record(level_id, outcomes=right)  # of a level that comes several times all outcomes count
            successes.append(sum(right) / len(right))
            return right

        args = GRPOConfig(
            output_dir="trl_prompts", max_steps=updates, learning_rate=3e-3, num_generations=GROUP_SIZE,
            per_device_train_batch_size=GROUP_SIZE * PROMPTS_PER_BATCH, max_completion_length=1, use_cpu=True,
            bf16=False, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = LevelGRPOTrainer(
            levels,
            model=model,
            reward_funcs=reward,
            args=args,
            processing_class=words,
            train_dataset=Dataset.from_list(list(sums)),
        )
        trainer.train()
        last = successes[-20:]
        print(f"{name}: {levels.episodes} questions drawn, {sum(last) / len(last):.1%} of the last answers are right")


if __name__ == "__main__":
    main()
