# SPDX-License-Identifier: Apache-2.0
"""TD errors of the recurrent DQN on any sequences against an agent that steps through them one at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay.agents import RecurrentDQN

STEPS = 6
SEQUENCE = st.tuples(st.integers(1, STEPS), st.sampled_from(["goes on", "terminated", "truncated"]))


def expected(agent: RecurrentDQN, sequence: TensorDict) -> torch.Tensor:
    """Returns TD errors ``[T]``, 0 where nothing is learned; each network has a state."""
    errors, states = torch.zeros(STEPS), [sequence["recurrent_state"][:1]] * 2
    for step in range(int(sequence["mask"].sum())):
        row, networks = sequence[step], (agent.network, agent.target_network)
        played = [net(row["observation"].view(1, 1, -1), state) for net, state in zip(networks, states, strict=True)]
        states = [state for _, state in played]
        after = row["next", "observation"].view(1, 1, -1)
        ours, theirs = (net(after, state)[0].flatten() for net, state in zip(networks, states, strict=True))
        bootstrap = 0.0 if row["next", "terminated"] else agent.hparams["discount"] * theirs[ours.argmax()]
        if step >= agent.hparams["burn_in"]:
            errors[step] = (row["next", "reward"] + bootstrap - played[0][0].flatten()[row["action"]]).abs()
    return errors


@pytest.mark.slow
@given(st.lists(SEQUENCE, min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_td_errors_are_those_of_stepping(drawn: list[tuple[int, str]], burn_in: int, seed: int) -> None:
    torch.manual_seed(seed)
    agent = RecurrentDQN(observation_size=2, num_actions=3, hidden_sizes=(4,), state_size=3, burn_in=burn_in)
    shape = (len(drawn), STEPS)
    terminated, truncated = (
        torch.tensor([[flag == name and step == length for step in range(1, STEPS + 1)] for length, flag in drawn])
        for name in ("terminated", "truncated")
    )
    observation, after = torch.randn(*shape, 2), torch.randn(*shape, 2)
    mask = torch.arange(STEPS).expand(shape) < torch.tensor([length for length, _ in drawn]).unsqueeze(1)
    after[:, :-1][mask[:, 1:]] = observation[:, 1:][mask[:, 1:]]
    following = {"reward": torch.randn(*shape, 1), "terminated": terminated.unsqueeze(-1)}
    following["done"] = (terminated | truncated).unsqueeze(-1)
    batch = TensorDict(
        {
            "observation": observation,
            "action": torch.randint(3, shape),
            "recurrent_state": torch.randn(*shape, 2, 3),
            "mask": mask,
            "next": following | {"observation": after},
        },
        shape,
    )
    with torch.no_grad():
        for parameter in agent.target_network.parameters():
            parameter.add_(torch.randn_like(parameter))
        _, found, exists = agent.losses(batch)
        wanted = torch.stack([expected(agent, sequence) for sequence in batch])
    torch.testing.assert_close(found * exists, wanted[:, burn_in:])
