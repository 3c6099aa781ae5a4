//! Which files may be plugins, and in which order they are tried.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use super::registry::Refused;

/// Environment variable with more plugin folders, separated by colons.
pub const PATH_VARIABLE: &str = "BLOCKSTREAMER_PLUGIN_PATH";

/// Beside the binary lie other libraries too; only files of this form are opened there.
const PREFIX: &str = "libblockstreamer_";

/// The files to try, in order: those of the folders given, then of [`PATH_VARIABLE`], then beside the
/// binary; by name within a folder. A file that is reached twice counts once.
/// Second: what was asked for and cannot be searched.
pub fn search(plugin_dirs: &[PathBuf]) -> (Vec<PathBuf>, Vec<Refused>) {
    let named = env::var_os(PATH_VARIABLE).unwrap_or_default();
    let named = env::split_paths(&named).filter(|folder| !folder.as_os_str().is_empty());
    let asked_for: Vec<_> = plugin_dirs.iter().cloned().chain(named).collect();
    let beside = env::current_exe().ok().and_then(|binary| Some(binary.parent()?.to_owned()));
    search_folders(&asked_for, beside.as_deref())
}

fn search_folders(asked_for: &[PathBuf], beside: Option<&Path>) -> (Vec<PathBuf>, Vec<Refused>) {
    let mut files = Vec::new();
    let mut refused = Vec::new();
    let mut add = |path: PathBuf| match path.canonicalize() {
        Ok(file) if !files.contains(&file) => files.push(file),
        Ok(_) => {}
        Err(error) => refused.push(Refused::new(&path, format!("cannot be opened: {error}"))),
    };
    let mut unreadable = Vec::new();
    for folder in asked_for {
        match libraries(folder) {
            Ok(paths) => paths.into_iter().for_each(&mut add),
            Err(error) => unreadable.push(Refused::new(
                folder,
                format!("cannot be searched for plugins: {error}; name a folder that exists"),
            )),
        }
    }
    // Nobody asked for the binary's own folder: if it cannot be listed, it offers nothing.
    let beside = beside.map(libraries).and_then(Result::ok).unwrap_or_default();
    let ours = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX))
    };
    beside.into_iter().filter(ours).for_each(&mut add);
    refused.splice(0..0, unreadable);
    (files, refused)
}

/// The `*.so` of a folder, by name.
fn libraries(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "so") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            fs::write(folder.path().join(file), "").unwrap();
        }
        folder
    }

    fn names(files: &[PathBuf]) -> Vec<&str> {
        files.iter().map(|file| file.file_name().unwrap().to_str().unwrap()).collect()
    }

    #[test]
    fn folders_keep_their_order_and_files_are_sorted_within_each() {
        let (first, second) = (folder(&["z.so", "a.so", "notes.txt"]), folder(&["b.so"]));
        let (files, refused) = search_folders(&[first.path().into(), second.path().into()], None);
        assert_eq!(names(&files), ["a.so", "z.so", "b.so"]);
        assert!(refused.is_empty());
    }

    #[test]
    fn beside_the_binary_only_files_with_our_prefix_are_tried_and_come_last() {
        let beside = folder(&["libc10.so", "libblockstreamer_x.so"]);
        let given = folder(&["z.so"]);
        let (files, _) = search_folders(&[given.path().into()], Some(beside.path()));
        assert_eq!(names(&files), ["z.so", "libblockstreamer_x.so"]);
    }

    #[test]
    fn a_file_reached_by_two_ways_counts_once() {
        let (given, other) = (folder(&["a.so"]), folder(&[]));
        std::os::unix::fs::symlink(given.path().join("a.so"), other.path().join("link.so"))
            .unwrap();
        let asked_for = [given.path().into(), given.path().join("."), other.path().into()];
        assert_eq!(names(&search_folders(&asked_for, Some(given.path())).0), ["a.so"]);
    }

    #[test]
    fn a_missing_folder_and_a_dangling_link_are_refused_by_name() {
        let given = folder(&["good.so"]);
        std::os::unix::fs::symlink("gone", given.path().join("dangling.so")).unwrap();
        let missing = given.path().join("nowhere");
        let (files, refused) = search_folders(&[missing.clone(), given.path().into()], None);
        assert_eq!(names(&files), ["good.so"]);
        assert_eq!(refused[0].path, missing);
        assert!(refused[0].reason.contains("cannot be searched"), "{}", refused[0].reason);
        assert!(refused[1].path.ends_with("dangling.so"));
        assert!(refused[1].reason.contains("cannot be opened"), "{}", refused[1].reason);
    }
}
