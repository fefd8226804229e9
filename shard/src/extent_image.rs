//! The bytes of one extent on their way to the device, in buffers of the size of one write.

use ringmain_core::limits::WRITE_BYTES;

use crate::files::{FileError, LogFile, WriteBuffer};
use crate::runtime::spawn_joined;

/// An extent being put together. Every byte is written before it goes out: pooled buffers hold old data.
pub(crate) struct ExtentImage {
    buffers: Vec<WriteBuffer>,
    bytes: usize,
}

impl ExtentImage {
    /// Buffers for `bytes`, a multiple of 4096.
    pub(crate) fn new(bytes: usize) -> Self {
        let buffers =
            (0..bytes.div_ceil(WRITE_BYTES)).map(|at| WriteBuffer::new(WRITE_BYTES.min(bytes - at * WRITE_BYTES)));
        Self { buffers: buffers.collect(), bytes }
    }

    /// Copies `from` to `at`, over the seams of the buffers.
    pub(crate) fn put(&mut self, mut at: usize, mut from: &[u8]) {
        while !from.is_empty() {
            let (buffer, inside) = (at / WRITE_BYTES, at % WRITE_BYTES);
            let into = &mut self.buffers[buffer].as_mut_slice()[inside..];
            let count = into.len().min(from.len());
            into[..count].copy_from_slice(&from[..count]);
            at += count;
            from = &from[count..];
        }
    }

    /// Zeros `from..to`.
    pub(crate) fn zero(&mut self, from: usize, to: usize) {
        const ZEROS: [u8; 4096] = [0; 4096];
        let mut at = from;
        while at < to {
            let count = (to - at).min(ZEROS.len());
            self.put(at, &ZEROS[..count]);
            at += count;
        }
    }

    /// Size of the extent.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writes all of it at `place`; the buffers go out side by side.
    pub(crate) async fn write_to(self, file: &LogFile, place: u64) -> Result<(), FileError> {
        let writes: Vec<_> = self
            .into_writes()
            .map(|(at, buffer)| {
                let file = file.clone();
                spawn_joined(async move { file.write_at(buffer, place + at).await })
            })
            .collect();
        let mut result = Ok(());
        for write in writes {
            // Each is waited for: the kernel owns its buffer until then.
            result = result.and(write.await);
        }
        result
    }

    /// The buffers with their places, counted from the extent's first byte.
    pub(crate) fn into_writes(self) -> impl Iterator<Item = (u64, WriteBuffer)> {
        self.buffers.into_iter().enumerate().map(|(at, buffer)| ((at * WRITE_BYTES) as u64, buffer))
    }
}
