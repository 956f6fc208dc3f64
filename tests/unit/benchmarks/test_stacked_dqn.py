# SPDX-License-Identifier: Apache-2.0
"""Double DQN of several seeds in one process: gradients as torch's, and runs that go on exactly where they stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tests.benchmarks.learning.experiments import retention, retention_mending
from tests.benchmarks.learning.learners.minatar_players import StackedPlayers
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN
from tests.benchmarks.learning.recorder import OutOfTimeError, Recorder

SIZES, ROWS = (6, 8, 8, 3), 16


def batch_of(seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 2, (2, ROWS, 1, 2, 3), generator=generator, dtype=torch.uint8)
    following = {
        "observation": images[1],
        "reward": 3.0 * torch.rand(ROWS, 1, generator=generator),
        "terminated": torch.rand(ROWS, 1, generator=generator) < 0.3,
    }
    action = torch.randint(0, 3, (ROWS,), generator=generator)
    weight = torch.rand(ROWS, generator=generator)
    return TensorDict(
        {"observation": images[0], "action": action, "priority_weight": weight, "next": following}, [ROWS]
    )


def network_of(agent: StackedDQN, run: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in zip(agent.online[::2], agent.online[1::2], strict=True):
        layer = nn.Linear(*weight.shape[1:])
        layer.weight.data, layer.bias.data = weight[run].detach().T.clone(), bias[run, 0].detach().clone()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def errors(online: nn.Module, target: nn.Module, batch: TensorDict, discount: float | Tensor) -> Tensor:
    observation, following = (part["observation"].flatten(1).float() for part in (batch, batch["next"]))
    with torch.no_grad():
        best = online(following).argmax(1, keepdim=True)
        value = target(following).gather(1, best) * ~batch["next", "terminated"]
    goal = batch["next", "reward"] + discount * value
    return (goal - online(observation).gather(1, batch["action"].unsqueeze(1))).squeeze(1)


def test_a_run_learns_as_by_autograd() -> None:
    agent = StackedDQN(SIZES, (4, 9), learning_rate=1e-2, discount=0.9, updates_per_target=3)
    online = network_of(agent, 1)
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-2)
    for update in range(1, 8):
        both = [batch_of(100 + update), batch_of(update)]
        error = errors(online, target, both[1], 0.9)
        found, values = agent.learn(both)
        torch.testing.assert_close(found[1], error.detach())
        taken = values[1].gather(1, both[1]["action"].unsqueeze(1)).squeeze(1)
        observation = both[1]["observation"].flatten(1).float()
        torch.testing.assert_close(taken, online(observation).gather(1, both[1]["action"].unsqueeze(1)).squeeze(1))
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(error, torch.zeros(ROWS), reduction="none")
        (loss * both[1]["priority_weight"]).mean().backward()
        optimizer.step()
        if update % 3 == 0:
            target.load_state_dict(online.state_dict())
    rows = batch_of(50)
    torch.testing.assert_close(agent.td_error(1, rows), errors(online, target, rows, 0.9).detach())


def test_rows_of_several_steps_have_their_own_discount() -> None:
    agent = StackedDQN(SIZES, (4,), learning_rate=1e-2, discount=0.9, updates_per_target=3)
    rows = batch_of(1)
    rows["discount"] = torch.linspace(0.5, 1.0, ROWS).unsqueeze(1)
    network = network_of(agent, 0)
    torch.testing.assert_close(agent.td_error(0, rows), errors(network, network, rows, rows["discount"]).detach())


FEW = {
    **{"env_steps": 200, "warmup_steps": 40, "exploration_steps": 100, "check_every": 100},
    **{"capacity": 60, "compared_rows": 60, "hidden_sizes": (8,), "batch_size": 8},
}
SHORT = retention.SETTINGS | FEW | {"rule": "SurpriseOnPolicyness"}
MENDED = retention_mending.STICKY | FEW | retention_mending.mended("draws", 0.9)


def recorded(
    seeds: tuple[int, ...],
    folder: Path | None = None,
    deadline: float = float("inf"),
    run: Callable[..., None] = retention.run,
    settings: dict[str, Any] = SHORT,
) -> dict[str, Any]:
    out = Recorder(seeds, folder, deadline)
    run(settings, seeds, out)
    return {name: out.content.get(name) for name in ("steps", "curves", "final")}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*AdroitHand")
@pytest.mark.parametrize(("run", "settings"), [(retention.run, SHORT), (retention_mending.run, MENDED)])
def test_runs_go_on_from_a_checkpoint_as_if_they_had_not_stopped(run: Any, settings: Any, tmp_path: Path) -> None:
    whole = recorded((3, 5), run=run, settings=settings)
    with pytest.raises(OutOfTimeError):
        recorded((3, 5), tmp_path, 0.0, run, settings)
    resumed = recorded((3, 5), tmp_path, run=run, settings=settings)
    compared = ("steps", "curves", "final") if run is retention.run else ("steps", "curves")  # mending keeps more
    assert [resumed[name] for name in compared] == [whole[name] for name in compared]
    assert whole["steps"] == [100, 200]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*AdroitHand")
def test_a_checkpoint_within_an_episode_has_its_return_so_far(tmp_path: Path) -> None:
    def players() -> StackedPlayers:
        return retention.players_of(SHORT | {"warmup_steps": 1_000}, (3, 5))[0]

    whole, resumed = players(), players()
    while not any(whole._totals):
        whole.play(whole.env_steps + 2)
    whole.save(tmp_path)
    resumed.load(tmp_path, lambda run, replay: None)
    for each in (whole, resumed):
        each.play(600)
    assert resumed._returns == whole._returns and len(whole._returns[0]) > 3


@pytest.mark.slow
def test_a_run_is_the_same_beside_others() -> None:
    both, alone = recorded((3, 5)), recorded((5,))
    assert [point[1] for point in both["curves"]["age"]] == [point[0] for point in alone["curves"]["age"]]
    assert both["final"]["nbytes"][1] == alone["final"]["nbytes"][0]
