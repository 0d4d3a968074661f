"""From tokens to text as a client may see it: whole characters, and nothing of a stop string.

    emitted to the client | held back: may yet become a stop string | not sampled yet
    ----------------------^ _emitted                                ^ _end       (in characters)

A token, its id and its log-probability are let out once all of its text is. Without stop
strings nothing is held back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from radixsvc.request import TokenLogprob

if TYPE_CHECKING:
    from radixsvc.tokenizer import IncrementalDetokenizer


@dataclass
class Piece:
    """What may be shown now. `logprobs` is as long as `tokens`, or empty where not asked for."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class _Held(NamedTuple):
    token: int
    logprob: TokenLogprob | None
    end: int  # where the token's text ends, in characters


class TextAssembler:
    """One choice's text. Once `stopped`, its last piece ends where the stop string began."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.stopped = False
        self._detokenizer = detokenizer
        self._tail = ""
        self._emitted = 0
        self._end = 0
        self._held: deque[_Held] = deque()

    def push(self, tokens: list[int], logprobs: list[TokenLogprob]) -> Piece:
        """Take sampled tokens in; tokens that follow a stop string are ignored."""
        if not self.stops:
            return Piece(self._detokenizer.push(tokens), tokens, logprobs)
        piece = Piece()
        for i, token in enumerate(tokens):
            if self.stopped:
                break
            text = self._detokenizer.push([token])
            self._end += len(text)
            # A token without text of its own is a part of the next character.
            end = self._end if text else self._end + 1
            self._held.append(_Held(token, logprobs[i] if logprobs else None, end))
            self._add(text, piece)
        return piece

    def flush(self) -> Piece:
        """The end of the stream: let out what was held back."""
        if not self.stops:
            return Piece(self._detokenizer.flush())
        piece = Piece()
        if not self.stopped:
            text = self._detokenizer.flush()
            self._end += len(text)
            self._add(text, piece)
        if not self.stopped:
            self._emit(len(self._tail), piece)
            piece.tokens += [held.token for held in self._held]
            piece.logprobs += [held.logprob for held in self._held if held.logprob]
        return piece

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
        longest = max(map(len, self.stops), default=1) - 1
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
