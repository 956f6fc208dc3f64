# SPDX-License-Identifier: Apache-2.0
"""DQN of Stable-Baselines3 learns from a replay with priorities."""

from __future__ import annotations

from stable_baselines3 import DQN

from lightning_replay.sb3 import RecipeBuffer


def main() -> None:
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_starts=100,
        replay_buffer_class=RecipeBuffer,
        replay_buffer_kwargs={"recipe": "prioritized", "priority_exponent": 0.6},
        seed=0,
    )
    model.learn(300)
    assert model.replay_buffer.size() == 300 and model._n_updates > 0


if __name__ == "__main__":
    main()
