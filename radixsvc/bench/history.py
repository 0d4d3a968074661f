"""A history: the requests of a trace or a workload in order, for caches to be tried on.

Its token ids are prefix ids: two requests have the same id in a place just where they are equal
up to that place. Caches of prefixes can't tell them from real tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from radixsvc.bench.calls import Call, Reply, Session, rendered, take_turns, text
from radixsvc.bench.traces import BLOCK_TOKENS, read_trace
from radixsvc.completion import Tokens
from radixsvc.errors import SetupError


@dataclass(frozen=True, eq=False)
class Prompt:
    """One request. `blocks` are the prefix ids of prompt and output, `block_size` tokens each;
    the last block may be short. `session` names the conversation, `turn` counts within it.
    """

    session: int
    turn: int
    blocks: Tokens
    block_size: int
    prompt_len: int
    total_len: int  # with the output

    def tokens(self) -> Tokens:
        """Prefix ids of prompt and output, int32 [total_len]."""
        if self.block_size == 1:
            return self.blocks
        within = np.arange(self.block_size, dtype=np.int32)
        ids: Tokens = np.add.outer(self.blocks * np.int32(self.block_size), within)
        return ids.ravel()[: self.total_len]

    def pages(self, page_size: int) -> Tokens:
        """Prefix ids of the whole pages: that of a page's last token stands for all before."""
        return self.tokens()[page_size - 1 :: page_size]

    def block_lens(self) -> Tokens:
        """Tokens in each block."""
        lens: Tokens = np.full(len(self.blocks), self.block_size, np.int32)
        lens[-1] = self.total_len - self.block_size * (len(lens) - 1)
        return lens


def common_len(a: Prompt, b: Prompt) -> int:
    """Leading tokens that two requests of a history share."""
    n = min(len(a.blocks), len(b.blocks))
    different = np.flatnonzero(a.blocks[:n] != b.blocks[:n])
    equal = int(different[0]) if len(different) else n
    return min(equal * a.block_size, a.total_len, b.total_len)


def trace_history(path: Path, limit: int | None = None) -> list[Prompt]:
    """A trace's prompts. What was generated is not in a trace, so it takes no room here.

    A trace names no conversations: a request continues the one whose last prompt's whole blocks
    it begins with, the longest such. SetupError for what is not a trace.
    """
    history = []
    last_block: dict[int, int] = {}  # of a session's last prompt -> that session
    turns: Counter[int] = Counter()
    for line in read_trace(path, limit):
        if int(line.blocks.max()) >= 2**31 // BLOCK_TOKENS or line.blocks.min() < 0:
            most = 2**31 // BLOCK_TOKENS - 1
            raise SetupError(f"{path}: block ids must lie in 0 to {most}", 2)
        whole = line.blocks[: line.input_len // BLOCK_TOKENS].tolist()
        continued = next((b for b in reversed(whole) if b in last_block), None)
        session = len(turns) if continued is None else last_block.pop(continued)
        if whole:
            last_block[whole[-1]] = session
        turn = turns[session]
        turns[session] += 1
        length = line.input_len
        history.append(Prompt(session, turn, line.blocks, BLOCK_TOKENS, length, length))
    return history


def workload_history(
    sessions: Sequence[Session], concurrency: int, rotate: bool = False
) -> list[Prompt]:
    """What a server would see of a workload run in a closed loop, a token a word.

    Every reply is `max_tokens` words long; it is in the history, as the output of its request.
    """
    return asyncio.run(_record(sessions, concurrency, rotate))


async def _record(sessions: Sequence[Session], concurrency: int, rotate: bool) -> list[Prompt]:
    history: list[Prompt] = []
    ids: dict[tuple[int, str], int] = {}

    def prefix_ids(words: Sequence[str], parent: int = -1) -> list[int]:
        chain = []
        for word in words:
            parent = ids.setdefault((parent, word), len(ids))
            chain.append(parent)
        return chain

    async def send(session: int, call: Call) -> list[Reply]:
        prompt = prefix_ids([*rendered(call).split(), "<assistant>"])
        replies = []
        for i in range(call.n):
            reply = Reply(text(random.Random(f"{call.key} reply {i}"), call.max_tokens))
            chain = prompt + prefix_ids(reply.text.split(), prompt[-1])
            blocks = np.array(chain, np.int32)
            history.append(Prompt(session, call.turn, blocks, 1, len(prompt), len(chain)))
            replies.append(reply)
        await asyncio.sleep(0)  # the others' turn
        return replies

    async with asyncio.TaskGroup() as group:
        for index, run in enumerate(take_turns(sessions, concurrency, rotate)):
            group.create_task(run(partial(send, index)))
    return history
