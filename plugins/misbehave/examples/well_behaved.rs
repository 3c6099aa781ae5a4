//! A plugin as a third party writes it: a family, a model, one macro.

#[path = "../src/probe.rs"]
mod probe;

use blockstreamer_core::family::{ChatFormat, FamilySize, Model, ModelFamily, ModelOptions};
use blockstreamer_core::{Error, Result, export_family};

use probe::Probe;

struct WellBehaved;

impl ModelFamily for WellBehaved {
    fn name(&self) -> String {
        "well-behaved".into()
    }

    fn model_types(&self) -> Vec<String> {
        vec!["well_behaved".into()]
    }

    fn sizes(&self) -> Result<Vec<FamilySize>> {
        let config_json = r#"{"model_type": "well_behaved"}"#.into();
        Ok(vec![FamilySize { name: "tiny".into(), config_json }])
    }

    fn open(&self, config_json: &str, _options: &ModelOptions) -> Result<Box<dyn Model>> {
        let panic_in = Probe::panic_in("well-behaved", config_json)?;
        Ok(Box::new(Probe { panic_in }))
    }

    fn chat_format(&self, _config_json: &str) -> Result<ChatFormat> {
        Err(Error::NotSupported { operation: "chat_format", implementer: "well-behaved".into() })
    }
}

export_family!(WellBehaved);
