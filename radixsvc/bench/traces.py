"""Traces of requests: reading one, and replaying it with its shared blocks."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from radixsvc.bench.calls import Call, Send, Session, text, user
from radixsvc.request import Tokens

BLOCK_TOKENS = 512  # what one hash id stands for


@dataclass(frozen=True)
class TraceLine:
    """One request of a trace: seconds from its start, tokens in and out, ids of its blocks.

    The prompt's blocks are of 512 tokens, the last may be shorter. Equal ids stand for equal
    prefixes up to and including that block.
    """

    time: float
    input_len: int
    output_len: int
    blocks: Tokens


def read_trace(path: Path, limit: int | None = None) -> list[TraceLine]:
    """A trace in the form published with Mooncake (FAST '25), one JSON object a line.

    Raises ValueError with the line's number where it is of another form.
    """
    lines = []
    with path.open() as file:
        for number, line in enumerate(itertools.islice(file, limit), 1):
            try:
                entry = json.loads(line)
                blocks = np.array(entry["hash_ids"], np.int32)
                input_len, output_len = int(entry["input_length"]), int(entry["output_length"])
                time = float(entry["timestamp"]) / 1000
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise ValueError(f"{path}, line {number}: not a trace's line ({error!r})") from None
            if input_len < 1 or len(blocks) != -(-input_len // BLOCK_TOKENS):
                raise ValueError(
                    f"{path}, line {number}: {len(blocks)} blocks of {BLOCK_TOKENS} tokens can't "
                    f"hold a prompt of {input_len}"
                )
            lines.append(TraceLine(time, input_len, output_len, blocks))
    return lines


def replay(args: argparse.Namespace) -> list[Session]:
    """A trace's requests at their own times; text or token ids drawn from the blocks' ids.

    `scale` shrinks every block and output, so that a small machine can follow.
    """
    sessions = []
    for i, line in enumerate(read_trace(Path(args.trace[0]), args.limit)):
        out = max(1, round(min(line.output_len, args.out or line.output_len) * args.scale))
        call = partial(Call, f"replay {i}", 0, out)
        if args.prompt_as == "tokens":
            call = partial(call, tokens=block_tokens(line, args.scale, args.vocab))
        else:
            call = partial(call, messages=[user(block_text(line, args.scale))])
        sessions.append(Session(partial(_send_one, call), line.time / args.speed))
    return sessions


async def _send_one(call: Callable[[], Call], send: Send) -> None:
    await send(call())


def block_sizes(line: TraceLine, scale: float) -> list[int]:
    """Tokens of each block; all but the last are whole, and never less than one."""
    whole = max(1, round(BLOCK_TOKENS * scale))
    last = line.input_len - BLOCK_TOKENS * (len(line.blocks) - 1)
    return [whole] * (len(line.blocks) - 1) + [max(1, round(last * scale))]


def block_text(line: TraceLine, scale: float) -> str:
    """A word for a token: the words are common, so most are one token to most tokenizers."""
    parts = zip(line.blocks, block_sizes(line, scale), strict=True)
    return " ".join(text(random.Random(f"block {block}"), size) for block, size in parts)


def block_tokens(line: TraceLine, scale: float, vocab_size: int) -> Tokens:
    """Token ids in the vocabulary's upper half, clear of special tokens."""
    parts = [
        np.random.default_rng(int(block)).integers(vocab_size // 2, vocab_size, size)
        for block, size in zip(line.blocks, block_sizes(line, scale), strict=True)
    ]
    return np.concatenate(parts).astype(np.int32)
