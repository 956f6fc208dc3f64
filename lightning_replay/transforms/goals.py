# SPDX-License-Identifier: Apache-2.0
"""Hindsight: goals of drawn transitions replaced by goals that their episodes achieved."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.returns import FORMED_KEYS, EpisodeTracker, bootstrap_discounts, n_step_returns
from lightning_replay.options import check_kind, checked_choice, checked_key, checked_keys, checked_share
from lightning_replay.parts import ReplayTransform
from lightning_replay.samplers.pairs import PairSampler
from lightning_replay.saving.spec import rebuildable
from lightning_replay.storage.packed import read_columns

GOAL_STRATEGIES = ("future", "final", "episode")
ACHIEVED_GOAL = ("observation", "achieved_goal")
DESIRED_GOAL = ("observation", "desired_goal")

#: ``(achieved [N, ...], desired [N, ...], info) -> [N]``, of arrays, or of tensors if slots are drawn on a device.
#: ``info`` holds the columns ``[N, ...]`` that ``reward_keys`` names.
GoalFunction = Callable[[Any, Any, dict[str, Any]], Any]
WHOLE = slice(None)  # place of a goal that fills its column; torch 2.7 refuses a second ``...`` in an index


class _RewardColumns(dict[str, Any]):
    """Stored columns by name, for functions of goals. A missing one is reported with what to do."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"info has no {name!r}; it holds the columns that reward_keys names, here {[*self]}. Name a stored column "
            f"there, such as reward_keys=[('next', {name!r})]"
        )


@rebuildable
class RelabelGoals(ReplayTransform):
    """Replaces the desired goals of a share of each batch by goals achieved in the same episodes.

    The new goal of a row is the achieved goal after one step of its episode (under ``"next"``), drawn along the links
    between stored rows. It never crosses the end of an episode, a gap, an overwritten row or environments. The reward
    is computed again, and so is ``terminated`` if a function for it is given. A step that ended its episode at the old
    goal, and does not end it at the new one, becomes truncated. With ``n_steps`` of the buffer, this is
    done for every step of the return, which ends at the step that the new goal terminates. Stored rows, ``index``,
    weights and priorities stay as they are. Hindsight Experience Replay, Andrychowicz et al. 2017,
    https://arxiv.org/abs/1707.01495, section 4.5.

    For a :class:`~lightning_replay.Replay`, which gives it stored rows. TorchRL's buffers do not. The time of a draw
    grows with the length of the episodes, by about a millisecond for 256 rows of 1,000 steps, not with the capacity.

    If slots are drawn on a device, goals are drawn there without a wait. ``reward`` and ``terminated`` then accept
    tensors on that device and return tensors there, and NaN or infinity that they return is not refused.

    Args:
        strategy: Choice of the goal. ``"future"`` is a step from the row itself on to the newest stored one of its
            episode, all equally likely. ``"final"`` is the newest stored one. ``"episode"`` is any stored one, all
            equally likely.
        share: Probability that a row is relabeled, k / (k + 1) of the paper, 0.8 for k = 4.
        reward: Function from ``(achieved, desired, info)``, NumPy arrays ``[N, ...]`` to the rewards ``[N]``, as
            ``compute_reward`` of Gymnasium-Robotics. ``info`` holds the columns of ``reward_keys``. Saves name it by
            its import path.
        env: Id of an environment, an environment, or a class or function that builds one, whose ``compute_reward`` is
            used if ``reward`` is ``None``. An environment built here is closed. Its ``compute_terminated``, if any, is
            called row by row.
        terminated: Function like ``reward``, of flags ``[N]``, in place of that of ``env``. Without either the flags
            stay as they were stored, which is right if no goal ends an episode.
        achieved_key: Column of the goal that was achieved, read under ``"next"``.
        desired_key: Column of the goal, replaced there and, if there, under ``"next"``. If rows have flattened
            observations of ``env``, as RLlib's and Gymnasium's ``FlattenObservation`` make them, in one column
            ``observation``, the goals are their parts of it.
        reward_keys: Stored columns that the functions read besides the goals, such as
            ``["action", ("next", "speed")]``. They are in ``info`` as they are stored, ``[N, ...]``, each by the last
            part of its key: ``info["action"]``, ``info["speed"]``. They are of the step that is rewarded, also of
            each step of a return. ``compute_terminated`` of ``env`` gets one row of them.
        seed: Seed for the transform's own generator, whose state is part of :meth:`state_dict`.

    Raises:
        ValueError: neither ``reward`` nor an ``env`` with ``compute_reward``, or two ``reward_keys`` with one name.
            Rows without the columns of goals or of ``reward_keys``, or with returns over several steps. A buffer that
            draws pairs or sequences. Rewards or flags of another shape.

    Example:
        >>> from tensordict import TensorDict
        >>> from lightning_replay import recipes
        >>> goals, done = {"desired_goal": torch.full((2, 1), 9.0)}, torch.tensor([[False], [True]])
        >>> after = {"observation": goals | {"achieved_goal": torch.tensor([[1.0], [2.0]])}}
        >>> after |= {"reward": torch.zeros(2, 1), "terminated": done, "done": done}
        >>> relabel = RelabelGoals("final", 1.0, lambda achieved, desired, info: (achieved == desired).all(-1))
        >>> replay = recipes.uniform(capacity=10, batch_size=4, transform=relabel, check_continuity=False, seed=0)
        >>> slots = replay.extend(TensorDict({"observation": goals, "next": after}, [2]))
        >>> batch = replay.sample()
        >>> batch["index"], batch["observation", "desired_goal"].flatten(), batch["next", "reward"].flatten()
        (tensor([0, 1, 1, 0]), tensor([2., 2., 2., 2.]), tensor([0., 1., 1., 0.]))
    """

    follows_episodes = True
    draws_there = True
    takes_sequences = False
    _gives_tensors = False  # Whether slots are drawn on a device. The functions then accept tensors.

    def __init__(
        self,
        strategy: str = "future",
        share: float = 0.8,
        reward: GoalFunction | None = None,
        env: Any = None,
        terminated: GoalFunction | None = None,
        achieved_key: NestedKey = ACHIEVED_GOAL,
        desired_key: NestedKey = DESIRED_GOAL,
        reward_keys: Sequence[NestedKey] = (),
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self._seed_generator(seed)
        self.strategy: str = checked_choice("strategy", strategy, GOAL_STRATEGIES)
        self.share: float = checked_share("share", share)
        for name, function in (("reward", reward), ("terminated", terminated)):
            if function is not None:
                check_kind(name, function, Callable, "a function of achieved goals, desired goals and info")
        self.achieved_key: tuple[str, ...] = checked_key("achieved_key", achieved_key)
        self.desired_key: tuple[str, ...] = checked_key("desired_key", desired_key)
        self.reward_keys: tuple[tuple[str, ...], ...] = tuple(checked_keys("reward_keys", reward_keys))
        if len({key[-1] for key in self.reward_keys}) < len(self.reward_keys):
            raise ValueError(
                f"reward_keys is {reward_keys!r}; each column must have another last name, by which info holds it. "
                "Store one of the columns under another name"
            )
        self._given: tuple[Any, Any, Any] = reward, terminated, env
        # Whether rows have shown if goals end episodes.
        self._knows_ends = False
        self._set_functions()

    def _set_functions(self) -> None:
        reward, terminated, env = self._given
        # The places of the entries in flattened observations.
        self._flat: dict[str, slice] = {}
        if env is not None:
            built = _built(env)
            if reward is None and built.has_wrapper_attr("compute_reward"):
                reward = built.get_wrapper_attr("compute_reward")
            if terminated is None and built.has_wrapper_attr("compute_terminated"):
                terminated = functools.partial(_row_by_row, built.get_wrapper_attr("compute_terminated"))
            self._flat = _places(built)
            if built is not env:
                built.close()
        if reward is None:
            which = "no env is given" if env is None else f"{env} has no compute_reward"
            raise ValueError(
                f"reward is None and {which}, so the rewards of other goals are unknown; give reward=, a function of "
                "achieved goals, desired goals and info, or an env with compute_reward(achieved_goal, desired_goal, "
                "info)"
            )
        self._functions: Any = reward, terminated

    def __getstate__(self) -> dict[str, Any]:
        # The functions may be methods of a whole simulation, so they are not copied.
        return super().__getstate__() | {"_functions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_functions()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Refuses: goals are drawn from stored rows."""
        raise TypeError(
            "RelabelGoals reads stored rows and the links of their episodes, which only a lightning_replay.Replay "
            "gives it: replay.append_transform(RelabelGoals(...)), or recipes.hindsight"
        )

    def check_buffer(self, replay: Any) -> None:
        """Refuses a buffer that draws pairs or sequences. Raises ``ValueError``."""
        if isinstance(replay.sampler, PairSampler) or replay.needs_consecutive_rows:
            raise ValueError(
                f"RelabelGoals got a buffer with a {replay.sampler_name}; rows with goals of their own make neither "
                "pairs nor sequences. Use a sampler of single rows, such as UniformSampler"
            )
        device = replay.parts.sampler.draw_device
        self._gives_tensors = device is not None
        if device is not None and device.type != self._generator.device.type:
            self._seed_generator(self._generator.initial_seed(), device)

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses rows ``[N]`` without goals of one shape or with returns over several steps, and warns of other
        rewards.
        """
        if any(rows.get(key, None) is not None for key in FORMED_KEYS):
            raise ValueError(
                "the rewards of the transitions are returns over several steps, which RelabelGoals cannot compute for "
                "another goal; nothing was stored. Store single steps and give n_steps= to the buffer"
            )
        found = {key: self._part(rows, key) for key in (("next", *self.achieved_key), self.desired_key)}
        lacking = [repr(key) for key, part in found.items() if part is None]
        shapes = [list(rows.get(part[0])[..., part[1]].shape) for part in found.values() if part is not None]
        if lacking or shapes[0] != shapes[1]:
            what = f"no {' and no '.join(lacking)}" if lacking else f"goals of two shapes, {shapes[0]} and {shapes[1]}"
            raise ValueError(
                f"the transitions have {what}, and RelabelGoals needs an achieved and a desired goal of one shape; "
                "nothing was stored. Store the observations of a goal environment, or name your columns with "
                "achieved_key= and desired_key="
            )
        if unknown := [key for key in self.reward_keys if self._part(rows, key) is None]:
            raise ValueError(
                f"reward_keys has {unknown}, and the transitions have no such columns; nothing was stored. They have "
                f"{[*rows.keys(True, True)]}: name some of these, or store the missing ones, such as keys of the infos "
                "with info_keys="
            )
        if self.share > 0:
            self._compare_rewards(rows[:1000])
            self._compare_ends(rows[:1000])

    def _info(self, rows: TensorDictBase, of_slots: tuple[Storage, Tensor] | None = None) -> dict[str, Tensor]:
        """Returns the columns of ``reward_keys`` ``[N, ...]``, of the rows or of slots ``[N]`` of a storage."""
        # check_rows found the columns.
        parts = [self._part(rows, key) or (key, WHOLE) for key in self.reward_keys]
        names = [column for column, _ in parts]
        columns = [*map(rows.get, names)] if of_slots is None else read_columns(*of_slots, names)
        return {key[-1]: columns[i][..., parts[i][1]] for i, key in enumerate(self.reward_keys)}

    def _goals(self, rows: TensorDictBase) -> list[Tensor]:
        parts = (self._part(rows, key) or ((), WHOLE) for key in (("next", *self.achieved_key), self.desired_key))
        return [rows.get(column)[..., place] for column, place in parts]

    def _compare_ends(self, rows: TensorDictBase) -> None:
        # Rows may show that goals end episodes although no function returns so.
        ends = rows.get(("next", "terminated"), None)
        if self._knows_ends or ends is None or ends.numel() != len(rows) or not bool(ends.any()):
            return
        achieved, desired = self._goals(rows)
        info = self._info(rows)
        at_goal, reward = (self._computed("reward", info, achieved, goal).cpu() for goal in (achieved, desired))
        is_at_goal = reward == at_goal
        ended = ends.cpu().flatten()[is_at_goal]
        self._knows_ends = len(ended) > 0
        if not self._knows_ends or not bool(ended.all()):
            return
        terminated = self._functions[1]
        if terminated is None or not bool(
            self._computed("terminated", info, achieved, desired).cpu()[is_at_goal].any()
        ):
            warnings.warn(
                f"all {len(ended)} transitions at their goals end their episodes, but RelabelGoals has no function "
                "that returns True for them. Relabeled transitions at their goals go on, and their targets use a value "
                "that no episode has. Give terminated=, a function (achieved, desired, info) of arrays [N, ...] that "
                "returns flags [N], or an env with compute_terminated. If you gave one, it returns False for all of "
                "these transitions, so correct it, or give the env that the transitions are of; see docs/goals.md",
                stacklevel=2,
            )

    def _compare_rewards(self, rows: TensorDictBase) -> None:
        # A wrong environment or order of keys makes goals of other numbers without any error.
        computed = self._computed("reward", self._info(rows), *self._goals(rows)).cpu()
        stored = rows.get(("next", "reward"), None)
        if not isinstance(stored, Tensor) or stored.numel() != len(computed):
            return  # Other checks refuse such rewards.
        pairs = torch.stack((stored.cpu().reshape(-1).double(), computed.double()))
        differ = (~torch.isclose(pairs[0], pairs[1], rtol=1e-3, atol=1e-3)).nonzero().flatten()
        if len(differ):
            stored_one, computed_one = pairs[:, differ[0]].tolist()
            warnings.warn(
                f"{len(differ)} of the first {len(computed)} transitions have another reward than RelabelGoals "
                f"computes for the goals that they have: {stored_one:g} is stored and {computed_one:g} computed, and a "
                "batch mixes both. Give the env that the transitions are of, achieved_key= and desired_key= as its "
                "reward takes them, or a reward= that is shaped as the stored ones",
                stacklevel=2,
            )

    def _part(self, rows: TensorDictBase, key: tuple[str, ...]) -> tuple[tuple[str, ...], Any] | None:
        # The column that holds a goal, and the place of the goal in its last dimension.
        branch = key[:-1]
        name = key[-1]
        above = rows.get(branch, None) if branch else rows
        if isinstance(above, Tensor):
            is_flat = name in self._flat and above.shape[1:] == (max(place.stop for place in self._flat.values()),)
            return (branch, self._flat[name]) if is_flat else None
        return (key, WHOLE) if above is not None and isinstance(above.get(name, None), Tensor) else None

    def forward_drawn(
        self, batch: TensorDictBase, index: Tensor, storage: Storage, episodes: EpisodeTracker
    ) -> TensorDictBase:
        """Relabels a batch ``[B]``. The batch itself is changed."""
        links = None if episodes is None else episodes.links
        if links is None:
            raise RuntimeError(
                "RelabelGoals got no links between the rows of an episode; add it by replay.append_transform, which "
                "follows episodes from then on, not to replay.transform"
            )
        if self._gives_tensors:
            return self._relabel_there(batch, index, storage, episodes)
        if self.share > 0 and not self._knows_ends:
            self._compare_ends(batch)
        drawn = torch.rand(2, len(index), generator=self._rng, dtype=torch.float64, device=self._rng.device)
        relabelled, place = drawn.cpu().numpy()
        of_chosen = np.flatnonzero(relabelled < self.share)
        if not len(of_chosen):
            return batch
        of_rows = index.numpy()[of_chosen]
        goals_of = self._goal_slots(of_rows, place[of_chosen], links)
        counts = batch.get("steps_to_next_obs", None)
        if counts is None and self._relabel_steps(batch, of_chosen, of_rows, goals_of, storage):
            return batch
        chosen, slots, of_goals = map(torch.from_numpy, (of_chosen, of_rows, goals_of))
        # Rewards and flags along the return of each row belong to its new goal, [n, steps].
        used = torch.ones_like(slots) if counts is None else counts.cpu()[chosen].flatten()
        along = links.chain(slots, int(used.max()))[0]
        # check_rows found the column.
        key, part = self._part(batch, ("next", *self.achieved_key)) or ((), WHOLE)
        achieved = read_columns(storage, torch.cat((of_goals, along.flatten())), [key])[0][..., part]
        goal = achieved[: len(slots)]
        info = self._info(batch, (storage, along.flatten()))
        self._set_returns(batch, chosen, achieved.cpu(), info, used, along, storage, episodes.discount)
        for key in (self.desired_key, ("next", *self.desired_key)):
            part = self._part(batch, key)
            if part is not None:
                desired = batch.get(part[0])[..., part[1]]
                desired[chosen.to(goal.device, non_blocking=True)] = goal.to(desired.dtype)
        return batch

    def _goal_slots(self, slots: np.ndarray, place: np.ndarray, links: Any) -> np.ndarray:
        # The slots whose achieved goals become the goals of rows in these slots, int64 [n]. Places are below 1.
        most = np.full_like(slots, links.capacity)
        first = links.walk(slots, most, back=True)[0].numpy() if self.strategy == "episode" else slots
        newest, ahead = links.walk(first, most)
        if self.strategy == "final":
            return newest.numpy()
        # The row (or the first one) and the rows ahead of it are equally likely.
        steps = (place * (ahead.numpy() + 1)).astype(np.int64)
        return links.walk(first, steps)[0].numpy()

    def _relabel_steps(
        self, batch: TensorDictBase, chosen: np.ndarray, slots: np.ndarray, goals_of: np.ndarray, storage: Storage
    ) -> bool:
        # Relabels rows of single steps on the CPU through arrays of the batch, in a third of the time of returns.
        # Returns whether it did: rows on a device, and rewards without an array or a fraction, take the other way.
        following = dict(batch.get("next").items())
        reward = following["reward"]
        if not reward.is_cpu or reward.dtype not in (torch.float32, torch.float64):
            return False
        key = ("next", *self.achieved_key)
        column, part = (self._part(batch, key) or (key, ...)) if self._flat else (key, ...)
        both = torch.from_numpy(np.concatenate((goals_of, slots)))
        values = _array_of(read_columns(storage, both, [column])[0], part)
        goal, achieved = values[: len(slots)], values[len(slots) :]
        info = self._info(batch, (storage, both[len(slots) :])) if self.reward_keys else {}
        if self._functions[1] is not None:
            ended = _computed_array("terminated", self._functions[1], achieved, goal, info).astype(np.bool_)
            done = following["done"].numpy()
            ended = ended.reshape(done[chosen].shape)
            following["terminated"].numpy()[chosen] = ended
            # An episode that ended at its own goal has not reached the new one: its last step is truncated.
            if "truncated" in following:
                following["truncated"].numpy()[chosen] |= done[chosen] & ~ended
            done[chosen] |= ended
        rewards = reward.numpy()
        values = _computed_array("reward", self._functions[0], achieved, goal, info)
        rewards[chosen] = values.reshape(-1, *rewards.shape[1:])
        for key in (self.desired_key, ("next", *self.desired_key)):
            column, part = (self._part(batch, key) or (key, ...)) if self._flat else (key, ...)
            desired = batch.get(column, None)
            if desired is not None:
                _array_of(desired, part)[chosen] = goal
        return True

    def _set_returns(
        self,
        batch: TensorDictBase,
        chosen: Tensor,
        achieved: Tensor,
        info: dict[str, Tensor],
        used: Tensor,
        along: Tensor,
        storage: Storage,
        discount: float,
    ) -> None:
        # The functions accept arrays, so everything is computed on the CPU and copied to the batch.
        given = info, achieved[len(chosen) :], achieved[: len(chosen)].repeat_interleave(along.shape[1], 0)
        ends = self._functions[1]
        following = batch.get("next")
        counts = batch.get("steps_to_next_obs", None)
        terminated = following.get("terminated")
        done = following.get("done")
        there = chosen.to(done.device, non_blocking=True)
        if ends is not None:
            ended = self._computed("terminated", *given).view(along.shape).bool()
            step = torch.arange(1, along.shape[1] + 1, device="cpu")
            before = used
            used = torch.where(ended, step, along.shape[1]).amin(1).minimum(used)
            is_cut = used < before
            place = used.unsqueeze(1) - 1
            if bool(is_cut.any()):
                following[chosen[is_cut]] = storage.get(along.gather(1, place).flatten()[is_cut]).get("next")
            has_ended = ended.gather(1, place).to(done.device, non_blocking=True)
            terminated[there] = has_ended.view(terminated[there].shape)
            # An episode that ended at its own goal has not reached the new one: its last step is truncated.
            if following.get("truncated", None) is not None:
                following.get("truncated")[there] |= done[there] & ~terminated[there]
            done[there] |= terminated[there]
        summed = n_step_returns(self._computed("reward", *given).view(along.shape), used, discount)
        rewards = following.get("reward")
        # Rewards may be stored as whole numbers.
        rewards = rewards if rewards.is_floating_point() else rewards.float()
        summed = summed.to(rewards.device, rewards.dtype, non_blocking=True)
        rewards[there] = summed.view(rewards[there].shape)
        following.set("reward", rewards)
        if counts is not None:
            used = used.to(counts.device, non_blocking=True)
            counts[there] = used.view(counts[there].shape)
            remaining = bootstrap_discounts(used, terminated[there].flatten(), discount)
            batch.get("discount")[there] = remaining.float().view(counts[there].shape)

    def _relabel_there(
        self, batch: TensorDictBase, index: Tensor, storage: Storage, episodes: EpisodeTracker
    ) -> TensorDictBase:
        # As on the CPU, but for all rows: the number of rows that are relabeled is on the device.
        links = episodes.links
        relabeled, place = torch.rand(
            2, len(index), generator=self._generator, dtype=torch.float64, device=index.device
        )
        chosen = relabeled < self.share
        most = torch.full_like(index, links.capacity)
        first = links.walk(index, most, back=True)[0] if self.strategy == "episode" else index
        newest, ahead = links.walk(first, most)
        of_goals = newest if self.strategy == "final" else links.walk(first, (place * (ahead + 1)).long())[0]
        counts = batch.get("steps_to_next_obs", None)
        used = torch.ones_like(index) if counts is None else counts.flatten()
        along = links.chain(index, 1 if counts is None else episodes.n_steps)[0]
        key, part = self._part(batch, ("next", *self.achieved_key)) or ((), WHOLE)
        achieved = read_columns(storage, torch.cat((of_goals, along.flatten())), [key])[0][..., part]
        goal = achieved[: len(index)]
        goals = goal.unsqueeze(1).expand(-1, along.shape[1], *goal.shape[1:]).flatten(0, 1)
        given = self._info(batch, (storage, along.flatten())), achieved[len(index) :], goals
        following = batch.get("next")
        terminated = following.get("terminated")
        done = following.get("done")
        if self._functions[1] is not None:
            ended = self._computed("terminated", *given).view(along.shape).bool()
            step = torch.arange(1, along.shape[1] + 1, device=index.device)
            before = used
            used = torch.where(chosen, torch.where(ended, step, along.shape[1]).amin(1).minimum(used), used)
            end = used.unsqueeze(1) - 1
            if along.shape[1] > 1:
                at_end = storage.get(along.gather(1, end).flatten()).get("next")
                following.update_(at_end.select(*following.keys()).where(used < before, following))
            _put(terminated, chosen, ended.gather(1, end))
            # An episode that ended at its own goal has not reached the new one: its last step is truncated.
            if following.get("truncated", None) is not None:
                truncated = following.get("truncated")
                _put(truncated, chosen, truncated | (done & ~terminated))
            _put(done, chosen, done | terminated)
        rewards = following.get("reward")
        # Rewards may be stored as whole numbers.
        rewards = rewards if rewards.is_floating_point() else rewards.float()
        reward = self._computed("reward", *given).view(along.shape)
        _put(rewards, chosen, n_step_returns(reward, used, episodes.discount))
        following.set("reward", rewards)
        if counts is not None:
            _put(counts, chosen, used)
            _put(batch.get("discount"), chosen, bootstrap_discounts(used, terminated.flatten(), episodes.discount))
        for key in (self.desired_key, ("next", *self.desired_key)):
            part = self._part(batch, key)
            if part is not None:
                _put(batch.get(part[0])[..., part[1]], chosen, goal)
        return batch

    def _computed(self, name: str, info: dict[str, Tensor], achieved: Tensor, desired: Tensor) -> Tensor:
        function = self._functions[name == "terminated"]
        if not self._gives_tensors:
            return _computed(name, function, achieved, desired, info)
        values = function(achieved, desired, _RewardColumns(info))
        if not isinstance(values, Tensor) or values.device != achieved.device or values.shape != (len(achieved),):
            is_tensor = isinstance(values, Tensor)
            given = f"{list(values.shape)} on {values.device}" if is_tensor else f"a {type(values).__name__}"
            raise ValueError(
                f"{name} of RelabelGoals returned {given} for goals {list(achieved.shape)} on {achieved.device}; slots "
                f"are drawn there, so it must return a tensor [{len(achieved)}] there. Write it with torch, such as "
                "(achieved - desired).norm(dim=-1) < 0.05, or draw on the CPU"
            )
        return values


def _array_of(column: Tensor, part: Any) -> np.ndarray:
    """Returns a view of a part of the last dimension, all of it for ``...``."""
    array = column.numpy()
    return array if part is ... else array[..., part]


def _put(column: Tensor, chosen: Tensor, values: Tensor) -> None:
    """Writes the values of the chosen rows, bool ``[B]``, into a column ``[B, ...]``."""
    chosen = chosen.view(-1, *[1] * (column.ndim - 1))
    column.copy_(torch.where(chosen, values.view(column.shape).to(column.dtype), column))


def _computed(name: str, function: GoalFunction, achieved: Tensor, desired: Tensor, info: dict[str, Tensor]) -> Tensor:
    values = _computed_array(name, function, achieved.cpu().numpy(), desired.cpu().numpy(), info)
    return torch.as_tensor(values, device="cpu")


def _computed_array(
    name: str, function: GoalFunction, achieved: np.ndarray, desired: np.ndarray, info: dict[str, Tensor]
) -> np.ndarray:
    columns = _RewardColumns({key: column.cpu().numpy() for key, column in info.items()})
    values = np.asarray(function(achieved, desired, columns))
    if values.shape != (len(achieved),) or not (values.dtype.kind in "bui" or np.isfinite(values).all()):
        given = f"the shape {list(values.shape)}" if values.shape != (len(achieved),) else "NaN or infinity"
        raise ValueError(
            f"{name} of RelabelGoals returned {given} for goals of shape {list(achieved.shape)}; it must return one "
            f"finite number for each row, [{len(achieved)}], of all rows at once, such as "
            "numpy.linalg.norm(achieved - desired, axis=-1) < 0.05"
        )
    return values


def _row_by_row(function: GoalFunction, achieved: Any, desired: Any, info: dict[str, Any]) -> Any:
    # Gymnasium-Robotics defines compute_terminated for one step.
    rows = (_RewardColumns({key: column[i] for key, column in info.items()}) for i in range(len(achieved)))
    return np.array([bool(function(*given)) for given in zip(achieved, desired, rows, strict=True)])


def _places(env: Any) -> dict[str, slice]:
    # Entries are sorted by name, as RLlib and Gymnasium flatten a dictionary. Goals have one dimension.
    import gymnasium
    from gymnasium.spaces import Box, Dict

    while not isinstance(env.observation_space, Dict) and isinstance(env, gymnasium.Wrapper):
        # The wrapper may be the one that flattens.
        env = env.env
    space = env.observation_space
    places = {}
    start = 0
    for name, each in sorted(space.spaces.items()) if isinstance(space, Dict) else ():
        if not isinstance(each, Box) or len(each.shape) != 1:
            return {}
        places[name] = slice(start, start := start + each.shape[0])
    return places


def _built(env: Any) -> Any:
    # Gymnasium is imported here, because rows and a reward function do not need it.
    import gymnasium

    from lightning_replay.envs.building import build_environment

    if isinstance(env, gymnasium.Env):
        return env
    if not callable(env):
        check_kind("env", env, str, "the id of an environment, an environment, or a class or function that builds one")
        # Most goal environments come from this package.
        if ":" not in env and env not in gymnasium.registry:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module("gymnasium_robotics")
    return build_environment(env, {})
