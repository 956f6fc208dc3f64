# SPDX-License-Identifier: Apache-2.0
"""Training on rows that are there, without environment, and from there online without a warm-up."""

from __future__ import annotations

import csv
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import recipes
from lightning_replay.agents import CQL, DQN, IQL, MPDQN, SAC, TD3, RecurrentDQN
from lightning_replay.datasets import fill
from lightning_replay.lit import (
    Evaluate,
    InspectBuffer,
    LearningCurve,
    LogReplayStats,
    ReplayCheckpoint,
    ReplayDataModule,
    ReplayProgressBar,
)
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler
from lightning_replay.schedules import Linear
from lightning_replay.storage import PackedStorage
from tests.unit.lit.toys import Counting, Tiny, make_replay, make_trainer


def demonstrations(episodes: int = 8, length: int = 5, **columns: Any) -> TensorDict:
    """Rows of ``Counting``, as its data module stores them."""
    count = episodes * length
    place = torch.arange(count) % length
    episode = torch.arange(count) // length
    observation = torch.stack([100.0 + episode, place.float()], 1)
    ended = (place == length - 1)[:, None]
    following = {"observation": observation + torch.tensor([0.0, 1.0]), "reward": 1.0 + place[:, None]}
    following |= {"terminated": ended, "truncated": torch.zeros_like(ended), "done": ended}
    rows = {"observation": observation, "action": torch.full((count, 1), 0.5), "trajectory": episode}
    return TensorDict(rows | {"next": following} | columns, [count])


def filled(prioritized: bool = False, rows: TensorDict | None = None) -> Replay:
    return fill(make_replay(prioritized), demonstrations() if rows is None else rows)


def offline(replay: Replay | None = None, updates: int = 30, **options: Any) -> ReplayDataModule:
    return ReplayDataModule(replay=filled() if replay is None else replay, updates=updates, seed=0, **options)


def test_a_run_without_environment_counts_updates(tmp_path: Path) -> None:
    data, agent = offline(updates_per_epoch=8), Tiny()
    before = data.replay.storage.get(slice(0, 40)).clone()
    logger = CSVLogger(tmp_path)
    callbacks = [LogReplayStats(every_n_updates=10), ReplayProgressBar(), LearningCurve(), InspectBuffer(10)]
    trainer = make_trainer(tmp_path, callbacks, logger=logger, enable_progress_bar=True)
    trainer.fit(agent, datamodule=data)
    assert data.updates_done == len(agent.seen) == 30 and data.env_steps_done == 0 and not agent.modes
    assert trainer.current_epoch == 4 and data.is_finished  # 8, 8, 8 and 6
    assert (data.replay.storage.get(slice(0, 40)) == before).all() and len(data.replay) == 40
    with Path(logger.log_dir, "metrics.csv").open() as file:
        records = list(csv.DictReader(file))
    assert [(int(row["step"]), int(row["updates"])) for row in records[::2]] == [(10, 10), (20, 20), (30, 30)]
    assert "ReplayDataModule(None, 30 of 30 updates, " in repr(data)
    with pytest.warns(UserWarning, match="all 30 updates are done.*Give a larger updates"):
        make_trainer(tmp_path).fit(agent, datamodule=data)


def test_schedules_and_priorities_follow_the_updates(tmp_path: Path) -> None:
    sampler = PrioritizedSampler(capacity=40, importance_exponent=Linear(0.0, 1.0, 40, clock="updates"), seed=0)
    replay = fill(Replay(storage=PackedStorage(40), sampler=sampler, batch_size=4), demonstrations())
    make_trainer(tmp_path).fit(Tiny(), datamodule=offline(replay, 21))
    assert sampler.beta == pytest.approx(20 / 40)
    assert not replay.awaits_priorities and len({*sampler.priority_of(torch.arange(40)).tolist()}) > 10


class Collects(Tiny):
    """Collects by itself, and counts its environment steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        self.trainer.datamodule.replay.advance(env_steps=100 * (batch_idx + 1))
        return outputs


@pytest.mark.parametrize("kind", ["alone", "online", "offline"])
def test_schedules_follow_the_environment_steps_that_the_agent_counts(tmp_path: Path, kind: str) -> None:
    schedule = Linear(0.0, 1.0, 1_000, clock="env_steps")
    sampler = PrioritizedSampler(capacity=40, importance_exponent=schedule, seed=0)
    replay: Any = fill(Replay(storage=PackedStorage(40), sampler=sampler, batch_size=4), demonstrations())
    if kind != "alone":
        sides = {"online": filled(), "offline": filled()} | {kind: replay}
        replay = recipes.mixed(**sides, batch_size=4)
    betas = []
    draw = sampler.sample

    def watched(*given: Any) -> Any:
        betas.append(sampler.beta)
        return draw(*given)

    sampler.sample = watched  # type: ignore[method-assign]
    make_trainer(tmp_path).fit(Collects(), datamodule=offline(replay, 6))
    assert betas == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_the_share_of_mixed_rows_follows_the_updates(tmp_path: Path) -> None:
    schedule = Linear(1.0, 0.0, 40, clock="updates")
    replay = recipes.neighborhood_mixup(capacity=40, batch_size=4, num_neighbors=3, fraction=schedule, seed=0)
    (mixing,) = replay.transform
    make_trainer(tmp_path).fit(Tiny(), datamodule=offline(fill(replay, demonstrations()), 21))
    assert mixing.fraction == pytest.approx(1 - 20 / 40)


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_resumed_run_is_that_of_an_unbroken_one(tmp_path: Path, prioritized: bool) -> None:
    whole = Tiny()
    make_trainer(tmp_path / "a").fit(whole, datamodule=offline(filled(prioritized)))
    first, second = Tiny(), Tiny()
    folder = {"dirpath": tmp_path / "b", "monitor": None}
    make_trainer(tmp_path / "b", [ReplayCheckpoint(**folder)]).fit(first, datamodule=offline(filled(prioritized), 13))
    trainer = make_trainer(tmp_path / "b", [ReplayCheckpoint(**folder)])
    data = offline(make_replay(prioritized))  # the rows are those of the checkpoint
    trainer.fit(second, datamodule=data, ckpt_path="last")
    assert first.seen + second.seen == whole.seen and data.updates_done == 30
    assert torch.equal(second.weight, whole.weight) and not torch.equal(first.weight, whole.weight)


def test_a_run_that_goes_on_with_its_callback_replaces_its_checkpoint(tmp_path: Path) -> None:
    data, checkpoint = offline(), ReplayCheckpoint(tmp_path, monitor=None)
    for _ in range(2):
        make_trainer(tmp_path, [checkpoint], max_steps=10).fit(Tiny(), datamodule=data)
    assert [path.name for path in tmp_path.glob("last*.ckpt")] == ["last.ckpt"] and data.updates_done == 20


def test_an_environment_beside_updates_is_for_evaluation_alone(tmp_path: Path) -> None:
    evaluate, agent = Evaluate(every_n_env_steps=10, episodes=1), Tiny()
    data = offline(env=Counting, updates=25, evaluation_episodes=2)
    trainer = make_trainer(tmp_path, [evaluate, ReplayCheckpoint(tmp_path)])
    trainer.fit(agent, datamodule=data)
    assert [step for step, _ in evaluate.history] == [0, 10, 20, 25]
    assert data.env_steps_done == 0 and len(data.replay) == 40
    assert trainer.callback_metrics["eval/return"] == 15 and (tmp_path / "best.ckpt").exists()
    (found,) = trainer.validate(agent, datamodule=data, verbose=False)
    assert found["eval/return"] == 15
    again = Evaluate(every_n_env_steps=10, episodes=1)
    resumed = offline(make_replay(), env=Counting, updates=40)
    make_trainer(tmp_path, [again, ReplayCheckpoint(tmp_path)]).fit(Tiny(), datamodule=resumed, ckpt_path="last")
    assert [step for step, _ in again.history] == [0, 10, 20, 25, 30, 40]


def test_evaluations_without_environment_are_refused(tmp_path: Path) -> None:
    for refused in (
        lambda: make_trainer(tmp_path, [Evaluate()]).fit(Tiny(), datamodule=offline()),
        lambda: make_trainer(tmp_path).validate(Tiny(), datamodule=offline(), verbose=False),
    ):
        with pytest.raises(ValueError, match=r"ReplayDataModule has no environment.*Give it env beside updates"):
            refused()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"updates": 5, "env_steps": 10}, ValueError, "updates is 5.*beside env_steps. Leave these out"),
        ({"updates": 5, "num_envs": 2, "info_keys": ("a",)}, ValueError, "beside info_keys, num_envs. "),
        ({"updates": 5, "env": Counting, "warmup_steps": 1}, ValueError, "beside warmup_steps. "),
        ({"updates": 0}, ValueError, "updates is 0; it must be a whole number from 1 on"),
        ({}, TypeError, "env is None, env_steps None and warmup_steps None; give all three to collect, or updates"),
        ({"env": Counting, "env_steps": 5}, TypeError, "warmup_steps None"),
        ({"updates": 5, "replay": None}, TypeError, "replay is None; it must be a Replay"),
        ({"updates": 5, "env": Counting()}, TypeError, "env is .*it must be a Gymnasium id"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ReplayDataModule(**({"replay": make_replay()} | options))


def test_the_first_batch_of_rows_that_are_there_needs_as_many_rows(tmp_path: Path) -> None:
    few = make_replay()
    few.extend(demonstrations()[:3])
    for data, remedy in (
        (offline(few), "; fill it before fit"),
        (ReplayDataModule(Counting, few, 10, 0), "; collect at least as many by warmup_steps, or fill it before fit"),
        (ReplayDataModule(Counting, make_replay(), 10, 0), "holds 0 rows and its batches have 4"),
    ):
        with pytest.raises(ValueError, match=remedy):
            make_trainer(tmp_path).fit(Tiny(), datamodule=data)
    assert len(few) == 3


def test_rows_that_are_there_go_online_without_a_warm_up(tmp_path: Path) -> None:
    data, agent = ReplayDataModule(Counting, filled(), env_steps=10, warmup_steps=0, seed=0), Tiny()
    make_trainer(tmp_path).fit(agent, datamodule=data)
    assert len(agent.seen) == data.updates_done == 10 and len(data.replay) == 50
    assert len(agent.modes) == 10  # no action was random
    assert max(map(max, agent.seen[:1])) <= 40  # one step was stored before the first update
    rows = data.replay[:]
    assert rows["trajectory"][40:].tolist() == [8] * 5 + [9] * 5  # the episodes get numbers of their own
    assert rows["observation"][40:, 1].tolist() == [0, 1, 2, 3, 4] * 2


def test_an_online_run_without_warm_up_resumes(tmp_path: Path) -> None:
    """A break between two episodes, where closing the environments changes nothing."""
    whole, first, second = Tiny(), Tiny(), Tiny()
    make_trainer(tmp_path / "a").fit(whole, datamodule=ReplayDataModule(Counting, filled(), 20, 0, seed=0))
    for agent, replay, steps, path in ((first, filled(), 10, None), (second, make_replay(), 20, "last")):
        trainer = make_trainer(tmp_path / "b", [ReplayCheckpoint(tmp_path / "b", monitor=None)])
        trainer.fit(agent, datamodule=ReplayDataModule(Counting, replay, steps, 0, seed=0), ckpt_path=path)
    assert first.seen == whole.seen[:10] and second.seen == whole.seen[10:]


@pytest.mark.parametrize("warmup", [0, 4])
def test_a_checkpoint_of_updates_alone_is_continued_online(tmp_path: Path, warmup: int) -> None:
    checkpoint = {"dirpath": tmp_path, "monitor": None}
    make_trainer(tmp_path, [ReplayCheckpoint(**checkpoint)]).fit(Tiny(), datamodule=offline(updates=13))
    agent, data = Tiny(), ReplayDataModule(Counting, make_replay(), 14, warmup, updates_per_env_step=0.5, seed=0)
    make_trainer(tmp_path, [ReplayCheckpoint(**checkpoint)]).fit(agent, datamodule=data, ckpt_path="last")
    assert data.env_steps_done == 14 and data.updates_done == 13 + (14 - warmup) // 2
    assert len(agent.seen) == (14 - warmup) // 2 and len(agent.modes) == 14 - warmup and len(data.replay) == 54


def test_all_that_differs_from_the_rows_of_the_environments_is_named(tmp_path: Path) -> None:
    rows = demonstrations().exclude("trajectory", ("next", "truncated"))
    rows["action"] = rows["action"].double()
    rows["timestamp"] = torch.zeros(40)
    rows["observation"] = rows["next", "observation"] = torch.zeros(40, 3)
    replay = make_replay()
    replay.extend(rows)
    with pytest.raises(ValueError) as refused:
        make_trainer(tmp_path).fit(Tiny(), datamodule=ReplayDataModule(Counting, replay, 10, 0, num_envs=2))
    message = str(refused.value)
    names = ["'action'", "('next', 'observation')", "('next', 'truncated')", "'observation'", "'timestamp'"]
    for name in (*names, "'trajectory'"):
        assert f"{name}: stored " in message, message
    assert "torch.float64, (1,)), of the environment (torch.float32, (1,))" in message
    assert "('next', 'reward'): stored" not in message and len(replay) == 40


def test_columns_of_infos_are_compared_too(tmp_path: Path) -> None:
    for rows, data in ((demonstrations(), {"info_keys": ("win",)}), (demonstrations(extra=torch.zeros(40)), {})):
        name = r"\('next', 'win'\)" if data else "'extra'"
        with pytest.raises(ValueError, match=rf"Different: {name}: stored [^;]*\. Convert"):
            data = ReplayDataModule(Counting, filled(rows=rows), env_steps=10, warmup_steps=5, **data)
            make_trainer(tmp_path).fit(Tiny(), datamodule=data)


def test_actions_out_of_bounds_are_refused_before_the_first_step(tmp_path: Path) -> None:
    rows = demonstrations()
    rows["action"][:3] = 1.5
    for options in ({"env_steps": 10, "warmup_steps": 0}, {"updates": 3}):
        with pytest.raises(ValueError, match=r"action.* is out of the bounds of Box.* in 3 of 40 rows: .* 0.5 to 1.5"):
            make_trainer(tmp_path).fit(Tiny(), datamodule=ReplayDataModule(Counting, filled(rows=rows), **options))
    rows["action"] = torch.full((40,), 3)
    env = lambda: Counting(num_actions=3)  # noqa: E731
    with pytest.raises(ValueError, match=r"out of the bounds of Discrete\(3\) in 40 of 40 rows"):
        make_trainer(tmp_path).fit(Tiny(), datamodule=offline(filled(rows=rows), env=env))


def test_offline_rows_of_a_mixed_replay_are_compared_too(tmp_path: Path) -> None:
    rows = demonstrations(timestamp=torch.zeros(40)).exclude("trajectory")
    rows["action"][:3] = 1.5
    both = recipes.mixed(online=make_replay(), offline=filled(rows=rows), batch_size=8)
    with pytest.raises(ValueError, match=r"Different: 'action' is out of the bounds of .* in 3 of 40 rows"):
        make_trainer(tmp_path).fit(Tiny(), datamodule=ReplayDataModule(Counting, both, env_steps=10, warmup_steps=0))
    rows["action"].clamp_(-1, 1)
    both = recipes.mixed(online=make_replay(), offline=filled(rows=rows), batch_size=8)
    make_trainer(tmp_path).fit(Tiny(), datamodule=ReplayDataModule(Counting, both, env_steps=10, warmup_steps=0))
    assert len(both.online) == 10


def test_a_recurrent_agent_goes_on_with_its_rows(tmp_path: Path) -> None:
    def data(**options: Any) -> ReplayDataModule:
        return ReplayDataModule("CartPole-v1", replay, seed=0, **options)

    replay = recipes.sequences(capacity=200, batch_size=4, length=4, seed=0)
    agent = RecurrentDQN.for_env("CartPole-v1")
    make_trainer(tmp_path).fit(agent, datamodule=data(env_steps=60, warmup_steps=50))
    make_trainer(tmp_path).fit(agent, datamodule=data(env_steps=10, warmup_steps=0))
    make_trainer(tmp_path).fit(agent, datamodule=ReplayDataModule(replay=replay, updates=2))
    assert len(replay) == 70


def test_rows_of_an_evaluation_environment_may_have_further_columns(tmp_path: Path) -> None:
    rows = demonstrations(timestamp=torch.zeros(40)).exclude("trajectory")
    make_trainer(tmp_path).fit(Tiny(), datamodule=offline(filled(rows=rows), env=Counting, updates=2))


def pendulum_rows(count: int) -> TensorDict:
    generator = np.random.default_rng(0)
    rows = {
        "observation": torch.from_numpy(generator.normal(size=(count, 3)).astype(np.float32)),
        "action": torch.from_numpy(generator.uniform(-2, 2, (count, 1)).astype(np.float32)),
    }
    flags = dict.fromkeys(("terminated", "truncated", "done"), torch.zeros(count, 1, dtype=torch.bool))
    following = {"observation": rows["observation"].roll(-1, 0), "reward": torch.zeros(count, 1)} | flags
    return TensorDict(rows | {"next": following}, [count])


def test_agents_without_environment_need_their_sizes(tmp_path: Path) -> None:
    replay = fill(recipes.uniform(capacity=100, batch_size=8, seed=0), pendulum_rows(64))
    agent = SAC.for_env("Pendulum-v1", hidden_sizes=(8,))
    before = [weights.clone() for weights in agent.parameters()]
    make_trainer(tmp_path).fit(agent, datamodule=ReplayDataModule(replay=replay, updates=20))
    assert any((weights != old).any() for weights, old in zip(agent.parameters(), before, strict=True))
    with pytest.raises(
        ValueError, match=r"built without observation_size, num_actions; .*DQN.for_env\(env\), or fit .* has env"
    ):
        make_trainer(tmp_path).fit(DQN(), datamodule=ReplayDataModule(replay=replay, updates=2))
    with pytest.raises(ValueError, match=r"SAC was built with observation_size=3.*environment of ReplayDataModule"):
        make_trainer(tmp_path).fit(agent, datamodule=ReplayDataModule("MountainCarContinuous-v0", replay, updates=2))


@pytest.mark.parametrize("kind", [SAC, IQL, CQL, TD3])
def test_rows_are_compared_with_the_sizes_of_an_agent_without_environment(tmp_path: Path, kind: Any) -> None:
    agent = kind.for_env("Pendulum-v1", hidden_sizes=(8,))
    rows = pendulum_rows(64)
    rows["observation"], rows["next", "observation"] = torch.zeros(64, 5), rows["next", "observation"].double()
    rows["action"][:2] = 9.0
    replay = fill(recipes.uniform(capacity=100, batch_size=8, seed=0), rows)
    with pytest.raises(ValueError, match="rows of the replay are not those of the agent") as refused:
        make_trainer(tmp_path).fit(agent, datamodule=ReplayDataModule(replay=replay, updates=2))
    for clause in (
        "('next', 'observation'): stored (torch.float64, (3,)), of the agent (torch.float32, (3,))",
        "; 'observation': stored (torch.float32, (5,)), of the agent",
        "; 'action' is out of the bounds of Box(-2.0, 2.0, (1,), float32) in 2 of 64 rows",
        "to 9.0 (rescale them)",
    ):
        assert clause in str(refused.value)


@pytest.mark.parametrize(
    ("action", "clause"),
    [
        (torch.eye(2, dtype=torch.int64)[torch.zeros(32, dtype=torch.int64)], r"store argmax\(-1\)\)"),
        (torch.full((32,), 2), "'action' is out of the bounds of Discrete\\(2\\) in 32 of 32 rows.*number them"),
        (torch.zeros(32, dtype=torch.int32), r"'action': stored \(torch.int32, \(\)\), of the agent \(torch.int64"),
        (torch.zeros(32, 1, dtype=torch.int64), ""),
        (torch.zeros(32, dtype=torch.int64), ""),
    ],
)
def test_discrete_actions_are_compared_with_an_agent(tmp_path: Path, action: Tensor, clause: str) -> None:
    rows = pendulum_rows(32).set("action", action)
    replay = fill(recipes.uniform(capacity=100, batch_size=8, seed=0), rows)
    agent = DQN(observation_size=3, num_actions=2)
    data = ReplayDataModule(replay=replay, updates=2)
    with pytest.raises(ValueError, match=clause) if clause else nullcontext():
        make_trainer(tmp_path).fit(agent, datamodule=data)


def test_entries_are_compared_with_an_agent(tmp_path: Path) -> None:
    """Integers and images may have other dtypes than the environment's, which encoders take as well."""
    size = {"state": {"joints": 2, "tool": {"encoder": "one_hot", "low": 1, "high": 3}}}
    size |= {
        "map": {"encoder": "flat", "shape": [2, 2]},
        "tools": {"encoder": "one_hot", "low": [0, 1], "high": [1, 2]},
    }
    agent = SAC(size, [-2.0], [2.0], hidden_sizes=(8,))

    def fit(tool: int, **entries: Tensor) -> None:
        state = TensorDict({"joints": torch.zeros(16, 2), "tool": torch.full((16,), tool, dtype=torch.int32)}, [16])
        seen = {"state": state, "map": torch.zeros(16, 2, 2, dtype=torch.uint8), "tools": torch.ones(16, 2).long()}
        rows = pendulum_rows(16)
        for key in ("observation", ("next", "observation")):
            rows[key] = TensorDict(seen | entries, [16])
        replay = fill(recipes.uniform(capacity=16, batch_size=4, seed=0), rows)
        make_trainer(tmp_path).fit(agent, datamodule=ReplayDataModule(replay=replay, updates=2))

    fit(3)
    with pytest.raises(ValueError) as refused:
        fit(0, map=torch.zeros(16, 4), tools=torch.full((16, 2), 3))
    for clause in (
        "('observation', 'map'): stored (torch.float32, (4,)), of the agent (torch.float32, (2, 2))",
        "('observation', 'state', 'tool') is out of the bounds of Discrete(3, start=1) in 16 of 16 rows",
        "('next', 'observation', 'tools') is out of the bounds of MultiDiscrete([2 2], start=[0 1])",
    ):
        assert clause in str(refused.value)


def test_parameterized_actions_are_compared_with_an_agent(tmp_path: Path) -> None:
    agent = MPDQN(3, [1, 2], [-1.0] * 3, [1.0] * 3, hidden_sizes=(8,))
    for parameters, clause in ((1.0, None), (1.5, r"\('action', 'parameters'\) is out of the bounds of Box")):
        action = {"discrete": torch.ones(16).long(), "parameters": torch.full((16, 3), parameters)}
        replay = fill(
            recipes.uniform(capacity=16, batch_size=4), pendulum_rows(16).set("action", TensorDict(action, [16]))
        )
        with pytest.raises(ValueError, match=clause) if clause else nullcontext():
            make_trainer(tmp_path).fit(agent, datamodule=ReplayDataModule(replay=replay, updates=2))


@pytest.mark.parametrize("env", [None, "CartPole-v1"])
@pytest.mark.parametrize(
    ("key", "column", "clause"),
    [
        ("recurrent_state", torch.zeros(40, 2, 4), None),
        ("recurrent_state", torch.zeros(40, 2, 8), r"\(2, 8\)\), of the agent \(torch.float32, \(2, 4\)\) \(leave it"),
        ("recurrent_state", torch.zeros(40, 2, 4).double(), r"torch.float64, \(2, 4\)\), of the agent"),
        (("next", "reward"), torch.zeros(40).double(), None),
    ],
)
def test_present_columns_of_losses_are_compared_without_collecting(tmp_path, env, key, column, clause) -> None:
    agent = RecurrentDQN(4, 2, hidden_sizes=(4,), state_size=4)
    rows = pendulum_rows(40).set("action", torch.zeros(40).long()).set("trajectory", torch.arange(40) // 8)
    rows["observation"], rows["next", "observation"] = torch.zeros(40, 4), torch.zeros(40, 4)
    replay = fill(recipes.sequences(capacity=40, batch_size=2, length=4, seed=0), rows.set(key, column))
    with pytest.raises(ValueError, match=clause) if clause else nullcontext():
        make_trainer(tmp_path).fit(agent, datamodule=ReplayDataModule(env, replay, updates=2))


class Remembers(Tiny):
    is_recurrent = True

    def initial_state(self, num_envs: int) -> Tensor:
        return torch.zeros(num_envs, 1)

    def act_with_state(self, observation: Tensor, state: Tensor, explore: bool) -> tuple[Tensor, Tensor]:
        return self.act(observation, explore), state


def test_the_state_of_ones_own_agent_is_compared_without_environment(tmp_path: Path) -> None:
    replay = recipes.sequences(capacity=40, batch_size=2, length=4, seed=0)
    replay.extend(pendulum_rows(40).set("recurrent_state", torch.zeros(40, 3)))
    with pytest.raises(ValueError, match=r"not those of the agent Remembers. Different: 'recurrent_state': stored "):
        make_trainer(tmp_path).fit(Remembers(), datamodule=ReplayDataModule(replay=replay, updates=2))


@pytest.mark.parametrize("kind", [SAC, IQL, CQL, TD3])
@pytest.mark.parametrize("missing", [["reward"], ["terminated", "truncated", "done"]])
def test_columns_that_learning_needs_are_named(tmp_path: Path, kind: Any, missing: list[str]) -> None:
    rows = pendulum_rows(32)
    replay = make_replay()
    replay.extend(rows.exclude(*(("next", name) for name in missing)))
    with pytest.raises(ValueError, match=r"rows have the columns \['.*'\] under 'next', and learning takes reward"):
        make_trainer(tmp_path).fit(kind(3, [-2.0], [2.0]), datamodule=ReplayDataModule(replay=replay, updates=2))
