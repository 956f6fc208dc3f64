# SPDX-License-Identifier: Apache-2.0
"""Steps of vectors of environments as rows, in each autoreset mode: each row is a step that was played."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from lightning_replay import recipes
from lightning_replay.collecting import VectorSteps
from lightning_replay.envs.pendulums import Pendulums
from lightning_replay.levels import SequentialLevels
from lightning_replay.levels.environments import make_level_vector
from lightning_replay.replay import Replay

NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


class Counting(gymnasium.Env):
    """Observation ``[id, episode, step]``, reward the step; ends after ``length`` steps. May reuse its array."""

    observation_space, action_space = Box(-1e9, 1e9, (3,), np.float64), Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, env_id: int = 0, length: int = 5, reuses: bool = False, truncates: bool = True) -> None:
        self.seen, self.length, self.reuses, self.truncates = np.array([env_id, -1.0, 0.0]), length, reuses, truncates

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seen[1:] = self.seen[1] + 1, 0
        return self.seen if self.reuses else self.seen.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.seen[2] += 1
        ends = self.seen[2] == self.length
        observation = self.seen if self.reuses else self.seen.copy()
        return observation, float(self.seen[2]), ends and not self.truncates, ends and self.truncates, {}


def of_lengths(*lengths: int, mode: AutoresetMode, kind: Any = SyncVectorEnv, reuses: bool = False, **options: Any):
    makers = [partial(Counting, env_id, length, reuses) for env_id, length in enumerate(lengths)]
    return VectorSteps(kind(makers, autoreset_mode=mode, **options))


def played(envs: VectorSteps, steps: int, replay: Replay | None = None, policy: Any = None) -> Any:
    replay = recipes.uniform(capacity=10_000, batch_size=8) if replay is None else replay
    observations, _ = envs.reset(seed=0)
    for step in range(steps):
        actions = np.full((envs.num_envs, 1), step / steps, np.float32) if policy is None else policy(observations)
        observations, _, terminated, truncated, _ = envs.step(actions)
        envs.store(replay)
        ended = terminated | truncated
        if ended.any() and envs.unwrapped.autoreset_mode is DISABLED:
            observations, _ = envs.reset(options={"reset_mask": ended})
    return replay[:]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SyncVectorEnv, {}),
        (SyncVectorEnv, {"copy": False}),
        (AsyncVectorEnv, {"copy": False, "context": "fork"}),
        (AsyncVectorEnv, {"shared_memory": False, "context": "fork"}),
    ],
)
def test_each_row_is_a_step_that_was_played(mode: AutoresetMode, kind: Any, options: dict[str, Any]) -> None:
    # Only SAME_STEP needs environments that return an array of their own at each step.
    envs = of_lengths(3, 5, 5, mode=mode, kind=kind, reuses=mode is not SAME_STEP, **options)
    rows = played(envs, 30)
    envs.close()
    before, after, done = rows["observation"], rows["next", "observation"], rows["next", "done"].flatten()
    assert (before[:, :2] == after[:, :2]).all() and (after[:, 2] == before[:, 2] + 1).all()
    assert (rows["next", "reward"].flatten() == after[:, 2]).all()
    assert (done == (after[:, 2] == torch.tensor([3.0, 5.0, 5.0])[after[:, 0].long()])).all()
    assert (rows["next", "truncated"].flatten() == done).all() and not rows["next", "terminated"].any()
    # Of 30 steps in NEXT_STEP one in four and one in six is a reset.
    assert len(rows) == (23 + 25 + 25 if mode is NEXT_STEP else 90)
    episodes = {tuple(row) for row in torch.cat([rows["trajectory"][:, None], before[:, :2]], 1).tolist()}
    assert len(episodes) == len(set(rows["trajectory"].tolist())) == len({tuple(row) for row in before[:, :2].tolist()})
    assert rows["observation"].dtype == rows["action"].dtype == torch.float32


def test_a_policy_gets_the_same_rows_in_each_mode() -> None:
    of_mode = {}
    for mode in (NEXT_STEP, SAME_STEP, DISABLED):
        makers = [partial(gymnasium.make, "CartPole-v1")] * 16
        envs = VectorSteps(SyncVectorEnv(makers, autoreset_mode=mode))
        rows = played(envs, 120, policy=lambda seen: (seen[:, 2] > 0).astype(np.int64))
        starts = {}  # each environment's own steps, by its first observation
        for trajectory in rows["trajectory"].unique().tolist():
            episode = rows[rows["trajectory"] == trajectory]
            starts[tuple(episode["observation"][0].tolist())] = episode
        of_mode[mode] = starts
    for mode in (NEXT_STEP, DISABLED):
        common = of_mode[SAME_STEP].keys() & of_mode[mode].keys()
        assert len(common) > 30
        for first in common:
            ours, others = of_mode[SAME_STEP][first], of_mode[mode][first]
            length = min(len(ours), len(others))
            for key in ("observation", "action", ("next", "observation"), ("next", "done"), ("next", "reward")):
                assert torch.equal(ours[:length][key], others[:length][key]), key


def test_a_step_in_which_all_environments_are_reset_has_no_rows() -> None:
    envs = of_lengths(2, 2, mode=NEXT_STEP)
    replay = recipes.uniform(capacity=100, batch_size=8)
    envs.reset(seed=0)
    stored = []
    for _ in range(7):
        envs.step(np.zeros((2, 1), np.float32))
        stored.append(len(envs.store(replay, log_prob=np.array([0.0, 1.0]))))
    assert stored == [2, 2, 0, 2, 2, 0, 2] and envs.is_transition.all()
    assert replay[:]["log_prob"].tolist() == [0.0, 1.0] * 5


def test_further_columns_have_the_rows_of_the_transitions() -> None:
    envs, replay = of_lengths(2, 3, mode=NEXT_STEP), recipes.uniform(capacity=100, batch_size=8)
    envs.reset(seed=0)
    for step in range(4):
        envs.step(np.zeros((2, 1), np.float32))
        envs.store(replay, place=torch.tensor([10 * step, 10 * step + 1]))
    # environment 0 is reset in its third step, environment 1 in its fourth
    assert replay[:]["place"].tolist() == [0, 1, 10, 11, 21, 30]


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_a_reset_within_an_episode_begins_another_and_drops_no_row(mode: AutoresetMode) -> None:
    envs, replay = of_lengths(2, 5, mode=mode), recipes.uniform(capacity=100, batch_size=8)
    for _ in range(2):  # the second reset follows the end of an episode of environment 0
        envs.reset(seed=0)
        assert envs.columns == {} and len(envs.store(replay)) == 0
        for _ in range(2):
            envs.step(np.zeros((2, 1), np.float32))
            envs.store(replay)
    rows = replay[:]
    assert len(rows) == 8
    assert rows["observation"][:, 2].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    number = rows["trajectory"].tolist()
    assert number[:2] == number[2:4] and number[4:6] == number[6:] and len(set(number)) == 4


class Nested(gymnasium.Env):
    """Dict observations with a Tuple, in another order than their space's; Dict actions."""

    observation_space = Dict(
        {"camera": Box(0, 255, (2, 2, 1), np.uint8), "pair": Tuple([Discrete(9), Box(0, 9, (1,))])}
    )
    action_space = Dict({"move": Box(-1, 1, (2,)), "jump": Discrete(2)})

    def _seen(self) -> Any:
        camera, number = np.full((2, 2, 1), self.count, np.uint8), np.array([self.count], np.float32)
        return {"pair": (self.count, number), "camera": camera}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self._seen(), 0.0, self.count == 3, False, {}


@pytest.mark.parametrize("options", [{}, {"frame_stack": 1, "image_key": ("observation", "camera")}])
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_parts_of_spaces_are_nested_columns(mode: AutoresetMode, options: dict[str, Any]) -> None:
    envs = VectorSteps(SyncVectorEnv([Nested, Nested], autoreset_mode=mode))
    replay = recipes.uniform(capacity=100, batch_size=8, **options)
    envs.reset(seed=0)
    for _ in range(4):
        envs.step({"move": np.ones((2, 2)), "jump": np.array([0, 1])})
        envs.store(replay)
    rows = replay[:]
    assert rows["observation", "camera"].dtype == torch.uint8 and rows["observation", "pair", "0"].dtype == torch.int64
    assert rows["action", "move"].dtype == torch.float32 and rows["action", "jump"].tolist() == [0, 1] * (
        len(rows) // 2
    )
    now, last = [0, 0, 1, 1, 2, 2, 0, 0][: len(rows)], [1, 1, 2, 2, 3, 3, 1, 1][: len(rows)]
    assert len(rows) == (6 if mode is NEXT_STEP else 8)
    for prefix, expected in ((("observation",), now), (("next", "observation"), last)):
        assert rows[(*prefix, "camera")][:, 0, 0, 0].tolist() == expected
        assert rows[(*prefix, "pair", "0")].tolist() == rows[(*prefix, "pair", "1")].flatten().tolist() == expected


class Batched(VectorEnv):
    """A vector without sub-environments, which gives ``final_obs`` as one array, and reuses all its arrays."""

    single_observation_space, single_action_space = Box(-9, 9, (1,)), Discrete(2)

    def __init__(self, final: bool = True, **metadata: Any) -> None:
        self.num_envs, self.metadata, self.final = 2, metadata, final
        self.seen, self.reward, self.ends = np.zeros((2, 1), np.float32), np.zeros(2), np.zeros((2, 2), bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.seen[:] = 0
        return self.seen, {}

    def step(self, actions: Any) -> Any:
        self.seen += 1
        self.reward[:] = self.seen[:, 0]
        self.ends[0] = self.seen[:, 0] == 3
        infos = {"final_obs": self.seen.copy()} if self.final and self.ends.any() else {}
        self.seen[self.ends[0]] = 0
        return self.seen, self.reward, self.ends[0], self.ends[1], infos


@pytest.mark.parametrize("options", [{}, {"autoreset_mode": SAME_STEP}])
def test_a_vector_of_ones_own(options: dict[str, Any]) -> None:
    envs = VectorSteps(Batched(**({} if options else {"autoreset_mode": SAME_STEP})), **options)
    envs.reset()
    taken = []
    for _ in range(4):
        envs.step(np.zeros(2, np.int64))
        taken.append(envs.columns)
    assert [columns["observation"][0, 0] for columns in taken] == [0, 1, 2, 0]
    assert [columns["next", "observation"][0, 0] for columns in taken] == [1, 2, 3, 1]
    assert [columns["next", "reward"][0, 0] for columns in taken] == [1, 2, 3, 1]
    assert [bool(columns["next", "terminated"][0, 0]) for columns in taken] == [False, False, True, False]


class TensorsOfVectors(VectorWrapper):
    """Takes and returns tensors on the CPU, as Gymnasium's NumpyToTorch and vectors of simulators do."""

    def reset(self, **options: Any) -> Any:
        mask = (options.get("options") or {}).get("reset_mask")
        options |= {} if mask is None else {"options": {"reset_mask": mask.numpy()}}
        observations, infos = self.env.reset(**options)
        return as_tensors(observations), infos

    def step(self, actions: Any) -> Any:
        *results, infos = self.env.step(actions.numpy())
        final = infos.get("final_obs")  # of each environment that ended, elsewhere None
        if final is not None:
            infos = {"final_obs": as_tensors(np.stack([np.zeros(3) if one is None else one for one in final]))}
        return *map(as_tensors, results), infos


def as_tensors(values: Any) -> torch.Tensor:
    return torch.from_numpy(values.copy())


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_vectors_may_return_tensors(mode: AutoresetMode) -> None:
    expected, envs = (of_lengths(3, 5, 5, mode=mode) for _ in range(2))
    replays = [recipes.uniform(capacity=1_000, batch_size=8, n_steps=3) for _ in range(2)]
    played(expected, 40, replays[0])
    of_tensors = VectorSteps(TensorsOfVectors(envs.env))
    of_tensors.reset(seed=0)
    for step in range(40):
        results = of_tensors.step(torch.full((3, 1), step / 40))
        assert all(isinstance(part, torch.Tensor) for part in results[:4])
        of_tensors.store(replays[1])
        ended = results[2] | results[3]
        if mode is DISABLED and bool(ended.any()):
            of_tensors.reset(options={"reset_mask": ended})
    assert (replays[0][:] == replays[1][:]).all()


@pytest.mark.parametrize("noise", [None, 0.1])
def test_rows_of_a_simulator_are_steps_that_were_played(noise: float | None) -> None:
    names = None if noise is None else {"observation": "observation", "critic_observation": "critic_observation"}
    envs = VectorSteps(Pendulums(6, max_steps=5, staggered=True, noise=noise), observation_columns=names)
    replay = recipes.uniform(capacity=1_000, batch_size=8, n_steps=3)
    envs.reset(seed=0)
    ends, lasts = [], []
    for step in range(12):
        _, _, _, truncated, info = envs.step(torch.full((6, 1), step / 12, dtype=torch.float64))
        assert all(isinstance(column, torch.Tensor) for column in envs.columns.values())
        envs.store(replay)
        ends.append(truncated)
        lasts.append(info["final_observation"])
    rows = replay[:].reshape(12, 6)
    done = torch.stack(ends)
    assert torch.equal(rows["next", "truncated"][..., 0], done) and not rows["next", "terminated"].any()
    for name in names or ["observation"]:
        last = torch.stack([one[name] if names else one for one in lasts])
        assert torch.equal(rows["next", name], last)
        follows = ~done[:-1]
        assert torch.equal(rows[name][1:][follows], rows["next", name][:-1][follows])
    numbers = rows["trajectory"]
    assert ((numbers[1:] != numbers[:-1]) == done[:-1]).all() and rows["action"].dtype == torch.float32
    began = torch.cat([numbers[0], numbers[1:][done[:-1]]])
    assert began.tolist() == list(range(len(began))) and envs.next_trajectory == len(began) + int(done[-1].sum())


def test_levels_are_rows_too() -> None:
    levels = make_level_vector("CartPole-v1", 2, SequentialLevels(range(50)))
    envs, replay = VectorSteps(levels), recipes.uniform(capacity=500, batch_size=8)
    envs.reset()
    ends = []
    for _ in range(40):
        infos = envs.step(np.array([0, 1]))[-1]
        envs.store(replay, level_id=infos["step_level_id"])
        ends += [infos["final_obs"][i] for i in np.flatnonzero(infos.get("_final_obs", np.zeros(2)))]
    rows = replay[:]
    assert len(ends) > 3
    np.testing.assert_array_equal(rows["next", "observation"][rows["next", "done"].flatten()].numpy(), np.stack(ends))
    assert rows["level_id"].unique().tolist() == sorted(set(rows["trajectory"].tolist()))


def test_the_mode_is_that_of_the_vector_not_of_another_one_of_its_class() -> None:
    first = SyncVectorEnv([partial(Counting, 0, 2)], autoreset_mode=SAME_STEP)
    SyncVectorEnv([partial(Counting, 0, 2)], autoreset_mode=DISABLED)  # they share the class's metadata
    rows = played(VectorSteps(first), 6)
    assert rows["next", "observation"][:, 2].tolist() == [1, 2] * 3


def test_an_environment_that_reuses_its_array_is_reported_where_the_vector_loses_the_last_observation() -> None:
    envs = of_lengths(3, 4, mode=SAME_STEP, reuses=True)
    with pytest.warns(UserWarning, match=r"end with the observation that another episode begins with.* the same arr"):
        played(envs, 24)
    for mode, reuses in ((SAME_STEP, False), (NEXT_STEP, True), (DISABLED, True)):
        played(of_lengths(3, 4, mode=mode, reuses=reuses), 24)


class Same(Counting):
    """Always the same observation."""

    def step(self, action: Any) -> Any:
        observation, *others = super().step(action)
        return np.zeros_like(observation), *others

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros_like(super().reset(seed=seed)[0]), {}


def test_an_environment_with_one_observation_is_not_reported() -> None:
    assert len(played(VectorSteps(SyncVectorEnv([Same], autoreset_mode=SAME_STEP)), 80)) == 80


def test_refused() -> None:
    with pytest.raises(TypeError, match="env is <.*; it must be a vector of environments, such as gymnasium.make_vec"):
        VectorSteps(gymnasium.make("CartPole-v1"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="autoreset_mode is 'NextStep'; it must be a gymnasium.vector.AutoresetMode"):
        VectorSteps(Batched(), autoreset_mode="NextStep")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="have the autoreset_mode None; it must .* Give VectorSteps the one it follows"
    ):
        VectorSteps(Batched())
    envs = VectorSteps(Batched(final=False, autoreset_mode=SAME_STEP))
    with pytest.raises(gymnasium.error.ResetNeeded, match="call its reset"):
        envs.step(np.zeros(2, np.int64))
    envs.reset()
    for _ in range(2):
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(ValueError, match=r"infos\['final_obs'\] has no last observation of it: None"):
        envs.step(np.zeros(2, np.int64))


class Misshapen(SyncVectorEnv):
    """Returns one of its results in another shape."""

    def __init__(self, place: int, shape: tuple[int, ...]) -> None:
        super().__init__([Counting, Counting], autoreset_mode=SAME_STEP)
        self.place, self.shape = place, shape

    def step(self, actions: Any) -> Any:
        results = [*super().step(actions)]
        results[self.place] = np.zeros(self.shape, results[self.place].dtype)
        return tuple(results)


@pytest.mark.parametrize("shape", [(2, 0), (0,), (2, 2), (1, 2), ()], ids=str)
@pytest.mark.parametrize("place", [1, 2, 3], ids=["reward", "terminated", "truncated"])
def test_a_vector_returns_one_reward_and_flag_for_each_environment(place: int, shape: tuple[int, ...]) -> None:
    envs = VectorSteps(Misshapen(place, shape))
    envs.reset(seed=0)
    with pytest.raises(
        ValueError, match=r"returned rewards, terminated and truncated of the shapes .*, \[2\]. Nothing"
    ):
        envs.step(np.zeros((2, 1), np.float32))
    replay = recipes.uniform(capacity=8, batch_size=2)
    assert len(envs.store(replay)) == len(replay) == 0


def test_numbers_go_on_from_a_number_that_is_set() -> None:
    envs = VectorSteps(gymnasium.make_vec("CartPole-v1", num_envs=2))
    envs.next_trajectory = 40
    envs.reset(seed=0)
    envs.step(np.array([0, 1]))
    assert envs.columns["trajectory"].tolist() == [40, 41] and envs.next_trajectory == 42
