"""Which metrics a model shows on the server's metrics port, and under which names."""

from __future__ import annotations

from typing import Any

from octavo.runtime.metrics import definitions
from octavo.runtime.metrics.definitions import METRICS, Metric

# What dashboards of Triton's vLLM backend ask for.
VLLM_NAMES = {
    "vllm:prompt_tokens_total": definitions.PROMPT_TOKENS,
    "vllm:generation_tokens_total": definitions.GENERATION_TOKENS,
    "vllm:time_to_first_token_seconds": definitions.TIME_TO_FIRST_TOKEN,
    "vllm:time_per_output_token_seconds": definitions.INTER_TOKEN_LATENCY,
    "vllm:e2e_request_latency_seconds": definitions.E2E_REQUEST_LATENCY,
}


def exposed_metrics() -> list[dict[str, Any]]:
    """What `ServerMetrics` in the stub needs to know of each."""
    return [
        {
            "name": metric.name,
            "kind": metric.kind,
            "label": metric.label,
            "documentation": metric.documentation,
            "exposed": [
                _exposed_name(metric),
                *(name for name, other in VLLM_NAMES.items() if other is metric),
            ],
        }
        for metric in METRICS.values()
    ]


def _exposed_name(metric: Metric) -> str:
    return metric.exposed_name + ("_total" if metric.kind == "counter" else "")
