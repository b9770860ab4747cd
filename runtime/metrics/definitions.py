"""Every metric of an engine, declared once: the snapshot, Prometheus and docs/metrics.md follow it.

Names, meanings and bucket bounds are those of vLLM 0.32 (vllm/v1/metrics/loggers.py, buckets.py)
where the meaning is the same; only the prefix differs. Its bounds are kept and finer ones added
below them: a small model has finished a request before vLLM's first bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from octavo.runtime.request import FinishReason

PREFIX = "octavo:"
MOST_DRAFT_POSITIONS = 32  # what a build may ask for


@dataclass(frozen=True)
class Metric:
    """A counter only grows, a gauge is the value of now, a histogram counts values in buckets."""

    name: str  # the key in a snapshot
    kind: Literal["counter", "gauge", "histogram"]
    documentation: str
    label: str | None = None  # the value is divided by it: a dict over `label_values`
    label_values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # ascending upper bounds, inclusive; an infinite one follows

    @property
    def exposed_name(self) -> str:
        """The name in Prometheus, to which it adds `_total` for a counter."""
        return PREFIX + self.name


METRICS: dict[str, Metric] = {}


def _declare(metric: Metric) -> Metric:
    assert metric.name not in METRICS, f"{metric.name} is declared twice"
    METRICS[metric.name] = metric
    return metric


def _gauge(name: str, documentation: str) -> Metric:
    return _declare(Metric(name, "gauge", documentation))


def _counter(
    name: str, documentation: str, label: str | None = None, label_values: Sequence[str] = ()
) -> Metric:
    return _declare(Metric(name, "counter", documentation, label, tuple(label_values)))


def _histogram(name: str, documentation: str, buckets: Sequence[float]) -> Metric:
    return _declare(Metric(name, "histogram", documentation, buckets=tuple(buckets)))


_COMPLETIONS = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)
# vLLM ends these at its max_model_len; one end for every engine lets dashboards compare engines.
_REQUEST_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5) if m * 10**e <= 200_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# fmt: off
_STEP_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.0075,
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)
_REQUEST_SECONDS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2,
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on

NUM_REQUESTS_RUNNING = _gauge(
    "num_requests_running", "Requests that take part in the engine's steps."
)
NUM_REQUESTS_WAITING = _gauge(
    "num_requests_waiting", "Requests in the queue, preempted ones included."
)
KV_CACHE_USAGE = _gauge(
    "kv_cache_usage_perc",
    "Share of the cache's blocks that requests use, 1 is all of them; blocks kept only for later "
    "prefix hits do not count.",
)

NUM_PREEMPTIONS = _counter(
    "num_preemptions", "Times a request gave up its cache blocks to another one."
)
PROMPT_TOKENS = _counter(
    "prompt_tokens", "Prompt tokens of the requests whose computation began, cached ones included."
)
PROMPT_TOKENS_CACHED = _counter(
    "prompt_tokens_cached", "Prompt tokens that the prefix cache held when their request first ran."
)
GENERATION_TOKENS = _counter("generation_tokens", "Tokens generated.")
REQUEST_SUCCESS = _counter(
    "request_success", "Requests that ended.", "finished_reason", get_args(FinishReason)
)
ADMISSION_REJECTIONS = _counter(
    "admission_rejections", "Requests that were refused because the queue was full."
)
PREFIX_CACHE_QUERIES = _counter(
    "prefix_cache_queries", "Tokens that were looked up in the prefix cache."
)
PREFIX_CACHE_HITS = _counter("prefix_cache_hits", "Tokens that were found in the prefix cache.")
PREFIX_CACHE_EVICTIONS = _counter(
    "prefix_cache_evictions", "Cached blocks whose content was given up for other tokens."
)

_SPEC_POSITIONS = tuple(str(position) for position in range(MOST_DRAFT_POSITIONS))
SPEC_NUM_DRAFTS = _counter(
    "spec_decode_num_drafts", "Times that drafts of a sequence were verified."
)
SPEC_NUM_DRAFT_TOKENS = _counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
SPEC_NUM_ACCEPTED_TOKENS = _counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
SPEC_NUM_ACCEPTED_TOKENS_PER_POS = _counter(
    "spec_decode_num_accepted_tokens_per_pos",
    "Draft tokens accepted, by their place among the drafts.",
    "position",
    _SPEC_POSITIONS,
)
SPEC_NUM_WITHHELD = _counter(
    "spec_decode_num_withheld",
    "Times that a sequence got no drafts because they would have cost more than they gain.",
)
SPEC_NUM_FAILURES = _counter(
    "spec_decode_num_failures", "Drafters that were turned off because they failed."
)

ITERATION_TOKENS = _histogram(
    "iteration_tokens_total", "Tokens computed in one step.", _STEP_TOKENS
)
ITERATION_TIME = _histogram(
    "iteration_time_seconds", "Time of one step, from its plan to its commit.", _STEP_SECONDS
)
TIME_TO_FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    "Time from a request's arrival to its first token.",
    _FIRST_TOKEN_SECONDS,
)
INTER_TOKEN_LATENCY = _histogram(
    "inter_token_latency_seconds",
    "Time between two steps that gave a request tokens, once for each step after the first.",
    _TOKEN_SECONDS,
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "request_time_per_output_token_seconds",
    "A request's mean time for a token after the first.",
    _TOKEN_SECONDS,
)
E2E_REQUEST_LATENCY = _histogram(
    "e2e_request_latency_seconds", "Time from a request's arrival to its end.", _REQUEST_SECONDS
)
REQUEST_QUEUE_TIME = _histogram(
    "request_queue_time_seconds",
    "Time from a request's arrival to the first step that computes it.",
    _REQUEST_SECONDS,
)
REQUEST_PREFILL_TIME = _histogram(
    "request_prefill_time_seconds",
    "Time from the first step that computes a request to its first token.",
    _REQUEST_SECONDS,
)
REQUEST_DECODE_TIME = _histogram(
    "request_decode_time_seconds",
    "Time from a request's first token to its last.",
    _REQUEST_SECONDS,
)
REQUEST_INFERENCE_TIME = _histogram(
    "request_inference_time_seconds",
    "Time from the first step that computes a request to its last token.",
    _REQUEST_SECONDS,
)
REQUEST_PROMPT_TOKENS = _histogram(
    "request_prompt_tokens", "Tokens of a request's prompt.", _REQUEST_TOKENS
)
REQUEST_GENERATION_TOKENS = _histogram(
    "request_generation_tokens", "Tokens generated for a request.", _REQUEST_TOKENS
)
REQUEST_NUM_PREEMPTIONS = _histogram(
    "request_num_preemptions", "Times a request was preempted.", _PREEMPTIONS
)
REQUEST_PARAMS_N = _histogram("request_params_n", "The parameter n of a request.", _COMPLETIONS)
REQUEST_PARAMS_MAX_TOKENS = _histogram(
    "request_params_max_tokens", "The parameter max_tokens of a request.", _REQUEST_TOKENS
)
