"""Why a prompt misses: where it leaves the nearest cached branch, and what that costs.

    prompt   = [ common ][ volatile ][ the same again ... ]
    branch   = [ common ][ its own  ][ the same again ... ]
                         ^ position   ^ re-aligned by runs of RUN equal tokens

The engine thread only collects (`look`); comparing and wording happen elsewhere (`explain`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radixsvc.completion import Sources, Tokens
from radixsvc.match import Match, num_known
from radixsvc.node import PAGES, TOKEN_BYTES, Node
from radixsvc.protocol import Divergence, Evicted, Explanation, Realigned
from radixsvc.tree import RadixTree

if TYPE_CHECKING:
    from radixsvc.tokenizer import Tokenizer

RUN = 8  # equal tokens in a row that count as the same text again
MAX_BRANCH = 65_536  # tokens of the branch that are looked at
SHOWN = 24  # tokens of text shown on each side


class Look(NamedTuple):
    """What the tree knows of a prompt: `length` of its tokens, evicted ones included, and how the
    nearest branch goes on from there."""

    length: int
    branch: Tokens
    evicted: list[Evicted]


def look(tree: RadixTree, namespace: str, tokens: Tokens) -> Look:
    """Engine thread: collect what `explain` needs. Bounded by the prompt and `MAX_BRANCH`."""
    found = tree.match(namespace, tokens.tobytes(), ghosts=True)
    now = time.monotonic()
    evicted = []
    end = found.length
    node: Node | None = found.node
    used = found.used
    while node is not None and node.parent is not None:
        start = end - used // TOKEN_BYTES
        went = tree.ghosts.last(node)
        if went is not None and not num_known(node, tree.page_bytes):
            evicted.append(Evicted(start, end, PAGES[went[1]], round(now - went[0], 1)))
        end, node = start, node.parent
        used = len(node.tokens)
    return Look(found.length + found.partial, _branch(tree, found), evicted[::-1])


def _branch(tree: RadixTree, found: Match) -> Tokens:
    """The nearest branch from where it differs: the best partial match, then the latest used."""
    skip = found.partial * TOKEN_BYTES
    node = found.node
    runs = []
    rest = node.tokens[found.used :]
    if not rest and found.end is not node:
        node = found.end
        rest = node.tokens
    size = 0
    while True:
        runs.append(rest)
        size += len(rest)
        if node.children is None or size > MAX_BRANCH * TOKEN_BYTES:
            break
        node = max(node.children, key=lambda child: child.last_use)
        rest = node.tokens
    return np.frombuffer(b"".join(runs)[skip:][: MAX_BRANCH * TOKEN_BYTES], np.int32)


def explain(tokens: Tokens, cached: Sources, seen: Look, tokenizer: Tokenizer) -> Explanation:
    """Words and data for what was collected."""
    num_cached = cached.device + cached.host + cached.disk
    divergence = realigned = None
    rest = tokens[seen.length :]
    if len(rest) and len(seen.branch):
        divergence = _divergence(tokens, seen, tokenizer)
        realigned = realign(rest, seen.branch, tokenizer)
    return Explanation(
        prompt_tokens=len(tokens),
        cached_tokens=num_cached,
        radixsvc=cached,
        summary=_summary(len(tokens), num_cached, seen, divergence, realigned),
        divergence=divergence,
        evicted=seen.evicted,
        realigned=realigned,
    )


def _divergence(tokens: Tokens, seen: Look, tokenizer: Tokenizer) -> Divergence:
    at = seen.length
    ours = tokenizer.decode(tokens[at : at + SHOWN])
    theirs = tokenizer.decode(seen.branch[:SHOWN])
    firsts = (tokenizer.decode(tokens[at : at + 1]), tokenizer.decode(seen.branch[:1]))
    longest = max(firsts, key=len)  # one side's first token, read through on both sides
    same = ours.startswith(longest) and theirs.startswith(longest)
    return Divergence(
        position=at,
        text_before=tokenizer.decode(tokens[max(0, at - SHOWN) : at]),
        prompt_text=ours,
        cached_text=theirs,
        same_text=same,
    )


def realign(rest: Tokens, branch: Tokens, tokenizer: Tokenizer) -> Realigned | None:
    """Find runs of the branch again in what is left of the prompt; None where there are none.

    One pass over each: a dict of the branch's runs of RUN tokens, then the prompt from left to
    right, always onwards in the branch.
    """
    size = RUN * TOKEN_BYTES
    packed, ours = branch.tobytes(), rest[:MAX_BRANCH].tobytes()
    places: dict[bytes, int] = {}
    for at in range(len(packed) - size, -1, -TOKEN_BYTES):
        places[packed[at : at + size]] = at
    here = there = reused = 0
    first_volatile = -1
    volatile = 0
    while here + size <= len(ours):
        at = places.get(ours[here : here + size], -1)
        if at < there:
            here += TOKEN_BYTES
            volatile += 1
            continue
        if first_volatile < 0:
            first_volatile = here // TOKEN_BYTES
        start = here
        while here < len(ours) and ours[here : here + TOKEN_BYTES] == packed[at : at + TOKEN_BYTES]:
            here += TOKEN_BYTES
            at += TOKEN_BYTES
        there = at
        reused += (here - start) // TOKEN_BYTES
    if first_volatile < 0:
        return None
    return Realigned(volatile, tokenizer.decode(rest[: min(first_volatile, SHOWN)]), reused)


def _summary(
    num_tokens: int,
    num_cached: int,
    seen: Look,
    divergence: Divergence | None,
    realigned: Realigned | None,
) -> str:
    words = [f"{num_cached} of {num_tokens} prompt tokens are cached."]
    for gone in seen.evicted:
        words.append(
            f"Tokens {gone.start} to {gone.end} were evicted from {gone.tier} memory "
            f"{gone.seconds_ago:.0f} s ago; a larger tier would have kept them."
        )
    if divergence is None:
        if num_cached < num_tokens - 1 and not seen.evicted:
            words.append("Nothing that was cached goes on from there.")
    elif divergence.same_text:
        words.append(
            f"At token {divergence.position} the text is the same as a cached prompt's but is cut "
            "into other tokens: send back the token ids, or the text exactly as it came."
        )
    else:
        words.append(f"It leaves the nearest cached prompt at token {divergence.position}.")
    if realigned is not None:
        words.append(
            f"{realigned.reusable_tokens} of the tokens behind are the cached prompt's again: with "
            f"the {realigned.volatile_tokens} that vary moved to the end they would be reused."
        )
    return " ".join(words)
