//! Stand-ins for the tokenizers of other crates in a build without the feature `tokenizers`: they cannot be made, and the error says how to
//! get them.

use std::convert::Infallible;

use serde_json::Value;

use super::settings::Changes;
use super::special_tokens::AddedToken;
use crate::Result;
use crate::windows::Placed;

fn refusal(what: &str) -> String {
    format!(
        "this build has no {what}: build `phalanx` with the feature `tokenizers`, or use `byte` or `char`"
    )
}

/// GPT-2's vocabulary, which this build does not have.
pub(super) struct Gpt2(Infallible);

impl Gpt2 {
    pub(super) fn new() -> Result<Gpt2, String> {
        Err(refusal("GPT-2 vocabulary"))
    }

    pub(super) fn vocab_size(&self) -> usize {
        match self.0 {}
    }

    pub(super) fn end_of_text(&self) -> u32 {
        match self.0 {}
    }

    pub(super) fn encode(&self, _: &str) -> Vec<u32> {
        match self.0 {}
    }

    pub(super) fn decode(&self, _: &[u32]) -> String {
        match self.0 {}
    }

    pub(super) fn last_cut(&self, _: &str) -> usize {
        match self.0 {}
    }

    pub(super) fn ordinary_tokens(&self) -> Vec<Vec<u8>> {
        match self.0 {}
    }
}

/// A `tokenizer.json`, which this build cannot read.
pub(super) struct HuggingFace(Infallible);

impl HuggingFace {
    pub(super) fn from_json(_: &str, _: &Changes) -> Result<HuggingFace, String> {
        Err(refusal("reader of Hugging Face tokenizers"))
    }

    pub(super) fn add(&mut self, _: &AddedToken) -> Result<Option<u32>, String> {
        match self.0 {}
    }

    pub(super) fn vocab_size(&self) -> usize {
        match self.0 {}
    }

    pub(super) fn id(&self, _: &str) -> Option<u32> {
        match self.0 {}
    }

    pub(super) fn token(&self, _: u32) -> Option<(String, bool)> {
        match self.0 {}
    }

    pub(super) fn added(&self) -> Vec<(u32, String)> {
        match self.0 {}
    }

    pub(super) fn special(&self) -> Vec<String> {
        match self.0 {}
    }

    pub(super) fn encode_plain(&self, _: &str) -> Result<Vec<u32>> {
        match self.0 {}
    }

    pub(super) fn unknown(&self) -> Option<String> {
        match self.0 {}
    }

    pub(super) fn framing(&self) -> Result<[Vec<u32>; 2], String> {
        match self.0 {}
    }

    pub(super) fn model(&self) -> &'static str {
        match self.0 {}
    }

    pub(super) fn meaning(&self) -> Value {
        match self.0 {}
    }

    pub(super) fn encode(&self, _: &str) -> Result<Vec<u32>> {
        match self.0 {}
    }

    pub(super) fn encode_window(&self, _: &str) -> Result<Vec<Placed>> {
        match self.0 {}
    }

    pub(super) fn decode(&self, _: &[u32]) -> String {
        match self.0 {}
    }
}
