//! An extent: header and directory of runs.

use ringmain_core::crc::crc32c;
use ringmain_core::extent::{EXTENT_HEADER_BYTES, ExtentHeader, decode_directory, encode_directory};

use super::input::{fix_header, put_u32};

/// The first byte says what to mend: 1 size and CRC of the directory, 2 the header's CRC.
pub fn run(data: &[u8]) {
    let Some((mend, bytes)) = data.split_first() else { return };
    let mut bytes = bytes.to_vec();
    if mend & 1 != 0 && bytes.len() > EXTENT_HEADER_BYTES {
        mend_directory(&mut bytes);
    }
    if mend & 2 != 0 {
        fix_header(&mut bytes);
    }
    let Ok(header) = ExtentHeader::decode(&bytes) else { return };
    assert_eq!(ExtentHeader::decode(&header.encode()), Ok(header));
    let Some(directory) = bytes[EXTENT_HEADER_BYTES..].get(..header.directory_bytes as usize) else { return };
    let Ok(listed) = decode_directory(directory, &header) else { return };
    assert_eq!(listed.runs.len(), header.run_count as usize);
    let mut from = EXTENT_HEADER_BYTES + directory.len();
    for run in &listed.runs {
        assert!(run.place as usize >= from && run.base_offset < run.next_offset);
        from = run.place as usize + run.stored_bytes as usize;
    }
    assert!(from <= header.extent_bytes as usize);
    for entry in &listed.producers {
        let run = &listed.runs[entry.run as usize];
        assert!(run.base_offset <= entry.batch.base_offset && entry.batch.next_offset() <= run.next_offset);
    }
    let again = encode_directory(&listed.runs, &listed.producers);
    let header = ExtentHeader { directory_bytes: again.len() as u32, directory_crc: crc32c(&again), ..header };
    // An archive may stand in another order of bytes than ours and be longer; what it says is the same.
    if let Ok(decoded) = decode_directory(&again, &header) {
        assert_eq!(decoded, listed);
    }
}

/// Says in the header what stands behind it.
pub fn mend_directory(bytes: &mut [u8]) {
    let directory = &bytes[EXTENT_HEADER_BYTES..];
    let (size, crc) = (directory.len() as u32, crc32c(directory));
    put_u32(bytes, 40, size);
    put_u32(bytes, 44, crc);
}
