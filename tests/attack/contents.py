# SPDX-License-Identifier: Apache-2.0
"""Saves with forged contents: what loads is used, and neither a crash nor a hang nor a full memory may follow."""

from __future__ import annotations

import os
import random
import resource
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_replay.replay import Replay
from lightning_replay.saving.files import MALFORMED
from tests.attack.report import Report
from tests.attack.states import fingerprint
from tests.attack.subjects import RecipeSubject
from tests.attack.variants import VARIANTS, Variant

WHOLE = (-1, -(2**62), 1000, 70_000_000, 2**44, 2**62, 2**63 - 1)
REAL = (float("nan"), float("inf"), -5.0, 1e30)
SECONDS = 20.0  # that a load and its use may take, with anything that is compiled
MEMORY = 2 << 30  # that they may take
LOADED, REFUSED, CHANGED, MEMORY_FULL = range(4)
_ENDS = {CHANGED: "is refused and leaves a trace", MEMORY_FULL: "takes more than 2 GiB"}


class Forgery(NamedTuple):
    """A value that stands in place of the one of a save; ``path`` are keys and places."""

    path: tuple[Any, ...]
    what: str
    value: Any

    def __str__(self) -> str:
        return f"{self.what} in {'.'.join(map(str, self.path))}"

    def state(self, whole: Any) -> Any:
        """Returns a copy of a state with the value."""
        state = copied(whole)
        inner = state
        for key in self.path[:-1]:
            inner = inner[key]
        inner[self.path[-1]] = self.value
        return state


def copied(state: Any) -> Any:
    if isinstance(state, dict):
        return type(state)((key, copied(value)) for key, value in state.items())
    if isinstance(state, list):
        return [copied(value) for value in state]
    return state.clone() if isinstance(state, Tensor) else state


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, (*path, key))
    else:
        yield path, state


def forgeries(state: Any) -> Iterator[Forgery]:
    """Yields forgeries of every number of a state, in tensors and alone."""
    for path, value in leaves(state):
        if isinstance(value, Tensor):
            for what, forged in _forged(value):
                yield Forgery(path, what, forged)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            for other in WHOLE if isinstance(value, int) else REAL:
                yield Forgery(path, str(other), other)


def _forged(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    if value.ndim:
        yield "an end cut off", value[:-1].clone()
        yield "everything twice", torch.cat([value, value])
        yield "nothing", value[:0].clone()
    if not value.numel() or value.dtype == torch.bool:
        return
    yield "another kind of number", value.double() if not value.is_floating_point() else value.long()
    yield "an axis more", value.unsqueeze(0).clone()
    others: tuple[Any, ...] = REAL
    if not value.is_floating_point():
        limits = torch.iinfo(value.dtype)
        others = tuple({min(max(one, limits.min), limits.max) for one in WHOLE})
        yield "the first everywhere", value.flatten()[0].expand(value.shape).clone()
        yield "numbers that wrap around", value + value.numel()
    for other in others:
        for name, places in (("everywhere", slice(None)), ("first", slice(1)), ("last", slice(-1, None))):
            forged = value.clone().flatten()
            forged[places] = other
            yield f"{other} {name}", forged.view(value.shape)


class Forger:
    """A used buffer of a recipe, whose state is forged, loaded into others, and used there."""

    def __init__(self, folder: Path, seed: int, variant: Variant) -> None:
        self.folder, self.seed, self.variant = folder, seed, variant
        self.subject = RecipeSubject(folder, seed, variant)
        self.whole = copied(self.subject.replay.state_dict())
        assert self.run(self.whole) == LOADED, "a state that nobody forged is refused"

    def run(self, state: Any) -> int:
        """Loads a state into a new buffer, and uses the buffer."""
        replay = self.variant.build(24, 6, self.seed, self.folder / "rows")
        before = fingerprint(replay.state_dict())
        try:
            replay.load_state_dict(state)
        except MALFORMED:
            return REFUSED if fingerprint(replay.state_dict()) == before else CHANGED
        self.use(replay)
        return LOADED

    def use(self, replay: Replay) -> None:
        """Draws, returns TD errors, and stores rows until they replace others, whatever of it is refused."""
        steps: list[Callable[[], Any]] = [
            lambda: replay.update_priority(replay.sample(), torch.rand(6)),
            replay.sample,
            lambda: replay.extend(self.subject.world.take(9)),
            lambda: replay.extend(self.subject.world.take(1)),
            replay.end_episodes,
            replay.stats,
        ]
        for step in steps * 4:
            with suppress(ArithmeticError, *MALFORMED):
                step()


def in_children(forger: Forger, chosen: list[Forgery], report: Report) -> None:
    """Runs forgeries in forked processes, a new one after each that does not survive."""
    begun = 0
    while begun < len(chosen):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _run(forger, chosen[begun:], writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as stream:
            ends = stream.read()
        killed_by = os.WTERMSIG(os.waitpid(child, 0)[1])
        for forgery, end in zip(chosen[begun:], ends, strict=False):
            report.count("loaded" if end == LOADED else "refused")
            if end in _ENDS:
                report.findings.append(f"{forger.variant}: {forgery} {_ENDS[end]}")
        begun += len(ends)
        if begun < len(chosen):
            end = signal.Signals(killed_by).name if killed_by else "an error of another kind"
            report.findings.append(f"{forger.variant}: {chosen[begun]} ends in {end}")
            begun += 1


def _run(forger: Forger, chosen: list[Forgery], writing: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # of infinite numbers, which a user would see
    with suppress(BaseException):
        for forgery in chosen:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                end = forger.run(forgery.state(forger.whole))
            except MemoryError:
                end = MEMORY_FULL
            os.write(writing, bytes([end]))
    os._exit(0)


def attack(seed: int, count: int, variants: list[Variant] = VARIANTS) -> Report:
    """Forges the state of each variant ``count`` times; all that is known where there is less."""
    report = Report()
    for place, variant in enumerate(variants):
        with tempfile.TemporaryDirectory() as folder, report.round(f"forged contents of {variant}"):
            forger = Forger(Path(folder), 1_000 * seed + place, variant)
            chosen = [*forgeries(forger.whole)]
            random.Random(seed).shuffle(chosen)
            in_children(forger, chosen[:count], report)
    return report
