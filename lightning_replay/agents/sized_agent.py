# SPDX-License-Identifier: Apache-2.0
"""What an agent needs before it learns: sizes from the environment, networks built once, gradients without overhead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import gymnasium
import lightning as L
from gymnasium.spaces import Space
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_replay.agents.spaces import spaces_of

__all__ = ["SizedAgent"]


class SizedAgent(L.LightningModule):
    """A LightningModule with manual optimisation whose networks fit the environment's spaces.

    A subclass gives ``build`` (networks, loss), ``act``, ``training_step`` and ``configure_optimizers``, and names in
    ``size_names`` the arguments that the spaces determine. With those arguments it is built at once, otherwise when a
    trainer attaches a data module that knows its spaces.
    """

    size_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.is_built = False

    @classmethod
    def sizes_from(cls, observation_space: Space, action_space: Space) -> dict[str, Any]:
        """The arguments the spaces determine, or an error where the agent cannot act in such spaces."""
        raise NotImplementedError

    @classmethod
    def for_env(
        cls,
        env: str | Callable[[], gymnasium.Env] | gymnasium.Env | gymnasium.vector.VectorEnv,
        **hyperparameters: Any,
    ) -> Self:
        """An agent for this environment, given as an id, a callable that builds it, itself or a vector of them.

        Raises:
            TypeError: where ``env`` is none of these.
            ValueError: where the agent cannot act in the environment's spaces.
        """
        return cls(**(cls.sizes_from(*spaces_of(env)) | hyperparameters))

    def build(self) -> None:
        """Creates networks and loss from ``self.hparams``."""
        raise NotImplementedError

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Actions for a batch of observations."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Builds the networks once, with the sizes of the attached data module's spaces if none were given."""
        if self.is_built:
            return
        missing = [name for name in self.size_names if self.hparams.get(name) is None]
        if missing:
            datamodule: Any = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
            if not hasattr(datamodule, "observation_space"):
                raise ValueError(
                    f"{type(self).__name__} was built without {', '.join(missing)}; give them, use "
                    f"{type(self).__name__}.for_env(env), or fit it with a data module of lightning_replay.lit, which "
                    "knows its spaces."
                )
            sizes = self.sizes_from(datamodule.observation_space, datamodule.action_space)
            self.hparams.update({name: size for name, size in sizes.items() if self.hparams.get(name) is None})
        self.build()
        self.is_built = True

    def build_if_sized(self) -> None:
        """Called at the end of a subclass's ``__init__``."""
        if all(self.hparams.get(name) is not None for name in self.size_names):
            self.configure_model()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Records the return of one evaluation episode."""
        self.log("eval/return", batch["return"], batch_size=1, on_step=False, on_epoch=True)

    def take_gradients(self, loss: Tensor) -> None:
        """``manual_backward``, without its 20 to 50 µs where it does nothing: one device, 32-bit precision."""
        if self.takes_plain_gradients:
            loss.backward()
        else:
            self.manual_backward(loss)

    @property
    def takes_plain_gradients(self) -> bool:
        """Whether the trainer neither scales gradients nor exchanges them between devices."""
        trainer = self.trainer
        return type(trainer.precision_plugin) is Precision and isinstance(trainer.strategy, SingleDeviceStrategy)
