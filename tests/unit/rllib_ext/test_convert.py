# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from tensordict import TensorDict

from lightning_replay.collecting import VectorSteps
from lightning_replay.storage.columns import rows_of_columns
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.episodes import Columns, EpisodeConverter, FragmentTracker

from .episodes import numbered, sampled
from .recurrent_episodes import recurrent

SAME_STEP = gymnasium.vector.AutoresetMode.SAME_STEP


def transitions_of(converter: EpisodeConverter, episodes: list[SingleAgentEpisode]) -> TensorDict | None:
    columns = converter.transitions(converter.flatten(episodes))
    return None if columns is None else rows_of_columns(columns)


@pytest.mark.parametrize("numpy", [True, False])
def test_rows_of_one_episode(numpy: bool) -> None:
    rows = transitions_of(EpisodeConverter(), [numbered("a", 3, numpy=numpy, terminated=True)])
    assert rows.batch_size == (3,)
    assert rows["observation"].tolist() == [[0, 0], [1, -1], [2, -2]]
    assert rows["next", "observation"].tolist() == [[1, -1], [2, -2], [3, -3]]
    assert rows["action"].tolist() == [0, 1, 0]
    assert rows["next", "reward"].tolist() == [[0], [1], [2]] and rows["next", "reward"].dtype == torch.float32
    assert rows["next", "terminated"].tolist() == rows["next", "done"].tolist() == [[False], [False], [True]]
    assert not rows["next", "truncated"].any()
    assert rows["trajectory"].tolist() == [0, 0, 0]


SPACES = {
    "box": spaces.Box(-1, 1, (3,), np.float64),
    "discrete": spaces.Discrete(4),
    "multi_discrete": spaces.MultiDiscrete([3, 4]),
    "multi_binary": spaces.MultiBinary(5),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "dict": spaces.Dict({"camera": spaces.Box(0, 255, (4, 4, 1), np.uint8), "goal": spaces.Discrete(3)}),
    "tuple": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Dict({"inner": spaces.Discrete(2)})]),
}


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("name", SPACES)
def test_every_space_comes_back_as_it_went_in(name: str, numpy: bool) -> None:
    episode = sampled(SPACES[name], spaces.Box(-1, 1, (2,)), length=5, numpy=numpy)
    converter = EpisodeConverter()
    rows = transitions_of(converter, [episode])
    columns = converter.columns["observation"]
    again = columns.unflatten([rows[leaf.key].numpy() for leaf in columns.leaves])
    following = columns.unflatten([rows[("next", *leaf.key)].numpy() for leaf in columns.leaves])
    expected = episode.to_numpy().get_observations(slice(0, 6))
    for taken, part in ((again, slice(0, 5)), (following, slice(1, 6))):
        for mine, theirs in zip(_leaves(taken), _leaves(expected), strict=True):
            np.testing.assert_array_equal(mine, theirs[part])
            assert mine.dtype == theirs.dtype


class Goals(gymnasium.Env):
    """Entries of a goal and a camera with the number of the step; episodes have three steps."""

    observation_space = spaces.Dict(
        {
            **{name: spaces.Box(-9, 9, (2,)) for name in ("observation", "achieved_goal", "desired_goal")},
            "sight": spaces.Tuple([spaces.Box(0, 255, (2, 2, 3), np.uint8), spaces.Discrete(9)]),
        }
    )
    action_space = spaces.Discrete(2)

    def _seen(self) -> dict[str, Any]:
        names = ("observation", "achieved_goal", "desired_goal")  # in another order than the space
        goals = {name: np.full(2, self.count + place / 4, np.float32) for place, name in enumerate(names)}
        return goals | {"sight": (np.full((2, 2, 3), self.count, np.uint8), np.int64(self.count))}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self._seen(), float(self.count), self.count == 3, False, {}


def test_rows_of_dictionaries_are_those_of_a_vector_of_environments() -> None:
    environment, envs = Goals(), VectorSteps(gymnasium.vector.SyncVectorEnv([Goals], autoreset_mode=SAME_STEP))
    episode, taken = SingleAgentEpisode(), []
    episode.add_env_reset(environment.reset()[0])
    envs.reset()
    for action in (np.int64(1), np.int64(0), np.int64(1)):
        observation, reward, terminated, _, _ = environment.step(action)
        episode.add_env_step(observation, action, reward, terminated=terminated)
        envs.step(action[None])
        taken.append(rows_of_columns(envs.columns))
    rows = transitions_of(EpisodeConverter(), [episode.to_numpy()])
    expected = torch.cat(taken)
    assert set(rows.keys(True, True)) == set(expected.keys(True, True))
    for key, column in expected.items(True, True):
        assert rows[key].dtype == column.dtype and torch.equal(rows[key], column), key
    assert expected["next", "observation", "desired_goal"][:, 0].tolist() == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("numpy", [True, False])
def test_states_of_a_recurrent_module_and_the_steps_they_follow(numpy: bool) -> None:
    converter = EpisodeConverter()
    transitions_of(converter, [recurrent("a", 2, numpy=numpy), recurrent("b", 1, offset=100, numpy=numpy)])
    rows = transitions_of(
        converter,
        [
            recurrent("a", 3, start=1, lookback=1, numpy=numpy),  # its first step came before
            recurrent("b", 2, start=7, lookback=1, offset=100, numpy=numpy),  # a gap
        ],
    )
    assert rows["step"].tolist() == [2, 3, 7, 8] and rows["step"].dtype == torch.int64
    assert rows["state_out", "h"][:, 0, 0].tolist() == [2, 3, 107, 108]
    assert rows["state_out", "c"][:, 0, 1].tolist() == [-2, -3, -107, -108]
    assert rows["state_out", "h"].shape == (4, 1, 2) and rows["state_out", "h"].dtype == torch.float32


def test_episodes_with_and_without_states_are_not_mixed() -> None:
    stateful, stateless = EpisodeConverter(), EpisodeConverter()
    with pytest.raises(ValueError, match="episode b carries no state_out .* before it one with every step"):
        stateful.flatten([recurrent("a", 2), numbered("b", 2)])
    transitions_of(stateful, [recurrent("a", 2)])
    with pytest.raises(ValueError, match="episode b carries no state_out"):
        stateful.flatten([numbered("b", 2)])
    transitions_of(stateless, [numbered("a", 2)])
    with pytest.raises(ValueError, match="episode b carries state_out .* before it none"):
        stateless.flatten([recurrent("b", 2)])
    again = EpisodeConverter()
    again.load_state(stateful.state())
    with pytest.raises(ValueError, match="episode b carries no state_out"):
        again.flatten([numbered("b", 2)])
    assert transitions_of(again, [recurrent("a", 1, start=2)])["trajectory"].tolist() == [0]


def _leaves(struct: object) -> list[np.ndarray]:
    if isinstance(struct, dict):
        return [leaf for key in sorted(struct) for leaf in _leaves(struct[key])]
    if isinstance(struct, tuple):
        return [leaf for part in struct for leaf in _leaves(part)]
    return [np.asarray(struct)]


def test_read_only_arrays_become_writable_rows() -> None:
    # Ray's object store hands out read-only views; torch would warn about them
    episode = numbered("a", 3)
    for buffer in (episode.observations, episode.actions, episode.rewards):
        buffer.data.setflags(write=False)
    rows = transitions_of(EpisodeConverter(), [episode])
    rows["observation"][0] = 7.0
    assert episode.get_observations(0).tolist() == [0, 0]


#   known   0 1 2 3 4
#   sent          3 4 5 6     new: rows 2 and 3 of the fragment
@pytest.mark.parametrize(
    ("sent", "placed", "gaps"),
    [
        ([(0, 5), (3, 4), (7, 1)], [(0, 0), (0, 2), (0, 0)], 0),
        ([(0, 3), (6, 2), (8, 2)], [(0, 0), (1, 0), (1, 0)], 1),  # a lost fragment is a gap and a new trajectory
        ([(50, 3)], [(0, 0)], 0),  # first seen in its middle
    ],
)
def test_what_is_new_of_a_fragment(sent: Any, placed: Any, gaps: int) -> None:
    fragments = FragmentTracker()
    assert [fragments.place("a", *one) for one in sent] == placed and fragments.gaps == gaps


def test_the_episode_continued_longest_ago_is_forgotten_first() -> None:
    fragments = FragmentTracker(remembered=2)
    fragments.place("a", 0, 1)
    fragments.place("b", 0, 1)
    fragments.place("a", 1, 1)
    fragments.place("c", 0, 1)  # forgets b
    assert fragments.place("a", 2, 1) == (0, 0)
    assert fragments.place("b", 1, 1) == (3, 0)


NESTED = {"camera": np.zeros((3, 4, 4, 3), np.uint8), "arm": (np.zeros((3, 2)), np.arange(3))}


def test_another_order_of_entries_is_the_same_space() -> None:
    columns = Columns("observation", {"a": np.zeros(2), "b": np.ones(2)})
    arrays = columns.flatten({"b": np.ones(2), "a": np.zeros(2)})
    assert [array.tolist() for array in arrays] == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("first", "later"), [(np.int32, np.int64), (np.int64, np.int32), (np.float32, np.float64), (np.float64, np.float32)]
)
def test_dtypes_of_the_first_rows_stay(first: type, later: type) -> None:
    columns = Columns("action", np.zeros(3, first))
    (array,) = columns.flatten(np.arange(2, dtype=later))
    assert array.dtype == first
    assert array.tolist() == [0, 1]


def test_what_cannot_be_cast_within_its_kind_is_refused() -> None:
    columns = Columns("action", np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="action has dtype float32; the first rows had int64"):
        columns.flatten(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (np.zeros((3, 2)), "observation is ndarray; the first rows had the entries ['camera', 'arm']"),
        ({"camera": NESTED["camera"]}, "observation is ['camera']; the first rows had the entries ['camera', 'arm']"),
        ({**NESTED, "arm": (np.zeros((3, 2)),)}, "observation/arm is tuple; the first rows had 2 parts"),
        ({**NESTED, "arm": (np.zeros((3, 5)), np.arange(3))}, "observation/arm/0 has shape (5,); the first rows had"),
    ],
)
def test_another_space_is_refused(later: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Columns("observation", NESTED).flatten(later)


def test_a_space_without_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="observation has no entries"):
        Columns("observation", {})


@pytest.mark.parametrize("dtype", ["|O", "<U8", "|V4", "<M8[s]", "|S3"])
def test_a_forged_state_names_no_dtype_but_numbers(dtype: str) -> None:
    """NumPy would take the bytes of rows for the addresses of objects."""
    state = Columns("observation", NESTED).state()
    assert Columns.from_state(state).leaves == Columns("observation", NESTED).leaves
    state["leaves"][1][1] = dtype
    with pytest.raises(ValueError, match="the saved observation has columns of .* load an earlier save"):
        Columns.from_state(state)


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("entries", [(2,), (1,), (0,)], ids=str)
def test_a_step_has_one_reward(entries: tuple[int, ...], numpy: bool) -> None:
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=20, seed=0)
    rewards = [np.zeros(entries, np.float32)] * 3
    with pytest.raises(
        ValueError, match=r"'next', 'reward'\) has the shape .* for 3 rows; give one value for each row"
    ):
        buffer.add([numbered("a", 3, rewards=rewards, numpy=numpy)])
    assert len(buffer) == 0
    buffer.add([numbered("b", 3, numpy=numpy)])
    assert len(buffer) == 3
