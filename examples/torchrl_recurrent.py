# SPDX-License-Identifier: Apache-2.0
"""TorchRL's LSTM on sequences of a replay: a collector stores the recurrent states, DQNLoss learns a task of memory.

Run ``python examples/torchrl_recurrent.py``, half a minute; ``--fast`` ends after some updates.
"""

from __future__ import annotations

import argparse

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, LSTMModule, QValueModule, set_recurrent_mode
from torchrl.objectives import DQNLoss, SoftUpdate

import lightning_replay.envs  # noqa: F401  registers RecallCue-v0
from lightning_replay import recipes

DELAY = 10  # steps between the cue and the question; without memory the mean return is 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true")
    frames, frames_per_batch = (400 if parser.parse_args().fast else 8_000), 40
    torch.manual_seed(0)

    # The primer gives the policy a state at the start of each episode, and the collector hands it on from there.
    lstm = LSTMModule(input_size=32, hidden_size=64, in_key="features", out_key="features")
    env = TransformedEnv(GymEnv("RecallCue-v0", delay=DELAY, categorical_action_encoding=True), InitTracker())
    env.append_transform(lstm.make_tensordict_primer())
    env.set_seed(0)
    spec = env.action_spec
    network = TensorDictSequential(
        TensorDictModule(MLP(4, 32, num_cells=[], activate_last_layer=True), ["observation"], ["features"]),
        lstm,
        TensorDictModule(MLP(64, spec.n, num_cells=[]), ["features"], ["action_value"]),
        QValueModule(spec=spec),
    )
    explore = EGreedyModule(spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=frames // 2)
    loss_module = DQNLoss(network, action_space=spec, delay_value=True, double_dqn=True, reduction="none")
    loss_module.make_value_estimator(gamma=0.99)
    targets = SoftUpdate(loss_module, tau=0.01)
    optimizer = torch.optim.Adam(loss_module.parameters(), 1e-3)

    # States, recurrent_state_h and _c, are columns as all others: each sequence starts from those of its first step.
    replay = recipes.sequences(frames, 32, length=DELAY + 1, priority_exponent=0.9, importance_exponent=0.6, seed=0)
    policy = TensorDictSequential(network, explore)
    collector = Collector(env, policy, frames_per_batch=frames_per_batch, total_frames=frames)
    returns: list[float] = []
    for rows in collector:
        replay.extend(rows)
        explore.step(rows.numel())
        ended = rows["next", "done"]
        returns += rows["next", "reward"][ended].tolist()  # the only reward of an episode is its last
        if len(replay) < 200:
            continue
        for _ in range(frames_per_batch // 4):
            batch = replay.sample()
            with set_recurrent_mode("recurrent"):
                loss = loss_module(batch)["loss"]
            optimizer.zero_grad()
            weight = batch["priority_weight"] * batch["mask"]
            (loss.reshape(weight.shape) * weight).sum().div(batch["mask"].sum()).backward()
            optimizer.step()
            targets.step()
            replay.update_priority(batch, batch["td_error"])
        if len(replay) % 1_000 == 0:
            print(f"{len(replay):6,} steps, mean return of the last 100 episodes {sum(returns[-100:]) / 100:.2f}")
    collector.shutdown()
    print(f"{len(returns)} episodes, mean return of the last 20: {sum(returns[-20:]) / len(returns[-20:]):.2f}")


if __name__ == "__main__":
    main()
