# SPDX-License-Identifier: Apache-2.0
"""Lets a replay buffer of our own through the type gates of RLlib.

Measured with ray 2.60.0, new API stack; each row has a test in ``tests/unit/rllib/test_gates.py``.

=============================================  =======================================  ==============================
gate                                           asks                                     answered by
=============================================  =======================================  ==============================
``Algorithm._create_local_replay_buffer_...``  ``"EpisodeReplayBuffer" in type``        :meth:`BufferType.__contains__`
``SACConfig.validate``                         ``type in [four literal names]``         :meth:`BufferType.__eq__`
``DQNConfig.validate``                         ``issubclass(type, EpisodeReplayBuffer)``  the base class
``AlgorithmConfig.to_dict``, ``from_dict``     import path of the class and back        a class at module level
``update_priorities_in_episode_...``           ``isinstance(..., PrioritizedEpisode...)``  the base class
``AlgorithmConfig.training``                   ``new["type"] != old["type"]``           equal to no algorithm's default
=============================================  =======================================  ==============================

The second and the last row pull in opposite directions: RLlib merges a new ``replay_buffer_config`` into the
algorithm's default where both types are equal, and the default's ``alpha`` and ``beta`` would arrive at our
constructor. So the class equals the one literal name that is no algorithm's default.
"""

from __future__ import annotations

from abc import ABCMeta

ACCEPTED_NAME = "MultiAgentPrioritizedEpisodeReplayBuffer"


class BufferType(ABCMeta):
    """Metaclass of a buffer class that answers the questions RLlib asks of a class name."""

    def __contains__(cls, text: object) -> bool:
        return isinstance(text, str) and text in ACCEPTED_NAME

    def __eq__(cls, other: object) -> bool:
        return other == ACCEPTED_NAME if isinstance(other, str) else cls is other

    def __hash__(cls) -> int:
        return ABCMeta.__hash__(cls)
