"""Prompts and parameters in, outputs out: what `LLM` and `AsyncLLM` share."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from octavo.graphs.errors import CapacityError, OctavoError, QueueFullError, RequestError
from octavo.runtime.cache.eviction import DEFAULT_POLICY
from octavo.runtime.capacity import check_positive, resolve_limits
from octavo.runtime.engine import Engine
from octavo.runtime.generation import Generation
from octavo.runtime.generation_factory import GenerationFactory
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.prompts import Prompt
from octavo.runtime.request import Request
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.sampling_params import RequestOutputKind, SamplingParams
from octavo.runtime.speculation import options as speculative_options
from octavo.runtime.speculation.options import Speculative
from octavo.runtime.step_budget import SchedulingOptions
from octavo.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.runtime.cache.prefix_cache import PinnedPrefix
    from octavo.runtime.metrics.snapshots import Snapshot


_BEFORE_ALL = -(1 << 62)  # a priority


class EngineOptions(TypedDict, total=False):
    """What `LLM`, `AsyncLLM` and `LLMEngine` take beside the engine; see `LLMEngine`."""

    kv_cache_memory: str | int
    num_kv_blocks: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    enable_prefix_caching: bool
    eviction_policy: str
    scheduling_policy: Literal["fcfs", "priority"]
    max_num_waiting: int | None
    max_num_partial_prefills: int
    max_prefill_tokens_beside_decodes: int | None
    speculative: Speculative
    num_threads: int | None


class LLMEngine:
    """An engine that is fed requests and stepped. Not thread-safe.

    engine_or_checkpoint    an engine's folder; or a checkpoint (folder, .gguf file or name), which
                            is built on first use and cached
    kv_cache_memory         bytes of the paged cache, as a number or a text such as "512MiB"
    num_kv_blocks           blocks of the paged cache, instead of `kv_cache_memory`
    max_num_seqs            most sequences in one step
    max_num_batched_tokens  most tokens in one step
    enable_prefix_caching   reuse the computed blocks of equal beginnings of prompts
    eviction_policy         which cached blocks are given up first: see docs/prefix-cache.md
    scheduling_policy, max_num_waiting, max_num_partial_prefills, max_prefill_tokens_beside_decodes
                            see `SchedulingOptions`
    speculative             which drafters propose tokens, and how: see docs/speculation.md; None
                            uses those the engine was built with, False none
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
        eviction_policy: str = DEFAULT_POLICY,
        scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
        max_num_waiting: int | None = None,
        max_num_partial_prefills: int = 1,
        max_prefill_tokens_beside_decodes: int | None = None,
        speculative: Speculative = None,
        num_threads: int | None = None,
    ) -> None:
        # Reading bundles needs modules that `import octavo.runtime` must not wait for.
        from octavo.backends.bundle import read_manifest
        from octavo.runtime.loading import find_engine, load_engine
        from octavo.runtime.speculation.loading import drafter_manifests, load_speculator

        if num_threads is not None:
            check_positive("num_threads", num_threads)
        scheduling = SchedulingOptions(
            policy=scheduling_policy,
            max_num_waiting=max_num_waiting,
            max_num_partial_prefills=max_num_partial_prefills,
            max_prefill_tokens_beside_decodes=max_prefill_tokens_beside_decodes,
        )
        bundle = find_engine(engine_or_checkpoint)
        manifest = read_manifest(bundle)
        speculation = speculative_options.resolve(speculative, manifest)
        drafters = drafter_manifests(bundle, speculation)
        limits = resolve_limits(
            manifest,
            kv_cache_memory=kv_cache_memory,
            num_kv_blocks=num_kv_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            drafter_block_bytes=sum(one.cache_block_bytes for one in drafters.values()),
        )
        loaded = load_engine(bundle, manifest, num_threads)
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self._executable = loaded.executable
        self._factory = GenerationFactory(
            loaded.tokenizer,
            vocab_size=manifest.spec.vocab_size,
            sampled_vocab_size=manifest.spec.sampled_vocab_size,
            eos_token_ids=manifest.spec.eos_token_ids,
            max_model_len=limits.max_model_len,
        )
        self._generations: dict[str, Generation] = {}
        self._by_sequence: dict[Request, Generation] = {}
        self._undelivered: list[RequestOutput] = []
        self._pin_numbers = itertools.count()
        self._closed = False
        try:
            speculator = load_speculator(
                bundle,
                speculation,
                drafters,
                limits,
                manifest.spec.sampled_vocab_size,
                num_threads,
            )
            self.engine = Engine(
                loaded.executable,
                limits,
                sampled_vocab_size=manifest.spec.sampled_vocab_size,
                enable_prefix_caching=enable_prefix_caching,
                eviction_policy=eviction_policy,
                scheduling=scheduling,
                speculator=speculator,
                acceptance=speculation.acceptance,
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

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._generations or self._undelivered)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Queues a request; whatever is refused is refused here, and nothing has been queued.

        Raises RequestError for a bad prompt, parameters or id, CapacityError for a request that
        can never run in this cache, QueueFullError if it could at another time.
        """
        self.start(self.prepare(request_id, prompt, params, priority=priority))

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
    ) -> Generation:
        """Checks everything about a request and queues nothing; raises as `add_request` does."""
        self._check_open()
        if params is None:
            params = SamplingParams()
        if priority and self.engine.scheduler.options.policy != "priority":
            raise RequestError(
                f"priority is {priority!r}, the engine serves requests in the order of their "
                'arrival: set scheduling_policy="priority"'
            )
        generation = self._factory.make(request_id, prompt, params, priority)
        self.engine.check_fits(generation.sequences[0])
        return generation

    def start(self, generation: Generation) -> None:
        """Queues what `prepare` has returned; QueueFullError, or RequestError for a used id."""
        self._check_open()
        request_id = generation.request_id
        undelivered = (output.request_id for output in self._undelivered)
        if request_id in self._generations or request_id in undelivered:
            raise RequestError(
                f"a request with the id {request_id!r} is still open: give each its own id"
            )
        try:
            self.engine.add_request(generation.sequences[0])
        except QueueFullError:
            self.engine.metrics.observe_rejection()
            raise
        params = generation.params
        self.engine.metrics.observe_params(params.n or 1, params.max_tokens)
        self._generations[request_id] = generation
        for sequence in generation.sequences:
            self._by_sequence[sequence] = generation

    def step(self) -> list[RequestOutput]:
        """Computes one step; returns an output for each request that has something to show.

        What is shown follows the request's `output_kind`; the last output of each is `finished`.
        An error of one request alone is in its output. If the step as a whole fails, the error is
        raised and every request is as it was: step again, or abort them.
        """
        touched = {self._by_sequence[one]: None for one in self.engine.step()}
        outputs, self._undelivered = self._undelivered, []
        for generation in touched:
            if any(sequence.error is not None for sequence in generation.sequences):
                self._end(generation)
            output = generation.output()
            if generation.finished:
                self._forget(generation)
            if output is not None:
                outputs.append(output)
        return outputs

    def abort_request(self, request_id: str) -> bool:
        """Ends a request at once and frees its blocks; False if it has ended already.

        No step returns an output of it any more.
        """
        kept = [one for one in self._undelivered if one.request_id != request_id]
        was_undelivered = len(kept) < len(self._undelivered)
        self._undelivered = kept
        generation = self._generations.get(request_id)
        if generation is None:
            return was_undelivered
        self._end(generation)
        self._forget(generation)
        return True

    def pin_prefix(self, prompt: Prompt) -> PinnedPrefix:
        """Computes a prompt's full cache blocks and keeps them until the pin is released.

        Other requests are stepped meanwhile. RequestError if the prompt fills no block or prefix
        caching is off; CapacityError if open requests might no longer fit beside the pin.
        """
        cache = self.engine.prefix_cache
        if cache is None:
            raise RequestError("prefix caching is off: set enable_prefix_caching=True to pin")
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request_id = f"octavo pin {next(self._pin_numbers)}"
        generation = self._factory.make(request_id, prompt, params, _BEFORE_ALL)
        (request,) = generation.sequences
        scheduler = self.engine.scheduler
        scheduler.admission.check_pin(request, scheduler.running + scheduler.waiting)
        self.start(generation)
        try:
            while not request.finished:
                outputs = self.step()
                self._undelivered = [one for one in outputs if one.request_id != request_id]
        finally:
            self.abort_request(request_id)
        if request.error is not None:
            raise request.error
        return cache.pin(request)

    def reset_prefix_cache(self) -> None:
        """Forgets every computed prefix save the pinned ones: later requests compute anew."""
        if self.engine.prefix_cache is not None:
            self.engine.prefix_cache.reset()

    def metrics(self) -> Snapshot:
        """Counters, gauges and histograms of this engine by name: see docs/metrics.md."""
        return self.engine.snapshot()

    def close(self) -> None:
        """Frees the engine; harmless when called twice."""
        self._closed = True
        if self.engine.speculator is not None:
            self.engine.speculator.close()
        self._executable.close()

    def _end(self, generation: Generation) -> None:
        for sequence in generation.sequences:
            self.engine.abort(sequence)

    def _forget(self, generation: Generation) -> None:
        del self._generations[generation.request_id]
        for sequence in generation.sequences:
            self._by_sequence.pop(sequence, None)

    def _check_open(self) -> None:
        if self._closed:
            raise OctavoError("the LLM is closed: make another one")
