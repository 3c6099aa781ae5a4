//! What can be wrong with a user's data, tokenizer or template.

use std::path::PathBuf;

/// Result of every fallible operation of this module.
pub type Result<T, E = DataError> = std::result::Result<T, E>;

/// What went wrong, where, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused a file operation.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// What was tried: "open", "read", "write".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is missing or its content is not what it must be.
    #[error("{path}: {message}", path = path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it and what to do.
        message: String,
    },
    /// One row of a dataset cannot be used.
    #[error("{path}, line {line}: {message}", path = path.display())]
    Row {
        /// The dataset.
        path: PathBuf,
        /// Line in the file, from 1.
        line: usize,
        /// What is wrong with it and what to do.
        message: String,
    },
    /// A chat template does not compile, refused a conversation, or cannot tell the assistant's text.
    #[error("chat template: {message}")]
    Template {
        /// The template engine's words or ours.
        message: String,
    },
    /// The tokenizer could not do what was asked.
    #[error("tokenizer: {message}")]
    Tokenizer {
        /// The tokenizer's words or ours.
        message: String,
    },
    /// A setting cannot be used.
    #[error("{message}")]
    Setting {
        /// Which setting, and which values it takes.
        message: String,
    },
    /// A tensor could not be made.
    #[error(transparent)]
    Core(#[from] blockstreamer_core::Error),
}

impl DataError {
    /// A [`DataError::Io`] for `path`, for use with `map_err`.
    pub(super) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    pub(super) fn file(path: impl Into<PathBuf>, message: impl Into<String>) -> Self {
        Self::File { path: path.into(), message: message.into() }
    }

    pub(super) fn template(message: impl Into<String>) -> Self {
        Self::Template { message: message.into() }
    }

    /// The tokenizer library's errors are boxed trait objects; only their text is kept.
    pub(super) fn tokenizer(error: impl std::fmt::Display) -> Self {
        Self::Tokenizer { message: error.to_string() }
    }
}
