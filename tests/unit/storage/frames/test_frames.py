# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from lightning_replay import load_replay, recipes
from lightning_replay.storage import frame_pool as pool_module
from lightning_replay.storage.frame_pool import NumbaSearch, TorchSearch
from lightning_replay.storage.frames import FrameStorage
from lightning_replay.storage.packed import read_columns
from tests.frame_steps import IMAGE_KEYS, WRIST, distinct, frame_rows, image_of, of_wrist, stacks_in, stacks_of

SEARCHES = (TorchSearch, NumbaSearch)


@pytest.fixture(params=SEARCHES, ids=lambda search: search.__name__)
def search(request, monkeypatch) -> type:
    monkeypatch.setattr(pool_module, "NumbaSearch", request.param)
    return request.param


def storage_of(rows: TensorDict, capacity: int = 10, frames: int = 40, depth: int = 3) -> FrameStorage:
    storage = FrameStorage(capacity, frame_stack=depth, frame_capacity=frames)
    storage.set(slice(0, len(rows)), rows)
    return storage


#    frames of the episode    5   6   7   8            stacks of 3
#    row 0:   5 5 5 -> 5 5 6
#    row 1:   5 5 6 -> 5 6 7
#    row 2:   5 6 7 -> 6 7 8
EPISODE = stacks_of([5, 6, 7, 8], depth=3)


@pytest.mark.parametrize("shape", [(4, 4), (2, 6), (3, 6), (5, 3), (2, 2, 3)], ids=str)
def test_an_episode_of_three_steps_keeps_its_four_frames_once(search, shape) -> None:
    storage = storage_of(frame_rows(EPISODE, shape))
    assert storage.frames_held == 4
    assert sorted(storage._images[0].pool.references[1:5].tolist()) == [1, 3, 5, 9]  # 8, 7, 6, 5 as counted above
    drawn = storage.get(torch.tensor([2, 0, 2]))
    assert stacks_in(drawn) == [EPISODE[2], EPISODE[0], EPISODE[2]]
    assert drawn["pixels"].dtype == torch.uint8 and drawn["pixels"].shape == (3, 3, *shape)
    assert drawn["pixels"].is_contiguous() and drawn["next", "pixels"].is_contiguous()
    assert drawn["action"].tolist() == [2, 0, 2]
    assert list(drawn.keys()) == ["pixels", "action", "next", "generation"]


def test_overwriting_frees_what_was_there_and_keeps_what_the_new_row_has_as_well(search) -> None:
    storage = storage_of(frame_rows(EPISODE[:1]), frames=6)  # 5 and 6
    five = storage._images[0].pool.frames[storage._frames_of[0, 0]].data_ptr()
    storage.set(slice(0, 1), frame_rows([((5, 5, 9), (5, 9, 9))]))
    assert storage.frames_held == 2
    assert storage._images[0].pool.frames[storage._frames_of[0, 0]].data_ptr() == five
    assert stacks_in(storage.get(torch.tensor([0]))) == [((5, 5, 9), (5, 9, 9))]


def test_five_step_successors_share_what_is_equal(search) -> None:
    frames = list(range(1, 13))
    stacks = stacks_of(frames, depth=4, n_steps=5)
    storage = storage_of(frame_rows(stacks), capacity=20, frames=100, depth=4)
    assert storage.frames_held == 12
    kept = torch.tensor([0, 7])  #   1 1 1 1 -> 3 4 5 6      5 6 7 8 -> 9 10 11 12
    storage.release(torch.tensor([slot for slot in range(len(stacks)) if slot not in kept]))
    assert storage.frames_held == 11
    assert storage.stats()["frames_per_transition"] == 5.5


def test_the_compiled_search_tells_frames_of_equal_hash_apart(monkeypatch) -> None:
    monkeypatch.setattr(pool_module, "NumbaSearch", NumbaSearch)

    def after(word: int) -> int:  # the hash's state after a frame's first word
        mixed = 1 ^ word
        return (((mixed << 29) | (mixed >> 35)) * 0x9E3779B97F4A7C15) % 2**64

    #   The second word enters by an exclusive or: what the first words make different it makes equal again.
    words = [[1, 5], [2, 5 ^ after(1) ^ after(2)], [9, 9]]
    one, other, third = torch.from_numpy(np.array(words, dtype=np.uint64).view(np.uint8)).view(3, 1, 4, 4)
    hashes = NumbaSearch(torch.zeros(1, 16, dtype=torch.uint8)).hash_each(torch.cat((one, other, third)).view(3, 16))
    assert hashes[0] == hashes[1] != hashes[2]
    stacks = [(one, other), (third, one), (third, third), (other, one)]
    rows = TensorDict(
        {
            "pixels": torch.stack([torch.cat(stacks[0]), torch.cat(stacks[2])]),
            "next": {"pixels": torch.stack([torch.cat(stacks[1]), torch.cat(stacks[3])])},
        },
        [2],
    )
    for order in ([0, 1], [1, 0]):
        together = FrameStorage(4, 2, frame_capacity=9)
        together.set(slice(0, 2), rows[order])
        apart = FrameStorage(4, 2, frame_capacity=9)
        for slot, row in enumerate(order):
            apart.set(slice(slot, slot + 1), rows[row : row + 1])
        for storage in (together, apart):
            assert storage.frames_held == 3
            assert (storage.get(torch.arange(2)).exclude("generation") == rows[order]).all()
            storage.release(torch.tensor([0]))
            assert (storage.get(torch.tensor([1])).exclude("generation") == rows[order[1:]]).all()


def test_frames_that_differ_in_one_bit_are_two(search) -> None:
    rows = frame_rows([((1, 1, 1), (1, 1, 1))] * 2, (4, 6))
    for place in range(24):
        again = rows.clone()
        again["pixels"].view(2, 3, 24)[1, 1, place] ^= 128
        again["next", "pixels"].view(2, 3, 24)[0, 2, place] ^= 1
        storage = storage_of(again)
        assert storage.frames_held == 3
        drawn = storage.get(torch.arange(2))
        assert torch.equal(drawn["pixels"], again["pixels"])
        assert torch.equal(drawn["next", "pixels"], again["next", "pixels"])


def test_stacks_that_are_views_are_stored_as_they_look(search) -> None:
    rows = frame_rows(EPISODE, (4, 6))
    turned = rows.clone()
    turned["pixels"] = rows["pixels"].transpose(2, 3).contiguous().transpose(2, 3)
    turned["next", "pixels"] = rows["next", "pixels"].expand(1, -1, -1, -1, -1)[0]
    assert stacks_in(storage_of(turned).get(torch.arange(3))) == EPISODE


def test_rows_changed_after_a_question_about_their_room_are_stored_as_they_are() -> None:
    storage = storage_of(frame_rows(EPISODE), frames=7)  # 5, 6, 7 and 8 are held, and 1 to 4 are too many
    row = frame_rows([((1, 2, 3), (4, 5, 6))])
    assert storage.frames_missing(storage.checked_values(row))
    row["pixels"].copy_(image_of((8, 8, 7), (4, 4)))
    storage.set(slice(3, 4), row)
    assert stacks_in(storage.get(torch.tensor([3]))) == [((8, 8, 7), (4, 5, 6))]


def test_bytes_are_exact() -> None:
    storage = storage_of(frame_rows(EPISODE, (84, 84)), capacity=100, frames=120, depth=3)
    #   action 8 + frames 6 * 4 + reward 4 + 3 flags + generation 8 = 47 -> 64
    assert storage.row_bytes == 64
    #   references, hash, chain and free list of 120 frames and one that is none, 128 buckets; and frames so far
    beside = 6_400 + 121 * (4 + 8 + 4) + 120 * 4 + 128 * 4
    so_far = (1 + storage.frames_held) * 84 * 84
    assert storage.nbytes == beside + so_far
    storage.release(torch.arange(len(storage)))
    places = storage._live.nbytes
    assert storage.frames_held == 0 and storage.nbytes == beside + so_far + places, "memory is kept"
    storage.set(slice(0, 1), frame_rows([((1, 1, 1), (1, 1, 2))], (84, 84)))
    assert storage.nbytes == beside + so_far + places, "frames used before come first"


def test_bytes_of_two_cameras_are_exact() -> None:
    replay = recipes.uniform(100, 2, frame_stack=3, image_key=IMAGE_KEYS[1], frame_capacity=120, seed=0)
    replay.extend(frame_rows(EPISODE, (84, 84), key=IMAGE_KEYS[1]))
    storage = replay.storage
    #   action 8 + frames 2 * 6 * 4 + reward 4 + 3 flags + generation 8 = 71 -> 128
    assert storage.row_bytes == 128 and storage.frame_bytes == 84 * 84 + 15
    #   each has references, hash, chain, free list and buckets of its own; 15 bytes a frame in words of 8
    beside = 2 * (121 * (4 + 8 + 4) + 120 * 4 + 128 * 4)
    one, other = distinct(EPISODE) + 1, distinct(of_wrist(EPISODE)) + 1
    assert storage.nbytes == 12_800 + beside + one * 84 * 84 + -(-other * 15 // 8) * 8
    assert (one, other) == (5, 5) and storage.frames_held == 4
    assert replay.stats()["image_bytes"] == {"pixels": 5 * 84 * 84, "arm.wrist": 80}


@pytest.mark.slow
def test_single_images_need_no_axis_of_frames(tmp_path, search) -> None:
    #   a colour camera 0 1 2 3 4 without an axis of frames, and a depth image that has one
    colour = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 6, 5, 3)
    depth = torch.arange(10, 60, 10, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 1, 3, 4)
    state = torch.arange(5.0).view(5, 1)
    seen = {"camera": colour, "depth": depth, "state": state}
    rows = TensorDict({"observation": {name: one[:-1] for name, one in seen.items()}}, [4])
    flags = torch.zeros(4, 1, dtype=torch.bool)
    ends = {"reward": torch.ones(4, 1), "terminated": flags, "truncated": flags, "done": flags}
    rows["next"] = {"observation": {name: one[1:] for name, one in seen.items()}} | ends
    keys = [("observation", "camera"), ("observation", "depth")]
    replay = recipes.uniform(10, 4, frame_stack=1, image_key=keys, n_steps=2, seed=0)
    with pytest.raises(ValueError, match=r"^rows need images, uint8 \[N, H, W\] or \[N, H, W, C\], under"):
        replay.extend(rows.exclude(keys[0]))
    replay.extend(rows)
    assert replay.storage.frames_held == 5 and replay.storage.frame_bytes == 6 * 5 * 3 + 3 * 4
    assert (replay.storage[:].exclude("generation") == rows).all()
    assert replay.storage.get(torch.tensor([[0, 2]]))["observation", "camera"].shape == (1, 2, 6, 5, 3)
    camera, seen_depth = read_columns(replay.storage, torch.tensor([3]), [("next", *keys[0]), keys[1]])
    assert torch.equal(camera, colour[4:]) and torch.equal(seen_depth, depth[3:4])
    assert replay.successors(torch.arange(4)).tolist() == [1, 2, 3, -1]
    replay.save(tmp_path)
    again = load_replay(tmp_path, end_episodes=False)
    for _ in range(5):
        assert (again.sample() == replay.sample()).all()
    assert again[:]["observation", "camera"].shape == (4, 6, 5, 3)
    with pytest.raises(ValueError, match=r"'camera'\): stored .*\(6, 5, 3\)"):
        again.extend(rows.set(keys[0], colour[:-1, :5]))


def test_two_cameras_are_kept_or_refused_together() -> None:
    storage = FrameStorage(10, 2, IMAGE_KEYS[1], frame_capacity=4)
    #   first camera 1 2 -> 2 3, second 4 5 -> 0 0: each has room for one frame more
    storage.set(slice(0, 1), frame_rows([((1, 2), (2, 3))], key=IMAGE_KEYS[1]))
    fits = frame_rows([((1, 2), (1, 3))], key=IMAGE_KEYS[1])  # second 4 5 -> 4 6
    assert storage.frames_missing(storage.checked_values(fits)) == 0
    wide = frame_rows([((3, 1), (1, 4))], key=IMAGE_KEYS[1])  # first 3 1 -> 1 4, which fit; second 12 10 -> 4 7
    assert storage.frames_missing(storage.checked_values(wide)) == 2
    with pytest.raises(RuntimeError, match="2 more frames are needed"):
        storage.set(slice(1, 2), wide)
    assert [images.pool.num_stored for images in storage._images] == [3, 3] and len(storage) == 1
    storage.set(slice(1, 2), fits)
    assert stacks_in(storage.get(torch.arange(2)), IMAGE_KEYS[1]) == [((1, 2), (2, 3)), ((1, 2), (1, 3))]
    #   the first camera has room for any row, the second, which shows 4 6 12 14, 20 22 28, 16, is full
    storage = FrameStorage(10, 2, IMAGE_KEYS[1], frame_capacity=8)
    shown = [((1, 3), (3, 5)), ((5, 7), (7, 1)), ((3, 7), (3, 7))]
    storage.set(slice(0, 3), frame_rows(shown, key=IMAGE_KEYS[1]))
    assert [images.pool.num_stored for images in storage._images] == [4, 8]
    full = frame_rows([((5, 1), (7, 5))], key=IMAGE_KEYS[1])  # second 20 16 -> 28 26
    assert storage.frames_missing(storage.checked_values(full)) == 1


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("pixels", [("pixels",)]),
        ("[pixels, wrist]", [("pixels",), ("wrist",)]),
        ("[[observation, front]]", [("observation", "front")]),
        ("[pixels, [arm, wrist]]", [("pixels",), ("arm", "wrist")]),
    ],
)
def test_a_list_in_a_file_has_several_keys(text: str, keys: list[tuple[str, ...]]) -> None:
    parser = pytest.importorskip("jsonargparse").ArgumentParser()
    parser.add_function_arguments(recipes.uniform, "replay")
    image_key = parser.parse_args(["--replay.capacity=10", f"--replay.image_key={text}"]).replay.image_key
    assert recipes.uniform(10, 2, frame_stack=2, image_key=image_key).storage.image_keys == keys


@pytest.mark.parametrize("given", [[], ["pixels", "pixels"], ["pixels", ("pixels",)]])
def test_every_camera_is_named_once(given) -> None:
    with pytest.raises(ValueError, match="at least one key, and each once"):
        recipes.uniform(10, 2, frame_stack=2, image_key=given)


def test_a_second_camera_that_is_missing_or_of_other_frames_is_named() -> None:
    replay = recipes.uniform(10, 2, frame_stack=3, image_key=IMAGE_KEYS[1], seed=0)
    with pytest.raises(ValueError, match=r"stacks of 3 frames.*under \('arm', 'wrist'\).*a list of keys for several"):
        replay.extend(frame_rows(EPISODE))
    rows = frame_rows(EPISODE, key=IMAGE_KEYS[1])
    with pytest.raises(ValueError, match=r"\('next', 'arm', 'wrist'\) \[3, 3, 4\]; both need one shape"):
        replay.extend(rows.clone().set(("next", *WRIST), rows["next", WRIST][..., :4]))
    assert len(replay) == 0 and replay.nbytes == 0
    replay.extend(rows)
    assert stacks_in(replay[:], IMAGE_KEYS[1]) == EPISODE


@pytest.mark.parametrize("shapes", [((4, 4), (1, 4, 4)), ((1, 4, 4), (4, 4)), ((4, 4, 3), (1, 4, 4, 3))])
def test_an_axis_of_frames_in_one_of_both_images_is_refused(shapes) -> None:
    storage = FrameStorage(10, frame_stack=1, frame_capacity=30)
    first, second = (torch.zeros(2, *shape, dtype=torch.uint8) for shape in shapes)
    with pytest.raises(ValueError, match=r"under 'pixels' have shape .*\('next', 'pixels'\) .*need one shape"):
        storage.set(range(2), TensorDict({"pixels": first, "next": {"pixels": second}}, [2]))
    storage.set(range(2), TensorDict({"pixels": first, "next": {"pixels": first}}, [2]))
    with pytest.raises(ValueError, match=r"columns of the first ones.*pixels"):
        storage.set(range(2), TensorDict({"pixels": second, "next": {"pixels": second}}, [2]))
    assert storage.get(torch.arange(2))["next", "pixels"].shape == (2, *shapes[0])


def test_memory_of_frames_is_refused_before_anything_is_taken(monkeypatch) -> None:
    monkeypatch.setattr("lightning_replay.free_memory.free_bytes", lambda device: 10_000)
    storage = FrameStorage(10, 3, frame_capacity=1000)
    with pytest.raises(MemoryError, match=r"1,001 frames of 16 bytes"):
        storage.set(slice(0, 3), frame_rows(EPISODE))
    assert storage.nbytes == 0 and len(storage) == 0
    #   rows and each of two cameras alone would fit: 1,280 + 4,816 + 4,520 bytes
    storage = FrameStorage(10, 3, IMAGE_KEYS[1], frame_capacity=300)
    with pytest.raises(MemoryError, match=r"301 frames of 15 bytes, 6,096 bytes of rows and other frames"):
        storage.set(slice(0, 3), frame_rows(EPISODE, key=IMAGE_KEYS[1]))
    assert storage.nbytes == 0 and len(storage) == 0


def test_frames_may_lie_in_a_scratch_file(tmp_path) -> None:
    replay = recipes.uniform(10, 4, frame_stack=3, frame_capacity=40, memmap=str(tmp_path / "scratch"), seed=0)
    replay.extend(frame_rows(EPISODE))
    assert stacks_in(replay.storage.get(torch.arange(3))) == EPISODE
    assert not list((tmp_path / "scratch").iterdir()), "the files have no name once they are mapped"
    replay.save(tmp_path / "saved")
    assert stacks_in(load_replay(tmp_path / "saved").storage.get(torch.arange(3))) == EPISODE


def test_a_copy_is_apart_from_the_original() -> None:
    storage = storage_of(frame_rows(EPISODE))
    again = copy.deepcopy(storage)
    storage.set(slice(0, 1), frame_rows([((1, 1, 1), (1, 1, 1))]))
    assert stacks_in(again.get(torch.arange(3))) == EPISODE
    assert again.frames_held == 4


def test_other_indices_and_single_columns() -> None:
    storage = storage_of(frame_rows(EPISODE))
    assert stacks_in(storage.get(slice(1, 3))) == EPISODE[1:]
    assert stacks_in(storage.get(2).unsqueeze(0)) == EPISODE[2:]
    pairs = storage.get(torch.tensor([[0, 2], [1, 1]]))
    assert pairs["pixels"].shape == (2, 2, 3, 4, 4)
    assert stacks_in(pairs[:, 1]) == [EPISODE[2], EPISODE[1]]
    following, action = read_columns(storage, torch.tensor([2]), [("next", "pixels"), "action"])
    assert torch.equal(following[0], image_of((6, 7, 8), (4, 4))) and action.tolist() == [2]
    with pytest.raises(KeyError, match="colour"):
        read_columns(storage, torch.tensor([0]), ["colour"])


def test_keys_may_be_nested() -> None:
    rows = frame_rows(EPISODE)
    images = rows["pixels"], rows["next", "pixels"]
    first, second = ({"observation": {"image": image, "speed": torch.arange(3)}} for image in images)
    rows = TensorDict(first | {"next": second}, [3])
    storage = FrameStorage(10, 3, ("observation", "image"), frame_capacity=40)
    storage.set(slice(0, 3), rows)
    drawn = storage.get(torch.tensor([1]))
    assert (drawn.exclude("generation") == rows[1:2]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.exclude("pixels"), r"stacks of 3 frames.*under 'pixels'.*there are.*'action'"),
        (lambda rows: rows.exclude(("next", "pixels")), r"stacks of 3 frames.*\('next', 'pixels'\)"),
        (lambda rows: rows.set("pixels", rows["action"]), r"'pixels' is torch.int64 \[3\]"),
        (lambda rows: rows.set("pixels", rows["pixels"].float()), r"'pixels' is torch.float32 \[3, 3, 4, 4\].*uint8"),
        (lambda rows: rows.set("pixels", rows["pixels"][:, :2]), r"'pixels' is torch.uint8 \[3, 2, 4, 4\]"),
        (lambda rows: rows.set("pixels", rows["pixels"][:, 0]), r"'pixels' is torch.uint8 \[3, 4, 4\]"),
        (lambda rows: rows.set("pixels", rows["pixels"][..., :0]), r"'pixels' is torch.uint8 \[3, 3, 4, 0\]"),
        (
            lambda rows: rows.set(("next", "pixels"), rows["next", "pixels"][..., :3]),
            r"\[3, 4, 4\].*\[3, 4, 3\].*one shape",
        ),
        (lambda rows: rows.set("frames_of_stacks", rows["action"]), r"frames_of_stacks.*rename"),
    ],
)
def test_rows_without_such_stacks_are_refused_and_nothing_is_stored(change, message: str) -> None:
    replay = recipes.uniform(10, 2, frame_stack=3, image_key="pixels", seed=0)
    with pytest.raises(ValueError, match=message):
        replay.extend(change(frame_rows(EPISODE)))
    assert len(replay) == 0 and replay.nbytes == 0
    replay.extend(frame_rows(EPISODE))
    assert len(replay) == 3


@pytest.mark.parametrize("stored_before", [0, 3])
def test_frames_that_differ_in_shape_among_each_other_are_refused(stored_before: int) -> None:
    replay = recipes.uniform(10, 2, frame_stack=3, seed=0)
    if stored_before:
        replay.extend(frame_rows(EPISODE))
    row = frame_rows(EPISODE)[0]
    narrow = row.clone().set("pixels", row["pixels"][..., :3]).set(("next", "pixels"), row["next", "pixels"][..., :3])
    rows = LazyStackedTensorDict(row, narrow)
    with pytest.raises(RuntimeError, match="Failed to stack"):
        replay.extend(rows)
    assert len(replay) == stored_before
    assert replay.extend(LazyStackedTensorDict(row, row.clone())).tolist() == [stored_before, stored_before + 1]


def test_full_frames_are_logged_once_and_bytes_are_those_of_the_rows_held(caplog) -> None:
    replay = recipes.uniform(10, 2, frame_stack=3, frame_capacity=7, seed=0)
    with caplog.at_level("INFO", logger="lightning_replay"):
        for start in range(0, 40, 10):
            replay.extend(frame_rows([((start, start + 1, start + 2), (start + 3, start + 4, start + 5))]))
    assert [record.message for record in caplog.records if "is full" in record.message] == [
        "the room for 7 frames is full with 1 of 10 transitions"
    ]
    stats = replay.stats()
    assert replay.storage.num_stored == 1 and stats["bytes_per_transition"] == stats["nbytes"] == replay.nbytes


def test_rows_are_indexed_as_those_of_packed_storage() -> None:
    frames, packed = recipes.uniform(10, 2, frame_stack=3, seed=0), recipes.uniform(10, 2, seed=0)
    for replay in (frames, packed):
        replay.extend(frame_rows(EPISODE))
    for index in (slice(None), slice(1, 9), -1, range(2), [2, 0], torch.tensor([True, False, True])):
        assert frames[index].batch_size == packed[index].batch_size
        assert torch.equal(frames[index]["next", "pixels"], packed[index]["next", "pixels"])
    with pytest.raises(IndexError):
        frames[3]


def test_later_rows_of_other_frames_are_refused_and_nothing_is_lost() -> None:
    replay = recipes.uniform(10, 2, frame_stack=3, seed=0)
    replay.extend(frame_rows(EPISODE))
    with pytest.raises(ValueError, match=r"Different: .*pixels'\)?: stored \(torch.uint8, \(3, 4, 4\)\)"):
        replay.extend(frame_rows(EPISODE).apply(torch.Tensor.float))
    assert stacks_in(replay.storage.get(torch.arange(3))) == EPISODE and len(replay) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame_stack": 4, "frame_capacity": 7}, "frame_capacity is 7.*up to 8 different"),
        ({"frame_capacity": 100}, "frame_capacity is 100 and frame_stack is not given"),
        ({"image_key": "observation"}, "image_key is 'observation' and frame_stack is not given"),
        ({"frame_stack": 4, "n_steps": 3, "capacity": 6}, r"capacity is 6, below frame_stack \+ n_steps = 4 \+ 3"),
    ],
)
def test_bad_options_are_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipes.uniform(**{"capacity": 20, "batch_size": 2} | options)


def test_rows_released_by_others_do_not_count_as_the_oldest() -> None:
    replay = recipes.uniform(20, 1, frame_stack=2, frame_capacity=8, seed=0)
    replay.extend(frame_rows(stacks_of([1, 2, 3, 4, 5, 6], 2)))
    replay.storage.release(torch.tensor([0, 3, 4]))  # left: 1 2 -> 2 3 and 2 3 -> 3 4
    replay.extend(frame_rows([((11, 12), (13, 14)), ((14, 15), (15, 16))], first=5))
    assert held_actions(replay) == [5, 6], "6 new frames: 1 leaves with row 1, which is not enough, and then row 2"
    assert replay.storage.frames_held == 6


def held_actions(replay) -> list[int]:
    slots = replay.storage.occupancy.slots()
    return sorted(replay.storage.get(slots)["action"].tolist())


def test_a_slot_that_was_released_cannot_be_read() -> None:
    storage = storage_of(frame_rows(EPISODE))
    storage.release(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="released to make room"):
        storage.get(torch.tensor([0, 1]))


def test_returns_end_before_released_rows() -> None:
    replay = recipes.uniform(20, 1, frame_stack=2, n_steps=3, discount=1.0, seed=0)
    replay.extend(frame_rows(stacks_of([1, 2, 3, 4, 5, 6], 2)))
    replay.storage.release(torch.tensor([2]))
    steps = {}
    for _ in range(200):
        batch = replay.sample()
        steps[int(batch["action"])] = int(batch["steps_to_next_obs"])
    assert steps == {0: 2, 1: 1, 3: 2, 4: 1}


def test_a_save_of_other_frames_is_refused_and_nothing_is_changed(tmp_path) -> None:
    replay = recipes.uniform(20, 2, frame_stack=2, seed=0)
    replay.extend(frame_rows(stacks_of([1, 2, 3], 2)))
    replay.save(tmp_path)
    for other in (
        recipes.uniform(20, 2, frame_stack=2, image_key=IMAGE_KEYS[1]),
        recipes.uniform(20, 2, frame_stack=2, frame_capacity=100),
        recipes.uniform(20, 2, frame_stack=3),
        recipes.uniform(20, 2, frame_stack=2, image_key="image"),
        recipes.uniform(20, 2),
    ):
        with pytest.raises(ValueError, match="Nothing was loaded"):
            other.load(tmp_path)
        assert len(other) == 0
    small = FrameStorage(20, 2, frame_capacity=4)
    with pytest.raises(ValueError, match="has 6 frames and this one room for 4"):
        small.load_state_dict(storage_of(frame_rows(stacks_of(list(range(6)), 2)), 20, 10, depth=2).state_dict())
    assert len(small) == 0


def is_event(rows: TensorDict) -> torch.Tensor:
    return rows["action"] == 2


def test_priorities_of_entries_that_left_early_are_forgotten(tmp_path) -> None:
    options = {"frame_stack": 2, "frame_capacity": 9, "min_size": 1, "priority_exponent": 1.0, "seed": 0}
    replay = recipes.parallel_curriculum(["a"], 8, 4, **options)
    for first in (1, 11, 21):
        rows = frame_rows(stacks_of(list(range(first, first + 4)), 2), first=first)
        replay.extend(rows.set("task", torch.zeros(3, dtype=torch.int64)))
        replay.update_priority(replay.sample()["index"], torch.ones(4))
    #   12 frames are 3 too many: rows 1, 2 and 3 leave
    assert replay.table("a")["action"].tolist() == [11, 12, 13, 21, 22, 23]
    replay.save(tmp_path)
    again = load_replay(tmp_path)
    for _ in range(40):
        batch = replay.sample()
        assert (batch == again.sample()).all()
        assert int(batch["action"].min()) >= 11


@pytest.mark.gpu
@pytest.mark.parametrize("key", IMAGE_KEYS, ids=str)
def test_frames_on_a_gpu(key, tmp_path) -> None:
    options = {"frame_stack": 2, "image_key": key, "frame_capacity": 12}
    replay = recipes.prioritized(20, 4, n_steps=2, device="cuda", seed=3, **options)
    for first in range(0, 60, 10):
        replay.extend(frame_rows(stacks_of(list(range(first, first + 7)), 2), first=first, done=True, key=key))
    batch = replay.sample()
    assert batch["pixels"].is_cuda and stacks_in(batch.cpu(), key)
    assert replay.storage.frames_held <= 12
    replay.save(tmp_path)
    again = load_replay(tmp_path)
    assert (again.sample() == replay.sample()).all()
