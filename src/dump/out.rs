//! How findings are printed: lines of a table for people, or one JSON object a line.

use std::io::{BufWriter, StdoutLock, Write};

use anyhow::Result;
use serde_json::Value;

use crate::output::stdout;

/// Standard output.
pub struct Out {
    out: BufWriter<StdoutLock<'static>>,
    json: bool,
}

impl Out {
    pub fn new(json: bool) -> Self {
        Self { out: stdout(), json }
    }

    /// Prints one finding: an object, or a row.
    pub fn put(&mut self, object: &Value, row: impl FnOnce() -> String) -> Result<()> {
        if self.json {
            serde_json::to_writer(&mut self.out, object)?;
            self.out.write_all(b"\n")?;
        } else {
            writeln!(self.out, "{}", row())?;
        }
        Ok(())
    }

    /// Prints a line that JSON has no need of.
    pub fn heading(&mut self, line: impl FnOnce() -> String) -> Result<()> {
        if !self.json {
            writeln!(self.out, "{}", line())?;
        }
        Ok(())
    }

    pub fn flush(&mut self) -> Result<()> {
        Ok(self.out.flush()?)
    }
}

/// A row of the table: place, size, what it is (further to the right the deeper it lies), and what it says.
pub fn row(place: u64, bytes: u64, what: &str, says: &str) -> String {
    format!("{place:>12}  {bytes:>10}  {what:<14}  {says}").trim_end().to_owned()
}

/// The heading of such rows.
pub fn row_heading() -> String {
    format!("{:>12}  {:>10}  {:<14}  {}", "PLACE", "BYTES", "WHAT", "SAYS")
}
