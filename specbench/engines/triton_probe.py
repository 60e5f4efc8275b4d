"""Does a tritonserver run Python backends here? Asked of a real one, with the smallest of models.

Two things keep Triton's Python stub from working and say nothing useful: a libpython that it does not
find (the server then hangs with no port open), and numpy 2, with which the first text tensor fails
while the model's state says READY. So a model that echoes a text is loaded and asked.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from specbench.engines.triton import TritonServer
from specbench.errors import EngineError

NAME, TEXT = "specbench_probe", "é"  # not ASCII: the stub's locale is a third trap
PATIENCE_S = 30.0
CONFIG = """backend: "python"
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "SAID" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
MODEL = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode("utf-8")
            said = np.array([text.encode("utf-8")], dtype=np.object_)
            tensor = pb_utils.Tensor("SAID", said)
            answers.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return answers
"""
NUMPY = "the stub's Python needs numpy 1: pip install 'numpy<2' there"
ADVICE = {
    "numpy": NUMPY,
    "deserialize_bytes_tensor": NUMPY,  # all that the log says when the stub dies of numpy 2
    "libpython": "the stub finds no libpython: set LD_LIBRARY_PATH to the folder that has it",
    "ascii": "the stub runs in the C locale: set LC_ALL=C.UTF-8 for tritonserver",
    "did not answer": "the stub may find no libpython (ldd triton_python_backend_stub shows it)",
}


def probe(command: Sequence[str], *, waiting: Callable[[str], None] = lambda _: None) -> str:
    """Start the server, load the model, ask it; the server's version.

    Raises:
        EngineError: it does not work, with what to do where the log gives it away.
    """
    with tempfile.TemporaryDirectory(prefix="specbench-triton-") as work:
        folder = Path(work, "repository", NAME, "1")
        folder.mkdir(parents=True)
        (folder.parent / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
        (folder / "model.py").write_text(MODEL, encoding="utf-8")
        server = TritonServer(
            command=command,
            repository=folder.parents[1],
            folder=Path(work),
            timeout_s=PATIENCE_S,
            exit_timeout_s=2,
            waiting=waiting,
        )
        try:
            with server:
                said = server.echo(NAME, "TEXT", "SAID", TEXT)
        except EngineError as error:
            raise _explained(error) from None
    if said != TEXT:
        raise EngineError(f"Triton's Python stub made {said!r} of {TEXT!r}.", hint=ADVICE["ascii"])
    return server.version or "?"


def _explained(error: EngineError) -> EngineError:
    """The same with its remedy, as far as the message and the log tell one from the other."""
    told = f"{error.message}\n{error.tail}".lower()
    advice = next((advice for sign, advice in ADVICE.items() if sign in told), None)
    last = error.tail.strip().splitlines()[-1:] or [""]
    return EngineError(f"{error.message} {last[0]}".strip(), hint=advice)
