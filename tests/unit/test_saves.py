# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import Transform

from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.events import EventTable
from lightning_replay.levels import LevelBuffer
from lightning_replay.replay import Replay
from lightning_replay.saves import MANIFEST, verify_replay
from lightning_replay.saving import DamagedFileError
from lightning_replay.saving.spec import NotRebuildableError
from lightning_replay.schedulers import Exp3
from lightning_replay.schedules import Linear
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.table_replay import CurriculumReplay
from lightning_replay.writers import SurpriseOnPolicyness
from tests.attack.states import fingerprint
from tests.attack.variants import TASKS, VARIANTS, Variant
from tests.event_steps import IsTrue
from tests.recipe_options import built, fitting
from tests.saves import draws, files_of, flip_a_byte, forge, lengthen, remove, stored, truncate
from tests.transitions import numbered_steps


def used(replay: Replay) -> Replay:
    """Half-full, drawn from, updated, wrapped around."""
    for first in range(0, 72, 12):
        replay.extend(fitting(replay, numbered_steps(first, 12, done_every=10)))
        batch = replay.sample()
        replay.update_priority(batch["index"], torch.rand(8), generation=batch["generation"])
    return replay


OPTIONS = [
    *VARIANTS,
    Variant("prioritized", (("importance_exponent", Linear(0.4, 1.0, duration=20)), ("prefetch", 3))),
    *(Variant("neighborhood_mixup", (("refresh_interval", interval),)) for interval in (1, 4)),
    Variant("parallel_curriculum", (("scheduler", Exp3(exploration=0.2)), ("priority_exponent", 0.6))),
]


@pytest.mark.slow
@pytest.mark.parametrize("variant", OPTIONS, ids=lambda variant: re.sub(r"<.*>", "part", repr(variant)))
def test_with_any_options_a_loaded_buffer_and_its_parts_go_on_as_the_saved_one(variant: Variant, tmp_path) -> None:
    world = variant.world(1)
    replay = variant.build(20, 4, seed=3, memmap=tmp_path / "rows")
    used = [_step(replay, world.take(7), []) for _ in range(6)]
    replay.save(tmp_path / "save")
    again = load_replay(tmp_path / "save", trust=["tests"], end_episodes=False)
    draws_ahead = "prefetch" in variant.chosen  # meanwhile, by a thread: parts and counts are those of any moment
    for part, other in [] if draws_ahead else ((replay.sampler, again.sampler), (replay.writer, again.writer)):
        part.dumps(tmp_path / "part")
        other.loads(tmp_path / "part")
        shutil.rmtree(tmp_path / "part")
    for _ in range(6):
        rows = world.take(7)
        one, other = (_step(each, rows.clone(), used) for each in (replay, again))
        assert fingerprint(one.to_dict()) == fingerprint(other.to_dict())
    assert draws_ahead or replay.stats() == again.stats()


def _step(replay: Replay, rows: TensorDict, earlier: list[TensorDict]) -> TensorDict:
    """Stores rows, draws, and returns TD errors of the batch and of an earlier one, some of whose rows have left."""
    replay.extend(rows)
    batch = replay.sample()
    for each in (batch, *earlier[-1:]):
        error = each["next", "reward"].flatten() + 1.0
        replay.update_priority(each, error, surprise=error)
    if isinstance(replay, CurriculumReplay):
        task = int(batch["task"][0])
        replay.progress(TASKS[task], task / 2)
    return batch


def test_a_save_does_not_say_where_files_are_made(tmp_path) -> None:
    """The directory of the rows is one of the machine that saved; whoever loads names one of its own."""
    used(recipes.uniform(50, 8, memmap=str(tmp_path / "theirs"), seed=3)).save(tmp_path / "save")
    shutil.rmtree(tmp_path / "theirs")
    in_memory = load_replay(tmp_path / "save")
    on_disk = load_replay(tmp_path / "save", memmap=tmp_path / "mine")
    assert not (tmp_path / "theirs").exists()
    assert in_memory.storage.init_arguments["memmap"] is None
    assert on_disk.storage.init_arguments["memmap"] == str(tmp_path / "mine") and (tmp_path / "mine").exists()
    for batches in zip(draws(in_memory), draws(on_disk), strict=True):
        assert torch.equal(*batches)


@pytest.mark.parametrize("kind", ["class", "import"])
@pytest.mark.parametrize(
    ("place", "module"),
    [([], "lying_beside"), (["storage"], "lying_there.below"), (["writer", "rule"], "torch_lying_beside")],
    ids=str,
)
def test_a_module_that_lies_beside_a_save_and_is_named_in_it_does_not_run(kind, place, module, tmp_path, monkeypatch):
    """Also where Python looks for modules; trusted, it runs."""
    recipes.surprise_retention(50, 8, seed=3).save(tmp_path)
    root = module.split(".")[0]
    (tmp_path / root).mkdir()
    for name in ("__init__", "below"):
        code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef thing(): pass\n"
        (tmp_path / root / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    built_by = json.loads((tmp_path / MANIFEST).read_text())["built_by"]
    part = built_by
    for name in place:
        part = part["arguments"][name]
    part.clear()
    part.update({kind: f"{module}:thing", "arguments": {}})
    forge(tmp_path / MANIFEST, built_by=built_by)
    with pytest.raises(NotRebuildableError, match=rf"module {module} is not imported.*trust=\['{root}'\]"):
        load_replay(tmp_path)
    recipes.surprise_retention(50, 8, seed=3).load(tmp_path)
    assert verify_replay(tmp_path)["length"] == 0
    assert not (tmp_path / "ran").exists() and root not in sys.modules
    with pytest.raises((NotRebuildableError, DamagedFileError)):
        load_replay(tmp_path, trust=[root])
    assert (tmp_path / "ran").exists()
    for name in {root, module}:
        del sys.modules[name]


def test_what_is_trusted_is_a_list_of_packages(tmp_path) -> None:
    tables = [EventTable("one", condition=IsTrue("one"), history_length=2, capacity=4, min_size=1)]
    replay = recipes.event_tables(50, 8, tables=tables)
    replay.save(tmp_path)
    with pytest.raises(TypeError, match=r"trust is 'tests'; it must be a list of packages, as trust=\['tests'\]"):
        load_replay(tmp_path, trust="tests")
    for others in ([], ["test"], ["tests.event_steps.more"], ["tests.unit"]):
        with pytest.raises(NotRebuildableError, match=r"tests.event_steps is not imported.*trust=\[.*'tests'\]"):
            load_replay(tmp_path, trust=others)
    for trusted in (["tests"], ["tests.event_steps"], ("other", "tests")):
        assert load_replay(tmp_path, trust=trusted).tables.names == ["default", "one"]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "which", ["tensors.safetensors", "values.json", "000000.chunk", "000005.chunk", "000012.chunk"]
)
def test_damage_of_any_file_is_found(which, tmp_path) -> None:
    replay = stored(recipes.prioritized)
    for number, damage in enumerate([flip_a_byte, truncate, lengthen, remove]):
        folder = tmp_path / str(number)
        replay.save(folder)
        assert verify_replay(folder)["length"] == 200
        damage(next(folder.glob(f"data-*/{which}")))
        fresh = recipes.prioritized(capacity=200, batch_size=8)
        fresh.extend(numbered_steps(500, 9))
        for read in (load_replay, fresh.load, verify_replay):
            with pytest.raises(DamagedFileError, match=f"{which}.*nothing was loaded"):
                read(folder)
        assert len(fresh) == 9


def test_verifying_says_how_the_buffer_was_built_or_that_it_is_newer_or_missing(tmp_path) -> None:
    replay = used(recipes.uniform(capacity=50, batch_size=8))
    replay.save(tmp_path)
    found = verify_replay(tmp_path)
    assert set(found) == {"built_by", "length"} and found["length"] == 50
    assert found["built_by"]["arguments"]["storage"]["arguments"]["capacity"] == 50
    used(recipes.uniform(capacity=50, batch_size=8)).save(tmp_path)
    forge(tmp_path / MANIFEST, version=99)
    for read in (load_replay, verify_replay):
        with pytest.raises(ValueError, match=r"version 99.*Install a newer"):
            read(tmp_path)
        with pytest.raises(FileNotFoundError, match="no saved replay buffer"):
            read(tmp_path / "nowhere")


@pytest.mark.usefixtures("small_chunks")
def test_no_pickle_in_a_save(tmp_path) -> None:
    stored(recipes.neighborhood_mixup).save(tmp_path)
    names = {path.name for path in files_of(tmp_path)}
    chunks = {name for name in names if name.endswith(".chunk")}
    assert len(chunks) >= 13 and names - chunks == {MANIFEST, "tensors.safetensors", "values.json"}


def test_level_buffers_save_themselves(tmp_path) -> None:
    levels = LevelBuffer(4, seed=0)
    with pytest.raises(TypeError, match="replay is a LevelBuffer.*levels.save"):
        save_replay(levels, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
    levels.save(tmp_path / "right")
    with pytest.raises(FileNotFoundError, match="replay.json is missing. A level buffer is there: levels.load"):
        load_replay(tmp_path / "right")


@pytest.mark.parametrize("name", ["prioritized", "mixup", "noisy", "neighborhood_mixup"])
@pytest.mark.parametrize(
    ("other", "capacity", "message"),
    [("uniform", 50, ""), ("continuous_transition", 50, ""), ("s4rl", 50, ""), ("uniform", 60, "capacity 50, here 60")],
)
def test_a_buffer_of_other_parts_refuses_the_save_and_keeps_its_rows(name, other, capacity, message, tmp_path) -> None:
    used(recipes.by_name(name)(capacity=50, batch_size=8)).save(tmp_path)
    replay = recipes.by_name(other)(capacity=capacity, batch_size=8)
    replay.extend(numbered_steps(500, 9))
    with pytest.raises(ValueError, match=rf"the saved buffer has .*{message}.* Nothing was loaded"):
        replay.load(tmp_path)
    assert replay.storage.get(torch.arange(9))["observation"][:, 0].tolist() == list(range(500, 509))
    assert len(replay) == 9 and len(replay.sample()) == 8


def test_a_sampler_of_other_options_refuses_the_save_and_stays_whole(tmp_path) -> None:
    used(recipes.neighborhood_mixup(capacity=50, batch_size=8, num_neighbors=3)).save(tmp_path)
    replay = recipes.neighborhood_mixup(capacity=50, batch_size=8, num_neighbors=5)
    replay.extend(numbered_steps(500, 9))
    with pytest.raises(ValueError):
        replay.load(tmp_path)
    assert len(replay) == 9
    assert replay.sample()["observation"].min() >= 500


def test_a_batch_drawn_ahead_that_failed_does_not_keep_a_buffer_from_being_saved() -> None:
    class SecondFails(Transform):
        calls = 0

        def forward(self, tensordict):
            self.calls += 1
            if self.calls == 2:
                raise ValueError("a transform that raises")
            return tensordict

    def build() -> Replay:
        return Replay(storage=PackedStorage(8), transform=SecondFails(), batch_size=2, prefetch=1, seed=0)

    replay, other = build(), build()
    replay.extend(numbered_steps(0, 8))
    replay.sample()
    state = replay.state_dict()
    assert state["prefetched"] == []
    other.load_state_dict(state)
    assert len(other.sample()) == 2
    with pytest.raises(ValueError, match="a transform that raises"):
        replay.sample()


OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "exponent": {"priority_exponent": 0.9},
    "offset": {"priority_offset": 0.5},
    "exponent and offset": {"priority_exponent": 0.3, "priority_offset": 0.25},
    "correction": {"importance_exponent": 1.0},
    "schedule": {"importance_exponent": Linear(0.5, 1.0, duration=10)},
}


@pytest.mark.parametrize("options", OTHER_OPTIONS.values(), ids=OTHER_OPTIONS)
@pytest.mark.parametrize("recipe", ["prioritized", "event_tables", "parallel_curriculum"])
def test_the_options_of_a_new_buffer_count_and_one_message_names_them(recipe, options, tmp_path, caplog) -> None:
    """The stored rows are drawn as if the buffer had been built with these options from the start."""
    if recipe != "prioritized" and "priority_offset" in options:
        pytest.skip("is no option of the recipe")

    def build(**given: Any) -> Replay:
        return built(recipe, capacity=32, batch_size=16, **({"priority_exponent": 0.6, "seed": 0} | given))

    def filled(**given: Any) -> Replay:
        replay = build(**given)
        replay.extend(fitting(replay, numbered_steps(0, 32, done_every=8)))
        replay.update_priority(torch.arange(32), torch.linspace(0.01, 3.0, 32))
        return replay

    filled().save(tmp_path)
    expected, loaded = filled(**options), build(**options)
    loaded.load(tmp_path)
    assert caplog.text.count("count, not those of the save") == 1
    assert all(name in caplog.text for name in options)
    for replay in (expected, loaded):
        replay.seed(1)
    for _ in range(20):
        one, other = expected.sample(), loaded.sample()
        assert torch.equal(one["index"], other["index"])
        torch.testing.assert_close(one["priority_weight"], other["priority_weight"], rtol=1e-4, atol=1e-6)


def test_values_set_after_building_go_on_in_a_buffer_of_the_same_options(tmp_path, caplog) -> None:
    replay = built("prioritized", capacity=16, batch_size=4, seed=0)
    replay.extend(numbered_steps(0, 16))
    replay.sampler.priority_exponent, replay.sampler.priority_offset, replay.sampler.beta = 0.9, 0.25, 0.7
    replay.save(tmp_path)
    again = built("prioritized", capacity=16, batch_size=4, seed=1)
    again.load(tmp_path)
    for loaded in (again, load_replay(tmp_path)):
        sampler = loaded.sampler
        assert (sampler.priority_exponent, sampler.priority_offset, sampler.beta) == (0.9, 0.25, 0.7)
    assert not caplog.text


@pytest.mark.parametrize(("batch_size", "prefetch"), [(8, 2), (4, None)])
def test_batches_drawn_ahead_are_handed_out_only_where_they_have_the_size_of_a_batch(batch_size, prefetch, tmp_path):
    replay = built("uniform", capacity=16, batch_size=4, prefetch=2, seed=0)
    replay.extend(numbered_steps(0, 16))
    replay.sample()
    replay.save(tmp_path)
    other = built("uniform", capacity=16, batch_size=batch_size, prefetch=prefetch, seed=0)
    other.load(tmp_path)
    assert prefetch or other.state_dict()["prefetched"] == []
    assert [other.sample().shape[0] for _ in range(4)] == [batch_size] * 4


def test_coefficients_drawn_ahead_are_of_the_concentration_of_the_buffer(tmp_path: Path) -> None:
    replay = built("mixup", capacity=16, batch_size=8, mixup_concentration=0.01, seed=0)
    replay.extend(numbered_steps(0, 16))
    replay.sample()
    replay.save(tmp_path)
    even = built("mixup", capacity=16, batch_size=8, mixup_concentration=1e6, seed=0)
    even.load(tmp_path)
    coefficient = torch.cat([even.sample()["mixup_coefficient"] for _ in range(8)])
    assert ((coefficient - 0.5).abs() < 0.01)[coefficient < 1].all()


def test_another_exponent_of_stored_surprises_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build(exponent: float) -> Replay:
        rule = SurpriseOnPolicyness(surprise_exponent=exponent)
        return built("surprise_retention", capacity=16, batch_size=4, rule=rule, seed=0)

    replay = build(1.0)
    replay.extend(numbered_steps(0, 16))
    replay.save(tmp_path)
    build(1.0).load(tmp_path)
    assert not caplog.text
    with pytest.raises(ValueError, match=r"'surprise_exponent': 1.0, .*, here .*'surprise_exponent': 0.5"):
        build(0.5).load(tmp_path)
