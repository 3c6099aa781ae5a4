//! Everything that a file may hold, as RGB with 8 bits a channel.

/// Lays one pixel over white, with the rounding of Pillow's `alpha_composite`: a blend in 1/128 of a level, then
/// a division by 255.
pub(super) fn over_white(colour: u8, alpha: u8) -> u8 {
    const HALF: u32 = 0x80 << 7;
    let share = u32::from(alpha) * 128;
    let sum = u32::from(colour) * share + 255 * (255 * 128 - share) + HALF;
    let divided = ((sum >> 8) + sum) >> 8;
    (divided >> 7) as u8
}

/// Inks as Adobe stores them in JPEG files (255 is none), with the rounding of Pillow's conversion.
pub(super) fn from_inverted_cmyk([cyan, magenta, yellow, black]: [u8; 4]) -> [u8; 3] {
    let ink = |stored: u8| {
        let product = u32::from(255 - stored) * u32::from(black) + 128;
        let covered = ((product >> 8) + product) >> 8;
        (u32::from(black) - covered.min(u32::from(black))) as u8
    };
    [ink(cyan), ink(magenta), ink(yellow)]
}

/// Pixels of `channels` values each (grey, grey and alpha, RGB, RGB and alpha) as RGB.
pub(super) fn to_rgb(pixels: Vec<u8>, channels: usize) -> Vec<u8> {
    match channels {
        1 => pixels.into_iter().flat_map(|grey| [grey; 3]).collect(),
        2 => pixels.chunks_exact(2).flat_map(|pixel| [over_white(pixel[0], pixel[1]); 3]).collect(),
        4 => (pixels.chunks_exact(4))
            .flat_map(|pixel| {
                [pixel[0], pixel[1], pixel[2]].map(|colour| over_white(colour, pixel[3]))
            })
            .collect(),
        _ => pixels,
    }
}
