"""Turns prompts and parameters into the sequences that an engine runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from octavo.graphs.errors import RequestError
from octavo.runtime.beam_group import BeamGroup
from octavo.runtime.generation import BeamGeneration, Generation, SampledGeneration
from octavo.runtime.prompts import EncodedPrompt, Prompt, PromptReader
from octavo.runtime.request import Request
from octavo.runtime.sampling.beam_search import BeamSearch, BeamSearchParams
from octavo.runtime.sampling.grammars import Grammar, GrammarCompiler
from octavo.runtime.sampling.logits_processors import make_processors
from octavo.runtime.sampling.sampling_params import RequestOutputKind, SamplingParams
from octavo.runtime.text.output_text import OutputText
from octavo.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationFactory:
    """Checks requests against one engine; what it makes is in no queue yet.

    sampled_vocab_size  ids from this one on are padding of the vocabulary
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    sampled_vocab_size: int
    eos_token_ids: Sequence[int]
    max_model_len: int

    def make(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        priority: int = 0,
    ) -> Generation:
        """RequestError if the prompt or a parameter is refused."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority is {priority!r}, it must be an integer")
        encoded = PromptReader(self.tokenizer, self.vocab_size, self.max_model_len).read(prompt)
        if isinstance(params, BeamSearchParams):
            return self._beams(request_id, encoded, params, priority)
        if isinstance(params, SamplingParams):
            return self._samples(request_id, encoded, params, priority)
        raise RequestError(f"sampling_params are {params!r}: give SamplingParams")

    def _samples(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int
    ) -> Generation:
        params.check_vocabulary(self.sampled_vocab_size)
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise RequestError(
                "the engine has no tokenizer and knows no stop texts or bad words: "
                "give stop_token_ids"
            )
        grammar = self._grammar(params)
        seed = int.from_bytes(os.urandom(8)) if params.seed is None else params.seed
        leader, *followers = (
            self._sequence(request_id, prompt, params, priority, choice, seed, grammar)
            for choice in range(params.num_sequences)
        )
        leader.followers = tuple(followers)
        return SampledGeneration(request_id, prompt, params, [leader, *followers], self.tokenizer)

    def _sequence(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        priority: int,
        choice: int,
        seed: int = 0,
        grammar: Grammar | None = None,
    ) -> Request:
        return Request(
            f"{request_id}/{choice}" if choice else request_id,
            prompt.token_ids,
            params,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            seed=seed,
            choice=choice,
            priority=priority,
            cache_salt=prompt.cache_salt,
            processors=make_processors(
                params,
                eos_token_ids=self.eos_token_ids,
                vocab_size=self.sampled_vocab_size,
                encode=self._encode,
                grammar=grammar,
            ),
            text=self._text(params),
        )

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise RequestError(
                "structured_outputs needs a tokenizer and the engine has none: "
                "use allowed_token_ids or logits_processors"
            )
        if not (self.eos_token_ids or params.stop_token_ids):
            raise RequestError(
                "structured_outputs needs a token that ends the text and the model has none: "
                "give stop_token_ids"
            )
        return self._grammars.compile(params.grammar)

    @cached_property
    def _grammars(self) -> GrammarCompiler | None:
        """One for all requests: it makes its tables of the vocabulary once."""
        if self.tokenizer is None:
            return None
        return GrammarCompiler(self.tokenizer, self.sampled_vocab_size)

    def _text(self, params: SamplingParams) -> OutputText | None:
        """None where the text is needed at the end only: then it is decoded at once."""
        if self.tokenizer is None or not params.detokenize:
            return None
        if not params.stop and params.output_kind is RequestOutputKind.FINAL_ONLY:
            return None
        return OutputText(
            self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens),
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _beams(
        self, request_id: str, prompt: EncodedPrompt, params: BeamSearchParams, priority: int
    ) -> Generation:
        for token_id in params.stop_token_ids or ():
            if token_id >= self.sampled_vocab_size:
                raise RequestError(
                    f"token id {token_id} in stop_token_ids lies outside the vocabulary of "
                    f"{self.sampled_vocab_size}: give ids below that"
                )
        sequence_params = SamplingParams(
            temperature=0.0, max_tokens=params.max_tokens, ignore_eos=True, detokenize=False
        )
        root = self._sequence(request_id, prompt, sequence_params, priority, 0)
        search = BeamSearch(
            params,
            eos_token_ids=self.eos_token_ids,
            max_output_tokens=root.max_total_tokens - root.num_prompt_tokens,
        )
        return BeamGeneration(request_id, prompt, BeamGroup(search, root), self.tokenizer)

    def _encode(self, text: str) -> Sequence[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text, add_special_tokens=False)
