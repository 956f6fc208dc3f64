# SPDX-License-Identifier: Apache-2.0
"""The lines of docs/prompts-trainers.md draw, learn, and resume in loops that are those of verl and prime-rl."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import prompt_stubs
from tests.prompt_stubs import Agent, DataProto, DictConfig, Episode, Task, Trace

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata on torch 2.13
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "prompts-trainers.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ANSWERS = 8  # to each prompt
NAMES = [3 * number + 7 for number in range(60)]  # in a data set whose long prompts were left out


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the page defines."""
    prompt_stubs.install(monkeypatch)
    namespace: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, "page", "exec"), namespace)
    return SimpleNamespace(**namespace)


def rewards_of(name: int) -> list[float]:
    """Rewards of the answers to a prompt: every third prompt is solved, every third hopeless, and others are mixed."""
    right = (0, ANSWERS, 1 + name % 7)[NAMES.index(name) % 3]
    return [1.0] * right + [-1.0] * (ANSWERS - right)


def through_a_file(state: Any, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def check_scores(page: SimpleNamespace, prompts: Any, seen: set[int]) -> None:
    """p (1 - p) of each prompt that was seen."""
    rows = prompts.levels.probabilities()
    rates = {place: rewards_of(NAMES[place]).count(1.0) / ANSWERS for place in seen}
    expected = {place: rate * (1 - rate) for place, rate in rates.items()}
    assert dict(zip(rows["level_id"].tolist(), rows["score"].tolist(), strict=True)) == pytest.approx(expected)


def test_each_adapter_is_short() -> None:
    classes = [block[block.index("class ") :] for block in BLOCKS]
    assert len(classes) == 4
    assert max(len([line for line in code.splitlines() if line.strip()]) for code in classes) <= 25
    assert len(PAGE.split()) < 600


class Verl:
    """The part of verl's trainer that loads prompts and calls the sampler."""

    batch_size = 5

    def __init__(self, page: SimpleNamespace) -> None:
        config = DictConfig(train_batch_size=99, gen_batch_size=self.batch_size, seed=4, dataloader_num_workers=0)
        rows = [{"prompt": f"question {name}", "extra_info": {"index": name}} for name in NAMES]
        source = SimpleNamespace(dataframe={"extra_info": [row["extra_info"] for row in rows]})
        self.sampler = page.LevelPrompts(data_source=source, data_config=config)
        assert isinstance(self.sampler, prompt_stubs.AbstractSampler)
        self.loader = StatefulDataLoader(
            rows, batch_size=self.batch_size, num_workers=0, drop_last=True, collate_fn=list, sampler=self.sampler
        )
        self.steps: list[list[int]] = []
        self.saved: dict[int, Any] = {}

    def fit(self, epochs: int) -> None:
        shuffled = torch.Generator().manual_seed(0)
        for _ in range(epochs):
            for batch in self.loader:
                infos = [row["extra_info"] for row in batch for _ in range(ANSWERS)]
                rewards = [reward for row in batch for reward in rewards_of(row["extra_info"]["index"])]
                scores = torch.zeros(len(infos), 3)
                scores[:, -1] = torch.tensor(rewards)
                order = torch.randperm(len(infos), generator=shuffled)  # verl balances tokens
                answers = DataProto(
                    {"token_level_scores": scores[order]}, {"extra_info": np.array(infos, dtype=object)[order.numpy()]}
                )
                self.steps.append([row["extra_info"]["index"] for row in batch])
                self.saved[len(self.steps)] = through_a_file(self.loader.state_dict())
                self.sampler.update(batch=answers)


def test_verl_draws_what_can_be_learned_and_resumes(page: SimpleNamespace) -> None:
    whole = Verl(page)
    assert len(whole.loader) == len(NAMES) // Verl.batch_size == 12
    whole.fit(epochs=5)
    assert len(whole.steps) == 60 and all(len(set(step)) == Verl.batch_size for step in whole.steps)
    places = [NAMES.index(name) for step in whole.steps for name in step]
    check_scores(page, whole.sampler.prompts, set(places))
    assert len(set(places)) == len(NAMES) and whole.sampler.prompts.levels.stats()["in_flight"] == 0
    late = Counter(place % 3 for place in places[-100:])
    assert late[2] > 55  # prompts with answers of both kinds; 33 of 100 if all were as likely
    # The last batch before the checkpoint comes again, because its outcomes are not in it.
    for step, steps in ((17, 44), (24, 25)):  # in the middle of an epoch, and in the last step of one
        resumed = Verl(page)
        resumed.loader.load_state_dict(whole.saved[step])
        resumed.fit(epochs=5 - step // len(resumed.loader))
        assert resumed.steps == whole.steps[step - 1 :][:steps]


def group_of(task: Task) -> list[Episode]:
    """Two episodes with the answers to a task, of which one failed and one is of a fixed opponent."""
    traces = [Trace(reward) for reward in rewards_of(int(task.key))]
    others = [Trace(1.0, has_error=True), Trace(1.0, agent=Agent(trainable=False))]
    return [Episode(task, [*traces[:3], *others]), Episode(task, traces[3:])]


class PrimeRL:
    """The part of prime-rl's orchestrator that dispatches tasks and reports their groups."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.drawn: list[int] = []
        self.running: deque[Task] = deque()

    def play(self, groups: int, in_flight: int = 6) -> None:
        for _ in range(groups):
            while len(self.running) < in_flight:
                self.running.append(next(self.sampler))
                self.drawn.append(int(self.running[-1].key))
            self.sampler.observe(group_of(self.running.popleft()))


def test_prime_rl_draws_what_can_be_learned_and_resumes(page: SimpleNamespace) -> None:
    tasks = [Task(str(name)) for name in NAMES]
    assert sys.modules["prime_rl.orchestrator.curriculum.samplers"].StandardSampler is page.LevelTasks
    whole = PrimeRL(page.LevelTasks(tasks))
    whole.play(200)
    state = through_a_file(whole.sampler.state_dict(), weights_only=True)
    waiting = [int(task.key) for task in whole.running]
    whole.play(200)
    finished = whole.drawn[:400]
    check_scores(page, whole.sampler.prompts, {NAMES.index(name) for name in finished})
    late = Counter(NAMES.index(name) % 3 for name in finished[-100:])
    assert late[2] > 55
    resumed = PrimeRL(page.LevelTasks(tasks))
    resumed.sampler.load_state_dict(state)
    resumed.play(200)
    assert resumed.drawn[:5] == waiting and resumed.drawn == whole.drawn[200:]
    assert resumed.sampler.metrics() == {}


def test_prime_rl_prompts_of_lost_groups_return(page: SimpleNamespace) -> None:
    tasks = [Task(str(name)) for name in NAMES]
    run = PrimeRL(page.LevelTasks(tasks))
    lost = [next(run.sampler).key for _ in range(2)]  # stale groups bypass the curriculum
    failed = next(run.sampler)
    run.sampler.observe([Episode(failed, [Trace(0.0, has_error=True)])])
    run.play(480)
    assert not {*lost, failed.key} & {str(name) for name in run.drawn}
    assert run.sampler.prompts.levels.stats()["expired"] == 0
    run.play(100)
    assert {*lost, failed.key} <= {str(name) for name in run.drawn}
    assert run.sampler.prompts.levels.stats()["expired"] == 3


def test_the_buffer_of_prime_rl_draws_and_resumes(page: SimpleNamespace, tmp_path: Path) -> None:
    rows = [{"example_id": name, "prompt": f"question {name}", "task": "sums"} for name in NAMES]

    class Dataset(list[dict[str, Any]]):
        def __getitem__(self, item: Any) -> Any:
            return [row[item] for row in self] if isinstance(item, str) else super().__getitem__(item)

    def play(buffer: Any, groups: int) -> list[int]:
        drawn = []
        for _ in range(groups):
            (example,) = buffer.sample_examples(n=1)
            assert example == rows[NAMES.index(example["example_id"])]
            rewards = rewards_of(example["example_id"])
            buffer.update([{"example_id": example["example_id"], "task": "sums", "reward": one} for one in rewards])
            drawn.append(example["example_id"])
        return drawn

    whole = page.LevelBufferOfPrompts(Dataset(rows), ["sums"], None)
    first = play(whole, 150)
    check_scores(page, whole.prompts, {NAMES.index(name) for name in first})
    whole.save(tmp_path / "buffer")
    resumed = page.LevelBufferOfPrompts(Dataset(rows), ["sums"], None)
    resumed.load(tmp_path / "buffer")
    assert play(resumed, 100) == play(whole, 100)
    assert len(whole.rollouts) == len(resumed.rollouts) == 250 * ANSWERS
    assert len(whole.sample_examples(4)) == 4


def test_a_name_that_comes_twice_is_refused(page: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="7"):
        page.Prompts([7, 8, 7])
