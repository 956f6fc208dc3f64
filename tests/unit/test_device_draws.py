# SPDX-License-Identifier: Apache-2.0
"""Slots drawn on the device of the rows, with the CPU as the device: the results are those of draws on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import recipes
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler, UniformSampler
from lightning_replay.storage import PackedStorage
from lightning_replay.transforms import GaussianNoise
from lightning_replay.writers import RetentionWriter
from tests.goal_steps import goal_rows, reached
from tests.transitions import numbered_steps

NAN = float("nan")


def built(recipe: str = "prioritized", draws_on: str = "device", **options: Any) -> Replay:
    given = {"capacity": 10, "batch_size": 4, "seed": 0, "draws_on": draws_on}
    return recipes.by_name(recipe)(**given | options)


def stored(recipe: str = "prioritized", draws_on: str = "device", **options: Any) -> Replay:
    replay = built(recipe, draws_on, **options)
    replay.extend(numbered_steps(0, 8))
    return replay


def priorities(replay: Replay) -> list[float]:
    return replay.sampler.priority_of(torch.arange(replay.capacity)).tolist()


def test_uniform_draws_are_those_of_the_same_seed_on_the_cpu() -> None:
    there, here = (stored("uniform", draws_on) for draws_on in ("device", "cpu"))
    for _ in range(5):
        one, other = there.sample(), here.sample()
        assert (one == other).all() and set(one.keys(True)) == set(other.keys(True))


def test_priorities_are_those_of_the_cpu_for_any_history() -> None:
    rng = np.random.default_rng(0)
    options = {"priority_exponent": 0.7, "capacity": 23, "min_priority": 0.05}
    there, here = (built("prioritized", draws_on, **options) for draws_on in ("device", "cpu"))
    first = 0
    batches: list[tuple[Tensor, Tensor]] = []
    for _ in range(60):
        rows = numbered_steps(first, int(rng.integers(1, 9)))
        first += len(rows)
        assert torch.equal(there.extend(rows), here.extend(rows))
        batch = here.sample()
        batches.append((batch["index"], batch["generation"]))
        index, generation = batches[rng.integers(len(batches))]  # some are stale
        error = torch.from_numpy(rng.normal(size=(4, 1)[: rng.integers(1, 3)])).float()
        for replay in (there, here):
            replay.update_priority(index, error, generation=generation)
        np.testing.assert_allclose(there.sampler._tree.leaves(), here.sampler._tree.leaves(), rtol=1e-6)
    counts = [
        {key: replay.stats()[key] for key in ("priorities_updated", "stale_updates_dropped")}
        for replay in (there, here)
    ]
    assert counts[0] == counts[1] and counts[0]["stale_updates_dropped"] > 0


@pytest.mark.parametrize("over_batch", [False, True])
def test_draws_and_weights_follow_the_priorities(over_batch: bool) -> None:
    options = {"priority_exponent": 1.0, "priority_offset": 0.0, "importance_exponent": 0.5}
    replay = stored(normalize_over_batch=over_batch, batch_size=8, **options)
    error = torch.tensor([0.0, 1.0, 4.0, 0.0, 2.0, 1.0, 0.5, 1.5])
    replay.update_priority(torch.arange(8), -error)
    drawn = [replay.sample() for _ in range(2_000)]
    index = torch.cat([batch["index"] for batch in drawn])
    counts = index.bincount(minlength=8).numpy()
    assert counts[[0, 3]].tolist() == [0, 0]
    held = error.numpy() > 0
    assert chisquare(counts[held], (error / error.sum()).numpy()[held] * len(index)).pvalue > 1e-4
    batch = drawn[0]
    least = error[batch["index"]].amin() if over_batch else 0.5
    torch.testing.assert_close(batch["priority_weight"], (error[batch["index"]] / least) ** -0.5)


def test_of_several_errors_for_a_row_the_last_counts_and_the_largest_is_that_of_new_rows() -> None:
    replay = stored(priority_exponent=1.0, priority_offset=0.0)
    replay.update_priority(torch.tensor([2, 1, 2, 2]), torch.tensor([9.0, 0.25, 5.0, 0.5]))
    assert priorities(replay)[:4] == [1.0, 0.25, 0.5, 1.0]
    replay.extend(numbered_steps(8, 1))
    assert priorities(replay)[8] == 9.0  # as on the CPU, the largest that was given


def test_errors_that_are_not_finite_are_refused_at_once_on_the_cpu() -> None:
    replay = stored()
    before = priorities(replay)
    with pytest.raises(ValueError, match=r"td_error must be finite; rows \[1\]"):
        replay.update_priority(torch.arange(2), torch.tensor([1.0, NAN]))
    with pytest.raises(ValueError, match="NaN|nan"):
        replay.extend(
            numbered_steps(8, 2).set(
                "observation", torch.full((2, 4), NAN)[:, : numbered_steps(0, 1)["observation"].shape[1]]
            )
        )
    assert priorities(replay) == before and len(replay) == 8


def test_errors_that_are_not_finite_are_never_written_and_raised_later() -> None:
    replay = stored(check_every=3, priority_exponent=1.0, priority_offset=0.0)
    replay.update_priority(torch.tensor([0, 1, 2]), torch.tensor([NAN, float("inf"), 0.5]))
    assert priorities(replay)[:4] == [1.0, 1.0, 0.5, 1.0]
    replay.update_priority(torch.tensor([3]), torch.tensor([0.25]))
    with pytest.raises(ValueError, match="call 1 of update_priority brought TD errors that are NaN or infinite"):
        replay.update_priority(torch.tensor([4]), torch.tensor([0.25]))
    assert priorities(replay)[4] == 1.0  # the call that raises changes nothing
    replay.update_priority(torch.tensor([4]), torch.tensor([0.25]))
    assert priorities(replay)[4] == 0.25


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        (("next", "reward"), NAN, r"call 2 of extend brought NaN or infinity in \('next', 'reward'\)"),
        (("observation",), -float("inf"), "call 2 of extend brought NaN or infinity in 'observation'"),
        (("next", "terminated"), True, "call 2 of extend brought rows that are terminated or truncated and not done"),
    ],
)
def test_rows_that_are_wrong_are_stored_and_raised_with_their_call(column: Any, value: Any, told: str) -> None:
    replay = stored("uniform", check_every=2)
    wrong = numbered_steps(8, 1)
    wrong.set(column, torch.full_like(wrong.get(column), value))
    replay.extend(wrong)
    assert len(replay) == 9
    with pytest.raises(ValueError, match=told):
        replay.extend(numbered_steps(9, 1))
    assert len(replay) == 9
    replay.extend(numbered_steps(9, 1))
    assert len(replay) == 10


def test_stale_feedback_and_slots_outside_are_dropped_and_counted() -> None:
    replay = stored(priority_exponent=1.0, priority_offset=0.0)
    batch = TensorDict({"index": torch.tensor([0, 5]), "generation": torch.ones(2, dtype=torch.int64)}, [2])
    replay.extend(numbered_steps(8, 4))  # overwrites slots 0 and 1
    replay.update_priority(batch, torch.tensor([7.0, 0.5]))
    assert priorities(replay)[0] == 1.0 and priorities(replay)[5] == 0.5
    outside = torch.tensor([-1, 10, 6])
    for generation in (None, replay.storage.generation_of(outside.clamp(0, 9))):
        replay.update_priority(outside, torch.tensor([7.0, 7.0, 0.5]), generation=generation)
        assert priorities(replay)[6] == 0.5 and 7.0 not in priorities(replay)
    stats = replay.stats()
    assert (stats["priorities_updated"], stats["stale_updates_dropped"]) == (3, 5)


@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
@pytest.mark.parametrize("saved_on", ["cpu", "device"])
def test_a_save_loads_into_a_buffer_that_draws_elsewhere(recipe: str, saved_on: str, tmp_path: Path) -> None:
    loaded_on = {"cpu": "device", "device": "cpu"}[saved_on]
    old = stored(recipe, saved_on, n_steps=2)
    new = built(recipe, loaded_on, n_steps=2, seed=1)
    old.update_priority(old.sample(), torch.tensor([0.1, 2.0, 3.0, 0.5]))
    old.save(tmp_path / "save")
    new.load(tmp_path / "save", end_episodes=False)
    for replay in (old, new):
        replay.extend(numbered_steps(8, 5))
    one, other = old.sample(), new.sample()
    assert torch.equal(one["index"], other["index"]) and (one["next"] == other["next"]).all()
    assert torch.equal(one["generation"], other["generation"])


def test_the_generator_of_another_kind_of_device_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    replay = built("uniform", seed=3)
    state = replay.state_dict()
    before = replay.sampler._generator.get_state()
    state["sampler"]["generator"] = torch.zeros(16, dtype=torch.uint8)
    replay.load_state_dict(state)
    assert "UniformSampler goes on with draws of its own" in caplog.text
    assert torch.equal(replay.sampler._generator.get_state(), before)


def test_a_priority_may_come_with_the_rows() -> None:
    replay = built(priority_exponent=1.0, priority_offset=0.0, check_every=1)
    for first, error in ((0, 0.5), (2, NAN)):
        replay.extend(numbered_steps(first, 2).set("td_error", torch.tensor([error, 2.0])))
    assert priorities(replay)[:4] == [0.5, 2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="call 2 of extend brought TD errors"):
        replay.extend(numbered_steps(4, 1).set("td_error", torch.ones(1)))


def test_a_filled_buffer_gets_a_sampler_on_the_device_and_back() -> None:
    replay = stored("uniform", "cpu")
    replay.set_sampler(PrioritizedSampler(10, device="cpu", seed=0))
    batch = replay.sample()
    replay.update_priority(batch, torch.ones(4))
    replay.extend(numbered_steps(8, 5))
    assert replay.storage.generation_of(torch.arange(10)).tolist() == [2, 2, 2, 1, 1, 1, 1, 1, 1, 1]
    replay.set_sampler(UniformSampler(seed=0))
    replay.extend(numbered_steps(13, 1))
    assert replay.storage.generation_of(torch.tensor([3])).tolist() == [2]


@pytest.mark.parametrize("recipe", sorted({*recipes.known()} - {"uniform", "prioritized", "sequences", "hindsight"}))
def test_other_recipes_refuse_draws_on_the_device(recipe: str) -> None:
    from tests.recipe_options import built as built_as_needed

    with pytest.raises(ValueError, match="this recipe draws slots on the CPU; the recipes uniform, prioritized"):
        built_as_needed(recipe, capacity=8, draws_on="device")


@pytest.mark.parametrize("returned", ["an array", "one number"])
def test_functions_of_goals_must_return_tensors(returned: str) -> None:
    def reward(achieved: Tensor, desired: Tensor, info: dict[str, Any]) -> Any:
        equal = (achieved == desired).all(-1)
        return equal.numpy() if returned == "an array" else equal.sum()

    replay = built("hindsight", reward=reward)
    with pytest.raises(ValueError, match=r"reward of RelabelGoals returned .* for goals \[3, 2\] on cpu; slots are"):
        replay.extend(goal_rows(range(3)))
    assert not len(replay)


@pytest.mark.filterwarnings("ignore:.*another reward than RelabelGoals computes")  # 100 is stored
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_are_those_of_the_same_seed_on_the_cpu(strategy: str) -> None:
    options = {"reward": reached, "terminated": reached, "strategy": strategy, "n_steps": 3, "batch_size": 10}
    there, here = (built("hindsight", draws_on, **options) for draws_on in ("device", "cpu"))
    for first in (0, 20):
        for replay in (there, here):
            replay.extend(goal_rows(range(first, first + 7), done=True))
        for _ in range(5):
            assert (there.sample() == here.sample()).all()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: built(draws_on="gpu"), "draws_on is 'gpu'; it must be one of 'cpu', 'device'"),
        (lambda: built("uniform", "cpu", check_every=4), "check_every is 4, and slots are drawn on the CPU"),
        (lambda: built(check_every=0), "check_every is 0; it must be a whole number of calls from 1 on"),
        (
            lambda: built("uniform", frame_stack=2),
            "UniformSampler draws on cpu, and a FrameStorage is read by slots on the",
        ),
        (lambda: built(transform=GaussianNoise()), "GaussianNoise works on the CPU, and slots are drawn on a device"),
        (
            lambda: Replay(storage=PackedStorage(8), sampler=UniformSampler(device="cpu"), writer=RetentionWriter()),
            "UniformSampler draws on cpu, and RetentionWriter chooses slots on the CPU",
        ),
        (lambda: PrioritizedSampler(8, backend="numba", device="cpu"), "backend is 'numba'; it must be one of 'auto'"),
        (
            lambda: built("sequences", length=2, priority_exponent=0.5),
            "SequenceSampler got device='cpu' with a base_sampler, a priority_exponent, or an age; sequences",
        ),
        (lambda: UniformSampler(device="meta"), "device is 'meta'; it must be a device of torch that keeps data"),
    ],
)
def test_parts_that_do_not_fit_are_refused(make: Any, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        make()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda rows: rows.set("observation", rows["observation"].to("meta")),
            "device of 'observation': first cpu, given meta",
        ),
        (lambda rows: rows.set(("next", "done"), rows["next", "done"].repeat(1, 2)), "..next., .done..: stored"),
    ],
)
def test_rows_of_two_devices_and_flags_of_another_shape_are_refused(change: Any, told: str) -> None:
    replay = stored("uniform", check_every=2)
    with pytest.raises(ValueError, match=told):
        replay.extend(change(numbered_steps(8, 2)))
    assert len(replay) == 8


@pytest.mark.parametrize(
    ("index", "error", "generation", "told"),
    [
        (torch.arange(2), torch.ones(2, device="meta"), None, "td_error is on meta, and slots are drawn on cpu"),
        (torch.arange(2).int(), torch.ones(2), None, r"index must be int64 \[B\]"),
        (torch.arange(2), torch.ones(3), None, "td_error must hold one value for each of the 2 rows"),
        (torch.arange(2), torch.ones(2), torch.ones(3, dtype=torch.int64), "generation must be the batch's own"),
        (torch.arange(2), None, None, "td_error is None, and PrioritizedSampler draws by TD errors"),
    ],
)
def test_feedback_that_does_not_fit_is_refused(index: Any, error: Any, generation: Any, told: str) -> None:
    replay = stored(check_every=4)
    before = priorities(replay)
    with pytest.raises(ValueError, match=told):
        replay.update_priority(index, error, generation=generation)
    assert priorities(replay) == before
