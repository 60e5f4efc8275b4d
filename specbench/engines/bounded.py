"""HTTP to a server that may be anyone's: no answer is larger, slower or other than it should be.

httpx limits each read. A server that sends a byte now and then, or never stops, stays within that.
"""

import socket
import threading
import time
from contextlib import suppress
from typing import Any

import httpx

MOST_BYTES = 16 << 20  # a /metrics page of a large deployment has 1 MB
CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")


class Bounded(httpx.HTTPTransport):
    """Reads an answer whole, within the request's read timeout in all, and MOST_BYTES.

    What breaks a bound is an httpx.HTTPError that says which. Compressed answers are refused: a
    small one may unpack to anything. Redirects are the client's, which follows none unless told to.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  (as httpx takes them)
        super().__init__(**options)
        self._socket: socket.socket | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send *request*; the whole answer.

        Raises:
            httpx.HTTPError: it fails, or breaks a bound.
        """
        limit_s = request.extensions["timeout"]["read"]
        request.headers["accept-encoding"] = "identity"
        request.extensions = {**request.extensions, "trace": self._note}
        ends = time.monotonic() + limit_s
        cut = threading.Timer(limit_s, self._cut)  # heads that come a byte at a time end here
        cut.daemon = True
        cut.start()
        try:
            answer = super().handle_request(request)
            try:
                return self._whole(request, answer, ends)
            finally:
                answer.close()
        except httpx.TransportError as error:
            if time.monotonic() < ends:
                raise
            raise httpx.ReadTimeout(f"no whole answer in {limit_s:g} s") from error
        finally:
            cut.cancel()

    def _whole(self, request: httpx.Request, answer: httpx.Response, ends: float) -> httpx.Response:
        if (coding := answer.headers.get("content-encoding", "identity")) != "identity":
            raise httpx.DecodingError(f"the answer is compressed ({coding[:40]})", request=request)
        body = bytearray()
        assert isinstance(answer.stream, httpx.SyncByteStream)
        for piece in answer.stream:
            body += piece
            if len(body) > MOST_BYTES:
                most = f"the answer is over {MOST_BYTES >> 20} MB"
                raise httpx.RemoteProtocolError(most, request=request)
            if time.monotonic() > ends:
                raise httpx.ReadTimeout("the answer does not end", request=request)
        kind = {"content-type": answer.headers.get("content-type", "text/plain")}
        return httpx.Response(answer.status_code, headers=kind, content=bytes(body))

    def _note(self, event: str, info: dict[str, Any]) -> None:
        if event in CONNECTED:
            self._socket = info["return_value"].get_extra_info("socket")

    def _cut(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
