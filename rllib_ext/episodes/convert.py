# SPDX-License-Identifier: Apache-2.0
"""RLlib's ``SingleAgentEpisode`` fragments to the columns of a replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from ray.rllib.core.columns import Columns as RLlibColumns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import batch as stack_structs

from rllib_ext.episodes.columns import Columns
from rllib_ext.episodes.fragments import FragmentTracker
from rllib_ext.episodes.info_columns import TASK, Information
from rllib_ext.episodes.task_progress import EpisodeSlice
from rllib_ext.rllib_compat import has_terminated

_STATE = RLlibColumns.STATE_OUT
Key = tuple[str, ...]


class FlatEpisode(NamedTuple):
    """An episode fragment whose columns fit what is stored.

    Attributes:
        columns: how ``observation``, ``action`` and, of a recurrent module, ``state_out`` nest.
        arrays: their values by name, observations ``[n + 1, ...]``, the others ``[n, ...]``.
        information, tasks: from the infos.
    """

    episode: SingleAgentEpisode
    columns: dict[str, Columns]
    arrays: dict[str, list[np.ndarray]]
    information: list[np.ndarray]
    tasks: np.ndarray | None


class EpisodeConverter:
    """Turns the episodes of one ``add`` call into columns of transitions.

    The lookback buffer in front of a fragment belongs to the fragment before and is left out. Actions are those the
    module computed, as in RLlib's own buffers, not the unsquashed ones the environment got. Rewards are float32,
    everything else has the dtype of the first rows (:class:`Columns`). Of a recurrent module, its state after each step
    and the number of the step in its episode are stored too.

    Args:
        information: which columns come from the infos; none by default.

    Attributes:
        columns: of what is stored, by name; empty before the first rows.
        slices: the new rows of the last :meth:`transitions` by episode, where there is a curriculum.

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
        self.slices: list[EpisodeSlice] = []
        self.columns: dict[str, Columns] = {}

    def flatten(self, episodes: Sequence[SingleAgentEpisode]) -> list[FlatEpisode]:
        """Returns episodes as columns, and refuses those that do not fit the first ones; keeps nothing."""
        structs = [(episode, _structs(episode)) for episode in episodes if len(episode) > 0]
        if not structs:
            return []
        # Kept by transitions(): a fragment that is refused must not decide what fits.
        columns = self.columns or {name: Columns(name, struct) for name, struct in structs[0][1].items()}
        flat, information = [], self.information
        for episode, given in structs:
            if given.keys() != columns.keys():
                here, before = ("state_out", "none") if _STATE in given else ("no state_out", "one with every step")
                raise ValueError(
                    f"episode {episode.id_} carries {here} among its extra model outputs, and the episodes before it "
                    f"{before}. One buffer stores what one module played, either a recurrent one (use_lstm) or one "
                    "without state"
                )
            arrays = {name: columns[name].flatten(struct) for name, struct in given.items()}
            numbers = information.read(episode) if information.keys else []
            tasks = None if information.tasks is None else information.read_tasks(episode)
            flat.append(FlatEpisode(episode, columns, arrays, numbers, tasks))
        return flat

    def transitions(self, flat: Sequence[FlatEpisode]) -> dict[Key, np.ndarray] | None:
        """Returns the new rows, in time order per trajectory; ``None`` if there are none.

        Sampled keys, each as a tuple of names:
            observation, action, ("next", "observation"): of the spaces, nested for Dict and Tuple spaces.
            ("next", "reward"): float32 ``[n, 1]``; ("next", "terminated" | "truncated" | "done"): bool ``[n, 1]``.
            trajectory: int64 ``[n]``.
            ("next", key): float32 ``[n, 1]``, of each key of the infos.
            task: int64 ``[n]``, of a curriculum.
            state_out, step: of recurrent modules, the state after the step, nested as the module's, and int64 ``[n]``.
        """
        self.slices = []
        if flat:
            self.columns = flat[0].columns
        parts = [part for part in map(self._new_rows, flat) if part]
        if not parts:
            return None
        # concatenate copies, so the rows are writable even where Ray's object store handed out read-only arrays
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def _new_rows(self, flat: FlatEpisode) -> dict[Key, np.ndarray]:
        episode, length = flat.episode, len(flat.episode)
        trajectory, first = self.fragments.place(episode.id_, episode.t_started, length)
        if first == length:
            return {}
        rewards = np.asarray(episode.get_rewards(slice(first, length)), dtype=np.float32)
        terminated, truncated, done = np.zeros((3, length - first, 1), dtype=bool)
        if episode.is_done:
            terminated[-1], truncated[-1] = has_terminated(episode), episode.is_truncated
            done[-1] = terminated[-1] | truncated[-1]
        rows: dict[Key, np.ndarray] = {
            ("trajectory",): np.full(length - first, trajectory),
            ("next", "reward"): rewards[:, None],
            ("next", "terminated"): terminated,
            ("next", "truncated"): truncated,
            ("next", "done"): done,
        }
        for key, column in zip(self.information.keys, flat.information, strict=True):
            rows["next", key] = column[first:]
        if flat.tasks is not None:
            rows[(TASK,)] = flat.tasks[first:]
            first_step, task = episode.t_started + first, int(flat.tasks[-1])
            self.slices.append(EpisodeSlice(trajectory, first_step, rewards, bool(done[-1]), task))
        if _STATE in flat.arrays:
            rows[("step",)] = np.arange(episode.t_started + first, episode.t_started + length)
        for name, columns in flat.columns.items():
            for leaf, array in zip(columns.leaves, flat.arrays[name], strict=True):
                rows[leaf.key] = array[first:length]
                if name == "observation":
                    rows["next", *leaf.key] = array[first + 1 :]
        return rows

    def state(self) -> dict[str, Any]:
        return {
            "fragments": self.fragments.state(),
            "columns": {name: columns.state() for name, columns in self.columns.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.fragments.load_state(state["fragments"])
        self.columns = {name: Columns.from_state(part) for name, part in state["columns"].items()}


def _structs(episode: SingleAgentEpisode) -> dict[str, Any]:
    """Returns the nested values of an episode by column, lists of steps stacked, without the lookback buffer."""
    steps = slice(0, len(episode))
    structs = {
        "observation": episode.get_observations(slice(0, len(episode) + 1)),
        "action": episode.get_actions(steps),
    }
    if _STATE in episode.extra_model_outputs:
        structs[_STATE] = episode.get_extra_model_outputs(_STATE, steps)
    return {name: stack_structs(value) if isinstance(value, list) else value for name, value in structs.items()}
