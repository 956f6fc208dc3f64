# SPDX-License-Identifier: Apache-2.0
"""The replay of each module, built from options, and the module of each agent's steps."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Mapping
from typing import Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from lightning_replay.validation import check_kind, checked_choice, checked_seed
from rllib_ext.buffer.building import Returns, build_progress, build_replay, uses_retention
from rllib_ext.buffer.min_sizes import MinSizes
from rllib_ext.buffer.module_replay import MeasureSurprise, ModuleReplay
from rllib_ext.episodes.info_columns import Information
from rllib_ext.learner.batch_layouts import LAYOUTS


class ModuleOptions:
    """The options of a buffer, for all modules and, ``special``, for single ones.

    Attributes:
        returns: length and discount of returns that are formed before rows are stored.
        measure: of the surprise of new rows.
        largest_priorities: by module, of rows elsewhere; the first rows of a module that is built later get it.
    """

    def __init__(
        self,
        recipe: str | None,
        layout: str,
        options: Mapping[str, Any],
        special: Mapping[str, Mapping[str, Any] | None],
    ) -> None:
        for name, options_of_module in special.items():
            accepted = "options by name, or None to store nothing of the module"
            check_kind(f"modules[{name!r}]", options_of_module, Mapping | None, accepted)
        self.recipe: str | None = recipe
        self.layout: Any = checked_choice("layout", layout, tuple(LAYOUTS))
        self.returns: Returns = (1, 0.99)
        self.measure: MeasureSurprise | None = None
        self.largest_priorities: dict[str, float] = {}
        self._options, self._special = options, special

    def stores(self, module_id: str) -> bool:
        return self._special.get(module_id, {}) is not None

    def of(self, module_id: str) -> tuple[str | None, dict[str, Any]]:
        special = self._special.get(module_id) or {}
        options = {**self._options, **special}
        # None removes an option of all modules, as another recipe may not have it.
        options = {key: value for key, value in options.items() if value is not None or key not in special}
        return options.pop("recipe", self.recipe), options

    def modules_with_retention(self) -> list[str]:
        """Returns the modules whose replay keeps rows by importance, not by age."""
        names = dict.fromkeys([DEFAULT_MODULE_ID, *self._special])
        return [name for name in names if self.stores(name) and uses_retention(*self.of(name))]

    def build(self, module_id: str, several_agents: bool = False) -> ModuleReplay:
        """Builds the replay of a module; errors as :func:`~rllib_ext.buffer.building.build_replay`."""
        recipe, options = self.of(module_id)
        seed = checked_seed(options.get("seed"))
        if seed is not None and module_id != DEFAULT_MODULE_ID:
            options["seed"] = seed = seed + zlib.crc32(module_id.encode())  # modules draw independently of each other
        info_keys, progress = options.pop("info_keys", None), options.pop("progress", None)
        replay = build_replay(recipe, options, self.returns)
        if module_id in self.largest_priorities:
            replay.raise_largest_priority(self.largest_priorities[module_id])
        return ModuleReplay(
            replay,
            self.layout,
            seed,
            module_id if several_agents else None,
            information=Information(info_keys or (), replay.tasks or None),
            progress=build_progress(progress, replay),
            min_sizes=None if replay.tables is None else MinSizes(replay, options),
            measure=self.measure,
        )

    def form_returns(self, returns: Returns, present: Container[str]) -> dict[str, ModuleReplay]:
        """Sets length and discount of returns formed before rows are stored; rebuilds the replays that have these."""
        self.returns = returns
        built = {name: self.build(name) for name in self.modules_with_retention()}
        return {name: module for name, module in built.items() if name in present}

    def restored(self, state: dict[str, Any]) -> dict[str, ModuleReplay]:
        """Builds the modules of a buffer's ``plain_state``, their replays still empty."""
        if state["recipe"] != self.recipe:
            raise ValueError(
                f"the state is of recipe {state['recipe']!r}; this buffer is {self.recipe!r}. "
                "Build it with the recipe and options it was saved with."
            )
        modules = {name: self.build(name, state["several_agents"]) for name in state["modules"]}
        for name, module in modules.items():
            module.load_state(state["modules"][name])
        return modules

    def group(self, episodes: Iterable[Any]) -> dict[str, list[SingleAgentEpisode]]:
        """Returns single-agent episodes by the module that acted, without those of modules that store nothing."""
        grouped: dict[str, list[SingleAgentEpisode]] = {}
        for episode in episodes:
            if isinstance(episode, SingleAgentEpisode):
                grouped.setdefault(DEFAULT_MODULE_ID, []).append(episode)
            elif isinstance(episode, MultiAgentEpisode):
                for part in episode.agent_episodes.values():
                    if self.stores(part.module_id):
                        grouped.setdefault(part.module_id, []).append(part)
            else:
                raise TypeError(
                    f"got a {type(episode).__name__}; episodes are accepted (SingleAgentEpisode, MultiAgentEpisode)"
                )
        return grouped
