use super::*;

fn chosen(options: &LoraOptions) -> Vec<String> {
    Lora::new(&golden_sites(), options, CPU).unwrap().modules().to_vec()
}

fn refused(options: &LoraOptions) -> String {
    Lora::new(&golden_sites(), options, CPU).unwrap_err().to_string()
}

fn by(target_modules: ModuleRule) -> LoraOptions {
    LoraOptions { target_modules, ..Default::default() }
}

#[test]
fn names_match_whole_paths_and_ends_after_a_dot() {
    assert_eq!(chosen(&by(ModuleRule::names(["q_proj"]))).len(), 4);
    assert_eq!(chosen(&by(ModuleRule::names(["self_attn.q_proj", "mlp.up_proj"]))).len(), 8);
    assert_eq!(chosen(&by(ModuleRule::names(["lm_head"]))), ["lm_head"]);
    let path = "model.language_model.layers.2.mlp.gate_proj";
    assert_eq!(chosen(&by(ModuleRule::names([path]))), [path]);
    // Neither a part of a name nor a start of a path is enough.
    for name in ["proj", "model.language_model"] {
        let message = refused(&by(ModuleRule::names([name])));
        assert!(message.contains(&format!("'{name}' matches no linear")), "{message}");
    }
}

#[test]
fn a_pattern_must_match_the_whole_path() {
    let pattern = |text: &str| by(ModuleRule::Pattern(text.into()));
    assert_eq!(chosen(&pattern(r".*layers\.(0|2)\..*\.(q|v)_proj")).len(), 4);
    assert_eq!(chosen(&pattern("lm_head|.*up_proj")).len(), 5);
    assert!(refused(&pattern("q_proj")).contains("matches no linear"));
    for text in ["(", "(?!x).*"] {
        let message = refused(&pattern(text));
        assert!(message.contains(&format!("'{text}' is not a regular expression")), "{message}");
    }
}

#[test]
fn all_linear_leaves_out_the_head_alone() {
    for text in ["all-linear", "All-Linear"] {
        let modules = chosen(&by(ModuleRule::Pattern(text.into())));
        assert_eq!(modules.len(), 28);
        assert!(!modules.contains(&"lm_head".into()));
    }
}

#[test]
fn excluded_modules_are_left_out() {
    let excluding = |rule| LoraOptions { exclude_modules: Some(rule), ..Default::default() };
    assert_eq!(chosen(&excluding(ModuleRule::names(["mlp.up_proj"]))).len(), 24);
    assert_eq!(chosen(&excluding(ModuleRule::Pattern(r".*\.mlp\..*".into()))).len(), 16);
    let message = refused(&excluding(ModuleRule::Pattern(".*".into())));
    assert!(message.contains("matches no linear of this model"), "{message}");
}

#[test]
fn layers_are_chosen_from_the_top_or_by_number() {
    let layers = |layers| {
        let targets = ModuleRule::names(["q_proj", "lm_head"]);
        chosen(&LoraOptions { layers, ..by(targets) })
            .iter()
            .map(|module| module.split('.').nth(3).unwrap_or("head").parse().unwrap_or(99))
            .collect::<Vec<usize>>()
    };
    assert_eq!(layers(LayerRule::All), [0, 1, 2, 3, 99]);
    assert_eq!(layers(LayerRule::TopFraction(1.0)), [0, 1, 2, 3]);
    assert_eq!(layers(LayerRule::TopFraction(0.5)), [2, 3]);
    assert_eq!(layers(LayerRule::TopFraction(0.7)), [1, 2, 3]);
    // 4 * 0.625 = 2.5, which rounds to even.
    assert_eq!(layers(LayerRule::TopFraction(0.625)), [2, 3]);
    assert_eq!(layers(LayerRule::TopFraction(0.001)), [3]);
    assert_eq!(layers(LayerRule::Only(vec![2, 0])), [0, 2]);
}

#[test]
fn options_out_of_range_are_refused_with_the_reason() {
    let layers = |layers| LoraOptions { layers, ..Default::default() };
    for fraction in [0.0, -0.5, 1.01, f64::NAN] {
        let message = refused(&layers(LayerRule::TopFraction(fraction)));
        assert!(message.contains("greater than 0 and at most 1"), "{message}");
    }
    assert!(refused(&layers(LayerRule::Only(vec![1, 4]))).contains("has layers 0 to 3"));
    assert!(refused(&layers(LayerRule::Only(vec![]))).contains("matches no linear"));
    let shaped = |shape| refused(&LoraOptions { shape, ..Default::default() });
    let rank = |rank| LoraShape { rank, ..Default::default() };
    assert!(shaped(rank(0)).contains("the rank must be at least 1"));
    for alpha in [0.0, f64::NAN, f64::INFINITY] {
        let message = shaped(LoraShape { alpha, ..Default::default() });
        assert!(message.contains("alpha must be a number greater than 0"), "{message}");
    }
    for dropout in [-0.1, 1.0, f64::NAN] {
        let message = shaped(LoraShape { dropout, ..Default::default() });
        assert!(message.contains("dropout must be at least 0 and below 1"), "{message}");
    }
}

#[test]
fn a_target_that_matches_nothing_lists_what_there_is() {
    let message = refused(&by(ModuleRule::names(["q_proj", "query"])));
    assert_eq!(
        message,
        "adapter: target module 'query' matches no linear of this model; its linears end in: \
         down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    );
}
