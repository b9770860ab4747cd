"""The replay of request traces: hits worked out by hand, the command, the picture."""

from __future__ import annotations

import gzip
import json
import xml.etree.ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.tools.bench.prefix_traces import app, belady_hits, read_trace, replay

# Four blocks at most; A = [0, 1], B = [2, 3], C = [4, 5].
#   A: nothing    B: nothing, the cache is full
#   C: nothing. LRU gives up A, the oldest; Belady B, which never comes again
#   A: LRU finds nothing and gives up B; Belady finds 2
#   C, A: both are cached now
SMALL = [[0, 1], [2, 3], [4, 5], [0, 1], [4, 5], [0, 1]]


def test_hits_of_a_small_trace() -> None:
    assert replay(SMALL, 4, "lru") == 4
    assert belady_hits(SMALL, 4) == 6
    assert replay(SMALL, 6, "lru") == replay(SMALL, 6, "lhd") == belady_hits(SMALL, 6) == 6


def test_only_the_longest_cached_prefix_is_found() -> None:
    """[0, 1, 2] then [3]: a pool of three gives up block 2, the end; then a beginning is found."""
    trace = [[0, 1, 2], [3], [0, 1, 4], [0, 1, 2]]
    for policy in ("lru", "lhd"):
        assert replay(trace, 3, policy) == 2 + 2
    assert belady_hits(trace, 3) == 2 + 2


def test_a_request_larger_than_the_pool_finds_nothing_and_disturbs_nothing() -> None:
    trace = [[0, 1], [0, 1, 2, 3], [0, 1]]
    assert replay(trace, 3, "lru") == replay(trace, 3, "lhd") == belady_hits(trace, 3) == 2


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for ids in SMALL:
            file.write(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n")
    return path


def test_traces_are_read_compressed_or_not(trace_file: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(gzip.decompress(trace_file.read_bytes()))
    assert read_trace(trace_file) == read_trace(plain) == SMALL


def test_the_command_prints_a_table_and_writes_numbers_and_a_picture(
    trace_file: Path, tmp_path: Path
) -> None:
    numbers, picture = tmp_path / "out" / "numbers.json", tmp_path / "out" / "picture.svg"
    options = ["--sizes", "6,4", "--json", str(numbers), "--plot", str(picture), "--jobs", "1"]
    result = CliRunner().invoke(app, [str(trace_file), *options])
    assert result.exit_code == 0, result.output
    assert "share of 12 blocks found" in result.output
    found = {(one["num_blocks"], one["policy"]): one for one in json.loads(numbers.read_text())}
    assert found[4, "lru"] == {
        "trace": "small",
        "policy": "lru",
        "num_blocks": 4,
        "queries": 12,
        "hits": 4,
        "hit_rate": 0.333333,
    }
    assert found[4, "belady"]["hits"] == found[6, "lhd"]["hits"] == 6
    root = xml.etree.ElementTree.fromstring(picture.read_text())
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3
    texts = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"small", "lru", "lhd", "belady"} <= texts


@pytest.mark.parametrize("sizes", ["", "0", "1,x", "-5"])
def test_sizes_that_are_none_are_refused(trace_file: Path, sizes: str) -> None:
    result = CliRunner().invoke(app, [str(trace_file), f"--sizes={sizes}"])
    assert result.exit_code == 1
    assert f"sizes are {sizes!r}, they must be numbers of blocks" in result.output


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"tokens": [1]}\n')
    result = CliRunner().invoke(app, [str(path), "--sizes", "4"])
    assert result.exit_code == 1
    assert "other.jsonl is no trace of JSON lines with the field hash_ids" in result.output
