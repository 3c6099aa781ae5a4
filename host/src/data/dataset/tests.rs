use std::fs;

use super::*;
use crate::data::test_model;

const LIMIT: DatasetOptions = DatasetOptions { sequence_length: 64, overflow: Overflow::Error };

fn read_with(text: impl AsRef<[u8]>, options: DatasetOptions) -> Result<Dataset> {
    let (tokenizer, template) = test_model();
    let name = Path::new("rows.jsonl");
    Dataset::read(text.as_ref(), name, &tokenizer, Some(&template), None, options)
}

fn read(text: impl AsRef<[u8]>) -> Result<Dataset> {
    read_with(text, LIMIT)
}

/// Asserts that `line`, as the third line of a file, is refused with all of `needles`.
fn refused(line: &str, needles: &[&str]) {
    let text = format!("{{\"text\": \"fine\"}}\n\n{line}\n{{\"text\": \"fine\"}}\n");
    let error = read(&text).unwrap_err().to_string();
    assert!(error.starts_with("rows.jsonl, line 3: "), "{line}: {error}");
    for needle in needles {
        assert!(error.contains(needle), "{line}: no '{needle}' in: {error}");
    }
}

fn chat_row(answer: &str) -> String {
    serde_json::json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]})
        .to_string()
}

#[test]
fn every_token_of_a_text_row_is_a_target_and_the_end_token_is_appended() {
    let (tokenizer, _) = test_model();
    let dataset = read("{\"text\": \"The tide turns.\"}").unwrap();
    let [sample] = &dataset.samples[..] else { panic!("{dataset:?}") };
    assert!(sample.targets.iter().all(|target| *target));
    assert_eq!(sample.num_targets(), sample.ids.len() - 1);
    assert_eq!(sample.ids.last().copied(), tokenizer.token_id("<|im_end|>"));
    assert_eq!(tokenizer.decode(&sample.ids, true).unwrap(), "The tide turns.");
}

#[test]
fn a_text_that_ends_with_the_end_token_does_not_get_another() {
    let (tokenizer, _) = test_model();
    let dataset = read("{\"text\": \"x<|im_end|>\"}").unwrap();
    let end = tokenizer.token_id("<|im_end|>").unwrap();
    assert_eq!(dataset.samples[0].ids.iter().filter(|id| **id == end).count(), 1);
}

#[test]
fn of_a_chat_row_only_the_answer_and_its_end_are_targets() {
    let (tokenizer, _) = test_model();
    let dataset = read(chat_row("Fair winds.")).unwrap();
    let sample = &dataset.samples[0];
    let pairs = sample.ids.iter().zip(&sample.targets);
    let targets: Vec<u32> = pairs.filter(|(_, target)| **target).map(|(id, _)| *id).collect();
    assert_eq!(tokenizer.decode(&targets, false).unwrap(), "Fair winds.<|im_end|>\n");
}

#[test]
fn blank_lines_byte_order_marks_and_windows_line_ends_are_passed_over() {
    let plain = read(format!("{}\n{}", chat_row("a"), chat_row("b"))).unwrap();
    let windows =
        read(format!("\u{feff}{}\r\n\r\n  \n{}\r\n", chat_row("a"), chat_row("b"))).unwrap();
    assert_eq!(plain.samples.len(), 2);
    let ids = |dataset: &Dataset| -> Vec<_> {
        dataset.samples.iter().map(|sample| (sample.ids.clone(), sample.targets.clone())).collect()
    };
    assert_eq!(ids(&plain), ids(&windows));
    let lines =
        |dataset: &Dataset| dataset.samples.iter().map(|sample| sample.line).collect::<Vec<_>>();
    assert_eq!((lines(&plain), lines(&windows)), (vec![1, 2], vec![1, 4]));
}

#[test]
fn malformed_rows_are_refused_with_file_and_line() {
    refused("{\"text\": \"cut", &["not valid JSON", "column 13", "EOF"]);
    refused("[1]", &["must be a JSON object", "a list"]);
    refused("{\"prompt\": \"x\"}", &["neither 'text' nor 'messages'", "its keys: prompt"]);
    refused("{}", &["its keys: none"]);
    refused("{\"text\": 5}", &["'text' must be a string", "a number"]);
    refused("{\"text\": \"a\", \"messages\": []}", &["both"]);
    refused("{\"messages\": {}}", &["'messages' must be a list", "an object"]);
    refused("{\"messages\": []}", &["empty", "nothing to learn"]);
    refused("{\"text\": \"\"}", &["nothing to learn"]);
}

#[test]
fn malformed_messages_are_refused_with_their_index() {
    let row = |message: &str| {
        format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"x\"}}, {message}]}}")
    };
    let refused = |message: &str, needles: &[&str]| refused(&row(message), needles);
    refused("\"x\"", &["messages[1]: must be an object", "a string"]);
    refused("{\"content\": \"x\"}", &["messages[1]: has no 'role'"]);
    refused("{\"from\": \"gpt\", \"value\": \"x\"}", &["'from'", "role/content"]);
    refused("{\"role\": 1, \"content\": \"x\"}", &["'role' must be a string"]);
    refused(
        "{\"role\": \"asistant\", \"content\": \"x\"}",
        &["'asistant' is not known", "assistant, tool"],
    );
    refused("{\"role\": \"assistant\"}", &["has no 'content'"]);
    refused("{\"role\": \"assistant\", \"content\": null}", &["'content' must be", "null"]);
    refused("{\"role\": \"assistant\", \"content\": [5]}", &["content[0]", "'type'"]);
    refused(
        "{\"role\": \"assistant\", \"content\": [{\"type\": \"text\"}]}",
        &["content[0]", "'text'"],
    );
    refused(
        "{\"role\": \"user\", \"content\": [{\"type\": \"audio\"}]}",
        &["'audio' cannot be trained on"],
    );
    refused("{\"role\": \"user\", \"content\": \"x\"}", &["no message is from the assistant"]);
    refused("{\"role\": \"assistant\", \"tool_calls\": []}", &["has no 'content'"]);
    for calls in ["\"tide\"", "{}", "[\"tide\"]"] {
        let message =
            format!("{{\"role\": \"assistant\", \"content\": \"x\", \"tool_calls\": {calls}}}");
        refused(&message, &["messages[1]: 'tool_calls' must be a list of objects"]);
    }
}

#[test]
fn malformed_tools_are_refused() {
    let messages = "\"messages\": [{\"role\": \"assistant\", \"content\": \"x\"}]";
    refused(&format!("{{{messages}, \"tools\": \"f\"}}"), &["'tools' must be a list", "a string"]);
    refused(&format!("{{{messages}, \"tools\": [1]}}"), &["'tools'", "something else in it"]);
}

#[test]
fn bytes_that_are_not_utf8_are_refused_with_their_place() {
    let error = read(b"{\"text\": \"ok\"}\n{\"text\": \"\xff\"}\n").unwrap_err().to_string();
    assert!(error.contains("line 2: not valid UTF-8 at byte 10"), "{error}");
}

#[test]
fn a_file_without_rows_or_without_a_file_is_refused() {
    for empty in ["", "\n \r\n", "\u{feff}"] {
        let error = read(empty).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl: the dataset is empty"), "{error}");
    }
    let (tokenizer, template) = test_model();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("missing.jsonl");
    let error =
        Dataset::load(&path, &tokenizer, Some(&template), None, LIMIT).unwrap_err().to_string();
    assert!(error.contains("cannot open") && error.contains("missing.jsonl"), "{error}");
}

#[test]
fn a_chat_without_a_template_is_refused_with_the_remedy() {
    let (tokenizer, _) = test_model();
    let read =
        |text: &str| Dataset::read(text.as_bytes(), Path::new("x"), &tokenizer, None, None, LIMIT);
    assert!(read("{\"text\": \"no template needed\"}").is_ok());
    let error = read(&chat_row("x")).unwrap_err().to_string();
    assert!(error.contains("line 1") && error.contains("chat_template.jinja"), "{error}");
}

#[test]
fn a_long_row_is_refused_skipped_or_cut_as_told() {
    let long = "word ".repeat(100);
    let text = format!("{}\n{}\n", chat_row("short"), chat_row(&long));
    let error = read(&text).unwrap_err().to_string();
    for needle in
        ["line 2", "sequence_length is 64", "overflow = \"skip\" or \"truncate\"", "tokens"]
    {
        assert!(error.contains(needle), "{error}");
    }
    let length =
        read_with(&text, DatasetOptions { sequence_length: 4096, ..LIMIT }).unwrap().samples[1]
            .ids
            .len();
    assert!(error.contains(&format!("has {length} tokens")), "{error}");

    let skipped = read_with(&text, DatasetOptions { overflow: Overflow::Skip, ..LIMIT }).unwrap();
    assert_eq!((skipped.samples.len(), skipped.num_skipped, skipped.num_truncated), (1, 1, 0));
    let cut = read_with(&text, DatasetOptions { overflow: Overflow::Truncate, ..LIMIT }).unwrap();
    assert_eq!((cut.samples.len(), cut.num_skipped, cut.num_truncated), (2, 0, 1));
    assert_eq!((cut.samples[1].ids.len(), cut.samples[1].targets.len()), (64, 64));
}

#[test]
fn a_row_exactly_as_long_as_the_limit_is_kept() {
    let text = chat_row("exactly");
    let length = read(&text).unwrap().samples[0].ids.len();
    let at = |sequence_length| read_with(&text, DatasetOptions { sequence_length, ..LIMIT });
    assert!(at(length).is_ok());
    assert!(at(length - 1).is_err());
}

#[test]
fn a_cut_that_leaves_no_target_drops_the_row_and_a_file_of_such_rows_is_refused() {
    let question = "word ".repeat(100);
    let row = serde_json::json!({"messages": [
        {"role": "user", "content": question}, {"role": "assistant", "content": "x"}]});
    let options = DatasetOptions { overflow: Overflow::Truncate, ..LIMIT };
    let both = read_with(format!("{row}\n{}", chat_row("y")), options).unwrap();
    assert_eq!((both.samples.len(), both.num_skipped, both.num_truncated), (1, 1, 0));
    let error = read_with(row.to_string(), options).unwrap_err().to_string();
    assert!(error.contains("none of the 1 rows fits sequence_length = 64"), "{error}");
}

#[test]
fn a_limit_below_two_is_refused() {
    let error = read_with("", DatasetOptions { sequence_length: 1, ..LIMIT }).unwrap_err();
    assert!(error.to_string().contains("at least 2"));
}

#[test]
fn a_template_that_rewrites_earlier_turns_is_refused_rather_than_guessed_at() {
    let (tokenizer, _) = test_model();
    let source = "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last or m.role == 'user' else '…' }}\
                  {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    let template = ChatTemplate::new(source, tokenizer.special_tokens()).unwrap();
    let read = |text: &str| {
        Dataset::read(text.as_bytes(), Path::new("x"), &tokenizer, Some(&template), None, LIMIT)
    };
    assert!(read(&chat_row("one turn is fine")).is_ok());
    let two = serde_json::json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]});
    let error = read(&two.to_string()).unwrap_err().to_string();
    assert!(error.contains("messages[1]") && error.contains("{% generation %}"), "{error}");
}

#[test]
fn a_prompt_that_opens_more_than_the_turn_holds_is_cut_where_they_part() {
    let (tokenizer, _) = test_model();
    let source = "{% for m in messages %}[{{ m.role }}]{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}\
                  {% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}";
    let template = ChatTemplate::new(source, tokenizer.special_tokens()).unwrap();
    let Row::Chat(chat, _) = Row::parse(&chat_row("yes")).unwrap() else { panic!("a chat row") };
    let (text, spans) = crate::data::assistant_spans(&template, &chat).unwrap();
    let [span] = &spans[..] else { panic!("{spans:?}") };
    assert_eq!(&text[span.clone()], "</think>yes");
}

#[test]
fn a_template_that_refuses_the_chat_is_reported_with_the_line() {
    let (tokenizer, _) = test_model();
    let template =
        ChatTemplate::new("{{ raise_exception('no thanks') }}", tokenizer.special_tokens())
            .unwrap();
    let error = Dataset::read(
        chat_row("x").as_bytes(),
        Path::new("x"),
        &tokenizer,
        Some(&template),
        None,
        LIMIT,
    );
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("x, line 1: ") && error.contains("no thanks"), "{error}");
}

#[test]
fn a_template_that_never_prints_the_answer_leaves_nothing_to_learn() {
    let (tokenizer, _) = test_model();
    let template =
        ChatTemplate::new("hello{% generation %}{% endgeneration %}", tokenizer.special_tokens())
            .unwrap();
    let error = Dataset::read(
        chat_row("x").as_bytes(),
        Path::new("x"),
        &tokenizer,
        Some(&template),
        None,
        LIMIT,
    );
    assert!(error.unwrap_err().to_string().contains("marks none"));
}

/// Reads with gpt-oss's template, which adds texts up and asks whether keys are there.
fn read_harmony(row: &serde_json::Value) -> Result<Dataset> {
    let (tokenizer, _) = test_model();
    let source = include_str!("../../../../plugins/gpt-oss/src/chat_template.jinja");
    let template = ChatTemplate::new(source, tokenizer.special_tokens()).unwrap();
    let template = template.on(jiff::civil::date(2025, 8, 5));
    let options = DatasetOptions { sequence_length: 1024, ..LIMIT };
    let text = format!("{row}\n{row}");
    Dataset::read(text.as_bytes(), Path::new("x"), &tokenizer, Some(&template), None, options)
}

#[test]
fn lists_of_texts_are_joined_for_a_model_without_pictures() {
    let text = |text: &str| serde_json::json!({"type": "text", "text": text});
    let row = |question: serde_json::Value, answer: serde_json::Value| {
        serde_json::json!({"messages": [{"role": "system", "content": question},
            {"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    };
    let joined = read_harmony(&row("one two".into(), "".into())).unwrap();
    let parts = row([text("one "), text("two")].as_slice().into(), serde_json::json!([]));
    assert_eq!(read_harmony(&parts).unwrap().samples, joined.samples);
    let picture = row(serde_json::json!([{"type": "image", "image": "a.png"}]), "x".into());
    let error = read_harmony(&picture).unwrap_err().to_string();
    assert!(error.contains("messages[0].content[0]: this model takes no pictures"), "{error}");
}

#[test]
fn what_a_tool_gave_back_stays_a_list_of_texts() {
    let row = serde_json::json!({"messages": [
        {"role": "user", "content": "How high?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "tide", "arguments": {}}}]},
        {"role": "tool", "content": [{"type": "text", "text": "4"}]}]});
    let sample = &read_harmony(&row).unwrap().samples[0];
    let text = test_model().0.decode(&sample.ids, false).unwrap();
    assert!(text.contains("<|message|>[{\"type\": \"text\", \"text\": \"4\"}]<|end|>"), "{text}");
}

#[test]
fn an_empty_list_of_calls_counts_as_none() {
    let row = |calls: serde_json::Value| {
        serde_json::json!({"messages": [{"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": calls}]})
    };
    let without = read_harmony(&row(serde_json::Value::Null)).unwrap();
    assert_eq!(read_harmony(&row(serde_json::json!([]))).unwrap().samples, without.samples);
}

#[test]
fn what_a_template_leaves_out_is_told_with_the_lines_of_the_rows_that_are_used() {
    let row = |answer: &str| {
        serde_json::json!({"messages": [
            {"role": "user", "content": "a"}, {"role": "system", "content": "b"},
            {"role": "assistant", "channel": "analysis", "content": "c"},
            {"role": "assistant", "channel": "final", "content": answer},
            {"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]})
    };
    let warnings: Vec<_> = read_harmony(&row("d")).unwrap().unprinted.warnings().collect();
    let [content, reasoning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(content.contains("some texts of messages (2; lines 1, 2): "), "{content}");
    assert!(reasoning.contains("some texts of reasoning (2; lines 1, 2): "), "{reasoning}");
    let commentary = serde_json::json!({"messages": [
        {"role": "assistant", "channel": "commentary", "content": "x"},
        {"role": "assistant", "content": "y"}]});
    let error = read_harmony(&commentary).unwrap_err().to_string();
    assert!(
        error.starts_with("x, line 1: messages[0]: ") && error.contains("'commentary'"),
        "{error}"
    );
}

#[test]
fn the_bundled_demo_loads_and_its_rows_differ() {
    let (tokenizer, template) = test_model();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("demo.jsonl");
    fs::write(&path, crate::data::DEMO_JSONL).unwrap();
    let options = DatasetOptions { sequence_length: 512, overflow: Overflow::Error };
    let dataset = Dataset::load(&path, &tokenizer, Some(&template), None, options).unwrap();
    assert!((60..=100).contains(&dataset.samples.len()));
    let distinct: std::collections::HashSet<_> =
        dataset.samples.iter().map(|sample| &sample.ids).collect();
    assert_eq!(distinct.len(), dataset.samples.len());
    let longest = dataset.samples.iter().map(|sample| sample.ids.len()).max().unwrap();
    println!("longest row: {longest} tokens");
}
