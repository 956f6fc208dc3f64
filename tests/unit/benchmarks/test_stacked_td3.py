# SPDX-License-Identifier: Apache-2.0
"""TD3 of several seeds in one process learns what the library's TD3 learns, and no run changes another."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from tensordict import TensorDict

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts, no package

from stacked_td3 import EvaluateRuns, StackedReplays, StackedTD3

from lightning_replay import recipes
from lightning_replay.agents import TD3
from lightning_replay.agents.perceptrons import tensors_of

OBSERVATION, ACTION, BATCH, UPDATES = 3, 1, 16, 5
OPTIONS = {"hidden_sizes": (8, 8), "target_update_rate": 0.1, "target_noise": 0.0}


def batches(runs: int) -> TensorDict:
    size = [runs, UPDATES, BATCH]
    following = {
        "observation": torch.randn(*size, OBSERVATION),
        "reward": torch.randn(*size, 1),
        "terminated": torch.rand(*size, 1) < 0.2,
    }
    columns = {"observation": torch.randn(*size, OBSERVATION), "action": torch.rand(*size, ACTION) * 2 - 1}
    return TensorDict(columns | {"next": following}, size)


def fit(agent: L.LightningModule, steps: list[TensorDict]) -> None:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **options)
    trainer.fit(agent, train_dataloaders=_Plain(steps))


class _Plain(list):
    """Lightning takes an iterable with a length for a loader."""


def weights_of(network: torch.nn.ParameterList, run: int) -> list[torch.Tensor]:
    """Returns the parameters of one run, transposed as ``torch.nn.Linear`` has them."""
    return [parameter[run].detach().T.squeeze(-1) for parameter in network.parameters()]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")  # played for a data module alone
def test_a_run_learns_what_the_agent_learns() -> None:
    stacked = StackedTD3(OBSERVATION, ACTION, seeds=(4, 9), learning_rate=1e-2, **OPTIONS)
    agent = TD3(OBSERVATION, [-1.0], [1.0], actor_learning_rate=1e-2, critic_learning_rate=1e-2, **OPTIONS)
    run = 1
    sources = [*weights_of(stacked.policy, run)]
    both = zip(weights_of(stacked.critics, run), weights_of(stacked.critics, 2 + run), strict=True)
    with torch.no_grad():
        for parameter, source in zip(tensors_of(agent.actor_layers), sources, strict=True):
            parameter.copy_(source)
        for parameter, pair in zip(agent.loss.qvalue_network_params.values(True, True), both, strict=True):
            parameter.copy_(torch.stack(pair))
        for name in ("actor", "qvalue"):
            getattr(agent.loss, f"target_{name}_network_params").update_(getattr(agent.loss, f"{name}_network_params"))
    given = batches(2)
    flat = given.clone()
    flat["next", "done"] = flat["next", "terminated"]
    fit(stacked, [given])
    fit(agent, list(flat[run].unbind(0)))
    for parameter, learned in zip(tensors_of(agent.actor_layers), weights_of(stacked.policy, run), strict=True):
        torch.testing.assert_close(parameter, learned.to(parameter.dtype), atol=1e-5, rtol=1e-4)
    learned = zip(weights_of(stacked.critics, run), weights_of(stacked.critics, 2 + run), strict=True)
    for parameter, pair in zip(agent.loss.qvalue_network_params.values(True, True), learned, strict=True):
        torch.testing.assert_close(parameter, torch.stack(pair), atol=1e-5, rtol=1e-4)
    targets = zip(weights_of(stacked.target_critics, run), weights_of(stacked.target_critics, 2 + run), strict=True)
    for parameter, pair in zip(agent.loss.target_qvalue_network_params.values(True, True), targets, strict=True):
        torch.testing.assert_close(parameter, torch.stack(pair), atol=1e-5, rtol=1e-4)


def train(seeds: tuple[int, ...]) -> tuple[StackedTD3, StackedReplays, EvaluateRuns]:
    replays = [recipes.neighborhood_mixup(200, 8, num_neighbors=3, seed=seed) for seed in seeds]
    data = StackedReplays("Pendulum-v1", replays, seeds, 60, 50, 4, {"max_episode_steps": 20})
    agent, evaluate = StackedTD3(3, 1, seeds, hidden_sizes=(8,)), EvaluateRuns(5, 2, seed=7)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[evaluate], enable_model_summary=False, **options).fit(
        agent, datamodule=data
    )
    return agent, data, evaluate


def test_a_run_is_the_same_beside_others() -> None:
    agent, data, evaluate = train((3, 5))
    alone, alone_data, alone_evaluate = train((5,))
    assert [steps for steps, _ in evaluate.history] == [50, 55, 60] and len(data.replays[1]) == 60
    for together, single in zip(weights_of(agent.policy, 1), weights_of(alone.policy, 0), strict=True):
        torch.testing.assert_close(together, single, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        data.replays[1].storage[:]["action"], alone_data.replays[0].storage[:]["action"], atol=1e-5, rtol=1e-4
    )
    for (_, together), (_, single) in zip(evaluate.history, alone_evaluate.history, strict=True):
        assert abs(together[1] - single[0]) < 1e-2
    assert data.replays[0].storage[:]["next", "truncated"].sum() == 3  # episodes of 20 steps
    assert not torch.equal(data.replays[0].storage[:]["action"], data.replays[1].storage[:]["action"])
