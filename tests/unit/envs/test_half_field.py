# SPDX-License-Identifier: Apache-2.0
"""The half field by hand-worked numbers of the RoboCup server, its tasks, its ends, its keeper and its picture."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

import lightning_replay.envs
from lightning_replay.envs import half_field as soccer
from lightning_replay.envs.half_field import STARTS, HalfField, Keeper, draw
from tests.half_field_actions import NOTHING, dash, kick, placed, turn


def ways(env: HalfField) -> list[float]:
    return [env.player.x, env.player.y, env.player.velocity_x, env.player.velocity_y]


def test_a_dash_accelerates_by_0_6_and_the_speed_decays_to_two_fifths() -> None:
    env = placed(ball=(30.0, 0.0))
    env.step(dash(100.0, 90.0))
    assert ways(env) == pytest.approx([10.0, 0.6, 0.0, 0.24])
    env.step(dash(50.0, 90.0))
    assert ways(env) == pytest.approx([10.0, 0.6 + 0.54, 0.0, 0.216])
    env.heading = math.pi / 2
    env.step(dash(100.0, -90.0))
    assert ways(env) == pytest.approx([10.6, 1.14 + 0.216, 0.24, 0.0864])
    env = placed(ball=(30.0, 0.0))
    for _ in range(30):
        before = env.player.x
        env.step(dash(100.0, 0.0))
    assert env.player.x - before == pytest.approx(1.0)  # 0.6 / (1 - 0.4)


def test_a_turn_is_weaker_at_speed() -> None:
    env = placed(ball=(30.0, 0.0))
    env.step(turn(90.0))
    assert env.heading == pytest.approx(math.pi / 2)
    env.player.velocity_y = 0.24
    env.step(turn(-90.0))
    assert math.degrees(env.heading) == pytest.approx(90.0 - 90.0 / (1.0 + 5.0 * 0.24))
    assert env.player.velocity_y == pytest.approx(0.096)  # it rolls on by 0.24 meanwhile


def test_a_kick_loses_power_by_angle_and_by_the_gap_and_out_of_reach_does_nothing() -> None:
    env = placed(ball=(10.385, 0.0))
    _, reward, terminated, truncated, info = env.step(kick(100.0, 0.0))
    assert (env.ball.x, env.ball.velocity_x) == pytest.approx((10.385 + 2.7, 2.7 * 0.94))
    assert (reward, terminated, truncated, info["kicked"]) == (0.0, False, False, True)
    env.step(dash(0.0, 0.0))
    assert env.ball.x == pytest.approx(10.385 + 2.7 + 2.7 * 0.94)
    env = placed(ball=(10.0 - 0.735, 0.0))  # behind the player, half of the margin away
    env.step(kick(50.0, 90.0))
    power = 50.0 * (1.0 - 0.25 - 0.25 * 0.35 / 0.7)
    assert env.ball.y == pytest.approx(0.027 * power) == pytest.approx(0.84375)
    assert env.ball.x == pytest.approx(10.0 - 0.735)
    assert soccer.kick_acceleration(100.0, 0.1, 0.0) == pytest.approx(2.7)
    assert soccer.kick_acceleration(100.0, soccer.KICKABLE_DISTANCE, math.pi) == pytest.approx(1.35)
    assert soccer.kick_acceleration(100.0, soccer.KICKABLE_DISTANCE + 1e-9, 0.0) == 0.0
    assert pytest.approx(1.085) == soccer.KICKABLE_DISTANCE
    env = placed(ball=(11.09, 0.0))
    observation, *_, info = env.step(kick(100.0, 0.0))
    assert env.ball.x == 11.09 and not info["kicked"]
    assert info["ball_distance"] == pytest.approx(1.09) and info["goal_distance"] == pytest.approx(52.5 - 11.09)
    assert observation[17] == -1.0


def test_a_player_stops_at_the_lines_and_parameters_outside_their_ranges_are_clipped() -> None:
    env = placed(ball=(30.0, 0.0), player=(0.2, -33.9))
    env.step(dash(100.0, -135.0))
    assert ways(env) == [0.0, -34.0, 0.0, 0.0]
    env, same = placed(ball=(30.0, 0.0)), placed(ball=(30.0, 0.0))
    env.step(dash(250.0, 400.0))
    same.step(dash(100.0, 180.0))
    assert ways(env) == ways(same)
    env.step(dash(-100.0, 0.0))
    same.step(dash(0.0, 0.0))
    assert ways(env) == ways(same)


@pytest.mark.parametrize(
    ("ball", "velocity", "goal", "at"),
    [
        ((52.0, 0.0), (2.0, 1.0), True, (52.5, 0.25)),
        ((52.0, 6.5), (1.0, 1.0), True, (52.5, 7.0)),
        ((52.0, 6.52), (1.0, 1.0), False, (52.5, 7.02)),
        ((52.0, -6.52), (1.0, -1.0), False, (52.5, -7.02)),
        ((30.0, 33.5), (1.0, 1.0), False, (30.5, 34.0)),
        ((0.5, 0.0), (-1.0, 0.0), False, (0.0, 0.0)),
        ((52.0, 33.9), (1.0, 1.0), False, (52.1, 34.0)),  # over the side line before the goal line
    ],
)
def test_where_the_ball_leaves_the_field(ball, velocity, goal, at) -> None:
    env = placed(ball=ball)
    env.ball.velocity_x, env.ball.velocity_y = velocity
    observation, reward, terminated, truncated, info = env.step(turn(0.0))
    assert (reward, terminated, truncated, info["goal"]) == (5.0 if goal else 0.0, True, False, goal)
    assert (env.ball.x, env.ball.y) == pytest.approx(at)
    assert env.observation_space.contains(observation)


def test_time_limits_truncate() -> None:
    env = placed(ball=(10.385, 0.0), max_steps=4, untouched_limit=None)
    assert [env.step(turn(0.0))[3] for _ in range(4)] == [False, False, False, True]
    env = placed(ball=(10.385, 0.0), untouched_limit=3)
    actions = [turn(0.0), turn(0.0), kick(1.0, 0.0), turn(0.0), turn(0.0), turn(0.0)]
    assert [env.step(action)[3] for action in actions] == [False] * 5 + [True]
    env = placed(ball=(52.0, 0.0), max_steps=1)
    env.ball.velocity_x = 1.0
    assert env.step(turn(0.0))[2:4] == (True, False)  # a goal in the last step is no time-out


def test_time_outs_terminate_on_request() -> None:
    for limits in ({"max_steps": 3}, {"untouched_limit": 3}):
        env = placed(ball=(10.385, 0.0), time_outs_terminate=True, **limits)
        assert [env.step(turn(0.0))[1:4] for _ in range(3)] == [(0.0, False, False)] * 2 + [(0.0, True, False)]


def test_an_action_is_held_for_its_cycles_and_no_longer_than_the_episode() -> None:
    """As many single cycles give the same observation; the kick of the first cycle alone reaches the ball."""
    held, single = (placed(ball=(10.385, 0.0), max_steps=10, frame_skip=skip) for skip in (4, 1))
    action = kick(50.0, 0.0)
    observation, *_, info = held.step(action)
    singles = [single.step(action) for _ in range(4)]
    assert observation.tolist() == singles[-1][0].tolist() and info["kicked"]
    assert [step[4]["kicked"] for step in singles] == [True, False, False, False]
    assert [held.step(turn(0.0))[3] for _ in range(2)] == [False, True]  # after 4 + 4 + 2 cycles
    held = placed(ball=(52.0, 0.0), frame_skip=4)
    held.ball.velocity_x = 1.0
    assert held.step(turn(0.0))[1:3] == (5.0, True)


def test_the_observation_by_hand() -> None:
    env = placed(ball=(12.0, 2.0))
    env.heading = math.pi / 2
    observation = env.step(turn(0.0))[0]
    scale = 2.0 / math.hypot(52.5, 68.0)
    assert observation[:8] == pytest.approx([20.0 / 52.5 - 1.0, 0, 0, 0, 1, 0, 24.0 / 52.5 - 1.0, 2.0 / 34.0], abs=1e-6)
    half = math.sqrt(0.5)
    assert observation[12:16] == pytest.approx([math.sqrt(8) * scale - 1.0, -0.25, -half, half], abs=1e-6)
    assert observation[16:18] == pytest.approx([math.sqrt(8) / 5.0 - 1.0, -1.0], abs=1e-6)
    assert observation[22:26] == pytest.approx([42.5 * scale - 1.0, -0.5, -1.0, 0.0], abs=1e-6)
    angle = math.atan2(7.01, 42.5) - math.pi / 2
    assert observation[27:30] == pytest.approx([angle / math.pi, math.sin(angle), math.cos(angle)], abs=1e-6)
    env.ball.velocity_x = 2.7
    observation = env.step(turn(0.0))[0]
    assert observation[8:12] == pytest.approx([1.0, 0.0, 0.0, -1.0], abs=1e-6)  # to the right of where it faces


@pytest.mark.parametrize("task", HalfField.TASKS)
def test_every_start_lies_in_its_range(task: str) -> None:
    env, start = HalfField(task), STARTS[task]
    for seed in range(200):
        *_, info = env.reset(seed=seed)
        assert start.x_low <= env.ball.x <= start.x_high and abs(env.ball.y) <= start.y_limit
        assert info["ball_distance"] <= start.behind
        from_ball = math.hypot(52.5 - env.player.x, env.player.y)
        assert from_ball >= info["goal_distance"] - 1e-9 or env.player.x == 0.0
        assert (info["task"], info["goal"]) == (HalfField.TASKS.index(task), False)


def test_the_tasks_come_nearer_to_the_goal() -> None:
    assert HalfField.TASKS == ("target", "far", "near", "goal_mouth")
    starts = list(STARTS.values())
    assert all(one.x_high < other.x_low for one, other in itertools.pairwise(starts))
    assert (starts[0].x_low, starts[0].x_high, starts[0].y_limit) == pytest.approx((0.0, 10.5, 27.2))


@pytest.mark.parametrize("task", HalfField.TASKS)
def test_running_to_the_ball_and_kicking_at_the_goal_scores_in_time(task: str) -> None:
    env = HalfField(task)
    goals = 0
    for seed in range(25):
        observation, _ = env.reset(seed=seed)
        reward, done = 0.0, False
        while not done:
            near = observation[17] > 0
            action = kick(100.0, 180.0 * observation[23]) if near else dash(100.0, 180.0 * observation[13])
            observation, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
        goals += reward == 5.0
    assert goals == 25


def test_a_task_holds_from_the_next_reset_on_also_through_wrappers_and_vectors() -> None:
    env = HalfField()
    assert env.task == "target"
    assert env.reset(seed=0)[1]["task"] == 0
    env.task = "near"
    assert env.step(turn(0.0))[4]["task"] == 0
    assert env.reset()[1]["task"] == 2
    assert env.reset(options={"task": "goal_mouth"})[1]["task"] == 3
    assert env.task == "goal_mouth" and env.reset()[1]["task"] == 3
    env = gymnasium.make("HalfField-1v0", task="far")
    assert env.reset(seed=0)[1]["task"] == 1
    env.set_wrapper_attr("task", "near")
    assert env.reset()[1]["task"] == 2
    vector = gymnasium.make_vec("HalfField-1v0", num_envs=2)
    vector.set_attr("task", ["goal_mouth", "far"])
    assert vector.reset(seed=0)[1]["task"].tolist() == [3, 1]


def test_unknown_tasks_and_bad_actions_are_refused() -> None:
    message = "task is 'easy'; it must be one of 'target', 'far', 'near', 'goal_mouth'"
    env = HalfField()
    for attempt in (
        lambda: HalfField("easy"),
        lambda: setattr(env, "task", "easy"),
        lambda: env.reset(options={"task": "easy"}),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()
    assert env.task == "target"
    env = placed(ball=(10.5, 0.0))
    with pytest.raises(ValueError, match="choice is 3; accepted are 0"):
        env.step((3, NOTHING, NOTHING[:1], NOTHING))
    with pytest.raises(ValueError, match="power is nan"):
        env.step(dash(math.nan, 0.0))
    with pytest.raises(ValueError, match="angle is inf"):
        env.step(kick(1.0, math.inf))


def test_noise_is_off_unless_asked_for_and_within_its_share() -> None:
    env = placed(ball=(10.385, 0.0), player_noise=0.1, ball_noise=0.05, kick_noise=0.1)
    reached = set()
    for _ in range(50):
        env.player.place(10.0, 0.0)
        env.ball.place(10.385, 0.0)
        env.step(kick(50.0, 0.0))
        assert abs(env.ball.x - 11.735) <= 0.05 + 0.05 * 1.41 and abs(env.ball.y) <= 0.05 + 0.05 * 1.41
        reached.add(env.ball.y)
        env.player.place(10.0, 0.0)
        env.step(dash(100.0, 0.0))
        assert abs(env.player.x - 10.6) <= 0.06 and 0.0 < abs(env.player.y) <= 0.06
        env.heading, env.player.velocity_x, env.player.velocity_y = 0.0, 0.0, 0.0
        env.step(turn(100.0))
        assert 0.0 < abs(math.degrees(env.heading) - 100.0) <= 10.0
        env.heading = 0.0
    assert len(reached) == 50


def test_the_same_seed_plays_the_same_episode() -> None:
    played = []
    for _ in range(2):
        env = HalfField("near", keeper=True, player_noise=0.1, ball_noise=0.05, kick_noise=0.1)
        env.action_space.seed(3)
        observations = [env.reset(seed=7)[0]]
        observations += [env.step(env.action_space.sample())[0] for _ in range(40)]
        played.append(np.stack(observations))
    assert np.array_equal(*played)


def test_a_picture_is_drawn() -> None:
    assert HalfField().render() is None
    picture = draw((26.25, 0.0), 0.0, (0.0, 34.0), (52.5, -34.0))
    assert picture.dtype == np.uint8 and picture.shape == (444, 351, 3)
    assert picture[222, 176].tolist() == [240, 170, 30]  # the player in the middle
    assert picture[222, 184].tolist() == [240, 170, 30] and picture[222, 166].tolist() == [58, 125, 68]  # faces right
    assert picture[18, 18].tolist() == [255, 255, 255]  # the ball in the upper left corner
    assert picture[426, 333].tolist() == [50, 90, 220]  # the keeper in the lower right one


def test_registering_twice_changes_nothing() -> None:
    before = dict(gymnasium.registry)
    lightning_replay.envs.register_envs()
    assert gymnasium.registry == before
    assert {"HalfField-1v0", "HalfField-1v1", "ThreeRooms-v0", "PointMazeTasks-Medium-v0"} <= set(before)


def test_registering_imports_no_simulator_and_an_identifier_can_name_the_module() -> None:
    code = (
        "import sys, gymnasium\n"
        "env = gymnasium.make('lightning_replay.envs:HalfField-1v0', task='near')\n"
        "assert env.reset(seed=0)[1]['task'] == 2\n"
        "assert not {'torch', 'minigrid', 'mujoco', 'gymnasium_robotics', 'pygame'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("start", "end", "caught"),
    [
        ((48.0, 0.0), (49.4, 0.0), False),
        ((48.0, 0.0), (49.6, 0.0), True),
        ((48.0, 0.0), (52.0, 0.0), True),  # past the keeper within the step
        ((48.0, 0.9), (52.0, 0.9), True),
        ((48.0, 1.1), (52.0, 1.1), False),
        ((48.0, -2.0), (52.0, 1.0), True),  # slanting through it
        ((48.0, -3.0), (50.0, 3.0), False),  # slanting past its corner
        ((50.2, 0.3), (50.2, 0.3), True),  # lying in it
        ((50.2, 1.3), (50.2, 1.3), False),
    ],
)
def test_what_a_keeper_catches(start: tuple[float, float], end: tuple[float, float], caught: bool) -> None:
    keeper = Keeper()
    keeper.body.place(50.0, 0.0)
    assert keeper.catches(*start, *end) is caught
    assert keeper.catches(*end, *start) is caught


def test_the_keeper_walks_to_the_line_between_ball_and_goal() -> None:
    keeper, ball = Keeper(), soccer.ball()
    keeper.start(1.0)
    assert (keeper.body.x, keeper.body.y) == pytest.approx((51.5, 3.505))
    ball.place(22.5, -40.0 * 0.5)
    keeper.act(ball)
    assert math.hypot(keeper.body.x - 51.5, keeper.body.y - 3.505) == pytest.approx(0.24)
    for _ in range(30):
        keeper.act(ball)
    distance = math.hypot(30.0, 20.0)
    assert (keeper.body.x, keeper.body.y) == pytest.approx((52.5 - 3.0 * 30.0 / distance, -3.0 * 20.0 / distance))
    ball.place(49.5, 0.0)
    for _ in range(30):
        keeper.act(ball)
    assert (keeper.body.x, keeper.body.y) == pytest.approx((51.5, 0.0))


def test_the_keeper_meets_shots_on_target_alone() -> None:
    keeper, ball = Keeper(), soccer.ball()
    ball.place(40.0, 0.0)
    ball.velocity_x, ball.velocity_y = 2.5, 1.0  # would cross the line at y = 5
    keeper.body.place(52.5, 0.0)
    keeper.act(ball)
    nearest = 12.5 * 2.5**2 / (2.5**2 + 1.0)  # x of the point of the way nearest to the keeper
    assert keeper.body.y / (52.5 - keeper.body.x) == pytest.approx((nearest * 0.4) / (12.5 - nearest))
    ball.velocity_x, ball.velocity_y = 0.5, 0.1  # rolls 8.3 m, not as far as the line
    keeper.body.place(51.5, 0.0)
    keeper.act(ball)
    assert keeper.body.y == 0.0 and keeper.body.x < 51.5


def test_a_caught_ball_ends_the_episode_without_reward_and_a_shot_into_the_corner_scores() -> None:
    env = placed(ball=(48.0, 0.0), player=(47.5, 0.0), keeper=True)
    env.keeper.body.place(51.0, 0.0)
    env.step(kick(100.0, 0.0))
    observation, reward, terminated, truncated, info = env.step(turn(0.0))
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert info["caught"] and not info["goal"] and env.observation_space.contains(observation)
    env = placed(ball=(46.0, 4.0), player=(45.5, 4.0), keeper=True)
    env.keeper.body.place(51.0, 0.0)
    angle = math.degrees(math.atan2(2.5, 6.5))
    outcomes = [env.step(kick(100.0, angle)), env.step(turn(0.0)), env.step(turn(0.0))]
    assert [outcome[1] for outcome in outcomes] == [0.0, 0.0, 5.0]


def test_shots_at_the_keeper_are_caught_and_a_dribble_with_a_shot_past_it_scores() -> None:
    assert _goals(shoot_within=60.0, aim=0.0) == 0
    assert _goals(shoot_within=12.0, aim=6.3) >= 20


def _goals(shoot_within: float, aim: float) -> int:
    """Goals of 25 episodes: run to the ball, push it towards the goal, then shoot to the side the keeper is not on."""
    env, goals = HalfField("target", keeper=True), 0
    for seed in range(25):
        _, info = env.reset(seed=seed)
        reward, done = 0.0, False
        while not done:
            player, ball = env.player, env.ball
            if info["ball_distance"] > soccer.KICKABLE_DISTANCE:
                x, y = ball.x + 2 * ball.velocity_x - player.x, ball.y + 2 * ball.velocity_y - player.y
                action = dash(100.0, _degrees(math.atan2(y, x) - env.heading))
            else:
                near = info["goal_distance"] < shoot_within
                keeper_side = (52.5 - ball.x) * (env.keeper.body.y - ball.y) + ball.y * (env.keeper.body.x - ball.x)
                to = math.copysign(aim, -keeper_side) if near else 0.0
                action = kick(100.0 if near else 5.0, _degrees(math.atan2(to - ball.y, 52.5 - ball.x) - env.heading))
            _, reward, terminated, truncated, info = env.step(action)
            done = terminated or truncated
        goals += reward == 5.0
    return goals


def _degrees(angle: float) -> float:
    return math.degrees(math.remainder(angle, math.tau))
