//! `[data]`: text, rows, chats, tokenizer and token files.

use std::path::PathBuf;

use phalanx_data::{ChatFormat, Day, SampleOrder, TokenType};
use phalanx_models::Objective;
use phalanx_models::limits::MAX_VOCAB;

use super::check::refuse;
use super::declare::Conversion::{Rule, Same};
use super::declare::Resume::{Data, Said};
use super::declare::{AXOLOTL, HUGGING_FACE, KEY, LLAMA_FACTORY, MEGATRON, NANOGPT, TORCHTITAN};
use super::needs::{LEFT_OUT, Need, SET, SYNCHRONOUS};
use super::{ConfigError, Paths, RunConfig};

/// Consequences for a resumed run.
const OTHER_SHARE: &str = "the validation loss is that of other windows, and does not compare with the ones before; what is no longer held \
                           out is trained on";
const OTHER_TARGETS: &str = "tokens see other ones than before, and other targets are predicted: losses do not compare with the ones before";
const OTHER_ORDER: &str = "the samples that are left of this epoch are others: some of those that it has had come again, and some never come";

/// Why text, token files, rows and chats exclude each other.
const ONE_SOURCE: &str = "tokens have one source";

const OF_TOKENS: Need = Need::is_for(&[("data.tokens", SET)], "");
const OF_CHATS: Need = Need::is_for(&[("data.chat", SET)], "");
const OF_TEMPLATES: Need = Need::is_for(&[("data.chat", SET), ("data.pairs", SET)], "");

table! {
    /// `[data]`
    "data" DataConfig {
        /// Text files or folders, of plain text or JSON.
        text: Vec<String> = Vec::new(), KEY.resume(Data)
            .foreign(&[(NANOGPT, "dataset", Rule, "or data.tokens for a token file"), (HUGGING_FACE, "train_file", Rule, "")]);
        /// Extensions of the files that are read from folders; all text files when empty.
        extensions: Vec<String> = Vec::new(), KEY.resume(Data);
        /// In JSON files, of which each line or record is a document, and in files of rows: the key of the text.
        text_key: String = "text".into(), KEY.resume(Data);
        /// Extensions of files that are plain text whatever they hold, such as `json` and `csv`.
        plain: Vec<String> = Vec::new(), KEY.resume(Data);
        /// The fraction of lines, and of the bytes of files, that may be skipped; when left out, 1 % of the lines and half of the
        /// bytes.
        max_skipped: Option<f64> = None, KEY.from(0.0, 1.0);
        /// Token files (own, nanoGPT's, llm.c's, Megatron's), instead of text, by paths and patterns; they are read one after the other.
        tokens: Option<Paths> = None, KEY.resume(Data).foreign(&[(MEGATRON, "data_path", Rule, "or data.text for text")])
            .needs(&[Need::any(&[("data.text", LEFT_OUT)], ONE_SOURCE)]);
        /// Token files for evaluation, instead of the fraction `validation`.
        validation_tokens: Option<Paths> = None, KEY.resume(Data)
            .needs(&[OF_TOKENS]);
        /// Files of labelled rows (JSON lines or CSV, by their ending) for a model with classes, instead of text, by paths and patterns: a
        /// text under `text_key`, a class under `label`, perhaps a second text under `text_pair`.
        rows: Option<Paths> = None, KEY.resume(Data)
            .needs(&[Need::any(&[("data.text", LEFT_OUT)], ONE_SOURCE), Need::any(&[("data.tokens", LEFT_OUT)], ONE_SOURCE), SYNCHRONOUS]);
        /// Rows for evaluation, instead of the fraction `validation`.
        validation_rows: Option<Paths> = None, KEY.resume(Data)
            .needs(&[Need::is_for(&[("data.rows", SET)], "")]);
        /// Files of chats or instructions (JSON lines, or an array), instead of text, by paths and patterns: `messages` as OpenAI's,
        /// `conversations` as ShareGPT's, `instruction` and `output` as Alpaca's, `prompt` and `completion`.
        chat: Option<Paths> = None, KEY.resume(Data)
            .needs(&[
                Need::any(&[("data.text", LEFT_OUT)], ONE_SOURCE),
                Need::any(&[("data.tokens", LEFT_OUT)], ONE_SOURCE),
                Need::any(&[("data.rows", LEFT_OUT)], ONE_SOURCE),
                SYNCHRONOUS,
            ]);
        /// Chats for evaluation, instead of the fraction `validation`.
        validation_chat: Option<Paths> = None, KEY.resume(Data).needs(&[OF_CHATS]);
        /// Files of pairs of answers (JSON lines, or an array), instead of text, by paths and patterns: `prompt`, `chosen` and `rejected`, texts
        /// or messages; for KTO `prompt`, `completion` and `label`.
        pairs: Option<Paths> = None, KEY.resume(Data)
            .needs(&[
                Need::any(&[("data.text", LEFT_OUT)], ONE_SOURCE),
                Need::any(&[("data.tokens", LEFT_OUT)], ONE_SOURCE),
                Need::any(&[("data.rows", LEFT_OUT)], ONE_SOURCE),
                Need::any(&[("data.chat", LEFT_OUT)], ONE_SOURCE),
                SYNCHRONOUS,
            ]);
        /// Pairs for evaluation, instead of the fraction `validation`.
        validation_pairs: Option<Paths> = None, KEY.resume(Data).needs(&[Need::is_for(&[("data.pairs", SET)], "")]);
        /// Format of the chats.
        format: Format = Format::Auto, KEY.quiet().resume(Data).needs(&[OF_CHATS]);
        /// Chat template (Jinja): `chatml`, `llama3`, or the path of a file. When left out: the tokenizer's own.
        template: Option<String> = None, KEY.resume(Data).needs(&[OF_TEMPLATES]);
        /// Tokens of chats that are trained.
        train_on: TrainOn = TrainOn::Answers, KEY.quiet().resume(Data).needs(&[OF_CHATS]);
        /// Chats in a sequence.
        pack: Pack = Pack::Documents, KEY.quiet().resume(Data).needs(&[OF_CHATS]);
        /// The day that chat templates write (`2026-11-28`). When left out: the one on which the run starts, in UTC.
        date: Option<String> = None, KEY.keeps().resume(Data).needs(&[OF_TEMPLATES]);
        /// Type of ids in token files without a header: `u8`, `u16`, `u32`, `i64`; `auto` is `u16`.
        token_type: TokenType = TokenType::Auto, KEY.resume(Data)
            .needs(&[OF_TOKENS]);
        /// Accepts token files that look like something else, such as zeros or text.
        unusual_tokens: bool = false, KEY
            .needs(&[OF_TOKENS]);
        /// `byte`, `char`, `gpt2`, or the path of a Hugging Face `tokenizer.json` or of a folder with tokenizer files. When left
        /// out: the tokenizer of the folder `model.init` or of the resumed run, else `byte`.
        tokenizer: String = "byte".into(), KEY.resume(Data)
            .foreign(&[
                (HUGGING_FACE, "tokenizer_name", Same, ""),
                (TORCHTITAN, "model.hf_assets_path", Same, ""),
                (TORCHTITAN, "model.tokenizer_path", Same, ""),
                (AXOLOTL, "tokenizer_config", Same, ""),
            ]);
        /// Lets a model that has learned the ids of another tokenizer learn those of `tokenizer` anew.
        new_tokenizer: bool = false, KEY.quiet();
        /// For a masked model (`bert`): the id that replaces a hidden token. When left out: the tokenizer's `[MASK]`, or else
        /// one more row of the vocabulary.
        mask_token: Option<u32> = None, KEY.resume(Said("another token hides the ones that are predicted")).from(0.0, (MAX_VOCAB - 1) as f64);
        /// Attention between documents that lie in one sequence: `joined` documents see each other, those `apart` do not.
        documents: Documents = Documents::Joined, KEY.resume(Said(OTHER_TARGETS))
            .needs(&[SYNCHRONOUS]);
        /// For documents that are apart: the id of the token that each ends with. When left out: that which the tokenizer puts between
        /// documents.
        end_token: Option<u32> = None, KEY.keeps().resume(Said(OTHER_TARGETS)).from(0.0, (MAX_VOCAB - 1) as f64)
            .needs(&[Need::is_for(&[("data.documents", &["apart"])], "")]);
        /// `shuffled` or `sequential`.
        order: Order = Order::Shuffled, KEY.resume(Said(OTHER_ORDER));
        /// Fraction of the tokens, at the end, that is held out for evaluation; of rows, evenly spread ones.
        validation: f64 = 0.1, KEY.resume(Said(OTHER_SHARE)).from(0.0, 0.9)
            .foreign(&[
                (MEGATRON, "split", Rule, "the share that is held out"),
                (AXOLOTL, "val_set_size", Rule, ""),
                (LLAMA_FACTORY, "val_size", Rule, ""),
            ]);
    }
}

words! {
    /// Format of chats.
    Format {
        /// The one that the keys of each record show.
        Auto = "auto",
        /// OpenAI's: `messages` of `role` and `content`, `tools`.
        Messages = "messages",
        /// `conversations` of `from` and `value`, `system`, `tools`.
        Sharegpt = "sharegpt",
        /// `instruction`, `input`, `output`, `system`, `history`.
        Alpaca = "alpaca",
        /// `prompt` and `completion`, both texts (without a template) or both messages.
        Prompt = "prompt",
    }
}

words! {
    /// Tokens of chats that are trained.
    TrainOn {
        /// Those of all answers, with the token that ends each.
        Answers = "answers",
        /// Those of the last answer.
        LastAnswer = "last-answer",
        /// All.
        All = "all",
    }
}

words! {
    /// Chats in a sequence.
    Pack {
        /// Several whole ones, which do not see each other.
        Documents = "documents",
        /// One, and padding behind it.
        Off = "off",
    }
}

words! {
    /// Relation of documents that lie in one sequence.
    Documents {
        /// One text: each token sees all earlier ones of its sequence.
        Joined = "joined",
        /// Texts of their own: a token sees its own document, in which positions count from 0, and the first token of a document is not
        /// predicted.
        Apart = "apart",
    }
}

words! {
    /// Order of the samples.
    Order {
        /// A new permutation every epoch.
        Shuffled = "shuffled",
        /// Sample k covers tokens `k*seq` to `k*seq + seq - 1`.
        Sequential = "sequential",
    }
}

impl DataConfig {
    /// The files that are evaluated in place of a fraction of the tokens; an empty list is none.
    pub fn validation_paths(&self) -> Option<Vec<PathBuf>> {
        self.validation_tokens.as_ref().map(Paths::paths).filter(|paths| !paths.is_empty())
    }

    /// The keys that name files by paths and patterns.
    pub fn files_mut(&mut self) -> impl Iterator<Item = &mut Paths> {
        let DataConfig { tokens, validation_tokens, rows, validation_rows, .. } = self;
        let DataConfig { chat, validation_chat, pairs, validation_pairs, .. } = self;
        let of_tokens = [tokens, validation_tokens, rows, validation_rows];
        of_tokens.into_iter().chain([chat, validation_chat, pairs, validation_pairs]).flatten()
    }

    /// Returns whether samples are rows, which were cut for `model.seq`: labelled rows, chats, or answers of pairs.
    pub fn has_rows(&self) -> bool {
        self.rows.is_some() || self.chat.is_some() || self.pairs.is_some()
    }

    /// The format that chats must have.
    pub fn chat_format(&self) -> Option<ChatFormat> {
        match self.format {
            Format::Auto => None,
            Format::Messages => Some(ChatFormat::Messages),
            Format::Sharegpt => Some(ChatFormat::ShareGpt),
            Format::Alpaca => Some(ChatFormat::Alpaca),
            Format::Prompt => Some(ChatFormat::Prompt),
        }
    }
}

impl From<Order> for SampleOrder {
    fn from(order: Order) -> SampleOrder {
        match order {
            Order::Shuffled => SampleOrder::Shuffled,
            Order::Sequential => SampleOrder::Sequential,
        }
    }
}

impl From<TrainOn> for phalanx_data::TrainOn {
    fn from(train_on: TrainOn) -> phalanx_data::TrainOn {
        match train_on {
            TrainOn::Answers => phalanx_data::TrainOn::Answers,
            TrainOn::LastAnswer => phalanx_data::TrainOn::LastAnswer,
            TrainOn::All => phalanx_data::TrainOn::All,
        }
    }
}

impl RunConfig {
    pub(super) fn check_data(&self) -> Result<(), ConfigError> {
        if self.data.documents == Documents::Apart && self.model.arch.objective == Objective::Masked {
            let expected = "is for models that predict the next token: leave it out";
            return Err(refuse("data.documents", "\"apart\"", expected));
        }
        self.check_rows()?;
        self.check_chats()?;
        let data = &self.data;
        let evaluated = data.validation_paths().is_some();
        let given = |paths: &Option<Paths>| paths.as_ref().map_or(String::new(), Paths::shown);
        for (key, paths) in [
            ("data.tokens", &data.tokens),
            ("data.validation_tokens", &data.validation_tokens),
            ("data.rows", &data.rows),
            ("data.validation_rows", &data.validation_rows),
            ("data.chat", &data.chat),
            ("data.validation_chat", &data.validation_chat),
            ("data.pairs", &data.pairs),
            ("data.validation_pairs", &data.validation_pairs),
        ] {
            let has_no_name = |paths: &Paths| paths.paths().iter().any(|path| path.as_os_str().is_empty());
            if paths.as_ref().is_some_and(has_no_name) {
                return Err(refuse(key, given(paths), "has a path without a name"));
            }
        }
        for (key, paths) in [
            ("data.tokens", &data.tokens),
            ("data.rows", &data.rows),
            ("data.validation_rows", &data.validation_rows),
            ("data.chat", &data.chat),
            ("data.validation_chat", &data.validation_chat),
            ("data.pairs", &data.pairs),
            ("data.validation_pairs", &data.validation_pairs),
        ] {
            if paths.as_ref().is_some_and(|paths| paths.paths().is_empty()) {
                return Err(refuse(key, "[]", "names no file: give at least one, or leave it out"));
            }
        }
        if evaluated && data.validation > 0.0 {
            let expected = format!(
                "holds out a part of data.tokens, and data.validation_tokens = {} names files for evaluation: give one \
                 of the two (data.validation = 0 beside the files)",
                given(&data.validation_tokens)
            );
            return Err(refuse("data.validation", data.validation, expected));
        }
        Ok(())
    }

    /// Checks what labelled rows and a model with classes need of each other.
    fn check_rows(&self) -> Result<(), ConfigError> {
        let RunConfig { data, model, parallel, .. } = self;
        let has_labels = model.keys.get("labels").is_some();
        let given = |paths: &Option<Paths>| paths.as_ref().map_or(String::new(), Paths::shown);
        if data.rows.is_some() && model.arch.keys.iter().all(|key| key.name != "labels") {
            let expected =
                "are rows for a model with classes: set model.arch = \"bert\", or name text in data.text";
            return Err(refuse("data.rows", given(&data.rows), expected));
        }
        if has_labels && data.rows.is_none() && (!data.text.is_empty() || data.tokens.is_some()) {
            let (key, value) = match &data.tokens {
                Some(_) => ("data.tokens", given(&data.tokens)),
                None => ("data.text", data.text.join(", ")),
            };
            let expected = "a model with classes (model.labels) learns from labelled rows: name their files in data.rows";
            return Err(refuse(key, value, expected));
        }
        if data.rows.is_some() && parallel.sequence_parallel {
            let expected = "the pooler of a model with classes reads whole samples: leave it out";
            return Err(refuse("parallel.sequence_parallel", true, expected));
        }
        if data.rows.is_some() && data.mask_token.is_some() {
            let expected =
                "is for a model that predicts hidden tokens, and rows (data.rows) hide none: leave it out";
            return Err(refuse("data.mask_token", data.mask_token.unwrap_or_default(), expected));
        }
        let others = [
            ("data.extensions", data.extensions.join(", ")),
            ("data.plain", data.plain.join(", ")),
            ("data.max_skipped", data.max_skipped.map_or(String::new(), |share| share.to_string())),
        ];
        if let Some((key, value)) = others.into_iter().find(|(_, value)| data.has_rows() && !value.is_empty())
        {
            let expected =
                "is for text (data.text), and every row of data.rows and data.chat is read: leave it out";
            return Err(refuse(key, value, expected));
        }
        for (key, rows) in [
            ("rows", &data.validation_rows),
            ("chat", &data.validation_chat),
            ("pairs", &data.validation_pairs),
        ] {
            if rows.is_some() && data.validation > 0.0 {
                let expected = format!(
                    "holds out a part of data.{key}, and data.validation_{key} = {} names files for evaluation: give one of the \
                     two (data.validation = 0 beside the files)",
                    given(rows)
                );
                return Err(refuse("data.validation", data.validation, expected));
            }
        }
        Ok(())
    }

    /// Checks what chats and pairs need of the model and of other keys.
    fn check_chats(&self) -> Result<(), ConfigError> {
        let RunConfig { data, model, .. } = self;
        let given = [("data.chat", &data.chat), ("data.pairs", &data.pairs)];
        let Some((key, Some(files))) = given.into_iter().find(|(_, files)| files.is_some()) else {
            return Ok(());
        };
        if model.arch.objective != Objective::Causal || model.keys.get("labels").is_some() {
            return Err(refuse(key, files.shown(), "is for models that predict the next token"));
        }
        if data.documents == Documents::Apart {
            let expected = "is for text and token files, and chats never see each other: leave it out";
            return Err(refuse("data.documents", "\"apart\"", expected));
        }
        match &data.date {
            Some(date) if Day::parse(date).is_none() => {
                Err(refuse("data.date", format!("{date:?}"), "expected a day, as \"2026-11-28\""))
            }
            _ => Ok(()),
        }
    }
}
