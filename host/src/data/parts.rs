//! Pictures and films in the content of messages.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::images::Source;
use super::json::kind;

/// A picture or film that a row names.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Part {
    /// Where in the row: `messages[0].content[1]`.
    pub(super) place: String,
    pub(super) content: Content,
}

/// What a [`Part`] shows.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Content {
    Image(Name),
    Film {
        frames: Vec<Name>,
        /// Frames of a second.
        fps: Option<f64>,
    },
}

/// How a row names a picture.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Name {
    /// A path or an address.
    Text(String),
    /// The file itself, in base64.
    Base64(String),
}

impl Name {
    /// Where the picture is; paths are relative to `folder`.
    pub(super) fn resolve(&self, folder: &Path) -> Result<Source, String> {
        match self {
            Self::Text(name) => Source::resolve(name, folder),
            Self::Base64(encoded) => Source::from_base64(encoded),
        }
    }
}

/// Where the key of a picture's name may be: the first two are in common use, the others are what transformers takes.
const IMAGE_KEYS: [&str; 5] = ["image", "path", "url", "image_url", "base64"];

/// Checks the parts of one message's content and takes pictures and films out of it, in order. What stays of such
/// a part is its type: templates print a placeholder for it. Keys that hold null count as absent.
///
/// # Errors
/// A message that begins with the part's place.
pub(super) fn take_media(
    content: &mut [Value],
    place: &str,
    media: &mut Vec<Part>,
) -> Result<(), String> {
    for (index, part) in content.iter_mut().enumerate() {
        let here = format!("content[{index}]");
        if let Some(content) = check_part(part).map_err(|error| format!("{here}: {error}"))? {
            let name = if matches!(content, Content::Image(_)) { "image" } else { "video" };
            *part = json!({"type": name});
            media.push(Part { place: format!("{place}.{here}"), content });
        }
    }
    Ok(())
}

/// The text of a message's content, its parts joined; `None` when there are pictures or films among them.
pub(super) fn joined_text(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(|part| part.get("text")?.as_str()).collect(),
        _ => None,
    }
}

/// What a part shows; `None` for text.
fn check_part(part: &mut Value) -> Result<Option<Content>, String> {
    const WANTED: &str =
        "a part must be an object with a 'type', such as {\"type\": \"text\", \"text\": …}";
    let Value::Object(fields) = part else { return Err(WANTED.to_owned()) };
    fields.retain(|_, value| !value.is_null());
    match fields.get("type").and_then(Value::as_str) {
        Some("text") if fields.get("text").is_some_and(Value::is_string) => Ok(None),
        Some("text") => Err("a text part must hold its text as a string in 'text'".to_owned()),
        Some("image" | "image_url") => Ok(Some(Content::Image(image_name(fields)?))),
        Some("video") => film(fields).map(Some),
        // A placeholder without what it stands for would train the model on nothing.
        Some(other) => Err(format!(
            "parts of type '{other}' cannot be trained on; only text, image and video parts can"
        )),
        None => Err(WANTED.to_owned()),
    }
}

fn image_name(fields: &Map<String, Value>) -> Result<Name, String> {
    only_known(fields, &IMAGE_KEYS)?;
    let mut named = IMAGE_KEYS.iter().filter_map(|key| Some((*key, fields.get(*key)?)));
    let Some((key, value)) = named.next() else {
        return Err(
            "an image part must name its picture, as {\"type\": \"image\", \"image\": \"path\"}"
                .to_owned(),
        );
    };
    let name = value.as_str().or_else(|| value.get("url")?.as_str());
    let name = name.ok_or_else(|| {
        format!("'{key}' must be the path of a picture, but it is {}", kind(value))
    })?;
    Ok(if key == "base64" { Name::Base64(name.to_owned()) } else { Name::Text(name.to_owned()) })
}

fn film(fields: &Map<String, Value>) -> Result<Content, String> {
    const WANTED: &str = "a video part must hold its frames as a list of pictures, as \
                          {\"type\": \"video\", \"video\": [\"frame0.png\", …], \"fps\": 2}";
    only_known(fields, &["video", "fps", "sample_fps"])?;
    let frames = match fields.get("video") {
        Some(Value::Array(frames)) if !frames.is_empty() => frames,
        Some(Value::String(name)) => {
            return Err(format!("'{name}' cannot be taken apart here; {WANTED}"));
        }
        _ => return Err(WANTED.to_owned()),
    };
    let frames = frames.iter().enumerate().map(|(index, frame)| {
        let name = frame.as_str().map(|name| Name::Text(name.to_owned())).ok_or(());
        let name = name.or_else(|()| match frame {
            Value::Object(fields) => image_name(fields),
            other => {
                Err(format!("a frame must be the path of a picture, but it is {}", kind(other)))
            }
        });
        name.map_err(|error| format!("video[{index}]: {error}"))
    });
    let frames = frames.collect::<Result<_, _>>()?;
    let fps = fields.get("fps").or_else(|| fields.get("sample_fps"));
    let fps = fps.map(|value| {
        value.as_f64().filter(|fps| *fps > 0.0).ok_or_else(|| {
            format!("'fps' must be the number of frames for a second, above 0, but it is {value}")
        })
    });
    Ok(Content::Film { frames, fps: fps.transpose()? })
}

/// Refuses what other programs would obey and this one would not: a size or a part of a film, for instance.
fn only_known(fields: &Map<String, Value>, known: &[&str]) -> Result<(), String> {
    let harmless = ["type", "detail"];
    match fields.keys().find(|key| ![known, &harmless].concat().contains(&key.as_str())) {
        Some(key) => Err(format!(
            "'{key}' is not supported here; known keys are {} (bounds of the size are set for the whole run, with \
             [data] min_pixels and max_pixels)",
            known.join(", ")
        )),
        None => Ok(()),
    }
}
