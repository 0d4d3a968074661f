"""Prometheus metrics. What the engine counts is read from it when they are scraped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixsvc.cache import CacheStats
from radixsvc.engine import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The edge's own counters and histograms, beside the engine's. No label holds client text."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "radixsvc_requests", "HTTP requests", ["route", "status"], registry=self.registry
        )
        self._labelled = cache(self.requests.labels)  # looking labels up is not free
        seconds = partial(Histogram, registry=self.registry, buckets=SECONDS)
        self.first_token = seconds(
            "radixsvc_time_to_first_token_seconds", "From the request's arrival to its first token"
        )
        self.duration = seconds("radixsvc_request_seconds", "From the request's arrival to its end")

    def count(self, route: str, status: int) -> None:
        """One more HTTP request."""
        self._labelled(route, status).inc()

    def render(self, engine: EngineStats, cache: CacheStats) -> bytes:
        """The text of a scrape; `cache` comes from the engine's thread."""
        return generate_latest(self.registry) + generate_latest(_Snapshot(engine, cache))


class _Snapshot(Collector):
    """The engine's and the cache's own figures."""

    def __init__(self, engine: EngineStats, cache: CacheStats) -> None:
        self.engine = engine
        self.cache = cache

    def collect(self) -> Iterator[Metric]:
        stats, cache = self.engine, self.cache
        sources = dataclasses.asdict(stats.sources)
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
