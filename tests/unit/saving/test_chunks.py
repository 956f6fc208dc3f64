# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import threading

import pytest
import torch

from lightning_replay.saving import DamagedFileError
from lightning_replay.saving import chunks as chunk_files

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch) -> None:
    monkeypatch.setattr(chunk_files, "CHUNK_BYTES", 64)


def expected_of(chunks) -> dict:
    return {chunk.name: chunk.fingerprint._asdict() for chunk in chunks}


def earlier_of(directory, chunks) -> dict:
    return {chunk.fingerprint: directory / chunk.name for chunk in chunks}


def folders(tmp_path, count: int):
    made = [tmp_path / str(number) for number in range(count)]
    for each in made:
        each.mkdir()
    return made


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    contents = [each.contiguous().view(-1).view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*contents)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_dtype_come_back_bit_by_bit(dtype, tmp_path) -> None:
    content = torch.randint(0, 256, (7 * 11 * 16,), dtype=torch.uint8)
    if dtype == torch.bool:
        content %= 2
    whole = content.view(dtype)[: 7 * 11].view(7, 11)
    tensors = {"whole": whole, "strided": whole.T, "spread": whole[:, :1].expand(-1, 30), "scalar": whole[3, 4]}
    tensors["nothing"] = whole[:, :0]
    records, chunks = chunk_files.write_chunks(tmp_path, tensors, {})
    located = chunk_files.locate_chunks(tmp_path, records, expected_of(chunks))
    again = chunk_files.read_chunks(located, tmp_path)
    assert list(again) == list(tensors)
    for name, tensor in tensors.items():
        assert same_bytes(again[name], tensor), name


@pytest.mark.parametrize(
    ("num_bytes", "sizes"), [(1, [1]), (63, [63]), (64, [64]), (65, [64, 1]), (200, [64, 64, 64, 8])]
)
def test_a_tensor_is_cut_into_files_of_the_chunk_size(num_bytes, sizes, tmp_path) -> None:
    _, chunks = chunk_files.write_chunks(tmp_path, {"a": torch.arange(num_bytes, dtype=torch.uint8)}, {})
    assert [(tmp_path / chunk.name).stat().st_size for chunk in chunks] == sizes
    assert [chunk.fingerprint.bytes for chunk in chunks] == sizes
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{n:06d}{chunk_files.CHUNK_SUFFIX}" for n in range(len(sizes))
    ]


def test_content_that_moved_to_another_place_is_linked_from_there(tmp_path) -> None:
    before, after = folders(tmp_path, 2)
    _, chunks = chunk_files.write_chunks(before, {"rows": torch.arange(16)}, {})
    records, again = chunk_files.write_chunks(after, {"new": torch.arange(8, 24)}, earlier_of(before, chunks))
    assert [chunk.linked for chunk in again] == [True, False]
    read = chunk_files.read_chunks(chunk_files.locate_chunks(after, records, expected_of(again)), tmp_path)
    assert read["new"].tolist() == list(range(8, 24))


def test_no_chunk_is_ever_written_in_place(tmp_path, monkeypatch) -> None:
    """Network file systems report failure for a link they made: what is written then must not reach the other save."""
    before, after = folders(tmp_path, 2)
    _, chunks = chunk_files.write_chunks(before, {"rows": torch.arange(8)}, {})
    link = os.link

    def lie(source, target):
        link(source, target)
        raise OSError(17, "File exists")

    monkeypatch.setattr(os, "link", lie)
    _, again = chunk_files.write_chunks(after, {"rows": torch.arange(8)}, earlier_of(before, chunks))
    one, other = (before / chunks[0].name).stat(), (after / again[0].name).stat()
    assert one.st_ino != other.st_ino
    assert one.st_nlink == other.st_nlink == 1
    assert [path.name for path in after.iterdir()] == [again[0].name]


def test_what_is_hashed_is_what_is_written_while_another_thread_writes_rows(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(chunk_files, "CHUNK_BYTES", 1 << 16)
    rows = torch.zeros(200_000, dtype=torch.int64)
    stop = threading.Event()

    def write_rows() -> None:
        while not stop.is_set():
            rows.add_(1)

    writer = threading.Thread(target=write_rows)
    writer.start()
    earlier: dict = {}
    try:
        for attempt in range(6):
            folder = tmp_path / str(attempt)
            folder.mkdir()
            records, chunks = chunk_files.write_chunks(folder, {"rows": rows}, earlier)
            earlier = earlier_of(folder, chunks) if attempt % 2 else {}
            chunk_files.read_chunks(chunk_files.locate_chunks(folder, records, expected_of(chunks)), scratch=folder)
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("num_bytes", [1, 100, 1 << 20, (5 << 19) + 3])
def test_every_damage_is_found(num_bytes, tmp_path) -> None:
    file = tmp_path / "file"
    content = os.urandom(num_bytes)
    file.write_bytes(content)
    record = chunk_files.fingerprint(file)._asdict()
    target = bytearray(num_bytes)
    chunk_files.check_file(file, record)
    chunk_files.check_file(file, record, memoryview(target))
    assert target == content
    damaged = bytearray(content)
    damaged[-1] ^= 1
    for other in (bytes(damaged), content[:-1], content + b"0", b""):
        file.write_bytes(other)
        for place in (None, memoryview(target)):
            with pytest.raises(DamagedFileError, match="truncated or changed.*nothing was loaded"):
                chunk_files.check_file(file, record, place)
    file.unlink()
    with pytest.raises(DamagedFileError, match="cannot be read.*nothing was loaded"):
        chunk_files.check_file(file, record)


@pytest.mark.parametrize("record", [{}, {"bytes": 3}, {"bytes": "3", "blake2b": ""}, {"bytes": 3, "blake2b": None}])
def test_a_file_of_which_nothing_is_known_is_refused(record, tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    with pytest.raises(DamagedFileError):
        chunk_files.check_file(tmp_path / "file", record)


def test_a_fingerprint_is_size_and_hash_and_only_a_file_of_the_right_size_is_linked_from(tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    # printf abc | b2sum --length=160
    assert chunk_files.fingerprint(tmp_path / "file") == chunk_files.Fingerprint(
        3, "384264f676f39536840523f284921cdc68b6846b"
    )
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"abc")
    link.symlink_to("file")
    assert chunk_files.is_regular(file, 3)
    assert not chunk_files.is_regular(file, 4)
    assert not chunk_files.is_regular(link, 3)
    assert not chunk_files.is_regular(tmp_path, tmp_path.stat().st_size)
    assert not chunk_files.is_regular(tmp_path / "nowhere", 3)


def test_files_that_do_not_make_up_the_tensor_are_refused(tmp_path) -> None:
    records, chunks = chunk_files.write_chunks(tmp_path, {"rows": torch.arange(20)}, {})
    files = expected_of(chunks)
    less = {name: record for name, record in files.items() if name != chunks[1].name}
    with pytest.raises(DamagedFileError, match="chunks of rows"):
        chunk_files.locate_chunks(tmp_path, records, less)
    with pytest.raises(DamagedFileError, match="lack 32 bytes"):
        chunk_files.locate_chunks(tmp_path, {"rows": records["rows"] | {"shape": [24]}}, files)
    for wrong in ({"dtype": "int65"}, {"shape": None}, {"files": None}):
        with pytest.raises(DamagedFileError, match="chunks of rows"):
            chunk_files.locate_chunks(tmp_path, {"rows": records["rows"] | wrong}, files)


def test_where_memory_is_short_a_scratch_file_takes_its_place(tmp_path, monkeypatch) -> None:
    saved, scratch = folders(tmp_path, 2)
    rows = torch.randint(0, 1000, (100,))
    records, chunks = chunk_files.write_chunks(saved, {"rows": rows, "odd": rows[:3].to(torch.uint8)}, {})
    located = chunk_files.locate_chunks(saved, records, expected_of(chunks))
    used = []
    allocate = chunk_files.allocate_rows
    monkeypatch.setattr(chunk_files, "allocate_rows", lambda *args: used.append(args[3]) or allocate(*args))
    for free, expected in ((2 * 803, None), (2 * 803 - 1, scratch), (None, None)):
        used.clear()
        monkeypatch.setattr(chunk_files, "free_bytes", lambda device, free=free: free)
        read = chunk_files.read_chunks(located, scratch)
        assert used == [expected, expected]
        assert torch.equal(read["rows"], rows) and torch.equal(read["odd"], rows[:3].to(torch.uint8))
        assert list(scratch.iterdir()) == []
    monkeypatch.setattr(chunk_files, "free_bytes", lambda device: 0)
    (tmp_path / "file").touch()
    assert torch.equal(chunk_files.read_chunks(located, tmp_path / "file" / "no folder")["rows"], rows)
