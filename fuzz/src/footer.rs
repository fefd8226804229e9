//! The footer of a sealed segment: trailer, fences, pages, and lookups in them.

use ringmain_core::crc::crc32c;
use ringmain_core::ids::{LogId, Offset, PartitionKey, SegmentSequence};
use ringmain_core::index::{FOOTER_PAGE_BYTES, LogIndex, LookupStep, SealedIndex, SegmentIndex, Trailer};

use super::input::{Input, fix_header, put_u32, u32_at};

/// Log and segment of the seeds.
pub const LOG_ID: LogId = LogId(0x5eed);
/// See [`LOG_ID`].
pub const SEGMENT: SegmentSequence = SegmentSequence(3);
/// Header, then entries as they stand in a page.
const PAGE_PATCH_BYTES: usize = FOOTER_PAGE_BYTES;

/// First byte: 1 mends fences, 2 the trailer, 4 the pages. Then the trailer (64 bytes), fences (u16 size, bytes, zeros up
/// to their region), an offset to look up, and pages (u16 size, bytes, zeros).
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mend = input.u8();
    let mut trailer: [u8; 64] = input.array();
    let fence_bytes = usize::from(input.u16());
    let mut fences = input.bytes(fence_bytes).to_vec();
    fences.resize(fences.len().next_multiple_of(FOOTER_PAGE_BYTES), 0);
    if mend & 1 != 0 {
        put_u32(&mut trailer, 56, crc32c(&fences));
    }
    if mend & 2 != 0 {
        fix_header(&mut trailer);
    }
    let entries = u32_at(&trailer, 52) as usize % 100_000;
    let file_bytes = u64::from(u32_at(&trailer, 44)) + ringmain_core::index::footer_bytes(entries) as u64;
    let Ok(trailer) = Trailer::decode(&trailer, LOG_ID, SEGMENT, file_bytes) else { return };
    let (place, bytes) = trailer.fences();
    assert!(place + bytes as u64 <= file_bytes);
    let Ok(sealed) = SealedIndex::parse(&trailer, &fences) else { return };
    let (topic, partition, offset) = (input.u8(), input.u8(), input.u64());
    let mut pages = Vec::new();
    while !input.is_empty() && pages.len() < 64 {
        let size = usize::from(input.u16()).min(PAGE_PATCH_BYTES);
        let mut page = input.bytes(size).to_vec();
        page.resize(FOOTER_PAGE_BYTES, 0);
        if mend & 4 != 0 {
            let count = usize::from(u16::from_le_bytes([page[6], page[7]])).min(63);
            let crc = crc32c(&page[64..64 + count * 64]);
            put_u32(&mut page, 12, crc);
            fix_header(&mut page);
        }
        pages.push(page);
    }
    for page in 0..sealed.pages().min(pages.len() as u32 + 1) {
        let Some(bytes) = pages.get(page as usize) else { break };
        if let Ok(entries) = sealed.decode_page(page, bytes) {
            assert!(entries.iter().all(|entry| entry.base_offset < entry.next_offset));
        }
    }
    look_up(sealed, &pages, PartitionKey::new(u64::from(topic), u32::from(partition)), Offset(offset));
}

/// A lookup must come to an end, whatever the pages say.
fn look_up(sealed: SealedIndex, pages: &[Vec<u8>], key: PartitionKey, offset: Offset) {
    let most = 10 + sealed.pages();
    let mut index = LogIndex::default();
    index.put(SEGMENT, SegmentIndex::Sealed(sealed));
    let mut lookup = index.lookup(key, offset);
    for _ in 0..most {
        match lookup.step(&index) {
            LookupStep::Found(_, entry) => {
                assert!(entry.key == key && entry.next_offset > offset);
                return;
            }
            LookupStep::NotFound => return,
            LookupStep::ReadPage(read) => {
                let Some(bytes) = pages.get(read.page as usize) else { return };
                let Some(Ok(entries)) = index.decode_page(&read, bytes) else { return };
                lookup.feed(&index, &read, &entries);
            }
        }
    }
    panic!("the lookup of {key} {offset} does not end");
}
