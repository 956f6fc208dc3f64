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
from lightning_replay.transforms import MixMinibatch, UCBAugmentation


class FloatGrid(PaintedGrid):
    """Images of floats, ``[H, W, C]`` in [0, 1]."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, PaintedGrid.observation_space.shape, np.float32)

    def __init__(self, config: Any = None) -> None:
        pass

    def image(self) -> np.ndarray:
        return super().image().astype(np.float32) / 255.0


class AugmentedPPOLearner(PPOTorchLearner):
    """PPO with the transforms of ``learner_config_dict``: ``mixture``, or ``augmentation`` with the weight 0.1."""

    def build(self) -> None:
        super().build()
        self.mixture: MixMinibatch | None = self.config.learner_config_dict.get("mixture")
        self.augmentation: UCBAugmentation | None = self.config.learner_config_dict.get("augmentation")
        if self.augmentation is not None:  # chosen once for each update, behind the piece that estimates the returns
            self._learner_connector.append(ChooseAugmentation(self.augmentation))

    def _uncompiled_update(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        if self.mixture is not None:
            rows = batch[DEFAULT_MODULE_ID]
            kept = rows[Columns.LOSS_MASK]  # without the steps that are there to bootstrap
            columns = {name: rows[name][kept] for name in rows if name != Columns.LOSS_MASK}
            mixed = self.mixture(TensorDict(columns | {"action": columns.pop(Columns.ACTIONS)}, [int(kept.sum())]))
            columns = {Columns.ACTIONS if name == "action" else name: column for name, column in mixed.items()}
            batch = {DEFAULT_MODULE_ID: columns}
        return super()._uncompiled_update(batch, **kwargs)

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
        loss = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        if self.augmentation is None:
            return loss
        module, kept = self.module[module_id].unwrapped(), batch[Columns.LOSS_MASK]
        images = self.augmentation.augment(batch[Columns.OBS].movedim(-1, -3)).movedim(-3, -1)
        augmented = {**batch, Columns.OBS: images}
        other = module.forward_train(augmented)
        policy, changed = (
            module.get_train_action_dist_cls().from_logits(logits)
            for logits in (fwd_out[Columns.ACTION_DIST_INPUTS].detach(), other[Columns.ACTION_DIST_INPUTS])
        )
        value = module.compute_values(batch, embeddings=fwd_out.get(Columns.EMBEDDINGS)).detach()
        error = value - module.compute_values(augmented, embeddings=other.get(Columns.EMBEDDINGS))
        penalty = (policy.kl(changed) + error.square())[kept].mean()
        self.metrics.log_value((module_id, "invariance_loss"), penalty, window=1)
        return loss + 0.1 * penalty

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        parts = {"mixture": self.mixture, "augmentation": self.augmentation}
        states = {name: part.state_dict() for name, part in parts.items() if part is not None}
        return super().get_state(*args, **kwargs) | {"transforms": states}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        for name, one in state.get("transforms", {}).items():
            getattr(self, name).load_state_dict(one)


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
    parser.add_argument("--mixreg", action="store_true", help="mixreg in place of UCB-DrAC")
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    transform = {"mixture": MixMinibatch(0.2, seed=0)} if options.mixreg else {"augmentation": UCBAugmentation(seed=0)}
    iterations, steps = (2, 256) if options.fast else (40, 2_048)
    config = PPOConfig().environment(FloatGrid).env_runners(num_env_runners=0, num_envs_per_env_runner=8)
    config.rl_module(model_config=DefaultModelConfig(conv_filters=[[16, 3, 1], [32, 3, 1]], head_fcnet_hiddens=[64]))
    config.training(gamma=0.95, lambda_=0.95, lr=2.5e-3, train_batch_size_per_learner=steps, minibatch_size=steps // 8)
    config.training(learner_class=AugmentedPPOLearner, num_epochs=4, learner_config_dict=transform, entropy_coeff=0.01)
    config.evaluation(evaluation_interval=iterations, evaluation_duration=50).debugging(seed=0)
    levels = LevelBuffer(10, score=L1ValueLoss(0.95, 0.95), score_temperature=1.0, staleness_weight=0.3, seed=0)
    rllib_ext.configure(config, levels=levels, held_out_levels=100, check_environments=False)
    algorithm = config.build_algo()
    for _ in range(iterations):
        result = algorithm.train()
    learner = result["learners"][DEFAULT_MODULE_ID]
    print(f"loss {learner['total_loss']:.3f}, of invariance {learner.get('invariance_loss', 0.0):.3f}")
    print(f"return {result['evaluation']['env_runners']['episode_return_mean']:.2f} on held-out levels")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
