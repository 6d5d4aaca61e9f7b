//! The types of values of keys: which kind of values they have, the number for bounds, and how errors write them.

use phalanx_data::TokenType;
use phalanx_models::Arch;
use serde::Serialize;

use super::declare::{Declared, Key, Kind};
use super::kernels::WORDS;
use super::{ConfigError, KernelChoice, Paths};

/// A type of values of keys.
pub trait KeyType: Serialize {
    /// Kind of the values.
    const KIND: Kind;

    /// The value, if it is a number.
    fn number(&self) -> Option<f64> {
        None
    }

    /// The value as errors write it.
    fn given(&self) -> String {
        let value = || serde_json::to_string(self).unwrap_or_default();
        self.number().map_or_else(value, |number| number.to_string())
    }

    /// Returns whether the key is left out when it has this value.
    fn is_left_out(&self) -> bool {
        false
    }

    /// Refuses a number that `key` does not take.
    ///
    /// # Errors
    /// The key, its value and the bound.
    fn check(&self, key: &Key) -> Result<(), ConfigError> {
        self.number().map_or(Ok(()), |number| key.check(number, || self.given()))
    }
}

macro_rules! whole {
    ($($ty:ty)*) => {
        $(impl KeyType for $ty {
            const KIND: Kind = Kind::Whole;

            fn number(&self) -> Option<f64> {
                Some(*self as f64)
            }

            fn given(&self) -> String {
                self.to_string()
            }
        })*
    };
}
whole! { u8 u32 u64 usize }

impl KeyType for f64 {
    const KIND: Kind = Kind::Number;

    fn number(&self) -> Option<f64> {
        Some(*self)
    }
}

impl KeyType for bool {
    const KIND: Kind = Kind::Flag;
}

impl KeyType for String {
    const KIND: Kind = Kind::Text;
}

impl KeyType for Vec<String> {
    const KIND: Kind = Kind::Texts;

    fn is_left_out(&self) -> bool {
        self.is_empty()
    }
}

impl<T: Declared + Serialize> KeyType for Vec<T> {
    const KIND: Kind = Kind::Tables(T::KEYS);

    fn is_left_out(&self) -> bool {
        self.is_empty()
    }
}

impl<T: KeyType> KeyType for Option<T> {
    const KIND: Kind = T::KIND;

    fn number(&self) -> Option<f64> {
        self.as_ref()?.number()
    }

    fn given(&self) -> String {
        self.as_ref().map_or_else(|| "left out".to_string(), T::given)
    }

    fn is_left_out(&self) -> bool {
        self.is_none()
    }
}

impl KeyType for Paths {
    const KIND: Kind = Kind::Paths;

    fn given(&self) -> String {
        self.shown()
    }
}

impl KeyType for KernelChoice {
    const KIND: Kind = Kind::Names(|| WORDS.to_vec());
}

impl KeyType for Arch {
    const KIND: Kind = Kind::Names(|| Arch::all().map(|arch| arch.name).collect());
}

impl KeyType for TokenType {
    const KIND: Kind = Kind::Names(|| vec!["auto", "u8", "u16", "u32", "i64"]);
}
