# SPDX-License-Identifier: Apache-2.0
"""Tasks, infos and actions with parameters on their way from environments to rows."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from lightning_replay import recipes
from lightning_replay.lit import Evaluate, ReplayDataModule
from lightning_replay.lit.collection import Collection, InformationColumns, TaskAssignment
from lightning_replay.lit.rollouts import make_environments
from lightning_replay.schedulers import EasyToHard, Exp3, MeanReturn
from tests.unit.lit.toys import Counting, Tiny, make_replay, make_trainer

LENGTHS = {"target": 4, "middle": 3, "easy": 2}


class Tasked(Counting):
    """Counting whose task sets the length of the next episode; infos count, flag goals and note ends."""

    TASKS = ("easy", "middle", "target")  # not the order of the replay

    def __init__(self, task: str = "easy") -> None:
        super().__init__()
        self.task = task

    def reset(self, *, seed=None, options=None):
        self.length = LENGTHS[self.task]
        observation, _ = super().reset(seed=seed)
        return observation, {"count": -1}

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        info = {"count": self.count, "is_even": bool(self.count % 2 == 0)}
        return observation, reward, terminated, truncated, info | ({"end": np.bool_(True)} if terminated else {})


class Joined(gymnasium.Env):
    """Refuses what is not an action of its space; the reward is the parameter of the chosen action."""

    def __init__(self, as_dict: bool = False) -> None:
        parts = {"which": Discrete(2), "zero": Box(-1, 0, (1,)), "one": Box(5, 6, (2,))}
        self.action_space = Dict(list(parts.items())) if as_dict else Tuple(list(parts.values()))
        self.observation_space = Box(-1, 1, (3,))
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        which, *boxes = [action[key] for key in ("which", "zero", "one")] if isinstance(action, dict) else action
        self.count += 1
        return np.zeros(3, np.float32), float(boxes[which][-1]), self.count % 5 == 0, False, {}


class Moving:
    """Stands for a buffer with tasks: moves its actors on with every signal it gets."""

    tasks = ("target", "middle", "easy")

    def __init__(self) -> None:
        self.signals: list[tuple[str, float]] = []

    def progress(self, task: str, value: float) -> None:
        self.signals.append((task, value))

    def actor_tasks(self, num_actors: int) -> list[int]:
        return [(2 - len(self.signals) + actor) % 3 for actor in range(num_actors)]


def curriculum(**options):
    return recipes.parallel_curriculum(
        tasks=list(options.pop("tasks", LENGTHS)), capacity_per_task=400, batch_size=4, seed=0, **options
    )


def collect(environments, steps: int, *assigned, info_keys: tuple[str, ...] = ()):
    """Rows of so many steps of a vector of environments, and what collected them."""
    replay = make_replay()
    assignment = TaskAssignment(*assigned) if assigned else None
    collection = Collection(
        replay, lambda: environments, steps, 1_000, seed=0, assignment=assignment, info_keys=info_keys
    )
    collection.collect_until(steps, Tiny())
    return replay[:], collection


def test_a_task_holds_from_the_next_reset_on() -> None:
    # One environment; a signal at every episode's end moves it on, one episode late: its reset has already been.
    #   tasks told:   easy  easy    middle     target ...
    #   episodes:     easy  1-2 | easy 1-2 | middle 1-2-3 | target 1-2-3-4
    replay = Moving()
    replay.actor_tasks = lambda num_actors: [(2, 1, 0, 0, 0)[len(replay.signals)]]
    progress = MeanReturn(low=0.0, high=10.0, window=1, every=1)
    rows, _ = collect(make_environments(Tasked, {}, 1, asynchronous=False), 11, replay, progress)
    assert rows["task"].tolist() == [2, 2, 2, 2, 1, 1, 1, 0, 0, 0, 0]
    assert rows["task"].dtype == torch.int64
    assert rows["trajectory"].tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert rows["next", "done"].flatten().nonzero().flatten().tolist() == [1, 3, 6, 10]
    # returns 1 + 2, 1 + 2, 1 + 2 + 3 and 1 + 2 + 3 + 4, out of 10
    assert replay.signals == [("easy", 0.3), ("easy", 0.3), ("middle", 0.6), ("target", 1.0)]


def test_several_environments_play_their_own_tasks() -> None:
    environments = make_environments(Tasked, {}, 4, asynchronous=False)
    rows, _ = collect(environments, 48, curriculum(), None)
    assert rows["task"].reshape(12, 4)[0].tolist() == [0, 1, 2, 0]
    for task, length in enumerate(LENGTHS.values()):
        ends = rows["next", "done"].squeeze(-1)[rows["task"] == task].reshape(12, -1)
        assert ends.any(-1).nonzero().flatten().tolist() == list(range(length - 1, 12, length))


@pytest.mark.slow
def test_processes_of_their_own_play_the_same_tasks_for_an_agent_that_learns(tmp_path: Path) -> None:
    from lightning_replay.agents import MPDQN

    rows, weights = [], []
    for asynchronous in (False, True):
        torch.manual_seed(0)
        replay = curriculum(tasks=["target", "far", "near"], n_steps=2, discount=0.9, scheduler=Exp3())
        data = ReplayDataModule(
            "HalfField-1v0",
            replay,
            env_kwargs={"max_steps": 3, "time_outs_terminate": True},
            env_steps=60,
            warmup_steps=21,
            updates_per_env_step=1 / 3,
            num_envs=3,
            asynchronous=asynchronous,
            seed=0,
            progress=MeanReturn(low=0.0, high=5.0, every=1),
            info_keys=("ball_distance",),
        )
        agent = MPDQN(hidden_sizes=(8,), discount=0.9, exploration_start=0.3, exploration_noise=0.1)
        trainer = make_trainer(tmp_path)
        trainer.fit(agent, datamodule=data)
        assert trainer.global_step == 13
        rows.append(replay[:])
        weights.append(agent.value_network[0].weight.detach())
    for key in ("observation", "task", "trajectory", ("action", "parameters"), ("next", "ball_distance")):
        assert torch.equal(rows[0][key], rows[1][key]), key
    assert torch.equal(*weights)
    assert rows[1]["task"].tolist() == [0, 1, 2] * 20  # one for each actor
    assert rows[1]["next", "terminated"].flatten().tolist() == ([False] * 6 + [True] * 3) * 6 + [False] * 6


def test_the_assignment_and_the_progress_go_on_after_a_restore() -> None:
    environments = [make_environments(Tasked, {}, 3, asynchronous=False) for _ in range(2)]
    replay = Moving()
    # tasks 2, 0, 1 end twice, once, once: one signal, which moves all actors by one
    _, collection = collect(environments[0], 15, replay, MeanReturn(low=0.0, high=10.0, every=2))
    state = collection.state_dict()["tasks"]
    assert state["next"] == ["middle", "easy", "target"] and len(replay.signals) == 1
    other = TaskAssignment(Moving(), MeanReturn(low=0.0, high=10.0, every=2))
    other.load_state_dict(state)
    other.begin(environments[1])
    assert other.running.tolist() == [1, 2, 0]
    assert environments[1].get_attr("length") == (5, 5, 5)
    assert environments[1].get_attr("task") == ("middle", "easy", "target")
    assert other.state_dict() == state
    other.load_state_dict(state | {"next": ["target"]})  # saved with another number of environments
    other.begin(environments[1])
    assert other.running.tolist() == [2, 0, 1]


def test_infos_become_columns_also_of_the_last_step() -> None:
    # environments 0 and 1 play "easy" (2 steps) and "middle" (3); resets say count = -1, which no row may show
    class Apart(Tasked):
        def step(self, action):
            *rest, info = super().step(action)
            return *rest, info if self.length == 2 else {}

    replay = Moving()
    replay.actor_tasks = lambda num_actors: [2, 1]
    keys = ("count", "is_even", "end")
    rows, collection = collect(make_environments(Apart, {}, 2, asynchronous=False), 8, replay, None, info_keys=keys)
    first, second = rows[0::2], rows[1::2]
    assert first["next", "count"].tolist() == [[1.0], [2.0], [1.0], [2.0]]
    assert first["next", "is_even"].flatten().tolist() == first["next", "end"].flatten().tolist() == [0, 1, 0, 1]
    assert not any(second["next", key].any() for key in ("count", "is_even", "end"))  # its infos lack them
    assert all(rows["next", key].dtype == torch.float32 for key in ("count", "is_even", "end"))
    assert collection.state_dict()["missing_information"] == []


def test_an_info_never_seen_is_named_after_the_warm_up(tmp_path: Path) -> None:
    data = ReplayDataModule(Tasked, make_replay(), env_steps=60, warmup_steps=20, info_keys=("count", "gaol"))
    with pytest.raises(ValueError, match=r"info_keys has \['gaol'\].*seen were \['count', 'end', 'is_even'\]"):
        make_trainer(tmp_path).fit(Tiny(), datamodule=data)
    assert data.env_steps_done == 20 + 1


def test_an_info_of_resets_alone_is_never_seen() -> None:
    # an environment whose every step ends an episode: beside each last step's info stands the next reset's
    reset = {"maze": np.array([3.0]), "_maze": np.array([True]), "walls": np.ones((1, 2)), "_walls": np.array([True])}
    step = {"goal": np.array([True]), "_goal": np.array([True])}
    information = InformationColumns(("maze", "walls"))
    columns = information.read(reset | {"final_info": step, "_final_info": np.array([True])}, np.array([True]))
    assert columns["maze"].tolist() == columns["walls"].tolist() == [0.0]
    with pytest.raises(ValueError, match=r"info_keys has \['maze', 'walls'\].*seen were \['goal'\]"):
        information.check()


@pytest.mark.parametrize("keys", [("goal", "goal"), ("reward",), ("",)])
def test_info_keys_must_be_names(keys) -> None:
    with pytest.raises(ValueError, match="info_keys is .* give names of infos, each once"):
        InformationColumns(keys)


@pytest.mark.parametrize("value", ["goal", "1.0", 1 + 2j, np.zeros(2), {"distance": 1.0}])
def test_infos_must_be_numbers(value) -> None:
    class Odd(Counting):
        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"odd": value}

    environments = make_environments(Odd, {}, 3, asynchronous=False)
    with pytest.raises(ValueError, match="info 'odd' holds .* one number or flag"):
        collect(environments, 3, info_keys=("odd",))


@pytest.mark.parametrize("as_dict", [False, True])
def test_parameterized_actions_are_stored_joined_and_played_apart(as_dict: bool, tmp_path: Path) -> None:
    from lightning_replay.agents import MPDQN

    replay = make_replay()
    options = {"env_steps": 90, "warmup_steps": 60, "num_envs": 3, "env_kwargs": {"as_dict": as_dict}, "seed": 0}
    data = ReplayDataModule(Joined, replay, **options)
    agent = MPDQN(hidden_sizes=(8,), exploration_start=0.5)
    trainer = make_trainer(tmp_path, [Evaluate(every_n_env_steps=30, episodes=1)])
    trainer.fit(agent, datamodule=data)
    assert trainer.global_step == 30 and agent.hparams["parameter_sizes"] == [1, 2]
    rows = replay[:]
    discrete, parameters = rows["action", "discrete"], rows["action", "parameters"]
    assert discrete.dtype == torch.int64 and parameters.shape == (90, 3) and parameters.dtype == torch.float32
    assert discrete[:60].float().mean().item() == pytest.approx(0.5, abs=0.2)
    torch.testing.assert_close(
        rows["next", "reward"].flatten(), torch.where(discrete == 0, parameters[:, 0], parameters[:, 2])
    )
    assert trainer.callback_metrics["eval/return"] != 0
    (batch,) = trainer.validate(agent, datamodule=data, verbose=False)
    assert batch["eval/return"] != 0


def test_evaluation_plays_the_first_task_unless_told_another() -> None:
    options = {"replay": curriculum(), "env_steps": 60, "warmup_steps": 20}
    environment = ReplayDataModule(Tasked, **options).make_environment()
    assert environment.get_wrapper_attr("task") == "target"
    environment = ReplayDataModule(Tasked, **options, env_kwargs={"task": "middle"}).make_environment()
    assert environment.get_wrapper_attr("task") == "middle"


class Ignorant(Tasked):
    TASKS = ("easy", "middle")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Counting, r"the replay has the tasks \['target', 'middle', 'easy'\], but .* has no TASKS"),
        (Ignorant, r"the replay has the tasks \['target'\], which .* does not have; it has \['easy', 'middle'\]"),
    ],
)
def test_environments_that_cannot_play_the_tasks_are_refused_before_anything_is_collected(
    environment, message: str, tmp_path: Path
) -> None:
    data = ReplayDataModule(environment, curriculum(), env_steps=60, warmup_steps=20)
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path).fit(Tiny(), datamodule=data)
    assert data.env_steps_done == 0


def test_progress_needs_tasks() -> None:
    progress = MeanReturn(low=0.0, high=1.0)
    with pytest.raises(ValueError, match="progress is MeanReturn, but the replay has no tasks"):
        ReplayDataModule(Tasked, make_replay(), env_steps=60, warmup_steps=20, progress=progress)


def test_stages_advance_through_the_returns_of_the_episodes(tmp_path: Path) -> None:
    # "easy" returns 3 and "middle" 6, both at or above the 2.4 of 3 that a stage requires
    scheduler = EasyToHard(order=["easy", "middle", "target"], advance_at=0.8)
    replay = curriculum(scheduler=scheduler)
    options = {"num_envs": 2, "progress": MeanReturn(low=0.0, high=3.0, window=4, every=4)}
    data = ReplayDataModule(Tasked, replay, env_steps=120, warmup_steps=20, **options)
    make_trainer(tmp_path).fit(Tiny(), datamodule=data)
    assert torch.unique_consecutive(replay[:]["task"][0::2]).tolist() == [2, 1, 0]
