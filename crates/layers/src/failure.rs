//! The error of a layer.
//!
//! A layer without collectives does not fail. A layer with collectives fails when they do; it returns their error in
//! this type, so that this crate need not know process groups.

use std::error::Error;

/// The error of a collective inside a layer.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Failure(pub Box<dyn Error + Send + Sync>);

/// Result of a layer, or of its construction.
pub type Result<T, E = Failure> = std::result::Result<T, E>;
