//! Element types of stored tensors.

use serde::{Deserialize, Serialize};
use tch::Kind;

use crate::error::{Error, Result};

/// Element type of a stored tensor, spelled as in a safetensors header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Dtype {
    F64,
    F32,
    F16,
    BF16,
    #[serde(rename = "F8_E4M3")]
    F8E4M3,
    #[serde(rename = "F8_E5M2")]
    F8E5M2,
    I64,
    I32,
    I16,
    I8,
    U8,
    BOOL,
}

impl Dtype {
    /// Every type, with its safetensors name and libtorch's kind.
    const ALL: [(Dtype, &'static str, Kind); 12] = [
        (Dtype::F64, "F64", Kind::Double),
        (Dtype::F32, "F32", Kind::Float),
        (Dtype::F16, "F16", Kind::Half),
        (Dtype::BF16, "BF16", Kind::BFloat16),
        (Dtype::F8E4M3, "F8_E4M3", Kind::Float8e4m3fn),
        (Dtype::F8E5M2, "F8_E5M2", Kind::Float8e5m2),
        (Dtype::I64, "I64", Kind::Int64),
        (Dtype::I32, "I32", Kind::Int),
        (Dtype::I16, "I16", Kind::Int16),
        (Dtype::I8, "I8", Kind::Int8),
        (Dtype::U8, "U8", Kind::Uint8),
        (Dtype::BOOL, "BOOL", Kind::Bool),
    ];

    /// Size of one element.
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 | Self::I16 => 2,
            Self::F8E4M3 | Self::F8E5M2 | Self::I8 | Self::U8 | Self::BOOL => 1,
        }
    }

    /// The safetensors name.
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// libtorch's name for the type.
    pub fn kind(self) -> Kind {
        Self::ALL[self as usize].2
    }

    /// Whether values are real numbers: only these are cast to the compute dtype.
    pub fn is_float(self) -> bool {
        (self as usize) <= (Self::F8E5M2 as usize)
    }

    /// The type with this safetensors name.
    ///
    /// # Errors
    /// [`Error::Usage`] names the types that are supported.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.iter().find(|entry| entry.1 == name).map(|entry| entry.0).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|entry| entry.1).collect();
            Error::usage(format!("dtype {name} is not supported (only {})", known.join(", ")))
        })
    }

    /// The type that libtorch calls `kind`.
    ///
    /// # Errors
    /// [`Error::Usage`] for kinds that no checkpoint holds.
    pub fn from_kind(kind: Kind) -> Result<Self> {
        Self::ALL
            .iter()
            .find(|entry| entry.2 == kind)
            .map(|entry| entry.0)
            .ok_or_else(|| Error::usage(format!("tensors of kind {kind:?} cannot be stored")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_survives_its_name_and_its_kind() {
        for (index, (dtype, name, kind)) in Dtype::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, index);
            assert_eq!(Dtype::from_name(name).unwrap(), dtype);
            assert_eq!(Dtype::from_kind(kind).unwrap(), dtype);
            assert_eq!(serde_json::to_string(&dtype).unwrap(), format!("\"{name}\""));
            assert_eq!(kind.elt_size_in_bytes(), dtype.size_bytes());
        }
        assert!(Dtype::from_name("U3").is_err());
    }
}
