//! Pictures and films: from files to the patches that a vision tower takes.
//!
//! ```text
//! path or data URL --Source--> bytes --probe--> size --Processor--> grid, so many tokens   (when rows are read)
//!                              bytes --decode--> RGB, upright --resize, cut--> patches      (when a batch is made)
//! ```
//! What comes out is what the published image processors of transformers make of a picture that Pillow has
//! opened. Where they leave a choice, or differ among themselves, this was chosen:
//!
//! - **JPEG** is decoded by libjpeg-turbo's own code, as in Pillow and torchvision: equal in every pixel, CMYK
//!   included. Damaged data that these let pass, passes; a file that ends early does not.
//! - **WebP** is decoded in Rust, and equal to libwebp in every pixel of the test corpus.
//! - **Transparent** pixels are laid over white, with Pillow's rounding, as the processor does with a picture that
//!   it is given. (Its loader of paths drops the alpha channel instead, and shows what was not to be seen.)
//! - **16 bits** a channel become 8 by their upper byte, as Pillow does with colour. Pillow clips 16-bit grey at 255,
//!   which leaves a white area; here grey is treated like colour.
//! - **Orientation** is that of EXIF data, in all three formats. XMP is not read.
//! - **Resizing** is libtorch's kernel for 8-bit pixels, the one that torchvision calls: the same rounding.
//! - Of an animation the first picture is taken.
//! - A film is given as its frames. All of them are used, an odd one at the end twice. They are `fps` to the second:
//!   the row's number, else the processor's, else 2, at which the published models were trained.

mod colour;
mod decode;
mod jpeg;
mod orientation;
mod patches;
mod processor;
mod resize;
mod settings;
mod source;

pub use processor::Processor;
pub use settings::PixelLimits;

pub(super) use decode::probe;
pub(super) use source::Source;

#[cfg(test)]
mod tests;
