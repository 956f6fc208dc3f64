# SPDX-License-Identifier: Apache-2.0
"""Replay of any recipe in Stable-Baselines3's DQN, SAC, TD3 and DDPG, whose training steps stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn import functional

from lightning_replay import recipes
from lightning_replay.envs.building import checked_info_keys
from lightning_replay.options import check_kind, missing_extra
from lightning_replay.training_replay import TrainingReplay

try:
    from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
    from stable_baselines3.common.preprocessing import get_obs_shape
    from stable_baselines3.common.type_aliases import ReplayBufferSamples
except ImportError as _error:
    raise missing_extra("lightning_replay.sb3", "Stable-Baselines3", "sb3") from _error

__all__ = ["RecipeBuffer"]

_LOSSES = (functional.mse_loss, functional.smooth_l1_loss)


class _Rewards(Tensor):
    # Rewards of a batch. What is computed from them belongs to the batch too, so that the loss of values and targets
    # finds the weights of its rows and leaves its TD errors, [B] of each critic. Torch calls this method for its
    # functions of such tensors, losses included (https://docs.pytorch.org/docs/stable/notes/extending.html).
    batch: TensorDictBase
    errors: list[Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        origin = next((each for each in args if isinstance(each, cls)), None)
        if func in _LOSSES and origin is not None and kwargs["reduction"] == "mean":
            values, targets = (each.as_subclass(Tensor) for each in args)
            origin.errors.append((targets - values).detach().flatten())
            weight = origin.batch.get("priority_weight", values.new_ones(1)).to(values.device)
            return (
                weight.view(-1, *[1] * (values.dim() - 1)) * func(values, targets, **kwargs | {"reduction": "none"})
            ).mean()
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls) and origin is not None:
            result.batch = origin.batch
            result.errors = origin.errors
        return result


class RecipeBuffer(ReplayBuffer):
    """A replay of any recipe as the ``replay_buffer_class`` of Stable-Baselines3's off-policy algorithms.

    They give the first options, and ``replay_buffer_kwargs`` the others. Importance weights multiply the rows of the
    critics' losses, and TD errors, the largest of several critics, are returned before the next row or draw. Both are
    those of the training step itself: the rewards of a batch are a subclass of ``Tensor``, for which torch hands over
    the loss that is computed from them.

    Args:
        recipe: name of a :mod:`recipe <lightning_replay.recipes>`, or a function of ``capacity`` and the options that
            returns a replay.
        info_keys: of numbers or flags in the steps' infos, stored as float32 columns ``("next", key)`` for event
            conditions.
        options: of the recipe, such as ``priority_exponent=0.6``; with ``n_steps`` above 1 ``discount`` is the model's
            ``gamma``.

    Attributes:
        replay: the :class:`~lightning_replay.Replay`, to read rows, to draw by hand, to save, and for its ``stats``.

    Raises:
        ValueError: ``optimize_memory_usage``; a recipe of sequences or tasks; ``n_steps`` without ``discount``.
        RuntimeError: after the first draw, of an algorithm with another loss than ``mse_loss`` or ``smooth_l1_loss``
            where the recipe needs weights or TD errors.

    Example:
        >>> from stable_baselines3 import DQN
        >>> options = {"recipe": "prioritized", "priority_exponent": 0.6, "importance_exponent": 0.4}
        >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=RecipeBuffer, replay_buffer_kwargs=options)
        >>> _ = model.learn(200)
        >>> model.replay_buffer.replay.stats()["priorities_updated"]
        768
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        *,
        recipe: str | Callable[..., TrainingReplay] = "prioritized",
        info_keys: Sequence[str] = (),
        **options: Any,
    ) -> None:
        if optimize_memory_usage:
            raise ValueError("optimize_memory_usage is True; give frame_stack=4, image_key='observation' in its place")
        if options.get("n_steps", 1) != 1 and "discount" not in options:
            raise ValueError(f"n_steps is {options['n_steps']}; give the gamma of the model with it, discount=0.99")
        check_kind("recipe", recipe, str | Callable, "the name of a recipe, or a function that returns a replay")
        # The constructor of ReplayBuffer would allocate arrays.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        self.buffer_size: int = max(buffer_size // n_envs, 1)
        self.handle_timeout_termination: bool = True
        self.optimize_memory_usage: bool = False
        self.info_keys: tuple[str, ...] = checked_info_keys(info_keys)
        space: Any = observation_space
        self._spaces = {(name,): space[name] for name in space} if isinstance(space, spaces.Dict) else {(): space}
        self._recipe = recipe
        self._options = options
        self._capacity = self.buffer_size * n_envs
        self._is_loaded = False  # True until the first rows after a load.
        self._trajectory = np.arange(n_envs)
        self._env_steps = 0
        self._updates = 0
        self._drawn: _Rewards | None = None  # Rewards of the batch in the training step.
        self._is_answered = False
        self.replay: Any = self._built()

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

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Stores a step of each environment; at an end ``next_obs`` is the last observation of the episode.

        The first step after a load may be of another number of environments: the episodes that ran are ended.

        Raises:
            ValueError: an argument that is not of each environment, ``infos`` that lack a key of ``info_keys``, or rows
                that the replay refuses. Nothing is stored.
        """
        self._return_errors()
        count = self.n_envs
        if not isinstance(infos, Sequence | np.ndarray) or (len(infos) != count and not self._is_loaded):
            given = f"a {type(infos).__name__}"
            if isinstance(infos, Sized):
                given += f" of {len(infos)} entries"
            raise ValueError(
                f"infos is {given}, and the buffer is of {count} environments; give a list of the info of each, as "
                f"[{{}}] * {count} where they have none. Nothing was stored"
            )
        count = len(infos)

        def of_each(name: str, value: object, dtype: Any, *shape: int) -> np.ndarray:
            array = np.asarray(value, dtype=dtype)
            if array.size != count * math.prod(shape) or (count > 1 and len(array) != count):
                raise ValueError(
                    f"{name} has the shape {list(array.shape)}; give an array of each of {count} environments, "
                    f"{[count, *shape]}. Nothing was stored"
                )
            return array.reshape(count, *shape)

        ended = of_each("done", done, np.bool_, 1)
        late = ended & np.array([[info.get("TimeLimit.truncated", False)] for info in infos], dtype=np.bool_)
        action_dtype = self._maybe_cast_dtype(self.action_space.dtype)
        columns: dict[Any, Any] = {
            ("next", "done"): ended,
            ("next", "terminated"): ended & ~late,
            ("next", "truncated"): late,
            ("next", "reward"): of_each("reward", reward, np.float32, 1),
            "action": of_each("action", action, action_dtype, self.action_dim),
        }
        for path, space in self._spaces.items():
            for branch, name, observation in ((), "obs", obs), (("next",), "next_obs", next_obs):
                part = observation[path[0]] if path else observation
                columns[*branch, "observation", *path] = of_each(name, part, space.dtype, *get_obs_shape(space))
        for key in self.info_keys:
            if lacking := [[*info] for info in infos if key not in info]:
                raise ValueError(f"info_keys has {key!r}, an info has {lacking[0]}; put the key into every info, as 0")
            columns["next", key] = np.array([[info[key]] for info in infos], dtype=np.float32)
        if count != self.n_envs:
            self._continue_with(count)
        if not self._updates:  # Before the first draw nothing else moves the clock, from which the ages of rows count.
            self.replay.advance(env_steps=self._env_steps)
        self.replay.extend_columns(columns | {"trajectory": self._trajectory.copy()})
        self._is_loaded = False
        self._trajectory[ended[:, 0]] += count
        self._env_steps += count
        self.pos: int = (self.pos + 1) % self.buffer_size
        self.full: bool = self.full or self.pos == 0

    def _continue_with(self, num_envs: int) -> None:
        # Another number of environments than that of the model which saved the buffer.
        self.replay.end_episodes()
        steps = self.size() * self.n_envs // num_envs
        self._trajectory = self._trajectory.max() + 1 + np.arange(num_envs)
        self.n_envs = num_envs
        self.buffer_size = max(self._capacity // num_envs, 1)
        self.pos = steps % self.buffer_size
        self.full = self.full or steps >= self.buffer_size

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draws a batch for a training step, normalized by ``env``."""
        self._return_errors()
        self.replay.advance(env_steps=self._env_steps, updates=self._updates)
        batch = self.replay.sample(batch_size)
        self._updates += 1
        rewards = self.to_torch(self._normalize_reward(batch["next", "reward"].cpu().numpy(), env), copy=False)
        if batch.get("priority_weight", None) is not None or self.replay.awaits_priorities:
            self._drawn = rewards = rewards.as_subclass(_Rewards)
            rewards.batch = batch
            rewards.errors = []
        discount = batch.get("discount", None)
        return ReplayBufferSamples(
            self._observations(batch["observation"], env),
            batch["action"].to(self.device),
            self._observations(batch["next", "observation"], env),
            batch["next", "terminated"].to(self.device, torch.float32),
            rewards,
            None if discount is None else discount.to(self.device),
        )

    def _observations(self, rows: Any, env: Any) -> Any:
        held: Any = {path[0]: rows[path].cpu().numpy() for path in self._spaces if path} or rows.cpu().numpy()
        held = self._normalize_obs(held, env)
        if isinstance(held, dict):
            return {name: self.to_torch(array, copy=False) for name, array in held.items()}
        return self.to_torch(held, copy=False)

    def _return_errors(self) -> None:
        drawn = self._drawn
        self._drawn = None
        if drawn is not None and drawn.errors:
            self._is_answered = True
            self.replay.update_priority(drawn.batch, torch.stack(drawn.errors).abs().amax(0).cpu())
        elif drawn is not None and not self._is_answered:
            raise RuntimeError(
                "no mse_loss or smooth_l1_loss followed a draw, so there were neither weights nor TD errors; use DQN, "
                "SAC, TD3 or DDPG, or recipe='uniform'. To look at rows call replay_buffer.replay.sample()"
            )

    def reset(self) -> None:
        """Removes every row that was added; offline rows of a :class:`~lightning_replay.MixedReplay` stay."""
        super().reset()
        self.replay.entered.empty()

    def __getstate__(self) -> dict[str, Any]:
        if self._drawn is not None and self._drawn.errors:
            self._return_errors()
        return self.__dict__ | {"_drawn": None, "replay": self.replay.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.replay = self._built()
        self.replay.load_state_dict(state["replay"])
        self._is_loaded = True
