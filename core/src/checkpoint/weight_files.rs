//! The weight files of a checkpoint in the making: which tensor goes where, the headers, the index.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::sized_file::SizedFile;
use super::{header, index};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::size::size;

/// A tensor that is going to be written.
#[derive(Debug)]
pub(crate) struct NewTensor<'a> {
    /// Name in the checkpoint.
    pub(crate) name: &'a str,
    /// Element type.
    pub(crate) dtype: Dtype,
    /// Dimensions, outermost first.
    pub(crate) shape: &'a [usize],
    /// Size.
    pub(crate) num_bytes: usize,
}

/// Weight files whose headers are written and whose tensors may come in any order and in parts.
#[derive(Debug)]
pub(crate) struct WeightFiles {
    files: Vec<SizedFile>,
    /// Of every tensor: its file, and its start there.
    places: Vec<(usize, u64)>,
}

impl WeightFiles {
    /// Starts the files of `tensors` in the folder `directory`: in their order, a new file when the next one
    /// would make it larger than `max_file_bytes`, and an index when there are several. Messages name files
    /// as they will be called in the folder `target`.
    ///
    /// # Errors
    /// [`Error::File`] when the disk has no room for all of them; [`Error::Tensor`] when a name occurs twice
    /// in one file; [`Error::Io`].
    pub(crate) fn create(
        directory: &Path,
        target: &Path,
        tensors: &[NewTensor<'_>],
        max_file_bytes: u64,
    ) -> Result<Self> {
        let total_bytes = tensors.iter().map(|tensor| tensor.num_bytes as u64).sum();
        check_room(directory, target, total_bytes)?;
        let dealt = deal(tensors, max_file_bytes);
        let mut files = Vec::new();
        let mut places = vec![(0, 0); tensors.len()];
        let mut weight_map = Map::new();
        for (file, members) in dealt.iter().enumerate() {
            let name = match dealt.len() {
                1 => index::SINGLE_FILE.to_owned(),
                num_files => format!("model-{:05}-of-{num_files:05}.safetensors", file + 1),
            };
            let named = members.iter().map(|member| {
                let NewTensor { name, dtype, shape, .. } = tensors[*member];
                (name, dtype, shape)
            });
            let header = header::encode(named, &[("format", "pt")])?;
            let mut offset_bytes = header.len() as u64;
            for member in members {
                places[*member] = (file, offset_bytes);
                offset_bytes += tensors[*member].num_bytes as u64;
                weight_map.insert(tensors[*member].name.to_owned(), json!(name));
            }
            let file = SizedFile::create(&directory.join(&name), target.join(&name), offset_bytes)?;
            file.write(0, &header)?;
            files.push(file);
        }
        if files.len() > 1 {
            let index = json!({
                "metadata": {"total_size": total_bytes},
                "weight_map": Value::Object(weight_map),
            });
            std::fs::write(directory.join(index::INDEX_FILE), format!("{index:#}"))
                .map_err(Error::io("write", target.join(index::INDEX_FILE)))?;
        }
        Ok(Self { files, places })
    }

    /// How many files there are, the index aside.
    pub(crate) fn num_files(&self) -> usize {
        self.files.len()
    }

    /// Where the tensor at position `tensor` starts in its file.
    pub(crate) fn offset_bytes(&self, tensor: usize) -> u64 {
        self.places[tensor].1
    }

    /// Writes `bytes` of the tensor at position `tensor`, from its byte `start_bytes` on. They go
    /// past the page cache if they lie as far behind a multiple of 4,096 bytes in memory as in the file.
    ///
    /// # Errors
    /// [`Error::Io`], for example when the disk is full.
    pub(crate) fn write(&self, tensor: usize, start_bytes: usize, bytes: &[u8]) -> Result<()> {
        let (file, offset_bytes) = self.places[tensor];
        self.files[file].write(offset_bytes + start_bytes as u64, bytes)
    }
}

/// Which tensors go into which file, in their order. Readers that map a file rely on every tensor being aligned
/// to its own element: where it would not be, the widest elements of the file come first.
fn deal(tensors: &[NewTensor<'_>], max_file_bytes: u64) -> Vec<Vec<usize>> {
    let mut files = vec![Vec::new()];
    let mut used_bytes = 0;
    for (position, tensor) in tensors.iter().enumerate() {
        let num_bytes = tensor.num_bytes as u64;
        if used_bytes > 0 && used_bytes + num_bytes > max_file_bytes {
            files.push(Vec::new());
            used_bytes = 0;
        }
        used_bytes += num_bytes;
        if let Some(file) = files.last_mut() {
            file.push(position);
        }
    }
    let width = |position: &usize| tensors[*position].dtype.size_bytes();
    for file in &mut files {
        let mut start = 0;
        let is_aligned = file.iter().all(|position| {
            let is_aligned = usize::is_multiple_of(start, width(position));
            start += tensors[*position].num_bytes;
            is_aligned
        });
        if !is_aligned {
            file.sort_by_key(|position| std::cmp::Reverse(width(position)));
        }
    }
    files
}

/// Refuses to start what the file system of `directory` has no room for.
fn check_room(directory: &Path, target: &Path, num_bytes: u64) -> Result<()> {
    let found = rustix::fs::statvfs(directory)
        .map_err(|error| Error::io("ask for the free space of", target)(error.into()))?;
    let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
    // Some network file systems say nothing, by saying that they are of no size.
    if found.f_blocks == 0 || num_bytes <= free_bytes {
        return Ok(());
    }
    let message = format!(
        "takes {}, but the disk has {} free; make room or choose a folder on another disk",
        size(num_bytes),
        size(free_bytes)
    );
    Err(Error::file(target, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Checkpoint;

    fn tensor<'a>(name: &'a str, dtype: Dtype, shape: &'a [usize]) -> NewTensor<'a> {
        let num_bytes = shape.iter().product::<usize>() * dtype.size_bytes();
        NewTensor { name, dtype, shape, num_bytes }
    }

    #[test]
    fn tensors_written_in_parts_and_out_of_order_are_found_again_and_aligned() {
        let folder = tempfile::tempdir().unwrap();
        let tensors = [
            tensor("codes", Dtype::U8, &[3]),
            tensor("wide", Dtype::F32, &[2]),
            tensor("half", Dtype::BF16, &[2]),
        ];
        for max_file_bytes in [8, 100] {
            let directory = folder.path().join(max_file_bytes.to_string());
            std::fs::create_dir(&directory).unwrap();
            let files =
                WeightFiles::create(&directory, &directory, &tensors, max_file_bytes).unwrap();
            assert_eq!(files.num_files(), if max_file_bytes == 8 { 3 } else { 1 });
            files.write(2, 0, &[9, 10, 11, 12]).unwrap();
            files.write(1, 4, &[5, 6, 7, 8]).unwrap();
            files.write(1, 0, &[1, 2, 3, 4]).unwrap();
            files.write(0, 0, &[13, 14, 15]).unwrap();
            std::fs::write(directory.join("config.json"), "{}").unwrap();
            let checkpoint = Checkpoint::open(&directory).unwrap();
            for (name, values) in
                [("wide", &[1_u8, 2, 3, 4, 5, 6, 7, 8][..]), ("half", &[9, 10, 11, 12])]
            {
                let stored = &checkpoint.tensors[name];
                let bytes = std::fs::read(&checkpoint.files[stored.file].path).unwrap();
                let start = stored.offset_bytes as usize;
                assert_eq!(start % stored.dtype.size_bytes(), 0, "{name}");
                assert_eq!(&bytes[start..start + stored.num_bytes], values, "{name}");
            }
        }
    }

    #[test]
    fn what_the_disk_has_no_room_for_is_refused_before_anything_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let shape = [1 << 60];
        let tensors = [tensor("w", Dtype::F32, &shape)];
        let error = WeightFiles::create(folder.path(), Path::new("out"), &tensors, 100);
        let message = error.unwrap_err().to_string();
        assert!(message.contains("out: takes 4294967296.00 GiB"), "{message}");
        assert!(message.contains("GiB free; make room"), "{message}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
