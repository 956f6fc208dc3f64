# SPDX-License-Identifier: Apache-2.0
"""mixreg and UCB-DrAC in RLlib: a Learner of PPO for one policy without state, on the grids of lightning_augmentation.

python examples/rllib_augmentation.py [--fast] [--mixreg]
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium
import numpy as np
import ray
from lightning_augmentation import PaintedGrid
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.evaluation.postprocessing import Postprocessing
from tensordict import TensorDict

import rllib_ext
from lightning_replay.levels import LevelBuffer
from lightning_replay.levels.scores import L1ValueLoss
from lightning_replay.losses import invariance_loss
from lightning_replay.transforms import MixMinibatch, UCBAugmentation


class FloatGrid(PaintedGrid):
    """Images of floats, ``[H, W, C]`` in [0, 1]."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, PaintedGrid.observation_space.shape, np.float32)

    def __init__(self, config: Any = None) -> None:
        pass

    def image(self) -> np.ndarray:
        return super().image().astype(np.float32) / 255.0


class AugmentedPPOLearner(PPOTorchLearner):
    """PPO with the transforms of ``learner_config_dict``, an ``augmentation`` and optionally a ``mixture``."""

    def build(self) -> None:
        super().build()
        self.transforms: dict[str, Any] = self.config.learner_config_dict
        # once for each update, behind the piece that estimates the returns
        self._learner_connector.append(ChooseAugmentation(self.transforms["augmentation"]))

    def _uncompiled_update(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        rows = dict(batch[DEFAULT_MODULE_ID])
        kept = rows.pop(Columns.LOSS_MASK)  # others are there to bootstrap, and no row may be mixed with these
        rows = TensorDict({name: column[kept] for name, column in rows.items()}, [int(kept.sum())])
        if "mixture" in self.transforms:
            rows = self.transforms["mixture"](rows)
        return super()._uncompiled_update({DEFAULT_MODULE_ID: dict(rows.items())}, **kwargs)

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
        loss = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        module, images = self.module[module_id].unwrapped(), batch[Columns.OBS].movedim(-1, -3)
        augmented = {**batch, Columns.OBS: self.transforms["augmentation"].augment(images).movedim(-3, -1)}
        outputs = module.forward_train(augmented)
        log_probs, other_log_probs = (one[Columns.ACTION_DIST_INPUTS].log_softmax(-1) for one in (fwd_out, outputs))
        value, other_value = (
            module.compute_values(rows, embeddings=one.get(Columns.EMBEDDINGS))
            for rows, one in ((batch, fwd_out), (augmented, outputs))
        )
        penalty = invariance_loss(log_probs, value, other_log_probs, other_value)
        self.metrics.log_value((module_id, "invariance_loss"), penalty, window=1)
        return loss + 0.1 * penalty

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        states = {name: transform.state_dict() for name, transform in self.transforms.items()}
        return super().get_state(*args, **kwargs) | {"transforms": states}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        for name, one in state.get("transforms", {}).items():
            self.transforms[name].load_state_dict(one)


class ChooseAugmentation(ConnectorV2):
    """Credits the mean return of a batch to the last augmentation, and chooses the next."""

    def __init__(self, augmentation: UCBAugmentation) -> None:
        super().__init__()
        self.augmentation = augmentation

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> Any:
        self.augmentation.choose(batch[DEFAULT_MODULE_ID][Postprocessing.VALUE_TARGETS].mean().item())
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="two iterations of 256 steps")
    parser.add_argument("--mixreg", action="store_true", help="mixed minibatches too")
    options = parser.parse_args()
    ray.init(address="local", num_cpus=1, include_dashboard=False)
    transforms: dict[str, Any] = {"augmentation": UCBAugmentation(seed=0)}
    if options.mixreg:
        transforms["mixture"] = MixMinibatch(0.2, seed=0)
    iterations, steps = (2, 256) if options.fast else (40, 2_048)
    config = PPOConfig().environment(FloatGrid).env_runners(num_env_runners=0, num_envs_per_env_runner=8)
    config.rl_module(model_config=DefaultModelConfig(conv_filters=[[16, 3, 1], [32, 3, 1]], head_fcnet_hiddens=[64]))
    config.training(gamma=0.95, lambda_=0.95, lr=2.5e-3, train_batch_size_per_learner=steps, minibatch_size=steps // 8)
    config.training(num_epochs=4, entropy_coeff=0.01)
    config.learners(learner_class=AugmentedPPOLearner, learner_config_dict=transforms)
    config.evaluation(evaluation_interval=iterations, evaluation_duration=50).debugging(seed=0)
    levels = LevelBuffer(10, score=L1ValueLoss(0.95, 0.95), score_temperature=1.0, staleness_weight=0.3, seed=0)
    rllib_ext.configure(config, levels=levels, held_out_levels=100, check_environments=False)
    algorithm = config.build_algo()
    for _ in range(iterations):
        result = algorithm.train()
    learner = result["learners"][DEFAULT_MODULE_ID]
    used = next(iter(algorithm.learner_group.foreach_learner(lambda one: one.transforms["augmentation"].chosen))).get()
    print(f"loss {learner['total_loss']:.3f}, of invariance {learner['invariance_loss']:.1e} with {used}")
    print(f"return {result['evaluation']['env_runners']['episode_return_mean']:.2f} on held-out levels")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
