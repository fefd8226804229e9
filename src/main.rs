//! The one binary: parse, run, exit code. 0 = done, 1 = failed, 2 = used wrongly.

mod bench;
mod budget;
mod cli;
mod client;
mod config;
mod consume;
mod doctor;
mod dump;
mod launch;
mod output;
mod produce;
mod signals;
mod topic;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) if output::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever the causes are made of.
            eprintln!("ringmain: {}", format!("{error:#}").replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Serve(args) => launch::serve(*args),
        Command::Topic(command) => topic::topic(command).map(|()| ExitCode::SUCCESS),
        Command::Produce(args) => produce::produce(args),
        Command::Consume(args) => consume::consume(args),
        Command::Doctor(args) => doctor::doctor(*args),
        Command::Dump(args) => Ok(dump::dump(&args)),
        Command::Bench(command) => bench::bench(command).map(|()| ExitCode::SUCCESS),
    }
}
