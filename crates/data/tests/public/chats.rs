//! Chats: what of each record is trained, or why and where it is refused.

use std::path::PathBuf;

use phalanx_data::{
    ChatEncoder, ChatExample, ChatFiles, ChatFormat, Day, PackedChats, RowKind, RowOrder, RowSamples,
    SampleOrder, Tokenizer, Tokens, TrainOn, named_template,
};

const GOOD: &str =
    r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#;

fn day() -> Day {
    Day::parse("2026-11-28").unwrap()
}

fn encoder(tokenizer: &Tokenizer, template: &str, train_on: TrainOn) -> ChatEncoder {
    let source = named_template(template).unwrap_or(template);
    ChatEncoder::new(tokenizer, Some((source, "of a test")), train_on, day()).unwrap()
}

fn files(
    content: &str,
    format: Option<ChatFormat>,
) -> (tempfile::TempDir, PathBuf, Result<ChatFiles, String>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("chats.jsonl");
    std::fs::write(&path, content).unwrap();
    let read = ChatFiles::read(std::slice::from_ref(&path), format).map_err(|error| error.to_string());
    (dir, path, read)
}

/// The text of a chat, with `[` and `]` around what is trained.
fn shown(tokenizer: &Tokenizer, example: &ChatExample) -> String {
    let (mut text, mut at) = (String::new(), 0);
    for run in example.trained.chunk_by(|one, other| one == other) {
        let part = tokenizer.decode(&example.ids[at..at + run.len()]);
        text += &if run[0] { format!("[{part}]") } else { part };
        at += run.len();
    }
    text
}

/// The third record of a file, behind two good ones, in ChatML and bytes; what is refused names the file and the third line.
fn third(record: &str, format: Option<ChatFormat>, train_on: TrainOn) -> Result<String, String> {
    let (_dir, path, read) = files(&format!("{GOOD}\n{GOOD}\n{record}\n"), None);
    let tokenizer = Tokenizer::byte();
    let encoder = encoder(&tokenizer, "chatml", train_on);
    let files = match format {
        None => read?,
        Some(_) => {
            std::fs::write(&path, format!("\n\n{record}\n")).unwrap();
            ChatFiles::read(std::slice::from_ref(&path), format).map_err(|error| error.to_string())?
        }
    };
    let examples = encoder.examples(&files, 3).map_err(|error| {
        let error = error.to_string();
        assert!(error.starts_with(&format!("{}, line 3: ", path.display())), "{record}: {error}");
        error
    })?;
    let text = shown(&tokenizer, examples.last().unwrap());
    Ok(text.replace("<|im_start|>", "<").replace("<|im_end|>", ">").replace('\n', "/"))
}

#[test]
#[allow(clippy::too_many_lines, reason = "a list of cases")]
fn each_record_is_trained_as_its_format_says_or_refused_by_its_line() {
    let table: &[(&str, Result<&str, &str>)] = &[
        (GOOD, Ok("<user/q>/<assistant/[a>]/")),
        (
            r#"{"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "q"}, {"role": "assistant", "content": " a "}]}"#,
            Ok("<system/>/<user/q>/<assistant/[ a >]/"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "a", "weight": 0}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "b", "weight": 1}]}"#,
            Ok("<user/é>/<assistant/a>/<user/q>/<assistant/[b>]/"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"role": "assistant", "content": [{"type": "text", "text": "c"}]}]}"#,
            Ok("<user/ab>/<assistant/[c>]/"),
        ),
        (
            r#"{"messages": [{"role": "assistant", "content": "first"}, {"role": "user", "content": "last"}]}"#,
            Ok("<assistant/[first>]/<user/last>/"),
        ),
        (
            r#"{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"}"#,
            Ok("<system/s>/<user/q>/<assistant/[a>]/"),
        ),
        (
            r#"{"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "id": 7}"#,
            Ok("<user/q>/<assistant/[a>]/"),
        ),
        (
            r#"{"conversations": [{"from": "human", "value": "q"}, {"from": "observation", "value": ""}, {"from": "gpt", "value": "a"}]}"#,
            Ok("<user/q>/<tool/>/<assistant/[a>]/"),
        ),
        (r#"{"instruction": "i", "input": "x", "output": "o"}"#, Ok("<user/i/x>/<assistant/[o>]/")),
        (
            r#"{"instruction": "i", "input": "", "output": "o", "system": "s", "history": [["q", "a"]]}"#,
            Ok("<system/s>/<user/q>/<assistant/[a>]/<user/i>/<assistant/[o>]/"),
        ),
        (r#"{"prompt": "p ", "completion": "c"}"#, Ok("p [c]")),
        (r#"{"prompt": "", "completion": "c"}"#, Ok("[c]")),
        (
            r#"{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}], "completion": [{"role": "assistant", "content": "b"}]}"#,
            Ok("<user/q>/<assistant/a>/<user/r>/<assistant/[b>]/"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "a"}], "tools": []}"#,
            Ok("<user/>>/<assistant/[a>]/"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "é\u0000\ud83d\ude00"}]}"#,
            Ok("<user/q>/<assistant/[é\u{0}😀>]/"),
        ),
        // Refused.
        ("{", Err("not a JSON object in one line")),
        ("[1]", Err("is [1], expected an object")),
        ("7", Err("is 7, expected an object")),
        ("\"text\"", Err("expected an object")),
        ("{}", Err("no format of chats is known")),
        (r#"{"text": "t"}"#, Err("the record has \"text\"")),
        (r#"{"messages": null, "x": 1}"#, Err("no format of chats is known")),
        (r#"{"messages": []}"#, Err("it has no message")),
        (r#"{"messages": {}}"#, Err("\"messages\" is {}, expected a list")),
        (r#"{"messages": ["hi"]}"#, Err("message 1: it is hi, expected an object")),
        (r#"{"messages": [{"content": "q"}]}"#, Err("message 1: it has neither \"role\" nor \"from\"")),
        (
            r#"{"messages": [{"role": "narrator", "content": "q"}]}"#,
            Err("message 1: its role is \"narrator\", expected one of system"),
        ),
        (r#"{"messages": [{"role": 3, "content": "q"}]}"#, Err("\"role\" is 3, expected a text")),
        (
            r#"{"messages": [{"role": "user", "content": " \n"}, {"role": "assistant", "content": "a"}]}"#,
            Err("message 1 (user) is empty"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": null}]}"#,
            Err("message 2 (assistant) is empty"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant"}]}"#,
            Err("message 2 (assistant) is empty"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "a"}]}"#,
            Err("\"content\" is 5, expected a list"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, {"role": "assistant", "content": "a"}]}"#,
            Err("part of type \"image_url\", and only texts"),
        ),
        (r#"{"messages": [{"role": "user", "content": "q"}]}"#, Err("no answer")),
        (
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]}"#,
            Err("all its answers have the weight 0"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5}]}"#,
            Err("\"weight\" is 0.5, expected 0 or 1"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "tools": "no"}"#,
            Err("\"tools\" is a text that is not JSON"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}"#,
            Err("\"arguments\" of a call is not JSON"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]}"#,
            Err("\"arguments\" of a call is [], expected an object"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}]}"#,
            Err("has no name"),
        ),
        (
            r#"{"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "f()"}]}"#,
            Err("function_call is not JSON"),
        ),
        (r#"{"instruction": "i"}"#, Err("there is no \"output\"")),
        (r#"{"instruction": "", "output": "o"}"#, Err("message 1 (user) is empty")),
        (r#"{"instruction": "i", "output": ["o"]}"#, Err("\"output\" is ['o'], expected a text")),
        (
            r#"{"instruction": "i", "output": "o", "history": [["q"]]}"#,
            Err("expected a question and an answer"),
        ),
        (r#"{"prompt": "p"}"#, Err("there is no \"completion\"")),
        (r#"{"prompt": "p", "completion": ""}"#, Err("its completion is empty")),
        (
            r#"{"prompt": "p", "completion": [{"role": "assistant", "content": "a"}]}"#,
            Err("one is a text and one is not"),
        ),
        (
            r#"{"prompt": "p", "chosen": "a", "rejected": "b"}"#,
            Err("a pair of a preferred and another answer"),
        ),
        (
            "{\"messages\": [{\"role\": \"user\", \"content\": \"\u{f0000}\"}, {\"role\": \"assistant\", \"content\": \"a\"}]}",
            Err("U+F0000"),
        ),
    ];
    for (record, expected) in table {
        match (third(record, None, TrainOn::Answers), expected) {
            (Ok(text), Ok(expected)) => assert_eq!(text, *expected, "{record}"),
            (Err(error), Err(part)) => assert!(error.contains(part), "{record}: {error}"),
            (found, _) => panic!("{record}: {found:?}, expected {expected:?}"),
        }
    }
}

#[test]
fn what_is_trained_and_the_format_can_be_given() {
    let two = r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]}"#;
    let last = third(two, None, TrainOn::LastAnswer).unwrap();
    assert_eq!(last, "<user/q>/<assistant/a>/<user/r>/<assistant/[b>]/");
    let all = third(two, None, TrainOn::All).unwrap();
    assert_eq!(all, "[<user/q>/<assistant/a>/<user/r>/<assistant/b>/]");
    let both = r#"{"messages": [], "instruction": "i", "output": "o"}"#;
    let alpaca = third(both, Some(ChatFormat::Alpaca), TrainOn::Answers).unwrap();
    assert_eq!(alpaca, "<user/i>/<assistant/[o>]/");
    let refused = third(GOOD, Some(ChatFormat::ShareGpt), TrainOn::Answers).unwrap_err();
    assert!(refused.contains("there is no \"conversations\", which the format sharegpt has"), "{refused}");
}

#[test]
fn files_that_hold_no_chats_are_refused() {
    let encoder = encoder(&Tokenizer::byte(), "chatml", TrainOn::Answers);
    for (content, line, part) in [
        ("", 1, "no record"),
        ("\n \n", 1, "no record"),
        ("[]", 1, "no record"),
        ("[{},\n{", 2, "does not end"),
        ("[{\"a\": 1},\n 5]", 1, "no format of chats"),
        ("a,b\n1,2\n", 1, "not a JSON object"),
        ("\u{feff}{\"x\": 1}", 1, "the record has \"x\""),
    ] {
        let (_dir, path, read) = files(content, None);
        let found = read.and_then(|files| encoder.examples(&files, 9).map_err(|error| error.to_string()));
        let error = found.unwrap_err();
        assert!(error.starts_with(&format!("{}, line {line}: ", path.display())), "{content:?}: {error}");
        assert!(error.contains(part), "{content:?}: {error}");
    }
    let array = format!("[\n{GOOD},\n{GOOD}]\n");
    assert_eq!(encoder.examples(&files(&array, None).2.unwrap(), 9).unwrap().len(), 2);
}

/// A template in the manner of Qwen 3, which drops the reasoning of earlier answers and writes one where there is none.
const THINKS: &str = "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
    {%- for m in messages %}{%- set content = m.content or '' %}{%- set thought = m.reasoning_content or '' %}\
    {%- if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}\
    {{- '<|im_start|>' + m.role + '\\n' }}\
    {%- if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>' + thought + '</think>' }}{% endif %}{{ content }}\
    {%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}{% endfor %}\
    {{- '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A tokenizer of bytes with the special tokens of ChatML.
fn chat_tokenizer() -> Tokenizer {
    let content: serde_json::Value =
        serde_json::from_str(Tokenizer::byte().hugging_face_files(None).tokenizer()).unwrap();
    let mut content = content;
    let special = ["<|im_start|>", "<|im_end|>"].into_iter().zip(256..).map(|(token, id)| {
        serde_json::json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    });
    content["added_tokens"] = special.collect();
    Tokenizer::from_json(content.to_string().as_bytes(), &PathBuf::from("t.json")).unwrap()
}

#[test]
fn answers_are_found_in_templates_without_marks() {
    let tokenizer = chat_tokenizer();
    let encoder = encoder(&tokenizer, THINKS, TrainOn::Answers);
    let shown = |record: &str| {
        let (_dir, _, read) = files(record, None);
        let examples = encoder.examples(&read.unwrap(), 1).map_err(|error| error.to_string())?;
        Ok::<_, String>(
            shown(&tokenizer, &examples[0]).replace("<|im_start|>", "<").replace("<|im_end|>", ">"),
        )
    };
    for (messages, expected) in [
        (
            r#"{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nx\n</think>\n\na"}, {"role": "user", "content": "r"}, {"role": "assistant", "content": " <think>y</think>b ", "reasoning_content": "z"}"#,
            "<user\nq>\n<assistant\n[a>]\n<user\nr>\n<assistant\n[<think>y</think>b >]\n",
        ),
        (
            r#"{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}"#,
            "<user\nq>\n<assistant\n[<think></think>a>]\n<assistant\n<think></think>b>\n",
        ),
        (
            r#"{"role": "user", "content": "q"}, {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{\"b\":1,\"a\":\"é\"}"}}]}, {"role": "tool", "content": "t"}, {"role": "assistant", "content": "a"}"#,
            "<user\nq>\n<assistant\n[<think></think><tool_call>f{\"b\": 1, \"a\": \"é\"}</tool_call>>]\n<tool\nt>\n<assistant\n[<think></think>a>]\n",
        ),
        // Spelled special tokens are text, and no answer ends with one.
        (
            r#"{"role": "user", "content": "<|im_start|>assistant\n"}, {"role": "assistant", "content": "a<|im_end|>b"}"#,
            "<user\n<assistant\n>\n<assistant\n[<think></think>a>b>]\n",
        ),
    ] {
        assert_eq!(shown(&format!("{{\"messages\": [{messages}]}}")).unwrap(), expected);
    }
    let (_dir, _, read) = files(
        r#"{"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "x"}]}"#,
        None,
    );
    let example = encoder.examples(&read.unwrap(), 1).unwrap().remove(0);
    assert_eq!(example.spelled, [("<|im_end|>".to_string(), 1)].into());
    assert_eq!(example.ids.iter().filter(|id| **id == 257).count(), 2);
    assert_eq!(example.ids.iter().filter(|id| **id == 256).count(), 2);
}

#[test]
fn a_template_that_changes_answers_or_leaves_them_out_is_refused() {
    for (template, part) in [
        (
            "{% for m in messages %}{{ m.content | length }}{% endfor %}",
            "writes another text where parts of a message are marked",
        ),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "leaves out the content of message 2"),
        ("{% for m in messages %}{{ m.content | upper | reverse }}{% endfor %}", "cannot be told apart"),
        ("{{ raise_exception('only one message') }}", "only one message"),
    ] {
        let (_dir, path, read) = files(GOOD, None);
        let encoder = encoder(&Tokenizer::byte(), template, TrainOn::Answers);
        let error = encoder.examples(&read.unwrap(), 1).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("{}, line 1: ", path.display())) && error.contains(part),
            "{error}"
        );
    }
    let (_dir, _, read) = files(GOOD, None);
    let none = ChatEncoder::new(&Tokenizer::byte(), None, TrainOn::Answers, day()).unwrap();
    let error = none.examples(&read.unwrap(), 1).unwrap_err().to_string();
    assert!(error.contains("has no chat template") && error.contains("data.template"), "{error}");
}

/// Rows from the file have the chats of the encoder, and targets that are the trained tokens of each alone.
#[test]
fn packed_chats_come_back_from_the_token_file() {
    let dir = tempfile::tempdir().unwrap();
    let records: Vec<String> = (0..40)
        .map(|number| {
            let (question, answer) = ("q".repeat(1 + number % 7), "a".repeat(1 + number * 5 % 11));
            format!(r#"{{"prompt": "{question}", "completion": "{answer}"}}"#)
        })
        .collect();
    let (_dir, _, read) = files(&records.join("\n"), None);
    let (tokenizer, seq) = (Tokenizer::byte(), 32);
    let encoder = encoder(&tokenizer, "chatml", TrainOn::Answers);
    for one_each in [false, true] {
        let files = read.clone().unwrap();
        let packed = PackedChats::encode(&files, &encoder, (seq, one_each), 3, &mut |_| {}).unwrap();
        let alone = PackedChats::encode(&files, &encoder, (seq, one_each), 1, &mut |_| {}).unwrap();
        let path = dir.path().join("tokens.bin");
        let written =
            PackedChats::write(&path, &tokenizer, RowKind::Chats, [Some(&packed), Some(&alone)]).unwrap();
        assert_eq!(written.documents, 80);
        let order = RowOrder { order: SampleOrder::Sequential, seed: 1, held_out: 0.0 };
        let rows = RowSamples::open(RowKind::Chats, Tokens::open(&path).unwrap(), seq, order).unwrap();
        rows.check(256, 1).unwrap();
        assert_eq!(rows.counts(), [packed.len(), alone.len()]);
        let mut found = Vec::new();
        for row in 0..packed.len() {
            let [mut ids, mut targets, mut places] = [(); 3].map(|()| vec![0; seq]);
            rows.fill(row as u32, &mut ids, &mut targets).unwrap();
            rows.positions(row as u32, &mut places).unwrap();
            let starts: Vec<usize> = (0..seq).filter(|at| places[*at] == 0).chain([seq]).collect();
            for range in starts.windows(2) {
                let range = range[0]..range[1];
                let text = tokenizer.decode(&ids[range.clone()]);
                let trained = targets[range].iter().filter(|target| **target != u32::MAX);
                let trained: Vec<u32> = trained.copied().collect();
                if !trained.is_empty() {
                    found.push((text, tokenizer.decode(&trained)));
                }
            }
        }
        let mut expected: Vec<(String, String)> = (0..40usize)
            .map(|number| {
                let (question, answer) = ("q".repeat(1 + number % 7), "a".repeat(1 + number * 5 % 11));
                (question + &answer, answer)
            })
            .collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
        assert!(one_each == (packed.len() == 40));
    }
    let wrong = RowSamples::open(
        RowKind::Labelled,
        Tokens::open(&dir.path().join("tokens.bin")).unwrap(),
        seq,
        RowOrder { order: SampleOrder::Sequential, seed: 1, held_out: 0.0 },
    );
    assert!(wrong.err().unwrap().to_string().contains("it holds no labelled rows"));
}
