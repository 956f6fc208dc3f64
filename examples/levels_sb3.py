# SPDX-License-Identifier: Apache-2.0
"""Level replay in Stable-Baselines3's PPO: a wrapper that plays the levels, and a callback that scores them.

python examples/levels_sb3.py [--fast]

Needs `pip install stable-baselines3`, which installs beside this package. Prints the held-out return with uniform
levels and with level replay.
"""

from __future__ import annotations

import sys
from functools import partial

from locks import DISCOUNT, ENVS, GAE_LAMBDA, LOCKS, ROLLOUT, Lock, compare, held_out_return, update_levels

from lightning_replay.levels import LevelSelector
from lightning_replay.levels.environments import LevelWrapper

try:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv
except ImportError:
    sys.exit("this example is of Stable-Baselines3, which is not installed: pip install stable-baselines3")


class ScoreLevels(BaseCallback):
    """Scores the levels of a rollout with the values that PPO predicted, before it learns from them."""

    def __init__(self, levels: LevelSelector) -> None:
        super().__init__()
        self.levels = levels

    def _on_rollout_start(self) -> None:
        self.played, self.ended = [], []

    def _on_step(self) -> bool:
        self.played.append([info["level_id"] for info in self.locals["infos"]])  # of the step, also where it ended
        self.ended.append(self.locals["dones"].tolist())
        return True

    def _on_rollout_end(self) -> None:
        rollout = self.locals["rollout_buffer"]  # whose rewards hold the value after a time limit
        last = self.locals["values"].flatten()
        update_levels(self.levels, rollout.rewards, rollout.values, last, self.ended, self.played)


def train(levels: LevelSelector, total_steps: int) -> float:
    def make(actor: int) -> LevelWrapper:
        return LevelWrapper(Lock(), partial(levels.next_level, actor), level_option="level", level_set=LOCKS)

    envs = DummyVecEnv([partial(make, actor) for actor in range(ENVS)])
    rates = {"gamma": DISCOUNT, "gae_lambda": GAE_LAMBDA, "ent_coef": 0.01, "learning_rate": 1e-3}
    model = PPO("MlpPolicy", envs, n_steps=ROLLOUT, batch_size=256, n_epochs=4, **rates, seed=None)
    model.learn(total_steps, callback=ScoreLevels(levels))
    return held_out_return(lambda observation: model.policy.get_distribution(observation).distribution.probs)


if __name__ == "__main__":
    compare(train, __doc__)
