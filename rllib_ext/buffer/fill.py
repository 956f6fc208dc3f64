# SPDX-License-Identifier: Apache-2.0
"""Fills the buffer of an RLlib algorithm with the rows of any replay, actions in the form of RLlib's modules."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import tree
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from tensordict import TensorDictBase

from lightning_replay.envs.building import bounds_of, outside_bounds
from lightning_replay.episodes.links import trajectory_of
from lightning_replay.options import check_kind
from lightning_replay.replay import Replay
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.episodes import TASK
from rllib_ext.rllib_compat import has_own_connectors, local_replay_buffer

logger: logging.Logger = logging.getLogger(__name__)


def fill(algorithm: Any, replay: Replay, module_id: str | None = None) -> int:
    """Adds the rows of a replay to an algorithm's buffer, as if its EnvRunners had played them.

    For rows that the Lightning integration collected (``load_replay(path)``), or of a data set. They are added as
    episodes, oldest first. A new episode begins if the trajectory changes, if an episode ended, or if an observation is
    not the next observation of the row before. The flags stay as stored: an episode that breaks off without an end is
    bootstrapped at its last row. If there are more rows than the buffer's capacity, the newest are taken.

    Actions are the actions that the environment got. Bounded ones are converted to the form RLlib's modules compute
    (between -1 and 1 with ``normalize_actions``), one-hot discrete ones to numbers. Observations must be observations
    of the module, because connectors of the config between environment and module are not applied. If the buffer has
    ``info_keys`` or a curriculum, the rows must have the columns ``("next", key)`` or ``task``.

    RLlib learns once its EnvRunners have sampled ``num_steps_sampled_before_learning_starts``, and does not count rows
    that were filled in: set it to 0 in ``.training(...)`` to learn from the first iteration on.

    Args:
        algorithm: built, with a ``replay_buffer_config`` of :func:`rllib_ext.replay_config`.
        replay: of single steps, written first in, first out.
        module_id: the module that learns from the rows. Needed if there are several.

    Returns:
        The number of rows added.

    Raises:
        TypeError: an algorithm with another buffer, or something else than a replay.
        ValueError: an empty replay, rows that do not fit the spaces of the module, or actions out of bounds. Rows that
            are n-step returns already, or a recurrent module. Nothing is stored then.
    """
    buffer = local_replay_buffer(algorithm)
    if not isinstance(buffer, RecipeEpisodeReplayBuffer):
        raise TypeError(
            f"the algorithm's replay buffer is a {type(buffer).__name__}; fill works with "
            ".training(replay_buffer_config=rllib_ext.replay_config(...)), without num_shards"
        )
    check_kind("replay", replay, Replay, "a Replay (see load_replay), of a MixedReplay its online or offline")
    name = _module_of(algorithm, module_id)
    config = algorithm.config
    special = (config.replay_buffer_config.get("modules") or {}).get(name, {})
    if special is None:
        raise ValueError(f"module {name!r} stores nothing: replay_config(modules=...) gives None for it")
    module = buffer.modules[name] if name in buffer.modules else buffer.options.build(name)
    information = module.converter.information
    episodes = episodes_of(
        replay,
        *algorithm.spaces[name],
        most=special.get("capacity") or module.max_rows,
        normalized=config.normalize_actions,
        infos={key: ("next", key) for key in information.keys} | ({TASK: (TASK,)} if information.tasks else {}),
    )
    buffer.add([_of_several_agents(episode, name) for episode in episodes] if config.is_multi_agent else episodes)
    return sum(map(len, episodes))


def _module_of(algorithm: Any, module_id: str | None) -> str:
    names = sorted(set(algorithm.spaces) - {INPUT_ENV_SPACES, INPUT_ENV_SINGLE_SPACES})
    if module_id is None and len(names) == 1:
        module_id = names[0]
    if module_id is None or module_id not in names:
        raise ValueError(f"module_id is {module_id!r}; the algorithm's modules are {', '.join(map(repr, names))}")
    if algorithm.get_module(module_id).is_stateful():
        raise ValueError(
            f"module {module_id!r} is recurrent and learns from rows with its state, which the replay does not hold. "
            "Fill a module without state"
        )
    config = algorithm.config
    if has_own_connectors(config):
        logger.warning(
            "the config has connectors of its own between environment and module; rows are filled in without them, so "
            "observations must be those the module gets"
        )
    return module_id


def episodes_of(
    replay: Replay,
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    *,
    most: int,
    normalized: bool,
    infos: Mapping[str, tuple[str, ...]] | None = None,
) -> list[SingleAgentEpisode]:
    """Returns the newest ``most`` rows of a replay as episodes, with columns of infos by name. See :func:`fill`."""
    rows = _newest_rows(replay, most)
    return _episodes(
        rows,
        observation=_read(rows, ("observation",), observation_space, fit_observation),
        following=_read(rows, ("next", "observation"), observation_space, fit_observation),
        action=_read(rows, ("action",), action_space, functools.partial(fit_action, normalized=normalized)),
        infos={name: _column(rows, key).reshape(len(rows)) for name, key in (infos or {}).items()},
    )


def _newest_rows(replay: Replay, most: int) -> TensorDictBase:
    if not len(replay):
        raise ValueError("the replay is empty; collect rows before filling an algorithm's buffer")
    rows = replay.storage.get(replay.oldest_first()[-most:]).cpu()
    # Returns may have been formed before the rows were stored.
    steps = rows.get("steps_to_next_obs", None)
    if steps is not None and (steps > 1).any():
        raise ValueError(
            "the rows are returns over several steps (steps_to_next_obs); RLlib forms these itself from single steps. "
            "Collect without NStepTransitions and give .training(n_step=...)"
        )
    return rows


def _read(rows: TensorDictBase, key: tuple[str, ...], space: gym.Space[Any], fit: Callable[..., np.ndarray]) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {name: _read(rows, (*key, str(name)), part, fit) for name, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_read(rows, (*key, str(place)), part, fit) for place, part in enumerate(space.spaces))
    return fit(_column(rows, key), space, "/".join(key))


def _column(rows: TensorDictBase, key: tuple[str, ...]) -> np.ndarray:
    stored = [name if isinstance(name, tuple) else (name,) for name in rows.keys(True, True)]
    if key not in stored:
        raise ValueError(
            f"the replay has no column {'/'.join(key)}, which the algorithm needs; stored are "
            f"{', '.join(map('/'.join, stored))}. Convert the rows to what the module gets, before they are stored"
        )
    return rows.get(key).numpy()


def _episodes(
    rows: TensorDictBase, observation: Any, following: Any, action: Any, infos: Mapping[str, np.ndarray]
) -> list[SingleAgentEpisode]:
    reward = _column(rows, ("next", "reward")).reshape(len(rows)).astype(np.float32)
    terminated, truncated, done = (_flag(rows, name) for name in ("terminated", "truncated", "done"))
    truncated = truncated | (done & ~terminated)
    trajectory = trajectory_of(rows)
    name = np.zeros(len(rows), dtype=np.int64) if trajectory is None else trajectory.reshape(len(rows)).numpy()
    order = np.argsort(name, kind="stable")
    before = order[:-1]
    after = order[1:]
    # An episode goes on if the same trajectory begins with its last observation, and it did not end.
    follows = (name[before] == name[after]) & ~(terminated | truncated)[before]
    for ended, started in zip(tree.flatten(following), tree.flatten(observation), strict=True):
        equal = ended[before] == started[after]
        follows &= equal.all(axis=tuple(range(1, equal.ndim)))

    def episode(places: np.ndarray) -> SingleAgentEpisode:
        """Returns the rows at these places as one episode."""
        last = places[-1]
        observations = tree.map_structure(
            lambda now, later: np.concatenate([now[places], later[last : last + 1]]), observation, following
        )
        return SingleAgentEpisode(
            observations=InfiniteLookbackBuffer(observations),
            actions=InfiniteLookbackBuffer(tree.map_structure(lambda column: column[places], action)),
            rewards=InfiniteLookbackBuffer(reward[places]),
            infos=[{}, *({name: column[place] for name, column in infos.items()} for place in places)],
            terminated=bool(terminated[last]),
            truncated=bool(truncated[last]),
            len_lookback_buffer=0,
        )

    parts = np.split(order, np.flatnonzero(~follows) + 1)
    return [episode(places) for places in sorted(parts, key=lambda places: int(places[0]))]


def _flag(rows: TensorDictBase, name: str) -> np.ndarray:
    column = rows.get(("next", name), None)
    return np.zeros(len(rows), dtype=bool) if column is None else column.reshape(len(rows)).bool().numpy()


def _of_several_agents(episode: SingleAgentEpisode, module_id: str) -> MultiAgentEpisode:
    # As the flag of the only agent of an environment, for which truncated excludes terminated.
    episode.is_truncated = episode.is_truncated and not episode.is_terminated
    whole = MultiAgentEpisode(terminateds=episode.is_terminated, truncateds=episode.is_truncated)
    episode.agent_id = episode.module_id = module_id
    episode.multi_agent_episode_id = whole.id_
    whole.agent_episodes[module_id] = episode
    whole.env_t = len(episode)
    return whole


def fit_observation(column: np.ndarray, space: gym.Space[Any], name: str) -> np.ndarray:
    """Returns observations ``[N, ...]`` in the dtype of their space, which is not Dict and not Tuple."""
    _check_shape(column, space, name)
    return column.astype(space.dtype, copy=False)


def fit_action(column: np.ndarray, space: gym.Space[Any], name: str, *, normalized: bool) -> np.ndarray:
    """Returns actions of the environment as the module would have computed them: float32 or int64, ``[N, ...]``.

    Discrete actions may be one-hot, ``[N, n]``. Bounded actions are ``normalized`` if the module computes them as
    fractions of the bounds (``normalize_actions``): floats between -1 and 1, integers from 0 on.

    Example:
        >>> fit_action(np.array([[-2.0], [1.0]]), gym.spaces.Box(-2, 2, (1,)), "action", normalized=True).tolist()
        [[-1.0], [0.5]]
        >>> fit_action(np.array([[0, 0, 1], [1, 0, 0]]), gym.spaces.Discrete(3), "action", normalized=True).tolist()
        [2, 0]
    """
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete) and np.any(space.start):
        raise ValueError(f"{name} is of {space}; RLlib's modules compute actions from 0 on. Wrap the environment")
    if isinstance(space, gym.spaces.Discrete) and column.shape[1:] == (space.n,):
        column = column.argmax(1) if np.isin(column, (0, 1)).all() and (column.sum(1) == 1).all() else column  # one-hot
    _check_shape(column, space, name)
    low, high = bounds_of(space)
    wrong = outside_bounds(column, space, name)
    if wrong:
        stored = "Actions are stored as the environment got them; were these collected in another one?"
        raise ValueError(f"{wrong}. {stored}")
    floats = column.dtype.kind == "f"
    if normalized and isinstance(space, gym.spaces.Box) and space.is_bounded("both"):
        if floats:  # a bound with itself as the other leaves one action, at -1
            width = np.where(high > low, high - low, 1.0)
            column = np.clip((column - low) * 2.0 / width - 1.0, -1.0, 1.0)
        else:
            column = column - low
    return column.astype(np.float32 if floats else np.int64)


def _check_shape(column: np.ndarray, space: gym.Space[Any], name: str) -> None:
    wanted = space.dtype
    fits = wanted is not None and column.shape[1:] == space.shape and np.can_cast(column.dtype, wanted, "same_kind")
    if not fits or wanted is None or (column.dtype.kind == "f") != (wanted.kind == "f"):
        raise ValueError(
            f"{name} has rows of {column.dtype} {column.shape[1:]}; the algorithm's space is {space}, of {space.dtype} "
            f"{space.shape}. Fill with rows collected in the same environment, converted before they are stored"
        )
