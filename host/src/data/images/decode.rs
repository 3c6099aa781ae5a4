//! From the bytes of a file to RGB pixels.

use std::io::{Cursor, Read, Seek, SeekFrom};

use image_webp::WebPDecoder;
use png::{Decoder, Limits, Transformations};

use super::colour::to_rgb;
use super::jpeg;
use super::orientation::Orientation;
use super::source::{Source, Stream};

/// Most pixels of a file that is decoded, as in Pillow: a small file can claim a picture that fills the memory.
const MAX_STORED_PIXELS: usize = 178_956_970;

/// An upright picture: three bytes a pixel, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rgb {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) pixels: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Png,
    Jpeg,
    WebP,
}

impl Format {
    /// The format that a file's first bytes tell; its name tells nothing.
    fn of(start: &[u8]) -> Result<Self, String> {
        match start {
            [] => Err("is empty".to_owned()),
            [0x89, b'P', b'N', b'G', ..] => Ok(Self::Png),
            [0xff, 0xd8, 0xff, ..] => Ok(Self::Jpeg),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Ok(Self::WebP),
            _ => Err("is not a picture in PNG, JPEG or WebP format".to_owned()),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
        }
    }

    fn damaged(self) -> impl Fn(String) -> String {
        move |words| format!("is a damaged {} file: {words}", self.name())
    }
}

/// What a header tells.
struct Header {
    format: Format,
    /// Height and width as stored.
    stored: [usize; 2],
    orientation: Orientation,
}

impl Header {
    fn upright(&self) -> [usize; 2] {
        let [height, width] = self.stored;
        if self.orientation.swaps_sides() { [width, height] } else { [height, width] }
    }
}

/// Height and width of a picture, upright. Reads its header, and looks whether its end is there: a file that was
/// cut off is told without decoding it. Where the end is not what it mostly is, the picture is decoded to know.
///
/// # Errors
/// A message that says what is wrong, to follow the picture's name.
pub(in crate::data) fn probe(source: &Source) -> Result<[usize; 2], String> {
    let mut stream = source.open()?;
    let header = header(&mut stream)?;
    if !has_usual_end(&mut stream, header.format)
        .map_err(|error| format!("cannot be read: {error}"))?
    {
        decode(source)?;
    }
    Ok(header.upright())
}

/// Decodes a picture and turns it upright.
///
/// # Errors
/// As [`probe`].
pub(super) fn decode(source: &Source) -> Result<Rgb, String> {
    let bytes = source.read()?;
    let header = header(&mut Cursor::new(&bytes))?;
    let damaged = header.format.damaged();
    let pixels = match header.format {
        Format::Jpeg => jpeg::decode(&bytes),
        Format::Png => decode_png(&bytes),
        Format::WebP => decode_webp(&bytes),
    };
    let pixels = pixels.map_err(&damaged)?;
    let [height, width] = header.stored;
    if pixels.len() != height * width * 3 {
        return Err(damaged(format!("{} bytes for {width} x {height} pixels", pixels.len())));
    }
    Ok(header.orientation.apply(Rgb { height, width, pixels }))
}

fn header(stream: &mut impl Stream) -> Result<Header, String> {
    let failed = |error: std::io::Error| format!("cannot be read: {error}");
    let mut start = Vec::new();
    stream.by_ref().take(12).read_to_end(&mut start).map_err(failed)?;
    let format = Format::of(&start)?;
    stream.seek(SeekFrom::Start(0)).map_err(failed)?;
    let (stored, orientation) = match format {
        Format::Jpeg => jpeg::probe(&mut *stream),
        Format::Png => probe_png(&mut *stream),
        Format::WebP => probe_webp(&mut *stream),
    }
    .map_err(format.damaged())?;
    let [height, width] = stored;
    if height == 0 || width == 0 {
        return Err(format!("has no pixels: it is {width} x {height}"));
    }
    if height.saturating_mul(width) > MAX_STORED_PIXELS {
        return Err(format!(
            "claims {width} x {height} pixels, more than the {MAX_STORED_PIXELS} that are decoded; \
             make it smaller"
        ));
    }
    Ok(Header { format, stored, orientation })
}

/// Whether a file ends as its format wants it.
fn has_usual_end(stream: &mut impl Stream, format: Format) -> std::io::Result<bool> {
    let num_bytes = stream.seek(SeekFrom::End(0))?;
    let mut part = |start: u64, count: u64| -> std::io::Result<Vec<u8>> {
        stream.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        stream.take(count).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let from_end = |count: u64| num_bytes.saturating_sub(count);
    Ok(match format {
        Format::Jpeg => part(from_end(64), 64)?.windows(2).any(|marker| marker == [0xff, 0xd9]),
        Format::Png => part(from_end(12), 12)?.get(4..8) == Some(b"IEND"),
        Format::WebP => {
            let size: Option<[u8; 4]> = part(4, 4)?.try_into().ok();
            size.is_some_and(|size| u64::from(u32::from_le_bytes(size)) + 8 <= num_bytes)
        }
    })
}

fn png_decoder<R: std::io::BufRead + Seek>(stream: R) -> Decoder<R> {
    let mut decoder = Decoder::new_with_limits(stream, Limits { bytes: MAX_STORED_PIXELS * 8 });
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    decoder.set_transformations(Transformations::normalize_to_color8());
    decoder
}

fn probe_png(stream: impl Stream) -> Result<([usize; 2], Orientation), String> {
    let reader = png_decoder(stream).read_info().map_err(|error| error.to_string())?;
    let info = reader.info();
    let exif = info.exif_metadata.as_deref();
    let size = [info.height as usize, info.width as usize];
    Ok((size, exif.map_or(Orientation::UPRIGHT, Orientation::from_exif)))
}

fn decode_png(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut reader =
        png_decoder(Cursor::new(bytes)).read_info().map_err(|error| error.to_string())?;
    let num_bytes = reader.output_buffer_size().ok_or("it is too large")?;
    let mut pixels = vec![0; num_bytes];
    let frame = reader.next_frame(&mut pixels).map_err(|error| error.to_string())?;
    pixels.truncate(frame.buffer_size());
    Ok(to_rgb(pixels, frame.color_type.samples()))
}

fn probe_webp(stream: impl Stream) -> Result<([usize; 2], Orientation), String> {
    let mut decoder = WebPDecoder::new(stream).map_err(|error| error.to_string())?;
    let (width, height) = decoder.dimensions();
    // Damaged EXIF data is no reason to refuse a picture.
    let exif = decoder.exif_metadata().ok().flatten();
    let orientation = exif.map_or(Orientation::UPRIGHT, |exif| Orientation::from_exif(&exif));
    Ok(([height as usize, width as usize], orientation))
}

fn decode_webp(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut decoder = WebPDecoder::new(Cursor::new(bytes)).map_err(|error| error.to_string())?;
    decoder.set_memory_limit(MAX_STORED_PIXELS * 4);
    let num_bytes = decoder.output_buffer_size().ok_or("it is too large")?;
    let mut pixels = vec![0; num_bytes];
    decoder.read_image(&mut pixels).map_err(|error| error.to_string())?;
    Ok(to_rgb(pixels, if decoder.has_alpha() { 4 } else { 3 }))
}
