"""Pages of one tier: who owns them, and that none is lost or owned twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiers.page import InvariantError, LayerSpec, OutOfPages, PageLedger, PageShape, PageState


def test_shape_of_an_8b_model_is_2_mib_a_page() -> None:
    shape = PageShape.uniform(32, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    assert shape.nbytes == 2 * 2**20


def test_layers_may_differ_and_share_offsets() -> None:
    wide, narrow = LayerSpec(2, 8, 0), LayerSpec(1, 4, 2 * 2 * 4 * 8, window=16)
    shape = PageShape((wide, narrow, narrow), page_size=4, dtype="float32")
    assert shape.elems == 2 * 2 * 4 * 8 + 2 * 1 * 4 * 4


@pytest.mark.parametrize(("size", "dtype"), [(0, "float32"), (16, "int8")])
def test_impossible_shapes_are_refused(size: int, dtype: str) -> None:
    with pytest.raises(ValueError):
        PageShape.uniform(1, 1, 1, size, dtype)


def test_allocation_is_all_or_nothing() -> None:
    ledger = PageLedger(4)
    ledger.allocate(3)
    with pytest.raises(OutOfPages):
        ledger.allocate(2)
    assert ledger.num_free == 1


def test_page_being_read_is_not_reused_before_the_copy_ends() -> None:
    ledger = PageLedger(2)
    pages = ledger.allocate(2)
    ledger.publish(pages)
    ledger.add_readers(pages[:1])
    ledger.free(pages)
    assert (ledger.num_free, ledger.num_retired) == (1, 1)
    ledger.drop_readers(pages[:1])
    assert (ledger.num_free, ledger.num_retired) == (2, 0)
    ledger.check()


def test_no_copy_touches_what_a_request_writes() -> None:
    ledger = PageLedger(1)
    with pytest.raises(InvariantError):
        ledger.add_readers(ledger.allocate(1, PageState.WRITING))


def test_page_let_go_while_it_is_loaded_is_free_when_the_copy_ends() -> None:
    ledger = PageLedger(1)
    pages = ledger.allocate(1, PageState.LOADING)
    ledger.add_readers(pages)
    ledger.free(pages)
    assert (ledger.num_free, ledger.num_retired) == (0, 1)
    ledger.publish(pages)
    ledger.drop_readers(pages)
    assert (ledger.num_free, ledger.num_retired) == (1, 0)


def test_freeing_twice_is_an_error() -> None:
    ledger = PageLedger(2)
    pages = ledger.allocate(1)
    ledger.publish(pages)
    ledger.add_readers(pages)
    ledger.free(pages)
    with pytest.raises(InvariantError):
        ledger.free(pages)
    ledger.drop_readers(pages)
    with pytest.raises(InvariantError):
        ledger.free(pages)


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of operations keeps every page in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(6)
        self.owned: dict[int, PageState] = {}
        self.reads: list[int] = []

    @rule(n=st.integers(0, 7), state=st.sampled_from([PageState.WRITING, PageState.LOADING]))
    def allocate(self, n: int, state: PageState) -> None:
        if n > self.ledger.num_free:
            with pytest.raises(OutOfPages):
                self.ledger.allocate(n, state)
            return
        pages = self.ledger.allocate(n, state).tolist()
        assert not set(pages) & (set(self.owned) | set(self.reads))
        self.owned.update(dict.fromkeys(pages, state))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def use_one(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.owned)))
        ids = np.array([page], np.int32)
        if self.owned[page] is not PageState.READY:
            self.ledger.publish(ids)
            self.owned[page] = PageState.READY
        else:
            self.ledger.add_readers(ids)
            self.reads.append(page)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free_one(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.owned)))
        self.ledger.free(np.array([page], np.int32))
        del self.owned[page]

    @precondition(lambda self: self.reads)
    @rule()
    def copy_ends(self) -> None:
        self.ledger.drop_readers(np.array([self.reads.pop()], np.int32))

    @invariant()
    def conserved(self) -> None:
        self.ledger.check()
        assert self.ledger.num_free == 6 - len(set(self.owned) | set(self.reads))


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
