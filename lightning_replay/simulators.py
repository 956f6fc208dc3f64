# SPDX-License-Identifier: Apache-2.0
"""Simulators that step thousands of environments in tensors, as vectors of Gymnasium."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any
from warnings import warn

from gymnasium import Env
from gymnasium.vector import AutoresetMode, VectorEnv

ACCEPTED = (
    'a vector of environments, such as gymnasium.make_vec("CartPole-v1", num_envs=1), or a simulator with num_envs, '
    "reset and step"
)
MEMBERS = ("num_envs", "reset", "step")  # of every simulator


class SimulatorVector(VectorEnv[Any, Any, Any]):
    """A simulator with ``num_envs``, ``reset``, and ``step`` as a vector of Gymnasium.

    ``reset`` passes only the arguments that are given, and returns observations and infos. It warns if the simulator
    accepts no seed. ``step`` returns five values. A step of four values is read as
    ``(observation, reward, done, info)``, and ``info["time_outs"]`` marks the ends by a time limit. Attributes that a
    vector lacks come from the simulator.

    Args:
        simulator: Simulator, which resets its environments in the step that ends their episodes.
    """

    closed = True  # Gymnasium closes an open vector that is deleted. The simulator may outlive this one.

    def __init__(self, simulator: Any) -> None:
        base = getattr(simulator, "unwrapped", simulator)  # Gymnasium's wrappers hide num_envs.
        lacking = [name for name in MEMBERS if not hasattr(simulator, name) and not hasattr(base, name)]
        if isinstance(simulator, type) or lacking:
            missing = f" without {', '.join(lacking)}" if lacking else ""
            raise TypeError(f"env is {simulator!r}{missing}; it must be {ACCEPTED}")
        self.simulator: Any = simulator
        self.num_envs: int = int(simulator.num_envs if hasattr(simulator, "num_envs") else base.num_envs)
        metadata = getattr(simulator, "metadata", None) or {}
        # Vectors of Gymnasium write their mode into the metadata of their environments. All environments without their
        # own metadata share one dictionary.
        own = {} if metadata is Env.metadata else metadata
        self.metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP, **own}
        self._base = base

    def __getattr__(self, name: str) -> Any:
        if name in ("simulator", "_base"):  # while a copy is built
            raise AttributeError(name)
        holder = self.simulator if hasattr(self.simulator, name) else self._base
        return getattr(holder, name)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode in each environment."""
        given = {name: value for name, value in (("seed", seed), ("options", options)) if value is not None}
        parameters = signature(self.simulator.reset).parameters
        takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
        if seed is not None and "seed" not in parameters and not takes_any:
            del given["seed"]
            warn(f"reset of {self!r} takes no seed; seed the simulator when you build it", stacklevel=3)
        results = self.simulator.reset(**given)
        return results if isinstance(results, tuple) else (results, {})

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Takes a step in each environment."""
        results = self.simulator.step(actions)
        if len(results) == 5:
            return results
        if len(results) != 4:
            raise ValueError(
                f"{self.simulator!r} returned {len(results)} values for a step; it must return (observation, reward, "
                "terminated, truncated, info), or (observation, reward, done, info). Nothing was stored"
            )
        observation, reward, done, info = results
        if "time_outs" not in info:
            raise ValueError(
                f"{self.simulator!r} returned four values for a step, and info has no 'time_outs', so that ends by a "
                "time limit cannot be told from terminations. Return info['time_outs'], bool [num_envs]. Nothing was "
                "stored"
            )
        truncated = info["time_outs"] != 0
        return observation, reward, (done != 0) & ~truncated, truncated, info

    def close(self, **options: Any) -> None:
        """Closes the simulator, if it can be closed."""
        if hasattr(self.simulator, "close"):
            self.simulator.close(**options)

    def __repr__(self) -> str:
        return repr(self.simulator)
