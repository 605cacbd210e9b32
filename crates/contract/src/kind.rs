//! The kinds of errors, which all crates above this one share.

/// The kind of an error: what a caller can do about it. A program's exit code follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// A check failed.
    Check,
    /// The request is invalid, or refused for safety.
    Usage,
    /// The input is missing or malformed.
    Input,
    /// Not enough memory or disk space.
    Space,
    /// A value is not finite, or a protected tensor changed.
    Diverged,
    /// A rank failed or does not answer.
    Rank,
    /// The user asked to stop.
    Interrupted,
}
