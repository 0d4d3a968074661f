"""Prometheus metrics. What the engine counts is read from it when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixsvc.engine import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The edge's own counters and histograms, beside the engine's. No label holds client text."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[tuple[str, int], Counter] = {}  # looking labels up is not free
        self.requests = Counter(
            "radixsvc_requests", "HTTP requests", ["route", "status"], registry=self.registry
        )
        self.first_token = Histogram(
            "radixsvc_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            registry=self.registry,
            buckets=SECONDS,
        )
        self.duration = Histogram(
            "radixsvc_request_seconds",
            "From the request's arrival to its end",
            registry=self.registry,
            buckets=SECONDS,
        )

    def count(self, route: str, status: int) -> None:
        """One more HTTP request."""
        counter = self._counters.get((route, status))
        if counter is None:
            counter = self._counters[route, status] = self.requests.labels(route, str(status))
        counter.inc()

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Add the engine's figures to every scrape from now on."""
        self.registry.register(_EngineCollector(stats))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        tokens = CounterMetricFamily(
            "radixsvc_prompt_tokens", "Prompt tokens by the source of their keys and values",
            labels=["source"],
        )  # fmt: skip
        for source in ("device", "host", "disk", "computed"):
            tokens.add_metric([source], getattr(stats.sources, source))
        yield tokens
        finished = CounterMetricFamily(
            "radixsvc_finished_requests", "Requests by the reason they ended", labels=["reason"]
        )
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
        pages = GaugeMetricFamily("radixsvc_device_pages", "Pages by state", labels=["state"])
        for state, count in stats.pages.items():
            pages.add_metric([state], count)
        yield pages
        for name, text, value in (
            ("steps", "Engine steps", stats.steps),
            ("generated_tokens", "Tokens sampled", stats.generated_tokens),
            ("recomputed_tokens", "Tokens computed again", stats.recomputed_tokens),
            ("preemptions", "Requests put back into the queue", stats.preemptions),
        ):
            yield CounterMetricFamily(f"radixsvc_{name}", text, value=value)
        yield GaugeMetricFamily("radixsvc_waiting_requests", "In the queue", value=stats.waiting)
        yield GaugeMetricFamily("radixsvc_running_requests", "In steps", value=stats.running)
