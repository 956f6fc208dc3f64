# SPDX-License-Identifier: Apache-2.0
"""The recurrent DQN: unrolled as it acts, learned from the steps that count, from hand-made sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay.agents import RecurrentDQN
from tests.unit.agents.toys import fit

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"observation_size": 3, "num_actions": 2, "hidden_sizes": (5,), "state_size": 4}


def agent_of(burn_in: int = 0, **options) -> RecurrentDQN:
    """An agent whose target network differs from its network."""
    torch.manual_seed(0)
    agent = RecurrentDQN(**(SIZES | {"burn_in": burn_in} | options))
    with torch.no_grad():
        for parameter in agent.target_network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return agent


def sequences(lengths: list[int], steps: int, seed: int = 1) -> TensorDict:
    """Sequences ``[B, T]`` of which the first steps exist; the others hold numbers that must not matter.

    Short ones of an odd length terminated, those of an even length are truncated.
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    walk = torch.randn(count, steps + 1, 3, generator=generator)
    mask = torch.arange(steps).expand(count, steps) < torch.tensor(lengths).unsqueeze(1)
    observation = torch.where(mask.unsqueeze(-1), walk[:, :-1], 100.0)
    done, terminated = (torch.zeros(count, steps, 1, dtype=torch.bool) for _ in range(2))
    for row, length in enumerate(lengths):
        done[row, length - 1 :] = length < steps
        terminated[row, length - 1 :] = length < steps and length % 2 == 1
    following = {
        "observation": walk[:, 1:],
        "reward": torch.randn(count, steps, 1, generator=generator),
        "terminated": terminated,
        "done": done,
    }
    return TensorDict(
        {
            "observation": observation,
            "action": torch.randint(2, (count, steps), generator=generator),
            "recurrent_state": 0.5 * torch.randn(count, steps, 2, 4, generator=generator),
            "mask": mask,
            "next": TensorDict(following, [count, steps]),
        },
        [count, steps],
    )


def lstm_values(network, observations: Tensor, state: Tensor) -> np.ndarray:
    """Values ``[T, A]`` along one sequence ``[T, O]``, by the equations of the LSTM and of the dueling layer."""
    given = {name: parameter.detach().double().numpy() for name, parameter in network.named_parameters()}
    output, cell = state.double().numpy()
    values = []
    for observed in observations.double().numpy():
        encoded = np.maximum(0.0, given["encoder.0.weight"] @ observed + given["encoder.0.bias"])
        gates = given["memory.weight_ih_l0"] @ encoded + given["memory.bias_ih_l0"]
        gates += given["memory.weight_hh_l0"] @ output + given["memory.bias_hh_l0"]
        enter, forget, new, leave = np.split(gates, 4)
        sigmoid = [1.0 / (1.0 + np.exp(-gate)) for gate in (enter, forget, leave)]
        cell = sigmoid[1] * cell + sigmoid[0] * np.tanh(new)
        output = sigmoid[2] * np.tanh(cell)
        value, *advantages = given["values.weight"] @ output + given["values.bias"]
        values.append(value + np.array(advantages) - np.mean(advantages))
    return np.array(values)


@pytest.mark.parametrize("burn_in", [0, 2])
def test_td_errors_are_those_of_the_equations(burn_in: int) -> None:
    agent, batch = agent_of(burn_in), sequences([5, 4, 3], steps=5)
    loss, td_error, exists = agent.losses(batch)
    for row, length in enumerate([5, 4, 3]):
        assert exists[row].tolist() == [True] * (length - burn_in) + [False] * (5 - length)
        one = batch[row]
        walk = torch.cat([one["observation"][:length], one["next", "observation"][length - 1 : length]])
        ours, theirs = (
            lstm_values(network, walk, one["recurrent_state"][0]) for network in (agent.network, agent.target_network)
        )
        for step in range(burn_in, length):
            best = ours[step + 1].argmax()
            bootstrap = 0.0 if one["next", "terminated"][step] else 0.99 * theirs[step + 1, best]
            error = float(one["next", "reward"][step]) + bootstrap - ours[step, one["action"][step]]
            assert td_error[row, step - burn_in] == pytest.approx(abs(error), abs=1e-5)
            huber = 0.5 * error**2 if abs(error) < 1 else abs(error) - 0.5
            assert float(loss[row, step - burn_in].detach()) == pytest.approx(huber, abs=1e-5)


def test_unrolled_values_are_those_of_acting_step_by_step() -> None:
    agent, batch = agent_of(), sequences([6, 6], steps=6)
    state, stepped = batch["recurrent_state"][:, 0], []
    with torch.no_grad():
        for step in range(6):
            action, following = agent.act_with_state(batch["observation"][:, step], state, explore=False)
            values, state = agent.network(batch["observation"][:, step : step + 1], state)
            assert torch.equal(state, following) and torch.equal(action, values[:, 0].argmax(-1))
            stepped.append(values)
        unrolled, last = agent.network(batch["observation"], batch["recurrent_state"][:, 0])
    torch.testing.assert_close(unrolled, torch.cat(stepped, 1))
    torch.testing.assert_close(last, state)


def test_without_a_stored_state_a_sequence_begins_with_zeros() -> None:
    agent, batch = agent_of(burn_in=1), sequences([4, 3], steps=4)
    without = batch.exclude("recurrent_state")
    batch["recurrent_state"].zero_()
    assert torch.equal(agent.losses(without)[0], agent.losses(batch)[0])


def learn(agent: RecurrentDQN, batch: TensorDict, tmp_path) -> tuple[float, Tensor, list[Tensor]]:
    _, record = fit(
        agent, [batch], tmp_path, look=lambda fitted: [one.grad.clone() for one in fitted.network.parameters()]
    )
    return float(record[0]["loss"]), record[0]["td_error"], record.seen[0]


def test_padding_and_what_happened_in_the_burn_in_are_not_learned_from(tmp_path) -> None:
    batch = sequences([5, 3], steps=5)
    loss, td_error, gradients = learn(agent_of(burn_in=2), batch, tmp_path)
    assert (td_error > 0).tolist() == [[False, False, True, True, True], [False, False, True, False, False]]
    rows, _, _ = agent_of(burn_in=2).losses(batch)
    assert loss == pytest.approx(float(rows[[0, 0, 0, 1], [0, 1, 2, 0]].mean().detach()))

    other = batch.clone()
    other["action"][:, :2] = 1 - other["action"][:, :2]
    other["next", "reward"][:, :2] += 9.0
    other["recurrent_state"][:, 1:] += 9.0
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        other[key][1, 3:] += 9.0
    same_loss, same_error, same_gradients = learn(agent_of(burn_in=2), other, tmp_path)
    assert same_loss == loss and torch.equal(same_error, td_error)
    assert all(map(torch.equal, same_gradients, gradients))

    other["observation"][:, 0] += 1.0  # it changes the state from which is learned
    assert learn(agent_of(burn_in=2), other, tmp_path)[0] != loss


def test_no_gradient_flows_into_the_burn_in(tmp_path) -> None:
    batch, agent = sequences([5, 5], steps=5), agent_of(burn_in=2)
    agent.target_network.load_state_dict(agent.network.state_dict())
    warm = batch[:, 2:].clone()  # with the state that the burn-in ends with as the stored one
    with torch.no_grad():
        warm["recurrent_state"][:, 0] = agent.network(batch["observation"][:, :2], batch["recurrent_state"][:, 0])[1]
    direct = agent_of(burn_in=0)
    direct.target_network.load_state_dict(direct.network.state_dict())
    for ours, theirs in zip(learn(agent, batch, tmp_path)[2], learn(direct, warm, tmp_path)[2], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_weights_multiply_the_loss_of_each_step(tmp_path) -> None:
    batch = sequences([4, 2], steps=4)
    rows, _, _ = agent_of().losses(batch)
    weights = torch.tensor([0.25, 1.0])
    expected = (rows * weights.unsqueeze(1) * batch["mask"]).sum() / 6
    batch["priority_weight"] = weights.unsqueeze(1).expand(2, 4).clone()
    assert learn(agent_of(), batch, tmp_path)[0] == pytest.approx(float(expected.detach()))


def test_the_target_network_moves_and_gradients_are_clipped(tmp_path) -> None:
    agent, batch = agent_of(gradient_norm=1e-3, target_update_rate=0.5), sequences([4, 4], steps=4)
    before = [parameter.clone() for parameter in agent.target_network.parameters()]
    gradients = learn(agent, batch, tmp_path)[2]
    assert torch.stack([one.square().sum() for one in gradients]).sum().sqrt() == pytest.approx(1e-3, rel=1e-3)
    pairs = zip(before, agent.target_network.parameters(), agent.network.parameters(), strict=True)
    for old, target, network in pairs:
        torch.testing.assert_close(target, (old + network) / 2)


def test_layers_in_bfloat16_learn_too(tmp_path) -> None:
    _, record = fit(agent_of(), [sequences([4, 3], steps=4)], tmp_path, precision="bf16-mixed")
    assert record[0]["td_error"].dtype == torch.float32 and record[0]["td_error"].isfinite().all()


def test_random_actions_are_counted_and_saved() -> None:
    agent = agent_of(exploration_start=1.0, exploration_end=0.0, exploration_steps=400)
    torch.manual_seed(0)
    action, _ = agent.act_with_state(torch.zeros(200, 3), agent.initial_state(200), explore=True)
    assert 70 <= int(action.sum()) <= 130 and agent.exploration_rate == 0.5
    checkpoint: dict = {}
    agent.on_save_checkpoint(checkpoint)
    other = agent_of(exploration_start=1.0, exploration_end=0.0, exploration_steps=400)
    other.on_load_checkpoint(checkpoint)
    assert other.exploration_rate == 0.5


def test_acting_without_a_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^RecurrentDQN acts with a state: call act_with_state"):
        agent_of().act(torch.zeros(1, 3), explore=False)


def test_dictionaries_and_images_are_encoded(tmp_path) -> None:
    camera = {"encoder": "convolutions", "shape": [3, 8, 8], "high": 255.0, "channels_first": True}
    agent = agent_of(observation_size={"camera": camera, "speed": 3})
    batch = sequences([4, 3], steps=4)
    for part in (batch, batch["next"]):
        images = torch.randint(256, (2, 4, 3, 8, 8), dtype=torch.uint8)
        part["observation"] = TensorDict({"camera": images, "speed": part["observation"]}, [2, 4])
    before = [parameter.clone() for parameter in agent.observation_encoder.parameters()]
    learn(agent, batch, tmp_path)
    assert not any(map(torch.equal, before, agent.observation_encoder.parameters()))
    action, state = agent.act_with_state(batch["observation"][:, 0], agent.initial_state(2), explore=False)
    assert action.shape == (2,) and state.shape == (2, 2, 4)
