# SPDX-License-Identifier: Apache-2.0
"""Surprise and action values of each row from DQN Learners, beside TD errors, and the surprise of new rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.dqn.dqn_learner import (
    ATOMS,
    QF_LOGITS,
    QF_NEXT_PREDS,
    QF_PREDS,
    QF_TARGET_NEXT_PREDS,
    QF_TARGET_NEXT_PROBS,
)
from ray.rllib.algorithms.dqn.torch.dqn_torch_learner import DQNTorchLearner
from ray.rllib.algorithms.sac.sac_learner import SACLearner
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import TD_ERROR_KEY
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from torch import Tensor

from lightning_replay.retention.surprise import distributional_surprise, squared_td_error
from rllib_ext.rllib_compat import call_one_learner, learner_connector_of


def report_signals(learner: Any) -> bool:
    """Adds surprise and the values of all actions to each row's TD error, ``[B, 2 + A]``. Returns whether it does."""
    # Of single rows RLlib sends TD errors alone from Learners to the buffer, and joins them along the first dimension.
    # Any class of Learner works, except SAC's and TQC's, whose critics value one action each.
    if not isinstance(learner, DQNTorchLearner) or isinstance(learner, SACLearner):
        return False
    compute_loss = learner.compute_loss_for_module

    def with_signals(*, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]) -> Tensor:
        """Computes the loss of the algorithm, and adds the signals of its batch to the metrics."""
        loss = compute_loss(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        add_signals(learner.metrics, module_id, config, batch, fwd_out)
        return loss

    learner.compute_loss_for_module = with_signals
    return True


def surprise_of(config: Any, batch: dict[str, Any], fwd_out: dict[str, Any], td_error: Tensor) -> Tensor:
    """Returns the surprise of each row, ``[B]``: the squared TD error, or of distributions KL(target || prediction)."""
    # RLlib's TD error of distributions is the cross-entropy, which is larger by the entropy of the target and orders
    # rows differently.
    if config.num_atoms <= 1:
        return squared_td_error(td_error)
    rows = torch.arange(len(td_error), device=td_error.device)
    logits = fwd_out[QF_LOGITS][rows, batch[Columns.ACTIONS].reshape(-1).long()]
    chooses = fwd_out[QF_NEXT_PREDS if config.double_q else QF_TARGET_NEXT_PREDS]
    following = fwd_out[QF_TARGET_NEXT_PROBS][rows, chooses.argmax(-1)]
    discount = config.gamma ** batch["n_step"] * (1.0 - batch[Columns.TERMINATEDS].float())
    log_probability = torch.log_softmax(logits, dim=-1)
    return distributional_surprise(log_probability, following, batch[Columns.REWARDS], discount, fwd_out[ATOMS])


def surprise_of_candidates(learner_group: Any, module_id: str, episodes: Sequence[SingleAgentEpisode]) -> np.ndarray:
    """Returns the surprise ``[M]`` of a module's new rows, pieces of a batch, by one pass of a Learner's networks."""
    return np.asarray(call_one_learner(learner_group, _measured_surprise, module_id=module_id, episodes=episodes))


def _measured_surprise(learner: Any, *, module_id: str, episodes: Sequence[SingleAgentEpisode]) -> np.ndarray:
    # Without learning or logging.
    connect = learner_connector_of(learner)
    batch = connect(rl_module=learner.module, batch={}, episodes=episodes, shared_data={})[module_id]
    metrics = learner.metrics
    learner.metrics = MetricsLogger(root=False)
    try:
        with torch.no_grad():
            learner.compute_loss_for_module(
                module_id=module_id,
                config=learner.config.get_config_for_module(module_id),
                batch=batch,
                fwd_out=learner.module[module_id].unwrapped().forward_train(batch),
            )
        signals = learner.metrics.stats[module_id][TD_ERROR_KEY].items[-1]
    finally:
        learner.metrics = metrics
    return signals[:, 1].cpu().numpy()


def add_signals(
    metrics: MetricsLogger, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]
) -> None:
    """Adds surprise and action values of each row beside the TD errors that a Learner reports."""
    if (module_id, TD_ERROR_KEY) not in metrics:
        return  # a Learner of the user's that reports nothing
    if QF_PREDS not in fwd_out:
        raise ValueError(
            f"module {module_id!r} returns no action values ({QF_PREDS!r}) from forward_train, by which rows are kept, "
            f"but {sorted(fwd_out)}. If it does not learn from the replay, store nothing for it: "
            f"replay_config(..., modules={{{module_id!r}: None}})"
        )
    items = metrics.stats[module_id][TD_ERROR_KEY].items
    td_error = items[-1].detach()
    action_values = fwd_out[QF_PREDS].detach()
    surprise = surprise_of(config, batch, fwd_out, td_error).detach()
    items[-1] = torch.column_stack((td_error, surprise, action_values))
