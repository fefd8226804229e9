//! The corpus of the fuzz targets as plain tests: each input that was worth keeping, and the seeds, through the bodies
//! that fuzz/ gives to libFuzzer. See fuzz/README.md.

#![allow(clippy::unwrap_used)]

#[path = "../fuzz/src/lib.rs"]
#[allow(dead_code, missing_docs, reason = "written for a crate of its own")]
mod targets;

use std::fs;
use std::path::{Path, PathBuf};

/// All committed inputs together.
const CORPUS_BYTES_MAX: u64 = 200 * 1024;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn inputs_of(target: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder("fuzz/corpus").join(target)).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// Runs an input and names it when it fails.
fn run(body: fn(&[u8]), what: &str, bytes: &[u8]) {
    let result = std::panic::catch_unwind(|| body(bytes));
    assert!(result.is_ok(), "{what} fails, see above");
}

#[test]
fn every_input_of_the_corpus_passes() {
    for (target, body) in targets::TARGETS {
        let inputs = inputs_of(target);
        assert!(inputs.len() >= 2, "target {target} has no corpus");
        for path in inputs {
            run(*body, &path.display().to_string(), &fs::read(&path).unwrap());
        }
    }
}

/// With RINGMAIN_BLESS=1 the seeds are also written into the corpus.
#[test]
fn every_seed_passes_cut_and_with_any_byte_changed() {
    let bless = std::env::var_os("RINGMAIN_BLESS").is_some();
    for (target, name, bytes) in targets::seeds::seeds(&folder("tests/golden")) {
        let (_, body) = targets::TARGETS.iter().find(|(known, _)| *known == target).unwrap();
        run(*body, &format!("seed {name} of {target}"), &bytes);
        // Not each place of the larger ones: a few hundred tell as much.
        let step = bytes.len().div_ceil(200);
        for at in (0..bytes.len()).step_by(step) {
            run(*body, &format!("seed {name} of {target}, cut at {at}"), &bytes[..at]);
            let mut changed = bytes.clone();
            changed[at] ^= 0x80 >> (at % 8);
            run(*body, &format!("seed {name} of {target}, byte {at} changed"), &changed);
        }
        if bless {
            let folder = folder("fuzz/corpus").join(target);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(format!("seed-{name}")), bytes).unwrap();
        }
    }
}

#[test]
fn the_corpus_is_small_and_has_a_folder_for_each_target() {
    let mut bytes = 0;
    let mut folders: Vec<String> = Vec::new();
    for entry in fs::read_dir(folder("fuzz/corpus")).unwrap() {
        let entry = entry.unwrap();
        folders.push(entry.file_name().into_string().unwrap());
        bytes += inputs_of(folders.last().unwrap()).iter().map(|path| path.metadata().unwrap().len()).sum::<u64>();
    }
    folders.sort();
    let mut names: Vec<&str> = targets::TARGETS.iter().map(|(name, _)| *name).collect();
    names.sort_unstable();
    assert_eq!(folders, names);
    assert!(bytes <= CORPUS_BYTES_MAX, "the corpus has {bytes} bytes");
}

#[test]
fn the_seeds_are_whole() {
    // What the targets would pass over in silence would be of no use as a start.
    let seeds = targets::seeds::seeds(&folder("tests/golden"));
    for (target, _) in targets::TARGETS {
        assert!(seeds.iter().any(|(of, _, _)| of == target), "target {target} has no seed");
    }
    for (_, name, bytes) in seeds.iter().filter(|(target, _, _)| *target == "segment_recovery") {
        let mut files = targets::segment_recovery::files_of(bytes);
        let log_id = targets::footer::LOG_ID;
        let segment_bytes = targets::segment_recovery::SEGMENT_BYTES;
        let recovered = ringmain_core::recover::recover(&mut files, log_id, segment_bytes).unwrap();
        assert_eq!(recovered.partitions.len(), 3, "{name}");
        assert!(recovered.lost.is_empty(), "{name}");
    }
}
