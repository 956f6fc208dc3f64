# SPDX-License-Identifier: Apache-2.0
"""The data module that collects into a replay, and draws Lightning's batches from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.agents.agent import OffPolicyAgent, SizedAgent
from lightning_replay.agents.interfaces import (
    UpdatePriorities,
    check_sequences,
    is_compiled,
    observes_batches,
    recurrent_agent,
    takes_update_batches,
    warn_of_discounts,
)
from lightning_replay.agents.spaces import spaces_of_sizes
from lightning_replay.collecting import check_step_options
from lightning_replay.envs.building import MAX_EPISODE_STEPS, checked_info_keys
from lightning_replay.fast_path import has_fast_path
from lightning_replay.lit.check_stored_rows import STATE, Columns, row_differences
from lightning_replay.lit.checkpoint_files import saved_replay
from lightning_replay.lit.collection import Collection, OfflineSchedule, TaskAssignment, UpdateSchedule
from lightning_replay.lit.data import ActsAtUpdates, EnvStepDataModule, UpdateStream
from lightning_replay.lit.rollouts import States, Successes, make_environments
from lightning_replay.lit.simulators import (
    Simulator,
    SimulatorCollection,
    Simulators,
    is_simulator,
    simulator_class,
    simulator_returns,
)
from lightning_replay.mixed_replay import MixedReplay
from lightning_replay.options import (
    check_kind,
    checked_count,
    checked_optional_count,
    with_named_arguments,
)
from lightning_replay.replay import Replay
from lightning_replay.saving.directory import local_folder
from lightning_replay.schedulers import ReturnProgress
from lightning_replay.training_replay import TrainingReplay

# Lightning takes 100 to 200 us for a training step: 2 % of 16 updates of a small network.
_JOINED_UPDATES = 16
# With fewer updates the environment steps take longer than Lightning, and many episodes would end in one training step.
_JOINED_RATIO = 0.25


class ReplayDataModule(EnvStepDataModule):
    """Environments and replay of one run: ``updates = floor((env_steps - warmup_steps) * updates_per_env_step)``.

    Give it to ``Trainer(max_epochs=-1).fit(agent, datamodule=...)``: it collects with the agent's
    ``act(observation, explore)``, draws one batch per update and stops the trainer when ``env_steps`` are collected.
    Its two clocks are ``env_steps_done`` and ``updates_done``. The replay is saved beside every checkpoint and
    restored by ``fit(ckpt_path=...)``. The environments then start new episodes.

    With ``updates`` in place of ``env_steps`` nothing is collected: it trains on the rows that the replay holds, and
    ``env`` is for evaluation alone and may be absent. Loggers and evaluations then count updates.

    Args:
        env: Gymnasium id, or a callable that builds one environment, ``None`` only with ``updates``. Or a simulator
            that steps ``num_envs`` environments in one tensor: an instance, a callable that builds one, or a mapping
            with its ``class_path`` and ``init_args``. See docs/simulators.md.
        replay: Buffer, usually from :mod:`lightning_replay.recipes`, or a ``ShardedReplay``, for which each process
            of the trainer collects its share of ``env_steps``, and draws its share of every batch.
        env_steps: environment steps of the whole run, warm-up included.
        warmup_steps: environment steps with random actions of the space's ``sample`` before the first update, 0 if the
            replay holds a batch.
        updates_per_env_step: replay ratio, a fraction or several. A resumed run follows another ratio from there on.
        num_envs: environments stepped together.
        asynchronous: step them each in its own process (then keep a script's main part under ``__main__``). For
            environments that take milliseconds a step: 8 MuJoCo environments cost this process more CPU than stepping
            them here.
        updates_per_training_step: batches per ``training_step``. Several make small updates cheaper. ``None`` is up to
            16 if only the speed changes by that, see docs/lightning.md, and otherwise 1.
        updates_per_epoch: updates in one of Lightning's epochs, 1,000 by default. With the callback ``Evaluate``, an
            epoch ends with each evaluation instead.
        evaluation_episodes: episodes of ``trainer.validate``.
        env_kwargs: further arguments of the environment.
        evaluation_env_kwargs: Arguments that differ in evaluation, for whole games and unchanged rewards.
        seed: Seed for environments, random actions, and the replay's draws. ``None`` does not seed the replay.
        progress: Progress signal for a replay with tasks, computed from the returns of finished episodes.
        info_keys: Keys of numbers or flags in the steps' infos, stored as float32 columns ``("next", key)`` for event
            conditions, 0 if an info lacks one.
        updates: Number of updates of a run on stored rows. Excludes all options of collecting.
        final_observation: Place of the last observations of ended episodes in a simulator's infos. It and the three
            options below are options of :class:`~lightning_replay.collecting.VectorSteps`.
        without_final_observation: Treatment of ends whose last observation the simulator does not give.
        skip_invalid: Whether rows of a simulator that are not finite are left out.
        observation_columns: Entries of a simulator's observations by the column that they become. The agent acts on
            the column ``observation``.

    If the replay keeps transitions by their surprise and has no function that measures it, the agent's method
    ``initial_surprise``, if it has one, is called for new rows. Of an agent with a state (``is_recurrent``) each
    environment has one, which rows carry as ``recurrent_state``. If the replay has tasks, its scheduler chooses the
    task of each environment, rows carry ``task``, and evaluation plays the first task unless ``env_kwargs`` name one.

    Raises:
        TypeError: during the run a reward that is no number, or steps and actions of another form than Gymnasium's.
        ValueError: options that contradict each other or the replay. In ``fit`` fewer rows than a batch when the first
            one is drawn from them, rows that do not fit the environment, a recurrent agent with a replay of single
            rows, or another with one of sequences. During the run an environment without the replay's tasks, or an info
            never seen.

    Example:
        >>> from lightning_replay import recipes
        >>> data = ReplayDataModule("Pendulum-v1", recipes.uniform(capacity=1_000), env_steps=600, warmup_steps=500)
        >>> data.pace.total_updates
        100
    """

    pace: UpdateSchedule | OfflineSchedule
    collection: Collection
    replay: TrainingReplay
    updates_done: int
    rollout_rows: int = 0
    takes_td_errors = True
    exact: bool = True
    takes_simulators = True

    @with_named_arguments
    def __init__(
        self,
        env: str | dict[str, Any] | Callable[..., Any] | Simulator | None = None,
        replay: TrainingReplay | None = None,
        env_steps: int | None = None,
        warmup_steps: int | None = None,
        updates_per_env_step: float = 1.0,
        num_envs: int = 1,
        asynchronous: bool = False,
        updates_per_training_step: int | None = None,
        updates_per_epoch: int | None = None,
        evaluation_episodes: int = 5,
        env_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
        progress: ReturnProgress | None = None,
        info_keys: tuple[str, ...] = (),
        evaluation_env_kwargs: dict[str, Any] | None = None,
        updates: int | None = None,
        final_observation: str | list[str] | Callable[..., Any] | None = None,
        without_final_observation: str | None = None,
        skip_invalid: bool = False,
        observation_columns: dict[str, str] | None = None,
    ) -> None:
        env = simulator_class(env) if isinstance(env, dict) else env
        super().__init__(env, asynchronous, env_kwargs, evaluation_env_kwargs)
        accepted = "a Replay, such as lightning_replay.recipes.prioritized(capacity=100_000)"
        check_kind("replay", replay, TrainingReplay, f"{accepted}; levels are replayed with LevelDataModule")
        assert replay is not None
        if checked_count("num_envs", num_envs) > 1 and replay.needs_consecutive_rows:
            raise ValueError(
                f"num_envs is {num_envs}, and the replay draws with {replay.sampler_name}, which cuts slices "
                "out of rows that lie side by side; rows of several environments are stored interleaved. Use "
                "num_envs=1, or draw with lightning_replay.samplers.SequenceSampler, as recipes.sequences does"
            )
        if updates is not None:
            self.pace = OfflineSchedule(updates)
            collecting: dict[str, Any] = {
                "env_steps": env_steps,
                "warmup_steps": warmup_steps,
                "progress": progress,
                "info_keys": info_keys,
                "asynchronous": asynchronous,
                "num_envs": num_envs != 1,
                "updates_per_env_step": updates_per_env_step != 1,
            }
            refused = [name for name, value in collecting.items() if value]
            if refused:
                raise ValueError(
                    f"updates is {updates}, with which nothing is collected, beside {', '.join(refused)}. Leave these "
                    "out, or give env, env_steps and warmup_steps without updates"
                )
        elif env is None or env_steps is None or warmup_steps is None:
            raise TypeError(
                f"env is {env!r}, env_steps {env_steps} and warmup_steps {warmup_steps}; give all three to collect, or "
                "updates in place of the last two to train on the rows that the replay holds"
            )
        else:
            self.pace = UpdateSchedule(env_steps, warmup_steps, updates_per_env_step)
        self.replay: TrainingReplay = replay
        self.updates_per_training_step: int | None = checked_optional_count(
            "updates_per_training_step", updates_per_training_step
        )
        self.updates_per_epoch: int | None = checked_optional_count("updates_per_epoch", updates_per_epoch)
        self._updates_per_env_step = updates_per_env_step
        self.evaluation_episodes: int = checked_count("evaluation_episodes", evaluation_episodes)
        self._saved_replay: Any = None  # save of the checkpoint that is being restored
        self._tasks = replay.tasks
        self._num_envs = num_envs
        self._info_keys = checked_info_keys(info_keys)
        check_kind("progress", progress, ReturnProgress | None, "an object of lightning_replay.schedulers, or None")
        if progress is not None and not self._tasks:
            raise ValueError(
                f"progress is {type(progress).__name__}, but the replay has no tasks whose progress could matter. Use "
                "lightning_replay.recipes.parallel_curriculum, or leave it out."
            )
        self.collection = Collection(
            replay,
            # Without an environment it is never called.
            partial(make_environments, env, self.env_kwargs, num_envs, asynchronous),  # type: ignore[arg-type]
            warmup_steps=warmup_steps or 0,
            env_steps=env_steps or 0,
            seed=seed,
            assignment=TaskAssignment(replay, progress) if self._tasks else None,
            info_keys=self._info_keys,
        )
        self._simulators: Simulators | None = None
        self._simulator_options: dict[str, Any] = {
            "final_observation": final_observation,
            "without_final_observation": without_final_observation,
            "skip_invalid": skip_invalid,
            "observation_columns": observation_columns,
        }
        check_step_options(**self._simulator_options)
        if seed is not None:
            replay.seed(seed)
        self._has_drawn = self._sets_surprise = False
        self._world_size = 1

    def __repr__(self) -> str:
        replay = self.replay
        return self._describe(
            f"{type(replay).__name__} of {len(replay):,} of {replay.capacity:,} transitions, {replay.sampler_name}"
        )

    def make_environment(self) -> gymnasium.Env[Any, Any]:
        """Builds an environment for an evaluation, of the first task if there are tasks."""
        environment = super().make_environment()
        if self._tasks and "task" not in self.evaluation_env_kwargs:
            environment.set_wrapper_attr("task", self._tasks[0])
        return environment

    def setup(self, stage: str) -> None:
        """Reads the spaces and makes the trainer save the replay beside its checkpoints."""
        if self.trainer is not None and self.replay.is_shared:
            self._join_processes(self.trainer.strategy, self.trainer.global_rank, self.trainer.world_size)
        if self.trainer is not None and stage == TrainerFn.FITTING:
            check_sequences(self._agent, self.replay)
            if not isinstance(self._agent, OffPolicyAgent):  # Such an agent refuses the replay itself.
                warn_of_discounts(self._agent, self.replay)
        super().setup(stage)
        if self.trainer is not None and stage == TrainerFn.FITTING and self.replay.needs_initial_surprise:
            surprise = getattr(self._agent, "initial_surprise", None)  # an agent may have it
            self._sets_surprise = callable(surprise)
            if self._sets_surprise:
                self.replay.set_initial_surprise(surprise)
        self._has_drawn = False

    def _read_spaces(self, built: Any) -> None:
        if not is_simulator(built):
            if refused := [name for name, value in self._simulator_options.items() if value]:
                raise ValueError(
                    f"{', '.join(refused)} of {type(self).__name__} belong to a simulator, and env is {self.env!r}. "
                    "Leave them out"
                )
            super()._read_spaces(built)
            return
        self._refuse_beside_simulator(built)
        simulators = self._simulators = Simulators(
            self.env,
            built,
            self.env_kwargs,
            self.evaluation_env_kwargs,
            self._simulator_options["observation_columns"],
            None if self.trainer is None else self._agent,
        )
        self.observation_space: gymnasium.Space[Any] | None = simulators.observation_space
        self.action_space: gymnasium.Space[Any] | None = simulators.action_space
        self.column_spaces: Mapping[str, gymnasium.Space[Any]] = simulators.column_spaces
        self._num_envs = simulators.get().num_envs
        self.collection = SimulatorCollection(simulators, self._simulator_options, self.collection)

    def _refuse_beside_simulator(self, simulator: Any) -> None:
        """Refuses options of environments that are stepped one by one."""
        of_instance = simulator is self.env
        given: dict[str, Any] = {
            "num_envs": self._num_envs != 1,
            "asynchronous": self._asynchronous,
            "env_kwargs": of_instance and self.env_kwargs,
            "evaluation_env_kwargs": of_instance and self.evaluation_env_kwargs,
            "a replay with tasks": self._tasks,
            f"a replay that draws with {self.replay.sampler_name}": self.replay.needs_consecutive_rows,
        }
        if refused := [name for name, value in given.items() if value]:
            raise ValueError(
                f"env is the simulator {simulator!r}, beside {', '.join(refused)}. A simulator has its own num_envs, "
                "steps all environments in this process, plays no tasks, and interleaves their rows; only a class or "
                "function takes env_kwargs. Leave these out"
            )

    def _join_processes(self, strategy: Strategy, rank: int, world_size: int) -> None:
        if self.pace.env_steps % world_size:
            raise ValueError(
                f"env_steps is {self.pace.env_steps}; {world_size} processes share it, give a multiple of {world_size}"
            )
        # If each process had its own replay, the processes would wait forever for the draws of the others.
        if not strategy.reduce_boolean_decision(strategy.broadcast(self.replay.name) == self.replay.name):
            raise ValueError(
                "each process has built a replay of its own, of which none would get batches. Give all the same name, "
                'ShardedReplay(..., name="..."), and connect them to one cluster, ray.init(address="auto")'
            )
        self._world_size = world_size
        self.replay = self.replay.for_rank(rank, world_size)
        self.collection.collect_share(self.replay, rank, world_size)
        self._draw_apart(rank)

    def _draw_apart(self, rank: int) -> None:
        if rank:
            # All processes have the seed of the first. Each is to explore on its own.
            torch.manual_seed(int(torch.randint(2**31, ())) + rank)

    @property
    def env_steps_done(self) -> int:
        """Environment steps that all processes collected."""
        return self.collection.env_steps * self._world_size

    def _collect_until(self, env_steps: int, agent: L.LightningModule) -> None:
        share = -(-env_steps // self._world_size)
        self.collection.collect_until(share, agent, self.pause_hooks)

    def train_dataloader(self) -> UpdateStream:
        """Returns one epoch, and not a DataLoader, whose workers would draw from a stale copy of the buffer.

        :meta private:
        """
        if self._is_fitting and not any(self.clocks):  # a run that goes on has rows of its own
            self._check_rows()
        several = self.updates_per_training_step
        updates = self._updates_of_epoch("updates_per_epoch", self.updates_per_epoch, 1_000)
        if several is None:
            if self._joins_updates():
                return UpdateStream(self, updates, _JOINED_UPDATES, ends_early=True)
            several = 1
        if several > 1 and self.trainer is not None and is_compiled(self._agent):
            raise ValueError(
                f"updates_per_training_step is {several}, and training_step of {type(self._agent).__name__} is "
                "compiled, which would draw the batches in compiled code. Leave the option out or set it to 1."
            )
        return UpdateStream(self, math.ceil(updates / several), several)

    def _check_rows(self) -> None:
        """Refuses less rows than a first batch needs, and rows that fit neither environment nor agent."""
        replay = self.replay
        if not self.pace.warmup_steps and len(replay) < replay.batch_size:
            remedy = "collect at least as many by warmup_steps, or fill it" if self.pace.env_steps else "fill it"
            raise ValueError(
                f"the replay holds {len(replay)} rows and its batches have {replay.batch_size}, and the first one is "
                f"drawn from rows that are there; {remedy} before fit, see lightning_replay.datasets"
            )
        spaces, source = (self.observation_space, self.action_space), f"environment {self.env!r}"
        if of_agent := self.env is None:
            sizes = self._agent.hparams if isinstance(self._agent, SizedAgent) else {}  # else the state alone
            spaces = spaces_of_sizes(sizes)
            source = f"agent {type(self._agent).__name__}"
        observation, action = spaces
        assert observation is not None and action is not None
        further: Columns = {("next", key): (torch.float32, (1,)) for key in self._info_keys}
        if self._tasks:
            further["task",] = (torch.int64, ())
        recurrent = recurrent_agent(self._agent)
        num_envs = self._num_envs if self.pace.env_steps else 0
        if recurrent is not None:
            further[STATE] = (torch.float32, tuple(States(recurrent, 1).current.shape[1:]))
        sides: list[tuple[Any, int]] = [(replay, num_envs)]
        if isinstance(replay, MixedReplay):  # It compares further columns of its sides itself.
            sides = [(replay.online, num_envs), (replay.offline, 0)]
        # The columns of a critic's observations are compared when rows are stored.
        has_further = bool(self._simulator_options["observation_columns"])
        differences = [
            one
            for side, count in sides
            if isinstance(side, Replay) and len(side) and not has_further
            for one in row_differences(side, observation, action, count, further, of_agent)
        ]
        if differences:
            raise ValueError(
                f"rows of the replay are not those of the {source}. Different: {'; '.join(differences)}. Convert the "
                "rows before they are stored, see docs/demonstrations.md"
            )

    def _joins_updates(self) -> bool:
        # Nothing but the speed may change: no limit counts batches, no hook moves them, no callback looks at each.
        trainer = self.trainer
        updates_per_step = self._updates_per_env_step * (1 if self._simulators is None else self._num_envs)
        if trainer is None or not takes_update_batches(self._agent) or updates_per_step < _JOINED_RATIO:
            return False
        limits = (trainer.limit_train_batches != 1.0, trainer.overfit_batches, trainer.fast_dev_run)  # type: ignore[attr-defined]
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by its connectors
        own = ActsAtUpdates | UpdatePriorities
        is_observed = any(observes_batches(one) for one in callbacks if not isinstance(one, own))
        # A subclass may override a hook that moves or counts batches.
        return has_fast_path(self) and not any(limits) and not is_observed

    def evaluation_returns(self) -> Iterable[float]:
        """Plays the episodes of ``trainer.validate`` and returns their returns.

        :meta private:
        """
        return self.played_returns(self._agent, self.evaluation_episodes, seed=10_000)

    def played_returns(
        self,
        agent: L.LightningModule,
        episodes: int,
        seed: int,
        max_episode_steps: int = MAX_EPISODE_STEPS,
        successes: Successes | None = None,
    ) -> Generator[float, None, None]:
        """Plays whole episodes, in all environments of a simulator at once.

        :meta private:
        """
        if self._simulators is None:
            return super().played_returns(agent, episodes, seed, max_episode_steps, successes)
        if self._simulators.is_single:
            self.collection.close()  # The episodes of the training end, because their simulator is used.
        return simulator_returns(
            agent, self._simulators, episodes, seed, max_episode_steps, self.check_stopped, successes
        )

    @property
    def remaining_updates(self) -> int:
        """Updates that remain.

        :meta private:
        """
        return max(0, self.pace.total_updates - self.updates_done)

    def start_epoch(self) -> None:
        """Collects the last steps if no update remains.

        :meta private:
        """
        super().start_epoch()
        if self.remaining_updates == 0:
            self._collect_until(self.pace.env_steps, self._agent)

    def draw(self) -> TensorDictBase:
        """Collects what is due before the next update, then draws its batch, on the agent's device."""
        assert self.trainer is not None
        replay = self.replay
        agent = self.trainer.lightning_module
        if self._has_drawn and replay.awaits_priorities:
            raise RuntimeError(
                "the replay is prioritized, but no TD errors came back since its last draw. Return "
                "[UpdatePriorities()] from configure_callbacks (agents of this library do); a training_step that gets "
                "several batches calls batches.update_priority(batch, td_error) in its loop."
            )
        self.is_update_open: bool = False
        # The steps due before this update are stored first, then the schedules are set to both clocks.
        self._collect_until(self.pace.steps_for(self.updates_done + 1), agent)
        # If nothing is collected here, the agent may collect, and advance the clock of environment steps.
        replay.advance(env_steps=self.env_steps_done if self.pace.env_steps else None, updates=self.updates_done)
        batch = replay.sample()
        self.updates_done += 1  # open until the agent has learned from the batch, see drop_open_update
        self.is_update_open = self._has_drawn = True
        device = batch.device or batch.get("index").device
        return batch if device == agent.device else batch.to(agent.device)

    def update_priority(self, batch: TensorDictBase, td_error: Tensor, **signals: Tensor) -> None:
        """Passes the TD errors ``[B]`` of a batch to the replay."""
        self.replay.update_priority(batch, td_error, **signals)

    def replay_stamp(self) -> Hashable:
        """Returns a value that is equal while the replay is neither written, drawn from, nor updated.

        :meta private:
        """
        replay = self.replay
        return self.env_steps_done, self.updates_done, replay.awaits_priorities, replay.generator_fingerprint()

    def state_dict(self) -> dict[str, Any]:
        """Clocks and generators, plain values only. The replay itself is saved beside the checkpoint file."""
        return super().state_dict() | {"replay": None, "pace": self.pace.state_dict()}

    def find_replay(self, checkpoint: dict[str, Any], path: str | Path) -> Any:
        """Finds the replay of a checkpoint before the agent is restored, or returns ``None`` if only weights are
        loaded.

        :meta private:
        """
        state = checkpoint.get(type(self).__qualname__)
        if not self._is_fitting or state is None:
            return None
        self._saved_replay = saved_replay(path, state["replay"], state["replay_id"])
        return self._saved_replay

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict` and the replay beside the checkpoint, while fitting only.

        :meta private:
        """
        if not self._is_fitting:
            return
        assert self.trainer is not None
        if self.trainer.is_global_zero:  # a shared replay is loaded once for all processes
            with local_folder(self._saved_replay) as saved:
                self.replay.load(saved)
        self.trainer.strategy.barrier()
        super().load_state_dict(state)
        self.pace.resume(state["pace"], *self.clocks)
        self._draw_apart(self.trainer.global_rank)

    def teardown(self, stage: str) -> None:
        """Restores the replay's options, and waits for the other processes.

        :meta private:
        """
        super().teardown(stage)
        if self._simulators is not None:
            self._simulators.close()
        if self._sets_surprise:
            self.replay.set_initial_surprise(None)
            self._sets_surprise = False
        if self._world_size > 1 and self.trainer is not None:
            self.trainer.strategy.barrier()  # one process may end the replay after this, to which others still send
