# SPDX-License-Identifier: Apache-2.0
"""A reference to the coordinator of a sharded replay that other processes can be sent."""

from __future__ import annotations

import os
import time
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_replay.sharded.coordinator import Coordinator, NotYet

NAMESPACE = "lightning_replay"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


class Connection:
    """Calls methods of a coordinator, from any process of the cluster and any that can reach it.

    The coordinator ends with the process that started it. Connections that are sent to another process find it by
    name; if Ray is not running there, it is connected to the cluster first.

    Args:
        name: of the coordinator.
        wait_timeout_s: seconds after which :meth:`wait_for` raises an error.
        actor: its handle; ``None`` finds it.

    Attributes:
        is_owner: whether this process has started the coordinator.
    """

    def __init__(self, name: str, wait_timeout_s: float, actor: Any = None) -> None:
        self._name, self._wait_timeout_s = name, wait_timeout_s
        self._actor = actor
        self._address: str = ray.get_runtime_context().gcs_address
        self._process = os.getpid()
        self._has_stopped = False
        self.is_owner = False

    @classmethod
    def start(cls, name: str, wait_timeout_s: float, *arguments: Any) -> Connection:
        """Starts a coordinator and its shards, on the node of this process as far as there is room."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        actor: Any = ray.remote(num_cpus=0, max_restarts=0)(Coordinator)
        handle = actor.options(name=name, namespace=NAMESPACE, scheduling_strategy=here).remote(*arguments)
        connection = cls(name, wait_timeout_s, handle)
        try:
            connection.call("start")
        except BaseException:
            ray.kill(handle)
            raise
        connection.is_owner = True
        return connection

    @classmethod
    def find(cls, name: str, wait_timeout_s: float) -> Connection | None:
        """Returns a connection to a coordinator that was started, ``None`` if there is none."""
        try:
            return cls(name, wait_timeout_s, ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            return None

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method and returns its result.

        Raises:
            RuntimeError: the replay was stopped, or its process was lost.
            Exception: what the method has raised.
        """
        try:
            return ray.get(getattr(self._handle(), method).remote(*arguments))
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise RuntimeError(self._stopped()) from error

    def wait_for(self, method: str, *arguments: Any) -> Any:
        """Calls a method until its result is another than :class:`~lightning_replay.sharded.coordinator.NotYet`.

        Raises:
            TimeoutError: that has taken longer than ``wait_timeout_s``.
        """
        deadline, pause = time.monotonic() + self._wait_timeout_s, _FIRST_PAUSE_S
        while isinstance(result := self.call(method, *arguments), NotYet):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{result.reason}, and this has not changed for {self._wait_timeout_s:g} s (wait_timeout_s). "
                    f"{result.remedy}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return result

    def stop(self) -> None:
        """Ends the coordinator and its shards."""
        if self._has_stopped:
            return
        try:
            self.call("stop")
            ray.kill(self._handle())
        except RuntimeError:  # another process has ended them
            pass
        self._has_stopped = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_actor": None, "_process": None, "is_owner": False}

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
