//! Reading a segment in large pieces, with a second try where the device refuses.

use super::{ReadError, RecoverError, SegmentSource};
use crate::ids::SegmentSequence;
use crate::limits::DISK_BLOCK_BYTES;

/// Tries of a read that the device refuses.
const READ_TRIES: usize = 3;

/// Reads one segment through a window.
pub(crate) struct SegmentReader<'a, S> {
    source: &'a mut S,
    pub(crate) segment: SegmentSequence,
    pub(crate) file_bytes: u64,
    window: Vec<u8>,
    window_at: u64,
}

impl<'a, S: SegmentSource> SegmentReader<'a, S> {
    pub(crate) fn open(source: &'a mut S, segment: SegmentSequence) -> Result<Self, RecoverError> {
        let file_bytes = source.file_bytes(segment).map_err(|error| RecoverError::Read { segment, error })?;
        Ok(Self { source, segment, file_bytes, window: Vec::new(), window_at: 0 })
    }

    /// The bytes at `place`, a multiple of 4096; `None` when they reach past the file or the device can't read them.
    /// `ahead` is how much to read at once if a read is needed. The caller bounds `bytes`.
    pub(crate) fn bytes(&mut self, place: u64, bytes: usize, ahead: usize) -> Result<Option<&[u8]>, RecoverError> {
        let Some(left) = self.file_bytes.checked_sub(place) else { return Ok(None) };
        if left < bytes as u64 {
            return Ok(None);
        }
        let within = place.checked_sub(self.window_at).map(|from| from as usize);
        let held = within.is_some_and(|from| from + bytes <= self.window.len());
        if !held {
            let wanted = bytes.next_multiple_of(DISK_BLOCK_BYTES);
            let ahead = ahead.max(wanted).min(usize::try_from(left).unwrap_or(usize::MAX));
            if !self.fill(place, ahead)? {
                let mut tries = 0;
                while !self.fill(place, wanted)? {
                    tries += 1;
                    if tries == READ_TRIES {
                        return Ok(None);
                    }
                }
            }
        }
        let from = (place - self.window_at) as usize;
        Ok(self.window.get(from..from + bytes))
    }

    /// Fills the window from `place`. False when the device can't read.
    fn fill(&mut self, place: u64, bytes: usize) -> Result<bool, RecoverError> {
        self.window.resize(bytes.next_multiple_of(DISK_BLOCK_BYTES), 0);
        self.window_at = place;
        let mut filled = 0;
        while filled < self.window.len() {
            match self.source.read(self.segment, place + filled as u64, &mut self.window[filled..]) {
                Ok(more) => {
                    filled += more;
                    // Only the end of the file cuts a read within a block.
                    if more == 0 || !filled.is_multiple_of(DISK_BLOCK_BYTES) {
                        break;
                    }
                }
                Err(ReadError::Unreadable) => {
                    self.window.clear();
                    return Ok(false);
                }
                Err(error) => return Err(RecoverError::Read { segment: self.segment, error }),
            }
        }
        self.window.truncate(filled);
        Ok(true)
    }
}
