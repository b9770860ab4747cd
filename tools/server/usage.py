"""Counts what one request used."""

from __future__ import annotations

from octavo.runtime.outputs import RequestOutput
from octavo.tools.server.requests import GenerationRequest
from octavo.tools.server.responses import Usage


class UsageCount:
    """Of all prompts and choices of a request, up to now."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # number -> tokens, those of them cached
        self._num_generated = 0

    def add(self, prompt_index: int, output: RequestOutput, *, generated: bool = True) -> None:
        """`output` holds what is new; `generated`: whether the client gets it."""
        sizes = len(output.prompt_token_ids), output.num_cached_tokens
        self._prompts[prompt_index] = sizes
        if generated:
            self._num_generated += sum(len(one.token_ids) for one in output.outputs)

    def total(self) -> Usage:
        num_prompt = sum(tokens for tokens, _ in self._prompts.values())
        num_cached = sum(cached for _, cached in self._prompts.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def of_chunk(self, request: GenerationRequest) -> dict[str, Usage | None]:
        """The field in a chunk with choices, as the stream's options say: none, null, up to now."""
        options = request.stream_options
        if options is None or not options.include_usage:
            return {}
        return {"usage": self.total() if options.continuous_usage_stats else None}
