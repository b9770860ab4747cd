"""What AsyncLLM and its engine say to each other; in a thread these objects, to a child as bytes.

A request is known by a `key` that is never used twice, not by its user's id: what is still on its
way for a request can not be taken for another one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from octavo.runtime.metrics.snapshots import Snapshot
    from octavo.runtime.outputs import RequestOutput
    from octavo.runtime.sampling.beam_search import BeamSearchParams
    from octavo.runtime.sampling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class AddRequest:
    """`params` have the output_kind DELTA or FINAL_ONLY: an output never says a thing twice."""

    key: int
    token_ids: list[int]
    cache_salt: str
    params: SamplingParams | BeamSearchParams
    priority: int


@dataclass(frozen=True, slots=True)
class AbortRequest:
    key: int


@dataclass(frozen=True, slots=True)
class PinPrefix:
    """Answered by a Reply."""

    key: int
    token_ids: list[int]
    cache_salt: str


@dataclass(frozen=True, slots=True)
class ReleasePin:
    """`key`: the one of the PinPrefix."""

    key: int


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Answered by a Reply."""

    key: int


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """Answered by a Reply whose value is a Snapshot."""

    key: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The engine ends after its current step, with whatever is open."""


Command: TypeAlias = (
    AddRequest | AbortRequest | PinPrefix | ReleasePin | ResetPrefixCache | ReadMetrics | Shutdown
)

# What has become of a request: its output, or the error that ended it.
Outcome: TypeAlias = "tuple[int, RequestOutput | Exception]"


@dataclass(frozen=True, slots=True)
class Started:
    """The engine takes commands. `bundle`: the folder of the engine that was loaded or built."""

    bundle: str


@dataclass(frozen=True, slots=True)
class StartFailed:
    error: Exception


@dataclass(frozen=True, slots=True)
class Progress:
    """What happened since the one before; even without outcomes it says that the engine lives."""

    outcomes: Sequence[Outcome] = ()
    metrics: Snapshot | None = None  # at most once a second


@dataclass(frozen=True, slots=True)
class Reply:
    key: int
    value: Snapshot | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine can not go on after this error."""

    error: Exception


Event: TypeAlias = Started | StartFailed | Progress | Reply | Failed
