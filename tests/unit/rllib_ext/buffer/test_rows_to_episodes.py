# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictMaxValueWriter

import rllib_ext
from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.events import EventTable, reward_at_least
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.fill import episodes_of
from tests.integration.rllib_algorithms import small, trained
from tests.stored import stored_rows
from tests.unit.rllib_ext.episodes import column

OBSERVATION, ACTION = spaces.Box(-np.inf, np.inf, (1,), np.float32), spaces.Discrete(3)
GO, TERMINATED, TRUNCATED, GAP = range(4)
Step = tuple[int, int, int]  # trajectory, number of its observation, how it goes on


def rows_of(steps: list[Step]) -> TensorDict:
    """Row ``number`` observes it, is rewarded with it, acts ``number % 3`` and leads to ``number + 1``."""
    trajectory, number, how = (torch.tensor(values) for values in zip(*steps, strict=True))
    terminated, truncated = (how == TERMINATED).unsqueeze(1), (how == TRUNCATED).unsqueeze(1)
    following = {
        "observation": number.float().unsqueeze(1) + 1,
        "reward": number.float().unsqueeze(1),
        "terminated": terminated,
        "truncated": truncated,
        "done": terminated | truncated,
    }
    rows = {"observation": number.float().unsqueeze(1), "action": number % 3, "next": following}
    return TensorDict({**rows, "trajectory": trajectory}, [len(steps)])


def replay_of(rows: TensorDict, capacity: int = 100) -> Replay:
    replay = recipes.uniform(capacity, batch_size=1, seed=0)
    replay.extend(rows)
    return replay


def converted(replay: Replay, most: int = 100, **options: Any) -> list[SingleAgentEpisode]:
    settings = {"observation_space": OBSERVATION, "action_space": ACTION, "normalized": True, **options}
    return episodes_of(replay, most=most, **settings)


def described(episode: SingleAgentEpisode) -> tuple[list[float], list[int], bool, bool]:
    observations = episode.get_observations(slice(0, len(episode) + 1))[:, 0].tolist()
    actions = episode.get_actions(slice(0, len(episode))).tolist()
    return observations, actions, episode.is_terminated, episode.is_truncated


#   trajectory 9    10  11  12T           terminated
#   trajectory 7      20  21X  30  31     truncated; then the same name goes on elsewhere
#   trajectory 8                  40 | 45 a row is missing in between
STEPS: list[Step] = [
    *((9, 10, GO), (7, 20, GO), (9, 11, GO), (7, 21, TRUNCATED), (9, 12, TERMINATED)),
    *((7, 30, GO), (8, 40, GAP), (7, 31, GO), (8, 45, GO)),
]


def test_rows_become_episodes_the_one_with_the_oldest_row_first() -> None:
    assert [described(episode) for episode in converted(replay_of(rows_of(STEPS)))] == [
        ([10, 11, 12, 13], [1, 2, 0], True, False),
        ([20, 21, 22], [2, 0], False, True),
        ([30, 31, 32], [0, 1], False, False),
        ([40, 41], [1], False, False),
        ([45, 46], [0], False, False),
    ]


def test_rows_without_a_trajectory_are_one_stream() -> None:
    rows = rows_of([(0, 1, GO), (0, 2, TERMINATED), (0, 3, GO), (0, 4, GO), (0, 8, GO)]).exclude("trajectory")
    assert [described(episode)[0] for episode in converted(replay_of(rows))] == [[1, 2, 3], [3, 4, 5], [8, 9]]


def test_an_end_of_neither_kind_is_a_truncation() -> None:
    rows = rows_of([(0, 1, GO), (0, 2, TRUNCATED), (0, 3, GO)])
    rows["next", "truncated"].zero_()
    assert [described(episode)[2:] for episode in converted(replay_of(rows))] == [(False, True), (False, False)]
    rows = rows_of([(0, 1, GO), (0, 2, TERMINATED), (0, 3, GO)])
    del rows["next", "truncated"], rows["next", "done"]
    assert [described(episode)[2:] for episode in converted(replay_of(rows))] == [(True, False), (False, False)]


def test_bounded_actions_become_those_the_module_computes() -> None:
    space = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 8], np.float32))
    rows = rows_of(STEPS[:3])
    rows["action"] = torch.tensor([[-2.0, 0.0], [0.0, 6.0], [2.0000002, 8.0]])
    first, second = converted(replay_of(rows), action_space=space)
    assert first.get_actions(slice(0, 2)).tolist() == [[-1, -1], [1, 1]]  # trajectory 9: rows 0 and 2
    assert second.get_actions(slice(0, 1)).tolist() == [[0, 0.5]]
    first, second = converted(replay_of(rows), action_space=space, normalized=False)
    assert second.get_actions(slice(0, 1)).tolist() == [[0, 6]]


def test_what_rllib_makes_of_a_module_action_is_the_stored_one() -> None:
    from ray.rllib.utils.spaces.space_utils import unsquash_action

    for space in (
        spaces.Box(np.array([-2, 3, 5], np.float32), np.array([0.5, 9, 5], np.float32)),
        spaces.Box(-3, 4, (3,), np.int64),
    ):
        space.seed(0)
        actions = np.stack([space.sample() for _ in range(50)])
        rows = rows_of([(0, number, GO) for number in range(50)])
        rows["action"] = torch.from_numpy(actions)
        (episode,) = converted(replay_of(rows), action_space=space)
        again = [unsquash_action(action, space) for action in episode.get_actions(slice(0, 50))]
        np.testing.assert_allclose(again, actions, atol=1e-6)


def test_unbounded_actions_and_those_of_other_spaces_stay() -> None:
    rows = rows_of(STEPS[:3])
    cases: list[tuple[gym.Space, torch.Tensor]] = [
        (spaces.Box(-np.inf, np.inf, (1,)), torch.tensor([[-50.0], [0.5], [70.0]])),
        (spaces.MultiDiscrete([3, 2]), torch.tensor([[2, 1], [0, 0], [1, 1]])),
        (spaces.MultiBinary(2), torch.tensor([[0, 1], [0, 0], [1, 1]], dtype=torch.int8)),
    ]
    for space, actions in cases:
        rows["action"] = actions
        first, _ = converted(replay_of(rows), action_space=space)
        assert first.get_actions(slice(0, 2)).tolist() == actions[[0, 2]].tolist()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_one_hot_actions_become_numbers(dtype: torch.dtype) -> None:
    rows = rows_of(STEPS)
    rows["action"] = torch.nn.functional.one_hot(rows["action"], 3).to(dtype)
    assert [described(episode)[1] for episode in converted(replay_of(rows))][:2] == [[1, 2, 0], [2, 0]]


def test_nested_spaces() -> None:
    space = spaces.Dict({"arm": spaces.Tuple([OBSERVATION, OBSERVATION]), "goal": spaces.Discrete(9)})
    rows = rows_of([(0, 1, GO), (0, 2, GO), (0, 4, GO)])
    goals = torch.tensor([5, 5, 5]), torch.tensor([5, 6, 5])  # the goal changes behind the second row
    for place, part in ((rows, goals[0]), (rows["next"], goals[1])):
        number = place["observation"]
        place["observation"] = TensorDict({"arm": {"0": number, "1": -number}, "goal": part}, [3])
    first, second = converted(replay_of(rows), observation_space=space)
    assert first.get_observations(slice(0, 3))["arm"][1][:, 0].tolist() == [-1, -2, -3]
    assert first.get_observations(slice(0, 3))["goal"].tolist() == [5, 5, 6]
    assert second.get_observations(slice(0, 1))["goal"].tolist() == [5]


@pytest.mark.slow
def test_cameras_stored_once_fill_a_buffer_that_stores_them_once() -> None:
    def seen(number: torch.Tensor) -> TensorDict:
        image = number.to(torch.uint8).view(-1, 1, 1)
        parts = {"front": image.expand(-1, 5, 6), "arm": {"wrist": image.expand(-1, 2, 3) + 1, "angle": number}}
        return TensorDict(parts, [len(number)])

    rows = rows_of([(0, 1, GO), (0, 2, GO), (0, 3, TERMINATED), (1, 7, GO), (1, 8, GO)])
    for place in (rows, rows["next"]):
        place["observation"] = seen(place["observation"])
    entries = ["front", ("arm", "wrist")]
    keys = [("observation", "front"), ("observation", "arm", "wrist")]
    replay = recipes.uniform(100, 1, frame_stack=1, image_key=keys, seed=0)
    replay.extend(rows)
    cameras = {"front": spaces.Box(0, 255, (5, 6), np.uint8), "wrist": spaces.Box(0, 255, (2, 3), np.uint8)}
    arm = spaces.Dict({"wrist": cameras["wrist"], "angle": OBSERVATION})
    episodes = converted(replay, observation_space=spaces.Dict({"front": cameras["front"], "arm": arm}))
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=60, frame_stack=1, image_key=entries, seed=0)
    buffer.add(episodes)
    assert len(buffer) == 5 and buffer.replay.storage.frames_held == replay.storage.frames_held == 7
    assert (buffer.replay[:]["observation"] == replay[:]["observation"]).all()
    assert (buffer.replay[:]["next", "observation"] == replay[:]["next", "observation"]).all()


def test_every_part_of_an_observation_must_go_on() -> None:
    rows = rows_of([(0, 1, GO), (0, 2, GO)])
    for place in (rows, rows["next"]):
        place["observation"] = place["observation"].repeat(1, 2)
    rows["observation"][1, 1] = 7.0
    space = spaces.Box(-np.inf, np.inf, (2,))
    assert list(map(len, converted(replay_of(rows), observation_space=space))) == [1, 1]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"observation_space": spaces.Box(-1, 1, (4,))}, r"observation has rows of float32 \(1,\); .* float32 \(4,\)"),
    ({}, {"observation_space": spaces.Box(0, 9, (1,), np.uint8)}, "observation has rows of float32 .* of uint8"),
    ({}, {"observation_space": spaces.Dict({"a": OBSERVATION})}, "no column observation/a, .*; stored are "),
    ({}, {"action_space": spaces.Discrete(2)}, "action is out of the bounds of Discrete.2. in 2 of 3 rows: .* 1 to 2"),
    ({}, {"action_space": spaces.Discrete(3, start=1)}, "compute actions from 0 on"),
    ({}, {"action_space": spaces.Box(-1, 1, (1,))}, r"action has rows of int64 \(\)"),
    ({}, {"action_space": spaces.Text(3)}, "not supported|has rows of"),
    ({"action": torch.full((3,), 0.5)}, {}, "action has rows of float32 .* of int64"),
    ({"action": torch.ones(3, 3, dtype=torch.int64)}, {}, r"action has rows of int64 \(3,\)"),
    (
        {"action": torch.tensor([[2.1], [0.0], [-3.0]])},
        {"action_space": spaces.Box(-2, 2, (1,))},
        "Box.* in 2 of 3 rows",
    ),
    ({"action": None}, {}, "no column action"),
    ({("next", "reward"): None}, {}, "no column next/reward"),
    ({"steps_to_next_obs": torch.tensor([[1], [3], [1]])}, {}, "returns over several steps"),
]


@pytest.mark.parametrize(("columns", "settings", "message"), REFUSED, ids=[message[:30] for *_, message in REFUSED])
def test_rows_that_do_not_fit_are_refused(columns: dict[Any, Any], settings: dict[str, Any], message: str) -> None:
    rows = rows_of(STEPS[:3])
    for key, value in columns.items():
        rows = rows.exclude(key) if value is None else rows.set(key, value)
    with pytest.raises(ValueError, match=message):
        converted(replay_of(rows), **settings)


def test_replays_without_rows_or_order_are_refused() -> None:
    with pytest.raises(ValueError, match="the replay is empty"):
        converted(recipes.uniform(10, batch_size=1))
    ranked = Replay(storage=PackedStorage(10), writer=TensorDictMaxValueWriter(rank_key="rank"), batch_size=1)
    ranked.extend(rows_of(STEPS[:3]).set("rank", torch.ones(3)))
    with pytest.raises(ValueError, match="TensorDictMaxValueWriter keeps no order of its rows"):
        converted(ranked)


@st.composite
def played_steps(draw: st.DrawFn) -> list[Step]:
    """Interleaved environments; numbers jump where an episode ends or a row is missing."""
    number, trajectory = [1000, 2000, 3000], [0, 1, 2]
    steps: list[Step] = []
    hows = st.sampled_from([GO, GO, GO, TERMINATED, TRUNCATED, GAP])
    for env, how in draw(st.lists(st.tuples(st.integers(0, 2), hows), min_size=1, max_size=40)):
        steps.append((trajectory[env], number[env], how))
        number[env] += 1 if how == GO else 5
        if how in (TERMINATED, TRUNCATED):
            trajectory[env] += 3
    return steps


@pytest.mark.slow
@given(played_steps(), st.integers(5, 40), st.integers(5, 40), st.integers(1, 4))
def test_the_buffer_holds_the_newest_rows_and_their_links(
    steps: list[Step], stored: int, capacity: int, n_step: int
) -> None:
    replay = replay_of(rows_of(steps[:1]), capacity=stored)
    for step in steps[1:]:
        replay.extend(rows_of([step]))
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=capacity, seed=0)
    buffer.add(converted(replay, most=capacity))
    kept = steps[-min(stored, capacity) :]
    how = {number: how for _, number, how in kept}
    rows = stored_rows(buffer.replay)
    held = {int(number): row for number, row in zip(rows["observation"][:, 0].tolist(), rows, strict=True)}
    assert len(buffer) == len(held) and set(held) == set(how)
    for number, row in held.items():
        assert row["next", "observation"].item() == number + 1 and row["next", "reward"].item() == number
        assert row["action"].item() == number % 3
        ends = tuple(bool(row["next", name]) for name in ("terminated", "truncated", "done"))
        assert ends == (how[number] == TERMINATED, how[number] == TRUNCATED, how[number] in (TERMINATED, TRUNCATED))
    drawn = buffer.sample(num_items=100, n_step=n_step, gamma=0.5)
    numbers, returns = column(drawn, "get_observations")[:, 0].astype(int), column(drawn, "get_rewards")
    taken = column(drawn, "get_extra_model_outputs", "n_step")
    for number, total, used in zip(numbers.tolist(), returns.tolist(), taken.tolist(), strict=True):
        chain = [number]  # a row that went on is followed by the next number, if that is held
        while len(chain) < n_step and how[chain[-1]] == GO and chain[-1] + 1 in how:
            chain.append(chain[-1] + 1)
        assert used == len(chain)
        assert total == pytest.approx(sum(0.5**i * reward for i, reward in enumerate(chain)))


@pytest.mark.slow
def test_a_module_of_several_agents_is_filled(shared_ray: None, caplog: pytest.LogCaptureFixture) -> None:
    config = small(DQNConfig, MultiAgentCartPole, "uniform", modules={"fixed": None, "second": {"capacity": 50}})
    config.environment(env_config={"num_agents": 3}).multi_agent(
        policies={"first", "second", "fixed"},
        policy_mapping_fn=lambda agent, episode, **rest: ["first", "second", "fixed"][agent],
        policies_to_train=["first", "second"],
    )
    algorithm = rllib_ext.configure(config).build_algo()
    number = torch.arange(101.0).unsqueeze(1).expand(-1, 4)
    flags = {name: torch.zeros(100, 1, dtype=torch.bool) for name in ("terminated", "truncated", "done")}
    following = {"observation": number[1:], "reward": torch.ones(100, 1), **flags}
    replay = recipes.uniform(1000, batch_size=1, seed=0)
    replay.extend(TensorDict({"observation": number[:-1], "action": torch.arange(100) % 2, "next": following}, [100]))
    assert rllib_ext.fill(algorithm, replay, "first") == 100
    assert rllib_ext.fill(algorithm, replay, "second") == 50
    buffer = algorithm.local_replay_buffer
    assert {name: len(module) for name, module in buffer.modules.items()} == {"first": 100, "second": 50}
    stored = buffer.modules["first"].replay.storage.get(slice(0, 100))
    assert torch.equal(stored["observation"], replay.storage.get(slice(0, 100))["observation"])
    for name, message in (
        (None, "module_id is None; the algorithm's modules are 'first', 'fixed', 'second'"),
        ("third", "module_id is 'third'"),
        ("fixed", "module 'fixed' stores nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            rllib_ext.fill(algorithm, replay, name)
    assert np.isfinite(trained(algorithm)["learners"]["first"]["total_loss"])
    algorithm.stop()


def test_columns_of_infos_and_tasks_go_along_in_the_order_of_their_steps() -> None:
    rows = rows_of([(0, 0, GO), (0, 1, TERMINATED), (1, 10, GO), (0, 20, GO), (1, 11, GO)])
    rows["task"] = torch.tensor([1, 1, 0, 0, 0])
    rows["next", "goal"] = torch.tensor([[0.5], [1.5], [2.5], [3.5], [4.5]])
    episodes = converted(replay_of(rows), infos={"goal": ("next", "goal"), "task": ("task",)})
    taught = RecipeEpisodeReplayBuffer(
        "parallel_curriculum", tasks=["target", "near"], capacity_per_task=10, info_keys=["goal"], seed=0
    )
    taught.add(episodes)
    for name, numbers, goals in (("near", [0, 1], [0.5, 1.5]), ("target", [10, 11, 20], [2.5, 4.5, 3.5])):
        table = taught.replay.table(name)
        assert table["observation"].flatten().tolist() == numbers
        assert table["next", "goal"].flatten().tolist() == goals
    with pytest.raises(ValueError, match="the replay has no column next/other"):
        converted(replay_of(rows), infos={"other": ("next", "other")})


def test_rows_of_tables_are_taken_each_once() -> None:
    goal = EventTable("goal", reward_at_least(3.0), history_length=2, capacity=10)
    replay = recipes.event_tables(3, batch_size=1, tables=[goal], seed=0)
    replay.extend(rows_of([(0, number, TERMINATED if number == 3 else GO) for number in range(8)]))
    assert len(replay) == 6  # the table of events has 2 to 7, the default table 5 to 7
    (first, rest) = converted(replay)
    assert column([first], "get_observations")[:, 0].tolist() == [2, 3]
    assert column([rest], "get_observations")[:, 0].tolist() == [4, 5, 6, 7]
