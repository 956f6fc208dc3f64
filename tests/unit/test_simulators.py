# SPDX-License-Identifier: Apache-2.0
"""Simulators whose values are tensors: last observations by name or missing, invalid rows, and bad input."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import recipes
from lightning_replay.collecting import VectorSteps
from lightning_replay.replay import Replay


class Counters:
    """Observation ``[environment, episode, step]``, reward the step; ends are given, environment by environment.

    ``ends`` int ``[T, num_envs]``: 0 goes on, 1 terminates, 2 truncates, 3 does both.
    """

    def __init__(self, ends: Any, final: Any = "final_observation") -> None:
        self.ends = torch.as_tensor(ends)
        self.num_envs = self.ends.shape[1]
        self.final = final

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.state = torch.zeros(self.num_envs, 3)
        self.state[:, 0] = torch.arange(self.num_envs)
        self.t = 0
        return self.observed(self.state), {}

    def observed(self, state: Tensor) -> Any:
        return state.clone()

    def step(self, action: Any) -> tuple[Any, ...]:
        self.state[:, 2] += 1
        last = self.state.clone()
        ends = self.ends[self.t]
        self.t += 1
        self.state[ends > 0, 1] += 1
        self.state[ends > 0, 2] = 0
        info = {} if self.final is None else {self.final: self.observed(last)}
        return self.observed(self.state), last[:, 2].double(), ends % 2 == 1, ends >= 2, info


def played(envs: VectorSteps, steps: int, replay: Replay | None = None) -> Replay:
    replay = recipes.uniform(capacity=10_000, batch_size=8, n_steps=3) if replay is None else replay
    envs.reset()
    for _ in range(steps):
        envs.step(torch.zeros(envs.num_envs, 1))
        envs.store(replay)
    return replay


ENDS = [[0, 0, 0], [1, 0, 0], [0, 2, 0], [0, 0, 3], [0, 0, 0], [2, 2, 2], [0, 0, 0]]


def names_of(ends: Any) -> list[list[int]]:
    """Numbers of the episodes of each row, counted one by one."""
    number = len(ends[0])
    running = list(range(number))
    names = []
    for row in ends:
        names.append(list(running))
        for i, end in enumerate(row):
            if end:
                running[i] = number
                number += 1
    return names


class Named(Counters):
    """Gives last observations under ``extras["observations"]["raw"]["obs"]``, as environments of FastTD3 do."""

    def step(self, action: Any) -> tuple[Any, ...]:
        *others, info = super().step(action)
        return *others, {"observations": {"raw": {"obs": info["final_observation"]}}}


class Sparse(Counters):
    """Gives last observations only in steps that end an episode, as ManiSkill does."""

    def step(self, action: Any) -> tuple[Any, ...]:
        *others, info = super().step(action)
        return *others, info if bool((others[2] | others[3]).any()) else {}


class OfFour(Counters):
    """Returns four values and no infos of a reset, as environments of RSL-RL do; flags are whole numbers."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0]

    def step(self, action: Any) -> tuple[Any, ...]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, (terminated | truncated).long(), info | {"time_outs": truncated.float()}


@pytest.mark.parametrize(
    ("simulator", "options"),
    [
        (Counters(ENDS), {}),
        (Counters(ENDS, "final_obs"), {}),
        (Counters(ENDS, "last"), {"final_observation": "last"}),
        (Named(ENDS), {"final_observation": ("observations", "raw", "obs")}),
        (Named(ENDS), {"final_observation": lambda _, info: info["observations"]["raw"]["obs"]}),
        (Sparse(ENDS), {}),
        (Sparse(ENDS), {"final_observation": "final_observation"}),
    ],
)
def test_the_last_observation_is_found_by_its_name(simulator: Counters, options: dict[str, Any]) -> None:
    rows = played(VectorSteps(simulator, **options), 7)[:].reshape(7, 3)
    before, after = rows["observation"], rows["next", "observation"]
    assert (after[..., 2] == before[..., 2] + 1).all() and (after[..., :2] == before[..., :2]).all()
    assert torch.equal(rows["next", "reward"][..., 0], after[..., 2])
    ends = torch.tensor(ENDS)
    assert torch.equal(rows["next", "terminated"][..., 0], ends % 2 == 1)
    assert torch.equal(rows["next", "truncated"][..., 0], ends >= 2)
    assert rows["trajectory"].tolist() == names_of(ENDS)


def test_steps_of_four_values_are_read_with_their_time_outs() -> None:
    ends = [[min(end, 2) for end in row] for row in ENDS]
    envs = VectorSteps(OfFour(ends))
    with pytest.warns(UserWarning, match="reset of .* takes no seed"):
        envs.reset(seed=0)
    rows = played(envs, 7)[:].reshape(7, 3)
    assert torch.equal(rows["next", "terminated"][..., 0], torch.tensor(ends) == 1)
    assert torch.equal(rows["next", "truncated"][..., 0], torch.tensor(ends) == 2)
    without = OfFour(ends)
    without.step = lambda action: (*Counters.step(without, action)[:3], {})  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="returned four values for a step, and info has no 'time_outs'"):
        played(VectorSteps(without), 1)
    without.step = lambda action: (1, 2, 3)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="returned 3 values for a step; it must return"):
        played(VectorSteps(without), 1)


def test_an_undeclared_simulator_that_loses_last_observations_is_refused_at_the_first_end() -> None:
    envs, replay = VectorSteps(Counters(ENDS, None)), recipes.uniform(capacity=100, batch_size=8)
    with pytest.raises(ValueError, match="an episode of .* ended, and .* without_final_observation='terminate'"):
        played(envs, 7, replay)
    elsewhere = VectorSteps(Counters(ENDS, "last"))
    with pytest.raises(ValueError, match=r"infos have \['last'\]. .* name it with final_observation="):
        played(elsewhere, 7)
    assert len(replay) == 3  # the step before the end
    promised = VectorSteps(Counters(ENDS, None), final_observation=("last", "policy"))
    with pytest.raises(ValueError, match=r"\('last', 'policy'\) has no last observation"):
        played(promised, 7)


def test_ends_without_a_last_observation_are_terminated() -> None:
    replay = recipes.uniform(capacity=100, batch_size=64, n_steps=3, discount=0.5, seed=0)
    envs = VectorSteps(Counters(ENDS, None), without_final_observation="terminate")
    rows = played(envs, 7, replay)[:].reshape(7, 3)
    ends = torch.tensor(ENDS)
    assert torch.equal(rows["next", "terminated"][..., 0], ends > 0)
    assert torch.equal(rows["next", "truncated"][..., 0], ends >= 2)
    # The row's own observation stands in, and never that of the next episode.
    assert torch.equal(rows["next", "observation"][ends > 0], rows["observation"][ends > 0])
    assert (rows["next", "observation"][ends == 0][:, 2] == rows["observation"][ends == 0][:, 2] + 1).all()
    assert rows["trajectory"].tolist() == names_of(ENDS) and envs.num_skipped == 0
    batch = replay.sample(512)
    places = zip(batch["observation"].tolist(), batch["discount"].flatten().tolist(), strict=True)
    # Of environment 0, by episode and step: the discount is 0 where a return over three steps reaches an end.
    of_first = {(episode, step): discount for (env, episode, step), discount in places if env == 0}
    ended = dict.fromkeys([(0, 0), (0, 1), (1, 1), (1, 2), (1, 3)], 0.0)
    assert of_first == ended | {(1, 0): 0.125, (2, 0): 0.5}


def test_truncated_rows_without_a_last_observation_are_dropped() -> None:
    envs = VectorSteps(Counters(ENDS, None), without_final_observation="drop")
    replay = recipes.uniform(capacity=100, batch_size=8, n_steps=3)
    envs.reset()
    stored = []
    for _ in range(7):
        envs.step(torch.zeros(3, 1))
        stored.append(len(envs.store(replay)))
    assert stored == [3, 3, 2, 3, 3, 0, 3]  # A row that is terminated and truncated stays.
    assert envs.num_skipped == 4 and not replay[:]["next", "truncated"][replay[:]["next", "terminated"] == 0].any()
    rows = replay[:]
    kept = torch.tensor(ENDS) != 2
    assert rows["trajectory"].tolist() == torch.tensor(names_of(ENDS))[kept].tolist()


class Breaking(Counters):
    """The observation of environment 1 is NaN after step 2, and the reward of environment 2 is infinite in step 4."""

    def step(self, action: Any) -> tuple[Any, ...]:
        observation, reward, *others = super().step(action)
        if self.t == 2:
            observation[1, 0] = float("nan")
        if self.t == 4:
            reward[2] = float("inf")
        return observation, reward, *others


def test_rows_with_nan_are_left_out_and_cut_their_episode() -> None:
    nothing = [[0, 0, 0]] * 6
    envs = VectorSteps(Breaking(nothing), skip_invalid=True)
    replay = recipes.uniform(capacity=100, batch_size=8, n_steps=3, seed=0)
    envs.reset()
    stored, cut = [], []
    for _ in range(6):
        envs.step(torch.zeros(3, 1))
        cut.append(list(envs.cut_episodes))
        stored.append(len(envs.store(replay)))
    # The observation that is NaN is the next one of a row and the first one of another.
    assert stored == [3, 2, 2, 2, 3, 3] and envs.num_skipped == 3
    assert cut == [[], [1], [], [2], [], []]  # The second row of environment 1 is of an episode without rows.
    rows = replay[:]
    names = {i: rows["trajectory"][rows["observation"][:, 0] == i].tolist() for i in range(3)}
    assert names == {0: [0] * 6, 1: [1, 4, 4, 4], 2: [2, 2, 2, 5, 5]}
    is_cut = rows["next", "truncated"].flatten()
    assert rows["trajectory"][is_cut].tolist() == [1, 2] and not rows["next", "terminated"].any()
    assert torch.isfinite(rows["next", "observation"]).all()
    with pytest.raises(ValueError, match="is nan in rows"):
        played(VectorSteps(Breaking(nothing)), 6, recipes.uniform(capacity=100, batch_size=8))


def test_rows_of_arrays_with_nan_are_left_out_as_well() -> None:
    class Arrays(VectorEnv):
        metadata: ClassVar = {"autoreset_mode": AutoresetMode.SAME_STEP}

        def __init__(self) -> None:
            self.simulator, self.num_envs = Breaking([[0, 0, 0]] * 6), 3
            self.single_action_space = Box(-1, 1, (1,))

        def reset(self, **options: Any) -> Any:
            return self.simulator.reset()[0].numpy(), {}

        def step(self, actions: Any) -> Any:
            *values, info = self.simulator.step(actions)
            return *(value.numpy() for value in values), info

    of_arrays, of_tensors = (recipes.uniform(capacity=100, batch_size=8, n_steps=3) for _ in range(2))
    played(VectorSteps(Arrays(), skip_invalid=True), 6, of_arrays)
    played(VectorSteps(Breaking([[0, 0, 0]] * 6), skip_invalid=True), 6, of_tensors)
    assert (of_arrays[:] == of_tensors[:]).all()


class Groups(Counters):
    """Observations in groups, one of them nested, in an order that changes."""

    def observed(self, state: Tensor) -> Any:
        entries = {"policy": state + 0.25, "critic": {"body": state.clone(), "count": state[:, 2].long()}}
        return entries if self.t % 2 else dict(reversed(entries.items()))

    t = 0


def test_groups_of_observations_are_columns() -> None:
    nested = played(VectorSteps(Groups(ENDS)), 7)[:]
    named = {"observation": "policy", "critic_observation": "critic"}
    rows = played(VectorSteps(Groups(ENDS), observation_columns=named), 7)[:]
    for branch in ((), ("next",)):
        assert torch.equal(rows[*branch, "observation"], nested[*branch, "observation", "policy"])
        for part in ("body", "count"):
            expected = nested[*branch, "observation", "critic", part]
            assert torch.equal(rows[*branch, "critic_observation", part], expected)
        assert torch.equal(rows[*branch, "observation"], rows[*branch, "critic_observation", "body"] + 0.25)
    only = played(VectorSteps(Groups(ENDS), observation_columns={"observation": "policy"}), 7)[:]
    assert "critic_observation" not in set(only.keys()) and torch.equal(only["observation"], rows["observation"])
    with pytest.raises(ValueError, match=r"observation_columns names the entries \['actor'\], and observations of .*"):
        VectorSteps(Groups(ENDS), observation_columns={"observation": "actor"}).reset()


def test_tensordicts_are_observations() -> None:
    class Grouped(Counters):
        def observed(self, state: Tensor) -> Any:
            return TensorDict({"policy": state.clone()}, [3])

    rows = played(VectorSteps(Grouped(ENDS), observation_columns={"observation": "policy"}), 7)[:]
    assert torch.equal(rows["observation"], played(VectorSteps(Counters(ENDS)), 7)[:]["observation"])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=1)))
def test_numbers_are_those_of_a_count_one_by_one(ends: list[list[int]]) -> None:
    envs = VectorSteps(Counters(ends), first_trajectory=0)
    envs.reset()
    found = []
    for _ in ends:
        envs.step(torch.zeros(envs.num_envs, 1))
        found.append(envs.columns["trajectory"].tolist())
    assert found == names_of(ends)
    assert envs.next_trajectory == envs.num_envs + sum(end > 0 for row in ends for end in row)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bool], ids=str)
def test_flags_of_any_dtype_are_bool(dtype: torch.dtype) -> None:
    class Typed(Counters):
        def step(self, action: Any) -> tuple[Any, ...]:
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, terminated.to(dtype), truncated.to(dtype), info

    assert (played(VectorSteps(Typed(ENDS)), 7)[:] == played(VectorSteps(Counters(ENDS)), 7)[:]).all()


class Wrong(Counters):
    """Returns one of its values in another way in its second step."""

    def __init__(self, change: Any) -> None:
        super().__init__([[0, 2, 0]] * 3)
        self.change = change

    def step(self, action: Any) -> tuple[Any, ...]:
        values = list(super().step(action))
        if self.t == 2:
            self.change(values)
        return tuple(values)


def _change(place: int, change: Any) -> Any:
    def changed(values: list[Any]) -> None:
        values[place] = change(values[place])

    return changed


OTHER = {"final_observation": torch.zeros(3, 3, device="meta")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change(1, lambda reward: reward.to("meta")), "reward is on meta, and the first observations were on cpu"),
        (_change(0, lambda seen: seen.to("meta")), "observations is on meta"),
        (_change(4, lambda _: OTHER), "final observations is on meta"),
        (
            _change(0, lambda seen: seen[:2]),
            r"observations of .* are of the shapes \[\(2, 3\)\]; .* its 3 environments",
        ),
        (_change(1, lambda reward: reward[:2]), r"of the shapes \[\(2,\), \(3,\), \(3,\)\]"),
        (_change(2, lambda flags: flags[:, None]), r"of the shapes \[\(3,\), \(3, 1\), \(3,\)\]"),
        (_change(4, lambda _: {}), "ended, and .* has no last observation"),
        (_change(4, lambda _: {"final_observation": torch.zeros(3, 2)}), "final observations of .* of the shapes"),
        (_change(4, lambda _: {"final_observation": torch.zeros(1, 3)}), "final observations of .* of the shapes"),
    ],
)
def test_a_wrong_step_is_refused_and_nothing_is_stored(change: Any, message: str) -> None:
    envs = VectorSteps(Wrong(change), final_observation="final_observation")
    replay = recipes.uniform(capacity=100, batch_size=8)
    envs.reset()
    envs.step(torch.zeros(3, 1))
    envs.store(replay)
    with pytest.raises(ValueError, match=message):
        envs.step(torch.zeros(3, 1))
    assert len(replay) == 3


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [None, {"policy": 0}])
def test_what_is_no_tensor_is_refused(place: int, value: Any) -> None:
    envs = VectorSteps(Wrong(_change(place, lambda _: value)))
    envs.reset()
    envs.step(torch.zeros(3, 1))
    with pytest.raises(TypeError, match="is .*; it must be a tensor with one row for each environment"):
        envs.step(torch.zeros(3, 1))


@pytest.mark.parametrize("shape", [(), (2, 1), (4, 1)])
def test_actions_of_another_number_of_environments_are_refused_before_the_step(shape: tuple[int, ...]) -> None:
    simulator = Counters(ENDS)
    envs = VectorSteps(simulator)
    envs.reset()
    with pytest.raises(ValueError, match=r"actions are of the shapes \[.*\]; .* of the 3 environments"):
        envs.step(torch.zeros(shape))
    assert simulator.t == 0


def test_observations_without_entries_have_no_columns() -> None:
    with pytest.raises(ValueError, match=r"observation_columns names the entries \['policy'\], and .* have none; name"):
        VectorSteps(Counters(ENDS), observation_columns={"observation": "policy"}).reset()


def test_actions_are_on_the_device_of_the_simulator() -> None:
    envs = VectorSteps(Counters(ENDS))
    envs.reset()
    with pytest.raises(ValueError, match="action is on meta, and the first observations were on cpu; all tensors"):
        envs.step(torch.zeros(3, 1, device="meta"))
    envs.step(np.zeros((3, 1)))
    assert envs.columns["action"].dtype == torch.float32
    action = torch.zeros(3, 1, requires_grad=True)
    envs.step(action)
    assert not envs.columns["action"].requires_grad


def test_columns_may_be_left_out_before_they_are_stored() -> None:
    envs, replay = VectorSteps(Counters([[0], [0]])), recipes.uniform(capacity=100, batch_size=8)
    envs.reset()
    for _ in range(2):
        envs.step(torch.zeros(1, 1))
        del envs.columns["trajectory"]
        envs.store(replay, log_prob=torch.ones(1))
    assert len(replay) == 2 and "trajectory" not in set(replay[:].keys())


def test_columns_are_copies() -> None:
    class Reusing(Counters):
        def observed(self, state: Tensor) -> Any:
            return state

    replay = recipes.uniform(capacity=100, batch_size=8)
    envs = VectorSteps(Reusing([[0, 0]] * 4))
    action = torch.zeros(2, 1)
    envs.reset()
    for _ in range(4):
        envs.step(action.add_(1.0))
        envs.store(replay)
    assert replay[:]["observation"][:, 2].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert replay[:]["action"].flatten().tolist() == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_simulators_of_other_modes_name_them(mode: AutoresetMode) -> None:
    class Late(Counters):
        metadata: ClassVar = {"autoreset_mode": mode}

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            if options is None:
                return super().reset()
            self.state[options["reset_mask"], 1] += 1
            self.state[options["reset_mask"], 2] = 0
            return self.state.clone(), {}

        def step(self, action: Any) -> Any:
            begins = torch.zeros(3, dtype=torch.bool)
            if mode is AutoresetMode.NEXT_STEP and self.t:
                begins = self.ends[self.t - 1] > 0
            self.state[:, 2] += 1
            self.state[begins, 1] += 1
            self.state[begins, 2] = 0
            ends = self.ends[self.t]
            self.t += 1
            return self.state.clone(), self.state[:, 2].clone(), ends == 1, ends == 2, {}

    ends = [[0, 0, 0], [1, 0, 2], [0, 0, 0], [0, 2, 0], [0, 0, 0]]
    envs, replay = VectorSteps(Late(ends)), recipes.uniform(capacity=100, batch_size=8, n_steps=3)
    envs.reset()
    for _ in ends:
        _, _, terminated, truncated, _ = envs.step(torch.zeros(3, 1))
        envs.store(replay)
        done = terminated | truncated
        if mode is AutoresetMode.DISABLED and done.any():
            envs.reset(options={"reset_mask": done})
    rows = replay[:]
    before, after = rows["observation"], rows["next", "observation"]
    assert len(rows) == (12 if mode is AutoresetMode.NEXT_STEP else 15)
    assert torch.equal(before[:, :2], after[:, :2]) and torch.equal(before[:, 2] + 1, after[:, 2])


def test_what_is_no_simulator_is_refused_when_it_is_built() -> None:
    class WithoutStep:
        num_envs = 3

        def reset(self) -> None: ...

    with pytest.raises(TypeError, match="env is .* without step; it must be a vector of environments, .* or a simulat"):
        VectorSteps(WithoutStep())
    with pytest.raises(TypeError, match="it must be a vector of environments"):
        VectorSteps(Counters)
    with pytest.raises(ValueError, match="without_final_observation is 'stop'; it must be one of 'terminate', 'drop'"):
        VectorSteps(Counters(ENDS), without_final_observation="stop")
    with pytest.raises(TypeError, match="skip_invalid is 1"):
        VectorSteps(Counters(ENDS), skip_invalid=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="final_observation is 3; it must be"):
        VectorSteps(Counters(ENDS), final_observation=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="observation_columns is 'policy'; it must be"):
        VectorSteps(Counters(ENDS), observation_columns="policy")  # type: ignore[arg-type]
    with pytest.raises(gymnasium.error.ResetNeeded):
        VectorSteps(Counters(ENDS)).step(torch.zeros(3, 1))


def test_attributes_of_the_simulator_are_those_of_its_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    # A vector of an environment without metadata of its own was built before.
    monkeypatch.setitem(gymnasium.Env.metadata, "autoreset_mode", AutoresetMode.NEXT_STEP)

    class Isaac(gymnasium.Env[Any, Any]):
        """As environments of Isaac Lab, which ``gymnasium.make`` wraps."""

        num_envs = 3
        single_action_space = Box(-1, 1, (1,))
        closed_times = 0

        def __init__(self) -> None:
            self.counters = Counters(ENDS)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return self.counters.reset()

        def step(self, action: Any) -> Any:
            return self.counters.step(action)

        def close(self) -> None:
            self.closed_times += 1

    simulator = Isaac()
    envs = VectorSteps(gymnasium.Wrapper(simulator))
    assert envs.num_envs == 3 and envs.single_action_space.shape == (1,)
    assert len(played(envs, 7)) == 21
    envs.close()
    assert simulator.closed_times == 1
    del envs
    assert simulator.closed_times == 1
