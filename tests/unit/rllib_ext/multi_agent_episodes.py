# SPDX-License-Identifier: Apache-2.0
"""Episodes of several agents in fragments as an EnvRunner sends them, and a plain record of what happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

AGENTS = ("a", "b", "c")
# What the environment returns for one agent in one step.
SILENT, OBSERVED, TERMINATED, TRUNCATED, TERMINATED_SILENTLY = range(5)


class Row(NamedTuple):
    """A transition; observations are numbers that belong to one agent and step."""

    observation: int
    action: int
    reward: float
    following: int
    terminated: bool
    truncated: bool


@dataclass
class Played:
    """Fragments in the order in which they are sent, and by agent the transitions completed in each."""

    fragments: list[MultiAgentEpisode] = field(default_factory=list)
    rows: list[dict[str, list[Row]]] = field(default_factory=list)
    never_completed: list[Row] = field(default_factory=list)


def number(agent: str, step: int) -> int:
    return 1000 * AGENTS.index(agent) + step


def by_name(agent: Any, *args: Any, **rest: Any) -> str:
    return f"module_{agent}"


def play(
    first: Sequence[str],
    steps: Sequence[dict[str, int]],
    fragment: int,
    lookback: int = 1,
    module_of: Callable[..., str] = by_name,
) -> Played:
    """Plays one episode, which ends for all that are left with its last step.

    Args:
        first: agents that observe the reset; others appear with their first observation.
        steps: what each agent is told; an agent acts after each observation. Every agent gets the reward 2**k in step
            k, whether it acted or not.
        fragment: steps after which the EnvRunner cuts.
        lookback: RLlib's ``episode_lookback_horizon``, 1 by default.
        module_of: RLlib's ``policy_mapping_fn``.
    """
    played, rows = Played(), defaultdict(list)
    episode = MultiAgentEpisode(agent_to_module_mapping_fn=module_of)
    episode.add_env_reset(observations={agent: _seen(agent, 0) for agent in first})
    newest, to_act = dict.fromkeys(first, 0), list(first)
    waiting: dict[str, float] = {}  # agents that acted and saw nothing since, with their rewards
    gone: set[str] = set()
    for step, told in enumerate(steps, 1):
        is_last = step == len(steps)
        said = {agent: told.get(agent, SILENT) for agent in AGENTS if agent not in gone}
        for agent, word in said.items():
            if agent not in newest:  # an agent that was never seen can only appear
                said[agent] = OBSERVED if word == OBSERVED and not is_last else SILENT
        seen = [agent for agent, word in said.items() if word in (OBSERVED, TERMINATED, TRUNCATED)]
        ended = {agent: word for agent, word in said.items() if word > OBSERVED}
        waiting |= {agent: 0.0 for agent in to_act}
        present = [agent for agent in said if agent in newest]
        episode.add_env_step(
            {agent: _seen(agent, step) for agent in seen},
            {agent: np.int64(newest[agent] % 2) for agent in to_act},
            {agent: 2.0**step for agent in present},
            terminateds={agent: True for agent, word in ended.items() if word != TRUNCATED} | {"__all__": is_last},
            truncateds={agent: True for agent, word in ended.items() if word == TRUNCATED},
            extra_model_outputs={agent: {"action_logp": 0.5} for agent in to_act},
        )
        for agent in present:
            ends = agent in ended or is_last
            if agent in waiting:
                waiting[agent] += 2.0**step
            if agent in waiting and (agent in seen or ends):
                truncated = said[agent] == TRUNCATED
                following = step if agent in seen else newest[agent]  # RLlib repeats the last observation
                row = Row(
                    number(agent, newest[agent]),
                    newest[agent] % 2,
                    waiting.pop(agent),
                    number(agent, following),
                    ends and not truncated,
                    truncated,
                )
                # RLlib repeats an observation of the same fragment alone; the others' last step it leaves out.
                was_cut = newest[agent] <= (step - 1) // fragment * fragment and step > fragment
                if agent not in seen and was_cut:
                    played.never_completed.append(row)
                else:
                    rows[agent].append(row)
        newest |= dict.fromkeys(seen, step)
        gone |= set(ended)
        to_act = [agent for agent in seen if agent not in gone]
        if episode.is_done or step % fragment == 0:
            following_fragment = None if episode.is_done else episode.cut(len_lookback_buffer=lookback)
            _send(played, episode, rows)
            if following_fragment is None:
                break
            episode, rows = following_fragment, defaultdict(list)
    return played


def _seen(agent: str, step: int) -> np.ndarray:
    return np.array([number(agent, step), -1], np.float32)


def _send(played: Played, episode: MultiAgentEpisode, rows: dict[str, list[Row]]) -> None:
    for agent, part in list(episode.agent_episodes.items()):
        if not len(part):
            del episode.agent_episodes[agent]  # as the EnvRunner does
    played.fragments.append(episode.to_numpy())
    played.rows.append(rows)
