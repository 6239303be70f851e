"""Prometheus metrics under vLLM's names with the prefix "octavo:". Each server has its own registry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.engine.client import EngineClient
from octavo.engine.messages import Delta, Event, Failed, Finished, GenerateRequest, Started

PREFIX = "octavo:"

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
            20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_GAPS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
_COUNTS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
)
_CHOICES = (1, 2, 5, 10, 20, 50)


class Metrics:
    """Counters and histograms that requests feed, and the engine's own numbers, read when they are
    scraped."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._registry.register(_EngineCollector(engine, self._labels))
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one choice.", _GAPS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token of a request after its first.",
            _GAPS,
        )
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self.queue_time = self._histogram("request_queue_time_seconds", "From arrival to admission.", _SECONDS)
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "From admission to the first token.", _SECONDS
        )
        self.decode_time = self._histogram("request_decode_time_seconds", "From first to last token.", _SECONDS)
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "From admission to the last token.", _SECONDS
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _COUNTS)
        self.computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", _COUNTS
        )
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens that a request generated, over all choices.", _COUNTS
        )
        self.params_n = self._histogram("request_params_n", "The n that requests asked for.", _CHOICES)
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "The max_tokens that requests asked for.", _COUNTS
        )
        self._success = Counter(
            PREFIX + "request_success",
            "Choices that ended, by reason; requests cancelled (abort) or failed (error) count once.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_name, reason)

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(PREFIX + name, documentation, ["model_name"], registry=self._registry, buckets=buckets)
        return metric.labels(**self._labels)

    def finished(self, reason: str) -> None:
        self._success.labels(self._labels["model_name"], reason).inc()

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class RequestTimer:
    """Feeds the metrics from one request's events. Times are those at which events left the engine."""

    def __init__(self, metrics: Metrics, request: GenerateRequest) -> None:
        self._metrics = metrics
        self._params = request.params
        self._last_token_at: dict[int, float] = {}

    def observe(self, event: Event, at: float) -> None:
        """`at` is monotonic, in seconds."""
        if isinstance(event, Started):
            self._metrics.params_n.observe(self._params.n)
            if self._params.max_tokens is not None:
                self._metrics.params_max_tokens.observe(self._params.max_tokens)
            self._metrics.prompt_tokens.observe(event.prompt_tokens)
            self._metrics.computed_tokens.observe(event.prompt_tokens - event.cached_tokens)
        elif isinstance(event, Delta):
            self._delta(event, at)
        elif isinstance(event, Finished):
            self._finish(event)
        elif isinstance(event, Failed):
            self._metrics.finished("error")

    def _delta(self, event: Delta, at: float) -> None:
        before = self._last_token_at.get(event.index)
        if event.token_ids:
            self._last_token_at[event.index] = at
            if before is not None:
                gap = (at - before) / len(event.token_ids)
                for _ in event.token_ids:
                    self._metrics.inter_token_latency.observe(gap)
        if event.finish_reason in ("stop", "length"):
            self._metrics.finished(event.finish_reason)

    def _finish(self, event: Finished) -> None:
        metrics = self._metrics
        metrics.e2e_latency.observe(event.total_s)
        metrics.queue_time.observe(event.queued_s)
        metrics.inference_time.observe(event.total_s - event.queued_s)
        metrics.generation_tokens.observe(event.completion_tokens)
        if event.first_token_s is None:
            return
        decode_s = event.total_s - event.first_token_s
        metrics.time_to_first_token.observe(event.first_token_s)
        metrics.prefill_time.observe(event.first_token_s - event.queued_s)
        metrics.decode_time.observe(decode_s)
        if event.completion_tokens > 1:
            metrics.time_per_output_token.observe(decode_s / (event.completion_tokens - 1))

    def abort(self) -> None:
        self._metrics.finished("abort")


class _EngineCollector(Collector):
    """Reads EngineStats once per scrape, so that the numbers of one scrape agree with each other."""

    def __init__(self, engine: EngineClient, labels: dict[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        usage = stats.kv_used_bytes / stats.kv_total_bytes if stats.kv_total_bytes else 0.0
        gauges: list[tuple[str, str, float]] = [
            ("num_requests_running", "Requests in the running batch.", stats.requests_running),
            ("num_requests_waiting", "Requests that wait to be admitted.", stats.requests_waiting),
            ("kv_cache_usage_perc", "Fraction of the page budget in use, 0 to 1.", usage),
            ("kv_cache_used_bytes", "Bytes of the page budget in use.", stats.kv_used_bytes),
            ("kv_cache_total_bytes", "The page budget in bytes.", stats.kv_total_bytes),
        ]
        counters: list[tuple[str, str, float]] = [
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix tree.", stats.query_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix tree.", stats.hit_tokens),
            ("num_preemptions", "Requests preempted for want of pages.", stats.preemptions),
            ("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("evicted_pages", "Pages evicted from the prefix tree.", stats.evicted_pages),
            (
                "cascade_refused",
                "Tiles of rows whose shared pages were read apart, for want of memory for partial results.",
                stats.cascade_refused,
            ),
            ("engine_steps", "Steps that the engine has run.", stats.steps),
        ]
        for name, documentation, value in gauges:
            yield self._filled(GaugeMetricFamily(PREFIX + name, documentation, labels=list(self._labels)), value)
        for name, documentation, value in counters:
            yield self._filled(CounterMetricFamily(PREFIX + name, documentation, labels=list(self._labels)), value)
        misses = CounterMetricFamily(
            PREFIX + "prefix_cache_misses", "Requests whose hit ended before their prompt, by reason.",
            labels=["model_name", "reason"],
        )  # fmt: skip
        for reason, count in stats.misses:
            misses.add_metric([self._labels["model_name"], reason], count)
        yield misses
        pages = GaugeMetricFamily(
            PREFIX + "kv_pages",
            "Pages by cache group, form (open, or how they are sealed) and state.",
            labels=["model_name", "group", "form", "state"],
        )
        for p in stats.pages:
            states = [("active", p.active), ("free", p.free)]
            if not p.is_open:  # an open page is nobody's but its sequence's
                states.append(("cached", p.cached))
            for state, count in states:
                pages.add_metric([self._labels["model_name"], p.group, p.form, state], count)
        yield pages
        info = self._engine.info
        config = InfoMetricFamily(PREFIX + "cache_config", "How the cache is set up.", labels=["model_name"])
        config.add_metric(
            [self._labels["model_name"]],
            {
                "page_size": str(info.page_size),
                "key_codec": info.key_codec,
                "value_codec": info.value_codec,
                "kv_memory_bytes": str(info.kv_memory_bytes),
                "prefix_cache": str(info.prefix_cache).lower(),
            },
        )
        yield config

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric(list(self._labels.values()), value)
        return family
