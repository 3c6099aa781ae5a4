//! Sizes as people type them: `8GiB`, `500MB`, plain bytes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size {
    /// The number.
    pub num_bytes: u64,
}

const UNITS: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
        let (number, unit) = (&text[..split], text[split..].trim());
        let factor = match unit {
            "" | "B" => 1,
            _ => {
                UNITS.iter().find(|(name, _)| *name == unit).map(|(_, factor)| *factor).unwrap_or(0)
            }
        };
        match number.parse::<f64>() {
            Ok(value) if factor > 0 && value.is_finite() => {
                Ok(Self { num_bytes: (value * factor as f64).round() as u64 })
            }
            _ => Err(format!("'{text}' is not a size; write 8GiB, 500MB or a number of bytes")),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS[..4].iter().rev().find(|(_, factor)| self.num_bytes >= *factor);
        match unit {
            Some((name, factor)) if self.num_bytes.is_multiple_of(*factor) => {
                write!(formatter, "{}{name}", self.num_bytes / factor)
            }
            Some((name, factor)) => {
                write!(formatter, "{:.2}{name}", self.num_bytes as f64 / *factor as f64)
            }
            None => write!(formatter, "{}", self.num_bytes),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Exact, whatever the display rounds to.
        match self.to_string().parse::<Self>() {
            Ok(again) if again == *self => serializer.serialize_str(&self.to_string()),
            _ => serializer.serialize_u64(self.num_bytes),
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Typed {
            Bytes(u64),
            Text(String),
        }
        match Typed::deserialize(deserializer)? {
            Typed::Bytes(num_bytes) => Ok(Self { num_bytes }),
            Typed::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_typed_and_shown_in_the_largest_unit() {
        for (text, num_bytes) in
            [("8GiB", 8 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("77", 77), ("3B", 3)]
        {
            assert_eq!(text.parse::<Size>().unwrap().num_bytes, num_bytes, "{text}");
        }
        assert_eq!(Size { num_bytes: 8 << 30 }.to_string(), "8GiB");
        assert_eq!(Size { num_bytes: 1536 }.to_string(), "1.50KiB");
        for text in ["", "GiB", "8 GiBs", "-1", "8gib", "1e3"] {
            assert!(text.parse::<Size>().unwrap_err().contains("is not a size"), "{text}");
        }
    }
}
