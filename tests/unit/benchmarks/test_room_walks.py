# SPDX-License-Identifier: Apache-2.0
"""Double DQN in three rooms learns what the library's learns, and the table of three rooms is the environment."""

from __future__ import annotations

import lightning as L
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_replay import Replay
from lightning_replay.agents import DQN
from lightning_replay.envs.grids import ThreeRooms
from tests.benchmarks.learning.experiments import rooms
from tests.benchmarks.learning.learners.grids import state_of
from tests.benchmarks.learning.learners.room_walks import RoomsDQN, StackedWalks, agent_of
from tests.benchmarks.learning.learners.stacked_networks import forward
from tests.benchmarks.learning.learners.three_rooms import (
    CONDITIONS,
    COORDINATES,
    ONE_HOT,
    PLACES,
    POTENTIALS,
    STATE_OF_ONE_HOT,
    Table,
    replay_of,
)
from tests.benchmarks.learning.recorder import Recorder
from tests.unit.benchmarks.stacked_batches import PlainBatches

OPTIONS = {"learning_rate": 1e-2, "discount": 0.9, "target_update_rate": 0.1}
SIZES = (ONE_HOT.shape[1], 8, 8, 3)
BATCH, UPDATES, RUNS = 8, 5, 2


def batches() -> TensorDict:
    """Rows ``[R, updates * B]``; rewards beyond 1 reach the linear part of smooth L1."""
    size = [RUNS, UPDATES * BATCH]
    states, following = torch.randint(len(PLACES), (2, *size))
    terminated = torch.rand(*size, 1) < 0.3
    after = {"observation": ONE_HOT[following], "reward": 3 * torch.rand(*size, 1), "terminated": terminated}
    columns = {"observation": ONE_HOT[states], "action": torch.randint(3, size), "next": after | {"done": terminated}}
    return TensorDict(columns | {"priority_weight": torch.rand(size)}, size)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")  # played for a data module alone
def test_a_run_learns_what_the_agent_learns() -> None:
    torch.manual_seed(0)
    run, stacked = 1, RoomsDQN(SIZES, (4, 9), **OPTIONS)
    agent = DQN(ONE_HOT.shape[1], 3, hidden_sizes=(8, 8), **OPTIONS)
    for parameter in stacked.target:  # far from the network, so that it matters which of them chooses an action
        parameter.normal_()
    for network, stack in ((agent.network, stacked.online), (agent.target_network, stacked.target)):
        for parameter, source in zip(network.parameters(), stack, strict=True):
            parameter.data.copy_(source[run].detach().T.squeeze(-1))
    given = batches()
    errors, values = stacked.learn(list(given), UPDATES)
    found: list[torch.Tensor] = []
    update = agent.update

    def kept(batch: TensorDict) -> dict[str, torch.Tensor]:
        outputs = update(batch)
        found.append(outputs["td_error"])
        return outputs

    agent.update = kept  # type: ignore[method-assign]
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **options)
    trainer.fit(agent, train_dataloaders=PlainBatches(given[run].split(BATCH)))
    torch.testing.assert_close(
        errors[run].abs(), torch.cat(found), atol=1e-5, rtol=1e-4
    )  # the agent returns magnitudes
    assert values.shape == (RUNS, UPDATES * BATCH, 3)
    for parameter, learned in zip(agent.network.parameters(), stacked.online, strict=True):
        torch.testing.assert_close(parameter.data, learned[run].detach().T.squeeze(-1), atol=1e-5, rtol=1e-4)


def test_rows_dealt_in_turn_are_every_fifth_of_a_draw() -> None:
    given = batches()
    in_turn, consecutive = (RoomsDQN(SIZES, (4, 9), **OPTIONS) for _ in range(2))
    order = torch.arange(UPDATES * BATCH).view(BATCH, UPDATES).T.flatten()  # row k in update k % UPDATES
    found = in_turn.learn(list(given), UPDATES, in_turn=True)
    for ours, theirs in zip(found, consecutive.learn(list(given[:, order]), UPDATES), strict=True):
        assert torch.equal(ours[:, order], theirs)
    assert all(torch.equal(*pair) for pair in zip(in_turn.online, consecutive.online, strict=True))


def test_a_run_does_not_change_another() -> None:
    both, alone = RoomsDQN(SIZES, (4, 9), **OPTIONS), RoomsDQN(SIZES, (9,), **OPTIONS)
    given = batches()
    both.learn(list(given), UPDATES)
    alone.learn(list(given[1:]), UPDATES)
    for parameter, single in zip(both.online, alone.online, strict=True):
        torch.testing.assert_close(parameter[1:], single, atol=1e-6, rtol=1e-5)


def test_coordinates_as_inputs_are_those_of_the_states() -> None:
    agent = agent_of(SETTINGS | {"inputs": "coordinates"}, (4, 9))
    torch.testing.assert_close(
        agent.values(ONE_HOT.repeat(2, 1, 1)), forward(list(agent.online), COORDINATES.repeat(2, 1, 1))[-1]
    )
    x, y, *direction = COORDINATES[PLACES.index((16, 3, 2))].tolist()
    assert (x, y, direction) == (1.0, 0.5, [0.0, 0.0, 1.0, 0.0])


def test_the_table_walks_as_the_environment() -> None:
    env, table = ThreeRooms(max_steps=50, one_hot=True), Table.of(ThreeRooms())
    generator = np.random.default_rng(0)
    observation, _ = env.reset()
    assert state_of(env) == table.start
    for _ in range(3_000):
        state, action = state_of(env), int(generator.integers(3))
        assert np.array_equal(observation, ONE_HOT[state]) and observation @ STATE_OF_ONE_HOT.numpy() == state
        observation, reward, terminated, truncated, _ = env.step(action)
        assert (state_of(env), terminated) == (table.following[state, action], table.is_goal[state, action])
        assert reward == float(terminated)
        if terminated or truncated:
            observation, _ = env.reset()


def check_walk(rows: TensorDict, episode_steps: int) -> None:
    """Rows ``[N]`` are steps of the environment, one after another."""
    table = Table.of(ThreeRooms())
    state, following = (
        (rows[key] @ STATE_OF_ONE_HOT).long().numpy() for key in ("observation", ("next", "observation"))
    )
    assert torch.equal(rows["observation"], ONE_HOT[state]) and torch.equal(
        rows["next", "observation"], ONE_HOT[following]
    )
    action = rows["action"].numpy()
    assert np.array_equal(following, table.following[state, action])
    terminated, truncated, done = (
        rows["next", name].squeeze(-1).numpy() for name in ("terminated", "truncated", "done")
    )
    assert np.array_equal(terminated, table.is_goal[state, action]) and np.array_equal(done, terminated | truncated)
    assert np.array_equal(rows["next", "reward"].squeeze(-1).numpy(), terminated)
    assert np.array_equal(state, np.append(table.start, np.where(done, table.start, following)[:-1]))
    ends = np.append(-1, done.nonzero()[0])
    lengths = np.diff(ends)
    assert np.array_equal(truncated[done], (lengths == episode_steps) & ~terminated[done])
    assert lengths.max(initial=0) <= episode_steps and len(rows) - 1 - ends[-1] < episode_steps


def test_a_walk_ends_with_the_first_goal_and_its_events_are_where_they_are() -> None:
    walk = Table.of(ThreeRooms()).walk_to_goal(seed=1, episode_steps=200)
    check_walk(walk, 200)
    assert walk["next", "reward"].nonzero()[:, 0].tolist() == [len(walk) - 1]
    assert walk["next", "truncated"].flatten().nonzero().flatten().tolist() == list(range(199, len(walk) - 1, 200))
    places = [PLACES[int(number)] for number in walk["next", "observation"] @ STATE_OF_ONE_HOT]
    for name, expected in (
        ("gap", [(x, y) in ThreeRooms.GAPS for x, y, _ in places]),
        ("near start", [(x, y) == (2, 2) for x, y, _ in places]),
        ("goal", [(x, y) == ThreeRooms.GOAL for x, y, _ in places]),
    ):
        assert CONDITIONS[name](walk).flatten().tolist() == expected and any(expected)
    x, y = ThreeRooms.GOAL
    near = [pytest.approx(-0.05 * (abs(column - x) + abs(row - y))) for column, row, _ in places]
    assert POTENTIALS["distance"](walk["next", "observation"]).tolist() == near
    at_first_gap = [float((column, row) == ThreeRooms.GAPS[0]) for column, row, _ in places]
    assert POTENTIALS["gap"](walk["next", "observation"]).flatten().tolist() == at_first_gap


def test_greedy_steps_of_the_shortest_way_and_of_one_that_never_arrives() -> None:
    table = Table.of(ThreeRooms())
    left = np.where(table.is_goal, 1, 10_000)  # steps to the goal, [S, A]
    for _ in range(200):
        left = np.where(table.is_goal, 1, 1 + left.min(1)[table.following])
    policies = np.stack([left.argmin(1), np.zeros(len(left), dtype=np.int64)])
    assert table.greedy_steps(policies, 100).tolist() == [23, 100]
    assert table.greedy_steps(policies, 23).tolist() == [23, 23]


SETTINGS = {
    "inputs": "one-hot",
    "hidden_sizes": (8, 8),
    "episode_steps": 40,
    "exploration": 0.5,
    "steps_per_draw": 8,
    "updates_per_draw": 8,
    "batch_size": 64,
    "capacity": 1_000,
    "replay": "prioritized",
    "importance_exponent": 0.4,
} | OPTIONS


def walks(seeds: tuple[int, ...]) -> tuple[StackedWalks, list[Replay]]:
    replays = [replay_of(SETTINGS, seed) for seed in seeds]
    return StackedWalks(agent_of(SETTINGS, seeds), Table.of(ThreeRooms()), replays, seeds, SETTINGS), replays


def test_runs_walk_as_the_environment_and_alone_as_beside_others() -> None:
    both, replays = walks((3, 5))
    alone, (single,) = walks((5,))
    for _ in range(15):
        both.advance()
        alone.advance()
    rows = [replay.storage[:][: len(replay)] for replay in (*replays, single)]
    for each in rows:
        check_walk(each, SETTINGS["episode_steps"])
        assert len(each) == 120 and len(set(each["action"].tolist())) == 3
    assert torch.equal(rows[1]["action"], rows[2]["action"]) and not torch.equal(rows[0]["action"], rows[1]["action"])


def test_a_run_that_never_reached_the_goal_counts_with_all_its_steps() -> None:
    out = Recorder((100,))
    rooms.run(rooms.EXPERIMENTS[0].settings_of("uniform") | {"env_steps": 250}, (100,), out)
    assert out.content["final"] == {"steps_to_near_optimal": [250.0], "near_optimal": [0.0], "first_goal": [250.0]}


def test_half_of_the_actions_are_the_agents() -> None:
    (walk, (replay,)) = walks((3,))
    agent = walk._agent
    agent.act = lambda observation: torch.full(observation.shape[:2], 2)
    for _ in range(100):
        walk.advance()
    share = (replay.storage[:]["action"][: len(replay)] == 2).float().mean()
    assert share == pytest.approx(0.5 + 0.5 / 3, abs=0.06)


def test_td_errors_return_to_the_rows_they_are_of() -> None:
    walk, replays = walks((3, 5))
    given: list[list[tuple[list[int], list[float]]]] = [[], []]
    walk._agent.learn = lambda batches, *options: (
        torch.stack([batch["observation"] @ STATE_OF_ONE_HOT for batch in batches]),
        None,
    )
    for replay, kept in zip(replays, given, strict=True):

        def keep(index: torch.Tensor, error: torch.Tensor, generation: torch.Tensor, kept: list = kept) -> None:
            kept.append((index.tolist(), error.tolist()))

        replay.update_priority = keep
    for _ in range(3):
        walk.advance()
    for replay, kept in zip(replays, given, strict=True):
        assert len(kept) == 3
        for index, error in kept:
            assert error == (replay.storage[:]["observation"][index] @ STATE_OF_ONE_HOT).tolist()
