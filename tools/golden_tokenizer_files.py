"""Writes crates/data/tests/golden/tokenizer_files.json: small folders of tokenizer files of each kind that is read, and the
ids that transformers gives with them.

    python tools/golden_tokenizer_files.py

The vocabularies are trained here. vocab.json with merges.txt and vocab.txt are opened by transformers' own classes; a
tokenizer.json by the tokenizers library, after what its tokenizer_config.json changes. It needs tokenizers and
transformers (no PyTorch).
"""

import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer, GPT2Tokenizer, RobertaTokenizer

GOLDEN = Path(__file__).resolve().parent.parent / "crates" / "data" / "tests" / "golden" / "tokenizer_files.json"
WORDS = "the rank gathers a shard of each layer, then it reduces; naïve Café 12 345 train LEARN step"
TEXTS = ["", "a", "The rank gathers", " the  layer\n\nthen", "Café NAÏVE 12345", "<|endoftext|>a</s> [MASK] [SEP]b <extra>", "漢字 🙂"]


def byte_pairs(special):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 5, trainer)
    return tokenizer


def of_model(tokenizer):
    """vocab.json and merges.txt of a tokenizer"""
    model = json.loads(tokenizer.to_str())["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    return {"vocab.json": json.dumps(model["vocab"]), "merges.txt": "\n".join(["#version: 0.2", *merges]) + "\n"}


def word_pieces():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
    )
    tokenizer.train_from_iterator([WORDS, WORDS.lower(), "cafe naive"] * 5, trainer)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    return {"vocab.txt": "".join(f"{token}\n" for token, _ in vocab)}


def golden(name, files, make):
    """the ids without and with what a text is enclosed in, by the tokenizer that `make` opens in the folder"""
    with tempfile.TemporaryDirectory() as folder:
        for file, content in files.items():
            (Path(folder) / file).write_text(content, encoding="utf-8")
        tokenizer = make(folder)
    texts = [{"text": text, "ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in TEXTS]
    plain, whole = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
    at = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    roles = {role: getattr(tokenizer, role + "_id") for role in ("bos_token", "eos_token", "sep_token", "mask_token")}
    return {
        "name": name, "files": files, "texts": texts, "begin": whole[:at], "end": whole[at + len(plain) :], "roles": roles,
    }


def main():
    config = lambda **keys: {"tokenizer_config.json": json.dumps(keys)}
    gpt2 = of_model(byte_pairs(["<|endoftext|>"]))
    roberta = of_model(byte_pairs(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]))
    end = len(json.loads(gpt2["vocab.json"]))
    added = {"added_tokens.json": json.dumps({"<extra>": end, "[EOS]": end + 1})}
    bert = word_pieces()
    goldens = [
        golden("gpt2", {**gpt2, **config(tokenizer_class="GPT2Tokenizer")}, GPT2Tokenizer.from_pretrained),
        golden(
            "gpt2-prefix-space",
            {**gpt2, **config(tokenizer_class="GPT2Tokenizer", add_prefix_space=True)},
            GPT2Tokenizer.from_pretrained,
        ),
        golden(
            "gpt2-added",
            {
                **gpt2, **added, **config(tokenizer_class="GPT2Tokenizer", add_bos_token=True, add_eos_token=True),
                "special_tokens_map.json": json.dumps({"bos_token": "<|endoftext|>", "eos_token": "[EOS]"}),
            },
            GPT2Tokenizer.from_pretrained,
        ),
        golden("roberta", {**roberta, **config(tokenizer_class="RobertaTokenizer")}, RobertaTokenizer.from_pretrained),
        golden("bert", {**bert, **config(tokenizer_class="BertTokenizer", do_lower_case=True)}, BertTokenizer.from_pretrained),
        golden(
            "bert-cased", {**bert, **config(tokenizer_class="BertTokenizer", do_lower_case=False)}, BertTokenizer.from_pretrained
        ),
        golden(
            "bert-accents",
            {**bert, **config(tokenizer_class="BertTokenizer", do_lower_case=True, strip_accents=False)},
            BertTokenizer.from_pretrained,
        ),
    ]
    GOLDEN.write_text(json.dumps(goldens, ensure_ascii=False) + "\n", encoding="utf-8")


main()
