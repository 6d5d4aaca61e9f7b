//! State that a layer's forward saves for its backward.
//!
//! Three things: the layer's input and output, where backward reads them, and a struct of the layer's own. Input and output are
//! shared with the neighbouring layers (one tensor, counted owners). So a composition of layers can free a tensor that can be
//! recomputed, everywhere it is held, and put it back before the first backward that reads it.

use std::any::Any;

use crate::activation::Activation;

/// State that a layer's forward saves for its backward.
pub struct Saved<Own> {
    /// The layer's input.
    pub x: Shared,
    /// The layer's output, without a sum.
    pub y: Shared,
    /// The layer's own struct.
    pub own: Own,
}

/// The own struct of a layer of any type.
pub type AnyOwn = Box<dyn Any + Send>;

/// State that a layer of any type saves.
pub type AnySaved = Saved<AnyOwn>;

impl<Own> Saved<Own> {
    /// Saves the layer's own struct; backward reads neither input nor output.
    pub fn new(own: Own) -> Saved<Own> {
        Saved { x: Shared::Unread, y: Shared::Unread, own }
    }

    /// Backward reads the input too.
    #[must_use]
    pub fn with_input(self, x: Activation) -> Saved<Own> {
        Saved { x: Shared::Held(x), ..self }
    }

    /// Backward reads the output too.
    #[must_use]
    pub fn with_output(self, y: Activation) -> Saved<Own> {
        Saved { y: Shared::Held(y), ..self }
    }

    /// The same, with its own struct of any type.
    pub(crate) fn boxed(self) -> AnySaved
    where
        Own: Send + 'static,
    {
        Saved { x: self.x, y: self.y, own: Box::new(self.own) }
    }
}

impl AnySaved {
    /// The same, as the layer knows it.
    #[track_caller]
    pub(crate) fn unboxed<Own: 'static>(self) -> Saved<Own> {
        Saved { x: self.x, y: self.y, own: restore(self.own) }
    }
}

/// State that the first part of backward saves for the second, which knows its type.
pub struct Deferred(AnyOwn);

impl Deferred {
    /// Saves a struct of the layer.
    pub fn new(own: impl Any + Send) -> Deferred {
        Deferred(Box::new(own))
    }

    /// The struct that was saved, by its type.
    #[track_caller]
    pub fn restore<T: 'static>(self) -> T {
        restore(self.0)
    }
}

/// A tensor between two layers, as one of them holds it for its backward.
pub enum Shared {
    /// Backward does not read it.
    Unread,
    /// It is saved.
    Held(Activation),
    /// It was freed or given away, and is put back before backward.
    Forgotten,
}

impl Shared {
    /// The tensor, by value.
    #[track_caller]
    pub fn into_held(self) -> Activation {
        match self {
            Shared::Held(tensor) => tensor,
            Shared::Unread => panic!("backward reads a tensor that forward did not save"),
            Shared::Forgotten => panic!("a freed tensor is read before it is recomputed"),
        }
    }

    /// The tensor, by value; None where backward does not read it.
    #[track_caller]
    pub fn if_read(self) -> Option<Activation> {
        match self {
            Shared::Unread => None,
            read => Some(read.into_held()),
        }
    }

    /// The tensor, by reference.
    #[track_caller]
    pub fn held(&self) -> &Activation {
        match self {
            Shared::Held(tensor) => tensor,
            Shared::Unread | Shared::Forgotten => {
                panic!("a tensor is read that was not saved or not recomputed")
            }
        }
    }

    /// Returns whether backward does not read it.
    pub fn is_unread(&self) -> bool {
        matches!(self, Shared::Unread)
    }

    /// Returns whether it must be recomputed.
    pub(crate) fn is_forgotten(&self) -> bool {
        matches!(self, Shared::Forgotten)
    }

    /// Frees the tensor, if it is saved.
    pub(crate) fn forget(&mut self) {
        drop(self.take());
    }

    /// Gives the tensor away, if it is saved: [`Shared::recall`] must put it back before backward.
    pub fn take(&mut self) -> Option<Activation> {
        match std::mem::replace(self, Shared::Forgotten) {
            Shared::Held(tensor) => Some(tensor),
            other => {
                *self = other;
                None
            }
        }
    }

    /// Puts the tensor back, if it was freed or given away.
    pub fn recall(&mut self, tensor: &Activation) {
        if self.is_forgotten() {
            *self = Shared::Held(tensor.clone());
        }
    }
}

/// A struct of a layer, by its type, where it stays.
#[track_caller]
pub(crate) fn restored<T: 'static>(own: &mut AnyOwn) -> &mut T {
    (**own).downcast_mut().unwrap_or_else(|| panic!("saved is not {}", std::any::type_name::<T>()))
}

/// A struct of a layer, by its type.
#[track_caller]
fn restore<T: 'static>(own: AnyOwn) -> T {
    *own.downcast::<T>().unwrap_or_else(|_| panic!("saved is not {}", std::any::type_name::<T>()))
}
