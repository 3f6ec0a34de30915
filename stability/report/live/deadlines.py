"""HTTP connections with deadlines: a client that is slow, or says nothing, is hung up on.

uvicorn itself waits for the head of a request for as long as the connection lives. Here the whole
head must come within a time that data does not prolong, and a body, which this server has no use
for, counts as the head of the next request. A client that does not read its answer is given up too.
The making of an answer has no deadline: the first look at a large study takes long.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["DeadlineProtocol"]

REQUEST_S = 10.0
"""Seconds from a connection, or the first byte of a further request, to the end of its head."""
SENDING_S = 30.0
"""Seconds that a client may take to read what is already waiting for it."""


class DeadlineProtocol(H11Protocol):
    """One connection."""

    _asking: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._asking = self.loop.call_later(REQUEST_S, self._hang_up)

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        super().data_received(data)
        if self._is_answering():
            self._asking = _stopped(self._asking)
        elif self._asking is None:
            self._asking = self.loop.call_later(REQUEST_S, self._hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        self._asking, self._sending = _stopped(self._asking), _stopped(self._sending)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._sending = _stopped(self._sending)
        self._sending = self.loop.call_later(SENDING_S, self._hang_up)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        super().resume_writing()
        self._sending = _stopped(self._sending)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, at the latest once its last answer was not read in time."""
        super().timeout_keep_alive_handler()
        if self._sending is None:
            self._sending = self.loop.call_later(SENDING_S, self._hang_up)

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _hang_up(self) -> None:
        # not close(), which would wait for the client to read what is still to be sent
        self.transport.abort()


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
