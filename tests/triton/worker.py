"""A real vLLM engine behind pipes, for the Triton backend of the tests.

    python worker.py MODEL_JSON    orders in, a JSON line each; "ready", then answers out

Engine arguments are model.json's, as vLLM's own dataclass takes them: one that it does not know
fails as it does in the public backend.
"""

import json
import os
import queue
import sys
import threading


def main() -> None:
    """Serve until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to the log
    try:
        engine = start(sys.argv[1])
    except Exception as error:
        out.write(f"{type(error).__name__}: {str(error).splitlines()[0]}\n")
        out.flush()
        raise
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    out.write("ready\n")
    out.flush()
    orders: queue.Queue = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        orders.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        busy = engine.has_unfinished_requests()
        while not busy or not orders.empty():
            order = orders.get()
            if order is None:
                return
            kind = RequestOutputKind.DELTA if order["stream"] else RequestOutputKind.FINAL_ONLY
            try:
                sampling = SamplingParams(**order["sampling"], output_kind=kind)
                engine.add_request(order["id"], order["prompt"], sampling)
                busy = True
            except (TypeError, ValueError) as error:
                failed = {"id": order["id"], "error": str(error), "finish_reason": "error"}
                out.write(json.dumps(failed) + "\n")
                out.flush()
        for answer in engine.step():
            (said,) = answer.outputs
            line = {
                "id": answer.request_id,
                "text": said.text,
                "num_output_tokens": len(said.token_ids),
                "num_input_tokens": len(answer.prompt_token_ids or ()),
                "finish_reason": said.finish_reason,
            }
            out.write(json.dumps(line) + "\n")
            out.flush()


def start(path: str):
    """The engine that the model.json at *path* describes."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    with open(path, encoding="utf-8") as file:
        return LLMEngine.from_engine_args(EngineArgs(**json.load(file)))


if __name__ == "__main__":
    main()
