//! Checks of the keys of `[data]`.

use std::path::PathBuf;

use phalanx_data::SampleOrder;
use phalanx_models::Objective;

use super::check::refuse;
use super::{ConfigError, DataConfig, Documents, Order, Paths, RunConfig};

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
    pub(super) fn check_data(&self) -> Result<(), ConfigError> {
        if self.data.documents == Documents::Apart && self.model.arch.objective == Objective::Masked {
            let expected = "is for models that predict the next token: leave it out";
            return Err(refuse("data.documents", "\"apart\"", expected));
        }
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
        if data.tokens.as_ref().is_some_and(|tokens| tokens.paths().is_empty()) {
            return Err(refuse("data.tokens", "[]", "names no file: give at least one, or leave it out"));
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
