# SPDX-License-Identifier: Apache-2.0
"""The replay buffer class RLlib is given: any recipe of lightning_replay behind RLlib's interface."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer

from rllib_ext.convert import EpisodeConverter
from rllib_ext.draws import LAYOUTS, DrawnRows, learner_order
from rllib_ext.gates import BufferType
from rllib_ext.metrics import BufferMetrics

if TYPE_CHECKING:
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    from lightning_replay.replay import Replay

_SAID_BY_RLLIB = {
    "n_steps": ".training(n_step=...)",
    "discount": ".training(gamma=...)",
    "batch_size": ".training(train_batch_size_per_learner=...)",
    "prefetch": "nothing: RLlib learns from a batch before it draws the next",
}


class RecipeEpisodeReplayBuffer(PrioritizedEpisodeReplayBuffer, metaclass=BufferType):
    """A recipe of :mod:`lightning_replay.recipes` as the replay buffer of DQN, SAC or TQC.

    RLlib calls :meth:`add`, :meth:`sample`, :meth:`get_metrics` and :meth:`update_priorities` in every training step.
    Build it with :func:`rllib_ext.replay_config`. A subclass of RLlib's prioritized buffer in name only, because RLlib
    asks for that (:mod:`rllib_ext.gates`); its constructor, which allocates Python trees, is not called. Torch and
    TorchRL are imported when a buffer is built: the class alone travels to every EnvRunner.

    Args:
        recipe: name of the recipe.
        layout: how drawn rows travel: ``blocks`` of columns, or ``rows``, an episode for each row, for learner
            connectors that do more with an episode than read its columns (ten times slower).
        num_learners: Learners the batch is dealt out to, when there are 2 or more: the TD errors come back in
            another order then.
        metrics_num_episodes_for_smoothing: given by RLlib; not needed.
        options: the recipe's own. ``seed=None`` follows ``config.seed``.

    Raises:
        ValueError: an unknown recipe, layout or option, or values the recipe refuses.
    """

    def __init__(
        self,
        recipe: str,
        *,
        layout: str = "blocks",
        num_learners: int = 0,
        metrics_num_episodes_for_smoothing: int = 100,
        **options: Any,
    ) -> None:
        # The constructor of the base class is left out on purpose: see the class docstring.
        from rllib_ext.returns import AskedReturns

        del metrics_num_episodes_for_smoothing
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}; known are {', '.join(LAYOUTS)}")
        if num_learners < 0:
            raise ValueError(f"num_learners is {num_learners}; give the number of .learners(num_learners=...)")
        self.recipe = recipe
        self.replay = _build(recipe, options)
        self.capacity = self.replay.capacity
        self._layout, self._num_learners = LAYOUTS[layout], num_learners
        self._converter = EpisodeConverter()
        self._returns = AskedReturns(options.get("seed"))
        self._follows_episodes = False
        self._counters = BufferMetrics()
        self._mean_n_step = 1.0
        self._drawn: tuple[Any, Any] | None = None

    def __len__(self) -> int:
        return len(self.replay)

    def add(self, episodes: list[SingleAgentEpisode] | SingleAgentEpisode, weight: float | None = None) -> None:
        """Stores the new steps of episodes or of fragments of them, all of them with one ``extend``.

        Args:
            episodes: what EnvRunners sent; fragments continue by ``id_`` and ``t_started``.
            weight: RLlib's starting priority; new rows get the largest priority seen, whatever it is.

        Raises:
            TypeError: episodes of several agents.
            ValueError: rows that do not fit the first ones; nothing of this call is stored.
        """
        known = self._converter.fragments.episodes
        rows = self._converter.transitions(episodes if isinstance(episodes, list) else [episodes])
        if rows is None:
            return
        before = len(self.replay)
        self.replay.extend(rows)
        self._counters.count("episodes_added", self._converter.fragments.episodes - known)
        self._counters.count("steps_added", len(rows))
        self._counters.count("steps_evicted", before + len(rows) - len(self.replay))

    def sample(
        self,
        num_items: int | None = None,
        *,
        n_step: int | tuple[int, int] | None = None,
        gamma: float = 0.99,
        beta: float | None = None,
        batch_length_T: int | None = None,
        **ignored: Any,
    ) -> list[SingleAgentEpisode]:
        """Draws a train batch.

        Args:
            num_items: rows.
            n_step: rewards summed into one return: a number, or a closed interval one is drawn from for each row.
            gamma: discount of that return.
            beta: ignored; the recipe's ``importance_exponent`` is the correction's exponent.
            batch_length_T: above 1 for recurrent modules, which need sequences: refused.
            ignored: what else RLlib passes (lookback, sample_episodes, ...).

        Returns:
            Blocks whose rows carry ``weights`` and ``n_step`` among their extra model outputs.

        Raises:
            RuntimeError: the buffer is empty.
        """
        if batch_length_T and batch_length_T > 1:
            raise ValueError(
                f"batch_length_T is {batch_length_T}: a recurrent module (use_lstm) learns from sequences, and this "
                "buffer draws single transitions. Use a module without state, or RLlib's own EpisodeReplayBuffer."
            )
        self._ask_for_returns(n_step or 1, gamma)
        batch = self.replay.sample(num_items)
        assert self._converter.observation is not None and self._converter.action is not None
        rows = DrawnRows(batch, self._converter.observation, self._converter.action)
        episodes, order = self._layout(rows)
        self._remember(batch, order, [len(episode) for episode in episodes])
        self._counters.count("steps_sampled", len(batch))
        self._mean_n_step = rows.mean_n_step if self._follows_episodes else 1.0
        return episodes

    def update_priorities(self, priorities: Any, module_id: str | None = None) -> None:
        """Returns the TD errors of the last draw to the rows they belong to; recipes without priorities ignore them.

        Args:
            priorities: one TD error per row, in the order in which the Learners got the rows.
            module_id: the module that learned; single-agent buffers have one.

        Raises:
            ValueError: another number of TD errors than rows drawn, no draw to update, or NaN or infinite values.
        """
        if not self.replay.is_prioritized:
            return
        if self._drawn is None:
            raise ValueError(
                "update_priorities got TD errors, but nothing was drawn since the last update; sample first"
            )
        import torch

        td_error = torch.as_tensor(np.asarray(priorities)).reshape(-1)
        index, generation = self._drawn
        self.replay.update_priority(index, td_error, generation=generation)
        self._drawn = None

    def get_metrics(self) -> dict[str, Any]:
        """Counters under RLlib's keys, as its metrics logger takes them."""
        fragments = self._converter.fragments
        return self._counters.reduce(
            stored=len(self.replay), n_step=self._mean_n_step, gaps=fragments.gaps, duplicates=fragments.duplicates
        )

    def get_num_timesteps(self, module_id: str | None = None) -> int:
        """Steps stored."""
        return len(self.replay)

    def get_num_episodes(self, module_id: str | None = None) -> int:
        """Episodes added: rows leave one by one, so episodes stored are not counted."""
        return self._counters.totals["episodes_added"]

    def get_sampled_timesteps(self, module_id: str | None = None) -> int:
        """Steps drawn since the start."""
        return self._counters.totals["steps_sampled"]

    def get_added_timesteps(self, module_id: str | None = None) -> int:
        """Steps added since the start."""
        return self._counters.totals["steps_added"]

    def get_state(self) -> dict[str, Any]:
        """Everything that decides what is drawn next: tensors and plain values."""
        return {
            "recipe": self.recipe,
            "replay": self.replay.state_dict(),
            "converter": self._converter.state(),
            "counters": dict(self._counters.totals),
            "follows_episodes": self._follows_episodes,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what :meth:`get_state` gave, from a buffer of the same recipe and options.

        Raises:
            ValueError: the state of another recipe; nothing is changed.
        """
        if state["recipe"] != self.recipe:
            raise ValueError(
                f"the state is of recipe {state['recipe']!r}; this buffer is {self.recipe!r}. "
                "Build it with the recipe and options it was saved with."
            )
        if state["follows_episodes"]:
            self._follow_episodes()
        self.replay.load_state_dict(state["replay"])
        self._converter.load_state(state["converter"])
        self._counters.load(state["counters"])
        self._drawn = None

    def _ask_for_returns(self, n_step: int | tuple[int, int], gamma: float) -> None:
        if n_step == 1 and not self._follows_episodes:
            return
        self._returns.ask(n_step, gamma)
        self._follow_episodes()

    def _follow_episodes(self) -> None:
        if not self._follows_episodes:
            self._returns.follow(self.replay)
            self._follows_episodes = True

    def _remember(self, batch: Any, order: np.ndarray | None, lengths: list[int]) -> None:
        """Keeps index and generation of the rows in the order in which their TD errors will come back."""
        if not self.replay.is_prioritized:
            return
        if self._num_learners > 1:
            dealt = learner_order(lengths, self._num_learners)
            order = dealt if order is None else order[dealt]
        index, generation = batch["index"], batch["generation"]
        self._drawn = (index, generation) if order is None else (index[order], generation[order])


def _build(recipe: str, options: dict[str, Any]) -> Replay:
    from lightning_replay import recipes

    function = recipes.by_name(recipe)
    accepted = [name for name in inspect.signature(function).parameters if name not in _SAID_BY_RLLIB]
    for name in options:
        if name in _SAID_BY_RLLIB:
            raise ValueError(f"{name} is not an option of replay_config; RLlib says it: {_SAID_BY_RLLIB[name]}")
    unknown = [name for name in options if name not in accepted]
    if unknown:
        raise ValueError(
            f"recipe {recipe!r} has no option {', '.join(map(repr, unknown))}; accepted are "
            f"{', '.join(accepted)}, and layout and num_learners."
        )
    if "capacity" not in options:
        raise ValueError(f"recipe {recipe!r} needs capacity, the most transitions kept. Add capacity=100_000.")
    # RLlib says the batch size with each draw; the recipe checks this one against the capacity.
    return function(**options, batch_size=1)
