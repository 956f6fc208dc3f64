# SPDX-License-Identifier: Apache-2.0
"""A buffer of Stable-Baselines3 over a recipe: its rows, weights, TD errors and saves."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize
from tensordict import TensorDict
from torch.nn import functional

from lightning_replay import MixedReplay, events, recipes, save_replay
from lightning_replay.sb3 import RecipeBuffer
from lightning_replay.schedules import Linear
from tests.advice import Advice, advice, assert_leads_on

PLANE = spaces.Box(-99, 99, (2,), np.float32)
LEVER = spaces.Discrete(2)
KINDS = {
    "plain": (PLANE, LEVER),
    "numbers": (spaces.Discrete(5), spaces.Box(-1, 1, (1,), np.float64)),
    "dictionary": (spaces.Dict({"a": spaces.Box(-99, 99, (1,), np.float64), "b": spaces.Discrete(5)}), LEVER),
}


class Count(gymnasium.Env[Any, Any]):
    """Observes the steps of the episode, which ends at three; the reward is the step."""

    def __init__(self, action_space: spaces.Space[Any] = LEVER, last: int = 3, shape: tuple[int, ...] = (2,)) -> None:
        dtype: Any = np.uint8 if len(shape) > 1 else np.float32
        self.observation_space, self.action_space = spaces.Box(0, 99, shape, dtype), action_space
        self.last, self.time = last, 0

    def _seen(self) -> np.ndarray:
        return np.full(self.observation_space.shape or (), self.time, self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self._seen(), float(self.time), self.time == self.last, False, {"is_second": self.time == 2}


def filled(num_rows: int = 8, **options: Any) -> RecipeBuffer:
    """Rows of one episode with the observations 0, 1, ... ."""
    buffer = RecipeBuffer(16, PLANE, LEVER, "cpu", **({"seed": 0} | options))
    for time in range(num_rows):
        here, there = np.full((1, 2), time), np.full((1, 2), time + 1)
        buffer.add(here, there, np.array([time % 2]), np.array([1.0]), np.array([False]), [{}])
    return buffer


def test_ages_count_from_the_steps_before_the_first_draw_on() -> None:
    buffer = filled(5, recipe=partial(recipes.prioritized, age={"half_life": 3, "clock": "env_steps"}))
    buffer.sample(4)
    assert buffer.replay.state_dict()["sampler"]["ages"]["births"][:5].tolist() == [0, 1, 2, 3, 4]


def model_of(kind: type[OffPolicyAlgorithm], env: Any, *, steps: int = 0, **options: Any) -> Any:
    policy = "MultiInputPolicy" if isinstance(getattr(env, "observation_space", None), spaces.Dict) else "MlpPolicy"
    arguments: dict[str, Any] = {
        "learning_starts": 10**6,
        "train_freq": 1,
        "batch_size": 4,
        "buffer_size": 64,
        "seed": 0,
    }
    arguments |= {"policy_kwargs": {"net_arch": [8]}, "device": "cpu"}
    arguments |= {"replay_buffer_class": RecipeBuffer, "replay_buffer_kwargs": {"seed": 0} | options.pop("of", {})}
    model = kind(policy, env, **(arguments | options))
    return model.learn(steps) if steps else model


def batches_of(buffer: RecipeBuffer) -> list[TensorDict]:
    """Returns a list, to which every batch is appended that the replay draws from now on."""
    batches: list[TensorDict] = []
    sample = buffer.replay.sample

    def noted(*size: int) -> TensorDict:
        batches.append(sample(*size))
        return batches[-1]

    buffer.replay.sample = noted
    return batches


def test_rows_are_those_that_were_added() -> None:
    buffer = RecipeBuffer(10, PLANE, LEVER, "cpu", n_envs=2, recipe="uniform")
    here, there = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 6.0], [7.0, 8.0]])
    ended = np.array([True, True])  # the first by a time limit
    infos = [{"TimeLimit.truncated": True}, {"TimeLimit.truncated": False}]
    buffer.add(here, there, np.array([1, 0]), np.array([0.5, -0.5]), ended, infos)
    buffer.add(there, here, np.array([0, 1]), np.array([2.0, 3.0]), ~ended, [{}, {}])
    rows = buffer.replay[:]
    assert rows["observation"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert rows["next", "observation"].tolist() == [[5, 6], [7, 8], [1, 2], [3, 4]]
    assert rows["action"].tolist() == [[1], [0], [0], [1]]
    assert rows["next", "reward"].flatten().tolist() == [0.5, -0.5, 2.0, 3.0]
    assert rows["next", "terminated"].flatten().tolist() == [False, True, False, False]
    assert rows["next", "truncated"].flatten().tolist() == [True, False, False, False]
    assert rows["next", "done"].flatten().tolist() == [True, True, False, False]
    assert rows["trajectory"].tolist() == [0, 1, 2, 3]  # each ended, and another began
    assert (buffer.size(), buffer.pos, buffer.full, buffer.replay.capacity) == (2, 2, False, 10)

    drawn = buffer.sample(64)
    by_first = dict(zip(drawn.observations[:, 0].tolist(), range(64), strict=True))
    assert sorted(by_first) == [1, 3, 5, 7]
    assert [drawn.dones[by_first[first]].item() for first in (1, 3, 5, 7)] == [0, 1, 0, 0]
    assert [drawn.rewards[by_first[first]].item() for first in (1, 3, 5, 7)] == [0.5, -0.5, 2.0, 3.0]
    assert drawn.actions.dtype is torch.int64 and drawn.actions.shape == (64, 1) and drawn.discounts is None
    buffer.reset()
    assert (buffer.size(), len(buffer.replay)) == (0, 0)


def test_a_full_buffer_keeps_the_newest_rows() -> None:
    buffer = filled(20)
    assert sorted(buffer.replay[:]["observation"][:, 0].tolist()) == [*range(4, 20)]
    assert (buffer.size(), buffer.pos, buffer.full) == (16, 4, True)


def test_the_last_observation_of_an_episode_is_not_the_first_of_the_next() -> None:
    envs = DummyVecEnv([Count, lambda: TimeLimit(Count(last=9), 2)])
    rows = model_of(DQN, envs, steps=12, of={"recipe": "uniform", "info_keys": ["is_second"]}).replay_buffer.replay[:]
    first, second = rows[::2], rows[1::2]
    assert first["next", "observation"][:, 0].tolist() == [1, 2, 3, 1, 2, 3]
    assert first["next", "terminated"].flatten().tolist() == [False, False, True] * 2
    assert second["next", "observation"][:, 0].tolist() == [1, 2] * 3
    assert second["next", "truncated"].flatten().tolist() == [False, True] * 3  # not terminal
    assert not second["next", "terminated"].any()
    assert first["trajectory"].tolist() == [0, 0, 0, 2, 2, 2] and second["trajectory"].tolist() == [1, 1, 3, 3, 5, 5]
    assert first["next", "is_second"].flatten().tolist() == [0, 1, 0] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_observations_and_actions_have_the_types_of_their_spaces(kind: str) -> None:
    space, actions = KINDS[kind]
    buffer = RecipeBuffer(10, space, actions, "cpu", n_envs=2, recipe="uniform")
    one: Any = {"a": np.ones((2, 1)), "b": np.array([3, 4])} if kind == "dictionary" else None
    one = {"plain": np.ones((2, 2)), "numbers": np.array([3, 4])}.get(kind, one)
    buffer.add(one, one, np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}, {}])
    drawn = buffer.sample(4)
    of = {"plain": torch.float32, "numbers": torch.int64}
    if kind == "dictionary":
        assert drawn.observations["a"].dtype is torch.float64 and drawn.observations["a"].shape == (4, 1)
        assert drawn.next_observations["b"].dtype is torch.int64 and drawn.next_observations["b"].shape == (4, 1)
    else:
        assert drawn.observations.dtype is of[kind]
        assert drawn.next_observations.shape == (4, 2 if kind == "plain" else 1)
    assert drawn.actions.dtype is (torch.float32 if kind == "numbers" else torch.int64)


def priorities(buffer: RecipeBuffer, index: torch.Tensor) -> list[float]:
    return buffer.replay.sampler.priority_of(index).tolist()


def test_dqn_steps_by_the_weighted_loss_and_returns_its_td_errors() -> None:
    """β = 1 and δ = 1, 2, ... make the weights differ; the step is compared with one that is worked out here."""
    of = {"importance_exponent": 1.0, "n_steps": 2, "discount": 0.9}
    policy = {"net_arch": [8], "optimizer_class": torch.optim.SGD}
    model = model_of(DQN, Count(last=5), steps=19, of=of, gamma=0.9, policy_kwargs=policy, max_grad_norm=1e9)
    buffer = model.replay_buffer
    buffer.replay.update_priority(torch.arange(19), 1.0 + torch.arange(19.0))
    before = [one.detach().clone() for one in model.q_net.parameters()]
    batches = batches_of(buffer)
    model.train(1, batch_size=16)

    (batch,) = batches
    assert batch["priority_weight"].unique().numel() > 3 and batch["discount"].unique().numel() == 3
    after = [one.detach().clone() for one in model.q_net.parameters()]
    with torch.no_grad():
        for one, value in zip(model.q_net.parameters(), before, strict=True):
            one.copy_(value)
        best = model.q_net_target(batch["next", "observation"]).max(1, keepdim=True).values
        target = batch["next", "reward"] + batch["discount"] * best
    current = model.q_net(batch["observation"]).gather(1, batch["action"])
    rows = functional.smooth_l1_loss(current, target, reduction="none")
    gradients = torch.autograd.grad((batch["priority_weight"] * rows[:, 0]).mean(), [*model.q_net.parameters()])
    for value, gradient, found in zip(before, gradients, after, strict=True):
        torch.testing.assert_close(found, value - 1e-4 * gradient)

    buffer.sample(1)  # before which the TD errors are returned
    errors = (target - current).detach().abs().flatten()
    last = {int(slot): float(error) for slot, error in zip(batch["index"], errors, strict=True)}
    assert priorities(buffer, torch.tensor([*last])) == pytest.approx([*last.values()], rel=1e-5)


@pytest.mark.parametrize(("kind", "factor"), [(TD3, 1.0), (SAC, 0.5)])
def test_the_critics_of_continuous_actions_are_weighted_and_the_larger_error_returned(kind: Any, factor: float) -> None:
    noise = {"target_policy_noise": 0.0} if kind is TD3 else {"ent_coef": 0.0}
    actions = spaces.Box(-1, 1, (1,), np.float32)
    model = model_of(kind, Count(actions, last=1), steps=12, of={"importance_exponent": 1.0}, **noise)
    buffer = model.replay_buffer
    buffer.replay.update_priority(torch.arange(12), 1.0 + torch.arange(12.0))
    critic = kind("MlpPolicy", Count(actions), policy_kwargs={"net_arch": [8]}, device="cpu").critic
    critic.load_state_dict(model.critic.state_dict())
    batches = batches_of(buffer)
    model.train(1, batch_size=8)
    (batch,) = batches
    with torch.no_grad():  # every episode is one step, so that the target is the reward
        errors = torch.cat([batch["next", "reward"] - one for one in critic(batch["observation"], batch["action"])], 1)
    loss = factor * (batch["priority_weight"][:, None] * errors.square()).mean(0).sum()
    assert model.logger.name_to_value["train/critic_loss"] == pytest.approx(loss.item(), rel=1e-5)
    buffer.add(np.zeros((1, 2)), np.ones((1, 2)), np.zeros((1, 1)), np.zeros(1), np.ones(1), [{}])
    last = dict(zip(batch["index"].tolist(), errors.abs().amax(1).tolist(), strict=True))
    assert priorities(buffer, torch.tensor([*last])) == pytest.approx([*last.values()], rel=1e-5)


def test_a_recipe_without_feedback_leaves_the_batch_as_it_is() -> None:
    model = model_of(DQN, Count(), steps=12, of={"recipe": "uniform"})
    assert type(model.replay_buffer.sample(4).rewards) is torch.Tensor
    model.train(2, batch_size=4)


def test_weights_of_event_tables_reach_the_loss() -> None:
    table = events.EventTable("second", condition=events.info_key("is_second"), history_length=1, capacity=8)
    of = {"recipe": "event_tables", "tables": [table], "info_keys": ["is_second"], "correction": "mixture"}
    model = model_of(DQN, Count(), steps=30, of=of | {"batch_size": 4})
    batches = batches_of(model.replay_buffer)
    model.train(1, batch_size=8)
    (batch,) = batches
    assert (batch["table"] == 1).sum() == 4 and batch["priority_weight"].unique().numel() == 2
    assert model.replay_buffer.replay.stats()["tables"]["second"]["size"] == 8


@pytest.mark.parametrize("clock", ["env_steps", "updates"])
def test_schedules_follow_steps_of_all_environments_and_updates(clock: Any) -> None:
    """Half of the way after 20 steps of two environments, or 5 updates: β = 0.5."""
    of = {"importance_exponent": Linear(0.0, 1.0, 40 if clock == "env_steps" else 10, clock=clock)}
    model = model_of(DQN, DummyVecEnv([Count, Count]), steps=20, of=of | {"priority_exponent": 1.0})
    model.train(5, batch_size=4)
    buffer = model.replay_buffer
    pickle.dumps(buffer)  # The errors of the last update are returned before a save.
    buffer.replay.update_priority(torch.arange(20), torch.tensor([1.0, 4.0] * 10))
    batches = batches_of(buffer)
    buffer.sample(8)
    assert sorted({*batches[0]["priority_weight"].tolist()}) == pytest.approx([0.5, 1.0], abs=1e-5)


def test_observations_and_rewards_are_normalised_at_the_draw() -> None:
    model = model_of(TD3, VecNormalize(DummyVecEnv([partial(Count, PLANE)] * 2)), steps=40)
    envs, rows = model.get_vec_normalize_env(), model.replay_buffer.replay[:]
    assert sorted(set(rows["observation"][:, 0].tolist())) == [0, 1, 2]  # as they were seen
    assert sorted(set(rows["next", "observation"][:, 0].tolist())) == [1, 2, 3]
    batches = batches_of(model.replay_buffer)
    drawn = model.replay_buffer.sample(8, env=envs)
    (batch,) = batches
    assert drawn.observations.tolist() == envs.normalize_obs(batch["observation"].numpy()).tolist()
    assert drawn.rewards.tolist() == envs.normalize_reward(batch["next", "reward"].numpy()).tolist()


def test_stacks_are_stored_as_frames() -> None:
    envs = VecFrameStack(DummyVecEnv([partial(Count, shape=(1, 6, 6))] * 2), 4, channels_order="first")
    model = model_of(DQN, envs, steps=24, of={"frame_stack": 4, "image_key": "observation"})
    rows = model.replay_buffer.replay[:]
    assert rows["next", "observation"][:6:2, :, 0, 0].tolist() == [[0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3]]
    assert model.replay_buffer.replay.stats()["frames_held"] < 2 * 24


@pytest.mark.parametrize("recipe", ["prioritized", "uniform", "event_tables", "surprise_retention"])
def test_a_loaded_buffer_draws_the_same(recipe: str, tmp_path: Path) -> None:
    tables = [events.EventTable("goal", condition=events.reward_at_least(3.0), history_length=2, capacity=8)]
    of: dict[str, Any] = {"recipe": recipe} | ({"tables": tables, "batch_size": 4} if recipe == "event_tables" else {})
    model = model_of(DQN, DummyVecEnv([Count, Count]), steps=60, of=of, learning_starts=20)
    pending = model.replay_buffer._drawn  # of the last update
    assert pending is None if recipe in ("uniform", "event_tables") else pending.errors
    model.save_replay_buffer(tmp_path / "replay.pkl")
    other = model_of(DQN, DummyVecEnv([Count, Count]), of=of)
    other.load_replay_buffer(tmp_path / "replay.pkl")
    one, two = model.replay_buffer, other.replay_buffer
    for _ in range(3):
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b))
            for a, b in zip(one.sample(8)[:5], two.sample(8)[:5], strict=True)
        )
    assert one.size() == two.size()
    if recipe == "prioritized":
        assert priorities(one, torch.arange(60)) == priorities(two, torch.arange(60)) != [1.0] * 60
        clocks = [each.replay.sampler.state_dict()["clocks"] for each in (one, two)]
        assert clocks[0] == clocks[1] and clocks[0]["env_steps"] == 60 and clocks[0]["updates"] > 0
    other.learn(10)


def test_the_model_itself_is_saved_with_its_recipe(tmp_path: Path) -> None:
    model_of(DQN, Count(), of={"priority_exponent": 0.9}).save(tmp_path / "model")
    buffer = DQN.load(tmp_path / "model", env=Count()).replay_buffer
    assert isinstance(buffer, RecipeBuffer) and buffer.replay.sampler.priority_exponent == 0.9


LATE = events.EventTable("late", condition=events.reward_at_least(3.0), history_length=2, capacity=8)


def of_tasks(capacity: int) -> Any:
    return recipes.parallel_curriculum(["a", "b"], capacity // 2)


CAMERA = spaces.Box(0, 255, (4, 6, 6), np.uint8)


def buffer(space: spaces.Space[Any] = PLANE, **options: Any) -> RecipeBuffer:
    return RecipeBuffer(32, space, LEVER, "cpu", **options)


@pytest.mark.parametrize(
    "one",
    [
        advice(
            "a flag",
            lambda: buffer(handle_timeout_termination="no"),
            "handle_timeout_termination is 'no'; it must be True or False",
            lambda: buffer(handle_timeout_termination=False),
        ),
        advice(
            "returns",
            lambda: buffer(n_steps=3),
            "n_steps is 3; give the gamma of the model with it, discount=0.99",
            lambda: buffer(n_steps=3, discount=0.99),
        ),
        advice(
            "sequences",
            lambda: buffer(recipe="sequences", length=4),
            "recipe is 'sequences', of sequences or tasks, .*; use a recipe of rows, such as 'event_tables'",
            lambda: buffer(recipe="event_tables", tables=[LATE]),
        ),
        advice("tasks", lambda: buffer(recipe="parallel_curriculum", tasks=["a"]), "of sequences or tasks"),
        advice("tasks by a function", lambda: buffer(recipe=of_tasks), "recipe is <function of_tasks .* or tasks"),
        advice("a name", lambda: buffer(recipe="prioritised"), "Did you mean 'prioritized'", buffer),
        advice(
            "a number",
            lambda: buffer(recipe=4),  # type: ignore[arg-type]
            "recipe is 4; it must be the name of a recipe, or a function that returns a replay",
            lambda: buffer(recipe=recipes.uniform),
        ),
        advice(
            "another option",
            lambda: buffer(alpha=0.6),
            "prioritized has no argument 'alpha'; accepted are .*priority_exponent",
            lambda: buffer(priority_exponent=0.6),
        ),
        advice("a column", lambda: buffer(info_keys=["done"]), "are columns already"),
    ],
)
def test_what_it_cannot_do_is_refused_and_the_advice_works(one: Advice) -> None:
    assert_leads_on(one)


def test_an_info_that_lacks_a_key_is_refused_and_nothing_stored() -> None:
    with pytest.raises(ValueError, match=r"info_keys has 'solved', an info has \['lives'\]; put the key into every"):
        buffer = RecipeBuffer(16, PLANE, LEVER, "cpu", info_keys=["solved"])
        one = np.zeros((1, 2))
        buffer.add(one, one, np.zeros(1), np.zeros(1), np.zeros(1), [{"lives": 3}])
    assert len(buffer.replay) == 0 and buffer.size() == 0


def given(num_envs: int = 3, **others: Any) -> dict[str, Any]:
    """A step of each environment, as arguments of ``add``."""
    seen = np.arange(num_envs * 2, dtype=np.float32).reshape(num_envs, 2)
    step = {"obs": seen, "next_obs": seen + 1, "action": np.zeros(num_envs, np.int64), "reward": np.ones(num_envs)}
    return step | {"done": np.zeros(num_envs), "infos": [{}] * num_envs} | others


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("reward", [(3, 0), (0,), (3, 2), (1, 3), ()]),
        ("done", [(3, 0), (0,), (3, 2), (1, 3), ()]),
        ("action", [(3, 0), (0,), (3, 2), (1, 3), ()]),
        ("obs", [(2, 3), (2,), (1, 2), (3, 3)]),
        ("next_obs", [(2, 3), (2,), (1, 2), (3, 3)]),
    ],
)
def test_a_step_is_of_each_environment(name: str, shapes: list[tuple[int, ...]]) -> None:
    buffer = RecipeBuffer(30, PLANE, LEVER, "cpu", n_envs=3, recipe="uniform")
    for stored in 0, 3:
        for shape in shapes:
            with pytest.raises(ValueError, match=rf"{name} has the shape .* an array of each of 3 env.* Nothing was"):
                buffer.add(**given(**{name: np.zeros(shape)}))
            assert (len(buffer.replay), buffer.size()) == (stored, stored // 3)
        buffer.add(**given())


@pytest.mark.parametrize("infos", [[], [{}], [{}] * 4, None, 3], ids=str)
def test_infos_are_of_each_environment(infos: Any) -> None:
    buffer = RecipeBuffer(30, PLANE, LEVER, "cpu", n_envs=3, recipe="uniform")
    with pytest.raises(
        ValueError, match=r"infos is a .*, and the buffer is of 3 environments; give a list of the info of each.*vector"
    ):
        buffer.add(**given(infos=infos))
    assert len(buffer.replay) == 0
    buffer.add(**given())
    assert buffer.sample(4).dones.shape == (4, 1)


def ended_vector(name: str, last: Any, *, has_flags: bool = True, **more: Any) -> dict[str, Any]:
    """Infos of a vector of three environments, of which the second and the third ended."""
    flags = {f"_{name}": np.array([False, True, True])} if has_flags else {}
    return {name: last, **flags, **more}


def of_objects(*rows: Any) -> np.ndarray:
    objects = np.full(len(rows), None, dtype=object)
    for place, row in enumerate(rows):
        objects[place] = row
    return objects


LAST = [None, np.array([50.0, 51.0]), np.array([60.0, 61.0])]


@pytest.mark.parametrize(
    "infos",
    [
        ended_vector("final_obs", of_objects(*LAST)),
        ended_vector("final_observation", of_objects(*LAST)),
        ended_vector("final_observation", of_objects(*LAST), has_flags=False),
        ended_vector("final_obs", np.array([[0.0, 0.0], [50.0, 51.0], [60.0, 61.0]])),
    ],
    ids=["Gymnasium 1", "Gymnasium 0.29", "without flags", "arrays"],
)
def test_last_observations_of_a_vector_replace_the_next_ones(infos: dict[str, Any]) -> None:
    """The second environment terminated, and the third was cut: its script passes terminations alone."""
    buffer = RecipeBuffer(30, PLANE, LEVER, "cpu", n_envs=3, recipe="uniform", handle_timeout_termination=False)
    given_next = given()["next_obs"].copy()
    step = given(done=np.array([False, True, False]), infos=infos)
    buffer.add(**step)
    assert (step["next_obs"] == given_next).all()  # what the caller owns stays
    buffer.add(**given(infos={}))
    rows = buffer.replay[:]
    assert rows["next", "observation"][:3].tolist() == [[1, 2], [50, 51], [60, 61]]
    assert rows["next", "terminated"][:3].flatten().tolist() == [False, True, False]
    assert rows["next", "truncated"][:3].flatten().tolist() == [False, False, True]
    assert rows["trajectory"].tolist() == [0, 1, 2, 0, 4, 5]


def test_last_observations_of_dictionaries_are_read_by_their_entries() -> None:
    space = spaces.Dict({"a": spaces.Box(-99, 99, (1,)), "b": spaces.Discrete(9)})
    buffer = RecipeBuffer(30, space, LEVER, "cpu", n_envs=3, recipe="uniform")
    one = {"a": np.zeros((3, 1)), "b": np.zeros(3)}
    last = of_objects(None, {"b": 4, "a": np.array([7.0])}, {"b": 5, "a": np.array([8.0])})
    step = given(obs=one, next_obs=one)
    buffer.add(**step | {"infos": ended_vector("final_obs", last)})
    arrays = {"a": np.array([[0.0], [7.0], [8.0]]), "b": np.array([0, 4, 5])}
    buffer.add(**step | {"infos": ended_vector("final_obs", arrays)})
    rows = buffer.replay[:]["next", "observation"]
    assert rows["a"].flatten().tolist() == [0, 7, 8] * 2 and rows["b"].flatten().tolist() == [0, 4, 5] * 2


@pytest.mark.parametrize("handles", [True, False])
@pytest.mark.parametrize("of_vector", [True, False])
def test_dones_are_those_of_their_buffer(handles: bool, of_vector: bool) -> None:
    """Theirs are ``dones * (1 - timeouts)``, and ``dones`` if time limits are not handled."""
    late = [False, False, True]
    infos: Any = [{"TimeLimit.truncated": one} for one in late]
    ours = RecipeBuffer(3, PLANE, LEVER, "cpu", 3, handle_timeout_termination=handles, recipe="uniform", seed=0)
    theirs = [ReplayBuffer(1, PLANE, LEVER, "cpu", handle_timeout_termination=handles) for _ in late]
    step = given(done=np.array([False, True, True]))
    ours.add(**step | {"infos": {"TimeLimit.truncated": np.array(late)} if of_vector else infos})
    for place, one in enumerate(theirs):
        rows = {name: value[place : place + 1] for name, value in step.items()}
        one.add(**rows | {"infos": infos[place : place + 1]})
    drawn = ours.sample(32)
    by_row = {int(first) // 2: done.item() for first, done in zip(drawn.observations[:, 0], drawn.dones, strict=True)}
    assert [by_row[place] for place in range(3)] == [one.sample(1).dones.item() for one in theirs]


def test_flags_of_another_number_of_environments_are_refused() -> None:
    buffer = RecipeBuffer(30, PLANE, LEVER, "cpu", n_envs=2, recipe="uniform")
    with pytest.raises(ValueError, match=r"infos\['_final_obs'\] has the shape \[3\]; give an array of each of 2"):
        buffer.add(**given(2, infos=ended_vector("final_obs", of_objects(*LAST))))
    assert len(buffer.replay) == 0


def test_infos_of_a_vector_have_columns() -> None:
    buffer = RecipeBuffer(30, PLANE, LEVER, "cpu", n_envs=3, recipe="uniform", info_keys=["lives"])
    buffer.add(**given(infos={"lives": np.array([3, 2, 1]), "_lives": np.ones(3, dtype=np.bool_)}))
    assert buffer.replay[:]["next", "lives"].flatten().tolist() == [3, 2, 1]
    with pytest.raises(ValueError, match=r"info_keys has 'lives', an info has \['_lives'\]; put the key into every"):
        buffer.add(**given(infos={"_lives": np.zeros(3)}))


def test_memory_is_saved_by_storing_observations_once() -> None:
    wide = spaces.Box(-99, 99, (64,), np.float32)
    buffers = [RecipeBuffer(64, wide, LEVER, "cpu", optimize_memory_usage=one, seed=0) for one in (False, True)]
    for time in range(80):
        here, there = np.full((1, 64), time), np.full((1, 64), time + 1)
        for one in buffers:
            one.add(here, there, np.array([time % 2]), np.ones(1), np.array([time % 7 == 6]), [{}])
    drawn = [one.sample(16) for one in buffers]
    assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(*(one[:5] for one in drawn), strict=True))
    assert buffers[1].replay.nbytes < buffers[0].replay.nbytes
    framed = RecipeBuffer(64, CAMERA, LEVER, "cpu", optimize_memory_usage=True, frame_stack=4, image_key="observation")
    assert framed.replay.storage.stores_frames


def test_a_model_that_saves_memory_trains_twice() -> None:
    model = model_of(DQN, Count(last=9), steps=15, learning_starts=8, optimize_memory_usage=True)
    with pytest.warns(UserWarning, match="The last trajectory in the replay buffer will be truncated"):
        model.learn(10)
    rows = model.replay_buffer.replay[:]
    assert rows["observation"][:, 0].tolist() == [*range(9), *range(6), *range(9), 0]
    assert rows["next", "observation"][:, 0].tolist() == [*range(1, 10), *range(1, 7), *range(1, 10), 1]


@pytest.mark.parametrize("name", ["obs", "next_obs", "reward"])
def test_a_row_that_is_refused_is_refused_at_its_step_and_alone(name: str) -> None:
    buffer = RecipeBuffer(300, PLANE, LEVER, "cpu", n_envs=3, recipe="uniform")
    for _ in range(4):
        buffer.add(**given())
    wrong = given()
    wrong[name] = np.full_like(wrong[name], np.nan, dtype=np.float32)
    with pytest.raises(ValueError, match="is nan in rows"):
        buffer.add(**wrong)
    huge = given(reward=np.full(3, 3e38))  # whose squares are infinite
    buffer.add(**huge)
    assert len(buffer.replay) == 15
    assert torch.equal(buffer.replay[:]["trajectory"], torch.tensor([0, 1, 2] * 5))


def test_a_kept_replay_has_every_step_at_once() -> None:
    buffer = filled(4)
    replay = buffer.replay
    assert len(replay) == 4
    here = np.zeros((1, 2))
    for count in range(5, 9):
        buffer.add(here, here, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
        assert len(replay) == count


def test_a_single_environment_may_leave_its_dimension_out() -> None:
    buffer = RecipeBuffer(30, PLANE, LEVER, "cpu", recipe="uniform")
    buffer.add(**given(1, obs=np.zeros(2), next_obs=np.ones(2), action=1, reward=2.0, done=True))
    rows = buffer.replay[:]
    assert rows["next", "reward"].tolist() == [[2.0]] and rows["next", "terminated"].tolist() == [[True]]
    assert rows["observation"].shape == (1, 2)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3)])
@pytest.mark.parametrize("capacity", [40, 12])
def test_a_loaded_buffer_goes_on_with_another_number_of_environments(
    before: int, after: int, capacity: int, tmp_path: Path
) -> None:
    """Steps of the new environments follow none that is stored, and the capacity stays."""
    of = {"recipe": "uniform", "n_steps": 2, "discount": 0.5}
    first = model_of(DQN, DummyVecEnv([Count] * before), steps=before * 5, buffer_size=capacity, of=of)
    second = model_of(DQN, DummyVecEnv([Count] * after), buffer_size=capacity, of=of)
    ran = first.replay_buffer.replay[:]["trajectory"].tolist()
    for model in first, second:  # saved again after it went on
        model.save_replay_buffer(tmp_path / "replay.pkl")
        stored = len(model.replay_buffer.replay)
        second.load_replay_buffer(tmp_path / "replay.pkl")
        assert len(second.replay_buffer.replay) == stored
        second.learn(after * 4)
    buffer = second.replay_buffer
    replay, rows = buffer.replay, buffer.replay[:]
    assert replay.capacity == capacity // before * before
    assert len(rows) == min(before * 5 + after * 8, replay.capacity)
    assert buffer.size() == len(rows) // after and buffer.n_envs == after
    assert (rows["next", "observation"] == rows["observation"] + 1).all()
    linked = replay.successors(torch.arange(len(rows)))
    follows = linked >= 0
    assert (rows["trajectory"][linked[follows]] == rows["trajectory"][follows]).all()
    assert (rows["observation"][linked[follows]] == rows["next", "observation"][follows]).all()
    for name in {*ran} & {*rows["trajectory"].tolist()}:
        assert rows["next", "done"][rows["trajectory"] == name].sum() == 1, "the episodes that ran are ended"
    with pytest.raises(ValueError, match=f"of {after} environments; give a list"):
        buffer.add(**given(before))


def test_a_reset_removes_the_online_rows_of_a_mixed_replay() -> None:
    model = model_of(DQN, Count(), steps=20, learning_starts=8, of={"recipe": half_offline})
    buffer = model.replay_buffer
    buffer.reset()
    assert (buffer.size(), len(buffer.replay.online), len(buffer.replay.offline)) == (0, 0, 8)
    assert buffer.sample(8).rewards.shape == (8, 1)  # all are offline
    model.learn(12, reset_num_timesteps=False)
    assert len(buffer.replay.online) == 12


def half_offline(capacity: int, seed: int) -> MixedReplay:
    offline = recipes.uniform(capacity=8, seed=1)
    offline.extend(model_of(DQN, Count(), steps=8, of={"recipe": "uniform"}).replay_buffer.replay[:].exclude("index"))
    return recipes.mixed(online=recipes.prioritized(capacity=capacity), offline=offline, seed=seed)


def test_half_of_a_batch_may_be_offline_rows(tmp_path: Path) -> None:
    model = model_of(DQN, Count(), steps=20, learning_starts=8, of={"recipe": half_offline})
    assert model.replay_buffer.sample(8).rewards.shape == (8, 1)
    model.save_replay_buffer(tmp_path / "replay.pkl")
    before = model.replay_buffer.sample(8).observations
    model.load_replay_buffer(tmp_path / "replay.pkl")
    assert torch.equal(model.replay_buffer.sample(8).observations, before)


def test_without_a_recipe_another_loss_is_reported_once_and_draws_stay_uniform() -> None:
    with pytest.warns(UserWarning, match="neither weights nor TD errors. Draws are uniform until such a loss") as found:
        model = model_of(OtherLoss, Count(), steps=20, learning_starts=4)
    assert len([one for one in found if "TD errors" in str(one.message)]) == 1
    buffer = model.replay_buffer
    assert priorities(buffer, torch.arange(20)) == pytest.approx([1.0] * 20)
    drawn = buffer.sample(8)
    functional.mse_loss(torch.zeros(8, 1), drawn.rewards + 1.0)  # TD errors of such a loss count from now on
    buffer.sample(8)
    assert buffer.replay.stats()["priorities_updated"] == 8


class OtherLoss(DQN):
    """An algorithm whose loss is neither of the two that are weighted."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        for _ in range(gradient_steps):
            drawn = self.replay_buffer.sample(batch_size)
            target = drawn.rewards + 0.9 * self.q_net_target(drawn.next_observations).max(1, keepdim=True).values
            functional.l1_loss(self.q_net(drawn.observations).gather(1, drawn.actions), target.detach()).backward()


def test_an_algorithm_with_another_loss_is_refused_unless_it_needs_no_feedback() -> None:
    with pytest.raises(RuntimeError, match="no mse_loss or smooth_l1_loss of all rows.*or recipe='uniform'"):
        model_of(OtherLoss, Count(), steps=20, learning_starts=4, of={"recipe": "prioritized"})
    model_of(OtherLoss, Count(), steps=20, learning_starts=4, of={"recipe": "uniform"})
    buffer = filled(recipe="prioritized")
    for _ in range(3):  # as the error advises
        buffer.replay.sample()
    buffer.sample(4)


@pytest.mark.parametrize("draws_first", [True, False])
def test_a_replay_that_was_loaded_brings_its_clocks_and_its_size(draws_first: bool, tmp_path: Path) -> None:
    of = {"importance_exponent": Linear(0.0, 1.0, 10, clock="env_steps"), "age": {"half_life": 3, "clock": "updates"}}
    one, two = filled(8, **of), filled(0, **of)
    for _ in range(3):
        functional.mse_loss(torch.zeros(4, 1), one.sample(4).rewards)
    one.add(**given(1))
    one.replay.save(tmp_path)
    two.replay.load(tmp_path)
    for buffer in one, two:
        if draws_first:
            functional.mse_loss(torch.zeros(2, 1), buffer.sample(2).rewards)
        buffer.add(**given(1))
        buffer.sample(4)
        assert (buffer.size(), buffer.pos, buffer.full) == (10, 10, False)
    clocks = [buffer.replay.sampler.state_dict()["clocks"] for buffer in (one, two)]
    assert clocks[0] == clocks[1] and clocks[0]["env_steps"] == 10


def test_a_full_replay_that_was_loaded_is_full(tmp_path: Path) -> None:
    one, two = filled(20, recipe="uniform"), filled(0, recipe="uniform")
    one.replay.save(tmp_path)
    two.replay.load(tmp_path)
    assert (two.sample(4).rewards.shape, two.size(), two._env_steps) == ((4, 1), 16, 20)


def test_the_error_of_a_save_names_the_replay(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"replay is a RecipeBuffer.*Of a RecipeBuffer rb give rb\.replay"):
        save_replay(filled(), tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_reduction_is_weighted_and_returns_td_errors(reduction: str) -> None:
    buffer = filled(importance_exponent=1.0)
    buffer.replay.update_priority(torch.arange(8), 1.0 + torch.arange(8.0))
    batches = batches_of(buffer)
    loss = functional.mse_loss(torch.zeros(4, 1), buffer.sample(4).rewards + 1.0, reduction=reduction)
    rows = batches[0]["priority_weight"][:, None] * 4.0
    assert rows.unique().numel() > 1
    assert torch.allclose(loss, {"mean": rows.mean(), "sum": rows.sum(), "none": rows}[reduction])
    buffer.sample(1)
    assert priorities(buffer, batches[0]["index"]) == pytest.approx([2.0] * 4)


def test_a_row_with_several_values_has_the_largest_error() -> None:
    buffer = filled()
    batches = batches_of(buffer)
    functional.mse_loss(torch.tensor([[0.0, 3.0, 1.0]] * 4), buffer.sample(4).rewards.expand(4, 3))
    buffer.sample(1)
    assert priorities(buffer, batches[0]["index"]) == pytest.approx([2.0] * 4)


def test_a_loss_that_is_not_of_rows_is_left_as_it_is() -> None:
    buffer = filled()
    drawn = buffer.sample(4)
    loss = functional.mse_loss(torch.zeros(4, 1), drawn.rewards)
    loss = loss + functional.mse_loss(torch.tensor(3.0), drawn.rewards.mean())
    assert loss.item() == pytest.approx(5.0)
    buffer.add(**given(1))
    assert (buffer.size(), buffer.replay.stats()["priorities_updated"]) == (9, 4)


def test_a_loss_of_all_pairs_of_rows_is_refused_and_a_step_stored() -> None:
    buffer = filled()
    drawn = buffer.sample(4)
    with pytest.raises(ValueError, match=r"mse_loss is of the shapes \[4\] and \[4, 1\], .*; give both the same shape"):
        functional.mse_loss(torch.zeros(4), drawn.rewards)
    functional.mse_loss(torch.full((4, 1), torch.nan), drawn.rewards)
    with pytest.raises(ValueError, match="No priority was changed"):
        buffer.add(**given(1))
    assert buffer.size() == len(buffer.replay) == 9


def test_an_error_of_several_environments_names_the_option() -> None:
    with pytest.raises(ValueError, match=r"an array of each of 1 env.*\[1, 1\], or build the buffer with n_envs=3"):
        filled().add(**given(3, infos={}))
    buffer = RecipeBuffer(30, PLANE, LEVER, "cpu", n_envs=3)
    buffer.add(**given(3, infos={}))


def test_infos_in_a_list_are_of_vectors_that_reset_in_the_same_step() -> None:
    """An environment of one observation, whose resets look like rows that store a reset."""
    buffer = RecipeBuffer(30, PLANE, LEVER, "cpu", n_envs=3)
    same = np.zeros((3, 2))
    for done in (True, False):
        buffer.add(**given(3, obs=same, next_obs=same, reward=np.zeros(3), done=np.full(3, done)))
    assert len(buffer.replay) == 6


def test_the_replay_that_a_function_keeps_holds_every_step() -> None:
    kept = []

    def made(**options: Any) -> Any:
        kept.append(recipes.uniform(**options))
        return kept[-1]

    space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    buffer = RecipeBuffer(100, space, gymnasium.spaces.Discrete(2), recipe=made, handle_timeout_termination=False)
    flags, reward = np.zeros(1, bool), np.ones(1)
    for step in range(10):
        first, second = (np.full((1, 3), number / 20, np.float32) for number in (step, step + 1))
        buffer.add(first, second, np.ones(1), reward, flags, [{}])
    assert buffer.size() == len(kept[0]) == 10
    loaded = pickle.loads(pickle.dumps(RecipeBuffer(100, space, gymnasium.spaces.Discrete(2))))
    nothing = np.zeros((0, 3), np.float32)
    with pytest.raises(ValueError, match=r"has the shape \[0\].*Nothing was stored"):
        loaded.add(nothing, nothing, np.ones(0), np.ones(0), np.zeros(0, bool), [])
