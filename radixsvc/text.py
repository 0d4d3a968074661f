"""From tokens to text as a client may see it: whole characters, and nothing of a stop string.

    emitted to the client | held back: may yet become a stop string | not sampled yet
    ----------------------^ _emitted ------------- _tail -----------^            (in characters)

A token, its id and its log-probability are let out once all of its text is. Without stop
strings nothing is held back but bytes that are no character yet.
"""

from __future__ import annotations

import codecs
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from radixsvc.completion import TokenLogprob

if TYPE_CHECKING:
    from radixsvc.tokenizer import Tokenizer


class Piece(Struct):
    """What may be shown now. `logprobs` is as long as `tokens`, or empty where not asked for."""

    text: str = ""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []


class _Held(NamedTuple):
    token: int
    logprob: TokenLogprob | None
    end: int  # where the token's text ends, in characters


class TextAssembler:
    """One choice's text. Once `stopped`, its last piece ends where the stop string began."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.stopped = False
        self._tokenizer = tokenizer
        self._rest = b""  # of a character that is not whole yet
        self._at_start = tokenizer.strips_first_space
        self._tail = ""
        self._emitted = 0
        self._held: deque[_Held] = deque()

    def push(self, tokens: list[int], logprobs: list[TokenLogprob], is_last: bool = False) -> Piece:
        """Take sampled tokens in; those that follow a stop string are ignored. With the last,
        what was held back is let out."""
        if not self.stops:
            return Piece(self._decode(tokens, is_last), tokens, logprobs)
        piece = Piece()
        for i, token in enumerate(tokens):
            if self.stopped:
                break
            text = self._decode([token])
            # A token without text of its own is a part of the next character.
            end = self._emitted + len(self._tail) + (len(text) or 1)
            self._held.append(_Held(token, logprobs[i] if logprobs else None, end))
            self._add(text, piece)
        if is_last and not self.stopped:
            self._add(self._decode([], True), piece)
        if is_last and not self.stopped:
            self._emit(len(self._tail) + 1, piece)  # and the tokens of a character never finished
        return piece

    def _decode(self, tokens: list[int], is_last: bool = False) -> str:
        """The characters that are complete with these tokens; U+FFFD for one that never will be."""
        data = self._tokenizer.shown_bytes(tokens)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        data = self._rest + data
        text, used = codecs.utf_8_decode(data, "replace", is_last)
        self._rest = data[used:]
        return text

    def _add(self, text: str, piece: Piece) -> None:
        self._tail += text
        found = [at for stop in self.stops if (at := self._tail.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._emit(min(found), piece)
        else:
            self._emit(len(self._tail) - self._num_suspect(), piece)

    def _num_suspect(self) -> int:
        """Characters at the end that a stop string may begin with."""
        tail = self._tail
        longest = max(map(len, self.stops)) - 1
        for n in range(min(longest, len(tail)), 0, -1):
            if any(stop.startswith(tail[-n:]) for stop in self.stops):
                return n
        return 0

    def _emit(self, num_chars: int, piece: Piece) -> None:
        piece.text += self._tail[:num_chars]
        self._tail = self._tail[num_chars:]
        self._emitted += num_chars
        while self._held and self._held[0].end <= self._emitted:
            held = self._held.popleft()
            piece.tokens.append(held.token)
            if held.logprob is not None:
                piece.logprobs.append(held.logprob)
