"""When bytes arrived, by the kernel's own stamp: whoever reads them may be late, the stamp is not.

Linux notes for each packet when it took it in, and hands that on with the bytes (socket(7),
SO_TIMESTAMPNS; for TCP tcp_recv_timestamp in net/ipv4/tcp.c). A process that sleeps until bytes come
is woken 50 to 100 us later, and one that has 64 streams to read gets to the last of them 1 ms later.
Where there is no stamp (TLS, whose packets are not ours to read, or a kernel that has none), the
caller's time of waking stands.
"""

import socket
import struct
import time
from collections.abc import Sequence
from contextlib import closing

SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)  # Python names it from 3.15 on
_STAMP = struct.Struct("qq")  # seconds, ns: struct timespec where longs have 64 bits
ANCILLARY_BYTES = socket.CMSG_SPACE(_STAMP.size)
_QUICK_NS = 20_000  # two clocks read within this were not torn apart by another process
_TRIES = 3
# The first socket that asks has Linux switch stamping on, which a worker thread of the kernel does a
# moment later (netstamp_work in net/core/dev.c): what arrives before has no stamp.
_SWITCHED_ON_S = 0.5


def ask_for_stamps(sock: socket.socket) -> None:
    """Have *sock*'s packets stamped from now on, where the kernel can."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        return


def are_stamped() -> bool:
    """Whether this kernel stamps what arrives over a connection within the machine; once it does."""
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as listener,
        closing(socket.create_connection(listener.getsockname())) as reader,
    ):
        ask_for_stamps(reader)
        writer, _ = listener.accept()
        reader.settimeout(1)
        deadline = time.monotonic() + _SWITCHED_ON_S
        with closing(writer):
            while time.monotonic() < deadline:
                writer.sendall(b"x")
                if reader.recvmsg(1, ANCILLARY_BYTES)[1]:
                    return True
                time.sleep(0.001)
        return False


class Stamps:
    """Turns the kernel's stamps, of the time of day, into ns of `time.perf_counter_ns`."""

    def __init__(self) -> None:
        self._offset_ns = 0
        self.compare_clocks()

    def compare_clocks(self) -> None:
        """Note how far the clocks are apart now: once for what is read next, as they drift."""
        for _ in range(_TRIES):
            before, day = time.perf_counter_ns(), time.time_ns()
            took = time.perf_counter_ns() - before
            self._offset_ns = before + took // 2 - day
            if took < _QUICK_NS:
                return

    def arrival_ns(
        self, ancillary: Sequence[tuple[int, int, bytes]], *, not_before_ns: int, seen_ns: int
    ) -> int:
        """When the bytes that came with *ancillary* arrived; *seen_ns* where no stamp tells.

        Nor is a stamp believed that is earlier than *not_before_ns* or lies in the future: then
        somebody has set the time of day meanwhile.
        """
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(data) == _STAMP.size:
                seconds, ns = _STAMP.unpack(data)
                stamp = seconds * 1_000_000_000 + ns + self._offset_ns
                if not_before_ns <= stamp <= time.perf_counter_ns():
                    return int(stamp)
        return seen_ns
