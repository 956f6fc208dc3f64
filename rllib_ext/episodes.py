# SPDX-License-Identifier: Apache-2.0
"""RLlib's episodes as columns of a replay: fragments, new rows, infos, and progress signals of tasks."""

from __future__ import annotations

import functools
import logging
import numbers
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ray.rllib.core.columns import Columns as RLlibColumns
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import batch as stack_structs

from lightning_replay.envs.building import checked_info_keys

if TYPE_CHECKING:
    from lightning_replay.schedulers import ReturnProgress
    from lightning_replay.table_replay import CurriculumReplay

logger: logging.Logger = logging.getLogger(__name__)
Struct = Any  # an array, or dicts and tuples of arrays, all with the same first dimension
Key = tuple[str, ...]
# Name of the task in infos, in an episode's custom_data, and of the column.
TASK = "task"
_STATE = RLlibColumns.STATE_OUT
_ROWS_BEFORE_WARNING = 1_000
# Entry in the custom data of an agent's episode.
_TERMINATED = "rllib_ext_terminated"


class EpisodeConverter:
    """Turns the episodes of one ``add`` call into columns of transitions.

    The lookback buffer in front of a fragment belongs to the fragment before and is left out. Actions are those the
    module computed, as in RLlib's own buffers, not the unsquashed ones the environment got. Rewards are float32,
    everything else has the dtype of the first rows (:class:`Columns`). Of a recurrent module, its state after each step
    and the number of the step in its episode are stored too.

    Example:
        >>> episode = SingleAgentEpisode(observations=[np.zeros(2), np.ones(2)], actions=[1], rewards=[0.5],
        ...                              terminated=True, len_lookback_buffer=0)
        >>> converter = EpisodeConverter()
        >>> rows = converter.transitions(converter.flatten([episode]))
        >>> rows["next", "observation"].tolist(), rows[("action",)].tolist(), rows["next", "terminated"].tolist()
        ([[1.0, 1.0]], [1], [[True]])
    """

    def __init__(self, information: Information | None = None) -> None:
        self.fragments: FragmentTracker = FragmentTracker()
        self.information: Information = information or Information()
        self.slices: list[EpisodeSlice] = []  # the new rows of the last add by episode, where there is a curriculum
        self.columns: dict[str, Columns] = {}  #: Columns by name; empty before the first rows.

    def flatten(self, episodes: Sequence[SingleAgentEpisode]) -> list[FlatEpisode]:
        """Returns episodes as columns, and refuses episodes that do not fit the first ones. Keeps nothing."""
        structs = [(episode, _structs(episode)) for episode in episodes if len(episode) > 0]
        if not structs:
            return []
        # Kept by transitions(): a fragment that is refused must not decide what fits.
        columns = self.columns or {name: Columns(name, struct) for name, struct in structs[0][1].items()}
        flat = []
        information = self.information
        for episode, given in structs:
            if given.keys() != columns.keys():
                here, before = ("state_out", "none") if _STATE in given else ("no state_out", "one with every step")
                raise ValueError(
                    f"episode {episode.id_} carries {here} among its extra model outputs, and the episodes before it "
                    f"{before}. One buffer stores what one module played, either a recurrent one (use_lstm) or one "
                    "without state"
                )
            arrays: dict[Key, np.ndarray] = information.read(episode)
            length = len(episode)
            if _STATE in given:
                arrays[("step",)] = np.arange(episode.t_started, episode.t_started + length)
            for name, struct in given.items():
                for leaf, array in zip(columns[name].leaves, columns[name].flatten(struct), strict=True):
                    arrays[leaf.key] = array[:length]
                    if name == "observation":  # [n + 1, ...]: the next observation is the one behind
                        arrays["next", *leaf.key] = array[1:]
            flat.append(FlatEpisode(episode, columns, arrays))
        return flat

    def transitions(self, flat: Sequence[FlatEpisode]) -> dict[Key, np.ndarray] | None:
        """Returns the new rows, in time order per trajectory, or ``None`` if there are none.

        Sampled keys, each as a tuple of names:
            observation, action, ("next", "observation"): of the spaces, nested for Dict and Tuple spaces.
            ("next", "reward"): float32 ``[n, 1]``. ("next", "terminated" | "truncated" | "done"): bool ``[n, 1]``.
            trajectory: int64 ``[n]``.
            ("next", key): float32 ``[n, 1]``, of each key of the infos.
            task: int64 ``[n]``, of a curriculum.
            state_out, step: of recurrent modules, the state after the step, nested as the module's, and int64 ``[n]``.
        """
        self.slices = []
        if not flat:
            return None
        self.columns = flat[0].columns
        parts: list[dict[Key, np.ndarray]] = []
        trajectories = []
        rewards = []
        ends = []
        for one in flat:
            episode = one.episode
            length = len(one.episode)
            trajectory, first = self.fragments.place(episode.id_, episode.t_started, length)
            if first == length:  # a fragment that was sent twice
                continue
            parts.append({key: array[first:] for key, array in one.arrays.items()})
            trajectories.append(trajectory)
            rewards.append(np.asarray(episode.get_rewards(slice(first, length)), dtype=np.float32))
            ends.append((has_terminated(episode), episode.is_truncated))
            if (TASK,) in one.arrays:
                first_step = episode.t_started + first
                task = int(one.arrays[(TASK,)][-1])
                self.slices.append(EpisodeSlice(trajectory, first_step, rewards[-1], any(ends[-1]), task))
        if not parts:
            return None
        # Once for all episodes: arrays for each, which often has few new steps, take 5 % of an add.
        lengths = [len(part) for part in rewards]
        flags = np.zeros((3, sum(lengths), 1), dtype=bool)
        flags[:2, np.cumsum(lengths) - 1, 0] = np.transpose(ends)
        np.logical_or(flags[0], flags[1], out=flags[2])
        rows: dict[Key, np.ndarray] = {
            ("trajectory",): np.repeat(trajectories, lengths),
            ("next", "reward"): np.concatenate(rewards)[:, None],
            **{("next", name): flag for name, flag in zip(("terminated", "truncated", "done"), flags, strict=True)},
        }
        # concatenate copies, so the rows are writable even if Ray's object store handed out read-only arrays
        return rows | {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def state(self) -> dict[str, Any]:
        """Returns the state of the fragments and the columns."""
        return {
            "fragments": self.fragments.state(),
            "columns": {name: columns.state() for name, columns in self.columns.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self.fragments.load_state(state["fragments"])
        self.columns = {name: Columns.from_state(part) for name, part in state["columns"].items()}


class FlatEpisode(NamedTuple):
    """An episode fragment whose columns fit what is stored."""

    episode: SingleAgentEpisode
    columns: dict[str, Columns]  # how observation, action and, of a recurrent module, state_out nest
    arrays: dict[Key, np.ndarray]  # [n, ...] each: theirs, those from the infos, and the steps of a recurrent module


def _structs(episode: SingleAgentEpisode) -> dict[str, Any]:
    # The nested values of an episode by column, lists of steps stacked, without the lookback buffer.
    steps = slice(0, len(episode))
    structs = {
        "observation": episode.get_observations(slice(0, len(episode) + 1)),
        "action": episode.get_actions(steps),
    }
    if _STATE in episode.extra_model_outputs:
        structs[_STATE] = episode.get_extra_model_outputs(_STATE, steps)
    return {name: stack_structs(value) if isinstance(value, list) else value for name, value in structs.items()}


def has_terminated(episode: SingleAgentEpisode) -> bool:
    """Returns whether an episode, or one agent of an episode, has terminated by the environment's own flags."""
    # Of one agent among several by the flags that the environment returned.
    is_one_of_several = episode.multi_agent_episode_id is not None
    # Without the record, as in episodes from files: RLlib marks agents that are all truncated as terminated too.
    default = episode.is_terminated and not (episode.is_truncated and is_one_of_several)
    return bool(episode.custom_data.get(_TERMINATED, default))


def _recording_ends(add_env_step: Callable[..., None]) -> Callable[..., None]:
    # RLlib ends every agent with the flags of "__all__" beside its own, and marks the whole episode terminated once all
    # agents are done. Agents that died and agents that a time limit stopped have the same flags afterwards. RLlib's
    # flags stay as they are. The record is in the custom data of the agent's episode.

    @functools.wraps(add_env_step)
    def recording_ends(
        self: MultiAgentEpisode, *step: Any, terminateds: Any = None, truncateds: Any = None, **rest: Any
    ) -> None:
        add_env_step(self, *step, terminateds=terminateds, truncateds=truncateds, **rest)
        died = terminateds or {}
        stopped = truncateds or {}
        if not (any(died.values()) or any(stopped.values())):
            return
        for agent, episode in self.agent_episodes.items():
            if episode.is_done:  # an agent's own flags count more than those of all; earlier ends stay
                terminated = died.get(agent) or (died.get("__all__") and not stopped.get(agent))
                episode.custom_data.setdefault(_TERMINATED, bool(terminated))

    return recording_ends


# EnvRunners import this module with the class of the buffer in their config.
MultiAgentEpisode.add_env_step = _recording_ends(MultiAgentEpisode.add_env_step)


class FragmentTracker:
    """Joins the fragments in which EnvRunners send an episode, by ``id_`` and ``t_started``.

    ::

        fragment        t_started  rows   next step    result
        first               0       3          -        rows 0 1 2, new trajectory
        second              3       2          3        rows 3 4, same trajectory
        second again        3       2          5        nothing new, 2 rows counted as duplicates
        overlapping         4       3          5        rows 5 6, same trajectory, 1 duplicate
        one was lost        9       2          7        rows 9 10, new trajectory, 1 gap

    Finished episodes are also remembered, to recognize a fragment that is sent twice. The episode continued longest ago
    is removed first.
    """

    def __init__(self, remembered: int = 4096) -> None:
        self.remembered = remembered
        self.episodes: int = 0
        self.steps: int = 0
        self.gaps: int = 0
        self.duplicates: int = 0
        self.trajectories: int = 0
        self._known: OrderedDict[str, tuple[int, int]] = OrderedDict()  # trajectory and next step, by episode

    def place(self, episode_id: str, first_step: int, length: int) -> tuple[int, int]:
        """Returns the trajectory of a fragment's rows and the first new row, ``length`` if none is new."""
        known = self._known.pop(episode_id, None)
        if known is None or first_step > known[1]:
            # After a gap the rows are complete transitions. Only the link to the fragment before is lost.
            self.episodes += known is None
            self.gaps += known is not None
            known = self.trajectories, first_step
            self.trajectories += 1
        trajectory, next_step = known
        first_row = min(next_step - first_step, length)
        self.duplicates += first_row
        self.steps += length - first_row
        self._known[episode_id] = trajectory, max(next_step, first_step + length)
        if len(self._known) > self.remembered:
            self._known.popitem(last=False)
        return trajectory, first_row

    def end_all_episodes(self) -> None:
        """Ends running episodes, so that no further fragment continues them."""
        self._known.clear()

    def state(self) -> dict[str, Any]:
        """Returns the counters and the running episodes."""
        return {
            "counts": [self.episodes, self.steps, self.gaps, self.duplicates, self.trajectories],
            "known": [[episode_id, *known] for episode_id, known in self._known.items()],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self.episodes, self.steps, self.gaps, self.duplicates, self.trajectories = state["counts"]
        self._known = OrderedDict((name, (trajectory, step)) for name, trajectory, step in state["known"])


class Columns:
    """Flattens nested values into columns, their parts as keys below ``name``, and restores the nesting.

    Later rows are cast to the dtypes of the first, ``struct``, within their kind (int32 to int64), and else refused.
    """

    def __init__(self, name: str, struct: Struct) -> None:
        self.name = name
        self.leaves: list[Leaf] = []
        self._nesting = self._describe(struct, (name,))
        if not self.leaves:
            raise ValueError(f"{name} has no entries: {struct!r}. Give a space with at least one Box or Discrete part.")

    def flatten(self, struct: Struct) -> list[np.ndarray]:
        """Returns the leaves of a nested value as arrays of the stored dtypes and shapes."""
        arrays = list(self._walk(struct, self._nesting, self.name))
        return [_fit(np.asarray(array), leaf) for array, leaf in zip(arrays, self.leaves, strict=True)]

    def unflatten(self, arrays: list[Any]) -> Struct:
        """Returns the nested value of flat arrays."""
        return self._rebuild(self._nesting, iter(arrays))

    def state(self) -> dict[str, Any]:
        """Returns name, nesting, and leaves as a save holds them."""
        leaves = [[list(leaf.key), leaf.dtype.str, list(leaf.shape)] for leaf in self.leaves]
        return {"name": self.name, "struct": self._nesting, "leaves": leaves}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Columns:
        """Returns the columns that :meth:`state` described."""
        columns = cls.__new__(cls)
        columns.name = state["name"]
        columns._nesting = state["struct"]
        columns.leaves = [Leaf(tuple(key), np.dtype(dtype), tuple(shape)) for key, dtype, shape in state["leaves"]]
        if not all(
            leaf.dtype.kind in "biufc" for leaf in columns.leaves
        ):  # An array of objects could not be read from its bytes.
            raise ValueError(f"the saved {state['name']} has columns of {state['leaves']}; load an earlier save")
        return columns

    def _describe(self, struct: Struct, key: tuple[str, ...]) -> Any:
        if isinstance(struct, dict):
            return {"dict": [[name, self._describe(part, (*key, str(name)))] for name, part in struct.items()]}
        if isinstance(struct, tuple):
            return {"tuple": [self._describe(part, (*key, str(place))) for place, part in enumerate(struct)]}
        array = np.asarray(struct)
        if array.dtype.kind not in "biufc":
            raise ValueError(
                f"{'/'.join(key)} holds values of type {array.dtype}; stored are booleans, integers and floats "
                "(Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them). Convert it in a connector."
            )
        self.leaves.append(Leaf(key, array.dtype, array.shape[1:]))
        return "leaf"

    def _walk(self, struct: Struct, nesting: Any, name: str) -> Iterator[Any]:
        if nesting == "leaf":
            yield struct
            return
        kind, parts = next(iter(nesting.items()))
        if kind == "dict":
            fits = isinstance(struct, dict) and set(struct) == {key for key, _ in parts}
            expected = f"the entries {[key for key, _ in parts]}"
        else:
            fits = isinstance(struct, tuple) and len(struct) == len(parts)
            expected = f"{len(parts)} parts"
        if not fits:
            given = list(struct) if isinstance(struct, dict) else type(struct).__name__
            raise ValueError(f"{name} is {given}; the first rows had {expected}. One buffer stores rows of one space.")
        for key, part in parts if kind == "dict" else enumerate(parts):
            yield from self._walk(struct[key], part, f"{name}/{key}")

    def _rebuild(self, nesting: Any, arrays: Iterator[Any]) -> Struct:
        if nesting == "leaf":
            return next(arrays)
        kind, parts = next(iter(nesting.items()))
        if kind == "dict":
            return {key: self._rebuild(part, arrays) for key, part in parts}
        return tuple(self._rebuild(part, arrays) for part in parts)


class Leaf(NamedTuple):
    """One column: its key in the TensorDict, and dtype and shape that later rows must fit."""

    key: Key
    dtype: np.dtype
    shape: tuple[int, ...]


def _fit(array: np.ndarray, leaf: Leaf) -> np.ndarray:
    if array.shape[1:] != leaf.shape:
        raise ValueError(
            f"{'/'.join(leaf.key)} has shape {array.shape[1:]}; the first rows had {leaf.shape}. "
            "One buffer stores rows of one space."
        )
    if array.dtype == leaf.dtype:
        return array
    if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        raise ValueError(
            f"{'/'.join(leaf.key)} has dtype {array.dtype}; the first rows had {leaf.dtype}, which cannot hold it. "
            "Let every environment return the dtype of its space."
        )
    return array.astype(leaf.dtype)


class Information:
    """Reads infos as columns: numbers or flags, 0 if an info lacks the key, and tasks of ``configure`` or infos."""

    def __init__(self, keys: Sequence[str] = (), tasks: Sequence[str] | None = None) -> None:
        self.keys: tuple[str, ...] = checked_info_keys(keys)
        self.tasks: list[str] | None = None if tasks is None else list(tasks)
        self._missing = set(keys)
        self._rows_read = 0

    def read(self, episode: SingleAgentEpisode) -> dict[Key, np.ndarray]:
        """Returns the columns ``("next", key)``, float32 ``[n, 1]``, and of a curriculum ``task``, int64 ``[n]``."""
        columns: dict[Key, np.ndarray] = {}
        if self.keys:
            infos = _infos(episode)
            self._warn_of_missing(infos)
            for key in self.keys:
                columns["next", key] = np.array([[_number(key, info, episode)] for info in infos], dtype=np.float32)
        if self.tasks is not None:
            tag = episode.custom_data.get(TASK)
            given = [info.get(TASK) for info in _infos(episode)] if tag is None else [tag]
            columns[(TASK,)] = np.full(len(episode), [self._task(task, episode) for task in given], dtype=np.int64)
        return columns

    def _warn_of_missing(self, infos: list[dict[str, Any]]) -> None:
        self._missing = {key for key in self._missing if not any(key in info for info in infos)}
        rows_before = self._rows_read
        self._rows_read = self._rows_read + len(infos)
        if self._missing and rows_before < _ROWS_BEFORE_WARNING <= self._rows_read:  # they may be misspelt
            logger.warning(
                f"info_keys has {sorted(self._missing)}, which no info had in the first {self._rows_read} steps and "
                f"which is stored as 0; the last info has {sorted(map(str, infos[-1]))}"
            )

    def _task(self, value: Any, episode: SingleAgentEpisode) -> int:
        assert self.tasks is not None
        value = _scalar(value)
        if isinstance(value, str) and value in self.tasks:
            return self.tasks.index(value)
        if isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= int(value) < len(self.tasks):
            return int(value)
        if value is None:
            raise ValueError(
                f"the steps of episode {episode.id_} have no task, and the replay has the tasks {self.tasks}. Let "
                "rllib_ext.configure(config) set each environment's task, or put 'task' into the info of every step"
            )
        raise ValueError(
            f"episode {episode.id_} is of task {value!r}; the replay has the tasks {self.tasks}, by name or numbered "
            f"0 to {len(self.tasks) - 1}"
        )


def _infos(episode: SingleAgentEpisode) -> list[dict[str, Any]]:
    return [info or {} for info in episode.get_infos(slice(1, len(episode) + 1))]


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value


def _number(key: str, info: dict[str, Any], episode: SingleAgentEpisode) -> float:
    value = _scalar(info.get(key, 0))
    if not isinstance(value, numbers.Real | np.bool_):
        raise ValueError(
            f"info {key!r} of episode {episode.id_} holds {value!r}; info_keys takes one number or flag for each step. "
            "Leave the key out, or put a number into the info by a wrapper. Nothing was stored"
        )
    return float(value)


class TaskProgress:
    """Sums the rewards of whole episodes and sends a signal when one ends.

    It remembers at most ``remembered`` running episodes.
    """

    def __init__(self, replay: CurriculumReplay, progress: ReturnProgress | None, remembered: int = 4096) -> None:
        self.replay: CurriculumReplay = replay
        self._progress = progress
        self._remembered = remembered
        self._running: OrderedDict[int, float] = OrderedDict()
        self.episodes: Counter[str] = Counter()
        self._new: list[tuple[str, float]] = []
        self.signals: dict[str, float] = {}

    def update(self, slices: list[EpisodeSlice]) -> None:
        """Adds up the returns of new steps, and sends a signal for each episode that ends."""
        for one in slices:
            before = 0.0 if one.first_step == 0 else self._running.pop(one.trajectory, None)
            if before is None:
                continue
            total = before + float(np.sum(one.rewards, dtype=np.float64))
            if not one.ended:
                self._running[one.trajectory] = total
                continue
            name = self.replay.tasks[one.task]
            self.episodes[name] += 1
            signal = None if self._progress is None else self._progress.episode(one.task, total)
            if signal is not None:
                self.replay.progress(name, signal)
                self.signals[name] = signal
                self._new.append((name, signal))
        del self._new[: -self._remembered]
        while len(self._running) > self._remembered:  # their EnvRunner was lost
            self._running.popitem(last=False)

    def new_signals(self) -> list[tuple[str, float]]:
        """Returns the signals since the last call, each with its task, for a scheduler elsewhere."""
        signals = self._new
        self._new = []
        return signals

    def end_all_episodes(self) -> None:
        """Ends running episodes without a signal."""
        self._running.clear()

    def state(self) -> dict[str, Any]:
        """Returns the running returns, the counters, and the signals."""
        return {
            "running": [[trajectory, total] for trajectory, total in self._running.items()],
            "episodes": dict(self.episodes),
            "signals": dict(self.signals),
            "progress": None if self._progress is None else self._progress.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self._running = OrderedDict((trajectory, total) for trajectory, total in state["running"])
        self.episodes = Counter(state["episodes"])
        self.signals = dict(state["signals"])
        if self._progress is not None and state["progress"] is not None:
            self._progress.load_state_dict(state["progress"])


class EpisodeSlice(NamedTuple):
    """New rows of one trajectory. ``ended`` is whether the last row ended the episode, and ``task`` is its task."""

    trajectory: int
    first_step: int
    rewards: np.ndarray
    ended: bool
    task: int
