"""Pins: prompts that are kept for a time, whatever else needs the room.

A pinned path is never evicted from a tier below the device. It is locked on the device until it
lies whole below; from then on the device may have its room.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from radixsvc.node import Node
from radixsvc.residency import Residency


class PinLimit(Exception):
    """More would be pinned than may be."""


@dataclass
class Pin:
    node: Node
    expires: float  # time.monotonic
    locked: bool = True


class Pins:
    """At most `max_pages` pages are pinned, each counted once."""

    def __init__(self, residency: Residency, max_pages: int) -> None:
        self.tree = residency.tree
        self.residency = residency
        self.max_pages = max_pages
        self.num_pages = 0
        self._pins: dict[tuple[str, bytes], Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_locked(self) -> int:
        return sum(pin.locked for pin in self._pins.values())

    def add(self, namespace: str, tokens: bytes, ttl: float) -> int:
        """Pin the known whole pages of a prompt for `ttl` seconds; returns how many tokens.

        PinLimit where there would be too many pages.
        """
        self.expire()
        tree = self.tree
        found = tree.match(namespace, tokens)
        if found.length == 0:
            return 0
        node = tree.lock(found.node, found.used)
        path = tree.path(node)
        new = sum(tree.num_pages(n) for n in path if not n.pins)
        if self.num_pages + new > self.max_pages:
            tree.unlock(node)
            raise PinLimit(
                f"{new} pages more would be pinned beside {self.num_pages}; {self.max_pages} may "
                "be, half of the device. Unpin something, or give the device more memory."
            )
        for one in path:
            one.pins += 1
        self.num_pages += new
        self.remove(namespace, tokens)
        self._pins[namespace, tokens] = Pin(node, time.monotonic() + ttl)
        self.secure()
        return found.length

    def remove(self, namespace: str, tokens: bytes) -> bool:
        """Undo `add`; False where nothing was pinned for these tokens."""
        pin = self._pins.pop((namespace, tokens), None)
        if pin is None:
            return False
        tree, account = self.tree, pin.node.account
        if not pin.locked:
            tree.lock(pin.node, len(pin.node.tokens))
        for one in tree.path(pin.node):
            one.pins -= 1
            if not one.pins:
                self.num_pages -= tree.num_pages(one)
        tree.unlock(pin.node)
        self.residency.enforce_quota(account)
        return True

    def expire(self) -> None:
        """Remove those whose time is over."""
        if self._pins:
            now = time.monotonic()
            for key in [key for key, pin in self._pins.items() if pin.expires <= now]:
                self.remove(*key)

    def clear(self) -> None:
        for key in list(self._pins):
            self.remove(*key)

    def secure(self) -> None:
        """Unlock what has arrived below the device since the last call."""
        for pin in self._pins.values():
            if pin.locked and self.residency.secure(self.tree.path(pin.node)):
                pin.locked = False
                self.tree.unlock(pin.node)
