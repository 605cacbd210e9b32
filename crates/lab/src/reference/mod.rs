//! The model in f64.
