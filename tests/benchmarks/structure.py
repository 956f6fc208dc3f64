# SPDX-License-Identifier: Apache-2.0
"""Prints how large the product is, what a reader must open, and what a walk through the code enters.

``python -m tests.benchmarks.structure`` prints all; nothing is asserted.

The figures of an earlier tree stand beside those of this one.

* lines, code lines, comments: Python's ``ast`` and ``tokenize`` over every file of both packages;
* loaded: own files in ``sys.modules`` of a new process after one prioritized batch;
* walks: own files that are entered, own calls, and changes from one own file to another (on call and on return),
  by ``sys.setprofile``;
* arrows: pairs of folders of which one imports the other; circles: groups of files that import each other.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lightning_replay", "rllib_ext")
OUTSIDE_CORE = {"levels", "envs", "agents", "lit", "inspection", "report", "analysis", "sharded"}
STATE = {"state_dict", "load_state_dict", "get_extra_state", "set_extra_state", "get_state", "set_state"}
#: What this script printed before the files were brought together by noun, on commit 7e1f5be.
BEFORE = {
    "product lines": 52401,
    "product code lines": 32677,
    "core lines": 22863,
    "product files": 372,
    "product files under 60 lines": 73,
    "own files (lines) loaded by one prioritized batch": "142 21673",
    "folder arrows": 176,
    "files in circles": 0,
    "names that a part may define": 58,
    "own bases of a sampler, at most": 11,
    "classes with hand-written state": 87,
    "comments, percent of lines": 2.1,
    "lines of tests without benchmarks": 52515,
    "uniform: extend 1": (29, 9, 19),
    "uniform: sample 256": (17, 6, 12),
    "uniform, n = 3: extend 1": (43, 12, 32),
    "uniform, n = 3: sample 256": (42, 11, 33),
    "PER: extend 1": (38, 15, 30),
    "PER: sample 256": (25, 12, 24),
    "PER: update 256": (15, 9, 16),
    "NMER: extend 1": (74, 19, 62),
    "NMER: sample 256": (51, 20, 53),
    "event tables with priorities: extend 1": (72, 22, 56),
    "event tables with priorities: sample 256": (48, 14, 48),
    "event tables with priorities: update 256": (41, 11, 42),
    "Lightning: step and DQN update, PER": (161, 36, 133),
    "RLlib: add 16, PER": (113, 29, 86),
    "RLlib: sample 64, PER": (126, 23, 80),
}
#: What the plan of the redesign asks for; of walks the number of files.
ASKED = {
    "product lines": 39000,
    "core lines": 16700,
    "product files": 175,
    "product files under 60 lines": 30,
    "own files (lines) loaded by one prioritized batch": "80",
    "folder arrows": 190,
    "files in circles": 0,
    "names that a part may define": 26,
    "own bases of a sampler, at most": 3,
    "classes with hand-written state": 25,
    "comments, percent of lines": 4,
    "lines of tests without benchmarks": 40000,
    "uniform: extend 1": 5,
    "uniform: sample 256": 4,
    "uniform, n = 3: sample 256": 6,
    "PER: extend 1": 7,
    "PER: sample 256": 6,
    "PER: update 256": 5,
    "NMER: extend 1": 9,
    "NMER: sample 256": 10,
    "event tables with priorities: extend 1": 9,
    "event tables with priorities: sample 256": 7,
    "event tables with priorities: update 256": 6,
    "Lightning: step and DQN update, PER": 18,
    "RLlib: add 16, PER": 13,
    "RLlib: sample 64, PER": 13,
}
LOADED = (
    "import sys, torch\n"
    "from tensordict import TensorDict\n"
    "from lightning_replay import recipes\n"
    "replay = recipes.prioritized(capacity=100, batch_size=4)\n"
    "rows = {'observation': torch.zeros(8, 2), 'action': torch.zeros(8, 1)}\n"
    "rows['next'] = {'observation': torch.zeros(8, 2), 'reward': torch.zeros(8, 1),\n"
    "    'terminated': torch.ones(8, 1, dtype=torch.bool), 'done': torch.ones(8, 1, dtype=torch.bool)}\n"
    "replay.extend(TensorDict(rows, batch_size=[8]))\n"
    "batch = replay.sample()\n"
    "replay.update_priority(batch, torch.ones(4))\n"
    "files = {m.__file__ for n, m in sys.modules.items() if n.split('.')[0] in ('lightning_replay', 'rllib_ext')}\n"
    "print(len(files), sum(len(open(file).readlines()) for file in files))\n"
)


class Lines(NamedTuple):
    """Lines of a file, by kind."""

    total: int
    code: int
    comments: int


class Walk(NamedTuple):
    """What a call enters."""

    calls: int
    files: int
    changes: int


def product_files(packages: tuple[str, ...] = PACKAGES) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def lines_of(path: Path) -> Lines:
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments += "SPDX" not in token.string
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            code.update(range(token.start[0], token.end[0] + 1))
    return Lines(len(source.splitlines()), len(code - docstrings), comments)


def hand_written_states() -> list[str]:
    """Returns the classes that write their state by hand."""
    return [
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in product_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(part, ast.FunctionDef) and part.name in STATE for part in node.body)
    ]


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name for name in names if name.split(".")[0] in PACKAGES}


def arrows_and_circles() -> tuple[int, int]:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in product_files()
        if path.name != "__init__.py"
    }
    graph = {name: imports_of(path) & modules.keys() - {name} for name, path in modules.items()}
    arrows = {
        (name.rpartition(".")[0], other.rpartition(".")[0])
        for name, others in graph.items()
        for other in others
        if name.rpartition(".")[0] != other.rpartition(".")[0]
    }
    while removable := {name for name, others in graph.items() if not others & graph.keys()}:
        graph = {name: others for name, others in graph.items() if name not in removable}
    return len(arrows), len(graph)


def names_of_parts() -> set[str]:
    """Returns the public names of the parts' base classes beside TorchRL's, which a part may define."""
    from torchrl.data.replay_buffers import Sampler, Writer
    from torchrl.envs import Transform

    from lightning_replay import parts

    found: set[str] = set()
    for base, torchrl in (
        (parts.ReplaySampler, Sampler),
        (parts.ReplayWriter, Writer),
        (parts.ReplayTransform, Transform),
    ):
        for kind in base.__mro__:
            if kind.__module__.startswith(PACKAGES):
                found |= {name for name in vars(kind) if not name.startswith("_") and not hasattr(torchrl, name)}
    return found


def most_own_bases() -> int:
    from lightning_replay import samplers

    own = [
        sum(base.__module__.startswith(PACKAGES) for base in getattr(samplers, name).__mro__[1:])
        for name in samplers.__all__
        if name.endswith("Sampler")
    ]
    return max(own)


class Recorder:
    """Counts own calls, files and changes of file while it is entered."""

    def __enter__(self) -> Recorder:
        self.calls, self.files, self.changes, self._last = 0, set[str](), 0, ""
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    @property
    def walk(self) -> Walk:
        return Walk(self.calls, len(self.files), self.changes)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        file = frame.f_code.co_filename
        if not any(f"/{package}/" in file.removeprefix(str(ROOT.parent)) for package in PACKAGES) or "/tests/" in file:
            return
        if event == "call":
            self.calls += 1
            self.files.add(file)
        self.changes += file != self._last
        self._last = file


def walk_of(call: Callable[[], Any]) -> Walk:
    call()  # what is done once
    with Recorder() as recorder:
        call()
    return recorder.walk


def replay_walks() -> Iterator[tuple[str, Walk]]:
    import torch
    from tensordict import TensorDict

    from lightning_replay import recipes
    from lightning_replay.events import EventTable, reward_at_least

    def rows(count: int) -> TensorDict:
        steps = torch.arange(count + 1.0).unsqueeze(1).expand(-1, 3)
        flags = {name: torch.zeros(count, 1, dtype=torch.bool) for name in ("terminated", "truncated", "done")}
        following = {"observation": steps[1:], "reward": torch.ones(count, 1), **flags}
        columns = {"observation": steps[:-1], "action": torch.zeros(count, 2), "next": following}
        return TensorDict(columns, batch_size=[count])

    tables = [EventTable("good", reward_at_least(0.5), history_length=5, capacity=1000, share=0.5)]
    built = {
        "uniform": recipes.uniform(10_000, 256, check_continuity=False),
        "uniform, n = 3": recipes.uniform(10_000, 256, n_steps=3, check_continuity=False),
        "PER": recipes.prioritized(10_000, 256, check_continuity=False),
        "NMER": recipes.neighborhood_mixup(10_000, 256, check_continuity=False),
        "event tables with priorities": recipes.event_tables(
            10_000, 256, tables=tables, priority_exponent=0.6, check_continuity=False
        ),
    }
    for name, replay in built.items():
        replay.extend(rows(2_000))
        yield f"{name}: extend 1", walk_of(lambda replay=replay: replay.extend(rows(1)))
        yield f"{name}: sample 256", walk_of(replay.sample)
        if replay.takes_feedback:
            batch = replay.sample()
            yield f"{name}: update 256", walk_of(lambda r=replay, b=batch: r.update_priority(b, torch.ones(256)))


def lightning_walk() -> Walk:
    """Returns the walk of one environment step and one update of DQN with priorities."""
    import lightning
    import torch

    from lightning_replay import recipes
    from lightning_replay.agents import DQN
    from lightning_replay.lit import ReplayDataModule

    class Profile(lightning.Callback):
        recorder = Recorder()

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 5:
                self.recorder.__enter__()
            elif trainer.global_step == 6 and sys.getprofile() is not None:
                self.recorder.__exit__()

    torch.manual_seed(0)
    profile = Profile()
    replay = recipes.prioritized(1_000, 32, seed=0)
    data = ReplayDataModule("CartPole-v1", replay, env_steps=200, warmup_steps=64, updates_per_training_step=1, seed=0)
    trainer = lightning.Trainer(
        max_steps=20, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[profile],
    )  # fmt: skip
    trainer.fit(DQN(), data)
    sys.setprofile(None)
    return profile.recorder.walk


def rllib_walks() -> Iterator[tuple[str, Walk]]:
    import numpy as np
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    from rllib_ext import RecipeEpisodeReplayBuffer

    buffer = RecipeEpisodeReplayBuffer("prioritized", capacity=1000, seed=0)
    number = 0

    def add() -> None:
        nonlocal number
        number += 1
        observations = [np.full(3, step, dtype=np.float32) for step in range(17)]
        buffer.add(
            SingleAgentEpisode(
                id_=str(number),
                observations=observations,
                actions=[0] * 16,
                rewards=[1.0] * 16,
                terminated=True,
                len_lookback_buffer=0,
            )
        )

    for _ in range(10):
        add()
    yield "RLlib: add 16, PER", walk_of(add)
    yield "RLlib: sample 64, PER", walk_of(lambda: buffer.sample(num_items=64))


def main() -> None:
    lines = {path: lines_of(path) for path in product_files()}
    total = [sum(column) for column in zip(*lines.values(), strict=True)]
    core = [path for path in product_files(PACKAGES[:1]) if path.relative_to(ROOT).parts[1] not in OUTSIDE_CORE]
    tests = [path for path in (ROOT / "tests").rglob("*.py") if "benchmarks" not in path.relative_to(ROOT).parts]
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, cwd=ROOT)
    arrows, circles = arrows_and_circles()
    states = hand_written_states()
    measures = {
        "product lines": total[0],
        "product code lines": total[1],
        "core lines": sum(lines[path].total for path in core),
        "product files": len(lines),
        "product files under 60 lines": sum(count.total < 60 for count in lines.values()),
        "own files (lines) loaded by one prioritized batch": " ".join(loaded.stdout.split()),
        "folder arrows": arrows,
        "files in circles": circles,
        "names that a part may define": len(names_of_parts()),
        "own bases of a sampler, at most": most_own_bases(),
        "classes with hand-written state": len(states),
        "comments, percent of lines": round(100 * total[2] / total[0], 1),
        "lines of tests without benchmarks": sum(len(path.read_text().splitlines()) for path in tests),
    }
    print(f"{'':55} {'now':>12} {'before':>12} {'asked':>12}")
    for name, value in measures.items():
        print(f"{name:55} {value:>12} {BEFORE[name]:>12} {ASKED.get(name, '-'):>12}")
    print(f"\n{'walk':45} {'own calls':>9} {'files':>6} {'changes':>8}   {'before':15} files asked")
    for name, walk in [*replay_walks(), ("Lightning: step and DQN update, PER", lightning_walk()), *rllib_walks()]:
        print(f"{name:45} {walk.calls:9} {walk.files:6} {walk.changes:8}   {BEFORE[name]!s:15} {ASKED.get(name, '-')}")
    if "--states" in sys.argv:
        print(json.dumps(states, indent=1))


if __name__ == "__main__":
    main()
