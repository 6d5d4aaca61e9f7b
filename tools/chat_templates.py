"""Compares chats of `phalanx tokenize --show` with transformers': text, ids, and which tokens are trained.

    python tools/chat_templates.py target/debug/phalanx FOLDER [NAME ...]

FOLDER holds chat templates (`*.jinja`), such as `trl/chat_templates` of the package trl (Apache 2.0; nothing of it is kept here). A tokenizer of
bytes with the special tokens of the template is made for each. Chats are compared where both render them, and must be refused by both
otherwise. The mask of a template with `{% generation %}` is transformers' `return_assistant_tokens_mask`; that of another one is compared
with its counterpart `NAME_training`, where this renders the same text. Exit code 1 when a text, an id or a mask of the first kind differs.
It needs transformers and its dependencies, without PyTorch.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern", "days": 2, "x": [1.5, None]}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The \"weather\" <é>", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "a city"}, "days": {"type": "integer"}}, "required": ["city"]}}}]


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CHATS = {
    "one turn": {"messages": [turn("user", "Hi"), turn("assistant", "Hello.")]},
    "two turns": {"messages": [
        turn("system", "Be brief."), turn("user", " What is 2 + 2?\n"), turn("assistant", "\n4, of course \n"), turn("user", "And é?"),
        turn("assistant", "A letter: ü, 東京."),
    ]},
    "reasoning": {"messages": [
        turn("user", "a"), turn("assistant", "b", reasoning_content="first I think"), turn("user", "c"),
        turn("assistant", "d", reasoning_content="then\nI think again\n"),
    ]},
    "think in content": {"messages": [
        turn("user", "a"), turn("assistant", "<think>\nhm\n</think>\n\nb"), turn("user", "c"), turn("assistant", "<think>\nso\n</think>\n\nd"),
    ]},
    "tools": {"tools": TOOLS, "messages": [
        turn("system", "Use tools."), turn("user", "Weather?"), {"role": "assistant", "content": "", "tool_calls": [CALL]},
        turn("tool", "{\"sun\": true}", tool_call_id="call00001", name="weather"), turn("assistant", "Sunny."),
    ]},
    "calls and text": {"tools": TOOLS, "messages": [
        turn("user", "Weather?"), turn("assistant", "I look it up.", tool_calls=[CALL]),
        turn("tool", "rain", tool_call_id="call00001", name="weather"), turn("assistant", "Rain."), turn("user", "Thanks"), turn("assistant", "Welcome"),
    ]},
    "parts": {"messages": [turn("user", [{"type": "text", "text": "a"}]), turn("assistant", [{"type": "text", "text": "b"}])]},
    "parts joined": {"messages": [turn("user", "a"), turn("assistant", "b")]},
    "open end": {"messages": [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]},
}

SPECIAL = re.compile(r"<\|[A-Za-z_0-9/]+\|>|<｜[^｜<>]+｜>|<\|[A-Z_0-9]+_TOKEN\|>|<(?:start|end)_of_turn>|<s>|</s>|\[/?INST\]")
ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|end|>")


def tokenizer(template: str, folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, and of the special tokens that a template spells, in a folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = sorted(set(SPECIAL.findall(template)) | {"<s>", "</s>", "<unk>", "<pad>", "<|im_end|>"})
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    end = next((token for token in ENDS if token in SPECIAL.findall(template)), "</s>")
    loaded = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token=end, unk_token="<unk>", pad_token="<pad>")
    loaded.chat_template = template
    loaded.save_pretrained(folder)
    return loaded


def ours(program: str, folder: Path, chat: dict, sets: list[str]) -> dict | str:
    """What `phalanx tokenize --show` makes of a chat: text, ids, trained; or why it refuses it."""
    record = json.loads(json.dumps(chat))
    for message in record["messages"]:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    path = folder / "chat.jsonl"
    path.write_text(json.dumps(record) + "\n")
    arguments = [program, "tokenize", str(path), "--tokenizer", str(folder), "--show", "1", "--json"]
    run = subprocess.run(arguments + [f"--set={key}" for key in sets], capture_output=True, text=True)
    return json.loads(run.stdout)["chats"][0] if run.returncode == 0 else run.stderr.strip()


def theirs(loaded: PreTrainedTokenizerFast, chat: dict) -> dict | str:
    """What transformers makes of it."""
    arguments = {"tools": chat.get("tools"), "tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    try:
        made = loaded.apply_chat_template(chat["messages"], **arguments)
    except Exception as error:  # templates raise anything
        return f"{type(error).__name__}: {error}"
    return {"ids": list(made["input_ids"]), "trained": [mask == 1 for mask in made["assistant_masks"]]}


def main() -> int:
    program, folder, *names = sys.argv[1:]
    sources = {path.stem: path.read_text() for path in sorted(Path(folder).glob("*.jinja")) if not names or path.stem in names}
    counts = dict.fromkeys(
        ("same ids", "parts joined", "refused by both", "ids differ", "refused here alone", "rendered here alone", "same mask of generation",
         "mask of generation differs", "same answers as the counterpart's", "other answers", "answers not found"), 0)
    whole = 0
    for name, source in sources.items():
        before = counts["ids differ"] + counts["refused here alone"] + counts["rendered here alone"]
        marks = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        with tempfile.TemporaryDirectory() as made:
            here = Path(made)
            loaded = tokenizer(source, here)
            for what, chat in CHATS.items():
                expected = theirs(loaded, chat)
                found = ours(program, here, chat, ["data.train_on=all"])
                if what == "parts" and isinstance(found, dict) and (isinstance(expected, str) or expected["ids"] != found["ids"]):
                    # A template that reads texts alone gets the parts joined here.
                    counts["parts joined"] += 1
                    chat = CHATS["parts joined"]
                    expected = theirs(loaded, chat)
                if isinstance(expected, str) or isinstance(found, str):
                    both = isinstance(expected, str) and isinstance(found, str)
                    key = "refused by both" if both else "refused here alone" if isinstance(found, str) else "rendered here alone"
                    counts[key] += 1
                    if not both:
                        print(f"{name}, {what}: {key}: {found if isinstance(found, str) else expected}")
                    continue
                if found["ids"] != expected["ids"]:
                    counts["ids differ"] += 1
                    print(f"{name}, {what}: ids differ:\n  {loaded.decode(expected['ids'])!r}\n  {found['text']!r}")
                    continue
                counts["same ids"] += 1
                found = ours(program, here, chat, [])
                if isinstance(found, str):
                    counts["answers not found"] += 1
                    print(f"{name}, {what}: answers not found: {found}")
                elif marks:
                    same = found["trained"] == expected["trained"]
                    counts["same mask of generation" if same else "mask of generation differs"] += 1
                    if not same:
                        print(f"{name}, {what}: mask of generation differs")
                elif f"{name}_training" in sources:
                    loaded.chat_template = sources[f"{name}_training"]
                    counterpart = theirs(loaded, chat)
                    loaded.chat_template = source
                    if isinstance(counterpart, dict) and counterpart["ids"] == expected["ids"]:
                        spelled = [
                            [loaded.decode([i for i, trained in zip(expected["ids"], mask) if trained]) for mask in (counterpart["trained"], found["trained"])]
                        ][0]
                        same = spelled[0].replace("\n", "") == spelled[1].replace("\n", "")
                        counts["same answers as the counterpart's" if same else "other answers"] += 1
                        if not same:
                            print(f"{name}, {what}: other answers:\n  theirs {spelled[0]!r}\n  ours   {spelled[1]!r}")
        whole += before == counts["ids differ"] + counts["refused here alone"] + counts["rendered here alone"]
    print(f"{whole} of {len(sources)} templates render all {len(CHATS)} chats as transformers does")
    for key, count in counts.items():
        print(f"{count:5} {key}")
    wrong = ("ids differ", "refused here alone", "rendered here alone", "mask of generation differs")
    return 1 if any(counts[key] for key in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
