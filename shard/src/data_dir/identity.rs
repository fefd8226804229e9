//! `DATA/identity`: written when the directory is made, and again, whole, when shards are added. Little-endian:
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic "RMID" |
//! | 4 | 1 | version = 1 |
//! | 5 | 1 | zero |
//! | 6 | 2 | shard count |
//! | 8 | 8 | segment bytes |
//! | 16 | 8 | cluster id |
//! | 24 | 8 a shard | log id of each shard |
//! | then | 4 | CRC32C of all before |

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use ringmain_core::crc::crc32c;
use ringmain_core::ids::LogId;
use ringmain_core::limits::{SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SHARDS_MAX};

use super::{DataDirError, sync_dir};

const MAGIC: [u8; 4] = *b"RMID";
const VERSION: u8 = 1;
const HEAD_BYTES: usize = 24;
const CRC_BYTES: usize = 4;
/// More is not read of a file that calls itself an identity.
const BYTES_MAX: usize = HEAD_BYTES + 8 * SHARDS_MAX + CRC_BYTES;

/// What a data directory is, for its whole life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Size of each segment file.
    pub segment_bytes: u64,
    /// The cluster it belongs to.
    pub cluster_id: u64,
    /// The log of each shard, by index.
    pub log_ids: Vec<LogId>,
}

/// Why an identity can't be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// Too short, too long, or the CRC is wrong.
    #[error("it is damaged; restore it from a backup")]
    Damaged,
    /// Written by another version of Ringmain.
    #[error("its format is version {0}, this program reads version {VERSION}; use the Ringmain that wrote it")]
    Version(u8),
    /// The CRC is right but a field is not possible.
    #[error("it says what can't be; restore it from a backup")]
    Impossible,
}

impl Identity {
    /// Number of shards.
    #[must_use]
    pub fn shards(&self) -> u16 {
        // At most SHARDS_MAX, checked when it was read or made.
        self.log_ids.len() as u16
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES + 8 * self.log_ids.len() + CRC_BYTES);
        out.extend(MAGIC);
        out.extend([VERSION, 0]);
        out.extend(self.shards().to_le_bytes());
        out.extend(self.segment_bytes.to_le_bytes());
        out.extend(self.cluster_id.to_le_bytes());
        for id in &self.log_ids {
            out.extend(id.0.to_le_bytes());
        }
        out.extend(crc32c(&out).to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, IdentityError> {
        let (body, crc) = bytes.split_last_chunk::<CRC_BYTES>().ok_or(IdentityError::Damaged)?;
        if body.len() < HEAD_BYTES || body[..4] != MAGIC || crc32c(body) != u32::from_le_bytes(*crc) {
            return Err(IdentityError::Damaged);
        }
        if body[4] != VERSION {
            return Err(IdentityError::Version(body[4]));
        }
        let u64_at = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&body[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        let shards = usize::from(u16::from_le_bytes([body[6], body[7]]));
        let identity = Self {
            segment_bytes: u64_at(8),
            cluster_id: u64_at(16),
            log_ids: (HEAD_BYTES..body.len())
                .step_by(8)
                .filter(|at| at + 8 <= body.len())
                .map(|at| LogId(u64_at(at)))
                .collect(),
        };
        let possible = shards > 0
            && shards <= SHARDS_MAX
            && body.len() == HEAD_BYTES + 8 * shards
            && (SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&identity.segment_bytes)
            && identity.segment_bytes.is_multiple_of(4096);
        if possible { Ok(identity) } else { Err(IdentityError::Impossible) }
    }
}

/// Reads the identity at `path`; `None` when there is none.
pub(super) fn read(path: &Path) -> Result<Option<Identity>, DataDirError> {
    let mut bytes = Vec::new();
    let read = File::open(path)
        .and_then(|file| io::Read::read_to_end(&mut io::Read::take(file, BYTES_MAX as u64 + 1), &mut bytes));
    match read {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(DataDirError::io("read", path))?,
    };
    let identity = Identity::decode(&bytes);
    identity.map(Some).map_err(|reason| DataDirError::Identity { path: path.to_owned(), reason })
}

/// Puts the identity in place at once: a kill or power cut leaves the old one or the new one.
pub(super) fn write(dir: &Path, identity: &Identity) -> Result<(), DataDirError> {
    let (path, new) = (dir.join("identity"), dir.join("identity.new"));
    let written = File::create(&new).and_then(|mut file| {
        file.write_all(&identity.encode())?;
        file.sync_all()
    });
    written.map_err(DataDirError::io("write", &new))?;
    fs::rename(&new, &path).map_err(DataDirError::io("write", &path))?;
    sync_dir(dir)
}
