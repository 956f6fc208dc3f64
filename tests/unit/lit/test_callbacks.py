# SPDX-License-Identifier: Apache-2.0
"""Evaluation metrics where Lightning looks for them, statistics against environment steps, bar and picture."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger

from lightning_replay import recipes
from lightning_replay.lit import (
    Evaluate,
    LearningCurve,
    LinearLearningRate,
    LogReplayStats,
    ReplayCheckpoint,
    ReplayDataModule,
    ReplayProgressBar,
)
from lightning_replay.lit import evaluation as progress
from lightning_replay.lit.rollouts import episode_returns
from lightning_replay.writers import SurpriseOnly
from tests.unit.lit.toys import Counting, Tiny, make_data, make_replay, make_trainer


class ScriptedEvaluate(Evaluate):
    """Evaluates for real, then replaces the result by scripted ones."""

    def __init__(self, *script: float, **options) -> None:
        super().__init__(**options)
        self.script = list(script)

    def _publish(self, trainer) -> None:
        steps, _ = self.history[-1]
        self.history[-1] = (steps, self.script[min(len(self.history) - 1, len(self.script) - 1)])
        super()._publish(trainer)


class Memory(Logger):
    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None) -> None:
        self.records.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs) -> None:
        pass


def test_evaluation_is_due_by_environment_steps(tmp_path: Path) -> None:
    evaluate, logger = Evaluate(every_n_env_steps=15, episodes=2), Memory()
    trainer = make_trainer(tmp_path, [evaluate], logger=logger)
    trainer.fit(Tiny(), datamodule=make_data(updates_per_env_step=0.5))
    # the first update comes at step 22, then every second step; the run ends at 60
    assert evaluate.history == [(0, 15.0), (22, 15.0), (30, 15.0), (46, 15.0), (60, 15.0)]
    assert trainer.callback_metrics["eval/return"] == 15.0
    assert [(step, m["eval/return"]) for step, m in logger.records if "eval/return" in m] == evaluate.history


class Flagged(Counting):
    """The last infos have a flag: episode 1 of an evaluation succeeds, and episode 0 if its action is below 0.49."""

    key = "is_success"
    number = -1

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.number = seed - 10_000
        return super().reset(seed=seed)

    def step(self, action):
        *step, info = super().step(action)
        succeeded = self.number == 1 or (self.number == 0 and float(action[0]) < 0.49)
        return (*step, info | self.told(succeeded) if self.count == self.length else info)

    def told(self, succeeded: bool):
        return {self.key: succeeded}


class FlaggedIfTrue(Flagged):
    key = "success"

    def told(self, succeeded: bool):
        return {self.key: np.bool_(True)} if succeeded else {}


class Learning(Tiny):
    """Its weight, and so its action, falls from 0.5 to below 0.49 by update 10, and is 0.6 from update 20 on."""

    def update(self, batch):
        outputs = super().update(batch)
        update = self.trainer.datamodule.updates_done
        with torch.no_grad():
            self.weight.fill_(0.5 if update < 10 else 0.4 if update < 20 else 0.6)
        return outputs


@pytest.mark.parametrize("env", [Flagged, FlaggedIfTrue])
def test_the_success_rate_is_that_of_the_last_infos(tmp_path: Path, env) -> None:
    evaluate, logger = Evaluate(every_n_env_steps=10, episodes=4), Memory()
    keep = ReplayCheckpoint(tmp_path / "run", monitor="eval/success_rate")
    trainer = make_trainer(tmp_path, [evaluate, keep], logger=logger)
    trainer.fit(Learning(), datamodule=make_data(env=env))
    # Of four episodes one succeeds, and a second one from update 10 to 19, which is step 30 to 39.
    expected = [(0, 0.25), (21, 0.25), (30, 0.5), (40, 0.25), (50, 0.25), (60, 0.25)]
    assert evaluate.success_history == expected and [steps for steps, _ in evaluate.history] == [0, 21, 30, 40, 50, 60]
    assert trainer.callback_metrics["eval/success_rate"] == 0.25
    assert [(step, m["eval/success_rate"]) for step, m in logger.records if "eval/success_rate" in m] == expected
    assert keep.best_model_score == 0.5
    best = torch.load(keep.best_model_path, weights_only=True)
    assert best["callbacks"]["Evaluate"]["success_history"][-1] == (30, 0.5)
    again, best_path = Evaluate(every_n_env_steps=10, episodes=4), keep.best_model_path
    trainer = make_trainer(tmp_path, [again, ReplayCheckpoint(tmp_path / "run", monitor="eval/success_rate")])
    trainer.fit(Learning(), datamodule=make_data(env=env), ckpt_path=best_path)
    assert again.success_history == expected  # that of the save, and those that follow
    trainer.fit(Learning(), datamodule=make_data(env=env, env_steps=21))
    assert [steps for steps, _ in again.success_history] == [0, 21]  # another run begins anew


def test_episodes_without_a_flag_are_failures_once_one_had_it(tmp_path: Path) -> None:
    class Rare(FlaggedIfTrue):
        def told(self, succeeded: bool):
            return super().told(succeeded and self.number == 0)

    evaluate = Evaluate(every_n_env_steps=10, episodes=4)
    trainer = make_trainer(tmp_path, [evaluate])
    trainer.fit(Learning(), datamodule=make_data(env=Rare))
    assert evaluate.success_history == [(30, 0.25), (40, 0.0), (50, 0.0), (60, 0.0)]  # before, no episode had it
    assert trainer.callback_metrics["eval/success_rate"] == 0.0


@pytest.mark.parametrize("told", [None, "yes", [True, False], {"goal": True}], ids=str)
def test_infos_that_are_no_flags_give_no_rate(tmp_path: Path, told) -> None:
    class Told(Flagged):
        def told(self, succeeded: bool):
            return {"is_success": told}

    for env in (Counting, Told):
        evaluate = Evaluate(every_n_env_steps=100, episodes=2)
        trainer = make_trainer(tmp_path, [evaluate])
        trainer.fit(Tiny(), datamodule=make_data(env=env, env_steps=22))
        assert evaluate.success_history == [] and "eval/success_rate" not in trainer.callback_metrics
        assert len(evaluate.history) == 2


def test_a_function_tells_whether_an_episode_succeeded(tmp_path: Path) -> None:
    class Lengths(Counting):
        def reset(self, *, seed=None, options=None):
            self.length = 5 if seed is None else seed - 10_000 + 1  # 1, 2, 3 steps, so returns of 1, 3, 6
            return super().reset(seed=seed)

        def step(self, action):
            *step, _ = super().step(action)
            return (*step, {"left": self.length - self.count, "is_success": True})

    seen = []

    def success(episode_return, infos):
        seen.append((episode_return, infos["left"]))
        return episode_return > 2

    evaluate = Evaluate(every_n_env_steps=100, episodes=3, success=success)
    make_trainer(tmp_path, [evaluate]).fit(Tiny(), datamodule=make_data(env=Lengths, env_steps=22))
    assert evaluate.success_history == [(0, pytest.approx(2 / 3)), (22, pytest.approx(2 / 3))]
    assert seen == [(1.0, 0), (3.0, 0), (6.0, 0)] * 2
    with pytest.raises(TypeError, match="success is 3; it must be a function of an episode's return and last infos"):
        Evaluate(success=3)
    for returned in (None, "yes", [True, False]):
        wrong = Evaluate(episodes=1, success=lambda episode_return, infos, returned=returned: returned)
        with pytest.raises(ValueError, match=r"success returned .* for returns of shape \[\]; it must return one flag"):
            make_trainer(tmp_path, [wrong]).fit(Tiny(), datamodule=make_data())


def test_learning_rates_fall_linearly_and_go_on_after_a_checkpoint(tmp_path: Path) -> None:
    class Rates(L.Callback):
        def __init__(self) -> None:
            self.seen: dict[int, float] = {}

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            self.seen[trainer.datamodule.updates_done] = trainer.optimizers[0].param_groups[0]["lr"]

    # steps of the environment: 60, updates 1 to 40 after steps 21 to 60; every 10 updates the rate is set
    seen, checkpoint = Rates(), tmp_path / "half.ckpt"
    trainer = make_trainer(tmp_path, [seen, LinearLearningRate(end=0.1, every_n_updates=10)], max_steps=25)
    trainer.fit(Tiny(), datamodule=make_data())
    trainer.save_checkpoint(checkpoint)
    # an update is the step's whose rate was set before it: 1e-4 (1 - 0.9 * 30 / 60) after update 10, at step 30
    assert [seen.seen[update] for update in (1, 10, 11, 20, 21)] == pytest.approx([1e-4, 1e-4, 5.5e-5, 5.5e-5, 4e-5])
    trainer = make_trainer(tmp_path, [seen, LinearLearningRate(end=0.1, every_n_updates=10)])
    trainer.fit(Tiny(), datamodule=make_data(), ckpt_path=checkpoint)
    assert [seen.seen[update] for update in (26, 31, 40)] == pytest.approx([3.25e-5, 2.5e-5, 2.5e-5])
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-5)  # at the end


def test_evaluation_does_not_disturb_training(tmp_path: Path) -> None:
    weights, seen = [], []
    for callbacks in ([], [Evaluate(every_n_env_steps=3, episodes=2)]):
        torch.manual_seed(0)
        agent = Tiny()
        make_trainer(tmp_path, callbacks).fit(agent, datamodule=make_data())
        weights.append(agent.weight)
        seen.append(agent.seen)
    assert torch.equal(*weights) and seen[0] == seen[1]


def test_evaluations_are_resumed(tmp_path: Path) -> None:
    evaluate = ScriptedEvaluate(1.0, 7.0, every_n_env_steps=10, episodes=1)
    trainer = make_trainer(tmp_path, [evaluate])
    trainer.fit(Tiny(), datamodule=make_data(env_steps=35))
    trainer.save_checkpoint(tmp_path / "run" / "end.ckpt")
    again, seen = ScriptedEvaluate(1.0, 7.0, every_n_env_steps=10, episodes=1), []

    class Look(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module) -> None:
            seen.append((trainer.callback_metrics["eval/return"].item(), len(again.history)))

    data = make_data()
    trainer = make_trainer(tmp_path, [again, Look()])
    trainer.fit(Tiny(), datamodule=data, ckpt_path=tmp_path / "run" / "end.ckpt")
    assert seen[0] == (7.0, len(evaluate.history))  # not evaluated again
    assert again.history[: len(evaluate.history)] == evaluate.history
    assert [steps for steps, _ in again.history] == [0, 21, 30, 35, 40, 50, 60]


def test_the_figures_by_which_hoarding_shows_are_logged(tmp_path: Path) -> None:
    replay = recipes.surprise_retention(
        50, 4, rule=SurpriseOnly(), initial_surprise=lambda rows: torch.ones(len(rows)), seed=0
    )
    data, logger = ReplayDataModule(Counting, replay, env_steps=23, warmup_steps=20, seed=0), Memory()
    make_trainer(tmp_path, [LogReplayStats(every_n_updates=1)], logger=logger).fit(Tiny(), datamodule=data)
    logged, stats = logger.records[-1][1], replay.stats()
    assert {"train/loss", "train/td_error", "updates_per_second", "replay/nbytes"} <= set(logged)
    assert logged["train/return"] == 15.0 and logged["updates"] == 3
    names = ("refused", "age_over_capacity", "terminal_share", "terminal_over_newest", "td_error_over_newest")
    assert {name: logged[f"replay/{name}"] for name in names} == {name: stats[name] for name in names}
    # there is room for all 23 rows, of which every fifth ends an episode
    assert [stats[name] for name in names] == [0, 11 / 50, 4 / 23, 1.0, 1.0]


def test_the_bar_shows_steps_return_and_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    real = progress.tqdm
    monkeypatch.setattr(progress, "tqdm", lambda **options: real(file=output, **(options | {"ncols": 120})))
    bar = ReplayProgressBar()
    bar.refresh_seconds = 0.0
    trainer = make_trainer(tmp_path, [bar, Evaluate(20, 3)], enable_progress_bar=True)
    trainer.fit(Tiny(), datamodule=make_data())
    text = output.getvalue()
    assert "evaluating, 1 of 3 played" in text and "evaluating" not in text.splitlines()[-1].split("\r")[-1]
    assert "60/60" in text and "return=15.0" in text and "eval/return=15.0" in text and "updates/s=" in text
    assert trainer.progress_bar_callback is bar


def test_the_picture_is_drawn_at_the_end(tmp_path: Path, saved_figures: list) -> None:
    evaluate = Evaluate(20, 2)
    make_trainer(tmp_path, [LearningCurve(), evaluate]).fit(Tiny(), datamodule=make_data())
    picture = tmp_path / "learning_curve.png"
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 5_000
    (axes,) = saved_figures[0].axes
    training, evaluation = axes.get_lines()
    assert list(zip(*evaluation.get_data(), strict=True)) == evaluate.history
    labels = ["training episodes", "evaluation, mean of 2 episodes"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == labels
    assert axes.get_title() == "Learning curve of Tiny" and len(training.get_xdata()) > 1
    make_trainer(tmp_path, [LearningCurve(str(tmp_path / "a" / "b.png"))]).fit(Tiny(), datamodule=make_data())
    assert (tmp_path / "a" / "b.png").exists()


def test_the_picture_begins_with_the_first_episode_however_many_there_are(tmp_path: Path) -> None:
    curve = LearningCurve()
    data = make_data(env=partial(Counting, length=1), env_steps=1_300, warmup_steps=100, updates_per_env_step=0.05)
    make_trainer(tmp_path, [curve]).fit(Tiny(), datamodule=data)
    assert len(data.collection.episodes) == 1_000, "what the data module keeps"
    assert curve.history == [(step, 1.0) for step in range(1, 1_301)]


def test_feedback_without_td_errors_is_an_error(tmp_path: Path) -> None:
    class Forgetful(Tiny):
        def training_step(self, batch, batch_idx):
            return {"loss": self.update(batch)["loss"]}

    with pytest.raises(KeyError, match="training_step of Forgetful returned no 'td_error'"):
        make_trainer(tmp_path).fit(Forgetful(), datamodule=make_data(make_replay(prioritized=True)))
    uniform = make_data()
    make_trainer(tmp_path).fit(Forgetful(), datamodule=uniform)  # the loss is sufficient
    assert uniform.updates_done > 0


class Endless(Counting):
    def __init__(self, length: int = 10**9) -> None:
        super().__init__(length)


def test_an_evaluation_episode_without_an_end_counts_up_to_the_limit(tmp_path: Path) -> None:
    evaluate = Evaluate(every_n_env_steps=100, episodes=2, max_episode_steps=20)
    data = ReplayDataModule(Endless, make_replay(), env_steps=24, warmup_steps=20, seed=0)
    with pytest.warns(UserWarning, match="had not ended after 20 steps; it counts up .*TimeLimit.*max_episode_steps"):
        make_trainer(tmp_path, [evaluate]).fit(Tiny(), datamodule=data)
    assert evaluate.history == [(0, 210.0), (24, 210.0)]  # 1 + 2 + ... + 20
    # An episode of just as many steps ends by itself.
    returns = episode_returns(Tiny(), Endless(20), episodes=1, seed=0, max_episode_steps=20)
    assert list(returns) == [210.0]


class Fragile(Counting):
    closed = 0

    def step(self, action):
        if self.count == 3:
            raise ZeroDivisionError
        return super().step(action)

    def close(self) -> None:
        type(self).closed += 1


def test_the_environment_of_an_evaluation_that_fails_is_closed(tmp_path: Path) -> None:
    data = make_data(env=Fragile)
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, [Evaluate(episodes=1)]).fit(Tiny(), datamodule=data)
    assert Fragile.closed == 2  # that whose spaces were read, and this one
