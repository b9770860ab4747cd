"""What `LLM(speculative=...)` takes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.backends.manifest import DrafterRecord, Limits, Manifest
from octavo.backends.null.bundle import make_manifest
from octavo.graphs.errors import CapacityError, RequestError
from octavo.runtime import LLM, SamplingParams
from octavo.runtime.speculation.options import DrafterOptions, SpeculativeOptions, resolve
from octavo.tools.speculative_options import drafters_to_use
from tests.unit.runtime_bundles import write_text_engine

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, block_size=4)


def manifest(*drafters: DrafterRecord, **changes: Any) -> Manifest:
    made = make_manifest(vocab_size=97, limits=LIMITS)
    return made.model_copy(update={"drafters": drafters, **changes})


EAGLE = DrafterRecord(method="eagle3", num_speculative_tokens=3, path="drafter/eagle3")
NGRAM = DrafterRecord(method="ngram", num_speculative_tokens=6, prompt_lookup_max=4)


def test_an_engine_without_drafters_has_none_unless_ngrams_are_asked_for() -> None:
    assert resolve(None, manifest()) == resolve(True, manifest()) == SpeculativeOptions()
    assert resolve("ngram", manifest()).drafters == (DrafterOptions("ngram", 8),)


def test_an_engines_own_drafters_are_taken_with_its_options_ngrams_first() -> None:
    ngram = DrafterOptions("ngram", 6, prompt_lookup_max=4)
    eagle = DrafterOptions("eagle3", 3, "drafter/eagle3")
    built = manifest(EAGLE, NGRAM)
    assert resolve(None, built).drafters == (ngram, eagle)
    assert resolve(["eagle3", "ngram"], built).drafters == (ngram, eagle)
    assert resolve("eagle3", built).drafters == (eagle,)
    assert resolve(False, built).drafters == ()


def test_a_mapping_changes_what_it_names() -> None:
    options = resolve(
        {"method": "ngram", "num_speculative_tokens": 12, "prompt_lookup_min": 3,
         "adaptive": False},
        manifest(NGRAM),
    )  # fmt: skip
    assert options == SpeculativeOptions((DrafterOptions("ngram", 12, None, 3, 4),), adaptive=False)
    everyone = resolve({"num_speculative_tokens": 2}, manifest(EAGLE, NGRAM))
    assert [one.num_speculative_tokens for one in everyone.drafters] == [2, 2]


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (3, RequestError, "speculative is 3: give True, False, the name of a drafter"),
    ("medusa", RequestError, "the engine has no drafter 'medusa', it has ngram, eagle3: build it"),
    ({"k": 3}, RequestError, "speculative has no option 'k': choose from method, "),
    ({"adaptive": 1}, RequestError, "adaptive is 1, it must be True or False"),
    ({"acceptance": "greedy"}, RequestError, "acceptance is 'greedy', it must be one of"),
    ({"acceptance": "rejection"}, RequestError, "the engine has no graph for that"),
    ({"num_speculative_tokens": 0}, RequestError, "num_speculative_tokens is 0, it must be"),
    ({"num_speculative_tokens": 4}, CapacityError, "num_speculative_tokens is 4, .* at most 3"),
    (
        {"method": "ngram", "num_speculative_tokens": 17},
        CapacityError,
        "num_speculative_tokens is 17, the engine was built for at most 16 with ngram",
    ),
    (
        {"method": "ngram", "prompt_lookup_min": 9},
        RequestError,
        "prompt_lookup_min is 9 and prompt_lookup_max 8: the first must not be the larger",
    ),
]


@pytest.mark.parametrize(("given", "kind", "sentence"), REFUSED)
def test_what_is_refused(given: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        resolve(given, manifest(EAGLE))


def test_rejection_needs_the_engines_graph() -> None:
    built = manifest(EAGLE, accept_file="accept.onnx")
    assert resolve({"acceptance": "rejection"}, built).acceptance == "rejection"


def test_the_command_lines_words() -> None:
    assert drafters_to_use(None) is None
    assert drafters_to_use("off") is False
    assert drafters_to_use("ngram") == {"method": "ngram"}
    assert drafters_to_use("ngram,num_speculative_tokens=8,adaptive=false") == {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "adaptive": False,
    }


def test_an_llm_drafts_and_its_metrics_say_so(tmp_path: Path) -> None:
    """Of two letters, so that what came before comes again."""
    path = write_text_engine(tmp_path / "engine")
    with LLM(path, speculative={"method": "ngram", "adaptive": False}) as llm:
        params = SamplingParams(allowed_token_ids=[65, 66], max_tokens=16, temperature=0.0)
        llm.generate({"prompt_token_ids": [65, 66] * 8}, params)
        metrics = llm.metrics()
    assert metrics["spec_decode_num_drafts"] >= 1
    assert metrics["spec_decode_num_draft_tokens"] >= metrics["spec_decode_num_accepted_tokens"]
    per_position = metrics["spec_decode_num_accepted_tokens_per_pos"]
    assert sum(per_position.values()) == metrics["spec_decode_num_accepted_tokens"]
    with pytest.raises(RequestError, match="the engine has no drafter 'eagle'"):
        LLM(path, speculative="eagle")
