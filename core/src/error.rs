//! The one error type of the library.
//!
//! It crosses the plugin boundary, so it holds nothing but types of `std`.

use std::path::PathBuf;

/// Result of every fallible operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, where, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a file operation.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// What was tried: "open", "read", "rename".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file was read but its content is not what it must be.
    #[error("{path}: {message}", path = path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it and what to do.
        message: String,
    },
    /// A tensor that the model needs is not in the checkpoint.
    #[error(
        "tensor '{tensor}' is missing from {place}; the download may be incomplete, or config.json belongs to another checkpoint"
    )]
    MissingTensor {
        /// Name in the checkpoint.
        tensor: String,
        /// Where it was looked for.
        place: String,
    },
    /// A tensor does not fit the model.
    #[error("tensor '{tensor}': {message}")]
    Tensor {
        /// Name of the tensor.
        tensor: String,
        /// What is wrong with it.
        message: String,
    },
    /// `config.json` lacks a key or holds a value that the family cannot use.
    #[error("{family}: config.json: {message}")]
    Config {
        /// The family that read it.
        family: String,
        /// The key and what is wrong with it.
        message: String,
    },
    /// No family found at startup takes this `model_type`.
    #[error("model_type '{found}' is not known; families found: {known}")]
    UnknownModelType {
        /// The `model_type` of `config.json`.
        found: String,
        /// The families and the model types each takes.
        known: String,
    },
    /// libtorch refused an operation.
    #[error("libtorch: {message}")]
    Torch {
        /// libtorch's own words, without its C++ stack.
        message: String,
    },
    /// Device memory ran out.
    #[error("out of device memory while {action}: {message}")]
    OutOfMemory {
        /// What was being done.
        action: String,
        /// The allocator's words.
        message: String,
    },
    /// No plan fits into the memory that may be used.
    #[error("{message}")]
    Budget {
        /// How much more the plan that needs the least would take.
        missing_bytes: u64,
        /// Which memory, how much would do, and what it is for.
        message: String,
    },
    /// The CUDA driver refused an operation.
    #[error("CUDA: {action}: {message}")]
    Cuda {
        /// What was tried.
        action: &'static str,
        /// The driver's words.
        message: String,
    },
    /// There is no usable CUDA device.
    #[error("no CUDA device: {reason}")]
    NoCuda {
        /// What is missing.
        reason: String,
    },
    /// A block is larger than a slot may be. Nothing was copied.
    #[error(
        "block '{block}' needs {num_bytes} bytes but a slot may hold {budget_bytes}; raise the slot budget or split the block"
    )]
    OversizedBlock {
        /// Name of the block.
        block: String,
        /// Its size.
        num_bytes: usize,
        /// The budget of one slot.
        budget_bytes: usize,
    },
    /// A block could not be read from its source. The engine is usable again.
    #[error("block '{block}': {source}")]
    Block {
        /// Name of the block.
        block: String,
        /// Why.
        source: Box<Error>,
    },
    /// The engine was used against its rules.
    #[error("{message}")]
    Usage {
        /// Which rule, and what to do.
        message: String,
    },
    /// A tensor is on another device than the engine.
    #[error("{what} is on {found} but the engine runs on {expected}; move it first")]
    WrongDevice {
        /// Which tensor.
        what: String,
        /// The engine's device.
        expected: String,
        /// The tensor's device.
        found: String,
    },
    /// Memory that must be page-locked is not.
    #[error("{what} is not in pinned memory, which copies to a CUDA device need")]
    Unpinned {
        /// Which memory.
        what: String,
    },
    /// A plugin panicked. The panic did not leave the plugin.
    #[error("plugin '{plugin}' panicked in {method}: {message}")]
    PluginPanic {
        /// Family name.
        plugin: String,
        /// The trait method.
        method: &'static str,
        /// The panic's message.
        message: String,
    },
    /// A plugin was refused.
    #[error("plugin {path}: {reason}", path = path.display())]
    PluginRefused {
        /// The library.
        path: PathBuf,
        /// Why, with what was expected and what was found.
        reason: String,
    },
    /// An implementation does not offer an operation.
    #[error("{implementer} does not support {operation}")]
    NotSupported {
        /// The operation.
        operation: &'static str,
        /// Who was asked.
        implementer: String,
    },
    /// Adapter settings or adapter files are wrong.
    #[error("adapter: {message}")]
    Adapter {
        /// What is wrong and what to do.
        message: String,
    },
}

impl Error {
    /// An [`Error::Io`] for `path`, for use with `map_err`.
    pub fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// An [`Error::File`].
    pub fn file(path: impl Into<PathBuf>, message: impl Into<String>) -> Self {
        Self::File { path: path.into(), message: message.into() }
    }

    /// An [`Error::Tensor`].
    pub fn tensor(tensor: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Tensor { tensor: tensor.into(), message: message.into() }
    }

    /// An [`Error::Usage`].
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Usage { message: message.into() }
    }

    /// The same error, saying which block it hit. An error that says so already stays as it is.
    pub fn in_block(self, block: &str) -> Self {
        match self {
            Self::Block { .. } => self,
            other => Self::Block { block: block.to_owned(), source: Box::new(other) },
        }
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        let text = error.to_string();
        // libtorch appends its C++ stack after this line; it helps nobody who reads the message.
        let message =
            text.split("\nException raised from").next().unwrap_or(&text).trim().to_owned();
        if message.contains("out of memory") {
            return Self::OutOfMemory { action: "computing".into(), message };
        }
        Self::Torch { message }
    }
}
