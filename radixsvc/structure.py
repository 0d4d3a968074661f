"""The shape of a tree: paths, splits, merges, and nodes that come and go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from radixsvc.node import ABSENT, PAGE_ID_BYTES, Children, Node, stripped
from radixsvc.placement import Placement
from tiers.page import InvariantError


class Structure(Placement):
    """The trees below the namespaces' roots. What a change does to lists and counts is done too."""

    def __init__(self, ghost_pages: Sequence[int], page_bytes: int) -> None:
        super().__init__(ghost_pages, page_bytes)
        self.roots: dict[str, Node] = {}
        self.namespaces: dict[Node, str] = {}  # by root, flushed ones that are held included
        self.num_nodes = 0

    def __del__(self) -> None:
        for node in list(self.nodes()):
            node.parent = None  # a cycle that the collector does not see, as is the next
        for account in self.accounts.values():
            account.stubs.clear()

    def path(self, node: Node) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def device_pages(self, node: Node) -> bytes:
        """The device pages of the path down to a node's end, packed."""
        return b"".join([n.device for n in self.path(node)])

    def nodes(self) -> Iterator[Node]:
        """Every node, roots apart, parents first."""
        for root in list(self.namespaces):
            yield from self._below(root)

    def _below(self, node: Node) -> Iterator[Node]:
        stack = [*(node.children or ())]
        while stack:
            node = stack.pop()
            yield node
            if node.children is not None:
                stack.extend(node.children)

    def _upwards(self, node: Node) -> list[Node]:
        """A node behind all below it, children first."""
        return [node, *self._below(node)][::-1]

    def _upper(self, node: Node, used: int) -> Node:
        """The node that ends `used` bytes, whole pages, into this one's run; splits it there."""
        if used == len(node.tokens):
            return node
        parent = node.parent
        if parent is None or parent.children is None or not 0 < used < len(node.tokens):
            raise InvariantError(f"no split at byte {used} of {len(node.tokens)}")
        upper = Node(node.tokens[:used], node.account)
        parent.children.replace(node, upper)
        upper.parent, node.parent = parent, upper
        upper.children = Children(node)
        upper.refs, upper.pins, upper.uses = node.refs, node.pins, node.uses
        upper.priority, upper.last_use = node.priority, node.last_use
        self.num_nodes += 1
        left = self.ghosts.forget(node)
        node.tokens = node.tokens[used:]
        ids = used // self.page_bytes * PAGE_ID_BYTES
        for level in range(self.num_tiers):
            held = node[level]
            upper[level], node[level] = stripped(held[:ids]), stripped(held[ids:])
            after = node.after(level)
            if after is not None:
                if upper[level]:
                    upper.link_before(after, level)
                if not node[level]:
                    node.unlink(level)
            for part in (node, upper):
                if not part[level] and (held or left[level]):
                    self.ghosts.add(part, level, left[level])
        self._drop_if_bare(node)
        return upper

    def _merge_below(self, node: Node) -> None:
        """Merge a node with its only child where both are at rest and were last used together."""
        child = node.children.only if node.children is not None else None
        parent = node.parent
        if (
            child is None
            or parent is None
            or node.refs
            or child.refs
            or child.last_use != node.last_use
            or child.pins != node.pins
            or child.priority != node.priority
            or not (child.device or child.host or child.disk)
        ):
            return
        left = zip(self.ghosts.forget(node), self.ghosts.forget(child), strict=True)
        num_pages = len(node.tokens) // self.page_bytes
        child.tokens = node.tokens + child.tokens
        for level, times in enumerate(left):
            lower, upper = child[level], node[level]
            if lower:
                upper += ABSENT * (num_pages - len(upper) // PAGE_ID_BYTES) + lower
            child[level] = upper
            node[level] = b""
            after = node.after(level)
            if after is not None:
                child.link_before(after, level)
                node.unlink(level)
            if times[0] is not None and times[1] is not None:
                self.ghosts.add(child, level, min(times[0], times[1]))
        assert parent.children is not None
        parent.children.replace(node, child)
        child.uses = max(child.uses, node.uses)
        child.parent = parent
        node.parent = node.children = None
        self.num_nodes -= 1

    def _adopt(self, parent: Node, tokens: bytes) -> Node:
        """A new child, which lies nowhere yet."""
        child = Node(tokens, parent.account)
        child.parent = parent
        if parent.children is None:
            parent.children = Children(child)
        else:
            parent.children.add(child)
        self.num_nodes += 1
        return child

    def _take_out(self, node: Node) -> None:
        """Remove an unreferenced leaf from the tree and let its pages go."""
        parent = node.parent
        if parent is None or node.refs or node.children is not None:
            raise InvariantError("only a leaf without references leaves the tree")
        for level in range(self.num_tiers):
            if node[level]:
                self.keep(node, level, 0)
        if any(self.ghosts.left):
            self.ghosts.forget(node)
        if not parent.children.remove(node):
            parent.children = None
            if parent.parent is None:
                self._drop_root_if_bare(parent)
        node.parent = None
        node.tokens = b""  # it may still stand in someone's queue
        self.num_nodes -= 1

    def _drop_if_bare(self, node: Node) -> None:
        """A node goes that lies nowhere, that nobody holds and that is no ghost."""
        parent = node.parent
        if node.device or node.refs or node.host or node.disk or node.pins or parent is None:
            return
        if any(self.ghosts.left) and node in self.ghosts:
            return
        if node.children is not None:
            self._drop_loose(self._upwards(node)[:-1])
        self._take_out(node)
        self._merge_below(parent)

    def _drop_loose(self, nodes: Iterable[Node]) -> None:
        """Of these nodes the leaves go, and what is one then, save held and pinned ones."""
        for node in nodes:
            if node.children is None and node.refs == 0 and node.pins == 0:
                self._take_out(node)

    def _drop_root_if_bare(self, root: Node) -> None:
        """A root that nothing hangs on or holds goes, so that namespaces can come and go."""
        if root.refs == 0 and root.children is None and root in self.namespaces:
            name = self.namespaces.pop(root)
            if self.roots.get(name) is root:
                del self.roots[name]
