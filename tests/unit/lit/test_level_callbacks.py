# SPDX-License-Identifier: Apache-2.0
"""The test protocol, figures and pictures of levels, on levels whose returns and difficulties are known."""

from __future__ import annotations

import math
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from matplotlib import pyplot
from matplotlib.colors import LogNorm
from torch.utils.data import DataLoader

from lightning_replay.levels import LevelBatchSampler, LevelBuffer, LevelSet, SequentialLevels, UniformLevels
from lightning_replay.levels.scores import Learnability
from lightning_replay.lit import (
    Evaluate,
    GeneralizationGap,
    LearningCurve,
    LevelCurriculum,
    LogLevelStats,
    ReplayDataModule,
    ReplayProgressBar,
    ScoreAgainstStaleness,
    level_returns,
)
from lightning_replay.lit.pictures import draw_learning_curves, draw_level_curriculum
from tests.unit.lit.level_toys import Doors, Stairs, Valuer, make_data
from tests.unit.lit.test_callbacks import Memory
from tests.unit.lit.toys import Counting, Tiny, make_replay, make_trainer

PICTURE = b"\x89PNG"


def stairs_return(level: int) -> float:
    steps = 1 + level % 4
    return steps * level + steps * (steps + 1) / 20


def idle(observations: np.ndarray) -> np.ndarray:
    return np.zeros(len(observations), dtype=int)


@pytest.mark.parametrize("num_envs", [1, 3, 16])
def test_each_level_is_played_once(num_envs: int) -> None:
    # long and short ones, so that some environments begin the levels a second time before others end their first
    levels = [7, 4, 8, 0, 12, 3, 16]
    seen = []

    def policy(observations):
        seen.extend(observations[observations[:, 1] == 0, 0].tolist())
        return idle(observations)

    found = level_returns(policy, Stairs, levels, num_envs)
    assert found == pytest.approx([stairs_return(level) for level in levels])
    assert set(seen) == set(levels)


def test_a_level_without_an_end_counts_up_to_the_limit() -> None:
    class Odd(Stairs):
        def step(self, action):
            observation, reward, terminated, _, info = super().step(action)
            return observation, reward, terminated, False, info

    levels = [0, 1, 4, 3, 2]
    with pytest.warns(UserWarning, match="an evaluation episode in <.*> had not ended after 7 steps"):
        found = level_returns(idle, Odd, levels, 2, max_episode_steps=7)
    expected = [7 * level + 2.8 if level % 2 else stairs_return(level) for level in levels]
    assert found == pytest.approx(expected)
    with pytest.raises(ValueError, match="max_episode_steps is 0; it must be a whole number from 1 on"):
        level_returns(idle, Odd, levels, max_episode_steps=0)
    with pytest.raises(TypeError, match="env is <.*>; it must be a Gymnasium id, or a callable"):
        level_returns(idle, Odd(), levels)


def test_a_second_round_on_a_level_does_not_count() -> None:
    played: list[int] = []

    class OnlyTheFirst(Stairs):
        def reset(self, *, seed=None, options=None):
            self.reward = float(seed not in played)
            played.append(seed)
            return super().reset(seed=seed)

    levels = [0, 3, 4]  # level 0 is begun and ended again while level 3 is played
    assert level_returns(idle, OnlyTheFirst, levels, 2) == pytest.approx([stairs_return(level) for level in levels])
    assert len(played) > 3


def test_each_level_is_played_by_set_level() -> None:
    found = level_returns(lambda rows: rows[:, :3].argmax(1), Doors, [4, 5, 6], num_envs=2)
    assert found.tolist() == [4.0, 4.0, 4.0]
    assert level_returns(idle, Doors, [4, 5, 6]).tolist() == [0.0, 0.0, 4.0]


def fit(directory: Path, callbacks, data=None, agent=None, **options):
    data = data or make_data()
    trainer = make_trainer(directory, callbacks, **options)
    trainer.fit(agent or Valuer(), datamodule=data)
    return trainer, data


HELD_OUT = np.mean([stairs_return(level) for level in (100, 101, 102)])


def test_the_gap_between_held_out_levels_and_those_trained_on(tmp_path: Path) -> None:
    gap, logger = GeneralizationGap(every_n_env_steps=30), Memory()
    trainer, data = fit(tmp_path, [gap], make_data(SequentialLevels([5, 8, 9])), logger=logger)
    trained = np.mean([stairs_return(level) for level in (5, 8, 9)])
    assert dict(gap.history) == pytest.approx({0: HELD_OUT, 30: HELD_OUT, 60: HELD_OUT})
    assert dict(gap.training_history) == pytest.approx({30: trained, 60: trained})  # nothing was played at the start
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("eval/")}
    expected = {"eval/return": HELD_OUT, "eval/train_return": trained, "eval/generalization_gap": trained - HELD_OUT}
    assert metrics == pytest.approx(expected, rel=1e-6)
    logged = [(step, values) for step, values in logger.records if "eval/return" in values]
    assert [(step, values["updates"]) for step, values in logged] == [(0, 0), (30, 2), (60, 4)]
    assert logged[0][1] == pytest.approx({"eval/return": HELD_OUT, "updates": 0})
    assert logged[1][1] == pytest.approx(expected | {"updates": 2})
    assert data.levels.episodes > 0 and sorted(data.collection.played_levels) == [5, 8, 9]


def test_the_success_rate_on_held_out_levels(tmp_path: Path) -> None:
    class Flagged(Stairs):
        def step(self, action):
            *step, info = super().step(action)
            ends = step[2] or step[3]
            # Level 100 succeeds. Of level 102 only the infos before the end say so, and level 101 has no flag.
            told = (
                {}
                if self.level == 101
                else {"is_success": (self.level == 100) == ends, "nested": {"level": self.level}}
            )
            return (*step, info | told)

    gap = GeneralizationGap(every_n_env_steps=30)
    trainer, _ = fit(tmp_path, [gap], make_data(SequentialLevels([5, 8, 9]), env=Flagged))
    assert gap.success_history == [(steps, pytest.approx(1 / 3)) for steps in (0, 30, 60)]
    assert trainer.callback_metrics["eval/success_rate"] == pytest.approx(1 / 3)
    seen = set()

    def success(episode_return, infos):
        seen.add((round(episode_return, 1), infos.get("is_success"), infos.get("nested", {}).get("level")))
        return episode_return > stairs_return(100)

    own = GeneralizationGap(every_n_env_steps=100, success=success)
    fit(tmp_path, [own], make_data(SequentialLevels([5, 8, 9]), env=Flagged))
    returns = [round(stairs_return(level), 1) for level in (100, 101, 102)]
    assert seen == {(returns[0], True, 100), (returns[1], None, None), (returns[2], False, 102)}
    assert own.success_history[0] == (0, pytest.approx(2 / 3))


def test_playing_levels_does_not_disturb_training(tmp_path: Path) -> None:
    actions = []
    for callbacks in ([], [GeneralizationGap(every_n_env_steps=10)]):
        torch.manual_seed(0)
        agent = Valuer()
        fit(tmp_path, callbacks, agent=agent)
        actions.append(torch.cat([rollout["action"] for rollout in agent.rollouts], 1))
        assert agent.training
    assert torch.equal(*actions)


def test_the_policy_acts_as_in_training_and_the_same_each_time(tmp_path: Path) -> None:
    seen = []

    class Watching(Valuer):
        def act(self, observation, explore):
            action = super().act(observation, explore)
            if self.trainer.datamodule.env_steps_done in (0, 60) and torch.all(observation[:, 0] >= 100):
                seen.append((explore, action.tolist()))
            return action

    fit(tmp_path, [GeneralizationGap(every_n_env_steps=60)], agent=Watching())
    assert len(seen) % 2 == 0 and seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert all(explore for explore, _ in seen)


def test_a_data_module_without_levels_is_refused(tmp_path: Path) -> None:
    for callback in (GeneralizationGap(), LogLevelStats(), LevelCurriculum(), ScoreAgainstStaleness()):
        data = ReplayDataModule(Counting, make_replay(), env_steps=25, warmup_steps=20)
        with pytest.raises(TypeError, match=f"{type(callback).__name__} .*ReplayDataModule has no.*LevelDataModule"):
            make_trainer(tmp_path, [callback]).fit(Tiny(), datamodule=data)


@pytest.mark.slow
def test_callbacks_remember_after_a_resume(tmp_path: Path) -> None:
    def callbacks():
        saved = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
        curriculum = LevelCurriculum(every_n_rollouts=2, path=str(tmp_path / "c.png"))
        return [GeneralizationGap(30), curriculum, LearningCurve(str(tmp_path / "l.png")), saved]

    first = callbacks()
    fit(tmp_path, first)
    second = callbacks()
    trainer = make_trainer(tmp_path, second)
    trainer.fit(Valuer(), datamodule=make_data(env_steps=90), ckpt_path=tmp_path / "step=4.ckpt")
    gaps, curricula = (first[0], second[0]), (first[1], second[1])
    assert gaps[1].history[:3] == gaps[0].history and gaps[1].training_history[:2] == gaps[0].training_history
    assert [steps for steps, _ in gaps[1].history] == [0, 30, 60, 90]
    assert curricula[1].history[:2] == curricula[0].history
    assert [steps for steps, _ in curricula[1].history] == [30, 60, 90]
    before = [episode for episode in first[2].history if episode[0] <= 60]
    assert second[2].history[: len(before)] == before and second[2].history[-1][0] > 60 and len(before) > 4
    # another run with the same callbacks begins anew
    fit(tmp_path, second[:3])
    assert second[2].history[0][0] <= 15 and second[2].history == sorted(second[2].history, key=lambda each: each[0])
    assert [steps for steps, _ in gaps[1].history] == [0, 30, 60] == [0, *(steps for steps, _ in curricula[1].history)]
    assert [steps for steps, _ in gaps[1].training_history] == [30, 60]


def test_the_mass_of_each_difficulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    curriculum, logger, found = LevelCurriculum(every_n_rollouts=2), Memory(), []

    class Watching(Valuer):
        def training_step(self, batch, batch_idx):
            levels = self.trainer.datamodule.levels.probabilities()
            mass = torch.zeros(3, dtype=torch.float64).index_add_(0, levels["level_id"] % 3, levels["probability"])
            found.append(mass.tolist())
            return super().training_step(batch, batch_idx)

    trainer, _ = fit(tmp_path, [curriculum], make_data(env_steps=75), Watching(), logger=logger)
    assert [steps for steps, _ in curriculum.history] == [30, 60, 75]
    for (_, masses), expected in zip(curriculum.history, (found[1], found[3], found[4]), strict=True):
        assert [masses.get(float(d), 0.0) for d in range(3)] == pytest.approx(expected)
        assert math.isclose(sum(masses.values()), 1.0)
    (logged,) = [m["levels/expected_difficulty"] for step, m in logger.records if step == 75]
    assert logged == pytest.approx(found[4][1] + 2 * found[4][2])
    assert (Path(trainer.log_dir or ".") / "level_curriculum.png").read_bytes()[:4] == PICTURE


def test_a_difficulty_of_ones_own(tmp_path: Path) -> None:
    asked = []

    def halves(level_id: int) -> float:
        asked.append(level_id)
        return float(level_id >= 6)

    curriculum = LevelCurriculum(halves, every_n_rollouts=1, path=str(tmp_path / "mine.png"))
    fit(tmp_path, [curriculum])
    assert len(asked) == len(set(asked)) and set(curriculum.history[-1][1]) == {0.0, 1.0}
    assert (tmp_path / "mine.png").exists()


def test_an_environment_without_difficulty_is_refused(tmp_path: Path) -> None:
    class Wide(Valuer):
        def value(self, observation):
            return super().value(observation[:, :2])

    with pytest.raises(ValueError, match=r'no info\["difficulty"\].*give LevelCurriculum\(difficulty=...\)'):
        fit(tmp_path, [LevelCurriculum(every_n_rollouts=1)], make_data(env=Doors), Wide())


def test_scores_against_staleness(tmp_path: Path, saved_figures: list) -> None:
    _, data = fit(tmp_path, [ScoreAgainstStaleness(str(tmp_path / "scores.png"))])
    assert (tmp_path / "scores.png").read_bytes()[:4] == PICTURE
    levels = data.levels.probabilities()
    axes, bar = saved_figures[0].axes
    assert axes.get_title() == f"Scores and staleness of {len(levels)} levels"
    assert axes.get_xlabel() == "staleness (episodes since the level was played)"
    assert axes.get_ylabel() == "score of the level" and bar.get_ylabel() == "probability of replay (logarithmic)"
    (points,) = axes.collections
    rows = levels["probability"].argsort()  # the most probable is drawn last, over the others
    assert points.get_offsets().tolist() == torch.stack((levels["staleness"], levels["score"]), 1)[rows].tolist()
    assert points.get_array().tolist() == pytest.approx(levels["probability"][rows].tolist())
    assert isinstance(points.norm, LogNorm) and points.norm.vmax == pytest.approx(levels["probability"].max().item())


def test_sources_without_scores_draw_nothing_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pictures = [LevelCurriculum(path=str(tmp_path / "c.png")), ScoreAgainstStaleness(str(tmp_path / "s.png"))]
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        fit(tmp_path, pictures, make_data(UniformLevels(12, seed=0)))
    assert not list(tmp_path.glob("*.png"))
    for name in ("LevelCurriculum", "ScoreAgainstStaleness"):
        assert f"{name} drew nothing, because no level has a score: UniformLevels(" in caplog.text


def colored(path: Path) -> float:
    """Share of a picture that is neither white, gray nor black."""
    image = pyplot.imread(path)[..., :3]
    return float((np.ptp(image, axis=-1) > 0.2).mean())


def test_a_single_record_is_seen(tmp_path: Path) -> None:
    draw_level_curriculum([(10, {1.0: 0.25, 2.0: 0.75})], tmp_path / "one.png")
    draw_level_curriculum([(10, {1.0: 1.0}), (20, {2.0: 0.25, 1.0: 0.75})], tmp_path / "two.png")
    assert colored(tmp_path / "one.png") > 0.05 and colored(tmp_path / "two.png") > 0.5
    draw_learning_curves({"a point": [(10, 1.0)]}, tmp_path / "point.png")
    draw_learning_curves({"a point": []}, tmp_path / "nothing.png")
    assert colored(tmp_path / "point.png") > colored(tmp_path / "nothing.png")


def test_levels_that_were_forgotten_leave_a_gap_in_the_picture(tmp_path: Path, saved_figures: list) -> None:
    draw_level_curriculum([(10, {1.0: 1.0}), (20, {2.0: 0.25, 1.0: 0.75})], tmp_path / "new" / "c.png")
    assert (tmp_path / "new" / "c.png").exists()
    (axes,) = saved_figures[0].axes
    assert axes.get_title() == "Level curriculum: difficulty of the levels replayed"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("environment steps", "probability of replay")
    # stacked: the second area lies on the first, and the legend has them from the top down
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in axes.collections]
    assert tops == [1.0, 1.0] and axes.collections[1].get_paths()[0].vertices[:, 1].min() == 0.75
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["2", "1"]
    assert axes.get_legend().get_title().get_text() == "difficulty"


def test_many_records_are_drawn_as_means(tmp_path: Path, saved_figures: list) -> None:
    # in turn all on one difficulty or on the other; half of each over ten records
    draw_level_curriculum([(step, {float(step % 2): 1.0}) for step in range(500)], tmp_path / "c.png")
    (axes,) = saved_figures[0].axes
    assert axes.get_ylabel() == "probability of replay, mean of about 10 records"
    area = axes.collections[0].get_paths()[0].vertices
    assert set(area[:, 1].tolist()) == {0.0, 0.5} and area[:, 0].max() == 499


def test_figures_of_levels_are_logged(tmp_path: Path) -> None:
    logger = Memory()
    _, data = fit(tmp_path, [LogLevelStats(every_n_rollouts=2)], logger=logger)
    assert [step for step, _ in logger.records] == [30, 60]
    last = logger.records[-1][1]
    assert last["levels/levels"] == len(data.levels) and last["levels/episodes"] == data.levels.episodes
    for name in ("effective_levels", "probability_max"):
        assert last[f"levels/{name}"] == data.levels.stats()[name]
    assert last["train/return"] == pytest.approx(data.collection.recent_return)
    assert last["train/loss"] == pytest.approx(1.6) and last["updates"] == 4 and last["env_steps_per_second"] > 0


PROMPTS = LevelSet([{"question": str(number)} for number in range(20)])


class Asking(L.LightningModule):
    """Records whether the prompts of a batch were answered: those with an even number are."""

    def __init__(self, levels) -> None:
        super().__init__()
        self.levels = levels
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        (batch,) = batch if isinstance(batch, list | tuple) and isinstance(batch[0], list) else (batch,)
        self.levels.record([prompt["level_id"] for prompt in batch], [prompt["level_id"] % 2 == 0 for prompt in batch])
        self.log("loss", self.weight)
        return {"loss": self.weight + 1.0}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def asking(directory, callback, wrap=lambda loader: loader, data=None, **options):
    levels = LevelBuffer(PROMPTS, score=Learnability(window=4), seed=0)
    sampler = LevelBatchSampler(levels, batch_size=4, num_batches=5)
    logger = Memory()
    trainer = make_trainer(
        directory, [callback], logger=logger, **({"max_epochs": 2, "log_every_n_steps": 1} | options)
    )
    loader = wrap(DataLoader(PROMPTS, batch_sampler=sampler, collate_fn=list))
    trainer.fit(Asking(levels), None if data else loader, datamodule=data and data(loader))
    return [(step, values) for step, values in logger.records if "levels/levels" in values], levels, logger


class Loaded(L.LightningDataModule):
    def __init__(self, loader) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return self.loader


@pytest.mark.parametrize("given", ["a loader", "a list", "a data module", "levels"])
def test_figures_of_the_levels_of_a_dataloader_are_logged(tmp_path: Path, given: str) -> None:
    ways = {"a list": {"wrap": lambda loader: [loader]}, "a data module": {"data": Loaded}}
    others = LevelBuffer(PROMPTS, score=Learnability(window=4), seed=1)
    callback = LogLevelStats(every_n_rollouts=4, levels=others if given == "levels" else None)
    records, levels, logger = asking(tmp_path, callback, **ways.get(given, {}))
    # After the batches 4 and 8, of two epochs of five: at the steps at which Lightning logs, which counts from 0.
    assert [step for step, _ in records] == [3, 7]
    logged = [step for step, values in logger.records if "loss" in values]
    assert logged == list(range(10))
    assert [values["levels/episodes"] for _, values in records] == ([0, 0] if given == "levels" else [16, 32])
    last = records[-1][1]
    # The weight falls by a half in each batch.
    assert last["train/loss"] == pytest.approx(1.0 - 0.5 * 7) and last["batches_per_second"] > 0
    assert levels.episodes == 40 and "env_steps_per_second" not in last and "train/return" not in last


def test_records_of_a_dataloader_go_on_after_a_resume(tmp_path: Path) -> None:
    levels = LevelBuffer(PROMPTS, score=Learnability(window=4), seed=0)
    seen = []
    for max_epochs, checkpoint in ((1, None), (3, tmp_path / "one.ckpt")):
        logger = Memory()
        loader = DataLoader(PROMPTS, batch_sampler=LevelBatchSampler(levels, 4, num_batches=5), collate_fn=list)
        trainer = make_trainer(tmp_path, [LogLevelStats(4)], logger=logger, max_epochs=max_epochs)
        trainer.fit(Asking(levels), loader, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        seen += [step for step, values in logger.records if "levels/levels" in values]
    assert seen == [3, 7, 11]  # after 4, 8, and 12 of 15 batches


def test_a_dataloader_without_levels_is_refused(tmp_path: Path) -> None:
    for wrap, message in (
        (
            lambda loader: DataLoader(PROMPTS, batch_size=4, collate_fn=list),
            "DataLoader has none; fit with a LevelData",
        ),
        (lambda loader: [loader, loader], r"list has 2; .* LevelBatchSampler, or give levels="),
    ):
        with pytest.raises(TypeError, match=f"LogLevelStats is about levels, of which {message}"):
            asking(tmp_path, LogLevelStats(), wrap)
    with pytest.raises(TypeError, match="levels is 3; it must be a level selector such as"):
        LogLevelStats(levels=3)


def test_the_other_callbacks_know_levels_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = {}
    monkeypatch.setattr("lightning_replay.lit.pictures.draw_learning_curves", lambda found, *_: curves.update(found))
    gap, bar = GeneralizationGap(30), ReplayProgressBar(refresh_seconds=0.0)
    fit(tmp_path, [gap, bar, LearningCurve()], enable_progress_bar=True)
    assert curves["held-out levels"] == gap.history and curves["levels trained on"] == gap.training_history
    assert len(curves["training episodes"]) > 4
    # without exploration, from the seeds as levels
    evaluate = Evaluate(every_n_env_steps=30, episodes=2)
    fit(tmp_path, [evaluate])
    assert evaluate.history[0][1] == pytest.approx((stairs_return(10_000) + stairs_return(10_001)) / 2)


def test_many_training_episodes_are_drawn_as_means_with_a_band(tmp_path: Path, saved_figures: list) -> None:
    data = make_data(SequentialLevels([4, 8]), env_steps=1_002, num_envs=2, rollout_length=501)  # episodes of one step
    fit(tmp_path, [LearningCurve()], data)
    (axes,) = saved_figures[0].axes
    (line,) = axes.get_lines()
    assert line.get_label() == "training episodes, mean ± standard deviation of about 20"
    # 50 groups of 20 or 21 returns, 4.1 and 8.1 in turn
    assert len(line.get_xdata()) == 50 and line.get_xdata()[-1] == 1_002
    assert line.get_ydata() == pytest.approx([6.1] * 50, abs=0.1)
    (band,) = axes.collections
    _, low, _, high = band.get_paths()[0].get_extents().extents
    assert (low, high) == pytest.approx((4.1, 8.1), abs=0.1)
    assert axes.get_title() == "Learning curve of Valuer"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("environment steps", "return of an episode")


def test_a_run_shorter_than_the_interval_of_records_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        fit(tmp_path, [LevelCurriculum(path=str(tmp_path / "c.png"), every_n_rollouts=1_000)], max_steps=1)
    assert "LevelCurriculum drew nothing, because fewer than 1000 rollouts were made: " in caplog.text
