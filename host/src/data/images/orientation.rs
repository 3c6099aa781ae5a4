//! How a stored picture is to be turned, as EXIF data says it.

use super::decode::Rgb;

/// The tag `Orientation` of EXIF 2.3, from 1 to 8: which corner the first pixel belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Orientation(u16);

const TAG: u16 = 0x0112;
const SHORT: u16 = 3;

impl Orientation {
    /// As it is stored.
    pub(super) const UPRIGHT: Self = Self(1);

    /// Reads the tag out of EXIF data: a TIFF header and its first directory. Data without the tag, damaged data and
    /// values that are none say nothing.
    pub(super) fn from_exif(exif: &[u8]) -> Self {
        let exif = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
        find(exif).filter(|value| (1..=8).contains(value)).map_or(Self::UPRIGHT, Self)
    }

    /// Whether width and height change places.
    pub(super) fn swaps_sides(self) -> bool {
        self.0 >= 5
    }

    /// Turns a picture upright.
    pub(super) fn apply(self, stored: Rgb) -> Rgb {
        if self == Self::UPRIGHT {
            return stored;
        }
        let Rgb { height, width, pixels } = stored;
        let (upright_height, upright_width) =
            if self.swaps_sides() { (width, height) } else { (height, width) };
        let mut turned = Vec::with_capacity(pixels.len());
        for y in 0..upright_height {
            for x in 0..upright_width {
                let (row, column) = match self.0 {
                    2 => (y, width - 1 - x),
                    3 => (height - 1 - y, width - 1 - x),
                    4 => (height - 1 - y, x),
                    5 => (x, y),
                    6 => (height - 1 - x, y),
                    7 => (height - 1 - x, width - 1 - y),
                    _ => (x, width - 1 - y),
                };
                let at = (row * width + column) * 3;
                turned.extend_from_slice(&pixels[at..at + 3]);
            }
        }
        Rgb { height: upright_height, width: upright_width, pixels: turned }
    }
}

/// The value of the tag in the first directory.
fn find(tiff: &[u8]) -> Option<u16> {
    let little_endian = match tiff.get(..4)? {
        b"II*\0" => true,
        b"MM\0*" => false,
        _ => return None,
    };
    let short = |at: usize| -> Option<u16> {
        let bytes = tiff.get(at..at.checked_add(2)?)?.try_into().ok()?;
        Some(if little_endian { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    };
    let long = |at: usize| -> Option<usize> {
        let (first, second) = (usize::from(short(at)?), usize::from(short(at + 2)?));
        Some(if little_endian { second << 16 | first } else { first << 16 | second })
    };
    let directory = long(4)?;
    let entries = usize::from(short(directory)?);
    let entry = (0..entries).map(|index| directory + 2 + 12 * index);
    let mut tagged = entry.filter(|at| short(*at) == Some(TAG) && short(*at + 2) == Some(SHORT));
    // A short value stands at the front of the four bytes that hold a value.
    short(tagged.next()? + 8)
}
