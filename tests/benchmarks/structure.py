# SPDX-License-Identifier: Apache-2.0
"""Prints how large the product is, how it reads, what a reader must open, and what a walk through the code enters.

``python -m tests.benchmarks.structure`` prints every figure beside the figure of an earlier tree; nothing is asserted.
``--list MEASURE [PREFIX]`` prints the places that a measure counts, of the files whose path begins with the prefix.
``--each MEASURE`` prints the number of places of each file.

* Statements are ``ast.stmt`` nodes without docstrings, over every file of both packages.
* Loaded are the own files in ``sys.modules`` of a new process that imports the three classes of a core.
* A private name is read across files if another file defines it; the names of hosts are counted apart.
* A member is mentioned if its name is a word of a page, a notebook, an example, or a configuration.
* Walks count own files that are entered, own calls, and changes of file (on call and on return), by ``sys.setprofile``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lightning_replay", "rllib_ext")
STATE = {"state_dict", "load_state_dict", "get_extra_state", "set_extra_state", "get_state", "set_state"}
STATEMENTS_BEFORE = 26_429
CORE_LINES_BEFORE = 17_797
WALKS_BEFORE = {
    "uniform: extend 1": (28, 6, 18),
    "uniform: sample 256": (17, 5, 12),
    "uniform, n = 3: extend 1": (43, 8, 27),
    "uniform, n = 3: sample 256": (40, 8, 23),
    "PER: extend 1": (35, 9, 25),
    "PER: sample 256": (22, 7, 17),
    "PER: update 256": (12, 7, 12),
    "NMER: extend 1": (62, 12, 45),
    "NMER: sample 256": (43, 12, 32),
    "event tables with priorities: extend 1": (65, 14, 51),
    "event tables with priorities: sample 256": (47, 9, 29),
    "event tables with priorities: update 256": (48, 8, 33),
    "Lightning: step and DQN update, PER": (152, 24, 110),
    "RLlib: add 16, PER": (88, 14, 51),
    "RLlib: sample 64, PER": (120, 13, 56),
}
#: A file that may use the private names of each host.
COMPAT = {"lightning_compat.py", "torchrl_compat.py", "rllib_compat.py"}
#: Each way in which a line can ask whether an object is of exactly one class of ours, or replaces none of its methods.
#: Classes of NumPy, torch, and Lightning, and those of Python, are compared by ``type(x) is`` for other reasons.
FAST_WAYS = (
    re.compile(r"\bin vars\(type\("),
    re.compile(r"\btype\((self|score|rule|agent|replay|sampler)[\w.]*\)\.(?!state_dict)\w+ is "),
    re.compile(
        r"\btype\((self|score|rule|agent|replay|sampler)[\w.]*\) is (?!int|dict|tuple|float|slice|np|nn|Tensor)"
    ),
    re.compile(r"\bhas_fast_path\("),
)
ENDS_OF_EPISODES = re.compile(
    r"def (end_episodes|end_all_episodes|truncate|cut|break_episodes|_mark_ends|flush)\b"
    r"|def (forget\w*|abandon|make_room)\b"
)
LEADING_WORDS = frozenset(
    (
        *(
            "of",
            "in",
            "at",
            "on",
            "to",
            "for",
            "from",
            "with",
            "without",
            "by",
            "as",
            "into",
            "over",
            "under",
            "before",
        ),
        *("after", "since", "until", "within", "beside", "besides", "through", "during", "among", "above", "below"),
        *("about", "against", "per", "like", "except", "than"),
        *("which", "that", "whose", "whom", "where", "when"),
    )
)
CORE = (
    "import sys\n"
    "from lightning_replay.replay import Replay\n"
    "from lightning_replay.samplers import PrioritizedSampler\n"
    "from lightning_replay.storage import PackedStorage\n"
    "assert Replay and PrioritizedSampler and PackedStorage\n"
    "files = {m.__file__ for n, m in sys.modules.items() if n.split('.')[0] in ('lightning_replay', 'rllib_ext')}\n"
    "print('\\n'.join(sorted(files)))\n"
)


class Place(NamedTuple):
    """A place in a file that a measure counts."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


class Measure(NamedTuple):
    """A measure of the code: its places, and how their number becomes the figure."""

    places: Callable[[], Iterator[Place]]
    figure: Callable[[int], float]
    before: str
    asked: str


class Walk(NamedTuple):
    """What a call enters."""

    calls: int
    files: int
    changes: int


def product_files(packages: tuple[str, ...] = PACKAGES) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in product_files():
        for node in ast.walk(tree_of(path)):
            yield path, node


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@functools.cache
def num_statements() -> int:
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for _, node in nodes())


def tuple_assignments() -> Iterator[Place]:
    for path, node in nodes():
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            yield Place(path, node.lineno, ast.unparse(node))


def conditional_expressions() -> Iterator[Place]:
    for path, node in nodes():
        if isinstance(node, ast.IfExp):
            yield Place(path, node.lineno, ast.unparse(node))


def is_public_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")


def functions_without_docstring() -> Iterator[Place]:
    for path, node in nodes():
        if is_public_function(node) and ast.get_docstring(node) is None:  # type: ignore[arg-type]
            yield Place(path, node.lineno, node.name)  # type: ignore[attr-defined]


def comments_that_lean_on_a_line() -> Iterator[Place]:
    for path in product_files():
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type != tokenize.COMMENT or token.string.startswith(("# SPDX", "# type:", "# noqa", "# fmt")):
                continue
            first = re.match(r"[a-z]+\b", token.string.lstrip("#: "))
            if first and first.group() in LEADING_WORDS:
                yield Place(path, token.start[0], token.string)


def any_in_signatures() -> Iterator[Place]:
    for path, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if argument.annotation is not None and ast.unparse(argument.annotation) == "Any":
                    yield Place(path, argument.lineno, f"{node.name}({argument.arg})")


@functools.cache
def own_private_names() -> dict[str, set[Path]]:
    """Returns the files that define each private name of ours, as a function, an attribute, or a variable."""
    defined: dict[str, set[Path]] = {}
    for path, node in nodes():
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        if name.startswith("_") and not name.startswith("__"):
            defined.setdefault(name, set()).add(path)
    return defined


def private_reads(of_hosts: bool) -> Iterator[Place]:
    own = own_private_names()
    for path, node in nodes():
        if isinstance(node, ast.ImportFrom):
            read = [(alias.name, f"from {node.module} import {alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute):
            receiver = ast.unparse(node.value)
            read = (
                [] if receiver in ("self", "cls") or receiver.startswith("super(") else [(node.attr, ast.unparse(node))]
            )
        else:
            continue
        for name, text in read:
            if not name.startswith("_") or name.startswith("__") or path in own.get(name, ()):
                continue
            if name in {"_replace", "_asdict", "_make", "_fields"}:  # Named tuples publish these names.
                continue
            if (name not in own) == of_hosts:
                yield Place(path, node.lineno, text)


def host_names_outside_compat() -> Iterator[Place]:
    return (place for place in private_reads(of_hosts=True) if place.path.name not in COMPAT)


def fast_ways() -> Iterator[Place]:
    """Yields the first line of each spelling that is in use."""
    return (place for pattern in FAST_WAYS for place in [*lines_matching(pattern)][:1])


def lines_matching(pattern: re.Pattern[str]) -> Iterator[Place]:
    for path in product_files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if pattern.search(line):
                yield Place(path, number, line.strip())


def ends_of_episodes() -> Iterator[Place]:
    """Yields one place for each different name of a function that ends episodes."""
    seen: set[str] = set()
    for place in lines_matching(ENDS_OF_EPISODES):
        name = place.text.partition("def ")[2].partition("(")[0]
        if name not in seen:
            seen.add(name)
            yield place


def hand_written_states() -> Iterator[Place]:
    for path, node in nodes():
        if isinstance(node, ast.ClassDef):
            names = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            if names & STATE:
                yield Place(path, node.lineno, node.name)


def methods_of_replay() -> Iterator[Place]:
    path = ROOT / "lightning_replay" / "replay.py"
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef) and node.name == "Replay":
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    yield Place(path, part.lineno, part.name)


def core_files() -> Iterator[Place]:
    loaded = subprocess.run([sys.executable, "-c", CORE], capture_output=True, text=True, check=True, cwd=ROOT)
    for name in loaded.stdout.split():
        yield Place(Path(name), 1, f"{len(Path(name).read_text().splitlines())} lines")


def modules_off_the_map() -> Iterator[Place]:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for path in product_files():
        if path.name != "__init__.py" and f"`{path.relative_to(ROOT).as_posix()}`" not in page:
            yield Place(path, 1, "is not on the map of CONTRIBUTING.md")


def documented() -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the object of each class and function of ``docs/api``, with its excluded members."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        module = ""
        found: list[tuple[str, set[str]]] = []
        for line in page.read_text().splitlines():
            if match := re.match(r"\.\. currentmodule:: (\S+)", line):
                module = match[1]
            elif match := re.match(r"\.\. auto\w+:: (\S+)", line):
                name = match[1] if match[1].startswith(PACKAGES) else f"{module}.{match[1]}"
                found.append((name, set()))
            elif match := re.match(r"\s+:exclude-members:\s*(.*)", line):
                found[-1][1].update(re.split(r",\s*", match[1].strip()))
        yield from found


def object_of(dotted: str) -> Any:
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[end:], found)
    raise ImportError(dotted)


def members_of(kind: type) -> Iterator[tuple[str, int]]:
    """Yields the documented public members of a class, which autodoc shows, and their lines."""
    source = inspect.getsource(kind)
    lines = source.splitlines()
    first = inspect.getsourcelines(kind)[1]
    node = ast.parse(inspect.cleandoc("\n" + source)).body[0]
    assert isinstance(node, ast.ClassDef)
    for part in node.body:
        name, text = "", ""
        if isinstance(part, ast.FunctionDef):
            setter = any(ast.unparse(decorator).endswith(".setter") for decorator in part.decorator_list)
            name, text = ("" if setter else part.name), ast.get_docstring(part) or ""
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            beside = lines[part.lineno - 1 : part.end_lineno]
            above = lines[part.lineno - 2].strip()
            name = part.target.id
            text = " ".join(line.partition("#:")[2] for line in (*beside, above if above.startswith("#:") else ""))
        if text.strip() and not name.startswith("_") and ":meta private:" not in text:
            yield name, first + part.lineno - 1


@functools.cache
def words_of_pages() -> frozenset[str]:
    patterns = ("docs/*.md", "docs/notebooks/*.ipynb", "*.md", "examples/**/*.py", "configs/**/*.yaml")
    pages = [path for pattern in patterns for path in ROOT.glob(pattern) if path.name != "CHANGELOG.md"]
    return frozenset(word for path in pages for word in re.findall(r"\w+", path.read_text()))


def documented_members() -> Iterator[Place]:
    for dotted, excluded in documented():
        kind = object_of(dotted)
        if inspect.isclass(kind):
            for name, line in members_of(kind):
                if name not in excluded:
                    yield Place(Path(inspect.getsourcefile(kind) or ""), line, f"{dotted}.{name}")


def unmentioned_members() -> Iterator[Place]:
    return (place for place in documented_members() if place.text.rpartition(".")[2] not in words_of_pages())


def per_thousand_statements(count: int) -> float:
    return round(1000 * count / num_statements(), 1)


def percent_of_public_functions(count: int) -> float:
    return round(100 * count / sum(is_public_function(node) for _, node in nodes()), 1)


#: Each measure, with its figure on commit 77d6b771, before the core was made readable alone, and what was asked.
MEASURES = {
    "core files": Measure(core_files, int, "76", "42"),
    "methods of Replay": Measure(methods_of_replay, int, "84", "48"),
    "documented members": Measure(documented_members, int, "528", "-"),
    "documented members on no page, example, or file": Measure(unmentioned_members, int, "140", "20"),
    "tuple assignments per 1,000 statements": Measure(tuple_assignments, per_thousand_statements, "25.3", "8"),
    "conditional expressions per 1,000 statements": Measure(
        conditional_expressions, per_thousand_statements, "42.4", "30"
    ),
    "comments that begin with a preposition or a relative pronoun": Measure(
        comments_that_lean_on_a_line, int, "404", "50"
    ),
    "public functions without a docstring, percent": Measure(
        functions_without_docstring, percent_of_public_functions, "42.9", "10"
    ),
    "reads of private names across files": Measure(lambda: private_reads(of_hosts=False), int, "70", "20"),
    "private names of hosts outside their files": Measure(host_names_outside_compat, int, "43", "0"),
    "arguments of type Any": Measure(any_in_signatures, int, "451", "300"),
    "spellings of an exact class": Measure(fast_ways, int, "4", "1"),
    "verbs that end an episode": Measure(ends_of_episodes, int, "11", "2"),
    "classes with hand-written state": Measure(hand_written_states, int, "81", "55"),
    "modules off the map of CONTRIBUTING.md": Measure(modules_off_the_map, int, "167", "0"),
}


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
    if "--list" in sys.argv or "--each" in sys.argv:
        print_places(*sys.argv[2:])
        return
    print(f"{'':62} {'now':>8} {'before':>8} {'asked':>8}")
    print(f"{'statements':62} {num_statements():>8} {STATEMENTS_BEFORE:>8} {STATEMENTS_BEFORE:>8}")
    for name, measure in MEASURES.items():
        places = [*measure.places()]
        print(f"{name:62} {measure.figure(len(places)):>8} {measure.before:>8} {measure.asked:>8}")
        if name == "core files":
            lines = sum(len(place.path.read_text().splitlines()) for place in places)
            print(f"{'core lines':62} {lines:>8} {CORE_LINES_BEFORE:>8} {8800:>8}")
    print(f"\n{'walk':45} {'own calls':>9} {'files':>6} {'changes':>8}   before")
    for name, walk in [*replay_walks(), ("Lightning: step and DQN update, PER", lightning_walk()), *rllib_walks()]:
        print(f"{name:45} {walk.calls:9} {walk.files:6} {walk.changes:8}   {WALKS_BEFORE[name]}")


def print_places(measure: str, prefix: str = "") -> None:
    names = [name for name in MEASURES if name.startswith(measure)]
    if not names:
        raise SystemExit(f"no measure begins with {measure!r}; the measures are {', '.join(MEASURES)}")
    places = [place for place in MEASURES[names[0]].places() if str(place).startswith(prefix)]
    if "--each" in sys.argv:
        counts = Counter(place.path.relative_to(ROOT).as_posix() for place in places)
        places = [f"{count:5} {path}" for path, count in sorted(counts.items())]  # type: ignore[misc]
    print(*places, sep="\n")
    print(f"{names[0]}: {len(places)}")


if __name__ == "__main__":
    main()
