"""A Triton Python backend with the interface of Triton's vLLM backend, for tests.

Installed as `backends/vllm/model.py` of a real tritonserver. The vLLM itself runs in a process of its
own (worker.py), because Triton's Python stub wants numpy 1 and vLLM numpy 2. Inputs and outputs are
those of the public backend: text_input, stream, sampling_parameters (JSON), exclude_input_in_output,
return_finish_reason, return_num_input_tokens, return_num_output_tokens; text_output and so on. As there, a
stream's outputs are the text since the last one, and the prompt comes first unless it is excluded.

    SPECBENCH_TEST_VLLM      the Python that has vLLM
"""

import json
import os
import pathlib
import subprocess
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

INPUTS = [
    ("text_input", "TYPE_STRING", False),
    ("stream", "TYPE_BOOL", True),
    ("sampling_parameters", "TYPE_STRING", True),
    ("exclude_input_in_output", "TYPE_BOOL", True),
    ("return_finish_reason", "TYPE_BOOL", True),
    ("return_num_input_tokens", "TYPE_BOOL", True),
    ("return_num_output_tokens", "TYPE_BOOL", True),
]
OUTPUTS = [
    ("text_output", "TYPE_STRING"),
    ("finish_reason", "TYPE_STRING"),
    ("num_input_tokens", "TYPE_UINT32"),
    ("num_output_tokens", "TYPE_UINT32"),
]


class TritonPythonModel:
    """One engine for one model of the repository."""

    @staticmethod
    def auto_complete_config(config):
        """Say what goes in and out; answers come in any number."""
        names = {one["name"] for one in config.as_dict()["input"]}
        for name, kind, optional in INPUTS:
            if name not in names:
                config.add_input(
                    {"name": name, "data_type": kind, "dims": [1], "optional": optional}
                )
        names = {one["name"] for one in config.as_dict()["output"]}
        for name, kind in OUTPUTS:
            if name not in names:
                config.add_output({"name": name, "data_type": kind, "dims": [-1]})
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args):
        """Start the worker; the model is ready when its engine is."""
        here = pathlib.Path(args["model_repository"], args["model_version"])
        worker = pathlib.Path(__file__).with_name("worker.py")
        self._lock, self._waiting = threading.Lock(), {}
        self._worker = subprocess.Popen(
            [os.environ["SPECBENCH_TEST_VLLM"], str(worker), str(here / "model.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first = self._worker.stdout.readline()
        if first.strip() != "ready":
            raise pb_utils.TritonModelException(f"the engine did not start: {first.strip()}")
        threading.Thread(target=self._read, daemon=True).start()

    def execute(self, requests):
        """Hand every request to the engine; answers go out as they come."""
        for number, request in enumerate(requests):
            name = f"{id(request)}-{number}"
            prompt = _text(request, "text_input")
            sampling = json.loads(_text(request, "sampling_parameters") or "{}")
            asked = {key: _flag(request, key) for key, kind, _ in INPUTS if kind == "TYPE_BOOL"}
            echo = "" if asked["exclude_input_in_output"] else prompt
            with self._lock:
                self._waiting[name] = (request.get_response_sender(), asked, echo)
            order = {"id": name, "prompt": prompt, "sampling": sampling, "stream": asked["stream"]}
            self._worker.stdin.write(json.dumps(order) + "\n")
            self._worker.stdin.flush()

    def finalize(self):
        """End the worker: it ends with its input."""
        self._worker.stdin.close()
        self._worker.wait(30)

    def _read(self):
        for line in self._worker.stdout:
            answer = json.loads(line)
            with self._lock:
                sender, asked, echo = self._waiting[answer["id"]]
                self._waiting[answer["id"]] = (sender, asked, "")
            last = answer["finish_reason"] is not None
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
            sender.send(_response(answer, asked, echo), flags=flags)
            if last:
                with self._lock:
                    del self._waiting[answer["id"]]


def _text(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return tensor.as_numpy().reshape(-1)[0].decode("utf-8") if tensor is not None else ""


def _flag(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return bool(tensor.as_numpy().reshape(-1)[0]) if tensor is not None else False


def _response(answer, asked, echo):
    if answer.get("error"):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(answer["error"]))
    text = np.array([(echo + answer["text"]).encode("utf-8")], dtype=np.object_)
    tensors = [pb_utils.Tensor("text_output", text)]
    if asked["return_finish_reason"]:
        reason = np.array([str(answer["finish_reason"]).encode()], dtype=np.object_)
        tensors.append(pb_utils.Tensor("finish_reason", reason))
    for name in ("num_input_tokens", "num_output_tokens"):
        if asked[f"return_{name}"]:
            tensors.append(pb_utils.Tensor(name, np.array([answer[name]], dtype=np.uint32)))
    return pb_utils.InferenceResponse(output_tensors=tensors)
