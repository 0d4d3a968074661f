"""Traces of requests: reading one, and replaying it with its shared blocks."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from radixsvc.bench.calls import Call, Send, Session, text, user
from radixsvc.completion import Tokens
from radixsvc.errors import SetupError

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

    SetupError where there is none, or with the number of a line of another form.
    """
    try:
        with path.open() as file:
            written = list(itertools.islice(file, limit))
    except OSError as error:
        raise SetupError(f"--trace: {error}", 2) from None
    lines = []
    for number, line in enumerate(written, 1):
        try:
            entry = json.loads(line)
            blocks = np.array(entry["hash_ids"], np.int32)
            input_len, output_len = int(entry["input_length"]), int(entry["output_length"])
            time = float(entry["timestamp"]) / 1000
            if input_len < 1 or len(blocks) != -(-input_len // BLOCK_TOKENS):
                raise ValueError(f"{len(blocks)} blocks can't hold a prompt of {input_len}")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise SetupError(f"{path}, line {number}: not a trace's line ({error!r})", 2) from None
        lines.append(TraceLine(time, input_len, output_len, blocks))
    return lines


def replay(args: argparse.Namespace) -> list[Session]:
    """A trace's requests at their own times, their texts drawn from the blocks' ids.

    `scale` shrinks every block and output, so that a small machine can follow.
    """
    lines = enumerate(read_trace(Path(args.trace[0]), args.limit))
    return [Session(partial(_send, args, i, line), line.time / args.speed) for i, line in lines]


async def _send(args: argparse.Namespace, index: int, line: TraceLine, send: Send) -> None:
    out = max(1, round(min(line.output_len, args.out or line.output_len) * args.scale))
    prompt = user(block_text(line, args.scale))
    await send(Call(f"replay {index}", 0, out, [prompt]))


def block_text(line: TraceLine, scale: float) -> str:
    """A word for a token: the words are common, so most are one token to most tokenizers.

    All blocks but the last are whole, and none is empty.
    """
    last = line.input_len - BLOCK_TOKENS * (len(line.blocks) - 1)
    sizes = [BLOCK_TOKENS] * (len(line.blocks) - 1) + [last]
    return " ".join(
        text(random.Random(f"block {block}"), max(1, round(size * scale)))
        for block, size in zip(line.blocks, sizes, strict=True)
    )
