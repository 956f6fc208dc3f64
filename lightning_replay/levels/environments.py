# SPDX-License-Identifier: Apache-2.0
"""Gymnasium environments that play named levels, single and as vectors, and checks that they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from copy import deepcopy
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import iterate

from lightning_replay.envs.building import build_environment, check_env, checked_reset, checked_step
from lightning_replay.levels.level_ids import LEVEL_IDS, broken_off, checked_actor
from lightning_replay.levels.level_set import LevelSet
from lightning_replay.options import (
    check_kind,
    check_option,
    checked_count,
    checked_entries,
    checked_flag,
    checked_optional_count,
)

if TYPE_CHECKING:
    from lightning_replay.levels.selector import LevelSelector


def make_level_vector(
    env: str | Callable[[], gymnasium.Env[Any, Any]],
    num_envs: int,
    levels: LevelSelector,
    *,
    actors: Sequence[int | str] | None = None,
    asynchronous: bool = False,
    context: str | None = None,
    seed: int | None = None,
    check: bool | Sequence[int] = True,
) -> LevelVectorWrapper:
    """Builds a vector environment that plays levels, set by seed or by ``set_level``.

    Args:
        env: Id for ``gymnasium.make``, or a function that makes one environment.
        num_envs: Number of sub-environments, each an actor.
        levels: Level selector that chooses each actor's next level. ``actors`` and ``check`` are as in
            :class:`LevelVectorWrapper`.
        asynchronous: Whether there is one process for each sub-environment.
        context: Start method of these processes. ``None`` is the method of ``multiprocessing``. ``"spawn"`` takes
            seconds each and needs ``if __name__ == "__main__"``.
        seed: Seed for the environments' generators (plus 0, 1, 2, …) if levels are set by ``set_level``.

    Raises:
        TypeError, ValueError: What :class:`LevelWrapper` and :class:`LevelVectorWrapper` refuse.
    """
    checked_count("num_envs", num_envs, of="sub-environments")
    checked_flag("asynchronous", asynchronous)
    checked_optional_count("seed", seed, 0)
    _require_level_source(levels)
    check_env(env)
    makers = [partial(_LevelOfVector, env, None if seed is None else seed + row) for row in range(num_envs)]
    build: Any = partial(AsyncVectorEnv, context=context) if asynchronous else SyncVectorEnv
    return LevelVectorWrapper(build(makers, autoreset_mode=AutoresetMode.DISABLED), levels, actors=actors, check=check)


class LevelVectorWrapper(VectorWrapper):
    """Sub-environment k plays the levels of actor k, and begins the next in the step that ends its episode.

    It resets sub-environments itself, so the vector environment must not (``AutoresetMode.DISABLED``).
    :func:`~lightning_replay.levels.environments.make_level_vector` builds it. Steps have the layout of
    ``AutoresetMode.SAME_STEP``: if an episode ended, the observation is the next one's first. Sub-environments get
    their level by ``reset(seed=level_id)``. Sub-environments with a ``set_level`` method need a
    :class:`~lightning_replay.levels.environments.LevelWrapper` each. If returns are recorded, they need Gymnasium's
    ``RecordEpisodeStatistics``.

    :meth:`reset` draws a level for every sub-environment and abandons the older active episodes of these actors.
    Therefore call it also after a level buffer was loaded. Before a reset in between, update the levels with the steps
    collected. ``options={"level_id": ...}`` names levels instead, for which ``levels.start`` is called.

    Args:
        env: Vector environment that does not reset itself.
        levels: Level selector that chooses each actor's next level.
        actors: Name of each sub-environment, or 0, 1, 2, … if absent.
        check: Whether the first reset checks, by three more, that levels are followed. It may also be the ids of
            at least two to check with, if not all of 0 to 7 exist.

    Infos:
        level_id: int64 ``[num_envs]``, the level that the returned observation belongs to.
        step_level_id: int64 ``[num_envs]``, in :meth:`step` only. The level that the step, its reward, and its end
            belong to. It was ``level_id`` together with the observation acted on.
        final_obs, final_info: Entries of the last step, if an episode ended. ``_final_obs`` is bool ``[num_envs]``.

    Raises:
        ValueError: A vector environment that resets itself or has ``set_level`` but gets levels by seed, another number
            of actors than of sub-environments, or an environment that ignores its level.

    Example:
        >>> from lightning_replay.levels.environments import make_level_vector
        >>> from lightning_replay.levels import SequentialLevels
        >>> envs = make_level_vector("CartPole-v1", 2, SequentialLevels(range(7, 20)))
        >>> observations, infos = envs.reset()
        >>> infos["level_id"]
        array([7, 8])
        >>> while not (infos := envs.step(np.array([0, 1]))[-1]).get("_final_obs", np.zeros(2)).any():
        ...     pass
        >>> infos["step_level_id"], infos["level_id"]
        (array([7, 8]), array([ 9, 10]))
    """

    env: Any  # its class declares one seed, and all vectors take a list

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        levels: LevelSelector,
        *,
        actors: Sequence[int | str] | None = None,
        check: bool | Sequence[int] = True,
    ) -> None:
        super().__init__(env)
        _require_level_source(levels)
        _require_level_vector(env, levels.levels)
        self.levels = levels
        self.actors: list[int | str] = list(map(checked_actor, range(env.num_envs) if actors is None else actors))
        if len(set(self.actors)) != env.num_envs or len(self.actors) != env.num_envs:
            raise ValueError(f"actors is {self.actors}; a different name for each of {env.num_envs} sub-environments")
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self._probes = checked_probes(check)
        self._level_ids = np.zeros(env.num_envs, np.int64)
        self._has_begun = False

    @property
    def level_ids(self) -> np.ndarray:
        """Level of each sub-environment, int64 ``[num_envs]``."""
        if not self._has_begun:
            raise gymnasium.error.ResetNeeded("no level is played before the first reset(); call it once")
        return self._level_ids.copy()

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode on drawn or named levels, everywhere or only for a true ``options["reset_mask"]``.

        Args:
            seed: Seed without effect. The generator of ``levels`` chooses the levels, and a level decides its episode.
            options: ``level_id``, the levels to play, with one for each sub-environment, or ``None`` if it is drawn.
                Also ``reset_mask``, bool ``[num_envs]``, and the environments' own options.
        """
        others = dict(options or {})
        mask = others.get("reset_mask")
        if mask is None:
            mask = np.ones(self.num_envs, np.bool_)
        elif not self._has_begun:
            raise gymnasium.error.ResetNeeded("the first reset() begins everywhere; call it once without reset_mask")
        elif not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ValueError(f"reset_mask is {mask!r}; a boolean array [{self.num_envs}] is accepted")
        named = self._named(others.pop("level_id", None))
        if not self._has_begun and self._probes:
            env = self.env
            _require_levels_to_show(
                lambda ids: iterate(env.observation_space, env.reset(seed=ids)[0]), self._probes, self.num_envs, env
            )
        chosen = self._choose(mask, named)
        # Chosen first, abandoned after: the choices equal the choices of a run without a break.
        for row in np.flatnonzero(mask):
            self.levels.abandon_all_but_newest(self.actors[row])
        observations, infos = self.env.reset(seed=chosen.tolist(), options=others or None)
        self._level_ids = chosen
        self._has_begun = True
        return observations, infos | everywhere(level_id=self.level_ids)

    def step(  # type: ignore[override]  # Gymnasium's wrapper returns type variables that nothing binds
        self, actions: Any
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Takes a step. If an episode ended, the observation is the first of the next level."""
        played = self.level_ids
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        done = np.logical_or(terminated, truncated)
        if np.count_nonzero(done):  # a tenth of any() for a few environments
            # Copied before the reset, which may write into the same arrays.
            last = np.full(self.num_envs, None, dtype=object)
            for row, observation in enumerate(iterate(self.env.observation_space, observations)):
                if done[row]:
                    last[row] = deepcopy(observation)
            final = {"final_obs": last, "final_info": of_rows(infos, done)}
            self._level_ids = self._choose(done, [None] * self.num_envs)
            observations, begun = self.env.reset(seed=self._level_ids.tolist(), options={"reset_mask": done.copy()})
            infos = overlaid(of_rows(infos, ~done), begun) | final | {f"_{key}": done.copy() for key in final}
        infos |= everywhere(level_id=self.level_ids, step_level_id=played)
        return observations, rewards, terminated, truncated, infos

    def _named(self, levels: Sequence[int | None] | None) -> list[int | None]:
        if levels is None:
            return [None] * self.num_envs
        if isinstance(levels, int | np.integer) or len(levels) != self.num_envs:
            raise ValueError(
                f"options['level_id'] is {levels!r}; name {self.num_envs} levels, one for each sub-environment, None "
                "where it is to be drawn"
            )
        return [None if level is None else self.levels.checked(checked_level(level)) for level in levels]

    def _choose(self, mask: np.ndarray, named: list[int | None]) -> np.ndarray:
        chosen = self._level_ids.copy()
        for row in np.flatnonzero(mask):
            level_id = named[row]
            if level_id is None:  # not named: the selector draws it
                level_id = checked_level(self.levels.next_level(self.actors[row]))
            else:
                self.levels.start(self.actors[row], level_id)
            chosen[row] = level_id
        return chosen


def of_rows(infos: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Returns the infos of some sub-environments, bool ``[num_envs]``."""
    kept: dict[str, Any] = {}
    for key, value in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        mask = rows & infos.get(f"_{key}", True)  # a key without a mask is of all sub-environments
        if mask.any():
            kept[key] = of_rows(value, rows) if isinstance(value, dict) else value
            kept[f"_{key}"] = mask
    return kept


def overlaid(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Returns infos in which the second argument replaces entries of the first."""
    merged = dict(below)  # neither is changed: an environment may return the same dictionary again
    for key, value in above.items():
        if key.startswith("_") and key[1:] in above:
            continue
        mask = above.get(f"_{key}")
        if mask is None or key not in below or not isinstance(value, dict | np.ndarray):
            merged[key] = value
        elif isinstance(value, dict):
            merged[key] = overlaid(below[key], value)
        else:
            merged[key] = below[key].astype(np.result_type(below[key], value))  # a copy
            merged[key][mask] = value[mask]
        if mask is not None:
            merged[f"_{key}"] = mask | below.get(f"_{key}", False)
    return merged


def everywhere(**values: np.ndarray) -> dict[str, np.ndarray]:
    """Returns infos that all sub-environments have."""
    return values | {f"_{key}": np.ones(len(value), np.bool_) for key, value in values.items()}


class LevelWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Plays one level per episode: the one named for the reset, otherwise ``next_level()``.

    A level is set by ``reset(seed=level_id)``, or by ``set_level(level_id)`` and a ``reset()`` without a seed if the
    environment or one of its wrappers has that method, or by ``reset(options={level_option: level_id})``. Inside other
    level wrappers and vectors this environment gets its level. The level of a reset is taken, in this order, from
    ``options={"level_id": 7}``, :meth:`set_level`, ``next_level()``. Without ``next_level``, the ``seed`` of a reset is
    the id of the level. With ``next_level``, the seed, such as the ``seed=0`` of a training library, only seeds the
    environment's own generator. It has no effect if the level is the seed. A level buffer counts an episode in
    ``next_level``. If you name a level in another way, call the buffer's ``start``.

    A reset within an episode breaks the episode off. The next ``next_level()`` of a level selector ends it without a
    score. Steps that the selector receives later still count, and the episode is scored if its last step is done, as
    with a ``TimeLimit`` around this wrapper.

    Args:
        env: Environment to wrap.
        next_level: Function that chooses a level at the start of an episode, such as
            ``functools.partial(levels.next_level, actor=0)``. It is ``None`` if each reset names its level.
        seed: Seed for the environment's generator, used once, if the level is not the seed.
        check: Whether the first reset checks, by three more, that levels are followed. It may also be the ids of
            at least two to check with, if not all of 0 to 7 exist.
        level_option: Key of the level in the options of the environment's reset.
        level_set: Set that gives the environment, by ``level_option`` or ``set_level``, the object of an id as it was
            put into the set, such as a task dictionary. Otherwise, the environment gets the id.

    Attributes:
        level_id: Id of the level being played, ``None`` before the first reset. It is also in every info.

    Raises:
        ValueError: An environment that ignores its level, an id outside 0 to ``2**31 - 1``, or a reset without a level.
        RuntimeError: ``next_level`` of a level selector that is a copy in another process.
    """

    plays_level_ids = True  # _require_level_vector looks it up through all wrappers
    _names_each_step = True

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        next_level: Callable[[], int] | None = None,
        *,
        seed: int | None = None,
        check: bool | Sequence[int] = True,
        level_option: str | None = None,
        level_set: LevelSet | None = None,
    ) -> None:
        super().__init__(env)
        self.level_id: int | None = None
        self._next_level = next_level
        self.chooses: bool = next_level is not None  # _require_level_vector reads it
        self._seed = checked_optional_count("seed", seed, 0)
        self._probes = checked_probes(check)
        self._named: int | None = None
        self._steps: int | None = None  # steps of the running episode, or None between episodes
        self._broken_off: list[tuple[int | None, int]] = []  # level and steps of episodes, until the next draw
        self._set_level = env.has_wrapper_attr("set_level") and env.get_wrapper_attr("set_level")
        check_kind("level_option", level_option, str | None, "a key of the options of the environment's reset, or None")
        check_kind("level_set", level_set, LevelSet | None, "LevelSet(...), or None, for environments that take ids")
        if level_set is not None and level_option is None and not self._set_level:
            raise ValueError(f"level_set is given, and {env} has no set_level; give level_option, a key of its options")
        self._level_option = level_option
        self._level_set = level_set

    def has_other_set(self, digest: str) -> bool:
        """Returns whether a wrapper plays another level set than the set with this digest.

        :meta private:
        """
        if self._level_set is not None and self._level_set.digest != digest:
            return True
        return self.env.has_wrapper_attr("has_other_set") and self.env.get_wrapper_attr("has_other_set")(digest)

    def set_level(self, level_id: int) -> None:
        """Names the level of the next reset."""
        self._named = checked_level(level_id)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode on the named or chosen level, which is in ``info["level_id"]``."""
        if self.level_id is None and self._probes:
            _require_levels_to_show(lambda ids: [self._play(ids[0], None)[0]], self._probes, 1, self.env)
        others = dict(options or {})
        named = others.pop("level_id", self._named)
        if self._next_level is None:
            if named is None:
                named = self._level_of(seed)
        else:
            if seed is not None:
                self._seed = seed
            if self._steps is not None:
                self._broken_off.append((self.level_id, self._steps))
        self._steps = None
        level_id = checked_level(self._draw(self._next_level) if named is None else named)
        observation, info = self._play(level_id, others or None)
        self.level_id, self._named, self._steps = level_id, None, 0
        return observation, info | {"level_id": level_id}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step. ``info["level_id"]`` is its level."""
        observation, reward, terminated, truncated, info = checked_step(self.env.step(action), self.env)
        is_done = terminated or truncated
        self._steps = None if is_done or self._steps is None else self._steps + 1
        if self._names_each_step or is_done:
            info = info | {"level_id": self.level_id}
        return observation, reward, terminated, truncated, info

    def _level_of(self, seed: int | None) -> int:
        if seed is None:
            raise ValueError(
                "nothing chooses a level; give next_level= to LevelWrapper, set_level(level_id) or reset(seed=level_id)"
            )
        highest = LEVEL_IDS if self._level_set is None else len(self._level_set)
        accepted = f"a level from 0 to {highest - 1}: without next_level= the seed of a reset is the id of its level"
        check_option("seed", seed, Integral, accepted, 0, highest - 1)
        return int(seed)

    def _draw(self, next_level: Any) -> int:
        context = copy_context()
        context.run(broken_off.set, self._broken_off)
        level_id: int = context.run(next_level)
        self._broken_off = []
        return level_id

    def _play(self, level_id: int, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        level = level_id if self._level_set is None else self._level_set.level(level_id)
        try:
            returned = self._reset(level, options)
        except Exception as error:
            if self.level_id is None and self._level_set is None:
                error.add_note(f"The environment failed in its first reset on a level. Use {_BY_OPTION}")
            raise
        return checked_reset(returned, self.env)

    def _reset(self, level: Any, options: dict[str, Any] | None) -> Any:
        if self._level_option is not None:
            seed = self._seed
            self._seed = None
            return self.env.reset(seed=seed, options={**(options or {}), self._level_option: level})
        if not self._set_level:
            return self.env.reset(seed=level, options=options)
        self._set_level(level)
        if self._seed is not None:  # The generator gets it once, in a further reset: some environments play their seed.
            self.env.reset(seed=self._seed)
            self._seed = None
            self._set_level(level)
        return self.env.reset(options=options)


class _LevelOfVector(LevelWrapper):
    """Has its level in the infos of resets and last steps alone: the vector adds the rest, merging costs 4 µs each."""

    _names_each_step = False

    def __init__(self, env: str | Callable[[], gymnasium.Env[Any, Any]], seed: int | None) -> None:
        super().__init__(build_environment(env, {}), seed=seed, check=False)


_BY_OPTION = (
    "LevelWrapper(env, level_option=...) where reset reads the level from its options, with level_set=... where it "
    "takes an object in place of the id"
)
_ACCEPTED = (
    "Accepted are environments whose reset(seed=level_id) fixes the layout of the episode (they draw it from "
    "self.np_random after super().reset(seed=seed)), those with a method set_level(level_id), which is called before "
    f"reset, and {_BY_OPTION}. Correct the environment, or give check=False if its level does not show in the first "
    "observation"
)


def checked_level(level_id: Any) -> int:
    """Returns a level's id, or raises an error unless it is a seed that every environment accepts."""
    check_option("level_id", level_id, Integral, "a whole number from 0 to 2**31 - 1", 0, LEVEL_IDS - 1)
    return int(level_id)


def _require_level_source(levels: object) -> None:
    # The import is here because processes that only step environments do without torch.
    from lightning_replay.levels.selector import LevelSelector

    accepted = "LevelBuffer(...), UniformLevels(...) or SequentialLevels(...) of lightning_replay.levels"
    check_kind("levels", levels, LevelSelector, accepted)


def checked_probes(check: bool | Sequence[int]) -> tuple[int, ...]:
    """Returns the levels of the check in the first reset, or none."""
    if isinstance(check, bool):
        return tuple(range(8)) if check else ()
    accepted = "True, False or at least two different ids of levels"
    probes = tuple(dict.fromkeys(map(checked_level, checked_entries("check", check, accepted))))
    if len(probes) < 2:
        raise ValueError(f"check is {check!r}; it must be {accepted}")
    return probes


def _require_level_vector(env: VectorEnv[Any, Any, Any], levels: LevelSet | None) -> None:
    # All vectors of an environment class share their metadata, which has the mode of the vector built last.
    mode = getattr(env.unwrapped, "autoreset_mode", env.metadata.get("autoreset_mode"))
    if mode != AutoresetMode.DISABLED:
        raise ValueError(
            f"{env} resets its sub-environments by itself (autoreset_mode is {mode}), before a level can be chosen; "
            "build it with autoreset_mode=AutoresetMode.DISABLED, or by make_level_vector(env, num_envs, levels)"
        )
    call = getattr(env.unwrapped, "call", None)
    if call is None:  # a vector without sub-environments to look into
        return
    # If a level is set by a method, LevelWrapper has to call it with the seed of the reset.
    sets = call("has_wrapper_attr", "set_level")
    wrapped = call("has_wrapper_attr", "plays_level_ids")
    if any(has and not reaches for has, reaches in zip(sets, wrapped, strict=True)):
        raise ValueError(
            f"the sub-environments of {env} have a method set_level, which a seed does not reach; build the vector by "
            "make_level_vector(env, num_envs, levels), or put LevelWrapper(env, check=False) around each of them"
        )
    if all(wrapped) and any(call("get_wrapper_attr", "chooses")):
        raise ValueError(
            f"next_level is given to a LevelWrapper in {env}, and LevelVectorWrapper chooses its levels; leave "
            "next_level out of LevelWrapper"
        )
    if levels is not None and all(wrapped):
        check_set(levels, call("has_other_set", levels.digest))


def check_set(levels: LevelSet, has_other: Iterable[bool]) -> None:
    """Raises ``ValueError`` if an environment plays other objects than the ones that are chosen."""
    if any(has_other):
        raise ValueError(
            f"level_set of LevelWrapper has other objects than {levels}, whose ids are chosen; give the same"
        )


def _require_levels_to_show(
    begin: Callable[[list[int]], Iterable[Any]], probes: Sequence[int], num_envs: int, env: object
) -> None:
    # Three resets for a correct environment: a level begun twice, then each environment on another level.
    rounds = [[probes[(row + shift) % len(probes)] for row in range(num_envs)] for shift in range(len(probes))]
    first = deepcopy([*begin(rounds[0])])  # the next reset may write into the same arrays
    for level_id, before, after in zip(rounds[0], first, begin(rounds[0]), strict=True):
        if not data_equivalence(before, after):
            raise ValueError(
                f"{env} does not follow its level: level {level_id}, begun twice, gave two different first "
                f"observations. {_ACCEPTED}"
            )
    alike = list(range(num_envs))
    for level_ids in rounds[1:]:
        following = [*begin(level_ids)]
        alike = [row for row in alike if data_equivalence(first[row], following[row], exact=True)]
        if not alike:
            return
    raise ValueError(
        f"{env} ignores its level: the levels {', '.join(map(str, sorted(probes)))} all gave the same first "
        f"observation. {_ACCEPTED}"
    )
