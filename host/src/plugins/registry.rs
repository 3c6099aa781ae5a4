//! The families that were found, and what was refused.

use std::fmt;
use std::path::{Path, PathBuf};

use blockstreamer_core::family::{FamilySize, Model, ModelFamily, ModelOptions};
use blockstreamer_core::{Error, Result, plugin};
use serde::Deserialize;

use super::{discover, load};

/// A family that can be used.
pub struct Found {
    /// Its name, as typed on the command line.
    pub name: String,
    /// Its library; `None` if it is linked into the host.
    pub path: Option<PathBuf>,
    /// The values of `model_type` that it opens.
    pub model_types: Vec<String>,
    /// The sizes that it can describe.
    pub sizes: Vec<FamilySize>,
    family: Box<dyn ModelFamily>,
}

impl Found {
    /// The family itself.
    pub fn family(&self) -> &dyn ModelFamily {
        &*self.family
    }

    /// Where it was found, for messages.
    fn place(&self) -> String {
        self.path.as_ref().map_or("the host itself".to_owned(), |path| path.display().to_string())
    }
}

impl fmt::Debug for Found {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({})", self.name, self.place())
    }
}

/// A library, or a folder to search, that was not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The library or folder; the host's own file for a linked family.
    pub path: PathBuf,
    /// Why, and what to do.
    pub reason: String,
}

impl Refused {
    pub(super) fn new(path: &Path, reason: impl Into<String>) -> Self {
        Self { path: path.to_owned(), reason: reason.into() }
    }
}

/// The families that were found, and what was refused. One bad plugin never stops the others.
#[derive(Debug, Default)]
pub struct Registry {
    families: Vec<Found>,
    refused: Vec<Refused>,
}

impl Registry {
    /// Takes the families linked into the host, then those of every library that
    /// [`search`](super::search) finds.
    ///
    /// Install the tracing subscriber first: plugins are handed the one that is there now.
    pub fn discover(plugin_dirs: &[PathBuf]) -> Self {
        let mut registry = Self::linked();
        let (files, refused) = discover::search(plugin_dirs);
        registry.refused.extend(refused);
        for file in files {
            registry.load(&file);
        }
        registry
    }

    /// Takes only the families linked into the host.
    pub fn linked() -> Self {
        let mut registry = Self::default();
        for family in plugin::linked_families() {
            registry.take(family.map_err(|error| error.to_string()), None);
        }
        registry
    }

    /// Loads the library at `path`. Its families are added; what is wrong with it goes to
    /// [`Registry::refused`].
    pub fn load(&mut self, path: &Path) {
        let loaded = load::load(path);
        for reason in loaded.refused {
            self.take(Err(reason), Some(path));
        }
        for family in loaded.families {
            self.take(Ok(family), Some(path));
        }
    }

    fn take(&mut self, family: Result<Box<dyn ModelFamily>, String>, path: Option<&Path>) {
        match family.and_then(|family| self.admit(family, path)) {
            Ok(found) => {
                tracing::debug!(family = found.name, place = found.place(), "found a model family");
                self.families.push(found);
            }
            Err(reason) => {
                let path = match path {
                    Some(path) => path.to_owned(),
                    None => std::env::current_exe().unwrap_or_default(),
                };
                tracing::debug!(path = %path.display(), reason, "refused a plugin");
                self.refused.push(Refused { path, reason });
            }
        }
    }

    fn admit(&self, family: Box<dyn ModelFamily>, path: Option<&Path>) -> Result<Found, String> {
        let name = family.name();
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || !name.chars().all(allowed) {
            return Err(format!(
                "offers a family called '{name}'; a name is lower case letters, digits and dashes"
            ));
        }
        let model_types = family.model_types();
        for other in &self.families {
            if other.name == name {
                return Err(format!(
                    "offers the family '{name}', which {} offers too; the first one is kept, so \
                     remove one of the two",
                    other.place()
                ));
            }
            if let Some(taken) = model_types.iter().find(|t| other.model_types.contains(t)) {
                return Err(format!(
                    "opens the model_type '{taken}', which {} opens too; the first one is kept, so \
                     remove one of the two",
                    other.place()
                ));
            }
        }
        let sizes = family.sizes().map_err(|error| error.to_string())?;
        let path = path.map(Path::to_owned);
        let family = plugin::guard_scopes(family);
        Ok(Found { name, path, model_types, sizes, family })
    }

    /// The families in the order in which they were found.
    pub fn families(&self) -> &[Found] {
        &self.families
    }

    /// What was not used, and why.
    pub fn refused(&self) -> &[Refused] {
        &self.refused
    }

    /// The family called `name`.
    ///
    /// # Errors
    /// [`Error::Usage`] lists the families that there are, and what was refused.
    pub fn family(&self, name: &str) -> Result<&Found> {
        self.families.iter().find(|found| found.name == name).ok_or_else(|| {
            Error::usage(format!("family '{name}' is not known; families found: {}", self.known()))
        })
    }

    /// The family that opens a `config.json`, by its `model_type`.
    ///
    /// # Errors
    /// [`Error::File`] when the text is no configuration, [`Error::UnknownModelType`] when no family
    /// takes it.
    pub fn family_of(&self, config_json: &str) -> Result<&Found> {
        let model_type = model_type(config_json)?;
        self.families
            .iter()
            .find(|found| found.model_types.contains(&model_type))
            .ok_or_else(|| Error::UnknownModelType { found: model_type, known: self.known() })
    }

    /// A model from the text of its `config.json`, by its `model_type`.
    ///
    /// # Errors
    /// As [`Registry::family_of`] and [`ModelFamily::open`].
    pub fn open_model(&self, config_json: &str, options: &ModelOptions) -> Result<Box<dyn Model>> {
        self.family_of(config_json)?.family().open(config_json, options)
    }

    /// The families, their model types, and how many plugins were refused, for messages.
    fn known(&self) -> String {
        let family = |found: &Found| format!("{} ({})", found.name, found.model_types.join(", "));
        let mut known = match self.families.is_empty() {
            true => "none".to_owned(),
            false => self.families.iter().map(family).collect::<Vec<_>>().join(", "),
        };
        if !self.refused.is_empty() {
            let refused = self.refused.len();
            known += &format!("; {refused} refused, see `blockstreamer families`");
        }
        known
    }
}

/// The `model_type` of a `config.json`.
///
/// # Errors
/// [`Error::File`] when the text is no configuration.
pub fn model_type(config_json: &str) -> Result<String> {
    #[derive(Deserialize)]
    struct Config {
        model_type: String,
    }
    let config: Config = serde_json::from_str(config_json)
        .map_err(|error| Error::file("config.json", format!("{error}")))?;
    Ok(config.model_type)
}

#[cfg(test)]
mod tests {
    use blockstreamer_core::family::ChatFormat;
    use blockstreamer_core::inventory;
    use blockstreamer_core::plugin::FamilyEntry;

    use super::*;

    /// A family with this name.
    struct Named(&'static str);

    impl ModelFamily for Named {
        fn name(&self) -> String {
            self.0.to_owned()
        }

        fn model_types(&self) -> Vec<String> {
            vec![format!("{}_type", self.0)]
        }

        fn sizes(&self) -> Result<Vec<FamilySize>> {
            Ok(Vec::new())
        }

        fn open(&self, config_json: &str, _options: &ModelOptions) -> Result<Box<dyn Model>> {
            panic!("asked to open {config_json}")
        }

        fn chat_format(&self, _config_json: &str) -> Result<ChatFormat> {
            Err(Error::NotSupported { operation: "chat_format", implementer: self.0.to_owned() })
        }
    }

    fn refuse_to_be_made() -> Box<dyn ModelFamily> {
        panic!("not today")
    }

    inventory::submit! { FamilyEntry { package: "good", make: || Box::new(Named("linked")) } }
    inventory::submit! { FamilyEntry { package: "bad", make: refuse_to_be_made } }

    #[test]
    fn a_linked_family_is_found_and_guarded_like_a_loaded_one() {
        let registry = Registry::linked();
        let found = registry.family("linked").unwrap();
        assert_eq!(found.path, None);
        let error = registry
            .open_model(r#"{"model_type": "linked_type"}"#, &ModelOptions::default())
            .unwrap_err();
        assert!(matches!(&error, Error::PluginPanic { method: "open", .. }), "{error}");
        let listing = crate::commands::families::to_json(&registry);
        assert_eq!(listing["families"][0]["linked"], true);
        assert!(crate::commands::families::to_table(&registry).contains("  linked\n"));

        let own = std::env::current_exe().unwrap();
        let refused: Vec<_> = registry.refused().iter().collect();
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert_eq!(refused[0].path, own);
        assert!(refused[0].reason.contains("'bad' panicked in register: not today"));
    }

    #[test]
    fn names_that_cannot_be_typed_and_model_types_that_are_taken_are_refused() {
        let mut registry = Registry::default();
        for name in ["", "Upper", "a b", "x:y"] {
            registry.take(Ok(Box::new(Named(name))), Some(Path::new("/p.so")));
        }
        assert_eq!((registry.families().len(), registry.refused().len()), (0, 4));
        registry.take(Ok(Box::new(Named("glm-4"))), Some(Path::new("/p.so")));
        registry.take(Ok(Box::new(Named("glm-4"))), Some(Path::new("/q.so")));
        assert_eq!(registry.families().len(), 1);
        let last = &registry.refused()[4];
        assert_eq!(last.path, Path::new("/q.so"));
        assert!(last.reason.contains("/p.so"), "{}", last.reason);
    }
}
