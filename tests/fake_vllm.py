"""A stand-in for `vllm serve` that misbehaves on demand; its wire format was recorded from 0.32.

Started by path in place of vLLM's command line. FAKE_MODE says what goes wrong:
ok · exits · hangs · metrics-500 · no-metrics · cut · empty · error · stalls · dies · refuses ·
wrong-model · core-dead (every request is answered 500) · core-silent (none is answered) · eats
With FAKE_ONLY=draft an engine without speculation is a good one. FAKE_SAYS is printed before an exit.
FAKE_CGROUP is a control group to enter first. From FAKE_AFTER requests on it goes wrong (default 0).
FAKE_GAP_S lies between two events.
FAKE_STUBBORN ignores TERM and has a grandchild in a session of its own; FAKE_WITNESS names a file
that gets a line for each answer that was sent to its end.
"""

import json
import os
import signal
import socket
import sys
import threading
import time

# Some hundred of these are started in the fast tests: asyncio, subprocess and pathlib are left out,
# whose imports take as long as all the rest.


def recorded(name: str) -> bytes:
    """A recorded answer."""
    with open(os.path.join(os.path.dirname(__file__), "data", name), "rb") as file:
        return file.read()


STREAM = recorded("vllm_0.32_chat_eagle_k3.sse")
COMPLETION = recorded("vllm_0.32_completion_eagle_k3.sse")
EVENTS = [event + b"\n\n" for event in STREAM.strip().split(b"\n\n")]
SPECULATIVE = "--speculative-config" in sys.argv
SPARED = os.environ.get("FAKE_ONLY") == "draft" and not SPECULATIVE
MODE = "ok" if SPARED else os.environ.get("FAKE_MODE", "ok")
GAP_S = float(os.environ.get("FAKE_GAP_S", "0.002"))
AFTER = int(os.environ.get("FAKE_AFTER", "0"))
# vllm/v1/engine/exceptions.py of 0.32, as entrypoints/serve/exception_handling answers it
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
DEAD_ANSWER = {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}


def vanilla(event: bytes) -> bytes:
    """The recorded *event* as an engine without speculation sends it."""
    if b'"speculative_decoding"' not in event:
        return event
    chunk = json.loads(event.removeprefix(b"data: "))
    del chunk["metrics"]["speculative_decoding"]
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def flag(name: str) -> str:
    """The value behind --name on our command line."""
    return sys.argv[sys.argv.index(name) + 1]


class Counters:
    """The few counters that a run reads, moved as the recorded request moved them."""

    requests = 0
    asked = 0
    lock = threading.Lock()

    def page(self) -> str:
        with self.lock:
            n = self.requests
        per_pos = [5, 1, 0]
        lines = [f"vllm:generation_tokens_total {24 * n}", f"vllm:prompt_tokens_total {38 * n}"]
        lines += [f'vllm:request_success_total{{finished_reason="length"}} {n}']
        if not SPECULATIVE:
            return "\n".join(lines) + "\n"
        lines += [f"vllm:spec_decode_num_drafts_total {17 * n}"]
        lines += [f"vllm:spec_decode_num_draft_tokens_total {51 * n}"]
        lines += [f"vllm:spec_decode_num_accepted_tokens_total {6 * n}"]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{position="{i}"}} {c * n}' for i, c in enumerate(per_pos)]
        return "\n".join(lines) + "\n"


COUNTERS = Counters()


class Cut(Exception):
    """The connection ends here."""


def serve(connection: socket.socket) -> None:
    """One connection: requests one after the other."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        with connection, connection.makefile("rb") as asked:
            while first := asked.readline():
                method, path, _ = first.decode().split(" ", 2)
                length = 0
                while (line := asked.readline()).strip():
                    name, _, value = line.lower().partition(b":")
                    length = int(value) if name == b"content-length" else length
                body = asked.read(length)
                if method == "POST":
                    stream(connection, json.loads(body))
                else:
                    answer(connection, path)
    except (Cut, OSError):
        pass


def answer(connection: socket.socket, path: str) -> None:
    """The pages that are no stream."""
    status, kind, body = "200 OK", "application/json", b"{}"
    if path == "/metrics":
        kind, body = "text/plain", COUNTERS.page().encode()
        if MODE == "metrics-500":
            status, body = "500 Internal Server Error", b"oops"
        if MODE == "no-metrics":
            body = b"# HELP python_gc_objects x\n"
    elif path == "/v1/models":
        name = "another/model" if MODE == "wrong-model" else flag("--served-model-name")
        body = json.dumps({"data": [{"id": name}]}).encode()
    elif path == "/health" and MODE in ("core-dead", "core-silent") and COUNTERS.asked > AFTER:
        status, body = "503 Service Unavailable", b""
    elif path == "/version":
        body = b'{"version": "0.32.0"}'
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def no_stream(connection: socket.socket, mode: str) -> bool:
    """What becomes of a request without a stream; whether that was all."""
    if mode == "core-dead":
        print(os.environ.get("FAKE_SAYS", ""), flush=True)
        print(f"vllm.v1.engine.exceptions.EngineDeadError: {DEAD}", flush=True)
        status, text = b"500 Internal Server Error", json.dumps({"error": DEAD_ANSWER}).encode()
    elif mode == "refuses":
        status = b"400 Bad Request"
        text = b'{"error":{"message":"This model\'s maximum context length is 2048.","code":400}}'
    else:
        if mode == "core-silent":
            time.sleep(3600)
        eaten: list[bytes] = []
        while mode == "eats":
            eaten.append(b"x" * (1 << 20))
        return False
    connection.sendall(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n" % (status, len(text)) + text)
    return True


def stream(connection: socket.socket, body: dict[str, object]) -> None:
    """The recorded stream, or what MODE makes of it."""
    with COUNTERS.lock:
        COUNTERS.asked += 1
        mode = MODE if COUNTERS.asked > AFTER else "ok"
    if no_stream(connection, mode):
        return
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
    events = EVENTS if "messages" in body else [COMPLETION]
    if mode == "empty":
        events = [EVENTS[0], b"data: [DONE]\n\n"]
    if mode == "error":
        events = [*EVENTS[:3], b'data: {"error":{"message":"EngineCore died","code":500}}\n\n']
    for number, event in enumerate(events):
        if number == 5 and mode == "cut":
            raise Cut
        if number == 5 and mode == "dies":
            words = "RuntimeError: CUDA error: an illegal memory access was encountered"
            print(os.environ.get("FAKE_SAYS", words), flush=True)
            os._exit(7)
        if number == 5 and mode == "stalls":
            time.sleep(3600)
        event = event if SPECULATIVE else vanilla(event)
        connection.sendall(b"%x\r\n" % len(event) + event + b"\r\n")
        time.sleep(GAP_S)
    with COUNTERS.lock:  # whoever reads the counters after the last byte sees them moved
        connection.sendall(b"0\r\n\r\n")
        COUNTERS.requests += 1
        note(body)


def note(body: dict[str, object]) -> None:
    """Say in the file that FAKE_WITNESS names, if any, that *body* was answered to the end."""
    if witness := os.environ.get("FAKE_WITNESS"):
        said = {"served": flag("--served-model-name"), "end_ns": time.perf_counter_ns(), **body}
        with open(witness, "ab", buffering=0) as file:
            file.write(json.dumps(said).encode() + b"\n")


def be_stubborn() -> None:
    """Take no notice of TERM, and have a child in a session of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    os.posix_spawn(sys.executable, sleep, os.environ, setsid=True)


def main() -> None:
    """Serve until killed."""
    if os.environ.get("FAKE_STUBBORN"):
        be_stubborn()
    if MODE == "exits":
        said = "NotImplementedError: this method is not supported on this device"
        print(os.environ.get("FAKE_SAYS", said), flush=True)
        sys.exit(1)
    if MODE == "hangs":
        time.sleep(3600)
    listener = socket.create_server(("127.0.0.1", int(flag("--port"))), backlog=512)
    print("recorded from vLLM 0.32", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    if (group := os.environ.get("FAKE_CGROUP")) and not SPARED:
        with open(f"{group}/cgroup.procs", "w", encoding="ascii") as procs:
            procs.write(str(os.getpid()))
    main()
