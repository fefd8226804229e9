//! The extent: what one flush writes. A 64-byte header, a directory of the runs, the runs, zeros up to 4096.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic |
//! | 4 | 1 | version = 2 |
//! | 5 | 1 | kind: 0 data, 1 checkpoint, 2 moved |
//! | 6 | 2 | flags, zero |
//! | 8 | 8 | log id |
//! | 16 | 8 | sequence |
//! | 24 | 4 | incarnation |
//! | 28 | 4 | CRC of the header of the extent before; 0 for the first |
//! | 32 | 8 | synced position of the shard when the extent was placed |
//! | 40 | 4 | directory bytes |
//! | 44 | 4 | CRC32C of the directory |
//! | 48 | 4 | extent bytes, padding included |
//! | 52 | 4 | runs |
//! | 56 | 4 | epoch of the shard |
//! | 60 | 4 | header CRC: CRC32C of bytes 0..60 |
//!
//! The directory is a rkyv archive (little-endian, unaligned): of [`RunEntry`]s and [`ProducerEntry`]s, or in a checkpoint
//! of the [`crate::checkpoint::Checkpoint`]. Runs start at multiples of 8, in the order of the directory. A run is a row of batches,
//! or, when its entry has a codec, of [packs](crate::pack).

mod directory;
#[cfg(test)]
mod tests;

use crate::dedup::ProducerBatch;
use crate::disk_header::{DISK_HEADER_BYTES, DiskHeaderError, HeaderReader, HeaderWriter, header_crc};
use crate::ids::{Epoch, ExtentSequence, Incarnation, LogId, Offset, PartitionKey, Position};
use crate::limits::{CHECKPOINT_BYTES_MAX, DISK_BLOCK_BYTES, EXTENT_BYTES_MAX};

pub use directory::{RUN_ALIGN_BYTES, RUNS_MAX, decode_directory, encode_directory};

/// Size of the header.
pub const EXTENT_HEADER_BYTES: usize = DISK_HEADER_BYTES;

const MAGIC: u32 = u32::from_le_bytes(*b"RMex");
const VERSION: u8 = 2;

/// What an extent carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExtentKind {
    /// Newly appended batches.
    Data = 0,
    /// Ends, commits and windows of all partitions; no runs.
    Checkpoint = 1,
    /// Old runs copied forward so that their segment may go.
    Moved = 2,
}

/// One run in a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunEntry {
    /// Whose batches.
    pub key: PartitionKey,
    /// Offset of the first record.
    pub base_offset: Offset,
    /// One past the last record.
    pub next_offset: Offset,
    /// Epoch of its last batch.
    pub epoch: Epoch,
    /// Where the run starts, counted from the extent's first byte.
    pub place: u32,
    /// Bytes as they stand on disk.
    pub stored_bytes: u32,
    /// Bytes once decompressed.
    pub raw_bytes: u32,
    /// CRC32C of the stored bytes.
    pub crc: u32,
    /// Batches in the run.
    pub batches: u32,
    /// 0: the run is a row of batches. Else it is a row of packs (see [`crate::pack`]), most of them of this codec.
    pub codec: u8,
    /// Append time of the newest batch, milliseconds since the Unix epoch.
    pub max_append_time_ms: i64,
}

/// A batch of an idempotent producer in a run of the extent: the newest ones of each, so that windows can be made again without
/// reading runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProducerEntry {
    /// Number of the run in the directory.
    pub run: u32,
    /// The batch.
    pub batch: ProducerBatch,
}

/// What a directory lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Directory {
    /// The runs, sorted by partition and offset.
    pub runs: Vec<RunEntry>,
    /// Batches of idempotent producers, sorted by run and offset.
    pub producers: Vec<ProducerEntry>,
}

impl Directory {
    /// The batches of producers with their partitions, in their order.
    pub fn produced(&self) -> impl Iterator<Item = (PartitionKey, &ProducerBatch)> {
        self.producers.iter().filter_map(|entry| {
            let run = usize::try_from(entry.run).ok().and_then(|run| self.runs.get(run))?;
            Some((run.key, &entry.batch))
        })
    }
}

/// Why bytes are not an extent header, or not the directory that a header promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtentError {
    /// The 64 bytes are not a whole header of this version.
    #[error(transparent)]
    Header(#[from] DiskHeaderError),
    /// A whole header says what can't be.
    #[error("extent header field `{0}` is out of bounds")]
    Field(&'static str),
    /// The directory's CRC does not match.
    #[error("directory CRC mismatch")]
    DirectoryCrc,
    /// The directory is not a valid archive.
    #[error("directory is not readable")]
    Directory,
    /// A directory entry says what can't be.
    #[error("run {index} of the directory: {what}")]
    Run {
        /// Which entry, from 0.
        index: usize,
        /// What is wrong with it.
        what: &'static str,
    },
    /// An entry of a producer's batch says what can't be.
    #[error("producer entry {index} of the directory: {what}")]
    Producer {
        /// Which entry, from 0.
        index: usize,
        /// What is wrong with it.
        what: &'static str,
    },
}

/// An extent header, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentHeader {
    /// What the extent carries.
    pub kind: ExtentKind,
    /// The log it belongs to.
    pub log_id: LogId,
    /// Its place in the log.
    pub sequence: ExtentSequence,
    /// The life that wrote it.
    pub incarnation: Incarnation,
    /// Header CRC of the extent before.
    pub previous_header_crc: u32,
    /// The shard's synced position when the extent was placed.
    pub synced_position: Position,
    /// Size of the directory.
    pub directory_bytes: u32,
    /// CRC32C of the directory.
    pub directory_crc: u32,
    /// Whole extent, padding included.
    pub extent_bytes: u32,
    /// Runs in it.
    pub run_count: u32,
    /// The shard's epoch when the extent was placed.
    pub epoch: Epoch,
}

impl ExtentHeader {
    /// The 64 bytes, CRC included.
    #[must_use]
    pub fn encode(&self) -> [u8; EXTENT_HEADER_BYTES] {
        HeaderWriter::new(MAGIC, VERSION)
            .put([self.kind as u8])
            .u16(0)
            .u64(self.log_id.0)
            .u64(self.sequence.0)
            .u32(self.incarnation.0)
            .u32(self.previous_header_crc)
            .u64(self.synced_position.0)
            .u32(self.directory_bytes)
            .u32(self.directory_crc)
            .u32(self.extent_bytes)
            .u32(self.run_count)
            .u32(self.epoch.0)
            .finish()
    }

    /// Reads the header at the start of `bytes` and checks that its sizes fit each other and the limits. Whether it is
    /// the extent that belongs at this place is for the caller to check.
    pub fn decode(bytes: &[u8]) -> Result<Self, ExtentError> {
        let mut fields = HeaderReader::open(bytes, MAGIC, VERSION)?;
        let [kind] = fields.take();
        let flags = fields.u16();
        let kind = match kind {
            0 => ExtentKind::Data,
            1 => ExtentKind::Checkpoint,
            2 => ExtentKind::Moved,
            _ => return Err(ExtentError::Field("kind")),
        };
        if flags != 0 {
            return Err(ExtentError::Field("flags"));
        }
        let header = Self {
            kind,
            log_id: LogId(fields.u64()),
            sequence: ExtentSequence(fields.u64()),
            incarnation: Incarnation(fields.u32()),
            previous_header_crc: fields.u32(),
            synced_position: Position(fields.u64()),
            directory_bytes: fields.u32(),
            directory_crc: fields.u32(),
            extent_bytes: fields.u32(),
            run_count: fields.u32(),
            epoch: Epoch(fields.u32()),
        };
        header.check_sizes()?;
        Ok(header)
    }

    fn check_sizes(&self) -> Result<(), ExtentError> {
        let extent_bytes = self.extent_bytes as usize;
        let (most, runs_fit) = match self.kind {
            ExtentKind::Checkpoint => (CHECKPOINT_BYTES_MAX, self.run_count == 0),
            ExtentKind::Data | ExtentKind::Moved => {
                (EXTENT_BYTES_MAX, self.run_count > 0 && self.run_count as usize <= RUNS_MAX)
            }
        };
        if extent_bytes == 0 || extent_bytes > most || !extent_bytes.is_multiple_of(DISK_BLOCK_BYTES) {
            return Err(ExtentError::Field("extent_bytes"));
        }
        if self.directory_bytes == 0 || self.directory_bytes as usize > extent_bytes - EXTENT_HEADER_BYTES {
            return Err(ExtentError::Field("directory_bytes"));
        }
        if !runs_fit {
            return Err(ExtentError::Field("run_count"));
        }
        Ok(())
    }

    /// The CRC that the next extent names as its predecessor's.
    #[must_use]
    pub fn header_crc(&self) -> u32 {
        header_crc(&self.encode())
    }
}

/// Where the parts of an extent go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Size of the directory, which stands behind the header.
    pub directory_bytes: u32,
    /// Where each run starts, counted from the extent's first byte.
    pub run_places: Vec<u32>,
    /// Whole extent, padding included.
    pub extent_bytes: u32,
}

impl Layout {
    /// Lays out runs of these stored sizes, with so many batches of producers in the directory.
    ///
    /// # Panics
    /// When the runs are none, more than [`RUNS_MAX`], or fit no extent: the flush plan keeps below.
    #[must_use]
    pub fn of_runs(stored_bytes: &[u32], producers: usize) -> Self {
        assert!(!stored_bytes.is_empty() && stored_bytes.len() <= RUNS_MAX, "{} runs in an extent", stored_bytes.len());
        let directory_bytes = directory::directory_bytes(stored_bytes.len(), producers);
        let mut at = (EXTENT_HEADER_BYTES + directory_bytes).next_multiple_of(RUN_ALIGN_BYTES);
        let mut run_places = Vec::with_capacity(stored_bytes.len());
        for &bytes in stored_bytes {
            run_places.push(at as u32);
            at = (at + bytes as usize).next_multiple_of(RUN_ALIGN_BYTES);
            assert!(at <= EXTENT_BYTES_MAX, "runs fit no extent");
        }
        let extent_bytes = at.next_multiple_of(DISK_BLOCK_BYTES) as u32;
        Self { directory_bytes: directory_bytes as u32, run_places, extent_bytes }
    }

    /// Lays out an encoded checkpoint.
    ///
    /// # Panics
    /// When it is larger than a checkpoint extent: the limit on partitions keeps below.
    #[must_use]
    pub fn of_checkpoint(checkpoint_bytes: usize) -> Self {
        let extent_bytes = (EXTENT_HEADER_BYTES + checkpoint_bytes).next_multiple_of(DISK_BLOCK_BYTES);
        assert!(extent_bytes <= CHECKPOINT_BYTES_MAX, "checkpoint of {checkpoint_bytes} bytes");
        Self { directory_bytes: checkpoint_bytes as u32, run_places: Vec::new(), extent_bytes: extent_bytes as u32 }
    }

    /// Bytes that a run adds to an extent at most, besides its own: directory entry and alignment.
    #[must_use]
    pub const fn run_overhead_bytes() -> usize {
        directory::RUN_ENTRY_BYTES + RUN_ALIGN_BYTES - 1
    }
}
