# SPDX-License-Identifier: Apache-2.0
"""Which task of a curriculum the next batch is drawn from, and which task each actor plays."""

from lightning_replay.schedulers.exp3 import Exp3, Exp3S
from lightning_replay.schedulers.progress import MeanReturn, ReturnChange, ReturnProgress
from lightning_replay.schedulers.scheduler import Scheduler, UniformTasks, among_ready
from lightning_replay.schedulers.stages import EasyToHard, OneTask, ReverseCurriculum

__all__ = [
    "EasyToHard",
    "Exp3",
    "Exp3S",
    "MeanReturn",
    "OneTask",
    "ReturnChange",
    "ReturnProgress",
    "ReverseCurriculum",
    "Scheduler",
    "UniformTasks",
    "among_ready",
]
