"""Checks that transformers reads an exported folder as Phalanx does: the same ids for a text, and the same text for the ids.

    phalanx export runs/quickstart --out quickstart-hf
    phalanx tokenize --tokenizer runs/quickstart/tokenizer.json --out text.bin text.txt
    python tools/check_export.py quickstart-hf text.txt text.bin

text.bin holds the ids of text.txt by the run's own tokenizer. The script needs transformers, and no PyTorch.
"""

import json
import os
import struct
import sys

from transformers import AutoTokenizer, GenerationConfig, __version__


def read_ids(path):
    """The ids in a token file of Phalanx (crates/data/src/token_file/own.rs)."""
    with open(path, "rb") as file:
        data = file.read()
    magic, version, width, _vocab, tokens = struct.unpack_from("<8sIIQQ", data)
    assert (magic, version) == (b"PHXTOK\0\0", 1), path
    return list(struct.unpack_from(f"<{tokens}{'H' if width == 2 else 'I'}", data, 64))


def main(folder, text_path, tokens_path):
    with open(text_path, encoding="utf-8", newline="") as file:
        text = file.read()
    expected = read_ids(tokens_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = tokenizer(text)["input_ids"]
    assert found == expected, f"{len(found)} ids by transformers, {len(expected)} by Phalanx"
    assert tokenizer.decode(found) == text, "the ids give another text"
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    for name, value in special.items():
        assert config[name] == value, (name, config[name], value)
    if os.path.exists(os.path.join(folder, "generation_config.json")):
        generation = GenerationConfig.from_pretrained(folder)
        assert generation.eos_token_id == tokenizer.eos_token_id, generation
    print(f"transformers {__version__}: {len(found)} ids of {len(text)} characters agree; {special}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
