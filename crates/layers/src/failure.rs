//! Why a layer did not finish.
//!
//! A layer that computes alone always does. One that exchanges tensors with others can find that they are gone;
//! what it then knows is carried here, to whoever runs the layers.

use std::error::Error;

/// The cause, as whoever exchanges tensors knows it.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Failure(pub Box<dyn Error + Send + Sync>);

/// What layers return.
pub type Result<T> = std::result::Result<T, Failure>;
