"""`shadow` for any LightningModule: the same instrument as a callback, with the same arguments.

Leaves out everything that it does (`attention.session`).
"""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from stability.callbacks.each_update import UpdateCallback
from stability.callbacks.probe_log import ProbeLog
from stability.intercept.session import Candidate, Shadow, shadow
from stability.probe.measurements import Reading

__all__ = ["ShadowCallback"]


class ShadowCallback(UpdateCallback):
    """Shadow the attention of the module that is trained, and log to the trainer's loggers.

    Takes `candidate` and the options of `stability.shadow`; steps are the trainer's global steps.
    ValueError when training starts, as `shadow`.
    """

    def __init__(self, candidate: Candidate = "flash:fa2", **options: Any) -> None:
        self._candidate = candidate
        self._options = options
        self._open = ExitStack()
        self._session: Shadow | None = None
        self._log = ProbeLog()
        self._trainer: Trainer | None = None
        self._state: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the module."""
        self._trainer = trainer
        self._session = self._open.enter_context(
            shadow(
                pl_module,
                self._candidate,
                **self._options,
                sinks=[self._write],
                first_step=trainer.global_step,
            )
        )
        if self._state:
            self._session.probe.load_state_dict(self._state)

    def after_update(self, trainer: Trainer, step: int) -> None:
        """End the step."""
        if self._session is not None:
            self._session.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach."""
        self._open.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Detach."""
        self._open.close()

    def _write(self, step: int, reading: Reading) -> None:
        assert self._trainer is not None
        self._log.write(self._trainer.loggers, step, reading)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs; logs first what a checkpoint counts on."""
        if self._session is None:
            return {}
        self._session.deliver()
        return {"probe": self._session.probe.state_dict(), "watched": self._log.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._state = state_dict.get("probe", {})
        self._log.load_state_dict(state_dict.get("watched", {}))
