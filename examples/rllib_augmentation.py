# SPDX-License-Identifier: Apache-2.0
"""A Learner of PPO with mixreg and UCB-DrAC, for one policy without state: python examples/rllib_augmentation.py"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray
from gymnasium.wrappers import DtypeObservation, RescaleObservation
from lightning_augmentation import PaintedGrid, make_levels
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID, Columns
from ray.tune import register_env
from tensordict import TensorDict

import rllib_ext
from lightning_replay.losses import invariance_loss
from lightning_replay.transforms import MixMinibatch, UCBAugmentation


def float_grid(config: Any = None) -> Any:
    return RescaleObservation(DtypeObservation(PaintedGrid(), np.float32), np.float32(0.0), np.float32(1.0))


class AugmentedPPOLearner(PPOTorchLearner):
    """PPO with the transforms of ``learner_config_dict``, an ``augmentation`` and a ``mixture``."""

    def build(self) -> None:
        super().build()
        self.transforms: dict[str, Any] = self.config.learner_config_dict
        self._learner_connector.append(ChooseAugmentation(self.transforms["augmentation"]))  # once for each update

    def _uncompiled_update(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        rows = TensorDict(dict(batch[DEFAULT_MODULE_ID])).auto_batch_size_(1)
        kept = rows.pop(Columns.LOSS_MASK)  # others are there to bootstrap, and no row may be mixed with these
        return super()._uncompiled_update({DEFAULT_MODULE_ID: dict(self.transforms["mixture"](rows[kept]))}, **kwargs)

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
        loss = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        module, images = self.module[module_id].unwrapped(), batch[Columns.OBS].movedim(-1, -3)
        augmented = {**batch, Columns.OBS: self.transforms["augmentation"].augment(images).movedim(-3, -1)}
        both = ((batch, fwd_out), (augmented, module.forward_train(augmented)))
        log_probs, others = (outputs[Columns.ACTION_DIST_INPUTS].log_softmax(-1) for _, outputs in both)
        value, other = (module.compute_values(rows, outputs.get(Columns.EMBEDDINGS)) for rows, outputs in both)
        penalty = invariance_loss(log_probs, value, others, other)
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
        super().__init__(augmentation=augmentation)
        self.augmentation = augmentation

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> Any:
        self.augmentation.choose(batch[DEFAULT_MODULE_ID][Columns.VALUE_TARGETS].mean().item())
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="two iterations of 256 steps")
    ray.init(address="local", num_cpus=1, include_dashboard=False)
    register_env("grid", float_grid)
    transforms = {"augmentation": UCBAugmentation(seed=0), "mixture": MixMinibatch(0.2, seed=0)}
    iterations, steps = (2, 256) if parser.parse_args().fast else (40, 2_048)
    config = PPOConfig().environment("grid").env_runners(num_env_runners=0, num_envs_per_env_runner=8)
    config.rl_module(model_config={"conv_filters": [[16, 3, 1], [32, 3, 1]], "head_fcnet_hiddens": [64]})
    config.training(gamma=0.95, lambda_=0.95, lr=2e-3, num_epochs=4, train_batch_size_per_learner=steps)
    config.learners(learner_class=AugmentedPPOLearner, learner_config_dict=transforms).training(entropy_coeff=0.01)
    config.evaluation(evaluation_interval=iterations, evaluation_duration=50).debugging(seed=0)
    rllib_ext.configure(config, levels=make_levels(10, True, 0), held_out_levels=100, check_environments=False)
    algorithm = config.build_algo()
    for _ in range(iterations):
        result = algorithm.train()
    figures = result["learners"][DEFAULT_MODULE_ID]
    used = algorithm.learner_group._learner.transforms["augmentation"].chosen
    print(f"loss {figures['total_loss']:.3f}, of invariance {figures['invariance_loss']:.1e} with {used}")
    print(f"return {result['evaluation']['env_runners']['episode_return_mean']:.2f} on held-out levels")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
