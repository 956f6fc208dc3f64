# SPDX-License-Identifier: Apache-2.0
"""Import paths of earlier versions: which module has what a module had, for saves, pickled configs and users' code."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["MOVED", "current_module"]

#: Modules by their former names.
MOVED = {
    "lightning_replay.storage": "lightning_replay.storage.packed",
    "lightning_replay.row_layout": "lightning_replay.storage.row_layout",
    "lightning_replay.stored_column": "lightning_replay.storage.stored_column",
    "lightning_replay.transition_check": "lightning_replay.storage.transition_check",
    "lightning_replay.forking": "lightning_replay.storage.forking",
    "lightning_replay.slots": "lightning_replay.tables.slot_pool",
    "lightning_replay.frames.storage": "lightning_replay.storage.frames.storage",
    "lightning_replay.frames.pool": "lightning_replay.storage.frames.pool",
    "lightning_replay.frames.search": "lightning_replay.storage.frames.frame_index",
    "lightning_replay.frames.loops": "lightning_replay.storage.frames.frame_kernels",
    "lightning_replay.frames.numba_kernels": "lightning_replay.storage.frames.numba_kernels",
    "lightning_replay.frames.stack_columns": "lightning_replay.storage.frames.stack_columns",
    "lightning_replay.frames.live_slots": "lightning_replay.storage.occupancy",
    "lightning_replay.frames.options": "lightning_replay.recipes.storage",
    "lightning_replay.episodes": "lightning_replay.episodes.links",
    "lightning_replay.episode_tracker": "lightning_replay.episodes.tracker",
    "lightning_replay.tables": "lightning_replay.tables.tables",
    "lightning_replay.histories": "lightning_replay.tables.histories",
    "lightning_replay.state_action_counts": "lightning_replay.tables.counts",
    "lightning_replay.events": "lightning_replay.events.event_table",
    "lightning_replay.conditions.combined": "lightning_replay.events.conditions.combined",
    "lightning_replay.conditions.condition": "lightning_replay.events.conditions.condition",
    "lightning_replay.conditions.episodes": "lightning_replay.events.conditions.episodes",
    "lightning_replay.conditions.steps": "lightning_replay.events.conditions.steps",
    "lightning_replay.surprise": "lightning_replay.retention.surprise",
    "lightning_replay.writers.retention_rules": "lightning_replay.retention.rules",
    "lightning_replay.writers.retention_rows": "lightning_replay.retention.index",
    "lightning_replay.writers.retention_contest": "lightning_replay.retention.eviction",
    "lightning_replay.writers.retention_feedback": "lightning_replay.retention.feedback",
    "lightning_replay.priority_tree.leaving_order": "lightning_replay.retention.eviction_order",
    "lightning_replay.feedback": "lightning_replay.late_updates",
    "lightning_replay.recorded": "lightning_replay.saving.spec",
    "lightning_replay.replay_state": "lightning_replay.checkpoint.state",
    "lightning_replay.progress": "lightning_replay.schedulers.progress",
    "lightning_replay.cagrad": "lightning_replay.agents.cagrad",
    "lightning_replay.agents.actor_critic": "lightning_replay.agents.networks",
    "lightning_replay.agents.image_network": "lightning_replay.agents.networks",
    "lightning_replay.pictures": "lightning_replay.analysis.plotting",
    "lightning_replay.inspection": "lightning_replay.analysis.inspection",
    "lightning_replay.datasets": "lightning_replay.analysis.datasets",
    "lightning_replay.samplers.seeded": "lightning_replay.seeded",
    "lightning_replay.samplers.within_tables": "lightning_replay.samplers.table_sampler",
    "lightning_replay.samplers.torchrl_names": "lightning_replay.samplers.torchrl_compat",
    "lightning_replay.samplers.priority_inputs": "lightning_replay.priority_updates",
    "lightning_replay.levels.fractions": "lightning_replay.seeded",
    "lightning_replay.levels.unscored": "lightning_replay.levels.baselines",
    "lightning_replay.levels.new_levels": "lightning_replay.levels.unseen",
    "lightning_replay.levels.level_source": "lightning_replay.levels.selector",
    "lightning_replay.levels.running_levels": "lightning_replay.levels.episodes",
    "lightning_replay.levels.scoring": "lightning_replay.levels.episodes",
    "lightning_replay.levels.score_functions": "lightning_replay.levels.scores",
    "lightning_replay.levels.value_columns": "lightning_replay.levels.scores",
    "lightning_replay.levels.segment": "lightning_replay.levels.episodes",
    "lightning_replay.levels.key_names": "lightning_replay.levels.scores",
    "lightning_replay.levels.level_buffer": "lightning_replay.levels.buffer",
    "lightning_replay.levels.level_sampler": "lightning_replay.levels.sampler",
    "lightning_replay.levels.level_writer": "lightning_replay.levels.writer",
    "lightning_replay.envs.level_check": "lightning_replay.levels.environments.level_check",
    "lightning_replay.envs.level_vectors": "lightning_replay.levels.environments.level_vectors",
    "lightning_replay.envs.level_wrappers": "lightning_replay.levels.environments.level_wrappers",
    "lightning_replay.recipes.assemble": "lightning_replay.recipes.options",
    "lightning_replay.levels.best_returns": "lightning_replay.levels.scores",
    "lightning_replay.levels.environments.vector_infos": "lightning_replay.levels.environments.level_vectors",
    "rllib_ext.levels.checkpoint": "rllib_ext.levels.remote",
    "lightning_replay.envs.vector_infos": "lightning_replay.levels.environments.level_vectors",
    "lightning_replay.levels.editing": "lightning_replay.levels.unseen",
    "lightning_replay.lit.acting": "lightning_replay.lit.policy",
    "lightning_replay.lit.collection": "lightning_replay.lit.collectors.replay",
    "lightning_replay.lit.rollout": "lightning_replay.lit.collectors.replay",
    "lightning_replay.lit.collectors.vector": "lightning_replay.lit.collectors.replay",
    "lightning_replay.lit.level_collection": "lightning_replay.lit.collectors.levels",
    "lightning_replay.lit.pace": "lightning_replay.lit.update_schedule",
    "lightning_replay.lit.datamodule": "lightning_replay.lit.datamodules.replay",
    "lightning_replay.lit.level_datamodule": "lightning_replay.lit.datamodules.levels",
    "lightning_replay.lit.env_step_datamodule": "lightning_replay.lit.datamodules.env_steps",
    "lightning_replay.lit.stream": "lightning_replay.lit.datamodules.env_steps",
    "lightning_replay.lit.datamodules.stream": "lightning_replay.lit.datamodules.env_steps",
    "lightning_replay.lit.checkpointing": "lightning_replay.lit.checkpoint_io",
    "lightning_replay.lit.information": "lightning_replay.lit.info_columns",
    "lightning_replay.lit.callbacks.generalization": "lightning_replay.lit.callbacks.evaluate",
    "lightning_replay.lit.callbacks.levels": "lightning_replay.lit.callbacks.statistics",
    "lightning_replay.lit.callbacks.priorities": "lightning_replay.agents.feedback",
    "lightning_replay.lit.level_evaluation": "lightning_replay.lit.evaluation",
    "lightning_replay.lit.rollout_pace": "lightning_replay.lit.update_schedule",
    "lightning_replay.lit.parameterized_actions": "lightning_replay.agents.parameterized_actions",
    "rllib_ext.config": "rllib_ext.api",
    "rllib_ext.install": "rllib_ext.hooks",
    "rllib_ext.episode_buffer": "rllib_ext.buffer.episode_buffer",
    "rllib_ext.module_replay": "rllib_ext.buffer.module_replay",
    "rllib_ext.module_options": "rllib_ext.buffer.module_options",
    "rllib_ext.building": "rllib_ext.buffer.building",
    "rllib_ext.buffer_files": "rllib_ext.buffer.files",
    "rllib_ext.returns": "rllib_ext.buffer.n_step",
    "rllib_ext.formed_returns": "rllib_ext.buffer.n_step",
    "rllib_ext.stacks": "rllib_ext.buffer.frame_stacks",
    "rllib_ext.sequences": "rllib_ext.buffer.sequences",
    "rllib_ext.sequence_priorities": "rllib_ext.buffer.sequence_priorities",
    "rllib_ext.min_sizes": "rllib_ext.buffer.min_sizes",
    "rllib_ext.event_tables": "rllib_ext.buffer.event_tables",
    "rllib_ext.metrics": "rllib_ext.buffer.metrics",
    "rllib_ext.rows_to_episodes": "rllib_ext.buffer.fill",
    "rllib_ext.image_module": "rllib_ext.buffer.image_module",
    "rllib_ext.convert": "rllib_ext.episodes.convert",
    "rllib_ext.columns": "rllib_ext.episodes.columns",
    "rllib_ext.fragments": "rllib_ext.episodes.fragments",
    "rllib_ext.information": "rllib_ext.episodes.info_columns",
    "rllib_ext.task_progress": "rllib_ext.episodes.task_progress",
    "rllib_ext.task_assignment": "rllib_ext.episodes.task_assignment",
    "rllib_ext.blocks": "rllib_ext.learner.blocks",
    "rllib_ext.draws": "rllib_ext.learner.batch_layouts",
    "rllib_ext.learner_order": "rllib_ext.learner.sharding",
    "rllib_ext.learner_signals": "rllib_ext.learner.signals",
    "rllib_ext.flags": "rllib_ext.learner.done_flags_connector",
    "rllib_ext.gates": "rllib_ext.rllib_compat",
    "rllib_ext.algorithm_files": "rllib_ext.checkpoint.files",
    "rllib_ext.checkpoint_folders": "rllib_ext.checkpoint.files",
    "rllib_ext.clocks": "rllib_ext.hooks",
    "rllib_ext.levels.config": "rllib_ext.levels.building",
    "rllib_ext.levels.fragment": "rllib_ext.levels.episodes",
    "rllib_ext.levels.install": "rllib_ext.hooks",
    "rllib_ext.levels.scored_only": "rllib_ext.levels.scoring",
    "rllib_ext.space_fit": "rllib_ext.buffer.action_normalization",
    "rllib_ext.buffer.sampled_n_step": "rllib_ext.buffer.n_step",
    "rllib_ext.buffer.stored_n_step": "rllib_ext.buffer.n_step",
    "rllib_ext.buffer.draws": "rllib_ext.buffer.module_replay",
    "rllib_ext.buffer.feedback": "rllib_ext.buffer.module_replay",
}

# Packages that are gone, and where the names went that they exported.
_PACKAGES = {
    "lightning_replay.conditions": "lightning_replay.events.conditions",
    "lightning_replay.frames": "lightning_replay.storage.frames",
}
_NAMES = {
    "lightning_replay.levels.segment:generalized_advantages": "lightning_replay.levels.scores",
    "lightning_replay.levels.segment:td_errors": "lightning_replay.levels.scores",
    "lightning_replay.checkpoint:load_replay": "lightning_replay.loading",
    "lightning_replay.checkpoint:save_id": "lightning_replay.checkpoint.replay",
    **{
        f"lightning_replay.episodes:{name}": "lightning_replay.episodes.links"
        for name in ("EpisodeLinks", "MissingSteps", "missing_steps", "trajectory_name", "trajectory_of")
    },
    "lightning_replay.episodes:bootstrap_discounts": "lightning_replay.episodes.n_step",
    "lightning_replay.episodes:n_step_returns": "lightning_replay.episodes.n_step",
    "lightning_replay.storage:MissingDeviceError": "lightning_replay.storage.devices",
    "lightning_replay.storage:checked_device": "lightning_replay.storage.devices",
    "lightning_replay.storage:read_columns": "lightning_replay.storage.access",
    "lightning_replay.storage:stored_before": "lightning_replay.storage.access",
    "lightning_replay.tables:Tables": "lightning_replay.tables.tables",
    "lightning_replay.frames:frames_at_worst": "lightning_replay.recipes.storage",
    "lightning_replay.frames:frames_in_order": "lightning_replay.recipes.storage",
    "lightning_replay.frames:storage_for": "lightning_replay.recipes.storage",
    "rllib_ext.task_assignment:num_actors": "rllib_ext.rllib_compat",
    "rllib_ext.task_assignment:tell_recreated": "rllib_ext.hooks",
}


def current_module(module: str) -> str:
    """Returns the module that holds today what ``module`` held, which may be ``module`` itself."""
    return MOVED.get(module, module)


class _FormerModules(MetaPathFinder, Loader):
    """Imports a module under its former name: each name in it is looked up in the new one, with a warning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a specification for the former names alone; called where no other finder has the module."""
        if fullname in MOVED or fullname in _PACKAGES:
            return ModuleSpec(fullname, self, is_package=fullname in _PACKAGES)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its names, lazily."""
        module.__getattr__ = former_names(module.__name__)  # type: ignore[method-assign]


def former_names(former: str) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a module or package that looks up the names it had, with a warning."""

    def find(name: str) -> Any:
        new = _NAMES.get(f"{former}:{name}") or MOVED.get(former) or _PACKAGES.get(former)
        if new is None or name.startswith("__"):
            raise AttributeError(f"module {former!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(new), name)
        warnings.warn(f"{former}.{name} has moved: import {name} from {new}", DeprecationWarning, stacklevel=2)
        return found

    return find


if not any(isinstance(finder, _FormerModules) for finder in sys.meta_path):
    sys.meta_path.append(_FormerModules())  # last: packages of today may have a former module's name
