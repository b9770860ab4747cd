"""vLLM on CPU, in one process."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
)


class Driver:
    """Options: arguments of vllm.LLM."""

    @staticmethod
    def prepare(model: str, output: str, options: dict[str, Any]) -> None:
        os.symlink(os.path.abspath(model), output)  # it reads the checkpoint itself

    def __init__(self, artefact: str, num_threads: int, options: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[:num_threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        import vllm  # type: ignore[import-not-found]

        self._vllm = vllm
        self._llm = vllm.LLM(artefact, skip_tokenizer_init=True, disable_log_stats=True, **options)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        started = time.perf_counter()
        results = self._llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return seconds, [result.outputs[0].token_ids for result in results]

    def score(self, token_ids: list[int]) -> tuple[list[float], list[int]]:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False
        )
        request = {"prompt_token_ids": token_ids}
        (result,) = self._llm.generate([request], params, use_tqdm=False)
        log_probabilities, best = [], []
        for token, entry in zip(token_ids[1:], result.prompt_logprobs[1:], strict=True):
            log_probabilities.append(entry[token].logprob)
            best.append(max(entry, key=lambda key: entry[key].logprob))
        return log_probabilities, best
