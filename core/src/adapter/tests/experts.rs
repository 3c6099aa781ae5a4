use super::*;
use crate::device::grad;
use crate::execute::{BlockScope, Residents};
use crate::numerics::{AttentionKernel, ExpertKernel};
use crate::scope::{ExpertActivation, ExpertShape, GateUp, Routing, Scope};
use crate::state::NamedTensors;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens").join(name)
}

fn site(block: usize, kind: SiteKind, path: &str, [out_features, in_features]: [usize; 2]) -> Site {
    let (block, module) = (BlockIndex(block), path.to_owned());
    let local = path.strip_suffix(".weight").unwrap_or(path).to_owned();
    Site { block, layer: Some(0), local, module, kind, is_vision: false, in_features, out_features }
}

/// The block of `make_peft_experts.py`: its router, and its experts dealt over `groups` blocks.
fn peft_sites(groups: usize) -> Vec<Site> {
    let mut sites = vec![site(0, SiteKind::Parameter, "mlp.gate.weight", [4, 16])];
    for group in 0..groups {
        let experts = group * 4 / groups..(group + 1) * 4 / groups;
        let kind = SiteKind::Experts { num_experts: 4, experts };
        let mut part = |path, shape| sites.push(site(group, kind.clone(), path, shape));
        part("mlp.experts.gate_up_proj", [24, 16]);
        part("mlp.experts.down_proj", [16, 12]);
    }
    sites
}

/// The adapted block, in `groups` parts: its output, and its input with a graph between them.
fn run(lora: &Lora, gold: &NamedTensors, groups: usize) -> (Tensor, Tensor) {
    let residents = Residents::default();
    let x = gold.get("x").unwrap().view([7, 16]).set_requires_grad(true);
    let mut sum = None;
    let mut routing = None;
    for group in 0..groups {
        let (start, len) = (group * 4 / groups, 4 / groups);
        let part = |name| gold.get(name).unwrap().narrow(0, start as i64, len as i64);
        let tensors = NamedTensors::new()
            .with("mlp.gate.weight", gold.get("mlp.gate.weight").unwrap().shallow_clone())
            .with("mlp.experts.gate_up_proj", part("mlp.experts.gate_up_proj"))
            .with("mlp.experts.down_proj", part("mlp.experts.down_proj"));
        let scope = BlockScope {
            block: Some(BlockIndex(group)),
            block_name: "layer",
            tensors: &tensors,
            residents: &residents,
            adapter: Some(lora),
            dropout_seed: Some(1),
            compute_kind: Kind::Float,
            device: CPU,
            attention: AttentionKernel::Eager,
            experts: ExpertKernel::Grouped,
        };
        let routing = routing.get_or_insert_with(|| {
            let probabilities = scope.linear("mlp.gate", &x).unwrap().softmax(-1, Kind::Float);
            let (weights, experts) = probabilities.topk(2, -1, true, true);
            let total = weights.sum_dim_intlist([-1_i64].as_slice(), true, Kind::Float);
            Routing { experts, weights: weights / total }
        });
        let shape = ExpertShape {
            experts: start..start + len,
            gate_up: GateUp::Concatenated,
            activation: ExpertActivation::Silu,
        };
        sum = Some(scope.experts("mlp.experts", &x, routing, &shape, sum.as_ref()).unwrap());
    }
    (x, sum.unwrap())
}

fn assert_near(found: &Tensor, wanted: &Tensor, what: &str) {
    let error = (found - wanted.view_as(found)).abs().max().double_value(&[]);
    let scale = wanted.abs().max().double_value(&[]);
    assert!(scale > 0.0 && error < 1e-5 * scale, "{what}: {error} of {scale}");
}

#[test]
fn adapters_of_peft_on_router_and_experts_compute_what_peft_computes_and_come_out_again() {
    let gold = crate::checkpoint::read_safetensors(&folder("peft_experts/block.safetensors"));
    let gold = gold.unwrap();
    for (case, parameters) in [("all", 3), ("down", 1), ("gate_up", 1)] {
        for groups in [1, 2] {
            let directory = folder("peft_experts").join(case);
            let lora = Lora::import(&directory, &peft_sites(groups), CPU).unwrap();
            assert_eq!((lora.parameters().len(), lora.modules().len()), (parameters, 0));
            let (x, output) = run(&lora, &gold, groups);
            assert_near(&output, gold.get(&format!("{case}.output")).unwrap(), case);
            let mut leaves = vec![&x];
            leaves.extend(lora.trainables().iter().map(|trainable| &trainable.tensor));
            let seed = gold.get("grad_output").unwrap().view([7, 16]);
            let found = grad(&[&output], &[&seed], &leaves).unwrap();
            let names = lora.trainables().iter().map(|t| format!("{case}.grad.{}", t.name));
            let names = [format!("{case}.grad_x")].into_iter().chain(names);
            for (name, found) in names.zip(found) {
                assert_near(&found.unwrap(), gold.get(&name).unwrap(), &name);
            }

            let out = tempfile::tempdir().unwrap();
            lora.export(out.path(), "base").unwrap();
            assert_eq!(tensors_of(out.path()), tensors_of(&directory));
            let again = Lora::import(out.path(), &peft_sites(groups), CPU).unwrap();
            assert_eq!(again.parameters(), lora.parameters());
            assert_eq!(again.shape(), lora.shape());
        }
    }
}

/// Sites of the golden MoE checkpoint: layer 1 is dense, the experts of the others are in two blocks each.
fn moe_sites() -> Vec<Site> {
    let mut sites = Vec::new();
    for layer in 0..4 {
        let mut add = |block: usize, local: &str, kind, shape| {
            let mut site = site(3 * layer + block, kind, local, shape);
            site.module = format!("model.language_model.layers.{layer}.{local}");
            site.layer = Some(layer);
            sites.push(site);
        };
        for (name, shape) in [("q", [128, 64]), ("k", [64, 64]), ("v", [64, 64]), ("o", [64, 128])]
        {
            add(0, &format!("self_attn.{name}_proj"), SiteKind::Linear, shape);
        }
        if layer == 1 {
            for (name, shape) in [("gate", [160, 64]), ("up", [160, 64]), ("down", [64, 160])] {
                add(0, &format!("mlp.{name}_proj"), SiteKind::Linear, shape);
            }
            continue;
        }
        add(0, "mlp.gate.weight", SiteKind::Parameter, [8, 64]);
        for group in 0..2 {
            let experts = group * 4..group * 4 + 4;
            let kind = SiteKind::Experts { num_experts: 8, experts };
            add(1 + group, "mlp.experts.gate_up_proj", kind.clone(), [96, 64]);
            add(1 + group, "mlp.experts.down_proj", kind, [64, 48]);
        }
    }
    for (name, shape) in [("attn.qkv", [192, 64]), ("mlp.linear_fc1", [96, 64])] {
        let mut tower = site(20, SiteKind::Linear, name, shape);
        tower.module = format!("model.visual.blocks.0.{name}");
        (tower.layer, tower.is_vision) = (None, true);
        sites.push(tower);
    }
    sites
}

#[test]
fn the_golden_adapter_with_fused_experts_comes_out_again_bit_for_bit() {
    let directory = folder("qwen3_vl_moe/adapter");
    let lora = Lora::import(&directory, &moe_sites(), CPU).unwrap();
    assert_eq!((lora.modules().len(), lora.parameters().len()), (16, 6));
    let out = tempfile::tempdir().unwrap();
    lora.export(out.path(), "base").unwrap();
    assert_eq!(tensors_of(out.path()), tensors_of(&directory));
    let fused = lora.trainables().iter().find(|t| t.tensor.size() == [96, 32]).unwrap();
    assert!(fused.name.ends_with("layers.0.mlp.experts.base_layer.lora_B.weight"));
    assert_eq!(fused.blocks, [BlockIndex(1), BlockIndex(2)]);
    // The second half: expert 5 of the layer has columns 5, 13, 21, 29 of B and rows 20 to 23 of A.
    let call = call(2, "mlp.experts.gate_up_proj", None);
    let factors = lora.expert_factors(call, 4..8, Kind::Float).unwrap().unwrap();
    let columns = Tensor::from_slice(&[5_i64, 13, 21, 29]);
    assert_eq!(factors.b.get(1), fused.tensor.index_select(1, &columns));
    let a = lora.trainables().iter().find(|t| t.name == fused.name.replace("_B", "_A")).unwrap();
    assert_eq!(factors.a.get(1), a.tensor.narrow(0, 20, 4));
    let message = lora.expert_factors(call, 4..9, Kind::Float).unwrap_err().to_string();
    assert!(message.contains("4..9") && message.contains("has 8"), "{message}");
}

fn parameters(names: &[&str]) -> LoraOptions {
    let target_parameters = names.iter().map(|name| (*name).to_owned()).collect();
    LoraOptions {
        target_parameters,
        target_modules: ModuleRule::names([""; 0]),
        ..Default::default()
    }
}

fn made(options: &LoraOptions) -> Result<Lora> {
    Lora::new(&moe_sites(), options, CPU)
}

fn refused(options: &LoraOptions) -> String {
    made(options).unwrap_err().to_string()
}

#[test]
fn parameters_are_chosen_by_the_end_of_their_path_and_by_layer() {
    let lora = made(&parameters(&["mlp.experts.down_proj", "mlp.gate.weight"])).unwrap();
    assert_eq!(lora.parameters().len(), 6);
    // 8 experts of rank 8; drawn from U(-b, b) with b = 1 / sqrt(48), B zero.
    let a = lora.trainables().iter().find(|t| t.tensor.size() == [64, 48]).unwrap();
    let largest = a.tensor.abs().max().double_value(&[]) * 48_f64.sqrt();
    assert!(largest <= 1.0 && largest > 0.98, "{largest}");
    let b = lora.trainables().iter().find(|t| t.name.contains("experts.lora_B")).unwrap();
    assert_eq!((b.tensor.size(), b.tensor.abs().max().double_value(&[])), (vec![64, 64], 0.0));
    let again = made(&parameters(&["mlp.experts.down_proj"])).unwrap();
    let same = again.trainables().iter().find(|t| t.name == a.name).unwrap();
    assert_eq!(same.tensor, a.tensor);

    let last = LoraOptions { layers: LayerRule::TopFraction(0.5), ..parameters(&["gate_up_proj"]) };
    assert_eq!(made(&last).unwrap().parameters().len(), 2);
    // As in peft: "down_proj" is the dense layer's linear as a module, and the experts' as a parameter.
    let both = LoraOptions {
        target_modules: ModuleRule::names(["down_proj"]),
        ..parameters(&["experts.down_proj"])
    };
    let both = made(&both).unwrap();
    assert_eq!((both.modules().len(), both.parameters().len()), (1, 3));
    // A linear is reached by its weight, too.
    let weight = made(&parameters(&["layers.1.mlp.up_proj.weight"])).unwrap();
    assert_eq!(weight.parameters(), ["model.language_model.layers.1.mlp.up_proj.weight"]);
    assert!(weight.trainables()[0].name.ends_with("layers.1.mlp.up_proj.lora_A.weight"));
}

#[test]
fn modules_never_take_routers_or_experts_and_the_tower_only_when_asked() {
    let modules =
        |target_modules, vision| LoraOptions { target_modules, vision, ..Default::default() };
    let text = made(&modules(ModuleRule::all_linear(), false)).unwrap();
    assert_eq!((text.modules().len(), text.parameters().len()), (19, 0));
    let with_tower = made(&modules(ModuleRule::all_linear(), true)).unwrap();
    assert_eq!(with_tower.modules().len(), 21);
    // Names and expressions take the tower as peft does, whichever layers are chosen.
    for rule in [ModuleRule::names(["qkv", "linear_fc1"]), ModuleRule::Pattern(".*visual.*".into())]
    {
        let options = modules(rule, false);
        assert_eq!(made(&options).unwrap().modules().len(), 2);
        let top = LoraOptions { layers: LayerRule::TopFraction(0.25), ..options };
        assert_eq!(made(&top).unwrap().modules().len(), 2);
    }
    let top = modules(ModuleRule::all_linear(), true);
    let top = made(&LoraOptions { layers: LayerRule::TopFraction(0.25), ..top }).unwrap();
    assert_eq!(top.modules().len(), 4 + 2);
    assert_eq!(
        made(&modules(ModuleRule::Pattern(".*".into()), false)).unwrap().modules().len(),
        21
    );

    for name in ["experts.down_proj", "mlp.gate"] {
        let message = refused(&modules(ModuleRule::names([name]), false));
        assert!(message.contains(&format!("'{name}' matches no linear")), "{message}");
        assert!(message.contains("mlp.experts.gate_up_proj, mlp.gate.weight"), "{message}");
    }
    let message = refused(&modules(ModuleRule::names(["q_proj"]), true));
    assert!(message.contains("vision = true"), "{message}");
    let options = modules(ModuleRule::all_linear(), true);
    let message = Lora::new(&golden_sites(), &options, CPU).unwrap_err().to_string();
    assert!(message.contains("no vision tower"), "{message}");
}

#[test]
fn parameters_that_match_nothing_twice_or_with_dropout_are_refused() {
    let message = refused(&parameters(&["experts.w1"]));
    assert!(message.contains("'experts.w1'") && message.contains("mlp.gate.weight"), "{message}");
    assert!(refused(&parameters(&[])).contains("both empty"));
    let options = LoraOptions { layers: LayerRule::Only(vec![1]), ..parameters(&["gate_up_proj"]) };
    assert!(refused(&options).contains("nothing in the chosen layers"));
    let shape = LoraShape { dropout: 0.1, ..Default::default() };
    let message = refused(&LoraOptions { shape, ..parameters(&["gate_up_proj"]) });
    assert!(message.contains("dropout must be 0 with target_parameters"), "{message}");
    let twice = LoraOptions {
        target_modules: ModuleRule::names(["q_proj"]),
        ..parameters(&["self_attn.q_proj.weight"])
    };
    assert!(refused(&twice).contains("name it in one"));
}

#[test]
fn factors_that_older_peft_exchanged_are_refused_by_shape_or_by_version() {
    let source = folder("qwen3_vl_moe/adapter");
    let copy = |change: &dyn Fn(&mut Value)| {
        let folder = tempfile::tempdir().unwrap();
        let name = "adapter_model.safetensors";
        fs::copy(source.join(name), folder.path().join(name)).unwrap();
        let bytes = fs::read(source.join("adapter_config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&bytes).unwrap();
        change(&mut config);
        fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
        folder
    };
    let whole = copy(&|_| {});
    let mut exchanged = moe_sites();
    for site in exchanged.iter_mut().filter(|site| site.local == "mlp.experts.gate_up_proj") {
        std::mem::swap(&mut site.in_features, &mut site.out_features);
    }
    let message = Lora::import(whole.path(), &exchanged, CPU).unwrap_err().to_string();
    assert!(message.contains("base_layer.lora_A") && message.contains("0.19"), "{message}");

    let mut square = moe_sites();
    for site in square.iter_mut().filter(|site| site.local == "mlp.experts.down_proj") {
        site.in_features = 64;
    }
    for version in [json!("0.18.1"), Value::Null] {
        let old = copy(&|config| config["peft_version"] = version.clone());
        let message = Lora::import(old.path(), &square, CPU).unwrap_err().to_string();
        assert!(message.contains("peft_version is") && message.contains("0.19"), "{message}");
        // Where shapes tell, the version does not matter.
        assert!(Lora::import(old.path(), &moe_sites(), CPU).is_ok());
    }
    let lacking = copy(&|config| config["target_parameters"] = Value::Null);
    let message = Lora::import(lacking.path(), &moe_sites(), CPU).unwrap_err().to_string();
    assert!(message.contains("12 of 44 tensors fit no linear"), "{message}");
}
