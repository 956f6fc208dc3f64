# SPDX-License-Identifier: Apache-2.0
"""Sizes and actions of an agent, read from Gymnasium's spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple

from lightning_replay.agents.encoders import LEAST_IMAGE_SIDE, described_image
from lightning_replay.envs.building import bounds_of, build_environment, check_env, parts_of, refused_entries

_OF_YOUR_OWN = "an agent of your own for MultiDiscrete and others (docs/lightning-agents.md), or wrap the environment."

#: Id of an environment, the environment, a vector of them, or a callable that builds one.
EnvironmentSource = (
    str | gymnasium.Env[Any, Any] | gymnasium.vector.VectorEnv[Any, Any, Any] | Callable[[], gymnasium.Env[Any, Any]]
)


def is_parameterized(space: Space[Any]) -> bool:
    """Returns whether the space is composite, for :class:`ParameterizedActions`."""
    return isinstance(space, Tuple | Dict)


@dataclass(frozen=True)
class ParameterizedActions:
    """``K`` discrete actions, each with a vector of parameters.

    An agent's action is the pair ``(discrete, parameters)``: int64 ``[N]`` and float32 ``[N, P]``, the parameters of
    all actions one after the other in the environment's units. Masson et al. 2016, https://arxiv.org/abs/1509.01644.

    Args:
        space: Action space of one environment.
        boxes: Space of each action's parameters.
        keys: Keys of the discrete action and then of the boxes, if the space is a Dict.
    """

    space: Space[Any]
    boxes: tuple[Box, ...]
    keys: tuple[str, ...]

    @classmethod
    def of(cls, space: Space[Any]) -> ParameterizedActions:
        """Reads ``Tuple(Discrete(K), Box_1, ..., Box_K)``, or a Dict of one Discrete and, in its order, K Boxes.

        Raises:
            ValueError: Another space.
        """
        if isinstance(space, Dict):
            # The Discrete may be anywhere, because Gymnasium sorts the keys of a plain dictionary.
            ordered = sorted(space.spaces.items(), key=lambda item: not isinstance(item[1], Discrete))
            keys = tuple(key for key, _ in ordered)
            parts = [part for _, part in ordered]
        else:
            keys = ()
            parts = [*space.spaces] if isinstance(space, Tuple) else []
        boxes = tuple(part for part in parts[1:] if isinstance(part, Box) and part.is_bounded("both"))
        discrete = next(iter(parts), None)
        if not isinstance(discrete, Discrete) or not len(parts) - 1 == len(boxes) == discrete.n or discrete.start != 0:
            raise ValueError(
                f"got the action space {space}; parameterized actions are Tuple(Discrete(K), Box, ..., Box), or a Dict "
                "of these, with one bounded Box per discrete action (of shape (0,) for an action without parameters) "
                "and discrete actions that start at 0. Wrap the environment in gymnasium.wrappers.TransformAction."
            )
        return cls(space, boxes, keys)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of parameters of each action."""
        return tuple(int(np.prod(box.shape)) for box in self.boxes)

    @property
    def low(self) -> np.ndarray:
        """Smallest value of each parameter, float32 ``[P]``."""
        return np.concatenate([box.low.reshape(-1) for box in self.boxes]).astype(np.float32)

    @property
    def high(self) -> np.ndarray:
        """Largest value of each parameter, float32 ``[P]``."""
        return np.concatenate([box.high.reshape(-1) for box in self.boxes]).astype(np.float32)

    def random(self, count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns uniformly random discrete actions ``[N]`` and parameters ``[N, P]``."""
        discrete = generator.integers(len(self.boxes), size=count)
        drawn = []
        for box in self.boxes:  # The distribution is that of box.sample, which draws one vector.
            shape = (count, *box.shape)
            if box.low.dtype.kind == "f":
                values = generator.uniform(box.low, box.high, size=shape)
            else:
                values = generator.integers(box.low, box.high, size=shape, dtype=box.low.dtype.type, endpoint=True)
            drawn.append(values.reshape(count, -1).astype(box.dtype))
        return discrete, np.concatenate(drawn, axis=1).astype(np.float32)

    def for_environments(self, discrete: np.ndarray, parameters: np.ndarray) -> Any:
        """Returns the action of a vector of environments: batched arrays in the structure of the space.

        Parameters of integer boxes are rounded.
        """
        cuts = np.split(parameters, np.cumsum(self.sizes)[:-1], axis=1)
        boxes = [
            (cut if box.low.dtype.kind == "f" else np.rint(cut)).reshape(len(discrete), *box.shape).astype(box.dtype)
            for cut, box in zip(cuts, self.boxes, strict=True)
        ]
        return dict(zip(self.keys, (discrete, *boxes), strict=True)) if self.keys else (discrete, *boxes)

    def for_one(self, discrete: np.ndarray, parameters: np.ndarray) -> Any:
        """Returns the action of a single environment, from arrays ``[1]`` and ``[1, P]``."""
        batched = self.for_environments(discrete, parameters)
        if self.keys:
            return {key: part[0] for key, part in batched.items()}
        return tuple(part[0] for part in batched)


#: Function of observation space, action space and the agent's name, for messages, to the sizes by argument.
SizeReader = Callable[[Space[Any], Space[Any], str], dict[str, Any]]


def spaces_of(env: EnvironmentSource) -> tuple[Space[Any], Space[Any]]:
    """Returns the spaces of observations and actions of one environment."""
    if isinstance(env, gymnasium.vector.VectorEnv):
        return env.single_observation_space, env.single_action_space
    if isinstance(env, gymnasium.Env):
        return env.observation_space, env.action_space
    check_env(env)
    with closing(build_environment(env, {})) as made:
        return made.observation_space, made.action_space


def continuous_sizes(observation_space: Space[Any], action_space: Space[Any], agent: str) -> dict[str, Any]:
    """Reads the sizes of agents with bounded, continuous actions."""
    if not isinstance(action_space, Box) or len(action_space.shape) != 1 or not action_space.is_bounded("both"):
        raise ValueError(
            f"{agent} got the action space {action_space}; it needs a bounded, one-dimensional Box. "
            f"Use DQN for Discrete actions, {_OF_YOUR_OWN}"
        )
    return {
        "observation_size": observation_size(observation_space, agent),
        "action_low": [float(value) for value in action_space.low],
        "action_high": [float(value) for value in action_space.high],
    }


def discrete_sizes(observation_space: Space[Any], action_space: Space[Any], agent: str) -> dict[str, Any]:
    """Reads the sizes of agents with discrete actions and any observations."""
    return {
        "num_actions": _num_actions(action_space, agent),
        "observation_size": observation_size(observation_space, agent),
    }


def flat_or_image_sizes(observation_space: Space[Any], action_space: Space[Any], agent: str) -> dict[str, Any]:
    """Reads the sizes of PPO: discrete actions, and flat observations or images."""
    num_actions = _num_actions(action_space, agent)
    shape = observation_space.shape or ()
    is_flat = len(shape) == 1 and np.issubdtype(observation_space.dtype, np.floating)
    is_image = len(shape) == 3 and observation_space.dtype == np.uint8 and shape[0] >= shape[2]
    if not isinstance(observation_space, Box) or not (is_flat or is_image):
        raise ValueError(
            f"{agent} got the observation space {observation_space}; it needs flat observations, a one-dimensional "
            "Box of floats, or images, a Box of uint8 whose shape is (height, width, channels). DQN, SAC and TD3 "
            "encode dictionaries, integers and images of either layout; use one of these, or convert observations by "
            "gymnasium.wrappers.TransformObservation. FlattenObservation is for numbers, not for cameras."
        )
    high = float(observation_space.high.max()) if is_image else None
    return {"observation_shape": [int(size) for size in shape], "observation_high": high, "num_actions": num_actions}


def image_sizes(observation_space: Space[Any], action_space: Space[Any], agent: str) -> dict[str, Any]:
    """Reads the sizes of Rainbow: discrete actions and images."""
    num_actions = _num_actions(action_space, agent)
    is_image = len(observation_space.shape or ()) == 3 and observation_space.dtype == np.uint8
    if not isinstance(observation_space, Box) or not is_image:
        raise ValueError(
            f"{agent} got the observation space {observation_space}; it needs images, a Box of uint8 whose shape is "
            "(channels, height, width), such as those of Atari-v0 and MinAtar-v0. Use DQN for other observations."
        )
    return {
        "observation_shape": [int(size) for size in observation_space.shape],
        "observation_high": float(observation_space.high.max()),
        "num_actions": num_actions,
    }


def parameterized_sizes(observation_space: Space[Any], action_space: Space[Any], agent: str) -> dict[str, Any]:
    """Reads the sizes of agents whose discrete actions have parameters."""
    if not is_parameterized(action_space):
        raise ValueError(
            f"{agent} got the action space {action_space}; it needs discrete actions with parameters, "
            "Tuple(Discrete(K), Box, ..., Box). Use DQN for Discrete, TD3 or SAC for a Box."
        )
    actions = ParameterizedActions.of(action_space)
    return {
        "observation_size": observation_size(observation_space, agent),
        "parameter_sizes": list(actions.sizes),
        "parameter_low": [float(value) for value in actions.low],
        "parameter_high": [float(value) for value in actions.high],
    }


def _num_actions(space: Space[Any], agent: str) -> int:
    if not isinstance(space, Discrete) or space.start != 0:
        raise ValueError(
            f"{agent} got the action space {space}; it needs Discrete actions that start at 0. "
            f"Use TD3 or SAC for a Box, {_OF_YOUR_OWN}"
        )
    return int(space.n)


def observation_size(space: Space[Any], agent: str = "the agent") -> int | dict[str, Any]:
    """Returns the description of an observation that chooses its encoder, see ``observation_size`` of the agents.

    Raises:
        ValueError: Entries without an encoder, all of them by name.
    """
    refused = refused_entries(space, lambda part: _described(part) is not None)
    if refused:
        raise ValueError(
            f"{agent} has no encoder for {refused}. Entries may be Discrete, MultiDiscrete, MultiBinary, and Box of "
            "numbers or of images with at most three dimensions. Leave others out by "
            "gymnasium.wrappers.FilterObservation, or convert them by gymnasium.wrappers.TransformObservation."
        )
    return _nested(space)


def _nested(space: Space[Any]) -> Any:
    parts = parts_of(space)
    return _described(space) if parts is None else {name: _nested(part) for name, part in parts.items()}


def _described(space: Space[Any]) -> int | dict[str, Any] | None:
    if isinstance(space, Discrete | MultiDiscrete):
        low, high = (np.asarray(bound).tolist() for bound in bounds_of(space))
        return {"encoder": "one_hot", "low": low, "high": high}
    shape = [int(size) for size in space.shape or ()]
    dtype = np.dtype(space.dtype)
    if 0 in shape:
        return None
    high = float(space.high.max()) if isinstance(space, Box) and space.is_bounded("above") else 1.0
    channels_first = len(shape) == 3 and shape[0] <= shape[2]
    sides = shape[1:] if channels_first else shape[:2]
    if (len(shape) == 3 or (len(shape) == 2 and dtype == np.uint8)) and min(sides) >= LEAST_IMAGE_SIDE:
        return described_image(shape, high if high > 0 else 1.0, channels_first)
    if dtype == np.uint8:
        return {"encoder": "flat", "shape": shape, "high": high} if len(shape) <= 3 else None
    return shape[0] if len(shape) == 1 and dtype.kind == "f" else {"encoder": "flat", "shape": shape}


def spaces_of_sizes(sizes: Mapping[str, Any]) -> tuple[Space[Any], Space[Any]]:
    """Returns the spaces of observations and actions that fit an agent's sizes.

    Entries whose numbers may be of several dtypes are spaces without one. Without sizes there is no shape either.
    """
    observation: Space[Any] = Space()
    if sizes.get("observation_size") is not None:
        observation = _space_of(sizes["observation_size"])
    elif sizes.get("observation_shape") is not None:
        observation = Space(sizes["observation_shape"])
    if sizes.get("num_actions") is not None:
        return observation, Discrete(sizes["num_actions"])
    if sizes.get("action_low") is not None:
        return observation, _box_between(sizes["action_low"], sizes["action_high"])
    if sizes.get("parameter_sizes") is None:
        return observation, Space()
    cuts = np.cumsum(sizes["parameter_sizes"])[:-1]
    bounds = (np.split(np.array(sizes[name]), cuts) for name in ("parameter_low", "parameter_high"))
    return observation, Tuple((Discrete(len(cuts) + 1), *map(_box_between, *bounds)))


def _box_between(low: Sequence[float], high: Sequence[float]) -> Box:
    return Box(np.array(low, np.float32), np.array(high, np.float32))


def _space_of(size: int | Mapping[str, Any]) -> Space[Any]:
    if isinstance(size, int):
        return Box(-np.inf, np.inf, (size,))
    if not isinstance(size.get("encoder"), str):
        return Dict({name: _space_of(part) for name, part in size.items()})
    if size["encoder"] != "one_hot":
        return Space(size["shape"])
    low = np.array(size["low"])
    counts = np.array(size["high"]) - low + 1
    return MultiDiscrete(counts, start=low) if counts.ndim else Discrete(int(counts), start=int(low))
