//! Items of a generated corpus, each with its expected outcome.

use std::fmt::Write;

use crate::hostile::Random;

/// A file, link or folder of a corpus.
pub(super) struct Item {
    pub(super) kind: &'static str,
    /// Its path in the corpus.
    pub(super) name: String,
    pub(super) shape: Shape,
    pub(super) outcome: Outcome,
    /// Words that the program must say about it.
    pub(super) said: Vec<String>,
    /// True if it is an error to name it on the command line.
    pub(super) is_refused_by_name: bool,
}

pub(super) enum Shape {
    File(Vec<u8>),
    /// A link to this path.
    Link(String),
    /// A folder with these files.
    Files(Vec<(&'static str, Vec<u8>)>),
}

pub(super) enum Outcome {
    /// Its texts are documents; of its lines, some are skipped.
    Read { texts: Vec<String>, lines: usize, skipped: usize },
    /// It counts as skipped.
    Skipped,
    /// It is not to be read.
    LeftOut,
}

impl Item {
    /// A file that is no text, and what must be said of it.
    fn skipped(kind: &'static str, name: String, content: Vec<u8>, words: &str) -> Item {
        let said = vec![name.clone(), words.to_string()];
        Item {
            kind,
            name,
            shape: Shape::File(content),
            outcome: Outcome::Skipped,
            said,
            is_refused_by_name: true,
        }
    }

    fn read(kind: &'static str, name: String, content: impl Into<Vec<u8>>, texts: Vec<String>) -> Item {
        let outcome = Outcome::Read { texts, lines: 0, skipped: 0 };
        Item {
            kind,
            name,
            shape: Shape::File(content.into()),
            outcome,
            said: Vec::new(),
            is_refused_by_name: false,
        }
    }

    fn saying(mut self, words: &str) -> Item {
        self.said.extend([self.name.clone(), words.to_string()]);
        self
    }

    /// Returns whether the item is left out of folders, but refused if it is named.
    pub(super) fn is_for_folders(&self) -> bool {
        matches!(self.outcome, Outcome::LeftOut) && self.is_refused_by_name
    }

    /// Bytes of a file.
    pub(super) fn size(&self) -> usize {
        match &self.shape {
            Shape::File(content) => content.len(),
            Shape::Link(_) | Shape::Files(_) => 0,
        }
    }
}

type Make = fn(&'static str, usize, &mut Random) -> Item;

pub(super) const KINDS: [(&str, Make); 24] = [
    ("plain text", text),
    ("a text with a byte order mark", marked),
    ("a text with CRLF", windows_lines),
    ("a text across blocks", large_text),
    ("a text in a folder named target", in_target),
    ("JSON lines", lines),
    ("JSON lines by another name", renamed_lines),
    ("JSON lines of which some are broken", broken_lines),
    ("JSON as Python writes it", python),
    ("a JSON line across blocks", large_line),
    ("an array of records", array),
    ("records under a key", member),
    ("JSON without texts", without_texts),
    ("JSON that is cut", cut_json),
    ("a packed or binary format", magic),
    ("text in UTF-16 or UTF-32", wide),
    ("text in Latin-1", latin1),
    ("token ids", ids),
    ("a table", table),
    ("a pointer of git-lfs", pointer),
    ("a link to nothing", dangling),
    ("a hidden file", hidden),
    ("a build folder", build_folder),
    ("an empty file", empty),
];

/// Words with characters of one to four bytes; long enough to train on.
fn words(random: &mut Random, bytes: usize) -> String {
    const WORDS: [&str; 9] = ["chunk", "rank", "naïve", "漢字", "🙂", "[1]", "\"quoted\"", "a\\b", "{x}"];
    let mut text = format!("{} text", random.next_u64());
    while text.len() < bytes {
        text.push(*random.pick(&[' ', ' ', '\n', '\t']));
        text.push_str(random.pick::<&str>(&WORDS));
    }
    text
}

fn short(random: &mut Random) -> String {
    let bytes = 400 + random.below(3000);
    words(random, bytes)
}

fn named(number: usize, random: &mut Random, extensions: &[&str]) -> String {
    let folder = *random.pick(&["", "", "sub/", "sub/deep/", "Z/"]);
    let extension = *random.pick(extensions);
    format!("{folder}{}{number}{extension}", random.pick(&["a", "part ", "ü", "B"]))
}

const TEXTS: [&str; 5] = [".txt", ".md", "", ".rs", ".TXT"];

fn text(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let text = short(random);
    Item::read(kind, named(number, random, &TEXTS), text.clone(), vec![text])
}

fn marked(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let text = short(random);
    let name = named(number, random, &TEXTS);
    Item::read(kind, name, format!("\u{feff}{text}"), vec![text]).saying("byte order mark, dropped")
}

fn windows_lines(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let text = short(random).replace('\n', "\r\n") + "\r\n";
    Item::read(kind, named(number, random, &TEXTS), text.clone(), vec![text])
        .saying("CRLF line ends, kept as they are")
}

fn large_text(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let bytes = (1 << 20) + random.below(1 << 20);
    let text = words(random, bytes);
    Item::read(kind, named(number, random, &TEXTS), text.clone(), vec![text])
}

fn in_target(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let text = short(random);
    Item::read(kind, format!("target/t{number}.txt"), text.clone(), vec![text])
}

/// A JSON string as Python's `json.dumps` writes it, or with the characters as they are.
fn quoted(text: &str, random: &mut Random) -> String {
    let ascii = random.chance(0.5);
    let mut json = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => json += "\\\"",
            '\\' => json += "\\\\",
            '\n' => json += "\\n",
            '\t' => json += "\\t",
            c if ascii && !c.is_ascii() => {
                let mut units = [0; 2];
                c.encode_utf16(&mut units)
                    .iter()
                    .for_each(|unit| write!(json, "\\u{unit:04x}").expect("text grows"));
            }
            c => json.push(c),
        }
    }
    json + "\""
}

fn record(text: &str, random: &mut Random) -> String {
    let before = *random.pick(&["", "\"id\": 7, ", "\"meta\": {\"text\": [1, null]}, "]);
    let after = *random.pick(&["", ", \"more\": [true, {}, -1.5e3]"]);
    format!("{{{before}\"text\": {}{after}}}", quoted(text, random))
}

fn records(random: &mut Random) -> (Vec<String>, Vec<String>) {
    let texts: Vec<String> = (0..1 + random.below(6)).map(|_| short(random)).collect();
    let records = texts.iter().map(|text| record(text, random)).collect();
    (texts, records)
}

fn with_lines(mut item: Item, all: usize, not_texts: usize) -> Item {
    if let Outcome::Read { lines, skipped, .. } = &mut item.outcome {
        (*lines, *skipped) = (all, not_texts);
    }
    item
}

fn lines(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let (texts, records) = records(random);
    let ends = *random.pick(&["\n", "\r\n", "\n\n"]);
    let name = named(number, random, &[".jsonl", ".ndjson", ".JSONL"]);
    let count = records.len();
    with_lines(Item::read(kind, name, records.join(ends) + ends, texts), count, 0)
}

fn renamed_lines(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let (texts, records) = records(random);
    let count = records.len();
    // One record alone is a value, too.
    let item = with_lines(Item::read(kind, String::new(), records.join("\n"), texts), count, 0);
    match random.chance(0.4) {
        true => Item { name: named(number, random, &[".json"]), ..item },
        false => {
            Item { name: named(number, random, &[".txt", "", ".data"]), ..item }.saying("JSON by its content")
        }
    }
}

fn broken_lines(kind: &'static str, number: usize, random: &mut Random) -> Item {
    const BROKEN: [(&str, &str); 5] = [
        ("oops", "not valid JSON"),
        ("{\"text\": \"cut", "not valid JSON"),
        ("[1, 2]", "not an object"),
        ("{\"content\": \"other\"}", "without the key \"text\""),
        ("{\"text\": 7}", "with another value than a string"),
    ];
    let good = *random.pick(&[3, 80, 200]);
    let texts: Vec<String> = (0..good).map(|n| format!("line {n} {}", words(random, 200))).collect();
    let mut records: Vec<String> = texts.iter().map(|text| record(text, random)).collect();
    let (broken, what) = *random.pick(&BROKEN);
    let skipped = 1 + random.below(2);
    let mut numbers = Vec::new();
    for _ in 0..skipped {
        let place = numbers.last().copied().unwrap_or(0)
            + random.below(records.len() - numbers.last().copied().unwrap_or(0));
        records.insert(place, broken.to_string());
        numbers.push(place + 1);
    }
    let name = named(number, random, &[".jsonl", ".ndjson"]);
    let count = records.len();
    let mut item = with_lines(Item::read(kind, name.clone(), records.join("\n"), texts), count, skipped);
    item.said = vec![what.to_string(), format!("{name} line {}", numbers[0])];
    item
}

fn python(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let first = short(random);
    let long = "9".repeat(20 + random.below(40));
    let odd = ["NaN", "Infinity", "-Infinity", &long][random.below(4)].to_string();
    let content = format!(
        "{{\"n\": {odd}, \"text\": {}}}\n{{\"text\": \"lone \\ud83d.\", \"text\": \"lone \\udc00 \\ud83d\\u0041\"}}\n",
        quoted(&first, random)
    );
    let texts = vec![first, "lone \u{fffd} \u{fffd}A".to_string()];
    let item = with_lines(Item::read(kind, named(number, random, &[".jsonl"]), content, texts), 2, 0);
    item.saying("half of a surrogate pair, read as U+FFFD").saying("of which the last counts")
}

fn large_line(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let bytes = (1 << 20) + random.below(2 << 20);
    let text = words(random, bytes);
    let content = record(&text, random);
    with_lines(Item::read(kind, named(number, random, &[".jsonl", ".json"]), content, vec![text]), 1, 0)
}

fn array(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let (texts, mut records) = records(random);
    if random.chance(0.3) {
        records = texts.iter().map(|text| quoted(text, random)).collect();
    }
    let between = *random.pick(&[", ", ",\n", ",\n  "]);
    let name = named(number, random, &[".json", ".jsonl", ".txt"]);
    let is_text = name.ends_with(".txt");
    let count = records.len();
    let content = format!("[{}]\n", records.join(between));
    let item = with_lines(Item::read(kind, name, content, texts), count, 0);
    if is_text { item.saying("JSON by its content") } else { item }
}

fn member(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let (texts, records) = records(random);
    let key = *random.pick(&["data", "train", "rows"]);
    let gap = *random.pick(&["", "\n "]);
    let content = format!("{{{gap}\"version\": \"1\",{gap}\"{key}\": [{}]{gap}}}", records.join(", "));
    let count = records.len();
    with_lines(Item::read(kind, named(number, random, &[".json"]), content, texts), count, 0)
}

fn without_texts(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let (content, words) = *random.pick(&[
        ("[{\"instruction\": \"a\", \"output\": \"b\"}]", "\"instruction\", \"output\""),
        ("{\"name\": \"x\", \"files\": [\"a\"]}", "\"name\", \"files\""),
        ("{\"train\": [{\"text\": \"a\"}], \"test\": [{\"text\": \"b\"}]}", "\"train\", \"test\""),
        ("{\"text\": {\"0\": \"a\", \"1\": \"b\"}}", "\"text\""),
    ]);
    Item::skipped(kind, named(number, random, &[".json"]), content.into(), words)
}

fn cut_json(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let (_, records) = records(random);
    let mut content = format!("[{}", records.join(",\n")).into_bytes();
    let whole = content.len() - random.below(content.len() / 2);
    content.truncate(whole);
    while str::from_utf8(&content).is_err() {
        content.pop();
    }
    Item::skipped(kind, named(number, random, &[".json"]), content, "broken JSON")
}

fn magic(kind: &'static str, number: usize, random: &mut Random) -> Item {
    const MAGIC: [(&[u8], &str); 12] = [
        (b"\x1f\x8b\x08\0", "gunzip"),
        (b"PK\x03\x04", "zip archive"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\xfd7zXZ\0", "xz"),
        (b"PAR1", "Parquet"),
        (b"ARROW1\0\0", "Arrow"),
        (b"%PDF-1.7\n", "PDF"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"\xff\xd8\xff", "JPEG"),
        (b"\x20\0\0\0\0\0\0\0{\"__metadata__\":", "safetensors"),
        (b"\x80\x04\x95", "pickle"),
        (b"GGUF", "GGUF"),
    ];
    let (magic, words) = *random.pick(&MAGIC);
    let rest = random.below(4000);
    let content = [magic, &random.bytes(rest)].concat();
    Item::skipped(kind, named(number, random, &[".txt", "", ".gz", ".parquet"]), content, words)
}

fn wide(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let mut text = format!("A text of English words, {}, naïve or not.\n", random.next_u64()).repeat(9);
    if random.chance(0.5) {
        text.insert(0, '\u{feff}');
    }
    let utf16 = text.encode_utf16();
    let (content, words): (Vec<u8>, _) = match random.below(3) {
        0 => (utf16.flat_map(u16::to_le_bytes).collect(), "iconv -f UTF-16"),
        1 => (utf16.flat_map(u16::to_be_bytes).collect(), "iconv -f UTF-16"),
        _ => (text.chars().flat_map(|c| u32::from(c).to_le_bytes()).collect(), "iconv -f UTF-32"),
    };
    Item::skipped(kind, named(number, random, &TEXTS), content, words)
}

fn latin1(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let mut content = format!("un caf{} au lait {}", '\u{1}', random.next_u64()).into_bytes();
    content[6] = 0xe9;
    let (from, more) = (content.clone(), random.below(400));
    for _ in 0..more {
        content.extend_from_slice(&from);
    }
    Item::skipped(kind, named(number, random, &TEXTS), content, "WINDOWS-1252")
}

fn ids(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let (width, vocabulary) = (*random.pick(&[2, 4, 8]), *random.pick(&[65, 256, 50257]));
    let mut content = Vec::new();
    for _ in 0..500 {
        content.extend_from_slice(&(random.below(vocabulary) as u64).to_le_bytes()[..width]);
    }
    if random.chance(0.3) {
        content.splice(..0, *b"PHXTOK\0\0");
    }
    Item::skipped(kind, format!("ids{number}.bin"), content, "data.tokens")
}

fn table(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let content = "text,label\n\"a, b\",1\n".repeat(1 + random.below(40));
    Item::skipped(kind, named(number, random, &[".csv", ".tsv", ".CSV"]), content.into(), "data.plain")
}

fn pointer(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let content = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n";
    Item::skipped(
        kind,
        named(number, random, &[".txt", ".jsonl", ".parquet"]),
        content.into(),
        "git lfs pull",
    )
}

fn dangling(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let item = Item::skipped(kind, named(number, random, &TEXTS), Vec::new(), "link to nothing");
    Item { shape: Shape::Link("nowhere".to_string()), ..item }
}

fn hidden(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let text = short(random);
    let name = format!(".hidden{number}/text.txt");
    let said = vec![format!(".hidden{number}"), "hidden file or folder".to_string()];
    let shape = Shape::File(text.into_bytes());
    Item { kind, name, shape, outcome: Outcome::LeftOut, said, is_refused_by_name: true }
}

fn build_folder(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let marks: [(&'static str, &[u8]); 2] =
        [(".rustc_info.json", b"{}"), ("CACHEDIR.TAG", b"Signature: 8a477f597d28d172789f06886806bc55\n")];
    let (mark, content) = *random.pick(&marks);
    let shape = Shape::Files(vec![(mark, content.to_vec()), ("text.txt", b"built".to_vec())]);
    let name = format!("out{number}");
    let said = vec![name.clone(), "build or cache folder".to_string()];
    Item { kind, name, shape, outcome: Outcome::LeftOut, said, is_refused_by_name: true }
}

fn empty(kind: &'static str, number: usize, random: &mut Random) -> Item {
    let name = named(number, random, &TEXTS);
    let content = *random.pick(&[&b""[..], b"\xef\xbb\xbf"]);
    let mut item = Item::read(kind, name, content, Vec::new()).saying("empty file");
    item.outcome = Outcome::LeftOut;
    item
}
