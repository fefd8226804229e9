//! One record of the catalog. Bodies, little-endian:
//!
//! | kind | byte 0 | then |
//! |---|---|---|
//! | put | 1 | u8 default level, u8 floor, u8 compression, u32 stores, u64 id, u64 version, i64 created_ms, u16 name bytes, u16 store shards, u32 partitions, u32 created epochs, then name, u16 each store's shard, u16 each partition's store, u32 each created epoch, then u64 retention in ms and u64 in bytes, 0 = none; records of before retention end here, and have no bound |
//! | delete | 2 | 7 zero bytes, u64 id, u64 version |
//! | version | 3 | 7 zero bytes, u64 highest version of any change |

use ringmain_core::codec::Compression;
use ringmain_core::crc::Crc32c;
use ringmain_core::ids::{Durability, TopicId};
use ringmain_core::limits::{TOPIC_NAME_BYTES_MAX, TOPIC_PARTITIONS_MAX, TOPIC_STORES_MAX};
use ringmain_core::topic::{TopicInfo, TopicSettings};

use super::CatalogTopic;

/// Records begin at multiples of this, so that whole ones can be looked for behind a damaged one.
pub(super) const RECORD_ALIGN: usize = 8;
/// Size and CRC.
const FRAME_BYTES: usize = 8;
/// A larger body is none: the largest topic needs 62 KB.
const BODY_BYTES_MAX: usize = 128 * 1024;

const PUT: u8 = 1;
const DELETE: u8 = 2;
const VERSION: u8 = 3;

/// What a record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Body {
    Put(CatalogTopic),
    Delete { id: TopicId, version: u64 },
    Version(u64),
}

impl Body {
    pub(super) fn version(&self) -> u64 {
        match self {
            Self::Put(topic) => topic.info.version,
            Self::Delete { version, .. } | Self::Version(version) => *version,
        }
    }

    fn encode(&self) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        match self {
            Self::Put(CatalogTopic { info, store_shards, created_epochs }) => {
                let fits = info.name.len() <= TOPIC_NAME_BYTES_MAX
                    && store_shards.len() <= TOPIC_STORES_MAX as usize
                    && info.partition_stores.len() <= TOPIC_PARTITIONS_MAX as usize
                    && created_epochs.len() <= TOPIC_PARTITIONS_MAX as usize;
                if !fits {
                    return None;
                }
                let TopicSettings { durability_default, durability_floor, compression, retention_ms, retention_bytes } =
                    info.settings;
                out.extend([PUT, durability_default as u8, durability_floor as u8, compression as u8]);
                out.extend(info.stores.to_le_bytes());
                out.extend(info.id.0.to_le_bytes());
                out.extend(info.version.to_le_bytes());
                out.extend(info.created_ms.to_le_bytes());
                // All of them were bounded above.
                out.extend((info.name.len() as u16).to_le_bytes());
                out.extend((store_shards.len() as u16).to_le_bytes());
                out.extend((info.partition_stores.len() as u32).to_le_bytes());
                out.extend((created_epochs.len() as u32).to_le_bytes());
                out.extend(info.name.as_bytes());
                store_shards.iter().for_each(|shard| out.extend(shard.to_le_bytes()));
                info.partition_stores.iter().for_each(|store| out.extend(store.to_le_bytes()));
                created_epochs.iter().for_each(|epoch| out.extend(epoch.to_le_bytes()));
                out.extend(retention_ms.unwrap_or(0).to_le_bytes());
                out.extend(retention_bytes.unwrap_or(0).to_le_bytes());
            }
            Self::Delete { id, version } => {
                out.extend([DELETE, 0, 0, 0, 0, 0, 0, 0]);
                out.extend(id.0.to_le_bytes());
                out.extend(version.to_le_bytes());
            }
            Self::Version(version) => {
                out.extend([VERSION, 0, 0, 0, 0, 0, 0, 0]);
                out.extend(version.to_le_bytes());
            }
        }
        Some(out)
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = Rest(bytes);
        let [kind, settings @ ..] = rest.take::<4>()?;
        let body = match kind {
            PUT => Self::Put(Self::decode_topic(settings, &mut rest)?),
            DELETE if rest.take()? == [0; 4] => Self::Delete {
                id: TopicId(u64::from_le_bytes(rest.take()?)),
                version: u64::from_le_bytes(rest.take()?),
            },
            VERSION if rest.take()? == [0; 4] => Self::Version(u64::from_le_bytes(rest.take()?)),
            _ => return None,
        };
        rest.0.is_empty().then_some(body)
    }

    fn decode_topic([default, floor, compression]: [u8; 3], rest: &mut Rest<'_>) -> Option<CatalogTopic> {
        let stores = u32::from_le_bytes(rest.take()?);
        let id = TopicId(u64::from_le_bytes(rest.take()?));
        let version = u64::from_le_bytes(rest.take()?);
        let created_ms = i64::from_le_bytes(rest.take()?);
        let name_bytes = u16::from_le_bytes(rest.take()?);
        let store_shards = u16::from_le_bytes(rest.take()?);
        let partitions = u32::from_le_bytes(rest.take()?) as usize;
        let epochs = u32::from_le_bytes(rest.take()?) as usize;
        let name = rest.bytes(usize::from(name_bytes))?;
        let u16s = |bytes: &[u8]| bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
        let store_shards = u16s(rest.bytes(usize::from(store_shards) * 2)?);
        let partition_stores = u16s(rest.bytes(partitions.checked_mul(2)?)?);
        let epochs = rest.bytes(epochs.checked_mul(4)?)?.chunks_exact(4);
        let (retention_ms, retention_bytes) = if rest.0.is_empty() {
            (0, 0)
        } else {
            (u64::from_le_bytes(rest.take()?), u64::from_le_bytes(rest.take()?))
        };
        let bound = |value: u64| (value > 0).then_some(value);
        Some(CatalogTopic {
            info: TopicInfo {
                id,
                name: String::from_utf8(name.to_vec()).ok()?,
                stores,
                partition_stores,
                settings: TopicSettings {
                    durability_default: Durability::from_byte(default)?,
                    durability_floor: Durability::from_byte(floor)?,
                    compression: Compression::from_byte(compression)?,
                    retention_ms: bound(retention_ms),
                    retention_bytes: bound(retention_bytes),
                },
                created_ms,
                version,
            },
            store_shards,
            created_epochs: epochs.map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect(),
        })
    }
}

/// Bytes not yet read.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*bytes)
    }
}

/// The record of `body`, padded; `None` when it has more than any topic may have.
pub(super) fn write(body: &Body) -> Option<Vec<u8>> {
    let body = body.encode()?;
    debug_assert!(body.len() <= BODY_BYTES_MAX);
    let mut out = (body.len() as u32).to_le_bytes().to_vec();
    out.extend([0; 4]);
    out.extend(&body);
    let crc = crc_of(&out);
    out[4..8].copy_from_slice(&crc.to_le_bytes());
    out.resize(out.len().next_multiple_of(RECORD_ALIGN), 0);
    Some(out)
}

/// The CRC of a record without its padding.
fn crc_of(record: &[u8]) -> u32 {
    let mut crc = Crc32c::default();
    crc.update(&record[..4]);
    crc.update(&record[FRAME_BYTES..]);
    crc.finish()
}

/// What stands at a place of the catalog.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// A record, and its size with padding.
    Whole(Body, usize),
    /// Whole, but of a kind or form that this program does not know.
    Unknown,
}

/// Reads the record at the start of `bytes`; `None` when it is not whole.
pub(super) fn read(bytes: &[u8]) -> Option<Record> {
    let body_bytes = u32::from_le_bytes(*bytes.first_chunk::<4>()?) as usize;
    if body_bytes > BODY_BYTES_MAX {
        return None;
    }
    let record_bytes = (FRAME_BYTES + body_bytes).next_multiple_of(RECORD_ALIGN);
    let record = bytes.get(..record_bytes)?;
    let crc = u32::from_le_bytes([record[4], record[5], record[6], record[7]]);
    if crc_of(&record[..FRAME_BYTES + body_bytes]) != crc {
        return None;
    }
    let body = Body::decode(&record[FRAME_BYTES..FRAME_BYTES + body_bytes]);
    Some(body.map_or(Record::Unknown, |body| Record::Whole(body, record_bytes)))
}
