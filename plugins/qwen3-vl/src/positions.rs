//! Places and positions: which tokens stand for pictures, and where every token stands in time, height and
//! width.
//!
//! Text stands at the same number on all three axes and counts on. A picture stands at one time; its cells
//! count down and across from there, and what follows goes on after its longer side. (`get_rope_index` of
//! transformers.)

use blockstreamer_core::{Error, Result};

/// Pictures or films: what they need and what they got.
#[derive(Debug)]
pub(crate) struct Media {
    /// As messages say it: `picture`.
    pub(crate) name: &'static str,
    /// Id of the token that stands for one cell.
    token: i64,
    /// Number of the item, and its rows and columns of cells, for every frame in order.
    pub(crate) frames: Vec<(usize, [usize; 2])>,
    /// How many frames have their places.
    num_placed: usize,
    /// Places of the cells among the flattened positions.
    pub(crate) places: Vec<i64>,
}

impl Media {
    pub(crate) fn new(name: &'static str, token: u32) -> Self {
        let (frames, places) = (Vec::new(), Vec::new());
        Self { name, token: i64::from(token), frames, num_placed: 0, places }
    }
}

/// The tokens of a batch, and the positions they get.
#[derive(Debug)]
pub(crate) struct Rows {
    ids: Vec<i64>,
    mask: Option<Vec<bool>>,
    segments: Option<Vec<i64>>,
    sequence: usize,
    /// Time, height and width of every token; padding stands at 0.
    pub(crate) positions: [Vec<i64>; 3],
}

impl Rows {
    /// Flattened rows of `sequence` tokens each.
    pub(crate) fn new(
        ids: Vec<i64>,
        mask: Option<Vec<bool>>,
        segments: Option<Vec<i64>>,
        sequence: usize,
    ) -> Result<Self> {
        let fits = |length: Option<usize>| length.is_none_or(|length| length == ids.len());
        if !fits(mask.as_ref().map(Vec::len)) || !fits(segments.as_ref().map(Vec::len)) {
            return Err(Error::usage(
                "input_ids, attention_mask and segments must all be [batch, sequence]",
            ));
        }
        let positions = [vec![0; ids.len()], vec![0; ids.len()], vec![0; ids.len()]];
        Ok(Self { ids, mask, segments, sequence, positions })
    }

    /// Gives every token its position and every frame of `media` its places, in order.
    ///
    /// # Errors
    /// [`Error::Usage`] that names the row when there are more or fewer placeholders than cells.
    pub(crate) fn place(&mut self, media: &mut [Media]) -> Result<()> {
        let mut next = 0;
        let mut at = 0;
        while at < self.ids.len() {
            if at.is_multiple_of(self.sequence) || self.segment(at) != self.segment(at - 1) {
                next = 0;
            }
            if !self.is_token(at) {
                at += 1;
                continue;
            }
            let Some(media) = media.iter_mut().find(|media| media.token == self.ids[at]) else {
                self.set(at, [next; 3]);
                next += 1;
                at += 1;
                continue;
            };
            let [height, width] = self.next_frame(at, media)?;
            for cell in 0..height * width {
                let (row, column) = ((cell / width) as i64, (cell % width) as i64);
                self.set(at + cell, [next, next + row, next + column]);
                media.places.push((at + cell) as i64);
            }
            next += height.max(width) as i64;
            at += height * width;
        }
        for media in media {
            if let Some((number, _)) = media.frames.get(media.num_placed) {
                let name = media.name;
                let needed = media.frames.iter().map(|(_, [h, w])| h * w).sum::<usize>();
                let (found, last) = (media.places.len(), self.num_rows().saturating_sub(1));
                return Err(Error::usage(format!(
                    "the batch brings {name} {number}, but no row names it: the {name}s need {needed} \
                     placeholders (token {}), and rows 0 to {last} hold {found}",
                    media.token
                )));
            }
        }
        Ok(())
    }

    /// The frame whose cells begin at `at`.
    fn next_frame(&self, at: usize, media: &mut Media) -> Result<[usize; 2]> {
        let (name, token) = (media.name, media.token);
        let row = at / self.sequence;
        let end = (row + 1) * self.sequence;
        let same = |place: &usize| {
            self.is_token(*place)
                && self.ids[*place] == token
                && self.segment(*place) == self.segment(at)
        };
        let found = (at..end).take_while(same).count();
        let Some((number, [height, width])) = media.frames.get(media.num_placed).copied() else {
            let count = media.frames.len();
            return Err(Error::usage(format!(
                "row {row} has {found} more placeholders for {name}s (token {token}) from position {} on than \
                 the cells of the {count} {name} frames that the batch brings",
                at % self.sequence
            )));
        };
        if found < height * width {
            return Err(Error::usage(format!(
                "row {row} has {found} placeholders (token {token}) from position {} on for {name} {number} of \
                 the batch, whose {height} x {width} cells need {}: was the row cut inside a {name}?",
                at % self.sequence,
                height * width
            )));
        }
        media.num_placed += 1;
        Ok([height, width])
    }

    fn set(&mut self, at: usize, position: [i64; 3]) {
        for (axis, value) in self.positions.iter_mut().zip(position) {
            axis[at] = value;
        }
    }

    fn is_token(&self, at: usize) -> bool {
        self.mask.as_ref().is_none_or(|mask| mask[at])
    }

    fn segment(&self, at: usize) -> i64 {
        self.segments.as_ref().map_or(0, |segments| segments[at])
    }

    fn num_rows(&self) -> usize {
        self.ids.len() / self.sequence.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: i64 = 7;
    const FILM: i64 = 8;

    fn media(pictures: &[[usize; 2]], films: &[&[[usize; 2]]]) -> [Media; 2] {
        let mut media = [Media::new("picture", IMAGE as u32), Media::new("film", FILM as u32)];
        media[0].frames = pictures.iter().copied().enumerate().collect();
        let frames = films.iter().enumerate();
        media[1].frames = frames
            .flat_map(|(number, film)| film.iter().map(move |frame| (number, *frame)))
            .collect();
        media
    }

    fn rows(ids: &[&[i64]]) -> Rows {
        Rows::new(ids.concat(), None, None, ids[0].len()).unwrap()
    }

    #[test]
    fn a_picture_stands_at_one_time_and_text_goes_on_after_its_longer_side() {
        let mut rows = rows(&[&[1, 1, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, 1, 1]]);
        let mut media = media(&[[2, 3]], &[]);
        rows.place(&mut media).unwrap();
        assert_eq!(rows.positions[0], [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]);
        assert_eq!(rows.positions[1], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]);
        assert_eq!(rows.positions[2], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]);
        assert_eq!(media[0].places, [2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn frames_of_a_film_are_pictures_of_their_own_and_both_kinds_keep_their_order() {
        let row = [FILM, FILM, 1, IMAGE, 1, FILM, FILM, IMAGE, IMAGE];
        let mut rows = rows(&[&row, &[1, 1, 1, 1, 1, 1, 1, 1, IMAGE]]);
        let mut media = media(&[[1, 1], [2, 1], [1, 1]], &[&[[1, 2], [1, 2]]]);
        rows.place(&mut media).unwrap();
        assert_eq!(rows.positions[0][..9], [0, 0, 2, 3, 4, 5, 5, 7, 7]);
        assert_eq!(rows.positions[1][..9], [0, 0, 2, 3, 4, 5, 5, 7, 8]);
        assert_eq!(rows.positions[2][..9], [0, 1, 2, 3, 4, 5, 6, 7, 7]);
        assert_eq!(media[0].places, [3, 7, 8, 17]);
        assert_eq!(media[1].places, [0, 1, 5, 6]);
    }

    #[test]
    fn padding_counts_for_nothing_and_a_packed_sample_starts_anew() {
        let ids = vec![0, 0, 1, IMAGE, IMAGE, 1, /**/ 1, IMAGE, 1, IMAGE, IMAGE, 0];
        let mask = [false, false, true, true, true, true, true, true, true, true, true, false];
        let segments = vec![0, 0, 0, 0, 0, 0, /**/ 4, 4, 4, 5, 5, 5];
        let mut rows = Rows::new(ids, Some(mask.to_vec()), Some(segments), 6).unwrap();
        let mut media = media(&[[2, 1], [1, 1], [1, 2]], &[]);
        rows.place(&mut media).unwrap();
        assert_eq!(rows.positions[0], [0, 0, 0, 1, 1, 3, /**/ 0, 1, 2, 0, 0, 0]);
        assert_eq!(rows.positions[1], [0, 0, 0, 1, 2, 3, /**/ 0, 1, 2, 0, 0, 0]);
        assert_eq!(rows.positions[2], [0, 0, 0, 1, 1, 3, /**/ 0, 1, 2, 0, 1, 0]);
        assert_eq!(media[0].places, [3, 4, 7, 9, 10]);
    }

    #[test]
    fn pictures_without_text_between_them_are_told_apart() {
        let mut rows = rows(&[&[IMAGE; 5]]);
        let mut media = media(&[[1, 2], [1, 3]], &[]);
        rows.place(&mut media).unwrap();
        assert_eq!(rows.positions[0], [0, 0, 2, 2, 2]);
        assert_eq!(rows.positions[2], [0, 1, 2, 3, 4]);
    }

    #[test]
    fn placeholders_that_do_not_fit_are_refused_with_row_and_counts() {
        let text = [1, 1, 1, 1];
        for (row, pictures, wanted) in [
            (
                [1, IMAGE, IMAGE, IMAGE],
                vec![[2, 2]],
                ["row 1 has 3 placeholders", "2 x 2 cells need 4"],
            ),
            ([IMAGE, 1, IMAGE, 1], vec![[1, 2]], ["row 1 has 1 placeholders", "picture 0"]),
            ([IMAGE, IMAGE, 1, 1], vec![[1, 1]], ["row 1 has 1 more placeholders", "position 1"]),
            ([1, 1, 1, IMAGE], vec![], ["row 1 has 1 more placeholders", "the 0 picture frames"]),
            (
                [1, 1, 1, IMAGE],
                vec![[1, 1], [1, 1]],
                ["picture 1, but no row", "need 2 placeholders"],
            ),
            ([1, FILM, 1, 1], vec![], ["row 1 has 1 more placeholders for films", "token 8"]),
        ] {
            let mut rows = rows(&[&text, &row]);
            let error = rows.place(&mut media(&pictures, &[])).unwrap_err().to_string();
            assert!(wanted.iter().all(|part| error.contains(part)), "{error}");
        }
        // A picture does not reach into the next row or sample.
        let mut across = rows(&[&[1, 1, 1, IMAGE], &[IMAGE, 1, 1, 1]]);
        let error = across.place(&mut media(&[[1, 2]], &[])).unwrap_err().to_string();
        assert!(error.contains("row 0 has 1 placeholders"), "{error}");
        let segments = Some(vec![0, 0, 1, 1]);
        let mut across = Rows::new(vec![1, IMAGE, IMAGE, 1], None, segments, 4).unwrap();
        let error = across.place(&mut media(&[[1, 2]], &[])).unwrap_err().to_string();
        assert!(error.contains("row 0 has 1 placeholders"), "{error}");
    }
}
