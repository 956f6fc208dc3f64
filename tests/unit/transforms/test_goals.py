# SPDX-License-Identifier: Apache-2.0
"""Goals replaced by achieved ones: values by hand, where functions come from, saves, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import FlattenObservation
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ListStorage
from torchrl.data.replay_buffers import SliceSampler

from lightning_replay import PackedStorage, Replay, load_replay, recipes
from lightning_replay.collecting import VectorSteps
from lightning_replay.divided_draws import Divider
from lightning_replay.envs.bit_flipping import BitFlipping
from lightning_replay.episodes.links import EpisodeLinks
from lightning_replay.samplers import RandomPairSampler, SequenceSampler
from lightning_replay.saving.spec import NotRebuildableError
from lightning_replay.transforms import NStepTransitions, RelabelGoals
from tests.goal_steps import OWN_GOAL, costly, distance, goal_rows, reached

pytestmark = pytest.mark.filterwarnings("ignore:.*another reward than RelabelGoals computes")  # 100 is stored


def hindsight(capacity: int = 20, batch_size: int = 64, **options) -> Replay:
    return recipes.hindsight(capacity, min(batch_size, capacity), **{"reward": reached, "seed": 0} | options)


def drawn_once(replay: Replay, slot: int):
    """The first row drawn from a slot."""
    batch = replay.sample(200)
    return batch[batch["index"] == slot][0]


def test_values_by_hand() -> None:
    #  0 -> 1 -> 2 -> 3, which is terminated at its own goal; the last step achieves 3
    replay = hindsight(strategy="final", share=1.0, reward=distance)
    replay.extend(goal_rows([0, 1, 2], done=True))
    batch = replay.sample(30)
    assert (batch["observation", "desired_goal"] == 3).all() and (
        batch["next", "observation", "desired_goal"] == 3
    ).all()
    expected = torch.tensor([-4.0, -2.0, 0.0])[batch["index"]]  # of two numbers each
    assert torch.equal(batch["next", "reward"].flatten(), expected)
    assert torch.equal(batch["next", "terminated"].flatten(), batch["index"] == 2), "flags stay without a function"
    stored = replay[:]
    assert (stored["observation", "desired_goal"] == OWN_GOAL).all() and (stored["next", "reward"] == 100).all()


def test_flags_by_hand() -> None:
    replay = hindsight(strategy="final", share=1.0, terminated=lambda achieved, desired, info: achieved[:, 0] == 2)
    replay.extend(goal_rows([0, 1, 2], done=True))
    row = drawn_once(replay, 1)["next"]
    assert [row[name].item() for name in ("terminated", "truncated", "done")] == [True, False, True]
    row = drawn_once(replay, 2)["next"]
    assert [row[name].item() for name in ("terminated", "truncated", "done")] == [False, True, True]


def test_returns_by_hand() -> None:
    replay = hindsight(strategy="final", share=1.0, n_steps=3, discount=0.5, reward=distance)
    replay.extend(goal_rows([0, 1, 2, 3]))  # the newest achieves 4
    row = drawn_once(replay, 0)
    assert row["next", "reward"].item() == -6 + 0.5 * -4 + 0.25 * -2 and row["discount"].item() == 0.125
    ends = hindsight(strategy="final", share=1.0, n_steps=3, discount=0.5, reward=distance, terminated=reached)
    ends.extend(goal_rows([0, 1, 2]))
    ends.extend(goal_rows([3, 4]))
    row = drawn_once(ends, 3)
    assert row["next", "reward"].item() == -2 and row["steps_to_next_obs"].item() == 2
    assert row["discount"].item() == 0.0 and row["next", "terminated"].item()


def costed_rows():
    """Steps 0, 1, 2 with the actions 10, 20, 30 and, after them, the speeds 1, 2, 3."""
    rows = goal_rows([0, 1, 2], done=True)
    rows["action"] = torch.tensor([[10.0], [20.0], [30.0]])
    rows["next", "speed"] = torch.tensor([[1.0], [2.0], [3.0]])
    return rows


def test_rewards_read_stored_columns_by_hand() -> None:
    seen = []

    def reward(achieved, desired, info):
        seen.append({name: column.shape for name, column in info.items()})
        return distance(achieved, desired, info) - info["action"][:, 0] + 100 * info["speed"][:, 0]

    options = {"strategy": "final", "share": 1.0, "reward": reward, "reward_keys": ["action", ("next", "speed")]}
    single, summed = hindsight(**options), hindsight(**options, n_steps=3, discount=0.5)
    for replay in (single, summed):
        replay.extend(costed_rows())
    # The new goal is 3: distances 4, 2, 0, of two numbers each.
    batch = single.sample()
    expected = torch.tensor([-4.0 - 10 + 100, -2.0 - 20 + 200, 0.0 - 30 + 300])
    assert torch.equal(batch["next", "reward"].flatten(), expected[batch["index"]])
    assert seen[-1] == {"action": (20, 1), "speed": (20, 1)} and batch["next", "speed"].shape == (20, 1)
    row = drawn_once(summed, 0)  # each step of the return with its own action and speed
    assert row["next", "reward"].item() == 86 + 0.5 * 178 + 0.25 * 270
    assert drawn_once(summed, 1)["next", "reward"].item() == 178 + 0.5 * 270


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("ends", [None, reached])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_single_steps_are_relabelled_as_returns_of_one_step(strategy: str, ends, dtype: torch.dtype) -> None:
    """Rows of single steps are relabelled through arrays; without them, by the way that returns take."""
    batches = []
    for is_general in (False, True):
        options = {"reward": costly, "reward_keys": ["action", ("next", "speed")], "terminated": ends}
        replay = hindsight(strategy=strategy, share=0.7, **options)
        if is_general:
            replay.transform[0]._relabel_steps = lambda *_: False
        for _ in range(4):
            rows = costed_rows()
            rows["next", "reward"] = rows["next", "reward"].to(dtype)
            replay.extend(rows)
        batches.append([replay.sample() for _ in range(5)])
    for one, other in zip(*batches, strict=True):
        assert one["next", "reward"].dtype is dtype and (one == other).all()
    assert (batches[0][0]["observation", "desired_goal"] != OWN_GOAL).any()


@pytest.mark.parametrize("n_steps", [1, 2])
def test_columns_are_read_there_as_on_the_cpu(n_steps: int) -> None:
    def reward(achieved, desired, info):
        return 1.0 * (achieved == desired).all(-1) - info["action"][:, 0]

    found = []
    for draws_on in ("device", "cpu"):
        replay = hindsight(
            strategy="final", reward=reward, share=1.0, reward_keys=["action"], n_steps=n_steps, draws_on=draws_on
        )
        replay.extend(costed_rows())
        found.append([drawn_once(replay, slot)["next", "reward"].item() for slot in range(3)])
    assert found[0] == found[1]
    assert found[0] == pytest.approx([-10, -20, -29] if n_steps == 1 else [-10 - 0.99 * 20, -20 - 0.99 * 29, -29])


def test_functions_of_an_environment_read_columns_as_infos_of_its_steps() -> None:
    class Costly(BitFlipping):
        def compute_reward(self, achieved_goal, desired_goal, info):
            return (achieved_goal == desired_goal).all(-1) - 1.0 - np.ravel(info["speed"])

        def compute_terminated(self, achieved_goal, desired_goal, info):
            return super().compute_terminated(achieved_goal, desired_goal, info) | bool(info["speed"] == 2)

    keys = {"reward": None, "env": Costly(bits=2), "reward_keys": [("next", "speed")]}
    replay = hindsight(strategy="final", share=1.0, **keys)
    replay.extend(costed_rows())
    batch = replay.sample()
    assert torch.equal(batch["next", "reward"].flatten(), torch.tensor([-2.0, -3.0, -3.0])[batch["index"]])
    assert torch.equal(batch["next", "terminated"].flatten(), batch["index"] > 0)  # speed 2, and the goal
    # Flattened observations are read by the names of their parts.
    flat = hindsight(
        strategy="final",
        share=1.0,
        env=BitFlipping(bits=2),
        reward=costly,
        reward_keys=[("observation", "observation")],
    )
    rows = goal_rows([1, 2])
    for branch in (rows, rows["next"]):
        parts = [branch["observation", name] for name in ("achieved_goal", "desired_goal", "observation")]
        branch["observation"] = torch.cat(parts, 1)
    flat.extend(rows)
    batch = flat.sample()
    assert torch.equal(batch["next", "reward"].flatten(), torch.tensor([-4.0, 1.0 - 8.0])[batch["index"]])


def test_a_save_keeps_the_columns_of_rewards(tmp_path) -> None:
    options = {"strategy": "final", "share": 1.0, "reward": costly, "reward_keys": ["action", ("next", "speed")]}
    replay = hindsight(**options)
    replay.extend(costed_rows())
    replay.save(tmp_path)
    loaded = load_replay(tmp_path, trust=["tests"])
    assert (loaded.sample() == replay.sample()).all()
    assert loaded.transform[0].reward_keys == (("action",), ("next", "speed"))


def test_columns_of_rewards_that_cannot_be_read_are_refused_at_once() -> None:
    for keys, kind, message in (
        ("action", TypeError, r"reward_keys is 'action'; it must be a sequence of keys, as \['action'\]"),
        ([3], TypeError, r"reward_keys\[0\] is 3; it must be the name of a column"),
        (["speed", ("next", "speed")], ValueError, "each column must have another last name, by which info holds it"),
    ):
        with pytest.raises(kind, match=message):
            RelabelGoals(reward=reached, reward_keys=keys)
    replay = hindsight(reward=costly, reward_keys=["action", "speed"])
    with pytest.raises(
        ValueError, match=r"reward_keys has \[\('speed',\)\], and the transitions have no such columns;"
    ):
        replay.extend(costed_rows())  # it is under "next"
    assert len(replay) == 0 and replay.storage.layout is None
    replay = hindsight(reward=lambda achieved, desired, info: info["speed"][:, 0], reward_keys=["action"])
    with pytest.raises(KeyError, match=r"info has no 'speed'; it holds the columns that reward_keys names, .*'action'"):
        replay.extend(costed_rows())
    assert len(replay) == 0


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_columns_may_lie_anywhere(flat: bool, storage) -> None:
    keys = {"achieved_key": "achieved_goal", "desired_key": "desired_goal"} if flat else {}
    relabel = RelabelGoals("final", 1.0, reached, **keys)
    replay = Replay(storage=storage(20), transform=relabel, batch_size=8, seed=0)
    replay.extend(goal_rows([0, 1, 2], flat=flat))
    batch = replay.sample()
    desired = batch["desired_goal"] if flat else batch["observation", "desired_goal"]
    assert (desired == 3).all() and (batch["next", "reward"].flatten() == (batch["index"] == 2)).all()


@pytest.mark.parametrize("env", ["BitFlipping-v0", gymnasium.make("lightning_replay.envs:BitFlipping-v0", bits=2)])
def test_functions_of_an_environment(env) -> None:
    replay = hindsight(strategy="final", share=1.0, reward=None, env=env)
    replay.extend(goal_rows([0, 1]))
    batch = replay.sample()
    is_last = batch["index"] == 1
    assert torch.equal(batch["next", "reward"].flatten(), is_last.float() - 1)
    assert torch.equal(batch["next", "terminated"].flatten(), is_last)


@pytest.mark.parametrize("n_steps", [1, 2])
def test_flattened_observations_of_an_environment_hold_the_goals(n_steps) -> None:
    env = BitFlipping(bits=2)
    flat, whole = (hindsight(reward=None, env=env, n_steps=n_steps) for _ in range(2))
    rows, columns = goal_rows(range(6)), goal_rows(range(6))
    for branch in (columns, columns["next"]):
        seen = branch["observation"]
        parts = [seen[name] for name in ("achieved_goal", "desired_goal", "observation")]
        branch["observation"] = torch.cat(parts, 1)
    flat.extend(columns)
    whole.extend(rows)
    one, other = flat.sample(), whole.sample()
    assert torch.equal(one["observation"][:, 2:4], other["observation", "desired_goal"])
    assert torch.equal(one["next", "observation"][:, 2:4], other["next", "observation", "desired_goal"])
    assert torch.equal(one["next", "observation"][:, 4:], other["next", "observation", "observation"])
    assert torch.equal(one["next", "reward"], other["next", "reward"])
    assert one["observation"][:, 2].max() > OWN_GOAL and (flat[:]["observation"][:, 2] == OWN_GOAL).all()
    with pytest.raises(ValueError, match=r"no \('next', 'observation', 'achieved_goal'\)"):
        hindsight().extend(columns)  # without env nothing says where the goals are


def test_a_maze_of_gymnasium_robotics_is_found_by_its_id() -> None:
    pytest.importorskip("gymnasium_robotics")
    rewards, flags = RelabelGoals(env="PointMaze_UMaze-v3")._functions
    near, far = np.zeros((2, 2)), np.array([[0.0, 0.1], [0.0, 3.0]])
    assert rewards(near, far, {}).tolist() == [1, 0] and flags(near, far, {}).tolist() == [False, False]


def test_priorities_and_weights_stay() -> None:
    replay = hindsight(priority_exponent=1.0, share=1.0)
    replay.extend(goal_rows([0, 1, 2, 3]))
    replay.update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 0.0, 3.0]))
    batch = replay.sample(400)
    counts = batch["index"].bincount(minlength=4)
    assert counts[1] + counts[2] == 0 and 250 < counts[3] < 350 and "priority_weight" in batch
    replay.update_priority(batch, torch.ones(400))


@pytest.mark.parametrize(
    "options", [{"reward": reached, "terminated": reached, "prefetch": 2}, {"reward": None, "env": "BitFlipping-v0"}]
)
def test_saved_copied_and_resumed_draws_are_the_same(options, tmp_path) -> None:
    replay = hindsight(n_steps=2, **options)
    replay.extend(goal_rows(range(12)))
    replay.sample()
    replay.save(tmp_path / "saved")
    twins = [load_replay(tmp_path / "saved", trust=["tests"], end_episodes=False)]
    twins += [copy.deepcopy(replay), pickle.loads(pickle.dumps(replay))]
    for one in (replay, *twins):
        one.extend(goal_rows(range(12, 15)))
    batch = replay.sample()
    assert all((one.sample() == batch).all() for one in twins)
    assert batch["observation", "desired_goal"].max() > OWN_GOAL


def test_parts_of_a_divided_draw_are_relabelled_and_go_on_alike() -> None:
    shards, twins = ([hindsight(n_steps=2, priority_exponent=0.6, seed=seed) for seed in range(2)] for _ in range(2))
    for shard, twin in zip(shards, twins, strict=True):
        shard.extend(goal_rows(range(12)))
        twin.load_state_dict(shard.state_dict())
    drawn = []
    for group in (shards, twins):
        divider = Divider(hindsight(priority_exponent=0.6).sampler, seed=0)
        division = divider.divide(8, [one.group_totals() for one in group])
        parts = zip(group, division.parts, strict=True)
        drawn.append(torch.cat([shard.sample_shard(part)[0] for shard, part in parts if len(part)]))
    assert (drawn[0] == drawn[1]).all() and drawn[0]["observation", "desired_goal"].max() > OWN_GOAL


def test_a_save_imports_no_module_that_an_id_names(tmp_path) -> None:
    replay = hindsight(reward=None, env="BitFlipping-v0")
    replay.extend(goal_rows([0]))
    replay.save(tmp_path)
    path = tmp_path / "manifest.json" if (tmp_path / "manifest.json").exists() else next(tmp_path.glob("*.json"))
    built_by = json.loads(path.read_text())["built_by"]
    relabel = built_by["arguments"]["transform"]
    relabel["arguments"]["env"] = "antigravity:BitFlipping-v0"
    from lightning_replay.saving.spec import build

    with pytest.raises(NotRebuildableError, match="module antigravity is not imported because a file names it"):
        build(built_by)


def without_reward() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "reward is None and no env is given.*give reward=, a function"),
        ({"env": "CartPole-v1"}, "reward is None and CartPole-v1 has no compute_reward.*give reward="),
        ({"env": without_reward()}, "has no compute_reward"),
        (
            {"env": 3},
            "env is 3; it must be the id of an environment, an environment, or a class or function",
        ),
        ({"reward": 3}, "reward is 3; it must be a function"),
        ({"reward": reached, "strategy": "random"}, "strategy is 'random'.*future"),
        ({"reward": reached, "share": 1.5}, "share is 1.5"),
        ({"env": "NoSuch-v0"}, "NoSuch"),
    ],
)
def test_options_that_cannot_be_used(options, message) -> None:
    with pytest.raises((TypeError, ValueError, gymnasium.error.Error), match=message):
        RelabelGoals(**options)


def test_rows_without_goals_or_of_several_steps_are_refused_and_nothing_is_stored() -> None:
    replay = hindsight()
    rows = goal_rows([0, 1, 2])
    other = rows.clone()
    other["observation", "desired_goal"] = torch.zeros(3, 5)
    for wrong, message in (
        (
            rows.exclude(("observation", "desired_goal")),
            r"no \('observation', 'desired_goal'\), and RelabelGoals needs",
        ),
        (rows.exclude(("next", "observation", "achieved_goal")), r"no \('next', 'observation', 'achieved_goal'\)"),
        (other, r"goals of two shapes, \[3, 2\] and \[3, 5\]"),
        (NStepTransitions(2, 0.9).inv(rows.clone()), "returns over several steps, which RelabelGoals cannot"),
        (rows.exclude(("next", "terminated")), "'terminated'"),
    ):
        with pytest.raises(ValueError, match=message):
            replay.extend(wrong)
    assert len(replay) == 0 and replay.storage.layout is None
    replay.extend(rows)


def test_buffers_it_does_not_work_with_are_refused() -> None:
    relabel = RelabelGoals(reward=reached)
    with pytest.raises(ValueError, match="got a buffer with a RandomPairSampler; rows with goals of their own"):
        recipes.mixup(10).append_transform(relabel)
    replay = hindsight()
    with pytest.raises(ValueError, match="got a buffer with a RandomPairSampler"):
        replay.set_sampler(RandomPairSampler())
    with pytest.raises(ValueError, match="make neither pairs nor sequences. Use a sampler of single rows"):
        replay.set_sampler(SliceSampler(num_slices=1))
    for built in (
        lambda: replay.set_sampler(SequenceSampler(3)),
        lambda: recipes.sequences(10, length=3, transform=relabel),
        lambda: recipes.sequences(10, length=3).append_transform(relabel),
    ):
        with pytest.raises(ValueError, match="RelabelGoals works with single rows, and SequenceSampler"):
            built()
    assert replay.sampler_name == "UniformSampler" and replay.parts.sampler is replay.sampler
    with pytest.raises(ValueError, match="RelabelGoals follows the episodes of stored rows.*give n_steps="):
        recipes.surprise_retention(10, n_steps=2, transform=relabel)
    with pytest.raises(TypeError, match="RelabelGoals reads columns of rows, and a ListStorage has none"):
        Replay(storage=ListStorage(10), transform=relabel, batch_size=2)
    with pytest.raises(TypeError, match="only a lightning_replay.Replay gives it"):
        relabel(goal_rows([0]))
    late = recipes.uniform(10, 2)
    late.extend(goal_rows([0, 1]))
    late.transform.append(relabel)
    with pytest.raises(RuntimeError, match="no links between the rows.*add it by replay.append_transform"):
        late.sample()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda achieved, desired, info: achieved[:, :1], r"returned the shape \[10, 1\]"),
        (lambda achieved, desired, info: 0.0, r"reward of RelabelGoals returned the shape \[\]"),
        (lambda achieved, desired, info: -(achieved - desired), r"returned the shape \[10, 2\]"),
        (lambda achieved, desired, info: achieved[:, 0] * np.nan, "returned NaN or infinity"),
    ],
)
def test_rewards_of_another_shape_are_refused(reward, message) -> None:
    replay = hindsight(share=1.0, reward=reward)
    with pytest.raises(ValueError, match=message):
        replay.extend(goal_rows(range(10)))
    assert len(replay) == 0


def test_stored_rewards_that_the_function_does_not_give_are_named_once() -> None:
    #  The steps achieve 1, 2, 3 and have the goal -1: distances are -4, -6 and -8.
    rows = goal_rows([0, 1, 2])
    rows["next", "reward"] = torch.tensor([[-4.0], [-6.0004], [-8.0]])
    with warnings.catch_warnings(action="error"):
        hindsight(reward=distance).extend(rows)
    rows["next", "reward"][1] = 2.0
    replay = hindsight(reward=distance)
    with pytest.warns(UserWarning, match="1 of the first 3 transitions have another.* 2 is stored and -6 computed"):
        replay.extend(rows)
    with warnings.catch_warnings(action="error"):
        replay.extend(rows)  # which are not compared again
    assert len(replay) == 6


ENDS = "transitions at their goals end their episodes, but RelabelGoals has no function"


def own_goals(first: int, count: int, *, is_reached: bool, ends: bool = True) -> TensorDict:
    """Steps of an environment whose reward is 1 at the goal, which ends the episode if the last step reaches it."""
    rows = goal_rows(range(first, first + count), trajectory=first, done=ends)
    goal = float(first + count) if is_reached else OWN_GOAL
    for branch in ((), ("next",)):
        rows[*branch, "observation", "desired_goal"] = torch.full((count, 2), goal)
    rows["next", "reward"] = (rows["next", "observation", "achieved_goal"] == goal).all(-1, keepdim=True).float()
    return rows


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("is_first", [True, False])
def test_goals_that_end_episodes_are_warned_of_where_nothing_tells_which_others_do(is_first: bool, n_steps: int):
    replay = hindsight(reward=reached, n_steps=n_steps)
    if not is_first:
        replay.extend(own_goals(0, 3, is_reached=False))
        replay.sample()
    with pytest.warns(UserWarning, match=rf"{ENDS} .*terminated=, .*compute_terminated.*see docs/goals.md") as heard:
        replay.extend(own_goals(10, 3, is_reached=True))
        assert len(heard) == is_first
        for _ in range(2):
            replay.sample()
    assert len(heard) == 1


def never(achieved: np.ndarray, desired: np.ndarray, info: dict) -> np.ndarray:
    return np.zeros(len(achieved), np.bool_)


class EndsAtItsGoal(BitFlipping):
    """Its function for the flags contradicts its rows."""

    def compute_terminated(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: dict) -> bool:
        return False


@pytest.mark.parametrize("options", [{"terminated": never}, {"env": EndsAtItsGoal}])
def test_a_function_that_contradicts_the_flags_of_stored_goals_is_warned_of(options: dict) -> None:
    replay = hindsight(reward=reached, **options)
    with pytest.warns(UserWarning, match=rf"all 1 {ENDS} that returns True .*it returns False for all") as heard:
        replay.extend(own_goals(10, 3, is_reached=True))
        replay.sample()
    assert len(heard) == 1


def test_goals_that_end_no_episode_and_known_ends_are_not_warned_of() -> None:
    known: list[tuple[dict, bool]] = [({}, False), ({"terminated": reached}, True), ({"terminated": never}, False)]
    for options, ends in [*known, ({"share": 0.0}, True)]:
        replay = hindsight(reward=reached, **options)
        replay.extend(own_goals(0, 3, is_reached=True, ends=ends))
        replay.extend(own_goals(10, 3, is_reached=False))
        replay.sample()


def flat_bits() -> gymnasium.Env:
    return FlattenObservation(BitFlipping(bits=20))


@pytest.mark.parametrize("env", [BitFlipping, flat_bits, flat_bits()])
def test_environments_by_class_by_function_and_wrapped(env, tmp_path) -> None:
    envs = VectorSteps(SyncVectorEnv([BitFlipping if env is BitFlipping else flat_bits] * 2))
    envs.reset(seed=0)
    envs.action_space.seed(0)
    replay = hindsight(100, reward=None, env=env, share=1.0)
    for _ in range(30):
        envs.step(envs.action_space.sample())
        with warnings.catch_warnings(action="error"):  # rewards are those of the environment
            envs.store(replay)
    assert 0 < (replay.sample()["next", "reward"] == 0).sum() < 64
    replay.save(tmp_path / "saved")
    if not isinstance(env, gymnasium.Env):
        trust = ["lightning_replay.envs"] if env is BitFlipping else ["tests"]
        twin = load_replay(tmp_path / "saved", trust=trust, end_episodes=False)
        assert (twin.sample() == replay.sample()).all()


def test_rewards_of_a_double_and_rewards_stored_as_whole_numbers() -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        expected = torch.float32 if dtype == torch.int64 else dtype
        replay = hindsight(strategy="final", share=1.0, reward=lambda achieved, *_: np.full(len(achieved), -0.25))
        rows = goal_rows([0, 1])
        rows["next", "reward"] = rows["next", "reward"].to(dtype)
        replay.extend(rows)
        reward = replay.sample(8)["next", "reward"]
        assert reward.dtype == expected and (reward == -0.25).all() and replay[:]["next", "reward"].dtype == dtype


def test_a_state_of_links_in_a_circle_ends_a_walk() -> None:
    links = EpisodeLinks(3)
    links.successor[:] = torch.tensor([1, 2, 0])
    slots, steps = links.walk(torch.tensor([0, 1]), torch.tensor([3, 2]))
    assert slots.tolist() == [0, 0] and steps.tolist() == [3, 2]


def test_goals_of_a_real_environment_are_those_it_would_reward() -> None:
    env = BitFlipping(bits=5)
    replay = hindsight(200, reward=None, env=env, share=1.0)
    generator = np.random.default_rng(0)
    for episode in range(12):
        seen, _ = env.reset(seed=episode)
        done, rows = False, []
        while not done:
            action = int(generator.integers(5))
            after, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            row = {"observation": seen, "action": action, "trajectory": episode}
            row["next"] = {"observation": after, "reward": reward, "terminated": terminated, "truncated": truncated}
            rows.append(torch.stack([_as_row(row)])[0])
            seen = after
        replay.extend(torch.stack(rows))
    batch = replay.sample(200)
    same = (batch["next", "observation", "achieved_goal"] == batch["next", "observation", "desired_goal"]).all(1)
    assert torch.equal(batch["next", "reward"].flatten(), same.float() - 1) and 0 < same.sum() < 200
    assert torch.equal(batch["next", "terminated"].flatten(), same)


def _as_row(values):
    from tensordict import TensorDict

    def leaves(node):
        return {
            key: leaves(value) if isinstance(value, dict) else torch.as_tensor(value) for key, value in node.items()
        }

    return TensorDict(leaves(values), [])


@pytest.mark.parametrize("strategy", ["future", "episode"])
def test_rows_with_frames_stored_once_are_relabelled(strategy) -> None:
    replay = hindsight(12, share=1.0, strategy=strategy, frame_stack=2, n_steps=2, terminated=reached)
    rows = goal_rows(range(9))
    shown = torch.arange(11, dtype=torch.uint8).unfold(0, 2, 1)[..., None, None].expand(-1, -1, 3, 3).clone()
    rows["pixels"], rows["next", "pixels"] = shown[:9], shown[1:10]
    replay.extend(rows)
    batch = replay.sample(200)
    number, last = batch["observation", "achieved_goal"][:, 0], batch["next", "observation", "achieved_goal"][:, 0]
    assert torch.equal(batch["pixels"][:, 0, 0, 0], number) and torch.equal(batch["next", "pixels"][:, 0, 0, 0], last)
    goal = batch["observation", "desired_goal"][:, 0]
    assert torch.equal(batch["next", "terminated"].flatten(), goal == last)
    assert (last - number == batch["steps_to_next_obs"].flatten()).all() and (goal > OWN_GOAL).all()


@pytest.mark.gpu
def test_rows_on_a_gpu_get_the_goals_of_the_cpu() -> None:
    for strategy in ("future", "final", "episode"):
        found = []
        for device in ("cpu", "cuda"):
            replay = hindsight(strategy=strategy, share=0.8, n_steps=2, device=device)
            replay.extend(goal_rows(range(15)))
            index = torch.arange(15)
            rows = replay._episodes.draw(replay.storage.get(index), index, replay.storage)
            batch = replay.transform[0].forward_drawn(rows, index, replay.storage, replay._episodes)
            found.append(batch.exclude("index").cpu())
        assert (found[0] == found[1]).all()
