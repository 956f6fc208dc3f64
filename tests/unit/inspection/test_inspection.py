# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import TensorDictMaxValueWriter, TensorDictRoundRobinWriter

from lightning_replay import PackedStorage, Replay, load_replay, recipes
from lightning_replay.events import EventTable
from lightning_replay.inspection import compare
from tests.frame_steps import frame_rows, numbers_in, stacks_of
from tests.transitions import numbered_steps


def steps_of(rewards: list[float], done_at: tuple[int, ...] = ()) -> TensorDict:
    """Steps with these rewards, observed as numbers beside a constant."""
    count = len(rewards)
    steps = numbered_steps(0, count)
    steps["observation"] = torch.stack((torch.arange(count), torch.full((count,), 7)), 1).float()
    steps["next", "reward"] = torch.tensor(rewards).unsqueeze(1)
    for place in done_at:
        steps["next", "done"][place] = steps["next", "terminated"][place] = True
    return steps


def ring(capacity: int, count: int, **options) -> Replay:
    replay = recipes.uniform(capacity, 1, seed=0, **options)
    replay.extend(numbered_steps(0, count))
    return replay


def test_a_ring_holds_the_newest_rows_the_oldest_first_and_retention_rows_of_any_age() -> None:
    replay = ring(4, 6)  # slots: 4 5 2 3
    assert replay.oldest_first().tolist() == [2, 3, 0, 1]
    assert compare.ages(replay).tolist() == [3, 2, 1, 0]
    assert compare.returns(replay).tolist() == [2.0, 3.0, 4.0, 5.0]
    assert compare.observations(replay, replay.oldest_first())[:, 0].tolist() == [2.0, 3.0, 4.0, 5.0]
    replay = recipes.surprise_retention(3, 1, initial_surprise=lambda rows: rows["next", "reward"].flatten(), seed=0)
    replay.extend(steps_of([5.0, 1.0, 3.0, 2.0, 4.0, 0.0]))
    #   5 1 3, then 2 for 1, then 4 for 2; 0 is refused
    assert compare.returns(replay).tolist() == [5.0, 3.0, 4.0]
    assert compare.ages(replay).tolist() == [5, 3, 1]


def test_returns_over_two_steps_end_with_the_episode_and_with_what_is_stored() -> None:
    steps = steps_of([1.0, 2.0, 3.0, 4.0], done_at=(2,))
    drawn_later = recipes.uniform(9, 1, n_steps=2, discount=0.5, seed=0)
    formed_before = recipes.surprise_retention(9, 1, n_steps=2, discount=0.5, seed=0)
    for replay in (drawn_later, formed_before):
        replay.extend(steps)
    assert compare.returns(drawn_later).tolist() == [2.0, 3.5, 3.0, 4.0]
    assert compare.returns(formed_before).tolist() == [2.0, 3.5, 3.0]  # the fourth step still waits
    assert compare.ages(formed_before).tolist() == [2, 1, 0]


def test_a_row_in_several_tables_counts_once_and_tasks_share_one_order() -> None:
    table = EventTable(
        "event", condition=lambda rows: rows["next", "reward"].flatten() == 3.0, history_length=2, capacity=9
    )
    replay = recipes.event_tables(3, 1, tables=[table], max_trajectories=1, seed=0)
    for step in numbered_steps(0, 8).split(1):
        replay.extend(step)
    #   event: 2 3     default: 5 6 7
    assert compare.returns(replay).tolist() == [2.0, 3.0, 5.0, 6.0, 7.0]
    assert compare.ages(replay).tolist() == [5, 4, 2, 1, 0]
    replay = recipes.parallel_curriculum(["a", "b"], 2, 1, min_size=1, seed=0)
    replay.extend(numbered_steps(0, 5).set("task", torch.tensor([0, 1, 0, 0, 1])))
    assert compare.returns(replay).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert compare.ages(replay).tolist() == [3, 2, 1, 0]


def test_rows_released_for_their_frames_are_left_out_and_stacks_are_the_observations() -> None:
    replay = recipes.uniform(20, 1, frame_stack=2, frame_capacity=8, seed=0)
    replay.extend(frame_rows(stacks_of([1, 2, 3, 4, 5, 6], 2)))
    replay.extend(frame_rows(stacks_of([11, 12, 13], 2), first=5))  # 9 frames: rows 0 and 1 leave
    assert compare.returns(replay).tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert compare.ages(replay).tolist() == [4, 3, 2, 1, 0]
    assert numbers_in(compare.observations(replay, replay.oldest_first())) == [
        (2, 3),
        (3, 4),
        (4, 5),
        (11, 11),
        (11, 12),
    ]


def test_ages_over_torchrls_storage_and_writers() -> None:
    replay = Replay(storage=LazyTensorStorage(4), batch_size=1)
    replay.extend(numbered_steps(0, 6))
    assert compare.ages(replay).tolist() == [3, 2, 1, 0] and compare.returns(replay).tolist() == [2.0, 3.0, 4.0, 5.0]
    theirs = Replay(storage=LazyTensorStorage(4), writer=TensorDictRoundRobinWriter(), batch_size=1)
    theirs.extend(numbered_steps(0, 6))
    assert compare.ages(theirs).tolist() == [3, 2, 1, 0] and compare.returns(theirs).tolist() == [2.0, 3.0, 4.0, 5.0]
    ranked = Replay(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter(rank_key="rank"), batch_size=1)
    ranked.extend(numbered_steps(0, 2).set("rank", torch.arange(2.0)))
    with pytest.raises(ValueError, match="TensorDictMaxValueWriter keeps no order of its rows"):
        compare.ages(ranked)


def with_dictionaries() -> Replay:
    rows = numbered_steps(0, 3)
    camera = torch.arange(12, dtype=torch.uint8).view(3, 2, 2)
    rows["observation"] = TensorDict({"camera": camera, "speed": torch.tensor([[1.0], [2.0], [3.0]])}, [3])
    rows["next", "observation"] = rows["observation"].clone()
    replay = Replay(storage=PackedStorage(5), batch_size=1)
    replay.extend(rows)
    return replay


def test_a_part_of_a_dictionary_and_a_missing_key_are_named() -> None:
    replay = with_dictionaries()
    slots = replay.oldest_first()
    assert compare.observations(replay, slots, ("observation", "speed")).tolist() == [[1.0], [2.0], [3.0]]
    found = compare.inspect_buffers({"one": replay}, observation_key=("observation", "camera"))
    assert found["one"].points.shape == (3, 2)
    with pytest.raises(
        KeyError, match=r"no column 'observation' or 'pixels'.*\('observation', 'camera'\).*observation_"
    ):
        compare.observations(replay, slots)
    with pytest.raises(KeyError, match=r"no column 'observation' is stored.*\('observation', 'speed'\)"):
        compare.inspect_buffers({"one": replay}, observation_key="observation")
    with pytest.raises(KeyError, match=r"no column \('next', 'pixels'\) is stored; stored are.*'observation'"):
        compare.inspect_buffers({"one": ring(4, 4)}, observation_key=("next", "pixels"))


#   In a plane of a space of five dimensions: coordinates along u and v, which are at right angles.
U = torch.tensor([0.6, 0.0, 0.8, 0.0, 0.0])
V = torch.tensor([0.8, 0.0, -0.6, 0.0, 0.0])
OFFSET = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def in_space(*coordinates: tuple[float, float]) -> torch.Tensor:
    return torch.tensor(coordinates, dtype=torch.float32) @ torch.stack((U, V)) + OFFSET


def test_pca_turns_a_known_rotation_back_with_the_same_axes_for_both() -> None:
    points = compare.project({"a": in_space((-3, 0), (3, 0)), "b": in_space((0, 1), (0, -1))})
    assert torch.allclose(points["a"], torch.tensor([[-3.0, 0.0], [3.0, 0.0]]), atol=1e-5)
    assert torch.allclose(points["b"], torch.tensor([[0.0, 1.0], [0.0, -1.0]]), atol=1e-5)
    turned = compare.project({"a": -in_space((-3, 0), (3, 0)), "b": -in_space((0, 1), (0, -1))})
    assert torch.allclose(turned["a"], -points["a"], atol=1e-5), "the sign of an axis is that of its coefficients"


def test_pca_is_the_singular_value_decomposition_and_follows_its_seed_alone() -> None:
    rows = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    points = compare.principal_components(rows, 2, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    left, values, _ = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    exact = left[:, :2] * values[:2]
    assert torch.allclose(points.abs(), exact.abs(), atol=1e-3)
    rows = torch.randn(120, 200, generator=torch.Generator().manual_seed(1))
    points = compare.principal_components(rows, 2, seed=3)
    torch.rand(3)
    assert torch.equal(points, compare.principal_components(rows, 2, seed=3))
    assert not torch.equal(points, compare.principal_components(rows, 2, seed=4))


@pytest.mark.parametrize("rows", [torch.ones(4, 3), torch.ones(1, 3)], ids=["all equal", "a single row"])
def test_what_does_not_differ_lies_in_one_point(rows) -> None:
    assert torch.equal(compare.project({"a": rows})["a"], torch.zeros(len(rows), 2))


def test_of_many_rows_a_seeded_sample_is_projected() -> None:
    replay = ring(50, 60)
    found = compare.inspect_buffers({"one": replay, "two": ring(3, 3)}, max_points=10, seed=4)
    one = found["one"]
    assert len(one.ages) == 50 and one.sampled.shape == (10,) and found["two"].sampled.tolist() == [0, 1, 2]
    assert one.sampled.tolist() == sorted(set(one.sampled.tolist()))
    #   Observations are (i, i, i): the first coordinate is i * sqrt(3) from the mean of both.
    number = torch.cat((one.sampled + 10.0, torch.arange(3.0)))
    both = torch.cat((one.points, found["two"].points))
    assert torch.allclose(both[:, 0], (number - number.mean()) * 3**0.5, atol=1e-4)
    assert torch.allclose(both[:, 1], torch.zeros(13), atol=1e-4)
    again = compare.inspect_buffers({"one": replay}, max_points=10, seed=4)["one"]
    other = compare.inspect_buffers({"one": replay}, max_points=10, seed=5)["one"]
    assert torch.equal(again.sampled, one.sampled) and not torch.equal(other.sampled, one.sampled)


def test_integers_and_flags_are_numbers_and_one_column_has_no_second_axis() -> None:
    points = compare.project({"a": torch.tensor([0, 255], dtype=torch.uint8), "b": torch.tensor([True, False])})
    assert torch.allclose(points["a"], torch.tensor([[-64.0, 0.0], [191.0, 0.0]]))
    assert torch.allclose(points["b"], torch.tensor([[-63.0, 0.0], [-64.0, 0.0]]))


def test_saved_buffers_are_given_by_their_paths_and_nothing_is_changed(tmp_path: Path) -> None:
    replay = recipes.prioritized(8, 4, n_steps=2, seed=3)
    replay.extend(numbered_steps(0, 11))
    replay.save(tmp_path / "saved")
    found = compare.inspect_buffers({"here": replay, "path": tmp_path / "saved", "text": str(tmp_path / "saved")})
    for name in ("path", "text"):
        assert all(torch.equal(*both) for both in zip(found["here"], found[name], strict=True))
    assert (replay.sample() == load_replay(tmp_path / "saved").sample()).all()


def test_no_buffers_and_an_empty_one_are_refused() -> None:
    with pytest.raises(ValueError, match="no buffers; give at least one by name"):
        compare.inspect_buffers({})
    with pytest.raises(ValueError, match="buffer 'kept' is empty; store transitions with extend"):
        compare.inspect_buffers({"kept": recipes.uniform(4, 1)})


def test_observations_that_do_not_compare_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\{'a': \[4, 2\], 'b': \[2, 4\]\}; one projection needs one shape"):
        compare.project({"a": torch.zeros(3, 4, 2), "b": torch.zeros(3, 2, 4)})
    with pytest.raises(ValueError, match="2 of 4 observations are NaN or infinite"):
        compare.project({"a": torch.tensor([[1.0, 2.0], [torch.nan, torch.nan], [0.0, torch.inf], [3.0, 4.0]])})


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"what stays needs matplotlib.*lightning-replay\[plots\]"):
        compare.draw_inspection(compare.inspect_buffers({"one": ring(4, 4)}), tmp_path / "a.png")


def test_the_picture_has_a_column_for_each_buffer_and_the_same_axes(tmp_path: Path, saved_figures: list) -> None:
    fifo = recipes.uniform(3, 1, seed=0)
    kept = recipes.surprise_retention(3, 1, initial_surprise=lambda rows: rows["next", "reward"].flatten(), seed=0)
    for replay in (fifo, kept):
        replay.extend(steps_of([5.0, 1.0, 3.0, 0.0, 0.0, 0.0]))
    picture = tmp_path / "new" / "retention.png"
    compare.draw_inspection(compare.inspect_buffers({"fifo": fifo, "kept": kept}), picture, "title")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    left, right = (saved_figures[0].axes[column:6:2] for column in (0, 1))
    assert [each.get_title() for each in (left[0], right[0])] == ["fifo: 3 rows", "kept: 3 rows"]
    assert saved_figures[0].get_suptitle() == "title"
    ages_named, seen = "age (transitions that came since)", "first coordinate of the observation"
    assert [each.get_xlabel() for each in right] == [seen, ages_named, "return of the row"]
    assert [each.get_ylabel() for each in left] == ["second coordinate", "share of rows", "share of rows"]
    assert saved_figures[0].axes[6].get_xlabel() == ages_named
    assert [each.get_xlim() for each in left] == [each.get_xlim() for each in right]
    assert [each.get_ylim() for each in left] == [each.get_ylim() for each in right]
    assert left[0].collections[0].get_array().tolist() == [2, 1, 0]
    assert right[0].collections[0].get_array().tolist() == [5, 4, 3]
    for row, values in ((1, (5, 4, 3)), (2, (5, 1, 3))):
        bars = [bar for bar in right[row].patches if bar.get_height()]
        assert [bar.get_height() for bar in bars] == pytest.approx([1 / 3] * 3)
        assert all(
            bar.get_x() - 1e-6 <= value <= bar.get_x() + bar.get_width() + 1e-6
            for bar, value in zip(bars, sorted(values), strict=True)
        )
