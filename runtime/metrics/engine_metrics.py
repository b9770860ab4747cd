"""What an engine counts while it runs: plain numbers, cheap enough for every token."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from octavo.runtime.metrics import definitions
from octavo.runtime.metrics.definitions import METRICS, Metric
from octavo.runtime.metrics.snapshots import Snapshot, histogram_snapshot

if TYPE_CHECKING:
    from octavo.runtime.request import Request
    from octavo.runtime.scheduler import Scheduler
    from octavo.runtime.speculation.verified import SpeculationCounts

# Times and sizes of the others say how patient a client was, not how the engine did.
_COMPLETED = ("stop", "length")


class Histogram:
    """Counts values by the first bucket whose bound is not below them."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> Any:
        return histogram_snapshot(self._bounds, self._counts, self._sum)


class EngineMetrics:
    """Belongs to one engine and, like it, to one thread.

    The `observe_...` methods are called when the state they speak of is final: a step that is
    rolled back is not observed.
    """

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._prompt_tokens_cached = 0
        self._generation_tokens = 0
        self._admission_rejections = 0
        self._ended = dict.fromkeys(definitions.REQUEST_SUCCESS.label_values, 0)
        self._histograms: dict[str, Histogram] = {}
        self._iteration_tokens = self._histogram(definitions.ITERATION_TOKENS)
        self._iteration_time = self._histogram(definitions.ITERATION_TIME)
        self._time_to_first_token = self._histogram(definitions.TIME_TO_FIRST_TOKEN)
        self._inter_token_latency = self._histogram(definitions.INTER_TOKEN_LATENCY)
        self._time_per_output_token = self._histogram(definitions.TIME_PER_OUTPUT_TOKEN)
        self._e2e_latency = self._histogram(definitions.E2E_REQUEST_LATENCY)
        self._queue_time = self._histogram(definitions.REQUEST_QUEUE_TIME)
        self._prefill_time = self._histogram(definitions.REQUEST_PREFILL_TIME)
        self._decode_time = self._histogram(definitions.REQUEST_DECODE_TIME)
        self._inference_time = self._histogram(definitions.REQUEST_INFERENCE_TIME)
        self._request_prompt_tokens = self._histogram(definitions.REQUEST_PROMPT_TOKENS)
        self._request_generation_tokens = self._histogram(definitions.REQUEST_GENERATION_TOKENS)
        self._request_num_preemptions = self._histogram(definitions.REQUEST_NUM_PREEMPTIONS)
        self._params_n = self._histogram(definitions.REQUEST_PARAMS_N)
        self._params_max_tokens = self._histogram(definitions.REQUEST_PARAMS_MAX_TOKENS)

    def observe_params(self, n: int, max_tokens: int | None) -> None:
        """A request was queued, whatever the number of completions that it will be split into."""
        self._params_n.observe(n)
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)

    def observe_scheduled(self, request: Request) -> None:
        """The first step that computes the request was committed; never for a fork of another."""
        self._prompt_tokens += request.num_prompt_tokens
        self._prompt_tokens_cached += request.num_cached_tokens or 0

    def observe_rejection(self) -> None:
        """A request was not queued because the queue was full."""
        self._admission_rejections += 1

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step that computed `num_tokens` was committed."""
        self._iteration_tokens.observe(num_tokens)
        self._iteration_time.observe(seconds)

    def observe_tokens(self, request: Request, count: int) -> None:
        """The request gained `count` tokens at once and `times.mark_tokens` has taken note."""
        self._generation_tokens += count
        times = request.times
        if times.token_gap is not None:
            self._inter_token_latency.observe(times.token_gap)
        elif times.first_token is not None:
            self._time_to_first_token.observe(times.first_token - times.arrival)

    def observe_finished(self, request: Request) -> None:
        """The request has its reason and its time of finishing, and no more tokens will come."""
        assert request.finish_reason is not None
        self._ended[request.finish_reason] += 1
        if request.finish_reason not in _COMPLETED:
            return
        self._request_prompt_tokens.observe(request.num_prompt_tokens)
        self._request_generation_tokens.observe(request.num_output_tokens)
        self._request_num_preemptions.observe(request.num_preemptions)
        metrics = request.times.metrics(
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_preemptions=request.num_preemptions,
        )
        for histogram, seconds in (
            (self._queue_time, metrics.queue_time),
            (self._prefill_time, metrics.prefill_time),
            (self._decode_time, metrics.decode_time),
            (self._inference_time, metrics.inference_time),
            (self._time_per_output_token, metrics.time_per_output_token),
            (self._e2e_latency, metrics.total_time),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def snapshot(
        self, scheduler: Scheduler, speculation: SpeculationCounts | None = None
    ) -> Snapshot:
        """Every metric of `METRICS`, in its order; what the parts know themselves is read here."""
        pool = scheduler.pool
        stats = None if scheduler.prefix_cache is None else scheduler.prefix_cache.stats
        values: Snapshot = {
            definitions.NUM_REQUESTS_RUNNING.name: len(scheduler.running),
            definitions.NUM_REQUESTS_WAITING.name: len(scheduler.waiting),
            definitions.KV_CACHE_USAGE.name: 1 - pool.num_available / pool.num_blocks,
            definitions.NUM_PREEMPTIONS.name: scheduler.num_preemptions,
            definitions.PROMPT_TOKENS.name: self._prompt_tokens,
            definitions.PROMPT_TOKENS_CACHED.name: self._prompt_tokens_cached,
            definitions.GENERATION_TOKENS.name: self._generation_tokens,
            definitions.REQUEST_SUCCESS.name: dict(self._ended),
            definitions.ADMISSION_REJECTIONS.name: self._admission_rejections,
            definitions.PREFIX_CACHE_QUERIES.name: 0 if stats is None else stats.queries,
            definitions.PREFIX_CACHE_HITS.name: 0 if stats is None else stats.hits,
            definitions.PREFIX_CACHE_EVICTIONS.name: 0 if stats is None else stats.evictions,
        }
        values |= _speculation(speculation)
        for name, histogram in self._histograms.items():
            values[name] = histogram.snapshot()
        return {name: values[name] for name in METRICS}

    def _histogram(self, metric: Metric) -> Histogram:
        return self._histograms.setdefault(metric.name, Histogram(metric.buckets))


def _speculation(counts: SpeculationCounts | None) -> Snapshot:
    per_position = dict.fromkeys(definitions.SPEC_NUM_ACCEPTED_TOKENS_PER_POS.label_values, 0)
    if counts is not None:
        for position, count in enumerate(counts.accepted_per_position):
            per_position[str(position)] = count
    return {
        definitions.SPEC_NUM_DRAFTS.name: counts.num_drafts if counts else 0,
        definitions.SPEC_NUM_DRAFT_TOKENS.name: counts.num_draft_tokens if counts else 0,
        definitions.SPEC_NUM_ACCEPTED_TOKENS.name: counts.num_accepted_tokens if counts else 0,
        definitions.SPEC_NUM_ACCEPTED_TOKENS_PER_POS.name: per_position,
        definitions.SPEC_NUM_WITHHELD.name: counts.num_withheld if counts else 0,
        definitions.SPEC_NUM_FAILURES.name: counts.num_failures if counts else 0,
    }
