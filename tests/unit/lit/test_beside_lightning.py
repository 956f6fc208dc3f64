# SPDX-License-Identifier: Apache-2.0
"""Lightning's own parts beside the library's: early stopping, schedulers, averages, precision, compilation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightning_replay import recipes
from lightning_replay.agents import DQN, MPDQN, PPO, SAC, TD3, Rainbow
from lightning_replay.levels import UniformLevels
from lightning_replay.lit import (
    Evaluate,
    GeneralizationGap,
    LevelDataModule,
    ReplayCheckpoint,
    ReplayDataModule,
    ReplayProgressBar,
)
from tests.unit.lit.level_toys import Doors, Stairs, Valuer
from tests.unit.lit.toys import Counting, Tiny, make_trainer

# Lightning's WeightAveraging of an agent that builds its networks in configure_model
pytestmark = pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model")


class Pictures(gymnasium.Env):
    """Five steps of noise."""

    observation_space: gymnasium.Space[Any] = gymnasium.spaces.Box(0, 255, (1, 4, 4), np.uint8)
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action):
        self.count += 1
        return self._observe(), 1.0, self.count == 5, False, {}

    def _observe(self) -> np.ndarray:
        return self.np_random.integers(0, 256, self.observation_space.shape).astype(self.observation_space.dtype)


class Parameters(Pictures):
    """The same with flat observations and actions that have parameters."""

    observation_space = gymnasium.spaces.Box(-1.0, 255.0, (2,), np.float32)
    action_space = gymnasium.spaces.Tuple(
        [gymnasium.spaces.Discrete(2), gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Box(0, 1, (2,))]
    )


class Scored(Evaluate):
    """Gives scripted scores, the last of them again and again, and keeps the weights that each was given for."""

    def __init__(self, *script: float, every_n_env_steps: int = 10) -> None:
        super().__init__(every_n_env_steps, episodes=1)
        self.script = script
        self.weights: dict[float, dict[str, torch.Tensor]] = {}

    def _play(self, trainer, agent) -> None:
        super()._play(trainer, agent)
        score = self.script[min(len(self.history), len(self.script)) - 1]
        self.history[-1] = (self.history[-1][0], score)
        self.weights[score] = {name: weights.clone() for name, weights in agent.state_dict().items()}


def replayed(env: Any = Counting, **options: Any) -> ReplayDataModule:
    options = {"env_steps": 60, "warmup_steps": 20, "seed": 0} | options
    return ReplayDataModule(env, recipes.prioritized(capacity=100, batch_size=4, seed=0), **options)


def levelled(env: Any = Doors, **options: Any) -> LevelDataModule:
    options = {"env_steps": 60, "num_envs": 2, "rollout_length": 4, "held_out_levels": [100, 101], "seed": 0} | options
    return LevelDataModule(env, UniformLevels(None, seed=0), **options)


SMALL = {"hidden_sizes": (8,)}
IMAGES = {"channels": (4,), "kernel_sizes": (2,), "strides": (1,), "hidden_size": 8, "atoms": 5}
AGENTS: dict[str, tuple[type, dict[str, Any], Callable[..., Any], Any]] = {
    "DQN": (DQN, SMALL, replayed, "CartPole-v1"),
    "TD3": (TD3, SMALL, replayed, Counting),
    "SAC": (SAC, SMALL, replayed, Counting),
    "MPDQN": (MPDQN, SMALL, replayed, Parameters),
    "Rainbow": (Rainbow, IMAGES, replayed, Pictures),
    "PPO": (PPO, SMALL | {"epochs": 1, "minibatches": 2}, levelled, Doors),
}
every_agent = pytest.mark.parametrize("name", AGENTS)


class Automatic(Tiny):
    """Automatic optimisation, with a scheduler if one is given; keeps by how much it changed the learning rate."""

    rate = 1e-4

    def __init__(self, make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None) -> None:
        super().__init__()
        self.automatic_optimization = True
        self.make_scheduler = make_scheduler
        self.rates: list[float] = []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"] / self.rate)
        return self.outputs(batch)

    def outputs(self, batch):
        td_error = self.weight * batch["observation"].sum(-1)
        return {"loss": td_error.square().mean(), "td_error": td_error.detach()}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate)
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}


@pytest.mark.parametrize(
    ("make_agent", "make_data", "every", "patience", "updates_per_epoch"),
    [
        (Tiny, replayed, 1, 3, None),
        (Automatic, replayed, 7, 1, 3),
        (lambda: DQN(**SMALL), lambda **o: replayed("CartPole-v1", **o), 25, 3, None),
    ],
    ids=["manual", "automatic", "joined updates"],
)
def test_early_stopping_counts_evaluations(tmp_path, make_agent, make_data, every, patience, updates_per_epoch) -> None:
    evaluate = Scored(5.0, 4.0, every_n_env_steps=every)
    stop = EarlyStopping("eval/return", mode="max", patience=patience)
    data = make_data(env_steps=200, updates_per_epoch=updates_per_epoch)
    make_trainer(tmp_path, [stop, evaluate]).fit(make_agent(), datamodule=data)
    # that before the first update is not the end of an epoch, and the first after it is the best so far
    assert len(evaluate.history) == 2 + patience
    assert data.env_steps_done == evaluate.history[-1][0] < 200


@pytest.mark.parametrize("rollouts_per_epoch", [None, 3])
@pytest.mark.parametrize("callback", [Evaluate, GeneralizationGap])
def test_early_stopping_counts_evaluations_of_levels(tmp_path: Path, callback, rollouts_per_epoch) -> None:
    evaluate = callback(every_n_env_steps=16)  # two rollouts
    stop = EarlyStopping("eval/return", mode="max", patience=3)
    data = levelled(Stairs, env_steps=400, rollouts_per_epoch=rollouts_per_epoch)
    make_trainer(tmp_path, [evaluate, stop]).fit(Valuer(), datamodule=data)
    assert len(evaluate.history) == 5 and data.env_steps_done == 64


@pytest.mark.parametrize("every", [1, 7])
def test_a_plateau_is_as_many_evaluations_as_asked_for(tmp_path: Path, every: int) -> None:
    def plateau(optimizer):
        scheduler = ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=1, eps=0.0)
        return {"scheduler": scheduler, "monitor": "eval/return"}

    agent, evaluate = Automatic(plateau), Scored(5.0, 4.0, every_n_env_steps=every)
    make_trainer(tmp_path, [evaluate]).fit(agent, datamodule=replayed())
    rate, worse = agent.trainer.optimizers[0].param_groups[0]["lr"], len(evaluate.history) - 2
    assert rate == pytest.approx(agent.rate * 0.5 ** (worse // 2))


def test_schedulers_of_epochs_step_once_for_each_evaluation(tmp_path: Path) -> None:
    agent, evaluate = Automatic(lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step)), Scored(1.0)
    make_trainer(tmp_path, [evaluate]).fit(agent, datamodule=replayed())
    assert [steps for steps, _ in evaluate.history] == [0, 21, 30, 40, 50, 60]
    # the score of step 21 is that of the weights after update 1
    assert agent.rates == pytest.approx([1.0] + 9 * [0.5] + 10 * [0.25] + 10 * [0.125] + 10 * [0.0625])


def test_the_weights_after_the_last_update_are_evaluated(tmp_path: Path) -> None:
    evaluate, agent = Scored(1.0, 2.0, 3.0, 4.0, every_n_env_steps=20), Tiny()
    stop = EarlyStopping("eval/return", mode="max", patience=1)
    # of the last six updates five follow the last two steps
    data = replayed(env_steps=60, num_envs=2, updates_per_env_step=3)
    make_trainer(tmp_path, [evaluate, stop]).fit(agent, datamodule=data)
    assert [steps for steps, _ in evaluate.history] == [0, 22, 40, 60]
    assert torch.equal(evaluate.weights[4.0]["weight"], agent.weight) and stop.best_score == 4.0


@pytest.mark.parametrize("options", [{"max_steps": 13}, {"limit_train_batches": 13, "max_epochs": 1}], ids=str)
def test_an_epoch_that_ends_for_another_reason_is_evaluated_too(tmp_path: Path, options) -> None:
    evaluate, stop = Scored(5.0, 4.0, every_n_env_steps=100), EarlyStopping("eval/return", mode="max", patience=3)
    trainer = make_trainer(tmp_path, [evaluate, stop], **options)
    trainer.fit(Tiny(), datamodule=replayed(env_steps=200))
    assert [steps for steps, _ in evaluate.history] == [0, 33]
    assert stop.best_score == trainer.callback_metrics["eval/return"] == 4.0


@pytest.mark.parametrize("interval", [{"check_val_every_n_epoch": 5}, {"val_check_interval": 20}], ids=str)
def test_intervals_of_validation_that_fit_does_not_run_stop_no_callback(tmp_path: Path, interval) -> None:
    stop = EarlyStopping("eval/return", mode="max", patience=3)
    keep = ModelCheckpoint(tmp_path, monitor="eval/return", mode="max")
    trainer, data = make_trainer(tmp_path, [Scored(5.0, 4.0), stop, keep], **interval), replayed(env_steps=200)
    trainer.fit(Tiny(), datamodule=data)
    assert data.env_steps_done == 50 and keep.best_model_score == 4.0
    assert interval.items() <= vars(trainer).items()


def test_a_score_is_there_until_the_weights_change(tmp_path: Path) -> None:
    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            seen.append(trainer.callback_metrics.get("eval/return"))

    bar = ReplayProgressBar()
    trainer = make_trainer(tmp_path, [Scored(5.0, 4.0, 3.0, 2.0), Look(), bar], enable_progress_bar=True)
    trainer.fit(Tiny(), datamodule=replayed(env_steps=49))
    assert seen == [4.0, *8 * [None], 3.0, *9 * [None], 2.0, *8 * [None], 2.0]
    assert trainer.callback_metrics["eval/return"] == bar.evaluation == 2.0


def test_an_option_without_effect_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for callbacks in ([], [Evaluate(20, 1)]):
            make_trainer(tmp_path, callbacks).fit(Tiny(), datamodule=replayed(updates_per_epoch=7))
    lines = [one.getMessage() for one in caplog.records if "updates_per_epoch" in one.getMessage()]
    assert lines == ["updates_per_epoch=7 has no effect: the evaluations of the callback Evaluate end the epochs."]


class AtEpochs(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None) -> bool:
        return epoch_idx is not None


AVERAGING: dict[str, Callable[[], list[L.Callback]]] = {
    "none": list,
    "ema": lambda: [EMAWeightAveraging(decay=0.5)],
    "epochs": lambda: [AtEpochs()],
    "both": lambda: [EMAWeightAveraging(decay=0.5, update_starting_at_epoch=1)],
}


def check_best(tmp_path: Path, name: str, averaging: list[L.Callback], is_last: bool, kind: str, best: float) -> None:
    agent, options, make_data, env = AGENTS[name]
    evaluate = Scored(1.0, 2.0, 9.0, 3.0, 4.0, best)
    if kind == "ours":
        keep: ModelCheckpoint = ReplayCheckpoint(tmp_path)
    else:
        steps = {"every_n_train_steps": 1} if kind == "steps" else {}
        keep = ModelCheckpoint(tmp_path, "best", monitor="eval/return", mode="max", **steps)
    callbacks = [evaluate, *averaging] if is_last else [*averaging, evaluate]
    torch.manual_seed(0)
    make_trainer(tmp_path, [*callbacks, keep]).fit(agent(**options), datamodule=make_data(env))
    assert keep.best_model_score == max(9.0, best)
    loaded, scored = agent.load_from_checkpoint(keep.best_model_path).state_dict(), evaluate.weights[max(9.0, best)]
    assert all(torch.equal(loaded[name], weights) for name, weights in scored.items())
    other = evaluate.weights[2.0]  # weights did change, so that the comparison can fail
    assert any(not torch.equal(other[name], weights) for name, weights in scored.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SAC", "MPDQN", "Rainbow", "PPO"])  # DQN and TD3 below
def test_the_best_checkpoint_holds_the_weights_that_were_scored(tmp_path: Path, name: str) -> None:
    check_best(tmp_path, name, AVERAGING["ema"](), is_last=True, kind="lightning", best=5.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("averaging", "is_last", "best", "kind"),
    [
        ("none", True, 5.0, "ours"),
        ("ema", False, 10.0, "lightning"),
        ("epochs", True, 5.0, "steps"),
        ("epochs", False, 10.0, "ours"),
        ("both", True, 5.0, "ours"),
        ("both", False, 10.0, "lightning"),
    ],
)
def test_so_it_does_for_every_average_and_checkpoint(tmp_path, averaging, is_last, kind, best) -> None:
    check_best(tmp_path, "TD3", AVERAGING[averaging](), is_last, kind, best)


@pytest.mark.parametrize("kind", ["ours", "lightning"])
def test_an_average_that_replaces_the_weights_after_the_run_is_not_in_the_best(tmp_path: Path, kind: str) -> None:
    average = StochasticWeightAveraging(1e-2, swa_epoch_start=1)
    check_best(tmp_path, "DQN", [average], is_last=True, kind=kind, best=10.0)
    agent = average._average_model
    assert agent is not None and agent.is_built  # although it was copied before the trainer builds networks


def test_the_best_holds_the_weights_that_a_hook_of_the_agent_has_changed(tmp_path: Path) -> None:
    class Shrinking(Tiny):
        def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
            with torch.no_grad():
                self.weight.mul_(0.99)

    evaluate = Scored(1.0, 2.0, 9.0, 3.0)
    keep = ModelCheckpoint(tmp_path, monitor="eval/return", mode="max")
    make_trainer(tmp_path, [evaluate, keep]).fit(Shrinking(), datamodule=replayed())
    saved = torch.load(keep.best_model_path, weights_only=True)["state_dict"]["weight"]
    assert torch.equal(saved, evaluate.weights[9.0]["weight"])


def test_a_checkpoint_at_steps_is_kept_only_for_a_score(tmp_path: Path) -> None:
    # evaluated after updates       -    1    10   20   30   40
    evaluate = Scored(1.0, 2.0, 9.0, 3.0, 4.0, 5.0)
    keep = ModelCheckpoint(tmp_path, "{step}", monitor="eval/return", mode="max", every_n_train_steps=4, save_top_k=-1)
    make_trainer(tmp_path, [evaluate, keep]).fit(Tiny(), datamodule=replayed())
    scores = {Path(path).stem: float(score) for path, score in keep.best_k_models.items()}
    assert scores == {"step=20": 3.0, "step=40": 5.0}
    for path, score in keep.best_k_models.items():
        saved = torch.load(path, weights_only=True)["state_dict"]["weight"]
        assert torch.equal(saved, evaluate.weights[float(score)]["weight"])


@pytest.mark.parametrize(
    ("run", "precision", "agent", "make_data"),
    [
        ("fit", "64-true", lambda: TD3(**SMALL), replayed),
        ("validate", "bf16-true", Tiny, replayed),
        ("fit", "16-true", Valuer, levelled),
    ],
)
def test_a_precision_of_other_weights_is_refused(tmp_path: Path, run: str, precision: str, agent, make_data) -> None:
    trainer = make_trainer(tmp_path, precision=precision)
    with pytest.raises(ValueError, match=rf"precision is {precision}.*Trainer\(precision='32-true'\), or 'bf16-mixed'"):
        getattr(trainer, run)(agent(), datamodule=make_data())


@pytest.mark.slow
@every_agent
def test_mixed_precision_trains(tmp_path: Path, name: str) -> None:
    agent, options, make_data, env = AGENTS[name]
    data, trainer = make_data(env), make_trainer(tmp_path, precision="bf16-mixed")
    trainer.fit(agent(**options), datamodule=data)
    assert data.is_finished
    assert all(torch.isfinite(weights).all() for weights in trainer.lightning_module.parameters())


def decayed(agent: type, interval: str = "epoch", frequency: int = 1, steps_itself: bool = False) -> type:
    """Returns a subclass whose schedulers halve the learning rates of all optimizers."""

    class Decayed(agent):  # type: ignore[misc]
        def configure_optimizers(self):
            given = super().configure_optimizers()
            optimizers = given if isinstance(given, list) else [given]
            schedulers = [LambdaLR(one, lambda step: 0.5**step) for one in optimizers]
            return optimizers, [{"scheduler": one, "interval": interval, "frequency": frequency} for one in schedulers]

        def update(self, batch):
            outputs = super().update(batch)
            for scheduler in [self.lr_schedulers()] if steps_itself else []:
                scheduler.step()
            return outputs

    return Decayed


def halvings(trainer: L.Trainer) -> set[float]:
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return {round(math.log2(group["initial_lr"] / group["lr"])) for group in groups}


@pytest.mark.slow
@every_agent
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # TD3's policy skips an update
@pytest.mark.parametrize(
    ("interval", "frequency", "of_replay", "of_levels"),
    # 40 updates, or 8 rollouts, in 4 epochs
    [("epoch", 1, 4, 4), ("step", 3, 13, 2)],
)
def test_schedulers_of_agents_step(tmp_path, name: str, interval, frequency, of_replay: int, of_levels: int) -> None:
    agent, options, make_data, env = AGENTS[name]
    length = {"rollouts_per_epoch": 2} if make_data is levelled else {"updates_per_epoch": 10}
    trainer = make_trainer(tmp_path)
    trainer.fit(decayed(agent, interval, frequency)(**options), datamodule=make_data(env, **length))
    assert halvings(trainer) == {of_levels if make_data is levelled else of_replay}


@pytest.mark.parametrize("several", [None, 1, 4])
def test_schedulers_of_steps_count_updates_however_many_a_training_step_has(tmp_path: Path, several) -> None:
    trainer, data = make_trainer(tmp_path), replayed("CartPole-v1", env_steps=45, updates_per_training_step=several)
    trainer.fit(decayed(DQN, "step", 2)(**SMALL), datamodule=data)
    assert halvings(trainer) == {12}


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_scheduler_that_a_subclass_steps_is_left_to_it(tmp_path: Path, interval: str) -> None:
    trainer = make_trainer(tmp_path)
    data = replayed("CartPole-v1", env_steps=45, updates_per_epoch=5)
    trainer.fit(decayed(DQN, interval, steps_itself=True)(**SMALL), datamodule=data)
    assert halvings(trainer) == {25}


def test_schedulers_of_agents_are_resumed(tmp_path: Path) -> None:
    agent = decayed(DQN, "epoch")
    whole = make_trainer(tmp_path / "whole", [ReplayCheckpoint(tmp_path / "whole", monitor=None)])
    whole.fit(agent(**SMALL), datamodule=replayed("CartPole-v1", updates_per_epoch=10, env_steps=80))
    for env_steps in (40, 80):
        part = make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / "part", monitor=None)])
        data = replayed("CartPole-v1", updates_per_epoch=10, env_steps=env_steps)
        part.fit(agent(**SMALL), datamodule=data, ckpt_path=None if env_steps == 40 else "last")
    assert halvings(part) == halvings(whole) == {6}


class Idle(Tiny):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [LambdaLR(optimizer, lambda step: 0.5**step)]


class Plateau(DQN):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [ReduceLROnPlateau(optimizer)]


@pytest.mark.parametrize(
    ("agent", "env", "name"),
    [(Idle, Counting, "LambdaLR of Idle"), (lambda: Plateau(**SMALL), "CartPole-v1", "ReduceLROnPlateau of Plateau")],
)
def test_schedulers_that_nobody_steps_are_reported(tmp_path: Path, agent, env, name: str) -> None:
    with pytest.warns(UserWarning, match=rf"{name}.configure_optimizers did not step in the first epoch") as seen:
        make_trainer(tmp_path, [Evaluate(10, 1)]).fit(agent(), datamodule=replayed(env, updates_per_epoch=10))
    assert len([one for one in seen if "did not step" in str(one.message)]) == 1


class Brief(Automatic):
    """Declares that it takes several batches, as the library's agents do, which take 10 s to compile."""

    takes_update_batches = True

    def training_step(self, batch, batch_idx):
        return self.outputs(batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, about its own code
def test_a_compiled_agent_trains_on_single_batches(tmp_path: Path) -> None:
    agents = Brief(), Brief()
    for agent, several in zip((agents[0], torch.compile(agents[1], backend="eager")), (1, None), strict=True):
        data = replayed(updates_per_training_step=several, env_steps=30)
        torch.manual_seed(0)
        make_trainer(tmp_path, [Evaluate(20, 1)]).fit(agent, datamodule=data)
        assert data.updates_done == 10
    torch.testing.assert_close(agents[1].weight, agents[0].weight)
    with pytest.raises(ValueError, match="updates_per_training_step is 4, and training_step of Brief is compiled"):
        trainer = make_trainer(tmp_path)
        trainer.fit(torch.compile(Brief(), backend="eager"), datamodule=replayed(updates_per_training_step=4))
