"""The runtime: serves engines. Importing it imports no library but numpy."""

from octavo.runtime.llm import LLM
from octavo.runtime.metrics import RequestMetrics
from octavo.runtime.outputs import CompletionOutput, RequestOutput
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Tokenizer",
]
