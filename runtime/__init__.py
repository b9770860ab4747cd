"""The runtime: serves engines. Importing it imports no library but numpy."""

from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.llm import LLM
from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.metrics.request_metrics import RequestMetrics
from octavo.runtime.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.logits_processors import LogitsRow
from octavo.runtime.sampling.sampling_params import RequestOutputKind, SamplingParams
from octavo.runtime.sampling.structured_outputs import StructuredOutputsParams
from octavo.runtime.serving.options import SupervisionOptions
from octavo.runtime.text.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LLMEngine",
    "LogitsRow",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "SupervisionOptions",
    "Tokenizer",
]
