# SPDX-License-Identifier: Apache-2.0
"""The Learner of the example with mixreg and UCB-DrAC: which rows are mixed, its loss, and its state."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.evaluation.postprocessing import Postprocessing

from lightning_replay.losses import invariance_loss
from lightning_replay.transforms import MixMinibatch, UCBAugmentation

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return runpy.run_path(str(EXAMPLES / "rllib_augmentation.py"))


def learner_of(example: dict[str, Any], **transforms: Any) -> Any:
    config = (
        PPOConfig()
        .environment("grid")
        .learners(learner_class=example["AugmentedPPOLearner"], learner_config_dict=transforms)
    )
    config.rl_module(model_config=DefaultModelConfig(conv_filters=[[4, 3, 1]], head_fcnet_hiddens=[8]))
    learner = config.build_learner(env=example["float_grid"]())
    learner.build()
    return learner


def batch_of(kept: list[bool]) -> dict[str, Any]:
    count = len(kept)
    rows = {
        Columns.OBS: torch.rand(count, 5, 5, 3),
        Columns.ACTIONS: torch.randint(4, (count,)),
        Columns.ACTION_LOGP: torch.full((count,), 0.25).log(),
        Columns.ACTION_DIST_INPUTS: torch.zeros(count, 4),
        Postprocessing.ADVANTAGES: torch.randn(count),
        Postprocessing.VALUE_TARGETS: torch.randn(count),
        Columns.LOSS_MASK: torch.tensor(kept),
    }
    return {DEFAULT_MODULE_ID: rows}


def test_the_loss_is_that_of_rllib_on_mixed_rows_and_the_invariance(example, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(example, augmentation=UCBAugmentation(["random_conv"], seed=1), mixture=MixMinibatch(seed=2))
    batch = batch_of([True, True, False, True, False, True])
    seen: list[Any] = []
    parent = example["AugmentedPPOLearner"].__mro__[1]
    monkeypatch.setattr(parent, "_uncompiled_update", lambda self, rows, **options: seen.append(rows))
    learner._uncompiled_update(batch)
    (rows,) = (one[DEFAULT_MODULE_ID] for one in seen)
    kept = {name: column[[0, 1, 3, 5]] for name, column in batch[DEFAULT_MODULE_ID].items()}
    mixed = MixMinibatch(seed=2)(example["TensorDict"](kept, [4]))
    assert set(rows) == set(kept) - {Columns.LOSS_MASK}
    assert all(torch.equal(column, mixed[name]) for name, column in rows.items())

    module = learner.module[DEFAULT_MODULE_ID]
    outputs, options = module.forward_train(rows), {"module_id": DEFAULT_MODULE_ID, "config": learner.config}
    loss = learner.compute_loss_for_module(**options, batch=rows, fwd_out=outputs)
    plain = parent.compute_loss_for_module(learner, **options, batch=rows, fwd_out=outputs)
    images = UCBAugmentation(["random_conv"], seed=1).augment(rows[Columns.OBS].movedim(-1, 1)).movedim(1, -1)
    others = module.forward_train({**rows, Columns.OBS: images})
    logits, other_logits = (one[Columns.ACTION_DIST_INPUTS].log_softmax(-1) for one in (outputs, others))
    values = module.compute_values(rows), module.compute_values({**rows, Columns.OBS: images})
    expected = 0.1 * invariance_loss(logits, values[0], other_logits, values[1])
    torch.testing.assert_close(loss - plain, expected, rtol=1e-4, atol=1e-6)
    assert expected > 0


def test_its_state_has_that_of_the_choice(example) -> None:
    learner = learner_of(example, augmentation=UCBAugmentation(["crop", "flip"], seed=1))
    other = learner_of(example, augmentation=UCBAugmentation(["crop", "flip"], seed=3))
    piece = learner._learner_connector.connectors[-1]
    targets = {DEFAULT_MODULE_ID: {Postprocessing.VALUE_TARGETS: torch.tensor([1.0, 3.0])}}
    augmentation = learner.transforms["augmentation"]
    augmentation.augment(torch.rand(2, 3, 5, 5))
    piece(batch=targets)
    assert augmentation.chosen == "flip"
    assert augmentation.state_dict()["_extra_state"]["returns"] == {"crop": [2.0]}
    other.set_state(learner.get_state())
    assert other.transforms["augmentation"].chosen == "flip"
    images = torch.rand(4, 3, 5, 5)
    assert torch.equal(other.transforms["augmentation"].augment(images), augmentation.augment(images))
