//! Host and plugins in one process: panics, libtorch, autograd mode and tracing.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::fs;
use std::sync::{Arc, Mutex};

use blockstreamer_core::batch::Batch;
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::context::Context;
use blockstreamer_core::family::{Model, ModelOptions};
use blockstreamer_core::scope::{AttentionOptions, ExpertShape, Routing, Scope};
use blockstreamer_core::state::{HIDDEN, State};
use blockstreamer_core::{Error, Result};
use blockstreamer_host::plugins::Registry;
use blockstreamer_tests::built;
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context as LayerContext, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// The host's side of a block: every linear doubles, except that the head of this host is broken.
struct Doubling;

impl Scope for Doubling {
    fn linear(&self, site: &str, x: &Tensor) -> Result<Tensor> {
        assert_ne!(site, "lm_head", "a fault of the host");
        Ok(x.f_mul_scalar(2.0)?)
    }

    fn embedding(&self, _site: &str, ids: &Tensor) -> Result<Tensor> {
        Ok(ids.f_to_kind(Kind::Float)?)
    }

    fn tensor(&self, name: &str) -> Result<Tensor> {
        Err(Error::tensor(name, "is not in this block"))
    }

    fn stored_tensor(&self, name: &str) -> Result<Tensor> {
        self.tensor(name)
    }

    fn attention(
        &self,
        _site: &str,
        query: &Tensor,
        _key: &Tensor,
        _value: &Tensor,
        _context: &Context,
        _options: &AttentionOptions<'_>,
    ) -> Result<Tensor> {
        Ok(query.shallow_clone())
    }

    fn experts(
        &self,
        _site: &str,
        x: &Tensor,
        _routing: &Routing,
        _shape: &ExpertShape,
        _sum: Option<&Tensor>,
    ) -> Result<Tensor> {
        Ok(x.shallow_clone())
    }

    fn compute_kind(&self) -> Kind {
        Kind::Float
    }

    fn device(&self) -> Device {
        Device::Cpu
    }
}

/// A registry with copies of both plugins, each copy with statics of its own.
fn both_plugins() -> (Registry, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let mut registry = Registry::default();
    for plugin in [built::misbehave(), built::well_behaved()] {
        let copy = folder.path().join(plugin.file_name().unwrap());
        fs::copy(plugin, &copy).unwrap();
        registry.load(&copy);
    }
    assert_eq!(registry.refused(), []);
    (registry, folder)
}

fn open(registry: &Registry, model_type: &str, panic_in: &str) -> Result<Box<dyn Model>> {
    let config = format!(r#"{{"model_type": "{model_type}", "panic_in": "{panic_in}"}}"#);
    registry.open_model(&config, &ModelOptions::default())
}

fn counting() -> Tensor {
    Tensor::arange(4, (Kind::Float, Device::Cpu))
}

fn hidden() -> State {
    State::new().with(HIDDEN, counting())
}

fn forward(model: &dyn Model, state: State) -> Result<State> {
    model.forward_block(BlockIndex(3), &Doubling, &Context::default(), state)
}

/// The result is the panic of `method`, as an error.
fn assert_panicked<T: Debug>(result: Result<T>, method: &str) {
    match result {
        Err(Error::PluginPanic { plugin, method: found, message }) => {
            assert_eq!((&*plugin, found), ("misbehave", method));
            assert_eq!(message, format!("asked to panic in {method}"));
        }
        other => panic!("{method}: {other:?}"),
    }
}

#[test]
fn a_panic_in_any_method_comes_back_as_an_error_and_the_plugin_goes_on() {
    let (registry, _folder) = both_plugins();
    let model = |panic_in| open(&registry, "misbehave", panic_in).unwrap();

    assert_panicked(open(&registry, "misbehave", "open"), "open");
    assert_panicked(open(&registry, "misbehave", "dimensions"), "dimensions");
    let family = registry.family("misbehave").unwrap().family();
    assert_panicked(family.chat_format(r#"{"panic_in": "chat_format"}"#), "chat_format");
    let panics = r#"{"panic_in": "processor_files"}"#;
    assert_panicked(family.processor_files(panics), "processor_files");
    let files = family.processor_files(r#"{"panic_in": ""}"#).unwrap();
    assert_eq!(files[0].0, "processor.json");

    assert_panicked(model("weights").weights(), "weights");
    assert_panicked(model("ignores").ignores("x"), "ignores");
    assert_panicked(model("sites").sites(), "sites");
    let batch = Batch::new(Tensor::arange(4, (Kind::Int64, Device::Cpu)));
    assert_panicked(model("embed").embed(&Doubling, &batch), "embed");
    assert_panicked(forward(&*model("forward_block"), hidden()), "forward_block");
    let context = Context::default();
    let last = model("final_hidden").final_hidden(&Doubling, &context, hidden());
    assert_panicked(last, "final_hidden");
    assert_panicked(model("logits").logits(&Doubling, &counting()), "logits");

    let text = format!("{:?}", model("fmt"));
    assert!(text.contains("panicked in fmt"), "{text}");
    drop(model("drop"));

    let good = model("nothing");
    assert_eq!(good.dimensions().hidden_size, 4);
    assert_eq!(good.sites().unwrap()[0].local, "up");
    assert!(good.ignores("ignored").unwrap() && !good.ignores("other").unwrap());
    assert!(forward(&*good, hidden()).is_ok());
}

#[test]
fn an_error_passes_through_a_plugin_unchanged() {
    let (registry, _folder) = both_plugins();
    let model = open(&registry, "well_behaved", "nothing").unwrap();
    let error = forward(&*model, State::new()).unwrap_err();
    assert!(matches!(&error, Error::Tensor { tensor, .. } if tensor == HIDDEN), "{error}");
}

#[test]
fn a_panic_of_the_host_inside_a_plugins_call_comes_back_as_an_error() {
    let (registry, _folder) = both_plugins();
    let model = open(&registry, "well_behaved", "nothing").unwrap();
    match model.logits(&Doubling, &counting()) {
        Err(Error::PluginPanic { plugin, method: "Scope::linear", message }) => {
            assert_eq!(plugin, "host");
            assert!(message.contains("a fault of the host"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    assert!(forward(&*model, hidden()).is_ok());
}

#[test]
fn host_and_two_plugins_share_one_libtorch() {
    let (registry, _folder) = both_plugins();
    // Made in the host, doubled by the host's scope and increased in one plugin, then in the other.
    let first = open(&registry, "misbehave", "nothing").unwrap();
    let second = open(&registry, "well_behaved", "nothing").unwrap();
    let state = forward(&*second, forward(&*first, hidden()).unwrap()).unwrap();
    let values = Vec::<f32>::try_from(state.get(HIDDEN).unwrap()).unwrap();
    assert_eq!(values, [3.0, 7.0, 11.0, 15.0]);

    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let libtorch: BTreeSet<_> = maps
        .lines()
        .filter(|line| line.ends_with("/libtorch_cpu.so"))
        .filter_map(|line| line.split_whitespace().last())
        .collect();
    assert_eq!(libtorch.len(), 1, "{libtorch:?}");
    for plugin in ["libmisbehave.so", "libwell_behaved.so"] {
        assert!(maps.contains(plugin), "{plugin} is not mapped");
    }
}

#[test]
fn the_hosts_autograd_mode_holds_inside_plugins_and_gradients_flow_through_them() {
    let (registry, _folder) = both_plugins();
    let grad_enabled =
        |state: &State| bool::try_from(state.get("grad_enabled").unwrap().squeeze()).unwrap();
    for model_type in ["misbehave", "well_behaved"] {
        let model = open(&registry, model_type, "nothing").unwrap();
        assert!(grad_enabled(&forward(&*model, hidden()).unwrap()));
        let without = tch::no_grad(|| forward(&*model, hidden()).unwrap());
        assert!(!grad_enabled(&without), "{model_type} recorded a graph under no_grad");
        assert!(grad_enabled(&forward(&*model, hidden()).unwrap()));

        let input = counting().set_requires_grad(true);
        let state = State::new().with(HIDDEN, input.shallow_clone());
        let output = forward(&*model, state).unwrap();
        output.get(HIDDEN).unwrap().sum(Kind::Float).backward();
        assert_eq!(Vec::<f32>::try_from(input.grad()).unwrap(), [2.0; 4]);
    }
}

/// Text of an event, and the spans around it, innermost first.
type Recorded = (String, Vec<&'static str>);

/// Keeps every event.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<Recorded>>>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Recorder {
    fn on_event(&self, event: &Event<'_>, context: LayerContext<'_, S>) {
        let mut text = String::new();
        event.record(&mut |field: &tracing::field::Field, value: &dyn Debug| {
            text += &format!("{field}={value:?} ");
        });
        let spans = context.event_scope(event).into_iter().flatten().map(|span| span.name());
        self.0.lock().unwrap().push((text, spans.collect()));
    }
}

#[test]
fn an_event_inside_a_plugin_reaches_the_hosts_subscriber_within_the_hosts_spans() {
    let recorder = Recorder::default();
    let subscriber = tracing_subscriber::registry().with(recorder.clone());
    tracing::subscriber::with_default(subscriber, || {
        let (registry, _folder) = both_plugins();
        for model_type in ["misbehave", "well_behaved"] {
            let model = open(&registry, model_type, "nothing").unwrap();
            tracing::info_span!("step").in_scope(|| {
                tracing::info_span!("visit").in_scope(|| forward(&*model, hidden()).unwrap());
            });
            let broken = open(&registry, model_type, "logits").unwrap();
            assert!(broken.logits(&Doubling, &counting()).is_err());
        }
    });
    let events = recorder.0.lock().unwrap();
    let inside: Vec<_> =
        events.iter().filter(|event| event.0.contains("inside the plugin")).collect();
    assert_eq!(inside.len(), 2, "{events:?}");
    for (text, spans) in inside {
        assert!(text.contains("block=3") && text.contains("grad_enabled=true"), "{text}");
        assert_eq!(spans, &["visit", "step"]);
    }
    let panics = events.iter().filter(|event| event.0.contains("asked to panic in logits"));
    assert_eq!(panics.count(), 2, "{events:?}");
}
