//! Roles of special tokens: they separate and enclose documents, hide tokens, end generated text, and stand in chat templates.

use super::files::GENERATION_CONFIG;
use super::hugging_face_files::END_OF_TEXT;
use super::special_tokens::listed;
use super::{Algorithm, Tokenizer};
use crate::Result;

impl Tokenizer {
    /// The id that replaces a hidden token, if the vocabulary has one: the token with the role `mask_token` of a
    /// `tokenizer.json`, none for the other kinds.
    pub fn mask(&self) -> Option<u32> {
        match &*self.algorithm {
            Algorithm::HuggingFace(opened) => opened.role("mask_token").map(|token| token.id),
            _ => None,
        }
    }

    /// Describes what separates and encloses documents, for messages.
    pub fn describe_boundaries(&self) -> String {
        let spelled = |id: u32| match &*self.algorithm {
            Algorithm::HuggingFace(opened) => {
                opened.library.token(id).map_or_else(|| id.to_string(), |(content, _)| format!("{content:?}"))
            }
            _ => format!("{END_OF_TEXT:?}"),
        };
        let source = match &*self.algorithm {
            Algorithm::HuggingFace(opened) => opened.separator().map(|token| format!(", {}", token.source)),
            _ => None,
        };
        let between = match self.separator() {
            Some(id) => format!("{} (id {id}{})", spelled(id), source.unwrap_or_default()),
            None if matches!(*self.algorithm, Algorithm::HuggingFace(_)) => {
                "nothing, since no token is known that ends a text".to_string()
            }
            None => "nothing, as for a single document: no id is set aside for it".to_string(),
        };
        let list = |ids: &[u32]| ids.iter().map(|id| spelled(*id)).collect::<Vec<_>>().join(" ");
        let [begin, end] = self.framing().map(list);
        let enclosed = match (begin.is_empty(), end.is_empty()) {
            (true, true) => String::new(),
            (false, true) => format!("; each begins with {begin}"),
            (true, false) => format!("; each ends with {end}"),
            (false, false) => format!("; each begins with {begin} and ends with {end}"),
        };
        format!("between documents: {between}{enclosed}")
    }

    /// The source of its chat template: the one that it was given, or that of its files.
    pub fn chat_template(&self) -> Option<String> {
        match &*self.algorithm {
            _ if self.template.is_some() => self.template.as_deref().map(str::to_string),
            Algorithm::HuggingFace(opened) => opened.files().chat_template(),
            _ => None,
        }
    }

    /// The source of the chat template of its files for chats with tools, if it is not the one for all chats.
    pub fn tool_template(&self) -> Option<String> {
        match &*self.algorithm {
            Algorithm::HuggingFace(opened) if self.template.is_none() => opened.files().tool_template(),
            _ => None,
        }
    }

    /// The same tokenizer with this chat template, which it keeps and exports.
    #[must_use]
    pub fn with_chat_template(self, source: &str) -> Tokenizer {
        Tokenizer { template: Some(source.into()), ..self }
    }

    /// Ids that end a generated text: those of `generation_config.json`, and the token with the role `eos_token`, or else the one
    /// between documents.
    pub fn ends(&self) -> Vec<u32> {
        let mut ends = Vec::new();
        if let Algorithm::HuggingFace(opened) = &*self.algorithm {
            let config = opened.files().object(GENERATION_CONFIG).unwrap_or_default();
            ends.extend(listed(&config["eos_token_id"]));
        }
        ends.extend(self.separator().filter(|id| !ends.contains(id)));
        ends
    }

    /// Special tokens by their role, as chat templates name them.
    pub(crate) fn special_roles(&self) -> Vec<(String, String)> {
        let Algorithm::HuggingFace(opened) = &*self.algorithm else { return Vec::new() };
        opened.special().iter().map(|token| (token.role.to_string(), token.content.clone())).collect()
    }

    /// Spellings of special tokens.
    pub(crate) fn special_spellings(&self) -> Vec<String> {
        let Algorithm::HuggingFace(opened) = &*self.algorithm else { return Vec::new() };
        opened.library.special()
    }

    /// The ids of a text in which no special token is looked for.
    pub(crate) fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        match &*self.algorithm {
            Algorithm::HuggingFace(opened) => opened.library.encode_plain(text),
            _ => self.encode(text),
        }
    }
}
