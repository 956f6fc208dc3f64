# SPDX-License-Identifier: Apache-2.0
"""The examples of the RLlib integration and its command line, shortened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def rows(lines: list[str], header: str) -> list[list[str]]:
    """The cells of the lines of numbers behind the header."""
    start = next(place for place, line in enumerate(lines) if line.startswith(header))
    return [line.split() for line in lines[start + 1 :] if re.match(r" *[a-z_0-9.]+ +[-\d.nan]+ ", line)]


def test_sac_with_neighborhood_mixup(run_example: Any) -> None:
    lines = run_example("rllib_sac_nmer.py")
    table = rows(lines, "env_steps  return  stored  drawn")
    assert len(table) == 10 and [table[-1][0], table[-1][2]] == ["40", "40"] and int(table[-1][3]) >= 20 * 32 * 32


def test_dqn_goes_on_from_a_checkpoint_with_its_buffer(run_example: Any, tmp_path: Path) -> None:
    lines = run_example("rllib_dqn_prioritized.py")
    table = rows(lines, "env_steps  return  stored  steps/second")
    steps, stored = ([int(line[place]) for line in table] for place in (0, 2))
    assert steps == stored and len(steps) == 6 and steps[3] >= 200
    assert lines[-1] == f"{stored[3]} rows saved, {stored[3]} restored"
    assert (tmp_path / "runs" / "rllib_dqn_prioritized" / "replay_buffer").is_dir()


def test_mixreg_and_ucb_drac(run_example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))  # of the grids
    *_, loss, result = run_example("rllib_augmentation.py")
    assert re.fullmatch(r"loss -?\d\.\d{3}, of invariance [1-9]\.\de-\d\d with cutout_color", loss)
    assert re.fullmatch(r"return 0\.\d\d on held-out levels", result)


def test_rllibs_own_buffer_for_comparison(run_example: Any) -> None:
    """Its rows are lost, which is why we save ours; a release of Ray that saves them fails here."""
    lines = run_example("rllib_dqn_prioritized.py", "--buffer", "rllib")
    assert len(rows(lines, "env_steps  return  stored  steps/second")) == 6
    assert re.fullmatch(r"2\d\d rows saved, 0 restored", lines[-1])


def test_tune_searches_with_asha_and_the_best_trial_goes_on_with_its_buffer(run_example: Any, tmp_path: Path) -> None:
    lines = run_example("rllib_tune.py", "--directory", str(tmp_path / "trials"))
    table = rows(lines, "lr  ")
    assert len(table) == 2 and len({line[0] for line in table}) == 2
    assert all(1e-4 <= float(lr) <= 1e-2 and 0.0 <= float(exponent) <= 0.9 for lr, exponent, *_ in table)
    assert all(int(line[2]) in (100, 200, 300, 400) and int(line[3]) == int(line[2]) - 99 for line in table)
    best = max(table, key=lambda line: float(line[4]))
    checkpoint, restored, trained = (line.split(": ")[1] for line in lines[-3:])
    assert checkpoint.startswith(str(tmp_path / "trials")) and (Path(checkpoint) / "replay_buffer").is_dir()
    assert restored == f"{best[2]} rows, priority_exponent {best[1]}"
    assert trained == f"{int(best[2]) + 100} environment steps"


def test_rows_of_lightning_train_an_rllib_algorithm(run_example: Any) -> None:
    lines = run_example("lightning_to_rllib.py")
    assert any(line.startswith("Lightning: 600 rows, return -") for line in lines)
    assert "RLlib: 600 rows filled in" in lines
    table = rows(lines, "env_steps")
    assert len(table) == 5 and int(table[-1][2]) == 600 + int(table[-1][0]) >= 810
    assert int(table[0][3]) >= 32 * 42  # from the first step on


def test_apex(run_example: Any) -> None:
    lines = run_example("rllib_apex.py")
    assert lines[0] == "epsilons [[0.4, 0.0472], [0.0056, 0.0007]]"
    table = rows(lines, "env_steps  updates  return")
    assert len(table) >= 5 and int(table[-1][0]) >= 600 and int(table[-1][1]) >= 1
    bound = float(lines[-1].split()[1])
    assert all(abs(float(line[-1])) <= bound for line in table)


def test_a_replay_in_shards_of_which_one_is_lost(run_example: Any) -> None:
    lines = run_example("rllib_sharded.py")
    table = rows(lines, "env_steps  return  stored")
    sampled, lost = int(table[-1][0]), int(table[-1][3])
    saved, restored = (int(word) for word in lines[-1].split() if word.isdigit())
    assert len(table) == 4 and sampled >= 320 and lost > 0
    assert saved == restored == sampled - lost  # rows of a shard that is still starting are in no line of the table


def test_event_tables(run_example: Any) -> None:
    table = rows(run_example("rllib_event_tables.py"), "env_steps  return  stored  goal  gap")
    assert len(table) == 12 and int(table[-1][0]) >= 1_500 and int(table[-1][2]) >= 1_500
    assert 0 < int(table[-1][4]) <= 1_500 and float(table[-1][6]) > 0.2  # the gap is found by chance


def test_a_curriculum(run_example: Any) -> None:
    lines = run_example("rllib_parallel_curriculum.py")
    table = rows(lines, "env_steps")
    assert len(table) == 10 and int(table[-1][0]) >= 400
    assert sum(map(float, table[-1][5:])) == pytest.approx(1, abs=0.02)
    each = int(table[-1][0]) // 4
    assert lines[-1] == f"rows of each task: {{'target': {each}, 'far': {each}, 'near': {each}, 'nearest': {each}}}"


def test_mpdqn_in_a_curriculum(run_example: Any) -> None:
    lines = run_example("rllib_mpdqn.py")
    table = rows(lines, "env_steps  updates")
    steps, updates = map(int, table[-1][:2])
    assert len(table) == 10 and steps >= 400
    assert abs(updates - 8 * (steps - 200) / 64) <= 3  # 8 rows for each step after the first 200, in batches of 64
    stored = list(map(int, re.findall(r"'[a-z_]+': (\d+)", lines[-1])))
    assert len(stored) == 4 and sum(stored) == int(table[-1][0]) and max(stored) - min(stored) <= 4


def test_retention_of_atari_frames(run_example: Any) -> None:
    pytest.importorskip("ale_py")
    lines = run_example("rllib_surprise_retention.py")
    table = rows(lines, "env_steps  return  stored  admitted  refused")
    env_steps, _, stored, admitted, refused, frames, _ = (float(cell.replace(",", "")) for cell in table[-1])
    assert len(table) == 10 and env_steps >= 300 and stored == 100 and refused > 0
    assert env_steps - 2 * 4 <= admitted + refused <= env_steps  # the last steps wait for their returns
    assert 0.5 < frames < 8
    assert lines[-1] == f"would take {100 * 8 * 84 * 84:,} bytes"


ENVIRONMENT = """
from gymnasium.envs.classic_control import CartPoleEnv


class Tilted(CartPoleEnv):
    def __init__(self, limit):
        super().__init__()
        self.theta_threshold_radians = limit
"""
RECIPE = """
from lightning_replay import recipes


def gentle(capacity, batch_size, seed=None):
    return recipes.prioritized(capacity, batch_size, priority_exponent=0.25, seed=seed)
"""


def test_the_command_takes_modules_of_the_folder_and_ctrl_c_leaves_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "my_environments.py").write_text(ENVIRONMENT)
    (tmp_path / "my_recipes.py").write_text(RECIPE)
    settings = ("stop.env_steps=1_000_000", "reporting.min_sample_timesteps_per_iteration=30")
    settings += (
        "env_runners.num_env_runners=1",
        "env_runners.num_cpus_per_env_runner=3",
    )  # more than some have
    settings += ("environment={env: my_environments.Tilted, env_config: {limit: 0.1}}",)
    settings += ("replay={recipe: my_recipes.gentle, capacity: 1_000}",)
    file = str(ROOT / "configs" / "rllib" / "per_dqn_cartpole.yaml")
    # a shell that starts the tests in the background has its processes ignore Ctrl-C
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "runpy.run_module('rllib_ext', run_name='__main__')"
    command = [sys.executable, "-c", code, file, "--checkpoint=here", *(f"--set={text}" for text in settings)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # whole, as a user's: the only Ray of the tests that is
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes) as process:
        assert process.stdout is not None
        first = [next(process.stdout).split()[0] for _ in range(3)]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=280)
    assert first == ["updates", "env_steps", "30"] and process.returncode == 128 + signal.SIGINT, errors[-2000:]
    assert "interrupted: training ends after this iteration" in errors
    assert rest.splitlines()[-1] == f"checkpoint with the replay buffer: {tmp_path / 'here' / 'second'}"
    saved = json.loads((tmp_path / "here" / "second" / "replay_buffer" / "buffer.json").read_text())
    assert "my_recipes.gentle" in str(saved)


def test_the_command_without_its_extra_is_one_sentence(tmp_path: Path) -> None:
    hidden = "import runpy, sys; sys.modules['ray'] = None; runpy.run_module('rllib_ext', run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", hidden, "config.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert result.returncode == 1
    assert re.fullmatch(
        r"python -m rllib_ext needs Ray RLlib, and ray(\.rllib)? is not installed: "
        r"pip install 'lightning-replay\[rllib\]'\n",
        result.stderr,
    )
