"""How this process ends, for what is called at its exit: by an error, by an exit code, or well.

Python tells what is registered with `atexit` nothing of it. Not seen: a `SystemExit` that is raised
by hand, an error that the script catches, and `os._exit`, which calls nothing.
"""

import builtins
import sys
import threading
from types import TracebackType
from typing import Any, NoReturn

__all__ = ["ProcessEnd"]


class ProcessEnd:
    """Notes the error that ends this process, and `sys.exit` with a code other than 0."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._last = _last_of_session()
        self._hook, self._exit = sys.excepthook, sys.exit
        self._ours = self._note_error, self._note_exit
        sys.excepthook, sys.exit = self._ours
        self._quits = {x: getattr(builtins, x) for x in ("exit", "quit") if hasattr(builtins, x)}
        for name in self._quits:
            setattr(builtins, name, self._ours[1])

    @property
    def error(self) -> BaseException | None:
        """What ends the process, or what ended a notebook's cell last; None if all is well."""
        last = _last_of_session()
        return self._error or (last if last is not self._last else None)

    def restore(self) -> None:
        """Put back what was there before, unless somebody else has put something there since."""
        if sys.excepthook is self._ours[0]:
            sys.excepthook = self._hook
        if sys.exit is self._ours[1]:
            sys.exit = self._exit
        for name, before in self._quits.items():
            if getattr(builtins, name) is self._ours[1]:
                setattr(builtins, name, before)

    def went_on(self) -> None:
        """Tell that the process trains: what `sys.exit` raised was caught."""
        if isinstance(self._error, SystemExit):
            self._error = None

    def _note_error(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        self._error = error
        self._hook(kind, error, traceback)

    def _note_exit(self, code: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():  # another one ends alone
            self._error = SystemExit(code) if code not in (None, 0) else None
        self._exit(code)


def _last_of_session() -> BaseException | None:
    """Return the last error that a notebook or an interactive session has shown."""
    return getattr(sys, "last_value", None)
