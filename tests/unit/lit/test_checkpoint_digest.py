# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pickle

import numpy as np
import torch

from lightning_replay.lit.checkpoint_digest import digest_of


def test_arrays_of_objects_are_compared_by_their_objects() -> None:
    checkpoint = {"names": np.array([1.5, "a long enough name", None], dtype=object)}
    read = pickle.loads(pickle.dumps(checkpoint))
    assert digest_of(read) == digest_of(checkpoint)
    read["names"][0] = 2.5
    assert digest_of(read) != digest_of(checkpoint)


def test_tensors_that_are_not_dense_do_not_stop_a_save() -> None:
    checkpoint = {"sparse": torch.eye(3).to_sparse()}
    assert digest_of(pickle.loads(pickle.dumps(checkpoint))) == digest_of(checkpoint)
