"""Prometheus metrics: what edge, engine and cache have counted, put into families at a scrape."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from radixsvc.cache import CacheStats
from radixsvc.engine import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Durations, counted by the smallest of `SECONDS` that is not below them."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        bounds = [*map(str, SECONDS), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        return HistogramMetricFamily(f"radixsvc_{name}", text, buckets, self._sum)


class Metrics:
    """The edge's own, written on the event loop alone. No label holds client text."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.first_token = Histogram()
        self.duration = Histogram()

    def render(self, engine: EngineStats, cache: CacheStats) -> bytes:
        """The text of a scrape; `cache` comes from the engine's thread."""
        return generate_latest(_Snapshot(self, engine, cache))


@dataclass
class _Snapshot(Collector):
    edge: Metrics
    engine: EngineStats
    cache: CacheStats

    def collect(self) -> Iterator[Metric]:
        stats, cache = self.engine, self.cache
        requests = CounterMetricFamily(
            "radixsvc_requests", "HTTP requests", labels=["route", "status"]
        )
        for (route, status), count in self.edge.requests.items():
            requests.add_metric([route, str(status)], count)
        yield requests
        yield self.edge.first_token.family(
            "time_to_first_token_seconds", "From the request's arrival to its first token"
        )
        yield self.edge.duration.family("request_seconds", "From the request's arrival to its end")
        sources = msgspec.structs.asdict(stats.sources)
        yield _labelled("prompt_tokens", "Prompt tokens by source", "source", sources)
        yield _labelled("finished_requests", "Requests by outcome", "reason", stats.finished)
        yield _labelled(
            "hit_tokens_at_double",
            "Prompt tokens that a tier alone had given besides, were it twice as large",
            "tier",
            {tier: getattr(cache.hits_at_double, tier) for tier in cache.pages},
        )
        pages = GaugeMetricFamily(
            "radixsvc_pages", "Pages by tier and state", labels=["tier", "state"]
        )
        for tier, states in cache.pages.items():
            for state, count in states.items():
                pages.add_metric([tier, state], count)
        yield pages
        for owner, names in (
            (stats, "steps generated_tokens recomputed_tokens preemptions"),
            (cache, "evicted_pages dropped_pages lost_pages duplicate_pages"),
        ):
            for name in names.split():
                value, text = getattr(owner, name), name.replace("_", " ")
                yield CounterMetricFamily(f"radixsvc_{name}", text, value=value)
        yield GaugeMetricFamily("radixsvc_waiting_requests", "In the queue", value=stats.waiting)
        yield GaugeMetricFamily("radixsvc_running_requests", "In steps", value=stats.running)


def _labelled(name: str, text: str, label: str, counts: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"radixsvc_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
