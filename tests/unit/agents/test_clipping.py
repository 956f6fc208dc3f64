# SPDX-License-Identifier: Apache-2.0
"""Every agent limits the gradient of each optimizer, by its own option or by the trainer's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tensordict import TensorDict

from lightning_replay import agents
from lightning_replay.agents import CQL, DQN, IQL, MPDQN, PPO, SAC, TD3, Rainbow, RecurrentDQN
from lightning_replay.agents.agent import OffPolicyAgent, SizedAgent
from tests.unit.agents import test_mpdqn, test_ppo, test_rainbow, test_recurrent
from tests.unit.agents.toys import Batches, fit, make_rows

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

CONTINUOUS = {"observation_size": 3, "action_low": [-2.0], "action_high": [2.0], "hidden_sizes": (8,)}
DISCRETE = {"observation_size": 3, "num_actions": 2, "hidden_sizes": (8,)}
UNLIMITED = {"gradient_norm": None}
AGENTS: dict[type[SizedAgent], dict[str, Any]] = {
    CQL: CONTINUOUS,
    DQN: DISCRETE,
    IQL: CONTINUOUS,
    MPDQN: test_mpdqn.SIZES | {"hidden_sizes": (8,), "gradient_clip": 1e9},
    PPO: test_ppo.SIZES | test_ppo.ONE_STEP | UNLIMITED,
    Rainbow: test_rainbow.SMALL | UNLIMITED,
    RecurrentDQN: test_recurrent.SIZES | UNLIMITED,
    SAC: CONTINUOUS,
    TD3: CONTINUOUS | {"policy_delay": 1},
}
BATCHES: dict[type[SizedAgent], Callable[[], TensorDict]] = {
    DQN: lambda: make_rows(torch.arange(8) % 2),
    MPDQN: test_mpdqn.make_batch,
    PPO: lambda: test_ppo.make_rollout(4, 4),
    Rainbow: test_rainbow.make_batch,
    RecurrentDQN: lambda: test_recurrent.sequences([4, 3], steps=4),
}
AVERSE = {"conflict_aversion": 0.5}  # DQN's other ways to its gradient
LIMIT = 1e-3
CASES = [*AGENTS.items(), (DQN, DISCRETE | AVERSE), (DQN, DISCRETE | {"observation_size": {"a": 3}})]


def gradients(agent: Any) -> list[torch.Tensor]:
    """Those of each optimizer after its step."""
    found = agent.optimizers(use_pl_optimizer=False)
    every = [one.param_groups[0]["params"] for one in (found if isinstance(found, list) else [found])]
    return [torch.cat([one.grad.flatten() for one in parameters if one.grad is not None]) for parameters in every]


def learn(kind: type[SizedAgent], options: dict[str, Any], directory: Path, **of_trainer: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    agent = kind(**options)
    batch = BATCHES.get(kind, lambda: make_rows(torch.rand(8, 1)))()
    if options.get("conflict_aversion"):
        batch["table"] = torch.arange(8) % 2
    if isinstance(options.get("observation_size"), dict):
        for key in ("observation", ("next", "observation")):
            batch[key] = TensorDict({"a": batch[key]}, batch.shape)
    trainer, record = fit(agent, [batch], directory, look=gradients, **of_trainer)
    assert trainer.gradient_clip_val == of_trainer.get("gradient_clip_val")  # as the user gave it, for the next fit
    return record.seen[-1]


def test_every_agent_has_a_case() -> None:
    public = {one for one in vars(agents).values() if isinstance(one, type) and issubclass(one, SizedAgent)}
    assert public - {OffPolicyAgent} == set(AGENTS)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_gradient_of_every_optimizer_is_limited(kind: type[SizedAgent], options: Any, tmp_path: Path) -> None:
    free = learn(kind, options, tmp_path)
    assert free and all(one.norm() > 2 * LIMIT for one in free)
    of_trainer = learn(kind, options | {kind.clip_option: 0.5}, tmp_path, gradient_clip_val=LIMIT)
    of_agent = learn(kind, options | {kind.clip_option: LIMIT}, tmp_path)
    for before, *limited in zip(free, of_trainer, of_agent, strict=True):
        for after in limited:  # shorter, in the same direction
            torch.testing.assert_close(after, before * (LIMIT / before.norm()), rtol=1e-2, atol=1e-8)
    by_value = learn(kind, options, tmp_path, gradient_clip_val=LIMIT, gradient_clip_algorithm="value")
    for before, after in zip(free, by_value, strict=True):
        torch.testing.assert_close(after, before.clamp(-LIMIT, LIMIT))


def test_the_trainers_value_is_back_after_an_error_and_for_other_agents(tmp_path: Path) -> None:
    class Once(L.LightningDataModule):
        is_ready = False

        def setup(self, stage: str) -> None:
            if not self.is_ready:
                raise RuntimeError("no environment")

        def train_dataloader(self) -> Batches:
            return Batches([torch.zeros(1)])

    class Automatic(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return 3 * self.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    trainer, _ = fit(DQN(**DISCRETE), [BATCHES[DQN]()], tmp_path, gradient_clip_val=0.25)
    module, data = Automatic(), Once()
    with pytest.raises(RuntimeError, match="no environment"):
        trainer.fit(DQN(**DISCRETE), datamodule=data)
    assert trainer.gradient_clip_val == 0.25
    trainer.gradient_clip_val, data.is_ready = 0.5, True
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=data)
    assert module.weight.item() == pytest.approx(0.5) and trainer.gradient_clip_val == 0.5


@pytest.mark.parametrize("value", [0, -1.0])
def test_a_trainer_that_does_not_clip_leaves_the_option(value: float, tmp_path: Path) -> None:
    assert learn(SAC, CONTINUOUS | {"gradient_norm": LIMIT}, tmp_path, gradient_clip_val=value)[0].norm() < 2 * LIMIT
