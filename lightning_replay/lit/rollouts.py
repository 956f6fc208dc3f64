# SPDX-License-Identifier: Apache-2.0
"""Plays episodes with an agent: environments, actions, and returns on episodes or levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import gymnasium
import lightning as L
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDictBase
from torch import Tensor, nn

import lightning_replay.envs  # noqa: F401  registers the library's own ids
from lightning_replay.agents.interfaces import (
    ActingAgent,
    RecurrentAgent,
    RolloutAgent,
    acting_agent,
    recurrent_agent,
)
from lightning_replay.agents.spaces import ParameterizedActions, is_parameterized
from lightning_replay.envs.building import (
    MAX_EPISODE_STEPS,
    CheckedSteps,
    LimitedEpisodes,
    build,
    build_environment,
    check_env,
    checked_environment,
    integer_bounds_of,
    refused_entries,
    with_checked_steps,
)
from lightning_replay.levels import SequentialLevels
from lightning_replay.levels.environments import make_level_vector
from lightning_replay.options import check_kind, checked_count
from lightning_replay.storage.rows import each_part
from lightning_replay.torchrl_compat import assemble_unchecked

# one array, or for actions with parameters the discrete actions [N] and the parameters of all actions [N, P]
Action = np.ndarray | tuple[np.ndarray, np.ndarray]


@contextmanager
def acting(agent: Any) -> Iterator[None]:
    """Switches an agent to evaluation mode without gradients, the opposite of Lightning's training loop."""
    # Collection enters this at every step. agent.eval() and agent.train() would take 50 to 80 us.
    modules: list[Any] = [agent]
    plain: list[dict[str, Any]] = []
    others: list[nn.Module] = []
    for module in modules:
        if module is not None:
            modules.extend(module._modules.values())
            attributes = module.__dict__
            if attributes.get("training") and type(module).train is nn.Module.train:
                attributes["training"] = False
                plain.append(attributes)
            elif module.training:  # The module is compiled, or has its own train().
                others.append(module)
    for module in others:
        module.train(False)
    try:
        with torch.set_grad_enabled(False):
            yield
    finally:
        for attributes in plain:
            attributes["training"] = True
        for module in others:
            module.train(True)


def as_input(observation: Any) -> Any:
    """Returns observations as a tensor ``[N, ...]``, or of Dict and Tuple spaces a TensorDict ``[N]``.

    Tensors stay on their device.
    """
    if type(observation) is not np.ndarray and isinstance(observation, Mapping | tuple):
        named = observation.items() if isinstance(observation, Mapping) else enumerate(observation)
        entries = {str(name): as_input(part) for name, part in named}
        first = next(iter(entries.values()))
        return assemble_unchecked(entries, torch.Size([len(first)]), first.device)
    tensor = torch.as_tensor(observation)
    return tensor.float() if tensor.is_floating_point() else tensor  # images stay uint8


def batch_of_one(observation: Any) -> Any:
    """Adds a batch dimension of size 1 to every array of an observation."""
    return each_part(observation, lambda part: np.asarray(part)[None])


class ActionReader:
    """Converts actions that an agent returned to an array ``[N, *space.shape]`` of the action space's dtype.

    Tensors on any device, arrays, numbers and lists of numbers are accepted. Dimensions of size 1 may be missing or
    added: one observation needs no batch dimension. Numbers are cast to the space's dtype within a kind or upwards:
    integers to floats, not floats to integers. For actions with parameters an agent returns the pair
    ``(discrete, parameters)`` of :class:`~lightning_replay.agents.spaces.ParameterizedActions`.
    """

    def __init__(self, space: Space[Any]) -> None:
        self.actions: ParameterizedActions | None = ParameterizedActions.of(space) if is_parameterized(space) else None
        self._space = space
        self._dtype = np.dtype(space.dtype)
        self._shape = tuple(space.shape or ())
        self._bounds = integer_bounds_of(space)
        if self.actions is not None:
            self._parameters = Box(self.actions.low, self.actions.high)
            self._parts = ActionReader(Discrete(len(self.actions.boxes))), ActionReader(self._parameters)

    def __call__(self, returned: object, count: int, source: str) -> Action:
        """Reads the actions that ``source``, a method, returned for ``count`` observations."""
        if self.actions is not None:
            if not isinstance(returned, tuple | list) or len(returned) != 2:
                raise TypeError(
                    f"{source} returned {_shown(returned)} for a batch of {count}; an action with parameters is the "
                    f"pair (discrete, parameters): integers [{count}] and the parameters of all actions "
                    f"[{count}, {self._parameters.shape[0]}], in the order of the space {self._parameters}."
                )
            parts: Any = [read(part, count, source) for read, part in zip(self._parts, returned, strict=True)]
            return parts[0], parts[1]
        space, dtype, array, expected = self._space, self._dtype, as_array(returned), (count, *self._shape)
        if array is None or not (array.dtype == dtype or np.can_cast(array.dtype, dtype, "same_kind")):
            raise TypeError(refusal_of(returned, space, count, source))
        if array.shape != expected:
            if [size for size in array.shape if size != 1] != [size for size in expected if size != 1]:
                raise ValueError(refusal_of(returned, space, count, source))
            array = array.reshape(expected)
        if self._bounds is not None and _is_outside(array, *self._bounds):
            raise ValueError(refusal_of(array.tolist(), space, count, source))
        if array.dtype != dtype:
            array = array.astype(dtype)
        return array


def _is_outside(array: np.ndarray, low: Any, high: Any) -> bool:
    if type(low) is int:  # The numbers of a few environments are compared in a fifth of the time in a list.
        numbers = array.ravel().tolist()
        return min(numbers, default=low) < low or max(numbers, default=high) > high
    return bool(((array < low) | (array > high)).any())


class States:
    """The states ``[N, ...]`` of a recurrent agent in N environments: those before the present step."""

    def __init__(self, agent: RecurrentAgent, count: int) -> None:
        self._agent, self._count = agent, count
        self._initial = self._checked(agent.initial_state(count), "initial_state", (count,))
        self.current: Tensor = self._initial.clone()
        self._following = self.current

    def act(self, observation: Any, explore: bool) -> Any:
        """Returns what the agent's ``act_with_state`` returns as actions. Its states count from :meth:`advance` on."""
        returned = self._agent.act_with_state(observation, self.current, explore=explore)
        following = returned[1] if isinstance(returned, tuple | list) and len(returned) == 2 else returned
        self._following = self._checked(following, "act_with_state", self.current.shape)
        return returned[0]

    def advance(self, done: np.ndarray | Tensor) -> None:
        """Ends the step: environments whose episode ended, bool ``[N]``, have the initial state again."""
        ended = torch.as_tensor(done, device=self.current.device).view(-1, *[1] * (self.current.ndim - 1))
        self.current = torch.where(ended, self._initial, self._following)  # a copy: an agent may reuse its tensors

    def _checked(self, state: Any, method: str, shape: Sequence[int]) -> Tensor:
        is_float = isinstance(state, Tensor) and state.is_floating_point()
        is_first = method == "initial_state"
        if not is_float or (state.shape[:1] if is_first else state.shape) != shape:
            accepted = ", ".join(map(str, (*shape, "...") if is_first else shape))
            raise ValueError(
                f"{type(self._agent).__name__}.{method} returned as states {_shown(state)} for {self._count} "
                f"environments; accepted is one tensor of floats [{accepted}], with environments first (h and c of an "
                f"LSTM stacked: torch.stack([h, c], 1)){'.' if is_first else ', after the actions: (action, state).'}"
            )
        return state.detach().float()


def states_of(agent: L.LightningModule, count: int) -> States | None:
    """Returns the states of an agent in ``count`` environments, ``None`` for an agent without, and errors of both."""
    recurrent = recurrent_agent(agent)
    if recurrent is None:
        acting_agent(agent)
    return None if recurrent is None else States(recurrent, count)


def act_on(
    agent: ActingAgent,
    observation: Any,
    explore: bool,
    read: Callable[[object, int, str], Any],
    states: States | None = None,
) -> Any:
    """Returns what ``read``, an :class:`ActionReader`, makes of the actions for observations ``[N, ...]``."""
    act, method = (agent.act, "act") if states is None else (states.act, "act_with_state")
    given = as_input(observation)
    returned = act(given if agent.device.type == "cpu" else given.to(agent.device), explore=explore)
    return read(returned, len(given), f"{type(agent).__name__}.{method}")


def act_with_value_on(
    agent: RolloutAgent, observation: Any, read: ActionReader
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Returns the columns to record for observations ``[N, ...]``, on the CPU, and the actions for the environments."""
    given = as_input(observation)
    count = len(given)
    source = f"{type(agent).__name__}.act_with_value"
    recorded: Any = agent.act_with_value(given.to(agent.device))
    row = dict(recorded.items()) if isinstance(recorded, dict | TensorDictBase) else {}
    is_whole = row.get("action") is not None and row.get("state_value") is not None
    is_whole &= not isinstance(recorded, TensorDictBase) or recorded.batch_size == (count,)
    if not is_whole or any(np.shape(column)[:1] != (count,) for column in row.values()):
        shapes = {key: list(np.shape(column)) for key, column in row.items()}
        shown = f"columns of {shapes}" if row else _shown(recorded)
        raise ValueError(
            f"{source} returned {shown} for a batch of {count}; return a TensorDict [{count}], or a dictionary of "
            f"tensors [{count}, ...], with action, state_value [{count}, 1] and the columns of the loss and of the "
            "level scores, as lightning_replay.agents.PPO does."
        )
    for key, column in row.items():
        is_tensor = isinstance(column, Tensor) or isinstance(column, TensorDictBase)  # noqa: SIM101  a union is slower
        tensor = column if is_tensor else torch.as_tensor(column)
        # A copy, because an agent may return the same tensors at each step.
        row[key] = tensor.clone() if isinstance(tensor, Tensor) and tensor.is_cpu else tensor.detach().cpu().clone()
    action: Any = read(row["action"], count, source)
    state_value = _one_each(row["state_value"], count, source)
    return row | {"action": torch.from_numpy(action), "state_value": state_value, "observation": given}, action


def values_of(agent: RolloutAgent, observations: Sequence[Any]) -> Tensor:
    """Returns the values of observations, one batch ``[N, ...]`` after the other, ``[N, 1]`` on the CPU."""
    given = torch.cat([as_input(one) for one in observations])
    return _one_each(agent.value(given.to(agent.device)), len(given), f"{type(agent).__name__}.value")


def _one_each(values: Any, count: int, source: str) -> Tensor:
    is_float = isinstance(values, Tensor) and values.is_floating_point()
    if not is_float or values.shape not in ((count, 1), (count,)):
        raise ValueError(
            f"{source} returned as values {_shown(values)} for a batch of {count}; accepted are floats [{count}, 1]."
        )
    return values.detach().cpu().reshape(count, 1)


def as_array(returned: object) -> np.ndarray | None:
    """Converts an agent's output to an array, or returns ``None`` if that is not possible."""
    if isinstance(returned, Tensor):
        tensor = returned.detach() if returned.requires_grad else returned
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
    try:
        return np.asarray(returned)
    except (TypeError, ValueError, RuntimeError):  # lists of unequal lengths, or of tensors on a GPU
        return None


def refusal_of(returned: Any, space: Space[Any], count: int, source: str) -> str:
    """Returns a sentence for actions that are no values of the space."""
    shape = (count, *(space.shape or ()))
    numbers, hint = f"{'floats' if np.issubdtype(space.dtype, np.floating) else space.dtype} {list(shape)}", ""
    if (bounds := integer_bounds_of(space)) is not None:
        numbers = f"integers {list(shape)} from {bounds[0]} to {bounds[1]}"
    is_array = isinstance(returned, Tensor | np.ndarray)
    if isinstance(space, Discrete) and is_array and tuple(returned.shape) == (count, space.n):
        hint = " Of one number per action take the argmax(-1)."
    return (
        f"{source} returned {_shown(returned)} for a batch of {count} observations, and the action space is {space}; "
        f"return {numbers}, as a tensor or an array.{hint}"
    )


def _shown(returned: Any) -> str:
    if isinstance(returned, Tensor | np.ndarray):
        return f"{str(returned.dtype).removeprefix('torch.')} of shape {list(returned.shape)}"
    text = repr(returned).replace("\n", " ")
    return f"{type(returned).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


Policy = Callable[[Any], Any]
#: ``(episode_return, infos) -> flag``, with the infos of the episode's last step, tensors ``[N]`` for a simulator.
SuccessFunction = Callable[[Any, Mapping[str, Any]], Any]


def success_of(episode_return: Any, infos: Mapping[str, Any]) -> Any:
    """Returns ``is_success``, or ``success``, of the infos of a step, or ``None`` if they have neither."""
    return infos.get("is_success", infos.get("success"))


class Successes:
    """Whether the episodes of an evaluation succeeded.

    Args:
        function: Flag of an episode, from its return and the infos of its last step, by default :func:`success_of`.

    Attributes:
        flags: 1 or 0 for each episode, NaN if its infos have no flag.
    """

    def __init__(self, function: SuccessFunction | None = None) -> None:
        check_kind("success", function, Callable | None, "a function of an episode's return and last infos, or None")
        self.function: SuccessFunction = success_of if function is None else function
        self.flags: list[float] = []

    def read(self, returns: Any, infos: Mapping[str, Any]) -> Tensor:
        """Returns the flags for returns ``[N]`` of environments, float32 ``[N]``, for one return or no flag ``[1]``.

        ``ValueError`` if the function of the user returned anything else.
        """
        episodes = torch.as_tensor(returns)
        given = self.function(returns, infos)
        with suppress(TypeError, ValueError, RuntimeError):
            flags = torch.as_tensor(given, dtype=torch.float32, device=episodes.device).reshape(-1).clamp(0, 1)
            if len(flags) == episodes.numel():
                return flags
        if self.function is not success_of:
            raise ValueError(
                f"success returned {_shown(given)} for returns of shape {list(episodes.shape)}; it must return one "
                "flag for each return, such as lambda episode_return, infos: episode_return > 0."
            )
        return torch.full((1,), torch.nan, device=episodes.device)

    def rate(self) -> float | None:
        """Returns the share of the episodes that succeeded, or ``None`` if no episode has a flag."""
        return None if np.isnan(self.flags).all() else float(np.nansum(self.flags)) / len(self.flags)


def infos_of(infos: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Returns the infos of one sub-environment of a vector, as their masks ``_key`` assign them."""
    own = [key for key in infos if f"_{key}" in infos and infos[f"_{key}"][row]]
    return {key: infos_of(infos[key], row) if isinstance(infos[key], dict) else infos[key][row] for key in own}


def episode_returns(
    agent: L.LightningModule,
    environment: gymnasium.Env[Any, Any],
    episodes: int,
    seed: int,
    max_episode_steps: int = MAX_EPISODE_STEPS,
    before_step: Callable[[], None] = lambda: None,
    successes: Successes | None = None,
) -> Iterator[float]:
    """Plays whole episodes, the i-th from ``seed + i``, and yields the return of each.

    Actions that the agent draws also start from that seed. Torch's generators are restored after each episode.
    ``before_step`` is called before every step, and may raise to end the episode. ``successes`` gets each flag.
    """
    environment = LimitedEpisodes(CheckedSteps(environment), max_episode_steps)
    policy: Any = agent
    read = ActionReader(environment.action_space)
    for episode in range(episodes):
        observation, _ = environment.reset(seed=seed + episode)
        total, done = 0.0, False
        with acting(policy), drawing_from(seed + episode, policy):
            states = states_of(agent, 1)
            while not done:
                before_step()
                given = act_on(policy, batch_of_one(observation), False, read, states)
                action = given[0] if read.actions is None else read.actions.for_one(*given)
                observation, reward, terminated, truncated, infos = environment.step(action)
                total += float(reward)
                done = terminated or truncated
                if states is not None:
                    states.advance(np.array([done]))
        if successes is not None:
            successes.flags += successes.read(total, infos).tolist()
        yield total


def level_returns(
    policy: Policy,
    env: str | Callable[[], gymnasium.Env[Any, Any]],
    level_ids: Sequence[int],
    num_envs: int = 16,
    seed: int | None = None,
    max_episode_steps: int = MAX_EPISODE_STEPS,
    successes: Successes | None = None,
) -> np.ndarray:
    """Plays one episode on each level and returns its returns, float64 ``[L]``.

    Args:
        policy: Actions ``[N, ...]``, a tensor or an array, for observations ``[N, ...]`` as the vector of environments
            gives them, arrays in the structure of their space.
        env: Gymnasium id, or a callable that builds one environment.
        level_ids: Distinct ids. Each level is played once.
        num_envs: Number of episodes that are played at a time.
        seed: Seed for the environments' own randomness, if levels are set by ``set_level``.
        max_episode_steps: Number of steps after which an episode is cut and counted, with a warning.
        successes: Object that gets the flag of each episode.

    Raises:
        TypeError, ValueError: the policy returned no actions of the environment's space.

    Example:
        >>> level_returns(lambda observations: np.zeros(len(observations), dtype=int), "CartPole-v1", [3, 4, 5])
        array([9., 8., 9.])
    """
    check_env(env)
    count = min(num_envs, len(level_ids))
    checked_count("max_episode_steps", max_episode_steps)

    def limited() -> LimitedEpisodes:
        return LimitedEpisodes(build_environment(env, {}), max_episode_steps)

    environments = make_level_vector(limited, count, SequentialLevels(level_ids), seed=seed, check=False)
    read = ActionReader(environments.single_action_space)
    try:
        returns = np.zeros(len(level_ids))
        is_played = np.zeros(len(level_ids), dtype=np.bool_)
        # index of the level that each environment plays. Episodes begun after the last level do not count
        place = np.arange(count)
        total = np.zeros(count)
        following = count
        observation, _ = environments.reset()
        while not is_played.all():
            action = read(policy(observation), count, "policy")
            observation, reward, terminated, truncated, infos = environments.step(action)
            total += reward
            for i in np.flatnonzero(terminated | truncated):
                if place[i] < len(level_ids):
                    returns[place[i]], is_played[place[i]] = total[i], True
                    if successes is not None:
                        successes.flags += successes.read(total[i], infos_of(infos["final_info"], int(i))).tolist()
                place[i], total[i] = following, 0.0
                following += 1
        return returns
    finally:
        environments.close()


@contextmanager
def stochastic_policy(agent: L.LightningModule, seed: int) -> Iterator[Policy]:
    """Yields the agent's policy with exploration. The random numbers of the training are left unchanged.

    Args:
        agent: Agent with ``act(observation, explore)``.
        seed: Seed for the actions.
    """
    acts = acting_agent(agent)

    def policy(observation: Any) -> Any:
        returned = acts.act(as_input(observation).to(acts.device), explore=True)
        return as_array(returned) if isinstance(returned, Tensor) else returned

    with acting(acts), drawing_from(seed, agent):
        yield policy


@contextmanager
def drawing_from(seed: int, agent: L.LightningModule) -> Iterator[None]:
    """Starts torch's generators from a seed, and restores them afterwards."""
    with torch.random.fork_rng(devices=[agent.device] if agent.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def make_environment(
    env: str | Callable[..., gymnasium.Env[Any, Any]], env_kwargs: dict[str, Any]
) -> gymnasium.Env[Any, Any]:
    """Builds one environment, whose observations must be arrays, or Dict and Tuple of arrays."""
    return usable_environment(build(env, env_kwargs), env)


def usable_environment(built: Any, env: object) -> gymnasium.Env[Any, Any]:
    """Returns what ``env`` built, with the checks of :func:`make_environment`."""
    made = checked_environment(built, env)
    if refused := refused_entries(made.observation_space):
        made.close()
        raise ValueError(
            f"environment {env!r} has {refused} among its observations; accepted are arrays (Box, Discrete, "
            "MultiDiscrete, MultiBinary), and Dict and Tuple of these. Leave others out by "
            "gymnasium.wrappers.FilterObservation, or convert them by gymnasium.wrappers.TransformObservation."
        )
    return made


def make_environments(
    env: str | Callable[..., gymnasium.Env[Any, Any]], env_kwargs: dict[str, Any], num_envs: int, asynchronous: bool
) -> VectorEnv[Any, Any, Any]:
    """Returns a vector whose environments reset in the step that ends an episode, so that no reset is a transition."""
    # functions of Gymnasium and of lightning_replay.envs, so that a separate process does not import torch
    if isinstance(env, str):
        spec = gymnasium.registry.get(env)
        package = "lightning_replay.envs"
        if spec is not None and str(spec.entry_point).startswith(f"{package}."):
            env = f"{package}:{env}"  # A new process imports the module that registers it.
        env = partial(gymnasium.make, env)
    constructors = [partial(with_checked_steps, partial(env, **env_kwargs))] * num_envs
    vector = AsyncVectorEnv if asynchronous else SyncVectorEnv
    return vector(constructors, autoreset_mode=AutoresetMode.SAME_STEP)


def random_actions(space: Space[Any], count: int) -> Action:
    """Draws ``count`` actions of one environment's space by its ``sample``, ``[N, *space.shape]``."""
    if is_parameterized(space):
        return ParameterizedActions.of(space).random(count, space.np_random)
    if space.shape is not None:
        return np.stack([space.sample() for _ in range(count)])
    raise ValueError(
        f"no random warm-up actions in the action space {space}; it must be one of arrays, such as Discrete, "
        "MultiDiscrete, MultiBinary and Box, or discrete actions with parameters, Tuple(Discrete(K), Box, ..., Box). "
        "Convert the actions in a wrapper, such as gymnasium.wrappers.TransformAction."
    )
