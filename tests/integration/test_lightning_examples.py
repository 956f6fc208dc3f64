# SPDX-License-Identifier: Apache-2.0
"""The demo, shortened, as a user starts it; the example; the loop of the README."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_replay import load_replay, recipes
from lightning_replay.agents import DQN, TD3
from lightning_replay.lit import Evaluate, ReplayDataModule
from tests.matrix import packages_of
from tests.unit.lit.toys import make_trainer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(directory: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments, "--directory", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_demo(tmp_path: Path) -> None:
    output = run(tmp_path, "examples/demo.py", "--fast")
    picture = tmp_path / "demo.png"
    assert picture.read_bytes()[:4] == b"\x89PNG" and str(picture) in output
    for title, seeds in (
        ("combination locks", "400      401"),
        ("three rooms", "400      401"),
        ("flipping 20 bits", "400      401"),
    ):
        table = output[output.index(title) :]
        assert seeds in table and table.index("difference") < table.index("better for")


def test_example(run_script: Any, tmp_path: Path) -> None:
    output = "\n".join(run_script("lightning_nmer.py", "--directory", str(tmp_path)))
    assert "630 transitions in the replay" in output and "the best policy is TD3" in output


def test_simulator(run_script: Any) -> None:
    output = "\n".join(run_script("lightning_simulator.py"))
    # All pendulums were staggered, so that each ended an episode within its first 200 steps.
    assert "13,440 steps of 64 pendulums, 205 updates" in output and "mean return of 64 pendulums: -" in output


def test_offline(run_script: Any, tmp_path: Path) -> None:
    output = run_script("lightning_offline.py", "--directory", str(tmp_path))
    assert output[-1].endswith("after 300 environment steps, 598 rows") and "after 300 updates" in "\n".join(output)


def test_halves(run_script: Any, tmp_path: Path) -> None:
    output = run_script("lightning_halves.py", "--directory", str(tmp_path))
    assert output[-1] == "32 of 64 rows of a batch are demonstrations"
    assert len(load_replay(tmp_path / "demonstrations")) > 100


def test_event_tables(run_script: Any, tmp_path: Path) -> None:
    output = run_script("lightning_event_tables.py", "--directory", str(tmp_path))
    assert "table default: 2000 steps" in output[-3] and "table gap" in output[-2] and "table goal" in output[-1]


def test_hindsight(run_script: Any) -> None:
    output = run_script("lightning_hindsight.py")
    assert "return after 800 steps: " in output[-2] and "0% stored, " in output[-1] and "0% drawn" not in output[-1]


def test_prompts(run_script: Any) -> None:
    output = run_script("lightning_prompts.py")
    kinds = ("uniform", "learnability, staleness weight 0", "learnability, staleness weight 0.3")
    assert [line.split(":")[0] for line in output[-3:]] == list(kinds)
    assert all("of other questions answered, after 3 updates " in line for line in output[-3:])


def test_grpo(run_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")  # for lightning_prompts.py, beside it
    output = run_script("grpo_replay.py")
    assert [line.split(":")[0] for line in output[::3]] == ["plain", "drawn again", "refilled"]
    for line, updates in zip(output[1::3], (8, 1, 8), strict=True):
        assert line.endswith(f" after 512 groups and {updates} updates")
    assert all(line.endswith("% of the groups in the last batch have a gradient") for line in output[2::3])
    (title, _, _) = run_script("grpo_replay.py", "--filling", "refilled")
    assert title.startswith("refilled: ")


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="TRL is installed")
def test_the_example_for_trl_names_what_it_needs(run_script: Any) -> None:
    packages = re.escape(" ".join(packages_of("trl_prompts.py")))
    with pytest.raises(SystemExit, match=rf"this example needs TRL \(No module named .*\): pip install {packages}$"):
        run_script("trl_prompts.py")  # test_trl.py runs it with TRL


def test_dict_observations(run_script: Any) -> None:
    output = run_script("lightning_dict_observations.py")
    assert "'camera': [64, 5, 5, 1]" in output[-2] and "of 100 episodes" in output[-1]


def test_augmentation(run_script: Any) -> None:
    output = run_script("lightning_augmentation.py")
    assert [line.split(":")[0] for line in output] == ["PPO", "mixreg", "UCB-DrAC", "level replay and UCB-DrAC"]
    assert all("the last augmentation is cutout_color" in line for line in output[2:])  # of two rollouts


@pytest.mark.parametrize(("agent", "env"), [(TD3, "Pendulum-v1"), (DQN, "CartPole-v1")], ids=["td3", "dqn"])
@pytest.mark.parametrize(
    ("recipe", "n_steps"),
    [("uniform", 3), ("prioritized", 1), ("neighborhood_mixup", 3), ("continuous_transition", 1), ("noisy", 3)],
)
def test_every_agent_runs_on_every_kind_of_replay(tmp_path: Path, agent, env: str, recipe: str, n_steps: int) -> None:
    options = {"capacity": 500, "batch_size": 16, "n_steps": n_steps, "seed": 0}
    if agent is DQN and recipe == "neighborhood_mixup":
        options["discrete"] = "same_action"
    if agent is DQN and recipe == "noisy":
        options["keys"] = ["observation", ("next", "observation"), ("next", "reward")]
    if agent is DQN and recipe == "continuous_transition":
        pytest.skip("mixes actions")
    data = ReplayDataModule(env, recipes.by_name(recipe)(**options), env_steps=130, warmup_steps=100, num_envs=2)
    trainer = make_trainer(tmp_path, [Evaluate(1_000, 1)])
    module = agent.for_env(env, hidden_sizes=(8,))
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 30
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_dqn_with_prioritized_replay_learns_cartpole(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    replay = recipes.prioritized(capacity=10_000, batch_size=64)
    data = ReplayDataModule("CartPole-v1", replay, env_steps=4_000, warmup_steps=500, num_envs=4, seed=0)
    agent = DQN.for_env("CartPole-v1", hidden_sizes=(64,), learning_rate=2e-3, exploration_steps=2_000)
    evaluate = Evaluate(every_n_env_steps=1_000, episodes=5)
    make_trainer(tmp_path, [evaluate]).fit(agent, datamodule=data)
    before, after = evaluate.history[0][1], max(value for _, value in evaluate.history[2:])
    assert after > 100 > 40 > before
