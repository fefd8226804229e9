//! Standard output that ends quietly when nobody reads it any more, and words for people.

use std::io::{self, BufWriter, StdoutLock, Write};

use serde::Serialize;

/// Buffered standard output: large writes, so that a fast `consume` is not one system call a record.
pub fn stdout() -> BufWriter<StdoutLock<'static>> {
    BufWriter::with_capacity(256 * 1024, io::stdout().lock())
}

/// Prints `value` as one line of JSON.
pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut out = stdout();
    serde_json::to_writer(&mut out, value)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Prints text that has its line ends.
pub fn print_text(text: &str) -> anyhow::Result<()> {
    let mut out = stdout();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Whether an error is only the reader of our output having gone (`ringmain consume t | head`).
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        let json = cause.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind);
        io.or(json) == Some(io::ErrorKind::BrokenPipe)
    })
}

/// Rows under headings, each column as wide as it needs; numbers to the right.
pub fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = headings
        .iter()
        .enumerate()
        .map(|(column, heading)| {
            rows.iter().map(|row| row[column].chars().count()).chain([heading.chars().count()]).max().unwrap_or(0)
        })
        .collect();
    let numeric = |column: usize| rows.iter().all(|row| row[column].parse::<f64>().is_ok()) && !rows.is_empty();
    let mut text = String::new();
    let headings: Vec<String> = headings.iter().map(|heading| (*heading).to_owned()).collect();
    for row in std::iter::once(&headings).chain(rows) {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            if numeric(column) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// A time as people read it: `2026-01-31 12:00:00 UTC`.
pub fn show_time(unix_ms: i64) -> String {
    let seconds = unix_ms.div_euclid(1000);
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Howard Hinnant's civil_from_days: eras of 400 years that start on the first of March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_civil_dates() {
        assert_eq!(show_time(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(show_time(951_782_399_999), "2000-02-28 23:59:59 UTC");
        assert_eq!(show_time(951_782_400_000), "2000-02-29 00:00:00 UTC");
        assert_eq!(show_time(-1), "1969-12-31 23:59:59 UTC");
    }

    #[test]
    fn a_table_lines_up_and_puts_numbers_right() {
        let rows = vec![vec!["a".to_owned(), "10".to_owned()], vec!["long".to_owned(), "9".to_owned()]];
        assert_eq!(table(&["NAME", "N"], &rows), "NAME   N\na     10\nlong   9\n");
    }

    #[test]
    fn a_closed_pipe_is_found_under_context() {
        let error = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe)).context("printing");
        assert!(is_closed_pipe(&error));
        assert!(!is_closed_pipe(&anyhow::anyhow!("else")));
    }
}
