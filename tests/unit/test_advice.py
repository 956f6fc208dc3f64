# SPDX-License-Identifier: Apache-2.0
"""What errors of the core advise works: options, functions, extras and pages that they name exist, and are tried."""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import re
import tomllib
from collections.abc import Callable, Iterator
from multiprocessing.context import set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import LazyMemmapStorage, LazyTensorStorage, ListStorage, SliceSampler

from lightning_replay import MixedReplay, PackedStorage, Replay, load_replay, recipes, save_replay
from lightning_replay.events import EventTable, key_in_region, reward_at_least, suggest_events
from lightning_replay.samplers import (
    PrioritizedSampler,
    RandomPairSampler,
    SequenceSampler,
    TableShares,
    UniformSampler,
)
from lightning_replay.samplers.tables import lemma2
from lightning_replay.transforms import MixPairs, NStepTransitions, RelabelGoals
from lightning_replay.writers import EventTableWriter, FirstInFirstOutWriter, RetentionWriter, SurpriseOnly
from tests.advice import Advice, advice, assert_leads_on
from tests.transitions import numbered_steps, task_steps

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "lightning_replay|rllib_ext|gymnasium|ray\\.rllib|torchrl"
HIGH = reward_at_least(4.0)


def texts() -> Iterator[tuple[str, str]]:
    """Every text of the code that is no docstring."""
    for file in (file for package in ("lightning_replay", "rllib_ext") for file in (ROOT / package).rglob("*.py")):
        tree = ast.parse(file.read_text())
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
                yield file.name, node.value


TEXTS = list(texts())


def named(pattern: str) -> list[str]:
    return sorted({found for _, text in TEXTS for found in re.findall(pattern, text)})


@pytest.mark.parametrize("name", named(rf"\b((?:{PACKAGES})(?:\.[A-Za-z_]\w*)+)"))
def test_every_function_and_class_that_an_error_names_exists(name: str) -> None:
    if name == "lightning_replay.recipes.NAME":
        return
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return
    pytest.fail(f"nothing of {name} can be imported")


def test_every_recipe_extra_and_page_that_an_error_names_exists() -> None:
    recipe = set(named(r"\brecipes\.([a-z]\w+)") + named(r"replay_config\([\"'](\w+)") + named(r"recipe=[\"'](\w+)"))
    assert recipe >= {"event_tables", "uniform"} and recipe <= {*recipes.known(), "mixed"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(named(r"lightning-replay\[(\w[\w-]*)\]")) <= set(extras)
    pages = named(r"\bdocs/[\w/-]+\.md")
    assert pages and not [page for page in pages if not (ROOT / page).exists()]


def rows(count: int = 8, first: int = 0, **columns: Any) -> TensorDict:
    """Steps of one running episode, with a discrete action besides."""
    steps = numbered_steps(first, count)
    return steps.update({name: torch.as_tensor(value) for name, value in columns.items()})


def discrete(count: int = 8) -> TensorDict:
    return rows(count, action=torch.arange(count).reshape(-1, 1) % 2)


def filled(replay: Any, steps: TensorDict | None = None) -> Any:
    replay.extend(rows() if steps is None else steps)
    return replay


def drawn(replay: Any, steps: TensorDict | None = None) -> Any:
    return filled(replay, steps).sample()


def tables(**options: Any) -> Any:
    table = EventTable("high", condition=HIGH, history_length=2, capacity=8, **options)
    return {"capacity": 16, "tables": [table], "batch_size": 4}


def writer() -> EventTableWriter:
    return EventTableWriter(16, [EventTable("high", condition=HIGH, history_length=2, capacity=8)])


def stored(storage: Any = None, **parts: Any) -> Replay:
    return Replay(storage=PackedStorage(64) if storage is None else storage, batch_size=4, **parts)


def interleaved() -> TensorDict:
    return rows(8, trajectory=torch.tensor([0, 1] * 4))


def fed(replay: Any, **feedback: Any) -> Any:
    batch = drawn(replay)
    return replay.update_priority(batch, **({"td_error": torch.ones(len(batch))} | feedback))


def unrewarded(achieved: Any, desired: Any, info: Any) -> Any:
    return np.zeros(len(achieved))


GOALS = {"achieved_key": "observation", "desired_key": "observation"}


def sent(build: Callable[[], Any]) -> bytes:
    """What a process that is spawned would be sent of what is built where processes are spawned."""
    process: Any = Popen.__new__(Popen)  # not started
    process._fds = []
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    set_spawning_popen(process)
    try:
        return ForkingPickler.dumps(build())
    finally:
        set_spawning_popen(None)
        multiprocessing.set_start_method(method, force=True)


AIMLESS = rows().set(("next", "reward"), torch.zeros(8, 1))
PAIR = {"batch_size": 4, "capacity": 8}

CASES = [
    advice(
        "a recipe that is misspelt",
        lambda: recipes.by_name("prioritised"),
        "Did you mean 'prioritized'",
        lambda: recipes.by_name("prioritized"),
    ),
    advice(
        "rows as a dictionary",
        lambda: stored().extend({"observation": np.zeros((2, 3))}),
        r"Wrap columns \[N, ...\] as TensorDict\(.*batch_size=\[N\]\), and join several .* torch.stack or torch.cat",
        lambda: stored().extend(TensorDict({"observation": np.zeros((2, 3))}, batch_size=[2])),
        lambda: stored().extend(torch.cat([rows(), rows()])),
        lambda: stored().extend(torch.stack([rows()[0], rows()[1]])),
    ),
    advice(
        "rows of two dimensions",
        lambda: stored().extend(rows().reshape(4, 2)),
        r"Flatten time and environments first \(reshape\(-1\)\).*call add for a single transition",
        lambda: stored().extend(rows().reshape(4, 2).reshape(-1)),
        lambda: stored().add(rows()[0]),
    ),
    advice(
        "several rows to add", lambda: stored().add(rows()), "Call extend for several", lambda: stored().extend(rows())
    ),
    advice(
        "a capacity below a batch",
        lambda: recipes.uniform(10, 20),
        "raise the capacity or lower the batch size",
        lambda: recipes.uniform(20, 20),
        lambda: recipes.uniform(10, 10),
    ),
    advice(
        "rows that are terminated and not done",
        lambda: stored().extend(rows().set(("next", "terminated"), torch.ones(8, 1, dtype=torch.bool))),
        "[Ss]tore done = terminated",
        lambda: stored().extend(
            rows()
            .set(("next", "terminated"), torch.ones(8, 1, dtype=torch.bool))
            .set(("next", "done"), torch.ones(8, 1, dtype=torch.bool))
        ),
    ),
    advice(
        "a reward that is NaN",
        lambda: stored().extend(rows().set(("next", "reward"), torch.full((8, 1), torch.nan))),
        "check_finite=False",
        lambda: stored(check_finite=False).extend(rows().set(("next", "reward"), torch.full((8, 1), torch.nan))),
    ),
    advice(
        "a prioritized replay without TD errors",
        lambda: fed(recipes.prioritized(**PAIR), td_error=None),
        "give one for each row of the batch, or write them to its column 'td_error'",
        lambda: fed(recipes.prioritized(**PAIR)),
        lambda: (replay := filled(recipes.prioritized(**PAIR))).update_tensordict_priority(
            replay.sample().set("td_error", torch.ones(4))
        ),
    ),
    advice(
        "an empty replay",
        lambda: recipes.uniform(**PAIR).sample(),
        "call extend first",
        lambda: drawn(recipes.uniform(**PAIR)),
    ),
    advice(
        "a sampler with fewer slots",
        lambda: stored(sampler=PrioritizedSampler(10)),
        "build the sampler with capacity=64",
        lambda: stored(sampler=PrioritizedSampler(capacity=64)),
    ),
    advice(
        "a sampler of tables alone",
        lambda: stored(sampler=TableShares({"default": 1.0})),
        "give an EventTableWriter",
        lambda: stored(
            PackedStorage(writer().num_slots), sampler=TableShares({"default": 0.5, "high": 0.5}), writer=writer()
        ),
    ),
    advice(
        "a writer of tables alone",
        lambda: stored(PackedStorage(writer().num_slots), writer=writer()),
        r"use TableShares or ScheduledSampler, alone or as base_sampler= of a sampler of pairs or sequences",
        lambda: stored(
            PackedStorage(writer().num_slots),
            writer=writer(),
            sampler=SequenceSampler(2, base_sampler=TableShares({"default": 0.5, "high": 0.5})),
        ),
    ),
    advice(
        "a writer of tables over a smaller storage",
        lambda: stored(PackedStorage(4), writer=writer(), sampler=TableShares({"default": 0.5, "high": 0.5})),
        rf"Use PackedStorage\({writer().num_slots}\)",
        lambda: stored(PackedStorage(152), writer=writer(), sampler=TableShares({"default": 0.5, "high": 0.5})),
    ),
    advice(
        "columns of a list",
        lambda: stored(ListStorage(64), n_steps=2),
        "use PackedStorage or LazyTensorStorage",
        lambda: drawn(stored(PackedStorage(64), n_steps=2)),
        lambda: drawn(stored(LazyTensorStorage(64), n_steps=2)),
    ),
    advice(
        "sequences with returns",
        lambda: stored(sampler=SequenceSampler(2), n_steps=3),
        "Leave it out, or use a sampler of rows",
        lambda: stored(sampler=SequenceSampler(2)),
        lambda: stored(sampler=UniformSampler(), n_steps=3),
    ),
    advice(
        "returns before storing and episodes of stored rows",
        lambda: stored(sampler=SequenceSampler(2), transform=NStepTransitions(3, 0.9)),
        "[Ll]eave .*out",
        lambda: drawn(stored(sampler=SequenceSampler(2))),
    ),
    advice(
        "hindsight with returns before storing",
        lambda: recipes.hindsight(**PAIR, reward=unrewarded, **GOALS, transform=NStepTransitions(3, 0.9)),
        "leave NStepTransitions out and give n_steps= to the buffer",
        lambda: drawn(recipes.hindsight(**PAIR, reward=unrewarded, **GOALS, n_steps=3), AIMLESS),
    ),
    advice(
        "hindsight of pairs",
        lambda: stored(sampler=RandomPairSampler(), transform=RelabelGoals(reward=unrewarded, **GOALS)),
        "Use a sampler of single rows, such as UniformSampler",
        lambda: drawn(stored(sampler=UniformSampler(), transform=RelabelGoals(reward=unrewarded, **GOALS)), AIMLESS),
    ),
    advice(
        "hindsight without rewards",
        lambda: recipes.hindsight(**PAIR),
        "give reward=, a function .*, or an env with compute_reward",
        lambda: recipes.hindsight(**PAIR, reward=unrewarded),
        lambda: recipes.hindsight(**PAIR, env="lightning_replay.envs:BitFlipping-v0"),
    ),
    advice(
        "hindsight without goals",
        lambda: filled(recipes.hindsight(**PAIR, reward=unrewarded)),
        "name your columns with achieved_key= and desired_key=",
        lambda: drawn(recipes.hindsight(**PAIR, reward=unrewarded, **GOALS), AIMLESS),
    ),
    advice(
        "mixup of discrete actions",
        lambda: drawn(recipes.mixup(**PAIR), discrete()),
        "name the columns that are mixed with keys=. .* neighborhood_mixup with discrete='same_action', or another",
        lambda: drawn(recipes.mixup(**PAIR, keys=["observation"]), discrete()),
        lambda: drawn(recipes.neighborhood_mixup(**PAIR, discrete="same_action", num_neighbors=2), discrete()),
        lambda: drawn(recipes.uniform(**PAIR), discrete()),
    ),
    advice(
        "neighbours of discrete actions",
        lambda: drawn(recipes.neighborhood_mixup(**PAIR), discrete()),
        "discrete=.same_action",
        lambda: drawn(recipes.neighborhood_mixup(**PAIR, discrete="same_action", num_neighbors=2), discrete()),
    ),
    advice(
        "pairs that nothing mixes",
        lambda: drawn(stored(transform=MixPairs())),
        "NeighborhoodMixupSampler, ContinuousTransitionSampler or RandomPairSampler",
        lambda: drawn(stored(sampler=RandomPairSampler(), transform=MixPairs())),
    ),
    advice(
        "frame_capacity without stacks",
        lambda: recipes.uniform(64, 4, frame_capacity=100),
        "Pass frame_stack=4, for example, or leave frame_capacity out",
        lambda: recipes.uniform(64, 4, frame_stack=4, frame_capacity=100),
        lambda: recipes.uniform(64, 4),
    ),
    advice(
        "a capacity below a stack",
        lambda: recipes.uniform(4, 4, frame_stack=4),
        "Raise the capacity",
        lambda: recipes.uniform(5, 4, frame_stack=4),
    ),
    advice(
        "a file on a GPU",
        lambda: PackedStorage(8, device="cuda", memmap="rows"),
        "device='cpu'",
        lambda: PackedStorage(8, device="cpu"),
    ),
    advice(
        "rows of several environments in TorchRL's slices",
        lambda: drawn(stored(sampler=SliceSampler(slice_len=2, traj_key="trajectory")), interleaved()),
        "SequenceSampler, or collect from one environment",
        lambda: drawn(stored(sampler=SequenceSampler(2)), interleaved()),
        lambda: drawn(
            stored(sampler=SliceSampler(slice_len=2, traj_key="trajectory")), rows(trajectory=torch.zeros(8).long())
        ),
    ),
    advice(
        "a replay that is sent to another process",
        lambda: sent(lambda: PackedStorage(8)),
        "ShardedReplay or TorchRL's LazyMemmapStorage",
        lambda: sent(lambda: filled(TensorDictReplayBuffer(storage=LazyMemmapStorage(8)), rows()).storage),
    ),
    advice(
        "event tables that correct all at once and choose numbers",
        lambda: recipes.event_tables(**tables(), correction="continuous", multinomial=True),
        "leave out multinomial, or use correction='mixture'",
        lambda: recipes.event_tables(**tables(), correction="continuous"),
        lambda: recipes.event_tables(**tables(), correction="mixture", multinomial=True),
    ),
    advice(
        "event tables that leave nothing",
        lambda: recipes.event_tables(**tables(), default_share=1.0),
        "lower default_share or the share of a table",
        lambda: recipes.event_tables(**tables(), default_share=0.9),
    ),
    advice(
        "event tables that hold too little",
        lambda: drawn(recipes.event_tables(**tables(), default_share=0.5), rows(2)),
        "Collect more steps before the first draw, or lower min_size",
        lambda: drawn(recipes.event_tables(**tables(), default_share=0.5)),
        lambda: drawn(recipes.event_tables(**tables(min_size=1), min_size=1), rows(2)),
    ),
    advice(
        "no event tables",
        lambda: recipes.event_tables(16, 4, tables=[]),
        "at least one EventTable, or use recipes.un",
        lambda: recipes.uniform(16, 4),
    ),
    advice(
        "a history longer than its table",
        lambda: EventTable("high", condition=HIGH, history_length=9, capacity=8),
        "Raise the capacity or shorten the hi",
        lambda: EventTable("high", condition=HIGH, history_length=9, capacity=9),
        lambda: EventTable("high", condition=HIGH, history_length=8, capacity=8),
    ),
    advice(
        "events of rewards that are all equal",
        lambda: suggest_events(rows().set(("next", "reward"), torch.ones(8, 1))),
        "key_in_region",
        lambda: EventTable("far", condition=key_in_region("observation", low=3.0), history_length=2, capacity=8),
    ),
    advice(
        "corrections that need counts",
        lambda: drawn(
            stored(
                PackedStorage(writer().num_slots),
                writer=writer(),
                sampler=TableShares({"default": 0.5, "high": 0.5}, correction=lemma2),
            )
        ),
        "the correction 'mixture'",
        lambda: recipes.event_tables(**tables(), correction="mixture"),
    ),
    advice(
        "rows without a task",
        lambda: filled(recipes.parallel_curriculum(["target", "near"], 8, 4)),
        r"need a column 'task', int64 \[N\], an index into",
        lambda: filled(recipes.parallel_curriculum(["target", "near"], 8, 4), task_steps([0, 1] * 4)),
    ),
    advice(
        "action values without actions",
        lambda: fed(recipes.surprise_retention(**PAIR), action_values=torch.ones(4, 2)),
        r"pass action=batch\['action'\] as well",
        lambda: fed(
            recipes.surprise_retention(**PAIR), action_values=torch.ones(4, 2), action=torch.zeros(4, dtype=torch.int64)
        ),
    ),
    advice(
        "a rule with options of another",
        lambda: recipes.surprise_retention(**PAIR, rule=SurpriseOnly(), draw_discount=0.9),
        "leave it out, or give it to the rule",
        lambda: recipes.surprise_retention(**PAIR, rule=SurpriseOnly()),
        lambda: recipes.surprise_retention(**PAIR, rule=SurpriseOnly(draw_discount=0.9)),
    ),
    advice(
        "a capacity below a return",
        lambda: recipes.surprise_retention(2, 2, n_steps=3),
        "Raise the capacity",
        lambda: recipes.surprise_retention(3, 2, n_steps=3),
    ),
    advice(
        "both sides of a mixture are one",
        lambda: MixedReplay(*[recipes.uniform(**PAIR)] * 2),
        "give two",
        lambda: MixedReplay(recipes.uniform(**PAIR), recipes.uniform(**PAIR)),
    ),
    advice(
        "a mixture of rows and sequences",
        lambda: MixedReplay(recipes.uniform(**PAIR), recipes.sequences(**PAIR, length=2)),
        "build both with recipes.sequences and the same lengths, or with recipes of rows",
        lambda: MixedReplay(*(recipes.sequences(**PAIR, length=2) for _ in range(2))),
    ),
    advice(
        "a GPU that there is not",
        lambda: recipes.uniform(**PAIR, device="cuda:99"),
        "use device='cpu'",
        lambda: recipes.uniform(**PAIR, device="cpu"),
    ),
    advice(
        "a sampler that refuses rows in TorchRL's buffer",
        lambda: TensorDictReplayBuffer(storage=PackedStorage(8), writer=RetentionWriter(SurpriseOnly())),
        r"use lightning_replay.Replay\(storage=..., writer=..., ...\)",
        lambda: stored(writer=RetentionWriter(SurpriseOnly())),
    ),
]


@pytest.mark.parametrize("one", CASES)
def test_the_advice_of_the_error_works(one: Advice) -> None:
    assert_leads_on(one)


def my_condition(steps: TensorDict) -> torch.Tensor:
    return steps["next", "reward"].flatten() > 4


def own_tables() -> Replay:
    table = EventTable("mine", condition=my_condition, history_length=2, capacity=8)
    return recipes.event_tables(16, 4, tables=[table])


def test_the_advice_of_loading_works(tmp_path: Path) -> None:
    save_replay(filled(recipes.uniform(16, 4)), tmp_path / "rows")
    save_replay(filled(own_tables()), tmp_path / "mine")
    for one in (
        Advice(
            "options",
            lambda: recipes.uniform(32, 4).load(tmp_path / "rows"),
            "build the buffer with the options of the saved one, or let load_replay build it",
            (lambda: recipes.uniform(16, 4).load(tmp_path / "rows"), lambda: load_replay(tmp_path / "rows")),
        ),
        Advice(
            "functions",
            lambda: load_replay(tmp_path / "mine"),
            r"load with trust=\['tests'\]; or build the replay buffer yourself .* and call replay.load\(path\)",
            (lambda: load_replay(tmp_path / "mine", trust=["tests"]), lambda: own_tables().load(tmp_path / "mine")),
        ),
        Advice(
            "folders",
            lambda: (UniformSampler().dumps(tmp_path / "part"), FirstInFirstOutWriter().dumps(tmp_path / "part")),
            "Give each a directory of its own",
            (lambda: FirstInFirstOutWriter().dumps(tmp_path / "writer"),),
        ),
        Advice(
            "no save",
            lambda: load_replay(tmp_path),
            "no saved replay buffer in",
            (lambda: load_replay(tmp_path / "rows"),),
        ),
    ):
        assert_leads_on(one)
