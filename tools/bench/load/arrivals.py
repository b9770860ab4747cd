"""When requests arrive, and with which prompts: the same for the same seed."""

from __future__ import annotations

import math

import numpy as np

from octavo.tools.bench.load.plan import LoadPlan

# Common words, of which most tokenizers have one token each.
_TEXT = """
the of and to in is was for on are with as his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she
many some so these would other into has more her two like him see time could no make than first been
its who now people my made over did down only way find use may water long little very after words
called just where most know
"""


def arrival_times(plan: LoadPlan) -> list[float]:
    """Seconds from the start of the run, ascending; all 0 where nothing is spread over time."""
    if not math.isfinite(plan.request_rate):
        return [0.0] * plan.num_requests
    if plan.arrivals == "constant":
        return [number / plan.request_rate for number in range(plan.num_requests)]
    gaps = np.random.default_rng(plan.seed).exponential(
        1.0 / plan.request_rate, plan.num_requests - 1
    )
    return [0.0, *np.cumsum(gaps).tolist()]


def prompts(plan: LoadPlan) -> list[str]:
    """One for each request, warm-up included; those given are taken in turn."""
    count = plan.num_warmup + plan.num_requests
    if plan.prompts:
        return [plan.prompts[number % len(plan.prompts)] for number in range(count)]
    choose = np.random.default_rng([plan.seed, 1])
    words = _TEXT.split()
    shared = choose.choice(words, plan.prefix_len).tolist()
    own = plan.input_len - plan.prefix_len
    return [" ".join([*shared, *choose.choice(words, own).tolist()]) for _ in range(count)]


def moments_of_leaving(plan: LoadPlan) -> list[int | None]:
    """For each request the number of tokens after which it is left; None: it is not."""
    choose = np.random.default_rng([plan.seed, 2])
    leaves = choose.random(plan.num_requests) < plan.disconnect_share
    after = choose.integers(0, plan.output_len, plan.num_requests)
    return [int(tokens) if left else None for left, tokens in zip(leaves, after, strict=True)]
