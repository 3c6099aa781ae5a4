//! One row as tokens, targets and pictures.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use blockstreamer_core::Error;
use blockstreamer_core::vision::Media;
use serde_json::Value;

use super::channels;
use super::images::{Processor, Source, probe};
use super::mask::{assistant_spans, target_tokens};
use super::parts::{Content, Part, joined_text};
use super::placing::{Insert, VisionTokens, place};
use super::row::{Conversation, Row};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use super::unprinted::{self, Piece};

/// What a model does with pictures.
#[derive(Clone)]
pub struct Vision<'a> {
    /// How they are prepared.
    pub processor: Arc<Processor>,
    /// The text that stands for one, as [`Model::media_text`](blockstreamer_core::family::Model::media_text).
    pub media_text: &'a dyn Fn(&Media) -> Result<String, Error>,
}

impl fmt::Debug for Vision<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vision").field("processor", &self.processor).finish_non_exhaustive()
    }
}

/// A picture or a film of a row: its files, and what becomes of them. Its pixels are not read yet.
#[derive(Debug, Clone, PartialEq)]
pub struct Picture {
    /// Where in the row: `messages[0].content[1]`.
    pub(super) place: String,
    /// One file, or one for each frame of a film.
    pub(super) sources: Vec<Source>,
    /// Height and width of each file, upright.
    pub(super) size: [usize; 2],
    /// Size in patches, and times of frames.
    pub(super) media: Media,
}

impl Picture {
    /// Whether it is a film.
    pub fn is_film(&self) -> bool {
        self.media.frame_seconds.is_some()
    }

    /// Patches of it.
    pub fn num_patches(&self) -> usize {
        self.media.grid.iter().product()
    }
}

/// One row: its tokens, and which of them are targets.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Token ids.
    pub ids: Vec<u32>,
    /// For each token, whether the model is to learn to produce it.
    pub targets: Vec<bool>,
    /// The pictures and films that the tokens stand for, in order.
    pub pictures: Vec<Picture>,
    /// Line in the file, from 1.
    pub line: usize,
}

impl Sample {
    /// Tokens that contribute to the loss. The first token never does: nothing comes before it.
    pub fn num_targets(&self) -> usize {
        self.targets.iter().skip(1).filter(|target| **target).count()
    }

    /// Patches of all pictures and films.
    pub fn num_patches(&self) -> usize {
        self.pictures.iter().map(Picture::num_patches).sum()
    }
}

/// A sample, and how much of it pictures take up.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) sample: Sample,
    /// Tokens that stand for pictures and films.
    pub(super) num_picture_tokens: usize,
    /// Tokens up to the last of these, included.
    pub(super) pictures_end: usize,
    /// What of the row the template does not print.
    pub(super) unprinted: Vec<Piece>,
}

/// Turns rows into samples.
#[derive(Debug)]
pub(super) struct Encoder<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) template: Option<&'a ChatTemplate>,
    vision: Option<(Vision<'a>, VisionTokens)>,
    /// What paths of pictures are relative to.
    folder: &'a Path,
}

impl<'a> Encoder<'a> {
    pub(super) fn new(
        tokenizer: &'a Tokenizer,
        template: Option<&'a ChatTemplate>,
        vision: Option<Vision<'a>>,
        folder: &'a Path,
    ) -> Self {
        let with_tokens = |vision: Vision<'a>| {
            let tokens = VisionTokens::new(vision.processor.format(), tokenizer);
            (vision, tokens)
        };
        Self { tokenizer, template, vision: vision.map(with_tokens), folder }
    }

    /// The sample of the row in `line`. The error is a message without file and line.
    pub(super) fn sample(&self, row: Row, line: usize) -> Result<Measured, String> {
        match row {
            Row::Text(text) => self.text(&text, line),
            Row::Chat(chat, parts) => self.chat(chat, &parts, line),
        }
    }

    fn text(&self, text: &str, line: usize) -> Result<Measured, String> {
        if let Some((_, tokens)) = &self.vision {
            tokens.check_text(text)?;
        }
        let mut ids = self.tokenizer.encode(text, true).map_err(|error| error.to_string())?.ids;
        if let Some(eos) = self.tokenizer.eos_id().filter(|eos| ids.last() != Some(eos)) {
            ids.push(eos);
        }
        let sample = Sample { targets: vec![true; ids.len()], ids, pictures: Vec::new(), line };
        Ok(Measured { sample, num_picture_tokens: 0, pictures_end: 0, unprinted: Vec::new() })
    }

    fn chat(
        &self,
        mut chat: Conversation,
        parts: &[Part],
        line: usize,
    ) -> Result<Measured, String> {
        let template = self.template.ok_or(
            "the row is a conversation but the model's folder has no chat template; copy the \
             chat_template.jinja of its chat version there, or use {\"text\": …} rows",
        )?;
        match (&self.vision, parts) {
            (Some((_, tokens)), _) => tokens.check_chat(&chat)?,
            (None, [part, ..]) => {
                return Err(format!(
                    "{}: this model takes no pictures; take them out of the rows or use a model that does",
                    part.place
                ));
            }
            (None, []) => join_parts(&mut chat),
        }
        channels::fold(template, &mut chat)?;
        let (mut text, mut spans) =
            assistant_spans(template, &chat).map_err(|error| error.to_string())?;
        let unprinted = unprinted::find(template, &chat, &text);
        let mut pictures = Vec::new();
        let mut places = Vec::new();
        if let Some((vision, _)) = &self.vision {
            let mut inserts = Vec::new();
            for part in parts {
                let in_part = |error: String| format!("{}: {error}", part.place);
                let picture = self.picture(part, &vision.processor).map_err(in_part)?;
                let text = (vision.media_text)(&picture.media)
                    .map_err(|error| in_part(error.to_string()))?;
                inserts.push(Insert { is_film: picture.is_film(), text });
                pictures.push(picture);
            }
            let placed = place(&text, &spans, &inserts, vision.processor.format())?;
            (text, spans, places) = (placed.text, placed.spans, placed.media);
        }
        let encoded = self.tokenizer.encode(&text, false).map_err(|error| error.to_string())?;
        let mut targets = target_tokens(&encoded.offsets, &spans);
        if let Some((_, tokens)) = &self.vision {
            // Those that the template prints around a picture, too.
            for (target, id) in targets.iter_mut().zip(&encoded.ids) {
                *target &= !tokens.contains(*id);
            }
        }
        if !targets.contains(&true) {
            return Err(
                "the chat template prints nothing of the assistant's turns, or marks none \
                        of it with {% generation %}"
                    .to_owned(),
            );
        }
        let of_pictures = target_tokens(&encoded.offsets, &places);
        let sample = Sample { ids: encoded.ids, targets, pictures, line };
        Ok(Measured {
            sample,
            num_picture_tokens: of_pictures.iter().filter(|of_picture| **of_picture).count(),
            pictures_end: of_pictures
                .iter()
                .rposition(|of_picture| *of_picture)
                .map_or(0, |last| last + 1),
            unprinted,
        })
    }

    /// Finds the files of a part and reads their sizes.
    fn picture(&self, part: &Part, processor: &Processor) -> Result<Picture, String> {
        let (names, fps) = match &part.content {
            Content::Image(name) => (std::slice::from_ref(name), None),
            Content::Film { frames, fps } => (frames.as_slice(), *fps),
        };
        let mut sources = Vec::with_capacity(names.len());
        let mut size = None;
        for name in names {
            let source = name.resolve(self.folder)?;
            let found = probe(&source).map_err(|error| format!("{source} {error}"))?;
            let [height, width] = found;
            let [first_height, first_width] = *size.get_or_insert(found);
            if found != [first_height, first_width] {
                return Err(format!(
                    "{source} is {width} x {height} pixels but the first frame {first_width} x {first_height}; \
                     the frames of a film must have one size"
                ));
            }
            sources.push(source);
        }
        let size = size.ok_or("there is no picture in it")?;
        let media = match part.content {
            Content::Image(_) => processor.image(size),
            Content::Film { .. } => processor.film(names.len(), size, fps),
        };
        let media = media.map_err(|error| match sources.first() {
            Some(source) => format!("{source} {error}"),
            None => error,
        })?;
        Ok(Picture { place: part.place.clone(), sources, size, media })
    }
}

/// Gives content that is a list of texts as one text, which is what templates without pictures take. What a tool
/// gave back stays as it is: that may be any JSON.
fn join_parts(chat: &mut Conversation) {
    let messages = chat.messages.iter_mut().filter(|message| message["role"] != "tool");
    for content in messages.filter_map(|message| message.get_mut("content")) {
        if let Some(text) = joined_text(content) {
            *content = Value::String(text);
        }
    }
}

#[cfg(test)]
mod tests;
