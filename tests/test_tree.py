"""The tree's shapes: each case is drawn in the docstring; pages hold 4 tokens."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from radixsvc.inspection import check_tree, format_tree
from radixsvc.node import DEVICE, HOST, Node
from radixsvc.tree import RadixTree
from tiers._kernels import common_prefix


def pack(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def run(text: str) -> bytes:
    """Tokens of a word, one a letter."""
    return pack(*map(ord, text))


class Tree(RadixTree):
    """Hands out page ids 0, 1, 2, ... and speaks in words."""

    def __init__(self, *ghost_pages: int) -> None:
        super().__init__(4, ghost_pages or (0,))
        self.next_page = 0

    def put(self, text: str) -> None:
        n = -(-len(text) // 4)
        pages = pack(*range(self.next_page, self.next_page + n))
        self.next_page += n
        self.unlock(self.insert(self.lock(self.root("a"), 0), run(text), pages).node)
        check_tree(self)

    def hold(self, text: str) -> Node:
        found = self.match("a", run(text))
        node = self.lock(found.node, found.used)
        check_tree(self)
        return node

    def length(self, text: str) -> tuple[int, int]:
        found = self.match("a", run(text))
        return found.length, found.partial

    def shape(self) -> list[str]:
        """Runs in depth-first order, a dot a level."""
        out = []
        for node in self.nodes():
            depth = len(self.path(node)) - 1
            letters = np.frombuffer(node.tokens, np.int32)
            out.append("." * depth + "".join(map(chr, letters)))
        return sorted(out, key=lambda s: s.strip("."))


def test_a_branch_in_the_middle_of_an_edge_splits_at_a_page() -> None:
    """[abcd|efgh|ijkl] and abcdefgh|xyz: [abcd|efgh] -+- [ijkl], -+- [xyz]"""
    tree = Tree()
    tree.put("abcdefghijkl")
    tree.put("abcdefghxyz")
    assert tree.shape() == ["abcdefgh", ".ijkl", ".xyz"]
    assert tree.length("abcdefghxyz!") == (8, 3)
    assert tree.length("abcdefgx") == (4, 3)


def test_a_stub_gives_way_to_a_page_that_goes_beyond_it() -> None:
    """[abcd|ef] then abcd|efgh|i: [abcd|efgh|i], and the stub's page is let go"""
    tree = Tree()
    tree.put("abcdef")
    stub = tree.match("a", run("abcdef")).node.device[-4:]
    tree.put("abcdefghi")
    assert tree.shape() == ["abcdefghi"]
    freed = tree.take_freed(DEVICE)
    assert freed is not None
    assert freed.tobytes() == stub


def test_a_stub_is_not_kept_where_more_of_its_tokens_is_known() -> None:
    tree = Tree()
    tree.put("abcdefgh")
    node = tree.lock(tree.root("a"), 0)
    inserted = tree.insert(node, run("abcdef"), pack(50, 51))
    assert inserted.pages == pack(0)
    tree.unlock(inserted.node)
    check_tree(tree)


def test_two_stubs_that_differ_live_side_by_side() -> None:
    tree = Tree()
    tree.put("ab")
    tree.put("ac")
    assert tree.shape() == ["ab", "ac"]
    assert tree.length("acx") == (0, 2)


def test_a_leaf_that_only_its_lease_holds_is_lengthened() -> None:
    tree = Tree()
    tree.put("abcd")
    node = tree.hold("abcd")
    end = tree.insert(node, run("efgh"), pack(90)).node
    assert end is node
    tree.unlock(end)
    assert tree.shape() == ["abcdefgh"]


def test_a_leaf_that_others_hold_gets_a_child() -> None:
    tree = Tree()
    tree.put("abcd")
    node, other = tree.hold("abcd"), tree.hold("abcd")
    end = tree.insert(node, run("efgh"), pack(90)).node
    assert tree.shape() == ["abcd", ".efgh"]
    tree.unlock(end)
    tree.unlock(other)
    check_tree(tree)


def test_locking_part_of_an_edge_splits_it_and_release_leaves_recency_true() -> None:
    tree = Tree()
    tree.put("abcdefghijkl")
    tree.unlock(tree.hold("abcdefgh"))
    assert tree.shape() == ["abcdefgh", ".ijkl"]
    assert tree.evict(1) == 1
    assert tree.shape() == ["abcdefgh"]


def test_what_is_left_with_one_child_of_the_same_use_is_merged() -> None:
    tree = Tree()
    tree.put("abcdefghijkl")
    tree.put("abcdxxxx")
    tree.unlock(tree.hold("abcdefghijkl"))
    assert tree.shape() == ["abcd", ".efghijkl", ".xxxx"]
    assert tree.evict(1) == 1
    assert tree.shape() == ["abcdefghijkl"]


def test_eviction_takes_leaves_oldest_first_from_the_tail_and_spares_their_root() -> None:
    tree = Tree()
    tree.put("rootoneeonee")
    tree.put("roottwootwoo")
    assert tree.evict(1) == 1
    assert tree.length("rootoneeonee") == (8, 0)
    assert tree.evict(2) == 2
    assert tree.length("roottwoo") == (8, 0)
    assert tree.evict(9) == 2
    assert tree.num_nodes == 0
    assert not tree.roots


def test_partly_filled_pages_go_before_whole_ones_where_nothing_lies_below() -> None:
    """[aaaa|aa], [bbbb] and [cccc|cc]: first the stubs, then from the oldest on"""
    tree = Tree()
    for text in ("aaaaaa", "bbbb", "cccccc"):
        tree.put(text)
    assert tree.evict(1) == 1
    assert [tree.length(text) for text in ("aaaaaa", "bbbb", "cccccc")] == [(4, 0), (4, 0), (4, 2)]
    tree.put("aaaaaaaa")  # and the oldest stub is known to be gone
    assert tree.evict(2) == 2
    assert tree.shape() == ["aaaaaaaa", "cccccc"]
    assert tree.length("cccccc") == (4, 0)


def test_a_tree_that_is_dropped_leaves_nothing_behind() -> None:
    tree = Tree()
    tree.put("aaaabbbb")
    tree.put("aaaacc")
    left = weakref.ref(tree.shared)
    del tree
    gc.collect()
    assert left() is None


def test_partly_filled_pages_go_with_their_nodes_where_there_are_tiers_below() -> None:
    tree = Tree(0, 0, 0)
    tree.put("aaaa")
    tree.put("bbbbbb")
    assert tree.evict(1) == 1
    assert tree.shape() == ["bbbbbb"]


def test_counters_follow_the_first_and_the_last_reference() -> None:
    tree = Tree()
    tree.put("abcdefgh")
    assert (tree.resident(DEVICE), tree.evictable(DEVICE)) == (2, 2)
    node = tree.hold("abcd")
    assert (tree.resident(DEVICE), tree.evictable(DEVICE)) == (2, 1)
    tree.unlock(node)
    assert (tree.resident(DEVICE), tree.evictable(DEVICE)) == (2, 2)


def test_low_priority_goes_first() -> None:
    tree = Tree()
    tree.put("aaaa")
    found = tree.match("a", run("aaaa"))
    tree.unlock(tree.lock(found.node, found.used, priority=2))
    tree.put("bbbb")
    tree.evict(1)
    assert tree.shape() == ["aaaa"]


def test_a_ghost_tells_what_was_known_and_when_it_went() -> None:
    tree = Tree(2)
    tree.put("abcdefgh")
    tree.put("xxxx")
    tree.evict(3)
    assert tree.length("abcdefgh") == (0, 0)
    assert tree.match("a", run("abcdefgh"), ghosts=True).length == 0  # two pages of ghosts at most
    assert tree.match("a", run("xxxx"), ghosts=True).length == 4
    assert "ghost, last on device" in format_tree(tree)
    tree.put("xxxx")
    assert not tree.ghosts.left[DEVICE]


def test_a_node_may_lie_partly_on_the_device() -> None:
    tree = Tree(0, 0, 0)
    tree.put("abcdefghijkl")
    node = tree.match("a", run("abcdefghijkl")).node
    places = np.array([1, 2], np.int32)
    tree.attach(node, HOST, places, np.array([7, 8], np.int32))
    tree.evict(2)
    assert tree.length("abcdefghijkl") == (12, 0)
    assert check_tree(tree)[HOST].tolist() == [7, 8]
    tree.detach([np.empty(0, np.int32), np.array([7], np.int32)])
    assert tree.length("abcdefghijkl") == (4, 0)
    lost = tree.take_freed(HOST)
    assert lost is not None
    assert sorted(lost.tolist()) == [7, 8]  # 8 is of no use without the page before it
    check_tree(tree)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1000])
def test_common_prefix_of_runs(n: int) -> None:
    a = pack(*range(1000))
    b = pack(5, 6) + pack(*range(n)) + pack(-1) * (1000 - n)
    assert common_prefix(a, b, 8) == 4 * n
    assert common_prefix(a[: 4 * n], b, 8) == 4 * n


def test_many_children_are_found_by_their_first_page() -> None:
    tree = Tree()
    words = [f"{i:04d}{i:04d}" for i in range(3000)]
    for i, word in enumerate(words):
        node = tree.lock(tree.root("a"), 0)
        tree.unlock(tree.insert(node, run(word), pack(2 * i, 2 * i + 1)).node)
    check_tree(tree)
    assert all(tree.length(word) == (8, 0) for word in words)
    assert tree.length("0777x") == (4, 0)
    tree.evict(2 * 2990)
    check_tree(tree)
    assert tree.length(words[-1]) == (8, 0)
    assert tree.num_nodes == 10
