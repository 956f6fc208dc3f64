# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for Isaac Lab, ManiSkill, mjlab, MuJoCo Playground, Brax and FastTD3, with the signatures of their sources.

Each counts steps: an observation is ``[environment, episode, step]``, the reward the step; every fifth step is a time
limit, and every seventh step of environment 0 a termination. Observations of critics have 0.25 added.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv
from torch import Tensor

LIMIT, TERMINATION = 5, 7


class Counts:
    """The state of all environments, and which episodes end."""

    def __init__(self, num_envs: int) -> None:
        self.state = torch.zeros(num_envs, 3)
        self.state[:, 0] = torch.arange(num_envs)
        self.steps = 0

    def step(self) -> tuple[Tensor, Tensor]:
        self.steps += 1
        self.state[:, 2] += 1
        terminated = torch.zeros(len(self.state), dtype=torch.bool)
        terminated[0] = self.steps % TERMINATION == 0
        return terminated, (self.state[:, 2] >= LIMIT) & ~terminated

    def reset(self, ended: Tensor) -> None:
        self.state[ended, 1] += 1
        self.state[ended, 2] = 0

    def groups(self, actor: str) -> dict[str, Tensor]:
        return {actor: self.state.clone(), "critic": self.state + 0.25}


class ManagerBasedRLEnv(gymnasium.Env[Any, Any]):
    """Isaac Lab: dictionaries of groups, no last observation; recorder terms run before the resets."""

    def __init__(self, cfg: Any, render_mode: str | None = None, **kwargs: Any) -> None:
        self.num_envs, self.extras = cfg.num_envs, {}
        self.single_action_space = Box(-np.inf, np.inf, (2,))
        self.recorders = []
        for name in [] if cfg.recorders is None else vars(type(cfg.recorders)):
            term = getattr(cfg.recorders, name)
            if isinstance(term, RecorderTermCfg):
                self.recorders.append(term.class_type(term, self))

    def reset(self, *, seed: int | None = None, env_ids: Any = None, options: dict[str, Any] | None = None) -> Any:
        self.counts = Counts(self.num_envs)
        self.obs_buf = self.counts.groups("policy")
        return self.obs_buf, self.extras

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        terminated, time_outs = self.counts.step()
        reward = self.counts.state[:, 2].clone()
        if self.recorders:
            self.obs_buf = self.counts.groups("policy")
            for term in self.recorders:
                term.record_post_step()
        self.counts.reset(terminated | time_outs)
        self.obs_buf = self.counts.groups("policy")
        return self.obs_buf, reward, terminated, time_outs, self.extras


class RecorderTerm:
    def __init__(self, cfg: Any, env: Any) -> None:
        self.cfg, self._env = cfg, env

    def record_post_step(self) -> tuple[None, None]:
        return None, None


@dataclass
class RecorderTermCfg:
    class_type: type[RecorderTerm]


class ManiSkillEnv(gymnasium.Env[Any, Any]):
    """A task of ManiSkill, as ``gymnasium.make`` gives it."""

    def __init__(self, num_envs: int = 1) -> None:
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.single_observation_space, self.single_action_space = Box(-np.inf, np.inf, (3,)), Box(-1, 1, (2,))

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        options = options or {}
        if "env_idx" in options:
            ended = torch.zeros(self.num_envs, dtype=torch.bool)
            ended[options["env_idx"]] = True
            self.counts.reset(ended)
        else:
            self.counts = Counts(self.num_envs)
        return self.counts.state.clone(), {}

    def step(self, action: Tensor) -> Any:
        terminated, truncated = self.counts.step()
        return self.counts.state.clone(), self.counts.state[:, 2].clone(), terminated, truncated, {}


class ManiSkillVectorEnv(VectorEnv):
    """ManiSkill: last observations in ``final_observation``, in steps that end an episode."""

    def __init__(
        self,
        env: Any,
        num_envs: int = 1,
        auto_reset: bool = True,
        ignore_terminations: bool = False,
        record_metrics: bool = False,
        **kwargs: Any,
    ) -> None:
        self._env, self.auto_reset = env, auto_reset
        self.num_envs = env.unwrapped.num_envs
        self.single_observation_space = env.get_wrapper_attr("single_observation_space")
        self.single_action_space = env.get_wrapper_attr("single_action_space")

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return self._env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        observation, reward, terminated, truncated, infos = self._env.step(actions)
        done = torch.logical_or(terminated, truncated)
        if done.any() and self.auto_reset:
            last = observation.clone()
            env_idx = torch.arange(self.num_envs)[done]
            observation, infos = self.reset(options={"env_idx": env_idx})
            infos |= {"final_observation": last, "_final_observation": done}
        return observation, reward, terminated, truncated, infos


class ManagerBasedRlEnv:
    """mjlab: no last observation, but resets can be off."""

    metadata = {"render_modes": [None, "rgb_array"]}  # noqa: RUF012

    def __init__(self, cfg: Any, device: str, render_mode: str | None = None, **kwargs: Any) -> None:
        self.cfg, self.num_envs, self.extras = cfg, cfg.scene.num_envs, {}
        self.single_action_space = SimpleNamespace(shape=(2,), low=-np.inf, high=np.inf)  # mjlab's own class

    @property
    def unwrapped(self) -> Any:
        return self

    def reset(self, *, seed: int | None = None, env_ids: Tensor | None = None, options: Any = None) -> Any:
        if env_ids is None:
            self.counts = Counts(self.num_envs)
        else:
            self.counts.reset(env_ids)
        return self.counts.groups("actor"), self.extras

    def step(self, action: Tensor) -> Any:
        terminated, time_outs = self.counts.step()
        reward = self.counts.state[:, 2].clone()
        if self.cfg.auto_reset:
            self.counts.reset(terminated | time_outs)
        return self.counts.groups("actor"), reward, terminated, time_outs, self.extras


@dataclass
class State:
    """The state of Brax and Playground, whose arrays are those of NumPy here."""

    data: Any
    obs: Any
    reward: Any
    done: Any
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def replace(self, **changes: Any) -> State:
        return replace(self, **changes)


class JaxEnv:
    """An environment of Playground or Brax, which steps all states at once. Dictionaries are Playground's."""

    def __init__(self, has_groups: bool) -> None:
        self.has_groups = has_groups

    def observed(self, data: Any) -> Any:
        return {"state": data.copy(), "privileged_state": data + 0.25} if self.has_groups else data.copy()

    def reset(self, rng: Any) -> State:
        data = np.zeros((len(rng), 3), np.float32)
        data[:, 0] = np.arange(len(rng))
        zeros = np.zeros(len(rng), np.float32)
        return State(data, self.observed(data), zeros, zeros)

    def step(self, state: State, action: Any) -> State:
        assert isinstance(action, np.ndarray)
        data = state.data + np.array([0, 0, 1], np.float32)
        done = np.zeros(len(data), np.float32)
        done[0] = data[0, 2] == 3
        return state.replace(data=data, obs=self.observed(data), reward=data[:, 2].copy(), done=done)


class Wrapper:
    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, rng: Any) -> State:
        return self.env.reset(rng)

    def step(self, state: State, action: Any) -> State:
        return self.env.step(state, action)


class EpisodeWrapper(Wrapper):
    def __init__(self, env: Any, episode_length: int, action_repeat: int) -> None:
        super().__init__(env)

    def reset(self, rng: Any) -> State:
        state = self.env.reset(rng)
        state.info |= {"steps": np.zeros(len(rng), np.float32), "truncation": np.zeros(len(rng), np.float32)}
        return state

    def step(self, state: State, action: Any) -> State:
        state = self.env.step(state, action)
        steps = state.info["steps"] + 1
        is_last = steps >= LIMIT
        truncation = np.where(is_last, 1 - state.done, 0).astype(np.float32)
        state.info |= {"steps": steps, "truncation": truncation}
        return state.replace(done=np.where(is_last, 1, state.done).astype(np.float32))


class AutoResetWrapper(Wrapper):
    def reset(self, rng: Any) -> State:
        state = self.env.reset(rng)
        state.info |= {"first_state": state.data, "first_obs": state.obs}
        return state

    def step(self, state: State, action: Any) -> State:
        steps = np.where(state.done, 0, state.info["steps"]).astype(np.float32)
        state = replace(state, info=state.info | {"steps": steps}, done=np.zeros_like(state.done))
        state = self.env.step(state, action)
        ended = state.done[:, None] > 0

        def where_ended(first: Any, last: Any) -> Any:
            return np.where(ended, first, last)

        obs = tree_map(where_ended, state.info["first_obs"], state.obs)
        return state.replace(data=where_ended(state.info["first_state"], state.data), obs=obs)


def tree_map(function: Any, tree: Any, *others: Any) -> Any:
    if isinstance(tree, dict):
        return {name: function(tree[name], *(other[name] for other in others)) for name in tree}
    return function(tree, *others)


class FastTD3Env:
    """An environment of FastTD3: four values, and the last observations deep in the infos."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def reset(self) -> Tensor:
        self.counts = Counts(self.num_envs)
        return self.counts.state.clone()

    def step(self, actions: Tensor) -> Any:
        terminated, truncated = self.counts.step()
        last = self.counts.state.clone()
        self.counts.reset(terminated | truncated)
        infos = {"time_outs": truncated, "observations": {"raw": {"obs": last}}}
        return self.counts.state.clone(), last[:, 2].clone(), (terminated | truncated).long(), infos


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    return module


def modules() -> dict[str, ModuleType]:
    """The stand-ins by the names of their modules."""

    def parse_env_cfg(task: str, device: str = "cuda:0", num_envs: int | None = None, **_: Any) -> Any:
        return SimpleNamespace(num_envs=num_envs, recorders=None)

    def load_env_cfg(task: str, play: bool = False) -> Any:
        return SimpleNamespace(scene=SimpleNamespace(num_envs=1), auto_reset=True)

    def split(key: Any, num: int) -> Any:
        return np.zeros((num, 2), np.uint32)

    def make_env(
        env_name: str, seed: int, num_envs: int, num_eval_envs: int, device_rank: int, **_: Any
    ) -> tuple[Any, None, None]:
        return FastTD3Env(num_envs), None, None

    for name, entry in (("Isaac-Velocity-Flat-G1-v0", ManagerBasedRLEnv), ("PickCube-v1", ManiSkillEnv)):
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry, disable_env_checker=True)
    app = SimpleNamespace(app=None)
    training = {"EpisodeWrapper": EpisodeWrapper, "VmapWrapper": lambda env: env, "AutoResetWrapper": AutoResetWrapper}
    managers = {
        "DatasetExportMode": SimpleNamespace(EXPORT_NONE=0),
        "RecorderManagerBaseCfg": object,
        "RecorderTerm": RecorderTerm,
        "RecorderTermCfg": RecorderTermCfg,
    }
    jax = {
        "jit": lambda function: function,
        "random": SimpleNamespace(PRNGKey=lambda seed: seed, split=split),
        "tree": SimpleNamespace(map=tree_map),
        "dlpack": SimpleNamespace(from_dlpack=np.from_dlpack),
    }
    playground = {
        "registry": SimpleNamespace(load=lambda name: JaxEnv(has_groups=True)),
        "wrapper": SimpleNamespace(Wrapper=Wrapper, BraxAutoResetWrapper=AutoResetWrapper),
    }
    brax_envs = _module("brax.envs", get_environment=lambda name: JaxEnv(has_groups=False))
    found = [
        _module("isaaclab"),
        _module("isaaclab.app", AppLauncher=lambda headless: app),
        _module("isaaclab.managers", **managers),
        _module("isaaclab.utils", configclass=lambda cls: cls),
        _module("isaaclab_tasks"),
        _module("isaaclab_tasks.utils", parse_env_cfg=parse_env_cfg),
        _module("mani_skill"),
        _module("mani_skill.envs"),
        _module("mani_skill.vector"),
        _module("mani_skill.vector.wrappers"),
        _module("mani_skill.vector.wrappers.gymnasium", ManiSkillVectorEnv=ManiSkillVectorEnv),
        _module("mjlab"),
        _module("mjlab.envs", ManagerBasedRlEnv=ManagerBasedRlEnv),
        _module("mjlab.tasks"),
        _module("mjlab.tasks.registry", load_env_cfg=load_env_cfg),
        _module("jax", **jax),
        _module("brax", envs=brax_envs),
        brax_envs,
        _module("brax.envs.base", Wrapper=Wrapper),
        _module("brax.envs.wrappers"),
        _module("brax.envs.wrappers.training", **training),
        _module("mujoco_playground", **playground),
        _module("fast_td3"),
        _module("fast_td3.environments"),
        _module("fast_td3.environments.mujoco_playground_env", make_env=make_env),
    ]
    return {module.__name__: module for module in found}


def install(monkeypatch: Any) -> None:
    """Puts the stand-ins in place of modules that are not installed here."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
