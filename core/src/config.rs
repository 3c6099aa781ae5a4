//! Reading a `config.json`, with errors that name the key.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// An object of a `config.json`: the document itself, or one nested in it.
#[derive(Debug, Clone)]
pub struct ConfigSection {
    family: String,
    path: String,
    values: Map<String, Value>,
}

impl ConfigSection {
    /// The whole document. `family` is named in errors.
    ///
    /// # Errors
    /// [`Error::Config`] when the text is no JSON object.
    pub fn parse(family: &str, config_json: &str) -> Result<Self> {
        let values = serde_json::from_str(config_json).map_err(|error| Error::Config {
            family: family.to_owned(),
            message: format!("is not a JSON object: {error}"),
        })?;
        Ok(Self { family: family.to_owned(), path: String::new(), values })
    }

    /// The value at `key`.
    ///
    /// # Errors
    /// [`Error::Config`] when there is none or it has another type.
    pub fn required<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        self.optional(key)?.ok_or_else(|| self.error(key, "is missing"))
    }

    /// The value at `key`, if there is one other than null.
    ///
    /// # Errors
    /// [`Error::Config`] when it has another type.
    pub fn optional<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.values.get(key).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        match T::deserialize(value) {
            Ok(value) => Ok(Some(value)),
            Err(error) => Err(self.error(key, format!("is {value}, but: {error}"))),
        }
    }

    /// The object at `key`, if there is one.
    ///
    /// # Errors
    /// [`Error::Config`] when it is no object.
    pub fn section(&self, key: &str) -> Result<Option<Self>> {
        let values = self.optional(key)?;
        Ok(values.map(|values| Self {
            family: self.family.clone(),
            path: format!("{}{key}.", self.path),
            values,
        }))
    }

    /// What is wrong with `key`, as an error: `text_config.hidden_act 'relu' is not supported`.
    pub fn error(&self, key: &str, message: impl AsRef<str>) -> Error {
        Error::Config {
            family: self.family.clone(),
            message: format!("{}{key} {}", self.path, message.as_ref()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section() -> ConfigSection {
        let text = r#"{"size": 4, "none": null, "text_config": {"size": "four", "scale": 1e-6}}"#;
        ConfigSection::parse("qwen9", text).unwrap()
    }

    #[test]
    fn values_are_read_with_their_types() {
        let root = section();
        assert_eq!(root.required::<usize>("size").unwrap(), 4);
        assert_eq!(root.optional::<usize>("none").unwrap(), None);
        assert!(root.section("vision_config").unwrap().is_none());
        let text = root.section("text_config").unwrap().unwrap();
        assert_eq!(text.required::<f64>("scale").unwrap(), 1e-6);
    }

    #[test]
    fn errors_name_the_family_and_the_whole_key() {
        let root = section();
        let text = root.section("text_config").unwrap().unwrap();
        for (error, wanted) in [
            (root.required::<usize>("heads").unwrap_err(), "qwen9: config.json: heads is missing"),
            (root.required::<usize>("none").unwrap_err(), "none is missing"),
            (text.required::<usize>("size").unwrap_err(), "text_config.size is \"four\", but"),
            (root.section("size").unwrap_err(), "size is 4, but"),
            (ConfigSection::parse("qwen9", "{").unwrap_err(), "is not a JSON object"),
            (ConfigSection::parse("qwen9", "[1]").unwrap_err(), "is not a JSON object"),
        ] {
            assert!(error.to_string().contains(wanted), "{error}");
        }
    }
}
