"""HTTP/1.1 as a streaming client needs it: a cheap look while bytes arrive, h11 when they have.

While an answer streams, only `Ending` looks at it, and only so far as to tell that it is over.
`body` has h11 take the whole apart afterwards and says when each byte of the body arrived.
"""

import json
import re
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

import h11

from specbench.errors import LoadError

MAX_HEAD_BYTES = 64 << 10
MAX_ANSWER_BYTES = 64 << 20
MAX_REFUSAL_BYTES = 4096
MAX_CHUNKS = 1 << 19  # one a token; more would take h11 many seconds to take out
LAST_CHUNK = b"\r\n0\r\n"
TAIL_BYTES = 256  # in which the last chunk and its trailers are looked for
HEAD_END = re.compile(rb"\n\r?\n")
CHUNKED = re.compile(rb"\ntransfer-encoding:[^\n]*chunked")
LENGTH = re.compile(rb"\ncontent-length:[ \t]*(\d{1,18})")
CLOSING = re.compile(rb"^http/1\.0|\nconnection:[^\n]*close")


class AnswerError(Exception):
    """An answer that is no whole 200; the message says why."""


class Site:
    """The server at *url*, to which requests are addressed with an optional API key."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url)
        self._prefix = parts.path.rstrip("/")
        self._fields = [
            ("host", parts.netloc.rpartition("@")[2]),
            ("accept", "text/event-stream"),
            ("accept-encoding", "identity"),
            ("content-type", "application/json"),
        ]
        if api_key:
            self._fields.append(("authorization", f"Bearer {api_key}"))

    def post(self, path: str, payload: bytes) -> bytes:
        """A whole POST request as it goes over the wire.

        Raises:
            LoadError: the API key or the URL cannot be sent.
        """
        fields = [*self._fields, ("content-length", str(len(payload)))]
        try:
            wanted = h11.Request(method="POST", target=self._prefix + path, headers=fields)
        except (h11.LocalProtocolError, UnicodeError) as error:
            raise LoadError(
                f"This request cannot be sent: {error}.",
                hint="The URL and the API key may hold printable ASCII only.",
            ) from None
        return (h11.Connection(h11.CLIENT).send(wanted) or b"") + payload


class Ending:
    """Tells from its pieces whether an answer is over, without taking it apart.

    A chunked answer is over where a piece ends with the last chunk. Those bytes inside an answer
    would be taken for it; server-sent events of JSON cannot hold them. `reusable` says whether the
    connection can carry another request then, `problem` why the answer was given up.
    """

    __slots__ = (
        "_chunked",
        "_head",
        "_in_head",
        "_is_refusal",
        "_left",
        "_room",
        "_tail",
        "problem",
        "reusable",
    )

    def __init__(self) -> None:
        self._in_head, self._head = True, b""
        self._chunked, self._tail = False, b""
        self._is_refusal = False
        self._left: int | None = None  # bytes of the body to come; None: until the server closes
        self._room = MAX_ANSWER_BYTES
        self.reusable = False
        self.problem: str | None = None

    def take(self, piece: bytes) -> bool:
        """Whether the answer ends with *piece*."""
        if self._in_head:
            return self._take_head(piece)
        self._room -= len(piece)
        if self._room < 0:
            return self._give_up(f"the answer is over {MAX_ANSWER_BYTES >> 20} MB")
        if self._chunked:
            tail = piece if len(piece) > TAIL_BYTES else self._tail + piece
            self._tail = tail[-TAIL_BYTES:]
            return tail.endswith(b"\r\n\r\n") and LAST_CHUNK in self._tail
        if self._left is None:
            return False
        self._left -= len(piece)
        self.reusable = self.reusable and self._left >= 0  # more than announced: out of step
        return self._left <= 0

    def _take_head(self, piece: bytes) -> bool:
        self._head += piece
        end = HEAD_END.search(self._head)
        if end is None:
            if len(self._head) > MAX_HEAD_BYTES:
                return self._give_up(f"the answer's head is over {MAX_HEAD_BYTES >> 10} kB")
            return False
        head, rest = self._head[: end.end()].lower(), self._head[end.end() :]
        status = head[9:12]
        if status.startswith(b"1") and status != b"101":  # the answer proper is still to come
            self._head = b""
            return self._take_head(rest)
        self._in_head, self._head = False, b""
        self._chunked = CHUNKED.search(head) is not None
        if length := LENGTH.search(head):
            self._left = int(length[1])
        if status in (b"204", b"304"):
            self._left, self._chunked = 0, False
        self.reusable = CLOSING.search(head) is None
        if status != b"200":
            self._is_refusal, self._room = True, MAX_REFUSAL_BYTES
        self._tail = b"\r\n"  # the last chunk of an empty body follows the head at once
        return self.take(rest)

    def _give_up(self, problem: str) -> bool:
        """No more of this answer; what a refusal said so far will do."""
        self.problem = None if self._is_refusal else problem
        self.reusable = False
        return True


def body(pieces: Iterable[tuple[int, bytes]], *, whole: bool) -> Iterator[tuple[int, bytes]]:
    """The body inside *pieces*, pairs of (arrival in ns, bytes as they came), in the same form.

    *whole*: the pieces should be all of an answer. Without it an answer may break off anywhere.

    Raises:
        AnswerError: a status other than 200, a compressed body, or a *whole* answer that is not.
    """
    refused: h11.Response | None = None
    said, chunks = b"", 0
    try:
        for arrived_ns, event in _events([*pieces, (0, b"")] if whole else pieces):
            if isinstance(event, h11.Response):
                refused = _must_be_plain(event)
            elif isinstance(event, h11.Data) and refused is not None:
                said += event.data
            elif isinstance(event, h11.Data):
                chunks += 1
                if chunks > MAX_CHUNKS:
                    raise AnswerError(f"the answer is in over {MAX_CHUNKS} chunks")
                yield arrived_ns, bytes(event.data)
    except h11.RemoteProtocolError as error:
        if whole and refused is None:
            what = "the stream was cut" if chunks else "the request failed"
            raise AnswerError(f"{what}: RemoteProtocolError: {_in_words(error)}") from None
    if refused is not None:
        raise AnswerError(_refusal(refused, said))


def _events(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, h11.Event]]:
    """What h11 finds in *pieces*, an empty one being the end of the connection, up to the end."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=2 * MAX_HEAD_BYTES)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "a")]))
    connection.send(h11.EndOfMessage())
    for arrived_ns, piece in pieces:
        connection.receive_data(piece)
        while isinstance(event := connection.next_event(), h11.Event):
            yield arrived_ns, event
            if isinstance(event, h11.EndOfMessage):
                return


def _must_be_plain(answer: h11.Response) -> h11.Response | None:
    """None for a 200 that can be read; a refusal itself."""
    if answer.status_code != 200:
        return answer
    encoding = dict(answer.headers).get(b"content-encoding")
    if encoding is not None:
        raise AnswerError(f"the server compressed its answer ({encoding.decode('latin-1')})")
    return None


def _refusal(answer: h11.Response, said: bytes) -> str:
    """What a status other than 200 comes with."""
    try:
        message = json.loads(said)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = said[:300].decode("utf-8", "replace").strip()
    return f"HTTP {answer.status_code}: {str(message)[:300]}"


def _in_words(error: h11.RemoteProtocolError) -> str:
    """h11's own words, but for its two ways to say that no answer began."""
    text = str(error)
    if "SEND_RESPONSE" in text or "unexpectedly closed" in text:
        return "the server closed the connection before it answered"
    return text
