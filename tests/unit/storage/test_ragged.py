# SPDX-License-Identifier: Apache-2.0
"""Columns whose rows have different lengths: stored end to end, drawn padded or jagged, evicted by age."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay import MixedReplay, Replay, load_replay, recipes
from lightning_replay.storage import RaggedStorage
from lightning_replay.transforms import NStepTransitions
from tests.ragged_rows import KEYS, columns, log_prob_of, nested, ragged, rows, sequences_of, tokens_of

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def held(replay: Replay) -> list[int]:
    """Returns the numbers of the rows that are held, oldest first."""
    return replay.storage.get(replay.oldest_first())["number"].tolist()


def drawn(replay: Replay, slots: list[int]) -> TensorDict:
    return replay.storage.get(torch.tensor(slots))


def test_a_batch_is_padded_to_its_longest_row_with_a_mask() -> None:
    replay = ragged()
    assert replay.extend(rows([3, 0, 2])).tolist() == [0, 1, 2]
    batch = drawn(replay, [2, 1])
    assert batch["tokens"].tolist() == [[200, 201], [0, 0]]
    assert batch["mask"].tolist() == [[True, True], [False, False]]
    assert batch["log_prob"].tolist() == [[[0, 2], [-1, 2]], [[0, 0], [0, 0]]]
    assert batch["log_prob"].dtype == torch.bfloat16 and batch["tokens"].dtype == torch.int64
    assert drawn(replay, [0, 2])["tokens"].tolist() == [[0, 1, 2], [200, 201, 0]]


def test_a_batch_of_empty_rows_has_no_elements() -> None:
    replay = ragged()
    replay.extend(rows([0, 0]))
    batch = replay.sample()
    assert batch["tokens"].shape == (4, 0) and batch["mask"].shape == (4, 0) and batch["log_prob"].shape == (4, 0, 2)


def test_a_jagged_batch_shares_its_offsets() -> None:
    replay = ragged(jagged=True)
    replay.extend(rows([3, 0, 2]))
    batch = drawn(replay, [2, 1, 0])
    assert [row.tolist() for row in batch["tokens"].unbind()] == [[200, 201], [], [0, 1, 2]]
    assert batch["tokens"].offsets() is batch["log_prob"].offsets() and "mask" not in batch
    assert (batch["tokens"] * batch["tokens"]).shape[0] == 3  # an operation on rows of different lengths


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_of_both_layouts_and_lists_are_stored_alike(layout: torch.layout) -> None:
    one, other = ragged(), ragged()
    one.extend(rows([3, 0, 2], layout=layout))
    other.extend_columns(columns([3, 0, 2]))
    for replay in (one, other):
        assert sequences_equal(replay, [3, 0, 2])


def sequences_equal(replay: Replay, lengths: list[int]) -> bool:
    found = sequences_of(drawn(replay, [*range(len(lengths))]))
    return all(
        torch.equal(tokens, tokens_of(number, length)) and torch.equal(log_prob, log_prob_of(number, length))
        for (number, tokens, log_prob), length in zip(found, lengths, strict=True)
    )


def test_rows_of_one_length_may_be_dense_and_one_row_is_added() -> None:
    replay = ragged(ragged=["tokens"])
    replay.extend(TensorDict({"tokens": torch.tensor([[1, 2], [3, 4]])}, [2]))
    replay.add(TensorDict({"tokens": torch.tensor([5, 6, 7])}, []))
    assert drawn(replay, [0, 2])["tokens"].tolist() == [[1, 2, 0], [5, 6, 7]]


def test_nested_keys() -> None:
    replay = ragged(ragged=[("rollout", "tokens")])
    replay.extend(TensorDict({"rollout": {"tokens": nested([torch.arange(3), torch.arange(1)])}}, [2]))
    assert drawn(replay, [0, 1])["rollout", "tokens"].tolist() == [[0, 1, 2], [0, 0, 0]]


# Room for 10 elements and 6 rows; lengths by the number of the row.
#   after          held                       elements
#   3 0 2 1 3 0    0:3 1:0 2:2 3:1 4:3 5:0    9
#   2              1:0 2:2 3:1 4:3 5:0 6:2    8     row 0 is overwritten
#   4 1            4:3 5:0 6:2 7:4 8:1        10    rows 1 and 2 are overwritten, row 3 leaves
#   10             9:10                       10
def test_the_oldest_rows_leave_until_new_elements_fit() -> None:
    replay = ragged()
    replay.extend(rows([3, 0, 2, 1, 3, 0]))
    assert held(replay) == [0, 1, 2, 3, 4, 5] and replay.stats()["elements_held"] == 9
    replay.extend(rows([2], 6))
    assert held(replay) == [1, 2, 3, 4, 5, 6] and replay.stats()["elements_held"] == 8
    batch = replay.storage.get(torch.tensor([3]))
    replay.extend(rows([4, 1], 7))
    assert held(replay) == [4, 5, 6, 7, 8] and replay.stats()["elements_held"] == 10
    assert set(replay.sample(200)["number"].tolist()) == {4, 5, 6, 7, 8}
    with pytest.raises(RuntimeError, match="^a slot was drawn whose row was released to make room for elements"):
        replay.storage.get(torch.tensor([3]))
    assert replay.storage.generation_of(torch.tensor([3])) > batch["generation"]  # a TD error of this row is stale
    replay.extend(rows([10], 9))
    assert held(replay) == [9] and sequences_of(replay.sample())[0][1].tolist() == tokens_of(9, 10).tolist()


def test_a_td_error_of_a_row_that_left_is_dropped() -> None:
    replay = ragged("prioritized")
    replay.extend(rows([5, 5]))
    batch = replay.sample()
    replay.extend(rows([5], 2))  # row 0 leaves, and its slot stays empty
    replay.update_priority(batch, torch.ones(4))
    stale = int((batch["number"] == 0).sum())
    assert stale and replay.stats()["stale_updates_dropped"] == stale


def test_more_rows_than_the_capacity_keep_the_last_ones() -> None:
    replay = ragged()
    replay.extend(rows([1] * 4))
    replay.extend(rows([1] * 9, 4))
    assert held(replay) == [7, 8, 9, 10, 11, 12]
    assert all(torch.equal(tokens, tokens_of(number, 1)) for number, tokens, _ in sequences_of(replay.sample(50)))


@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
@pytest.mark.parametrize("options", [{}, {"jagged": True}, {"prefetch": 2}, {"age": {"half_life": 4.0}}])
def test_a_loaded_buffer_draws_the_same(recipe: str, options: dict[str, Any], tmp_path: Path) -> None:
    replay = ragged(recipe, **options)
    for first, lengths in enumerate([[3, 0, 2], [1, 3, 0], [4, 1, 2]]):
        replay.extend(rows(lengths, 3 * first))
    replay.save(tmp_path)
    for loaded in (load_replay(tmp_path), copy.deepcopy(replay)):
        other = copy.deepcopy(replay)
        for step in range(3):
            one, two = other.sample(), loaded.sample()
            assert torch.equal(one["index"], two["index"])
            for (_, tokens, log_prob), (_, tokens_2, log_prob_2) in zip(
                sequences_of(one), sequences_of(two), strict=True
            ):
                assert torch.equal(tokens, tokens_2) and torch.equal(log_prob, log_prob_2)
            for each, batch in ((other, one), (loaded, two)):
                each.update_priority(batch, batch["number"].float())
                each.extend(rows([2, 1], 9 + 2 * step))


def test_an_empty_buffer_is_saved_and_filled_again(tmp_path: Path) -> None:
    replay = ragged()
    replay.save(tmp_path)
    loaded = load_replay(tmp_path)
    loaded.extend(rows([3, 2]))
    loaded.empty()
    loaded.extend(rows([4], 2))
    assert held(loaded) == [2] and sequences_of(loaded.sample())[0][1].tolist() == tokens_of(2, 4).tolist()


def test_a_state_of_other_options_is_refused_and_nothing_changes() -> None:
    state, used = ragged(), ragged(element_capacity=20)
    state.extend(rows([3, 2]))
    used.extend(rows([1, 2], 5))
    with pytest.raises(ValueError, match="build it with the saved ragged and element_capacity"):
        used.load_state_dict(ragged_state(state, num_written=3))
    assert held(used) == [5, 6] and sequences_of(used.sample(1))[0][0] in (5, 6)
    other = ragged(ragged=["tokens"])
    with pytest.raises(ValueError, match=r"ragged columns \[\('tokens',\), \('log_prob',\)\].*build it with the saved"):
        other.load_state_dict(state.state_dict())


def ragged_state(replay: Replay, **changed: Any) -> dict[str, Any]:
    state = replay.state_dict()
    state["storage"] |= changed
    return state


def test_damaged_spans_are_refused() -> None:
    replay = ragged()
    replay.extend(rows([3, 2]))
    state = replay.storage.state_dict()
    state["rows"] = state["rows"].clone()
    state["rows"][1] = 7  # The span of this row ends beyond the elements.
    with pytest.raises(ValueError, match="^the saved rows and elements do not fit; load another save$"):
        ragged().storage.load_state_dict(state)


def test_a_buffer_of_torchrl_takes_the_storage() -> None:
    storage = RaggedStorage(6, ["tokens"], element_capacity=10)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=3)
    buffer.extend(TensorDict({"tokens": nested([torch.arange(3), torch.arange(1)])}, [2]))
    assert buffer.sample()["tokens"].shape[0] == 3


def test_rows_in_a_file(tmp_path: Path) -> None:
    replay = ragged(memmap=str(tmp_path))
    replay.extend(rows([3, 0, 2]))
    assert sequences_equal(replay, [3, 0, 2])


def test_pairs_and_sequences_of_rows_are_padded() -> None:
    replay = recipes.sequences(20, 4, length=2, ragged=["tokens"], element_capacity=99, seed=0)
    flags = torch.zeros(5, 1, dtype=torch.bool)
    tokens = nested([torch.arange(length) for length in (1, 2, 3, 0, 1)])
    steps = torch.arange(6.0).view(6, 1)
    following = {"observation": steps[1:], "reward": steps[1:], "terminated": flags, "truncated": flags, "done": flags}
    replay.extend(TensorDict({"tokens": tokens, "observation": steps[:-1], "next": following}, [5]))
    batch = replay.sample()
    assert batch["tokens"].shape[:2] == (4, 2) == batch["mask"].shape[:2]


REFUSED = [
    (
        {"tokens": [torch.arange(2)], "number": torch.zeros(1)},
        TypeError,
        "^the option ragged names the column 'log_prob', and the rows do not have it",
    ),
    (
        {"tokens": [torch.arange(3)], "log_prob": [torch.zeros(2)]},
        ValueError,
        "^the rows have .3. elements under 'tokens' and .2.",
    ),
    (
        {"tokens": torch.arange(3), "log_prob": torch.arange(3)},
        TypeError,
        "'tokens', and its rows differ .* .given: Tensor.; give a nested tensor",
    ),
    (
        {"tokens": [torch.arange(3), torch.zeros(1)], "log_prob": 0},
        ValueError,
        "^the tensors of .*'tokens' may differ only",
    ),
    (columns([6, 5]), ValueError, "^the rows have 11 elements and element_capacity is 10; nothing was stored"),
    (columns([1]) | {"mask": torch.ones(1, 2)}, ValueError, "^the column 'mask' is a name that batches"),
    (columns([1]) | {"ragged_span": torch.ones(1, 2)}, ValueError, "^the column 'ragged_span' is a name that batches"),
]


@pytest.mark.parametrize(("given", "kind", "message"), REFUSED)
def test_wrong_rows_are_refused_and_nothing_is_stored(given: dict[str, Any], kind: type, message: str) -> None:
    replay = ragged()
    with pytest.raises(kind, match=message):
        replay.extend_columns(given)
    replay.extend(rows([2]))  # Refused rows fix no columns.
    assert held(replay) == [0]


def test_elements_of_another_dtype_or_shape_are_refused() -> None:
    replay = ragged()
    replay.extend(rows([2]))
    given = columns([1], 1)
    with pytest.raises(ValueError, match=r"^elements of 'tokens' are torch.float32 \[\], and those stored torch.int64"):
        replay.extend_columns(given | {"tokens": [torch.zeros(1)]})
    with pytest.raises(ValueError, match=r"^elements of 'log_prob' are torch.bfloat16 \[3\], and those stored"):
        replay.extend_columns(given | {"log_prob": [torch.zeros(1, 3, dtype=torch.bfloat16)]})
    assert held(replay) == [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"n_steps": 3},
            "^n_steps=3 does not fit the option ragged, with which each row is a whole sequence and rows leave",
        ),
        ({"observations": "once"}, "with frame_stack or observations='once'; leave ragged or the other out$"),
        ({"frame_stack": 2}, "with frame_stack or observations='once'; leave ragged or the other out$"),
        ({"element_capacity": None}, "^ragged is .*, element_capacity is None .*leave all three out$"),
        ({"ragged": None}, "^ragged is None, element_capacity is 10 .*leave all three out$"),
        ({"ragged": None, "element_capacity": None, "jagged": True}, "jagged is True; name the columns"),
        ({"ragged": ["a", "a"]}, r"^ragged is \['a', 'a'\]; it must have at least one key, and each once$"),
        ({"ragged": []}, r"^ragged is \[\]; it must have at least one key, and each once$"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ragged(**options)


def test_writers_of_another_order_are_refused() -> None:
    with pytest.raises(ValueError, match="^RetentionWriter does not fit the option ragged, with which each row is"):
        ragged("surprise_retention")


def test_rows_that_a_transform_keeps_back_are_refused() -> None:
    replay = recipes.uniform(
        20, 4, ragged=["tokens"], element_capacity=50, transform=NStepTransitions(3, 0.9, check_continuity=False)
    )

    def step(number: int) -> TensorDict:
        flag = torch.zeros(1, 1, dtype=torch.bool)
        after = {"observation": torch.full((1, 1), number + 1.0), "reward": torch.ones(1, 1)}
        after |= dict.fromkeys(("terminated", "truncated", "done"), flag)
        tokens = nested([tokens_of(number, 2)])
        observation = torch.full((1, 1), float(number))
        return TensorDict({"observation": observation, "tokens": tokens, "next": after}, [1])

    replay.extend(step(0))
    replay.extend(step(1))
    with pytest.raises(ValueError, match="^a transform kept back rows with ragged columns until a later call"):
        replay.extend(step(2))


def test_a_jagged_draw_of_pairs_is_refused() -> None:
    replay = ragged("mixup", jagged=True)
    replay.extend(rows([1, 2]))
    with pytest.raises(ValueError, match="^jagged is True and the sampler draws pairs or sequences of rows"):
        replay.sample()


def test_a_mixed_replay_refuses_a_side_with_the_option() -> None:
    with pytest.raises(ValueError, match="^a side has the option ragged, and batches of the two sides would be padded"):
        MixedReplay(ragged(), recipes.uniform(10, 4))


def test_a_sharded_replay_refuses_the_option() -> None:
    sharded = pytest.importorskip("lightning_replay.sharded")
    with pytest.raises(
        ValueError, match="^ragged is given, and the parts of a batch from several shards would be padded"
    ):
        sharded.ShardedReplay("uniform", 2, capacity=10, batch_size=4, ragged=["tokens"], element_capacity=10)


OTHERS = [
    lambda: recipes.uniform(10, 2),
    lambda: recipes.uniform(10, 2, observations="once"),
    lambda: recipes.uniform(10, 2, frame_stack=2),
    lambda: Replay(storage=LazyTensorStorage(10), batch_size=2),
]


@pytest.mark.parametrize("build", OTHERS, ids=["packed", "once", "frames", "torchrl"])
@pytest.mark.parametrize("given", ["jagged", "strided", "list"])
def test_a_ragged_column_of_another_buffer_is_refused_by_the_name_of_the_option(build: Any, given: str) -> None:
    replay = build()
    with pytest.raises(TypeError, match=r"^the column 'tokens' has rows .* built with the option ragged stores, as .*"):
        if given == "list":
            replay.extend_columns({key: value for key, value in columns([3, 1]).items() if key != "log_prob"})
        else:
            replay.extend(rows([3, 1], layout=getattr(torch, given)).exclude("log_prob"))
    assert len(replay) == 0


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_ragged_column_after_dense_rows_is_refused(layout: torch.layout) -> None:
    replay = recipes.uniform(10, 2)
    replay.extend(TensorDict({"tokens": torch.zeros(2, 3, dtype=torch.int64), "number": torch.arange(2)}, [2]))
    for store in (replay.extend, lambda given: replay.storage.set(slice(2, 4), given)):
        with pytest.raises(TypeError, match="^the column 'tokens' has rows of different lengths, which only a buffer"):
            store(rows([3, 1], layout=layout).exclude("log_prob"))
    assert len(replay) == 2


def test_options_are_those_of_the_storage() -> None:
    storage = ragged(jagged=True).storage
    assert isinstance(storage, RaggedStorage) and storage.jagged and storage.element_capacity == 10
    assert storage.ragged_keys == [(key,) for key in KEYS]


def test_lists_of_numbers_are_sequences_as_lists_of_tensors_are() -> None:
    replay = recipes.uniform(6, 4, ragged=["tokens"], element_capacity=10, seed=0)
    replay.extend_columns({"tokens": [[], [5, 6], [7]], "number": torch.arange(3)})
    assert [one.tolist() for one in replay.storage.get(torch.arange(3))["tokens"]] == [[0, 0], [5, 6], [7, 0]]
    for wrong in ([[1], ["x"]], [[1], [[2, 3]]], [[1.5], [2]]):
        with pytest.raises((TypeError, ValueError), match="tokens"):
            replay.extend_columns({"tokens": wrong, "number": torch.arange(2)})
    assert len(replay) == 3
