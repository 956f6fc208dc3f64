# SPDX-License-Identifier: Apache-2.0
"""What the experiment on MultiRoom rests on: levels step as MiniGrid's do, rollouts and scores, PPO, resumed runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_replay.levels import LevelBuffer, UniformLevels, scores
from tests.benchmarks.learning.experiment import Experiment
from tests.benchmarks.learning.experiments.multi_room import EXPERIMENTS, levels_of
from tests.benchmarks.learning.learners.multi_room_ppo import (
    Batch,
    Collector,
    StackedPPO,
    advantages,
    drawn_actions,
    held_out_returns,
)
from tests.benchmarks.learning.learners.stacked_networks import forward
from tests.benchmarks.learning.learners.vector_multi_room import (
    GOAL,
    MAX_STEPS,
    NUM_ACTIONS,
    OPEN,
    PADDED,
    SHUT,
    VIEW,
    WALL,
    MultiRoomLevels,
    VectorMultiRoom,
    cells_of,
    multi_room_env,
    position_of,
    training_and_held_out,
)
from tests.benchmarks.learning.recorder import OutOfTimeError, Recorder
from tests.benchmarks.learning.runner import run_fast, runs_of
from tests.level_steps import column, play

(EXPERIMENT,) = EXPERIMENTS
LEFT, RIGHT, FORWARD, TOGGLE = 0, 1, 2, 5
WINDOW = (2 * VIEW + 1) ** 2


@pytest.fixture(scope="module")
def levels() -> MultiRoomLevels:
    return MultiRoomLevels.generate(range(24))


def always(ppo: StackedPPO, action: int) -> StackedPPO:
    """The same with a policy that takes one action."""
    ppo.parameters[-1].data[..., action] = 1e6
    return ppo


@pytest.mark.slow
def test_copied_levels_step_as_minigrid_does(levels) -> None:
    count = len(levels) // 2
    vector = VectorMultiRoom(levels, count)
    vector.reset(torch.arange(count), torch.arange(count))
    envs = [multi_room_env() for _ in range(count)]
    for level, env in enumerate(envs):
        env.reset(seed=level)
    assert levels.rooms[:count].tolist() == [len(env.rooms) for env in envs]
    generator = torch.Generator().manual_seed(0)
    likely = torch.tensor([0.15, 0.15, 0.35, 0.02, 0.02, 0.29, 0.02])
    playing, opened, goals, limits = set(range(count)), 0, 0, 0
    for _ in range(MAX_STEPS):
        action = torch.multinomial(likely, count, True, generator=generator)
        reward, terminated, truncated = vector.step(action)
        state = vector.state_dict()
        for row in sorted(playing):
            _, paid, done, late, _ = envs[row].step(action[row].item())
            assert np.array_equal(state["cells"][row].numpy(), cells_of(envs[row]))
            assert state["position"][row].item() == position_of(envs[row])
            assert state["direction"][row].item() == envs[row].agent_dir
            assert reward[row].item() == pytest.approx(paid)
            late = late and not done  # MiniGrid gives both where the goal is reached at the limit
            assert (terminated[row].item(), truncated[row].item()) == (done, late)
            opened += int((state["cells"][row] == OPEN).any())
            goals, limits = goals + done, limits + late
            if done or late:
                playing.remove(row)
    assert not playing and opened and goals and limits  # it saw doors, goals and limits


def room(goal: tuple[int, int], agent: tuple[int, int], direction: int) -> MultiRoomLevels:
    """A level without walls."""
    cells = torch.zeros(PADDED, PADDED, dtype=torch.uint8)
    cells[goal[1] + VIEW, goal[0] + VIEW] = GOAL
    position = (agent[1] + VIEW) * PADDED + agent[0] + VIEW
    return MultiRoomLevels(cells.view(1, -1), *(torch.tensor([value]) for value in (position, direction, 1)))


def test_the_goal_reached_at_the_limit_terminates() -> None:
    vector = VectorMultiRoom(room(goal=(2, 1), agent=(1, 1), direction=3), 1)
    vector.reset(torch.tensor([0]), torch.tensor([0]))
    for _ in range(MAX_STEPS - 1):
        vector.step(torch.tensor([RIGHT]))  # 119 turns to the right from up: to the left
    vector.direction[:] = 0
    reward, terminated, truncated = vector.step(torch.tensor([FORWARD]))
    assert (reward.item(), terminated.item(), truncated.item()) == (pytest.approx(0.1), True, False)


def test_features_are_cells_around_the_agent_its_direction_and_the_time() -> None:
    # the agent in a corner of the grid looks down; a wall on its right, a door below, the goal four below
    level = room(goal=(0, 4), agent=(0, 0), direction=1)
    cells = level.cells.view(PADDED, PADDED)
    cells[VIEW, VIEW + 1], cells[VIEW + 1, VIEW] = WALL, SHUT
    vector = VectorMultiRoom(level, 1)
    vector.reset(torch.tensor([0]), torch.tensor([0]))
    center, side = WINDOW // 2, 2 * VIEW + 1
    wall, door, goal = center + 1, center + side, center + 4 * side

    def seen() -> list[int]:
        return vector.observe()[0].nonzero().flatten().tolist()

    direction, time = 4 * WINDOW, 4 * WINDOW + 4
    assert seen() == [wall, WINDOW + door, 3 * WINDOW + goal, direction + 1, time]
    for _ in range(7):
        vector.step(torch.tensor([TOGGLE]))
    assert seen() == [wall, 2 * WINDOW + door, 3 * WINDOW + goal, direction + 1, time]  # 16 * 7 < 120
    vector.step(torch.tensor([FORWARD]))
    wall, goal = wall - side, goal - side
    assert seen() == [wall, 2 * WINDOW + center, 3 * WINDOW + goal, direction + 1, time + 1]
    vector.steps[:] = MAX_STEPS - 1
    assert seen()[-1] == time + 15


def test_resetting_one_environment_leaves_the_others(levels) -> None:
    vector = VectorMultiRoom(levels, 3)
    vector.reset(torch.arange(3), torch.tensor([0, 1, 2]))
    vector.step(torch.tensor([LEFT, RIGHT, LEFT]))
    before = vector.observe()
    vector.reset(torch.tensor([1]), torch.tensor([7]))
    after, fresh = vector.observe(), VectorMultiRoom(levels, 1)
    fresh.reset(torch.tensor([0]), torch.tensor([7]))
    assert torch.equal(after[1:2], fresh.observe())
    assert torch.equal(after[[0, 2]], before[[0, 2]])


@pytest.mark.slow
def test_no_held_out_level_begins_as_a_training_level_does() -> None:
    training, held_out = training_and_held_out(1_636, 20)  # the seeds 272 and 1636 make the same level
    assert len(training) == 1_636 and len(held_out) == 20
    assert MultiRoomLevels.generate([1_636]).first_states() == MultiRoomLevels.generate([272]).first_states()
    assert not set(training.first_states()) & set(held_out.first_states())


def test_rollouts_name_the_level_of_each_step_and_give_every_level_its_score(levels) -> None:
    sources = [LevelBuffer(24, seed=seed) for seed in (0, 1)]
    collector, ppo = Collector(levels, sources, (0, 1), envs=4), StackedPPO((0, 1))
    begun = torch.ones(2, 4, dtype=torch.bool)
    ended = 0
    for _ in range(3):
        rollout = collector.rollout(ppo, 90)
        for step in range(90):
            first, level = rollout["features"][:, step][begun], rollout["level_id"][:, step][begun]
            starts = VectorMultiRoom(levels, len(level))
            starts.reset(torch.arange(len(level)), level)
            assert torch.equal(first, starts.observe())
            begun = rollout["terminated"][:, step]
            ended += int(begun.sum())
        collector.score(rollout)
    assert ended == sum(source.episodes for source in sources) - 8 > 8
    assert [len(source.in_flight(actor)) for source in sources for actor in range(4)] == [1] * 8
    assert all(len(source) > 0 for source in sources)


def test_scores_are_means_of_the_advantages_that_are_learned_from(levels) -> None:
    sources = [LevelBuffer(24, score=scores.L1ValueLoss(0.999, 0.95), seed=seed) for seed in (3, 4)]
    collector = Collector(levels, sources, (3, 4), envs=3)
    rollout = collector.rollout(StackedPPO((3, 4)), 2 * MAX_STEPS)
    magnitude = advantages(rollout, 0.999, 0.95).abs()
    collector.score(rollout)
    for run, source in enumerate(sources):
        expected = {}
        for env in range(3):  # the later score of a level is kept; actors are scored one after another
            start = 0
            for end in rollout["terminated"][run, :, env].nonzero().flatten().tolist():
                level = rollout["level_id"][run, end, env].item()
                expected[level] = magnitude[run, start : end + 1, env].mean().item()
                start = end + 1
        distribution = source.probabilities()
        found = dict(zip(distribution["level_id"].tolist(), distribution["score"].tolist(), strict=True))
        assert len(found) > 3 and found == pytest.approx(expected, rel=1e-4)


def test_the_limit_ends_the_task(levels) -> None:
    sources = [UniformLevels(24, seed=0)]
    rollout = Collector(levels, sources, (0,), envs=2).rollout(always(StackedPPO((0,)), LEFT), MAX_STEPS + 5)
    assert rollout["terminated"].nonzero().tolist() == [[0, MAX_STEPS - 1, 0], [0, MAX_STEPS - 1, 1]]
    assert torch.equal(rollout["next_state_value"][:, :-1], rollout["state_value"][:, 1:])
    advantage = advantages(rollout, 0.999, 0.95)
    torch.testing.assert_close(advantage[:, MAX_STEPS - 1], -rollout["state_value"][:, MAX_STEPS - 1])


def test_advantages_are_those_of_the_library(levels) -> None:
    collector = Collector(levels, [UniformLevels(24, seed=seed) for seed in (0, 1)], (0, 1), envs=3)
    rollout = collector.rollout(StackedPPO((0, 1)), 150)
    assert rollout["terminated"].any()
    ours = advantages(rollout, 0.999, 0.95)
    for run in range(2):
        for env in range(3):
            column = {key: value[run, :, env] for key, value in rollout.items()}
            expected = scores.generalized_advantages(
                *(column["reward"], column["state_value"], column["next_state_value"]),
                *(column["terminated"], column["terminated"]),
                discount=0.999,
                gae_lambda=0.95,
            )
            torch.testing.assert_close(ours[run, :, env], expected.float(), atol=1e-5, rtol=1e-5)


class PlainPPO(nn.Module):
    """The same as plain modules with autograd, for one run."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*weight.shape) for weight in parameters[::2])
        for layer, weight, bias in zip(self.layers, parameters[::2], parameters[1::2], strict=True):
            layer.weight.data, layer.bias.data = weight.T.clone(), bias.flatten().clone()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=7e-4, eps=1e-5)

    def update(self, batch: Batch) -> float:
        """Changes the weights by a minibatch ``[B]``; returns the norm of the gradient before it is clipped."""
        hidden = batch["features"]
        for layer in self.layers[:-1]:
            hidden = layer(hidden).relu()
        output = self.layers[-1](hidden)
        policy = torch.distributions.Categorical(logits=output[:, :NUM_ACTIONS])
        ratio = (policy.log_prob(batch["action"]) - batch["log_probability"]).exp()
        advantage = batch["advantage"]
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        value, old, target = output[:, NUM_ACTIONS], batch["state_value"], batch["return"]
        near = old + (value - old).clamp(-0.2, 0.2)
        value_loss = 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2).mean()
        loss = 0.5 * value_loss - objective - 0.01 * policy.entropy().mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        self.optimizer.step()
        return float(norm)


def test_updates_of_stacked_runs_are_those_of_each_run_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    ppo = StackedPPO((5, 6))
    alone = [PlainPPO([parameter[run].detach() for parameter in ppo.parameters]) for run in range(2)]
    for _ in range(3):
        scale = torch.tensor([[3.0], [0.02]])  # the gradient of the first run is clipped, the other's is not
        names = ("advantage", "state_value", "return")
        drawn = {name: scale * torch.randn(2, 32, generator=generator) for name in names}
        drawn["features"] = (torch.rand(2, 32, 344, generator=generator) < 0.3).float()
        value = ppo.predict(drawn["features"])[1]
        drawn |= {name: value + drawn[name] for name in names[1:]}
        drawn["log_probability"] = -torch.rand(2, 32, generator=generator) - 1.5
        drawn["action"] = torch.randint(NUM_ACTIONS, (2, 32), generator=generator)
        ppo._update(drawn)
        for run, plain in enumerate(alone):
            norm = plain.update({name: values[run] for name, values in drawn.items()})
            assert (norm > 0.6) == (run == 0)
            for layer, weight, bias in zip(plain.layers, ppo.parameters[::2], ppo.parameters[1::2], strict=True):
                for ours, theirs in ((weight[run].T, layer.weight), (bias[run].flatten(), layer.bias)):
                    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-3)
                for ours, theirs in ((weight.grad[run].T, layer.weight), (bias.grad[run].flatten(), layer.bias)):
                    torch.testing.assert_close(ours, theirs.grad, atol=1e-5, rtol=2e-2)


def test_every_step_of_a_run_is_in_one_minibatch_of_each_epoch() -> None:
    ppo = StackedPPO((0, 1, 2), epochs=2, minibatch=8)
    drawn = torch.stack([index.view(3, 8) for index in ppo._minibatches(3, 24)])  # [epochs * 3, R, B]
    for epoch in drawn.view(2, 3, 3, 8):
        for run in range(3):
            assert sorted(epoch[:, run].flatten().tolist()) == list(range(24 * run, 24 * run + 24))
    assert not torch.equal(drawn[:, 0], drawn[:, 1] - 24)


def test_learning_makes_rewarded_actions_likelier(levels) -> None:
    ppo = StackedPPO((0,), epochs=10, minibatch=32, discount=0.0)
    collector = Collector(levels, [UniformLevels(24, seed=0)], (0,), envs=4)
    for _ in range(3):
        rollout = collector.rollout(ppo, 64)
        rollout["reward"] = (rollout["action"] == TOGGLE).float()
        ppo.learn(rollout)
    assert collector.rollout(ppo, 64)["action"].eq(TOGGLE).float().mean() > 0.5


def test_actions_are_drawn_by_their_probabilities() -> None:
    log_probabilities = torch.tensor([0.1, 0.0, 0.4, 0.0, 0.2, 0.3, 0.0]).log()
    uniform = (torch.arange(1_000) + 0.5) / 1_000
    action = drawn_actions(log_probabilities.expand(1, 1_000, 7), uniform.unsqueeze(0))
    assert action.flatten().bincount(minlength=7).tolist() == [100, 0, 400, 0, 200, 300, 0]


def test_returns_on_held_out_levels_are_of_one_episode_each() -> None:
    level = room(goal=(6, 2), agent=(2, 2), direction=0)
    both = MultiRoomLevels(*(torch.cat(pair) for pair in zip(*map(columns, (level, level)), strict=True)))
    both.direction[1] = 1  # it walks away from the goal until it is against the end of the grid
    both.cells.view(2, PADDED, PADDED)[1, VIEW + 3] = WALL
    ppo = always(StackedPPO((0, 1)), FORWARD)
    expected = 1 - 0.9 * 4 / MAX_STEPS
    assert held_out_returns(ppo, both, (0, 1)).tolist() == [pytest.approx([expected, 0.0])] * 2


def columns(levels: MultiRoomLevels) -> tuple[Tensor, ...]:
    return levels.cells, levels.position, levels.direction, levels.rooms


def test_first_policies_are_nearly_uniform_and_differ_between_seeds(levels) -> None:
    ppo = StackedPPO((0, 1))
    vector = VectorMultiRoom(levels, 24)
    vector.reset(torch.arange(24), torch.arange(24))
    features = vector.observe().expand(2, 24, 344)
    log_probabilities, value = ppo.predict(features)
    assert (log_probabilities.exp() - 1 / 7).abs().max() < 0.02
    assert not torch.allclose(value[0], value[1])
    assert torch.equal(forward(list(StackedPPO((1,)).parameters), features[1:])[-1][0, :, NUM_ACTIONS], value[1])


def small(arm: str, **settings: object) -> Experiment:
    """The experiment with one arm in a few steps."""
    few = EXPERIMENT.settings | EXPERIMENT.fast | settings
    return replace(EXPERIMENT, arms={arm: EXPERIMENT.arms[arm]}, comparisons=(), panels=(), settings=few)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["uniform", "level replay, temperature 0.1, not in flight"])
def test_an_interrupted_run_goes_on_as_if_it_was_not(arm: str, tmp_path: Path) -> None:
    experiment = small(arm, env_steps=512, test_every=256)
    settings = experiment.settings_of(arm)
    whole = Recorder((3, 4))
    experiment.run(settings, (3, 4), whole)
    interruptions = 0
    while True:
        part = Recorder((3, 4), tmp_path, deadline=0.0)
        try:
            experiment.run(settings, (3, 4), part)
        except OutOfTimeError:
            interruptions += 1
            if part.content["steps"][-1:] == [512]:
                break
        else:
            break
    assert interruptions == 4
    for name in ("steps", "curves", "final"):
        assert part.content[name] == whole.content[name]


@pytest.mark.slow
def test_arms_differ_in_their_levels_only_and_all_run() -> None:
    uniform, *replayed = (levels_of(EXPERIMENT.settings_of(arm), seed=0) for arm in EXPERIMENT.arms)
    assert isinstance(uniform, UniformLevels) and {each.count for each in (uniform, *replayed)} == {4_000}
    best = []
    for source in replayed:
        play(source, 7, 0.5)
        play(source, 9, 0.2)
        before = column(source, "probability")[7]  # by staleness 1, as level 9 was played since
        source.start(1, 7)
        best.append((before, column(source, "probability")[7]))  # by staleness 0
    low = 1 / (1 + 0.5**10)
    assert np.array(best) == pytest.approx(
        np.array([(0.7 * 2 / 3 + 0.3, 0.7 * 2 / 3), (0.7 * low + 0.3, 0.7 * low), (0.7 * low + 0.3, 0.0)])
    )
    assert set().union(*EXPERIMENT.arms.values()) == {"score_temperature", "replay_in_flight"}
    arms = list(EXPERIMENT.arms)[1:3]  # the others run above
    page = run_fast(EXPERIMENT, arms)
    assert all(f"| {arm} | 2 |" in page for arm in arms)


def test_curves_are_of_each_seed() -> None:
    experiment = small("uniform")
    out = Recorder((3, 4))
    experiment.run(experiment.settings_of("uniform"), (3, 4), out)
    runs = runs_of(out)
    assert list(runs) == [3, 4] and not np.array_equal(runs[3].curves["held_out"], runs[4].curves["held_out"])
    assert runs[3].steps == [128, 256, 384, 512]
