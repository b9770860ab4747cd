"""llama.cpp through its C interface: the prebuilt libraries of the npm package node-llama-cpp.

The structures are those of `include/llama.h` of llama.cpp 0.5.0; loading checks the defaults that
the library fills in, so that another version cannot be misread.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

VERSION = "0.5.0"
LIBRARIES = "node/node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
F32 = 0  # enum ggml_type
BATCH = 2048  # tokens of a llama_decode
DEFAULTS = {
    "use_extra_bufts": True,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "flash_attn_type": -1,
    "yarn_beta_fast": -1.0,
    "type_k": 1,
    "offload_kqv": True,
}
FILE_TYPES = {"F32": 0, "Q4_0": 2, "Q8_0": 7}  # enum llama_ftype


class ModelParams(ctypes.Structure):
    _fields_: ClassVar = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]


class ContextParams(ctypes.Structure):
    _fields_: ClassVar = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    ]


class QuantizeParams(ctypes.Structure):
    _fields_: ClassVar = [
        ("nthread", c_int32),
        ("ftype", c_int32),
        ("output_tensor_type", c_int32),
        ("token_embedding_type", c_int32),
        ("allow_requantize", c_bool),
        ("quantize_output_tensor", c_bool),
        ("only_copy", c_bool),
        ("pure", c_bool),
        ("keep_split", c_bool),
        ("dry_run", c_bool),
        ("imatrix", c_void_p),
        ("kv_overrides", c_void_p),
        ("tt_overrides", c_void_p),
        ("prune_layers", c_void_p),
        ("max_buf_size", c_size_t),
    ]


class Batch(ctypes.Structure):
    _fields_: ClassVar = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


def _open() -> Any:
    environment = Path(os.environ["VIRTUAL_ENV"], LIBRARIES)
    base = next(environment.glob("libggml.v*.so"))
    ggml = ctypes.CDLL(str(base), mode=ctypes.RTLD_GLOBAL)
    ggml.ggml_backend_load_all_from_path(c_char_p(str(environment).encode()))
    library = ctypes.CDLL(str(next(environment.glob("libllama.v*.so"))))
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "llama_version": (c_char_p, []),
        "llama_model_default_params": (ModelParams, []),
        "llama_context_default_params": (ContextParams, []),
        "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
        "llama_init_from_model": (c_void_p, [c_void_p, ContextParams]),
        "llama_model_get_vocab": (c_void_p, [c_void_p]),
        "llama_vocab_n_tokens": (c_int32, [c_void_p]),
        "llama_get_memory": (c_void_p, [c_void_p]),
        "llama_memory_clear": (None, [c_void_p, c_bool]),
        "llama_batch_init": (Batch, [c_int32, c_int32, c_int32]),
        "llama_decode": (c_int32, [c_void_p, Batch]),
        "llama_get_logits": (POINTER(c_float), [c_void_p]),
        "llama_model_quantize_default_params": (QuantizeParams, []),
        "llama_model_quantize": (c_uint32, [c_char_p, c_char_p, POINTER(QuantizeParams)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_backend_init()
    _require_known_layout(library)
    return library


def _require_known_layout(library: Any) -> None:
    model = library.llama_model_default_params()
    context = library.llama_context_default_params()
    seen = {
        "use_extra_bufts": model.use_extra_bufts,
        "n_batch": context.n_batch,
        "n_ubatch": context.n_ubatch,
        "n_seq_max": context.n_seq_max,
        "flash_attn_type": context.flash_attn_type,
        "yarn_beta_fast": context.yarn_beta_fast,
        "type_k": context.type_k,
        "offload_kqv": context.offload_kqv,
    }
    version = library.llama_version().decode()
    if seen != DEFAULTS or not version.startswith(VERSION):
        raise RuntimeError(
            f"llama.cpp {version} is not {VERSION}: its default parameters are {seen}, "
            f"expected {DEFAULTS}"
        )


class Driver:
    """Options: `tensors` (packaged, F32, Q8_0, Q4_0), `cache` (f16, f32)."""

    @staticmethod
    def prepare(model: str, output: str, options: dict[str, Any]) -> None:
        """`model` is a folder; the packaged GGUF file lies beside it under the same name."""
        packaged = os.path.abspath(model + ".gguf")
        tensors = options["tensors"]
        if tensors == "packaged":
            os.symlink(packaged, output)
        elif tensors == "F32":
            _dequantize(packaged, output)
        else:
            with tempfile.TemporaryDirectory(dir=os.path.dirname(output)) as folder:
                floats = os.path.join(folder, "f32.gguf")
                _dequantize(packaged, floats)
                _quantize(floats, output, tensors)

    @staticmethod
    def versions() -> dict[str, str]:
        library = _open()
        return {"llama.cpp": library.llama_version().decode()}

    def __init__(self, artefact: str, num_threads: int, options: dict[str, Any]) -> None:
        self._library = _open()
        self._num_threads = num_threads
        self._float_cache = options.get("cache") == "f32"
        params = self._library.llama_model_default_params()
        self._model = self._library.llama_model_load_from_file(artefact.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {artefact}")
        vocabulary = self._library.llama_model_get_vocab(self._model)
        self._vocab_size = self._library.llama_vocab_n_tokens(vocabulary)
        self._batch = self._library.llama_batch_init(BATCH, 0, 1)
        self._contexts: dict[tuple[int, int], Any] = {}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        length = len(prompts[0]) + max_tokens
        context = self._context(len(prompts), length)  # made and warmed up before it counts
        results: list[list[int]] = [[] for _ in prompts]
        started = time.perf_counter()
        self._library.llama_memory_clear(self._library.llama_get_memory(context), False)
        for sequence, token in self._prefill(context, prompts):
            results[sequence].append(token)
        for position in range(len(prompts[0]), length - 1):
            step = [(row[-1], position, i, True) for i, row in enumerate(results)]
            best = self._decode(context, step).argmax(axis=1)
            for row, token in zip(results, best.tolist(), strict=True):
                row.append(token)
        return time.perf_counter() - started, results

    def logits(self, token_ids: list[int]) -> Any:
        context = self._context(1, BATCH)
        self._library.llama_memory_clear(self._library.llama_get_memory(context), False)
        return self._decode(context, [(token, i, 0, True) for i, token in enumerate(token_ids)])

    def _prefill(self, context: Any, prompts: list[list[int]]) -> list[tuple[int, int]]:
        """The first token of every sequence, as (sequence, token)."""
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        first = []
        for start in range(0, len(entries), BATCH):
            chunk = entries[start : start + BATCH]
            ends = [sequence for _, _, sequence, wanted in chunk if wanted]
            logits = self._decode(context, chunk)
            first += list(zip(ends, logits.argmax(axis=1).tolist(), strict=True))
        return first

    def _decode(self, context: Any, entries: list[tuple[int, int, int, bool]]) -> Any:
        """Logits [entries that want them, V]: a view that the next call overwrites.

        An entry is (token, position, sequence, whether logits are wanted).
        """
        batch, wanted = self._batch, 0
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, logits) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = logits
            wanted += logits
        if code := self._library.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")
        if not wanted:
            return np.empty((0, self._vocab_size), np.float32)
        pointer = self._library.llama_get_logits(context)
        return np.ctypeslib.as_array(pointer, shape=(wanted, self._vocab_size))

    def _context(self, num_seqs: int, length: int) -> Any:
        if (num_seqs, length) not in self._contexts:
            params = self._library.llama_context_default_params()
            params.n_ctx = num_seqs * (-(-length // 256) * 256)
            params.n_batch = BATCH
            params.n_seq_max = num_seqs
            params.n_threads = params.n_threads_batch = self._num_threads
            if self._float_cache:
                params.type_k = params.type_v = F32
            context = self._library.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
            self._contexts[num_seqs, length] = context
        return self._contexts[num_seqs, length]


def _quantize(source: str, output: str, tensors: str) -> None:
    """By llama.cpp's own recipe for a file type, from float32."""
    library = _open()
    params = library.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[tensors], 1
    code = library.llama_model_quantize(source.encode(), output.encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"llama_model_quantize of {source} failed with {code}")


def _dequantize(source: str, output: str) -> None:
    """The same model with every tensor in float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(output, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        inner = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kinds[0], inner)
    writer.add_file_type(FILE_TYPES["F32"])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
