"""What a user may say of speculation when an engine is loaded, checked against the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from octavo.graphs.errors import CapacityError, RequestError
from octavo.runtime.capacity import check_positive

if TYPE_CHECKING:
    from octavo.backends.manifest import DrafterRecord, Manifest

ACCEPTANCES = ("exact", "rejection")
DEFAULT_NUM_TOKENS = 8  # of n-grams, where nothing is said
DEFAULT_LOOKUP_MIN, DEFAULT_LOOKUP_MAX = 2, 8
NGRAM = "ngram"

# What `speculative=` may be: see `resolve`.
Speculative = bool | str | Mapping[str, Any] | Sequence[str] | None


@dataclass(frozen=True)
class DrafterOptions:
    """One drafter, in the order in which they are asked."""

    method: str
    num_speculative_tokens: int
    path: str | None = None  # of its bundle in the engine's, if it is compiled
    prompt_lookup_min: int = DEFAULT_LOOKUP_MIN
    prompt_lookup_max: int = DEFAULT_LOOKUP_MAX


@dataclass(frozen=True)
class SpeculativeOptions:
    """How an engine speculates.

    adaptive    whether fewer tokens are drafted where they cost more than they gain
    acceptance  "exact": every token is the one that would have come without speculation;
                "rejection": sampled tokens have the same distribution, and more drafts of a
                drafter that samples are accepted
    """

    drafters: tuple[DrafterOptions, ...] = ()
    adaptive: bool = True
    acceptance: Literal["exact", "rejection"] = "exact"


_KEYS = (
    "method",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "adaptive",
    "acceptance",
)


def resolve(speculative: Speculative, manifest: Manifest) -> SpeculativeOptions:
    """The options of an engine.

    None or True takes every drafter that the engine has, False none, a name or several names those
    drafters; "ngram" needs nothing compiled and is in every engine. A mapping may have "method" (as
    before), "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "adaptive" and
    "acceptance". n-grams are asked first. Raises RequestError for anything else, CapacityError for
    more tokens than the engine verifies.
    """
    if speculative is False:
        return SpeculativeOptions()
    given = _mapping(speculative)
    built: dict[str, DrafterRecord] = {record.method: record for record in manifest.drafters}
    methods = _methods(given.get("method"), tuple(built))
    drafters = [_drafter(method, built, given, manifest) for method in methods]
    drafters.sort(key=lambda drafter: drafter.method != NGRAM)
    adaptive = given.get("adaptive", True)
    if not isinstance(adaptive, bool):
        raise RequestError(f"adaptive is {adaptive!r}, it must be True or False")
    acceptance = given.get("acceptance", "exact")
    if acceptance not in ACCEPTANCES:
        raise RequestError(f"acceptance is {acceptance!r}, it must be one of {ACCEPTANCES}")
    if acceptance == "rejection" and manifest.accept_file is None:
        raise RequestError(
            'acceptance is "rejection" and the engine has no graph for that, only those built with '
            'a compiled drafter have: use "exact", or build it with `--speculative`'
        )
    return SpeculativeOptions(tuple(drafters), adaptive, acceptance)


def _mapping(speculative: Speculative) -> Mapping[str, Any]:
    if speculative is None or speculative is True:
        return {}
    if isinstance(speculative, Mapping):
        unknown = sorted(str(key) for key in speculative if key not in _KEYS)
        if unknown:
            raise RequestError(
                f"speculative has no option {unknown[0]!r}: choose from {', '.join(_KEYS)}"
            )
        return speculative
    if isinstance(speculative, str | list | tuple):
        return {"method": speculative}
    raise RequestError(
        f"speculative is {speculative!r}: give True, False, the name of a drafter, several names, "
        "or a mapping of options"
    )


def _methods(named: Any, built: tuple[str, ...]) -> tuple[str, ...]:
    if named is None:
        return built
    methods = (named,) if isinstance(named, str) else tuple(named)
    for method in methods:
        if method != NGRAM and method not in built:
            have = ", ".join((NGRAM, *(one for one in built if one != NGRAM)))
            raise RequestError(
                f"the engine has no drafter {method!r}, it has {have}: build it with "
                "`build-engine --speculative`"
            )
    return tuple(dict.fromkeys(methods))


def _drafter(
    method: str,
    built: Mapping[str, DrafterRecord],
    given: Mapping[str, Any],
    manifest: Manifest,
) -> DrafterOptions:
    record = built.get(method)
    options = DrafterOptions(method, min(DEFAULT_NUM_TOKENS, manifest.max_draft_tokens))
    if record is not None:
        options = DrafterOptions(
            method,
            record.num_speculative_tokens,
            record.path,
            record.prompt_lookup_min or DEFAULT_LOOKUP_MIN,
            record.prompt_lookup_max or DEFAULT_LOOKUP_MAX,
        )
    changed = {key: given[key] for key in _KEYS[1:4] if given.get(key) is not None}
    if method != NGRAM:
        changed = {key: value for key, value in changed.items() if not key.startswith("prompt")}
    for key, value in changed.items():
        check_positive(key, value)
    options = replace(options, **changed)
    most = manifest.max_draft_tokens
    if record is not None and record.path is not None:
        most = record.num_speculative_tokens
    if options.num_speculative_tokens > most:
        raise CapacityError(
            f"num_speculative_tokens is {options.num_speculative_tokens}, the engine was built for "
            f"at most {most} with {method}: lower it or build the engine again"
        )
    if options.prompt_lookup_min > options.prompt_lookup_max:
        raise RequestError(
            f"prompt_lookup_min is {options.prompt_lookup_min} and prompt_lookup_max "
            f"{options.prompt_lookup_max}: the first must not be the larger one"
        )
    return options
