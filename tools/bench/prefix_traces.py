"""`python -m octavo.tools.bench.prefix_traces`: what eviction policies find on request traces.

A trace is a file of JSON lines, gzip-compressed or not, with the field `hash_ids`: one id for each
block of a request's prompt, equal where the whole prefix up to the block's end is equal (the format
of Mooncake, FAST 2025). Requests are replayed one at a time, in order, against the real block pool
and prefix cache, without a model: blocks that are found are shared, the others allocated, all are
registered and released. Beside the policies stands Belady's bound: what a cache finds that knows
the future and gives up the block that is used again last.
"""

from __future__ import annotations

import gzip
import heapq
import json
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from octavo.graphs.errors import OctavoError
from octavo.runtime.cache.block_pool import BlockPool
from octavo.runtime.cache.eviction import POLICIES, make_policy
from octavo.runtime.cache.prefix_cache import PrefixCache
from octavo.runtime.request import Request
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.tools import console
from octavo.tools.bench import line_plot

Trace = Sequence[Sequence[int]]  # ids of each request's blocks

BELADY = "belady"
SIZES = (300, 500, 1000, 2000, 3000, 5000, 7000, 10000, 15000, 20000, 30000, 50000, 100000)
NEVER = 1 << 60

app = console.application("Replays request traces against the prefix cache.")


@dataclass(frozen=True)
class Replay:
    trace: str
    policy: str
    num_blocks: int
    queries: int  # blocks that were looked up
    hits: int  # blocks that were found

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries


@app.command()
@console.reports_errors
def compare(
    traces: Annotated[list[Path], typer.Argument(help="Traces: JSON lines, .gz or plain.")],
    sizes: Annotated[
        str, typer.Option(help="Sizes of the cache in blocks, with commas between.")
    ] = ",".join(map(str, SIZES)),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the numbers to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw them into this SVG file.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Replays at the same time.")] = 2,
) -> None:
    """Hit rates of every policy and of Belady's bound, by size of the cache."""
    chosen = _parse_sizes(sizes)
    results: list[Replay] = []
    with ProcessPoolExecutor(jobs) as executor:
        for path in traces:
            trace = read_trace(path)
            name = path.name.partition(".")[0]
            tasks = [(policy, size) for size in chosen for policy in (*POLICIES, BELADY)]
            results += executor.map(partial(_replay_task, name, trace), tasks)
    for path in traces:
        name = path.name.partition(".")[0]
        _print_table(name, [result for result in results if result.trace == name])
    if json_file is not None:
        content = [{**asdict(one), "hit_rate": round(one.hit_rate, 6)} for one in results]
        _write(json_file, json.dumps(content, indent=2) + "\n")
    if plot is not None:
        _write(plot, line_plot.svg(_panels(results), "blocks in the cache", "share found"))


def read_trace(path: Path) -> list[list[int]]:
    """The block ids of each request; OctavoError if the file is not such a trace."""
    try:
        content = path.read_bytes()
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
        return [[int(block) for block in json.loads(line)["hash_ids"]] for line in lines]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise OctavoError(
            f"{path} is no trace of JSON lines with the field hash_ids: {error}"
        ) from error


def replay(trace: Trace, num_blocks: int, policy: str) -> int:
    """Blocks found by a pool of `num_blocks`; requests that do not fit it find nothing."""
    pool = BlockPool(num_blocks, make_policy(policy, num_blocks))
    # An id stands for a whole block and its prefix: blocks of one token hold just that.
    cache = PrefixCache(pool, block_size=1)
    params = SamplingParams(max_tokens=1)
    hits = 0
    for ids in trace:
        if len(ids) > num_blocks:
            continue
        # The token after the last block, which is never taken from the cache.
        request = Request(
            "", [*ids, 0], params, max_model_len=len(ids) + 2, eos_token_ids=(), seed=0
        )
        chain = cache.match(request)
        hits += len(chain)
        for entry in chain:
            pool.acquire(entry.block_id)
        request.prefix_chain = chain
        request.block_ids = [entry.block_id for entry in chain]
        request.block_ids += pool.allocate(len(ids) - len(chain))
        request.num_computed_tokens = len(ids)
        cache.register(request)
        pool.release(request.block_ids)
    return hits


def belady_hits(trace: Trace, num_blocks: int) -> int:
    """Blocks found when the block whose next use is farthest away is evicted.

    Of blocks that are used next by the same request, the end of its prefix goes first. As a later
    block of a prefix is never used before an earlier one, what is cached is always whole prefixes.
    """
    cached: dict[int, int] = {}  # block to the request that uses it next
    farthest: list[tuple[int, int, int]] = []  # heap of (-next use, -index, block), some outdated
    hits = 0
    next_uses = _next_uses(trace, num_blocks)
    for ids, uses in zip(trace, next_uses, strict=True):
        if len(ids) > num_blocks:
            continue
        found = [cached.pop(block, None) is not None for block in ids]
        hits += sum(found)
        while len(cached) > num_blocks - len(ids):
            use, _, block = heapq.heappop(farthest)
            if cached.get(block) == -use:
                del cached[block]
        for index, (block, use) in enumerate(zip(ids, uses, strict=True)):
            cached[block] = use
            heapq.heappush(farthest, (-use, -index, block))
    return hits


def _next_uses(trace: Trace, num_blocks: int) -> list[list[int]]:
    """For each block of each request, the number of the next request with that block."""
    upcoming: dict[int, int] = {}
    uses = []
    for number in reversed(range(len(trace))):
        uses.append([upcoming.get(block, NEVER) for block in trace[number]])
        if len(trace[number]) <= num_blocks:
            upcoming.update(dict.fromkeys(trace[number], number))
    return uses[::-1]


def _replay_task(name: str, trace: Trace, task: tuple[str, int]) -> Replay:
    policy, size = task
    hits = belady_hits(trace, size) if policy == BELADY else replay(trace, size, policy)
    return Replay(name, policy, size, sum(map(len, trace)), hits)


def _parse_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise OctavoError(
            f"sizes are {text!r}, they must be numbers of blocks with commas between, such as "
            "1000,3000"
        )
    return sorted(sizes)


def _print_table(name: str, results: Sequence[Replay]) -> None:
    rates = {(result.num_blocks, result.policy): result for result in results}
    others = [policy for policy in POLICIES if policy != "lru"]
    table = console.table(
        f"{name}: share of {results[0].queries} blocks found",
        "blocks>",
        *(f"{policy}>" for policy in (*POLICIES, BELADY)),
        *(f"{policy} / lru>" for policy in others),
    )
    for size in sorted({result.num_blocks for result in results}):
        lru = rates[size, "lru"].hits
        table.add_row(
            f"{size}",
            *(f"{rates[size, policy].hit_rate:.1%}" for policy in (*POLICIES, BELADY)),
            *(f"{rates[size, policy].hits / lru:.2f}" if lru else "-" for policy in others),
        )
    console.print_tables(table)


def _panels(results: Sequence[Replay]) -> list[line_plot.Panel]:
    panels = []
    for name in dict.fromkeys(result.trace for result in results):
        lines = {
            policy: [
                (float(result.num_blocks), result.hit_rate)
                for result in results
                if (result.trace, result.policy) == (name, policy)
            ]
            for policy in (BELADY, *reversed(POLICIES))
        }
        panels.append(line_plot.Panel(name, lines))
    return panels


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    app()
