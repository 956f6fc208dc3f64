# SPDX-License-Identifier: Apache-2.0
"""n-step transitions formed before they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.postprocs import MultiStep
from torchrl.envs import MultiStepTransform

from lightning_replay.replay import Replay
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.transforms import NStepTransitions
from tests.transitions import numbered_steps

CASES = json.loads((Path(__file__).parents[2] / "fixtures" / "nstep_tuples.json").read_text())["cases"]


def episode(rewards: list[float], ending: str | None, trajectory: int | None = None) -> TensorDict:
    """Steps of one episode; the observation is the state's number, ``ending`` is terminal, truncated or None."""
    length = len(rewards)
    flags = torch.zeros(3, length, 1, dtype=torch.bool)
    flags[:, -1] = torch.tensor([[ending == "terminal"], [ending == "truncated"], [ending is not None]])
    terminated, truncated, done = flags
    state = torch.arange(length + 1)
    reward = torch.tensor(rewards, dtype=torch.float64).unsqueeze(1)
    following = {"observation": state[1:], "reward": reward, "terminated": terminated, "truncated": truncated}
    steps = TensorDict({"observation": state[:-1], "next": {**following, "done": done}}, [length])
    if trajectory is not None:
        steps["trajectory"] = torch.full((length,), trajectory)
    return steps


def form(transform: NStepTransitions, steps: TensorDictBase, size: int) -> list[TensorDictBase]:
    """What the transform emits when it is given ``size`` steps at a time, row by row."""
    formed = [transform.inv(part) for part in steps.split(size)]
    return [row for part in formed if part is not None for row in part]


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_formed_transitions_equal_the_worked_tuples(case: dict[str, Any], size: int) -> None:
    inputs = case["inputs"]
    transform = NStepTransitions(inputs["n"], inputs["gamma"])
    formed = form(transform, episode(inputs["rewards"], inputs["episode_end"]), size)
    assert len(formed) == len(case["expected"])
    assert transform.form_pending() is None
    for row, expected in zip(formed, case["expected"], strict=True):
        assert row["observation"] == expected["first_step"]
        assert row["steps_to_next_obs"] == expected["steps_used"]
        assert abs(float(row["next", "reward"]) - expected["reward_sum"]) <= 1e-12
        assert row["next", "observation"] == expected["bootstrap_state_index"]
        assert row["next", "terminated"] == expected["terminated"]
        assert row["discount"].dtype == torch.float32
        torch.testing.assert_close(float(row["discount"]), expected["bootstrap_discount"], rtol=1e-6, atol=0)


def test_a_buffer_stores_what_is_formed_and_nothing_while_nothing_is() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=NStepTransitions(3, 0.5), batch_size=4)
    steps = episode([1.0, 1.0, 1.0, 1.0], "terminal")
    lengths = []
    for step in steps.split(1):
        buffer.extend(step)
        lengths.append(len(buffer))
    assert lengths == [0, 0, 1, 4]
    assert buffer.sample()["discount"].shape == (4, 1)
    with pytest.raises(ValueError, match=r"as step.unsqueeze\(0\)"):
        buffer.add(steps[0])


def test_waiting_steps_are_state_and_can_be_flushed_or_forgotten() -> None:
    steps = episode([1.0, 2.0, 4.0], None)
    transform, again = NStepTransitions(3, 1.0), NStepTransitions(3, 1.0)
    assert transform.inv(steps[:2]) is None
    again.load_state_dict(transform.state_dict())
    assert torch.equal(again.inv(steps[2:])["next", "reward"], torch.tensor([[7.0]], dtype=torch.float64))
    flushed = again.form_pending()
    assert flushed is not None
    assert flushed["next", "reward"].flatten().tolist() == [6.0, 4.0]
    assert flushed["next", "observation"].tolist() == [3, 3] and flushed["discount"].flatten().tolist() == [1.0, 1.0]
    assert again.form_pending() is None
    transform.clear()
    assert transform.form_pending() is None
    again.load_state_dict(transform.state_dict())
    assert again.form_pending() is None


def test_episodes_that_never_end_do_not_wait_for_ever() -> None:
    """Of a running one beside them the return is whole."""
    replay = Replay(storage=PackedStorage(20_000), transform=NStepTransitions(3, 0.5), batch_size=8)
    ours, running = numbered_steps(0, 5_000), numbered_steps(10**6, 10, trajectory=10**6)
    ours["trajectory"] = torch.arange(5_000) // 2
    for rows, one in zip(ours.split(500), running.split(1), strict=True):
        replay.extend(torch.cat([rows, one]))
    [transform] = replay.transform
    waiting, _ = transform.pending
    assert len(waiting) <= 3 * 1_024 and int(waiting["trajectory"].max()) == 10**6
    rows = replay[:]
    of_running = rows["trajectory"] == 10**6
    assert rows["steps_to_next_obs"][of_running].flatten().tolist() == [3] * 8
    torch.testing.assert_close(rows["trajectory"][~of_running], ours["trajectory"][: len(replay) - 8])  # the oldest
    assert len(replay) + len(waiting) == 5_010


def test_emptying_our_buffer_forgets_waiting_steps() -> None:
    transform = NStepTransitions(2, 1.0)
    replay = Replay(storage=PackedStorage(8), transform=transform, batch_size=2)
    replay.extend(episode([1.0], None))
    replay.empty()
    assert len(replay) == 0 and transform.form_pending() is None


def test_batches_pass_unchanged() -> None:
    steps = episode([1.0], None)
    assert NStepTransitions(2, 0.9)(steps) is steps


def formed_by(name: str, steps: TensorDict) -> TensorDictBase:
    """The steps as returns over 3 of them, formed by one of those who do."""
    if name == "ours":
        return NStepTransitions(3, 0.5).inv(steps)
    if name == "a batch of another buffer":
        drawn_from = Replay(storage=PackedStorage(16), batch_size=8, n_steps=3, seed=0)
        drawn_from.extend(steps)
        return drawn_from.sample().exclude("index", "generation")
    if name == "TorchRL's transform":
        return MultiStepTransform(3, 0.5).inv(steps)
    return MultiStep(gamma=0.5, n_steps=3)(steps)


@pytest.mark.parametrize("by", ["ours", "a batch of another buffer", "TorchRL's transform", "a collector's MultiStep"])
@pytest.mark.parametrize("again", ["at the draw", "ours", "TorchRL's", "ours in TorchRL's buffer"])
def test_returns_are_not_formed_twice(by: str, again: str) -> None:
    steps = episode([1.0] * 12, None)
    formed = formed_by(by, steps)
    transform = None if again == "at the draw" else NStepTransitions(3, 0.5)
    if again == "TorchRL's":
        transform = MultiStepTransform(3, 0.5)
    storage, n_steps = PackedStorage(16), 3 if again == "at the draw" else 1
    if again == "ours in TorchRL's buffer":
        replay: Any = TensorDictReplayBuffer(storage=storage, transform=transform, batch_size=4)
    else:
        replay = Replay(storage=storage, n_steps=n_steps, transform=transform, batch_size=4)
    with pytest.raises(ValueError, match="returns over several steps already"):
        replay.extend(formed)
    assert len(replay) == 0
    plain = Replay(storage=PackedStorage(16), batch_size=4)
    plain.extend(formed)  # whose returns nobody forms again
    assert len(plain) == len(formed)


@pytest.mark.parametrize("build", [lambda: NStepTransitions(3, 0.5), lambda: MultiStepTransform(3, 0.5)])
def test_a_transform_that_forms_returns_is_refused_in_a_buffer_that_forms_them_at_the_draw(build: Any) -> None:
    replay = Replay(storage=PackedStorage(16), batch_size=4, n_steps=3)
    replay.append_transform(build())
    with pytest.raises(ValueError, match="would sum them again"):
        replay.extend(episode([1.0] * 12, None))
    assert len(replay) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("at_draw", [True, False])
def test_returns_of_half_precision_are_summed_in_float32(dtype: torch.dtype, at_draw: bool) -> None:
    steps = episode([30_000.0] * 5, "terminal")
    steps["next", "reward"] = steps["next", "reward"].to(dtype)
    single = float(steps["next", "reward"][0])
    transform = None if at_draw else NStepTransitions(3, 1.0)
    n_steps = 3 if at_draw else 1
    replay = Replay(
        storage=PackedStorage(64), batch_size=64, transform=transform, n_steps=n_steps, discount=1.0, seed=0
    )
    replay.extend(steps)
    reward = replay.sample()["next", "reward"]
    assert reward.dtype == torch.float32
    assert set(reward.flatten().tolist()) == {single, 2 * single, 3 * single}
