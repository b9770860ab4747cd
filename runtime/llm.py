"""The public entry: an engine, a queue of prompts, their texts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from octavo.graphs.errors import BundleError, CapacityError, OctavoError, RequestError
from octavo.runtime.capacity import check_positive, resolve_limits
from octavo.runtime.engine import Engine
from octavo.runtime.outputs import CompletionOutput, RequestOutput
from octavo.runtime.prompts import EncodedPrompt, Prompt, PromptReader
from octavo.runtime.request import Request
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.tokenizer import Tokenizer


class LLM:
    """Generates text with an engine. Not thread-safe; a context manager that frees the engine.

    engine_or_checkpoint    an engine's folder; or a checkpoint (folder, .gguf file or name), which
                            is built on first use and cached
    kv_cache_memory         bytes of the paged cache, as a number or a text such as "512MiB"
    num_kv_blocks           blocks of the paged cache, instead of `kv_cache_memory`
    max_num_seqs            most sequences in one step
    max_num_batched_tokens  most tokens in one step
    enable_prefix_caching   reuse the computed blocks of equal beginnings of prompts
    num_threads             threads of the backend; None uses every core

    The limits may lower the engine's own, never raise them (CapacityError). Raises BundleError,
    IncompatibleEngineError or BackendError if the engine cannot be loaded.
    """

    def __init__(
        self,
        engine_or_checkpoint: str | Path,
        *,
        kv_cache_memory: str | int = "512MiB",
        num_kv_blocks: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        num_threads: int | None = None,
    ) -> None:
        # Reading bundles needs modules that `import octavo.runtime` must not wait for.
        from octavo.backends.bundle import read_manifest
        from octavo.runtime.loading import load_engine

        if num_threads is not None:
            check_positive("num_threads", num_threads)
        bundle = _find_engine(engine_or_checkpoint)
        manifest = read_manifest(bundle)
        limits = resolve_limits(
            manifest,
            kv_cache_memory=kv_cache_memory,
            num_kv_blocks=num_kv_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        loaded = load_engine(bundle, manifest, num_threads)
        self._executable = loaded.executable
        self._tokenizer = loaded.tokenizer
        self._eos_token_ids = manifest.spec.eos_token_ids
        self._prompts = PromptReader(
            loaded.tokenizer, manifest.spec.vocab_size, limits.max_model_len
        )
        self._request_ids = itertools.count()
        self._closed = False
        try:
            self.engine = Engine(
                loaded.executable,
                limits,
                sampled_vocab_size=manifest.spec.sampled_vocab_size,
                enable_prefix_caching=enable_prefix_caching,
            )
        except MemoryError:
            loaded.executable.close()
            size = limits.num_kv_blocks * manifest.cache_block_bytes
            raise CapacityError(
                f"the paged cache of {limits.num_kv_blocks} blocks, {size} bytes, does not fit "
                "into memory: lower kv_cache_memory or num_kv_blocks"
            ) from None
        except BaseException:
            loaded.executable.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt, batched together; outputs come in the order of the prompts.

        A prompt is a text, {"prompt": text} or {"prompt_token_ids": [...]}. One SamplingParams
        serves all prompts, a list gives each its own, None takes the defaults. RequestError or
        CapacityError if a prompt is refused: then none is started.
        """
        prepared = self._prepare(self._prompts.read_all(prompts), sampling_params)
        try:
            for _, request in prepared:
                self.engine.add_request(request)
            unfinished = {request.request_id for _, request in prepared}
            while unfinished:
                unfinished -= {r.request_id for r in self.engine.step() if r.finished}
        finally:
            for _, request in prepared:
                self.engine.abort(request.request_id)
        return [self._output(prompt, request, self._text(request)) for prompt, request in prepared]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Completes one prompt and yields all of its output so far whenever there is more.

        The prompt is checked at once; closing the generator aborts the request.
        """
        ((encoded, request),) = self._prepare([self._prompts.read(prompt)], sampling_params)
        return self._stream(encoded, request)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The text prompt for messages of {"role": ..., "content": ...}."""
        return self.get_tokenizer().apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt
        )

    def get_tokenizer(self) -> Tokenizer:
        """The engine's tokenizer; RequestError if it has none."""
        if self._tokenizer is None:
            raise RequestError("the engine has no tokenizer: it serves token ids only")
        return self._tokenizer

    def close(self) -> None:
        """Frees the engine; harmless when called twice."""
        self._closed = True
        self._executable.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[tuple[EncodedPrompt, Request]]:
        """Checks everything about the requests before any is started."""
        if self._closed:
            raise OctavoError("the LLM is closed: make another one")
        params = _params_of_each(sampling_params, len(prompts))
        prepared = []
        for prompt, own in zip(prompts, params, strict=True):
            request = Request(
                str(next(self._request_ids)),
                prompt.token_ids,
                own,
                max_model_len=self.engine.limits.max_model_len,
                eos_token_ids=self._eos_token_ids,
                seed=int.from_bytes(os.urandom(8)) if own.seed is None else own.seed,
            )
            self.engine.check_fits(request)
            prepared.append((prompt, request))
        return prepared

    def _stream(
        self, prompt: EncodedPrompt, request: Request
    ) -> Generator[RequestOutput, None, None]:
        detokenizer = None if self._tokenizer is None else self._tokenizer.detokenizer()
        text = ""
        num_seen = 0
        self.engine.add_request(request)
        try:
            while True:
                # A `generate` between two outputs of this stream may have moved it on as well.
                if request.num_output_tokens == num_seen and not request.finished:
                    self.engine.step()
                    continue
                if detokenizer is not None:
                    text += detokenizer.push(_text_token_ids(request)[num_seen:])
                    text += detokenizer.flush() if request.finished else ""
                num_seen = request.num_output_tokens
                output = self._output(prompt, request, text)
                yield output
                if output.finished:
                    return
        finally:
            self.engine.abort(request.request_id)

    def _text(self, request: Request) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(_text_token_ids(request))

    def _output(self, prompt: EncodedPrompt, request: Request, text: str) -> RequestOutput:
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        num_cached_tokens = request.num_cached_tokens or 0
        return RequestOutput(
            request_id=request.request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            outputs=[completion],
            finished=request.finished,
            num_cached_tokens=num_cached_tokens,
            metrics=request.times.metrics(
                num_output_tokens=request.num_output_tokens,
                num_cached_tokens=num_cached_tokens,
                num_preemptions=request.num_preemptions,
            ),
        )


def _find_engine(model: str | Path) -> Path:
    """The bundle itself, or the engine of a checkpoint from the cache of builds."""
    from octavo.backends.bundle import MANIFEST_NAME

    path = Path(model)
    if (path / MANIFEST_NAME).exists():
        return path
    try:
        # The one place where the runtime meets the compiler, only when there is something to build.
        from octavo.compiler import cached_engine
    except ImportError as error:
        raise BundleError(
            f"{model} is no engine, it has no {MANIFEST_NAME}, and building one from a checkpoint "
            f"is not possible here ({error}): install `octavo[build]`"
        ) from error
    engine: Path = cached_engine(str(model))
    return engine


def _params_of_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if len(sampling_params) != count:
        raise RequestError(
            f"there are {len(sampling_params)} sampling_params for {count} prompts: "
            "give one for all or one for each"
        )
    for params in sampling_params:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params holds {params!r}: give SamplingParams")
    return sampling_params


def _text_token_ids(request: Request) -> list[int]:
    """The output without the token that stopped it, which is no part of the text."""
    token_ids = request.output_token_ids
    return token_ids[:-1] if request.finish_reason == "stop" else token_ids
