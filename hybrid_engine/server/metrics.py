"""Prometheus metrics: vLLM's names where the meaning is the same, ours for groups, checkpoints and reasons."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hybrid_engine.explanation import CacheExplanation
from hybrid_engine.outputs import RequestOutput
from hybrid_engine.snapshot import EngineSnapshot

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
LABELS = ("model_name", "engine")


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._snapshot = _SnapshotCollector(self._labels)
        self.registry.register(self._snapshot)
        self.news = News(self._labels)
        self.registry.register(self.news)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", SECONDS)
        self._prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Tokens of prompts.", TOKENS)
        self._answer_lengths = self._histogram("vllm:request_generation_tokens", "Tokens of answers.", TOKENS)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens taken in.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Of those, tokens found.")
        self._cached = self._counter("vllm:prompt_tokens_cached", "Prompt tokens that need not be computed.")
        self._ends = self._counter("vllm:request_success", "Answers that ended, by why.", "finished_reason")
        self._missed = self._counter("hybrid_engine:cache_missed_tokens", "Prompt tokens missed, by why.", "reason")
        self._refused = self._counter("hybrid_engine:requests_refused", "Requests answered with an error.", "code")
        self._aborted = self._counter("hybrid_engine:requests_aborted", "Requests that ended early, by why.", "reason")
        self._diverged = self._counter(
            "hybrid_engine:conversations_diverged", "Chats whose prompt isn't what the last one left.", "where"
        )
        self.in_flight = Gauge(
            "hybrid_engine:answers_in_flight", "Answers accepted and not ended.", LABELS, registry=self.registry
        ).labels(*self._labels)

    def note_prompt(self, output: RequestOutput) -> None:
        """Count a prompt once it is computed."""
        num_tokens = len(output.prompt_token_ids)
        self._prompt_tokens.inc(num_tokens)
        self._prompt_lengths.observe(num_tokens)
        self._cached.inc(output.num_cached_tokens)
        ttft = output.metrics.ttft_seconds
        if ttft is not None:
            self._ttft.observe(max(ttft, 0.0))
        if output.cache is not None:
            self._note_cache(output.cache)

    def _note_cache(self, cache: CacheExplanation) -> None:
        if not cache.disabled:
            self._queries.inc(cache.num_prompt_tokens)
            self._hits.inc(cache.hit)
        for reason, count in cache.reasons().items():
            if count:
                self._missed.labels(*self._labels, reason).inc(count)

    def note_end(self, finish_reason: str, num_tokens: int, seconds: float) -> None:
        """Count an answer that ended by itself."""
        self._ends.labels(*self._labels, finish_reason).inc()
        self._answer_lengths.observe(num_tokens)
        self._e2e.observe(max(seconds, 0.0))

    def note_refused(self, code: str) -> None:
        """Count a request answered with an error."""
        self._refused.labels(*self._labels, code).inc()

    def note_aborted(self, reason: str) -> None:
        """Count a request that was ended before its answer was whole."""
        self._aborted.labels(*self._labels, reason).inc()

    def note_diverged(self, where: str) -> None:
        """Count a conversation whose prompt doesn't begin with what its last turn left. where: 'prompt', 'answer'."""
        self._diverged.labels(*self._labels, where).inc()

    def text(self, snapshot: EngineSnapshot) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self._snapshot.snapshot = snapshot
        return generate_latest(self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, what, LABELS, buckets=buckets, registry=self.registry).labels(*self._labels)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        """labels: further ones; without any, the counter is ready to count."""
        counter = Counter(name, what, (*LABELS, *labels), registry=self.registry)
        return counter if labels else counter.labels(*self._labels)


class News(Collector):
    """Counts what is new of answers. It comes far more often than anything else: no lock is taken, no check is made."""

    def __init__(self, labels: tuple[str, str]) -> None:
        self._labels = labels
        self._num_tokens = 0
        self._seconds = 0.0
        self._counts = [0] * (len(SECONDS) + 1)

    def note(self, num_tokens: int, seconds_since_last: float | None = None) -> None:
        """Count tokens of one answer that came together, at least one.

        seconds_since_last: shared among them, so that the mean is the time of a token; None for an answer's first ones.
        """
        self._num_tokens += num_tokens
        if seconds_since_last is not None:
            self._seconds += seconds_since_last
            self._counts[bisect_left(SECONDS, seconds_since_last / num_tokens)] += num_tokens

    def collect(self) -> Iterator[Metric]:
        """Give out what was counted."""
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=LABELS)
        tokens.add_metric(self._labels, self._num_tokens)
        gaps = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds",
            "Between tokens of one answer; those that come together share the time.",
            labels=LABELS,
        )
        limits = [*(str(float(limit)) for limit in SECONDS), "+Inf"]
        gaps.add_metric(self._labels, list(zip(limits, accumulate(self._counts), strict=True)), self._seconds)
        yield from (tokens, gaps)


class _SnapshotCollector:
    """Turns a snapshot of the engine into metrics when they are read."""

    def __init__(self, labels: tuple[str, str]) -> None:
        self.snapshot: EngineSnapshot | None = None
        self._labels = labels
        self._start_time = time.time()

    def collect(self) -> Iterator[Metric]:
        snapshot = self.snapshot
        if snapshot is None:
            return
        for name, what, value in (
            ("vllm:num_requests_running", "Requests that hold blocks.", snapshot.num_running),
            ("vllm:num_requests_waiting", "Requests that wait to be scheduled.", snapshot.num_waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the cache memory held by requests, 0 to 1.",
                snapshot.held_share,
            ),
            ("hybrid_engine:cache_memory_bytes", "Cache memory of all groups.", snapshot.memory_bytes),
            ("hybrid_engine:cache_unowned_bytes", "Of it, what no group has taken yet.", snapshot.unowned_bytes),
            ("hybrid_engine:checkpoints", "Positions that prompts can go on from.", snapshot.num_checkpoints),
            ("hybrid_engine:start_time_seconds", "When the server started.", self._start_time),
        ):
            gauge = GaugeMetricFamily(name, what, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, what, value in (
            ("vllm:num_preemptions", "Requests that had to give their blocks back.", snapshot.num_preemptions),
            ("hybrid_engine:steps", "Steps run.", snapshot.num_steps),
            ("hybrid_engine:computed_tokens", "Tokens computed, over all steps.", snapshot.num_computed_tokens),
            ("hybrid_engine:recomputed_tokens", "Computed again after a preemption.", snapshot.num_recomputed_tokens),
        ):
            counter = CounterMetricFamily(name, what, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        yield from self._groups(snapshot)

    def _groups(self, snapshot: EngineSnapshot) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "hybrid_engine:group_blocks",
            "Blocks of each group of layers: held by requests, cached for later ones, empty.",
            labels=(*LABELS, "group", "kind", "state"),
        )
        sizes = GaugeMetricFamily(
            "hybrid_engine:group_block_bytes", "Bytes of a block.", labels=(*LABELS, "group", "kind")
        )
        for group in snapshot.groups:
            labels = (*self._labels, str(group.group_id), group.kind)
            for state in ("held", "cached", "empty"):
                blocks.add_metric((*labels, state), getattr(group, f"num_{state}"))
            sizes.add_metric(labels, group.block_bytes)
        yield from (blocks, sizes)
