"""Whole engines with every drafter: the same tokens and logprobs as without one, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from octavo.backends.base import StepInputs, StepOutputs
from octavo.compiler import BuildConfig, build_engine
from octavo.compiler.config import SpeculativeConfig
from octavo.runtime import LLM, SamplingParams
from tests.parity import feature_drafters as made
from tests.parity import tiny_models
from tests.unit import drafter_heads_files as heads

NUM_DRAFTS = 4
LAYERS = 6  # EAGLE-3 reads three of them


@dataclass(frozen=True)
class Engine:
    """Built with several drafters, of which one is used."""

    path: Path
    method: str

    def llm(self, *, speculates: bool, **options: Any) -> LLM:
        speculative = {"method": self.method, "adaptive": False} if speculates else False
        return LLM(self.path, speculative=speculative, num_threads=1, **options)


def head_files(folder: Path) -> tuple[Path, Path]:
    sizes: Any = {"vocab_size": made.VOCAB, "hidden_size": made.HIDDEN}
    config = {"medusa_num_heads": NUM_DRAFTS, "medusa_num_layers": 1}
    tensors = heads.medusa_tensors(NUM_DRAFTS, **sizes)
    medusa = heads.write(folder / "medusa", config, tensors, "medusa_lm_head.safetensors")
    speculator = heads.write(
        folder / "speculator",
        heads.speculator_config(NUM_DRAFTS, emb_dim=made.HIDDEN, vocab_size=made.VOCAB),
        heads.speculator_tensors(NUM_DRAFTS, **sizes),
    )
    return medusa, speculator


def speculative(method: str, model: Path | None = None) -> SpeculativeConfig:
    count = NUM_DRAFTS if method != "ngram" else 6
    name = None if model is None else str(model)
    return SpeculativeConfig.model_validate(
        {"method": method, "model": name, "num_speculative_tokens": count}
    )


def build(folder: Path, target: Path, *drafters: SpeculativeConfig) -> Path:
    config = BuildConfig(
        model=str(target),
        output=folder,
        use_cache=False,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        speculative=drafters,
    )
    return build_engine(config).path


class Engines:
    """Built when they are first asked for: drafters that read the same share one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[tuple[str, str], Path] = {}

    def get(self, architecture: str, method: str) -> Engine:
        group = method if method in ("eagle", "eagle3", "mtp") else "others"
        key = (architecture, group)
        if key not in self._built:
            self._built[key] = self._build(architecture, group)
        return Engine(self._built[key], method)

    def _build(self, architecture: str, group: str) -> Path:
        folder = self._folder / f"{architecture}-{group}"
        folder.mkdir()
        layers = 2 if group == "mtp" else LAYERS
        target, _ = tiny_models.checkpoint(
            folder / "target",
            architecture,
            num_hidden_layers=layers,
            **({"first_k_dense_replace": 1} if architecture == "deepseek_v3" else {}),
        )
        if group == "eagle":
            head = made.write(folder / "head", made.CONFIG, made.eagle_tensors())
            return build(folder / "engine", target, speculative("eagle", head))
        if group == "eagle3":
            head = made.write(folder / "head", made.EAGLE3_CONFIG, made.eagle3_tensors())
            return build(folder / "engine", target, speculative("eagle3", head))
        if group == "mtp":
            add = made.add_mimo_layer if architecture == "qwen2" else made.add_deepseek_layer
            add(target)
            return build(folder / "engine", target, speculative("mtp"))
        medusa, speculator = head_files(folder)
        return build(
            folder / "engine",
            target,
            speculative("ngram"),
            speculative("draft_model", target),
            speculative("medusa", medusa),
            speculative("mlp_speculator", speculator),
        )


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("engines"))


ARCHITECTURES = ("llama", "gemma2", "qwen2")
METHODS = ("ngram", "draft_model", "medusa", "mlp_speculator", "eagle", "eagle3")
CASES = [(a, m) for a in ARCHITECTURES for m in METHODS] + [
    ("qwen2", "mtp"),
    ("deepseek_v3", "mtp"),
]

LONG = [(7 * i * i + 3 * i) % made.VOCAB for i in range(100)]  # two chunks
PERIODIC = [11, 12, 13, 14] * 5
PROMPTS = [[5], LONG, PERIODIC, LONG[:40] + PERIODIC, [9, 8, 7], PERIODIC[:6]]


def params(**values: Any) -> SamplingParams:
    defaults = {"temperature": 0.0, "max_tokens": 14, "logprobs": 2, "ignore_eos": True}
    return SamplingParams(**{**defaults, **values})


PARAMS = [
    params(),
    params(max_tokens=7),
    params(temperature=1.2, seed=3, top_p=0.9),
    params(temperature=0.8, seed=4, frequency_penalty=1.0, top_k=40),
    params(speculate=False),
    params(temperature=3.0, seed=5, n=2, prompt_logprobs=1),
]


def outputs(llm: LLM, parameters: list[SamplingParams]) -> list[Any]:
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [
        (output.outputs, output.prompt_logprobs) for output in llm.generate(prompts, parameters)
    ]


@pytest.mark.parametrize(("architecture", "method"), CASES)
def test_drafts_change_nothing(engines: Engines, architecture: str, method: str) -> None:
    """Chunks, prefix hits (the second round), preemption, stops in the middle of a run."""
    engine = engines.get(architecture, method)
    tight = {"num_kv_blocks": 18}  # too few for all six at once
    with engine.llm(speculates=False, **tight) as llm:
        wanted = outputs(llm, PARAMS)
        stops = [[result[0][0].token_ids[4]] for result in wanted]
        ending = [replace(p, stop_token_ids=s) for p, s in zip(PARAMS, stops, strict=True)]
        stopped = outputs(llm, ending)
    with engine.llm(speculates=True, **tight) as llm:
        assert outputs(llm, PARAMS) == wanted
        assert outputs(llm, ending) == stopped
        counts = llm.metrics()
        assert counts["spec_decode_num_draft_tokens"] > 0
        assert counts["spec_decode_num_failures"] == 0
        if method == "draft_model":  # the model itself: wrong only where a run was cut
            assert counts["spec_decode_num_accepted_tokens"] > 20


class Recording:
    """Keeps what every step fed, and passes everything on."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable
        self.steps: list[StepInputs] = []
        self.likeliest: list[list[int]] = []  # of the rows of each step's logits

    def run(self, inputs: StepInputs) -> StepOutputs:
        arrays: Any = {
            name: None if array is None else array.copy() for name, array in vars(inputs).items()
        }
        self.steps.append(StepInputs(**arrays))
        outputs: StepOutputs = self._executable.run(inputs)
        self.likeliest.append(outputs.logits.argmax(axis=1).tolist())
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)


@pytest.fixture
def recorded(engines: Engines) -> Iterator[tuple[LLM, Recording, Recording]]:
    """An engine with an MTP layer whose steps, and the drafter's, are written down."""
    with engines.get("deepseek_v3", "mtp").llm(speculates=True) as llm:
        engine: Any = llm.engine
        (drafter,) = engine.speculator._drafters
        target, own = Recording(engine._executable), Recording(drafter._executable)
        engine._executable, drafter._executable = target, own
        yield llm, target, own


def test_mtp_drafts_four_times_and_one_step_verifies_five(
    recorded: tuple[LLM, Recording, Recording],
) -> None:
    """The design's example: a prefill gives one token, four runs of the layer one step of five."""
    llm, target, drafter = recorded
    prompt = [3, 1, 4, 1, 5, 9, 2]
    (output,) = llm.generate({"prompt_token_ids": prompt}, params(max_tokens=6))
    first = output.outputs[0].token_ids[0]

    prefill, verify = target.steps[:2]
    assert prefill.token_ids.tolist() == prompt
    assert prefill.logits_indices.tolist() == [6]

    chain = drafter.steps[:4]
    # The layer pairs each hidden state with the token after it; then it reads its own drafts.
    assert chain[0].token_ids.tolist() == [*prompt[1:], first]
    assert chain[0].positions.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert [step.positions.tolist() for step in chain[1:]] == [[7], [8], [9]]
    assert [step.prefix_offsets.tolist() for step in chain] == [[0], [7], [8], [9]]
    drafts = [likeliest for (likeliest,) in drafter.likeliest[:4]]
    assert [step.token_ids.tolist() for step in chain[1:]] == [[draft] for draft in drafts[:3]]

    assert verify.token_ids.tolist() == [first, *drafts]
    assert verify.positions.tolist() == [7, 8, 9, 10, 11]
    assert verify.query_start_loc.tolist() == [0, 5]
    assert verify.prefix_offsets.tolist() == [7]
    assert verify.logits_indices.tolist() == [0, 1, 2, 3, 4]
    block = int(verify.block_tables[0, 0])
    assert verify.slot_mapping.tolist() == [16 * block + offset for offset in range(7, 12)]
