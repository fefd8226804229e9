//! A checkpoint: an extent header and the archive behind it.

use ringmain_core::checkpoint::Checkpoint;
use ringmain_core::dedup::{PRODUCERS_SECTION, Producers};
use ringmain_core::extent::{EXTENT_HEADER_BYTES, ExtentHeader};

use super::extent::mend_directory;
use super::input::fix_header;

/// The first byte says what to mend, as in [`super::extent`].
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
    let Some(directory) = bytes[EXTENT_HEADER_BYTES..].get(..header.directory_bytes as usize) else { return };
    let Ok(checkpoint) = Checkpoint::decode(directory, &header) else { return };
    assert!(checkpoint.partitions.is_sorted_by(|one, next| one.key < next.key));
    let held: usize = checkpoint.sections.iter().map(|section| section.bytes.len()).sum();
    assert!(held <= directory.len(), "sections take more memory than the directory has bytes");
    for section in checkpoint.sections.iter().filter(|section| section.kind == PRODUCERS_SECTION) {
        if let Ok(producers) = Producers::of_section(&section.bytes) {
            let again = producers.section().map(|again| Producers::of_section(&again.bytes));
            assert_eq!(again.unwrap_or_else(|| Ok(Producers::default())), Ok(producers));
        }
    }
    let again = checkpoint.encode();
    let mut image = header.encode().to_vec();
    image.extend(&again);
    mend_directory(&mut image);
    fix_header(&mut image);
    // An archive that shares bytes may be shorter than ours, which then does not fit the header's extent.
    if let Ok(header) = ExtentHeader::decode(&image) {
        assert_eq!(Checkpoint::decode(&again, &header), Ok(checkpoint));
    }
}
