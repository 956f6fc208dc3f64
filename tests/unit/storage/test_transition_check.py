# SPDX-License-Identifier: Apache-2.0
"""Rows that are refused before they are stored, and rows like them that are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage

from lightning_replay import recipes
from lightning_replay.datasets import fill
from lightning_replay.replay import Replay
from lightning_replay.storage.packed import PackedStorage
from tests.recipe_options import built
from tests.transitions import numbered_steps

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[PackedStorage, LazyTensorStorage])
def replay(request) -> Replay:
    return Replay(storage=request.param(16), batch_size=2, seed=0)


def steps_with(key, row: int, value: object) -> TensorDict:
    steps = numbered_steps(0, 4)
    steps[key][row] = value
    return steps


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
@pytest.mark.parametrize("earlier", [0, 4], ids=["first rows", "later rows"])
def test_an_episode_that_ended_is_done(replay, flag, earlier) -> None:
    if earlier:
        replay.extend(numbered_steps(0, earlier))
    with pytest.raises(ValueError, match=r"rows \[2\] are terminated or truncated, and .*done.* is false there"):
        replay.extend(steps_with(("next", flag), 2, True))
    assert len(replay) == earlier
    both = steps_with(("next", flag), 2, True).set(("next", "done"), torch.tensor([[0], [0], [1], [0]]).bool())
    replay.extend(both)
    assert len(replay) == earlier + 4


@pytest.mark.parametrize(
    "change",
    [
        lambda steps: steps_with(("next", "done"), 1, True),  # neither terminated nor truncated
        lambda steps: steps_with(("next", "terminated"), 1, True).exclude(("next", "done")),
        lambda steps: steps.set("logits", torch.full((4, 2), -INF)),  # of actions that are not allowed
        lambda steps: steps.apply(lambda column: column if column.dtype == torch.bool else column.to(torch.uint8)),
    ],
)
def test_rows_with_nothing_wrong_are_stored(replay, change) -> None:
    replay.extend(change(numbered_steps(0, 4)))
    assert len(replay) == 4


@pytest.mark.parametrize("key", ["trajectory", ("collector", "traj_ids")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_episodes_are_told_apart_by_whole_numbers_also_after_rows_that_were_refused(replay, key, dtype) -> None:
    steps = numbered_steps(0, 4)
    for _ in range(2):
        with pytest.raises(TypeError, match="it names the episode of each row.*Nothing was stored"):
            replay.extend(steps.clone().set(key, torch.zeros(4, dtype=dtype)))
    replay.extend(steps.clone().set(key, torch.tensor([3, 3, 4, 4], dtype=torch.int32)))
    assert replay[:][key].tolist() == [3, 3, 4, 4]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("key", ["observation", ("next", "observation"), ("next", "reward")])
@pytest.mark.parametrize("earlier", [0, 4], ids=["first rows", "later rows"])
def test_what_is_learned_from_is_finite(replay, key, value, earlier) -> None:
    if earlier:
        replay.extend(numbered_steps(0, earlier))
    with pytest.raises(ValueError, match=rf"is {value} in rows \[3\] of 4; it must be finite.*check_finite=False"):
        replay.extend(steps_with(key, 3, value))
    assert len(replay) == earlier
    replay.extend(numbered_steps(0, 4))
    assert len(replay) == earlier + 4


def test_infinities_that_cancel_each_other_are_found(replay) -> None:
    steps = steps_with("observation", 0, torch.tensor([INF, -INF, 0.0]))
    steps["next", "observation"][0] = 0.0
    with pytest.raises(ValueError, match=r"'observation' is inf in rows \[0\]"):
        replay.extend(steps)


@pytest.mark.parametrize(
    ("dtype", "large"),
    [(torch.float16, 6e4), (torch.bfloat16, 3e38), (torch.float32, 3e38), (torch.float64, 1.7e308)],
    ids=str,
)
def test_large_numbers_whose_products_are_infinite_are_finite(replay, dtype, large) -> None:
    steps = numbered_steps(0, 4)
    for key, sign in (("observation", 1), (("next", "observation"), -1), (("next", "reward"), -1)):
        steps[key] = torch.full_like(steps[key], sign * large, dtype=dtype)
    replay.extend(steps)
    assert (replay[:]["observation"] == torch.tensor(large, dtype=dtype)).all()


def nested(change: Callable[[TensorDict], object]) -> TensorDict:
    """Observations of a camera, whose bytes are always finite, and of a speed."""
    steps = numbered_steps(0, 4)
    for where in (steps, steps["next"]):
        speed = where["observation"]
        where["observation"] = TensorDict({"camera": torch.full((4, 2, 2), 255, dtype=torch.uint8), "speed": speed}, 4)
    change(steps)
    return steps


@pytest.mark.parametrize("side", [(), ("next",)])
def test_parts_of_an_observation_are_looked_at_each(replay, side) -> None:
    def spoil(steps: TensorDict) -> None:
        steps[*side, "observation", "speed"][1, 2] = NAN

    with pytest.raises(ValueError, match=r"'observation', 'speed'\) is nan in rows \[1\]"):
        replay.extend(nested(spoil))
    replay.extend(nested(lambda steps: None))
    assert len(replay) == 4


def test_any_column_that_also_stands_under_next_is_a_state(replay) -> None:
    steps = numbered_steps(0, 4)
    steps["position"], steps["next", "position"] = torch.zeros(4), torch.zeros(4)
    steps["next", "position"][2] = NAN
    with pytest.raises(ValueError, match=r"\('next', 'position'\) is nan in rows \[2\]"):
        replay.extend(steps)


@pytest.mark.parametrize("key", ["observation", ("next", "observation"), ("next", "reward")])
@pytest.mark.parametrize("value", [NAN, INF])
def test_one_number_of_a_single_row_is_refused(key, value: float) -> None:
    replay = recipes.uniform(16, 2, seed=0)
    steps = [numbered_steps(number, 1) for number in range(4)]
    for one in steps:
        for name in ("observation", ("next", "observation")):
            one[name] = one[name][:, :1] * 1e30
    for one in steps[:3]:  # whose products overflow
        replay.extend(one)
    steps[3][key] = torch.full((1, 1), value)
    with pytest.raises(ValueError, match=rf"is {value} in rows \[0\] of 1"):
        replay.extend(steps[3])
    assert len(replay) == 3


@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
@pytest.mark.parametrize("key", ["observation", ("next", "observation"), ("next", "reward")])
def test_whoever_asks_for_it_may_store_what_is_not_finite(storage, key) -> None:
    replay = Replay(storage=storage(16), batch_size=2, check_finite=False, seed=0)
    replay.extend(steps_with(key, 1, NAN))
    assert replay[:][key][1].isnan().all()
    with pytest.raises(ValueError, match="is false there"):
        replay.extend(steps_with(("next", "terminated"), 1, True))


@pytest.mark.parametrize("recipe", [recipes.uniform, partial(recipes.surprise_retention, n_steps=3)])
def test_recipes_pass_the_choice_on(recipe) -> None:
    steps = steps_with(("next", "reward"), 0, INF)
    with pytest.raises(ValueError, match="must be finite"):
        recipe(16, 2).extend(steps)
    replay = recipe(16, 2, check_finite=False)
    replay.extend(steps)
    assert replay[:]["next", "reward"][0].isinf().all()


@pytest.mark.parametrize("key", ["trajectory", ("collector", "traj_ids")])
@pytest.mark.parametrize("name", ["uniform", "continuous_transition", "surprise_retention", "event_tables"])
def test_a_trajectory_of_several_numbers_is_refused_and_nothing_is_stored(name, key) -> None:
    replay = built(name, capacity=8, batch_size=2)
    steps = numbered_steps(0, 4)
    with pytest.raises(ValueError, match=r"has the shape \[2\] for each row; .* must be \[N\] or \[N, 1\]"):
        replay.extend(steps.clone().set(key, torch.zeros(4, 2, dtype=torch.int64)))
    assert len(replay.extend(steps)) == 4


WAYS: dict[str, Callable[[Any, TensorDict], object]] = {
    "extend": lambda replay, rows: replay.extend(rows),
    "extend_columns": lambda replay, rows: replay.extend_columns(dict(rows.items(True, True))),
    "add": lambda replay, rows: replay.add(rows[0]),
    "fill": lambda replay, rows: fill(getattr(replay, "offline", replay), rows),
}
BUILT: dict[str, Callable[[], Any]] = {
    "packed": lambda: Replay(storage=PackedStorage(16), batch_size=2),
    "TorchRL's storage": lambda: Replay(storage=LazyTensorStorage(16), batch_size=2),
    "returns before storing": lambda: recipes.surprise_retention(16, 2, n_steps=3),
    "event tables": lambda: built("event_tables", capacity=16, batch_size=2),
    "mixed": lambda: recipes.mixed(recipes.uniform(16, 2), recipes.uniform(16, 2), batch_size=2),
}


# Each of the four columns, and each wrong shape: the check reads the shape of a column, and not its name.
SHAPES = [("reward", (0,)), ("reward", (1, 1)), ("terminated", (2,)), ("truncated", (1, 1)), ("done", (0,))]


@pytest.mark.parametrize(("name", "entries"), SHAPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", BUILT)
def test_rewards_and_flags_are_one_for_each_row(kind: str, way: str, name: str, entries: tuple[int, ...]) -> None:
    replay, steps = BUILT[kind](), numbered_steps(0, 4, trajectory=0)
    wrong = steps.clone()
    wrong["next", name] = torch.zeros(4, *entries, dtype=steps["next", name].dtype)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"\('next', '{name}'\) has the shape .* one value for each row"):
            WAYS[way](replay, wrong)
        assert len(replay) == 0
    WAYS[way](replay, steps)
    replay.extend(steps)
    stored = len(replay)
    with pytest.raises(ValueError, match=f"Different: ..next., .{name}.|{name}.* has the shape|fit those of online"):
        WAYS[way](replay, wrong)
    assert len(replay) == stored


@pytest.mark.parametrize(
    ("name", "dtype"), [("terminated", torch.int64), ("truncated", torch.uint8), ("done", torch.float32)], ids=str
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", BUILT)
def test_flags_of_ends_are_bool(kind: str, way: str, name: str, dtype: torch.dtype) -> None:
    """Of an integer flag, ``~done`` is -1."""
    replay, steps = BUILT[kind](), numbered_steps(0, 4, trajectory=0)
    wrong = steps.clone().set(("next", name), steps["next", name].to(dtype))
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"'{name}'\) is .*; flags of ends must be bool.*\.astype\(bool\)"):
            WAYS[way](replay, wrong)
        assert len(replay) == 0
    WAYS[way](replay, steps)


@pytest.mark.parametrize("way", WAYS)
def test_the_weight_of_another_draw_is_not_stored(replay, way: str) -> None:
    steps = numbered_steps(0, 4)
    source = recipes.prioritized(16, 4)
    source.extend(steps)
    batch = source.sample()
    replay.extend(batch)
    WAYS[way](replay, batch)
    assert replay.sample(2).exclude("index", "generation").keys() == {*steps.keys()}


@pytest.mark.parametrize("earlier", [0, 4], ids=["first rows", "later rows"])
@pytest.mark.parametrize("rows", [[[1.0, 2.0, 3.0]] * 4, [torch.zeros(3)] * 4], ids=["numbers", "tensors"])
def test_a_list_of_equal_rows_is_no_ragged_column(rows: list[Any], earlier: int) -> None:
    replay, columns = recipes.uniform(16, 2), dict(numbered_steps(0, 4).items(True, True))
    if earlier:
        replay.extend_columns(columns)
    with pytest.raises(TypeError, match=r"the column 'observation' is a list, .* numpy.asarray\(rows\)"):
        replay.extend_columns(columns | {"observation": rows})
    with pytest.raises(TypeError, match="the column 'observation' has rows of different lengths"):
        replay.extend_columns(columns | {"observation": [*rows[1:], rows[0][:1]]})
    assert len(replay) == earlier


@pytest.mark.parametrize(
    "given", [torch.zeros(0, 1), torch.zeros(1, 4), torch.tensor(0.0)], ids=["[0]", "[1, N]", "one"]
)
def test_columns_of_another_number_of_rows_are_refused(given: torch.Tensor) -> None:
    replay, columns = recipes.uniform(16, 2), dict(numbered_steps(0, 4).items(True, True))
    for earlier in 0, 4:
        with pytest.raises((ValueError, TypeError), match="the same N >= 1|the column .'next', 'reward'. is"):
            replay.extend_columns(columns | {("next", "reward"): given})
        assert len(replay) == earlier
        replay.extend_columns(columns)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("earlier", [0, 4], ids=["first rows", "later rows"])
def test_rows_that_are_all_truncated_as_by_torchrls_trainers_end_where_none_continues_them(by_columns, earlier) -> None:
    replay = Replay(storage=PackedStorage(16), batch_size=2, check_finite=False)
    if earlier:
        replay.extend(numbered_steps(90, earlier))
    rows = torch.cat([numbered_steps(0, 4), numbered_steps(7, 2)])
    rows["observation"][1], rows["next", "observation"][0] = NAN, NAN  # the same
    rows["next", "truncated"].fill_(True)
    rows["next", "done"][2] = rows["next", "terminated"][2] = True
    given = rows.clone()
    columns = {key: value for key, value in rows.items(True, True)}
    index = replay.extend_columns(columns) if by_columns else replay.extend(rows)
    ends = replay.storage.get(index)["next"]
    assert ends["done"].flatten().tolist() == [False, False, True, True, False, True]
    assert ends["truncated"].flatten().tolist() == [False, False, False, True, False, True]
    assert (rows["next", "truncated"] == given["next", "truncated"]).all(), "the rows that were given stay as they are"
    rows["next", "terminated"][1] = True
    with pytest.raises(ValueError, match="rows .* are terminated or truncated"):
        replay.extend(rows)
    assert len(replay) == earlier + 6


def test_a_single_row_that_is_truncated_and_not_done_ends_its_episode(replay) -> None:
    row = numbered_steps(0, 1)
    row["next", "truncated"].fill_(True)
    replay.extend(row)
    assert replay[:]["next", "done"].all() and replay[:]["next", "truncated"].all()
