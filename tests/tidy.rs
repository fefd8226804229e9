//! Rules of the tree that no compiler checks: which crate may know which, what files may say, and that the documents name
//! only what exists. Think about the layering before you change a rule here.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Longest file of Rust, generated code aside: beyond it there is a seam that wants to be cut.
const FILE_LINES_MAX: usize = 600;

/// Who may know whom: `core <- wire <- {shard, master} <- ringmain`, and `bench -> wire, core`.
const ARROWS: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("wire", &["core"]),
    ("shard", &["core", "wire"]),
    ("master", &["core", "wire"]),
    ("bench", &["core", "wire"]),
    ("", &["core", "wire", "shard", "master", "bench"]),
];

/// Crates from outside that only some of ours may use.
const CONFINED: &[(&str, &[&str])] = &[
    ("glommio", &["shard", "bench"]),
    ("rtrb", &["shard"]),
    ("axum", &["master"]),
    ("redb", &["master"]),
    ("tokio", &["wire", "master", "bench", ""]),
    ("hdrhistogram", &["bench"]),
    ("clap", &[""]),
    ("anyhow", &["bench", ""]),
];

/// In shard/ only these (and what lies in folders of their names) speak to glommio, so that another runtime is a swap.
const GLOMMIO_FILES: &[&str] = &["runtime", "net", "files", "raw"];

/// Hosts that links may go to.
const LINK_HOSTS: &[&str] =
    &["flatbuffers.dev", "github.com", "keepachangelog.com", "semver.org", "www.apache.org", "127.0.0.1"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All files below `dir`, build products and hidden folders but .ci aside, as paths from the root.
fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let skipped = name == "target" || name == "ringmain-data" || (name.starts_with('.') && name != ".ci");
            match path.is_dir() {
                _ if skipped => {}
                true => folders.push(path),
                false => found.push(path),
            }
        }
    }
    found.sort();
    found
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

fn is_rust(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs")
}

fn is_generated(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "generated")
}

/// Files of Rust of one of our crates; "" is the root package.
fn rust_of(package: &str) -> Vec<PathBuf> {
    let folders: &[&str] = if package.is_empty() { &["src", "tests"] } else { &[package] };
    let all = folders.iter().map(|folder| root().join(folder)).filter(|folder| folder.exists());
    all.flat_map(|folder| files_below(&folder)).filter(|path| is_rust(path)).collect()
}

/// Code without what follows `//` on a line: rules are about what is used, not about what is talked of.
fn code(path: &Path) -> String {
    let text = read(path);
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Whether `name` is used as a path root: `name::…`, or `use name;`.
fn uses(code: &str, name: &str) -> bool {
    let boundary = |at: usize| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
    let ends = |rest: &str| rest.starts_with("::") || rest.starts_with(';') || rest.starts_with(" as ");
    code.match_indices(name).any(|(at, _)| boundary(at) && ends(&code[at + name.len()..]))
}

/// Names in the tables of a Cargo.toml that list dependencies.
fn dependencies(package: &str) -> BTreeSet<String> {
    let text = read(&root().join(package).join("Cargo.toml"));
    let mut listed = BTreeSet::new();
    let mut inside = false;
    for line in text.lines() {
        if let Some(table) = line.strip_prefix('[') {
            inside = matches!(table.trim_end_matches(']'), "dependencies" | "dev-dependencies" | "build-dependencies");
        } else if let Some((name, _)) = line.split_once(['.', ' ', '=']).filter(|_| inside && !line.starts_with('#')) {
            listed.insert(name.to_owned());
        }
    }
    listed.remove("");
    listed
}

fn packages() -> impl Iterator<Item = &'static str> {
    ARROWS.iter().map(|(package, _)| *package)
}

#[test]
fn no_crate_knows_one_that_it_may_not_know() {
    for (package, may_know) in ARROWS {
        let ours = ["core", "wire", "shard", "master", "bench"];
        let forbidden: Vec<&str> =
            ours.into_iter().filter(|other| other != package && !may_know.contains(other)).collect();
        let listed = dependencies(package);
        let sources: Vec<(PathBuf, String)> =
            rust_of(package).into_iter().map(|path| (path.clone(), code(&path))).collect();
        for other in forbidden {
            assert!(!listed.contains(&format!("ringmain-{other}")), "{package}/Cargo.toml lists ringmain-{other}");
            for (path, code) in &sources {
                assert!(!uses(code, &format!("ringmain_{other}")), "{} uses ringmain-{other}", shown(path));
            }
        }
    }
}

#[test]
fn crates_from_outside_stay_where_they_belong() {
    for (name, may_use) in CONFINED {
        for package in packages().filter(|package| !may_use.contains(package)) {
            assert!(!dependencies(package).contains(*name), "{package}/Cargo.toml lists {name}");
        }
    }
}

#[test]
fn only_a_few_files_of_shard_speak_to_glommio() {
    let src = root().join("shard/src");
    for path in files_below(&src).into_iter().filter(|path| is_rust(path)) {
        let inside = path.strip_prefix(&src).unwrap();
        let first = inside.components().next().unwrap().as_os_str().to_string_lossy().into_owned();
        if !GLOMMIO_FILES.contains(&first.trim_end_matches(".rs")) {
            assert!(!uses(&code(&path), "glommio"), "{} names glommio", shown(&path));
        }
    }
}

#[test]
fn every_dependency_is_used_and_has_a_reason_in_the_notes() {
    let notes = read(&root().join("NOTES.md"));
    for package in packages() {
        let all: String = rust_of(package).iter().map(|path| code(path)).collect();
        for name in dependencies(package) {
            let used = uses(&all, &name.replace('-', "_"));
            assert!(used, "{package}/Cargo.toml lists {name}, which nothing there uses");
            let ours = name.starts_with("ringmain-");
            assert!(ours || notes.contains(&format!("| {name} |")), "NOTES.md does not say why there is {name}");
        }
    }
}

#[test]
fn no_file_of_rust_is_too_long() {
    for path in files_below(root()).into_iter().filter(|path| is_rust(path) && !is_generated(path)) {
        let lines = read(&path).lines().count();
        assert!(lines <= FILE_LINES_MAX, "{} has {lines} lines, {FILE_LINES_MAX} are allowed", shown(&path));
    }
}

#[test]
fn files_name_no_machine_and_no_host_but_the_known_ones() {
    // Put together here, so that this file does not break its own rule.
    let folders = ["work", "root", "home"].map(|folder| format!("/{folder}/"));
    for path in files_below(root()) {
        // What is no text is no file of ours.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        for (number, line) in text.lines().enumerate() {
            let place = format!("{}:{}", shown(&path), number + 1);
            for folder in &folders {
                let starts = |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "-_.}/".contains(c));
                let named = line.match_indices(folder.as_str()).any(|(at, _)| starts(at));
                assert!(!named, "{place} names a path of some machine: {line}");
            }
            for (_, link) in line.match_indices("://").map(|(at, _)| line.split_at(at + 3)) {
                let host: String = link.chars().take_while(|c| c.is_alphanumeric() || ".-".contains(*c)).collect();
                let web = line.contains("http://") || line.contains("https://");
                let known = host.is_empty() || !host.contains('.') || LINK_HOSTS.contains(&host.as_str());
                assert!(!web || known, "{place} links to {host}");
            }
        }
    }
    let lock = read(&root().join("Cargo.lock"));
    let index = "source = \"registry+https://github.com/rust-lang/crates.io-index\"";
    for line in lock.lines().filter(|line| line.starts_with("source = ")) {
        assert_eq!(line, index, "Cargo.lock takes a crate from elsewhere");
    }
}

fn documents() -> Vec<PathBuf> {
    files_below(root()).into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

#[test]
fn links_of_the_documents_lead_to_files() {
    for document in documents() {
        let text = read(&document);
        for (_, link) in text.match_indices("](").map(|(at, _)| text.split_at(at + 2)) {
            let target = link.split([')', '#']).next().unwrap_or_default();
            if target.is_empty() || target.contains("://") {
                continue;
            }
            let path = document.parent().unwrap().join(target);
            assert!(path.exists(), "{} links to {target}, which is not there", shown(&document));
        }
    }
}

#[test]
fn metrics_that_the_documents_name_exist() {
    let source = read(&root().join("shard/src/metrics.rs"));
    for document in documents() {
        let text = read(&document);
        for (at, _) in text.match_indices("`ringmain_") {
            let name: String = text[at + 1..].chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect();
            let field = name.strip_prefix("ringmain_").unwrap_or_default();
            let is_crate = packages().any(|package| package == field || field.starts_with(&format!("{package}::")));
            let there = source.contains(&format!(" {field},")) || source.contains(&format!("{name} "));
            assert!(is_crate || there, "{} names {name}, which no code renders", shown(&document));
        }
    }
}

/// Lines of commands in a document, continued ones joined: from code blocks, and from code in the text.
fn commands(document: &Path) -> Vec<String> {
    let text = read(document).replace("\\\n", " ");
    let pieces = text.split(['`', '\n']).map(|piece| piece.trim().trim_start_matches("./target/release/"));
    pieces.filter(|piece| piece.starts_with("ringmain ")).map(str::to_owned).collect()
}

#[test]
fn commands_in_the_documents_use_flags_that_exist() {
    let mut helps: BTreeMap<Vec<String>, String> = BTreeMap::new();
    let mut checked = 0;
    for document in documents() {
        for command in commands(&document) {
            let words: Vec<String> = command.split_whitespace().skip(1).map(str::to_owned).collect();
            let is_name = |word: &&String| word.chars().all(|c| c.is_ascii_lowercase());
            let most = if words.first().is_some_and(|word| word == "topic" || word == "bench") { 2 } else { 1 };
            let subcommand: Vec<String> = words.iter().take(most).take_while(is_name).cloned().collect();
            let flags: Vec<&str> = words.iter().filter(|word| word.starts_with("--")).map(String::as_str).collect();
            if subcommand.is_empty() || flags.is_empty() {
                continue;
            }
            let help = helps.entry(subcommand.clone()).or_insert_with(|| help_of(&subcommand));
            for flag in flags {
                let flag = flag.split(['=', ',', ')', ';']).next().unwrap_or_default();
                assert!(
                    help.split_whitespace().any(|word| word.trim_end_matches(',') == flag),
                    "{}: `{command}`: there is no {flag}",
                    shown(&document)
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 20, "only {checked} flags found: the documents are read wrongly");
}

fn help_of(subcommand: &[String]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_ringmain")).args(subcommand).arg("--help").output().unwrap();
    assert!(output.status.success(), "`ringmain {} --help` fails", subcommand.join(" "));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_check_script_runs_the_readme_test_command() {
    let readme = read(&root().join("README.md"));
    let line = readme.lines().find(|line| line.starts_with("cargo test")).expect("the README says how to test");
    let command = line.split('#').next().unwrap_or_default().trim();
    assert!(read(&root().join(".ci/run")).contains(command), ".ci/run does not run `{command}`");
}
