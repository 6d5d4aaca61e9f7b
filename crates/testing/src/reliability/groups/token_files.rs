//! Token files of every format and id type, alone and in lists, and files that are something else.
//!
//! The expected results of a valid file are computed here: numbers of tokens, bytes and windows, the largest id, and
//! the losses of the same ids as text (a byte is a token) or as a file in Phalanx's own format. An invalid file is
//! refused with its name and what it is. For parts that are shorter than a sequence, the refusal names configuration
//! keys that work. Nothing is trained on silently.

use crate::hostile::Random;
use crate::reliability::command::Ended;
use crate::reliability::folder;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};
use serde_json::{Value, json};

const SEQ: usize = 16;

/// Ids that are stored, and how.
struct Stored {
    vocab: usize,
    ids: Vec<u64>,
    /// The format with its id type: bare ones as `u16`; `own`, `llm.c`, `megatron u16`.
    format: &'static str,
}

/// Vocabularies with the formats that hold them.
const VOCABULARIES: [(usize, &[&str]); 4] = [
    (256, &["u8", "u16", "u32", "i64", "own", "megatron u8", "megatron u16", "megatron i32", "megatron i64"]),
    (300, &["u16", "u32", "i64", "own", "megatron u16", "megatron i32"]),
    (50_257, &["u16", "u32", "i64", "own", "llm.c", "megatron u16", "megatron i32", "megatron i64"]),
    (128_256, &["u32", "i64", "own", "llm.c", "megatron i32"]),
];

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let tried = world.case().map(|case| match number % 5 {
        0 | 1 => try_right(&case, random),
        2 | 3 => try_wrong(&case, random),
        _ => try_short(&case, random),
    });
    let (kind, detail, result) =
        tried.unwrap_or_else(|error| ("preparation".into(), String::new(), Err(error)));
    Trial::new(kind, detail, result)
}

type Tried = (String, String, Result<(), String>);

/// Ids as of text: of all kinds, small ones more often.
fn ids(vocab: usize, count: usize, random: &mut Random) -> Vec<u64> {
    let letters = b"the quick brown fox jumps over the lazy dog, and then it sleeps.\n";
    let id = |at: usize, random: &mut Random| match vocab {
        256 => u64::from(letters[(at * at / 7 + random.below(5)) % letters.len()]),
        _ => (1 + random.below(vocab)).min(1 + random.below(vocab)) as u64 - 1,
    };
    (0..count).map(|at| id(at, random)).collect()
}

fn width(id_type: &str) -> usize {
    match id_type {
        "u8" => 1,
        "u16" => 2,
        "u32" | "i32" => 4,
        _ => 8,
    }
}

fn little(ids: &[u64], width: usize) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes().into_iter().take(width)).collect()
}

/// The type of an id in a file of `format`.
fn id_type(format: &'static str, vocab: usize) -> &'static str {
    match format.strip_prefix("megatron ") {
        Some(id_type) => id_type,
        None if !["own", "llm.c"].contains(&format) => format,
        None if vocab > 1 << 16 => "u32",
        None => "u16",
    }
}

/// Writes the ids as `name` of a format; returns the size of the file.
fn write(
    case: &Case<'_>,
    name: &str,
    ids: &[u64],
    format: &'static str,
    vocab: usize,
) -> Result<usize, String> {
    let body = little(ids, width(id_type(format, vocab)));
    let mut bytes = Vec::new();
    if format == "own" {
        bytes.extend(b"PHXTOK\0\0\x01\0\0\0");
        bytes.extend((width(id_type(format, vocab)) as u32).to_le_bytes());
        bytes.extend([vocab, ids.len(), 1, 0, 0, 0].iter().flat_map(|long| (*long as u64).to_le_bytes()));
    } else if format == "llm.c" {
        let (magic, version) = if vocab > 1 << 16 { (20_240_801u32, 7) } else { (20_240_520, 1) };
        bytes.extend([magic, version, ids.len() as u32].iter().flat_map(|word| word.to_le_bytes()));
        bytes.resize(1024, 0);
    } else if let Some(kind) = format.strip_prefix("megatron ") {
        let code = [("u8", 1u8), ("i32", 4), ("i64", 5), ("u16", 8)].iter().find(|(name, _)| *name == kind);
        let first = ids.len() / 3;
        let mut index = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0".to_vec();
        index.push(code.expect("a known type").1);
        index.extend([2u64, 3].iter().flat_map(|count| count.to_le_bytes()));
        index.extend([first, ids.len() - first].iter().flat_map(|length| (*length as i32).to_le_bytes()));
        index.extend([0, first * width(kind)].iter().flat_map(|offset| (*offset as i64).to_le_bytes()));
        index.extend([0u64, 1, 2].iter().flat_map(|document| document.to_le_bytes()));
        case.write(&name.replace(".bin", ".idx"), index)?;
    }
    bytes.extend(body);
    case.write(name, &bytes)?;
    Ok(bytes.len())
}

/// A configuration with `data` as the content of `[data]`.
fn config(case: &Case<'_>, name: &str, vocab: usize, data: &str) -> Result<(), String> {
    let toml = format!(
        "[model]\nlayers = 1\nhidden = 8\nheads = 2\nseq = {SEQ}\nvocab = {vocab}\n[data]\n{data}\n[batch]\nglobal = 2\n\
         [schedule]\nkind = \"constant\"\n[train]\nsteps = 2\neval_samples = 4\nthreads = 1\n"
    );
    case.write(name, toml)
}

/// The value of a key that names files: by a pattern, or one by one.
fn named(names: &[String], pattern: &str, by_pattern: bool) -> String {
    match by_pattern {
        true => json!(pattern).to_string(),
        _ if names.len() == 1 => json!(names[0]).to_string(),
        _ => json!(names).to_string(),
    }
}

fn try_right(case: &Case<'_>, random: &mut Random) -> Tried {
    let (vocab, formats) = *random.pick(&VOCABULARIES);
    let count = 700 + random.below(2500);
    let ids = ids(vocab, count, random);
    let format = *random.pick(formats);
    let stored = Stored { vocab, ids, format };
    let kind = format!("right: {}", stored.format.split(' ').next().unwrap_or_default());
    let files = 1 + random.below(4);
    let own_validation = random.chance(0.4);
    let detail = format!(
        "{} ids below {vocab}, {}, {files} files, own validation {own_validation}",
        count, stored.format
    );
    (kind, detail, right(case, random, &stored, files, own_validation))
}

fn right(
    case: &Case<'_>,
    random: &mut Random,
    stored: &Stored,
    files: usize,
    own: bool,
) -> Result<(), String> {
    let Stored { vocab, ids, format } = stored;
    let held = ids.len() / 5;
    let (train, evaluated) = if own { ids.split_at(ids.len() - held) } else { (&ids[..], &[][..]) };
    let mut names = Vec::new();
    let mut size = 0;
    for (at, part) in train.chunks(train.len().div_ceil(files)).enumerate() {
        let name = format!("d_train_{at:03}.bin");
        size += write(case, &name, part, format, *vocab)?;
        names.push(name);
    }
    let by_pattern = random.chance(0.5);
    let mut data =
        format!("tokens = {}\norder = \"sequential\"\n", named(&names, "d_train_*.bin", by_pattern));
    if ["u8", "u32", "i64"].contains(format) || (*format == "u16" && random.chance(0.3)) {
        data += &format!("token_type = {format:?}\n");
    }
    if own {
        write(case, "d_val_000.bin", evaluated, format, *vocab)?;
        data += &format!(
            "validation_tokens = {}\n",
            named(&["d_val_000.bin".into()], "d_val_*.bin", random.chance(0.5))
        );
    }
    // Bytes of text in the upper or lower half of a word look like text; the user says that they are ids.
    let is_text = *format == "u8";
    data += if is_text { "unusual_tokens = true\n" } else { "" };
    config(case, "t.toml", *vocab, &data)?;
    let id_type = id_type(format, *vocab);
    let lines = [
        format!("tokens      {} tokens of type {id_type} in {size} bytes", train.len()),
        format!("validation part {} tokens", if own { evaluated.len() } else { train.len().div_ceil(10) }),
    ];
    match random.below(4) {
        0 => {
            let ended = case.phalanx(["plan", "t.toml"]).run()?;
            ended.success()?;
            said(&ended, &lines).or_else(|missing| ended.wrong(&missing))
        }
        1 => inspected(case, &names[0], &train[..train.len().div_ceil(files)], id_type, is_text),
        _ => {
            let ended = case.phalanx(["train", "t.toml", "--run", "r"]).run()?;
            ended.success()?;
            let largest = ids.iter().max().copied().unwrap_or(0);
            let part = if own { train.len() } else { train.len() - train.len().div_ceil(10) };
            let windows = format!("; {} windows of {SEQ} to train on", (part - 1) / SEQ);
            let more = [windows, format!("the largest id of the token files is {largest}")];
            said(&ended, &[&lines[..], &more].concat()).or_else(|missing| ended.wrong(&missing))?;
            same_losses(case, stored, train, evaluated)
        }
    }
}

fn said(ended: &Ended, lines: &[String]) -> Result<(), String> {
    match lines.iter().find(|line| !ended.stderr.contains(*line) && !ended.stdout.contains(*line)) {
        Some(missing) => Err(format!("did not say {missing:?}")),
        None => Ok(()),
    }
}

fn inspected(case: &Case<'_>, name: &str, ids: &[u64], id_type: &str, is_text: bool) -> Result<(), String> {
    let is_bare = !case.path(&name.replace(".bin", ".idx")).exists();
    let bare = ["u8", "u32", "i64"].contains(&id_type) && is_bare;
    let head = std::fs::read(case.path(name)).map_err(|error| error.to_string())?;
    let has_header = head.starts_with(b"PHXTOK") || head.starts_with(&20_240_801u32.to_le_bytes());
    let mut words = vec!["inspect", name, "--verify", "--json"];
    if bare && !has_header {
        words.extend(["--token-type", id_type]);
    }
    let ended = case.phalanx(words).run()?;
    match is_text {
        true => ended.refusal(&[name, "text"])?,
        false => ended.success()?,
    }
    let shown: Value = serde_json::from_str(&ended.stdout).map_err(|error| error.to_string())?;
    let expected = [
        ("tokens", json!(ids.len())),
        ("id_type", json!(id_type)),
        ("first", json!(ids[..64.min(ids.len())])),
        ("largest", json!(ids.iter().max())),
    ];
    match expected.iter().find(|(key, value)| shown[*key] != *value) {
        Some((key, value)) => ended.wrong(&format!("says {key} = {}, not {value}", shown[*key])),
        None => Ok(()),
    }
}

/// Checks that run `r` has the losses of a run on the same ids: as text if an id is a byte of text, else as Phalanx's
/// own files.
fn same_losses(case: &Case<'_>, stored: &Stored, train: &[u64], evaluated: &[u64]) -> Result<(), String> {
    let vocab = stored.vocab;
    let mut data = "order = \"sequential\"\n".to_string();
    if vocab == 256 && evaluated.is_empty() {
        case.write("same.txt", little(train, 1))?;
        data += "text = [\"same.txt\"]\n";
    } else {
        write(case, "same.bin", train, "own", vocab)?;
        data += "tokens = \"same.bin\"\n";
    }
    if !evaluated.is_empty() {
        write(case, "same_val.bin", evaluated, "own", vocab)?;
        data += "validation_tokens = \"same_val.bin\"\n";
    }
    config(case, "same.toml", vocab, &data)?;
    let ended = case.phalanx(["train", "same.toml", "--run", "same", "--quiet"]).run()?;
    ended.success()?;
    let [found, expected] = ["r", "same"].map(|run| folder::losses(&case.path(run)));
    match found == expected && !found.is_empty() {
        true => Ok(()),
        false => ended.wrong(&format!("has losses {expected:?}, and the token files gave {found:?}")),
    }
}

/// Contents that are no 16-bit ids, with a word of what each is.
fn contents(random: &mut Random) -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let count = 1200 + random.below(1000);
    let (many, letters) = (ids(50_257, count, random), ids(256, count, random));
    let noise: Vec<u8> = (0..16_384).map(|_| random.next_u64() as u8).collect();
    let behind = |magic: &[u8]| [magic, &noise[..2 * count]].concat();
    let floats =
        (0..count).flat_map(|_| (random.below(2000) as f32 / 1000.0 - 1.0003).to_le_bytes()).collect();
    let mut hole = little(&many, 2);
    hole.resize(5 * 4096, 0);
    let swapped = little(&letters, 2).chunks(2).flat_map(|pair| [pair[1], pair[0]]).collect();
    let json = b"{\"w\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}";
    let safetensors = [&(json.len() as u64).to_le_bytes()[..], json, &[1; 16][..]].concat();
    vec![
        ("32-bit ids", little(&many, 4), "data.token_type = \"u32\""),
        ("32-bit ids of bytes", little(&letters, 4), "data.token_type = \"u32\""),
        ("64-bit ids", little(&many, 8), "data.token_type = \"i64\""),
        ("64-bit ids of bytes", little(&letters, 8), "data.token_type = \"i64\""),
        ("ids of the other byte order", swapped, "first byte is the highest"),
        ("text", little(&letters[..count / 2 * 2], 1), "text"),
        (
            "an HTML page",
            b"<!DOCTYPE html>\n<html><title>403 Forbidden</title></html>\n\n".to_vec(),
            "HTML page",
        ),
        (
            "a git-lfs pointer",
            b"version https://git-lfs.github.com/spec/v1\nsize 4\n".to_vec(),
            "git lfs pull",
        ),
        ("zeros", vec![0; 2 * count], "one id only, 0"),
        ("one id", little(&vec![many[0]; count], 2), "one id only"),
        ("a hole", hole, "are zeros"),
        ("gzip", behind(b"\x1f\x8b\x08\0"), "gzip"),
        ("zip", behind(b"PK\x03\x04"), "zip archive"),
        ("NumPy", behind(b"\x93NUMPY\x01\0"), "NumPy array"),
        ("Parquet", behind(b"PAR1"), "Parquet"),
        ("pickle", behind(b"\x80\x04\x95\x01\0\0\0\0\0\0\0"), "pickle"),
        (
            "safetensors",
            safetensors.into_iter().chain([0]).take(json.len() / 2 * 2 + 24).collect(),
            "safetensors",
        ),
        ("floating-point numbers", floats, "floating-point"),
        ("noise", noise, "occur equally often"),
        ("an odd byte", little(&many, 2).into_iter().chain([7]).collect(), "cut short"),
        ("nothing", Vec::new(), "it is empty"),
    ]
}

/// Contents of `[data]` that cannot be meant, with words of the refusal; the last says whether only all tokens show it.
const KEYS: [(&str, &[&str], bool); 12] = [
    ("tokens = \"none_*.bin\"", &["none_*.bin", "no token file matches"], false),
    ("tokens = \"missing.bin\"", &["missing.bin", "no such file"], false),
    ("tokens = \".\"", &["folder"], false),
    ("tokens = [\"one.bin\", \"own.bin\"]", &["one.bin", "own.bin", "do not go together"], false),
    ("tokens = \"own.bin\"\nvalidation_tokens = \"one.bin\"", &["one.bin", "do not go together"], false),
    ("tokens = [\"one.bin\", \"one.bin\"]", &["one.bin", "are one file"], false),
    ("tokens = \"*ne.bin\"\nvalidation_tokens = \"one.bin\"", &["one.bin", "are one file"], false),
    ("tokens = \"one.bin\"\nvalidation_tokens = \"copy.bin\"", &["copy.bin", "the same content"], true),
    (
        "tokens = \"one.bin\"\nvalidation = 0.1\nvalidation_tokens = \"two.bin\"",
        &["data.validation", "give one"],
        false,
    ),
    ("tokens = \"own.bin\"\ntoken_type = \"i64\"", &["own.bin", "data.token_type", "u16"], false),
    ("tokens = \"beyond.bin\"", &["beyond.bin", "id 60000", "50257"], true),
    ("tokens = \"half_text_document.bin\"", &["half_text_document.idx is missing"], false),
];

fn try_wrong(case: &Case<'_>, random: &mut Random) -> Tried {
    let contents = contents(random);
    let number = random.below(contents.len() + KEYS.len());
    let command = *random.pick(&["plan", "train"]);
    match contents.into_iter().nth(number) {
        Some((what, bytes, word)) => {
            let place = random.below(4);
            let detail = format!("{what}, place {place}, {command}");
            ("wrong content".into(), detail, wrong_content(case, random, &bytes, word, place, command))
        }
        None => {
            let (data, words, needs_all) = KEYS[random.below(KEYS.len())];
            let command = if needs_all { "train" } else { command };
            (
                "wrong keys".into(),
                format!("{data}, {command}"),
                wrong_keys(case, random, data, words, command),
            )
        }
    }
}

fn wrong_content(
    case: &Case<'_>,
    random: &mut Random,
    bytes: &[u8],
    word: &str,
    place: usize,
    command: &str,
) -> Result<(), String> {
    case.write("w_1.bin", bytes)?;
    write(case, "w_0.bin", &ids(50_257, 900, random), "u16", 50_257)?;
    let data = match place {
        0 => return case.phalanx(["inspect", "w_1.bin"]).run()?.refusal(&["w_1.bin", word]),
        1 => "tokens = \"w_1.bin\"",
        2 => *random.pick(&["tokens = [\"w_0.bin\", \"w_1.bin\"]", "tokens = \"w_?.bin\""]),
        _ => "tokens = \"w_0.bin\"\nvalidation_tokens = \"w_1.bin\"",
    };
    config(case, "t.toml", 50_257, data)?;
    case.phalanx([command, "t.toml"]).run()?.refusal(&["w_1.bin", word])
}

fn wrong_keys(
    case: &Case<'_>,
    random: &mut Random,
    data: &str,
    words: &[&str],
    command: &str,
) -> Result<(), String> {
    let one = ids(50_257, 800, random);
    let mut beyond = one.clone();
    beyond[random.below(800)] = 60_000;
    for (name, ids) in
        [("one.bin", &one), ("copy.bin", &one), ("beyond.bin", &beyond), ("half_text_document.bin", &one)]
    {
        write(case, name, ids, "u16", 50_257)?;
    }
    write(case, "two.bin", &ids(50_257, 800, random), "u16", 50_257)?;
    write(case, "own.bin", &one, "own", 50_257)?;
    config(case, "t.toml", 50_257, data)?;
    case.phalanx([command, "t.toml"]).run()?.refusal(words)
}

/// Few tokens, of which the training part or the validation part may be shorter than a sequence.
fn try_short(case: &Case<'_>, random: &mut Random) -> Tried {
    let (count, seq) = (20 + random.below(300), 4 + random.below(60));
    let fraction = *random.pick(&[0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9]);
    let as_text = random.chance(0.5);
    let command = *random.pick(&["plan", "train"]);
    let detail =
        format!("{count} tokens, model.seq {seq}, data.validation {fraction}, text {as_text}, {command}");
    ("short parts".into(), detail, short(case, random, (count, seq, fraction), as_text, command))
}

fn short(
    case: &Case<'_>,
    random: &mut Random,
    (count, seq, fraction): (usize, usize, f64),
    as_text: bool,
    command: &str,
) -> Result<(), String> {
    let ids = ids(256, count, random);
    case.write("few.txt", little(&ids, 1))?;
    case.write("few.bin", little(&ids, 2))?;
    let data = if as_text { "text = [\"few.txt\"]" } else { "tokens = \"few.bin\"" };
    config(case, "t.toml", 256, data)?;
    let mut tries = 0;
    let mut tried = |seq: usize, fraction: f64| {
        tries += 1;
        let (seq, fraction) = (format!("model.seq={seq}"), format!("data.validation={fraction}"));
        let mut words =
            vec![command.to_string(), "t.toml".into(), "--set".into(), seq, "--set".into(), fraction];
        words.extend((command == "train").then(|| format!("--run=r{tries}")));
        case.phalanx(words).run()
    };
    // As documented: the training part is rounded down.
    let fits = |seq: usize, fraction: f64| {
        let train = (count as f64 * (1.0 - fraction) + 1e-6) as usize;
        train > seq && (fraction == 0.0 || count - train > seq)
    };
    let ended = tried(seq, fraction)?;
    if fits(seq, fraction) {
        return ended.success();
    }
    let words: &[&str] = if fraction > 0.0 { &["data.validation"] } else { &[] };
    ended.refusal(&[&["few.", "model.seq"], words].concat())?;
    let number = |key: &str| {
        let (_, behind) = ended.stderr.split_once("what works: ")?.1.split_once(&format!("{key} = "))?;
        behind.split([' ', ',', ';']).next()?.parse::<f64>().ok()
    };
    if let Some(proposed) = number("data.validation") {
        tried(seq, proposed)?.success()?;
    }
    match number("model.seq") {
        Some(largest) => {
            tried(largest as usize, fraction)?.success()?;
            tried(largest as usize + 1, fraction)?.refusal(&["model.seq"])
        }
        None if fits(1, fraction) => ended.wrong("does not name the largest model.seq"),
        None => Ok(()),
    }
}
