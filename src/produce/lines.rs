//! Lines of a byte stream, read in large pieces and lent without a copy. A line ends with `\n`, which is not part of it; a
//! `\r` before it is. The last line need not end.

use std::io::{ErrorKind, Read};

use anyhow::{Context, Result, bail};
use ringmain_core::limits::RECORD_BYTES_MAX;

/// Bytes asked for at once.
const READ_BYTES: usize = 1024 * 1024;

/// Owns a buffer of at most one longest line and one read. Pull lines with [`Lines::next_line`] until it has none, then
/// [`Lines::fill`].
pub struct Lines<R> {
    input: R,
    buffer: Vec<u8>,
    /// Where the first line not given yet starts, and up to where there is none that ends.
    start: usize,
    searched: usize,
    end: usize,
    given: u64,
    ended: bool,
}

impl<R: Read> Lines<R> {
    pub fn new(input: R) -> Self {
        let buffer = vec![0; READ_BYTES];
        Self { input, buffer, start: 0, searched: 0, end: 0, given: 0, ended: false }
    }

    /// The next line that is there as a whole.
    pub fn next_line(&mut self) -> Result<Option<&[u8]>> {
        let (from, to, next) = match memchr::memchr(b'\n', &self.buffer[self.searched..self.end]) {
            Some(found) => (self.start, self.searched + found, self.searched + found + 1),
            None if self.ended && self.start < self.end => (self.start, self.end, self.end),
            None => {
                self.searched = self.end;
                if self.end - self.start > RECORD_BYTES_MAX {
                    return too_long(self.given + 1);
                }
                return Ok(None);
            }
        };
        self.given += 1;
        (self.start, self.searched) = (next, next);
        if to - from > RECORD_BYTES_MAX {
            return too_long(self.given);
        }
        Ok(Some(&self.buffer[from..to]))
    }

    /// Reads more; waits until there is some. False when all of the input has been read and given.
    pub fn fill(&mut self) -> Result<bool> {
        if self.ended {
            return Ok(self.start < self.end);
        }
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.searched -= self.start;
        self.start = 0;
        if self.end == self.buffer.len() {
            self.buffer.resize(self.end + READ_BYTES, 0);
        }
        loop {
            match self.input.read(&mut self.buffer[self.end..]) {
                Ok(0) => {
                    self.ended = true;
                    return Ok(self.start < self.end);
                }
                Ok(bytes) => {
                    self.end += bytes;
                    return Ok(true);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("can't read the input"),
            }
        }
    }
}

fn too_long<T>(line: u64) -> Result<T> {
    bail!("line {line} has more than {RECORD_BYTES_MAX} bytes: a record may not be larger")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Gives its bytes in pieces of changing size.
    struct Pieces<'a>(&'a [u8], usize);

    impl Read for Pieces<'_> {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            self.1 = self.1 * 7 % 11 + 1;
            let bytes = self.1.min(self.0.len()).min(into.len());
            into[..bytes].copy_from_slice(&self.0[..bytes]);
            self.0 = &self.0[bytes..];
            Ok(bytes)
        }
    }

    fn all(input: impl Read) -> Result<Vec<Vec<u8>>> {
        let mut lines = Lines::new(input);
        let mut found = Vec::new();
        loop {
            while let Some(line) = lines.next_line()? {
                found.push(line.to_vec());
            }
            if !lines.fill()? {
                return Ok(found);
            }
        }
    }

    #[test]
    fn empty_lines_and_carriage_returns_are_kept_and_the_last_line_need_not_end() {
        assert_eq!(all(&b"a\r\n\n\xff\xfe\nlast"[..]).unwrap(), [&b"a\r"[..], b"", b"\xff\xfe", b"last"]);
        assert_eq!(all(&b"a\n"[..]).unwrap(), [b"a"]);
        assert_eq!(all(&b"\n\n"[..]).unwrap(), [b"", b""]);
        assert!(all(&b""[..]).unwrap().is_empty());
    }

    #[test]
    fn the_longest_line_passes_and_one_byte_more_does_not() {
        let mut input = vec![b'x'; RECORD_BYTES_MAX];
        input.push(b'\n');
        assert_eq!(all(&input[..]).unwrap()[0].len(), RECORD_BYTES_MAX);
        assert_eq!(all(&input[..RECORD_BYTES_MAX]).unwrap().len(), 1);
        let long = [b"first\n", &[b'x'; RECORD_BYTES_MAX + 1][..]].concat();
        for long in [&long[..], &[&long[..], b"\n"].concat()] {
            assert!(all(long).unwrap_err().to_string().starts_with("line 2 has more than"));
        }
    }

    proptest! {
        #[test]
        fn any_pieces_give_the_lines_of_the_whole(
            lines in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..50),
            ended in any::<bool>(),
        ) {
            let lines: Vec<Vec<u8>> =
                lines.into_iter().map(|line| line.into_iter().filter(|byte| *byte != b'\n').collect()).collect();
            let mut input = lines.join(&b'\n');
            let mut expected = lines.clone();
            if ended && !lines.is_empty() {
                input.push(b'\n');
            } else if lines.last().is_some_and(Vec::is_empty) {
                // Nothing behind the last line end is no line.
                expected.pop();
            }
            prop_assert_eq!(all(Pieces(&input, 3)).unwrap(), expected);
        }
    }
}
