//! The tokenizer whose ids a model has learned before a run begins: that of the folder with its weights, or of the run that
//! is resumed. Data with other ids would train the wrong thing in silence, so they are refused, unless the configuration
//! says that the token table is learned anew.

use std::collections::HashSet;
use std::path::Path;

use phalanx_data::{Corpus, DataError, TokenFile, TokenFormat, Tokenizer, TokenizerFiles, TokenizerSpec};
use phalanx_models::{Arch, Model};

use crate::config::DataConfig;

/// Rows of the token table of GPT-2.
const GPT2_ROWS: usize = 50_257;

/// Advice against ids other than those that the model has learned: if `data.tokenizer` names them, and if token files hold them.
const LEAVE_OUT: &str = "leave data.tokenizer out, and the model's own tokenizer is used";
const TOKENIZE_AGAIN: &str = "name their text in data.text in place of the token files, or make these again with the model's own \
                              tokenizer (`phalanx tokenize --tokenizer`)";

/// Knowledge of a model about its token ids.
#[derive(Clone, Debug, Default)]
pub struct Learned {
    /// Origin of its weights, for messages; `None` for a model that starts from random values.
    origin: Option<String>,
    /// The tokenizer, if it is known.
    tokenizer: Option<Tokenizer>,
    /// True if the tokenizer is a guess, which a given one replaces.
    is_guess: bool,
    /// True if `data.tokenizer` was given and may name the tokenizer.
    is_given: bool,
    /// The `generation_config.json` of a folder without tokenizer.
    generation_config: Option<String>,
    /// Findings, for people.
    notes: Vec<String>,
}

/// The tokenizer of a run's data, and notes about it for people.
pub type Chosen<T> = (T, Vec<String>);

impl Learned {
    /// Returns what the model of the folder `dir` has learned.
    ///
    /// # Errors
    /// Tokenizer files that cannot be used.
    pub fn of_folder(dir: &Path, model: &dyn Model) -> Result<Learned, DataError> {
        let shown = dir.display();
        let found = Tokenizer::of_folder(dir)?;
        let mut learned = Learned { origin: Some(shown.to_string()), ..Learned::default() };
        if found.is_none() {
            let left = TokenizerFiles::without_vocabulary(dir);
            learned.generation_config = TokenizerFiles::generation_config(dir)?;
            learned.notes.extend((!left.is_empty()).then(|| {
                format!(
                    "tokenizer: {} of {shown} is not used or kept: no file with a vocabulary is beside it",
                    left.join(", ")
                )
            }));
        }
        if let Some(tokenizer) = found {
            learned.notes.push(format!(
                "tokenizer: {} of {shown}; {}",
                tokenizer.describe(),
                tokenizer.describe_boundaries()
            ));
            learned.notes.extend(tokenizer.notes().iter().map(|note| format!("tokenizer: {note}")));
            learned.tokenizer = Some(tokenizer);
        } else if model.architecture() == Some(Arch::GPT2) && model.vocab() == GPT2_ROWS {
            learned.notes.push(format!(
                "tokenizer: {shown} has no tokenizer files. This is a GUESS: its {GPT2_ROWS} rows are taken for those of the \
                 English GPT-2, only because of their number; if they are others, put the tokenizer's files there or give \
                 data.tokenizer"
            ));
            learned.tokenizer = Some(Tokenizer::open(&TokenizerSpec::Gpt2, None)?);
            learned.is_guess = true;
        } else {
            learned.notes.push(format!("tokenizer: {shown} has no tokenizer files"));
        }
        Ok(learned)
    }

    /// Returns what the model of a checkpoint has learned, with the `tokenizer` of its tokens if they came with one.
    pub fn of_run(origin: String, tokenizer: Option<Tokenizer>) -> Learned {
        Learned { origin: Some(origin), tokenizer, ..Learned::default() }
    }

    /// The same, whose tokenizer gets these special tokens.
    ///
    /// # Errors
    /// No tokenizer, one that has no added tokens, and tokens that it has already.
    pub fn adding(mut self, tokens: &[String]) -> Result<Learned, DataError> {
        if tokens.is_empty() {
            return Ok(self);
        }
        let refuse = |reason: String| DataError::Source { reason: format!("model.add_tokens: {reason}") };
        let Some(tokenizer) = self.tokenizer.as_ref() else {
            return Err(refuse("there are no tokenizer files to add tokens to".into()));
        };
        let added = tokenizer.adding(tokens)?;
        let before = tokenizer.vocab_size();
        if added.vocab_size() != before + tokens.len() {
            let old: HashSet<String> = (0..before as u32).filter_map(|id| tokenizer.token(id)).collect();
            let known = tokens.iter().find(|token| old.contains(*token));
            return Err(refuse(match known {
                Some(token) => format!("{token:?} is in the vocabulary already: leave it out"),
                None => format!("{tokens:?} has a token twice"),
            }));
        }
        let ids = (before..).zip(tokens).map(|(id, token)| format!("{token:?} is token {id}"));
        self.notes.push(format!("tokenizer: {}", ids.collect::<Vec<_>>().join(", ")));
        self.tokenizer = Some(added);
        Ok(self)
    }

    /// The same, where `data.tokenizer` was given or not.
    #[must_use]
    pub fn with_given(self, is_given: bool) -> Learned {
        Learned { is_given, ..self }
    }

    /// The same with the `generation_config.json` that a run keeps.
    #[must_use]
    pub fn with_generation_config(self, generation_config: Option<String>) -> Learned {
        Learned { generation_config, ..self }
    }

    /// The content of the `generation_config.json` of a folder without tokenizer.
    pub fn generation_config(&self) -> Option<&str> {
        self.generation_config.as_deref()
    }

    /// The tokenizer, if it is known.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Findings, for people.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The tokenizer for the text of `data`.
    ///
    /// # Errors
    /// [`DataError::OtherTokenizer`] for one whose ids differ, [`DataError::NoTokenizer`] where none is known, and
    /// those of opening the one that `data` names.
    pub fn for_text(
        &self,
        data: &DataConfig,
        corpus: Option<&Corpus>,
    ) -> Result<Chosen<Tokenizer>, DataError> {
        let key = format!("data.tokenizer = {:?}", data.tokenizer);
        let open = || Tokenizer::from_key(&data.tokenizer, corpus);
        let (tokenizer, mut notes) = match (&self.origin, &self.tokenizer) {
            (None, _) => {
                let tokenizer = open()?;
                let notes = tokenizer.notes().iter().map(|note| format!("tokenizer: {note}")).collect();
                (tokenizer, notes)
            }
            (Some(origin), None) if !self.is_given => {
                return Err(DataError::NoTokenizer { origin: origin.clone() });
            }
            (Some(_), Some(learned)) if !self.is_given => {
                let tokenizer = learned.clone();
                (corpus.map_or(tokenizer.clone(), |corpus| tokenizer.for_corpus(corpus)), Vec::new())
            }
            (Some(origin), learned) => {
                let given = open()?;
                let learned = learned.as_ref().filter(|_| !self.is_guess && !data.new_tokenizer);
                match learned {
                    None if data.new_tokenizer => {
                        let note = format!(
                            "{key}: the model of {origin} learns these ids anew (data.new_tokenizer); its rows start from \
                             those of other tokens"
                        );
                        (given, vec![note])
                    }
                    None => {
                        let note = format!("{key}: the ids of {origin} are taken for these; no file says so");
                        (given, vec![note])
                    }
                    Some(learned) => {
                        accept(&key, &given, learned, origin, LEAVE_OUT)?;
                        let tokenizer = learned.clone();
                        let tokenizer =
                            corpus.map_or(tokenizer.clone(), |corpus| tokenizer.for_corpus(corpus));
                        (
                            tokenizer,
                            vec![format!(
                                "{key} has the ids of the tokenizer of {origin}, whose files are kept"
                            )],
                        )
                    }
                }
            }
        };
        if corpus.is_some_and(Corpus::may_have_several_documents) && self.notes.is_empty() {
            notes.push(format!("tokenizer: {}; {}", tokenizer.describe(), tokenizer.describe_boundaries()));
        }
        Ok((tokenizer, notes))
    }

    /// The tokenizer of a token file: its own, or else the one that its ids are taken for.
    ///
    /// # Errors
    /// [`DataError::OtherTokenizer`], and those of reading the file.
    pub fn for_tokens(
        &self,
        data: &DataConfig,
        file: &TokenFile,
    ) -> Result<Chosen<Option<Tokenizer>>, DataError> {
        let name = format!("data.tokens = {:?}", file.path().display().to_string());
        let own = match (file.tokenizer()?, file.format(), file.vocab_size()) {
            // The number in the header of llm.c's files names the tokenizer.
            (None, TokenFormat::LlmC, Some(GPT2_ROWS)) if self.tokenizer.is_some() => {
                Some(Tokenizer::open(&TokenizerSpec::Gpt2, None)?)
            }
            (own, ..) => own,
        };
        let Some(origin) = &self.origin else { return Ok((own, Vec::new())) };
        let known = self.tokenizer.as_ref().filter(|_| !data.new_tokenizer);
        match (own, known) {
            (Some(own), Some(learned)) if !self.is_guess => {
                accept(&name, &own, learned, origin, TOKENIZE_AGAIN)?;
                Ok((Some(learned.clone()), Vec::new()))
            }
            (Some(own), _) => {
                let note = match data.new_tokenizer {
                    true => format!("{name}: the model of {origin} learns its ids anew (data.new_tokenizer)"),
                    false => format!(
                        "{name}: the ids of {origin} are taken for its ({}); no file says so",
                        own.describe()
                    ),
                };
                Ok((Some(own), vec![note]))
            }
            (None, Some(learned)) => {
                if let Some(vocab) = file.vocab_size().filter(|vocab| *vocab != learned.vocab_size()) {
                    let found = format!("{vocab} ids, without a tokenizer");
                    return Err(other(&name, found, learned, origin, TOKENIZE_AGAIN));
                }
                let described = learned.describe();
                let note = format!(
                    "{name} holds no tokenizer: its ids are taken for those of {origin} ({described}); no file says so"
                );
                Ok((Some(learned.clone()), vec![note]))
            }
            (None, None) => {
                let note = format!(
                    "{name} holds no tokenizer: its ids are taken for those of {origin}; no file says so"
                );
                Ok((None, vec![note]))
            }
        }
    }
}

fn accept(
    name: &str,
    given: &Tokenizer,
    learned: &Tokenizer,
    origin: &str,
    advice: &'static str,
) -> Result<(), DataError> {
    match given.agrees_with(learned) {
        true => Ok(()),
        false => Err(other(name, given.describe(), learned, origin, advice)),
    }
}

fn other(name: &str, found: String, learned: &Tokenizer, origin: &str, advice: &'static str) -> DataError {
    DataError::OtherTokenizer {
        given: name.to_string(),
        found,
        learned: learned.describe(),
        origin: origin.to_string(),
        advice,
    }
}
