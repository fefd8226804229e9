use proptest::prelude::*;

use super::*;
use crate::compressor::{Compressor, Level};

fn sealed(raw: &[u8], level: Option<Level>) -> Vec<u8> {
    let mut packed = vec![0; raw.len() + 200];
    let (codec, size) = match level {
        Some(level) => (level.codec(), Compressor::default().compress(level, raw, &mut packed).unwrap()),
        None => {
            packed[..raw.len()].copy_from_slice(raw);
            (Codec::None, raw.len())
        }
    };
    let pack = Pack {
        pack_bytes: pack_bytes(size) as u32,
        codec,
        base_offset: Offset(0x0102_0304_0506_0708),
        next_offset: Offset(0x0102_0304_0506_0710),
        raw_bytes: raw.len() as u32,
        packed_bytes: size as u32,
        batches: 3,
    };
    let mut bytes = vec![0xa5; pack.pack_bytes as usize];
    bytes[PACK_HEADER_BYTES..PACK_HEADER_BYTES + size].copy_from_slice(&packed[..size]);
    pack.seal(&mut bytes);
    bytes
}

#[test]
fn the_bytes_of_a_header_are_those_of_the_table() {
    let bytes = sealed(b"12345678", None);
    let expected = "30000000 81000000 0807060504030201 1007060504030201 08000000 08000000 03000000";
    let hex: String = bytes[..36].iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, expected.replace(' ', ""));
    assert_eq!(&bytes[40..], b"12345678");
}

#[test]
fn a_pack_gives_its_batches_back() {
    let raw = vec![7; 4096];
    for level in [None, Some(Level::Lz4), Some(Level::Quick), Some(Level::Zstd)] {
        let bytes = sealed(&raw, level);
        let pack = Pack::parse(&bytes).unwrap();
        pack.check_crc(&bytes).unwrap();
        assert_eq!(pack.unpack(&mut Decompressor::default(), &bytes).unwrap(), raw);
    }
}

#[test]
fn each_flipped_bit_is_noticed() {
    let good = sealed(&[7; 64], Some(Level::Zstd));
    for bit in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let sound = Pack::parse(&bytes).and_then(|pack| pack.check_crc(&bytes));
        assert!(sound.is_err(), "bit {bit} went unnoticed");
    }
}

#[test]
fn a_pack_that_is_cut_says_what_it_needs() {
    let bytes = sealed(&[7; 4096], Some(Level::Lz4));
    for has in 0..bytes.len() {
        let needs = if has < PACK_HEADER_BYTES { PACK_HEADER_BYTES } else { bytes.len() };
        assert_eq!(Pack::parse(&bytes[..has]), Err(PackError::Truncated { has, needs }));
    }
}

#[test]
fn sizes_past_the_limits_are_refused_before_memory_is_taken() {
    for (at, value) in [(24, u32::MAX - 7), (24, BATCH_BYTES_MAX as u32 + 8), (24, 0), (28, u32::MAX), (0, u32::MAX)] {
        let mut bytes = sealed(&[7; 4096], Some(Level::Lz4));
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        assert!(matches!(Pack::parse(&bytes), Err(PackError::Field(_))), "{at} {value}");
    }
}

#[test]
fn a_run_is_unpacked_only_to_the_size_that_its_entry_states() {
    let mut run = sealed(&[7; 4096], Some(Level::Zstd));
    run.extend(sealed(&[8; 800], None));
    let mut decompressor = Decompressor::default();
    assert_eq!(unpack_run(&mut decompressor, &run, 4896).unwrap(), [vec![7; 4096], vec![8; 800]].concat());
    assert!(unpack_run(&mut decompressor, &run, 4888).is_err());
    assert!(unpack_run(&mut decompressor, &run, 4904).is_err());
}

proptest! {
    #[test]
    fn hostile_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), marked: bool) {
        if marked && bytes.len() > 8 {
            bytes[4] = PACK_MARK;
            bytes[5] %= 3;
            bytes[6..8].fill(0);
        }
        if let Ok(pack) = Pack::parse(&bytes) {
            let _ = pack.check_crc(&bytes);
            let _ = pack.unpack(&mut Decompressor::default(), &bytes);
        }
        let _ = unpack_run(&mut Decompressor::default(), &bytes, 1 << 20);
    }

    #[test]
    fn damaged_sizes_never_panic(at in 0usize..40, value: u8) {
        let mut bytes = sealed(&[7; 4096], Some(Level::Lz4));
        bytes[at] = value;
        if let Ok(pack) = Pack::parse(&bytes) {
            let _ = pack.unpack(&mut Decompressor::default(), &bytes);
        }
    }
}
