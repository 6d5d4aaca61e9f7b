//! The macro that declares a family of operations.

/// Declares a family of operations: an enum with one variant for each, so that a device matches over them all.
macro_rules! family {
    ($(#[$meta:meta])* $family:ident { $($operation:ident,)* }) => {
        $(#[$meta])*
        pub enum $family<'a> {
            $(#[doc = concat!("[`struct@", stringify!($operation), "`]")] $operation($operation<'a>),)*
        }

        impl $crate::operation::Operands for $family<'_> {
            fn visit(&mut self, visit: &mut dyn FnMut($crate::operation::Operand<'_>)) {
                match self {
                    $($family::$operation(operation) => {
                        $crate::operation::Operands::visit(operation, visit);
                    })*
                }
            }
        }

        impl $family<'_> {
            /// The operation's name.
            pub fn name(&self) -> &'static str {
                match self {
                    $($family::$operation(operation) => $crate::operation::Describe::name(operation),)*
                }
            }
        }

        $(impl<'a> From<$operation<'a>> for $crate::operations::Operation<'a> {
            fn from(operation: $operation<'a>) -> Self {
                $crate::operations::Operation::$family($family::$operation(operation))
            }
        })*
    };
}

pub(crate) use family;
