"""When things happened to a request, on the monotonic clock, and what follows from that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds; a value is None until what it measures has happened."""

    arrival_time: float  # on the clock of `time.monotonic`
    queue_time: float | None  # from arrival to the first step that computes the request
    time_to_first_token: float | None  # from arrival
    prefill_time: float | None  # from that first step to the first token
    decode_time: float | None  # from the first token to the last one so far
    inference_time: float | None  # both of them together
    time_per_output_token: float | None  # mean over the tokens after the first
    total_time: float | None  # from arrival to the end of the request
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    num_preemptions: int


@dataclass(slots=True)
class RequestTimes:
    """The raw marks that the engine sets as a request moves on."""

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    token_gap: float | None = None  # between the last two marks of tokens
    finished: float | None = None

    def mark_tokens(self, now: float) -> None:
        if self.last_token is None:
            self.first_token = now
        else:
            self.token_gap = now - self.last_token
        self.last_token = now

    def metrics(
        self, *, num_output_tokens: int, num_cached_tokens: int, num_preemptions: int
    ) -> RequestMetrics:
        decode_time = _between(self.first_token, self.last_token)
        time_per_output_token = None
        if decode_time is not None and num_output_tokens > 1:
            time_per_output_token = decode_time / (num_output_tokens - 1)
        return RequestMetrics(
            arrival_time=self.arrival,
            queue_time=_between(self.arrival, self.first_scheduled),
            time_to_first_token=_between(self.arrival, self.first_token),
            prefill_time=_between(self.first_scheduled, self.first_token),
            decode_time=decode_time,
            inference_time=_between(self.first_scheduled, self.last_token),
            time_per_output_token=time_per_output_token,
            total_time=_between(self.arrival, self.finished),
            num_cached_tokens=num_cached_tokens,
            num_preemptions=num_preemptions,
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
