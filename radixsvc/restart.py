"""What the disk tier stores beside a page, and the tree that a restart finds there again.

A page's blob is its tokens, the namespace before them where it is the first of one. Records are
chained by digest from a root that depends on the weights and the namespace.
"""

from __future__ import annotations

import hashlib

import numpy as np

from radixsvc.namespace import account_name
from radixsvc.node import DISK, Node
from radixsvc.tree import RadixTree
from tiers.base import Chain, StoredPage
from tiers.page import PageIds


class Records:
    """Records for pages of `tree`; `fingerprint` names what their bytes depend on."""

    def __init__(self, tree: RadixTree, fingerprint: bytes) -> None:
        self.tree = tree
        self.fingerprint = fingerprint

    def chain(self, node: Node, places: PageIds) -> Chain:
        """Records from the first page of the namespace to the last of these of a node."""
        path = self.tree.path(node)
        root = path[0].parent
        assert root is not None
        name = self.tree.namespaces[root]
        size = self.tree.page_bytes
        run = b"".join(n.tokens for n in path[:-1]) + node.tokens[: (int(places[-1]) + 1) * size]
        blobs = [run[i : i + size] for i in range(0, len(run), size)]
        blobs[0] = name.encode() + blobs[0]
        return Chain(self._root_digest(name), 0, blobs)

    def _root_digest(self, namespace: str) -> bytes:
        return hashlib.sha256(self.fingerprint + namespace.encode()).digest()

    def recover(self, stored: list[StoredPage], uses: int) -> PageIds:
        """Hang stored pages into the tree, as used so often; returns those that are of no use."""
        size = self.tree.page_bytes
        below: dict[bytes, dict[bytes, StoredPage]] = {}  # by the digest before them, by tokens
        names: dict[bytes, str] = {}
        for one in stored:
            record = one.record
            if record.depth == 0:
                names[record.parent] = record.blob[:-size].decode()
            below.setdefault(record.parent, {})[record.blob[-size:]] = one
        unused = {one.page for one in stored}
        stack = [
            (self.tree.root(name, account_name(name)), digest)
            for digest, name in names.items()
            if self._root_digest(name) == digest
        ]
        while stack:
            parent, digest = stack.pop()
            for first in below.get(digest, {}).values():
                run = [first]  # one node a run without branches
                while len(after := below.get(run[-1].record.digest, {})) == 1:
                    run += after.values()
                pages = np.array([one.page for one in run], np.int32)
                unused.difference_update(pages.tolist())
                tokens = b"".join(one.record.blob[-size:] for one in run)
                node = self.tree.graft(parent, tokens, DISK, pages)
                node.uses = uses
                stack.append((node, run[-1].record.digest))
        return np.array(sorted(unused), np.int32)
