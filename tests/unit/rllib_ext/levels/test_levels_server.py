# SPDX-License-Identifier: Apache-2.0
"""The level buffer behind EnvRunners and Learners, without their processes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray import cloudpickle
from tensordict import TensorDict

from lightning_replay import forking
from lightning_replay.levels import LevelBuffer, LevelSelector, UniformLevels
from lightning_replay.levels.scores import Learnability, PositiveValueLoss
from rllib_ext.levels.level_assignment import LevelSupply
from rllib_ext.levels.server import Fragment, LevelServer, PendingEpisode, PendingEpisodes
from tests.level_steps import first_reward


def server_of(levels: LevelSelector, spare: Path, **options: Any) -> LevelServer:
    given = {"environments": 2, "max_lag": 4, "max_pending": 100, "flush": False, **options}
    return LevelServer(cloudpickle.dumps(levels), spare=str(spare), **given)


def buffer(**options: Any) -> LevelBuffer:
    return LevelBuffer(**{"levels": 6, "staleness_weight": 0.3, "seed": 0, **options})


def fragment(name: str, start: int = 0, rewards: tuple[float, ...] = (1.0,), done: bool = True) -> Fragment:
    reward = np.array(rewards, np.float32)
    return Fragment(name, start, reward, np.zeros(len(reward) + 1, np.float32), done, False)


def begin(server: LevelServer, *names: str, runner: int = 1, broken_off: tuple[str, ...] = ()) -> list[int]:
    return server.draw(runner, "process", names, broken_off)


def played(server: LevelServer, count: int, name: str = "e") -> list[int]:
    """Levels of episodes that are played and scored one after the other."""
    levels = []
    for number in range(count):
        levels += begin(server, f"{name}{number}")
        server.score([fragment(f"{name}{number}", rewards=(float(levels[-1]),))])
    return levels


def test_it_is_the_buffer_played_by_one_actor_for_each_episode(tmp_path: Path) -> None:
    server, direct = server_of(buffer(), tmp_path), buffer()
    for number in range(30):
        (level_id,) = begin(server, f"e{number}")
        assert level_id == direct.next_level("actor")
        rewards = torch.arange(1.0, 4.0) * level_id
        server.score([fragment(f"e{number}", 0, tuple(rewards[:2].tolist()), done=False)])
        server.score([fragment(f"e{number}", 2, tuple(rewards[2:].tolist()))])
        for part in (slice(0, 2), slice(2, 3)):
            ends = torch.tensor([step == 2 for step in range(part.start, part.stop)])
            zeros = torch.zeros(len(ends))
            following = {"reward": rewards[part], "state_value": zeros, "terminated": ends, "done": ends}
            steps = TensorDict({"state_value": zeros, "next": following}, [len(ends)])
            direct.update("actor", level_id, steps, bool(ends[-1]))
    assert (server.probabilities() == direct.probabilities()).all() and len(direct) == 6
    assert server.stats().items() >= direct.stats().items() and direct.episodes == 30
    assert server.stats()["effective_levels"] > 1.0


def test_the_server_plays_levels_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = buffer()
    monkeypatch.setattr(forking, "process", "another")
    assert played(server_of(levels, tmp_path), 3) == played(server_of(levels, tmp_path), 3)


class Returned(Learnability):
    """The return itself."""

    def of_episode(self, level_id: int, episode: int, episode_return: float) -> float:
        return episode_return


@pytest.mark.parametrize(("score", "expected"), [(Returned(), 30.5), (first_reward, 0.125)])
def test_scores_of_whole_episodes_get_the_environments_own_return(score: Any, expected: float, tmp_path: Path) -> None:
    server = server_of(buffer(score=score), tmp_path)
    begin(server, "e")
    server.score([fragment("e", 0, (0.125, 0.125), done=False)])  # rewards as connectors left them
    server.score([replace(fragment("e", 2, (0.125, 0.125)), episode_return=30.5)])
    assert server.probabilities()["score"].tolist() == [expected]


def test_two_episodes_of_one_environment_on_one_level_do_not_mix(tmp_path: Path) -> None:
    server = server_of(buffer(levels=1), tmp_path)
    assert begin(server, "a", "b") == [0, 0]
    server.score([fragment("a", 0, (8.0,), done=False), fragment("b", 0, (1.0,))])
    assert server.probabilities()["score"].item() == pytest.approx(1.0)  # of b alone
    server.score([fragment("a", 1, (4.0,))])
    assert server.probabilities()["score"].item() == pytest.approx(6.0)


def test_what_was_broken_off_or_lost_is_forgotten(tmp_path: Path) -> None:
    server = server_of(buffer(), tmp_path)
    begin(server, "a", "b")
    begin(server, "c", broken_off=("b", "unknown"))
    begin(server, "d", runner=2)
    assert (server.stats()["in_flight"], server.stats()["episodes_lost"]) == (3, 1)
    server.draw(1, "new process", ["e"])  # EnvRunner 1 is another: a and c are lost
    assert (server.stats()["in_flight"], server.stats()["episodes_lost"]) == (2, 3)
    server.score([fragment(name) for name in "abcde"])
    stats = server.report(lost_runners=[2])
    assert (stats["in_flight"], stats["levels"], stats["fragments_dropped"]) == (0, 2, 3)
    begin(server, "f", runner=2)
    assert server.report(lost_runners=[1, 2])["in_flight"] == 0


def test_the_oldest_of_too_many_episodes_of_an_env_runner_is_forgotten(tmp_path: Path) -> None:
    server = server_of(buffer(), tmp_path, max_pending=2)
    begin(server, "a", "b", "c")
    begin(server, "d", runner=2)
    stats = server.report([])
    assert (stats["in_flight"], stats["episodes_lost"]) == (3, 1)
    assert server.trains_on(["a", "b", "c", "d"]) == [False, True, True, True]


def test_an_episode_whose_end_never_arrives_is_forgotten(tmp_path: Path) -> None:
    server = server_of(buffer(levels=1), tmp_path, max_lag=0)
    begin(server, "a", "b")
    server.score([fragment("a", done=False)])
    server.score([fragment("b")])
    stats = server.stats()
    assert (stats["in_flight"], stats["episodes_lost"], stats["levels"]) == (0, 1, 1)


def test_a_server_that_was_lost_during_its_first_write_starts_anew(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "state-0123456789ab").mkdir()
    assert server_of(buffer(), tmp_path).stats()["restarts"] == 0
    assert server_of(buffer(), tmp_path).stats()["restarts"] == 1
    assert [path.name for path in tmp_path.glob("state-*")] != ["state-0123456789ab"]


def test_resuming_repeats_the_next_choices_and_then_forgets_what_was_in_flight(tmp_path: Path) -> None:
    server, again = server_of(buffer(), tmp_path / "one"), server_of(buffer(seed=7), tmp_path / "other")
    played(server, 4)
    begin(server, "running")
    state = cloudpickle.loads(cloudpickle.dumps(server.state()))
    begin(again, "stale")
    again.load_state(state)
    for number, in_flight in enumerate((2, 2)):  # once two environments chose, what ran before the break is given up
        assert begin(again, f"n{number}") == begin(server, f"n{number}")
        assert again.stats()["in_flight"] == in_flight
    assert server.stats()["in_flight"] == 3
    again.score([fragment("stale"), fragment("running"), fragment("n0")])
    assert again.stats()["fragments_dropped"] == 2 and again.stats()["in_flight"] == 1


def test_it_starts_again_from_the_last_report(tmp_path: Path) -> None:
    server = server_of(buffer(), tmp_path)
    played(server, 5)
    for _ in range(3):
        stats = server.report([])
    played(server, 1, name="later")
    again = server_of(buffer(), tmp_path)
    assert again.stats() == {**stats, "restarts": 1}
    again.report([])
    assert server_of(buffer(), tmp_path).stats() == {**stats, "restarts": 2}


def test_a_draw_that_is_repeated_after_a_restart_is_scored(tmp_path: Path) -> None:
    server = server_of(buffer(), tmp_path, environments=3)
    begin(server, "a", "b", "ahead")
    server.report([])
    again = server_of(buffer(), tmp_path, environments=3)
    begin(again, "a", "b")  # Ray calls again with the same names
    assert again.stats()["in_flight"] == 3
    begin(again, "c")  # as many as environments: what was drawn before and not again is abandoned
    assert again.stats()["in_flight"] == 3 and again.trains_on(["a", "ahead"]) == [True, False]
    again.score([fragment("a"), fragment("b"), fragment("ahead")])
    assert (again.stats()["in_flight"], again.stats()["fragments_dropped"]) == (1, 1)


def test_episodes_that_were_broken_off_are_abandoned_although_levels_are_left_over(tmp_path: Path) -> None:
    server = server_of(buffer(), tmp_path)
    remote = SimpleNamespace(remote=server.draw)
    config = SimpleNamespace(num_envs_per_env_runner=2)
    supply = LevelSupply(SimpleNamespace(draw=remote), SimpleNamespace(worker_index=1, config=config))
    supply.begin_round()
    first, _ = supply.take(None)
    supply.take(first)
    assert server.stats()["in_flight"] == 8
    supply.begun_before = 2  # of 6 left over
    supply.begin_round()
    assert (server.stats()["in_flight"], server.stats()["episodes_lost"]) == (7, 1)
    supply.begin_round()
    assert server.stats()["episodes_lost"] == 1


def test_a_mean_of_zero_after_an_update_is_no_score(tmp_path: Path) -> None:
    score = PositiveValueLoss(discount=1.0, gae_lambda=0.0)
    server = server_of(buffer(levels=1, score=score), tmp_path, flush=True)
    begin(server, "a")
    for start, (reward, expected) in enumerate([(-4.0, []), (2.0, [2.0]), (-1.0, [2.0])]):
        server.score([fragment("a", start, (reward,), done=False)])
        assert server.probabilities()["score"].tolist() == expected


def broken(generator: torch.Generator) -> int:
    raise OSError("no more levels")


def test_what_goes_wrong_in_a_choice_is_said_where_it_is_heard(tmp_path: Path) -> None:
    server = server_of(LevelBuffer(levels=None, capacity=4, generate=broken, seed=0), tmp_path)
    assert begin(server, "a", "b") == [0, 0]
    with pytest.raises(RuntimeError, match="could not choose a level:(?s:.*)no more levels"):
        server.score([])
    begin(server, "c")
    with pytest.raises(RuntimeError, match="no more levels"):
        server.report([])


def test_levels_that_were_played(tmp_path: Path) -> None:
    server = server_of(UniformLevels(range(10, 13), seed=0), tmp_path)
    assert set(played(server, 30)) == {10, 11, 12}
    assert server.played_levels() == [10, 11, 12] and server.stats()["levels"] == 0


def ones(name: str, start: int, length: int, done: bool = False) -> Fragment:
    return fragment(name, start, (1.0,) * length, done)


def begun(*names: str, max_lag: int = 2) -> PendingEpisodes:
    episodes = PendingEpisodes(max_lag)
    for number, name in enumerate(names):
        episodes.active[name] = PendingEpisode(name, number, runner=1)
    return episodes


def taken(episodes: PendingEpisodes, *fragments: Fragment) -> tuple[list[tuple[str, int]], list[str]]:
    """Actor and first step of what is learned, and actors given up."""
    learned, late = episodes.take(fragments)
    for name in late:
        del episodes.active[name]
    return [(episode.actor, one.t_started) for episode, one in learned], late


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_end_waits_for_all_steps_before_it(order: tuple[int, ...]) -> None:
    #   steps  0 1 2 | 3 4 | 5 6 7 end
    pieces = [ones("a", 0, 3), ones("a", 3, 2), ones("a", 5, 3, done=True)]
    episodes = begun("a")
    learned = [start for place in order for _, start in taken(episodes, pieces[place])[0]]
    assert sorted(learned) == [0, 3, 5] and learned[-1] == 5
    assert not episodes.active and not any(episodes.counts.values())


def test_fragments_that_came_before_or_of_unknown_episodes_are_dropped() -> None:
    episodes = begun("a")
    assert taken(episodes, ones("a", 0, 3), ones("a", 0, 3), ones("b", 0, 3)) == ([("a", 0)], [])
    assert episodes.counts["fragments_dropped"] == 2
    assert taken(episodes, ones("a", 3, 1, done=True), ones("a", 3, 1, done=True)) == ([("a", 3)], [])
    assert episodes.counts["fragments_dropped"] == 3


def test_what_is_missing_is_given_up_when_later_episodes_went_by() -> None:
    # a lacks its end, b a piece in the middle, c and d are complete, e goes on; f is of another EnvRunner, and g begins
    episodes = begun("a", "b", "c", "d", "e", "g", max_lag=2)
    episodes.active["f"] = PendingEpisode("f", 9, runner=2)
    assert taken(episodes, ones("a", 0, 2), ones("b", 0, 2), ones("b", 4, 1, done=True))[0] == [("a", 0), ("b", 0)]
    assert taken(episodes, ones("c", 0, 1, done=True)) == ([("c", 0)], [])  # overtaken for the first time
    assert taken(episodes, ones("e", 0, 1)) == ([("e", 0)], [])
    assert taken(episodes, ones("e", 1, 1), ones("d", 0, 1)) == ([("e", 1), ("d", 0), ("b", 4)], ["a"])
    assert dict(episodes.counts) == {"fragments_dropped": 0, "gaps": 1, "episodes_lost": 0}
    assert episodes.active.keys() == {"d", "e", "f", "g"}


def test_an_episode_that_goes_on_waits_for_its_end_however_many_others_begin() -> None:
    episodes = begun("long", *map(str, range(20)), max_lag=2)
    for number in range(20):
        pieces = [ones(str(number), 0, 1, done=True)]
        if number % 3 == 0:  # two batches in a row have nothing of it, as with two Learners
            pieces.append(ones("long", number // 3, 1))
        assert not taken(episodes, *pieces)[1]
    assert episodes.active.keys() == {"long"} and not any(episodes.counts.values())


def test_steps_are_in_torchrls_layout() -> None:
    values = np.arange(4, dtype=np.float32)
    logits = np.ones((3, 2), np.float32)
    steps = Fragment("a", 0, np.full(3, 0.5, np.float32), values, False, True, logits).steps()
    assert steps["state_value"].tolist() == [0, 1, 2] and steps["next", "state_value"].tolist() == [1, 2, 3]
    assert steps["next", "done"].tolist() == steps["next", "truncated"].tolist() == [False, False, True]
    assert not steps["next", "terminated"].any() and steps["logits"].shape == (3, 2)
    assert not ones("a", 0, 2).steps()["next", "done"].any() and "logits" not in ones("a", 0, 2).steps()
