"""What a chat says beside the answers: times, cache hits, what was left out or cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.tools import console

if TYPE_CHECKING:
    from rich.table import Table

    from octavo.runtime import RequestOutput
    from octavo.runtime.metrics.snapshots import Snapshot


def summary(output: RequestOutput) -> str:
    """Such as: 184 prompt tokens, 160 cached (87 %), first token 24 ms, 31 tokens/s."""
    num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
    metrics = output.metrics
    parts = [
        f"{num_prompt} prompt tokens",
        f"{num_cached} cached ({_share(num_cached, num_prompt)})",
    ]
    if metrics.time_to_first_token is not None:
        parts.append(f"first token {metrics.time_to_first_token * 1e3:.0f} ms")
    if metrics.time_per_output_token:
        parts.append(f"{1 / metrics.time_per_output_token:.0f} tokens/s")
    return ", ".join(parts)


def dropped(num_exchanges: int, context_len: int) -> str:
    what = "exchange was" if num_exchanges == 1 else f"{num_exchanges} exchanges were"
    return f"the oldest {what} dropped: the conversation no longer fits {context_len} tokens"


def cut(context_len: int, max_tokens: int | None) -> str:
    """Why an answer ended too early: by `max_tokens`, or None where the context is full."""
    if max_tokens is None:
        return f"cut: prompt and answer fill the {context_len} tokens of context"
    return f"cut after {max_tokens} tokens: --max-tokens allows more"


def statistics(metrics: Snapshot) -> Table:
    """What the engine has done since it was loaded."""
    from octavo.runtime.metrics import definitions

    prompt_tokens = metrics[definitions.PROMPT_TOKENS.name]
    cached = metrics[definitions.PROMPT_TOKENS_CACHED.name]
    ended = metrics[definitions.REQUEST_SUCCESS.name]
    table = console.table("", "what", "value>")
    for what, value in {
        "answers": f"{sum(ended.values()):,}",
        "of them interrupted": f"{ended['abort']:,}",
        "prompt tokens": f"{prompt_tokens:,}",
        "of them cached": f"{cached:,} ({_share(cached, prompt_tokens)})",
        "generated tokens": f"{metrics[definitions.GENERATION_TOKENS.name]:,}",
        "cached blocks given up": f"{metrics[definitions.PREFIX_CACHE_EVICTIONS.name]:,}",
        "first token, median": _milliseconds(metrics[definitions.TIME_TO_FIRST_TOKEN.name]["p50"]),
        "between tokens, median": _milliseconds(
            metrics[definitions.INTER_TOKEN_LATENCY.name]["p50"]
        ),
    }.items():
        table.add_row(what, value)
    return table


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
