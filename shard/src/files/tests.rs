use super::*;
use crate::runtime::spawn_joined;
use crate::test_support::on_shard;

const BLOCK: usize = DISK_BLOCK_BYTES;

fn filled(bytes: usize, seed: u8) -> WriteBuffer {
    let mut buffer = WriteBuffer::new(bytes);
    for (at, byte) in buffer.as_mut_slice().iter_mut().enumerate() {
        *byte = (at / 7) as u8 ^ seed ^ (at >> 12) as u8;
    }
    buffer
}

fn joined(buffer: &ReadBuffer) -> Vec<u8> {
    buffer.as_slice().to_vec()
}

#[test]
fn what_is_written_is_read_back_at_any_place_and_size() {
    on_shard(|dir| async move {
        let file = LogFile::create(&dir.join("a.log"), 16 << 20).await.unwrap();
        assert_eq!(file.bytes().unwrap(), 16 << 20);
        let buffer = filled(2 << 20, 9);
        let expected = buffer.as_slice().to_vec();
        file.write_at(buffer, 4096).await.unwrap();
        file.fdatasync().await.unwrap();
        for (place, bytes) in [(4096, 4096), (4096, 2 << 20), (5000, 1), (4097, 300_000), (4096 + 8, BLOCK), (4096, 0)]
        {
            let read = file.read_at(place, bytes).await.unwrap();
            assert_eq!(read.bytes(), bytes);
            let from = place as usize - 4096;
            assert!(joined(&read) == expected[from..from + bytes], "{place} {bytes}");
            assert!(joined(&read.slice(bytes / 3..bytes)) == expected[from + bytes / 3..from + bytes]);
        }
        assert!(joined(&file.read_at(0, BLOCK).await.unwrap()).iter().all(|&byte| byte == 0));
        file.close().await.unwrap();
    });
}

#[test]
fn large_writes_are_whole_also_when_several_are_in_flight() {
    on_shard(|dir| async move {
        let file = LogFile::create(&dir.join("a.log"), 64 << 20).await.unwrap();
        let writes: Vec<_> = (0..8u64)
            .map(|n| {
                let file = file.clone();
                spawn_joined(async move { file.write_at(filled(4 << 20, n as u8), n * (4 << 20)).await })
            })
            .collect();
        for write in writes {
            write.await.unwrap();
        }
        for n in 0..8u64 {
            let expected = filled(4 << 20, n as u8);
            let read = file.read_at(n * (4 << 20), 4 << 20).await.unwrap();
            assert!(joined(&read) == expected.as_slice(), "{n}");
        }
        assert_eq!(file.in_flight(), 0);
        file.close().await.unwrap();
    });
}

#[test]
fn the_largest_read_is_one_buffer() {
    on_shard(|dir| async move {
        let file = LogFile::create(&dir.join("a.log"), 2 * READ_BYTES_MAX as u64).await.unwrap();
        for n in 0..8u64 {
            file.write_at(filled(READ_BYTES_MAX / 8, n as u8), n * (READ_BYTES_MAX as u64 / 8)).await.unwrap();
        }
        let read = file.read_at(0, READ_BYTES_MAX).await.unwrap();
        for n in 0..8 {
            let part = READ_BYTES_MAX / 8;
            assert!(read.as_slice()[n * part..(n + 1) * part] == *filled(part, n as u8).as_slice());
        }
    });
}

#[test]
fn reading_past_the_end_is_an_error_that_says_how_much_there_is() {
    on_shard(|dir| async move {
        let file = LogFile::create(&dir.join("a.log"), 8192).await.unwrap();
        let error = file.read_at(4096, 8192).await.unwrap_err();
        assert!(matches!(error, FileError::ShortRead { read: 4096, .. }), "{error}");
        let error = file.read_at(1 << 20, 4096).await.unwrap_err();
        assert!(matches!(error, FileError::ShortRead { read: 0, .. }), "{error}");
    });
}

#[test]
fn a_locked_file_is_refused_until_the_lock_is_given_back() {
    on_shard(|dir| async move {
        let path = dir.join("a.log");
        let file = LogFile::create(&path, 8192).await.unwrap();
        let error = LogFile::open(&path).await.unwrap_err();
        assert!(matches!(error, FileError::Locked { .. }), "{error}");
        // Reading sealed files asks for no lock.
        LogFile::open_sealed(&path).await.unwrap().close().await.unwrap();
        file.close().await.unwrap();
        LogFile::open(&path).await.unwrap().close().await.unwrap();
    });
}

#[test]
fn creating_over_an_existing_file_and_opening_a_missing_one_are_errors() {
    on_shard(|dir| async move {
        let path = dir.join("a.log");
        LogFile::create(&path, 8192).await.unwrap().close().await.unwrap();
        let error = LogFile::create(&path, 8192).await.unwrap_err();
        assert!(error.to_string().contains("a.log"), "{error}");
        assert!(matches!(error, FileError::Io { action: "create", .. }), "{error}");
        let error = LogFile::open(&dir.join("b.log")).await.unwrap_err();
        assert!(matches!(error, FileError::Io { action: "open", .. }), "{error}");
    });
}

#[test]
fn a_file_larger_than_the_device_is_reported_as_full() {
    on_shard(|dir| async move {
        let file = LogFile::create(&dir.join("a.log"), 8192).await.unwrap();
        let error = file.reserve(1 << 50).await.unwrap_err();
        assert!(error.is_full(), "{error}");
    });
}

#[test]
fn truncate_punch_rename_and_remove_do_what_they_say() {
    on_shard(|dir| async move {
        let (a, b) = (dir.join("a.log"), dir.join("b.log"));
        let file = LogFile::create(&a, 1 << 20).await.unwrap();
        file.write_at(filled(65536, 1), 0).await.unwrap();
        file.punch(4096, 8192).await.unwrap();
        let read = joined(&file.read_at(0, 16384).await.unwrap());
        let expected = filled(65536, 1);
        assert!(read[..4096] == expected.as_slice()[..4096]);
        assert!(read[4096..12288].iter().all(|&byte| byte == 0));
        assert!(read[12288..] == expected.as_slice()[12288..16384]);
        file.truncate(65536).await.unwrap();
        assert_eq!(file.bytes().unwrap(), 65536);
        file.close().await.unwrap();
        rename(&a, &b).await.unwrap();
        sync_dir(&dir).await.unwrap();
        assert!(!a.exists() && b.exists());
        remove(&b).await.unwrap();
        assert!(!b.exists());
    });
}

#[test]
fn buffers_beyond_the_registered_memory_work_as_well() {
    on_shard(|dir| async move {
        let file = LogFile::create(&dir.join("a.log"), 16 << 20).await.unwrap();
        // The executor of tests has 1 MiB.
        let buffers: Vec<_> = (0..8u8).map(|n| filled(1 << 20, n)).collect();
        for (n, buffer) in buffers.into_iter().enumerate() {
            file.write_at(buffer, (n as u64) << 20).await.unwrap();
        }
        for n in 0..8u8 {
            let read = file.read_at(u64::from(n) << 20, 1 << 20).await.unwrap();
            assert!(joined(&read) == filled(1 << 20, n).as_slice());
        }
    });
}

#[test]
fn a_file_opened_again_to_sync_its_writes_stays_locked_until_both_are_closed() {
    on_shard(|dir| async move {
        let path = dir.join("a.log");
        let file = LogFile::create(&path, 65536).await.unwrap();
        let syncing = file.open_syncing().await.unwrap();
        syncing.write_at(filled(4096, 7), 4096).await.unwrap();
        file.write_at(filled(4096, 8), 8192).await.unwrap();
        assert!(*file.read_at(4096, 4096).await.unwrap().as_slice() == *filled(4096, 7).as_slice());
        let reader = std::fs::File::open(&path).unwrap();
        assert!(reader.try_lock().is_err());
        file.close().await.unwrap();
        assert!(reader.try_lock().is_err(), "writes through the other may still be under way");
        syncing.close().await.unwrap();
        reader.try_lock().unwrap();
    });
}
