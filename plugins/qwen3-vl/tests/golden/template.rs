//! The chat template with content in parts, as the published one renders it.

use blockstreamer_core::family::ModelFamily;
use blockstreamer_qwen3_vl::Qwen3Vl;
use minijinja::Environment;
use minijinja::value::Serde;
use serde_json::{Value, json};

use crate::harness::config;

const PICTURE: &str = "<|vision_start|><|image_pad|><|vision_end|>";
const FILM: &str = "<|vision_start|><|video_pad|><|vision_end|>";

fn render(messages: &Value, add_generation_prompt: bool, add_vision_id: bool) -> String {
    let format = Qwen3Vl.chat_format(&config("qwen3_vl")).unwrap();
    let mut environment = Environment::new();
    environment.add_template("chat", &format.chat_template).unwrap();
    let template = environment.get_template("chat").unwrap();
    let variables = json!({
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "add_vision_id": add_vision_id,
    });
    template.render(Serde(&variables)).unwrap()
}

#[test]
fn pictures_films_and_text_come_in_the_order_of_the_parts() {
    let messages = json!([
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [
            {"type": "image", "image": "a.png"},
            {"type": "text", "text": "Before "},
            {"type": "image_url", "image_url": {"url": "b.png"}},
            {"type": "video", "video": ["c.png", "d.png"]},
            {"type": "text", "text": " after"},
        ]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [{"image": "e.png"}, {"text": "And this?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A dog."}]},
    ]);
    let wanted = format!(
        "<|im_start|>system\nBe brief.<|im_end|>\n\
         <|im_start|>user\n{PICTURE}Before {PICTURE}{FILM} after<|im_end|>\n\
         <|im_start|>assistant\nA cat.<|im_end|>\n\
         <|im_start|>user\n{PICTURE}And this?<|im_end|>\n\
         <|im_start|>assistant\nA dog.<|im_end|>\n"
    );
    assert_eq!(render(&messages, false, false), wanted);
    assert_eq!(render(&messages, true, false), wanted + "<|im_start|>assistant\n");
}

#[test]
fn pictures_and_films_are_numbered_apart_over_the_whole_conversation_when_asked_to() {
    let messages = json!([
        {"role": "user", "content": [{"type": "image"}, {"type": "video"}, {"type": "image"}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "video"}]},
    ]);
    let wanted = format!(
        "<|im_start|>user\nPicture 1: {PICTURE}Video 1: {FILM}Picture 2: {PICTURE}<|im_end|>\n\
         <|im_start|>user\nPicture 3: {PICTURE}Video 2: {FILM}<|im_end|>\n"
    );
    assert_eq!(render(&messages, false, true), wanted);
}

#[test]
fn placeholders_of_the_vision_format_are_what_the_template_prints() {
    let model = Qwen3Vl.open(&config("qwen3_vl"), &Default::default()).unwrap();
    let format = model.vision_format().unwrap().unwrap();
    let messages = json!([{"role": "user", "content": [{"type": "image"}, {"type": "video"}]}]);
    let text = render(&messages, false, false);
    assert_eq!(text.matches(&format.image_placeholder).count(), 1);
    assert_eq!(text.matches(&format.video_placeholder).count(), 1);
    assert_eq!(format.vision_token_ids, [250, 251, 252, 253]);
}
