//! JPEG, through libjpeg-turbo's code.

use std::any::Any;
use std::cell::Cell;
use std::io::{self, BufRead, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};

use mozjpeg::{ColorSpace, Decompress, Marker};

use super::colour::from_inverted_cmyk;
use super::orientation::Orientation;

/// Height and width as stored, and how the picture is to be turned. Reads no more than the header.
pub(super) fn probe(stream: impl BufRead) -> Result<([usize; 2], Orientation), String> {
    guarded(stream, |stream| {
        let header = Decompress::builder().with_markers(&[Marker::APP(1)]).from_reader(stream)?;
        let exif = header.markers().find(|marker| marker.data.starts_with(b"Exif\0\0"));
        let orientation =
            exif.map_or(Orientation::UPRIGHT, |marker| Orientation::from_exif(marker.data));
        Ok(([header.height(), header.width()], orientation))
    })
}

/// RGB pixels, row by row, as stored.
pub(super) fn decode(bytes: &[u8]) -> Result<Vec<u8>, String> {
    guarded(bytes, |stream| {
        let header = Decompress::builder().from_reader(stream)?;
        let has_inks = matches!(header.color_space(), ColorSpace::JCS_CMYK | ColorSpace::JCS_YCCK);
        let target = if has_inks { ColorSpace::JCS_CMYK } else { ColorSpace::JCS_RGB };
        let mut picture = header.to_colorspace(target)?;
        let pixels: Vec<u8> = picture.read_scanlines()?;
        picture.finish()?;
        if !has_inks {
            return Ok(pixels);
        }
        let inks = pixels.chunks_exact(4);
        Ok(inks.flat_map(|ink| from_inverted_cmyk([ink[0], ink[1], ink[2], ink[3]])).collect())
    })
}

/// The library reports errors by unwinding, and takes the end of a file for the end of the picture; here both are
/// errors with words.
fn guarded<R: BufRead, T>(
    stream: R,
    work: impl FnOnce(Whole<'_, R>) -> io::Result<T>,
) -> Result<T, String> {
    let ended = Cell::new(false);
    let whole = Whole { stream, ended: &ended };
    let result = catch_unwind(AssertUnwindSafe(|| work(whole)));
    if ended.get() {
        return Err("the file ends before its picture does".to_owned());
    }
    match result {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(payload) => Err(words_of(&*payload)),
    }
}

fn words_of(payload: &(dyn Any + Send)) -> String {
    let words = payload.downcast_ref::<String>().map_or("damaged data", String::as_str);
    words.strip_prefix("libjpeg fatal error: ").unwrap_or(words).to_owned()
}

/// A stream whose end is an error.
struct Whole<'a, R> {
    stream: R,
    ended: &'a Cell<bool>,
}

impl<R: BufRead> BufRead for Whole<'_, R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let bytes = self.stream.fill_buf()?;
        if bytes.is_empty() {
            self.ended.set(true);
            return Err(io::Error::other("the end of the file"));
        }
        Ok(bytes)
    }

    fn consume(&mut self, num_bytes: usize) {
        self.stream.consume(num_bytes);
    }
}

impl<R: BufRead> Read for Whole<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer)
    }
}
