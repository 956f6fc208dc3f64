# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer takes its prompts from a level buffer, on a model that is built from a config, without a download.

python examples/trl_prompts.py [--fast] [--updates 300]
torchrun --nproc-per-node 2 examples/trl_prompts.py          # both processes share the prompts
python examples/trl_prompts.py --resume                      # goes on from the last checkpoint of such a run

It needs TRL, which no extra of this package installs. These versions fit beside those in constraints.txt:
pip install trl==1.16.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0
``make matrix ONLY=trl`` installs them into an environment, and tests this file in one process and in two.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils.data import Sampler

from lightning_replay.levels import LevelBatchSampler, LevelBuffer, LevelSet, UniformLevels, scores

try:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    packages = "trl==1.16.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0"
    sys.exit(f"this example needs TRL ({error}): pip install {packages}")

GROUP_SIZE, PROMPTS_PER_BATCH = 8, 8


class RepeatedBatches(Sampler[int]):
    """Each batch as often as its answers are learned from."""

    def __init__(self, batches: LevelBatchSampler, repeats: int) -> None:
        self.batches = batches
        self.repeats = repeats

    def __len__(self) -> int:
        return len(self.batches) * self.batches.batch_size * self.repeats

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches:
            for _ in range(self.repeats):
                yield from batch


class LevelGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose prompts are levels in place of a shuffled data set, and whose checkpoints have their state."""

    def __init__(self, levels, **options) -> None:
        self.levels = levels
        self.resumed_from: str | None = None
        super().__init__(**options)
        # As TRL's RepeatSampler: groups side by side, and a batch for each of its steps, which reuse its answers.
        self.repeats = self.num_iterations * self.args.steps_per_generation
        # Each process gets the whole batch, because the data loader of Accelerate divides it.
        self.batches = LevelBatchSampler(
            levels,
            self.args.generation_batch_size,
            -(-self.args.max_steps // self.repeats) + 1,
            group_size=self.num_generations,
            divides=False,
        )
        self.add_callback(LevelCheckpoints(self))

    def _get_train_sampler(self, dataset=None) -> Sampler[int]:
        return RepeatedBatches(self.batches, self.repeats)

    def resume(self, checkpoint: str) -> None:
        """Goes on from a checkpoint. The state of the levels tells which prompts come next, so no data is skipped."""
        of_levels, of_batches = torch.load(Path(checkpoint, "levels.pt"))
        self.levels.load_state_dict(of_levels)
        self.batches.load_state_dict(of_batches)
        self.args.ignore_data_skip = True
        self.resumed_from = checkpoint
        self.train(resume_from_checkpoint=checkpoint)


class LevelCheckpoints(TrainerCallback):
    """Saves the levels beside each checkpoint, and restores random numbers; one process has the state of all levels."""

    def __init__(self, trainer: LevelGRPOTrainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **_) -> None:
        if self.trainer.resumed_from is not None:
            # The data loader took a random number after the Trainer had restored them.
            self.trainer._load_rng_state(self.trainer.resumed_from)
            self.trainer.resumed_from = None

    def on_save(self, args, state, control, **_) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            states = self.trainer.levels.state_dict(), self.trainer.batches.state_dict()
            torch.save(states, folder / "levels.pt")


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
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    parser.add_argument("--folder", default="trl_prompts", help="for checkpoints")
    options = parser.parse_args()
    updates = 4 if options.fast else options.updates
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))

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
            # All outcomes of a level count, also of a group that is divided between processes.
            levels.record(level_id, outcomes=right)
            successes.append(sum(right) / len(right))
            return right

        folder = Path(options.folder, name)
        args = GRPOConfig(
            output_dir=str(folder), max_steps=updates, learning_rate=3e-3, num_generations=GROUP_SIZE,
            per_device_train_batch_size=GROUP_SIZE * PROMPTS_PER_BATCH // num_processes, max_completion_length=1,
            use_cpu=True, bf16=False, report_to="none", save_steps=max(updates // 2, 1), save_total_limit=1,
            save_only_model=False, logging_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = LevelGRPOTrainer(
            levels,
            model=model,
            reward_funcs=reward,
            args=args,
            processing_class=words,
            train_dataset=Dataset.from_list(list(sums)),
        )
        if options.resume:
            saved = {int(path.parent.name.split("-")[1]): path.parent for path in folder.glob("checkpoint-*/levels.pt")}
            if not saved:
                sys.exit(f"{folder} has no checkpoint with levels; run the same command without --resume first")
            trainer.resume(str(saved[max(saved)]))
        else:
            trainer.train()
        last = successes[-20:]
        print(f"{name}: {levels.episodes} questions drawn, {sum(last) / len(last):.1%} of the last answers are right")


if __name__ == "__main__":
    main()
