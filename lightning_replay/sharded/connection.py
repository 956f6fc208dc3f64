# SPDX-License-Identifier: Apache-2.0
"""A reference to the coordinator of a sharded replay that other processes can be sent."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_replay.sharded.actors import START_TIMEOUT_S
from lightning_replay.sharded.coordinator import Coordinator, NotYet

NAMESPACE = "lightning_replay"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_THREADS = 32  # of the coordinator: callers that wait at once
_GRACE_S = 5.0  # for the coordinator's own error, which names the shard, after the time that a call may take


class Connection:
    """Calls methods of a coordinator, from any process of the cluster and any that can reach it.

    The coordinator ends with the process that started it. Connections that are sent to another process find it by
    name; if Ray is not running there, it is connected to the cluster first.

    Attributes:
        wait_timeout_s: seconds after which :meth:`call` raises an error.
        is_owner: whether this process has started the coordinator.
    """

    def __init__(self, name: str, wait_timeout_s: float, actor: Any = None) -> None:
        self._name = name
        self.wait_timeout_s: float = wait_timeout_s
        self._caller = uuid.uuid4().hex
        self._actor = actor
        self._address: str = ray.get_runtime_context().gcs_address
        self._process = os.getpid()
        self._has_stopped = False
        self.is_owner = False

    @classmethod
    def start(cls, name: str, wait_timeout_s: float, *arguments: Any) -> Connection:
        """Starts a coordinator and its shards, on the node of this process as far as there is room.

        Where another process has just started one of that name, it is a connection to that one.
        """
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        actor: Any = ray.remote(num_cpus=0, max_restarts=0)(Coordinator)
        actor = actor.options(name=name, namespace=NAMESPACE, scheduling_strategy=here, max_concurrency=_THREADS)
        try:
            handle = actor.remote(*arguments)
        except ActorAlreadyExistsError:
            return cls(name, wait_timeout_s)
        connection = cls(name, wait_timeout_s, handle)
        try:
            connection.call("start", timeout_s=2 * START_TIMEOUT_S)
        except BaseException:
            ray.kill(handle)
            raise
        connection.is_owner = True
        return connection

    @classmethod
    def find(cls, name: str, wait_timeout_s: float) -> Connection | None:
        try:
            return cls(name, wait_timeout_s, ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            return None

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Calls a method until its result is another than :class:`~lightning_replay.sharded.coordinator.NotYet`.

        Raises:
            TimeoutError: it has taken longer than ``timeout_s``; it names the shards that have not answered.
            RuntimeError: the replay was stopped, or its process was lost.
            Exception: what the method has raised.
        """
        limit_s = self.wait_timeout_s if timeout_s is None else timeout_s
        deadline, pause = time.monotonic() + limit_s, _FIRST_PAUSE_S
        while isinstance(result := self._call(method, arguments, deadline - time.monotonic()), NotYet):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{result.reason}, and this has not changed for {limit_s:g} s (wait_timeout_s). {result.remedy}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return result

    def _call(self, method: str, arguments: tuple[Any, ...], left_s: float) -> Any:
        left_s = max(left_s, 0.0)
        answer = self._handle().call.remote(self._caller, method, left_s, arguments)
        try:
            return ray.get(answer, timeout=left_s + _GRACE_S)
        except GetTimeoutError:
            raise TimeoutError(
                f"the coordinator of this sharded replay has not answered for {left_s + _GRACE_S:.3g} s: its process "
                "hangs, or its node cannot be reached. Build another replay and load a save into it if that lasts"
            ) from None
        except RayTaskError as error:
            cause: Exception = error
            while isinstance(cause, RayTaskError):  # of a shard's error there are two
                cause = cause.cause
            raise cause from None
        except RayActorError as error:
            raise RuntimeError(self._stopped()) from error

    def stop(self) -> None:
        if self._has_stopped:
            return
        try:
            with suppress(TimeoutError):  # the shards end with the coordinator
                self.call("stop")
            ray.kill(self._handle())
        except RuntimeError:  # another process has ended them
            pass
        self._has_stopped = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_actor": None, "_process": None, "_caller": uuid.uuid4().hex, "is_owner": False}

    def _handle(self) -> Any:
        if self._has_stopped:
            raise RuntimeError(self._stopped())
        if self._process is not None and self._process != os.getpid():
            raise RuntimeError(
                "this process was forked from one that uses Ray, which Ray does not support. Start processes by "
                'spawning them, with Lightning strategy="ddp_spawn" or "ddp"'
            )
        if self._actor is None:
            if not ray.is_initialized():
                ray.init(address=self._address, log_to_driver=False)
            try:
                self._actor = ray.get_actor(self._name, namespace=NAMESPACE)
            except ValueError as error:
                raise RuntimeError(self._stopped()) from error
            self._process = os.getpid()
        return self._actor

    def _stopped(self) -> str:
        return (
            "this sharded replay has stopped: stop() was called, or the process that built it has ended. Build another "
            "one, and load a save into it"
        )
