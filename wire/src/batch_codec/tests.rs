use proptest::prelude::*;
use ringmain_core::batch::{check_stamp, seal_crc};
use ringmain_core::ids::{Epoch, Offset, PartitionKey};
use ringmain_core::pack::{PACK_HEADER_BYTES, pack_bytes};

use super::*;
use crate::batch::{check_produced, check_structure};
use crate::batch_builder::BatchBuilder;
use crate::record::NewRecord;

fn batch(values: &[Vec<u8>]) -> Bytes {
    let mut builder = BatchBuilder::new(PartitionKey::new(7, 3));
    builder.set_producer(9, 2, 40);
    for (at, value) in values.iter().enumerate() {
        let record = NewRecord {
            key: (at % 3 > 0).then_some(b"key" as &[u8]),
            value: (at % 5 > 0).then_some(value),
            timestamp_ms: 1000 + at as i64,
            tag: (at % 4 == 0).then_some("tag"),
            headers: &[("name", b"value")],
        };
        builder.push(&record).unwrap();
    }
    builder.finish()
}

fn stamped(batch: &[u8]) -> Vec<u8> {
    let mut bytes = batch.to_vec();
    stamp(&mut bytes, Offset(100), 1_700_000_000_000, Epoch(3));
    bytes
}

fn texts(count: usize) -> Vec<Vec<u8>> {
    (0..count).map(|at| format!("some text that repeats, number {at}, and goes on repeating").into_bytes()).collect()
}

fn compressed(codec: Codec) -> Vec<u8> {
    compress(&mut Compressor::default(), codec, &batch(&texts(50))).unwrap().to_vec()
}

fn refusal(bytes: &[u8]) -> InvalidBatch {
    let mut bytes = bytes.to_vec();
    seal_crc(&mut bytes);
    check_produced(&BatchHeader::parse(&bytes).unwrap(), &bytes).unwrap_err()
}

#[test]
fn a_compressed_batch_is_smaller_passes_the_broker_and_comes_back_as_it_was() {
    let plain = batch(&texts(50));
    for codec in [Codec::Lz4, Codec::Zstd] {
        let bytes = compressed(codec);
        assert!(bytes.len() < plain.len() * 2 / 3, "{codec}: {} of {}", bytes.len(), plain.len());
        let header = BatchHeader::parse(&bytes).unwrap();
        assert_eq!(header.codec, codec as u8);
        check_produced(&header, &bytes).unwrap();
        let bytes = stamped(&bytes);
        let header = BatchHeader::parse(&bytes).unwrap();
        let (header, back) = decompress(&mut Decompressor::default(), &header, &bytes).unwrap();
        assert_eq!(back, stamped(&plain));
        assert_eq!(header, BatchHeader::parse(&back).unwrap());
    }
}

#[test]
fn what_would_not_become_smaller_stays_as_it_is() {
    let mut compressor = Compressor::default();
    let noise: Vec<Vec<u8>> = vec![(0..200u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()];
    assert_eq!(compress(&mut compressor, Codec::Lz4, &batch(&noise)), None);
    assert_eq!(compress(&mut compressor, Codec::None, &batch(&texts(50))), None);
    assert_eq!(compress(&mut compressor, Codec::Zstd, &compressed(Codec::Lz4)), None);
}

#[test]
fn a_broker_refuses_sizes_that_a_compressed_batch_can_not_have() {
    let good = compressed(Codec::Zstd);
    let mut other = good.clone();
    other[54] = 9;
    assert_eq!(refusal(&other), InvalidBatch::Codec(9));
    let mut larger = good.clone();
    larger[68..72].copy_from_slice(&(2u32 << 20).to_le_bytes());
    assert!(matches!(refusal(&larger), InvalidBatch::RawTooLarge(_)));
    let mut longer = good;
    let stated = u32::from_le_bytes([longer[68], longer[69], longer[70], longer[71]]) + 1;
    longer[68..72].copy_from_slice(&stated.to_le_bytes());
    assert!(matches!(refusal(&longer), InvalidBatch::BodyBytes { .. }));
}

#[test]
fn a_body_that_does_not_decompress_is_an_error_of_the_reader() {
    for codec in [Codec::Lz4, Codec::Zstd] {
        let mut bytes = compressed(codec);
        let header = BatchHeader::parse(&bytes).unwrap();
        bytes[128..140].fill(0xff);
        check_structure(&bytes, &header).unwrap();
        assert!(decompress(&mut Decompressor::default(), &header, &bytes).is_err());
    }
}

fn pack_of(batches: &[u8]) -> Vec<u8> {
    let mut packed = vec![0; batches.len() + 100];
    let size = Compressor::default().compress(Level::Lz4, batches, &mut packed).unwrap();
    let pack = Pack {
        pack_bytes: pack_bytes(size) as u32,
        codec: Codec::Lz4,
        base_offset: Offset(100),
        next_offset: Offset(150),
        raw_bytes: batches.len() as u32,
        packed_bytes: size as u32,
        batches: 1,
    };
    let mut bytes = vec![0; pack_bytes(size)];
    bytes[PACK_HEADER_BYTES..PACK_HEADER_BYTES + size].copy_from_slice(&packed[..size]);
    pack.seal(&mut bytes);
    bytes
}

#[test]
fn a_share_of_batches_packs_and_compressed_batches_gives_plain_batches() {
    let plain = stamped(&batch(&texts(50)));
    let share =
        [plain.clone(), pack_of(&[&plain[..], &plain[..]].concat()), stamped(&compressed(Codec::Zstd))].concat();
    let batches: Vec<_> = FetchedBatches::new(share.into()).collect::<Result<_, _>>().unwrap();
    assert_eq!(batches.len(), 4);
    for (header, bytes) in &batches {
        assert_eq!(bytes, &plain);
        check_stamp(bytes).unwrap();
        assert_eq!(BatchView::parse(bytes, header).unwrap().records().count(), 50);
    }
}

#[test]
fn behind_a_damaged_pack_nothing_more_is_found() {
    let plain = stamped(&batch(&texts(50)));
    let mut share = [pack_of(&plain), plain].concat();
    share[60] ^= 1;
    let batches: Vec<_> = FetchedBatches::new(share.into()).collect();
    assert!(matches!(batches[..], [Err(InvalidBatch::Pack(_))]));
}

proptest! {
    #[test]
    fn hostile_shares_never_panic(
        mut share in proptest::collection::vec(any::<u8>(), 0..400),
        at in 0usize..300, value: u8, from_good: bool
    ) {
        if from_good {
            let plain = stamped(&batch(&texts(5)));
            share = [pack_of(&plain), stamped(&compressed(Codec::Lz4))].concat();
            share[at] = value;
        }
        let _ = FetchedBatches::new(share.into()).count();
    }

    #[test]
    fn damage_under_a_right_crc_never_panics(at in 36usize..400, value: u8, zstd: bool) {
        let mut bytes = compressed(if zstd { Codec::Zstd } else { Codec::Lz4 });
        bytes[at] = value;
        seal_crc(&mut bytes);
        if let Ok(header) = BatchHeader::parse(&bytes) {
            let _ = check_produced(&header, &bytes);
            let _ = decompress(&mut Decompressor::default(), &header, &bytes);
        }
    }
}
