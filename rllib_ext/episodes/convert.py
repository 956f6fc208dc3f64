# SPDX-License-Identifier: Apache-2.0
"""RLlib's ``SingleAgentEpisode`` fragments to the columns of a replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from ray.rllib.core.columns import Columns as RLlibColumns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import batch as stack_structs

from rllib_ext.episodes.columns import Columns
from rllib_ext.episodes.fragments import FragmentTracker
from rllib_ext.episodes.info_columns import TASK, Information
from rllib_ext.episodes.task_progress import EpisodeSlice

if TYPE_CHECKING:
    from tensordict import TensorDict


class FlatEpisode(NamedTuple):
    """An episode fragment whose columns fit what is stored."""

    episode: SingleAgentEpisode
    observation: Columns
    action: Columns
    observations: list[np.ndarray]
    actions: list[np.ndarray]
    state: Columns | None
    states: list[np.ndarray]
    information: list[np.ndarray]
    tasks: np.ndarray | None


class EpisodeConverter:
    """Turns the episodes of one ``add`` call into one TensorDict of transitions.

    The lookback buffer in front of a fragment belongs to the fragment before and is left out. Actions are those the
    module computed (what RLlib's own buffers store), not the unsquashed ones the environment got. Rewards are stored
    as float32, everything else in the dtype of the first rows (:class:`Columns`). Where a recurrent module played, its
    state after each step is stored too, and the number of the step in its episode.

    Args:
        information: which columns come from the infos; none by default.

    Attributes:
        slices: the new rows of the last :meth:`transitions` by episode, where there is a curriculum.

    Example:
        >>> episode = SingleAgentEpisode(observations=[np.zeros(2), np.ones(2)], actions=[1], rewards=[0.5],
        ...                              terminated=True, len_lookback_buffer=0)
        >>> converter = EpisodeConverter()
        >>> rows = converter.transitions(converter.flatten([episode]))
        >>> rows["next", "observation"].tolist(), rows["action"].tolist(), rows["next", "terminated"].tolist()
        ([[1.0, 1.0]], [1], [[True]])
    """

    def __init__(self, information: Information | None = None) -> None:
        self.fragments = FragmentTracker()
        self.information = information or Information()
        self.slices: list[EpisodeSlice] = []
        self.observation: Columns | None = None
        self.action: Columns | None = None
        self.state_out: Columns | None = None

    def flatten(self, episodes: Sequence[SingleAgentEpisode]) -> list[FlatEpisode]:
        """Returns episodes with observations ``[n + 1, ...]`` and actions ``[n, ...]`` as columns; keeps nothing.

        Raises:
            ValueError: rows that do not fit the first ones, or infos that hold no number or no task.
        """
        structs = [(episode, *_structs(episode)) for episode in episodes if len(episode) > 0]
        if not structs:
            return []
        # Remembered by transitions(): a fragment that is refused must not decide what fits.
        observation = self.observation or Columns("observation", structs[0][1])
        action = self.action or Columns("action", structs[0][2])
        stateful = structs[0][3] is not None if self.observation is None else self.state_out is not None
        for episode, *_, states in structs:
            if (states is not None) != stateful:
                _refuse_mixed(episode, stateful)
        state = (self.state_out or Columns("state_out", structs[0][3])) if stateful else None
        return [
            FlatEpisode(
                episode=episode,
                observation=observation,
                action=action,
                observations=observation.flatten(first),
                actions=action.flatten(second),
                state=state,
                states=[] if state is None else state.flatten(third),
                information=self.information.read(episode),
                tasks=self.information.read_tasks(episode),
            )
            for episode, first, second, third in structs
        ]

    def transitions(self, flat: Sequence[FlatEpisode]) -> TensorDict | None:
        """Returns the new rows, in time order per trajectory; ``None`` if there are none.

        Sampled keys:
            observation, action, ("next", "observation"): of the spaces, nested for Dict and Tuple spaces.
            ("next", "reward"): float32 ``[n, 1]``; ("next", "terminated" | "truncated" | "done"): bool ``[n, 1]``.
            trajectory: int64 ``[n]``.
            ("next", key): float32 ``[n, 1]``, of each key of the infos.
            task: int64 ``[n]``, of a curriculum.
            state_out, step: of recurrent modules, the state after the step, nested as the module's, and int64 ``[n]``.
        """
        self.slices = []
        if not flat:
            return None
        self.observation, self.action, self.state_out = flat[0].observation, flat[0].action, flat[0].state
        parts = [self._new_rows(episode) for episode in flat]
        parts = [part for part in parts if len(part["reward"])]
        if not parts:
            return None
        if self.information.tasks is not None:
            self.slices = [
                EpisodeSlice(
                    part["trajectory"], part["steps"][0], part["reward"], any(part["ends"]), int(part[TASK][-1])
                )
                for part in parts
            ]
        return _concatenate(parts, self.observation, self.action, self.state_out, self.information)

    def state(self) -> dict[str, Any]:
        """Returns plain values for :meth:`load_state`."""
        columns = (self.observation, self.action, self.state_out)
        return {
            "fragments": self.fragments.state(),
            "columns": {one.name: one.state() for one in columns if one is not None},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state`."""
        self.fragments.load_state(state["fragments"])
        loaded = {name: Columns.from_state(part) for name, part in state["columns"].items()}
        self.observation, self.action = loaded.get("observation"), loaded.get("action")
        self.state_out = loaded.get("state_out")

    def _new_rows(self, flat: FlatEpisode) -> dict[str, Any]:
        episode = flat.episode
        length = len(episode)
        trajectory, first = self.fragments.place(episode.id_, episode.t_started, length)
        return {
            "observation": [array[first:-1] for array in flat.observations],
            "next": [array[first + 1 :] for array in flat.observations],
            "action": [array[first:] for array in flat.actions],
            "reward": np.asarray(episode.get_rewards(slice(first, length)), dtype=np.float32),
            "ends": _ends(episode),
            "trajectory": trajectory,
            "state_out": [array[first:] for array in flat.states],
            "steps": (episode.t_started + first, episode.t_started + length),
            "information": [array[first:] for array in flat.information],
            TASK: None if flat.tasks is None else flat.tasks[first:],
        }


def _structs(episode: SingleAgentEpisode) -> tuple[Any, Any, Any]:
    """Observations ``[n + 1, ...]``, actions ``[n, ...]`` and states or ``None``, no lookback buffer, lists stacked."""
    length = len(episode)
    observations = episode.get_observations(slice(0, length + 1))
    actions = episode.get_actions(slice(0, length))
    states = None
    if RLlibColumns.STATE_OUT in episode.extra_model_outputs:
        states = _stacked(episode.get_extra_model_outputs(RLlibColumns.STATE_OUT, slice(0, length)))
    return _stacked(observations), _stacked(actions), states


def _refuse_mixed(episode: SingleAgentEpisode, stateful: bool) -> NoReturn:
    given, others = ("no state_out", "one with every step") if stateful else ("state_out", "none")
    raise ValueError(
        f"episode {episode.id_} carries {given} among its extra model outputs, and the episodes before it {others}. "
        "One buffer stores what one module played, either a recurrent one (use_lstm) or one without state"
    )


def _ends(episode: SingleAgentEpisode) -> tuple[bool, bool]:
    """Returns whether the last row is terminated, and whether it is truncated."""
    terminated, truncated = bool(episode.is_terminated), bool(episode.is_truncated)
    # RLlib marks an agent that is truncated as the last one, or together with all others, terminated as well.
    several_agents = episode.multi_agent_episode_id is not None
    return terminated and not (truncated and several_agents), truncated


def _stacked(values: Any) -> Any:
    return stack_structs(values) if isinstance(values, list) else values


def _concatenate(
    parts: list[dict[str, Any]],
    observation: Columns,
    action: Columns,
    state_out: Columns | None,
    information: Information,
) -> TensorDict:
    import torch
    from tensordict import TensorDict

    def column(name: str, place: int) -> torch.Tensor:
        # concatenate copies, so the rows are writable even where Ray's object store handed out read-only arrays
        return torch.from_numpy(np.concatenate([part[name][place] for part in parts]))

    lengths = [len(part["reward"]) for part in parts]
    last_rows = np.cumsum(lengths) - 1
    ends = np.zeros((3, int(last_rows[-1]) + 1, 1), dtype=bool)
    ends[:2, last_rows, 0] = np.asarray([part["ends"] for part in parts]).T
    np.logical_or(ends[0], ends[1], out=ends[2])
    following: dict[str, Any] = {
        "reward": torch.from_numpy(np.concatenate([part["reward"] for part in parts])[:, None]),
        **dict(zip(("terminated", "truncated", "done"), torch.from_numpy(ends), strict=True)),
    }
    rows: dict[str, Any] = {
        "trajectory": torch.from_numpy(np.repeat([part["trajectory"] for part in parts], lengths)),
        "next": following,
    }
    for place, key in enumerate(information.keys):
        following[key] = column("information", place)
    if information.tasks is not None:
        rows[TASK] = torch.from_numpy(np.concatenate([part[TASK] for part in parts]))
    for place, leaf in enumerate(observation.leaves):
        _put(rows, leaf.key, column("observation", place))
        _put(following, leaf.key, column("next", place))
    for place, leaf in enumerate(action.leaves):
        _put(rows, leaf.key, column("action", place))
    if state_out is not None:
        rows["step"] = torch.from_numpy(np.concatenate([np.arange(*part["steps"], dtype=np.int64) for part in parts]))
        for place, leaf in enumerate(state_out.leaves):
            _put(rows, leaf.key, column("state_out", place))
    return TensorDict(rows, batch_size=[int(last_rows[-1]) + 1])


def _put(rows: dict[str, Any], key: tuple[str, ...], value: Any) -> None:
    for name in key[:-1]:
        rows = rows.setdefault(name, {})
    rows[key[-1]] = value
