//! Model folders with tokenizers that are made at random: four kinds, with the files and special tokens that real folders
//! have, in places where real ones have them, some of them missing, damaged or against each other, and with more or fewer rows
//! than ids. A command trains or samples as the files mean, which is known from how they were made, or refuses by name;
//! what it must guess, it says.
//!
//! The ids that a run trained on are read from its token file, the ids that it drew from its output, and the special tokens
//! from an export.

mod asks;
mod made;
mod model_folder;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};

use crate::hostile::Random;
use crate::reliability::command::Ended;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};
use asks::Ask;
use made::{KINDS, Kind, Made, WORDS};

/// File and key that name the token at the end of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// `tokenizer_config.json`, as a string.
    Config,
    /// `tokenizer_config.json`, as an object.
    ConfigObject,
    /// `special_tokens_map.json`.
    Map,
    /// `eos_token_id` of `config.json`.
    ModelId,
    /// `eos_token_id` of `generation_config.json`, a list.
    GenerationIds,
    /// Nowhere: a known spelling is a guess, and another one is not found.
    Nowhere,
}

const SOURCES: [Source; 6] = [
    Source::Config,
    Source::ConfigObject,
    Source::Map,
    Source::ModelId,
    Source::GenerationIds,
    Source::Nowhere,
];

/// Change of a folder, which decides the expected result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// As real folders are.
    Nothing,
    /// More rows than ids.
    PaddedRows,
    /// Fewer rows than ids; the text does not use the ids without one.
    SpareIds,
    /// Fewer rows than ids; the text uses one of those.
    MissingRows,
    /// `data.tokenizer` names another tokenizer.
    OtherTokenizer,
    /// A file of the tokenizer cannot be read as what it is.
    Damage(&'static str),
    /// The vocabulary is in `vocab.json` and `merges.txt` (byte-level), in `tokenizer.model` (others).
    OtherFiles,
    /// `add_prefix_space` of `tokenizer_config.json` is not that of `tokenizer.json`.
    PrefixSpace,
    /// `special_tokens_map.json` and `tokenizer_config.json` name different tokens.
    TwoRoles,
    /// `tokenizer.json` was made to take memory or time, to end the program, or to give other ids each time.
    Asks(Ask),
}

const CHANGES: [Change; 21] = [
    Change::Nothing,
    Change::PaddedRows,
    Change::SpareIds,
    Change::MissingRows,
    Change::OtherTokenizer,
    Change::Damage("cut"),
    Change::OtherFiles,
    Change::Damage("a git-lfs pointer"),
    Change::PrefixSpace,
    Change::Damage("a link to nothing"),
    Change::TwoRoles,
    Change::Damage("empty"),
    Change::Nothing,
    Change::Damage("a folder"),
    Change::PaddedRows,
    Change::Damage("an added token with another id"),
    Change::Asks(Ask::EmptyPattern),
    Change::Asks(Ask::MuchText),
    Change::Asks(Ask::LongPiece),
    Change::Asks(Ask::DamagedTable),
    Change::Asks(Ask::Dropout),
];

/// Route by which a run takes the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    /// `model.init` of a new run.
    Init,
    /// `import`, then `train --resume`.
    Import,
}

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let folder = Folder::new(random, number);
    let tried = world.case().and_then(|case| {
        folder.write(&case, random).map_err(|error| error.to_string())?;
        folder.try_it(&case, random)
    });
    let detail = format!(
        "{:?}, end {:?} by {:?}, {} ids in {} rows, {:?}",
        folder.made.kind,
        folder.made.end,
        folder.source,
        folder.made.ids(),
        folder.rows,
        folder.entry
    );
    Trial::new(folder.fault(), detail, tried)
}

/// A model folder, and how it is used.
struct Folder {
    made: Made,
    source: Source,
    change: Change,
    entry: Entry,
    rows: usize,
    /// Documents of the text.
    texts: [String; 2],
}

impl Folder {
    fn new(random: &mut Random, number: usize) -> Folder {
        let change = CHANGES[number % CHANGES.len()];
        let kind = match change {
            Change::PrefixSpace | Change::Asks(Ask::Dropout) => Kind::ByteLevel,
            _ => KINDS[(number / CHANGES.len() + number) % KINDS.len()],
        };
        let source = match change {
            Change::TwoRoles => Source::Map,
            // A class has tokens of its own where no file names any.
            Change::OtherFiles => Source::Config,
            _ => SOURCES[(number / 3 + random.below(2)) % SOURCES.len()],
        };
        let mut made = Made::new(kind, random);
        made.prefix_space &= change != Change::OtherFiles;
        let text = |random: &mut Random| {
            let words: Vec<&str> = (0..300).map(|_| *random.pick(&WORDS)).collect();
            words.chunks(9).map(|line| line.join(" ")).collect::<Vec<_>>().join("\n")
        };
        let texts = [text(random), text(random)];
        let used = texts.iter().flat_map(|text| made.encode(text)).max().map_or(0, |id| id as usize + 1);
        let rows = match change {
            Change::PaddedRows => made.ids() + 1 + random.below(60),
            // A separator of the text is in the vocabulary anyway, so only the text's own ids are certain.
            Change::SpareIds => used.max(made.id(&made.end) as usize + 1),
            Change::MissingRows => used - 1 - random.below(3.min(used - 1)),
            _ => made.ids(),
        };
        let entry = if random.chance(0.5) { Entry::Init } else { Entry::Import };
        Folder { made, source, change, entry, rows, texts }
    }

    /// The row of the table.
    fn fault(&self) -> String {
        match self.change {
            Change::Nothing => "whole folders".to_string(),
            Change::PaddedRows => "more rows than ids".to_string(),
            Change::SpareIds => "fewer rows than ids, not used".to_string(),
            Change::MissingRows => "fewer rows than ids, used".to_string(),
            Change::OtherTokenizer => "another tokenizer in data.tokenizer".to_string(),
            Change::Damage(what) => format!("tokenizer.json is {what}"),
            Change::OtherFiles => "vocab.json and merges.txt, tokenizer.model".to_string(),
            Change::PrefixSpace => "add_prefix_space against tokenizer.json".to_string(),
            Change::TwoRoles => "two files name different tokens".to_string(),
            Change::Asks(ask) => format!("tokenizer.json asks for {}", ask.name()),
        }
    }

    fn write(&self, case: &Case<'_>, random: &mut Random) -> std::io::Result<()> {
        let dir = case.path("hf");
        model_folder::write(&dir, self.rows, random)?;
        let put = |name: &str, value: &Value| fs::write(dir.join(name), value.to_string());
        let end = &self.made.end;
        let mut config =
            json!({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false});
        match self.source {
            Source::Config => config["eos_token"] = json!(end),
            Source::ConfigObject => {
                config["eos_token"] = json!({"content": end, "lstrip": false, "rstrip": false, "normalized": false,
                                             "single_word": false, "special": true});
            }
            Source::Map => put("special_tokens_map.json", &json!({"eos_token": end}))?,
            Source::ModelId => {
                let mut model = model_folder::config(self.rows);
                model["eos_token_id"] = json!(self.made.id(end));
                put("config.json", &model)?;
            }
            Source::GenerationIds => {
                put("generation_config.json", &json!({"eos_token_id": [self.made.id(end)]}))?
            }
            Source::Nowhere => {}
        }
        match self.change {
            Change::PrefixSpace => config["add_prefix_space"] = json!(!self.made.prefix_space),
            Change::OtherFiles => config["tokenizer_class"] = json!("GPT2Tokenizer"),
            Change::TwoRoles => config["eos_token"] = json!(self.made.other),
            _ => {}
        }
        put("tokenizer_config.json", &config)?;
        let file = dir.join("tokenizer.json");
        let content = self.made.file().to_string();
        match self.change {
            Change::OtherFiles if self.made.kind == Kind::ByteLevel => {
                put("vocab.json", &json!(self.made.vocab))?;
                fs::write(
                    dir.join("merges.txt"),
                    format!("#version: 0.2\n{}\n", self.made.merge_lines().join("\n")),
                )?;
            }
            Change::OtherFiles => fs::write(dir.join("tokenizer.model"), random.bytes(400))?,
            Change::Damage("cut") => fs::write(&file, &content[..1 + random.below(content.len() - 1)])?,
            Change::Damage("empty") => fs::write(&file, "")?,
            Change::Damage("a folder") => fs::create_dir(&file)?,
            Change::Damage("a link to nothing") => symlink("../blobs/0a1b2c", &file)?,
            Change::Damage("a git-lfs pointer") => {
                fs::write(
                    &file,
                    "version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 123456\n",
                )?;
            }
            Change::Damage(_) => {
                let mut damaged = self.made.file();
                damaged["added_tokens"][0]["id"] = json!(self.made.ids() + 7);
                put("tokenizer.json", &damaged)?;
            }
            Change::Asks(ask) => {
                let mut asking = self.made.file();
                ask.put(&mut asking);
                put("tokenizer.json", &asking)?;
            }
            _ => fs::write(&file, content)?,
        }
        fs::create_dir(case.path("texts"))?;
        for (name, text) in ["a.txt", "b.txt"].iter().zip(&self.texts) {
            fs::write(case.path("texts").join(name), text)?;
        }
        fs::write(case.path("init.toml"), INIT)
    }

    /// Trains a step on the folder, samples and exports; compares what came of it with what was made.
    fn try_it(&self, case: &Case<'_>, random: &mut Random) -> Result<(), String> {
        let mut said = String::new();
        if self.entry == Entry::Import {
            let ended = case.phalanx(["import", "hf", "--run", "r"]).run()?;
            if let Some(words) = self.refused_at_import() {
                return ended.refusal(words);
            }
            ended.success()?;
            said.push_str(&ended.stdout);
        }
        let mut words: Vec<String> = match self.entry {
            Entry::Init => ["train", "init.toml", "--run", "r"].map(String::from).to_vec(),
            Entry::Import => {
                ["train", "--run", "r", "--resume", "--data", "texts"].map(String::from).to_vec()
            }
        };
        for set in ["train.steps=1", "data.validation=0", "train.threads=1"] {
            words.extend(["--set".to_string(), set.to_string()]);
        }
        if self.change == Change::OtherTokenizer {
            let other = *random.pick(&["byte", "char", "other.json"]);
            let different = Made::new(
                if self.made.kind == Kind::WordLevel { Kind::WordPiece } else { Kind::WordLevel },
                random,
            );
            case.write("other.json", different.file().to_string())?;
            words.extend(["--set".to_string(), format!("data.tokenizer={other}")]);
        }
        let ended = case.phalanx(words).run()?;
        if let Some(words) = self.refused_at_training() {
            return ended.refusal(words);
        }
        ended.success()?;
        said.push_str(&ended.stdout);
        said.push_str(&ended.stderr);
        self.check_tokens(case, &ended, &said)?;
        self.check_sample(case)?;
        self.check_export(case, &ended)
    }

    /// Words that an import's refusal must contain; None if it must not refuse.
    fn refused_at_import(&self) -> Option<&'static [&'static str]> {
        match self.change {
            Change::Damage("a git-lfs pointer") => Some(&["tokenizer.json", "git-lfs pointer"]),
            Change::Damage("a link to nothing") => Some(&["tokenizer.json", "link to ../blobs/0a1b2c"]),
            // A folder has no tokenizer then: an import says so, and a training needs data.tokenizer.
            Change::Damage("a folder") => None,
            Change::Damage(_) => Some(&["tokenizer.json"]),
            Change::Asks(ask) => Some(ask.refused()),
            Change::OtherFiles if self.made.kind != Kind::ByteLevel => {
                Some(&["tokenizer.model", "SentencePiece"])
            }
            _ => None,
        }
    }

    /// The same for a training.
    fn refused_at_training(&self) -> Option<&'static [&'static str]> {
        match self.change {
            Change::OtherTokenizer => Some(&["data.tokenizer"]),
            Change::MissingRows => Some(&["rows"]),
            Change::Damage("a folder") => Some(&["came without a tokenizer", "data.tokenizer"]),
            _ => self.refused_at_import(),
        }
    }

    /// The token between two documents, and whether it was found in the files.
    fn end(&self) -> Option<u32> {
        let known = self.source != Source::Nowhere || self.made.end != "<fim-des-textes>";
        known.then(|| self.made.id(&self.made.end))
    }

    /// The ids of the token file are those of the two texts, with the token that ends a text between them.
    fn check_tokens(&self, case: &Case<'_>, ended: &Ended, said: &str) -> Result<(), String> {
        let found = ids_in(&case.path("r/tokens.bin"))?;
        let [a, b] = self.texts.each_ref().map(|text| self.encode(text));
        let expected = [a, self.end().into_iter().collect(), b].concat();
        if found != expected {
            let at = found.iter().zip(&expected).position(|(found, expected)| found != expected);
            let at = at.unwrap_or(found.len().min(expected.len()));
            return ended.wrong(&format!(
                "trained on other ids: {} in place of {}, id {at} is {:?} in place of {:?}",
                found.len(),
                expected.len(),
                found.get(at),
                expected.get(at)
            ));
        }
        for (must, word) in [
            (self.end().is_none(), "no token is known that ends a text"),
            (self.source == Source::Nowhere && self.end().is_some(), self.made.end.as_str()),
            (self.change == Change::SpareIds && self.rows < self.made.ids(), "more ids than"),
            (self.change == Change::PrefixSpace, "add_prefix_space"),
            (self.change == Change::TwoRoles, self.made.other.as_str()),
        ] {
            if must && !said.contains(word) {
                return ended.wrong(&format!("did not say {word:?}"));
            }
        }
        Ok(())
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        if self.change != Change::PrefixSpace {
            return self.made.encode(text);
        }
        let mut ids = self.made.encode(text);
        match self.made.prefix_space {
            true => drop(ids.remove(0)),
            false => ids.insert(0, self.made.id("Ġ")),
        }
        ids
    }

    /// Only ids of the tokenizer that have a row are drawn, whatever the choices.
    fn check_sample(&self, case: &Case<'_>) -> Result<(), String> {
        let ids: BTreeSet<u64> = self
            .made
            .vocab
            .values()
            .filter(|id| (**id as usize) < self.rows)
            .map(|id| u64::from(*id))
            .collect();
        for choices in
            [&["--temperature", "50"][..], &["--temperature", "50", "--top-k", "200", "--shift", "5"]]
        {
            let base = ["sample", "r", "--prompt", WORDS[0], "--tokens", "40", "--json"];
            let ended = case.phalanx([&base[..], choices].concat()).run()?;
            ended.success()?;
            let drawn: Value = serde_json::from_str(&ended.stdout).map_err(|error| error.to_string())?;
            let drawn = drawn["tokens"].as_array().cloned().unwrap_or_default();
            let stranger = drawn.iter().find(|id| id.as_u64().is_none_or(|id| !ids.contains(&id)));
            if drawn.len() != 40 || stranger.is_some() {
                return ended.wrong(&format!("drew {stranger:?} among {} ids", drawn.len()));
            }
        }
        Ok(())
    }

    /// An export has the tokenizer file that was read, byte for byte, and the id of the end; it refuses a folder with files.
    fn check_export(&self, case: &Case<'_>, trained: &Ended) -> Result<(), String> {
        let export = ["export", "r", "--out", "out"];
        case.phalanx(export).run()?.success()?;
        let read = |name: &str| fs::read(case.path(name)).map_err(|error| format!("{name}: {error}"));
        if self.change != Change::OtherFiles && read("out/tokenizer.json")? != read("hf/tokenizer.json")? {
            return trained.wrong("exported another tokenizer.json than was read");
        }
        let config: Value =
            serde_json::from_slice(&read("out/config.json")?).map_err(|error| error.to_string())?;
        if config["eos_token_id"] != json!(self.end()) {
            return trained.wrong(&format!(
                "exported eos_token_id = {}, not {:?}",
                config["eos_token_id"],
                self.end()
            ));
        }
        case.phalanx(export).run()?.refusal(&["--out out", "--force"])?;
        case.phalanx([&export[..], &["--force"]].concat()).run()?.success()
    }
}

/// A run that starts from the folder.
const INIT: &str = "[model]\ninit = \"hf\"\n[data]\ntext = [\"texts\"]\n[batch]\nglobal = 2\n";

/// The ids in a token file: a header of 64 bytes with the bytes of an id at 12 and the number of tokens at 24, then the ids.
fn ids_in(path: &Path) -> Result<Vec<u32>, String> {
    let bytes = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let number = |at: usize, count: usize| {
        bytes
            .get(at..at + count)
            .map(|bytes| bytes.iter().rev().fold(0usize, |sum, byte| sum << 8 | usize::from(*byte)))
    };
    let short = || format!("{} is too short", path.display());
    let (width, tokens) = number(12, 4).zip(number(24, 8)).ok_or_else(short)?;
    (0..tokens).map(|token| number(64 + token * width, width).map(|id| id as u32).ok_or_else(short)).collect()
}
