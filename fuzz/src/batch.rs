//! A record batch: header, table, entries.

use ringmain_core::batch::{BatchHeader, batches, check_crc, check_stamp, seal_crc, stamp};
use ringmain_core::compressor::Decompressor;
use ringmain_core::ids::{Epoch, Offset};
use ringmain_wire::batch::{BatchView, check_produced};
use ringmain_wire::batch_codec::decompress;
use ringmain_wire::sparse::SparseBuilder;

use super::input::put_u32;

/// The first byte says what to mend: 1 the size, 2 the CRC, 4 the broker's stamp.
pub fn run(data: &[u8]) {
    let Some((mend, bytes)) = data.split_first() else { return };
    let mut bytes = bytes.to_vec();
    if mend & 1 != 0 {
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let size = bytes.len() as u32;
        put_u32(&mut bytes, 0, size);
    }
    if mend & 2 != 0 && bytes.len() >= 96 {
        seal_crc(&mut bytes);
    }
    if mend & 4 != 0 && bytes.len() >= 96 {
        stamp(&mut bytes, Offset(u64::MAX - u64::from(*mend)), 5, Epoch(1));
    }
    for batch in batches(&bytes) {
        let Ok((header, batch)) = batch else { break };
        let _ = check_crc(&header, batch);
    }
    let _ = check_stamp(&bytes);
    if let Ok(header) = BatchHeader::parse(&bytes) {
        read(&header, &bytes[..header.batch_bytes as usize]);
    }
}

/// Reads everything there is in a batch, whatever its CRC says.
pub fn read(header: &BatchHeader, bytes: &[u8]) {
    let produced = check_produced(header, bytes);
    if header.codec != 0 {
        // Its body is not looked at before a reader wants it.
        if let Ok((plain, batch)) = decompress(&mut Decompressor::default(), header, bytes) {
            assert_eq!((plain.codec, plain.record_count), (0, header.record_count));
            read(&plain, &batch);
        }
        return;
    }
    let Ok(view) = BatchView::parse(bytes, header) else {
        assert!(produced.is_err(), "what may be stored can be read");
        return;
    };
    let (first, last) = view.offset_range();
    assert!(first <= last);
    let mut count = 0;
    let mut body_bytes = 0;
    let mut before = None;
    for record in view.records() {
        // Offsets stop at the largest there is; a broker gives none so high.
        assert!(record.offset >= first && before.is_none_or(|before| before <= record.offset));
        before = Some(record.offset);
        count += 1;
        body_bytes += record.key.unwrap_or_default().len() + record.header_bytes.len();
        body_bytes += record.value.unwrap_or_default().len();
        let _ = record.headers().count();
        let _ = record.tag();
    }
    assert_eq!(count, view.record_count());
    assert_eq!(body_bytes, view.body().len(), "no bytes of the body hide between records");
    if produced.is_ok() {
        let kept: Vec<u32> = (0..view.record_count()).step_by(2).collect();
        let copy = SparseBuilder::new().copy(&view, &kept);
        let header = BatchHeader::parse(&copy).expect("a filtered copy has a header");
        assert!(check_crc(&header, &copy).is_ok());
        let copy = BatchView::parse(&copy, &header).expect("a filtered copy can be read");
        assert!(copy.records().map(|record| record.value).eq(view.records().step_by(2).map(|record| record.value)));
    }
}
