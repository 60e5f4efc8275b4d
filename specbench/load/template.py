"""The target's chat template, applied on our side where a server applies none."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from specbench.errors import LoadError


class ChatTemplate:
    """Renders messages by the tokenizer of *model*, a folder or a hub id.

    The server tokenizes the text again and puts a BOS in front of it. Where the template has written
    one already, that one is left out: two of them cost acceptance (vLLM PR 25916).
    """

    def __init__(self, model: str) -> None:
        self._model = model

    @cached_property
    def _tokenizer(self) -> Any:  # noqa: ANN401  (transformers', imported here only)
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise LoadError(
                "A Triton server applies no chat template, and there is no `transformers` here to do it.",
                hint="pip install transformers, or use prompts with `style: completion`.",
            ) from None
        try:
            return AutoTokenizer.from_pretrained(self._model)
        except (OSError, ValueError) as error:
            raise LoadError(
                f"The tokenizer of {self._model} cannot be loaded: {str(error).splitlines()[0]}"
            ) from None

    def __call__(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text to send.

        Raises:
            LoadError: the tokenizer is not there, or has no template for these messages.
        """
        tokenizer = self._tokenizer
        try:
            text: str = tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # noqa: BLE001  (templates raise jinja2's errors, and their own)
            raise LoadError(f"The chat template of {self._model} fails: {error}") from None
        bos = tokenizer.bos_token
        if bos and text.startswith(bos) and self._doubles(text, tokenizer.bos_token_id):
            return text.removeprefix(bos)
        return text

    def _doubles(self, text: str, bos_id: int) -> bool:
        return list(self._tokenizer(text)["input_ids"][:2]) == [bos_id, bos_id]
