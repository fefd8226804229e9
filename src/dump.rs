//! `ringmain dump`: looks at data directories, segments and arenas while no broker runs on them. Prints what there is,
//! says what is damaged, or writes out what can still be read. Never writes to what it reads.
//!
//! Exit codes: 0 sound (or printed), 1 damage found, 2 it could not be read at all.

mod arena;
mod batches;
mod extract;
mod out;
mod place;
mod report;
mod source;
mod walk;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use ringmain_core::ids::TopicId;

use crate::cli::DumpArgs;
use crate::output::is_closed_pipe;

use self::extract::Extract;
use self::out::Out;
use self::place::{Names, Place};
use self::report::Report;
use self::walk::{Visitor, walk_log};

/// Damage was found.
const DAMAGED: u8 = 1;
/// Nothing could be read.
const UNUSABLE: u8 = 2;

/// What of the runs is asked for.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    topic: Option<TopicId>,
    partition: Option<u32>,
}

impl Filter {
    /// Whether a partition is asked for.
    pub fn takes(&self, key: ringmain_core::ids::PartitionKey) -> bool {
        self.topic.is_none_or(|topic| topic == key.topic) && self.partition.is_none_or(|number| number == key.partition)
    }
}

/// Runs the command. Exit code 1 is for damage alone.
pub fn dump(args: &DumpArgs) -> ExitCode {
    match run(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(DAMAGED),
        // With `--verify` success would say that all was looked at.
        Err(error) if is_closed_pipe(&error) && !args.verify => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ringmain: {}", format!("{error:#}").replace('\n', " "));
            ExitCode::from(UNUSABLE)
        }
    }
}

/// Says whether all that was read is sound.
fn run(args: &DumpArgs) -> Result<bool> {
    let only_arenas = !args.arena.is_empty() && args.paths.is_empty() && args.data.is_none();
    let mut place = if only_arenas {
        Place::default()
    } else if args.paths.is_empty() {
        let dir = args.data.clone().unwrap_or_else(|| PathBuf::from("ringmain-data"));
        Place::data_dir(&dir, args.force)?
    } else {
        Place::paths(&args.paths, args.force)?
    };
    let filter = filter_of(args, &place.names)?;
    if args.extract.is_some() {
        let topic = filter.topic.unwrap_or_default();
        let name = place.names.of(topic);
        let mut extract = Extract::new(name, args.format, filter);
        visit(&mut place, args, &mut extract)?;
        extract.write(&mut place, &args.arena, args.force)?;
        return Ok(true);
    }
    let out = Out::new(args.json);
    let mut report = Report::new(out, place.names.clone(), filter, args.verify, args.records);
    report.start(&place)?;
    visit(&mut place, args, &mut report)?;
    for file in &args.arena {
        arena::dump(file, args.force, &mut report)?;
    }
    report.finish()
}

fn filter_of(args: &DumpArgs, names: &Names) -> Result<Filter> {
    let (topic, partition) = match &args.extract {
        Some(extract) => (Some(&extract.topic), extract.partition),
        None => (args.topic.as_ref(), args.partition),
    };
    let topic = topic.map(|topic| names.find(topic)).transpose()?;
    Ok(Filter { topic, partition })
}

fn visit(place: &mut Place, args: &DumpArgs, visitor: &mut impl Visitor) -> Result<()> {
    let root = place.root.clone();
    for log in &mut place.logs {
        walk_log(log, &root, args.segment, visitor)?;
    }
    Ok(())
}
