//! What a layer's forward keeps for its backward.
//!
//! Three things: the layer's input and its output, where backward reads them, and what only the layer knows, a
//! struct with a name. The first two lie between layers and are shared with neighbours (one tensor, counted
//! owners). So whoever composes layers may let go of a tensor that can be made again, in all the places that
//! hold it, and put it back before the first backward that reads it.

use std::any::Any;

use crate::layer::Activation;

/// See the module's head.
pub struct Saved {
    /// The layer's input.
    pub x: Shared,
    /// Its output, without a residual.
    pub y: Shared,
    /// What only the layer knows.
    pub own: Box<dyn Any + Send>,
}

impl Saved {
    /// What only the layer knows; neither input nor output is read again.
    pub fn new(own: impl Any + Send) -> Saved {
        Saved { x: Shared::Unread, y: Shared::Unread, own: Box::new(own) }
    }

    /// Backward reads the input too.
    #[must_use]
    pub fn with_input(self, x: Activation) -> Saved {
        Saved { x: Shared::Held(x), ..self }
    }

    /// Backward reads the output too.
    #[must_use]
    pub fn with_output(self, y: Activation) -> Saved {
        Saved { y: Shared::Held(y), ..self }
    }
}

/// What the first part of a backward leaves for the second, which alone knows its type.
pub struct Deferred(Box<dyn Any + Send>);

impl Deferred {
    /// Anything.
    pub fn new(own: impl Any + Send) -> Deferred {
        Deferred(Box::new(own))
    }

    /// As the type that it was made of.
    #[track_caller]
    pub fn restore<T: 'static>(self) -> T {
        restore(self.0)
    }
}

/// A tensor between two layers, as one of them needs it for its backward.
pub enum Shared {
    /// Backward does not read it.
    Unread,
    /// It is here.
    Held(Activation),
    /// It is made again before backward.
    Forgotten,
}

impl Shared {
    /// The tensor; it is here whenever a layer runs.
    #[track_caller]
    pub fn into_held(self) -> Activation {
        match self {
            Shared::Held(tensor) => tensor,
            Shared::Unread => panic!("forward kept what backward reads"),
            Shared::Forgotten => panic!("what was forgotten is made again before it is read"),
        }
    }

    /// The tensor, to read.
    #[track_caller]
    pub fn held(&self) -> &Activation {
        match self {
            Shared::Held(tensor) => tensor,
            Shared::Unread | Shared::Forgotten => panic!("a tensor is read before it is made again"),
        }
    }

    /// Whether it is to be made again.
    pub(crate) fn is_forgotten(&self) -> bool {
        matches!(self, Shared::Forgotten)
    }

    /// Lets go of the tensor, if it is here.
    pub(crate) fn forget(&mut self) {
        if matches!(self, Shared::Held(_)) {
            *self = Shared::Forgotten;
        }
    }

    /// Puts it back, if it was forgotten.
    pub(crate) fn recall(&mut self, tensor: &Activation) {
        if self.is_forgotten() {
            *self = Shared::Held(tensor.clone());
        }
    }
}

/// What only the layer knows, as the type it saved.
#[track_caller]
pub fn restore<T: 'static>(own: Box<dyn Any + Send>) -> T {
    *own.downcast::<T>().unwrap_or_else(|_| panic!("saved is not {}", std::any::type_name::<T>()))
}

/// The same, to write.
#[track_caller]
pub fn restore_mut<T: 'static>(own: &mut (dyn Any + Send)) -> &mut T {
    own.downcast_mut().unwrap_or_else(|| panic!("saved is not {}", std::any::type_name::<T>()))
}
