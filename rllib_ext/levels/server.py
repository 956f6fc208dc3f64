# SPDX-License-Identifier: Apache-2.0
"""The level buffer of an algorithm, in a separate process, and the fragments of episodes in flight."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict

from lightning_replay.levels.scores import EpisodeScore
from lightning_replay.saving import read_state, write_state
from lightning_replay.saving.folders import Folder
from lightning_replay.saving.states import STATE_MANIFEST
from lightning_replay.torchrl_compat import assemble_unchecked
from rllib_ext.checkpoints import CheckFiles
from rllib_ext.rllib_compat import Attached

_MOST_PLAYED = 100_000


class RemoteLevels:
    """The level buffer of an algorithm: a named Ray actor on the driver's node that reserves no CPU.

    A :class:`~rllib_ext.checkpoints.CheckpointPart`. A restore tries the state on a copy of ``packed``. ``seed`` is of
    the training levels that evaluations draw.
    """

    folder = "levels"
    option = "restore_levels"
    restores = True
    instead = "restore_levels=False restores the algorithm alone"

    def __init__(self, packed: bytes, seed: int | None, **options: Any) -> None:
        self._packed = packed
        self.gap_generator: np.random.Generator = np.random.default_rng(seed)
        self.name: str = f"levels_{uuid.uuid4().hex}"
        self._spare = tempfile.TemporaryDirectory(prefix=f"{self.name}_", ignore_cleanup_errors=True)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        kind: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(LevelServer)
        self.actor: Any = kind.options(name=self.name, scheduling_strategy=here).remote(
            packed, spare=self._spare.name, **options
        )

    def ask(self, method: str, *arguments: Any) -> Any:
        """Returns the answer of a method of the :class:`LevelServer`. Waits until the actor has started."""
        return ray.get(getattr(self.actor, method).remote(*arguments))

    def probabilities(self) -> TensorDict:
        """Returns :meth:`~lightning_replay.levels.LevelSelector.probabilities`."""
        return self.ask("probabilities")

    def played_levels(self) -> list[int]:
        """Returns levels with a score, and those played since the start, at most the last 100,000 of them."""
        return list(self.ask("played_levels"))

    def stats(self) -> dict[str, float]:
        """Returns the figures that results have under ``levels``."""
        return dict(self.ask("stats"))

    def state_dict(self) -> dict[str, Any]:
        """Returns :meth:`~lightning_replay.levels.LevelSelector.state_dict`."""
        return dict(self.state()["levels"])

    def save(self, path: str | Path) -> None:
        """Writes a save for :meth:`~lightning_replay.levels.LevelSelector.load` into a directory or a URL of fsspec."""
        state = self.state_dict()
        write_state(path, state, of=state["kind"])

    def state(self) -> dict[str, Any]:
        """Returns the state of the level buffer."""
        return dict(self.ask("state"))

    def write(self, folder: Folder, state: dict[str, Any], files: Mapping[str, Any]) -> None:
        """Writes the state into a folder."""
        with folder.to_write() as local:
            write_state(local, state | {"algorithm": files})

    def read(self, folder: Folder, check_files: CheckFiles) -> Callable[[], None]:
        """Reads the state from a checkpoint and loads it into a copy. Returns a function that restores it."""
        with folder.to_read() as local:
            state = read_state(local)
        check_files(state.pop("algorithm", None))
        cloudpickle.loads(self._packed).load_state_dict(state["levels"])
        return lambda: self.ask("load_state", state)

    def leave_out(self, folder: Folder) -> Callable[[], None]:
        """Returns a function that does nothing: without the saved levels, the present ones stay."""
        return lambda: None

    def stop(self) -> None:
        """Ends the actor and removes its files."""
        ray.kill(self.actor)
        self._spare.cleanup()


# The levels of each algorithm.
LEVELS = Attached[RemoteLevels]("levels")


def level_buffer(algorithm: Any) -> RemoteLevels:
    """Returns the level buffer of an algorithm that was configured with :func:`rllib_ext.configure` and ``levels``.

    Raises:
        ValueError: it was not.
    """
    levels = LEVELS.of(algorithm)
    if levels is None:
        raise ValueError(
            "the algorithm has no level buffer: call rllib_ext.configure(config, levels=...) before config.build_algo()"
        )
    return levels


class LevelServer:
    """Chooses the levels that environments play, and scores them.

    Every episode is a separate actor in the level buffer, named by RLlib's id, since an environment may have several
    episodes in flight on one level. If the process is lost, Ray restarts it, and it resumes from the last
    :meth:`report`, in ``spare``. Episodes begun or drawn ahead until then are not scored, and not trained on.
    """

    def __init__(
        self, packed: bytes, *, environments: int, max_lag: int, max_pending: int, flush: bool, spare: str
    ) -> None:
        self._levels = cloudpickle.loads(packed)
        self._levels.claim()
        self._environments, self._flush, self._spare = environments, flush, Path(spare)
        self._episodes = PendingEpisodes(max_lag)
        self._max_pending = max_pending
        self._processes: dict[int, str] = {}
        self._played: dict[int, None] = {}
        self._left: dict[str, None] = {}
        self._fault: str | None = None
        self._choices = self._any_level = self._restarts = 0
        if (self._spare / STATE_MANIFEST).exists():  # a loss during the first write leaves files, and no manifest
            state = read_state(self._spare)
            self._restarts = int(state.pop("restarts")) + 1
            self.load_state(state)
        else:
            self._write()

    def draw(self, runner: int, process: str, names: Sequence[str], broken_off: Sequence[str] = ()) -> list[int]:
        """Draws levels of an EnvRunner's next episodes, one by one. ``broken_off`` ended without being done."""
        if self._processes.setdefault(runner, process) != process:  # another process: the EnvRunner was lost
            self._processes[runner] = process
            self._lose_runners([runner])
        self._lose(broken_off)
        return [self._draw(runner, name) for name in names]

    def _draw(self, runner: int, name: str) -> int:
        if name in self._left:  # drawn before a restart, whose call is now repeated
            self._levels.abandon(name)
            del self._left[name]
        try:
            level_id = self._any_level = int(self._levels.next_level(name))
        except Exception:  # raised by check(): an error on an EnvRunner would have RLlib restart it endlessly
            self._fault = traceback.format_exc()
            return self._any_level
        self._played.pop(level_id, None)
        self._played[level_id] = None
        if len(self._played) > _MOST_PLAYED:
            del self._played[next(iter(self._played))]
        self._episodes.active[name] = PendingEpisode(name, level_id, runner)
        self._choices += 1
        # Until every environment has chosen a level, levels of the time before a resume count.
        while self._left and self._choices >= self._environments:
            self._levels.abandon(self._left.popitem()[0])
        return level_id

    def score(self, fragments: Sequence[Fragment]) -> None:
        """Updates the level buffer with fragments that a Learner is about to learn from."""
        self.check()
        learned, late = self._episodes.take(fragments)
        for episode, fragment in learned:
            steps = fragment.steps()
            if isinstance(self._levels.score, EpisodeScore):
                steps["next", "reward"] = fragment.own_rewards()
            self._levels.update(episode.actor, episode.level_id, steps, fragment.is_done)
        self._lose(late)
        if self._flush:
            self._levels.flush()

    def trains_on(self, episode_ids: Sequence[str]) -> list[bool]:
        """Returns whether the Learner may learn from each episode, and not from one that was dropped."""
        episodes = [self._episodes.active.get(name) for name in episode_ids]
        return [one is not None and self._levels.trains_on(one.actor, one.level_id) for one in episodes]

    def _lose_runners(self, runners: Sequence[int]) -> None:
        self._lose([name for name, episode in self._episodes.active.items() if episode.runner in runners])

    def _lose(self, names: Iterable[str]) -> None:
        for name in names:
            if self._episodes.active.pop(name, None) is not None:
                self._episodes.counts["episodes_lost"] += 1
                self._levels.abandon(name)

    def check(self) -> None:
        """Raises the error of a failed choice of a level."""
        if self._fault is not None:
            fault = self._fault
            self._fault = None
            raise RuntimeError(f"the level buffer could not choose a level:\n{fault}")

    def report(self, lost_runners: Sequence[int]) -> dict[str, float]:
        """Drops the episodes of lost EnvRunners, writes the state for a restart and returns :meth:`stats`."""
        self.check()
        self._lose_runners(lost_runners)
        of_runners: dict[int, list[str]] = {}
        for name, episode in self._episodes.active.items():
            of_runners.setdefault(episode.runner, []).append(name)
        for names in of_runners.values():
            self._lose(names[: -self._max_pending])
        self._write()
        return self.stats()

    def _write(self) -> None:
        write_state(self._spare, self.state() | {"restarts": self._restarts})

    def stats(self) -> dict[str, float]:
        """Returns the statistics of the level buffer, and its expected staleness in episodes."""
        figures = dict(self._levels.stats())
        rows = self._levels.probabilities()
        if len(rows):
            figures["expected_staleness"] = float((rows["probability"] * rows["staleness"]).sum())
        return figures | dict(self._episodes.counts) | {"restarts": self._restarts}

    def probabilities(self) -> TensorDict:
        """Returns :meth:`LevelBuffer.probabilities <lightning_replay.levels.LevelBuffer.probabilities>`."""
        return self._levels.probabilities()

    def played_levels(self) -> list[int]:
        """Returns the levels that have been played or have a score, in order."""
        return sorted({*self._levels.probabilities()["level_id"].tolist(), *self._played})

    def state(self) -> dict[str, Any]:
        """Returns the state of the levels, and the played levels."""
        return {"levels": self._levels.state_dict(), "played": torch.tensor(list(self._played), dtype=torch.int64)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the levels. Episodes in flight are abandoned when every environment has begun another."""
        # Episodes in flight are abandoned once every environment has begun another.
        self._levels.load_state_dict(state["levels"])
        self._played = dict.fromkeys(state["played"].tolist())
        self._episodes.active.clear()
        self._left = dict.fromkeys(map(str, state["levels"]["running"]["actors"]))
        self._choices = 0
        self._write()


class PendingEpisodes:
    """Tracks the episodes in flight by RLlib's ids.

    A score is a mean over steps, so fragments count in any order of arrival. The one that ends the episode counts
    last: with several Learners it may overtake others, and waits for them. An episode is dropped if, more than
    ``max_lag`` times in a row, fragments of later episodes of its EnvRunner arrived and no fragment of the episode.
    """

    def __init__(self, max_lag: int) -> None:
        self._max_lag = max_lag
        self.active: dict[str, PendingEpisode] = {}
        # Fragments of unknown episodes and duplicates, scored episodes that lack one, episodes dropped without a score.
        self.counts: Counter[str] = Counter(fragments_dropped=0, gaps=0, episodes_lost=0)

    def take(self, fragments: Sequence[Fragment]) -> tuple[list[tuple[PendingEpisode, Fragment]], list[str]]:
        """Returns fragments to learn from with their episodes, ends last, and the episodes to drop without a score."""
        learned: list[tuple[PendingEpisode, Fragment]] = []
        newest: dict[int, int] = {}
        for fragment in fragments:
            episode = self.active.get(fragment.episode_id)
            if episode is None or fragment.t_started in episode.first_steps:
                self.counts["fragments_dropped"] += 1
                continue
            newest[episode.runner] = max(newest.get(episode.runner, -1), episode.number)
            episode.first_steps.add(fragment.t_started)
            episode.steps += len(fragment)
            episode.lag = 0
            if fragment.is_done:
                episode.last = fragment
            else:
                learned.append((episode, fragment))
            # All steps up to the end have arrived, in whatever order.
            if episode.last is not None and episode.steps == episode.last.t_started + len(episode.last):
                learned.append((self.active.pop(fragment.episode_id), episode.last))
        heard = {fragment.episode_id for fragment in fragments}
        late = list[str]()
        for name, episode in [*self.active.items()]:
            if name in heard or episode.number >= newest.get(episode.runner, -1):
                continue
            episode.lag += 1
            if episode.lag > self._max_lag and episode.last is not None:
                learned.append((self.active.pop(name), episode.last))
                self.counts["gaps"] += 1
            elif episode.lag > self._max_lag:
                late.append(name)
        return learned, late


@dataclasses.dataclass
class PendingEpisode:
    """An episode that has begun and has no score yet."""

    actor: str  # its name in the level buffer
    level_id: int
    runner: int  # index of its EnvRunner
    number: int = dataclasses.field(
        default_factory=itertools.count().__next__
    )  #: Episodes are numbered in the order in which they begin.
    first_steps: set[int] = dataclasses.field(default_factory=set)  #: First steps of the fragments that arrived.
    steps: int = 0  #: Steps that arrived.
    last: Fragment | None = None  # the fragment that ends it, kept until all steps before it have arrived
    lag: int = 0  # how often in a row fragments of later episodes of its EnvRunner arrived, and none of its own


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Consecutive steps of one episode with the values that the Learner's module computed."""

    episode_id: str  # RLlib's
    t_started: int  # number of the first step in its episode
    reward: np.ndarray  # float32 [T], those the Learner learns from
    state_value: np.ndarray  # float32 [T + 1], the last of the observation behind the last step
    terminated: bool  #: Whether the last step terminates the episode.
    truncated: bool
    logits: np.ndarray | None = None  # float32 [T, A] of the policy that acted, where actions are discrete
    episode_return: float = 0.0  #: Sum of the environment's own rewards, if the last step ends the episode.

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def is_done(self) -> bool:
        """Whether the episode ends with this fragment."""
        return self.terminated or self.truncated

    def own_rewards(self) -> torch.Tensor:
        """Returns float64 ``[T]``, whose sum over all fragments is the episode's return in the environment's units."""
        return torch.tensor([0.0] * (len(self) - 1) + [self.episode_return], dtype=torch.float64)

    def steps(self) -> TensorDict:
        """Returns the steps in TorchRL's layout, ``[T]``."""
        ends = torch.zeros(3, len(self), dtype=torch.bool)
        ends[:, -1] = torch.tensor([self.terminated, self.truncated, self.is_done])
        values = torch.tensor(self.state_value, dtype=torch.float32)
        following = {
            "reward": torch.tensor(self.reward, dtype=torch.float32),
            "state_value": values[1:],
            **dict(zip(("terminated", "truncated", "done"), ends, strict=True)),
        }
        size = torch.Size([len(self)])
        cpu = torch.device("cpu")
        columns = {"state_value": values[:-1], "next": assemble_unchecked(following, size, cpu)}
        if self.logits is not None:
            columns["logits"] = torch.tensor(self.logits, dtype=torch.float32)
        return assemble_unchecked(columns, size, cpu)  # the checks of TensorDict would take half the time of a score
