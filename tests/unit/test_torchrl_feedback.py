# SPDX-License-Identifier: Apache-2.0
"""Feedback in TorchRL's own buffers reaches every part that uses it, or the part refuses the buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from lightning_replay import PackedStorage, Replay
from lightning_replay import writers as all_writers
from lightning_replay.levels import LevelSampler, LevelWriter
from lightning_replay.parts import as_replay_sampler
from lightning_replay.samplers import (
    ContinuousTransitionSampler,
    NeighborhoodMixupSampler,
    PrioritizedSampler,
    RandomPairSampler,
    SequenceSampler,
)
from lightning_replay.writers import FirstInFirstOutWriter, RetentionRule, RetentionWriter
from tests.recipe_options import built, fitting
from tests.transitions import numbered_steps


def first() -> PrioritizedSampler:
    return PrioritizedSampler(64, priority_exponent=1.0, priority_offset=0.0)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "rows": first,
    "neighbors": lambda: NeighborhoodMixupSampler(base_sampler=first()),
    "random pairs": lambda: RandomPairSampler(base_sampler=first()),
    "consecutive pairs": lambda: ContinuousTransitionSampler(base_sampler=first()),
    "sequences": lambda: SequenceSampler(length=2, priority_exponent=0.6),
    "tables": lambda: built("event_tables", capacity=64, priority_exponent=0.6),
    "tasks": lambda: built("parallel_curriculum", capacity=32, priority_exponent=0.6),
}
BUFFERS = [ReplayBuffer, TensorDictReplayBuffer]


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_td_errors_reach_the_priorities_of_every_sampler(kind: str, buffer: type[ReplayBuffer]) -> None:
    sampler, writer, steps = SAMPLERS[kind](), FirstInFirstOutWriter(), numbered_steps(0, 40)
    if isinstance(sampler, Replay):
        steps = fitting(sampler, steps)
        sampler, writer = sampler.sampler, sampler.writer
    replay = buffer(
        storage=PackedStorage(256 if kind == "tables" else 64), sampler=sampler, writer=writer, batch_size=4
    )
    replay.extend(steps)
    batch, info = replay.sample(return_info=True)
    index = torch.as_tensor(info["index"])
    drawn = index.reshape(4, -1)[:, 0]
    if buffer is TensorDictReplayBuffer:
        batch["td_error"] = torch.full(batch.shape, 7.0)
        replay.update_tensordict_priority(batch)
    else:
        replay.update_priority(drawn, torch.full((4,), 7.0))
    torch.testing.assert_close(as_replay_sampler(sampler).priority_of(drawn), torch.full((4,), 7.0))


@pytest.mark.parametrize("buffer", BUFFERS)
def test_partners_that_would_get_no_td_error_are_an_error(buffer: type[ReplayBuffer]) -> None:
    sampler = RandomPairSampler(base_sampler=first(), update_partners=True)
    replay = buffer(storage=PackedStorage(64), sampler=sampler, writer=FirstInFirstOutWriter(), batch_size=4)
    replay.extend(numbered_steps(0, 40))
    batch, info = replay.sample(return_info=True)
    pairs = torch.as_tensor(info["index"])
    with pytest.raises(ValueError, match=r"call update_priority\(batch\['index'\], td_error.abs\(\)\).*No priority"):
        if buffer is TensorDictReplayBuffer:
            replay.update_tensordict_priority(batch.set("td_error", torch.full(batch.shape, 7.0)))
        else:
            replay.update_priority(pairs[:, 0], torch.full((4,), 7.0))
    assert (sampler.priority_of(torch.arange(40)) == 1).all()
    replay.update_priority(pairs, torch.full((4,), 7.0))
    assert (sampler.priority_of(pairs.flatten()) == 7).all()
    uniform = RandomPairSampler(update_partners=True)  # without priorities nothing is lost
    uniform.update_priority(torch.arange(4), torch.ones(4))


NAMES = [getattr(all_writers, name) for name in all_writers.__all__]
RULES = [rule for rule in NAMES if isinstance(rule, type) and issubclass(rule, RetentionRule)]
RULES.remove(RetentionRule)


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_retention_rule_refuses_buffers_which_pass_it_not_what_it_needs(rule: type, buffer: type) -> None:
    for sampler, passes in ((first(), True), (None, False)):
        build = partial(buffer, storage=PackedStorage(8), sampler=sampler, batch_size=4)
        writer = RetentionWriter(rule())
        if rule().needs_actions and passes:
            with pytest.raises(
                TypeError, match=rf"learns from action_values.*a {buffer.__name__}.*use light.*Replay\("
            ):
                build(writer=writer)
        elif rule().learns and not passes:
            with pytest.raises(TypeError, match=rf"RetentionWriter.*{buffer.__name__}.*use lightning_replay\.Replay\("):
                build(writer=writer)
        else:
            replay = build(writer=writer)
            replay.extend(numbered_steps(0, 20))
            assert len(replay) == 8
    Replay(storage=PackedStorage(8), writer=RetentionWriter(rule()), batch_size=4).extend(numbered_steps(0, 20))


class Learning(FirstInFirstOutWriter):
    """A writer of a user that takes feedback."""

    needs_feedback = True


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_so_does_a_writer_of_a_user(storage: type, buffer: type) -> None:
    refused = rf"by the TD errors of drawn rows.*a {buffer.__name__} with the RandomSampler of torchrl passes it none"
    with pytest.raises(TypeError, match=refused):
        buffer(storage=storage(8), writer=Learning(), batch_size=4)
    with pytest.raises(TypeError, match=refused):
        buffer(storage=storage(8), batch_size=4).set_writer(Learning())
    assert Replay(storage=storage(8), writer=Learning(), batch_size=4).takes_feedback


def test_scores_of_levels_reach_the_sampler_and_a_replay_is_refused() -> None:
    sampler = LevelSampler(score_temperature=0.1, staleness_weight=0.0, seed=0)
    levels = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), sampler=sampler, writer=LevelWriter(sampler), batch_size=2
    )
    levels.extend(TensorDict({"level_id": [7, 8], "score": [0.5, 0.5]}, [2]))
    levels.update_priority(torch.tensor([0, 1]), torch.tensor([0.0, 9.0]))
    assert levels.sample()["score"].tolist() == [9.0, 9.0]
    sampler = LevelSampler(seed=0)
    with pytest.raises(
        TypeError, match=r"keep scores of levels, and a Replay returns TD errors.*TensorDictReplayBuffer\("
    ):
        Replay(storage=LazyTensorStorage(4), sampler=sampler, writer=LevelWriter(sampler), batch_size=2)


def surprises() -> TensorDictReplayBuffer:
    sampler = PrioritizedSampler(3, priority_exponent=1.0, priority_offset=0.0, seed=0)
    writer = RetentionWriter(all_writers.SurpriseOnly())
    return TensorDictReplayBuffer(storage=LazyTensorStorage(3), sampler=sampler, writer=writer, batch_size=2)


def test_td_errors_after_an_extend_that_set_no_priorities_are_feedback() -> None:
    buffer = surprises()
    rows = numbered_steps(0, 3).set("td_error", torch.zeros(3))
    slots = buffer.extend(rows, update_priority=False)
    buffer.update_priority(slots, torch.tensor([3.0, 1.0, 2.0]))
    evicted = buffer.extend(numbered_steps(3, 1).set("td_error", torch.zeros(1)))
    assert evicted.tolist() == [1]  # the row with the least TD error left


def test_what_a_retention_knows_can_be_read_after_a_load() -> None:
    buffer, other = surprises(), surprises()
    buffer.extend(numbered_steps(0, 3))
    assert "admitted" in other.writer.stats()
    other.load_state_dict(buffer.state_dict())
    assert other.writer.stats() == buffer.writer.stats()


@pytest.mark.parametrize("least", [-1, 2**63 - 1, 2**63, 1.0, "x", None, True])
@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_a_forged_least_generation_is_refused(storage: Any, least: Any) -> None:
    made = [Replay(storage=storage(3), writer=RetentionWriter(), sampler=first(), batch_size=2) for _ in range(2)]
    made[0].extend(numbered_steps(0, 3))
    state = made[0].state_dict()
    holder = state["storage"] if storage is PackedStorage else state["writer"]["rows_beside"]
    holder["least_generation"] = least
    with pytest.raises(ValueError, match="the saved least_generation is"):
        made[1].load_state_dict(state)


@pytest.mark.parametrize("change", [
    lambda replay: replay.set_storage(PackedStorage(64)), lambda replay: replay.set_writer(FirstInFirstOutWriter())
], ids=["storage", "writer"])  # fmt: skip
def test_a_replay_with_rows_keeps_its_storage_and_its_writer(change: Callable[[Replay], Any]) -> None:
    replay = Replay(storage=PackedStorage(64), batch_size=2)
    change(replay)
    replay.extend(numbered_steps(0, 3))
    assert len(replay) == 3
    with pytest.raises(RuntimeError, match="would lose the 3 rows of this replay"):
        change(replay)
    replay.extend(numbered_steps(3, 2))
    assert replay[:]["observation"].shape[0] == len(replay) == 5
