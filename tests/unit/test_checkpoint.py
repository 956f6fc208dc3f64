# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from torchrl.envs import Transform

from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.checkpoint import MANIFEST
from lightning_replay.recorded import NotRebuildableError
from lightning_replay.replay import Replay
from lightning_replay.state_files import DamagedFileError
from lightning_replay.storage import PackedStorage
from tests.transitions import numbered_steps


class Unrecorded(Transform):
    """A user's transform that says nothing of how it was built."""

    def forward(self, tensordict):
        return tensordict


def used(replay: Replay) -> Replay:
    """Half-full, drawn from, updated, wrapped around."""
    for first in range(0, 72, 12):
        replay.extend(numbered_steps(first, 12, done_every=10))
        batch = replay.sample()
        replay.update_priority(batch["index"], torch.rand(8), generation=batch["generation"])
    return replay


def draws(replay: Replay, count: int = 5) -> list[torch.Tensor]:
    batches = [replay.sample() for _ in range(count)]
    return [batch[key] for batch in batches for key in ("index", "observation", ("next", "reward"))]


@pytest.mark.parametrize("name", sorted(recipes.known()))
@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_loaded_buffer_goes_on_with_the_same_draws(name, n_steps, tmp_path) -> None:
    replay = used(recipes.by_name(name)(capacity=50, batch_size=8, n_steps=n_steps, seed=3))
    save_replay(replay, tmp_path / "buffer")
    again = load_replay(tmp_path / "buffer")
    for batch in zip(draws(replay), draws(again), strict=True):
        assert torch.equal(*batch)
    more = numbered_steps(100, 7)
    for one in (replay, again):
        one.extend(more)
    for batch in zip(draws(replay), draws(again), strict=True):
        assert torch.equal(*batch)
    assert replay.stats() == again.stats()


def test_prefetched_batches_are_saved_too(tmp_path) -> None:
    replay = used(recipes.uniform(capacity=50, batch_size=8, prefetch=2, seed=3))
    replay.save(tmp_path)
    again = load_replay(tmp_path)
    assert torch.equal(replay.sample()["index"], again.sample()["index"])
    assert torch.equal(replay.sample()["index"], again.sample()["index"])


def test_saving_again_replaces_the_earlier_save(tmp_path) -> None:
    replay = used(recipes.uniform(capacity=50, batch_size=8))
    replay.save(tmp_path)
    replay.extend(numbered_steps(500, 50))
    replay.save(tmp_path)
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["data", MANIFEST]
    assert load_replay(tmp_path).sample()["observation"].min() >= 500


def test_a_saved_buffer_may_be_moved(tmp_path) -> None:
    used(recipes.uniform(capacity=50, batch_size=8)).save(tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert len(load_replay(tmp_path / "there")) == 50


def test_options_that_cannot_be_rebuilt_are_saved_but_not_built(tmp_path) -> None:
    def built() -> Replay:
        return Replay(storage=PackedStorage(50), transform=Unrecorded(), batch_size=8, seed=0)

    replay = used(built())
    replay.save(tmp_path)
    with pytest.raises(NotRebuildableError, match=r"replay\.transform .*replay\.load\(path\)"):
        load_replay(tmp_path)
    again = built()
    again.load(tmp_path)
    assert torch.equal(replay.sample()["index"], again.sample()["index"])


def test_damage_is_found_before_anything_is_loaded(tmp_path) -> None:
    replay = used(recipes.prioritized(capacity=50, batch_size=8))
    for number, damage in enumerate([_flip_a_byte, _truncate, _remove]):
        replay.save(tmp_path / str(number))
        damage(next((tmp_path / str(number)).glob("data-*/tensors.safetensors")))
        with pytest.raises(DamagedFileError, match="nothing was loaded"):
            load_replay(tmp_path / str(number))
        fresh = recipes.prioritized(capacity=50, batch_size=8)
        with pytest.raises(DamagedFileError):
            fresh.load(tmp_path / str(number))
        assert len(fresh) == 0


def test_a_damaged_manifest_is_named(tmp_path) -> None:
    used(recipes.uniform(capacity=50, batch_size=8)).save(tmp_path)
    manifest = tmp_path / MANIFEST
    text = manifest.read_text()
    for damaged in (text[:40], "[]", '{"version": 1}', '{"version": "x"}'):
        manifest.write_text(damaged)
        with pytest.raises(DamagedFileError, match="damaged"):
            load_replay(tmp_path)


def test_a_newer_version_and_a_missing_save_are_said(tmp_path) -> None:
    used(recipes.uniform(capacity=50, batch_size=8)).save(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    manifest["version"] = 99
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"version 99.*Install a newer"):
        load_replay(tmp_path)
    with pytest.raises(FileNotFoundError, match="no saved replay buffer"):
        load_replay(tmp_path / "nowhere")


def test_a_buffer_of_another_capacity_refuses_the_save(tmp_path) -> None:
    used(recipes.uniform(capacity=50, batch_size=8)).save(tmp_path)
    other = recipes.uniform(capacity=60, batch_size=8)
    other.extend(numbered_steps(0, 5))
    with pytest.raises(ValueError, match="capacity 50, here 60"):
        other.load(tmp_path)
    assert len(other) == 5


def test_no_pickle_in_a_save(tmp_path) -> None:
    used(recipes.neighborhood_mixup(capacity=50, batch_size=8)).save(tmp_path)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {MANIFEST, "tensors.safetensors", "values.json"}


SAVE_FOR_EVER = """
import sys, torch
from lightning_replay import recipes
from tests.transitions import numbered_steps
replay = recipes.uniform(capacity=200_000, batch_size=8)
replay.extend(numbered_steps(0, 200_000))
while True:
    replay.save(sys.argv[1])
    print("saved", flush=True)
"""


def test_a_save_killed_in_the_middle_leaves_the_previous_one(tmp_path) -> None:
    """kill -9 at many moments of a save that repeats; whatever is there must load."""
    for moment in range(6):
        writer = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.007 * moment)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert len(load_replay(tmp_path)) == 200_000


def _flip_a_byte(file) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def _truncate(file) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _remove(file) -> None:
    file.unlink()


@pytest.mark.parametrize("name", ["prioritized", "mixup", "noisy", "neighborhood_mixup"])
@pytest.mark.parametrize("other", ["uniform", "continuous_transition", "s4rl"])
def test_a_buffer_of_other_parts_refuses_the_save_and_keeps_its_rows(name, other, tmp_path) -> None:
    used(recipes.by_name(name)(capacity=50, batch_size=8)).save(tmp_path)
    replay = recipes.by_name(other)(capacity=50, batch_size=8)
    replay.extend(numbered_steps(500, 9))
    with pytest.raises(ValueError, match=r"the saved buffer has .* Nothing was loaded"):
        replay.load(tmp_path)
    assert len(replay) == 9
    assert replay.storage.get(torch.arange(9))["observation"][:, 0].tolist() == list(range(500, 509))
    replay.sample()


def test_a_sampler_of_other_options_refuses_the_save_and_stays_whole(tmp_path) -> None:
    used(recipes.neighborhood_mixup(capacity=50, batch_size=8, num_neighbors=3)).save(tmp_path)
    replay = recipes.neighborhood_mixup(capacity=50, batch_size=8, num_neighbors=5)
    replay.extend(numbered_steps(500, 9))
    with pytest.raises(ValueError):
        replay.load(tmp_path)
    assert len(replay) == 9
    assert replay.sample()["observation"].min() >= 500
