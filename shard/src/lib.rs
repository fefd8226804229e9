//! The data path of one broker: does what the core crate decides.
