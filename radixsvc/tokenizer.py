"""Text to token ids and back, and chat templates.

A token's share of the text is a run of bytes, whatever stands around it: byte-level vocabularies
spell every byte as a printable character, sentencepiece ones spell a space as U+2581 and a byte
that is not text as <0xE2>. So text is the UTF-8 decoding of the tokens' bytes in a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers import AutoTokenizer

from radixsvc.completion import Tokens
from radixsvc.errors import InvalidRequest, SetupError


class Tokenizer:
    """The tokenizer in a model's folder. SetupError where there is none that can be used.

    May be used from several threads at once.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._hf: Any = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
            self._backend = self._hf.backend_tokenizer
        except Exception as error:  # each format's reader raises its own
            raise SetupError(f"{path} holds no usable tokenizer: {error}") from error
        layout = json.loads(self._backend.to_str())
        decoder = json.dumps(layout.get("decoder"))
        self._byte_level = '"ByteLevel"' in decoder
        # sentencepiece puts a space before the first word, and takes it off again in decoding
        self.strips_first_space = '"Strip"' in decoder or (
            '"Metaspace"' in decoder and '"never"' not in decoder
        )
        self._added = {i: str(t) for i, t in self._hf.added_tokens_decoder.items()}
        self._special = {i for i, t in self._hf.added_tokens_decoder.items() if t.special}
        self._bytes: dict[int, bytes] = {}  # filled as tokens are met
        template = self._hf.chat_template or ""
        self._template = template if isinstance(template, str) else "".join(template.values())

    @property
    def template_has_tools(self) -> bool:
        """Whether the chat template says anything about tools."""
        return re.search(r"\btools\b", self._template) is not None

    @property
    def tool_style(self) -> str:
        """How the model writes a tool call: `hermes`, JSON in tags, also where we have to tell
        it; `llama`, bare JSON; `unknown`."""
        if "<tool_call>" in self._template or not self.template_has_tools:
            return "hermes"
        return "llama" if "ipython" in self._template else "unknown"

    def encode(self, text: str, add_special: bool = True) -> Tokens:
        """Token ids of `text`, with the model's own first and last tokens if `add_special`."""
        # "fast" leaves out the character offsets, half of the time
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; what is not UTF-8 becomes U+FFFD."""
        ids = ids.tolist() if isinstance(ids, np.ndarray) else ids
        data = b"".join([self.token_bytes(token) for token in ids])
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text; none for an id that no token has."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._spell(token)
        return found

    def shown_bytes(self, tokens: Iterable[int]) -> bytes:
        """The bytes of an answer's tokens, but for those that only steer the model."""
        return b"".join([self.token_bytes(t) for t in tokens if t not in self._special])

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> Tokens:
        """Token ids of a conversation.

        InvalidRequest where the model has no template, or it refuses these messages.
        """
        if not self._template:
            raise InvalidRequest("this model has no chat template: use /v1/completions")
        try:
            text = self._hf.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        return self.encode(text, add_special=False)

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            try:
                return bytes([_BYTE_OF[char] for char in text])
            except KeyError:
                return str(text).encode()
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
        return bytes.fromhex(byte[1]) if byte else str(text).replace("\u2581", " ").encode()


def _byte_spelling() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as it is, the others from U+0100 on, in order.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    spelled_others = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | spelled_others


_BYTE_OF = _byte_spelling()
