# SPDX-License-Identifier: Apache-2.0
"""One gradient from several that conflict."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay.agents import DQN, SAC, TD3, OffPolicyAgent, Rainbow
from lightning_replay.agents.cagrad import ConflictAverseStep, conflict_averse_gradient
from lightning_replay.schedules import Linear
from tests.unit.agents.toys import fit, make_rows

# fitted without a data module here
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def simplex(count: int, points: int) -> torch.Tensor:
    """A grid of weights ``[N, count]``, for 2 or 3 parts."""
    ticks = torch.arange(points + 1, dtype=torch.float64) / points
    if count == 2:
        return torch.stack([ticks, 1 - ticks], dim=1)
    first, second = torch.cartesian_prod(ticks, ticks).unbind(1)
    inside = first + second <= 1 + 1e-12
    return torch.stack([first, second, (1 - first - second).clamp(min=0)], dim=1)[inside]


def least_on_grid(gradients: torch.Tensor, c: float) -> float:
    """The least of ``g_w . g0 + c |g0| |g_w|`` on a grid of weights that zooms in three times."""
    average = gradients.mean(0)
    grid = simplex(len(gradients), 200)
    centre, spread = torch.zeros(len(gradients), dtype=torch.float64), 1.0
    least = math.inf
    for _ in range(4):
        weights = centre + spread * (grid - (0 if spread == 1 else 1 / len(gradients)))
        weights = weights[(weights >= 0).all(1)]
        combined = weights @ gradients
        values = combined @ average + c * average.norm() * combined.norm(dim=1)
        if float(values.min()) < least:
            least, centre = float(values.min()), weights[values.argmin()]
        spread /= 20
    return least


def test_by_hand() -> None:
    gradients = torch.tensor([[4.0, 0.0], [0.0, 2.0]])
    # g0 = (2, 1), c |g0| = sqrt(5)/2
    direction = conflict_averse_gradient(gradients, c=0.5)
    # w = (a, 1 - a): 2 + 6a + sqrt(5)/2 sqrt(16a² + 4(1 - a)²) grows at a = 0 by 6 - sqrt(5) > 0, so g_w = (0, 2)
    torch.testing.assert_close(direction, torch.tensor([2.0, 1.0 + math.sqrt(5) / 2]))
    torch.testing.assert_close(conflict_averse_gradient(gradients, 0.5, lambda c: 1 / (1 + c)), direction / 1.5)


def test_the_average_at_zero_and_for_equal_gradients() -> None:
    gradients = torch.randn(3, 50)
    assert torch.equal(conflict_averse_gradient(gradients, 0.0), gradients.mean(0))
    one = gradients[:1]
    for parts in (1, 2, 5):
        torch.testing.assert_close(conflict_averse_gradient(one.expand(parts, -1), 0.4), 1.4 * one[0])


def test_opposite_gradients_and_zeros_give_the_average() -> None:
    along = torch.tensor([1.0, -2.0])
    assert torch.equal(conflict_averse_gradient(torch.stack([along, -along]), 0.5), torch.zeros(2))
    assert torch.equal(conflict_averse_gradient(torch.zeros(2, 3), 0.5), torch.zeros(3))
    # the second part has no gradient, so nothing helps it: g_w vanishes
    assert torch.equal(conflict_averse_gradient(torch.stack([along, 0 * along]), 0.5), along / 2)
    rescaled = conflict_averse_gradient(torch.stack([along, 0 * along]), 0.5, lambda c: 1 / (1 + c))
    torch.testing.assert_close(rescaled, along / 3)


@given(
    parts=st.sampled_from([2, 3]),
    size=st.integers(1, 6),
    c=st.floats(0.05, 0.95),
    spread=st.floats(0.0, 1.5),
    common=st.floats(0.0, 3.0),
    seed=st.integers(0, 2**20),
)
def test_the_least_helped_part_is_helped_as_much_as_a_grid_says(parts: int, size: int, c, spread, common, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(parts, size, generator=generator, dtype=torch.float64)
    gradients *= (spread * torch.randn(parts, 1, generator=generator, dtype=torch.float64)).exp()
    gradients += common * torch.randn(1, size, generator=generator, dtype=torch.float64)
    average = gradients.mean(0)
    direction = conflict_averse_gradient(gradients, c)
    scale = float(average.norm() * gradients.norm(dim=1).max())
    assert (direction - average).norm() <= c * average.norm() * (1 + 1e-9) + 1e-12
    # duality: the best of the worst part is the least of the weighted sums
    assert float((gradients @ direction).min()) == pytest.approx(least_on_grid(gradients, c), abs=2e-5 * scale)


@pytest.mark.parametrize("parts", [4, 9])
def test_many_parts_are_helped_at_least_as_much_as_by_any_other_direction_tried(parts: int) -> None:
    gradients = torch.randn(parts, 30, dtype=torch.float64) + 0.2 * torch.randn(1, 30, dtype=torch.float64)
    average = gradients.mean(0)
    direction = conflict_averse_gradient(gradients, 0.7)
    worst = float((gradients @ direction).min())
    combined = (direction - average) / (direction - average).norm()
    steps = torch.randn(20_000, 30, dtype=torch.float64) * torch.logspace(-6, 0, 20_000, dtype=torch.float64)[:, None]
    others = torch.nn.functional.normalize(combined + steps, dim=1) * 0.7 * average.norm() + average
    assert float((others @ gradients.t()).amin(1).max()) <= worst + 1e-9
    assert worst > float((gradients @ average).min())


def squares(parameters: list[torch.nn.Parameter], features: torch.Tensor) -> torch.Tensor:
    return (features @ parameters[0] - parameters[1]).square()


def test_backward_equals_the_function_on_the_gradients_of_the_parts() -> None:
    parameters = [torch.nn.Parameter(value) for value in (torch.randn(3), torch.zeros(()), torch.ones(2))]
    features, parts = torch.randn(8, 3), torch.tensor([7, 0, 7, 7, 2, 0, 7, 7])
    gradients = []
    for part in (0, 2, 7):
        loss = squares(parameters, features)[parts == part].sum() * 3 / 8
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters[:2])]))
    step = ConflictAverseStep(parameters, c=0.5)
    loss = step.backward(squares(parameters, features).unsqueeze(1), parts)
    assert not loss.requires_grad and loss == squares(parameters, features).mean()
    expected = conflict_averse_gradient(torch.stack(gradients), 0.5)
    torch.testing.assert_close(torch.cat([parameters[0].grad, parameters[1].grad.reshape(1)]), expected)
    assert torch.equal(parameters[2].grad, torch.zeros(2))  # no loss depends on it
    first = parameters[0].grad.clone()
    step.backward(squares(parameters, features), parts)
    torch.testing.assert_close(parameters[0].grad, first)  # overwritten, not added


def test_c_follows_its_own_updates_and_is_saved() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    step = ConflictAverseStep([weight], c=Linear(0.8, 0.0, duration=4, clock="updates"))
    losses = torch.tensor([[4.0, 0.0], [0.0, 2.0]])
    seen = []
    for _ in range(5):
        seen.append(step.c)
        step.backward_parts((losses * weight).sum(1))
    assert seen == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    assert torch.equal(weight.grad, losses.mean(0))
    again = ConflictAverseStep([weight], c=Linear(0.8, 0.0, duration=10, clock="updates"))
    again.load_state_dict(step.state_dict())
    assert again.c == pytest.approx(0.4)


def test_bad_input_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"c is 1.0; it must be a number in \[0, 1\), where 0 is the average"):
        conflict_averse_gradient(torch.zeros(2, 2), 1.0)
    with pytest.raises(ValueError, match=r"c at reading 0 of Linear\(.*\) is 1.0; it must be a number in \[0, 1\)"):
        ConflictAverseStep([weight], c=Linear(1.0, 0.0, duration=9, clock="updates"))
    for shape in ((3,), (0, 3)):
        with pytest.raises(ValueError, match=r"it must be \[T, P\]"):
            conflict_averse_gradient(torch.zeros(shape), 0.5)
    for value in (math.nan, math.inf, 1e30):
        with pytest.raises(ValueError, match="gradients are NaN, infinite, or too long"):
            conflict_averse_gradient(torch.tensor([[1.0], [value]]), 0.5)
    with pytest.raises(ValueError, match="parameters has none that requires a gradient"):
        ConflictAverseStep([torch.zeros(2)])
    with pytest.raises(ValueError, match='a schedule of environment steps; give a schedule with clock="updates"'):
        ConflictAverseStep([weight], c=Linear(0.5, 0.0, duration=9, clock="env_steps"))
    step = ConflictAverseStep([weight])
    for rows, parts in ((3, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rows has {rows} losses and parts {parts} entries"):
            step.backward(torch.zeros(rows), torch.zeros(parts, dtype=torch.int64))


CONTINUOUS = {"observation_size": 3, "action_low": [-1.0], "action_high": [1.0], "hidden_sizes": (8,)}
IMAGES = {"observation_shape": (1, 6, 6), "observation_high": 1.0, "hidden_size": 8, "gradient_norm": None}
LAYERS = {"channels": (4,), "kernel_sizes": (3,), "strides": (2,), "atoms": 5}
AGENTS = {
    "dqn": lambda **options: DQN(observation_size=3, num_actions=4, hidden_sizes=(8,), **options),
    "sac": lambda **options: SAC(**CONTINUOUS, **options),
    "td3": lambda **options: TD3(**CONTINUOUS, **options),
    "rainbow": lambda **options: Rainbow(**IMAGES, **LAYERS, num_actions=4, **options),
}
of_all_agents = pytest.mark.parametrize("make", AGENTS.values(), ids=AGENTS)


def make_batch(agent: OffPolicyAgent, size: int = 12) -> TensorDict:
    columns = {"priority_weight": torch.rand(size), "table": torch.arange(size) % 3}
    action = torch.rand(size, 1) if isinstance(agent, SAC | TD3) else torch.randint(4, (size,))
    rows = make_rows(action, **columns)
    if isinstance(agent, Rainbow):
        rows["observation"], rows["next", "observation"] = torch.rand(2, size, 1, 6, 6)
    return rows


def make_agent(make, conflict_aversion: object) -> OffPolicyAgent:
    torch.manual_seed(3)
    return make(conflict_aversion=conflict_aversion)


def gradient_of(agent: OffPolicyAgent) -> torch.Tensor:
    network = agent.critics if isinstance(agent, SAC | TD3) else agent.network
    return torch.cat([p.grad.flatten() for p in network.parameters()])


@of_all_agents
def test_agents_learn_with_the_gradient_of_their_tables(make, tmp_path: Path) -> None:
    """c is the length by which the gradient differs, as a share of the plain one."""
    agents = [make_agent(make, c) for c in (0.0, Linear(0.0, 0.0, duration=1, clock="updates"), 0.9)]
    batch, losses = make_batch(agents[0]), []
    for agent in agents:
        _, record = fit(agent, [batch], tmp_path, seed=5)
        losses.append(record[0]["loss"])
    plain, none, averse = map(gradient_of, agents)
    torch.testing.assert_close(plain, none)
    assert agents[0].conflict_averse_step is None and losses[0] == losses[1] == losses[2]
    assert float((averse - plain).norm() / plain.norm()) == pytest.approx(0.9, rel=1e-4)


def test_rainbow_limits_the_norm_of_the_combined_gradient(tmp_path: Path) -> None:
    agent = make_agent(lambda **options: AGENTS["rainbow"](**options), 0.9)
    agent.hparams["gradient_norm"] = 0.01
    fit(agent, [make_batch(agent)], tmp_path)
    assert float(gradient_of(agent).norm()) == pytest.approx(0.01, rel=1e-3)


@of_all_agents
def test_agents_save_their_place_in_the_schedule(make, tmp_path: Path) -> None:
    agent = make_agent(make, Linear(0.8, 0.0, duration=4, clock="updates"))
    trainer, _ = fit(agent, [make_batch(agent) for _ in range(3)], tmp_path)
    assert agent.conflict_averse_step is not None and agent.conflict_averse_step.c == pytest.approx(0.2)
    trainer.save_checkpoint(tmp_path / "agent.ckpt")
    again = type(agent).load_from_checkpoint(tmp_path / "agent.ckpt")
    assert again.conflict_averse_step is not None and again.conflict_averse_step.c == pytest.approx(0.2)


@of_all_agents
def test_agents_refuse_what_conflict_aversion_cannot_do(make, tmp_path: Path) -> None:
    agent = make_agent(make, 0.5)
    with pytest.raises(ValueError, match='the batch has no column "table"'):
        fit(agent, [make_batch(agent).exclude("table")], tmp_path)
    with pytest.raises(ValueError, match="needs one device and 32-bit precision"):
        fit(make_agent(make, 0.5), [make_batch(agent)], tmp_path, precision="bf16-mixed")
