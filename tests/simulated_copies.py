"""Copy streams whose work runs in any order that the edges between them allow.

A `Machine` holds queues: one for the computation, one per copy stream. `step` picks, at random,
one queue whose head may run and runs it: a page's copy, a record, a wait whose event is reached.
What happens to come out right on a real machine because the copy was late or early comes out wrong
here after a few rounds, unless an edge forbids it.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

from tiers.base import Checksums, PageView
from tiers.copy import checksums, copy_pages


class Event:
    def __init__(self) -> None:
        self.reached = False


class Machine:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()  # disk workers enqueue, and run the machine, too
        self.queues: list[deque[tuple[Event | None, Callable[[], None]]]] = []
        self.compute = SimulatedStream(self)

    def stream(self) -> SimulatedStream:
        return SimulatedStream(self)

    def step(self) -> bool:
        """Run one operation that may run; False where there is none."""
        with self.lock:
            ready = [q for q in self.queues if q and (q[0][0] is None or q[0][0].reached)]
            if not ready:
                return False
            self.random.choice(ready).popleft()[1]()
            return True

    def run(self, num_steps: int | None = None) -> None:
        while (num_steps is None or (num_steps := num_steps - 1) >= 0) and self.step():
            pass


class SimulatedStream:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.queue: deque[tuple[Event | None, Callable[[], None]]] = deque()
        machine.queues.append(self.queue)

    def call(self, operation: Callable[[], None], after: Event | None = None) -> None:
        with self.machine.lock:
            self.queue.append((after, operation))

    def copy(self, source: PageView, target: PageView) -> None:
        for i in range(len(source.pages)):
            views = [v._replace(pages=v.pages[i : i + 1].copy()) for v in (source, target)]
            self.call(lambda views=views: copy_pages(*views))

    def record(self) -> Event:
        event = Event()
        self.call(lambda: setattr(event, "reached", True))
        return event

    def wait(self, event: Event) -> None:
        self.call(lambda: None, after=event)

    def query(self, event: Event) -> bool:
        return event.reached

    def synchronize(self, event: Event) -> None:
        while not event.reached:
            self.machine.step()

    def copy_now(self, source: PageView, target: PageView, after: Event) -> Checksums:
        with self.machine.lock:
            self.wait(after)
            self.copy(source, target)
            done = self.record()
        self.synchronize(done)
        return checksums(target)

    def elapsed(self, start: Event, end: Event) -> float:
        return 1e-6

    def calibrate(self, source: PageView, target: PageView) -> None:
        pass

    def close(self) -> None:
        self.machine.run()
