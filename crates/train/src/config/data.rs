//! Checks of the keys of `[data]`.

use std::path::PathBuf;

use phalanx_data::{SampleOrder, TokenType};
use phalanx_models::Objective;

use super::check::refuse;
use super::{ConfigError, DataConfig, Documents, Order, Paths, RunConfig, Updates};

impl DataConfig {
    /// The files that are evaluated in place of a fraction of the tokens; an empty list is none.
    pub fn validation_paths(&self) -> Option<Vec<PathBuf>> {
        self.validation_tokens.as_ref().map(Paths::paths).filter(|paths| !paths.is_empty())
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

impl RunConfig {
    /// Refuses documents apart where they cannot be.
    fn check_documents(&self) -> Result<(), ConfigError> {
        let refused = match (self.data.documents, self.data.end_token) {
            (Documents::Joined, Some(end_token)) => {
                return Err(refuse(
                    "data.end_token",
                    end_token,
                    "is for data.documents = \"apart\": leave it out",
                ));
            }
            (Documents::Joined, None) => None,
            (Documents::Apart, _) if self.model.arch.objective == Objective::Masked => {
                Some("is for models that predict the next token: leave it out")
            }
            (Documents::Apart, _) if self.parallel.updates == Updates::Asynchronous => {
                Some("works with synchronous updates only: leave it out, or leave out parallel.updates")
            }
            (Documents::Apart, _) => None,
        };
        refused.map_or(Ok(()), |expected| Err(refuse("data.documents", "apart", expected)))
    }

    pub(super) fn check_data(&self) -> Result<(), ConfigError> {
        self.check_documents()?;
        let data = &self.data;
        let evaluated = data.validation_paths().is_some();
        let given = |paths: &Option<Paths>| paths.as_ref().map_or(String::new(), Paths::shown);
        for (key, paths) in
            [("data.tokens", &data.tokens), ("data.validation_tokens", &data.validation_tokens)]
        {
            let has_no_name = |paths: &Paths| paths.paths().iter().any(|path| path.as_os_str().is_empty());
            if paths.as_ref().is_some_and(has_no_name) {
                return Err(refuse(key, given(paths), "has a path without a name"));
            }
        }
        let Some(tokens) = &data.tokens else {
            let is_for = "is for data.tokens: leave it out, or name token files in data.tokens";
            return match data {
                _ if evaluated => {
                    Err(refuse("data.validation_tokens", given(&data.validation_tokens), is_for))
                }
                _ if data.token_type != TokenType::Auto => {
                    Err(refuse("data.token_type", format!("{:?}", data.token_type).to_lowercase(), is_for))
                }
                _ if data.unusual_tokens => Err(refuse("data.unusual_tokens", true, is_for)),
                _ => Ok(()),
            };
        };
        if tokens.paths().is_empty() {
            return Err(refuse("data.tokens", "[]", "names no file: give at least one, or leave it out"));
        }
        if !data.text.is_empty() {
            return Err(refuse("data.tokens", tokens.shown(), "give data.text or data.tokens, not both"));
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
}
