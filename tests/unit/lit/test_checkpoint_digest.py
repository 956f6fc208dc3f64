# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from lightning_replay.lit.checkpoint_digest import add_digest, check_digest
from lightning_replay.saving import DamagedFileError


def saved_and_read(checkpoint):
    add_digest(checkpoint)
    return pickle.loads(pickle.dumps(checkpoint))


def test_arrays_of_objects_are_compared_by_their_objects() -> None:
    checkpoint = saved_and_read({"names": np.array([1.5, "a long enough name", None], dtype=object)})
    check_digest(dict(checkpoint), "a.ckpt")
    checkpoint["names"][0] = 2.5
    with pytest.raises(DamagedFileError, match="was changed since it was saved"):
        check_digest(checkpoint, "a.ckpt")


def test_tensors_that_are_not_dense_do_not_stop_a_save() -> None:
    check_digest(saved_and_read({"sparse": torch.eye(3).to_sparse()}), "a.ckpt")
