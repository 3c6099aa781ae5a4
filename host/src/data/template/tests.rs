use std::fs;

use super::*;

fn chat(messages: Value) -> Conversation {
    Conversation { messages: messages.as_array().unwrap().clone(), tools: None }
}

fn greeting() -> Conversation {
    chat(json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]))
}

fn template(source: &str) -> Result<ChatTemplate> {
    ChatTemplate::new(source, &BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]))
}

fn rendered(source: &str) -> String {
    template(source).unwrap().render(&greeting(), false).unwrap().text
}

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

fn loaded(files: &[(&str, &str)], chat: &Conversation) -> Result<String> {
    let folder = folder(files);
    match ChatTemplate::find(folder.path(), &BTreeMap::new())? {
        Some(template) => Ok(template.render(chat, false)?.text),
        None => Ok("no template".to_owned()),
    }
}

#[test]
fn the_jinja_file_wins_over_both_json_files() {
    let jinja = ("chat_template.jinja", "A");
    let settings = ("tokenizer_config.json", r#"{"chat_template": "B"}"#);
    let json = ("chat_template.json", r#"{"chat_template": "C"}"#);
    assert_eq!(loaded(&[jinja, settings, json], &greeting()).unwrap(), "A");
    assert_eq!(loaded(&[settings, json], &greeting()).unwrap(), "B");
    assert_eq!(loaded(&[json], &greeting()).unwrap(), "C");
    let bare = ("tokenizer_config.json", "{}");
    assert_eq!(loaded(&[bare, json], &greeting()).unwrap(), "C");
}

#[test]
fn of_named_templates_tool_use_serves_chats_with_tools() {
    let named = r#"{"chat_template": [{"name": "default", "template": "plain"},
                                      {"name": "tool_use", "template": "with {{ tools | length }}"}]}"#;
    let files = [("tokenizer_config.json", named)];
    assert_eq!(loaded(&files, &greeting()).unwrap(), "plain");
    let with_tools = Conversation { tools: Some(vec![json!({})]), ..greeting() };
    assert_eq!(loaded(&files, &with_tools).unwrap(), "with 1");
}

#[test]
fn named_templates_without_a_default_are_listed() {
    let named = r#"{"chat_template": [{"name": "rag", "template": "x"}]}"#;
    let error = loaded(&[("tokenizer_config.json", named)], &greeting()).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json") && error.contains("found: rag"), "{error}");
}

#[test]
fn a_base_model_has_no_template() {
    assert_eq!(loaded(&[], &greeting()).unwrap(), "no template");
    assert_eq!(loaded(&[("tokenizer_config.json", "{}")], &greeting()).unwrap(), "no template");
}

#[test]
fn malformed_files_are_named() {
    let json = loaded(&[("tokenizer_config.json", "{")], &greeting()).unwrap_err().to_string();
    assert!(json.contains("tokenizer_config.json: not valid JSON"), "{json}");
    let number = loaded(&[("chat_template.json", r#"{"chat_template": 3}"#)], &greeting());
    assert!(number.unwrap_err().to_string().contains("chat_template is a number"));
    let syntax = loaded(&[("chat_template.jinja", "one\n{% if %}")], &greeting());
    let syntax = syntax.unwrap_err().to_string();
    assert!(syntax.contains("chat_template.jinja") && syntax.contains(":2"), "{syntax}");
}

#[test]
fn what_a_template_raises_reaches_the_user() {
    let template = template("{{ raise_exception('roles must alternate') }}").unwrap();
    let error = template.render(&greeting(), false).unwrap_err().to_string();
    assert!(error.contains("roles must alternate"), "{error}");
}

#[test]
fn tojson_takes_the_options_of_transformers_and_refuses_others() {
    assert_eq!(rendered("{{ '<é>' | tojson }}"), "\"<é>\"");
    assert_eq!(
        rendered("{{ {'b': 1, 'a': '<é>'} | tojson(true) }}"),
        r#"{"b": 1, "a": "<\u00e9>"}"#
    );
    let options =
        "{{ {'b': [1], 'a': 2} | tojson(indent='-', separators=['; ', '='], sort_keys=true) }}";
    assert_eq!(rendered(options), "{\n-\"a\"=2; \n-\"b\"=[\n--1\n-]\n}");
    for wrong in [
        "{{ 1 | tojson(width=3) }}",
        "{{ missing | tojson }}",
        "{{ 1 | tojson(separators=['a']) }}",
    ] {
        assert!(template(wrong).unwrap().render(&greeting(), false).is_err(), "{wrong}");
    }
}

#[test]
fn special_tokens_and_the_date_are_at_hand() {
    assert_eq!(rendered("{{ bos_token }}|{{ eos_token }}|"), "<s>||");
    let year: u32 = rendered("{{ strftime_now('%Y') }}").parse().unwrap();
    assert!(year >= 2025);
    let error = template("{{ strftime_now('%E') }}").unwrap().render(&greeting(), false);
    assert!(error.unwrap_err().to_string().contains("%E"));
    // As Python's datetime prints it.
    let every = "{{ strftime_now('%Y-%m-%d %H:%M:%S %a %A %b %B %-d %I %p %y %% %F %T') }}";
    let leap_day = template(every).unwrap().on(jiff::civil::date(2024, 2, 29));
    let text = leap_day.render(&greeting(), false).unwrap().text;
    assert_eq!(
        text,
        "2024-02-29 00:00:00 Thu Thursday Feb February 29 12 AM 24 % 2024-02-29 00:00:00"
    );
}

#[test]
fn names_set_in_a_generation_block_stay_in_it() {
    let source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}";
    let rendered = template(source).unwrap().render(&greeting(), false).unwrap();
    assert_eq!(
        rendered,
        Rendered { text: "21".into(), generated: vec![Range { start: 0, end: 1 }] }
    );
}

#[test]
fn private_use_characters_in_a_chat_are_not_taken_for_marks() {
    let source =
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}";
    let chat = chat(
        json!([{"role": "user", "content": "\u{e000}\u{e001}"}, {"role": "assistant", "content": "\u{e001}"}]),
    );
    let rendered = template(source).unwrap().render(&chat, false).unwrap();
    assert_eq!(rendered.text, "\u{e000}\u{e001};\u{e001};");
    assert_eq!(rendered.generated, vec![0..6, 7..10]);
}

#[test]
fn unbalanced_generation_blocks_are_refused() {
    let open = template("{% generation %}x").unwrap_err().to_string();
    assert!(open.contains("without an {% endgeneration %}"), "{open}");
    let closed = template("x{%- endgeneration -%}").unwrap_err().to_string();
    assert!(closed.contains("without a {% generation %}"), "{closed}");
}

#[test]
fn a_comment_that_mentions_the_block_is_only_a_comment() {
    let template = template("{# {% generation %} #}x").unwrap();
    assert!(!template.marks_generation(&greeting()));
    assert_eq!(template.render(&greeting(), false).unwrap().text, "x");
}

#[test]
fn images_and_videos_become_placeholders_that_can_be_numbered() {
    let qwen = include_str!("../../../../plugins/qwen3-vl/src/chat_template.jinja");
    let parts = json!([{"role": "user", "content": [
        {"type": "image"}, {"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}, {"video": "v"},
    ]}]);
    let text = template(qwen).unwrap().render(&chat(parts.clone()), true).unwrap().text;
    let image = "<|vision_start|><|image_pad|><|vision_end|>";
    let video = "<|vision_start|><|video_pad|><|vision_end|>";
    assert_eq!(
        text,
        format!("<|im_start|>user\n{image}a{image}{video}<|im_end|>\n<|im_start|>assistant\n")
    );
    let numbered = format!("{{% set add_vision_id = true %}}{qwen}");
    let text = template(&numbered).unwrap().render(&chat(parts), false).unwrap().text;
    assert_eq!(
        text,
        format!(
            "<|im_start|>user\nPicture 1: {image}aPicture 2: {image}Video 1: {video}<|im_end|>\n"
        )
    );
}

// What jinja2 3.1.6 printed.
#[test]
fn tests_and_numbers_are_those_of_python() {
    let test = |name: &str| {
        let values = ["none", "1", "true", "'a'", "[]", "{}", "missing"];
        let each = values.map(|value| format!("{{{{ {value} is {name} }}}}"));
        rendered(&each.join(" "))
    };
    assert_eq!(test("iterable"), "False False False True True True True");
    assert_eq!(test("sequence"), "False False False True True True True");
    assert_eq!(
        rendered("{{ 0.00001 }} {{ 2.0 }} {{ 0.5 | string }} {{ 3 }} {{ true }} {{ none }}"),
        "1e-05 2.0 0.5 3 True None"
    );
}

#[test]
fn windows_line_ends_of_a_template_do_not_reach_the_chat() {
    assert_eq!(rendered("{% if true %}\r\na\r\n{% endif %}\r\nb\rc"), "a\nb\nc");
}
