use serde_json::json;

use super::*;
use crate::data::{test_model, test_vision_format};

fn format(tokens: &[&str], tokenizer: &Tokenizer) -> VisionFormat {
    let ids = tokens.iter().map(|token| i64::from(tokenizer.token_id(token).unwrap()));
    VisionFormat {
        image_placeholder: "<I>".into(),
        video_placeholder: "[<V>]".into(),
        vision_token_ids: ids.collect(),
        ..test_vision_format()
    }
}

fn plain_format() -> VisionFormat {
    format(&[], &test_model().0)
}

fn image(text: &str) -> Insert {
    Insert { is_film: false, text: text.into() }
}

fn film(text: &str) -> Insert {
    Insert { is_film: true, text: text.into() }
}

fn cut<'a>(text: &'a str, spans: &[Range<usize>]) -> Vec<&'a str> {
    spans.iter().map(|span| &text[span.clone()]).collect()
}

#[test]
fn each_kind_is_placed_in_its_own_order_and_spans_move_along() {
    let text = "u: <I> and [<V>] é a: yes. u: <I> a: no.";
    let spans: Vec<_> = ["yes.", "no."]
        .map(|part| text.find(part).unwrap()..text.find(part).unwrap() + part.len())
        .into();
    let inserts = [image("first"), film("the film"), image("2")];
    let placed = place(text, &spans, &inserts, &plain_format()).unwrap();
    assert_eq!(placed.text, "u: first and the film é a: yes. u: 2 a: no.");
    assert_eq!(cut(&placed.text, &placed.spans), ["yes.", "no."]);
    assert_eq!(cut(&placed.text, &placed.media), ["first", "the film", "2"]);
}

#[test]
fn a_picture_in_the_assistants_text_is_cut_out_of_it() {
    let text = "u: x a: see <I><I> there. u: y a: <I>";
    let spans =
        [text.find("see").unwrap()..text.find(" u: y").unwrap(), text.len() - 3..text.len()];
    let inserts = [image("P"), image("QQ"), image("RRR")];
    let placed = place(text, &spans, &inserts, &plain_format()).unwrap();
    assert_eq!(placed.text, "u: x a: see PQQ there. u: y a: RRR");
    assert_eq!(cut(&placed.text, &placed.spans), ["see ", " there."]);
    assert_eq!(cut(&placed.text, &placed.media), ["P", "QQ", "RRR"]);
}

#[test]
fn a_text_without_pictures_stays_as_it_is() {
    let placed = place("abc", std::slice::from_ref(&(1..3)), &[], &plain_format()).unwrap();
    assert_eq!((placed.text.as_str(), &placed.spans[..]), ("abc", std::slice::from_ref(&(1..3))));
    assert!(placed.media.is_empty());
}

#[test]
fn a_template_that_drops_or_doubles_a_picture_is_refused_with_both_numbers() {
    let error =
        |text: &str, inserts: &[Insert]| place(text, &[], inserts, &plain_format()).unwrap_err();
    let dropped = error("<I>", &[image("a"), image("b")]);
    assert!(dropped.contains("2 pictures") && dropped.contains("'<I>' 1 times"), "{dropped}");
    let doubled = error("[<V>][<V>]", &[film("a")]);
    assert!(doubled.contains("1 films") && doubled.contains("2 times"), "{doubled}");
    assert!(error("<I>", &[]).contains("0 pictures"));
    assert!(error("<I>", &[film("a")]).contains("0 pictures"));
}

#[test]
fn a_token_that_stands_for_a_picture_is_refused_in_any_text_of_a_row() {
    let (tokenizer, _) = test_model();
    let tokens = VisionTokens::new(&format(&["<|image_pad|>"], &tokenizer), &tokenizer);
    assert!(tokens.check_text("a picture <|image_pad |>").is_ok());
    assert!(tokens.check_text("a <|image_pad|>").unwrap_err().contains("'<|image_pad|>'"));
    let chat = |message: Value, tools: Option<Vec<Value>>| Conversation {
        messages: vec![json!({"role": "user", "content": "x"}), message],
        tools,
    };
    let bad = "<|image_pad|>";
    for message in [
        json!({"role": "assistant", "content": bad}),
        json!({"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": bad}]}),
        json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {bad: 1}}}]}),
    ] {
        let error = tokens.check_chat(&chat(message, None)).unwrap_err();
        assert!(error.starts_with("messages[1]: ") && error.contains(bad), "{error}");
    }
    let fine =
        json!({"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "x"}]});
    assert!(tokens.check_chat(&chat(fine.clone(), None)).is_ok());
    let error = tokens.check_chat(&chat(fine, Some(vec![json!({"name": bad})]))).unwrap_err();
    assert!(error.starts_with("tools: "), "{error}");
}
