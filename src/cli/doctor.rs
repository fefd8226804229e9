//! Flags of `doctor`.

use clap::Args;

use super::ServeArgs;

/// Flags of `doctor`: those of `serve`, whose start is looked at, and its own.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Leave out the disk profile of 20 seconds.
    #[arg(long)]
    pub quick: bool,
    /// Print one line of JSON.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub serve: ServeArgs,
}
