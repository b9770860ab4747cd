"""What a server says of its engine, its names and its tokenizer."""

from __future__ import annotations

import importlib.metadata

from octavo.graphs.errors import RequestError
from octavo.tools.server.errors import ApiError
from octavo.tools.server.requests import DetokenizeRequest, TokenizeRequest
from octavo.tools.server.responses import Detokenization, Info, Model, ModelList, Tokenization
from octavo.tools.server.service import Service


def models(service: Service) -> ModelList:
    names = service.options.model_names
    return {"object": "list", "data": [model(service, name) for name in names]}


def model(service: Service, name: str) -> Model:
    service.check_model(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "max_model_len": service.manifest.limits.max_model_len,
    }


async def tokenize(service: Service, request: TokenizeRequest) -> Tokenization:
    service.check_model(request.model)
    max_model_len = service.manifest.limits.max_model_len
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either a prompt or messages, to be tokenized", param="prompt")
    if request.messages is not None:
        prompt = await service.chat_prompt(
            request.messages,
            request.chat_template_kwargs,
            tools=[tool.model_dump(exclude_none=True) for tool in request.tools or ()],
            add_generation_prompt=request.add_generation_prompt
            and not request.continue_final_message,
            continue_final_message=request.continue_final_message,
        )
        tokens = prompt["prompt_token_ids"]
    else:
        tokens = await service.encode(
            request.prompt or "", add_special_tokens=request.add_special_tokens
        )
    return {
        "count": len(tokens),
        "max_model_len": max_model_len,
        "tokens": tokens,
        "token_strs": await service.token_texts(tokens) if request.return_token_strs else None,
    }


async def detokenize(service: Service, request: DetokenizeRequest) -> Detokenization:
    service.check_model(request.model)
    vocab_size = service.manifest.spec.vocab_size
    for token in request.tokens:
        if token >= vocab_size:
            raise RequestError(
                f"the token id {token} lies outside the vocabulary of {vocab_size}: give ids below "
                "that"
            )
    return {"prompt": await service.decode(request.tokens, skip_special_tokens=False)}


def info(service: Service) -> Info:
    manifest = service.manifest
    limits, spec = manifest.limits, manifest.spec
    return {
        "model": service.options.model_names[0],
        "octavo": importlib.metadata.version("octavo"),
        "architecture": spec.architecture,
        "num_parameters": spec.num_parameters,
        "vocab_size": spec.vocab_size,
        "backend": manifest.backend,
        "device": manifest.target.device,
        "dtype": manifest.dtype,
        "quantization": manifest.quantization,
        "kv_cache_dtype": manifest.kv_cache_dtype,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "block_size": limits.block_size,
        "drafters": [drafter.method for drafter in manifest.drafters],
        "chat": service.chat_template is not None,
        "tools": "tools" in (service.chat_template or ""),
        "built_with": dict(manifest.versions),
    }
