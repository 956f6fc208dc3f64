# SPDX-License-Identifier: Apache-2.0
"""Replay of any recipe in place of Stable-Baselines3's buffer: in its algorithms, and in scripts that import it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn import functional

from lightning_replay import recipes
from lightning_replay.collecting import FINAL_OBSERVATIONS
from lightning_replay.envs.building import checked_info_keys
from lightning_replay.options import check_kind, checked_flag, missing_extra
from lightning_replay.parts import unwrap
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler, UniformSampler
from lightning_replay.storage import PackedStorage
from lightning_replay.training_replay import TrainingReplay
from lightning_replay.writers import FirstInFirstOutWriter

try:
    from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
    from stable_baselines3.common.preprocessing import get_obs_shape
    from stable_baselines3.common.type_aliases import ReplayBufferSamples
except ImportError as _error:
    raise missing_extra("lightning_replay.sb3", "Stable-Baselines3", "sb3") from _error

__all__ = ["RecipeBuffer"]

_LOSSES = (functional.mse_loss, functional.smooth_l1_loss)
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"mean": Tensor.mean, "sum": Tensor.sum, "none": Tensor.contiguous}
_MOST_STEPS_WAITING = 64
_MOST_ROWS_WAITING = 256
_FLAGS = (("next", "done"), ("next", "terminated"), ("next", "truncated"))


class _Rewards(Tensor):
    # Rewards of a batch. What is computed from them also belongs to the batch. So the loss of values and targets finds
    # the weights of its rows and leaves its TD errors, [B] of each critic. A loss that is not of rows stays as it is.
    # Torch calls this method for its functions of such tensors, losses included
    # (https://docs.pytorch.org/docs/stable/notes/extending.html).
    batch: TensorDictBase
    errors: list[Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        origin = next((each for each in args if isinstance(each, cls)), None)
        if func in _LOSSES and origin is not None and kwargs["reduction"] in _REDUCTIONS:
            values, targets = (each.as_subclass(Tensor) for each in args)
            if values.shape[:1] == targets.shape[:1] == origin.batch.shape:
                if values.dim() != targets.dim():
                    raise ValueError(
                        f"{func.__name__} is of the shapes {list(values.shape)} and {list(targets.shape)}, whose "
                        "difference is of all pairs of rows; give both the same shape, for example by flatten()"
                    )
                origin.errors.append((targets - values).detach().abs().reshape(len(values), -1).amax(1))
                weight = origin.batch.get("priority_weight", values.new_ones(1)).to(values.device)
                rows = func(values, targets, **kwargs | {"reduction": "none"})
                return _REDUCTIONS[kwargs["reduction"]](weight.view(-1, *[1] * (values.dim() - 1)) * rows)
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls) and origin is not None:
            result.batch = origin.batch
            result.errors = origin.errors
        return result


class RecipeBuffer(ReplayBuffer):
    """A replay of any recipe as the ``replay_buffer_class`` of Stable-Baselines3's off-policy algorithms.

    They give the first options, and ``replay_buffer_kwargs`` the others. Importance weights multiply the rows of the
    critics' losses, and TD errors, the largest of several critics, are returned before the next row or draw. Both come
    from the training step itself: the rewards of a batch are a subclass of ``Tensor``, for which torch hands over the
    loss that is computed from them.

    The class also replaces the ``ReplayBuffer`` that CleanRL, LeanRL, and similar scripts import. Only their import
    line changes, see the page on migrating.

    Args:
        optimize_memory_usage: Whether an observation that is also the next observation of another row is stored once.
            This is the option ``observations="once"`` of the recipe. With ``frame_stack`` nothing changes.
        handle_timeout_termination: Whether ``TimeLimit.truncated`` in the infos marks time limits, which are no
            terminations. If it is false, ``dones`` of a batch are the flags that ``add`` was given.
        recipe: Name of a :mod:`recipe <lightning_replay.recipes>`, or a function of ``capacity`` and the options that
            returns a replay. ``None`` is ``"prioritized"``. If a training step then has no loss that returns TD errors,
            the buffer warns once, and draws stay uniform.
        info_keys: Names of numbers or flags in the steps' infos, stored as float32 columns ``("next", key)`` for event
            conditions.
        options: Options of the recipe, such as ``priority_exponent=0.6``. With ``n_steps`` above 1 ``discount`` is the
            model's ``gamma``.

    Raises:
        ValueError: a recipe of sequences or tasks, or ``n_steps`` without ``discount``.
        RuntimeError: after the first draw, of an algorithm with another loss than ``mse_loss`` or ``smooth_l1_loss``
            if the named recipe needs weights or TD errors.

    Example:
        >>> from stable_baselines3 import DQN
        >>> options = {"recipe": "prioritized", "priority_exponent": 0.6, "importance_exponent": 0.4}
        >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=RecipeBuffer, replay_buffer_kwargs=options)
        >>> _ = model.learn(200)
        >>> model.replay_buffer.replay.stats()["priorities_updated"]
        768
    """

    _compares_resets: bool = True  # False after a warning.
    _lasts: tuple[np.ndarray, list[np.ndarray]] | None = None  # Environments whose episodes ended, last observations.

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        recipe: str | Callable[..., TrainingReplay] | None = None,
        info_keys: Sequence[str] = (),
        **options: Any,
    ) -> None:
        if options.get("n_steps", 1) != 1 and "discount" not in options:
            raise ValueError(f"n_steps is {options['n_steps']}; give the gamma of the model with it, discount=0.99")
        known = "the name of a recipe, or a function that returns a replay"
        check_kind("recipe", recipe, str | Callable | None, known)
        # The constructor of ReplayBuffer would allocate arrays.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        self.buffer_size: int = max(buffer_size // n_envs, 1)
        self.handle_timeout_termination: bool = checked_flag("handle_timeout_termination", handle_timeout_termination)
        self.optimize_memory_usage: bool = checked_flag("optimize_memory_usage", optimize_memory_usage)
        if self.optimize_memory_usage and "frame_stack" not in options:
            options = {"observations": "once"} | options
        self.info_keys: tuple[str, ...] = checked_info_keys(info_keys)
        space: Any = observation_space
        self._spaces: dict[tuple[str, ...], Any] = {(): space}
        if isinstance(space, spaces.Dict):
            self._spaces = {(name,): space[name] for name in space}
        self._recipe = "prioritized" if recipe is None else recipe
        self._may_be_uniform = recipe is None  # Whether a training step without TD errors is accepted.
        self._options = options
        self._capacity = self.buffer_size * n_envs
        self._is_loaded = False  # True until the first rows after a load.
        self._trajectory = np.arange(n_envs)
        self._env_steps = 0
        self._updates = 0
        self._drawn: _Rewards | None = None  # Rewards of the batch in the training step.
        self._is_answered = False
        self._replay: Any = self._built()
        # A function may keep its replay, which must then hold every step.
        self._may_wait = isinstance(self._recipe, str) and _may_be_stored_together(self._replay)
        self._begin()

    def _begin(self) -> None:
        # Prepares for rows of this number of environments.
        self._lasts = None
        self._arguments = self._columns_of(self.n_envs)
        if self.optimize_memory_usage:
            # Their algorithms mark the newest rows here before they train again. Rows are joined by their observations.
            self.dones: Any = np.zeros((self.buffer_size, self.n_envs), dtype=np.bool_)
        # Rows that are still to be stored, by column, [n, ...]. It is None while each step is stored at once.
        self._waiting: dict[Any, np.ndarray] | None = None
        self._num_waiting = 0
        self._most_waiting = -1
        # Pairs of columns that are checked for NaN and infinity.
        floats = [path for path, space in self._spaces.items() if np.dtype(space.dtype).kind == "f"]
        numbers = [("next", name) for name in ("reward", *self.info_keys)]
        self._checked = [(_observation(path), ("next", "observation", *path)) for path in floats]
        self._checked += zip(numbers, numbers, strict=True)

    @property
    def replay(self) -> Any:
        """The :class:`~lightning_replay.Replay`, to read rows, to draw by hand, to save, and for its ``stats``.

        Before the first read of this attribute, up to 64 steps wait and are stored together. Afterwards each step is
        stored at once, because you may keep the replay.
        """
        self._store_waiting()
        self._waiting = None
        self._may_wait = False
        self._advance()  # A save holds the present clocks.
        return self._replay

    def _built(self) -> TrainingReplay:
        recipe = recipes.by_name(self._recipe) if isinstance(self._recipe, str) else self._recipe
        if recipe is not recipes.parallel_curriculum:
            replay = recipe(capacity=self._capacity, **self._options)
            if replay.sequence_length is None and not replay.tasks:
                return replay
        raise ValueError(
            f"recipe is {self._recipe!r}, of sequences or tasks, for which these algorithms have no training step; use "
            "a recipe of rows, such as 'event_tables', or an agent of Lightning or RLlib"
        )

    def _columns_of(self, count: int) -> list[tuple[Any, str, int, str | None, Any, tuple[int, ...]]]:
        # Key, name of the argument of add, its place, entry of a dictionary, dtype, and shape of each column.
        action_dtype = self._maybe_cast_dtype(self.action_space.dtype)
        columns: list[Any] = [
            (("next", "reward"), "reward", 3, None, np.float32, (count, 1)),
            ("action", "action", 2, None, action_dtype, (count, self.action_dim)),
        ]
        for path, space in self._spaces.items():
            entry = path[0] if path else None
            kind = (entry, space.dtype, (count, *get_obs_shape(space)))
            columns.append((_observation(path), "obs", 0, *kind))
            columns.append((("next", "observation", *path), "next_obs", 1, *kind))
        return columns

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Stores a step of each environment. At an end ``next_obs`` is the last observation of the episode.

        The infos are a list with a dictionary for each environment, or the dictionary of a Gymnasium vector. Last
        observations in such a dictionary (``final_obs``, ``final_observation``) replace those in ``next_obs``. An
        environment with a last observation that is not done was truncated.

        The first step after a load may be of another number of environments: the episodes that ran are ended.

        Raises:
            ValueError: an argument that is not of each environment, ``infos`` that lack a key of ``info_keys``, or rows
                that the replay refuses. Nothing is stored.
        """
        try:
            if self._drawn is not None:
                self._return_errors()
        finally:  # TD errors that are refused belong to other rows.
            self._add(obs, next_obs, action, reward, done, infos)

    def _add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        of_vector = isinstance(infos, Mapping)
        count = self.n_envs
        arguments = self._arguments
        if self._is_loaded and isinstance(infos, Sized):
            count = max(np.size(done) if of_vector else len(infos), 1)
            arguments = self._columns_of(count)
        elif not of_vector and (not isinstance(infos, Sequence | np.ndarray) or len(infos) != count):
            given = f"a {type(infos).__name__}"
            if isinstance(infos, Sized):
                given += f" of {len(infos)} entries"
            raise ValueError(
                f"infos is {given}, and the buffer is of {count} environments; give a list of the info of each, as "
                f"[{{}}] * {count} where they have none, or the dictionary of a vector. Nothing was stored"
            )
        values = (obs, next_obs, action, reward)
        columns: dict[Any, Any] = {}
        for key, name, place, entry, dtype, shape in arguments:
            value = values[place] if entry is None else values[place][entry]
            columns[key] = _of_each(name, value, dtype, shape)
        ended = _of_each("done", done, np.bool_, (count, 1))
        has_last = self._put_last_observations(columns, infos, count) if of_vector else None
        for key in self.info_keys:
            columns["next", key] = _info_column(key, infos)
        flags: tuple[np.ndarray, ...] = (ended, ended, ended)
        has_ended = has_last is not None or bool(np.count_nonzero(ended))
        if has_ended:
            flags = self._flags(ended, has_last, infos)
        if self._waiting is None or not self._are_finite(columns):
            self._store(columns | dict(zip(_FLAGS, flags, strict=True)), count)
        else:
            columns["trajectory"] = self._trajectory
            rows = slice(self._num_waiting, self._num_waiting + count)
            for key, column in columns.items():
                self._waiting[key][rows] = column
            self._waiting_flags[:, rows] = flags if has_ended else False  # A third of the time of three columns.
            self._num_waiting = rows.stop
        if has_ended:
            self._trajectory[flags[0][:, 0]] += count
        self._env_steps += count
        self.pos = (self.pos + 1) % self.buffer_size
        self.full = self.full or self.pos == 0
        if self._num_waiting == self._most_waiting:
            self._store_waiting()
        if of_vector and self._compares_resets:
            lasts = self._lasts
            has_episode = has_ended or "_episode" in infos
            self._lasts = self._lasts_of(columns, flags[0], infos) if has_episode else None
            if lasts is not None:
                self._warn_of_resets(lasts, columns)

    def _lasts_of(self, columns: dict[Any, Any], ended: np.ndarray, infos: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        # Which environments ended, also by what Gymnasium's RecordEpisodeStatistics says, and their last observations.
        places = np.flatnonzero(ended[:, 0] | np.asarray(infos.get("_episode", False)))
        return places, [columns["next", "observation", *path][places] for path in self._spaces]

    def _warn_of_resets(self, lasts: tuple[np.ndarray, list[np.ndarray]], columns: dict[Any, Any]) -> None:
        places, observations = lasts
        is_reset = columns["next", "reward"][places, 0] == 0
        for path, last in zip(self._spaces, observations, strict=True):
            is_reset &= (columns[_observation(path)][places] == last).reshape(len(places), -1).all(1)
        if is_reset.any():
            self._compares_resets = False
            warnings.warn(
                "a row without a reward begins with the last observation of an episode, as resets by Gymnasium's "
                "autoreset_mode=NEXT_STEP do. Such rows teach wrong values, and prioritized draws prefer them. Build "
                "the vector with autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP. If it resets in the step "
                "that ends an episode, ignore this warning",
                stacklevel=4,
            )

    def _put_last_observations(self, columns: dict[Any, Any], infos: Any, count: int) -> np.ndarray | None:
        # Puts last observations of the infos of a vector in place of next ones. Returns which there are, [count, 1].
        name = next((name for name in FINAL_OBSERVATIONS if name in infos), None)
        if name is None:
            return None
        final = infos[name]
        given = infos.get(f"_{name}", [one is not None for one in final])
        has_last = _of_each(f"infos['_{name}']", given, np.bool_, (count, 1))
        for path in self._spaces:
            column = columns["next", "observation", *path].copy()
            columns["next", "observation", *path] = column
            for place in np.flatnonzero(has_last):
                last = final[path[0]][place] if isinstance(final, Mapping) else final[place]
                column[place] = last[path[0]] if isinstance(last, Mapping) else last
        return has_last

    def _flags(self, ended: np.ndarray, has_last: np.ndarray | None, infos: Any) -> tuple[np.ndarray, ...]:
        # The columns done, terminated, and truncated of a step at which an episode may have ended, [count, 1] each.
        late = np.zeros_like(ended)
        if self.handle_timeout_termination and isinstance(infos, Mapping):
            given = infos.get("TimeLimit.truncated", late)
            late = _of_each("infos['TimeLimit.truncated']", given, np.bool_, late.shape)
        elif self.handle_timeout_termination:
            late[:, 0] = [info.get("TimeLimit.truncated", False) for info in infos]
        terminated = ended & ~late
        done = ended if has_last is None else ended | has_last
        return done, terminated, done & ~terminated

    def _store(self, columns: dict[Any, Any], count: int) -> None:
        self._store_waiting()
        if count != self.n_envs:
            self._continue_with(count)
        # Before the first draw nothing else moves the clock, from which the ages of rows count.
        if not self._updates or self._replay.awaits_new_episodes:
            self._advance()
        columns["trajectory"] = self._trajectory.copy()
        self._replay.extend_columns(columns)
        self._is_loaded = False
        # Rows whose observations are still compared may be refused.
        may_wait = self._may_wait and self._waiting is None and not self._replay._ends.beginnings.may_refuse
        steps = min(_MOST_STEPS_WAITING, _MOST_ROWS_WAITING // count, self.buffer_size)
        if may_wait and steps > 1:
            self._most_waiting = steps * count
            shapes = {key: (self._most_waiting, *column.shape[1:]) for key, column in columns.items()}
            self._waiting = {key: np.empty(shape, columns[key].dtype) for key, shape in shapes.items()}
            self._waiting_flags = np.empty((len(_FLAGS), self._most_waiting, 1), dtype=np.bool_)
            self._waiting |= zip(_FLAGS, self._waiting_flags, strict=True)

    def _advance(self) -> None:
        # Until the first rows enter a loaded replay, clocks and size are taken from it.
        if self._replay.awaits_new_episodes:
            entered = self._replay.entered
            clocks = unwrap(entered.sampler).state_dict().get("clocks", {})
            self._env_steps = max(self._env_steps, clocks.get("env_steps", entered.write_count))
            self._updates = max(self._updates, clocks.get("updates", 0))
            self._set_size(len(entered) // self.n_envs)
        self._replay.advance(env_steps=self._env_steps, updates=self._updates)

    def _set_size(self, steps: int) -> None:
        self.pos: int = steps % self.buffer_size
        self.full: bool = steps >= self.buffer_size

    def _are_finite(self, columns: Mapping[Any, np.ndarray]) -> bool:
        # A sum of products is finite only if every factor is. It may overflow: then the replay checks the rows.
        return all([isfinite(np.vdot(columns[one], columns[other])) for one, other in self._checked])

    def _store_waiting(self) -> None:
        count = self._num_waiting
        if count and self._waiting is not None:
            if not self._updates:
                self._replay.advance(env_steps=self._env_steps - self.n_envs)
            self._replay.extend_columns({key: column[:count] for key, column in self._waiting.items()})
            self._num_waiting = 0  # Steps of a call that was interrupted still wait.

    def _continue_with(self, num_envs: int) -> None:
        # Another number of environments than that of the model which saved the buffer.
        self._replay.end_episodes()
        steps = self.size() * self.n_envs // num_envs
        self._trajectory = self._trajectory.max() + 1 + np.arange(num_envs)
        self.n_envs = num_envs
        self.buffer_size = max(self._capacity // num_envs, 1)
        self._set_size(steps)
        self._begin()

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draws a batch for a training step, normalized by ``env``."""
        self._return_errors()
        self._store_waiting()
        self._advance()
        batch = self._replay.sample(batch_size)
        self._updates += 1
        # The entries at once: a look-up of each takes a few microseconds.
        row = dict(batch.items())
        following = dict(row["next"].items())
        rewards = following["reward"].to(self.device)
        if env is not None:
            rewards = self.to_torch(self._normalize_reward(rewards.cpu().numpy(), env), copy=False)
        if row.get("priority_weight") is not None or self._replay.awaits_priorities:
            self._drawn = rewards = rewards.as_subclass(_Rewards)
            rewards.batch = batch
            rewards.errors = []
        discount = row.get("discount")
        return ReplayBufferSamples(
            self._observations(row["observation"], env),
            row["action"].to(self.device),
            self._observations(following["observation"], env),
            following["terminated"].to(self.device, torch.float32),
            rewards,
            None if discount is None else discount.to(self.device),
        )

    def _observations(self, rows: Any, env: Any) -> Any:
        if isinstance(rows, Tensor):
            given: Any = rows if env is None else env.normalize_obs(rows.cpu().numpy())
            return torch.as_tensor(given, device=self.device)
        parts: Any = rows.items()
        if env is not None:
            parts = env.normalize_obs({name: part.cpu().numpy() for name, part in parts}).items()
        return {name: torch.as_tensor(part, device=self.device) for name, part in parts}

    def _return_errors(self) -> None:
        drawn = self._drawn
        self._drawn = None
        if drawn is not None and drawn.errors:
            self._is_answered = True
            self._replay.update_priority(drawn.batch, torch.stack(drawn.errors).amax(0).cpu())
        elif drawn is not None and not self._is_answered:
            missing = (
                "no mse_loss or smooth_l1_loss of all rows, with a target that torch computed from the batch's rewards "
                "(no numpy), followed a draw, so there were neither weights nor TD errors"
            )
            if not self._may_be_uniform:
                raise RuntimeError(
                    f"{missing}; use DQN, SAC, TD3 or DDPG, or recipe='uniform'. To look at rows call "
                    "replay_buffer.replay.sample()"
                )
            self._is_answered = True
            warnings.warn(
                f"{missing}. Draws are uniform until such a loss follows. Give recipe='uniform' to say that you want "
                "uniform draws. For another loss draw by batch = replay_buffer.replay.sample(batch_size), multiply "
                "its rows by batch['priority_weight'], and call replay_buffer.replay.update_priority(batch, td_error)",
                stacklevel=3,
            )

    def reset(self) -> None:
        """Removes every row that was added. Offline rows of a :class:`~lightning_replay.MixedReplay` stay."""
        super().reset()
        self._store_waiting()
        self._replay.entered.empty()

    def __getstate__(self) -> dict[str, Any]:
        if self._drawn is not None and self._drawn.errors:
            self._return_errors()
        self._store_waiting()
        return self.__dict__ | {"_drawn": None, "_waiting": None, "_replay": self._replay.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._replay = self._built()
        self._replay.load_state_dict(state["_replay"])
        # A function may keep its replay, which must then hold every step.
        self._may_wait = isinstance(self._recipe, str) and _may_be_stored_together(self._replay)
        self._is_loaded = True


def _of_each(name: str, value: object, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(value, dtype=dtype)
    if array.shape == shape:
        return array
    count = shape[0]
    if array.size != prod(shape) or (count > 1 and len(array) != count):
        num_envs = array.size // prod(shape[1:])
        advice = f", or build the buffer with n_envs={num_envs}" if array.shape[:1] == (num_envs,) != (0,) else ""
        raise ValueError(
            f"{name} has the shape {list(array.shape)}; give an array of each of {count} environments, "
            f"{list(shape)}{advice}. Nothing was stored"
        )
    return array.reshape(shape)


def _info_column(key: str, infos: Any) -> np.ndarray:
    of_vector = isinstance(infos, Mapping)
    for info in [infos] if of_vector else infos:
        if key not in info:
            raise ValueError(
                f"info_keys has {key!r}, an info has {[*info]}; put the key into every info, as 0. Nothing was stored"
            )
    values = infos[key] if of_vector else [info[key] for info in infos]
    return np.array([[value] for value in values], dtype=np.float32)


def _observation(path: tuple[str, ...]) -> Any:
    return ("observation", *path) if path else "observation"


def _may_be_stored_together(replay: Any) -> bool:
    # Whether rows that are stored by one call lead to the same draws as rows of several calls between two draws.
    if type(replay) is not Replay:
        return False
    parts = replay.parts
    return (
        type(replay.storage) is PackedStorage
        and type(replay.writer) is FirstInFirstOutWriter
        and type(replay.sampler) in (UniformSampler, PrioritizedSampler)
        and replay.parts.sampler.age is None
        and parts.device is None
        and not parts.changes_rows
    )
