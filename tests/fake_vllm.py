"""A stand-in for `vllm serve` that misbehaves on demand; its wire format was recorded from 0.32.

Started by path in place of vLLM's command line. FAKE_MODE says what goes wrong:
ok · exits · hangs · metrics-500 · no-metrics · cut · empty · error · stalls · dies · refuses
"""

import asyncio
import json
import os
import sys
from pathlib import Path

MODE = os.environ.get("FAKE_MODE", "ok")
DATA = Path(__file__).with_name("data")
STREAM = (DATA / "vllm_0.32_chat_eagle_k3.sse").read_bytes()
COMPLETION = (DATA / "vllm_0.32_completion_eagle_k3.sse").read_bytes()
EVENTS = [event + b"\n\n" for event in STREAM.strip().split(b"\n\n")]
SPECULATIVE = "--speculative-config" in sys.argv


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

    def page(self) -> str:
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


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection: requests one after the other."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            method, path, _ = head.decode().split(" ", 2)
            length = next(
                (
                    int(h.split(b":")[1])
                    for h in head.lower().split(b"\r\n")
                    if b"content-length" in h
                ),
                0,
            )
            body = await reader.readexactly(length)
            if method == "POST":
                if not await stream(writer, json.loads(body)):
                    return
            else:
                await answer(writer, path)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def answer(writer: asyncio.StreamWriter, path: str) -> None:
    """The pages that are no stream."""
    status, kind, body = "200 OK", "application/json", b"{}"
    if path == "/metrics":
        kind, body = "text/plain", COUNTERS.page().encode()
        if MODE == "metrics-500":
            status, body = "500 Internal Server Error", b"oops"
        if MODE == "no-metrics":
            body = b"# HELP python_gc_objects x\n"
    elif path == "/v1/models":
        body = json.dumps({"data": [{"id": flag("--served-model-name")}]}).encode()
    elif path == "/version":
        body = b'{"version": "0.32.0"}'
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def stream(writer: asyncio.StreamWriter, body: dict[str, object]) -> bool:
    """The recorded stream, or what MODE makes of it; whether the connection goes on."""
    if MODE == "refuses":
        text = b'{"error":{"message":"This model\'s maximum context length is 2048.","code":400}}'
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
        await writer.drain()
        return True
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
    writer.write(b"transfer-encoding: chunked\r\n\r\n")
    events = EVENTS if "messages" in body else [COMPLETION]
    if MODE == "empty":
        events = [EVENTS[0], b"data: [DONE]\n\n"]
    if MODE == "error":
        events = [*EVENTS[:3], b'data: {"error":{"message":"EngineCore died","code":500}}\n\n']
    for number, event in enumerate(events):
        if number == 5 and MODE == "cut":
            await writer.drain()
            return False
        if number == 5 and MODE == "dies":
            print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(7)
        if number == 5 and MODE == "stalls":
            await writer.drain()
            await asyncio.sleep(3600)
        event = event if SPECULATIVE else vanilla(event)
        writer.write(b"%x\r\n" % len(event) + event + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0.002)
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    COUNTERS.requests += 1
    return True


async def main() -> None:
    """Serve until killed."""
    if MODE == "exits":
        print("NotImplementedError: this method is not supported on this device", flush=True)
        sys.exit(1)
    if MODE == "hangs":
        await asyncio.sleep(3600)
    server = await asyncio.start_server(handle, "127.0.0.1", int(flag("--port")))
    print("recorded from vLLM 0.32", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
