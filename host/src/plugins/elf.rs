//! Whether a shared library is whole. The system's loader maps a truncated one without a word, and the
//! process then dies of SIGBUS.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// 64-bit, little-endian: the first six bytes of the libraries of every platform we build for.
const MAGIC: [u8; 6] = [0x7f, b'E', b'L', b'F', 2, 1];
/// Size of the file header; the program headers follow it.
const HEADER_BYTES: usize = 64;
/// Program header type of a segment that is mapped.
const PT_LOAD: u64 = 1;

/// How many bytes the file must have according to its headers, if it has fewer.
/// A file that is no such library is left to the loader, which refuses it with its own words.
pub(super) fn missing_end(path: &Path) -> io::Result<Option<u64>> {
    let mut file = File::open(path)?;
    let num_bytes = file.metadata()?.len();
    let mut headers = Vec::new();
    // Far more than the program headers of any library need.
    file.by_ref().take(1 << 16).read_to_end(&mut headers)?;
    Ok(needed_bytes(&headers).filter(|needed| *needed > num_bytes))
}

/// Where the last segment or the section table ends, from the start of a file.
/// Offsets are those of `Elf64_Ehdr` and `Elf64_Phdr` in the System V ABI.
fn needed_bytes(headers: &[u8]) -> Option<u64> {
    if !headers.starts_with(&MAGIC) {
        return None;
    }
    if headers.len() < HEADER_BYTES {
        return Some(HEADER_BYTES as u64);
    }
    let number = |start: usize, width: usize| {
        let bytes = headers.get(start..start.checked_add(width)?)?;
        Some(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    };
    let (segments, sections) = (number(32, 8)?, number(40, 8)?);
    let (segment_bytes, num_segments) = (number(54, 2)?, number(56, 2)?);
    let (section_bytes, num_sections) = (number(58, 2)?, number(60, 2)?);
    let mut needed = sections.saturating_add(section_bytes * num_sections);
    needed = needed.max(segments.saturating_add(segment_bytes * num_segments));
    for index in 0..num_segments {
        let start = usize::try_from(segments.saturating_add(index * segment_bytes)).ok()?;
        // Headers that lie beyond what was read: the size of their table decides.
        let Some(kind) = number(start, 4) else { break };
        if kind == PT_LOAD {
            let end = number(start + 8, 8)?.saturating_add(number(start + 32, 8)?);
            needed = needed.max(end);
        }
    }
    Some(needed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_of_this_binary_is_noticed_and_the_whole_is_not() {
        let binary = std::env::current_exe().unwrap();
        assert_eq!(missing_end(&binary).unwrap(), None);
        let whole = std::fs::read(binary).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cut.so");
        for num_bytes in [6, 63, 64, 100, 4096, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..num_bytes]).unwrap();
            let needed = missing_end(&path).unwrap();
            assert!(needed.is_some_and(|needed| needed > num_bytes as u64), "{num_bytes}");
        }
    }

    #[test]
    fn a_file_without_sections_is_measured_by_its_segments() {
        let mut file = vec![0_u8; HEADER_BYTES + 56];
        file[..6].copy_from_slice(&MAGIC);
        file[32] = 64; // one program header after the file header
        file[54] = 56;
        file[56] = 1;
        assert_eq!(needed_bytes(&file), Some(120));
        file[64] = 1; // PT_LOAD from 4096, 16 bytes in the file
        file[64 + 9] = 16;
        file[64 + 32] = 16;
        assert_eq!(needed_bytes(&file), Some(4112));
        // Lies do not overflow.
        file[64 + 8..64 + 16].fill(0xff);
        file[40..48].fill(0xff);
        assert_eq!(needed_bytes(&file), Some(u64::MAX));
    }

    #[test]
    fn other_files_are_left_to_the_loader() {
        assert_eq!(needed_bytes(b""), None);
        assert_eq!(needed_bytes(b"model = \"none\""), None);
    }
}
