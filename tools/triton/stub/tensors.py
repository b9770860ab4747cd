"""The tensors of a model, declared once: config.pbtxt, the stub and docs/triton.md follow them.

Names are those of Triton's vLLM backend, and of the front of TensorRT-LLM's.
"""

from __future__ import annotations

from dataclasses import dataclass

STRING, BOOL, INT32, UINT32, UINT64, FP32 = (
    "TYPE_STRING",
    "TYPE_BOOL",
    "TYPE_INT32",
    "TYPE_UINT32",
    "TYPE_UINT64",
    "TYPE_FP32",
)
ANY = -1  # how many elements: any number


@dataclass(frozen=True)
class Tensor:
    """One dimension, of `size` elements."""

    name: str
    data_type: str
    documentation: str
    size: int = 1


@dataclass(frozen=True)
class Parameter(Tensor):
    """An input that is a sampling parameter, by the name `parameter` if that is another one."""

    parameter: str = ""

    @property
    def parameter_name(self) -> str:
        return self.parameter or self.name


TEXT_INPUT = Tensor("text_input", STRING, "The prompt.")
INPUT_IDS = Tensor("input_ids", INT32, "The prompt as token ids, instead of `text_input`.", ANY)
STREAM = Tensor("stream", BOOL, "Whether the text comes in pieces; false: one response.")
SAMPLING_PARAMETERS = Tensor(
    "sampling_parameters", STRING, "A JSON object: any of `SamplingParams` by its name."
)
EXCLUDE_INPUT = Tensor(
    "exclude_input_in_output",
    BOOL,
    "Whether the prompt is left out of `text_output`; by default it is if `stream` is true.",
)
PRIORITY = Tensor(
    "priority", INT32, "Lower runs earlier, if exported with `--scheduling-policy priority`."
)
CACHE_SALT = Tensor(
    "cache_salt", STRING, "The cached prefix is shared only with prompts of the same salt."
)

FINISH_REASON = Tensor(
    "finish_reason", STRING, '"stop" or "length"; empty while a completion goes on.', ANY
)
CUMULATIVE_LOGPROB = Tensor(
    "cumulative_logprob", FP32, "Sum of the log-probabilities of all tokens up to now.", ANY
)
LOGPROBS = Tensor(
    "logprobs",
    STRING,
    "JSON: for each token of this response an object of token id to `logprob`, `rank` and "
    "`decoded_token`.",
    ANY,
)
NUM_INPUT_TOKENS = Tensor("num_input_tokens", UINT32, "Tokens of the prompt.")
NUM_OUTPUT_TOKENS = Tensor("num_output_tokens", UINT32, "Tokens of this response.", ANY)
TOKEN_IDS = Tensor("token_ids", STRING, "JSON: the token ids of this response.", ANY)
TEXT_OUTPUT = Tensor("text_output", STRING, "The text, or what is new of it.", ANY)

ON_REQUEST = (
    FINISH_REASON,
    LOGPROBS,
    CUMULATIVE_LOGPROB,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
    TOKEN_IDS,
)
OUTPUTS = {tensor.name: tensor for tensor in (TEXT_OUTPUT, *ON_REQUEST)}
# Input -> the output that it asks for.
RETURNS = {
    Tensor(f"return_{tensor.name}", BOOL, f"Whether responses have `{tensor.name}`."): tensor
    for tensor in ON_REQUEST
}
STOP = Parameter("stop", STRING, "Texts that end the output; or one JSON list of them.", ANY)
STOP_WORDS = Parameter("stop_words", STRING, "The same.", ANY, "stop")
BAD_WORDS = Parameter("bad_words", STRING, "Texts that are not generated, or a JSON list.", ANY)
PARAMETERS = (
    Parameter("max_tokens", INT32, "Most tokens to generate; 16 by default."),
    Parameter("min_tokens", INT32, "Tokens to generate before anything but the length ends it."),
    Parameter("temperature", FP32, "0 always takes the likeliest token."),
    Parameter("top_k", INT32, "Sample from this many likeliest tokens; 0: from all."),
    Parameter("top_p", FP32, "Sample from the likeliest tokens that have this probability."),
    Parameter("min_p", FP32, "Sample from tokens at least this likely, relative to the likeliest."),
    Parameter("repetition_penalty", FP32, "Above 1 makes tokens that were there less likely."),
    Parameter("presence_penalty", FP32, "Subtracted from the logits of tokens in the output."),
    Parameter("frequency_penalty", FP32, "Subtracted for each time they are in the output."),
    Parameter("seed", UINT64, "The same seed gives the same tokens."),
    Parameter("beam_width", INT32, "Above 1: a beam search, whose hypotheses come at the end."),
    STOP,
    STOP_WORDS,
    BAD_WORDS,
)
INPUTS = {
    tensor.name: tensor
    for tensor in (
        TEXT_INPUT,
        INPUT_IDS,
        STREAM,
        SAMPLING_PARAMETERS,
        EXCLUDE_INPUT,
        *RETURNS,
        *PARAMETERS,
        PRIORITY,
        CACHE_SALT,
    )
}
