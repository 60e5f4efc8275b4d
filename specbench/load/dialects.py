"""How a server wants to be asked, and how its stream reads: an OpenAI-compatible one, or Triton."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specbench.load import sse
from specbench.load.template import ChatTemplate
from specbench.records import Prompt

Message = Mapping[str, str]


class Dialect(Protocol):
    """What the direct client has to know of a server."""

    def path(self, prompt: Prompt) -> str:
        """Where a request for *prompt* goes."""

    def body(
        self, prompt: Prompt, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> dict[str, Any]:
        """A streaming request for the last of *messages*; *sampling* holds max_tokens too."""

    def content(self, body: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """The part of a body that is the prompt."""

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Where in a body sampling stands."""

    def reader(self, body: Mapping[str, Any]) -> sse.Reader:
        """What reads the answer to *body*."""


def dialect_for(model: str, tokenizer: str, triton_inputs: Collection[str] | None) -> "Dialect":
    """Triton's where the model takes *triton_inputs*, with the chat template of *tokenizer*."""
    if triton_inputs is None:
        return OpenAI(model)
    return Triton(model, ChatTemplate(tokenizer), triton_inputs)


@dataclass(frozen=True)
class OpenAI:
    """Chat completions and completions, as vLLM serves them."""

    model: str

    def path(self, prompt: Prompt) -> str:
        """See Dialect."""
        return "/v1/chat/completions" if prompt.style == "chat" else "/v1/completions"

    def body(
        self, prompt: Prompt, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See Dialect."""
        is_chat = prompt.style == "chat"
        return {
            "model": self.model,
            ("messages" if is_chat else "prompt"): messages if is_chat else messages[-1]["content"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **sampling,
        }

    def content(self, body: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Dialect."""
        return body.get("messages") or body.get("prompt")

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """See Dialect."""
        return body

    def reader(self, body: Mapping[str, Any]) -> sse.Reader:
        """See Dialect."""
        return sse.Reader()


# Inputs of the vLLM backend that older versions do not have; asked for where they are.
OPTIONAL_INPUTS = ("return_num_output_tokens", "return_num_input_tokens", "return_finish_reason")


@dataclass(frozen=True)
class Triton:
    """The vLLM backend's /generate_stream. It applies no chat template: *render* does.

    *inputs* are the names that the model takes. `sampling_parameters` is complete, because the
    backend's own default cuts answers at 16 tokens, and the prompt is excluded from the output.
    """

    model: str
    render: Callable[[Sequence[Message]], str]
    inputs: Collection[str]

    def path(self, prompt: Prompt) -> str:
        """See Dialect."""
        return f"/v2/models/{self.model}/generate_stream"

    def body(
        self, prompt: Prompt, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See Dialect."""
        is_chat = prompt.style == "chat"
        said = {name: value for name, value in sampling.items() if value is not None}
        return {
            "text_input": self.render(messages) if is_chat else messages[-1]["content"],
            "stream": True,
            "exclude_input_in_output": True,
            "sampling_parameters": json.dumps(said),
            **{name: True for name in OPTIONAL_INPUTS if name in self.inputs},
        }

    def content(self, body: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Dialect."""
        return body["text_input"]

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """See Dialect."""
        found: Mapping[str, Any] = json.loads(body["sampling_parameters"])
        return found

    def reader(self, body: Mapping[str, Any]) -> sse.Reader:
        """See Dialect. An answer that begins with its own prompt is refused."""
        prompt = str(body["text_input"])

        def take(answer: sse.Answer, arrived_ns: int, event: Any) -> None:  # noqa: ANN401
            is_first = not answer.chunk_ns
            take_triton(answer, arrived_ns, event)
            if is_first and prompt and answer.text and answer.text[0].startswith(prompt):
                raise sse.BadStream(
                    "the answer begins with its prompt: exclude_input_in_output was not heeded"
                )

        return sse.Reader(take=take, ends_with_a_reason="return_finish_reason" in self.inputs)


def take_triton(answer: sse.Answer, arrived_ns: int, event: Any) -> None:  # noqa: ANN401
    """One response of the backend: the text since the last one, and how many tokens that is.

    Raises:
        sse.BadStream: an error (inside a 200), or no response of this backend.
    """
    if not isinstance(event, dict):
        raise sse.BadStream("the stream holds an event that is no JSON object")
    if (error := event.get("error")) is not None:
        raise sse.BadStream(f"the server sent an error inside the stream: {str(error)[:300]}")
    text, tokens = event.get("text_output"), event.get("num_output_tokens")
    if not isinstance(text, str):
        raise sse.BadStream("the stream holds a response without text_output")
    counted = sse.count(tokens) or 0
    if text or counted:
        answer.chunk_ns.append(arrived_ns)
        answer.chunk_tokens.append(counted)
        answer.text.append(text)
    if counted:
        total = sum(answer.chunk_tokens)
        answer.usage = {"completion_tokens": total, "prompt_tokens": event.get("num_input_tokens")}
    reason = event.get("finish_reason")
    if isinstance(reason, str) and reason != "None":
        answer.finish_reason = reason
