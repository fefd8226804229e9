use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use ringmain_core::ids::{Incarnation, LogId, ShardId};

use super::*;

/// A directory in memory that is gone after the test.
fn memory_dir() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("ringmain-test-").tempdir_in("/dev/shm").unwrap()
}

fn identity(dir: &Path) -> ArenaIdentity {
    ArenaIdentity::of(dir, LogId(0xabc), ShardId(1)).unwrap()
}

fn create(dir: &Path, slabs: u32) -> Arena {
    Arena::create(dir, identity(dir), Incarnation(1), slabs).unwrap()
}

fn reopen(dir: &Path) -> Arena {
    Arena::open_existing(dir, &identity(dir)).unwrap().0
}

const fn block(slab: u32, slot: u32) -> u32 {
    slab * SLAB_SLOTS as u32 + slot
}

#[test]
fn what_was_committed_is_there_for_the_next_one() {
    let dir = memory_dir();
    let arena = create(dir.path(), 4);
    arena.take(block(0, 5), TopicId(7), 0, 100);
    arena.write(block(0, 5), 0, b"0123456789");
    arena.publish(block(0, 5), 8);
    arena.take(block(1, 7), TopicId(8), 1, 99);
    arena.write(block(1, 7), 256 * 1024 - 3, b"end");
    arena.publish(block(1, 7), 256 * 1024);
    arena.seal(block(1, 7));
    arena.take(block(2, 0), TopicId(9), 2, 101);
    arena.take(block(0, 6), TopicId(9), 0, 102);
    arena.free(block(0, 6));
    drop(arena);

    let arena = reopen(dir.path());
    let live = |block, topic, class, sequence, committed_bytes, state| LiveBlock {
        block,
        topic: TopicId(topic),
        class,
        sequence,
        committed_bytes,
        state,
    };
    assert_eq!(
        arena.live_blocks().unwrap(),
        [
            live(block(1, 7), 8, 1, 99, 256 * 1024, BlockState::Sealed),
            live(block(0, 5), 7, 0, 100, 8, BlockState::Open),
            live(block(2, 0), 9, 2, 101, 0, BlockState::Open),
        ]
    );
    assert_eq!(arena.read(block(0, 5), 0, 8), b"01234567");
    assert_eq!(arena.read(block(1, 7), 256 * 1024 - 3, 3), b"end");
}

#[test]
fn blocks_do_not_overlap_each_other_or_the_descriptors() {
    let dir = memory_dir();
    let arena = create(dir.path(), 3);
    let blocks: Vec<(u32, u8)> = (0..128)
        .map(|slot| (block(0, slot), 0))
        .chain((0..8).map(|slot| (block(1, slot), 1)))
        .chain([(block(2, 0), 2)])
        .collect();
    for (n, &(number, class)) in blocks.iter().enumerate() {
        arena.take(number, TopicId(n as u64), class, n as u64);
        let bytes = BLOCK_BYTES[usize::from(class)];
        arena.write(number, 0, &vec![n as u8; bytes]);
        arena.publish(number, bytes as u32);
    }
    for (n, &(number, class)) in blocks.iter().enumerate() {
        let bytes = BLOCK_BYTES[usize::from(class)];
        assert!(arena.read(number, 0, bytes).iter().all(|&byte| byte == n as u8), "block {number}");
    }
    assert_eq!(arena.live_blocks().unwrap().len(), blocks.len());
}

#[test]
fn incarnations_and_adoptions_are_kept() {
    let dir = memory_dir();
    let mut arena = create(dir.path(), 1);
    arena.set_next_incarnation(Incarnation(2));
    drop(arena);
    let mut arena = reopen(dir.path());
    let header = arena.header();
    assert_eq!((header.incarnation, header.next_incarnation), (Incarnation(1), Incarnation(2)));
    assert_eq!(arena.count_panic(), 1);
    assert_eq!(arena.count_panic(), 2);
    drop(arena);
    let mut arena = reopen(dir.path());
    assert_eq!(arena.header().adoption_panics, 2);
    arena.commit_incarnation();
    drop(arena);
    let header = reopen(dir.path()).header();
    assert_eq!((header.incarnation, header.next_incarnation), (Incarnation(2), Incarnation(2)));
    assert_eq!(header.adoption_panics, 0);
}

#[test]
fn how_far_the_log_was_flushed_is_kept_and_leaves_the_header_alone() {
    let dir = memory_dir();
    let mut arena = create(dir.path(), 1);
    assert_eq!(arena.flushed(), Position(0));
    arena.note_flushed(Position(1 << 40));
    arena.set_next_incarnation(Incarnation(2));
    arena.commit_incarnation();
    arena.note_flushed(Position((1 << 40) + 4096));
    let header = arena.header();
    drop(arena);
    let arena = reopen(dir.path());
    assert_eq!((arena.header(), arena.flushed()), (header, Position((1 << 40) + 4096)));
}

#[test]
fn a_missing_a_locked_and_an_existing_arena_are_told_apart() {
    let dir = memory_dir();
    let id = identity(dir.path());
    assert!(matches!(Arena::open_existing(dir.path(), &id), Err(ArenaError::Missing(_))));
    let arena = create(dir.path(), 1);
    assert!(matches!(Arena::open_existing(dir.path(), &id), Err(ArenaError::Locked(_))));
    let again = Arena::create(dir.path(), id, Incarnation(1), 1);
    assert!(matches!(again, Err(ArenaError::Exists(_))));
    arena.remove().unwrap();
    assert!(matches!(Arena::open_existing(dir.path(), &id), Err(ArenaError::Missing(_))));
}

#[test]
fn the_arena_of_a_copied_data_directory_is_another_one() {
    let dir = memory_dir();
    let copy = memory_dir();
    let (ours, theirs) = (identity(dir.path()), identity(copy.path()));
    assert_eq!(ours.log_id, theirs.log_id);
    assert_ne!(arena_path(dir.path(), &ours), arena_path(dir.path(), &theirs));
}

#[test]
fn a_directory_on_disk_is_refused_with_the_fix() {
    let dir = tempfile::tempdir().unwrap();
    let error = Arena::create(dir.path(), identity(dir.path()), Incarnation(1), 1).unwrap_err();
    assert!(matches!(error, ArenaError::NotMemory(_)));
    assert!(error.to_string().contains("--arena-dir"), "{error}");
}

#[test]
fn too_little_room_is_refused_with_the_fix_and_leaves_nothing_behind() {
    let dir = memory_dir();
    let error = Arena::create(dir.path(), identity(dir.path()), Incarnation(1), 10_000_000).unwrap_err();
    assert!(matches!(error, ArenaError::NoRoom { .. }));
    assert!(error.to_string().contains("remount,size="), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn malformed_headers_and_sizes_are_refused() {
    let dir = memory_dir();
    drop(create(dir.path(), 2));
    let id = identity(dir.path());
    let path = arena_path(dir.path(), &id);
    let whole = fs::read(&path).unwrap();
    let open = || Arena::open_existing(dir.path(), &id).err().unwrap();

    File::options().write(true).open(&path).unwrap().set_len(whole.len() as u64 - 1).unwrap();
    assert!(matches!(open(), ArenaError::Size { .. }));
    fs::write(&path, b"short").unwrap();
    assert!(matches!(open(), ArenaError::Header { reason: HeaderError::NotWhole, .. }));
    fs::write(&path, vec![0; whole.len()]).unwrap();
    assert!(matches!(open(), ArenaError::Header { reason: HeaderError::NotWhole, .. }));
    fs::write(&path, &whole).unwrap();
    reopen(dir.path());
}

#[test]
fn malformed_descriptors_are_refused() {
    let dir = memory_dir();
    let arena = create(dir.path(), 2);
    arena.take(block(0, 0), TopicId(1), 1, 1);
    arena.take(block(0, 1), TopicId(1), 1, 2);
    arena.publish(block(0, 1), 100);
    drop(arena);
    let path = arena_path(dir.path(), &identity(dir.path()));
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let at = |number: u32| (HEADER_BYTES + number as usize * DESCRIPTOR_BYTES) as u64;
    let mut first = [0; DESCRIPTOR_BYTES];
    file.read_exact_at(&mut first, at(0)).unwrap();
    let mut second = [0; DESCRIPTOR_BYTES];
    file.read_exact_at(&mut second, at(1)).unwrap();
    let word = |bytes: &[u8; 64]| Word::decode(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let with_word = |word: Word| {
        let mut bytes = second;
        bytes[..8].copy_from_slice(&word.encode().to_le_bytes());
        bytes
    };
    let with_fields = |change: &dyn Fn(&mut Fields)| {
        let mut fields = Fields::decode(&second[FIELDS_AT..FIELDS_AT + FIELDS_BYTES]).unwrap();
        change(&mut fields);
        let mut bytes = second;
        bytes[FIELDS_AT..FIELDS_AT + FIELDS_BYTES].copy_from_slice(&fields.encode());
        bytes
    };
    let bad_state = {
        let mut bytes = second;
        bytes[0] |= 3;
        bytes
    };
    let bad_crc = {
        let mut bytes = second;
        bytes[10] ^= 1;
        bytes
    };
    let now = word(&second);
    let cases: [([u8; 64], DescriptorError); 8] = [
        (bad_state, DescriptorError::State),
        (bad_crc, DescriptorError::Crc),
        (with_word(Word { generation: now.generation + 1, ..now }), DescriptorError::Generation),
        (with_word(Word { committed_bytes: 256 * 1024 + 1, ..now }), DescriptorError::Committed(256 * 1024 + 1)),
        (with_fields(&|fields| fields.class = 3), DescriptorError::Class(3)),
        (with_fields(&|fields| fields.class = 2), DescriptorError::Class(2)),
        (with_fields(&|fields| fields.class = 0), DescriptorError::MixedSlab(0)),
        (with_fields(&|fields| fields.sequence = 1), DescriptorError::Sequence(1)),
    ];
    for (bytes, expected) in cases {
        file.write_all_at(&bytes, at(1)).unwrap();
        let error = reopen(dir.path()).live_blocks().unwrap_err();
        assert!(matches!(error, ArenaError::Descriptor { reason, .. } if reason == expected), "{error} {expected}");
    }
    file.write_all_at(&second, at(1)).unwrap();
    assert_eq!(reopen(dir.path()).live_blocks().unwrap().len(), 2);
}

#[test]
fn two_starts_that_die_one_after_the_other_leave_an_arena_that_knows_the_logs_last_incarnation() {
    let dir = memory_dir();
    let mut arena = create(dir.path(), 2);
    let first = arena.header().incarnation;
    let (second, third) = (Incarnation(first.0 + 1), Incarnation(first.0 + 2));
    // The first start dies when `second` is in the log, before it commits it here.
    arena.set_next_incarnation(second);
    // The next one dies before `third` is in the log.
    arena.confirm_incarnation(second);
    arena.set_next_incarnation(third);
    drop(arena);
    let (_, header) = Arena::open_existing(dir.path(), &identity(dir.path())).unwrap();
    assert_eq!((header.incarnation, header.next_incarnation), (second, third));
}

#[test]
fn quarantine_keeps_a_whole_copy_and_takes_the_arena_away() {
    let dir = memory_dir();
    let disk = tempfile::tempdir().unwrap();
    let arena = create(dir.path(), 2);
    arena.take(block(1, 3), TopicId(1), 0, 1);
    arena.write(block(1, 3), 0, b"hello");
    arena.publish(block(1, 3), 5);
    let path = arena_path(dir.path(), &identity(dir.path()));
    let before = fs::read(&path).unwrap();
    let kept = disk.path().join("kept.arena");
    arena.quarantine(&kept).unwrap();
    assert!(!path.exists());
    assert!(fs::read(&kept).unwrap() == before);

    // One that is no arena at all.
    fs::write(&path, b"garbage").unwrap();
    let error = quarantine_file(&path, &kept).unwrap_err();
    assert!(error.to_string().contains("exists"), "{error}");
    assert!(path.exists());
    quarantine_file(&path, &disk.path().join("garbage")).unwrap();
    assert!(!path.exists());
}

#[test]
fn memory_is_reserved_before_use_but_resident_only_with_use() {
    let dir = memory_dir();
    let arena = create(dir.path(), 64);
    assert_eq!(arena.usable_slabs(), SLABS_AT_ONCE);
    let reserver = arena.reserver();
    std::thread::spawn(move || reserver.reserve_all().unwrap()).join().unwrap();
    assert_eq!(arena.usable_slabs(), 64);
    let path = arena_path(dir.path(), &identity(dir.path()));
    let stat = rustix::fs::stat(&path).unwrap();
    assert!(stat.st_blocks as u64 * 512 >= 64 * SLAB_BYTES as u64, "all is allocated");
    let resident = || resident_bytes_of(&path);
    assert!(resident() < 1 << 20, "{} bytes are resident", resident());
    arena.take(block(40, 0), TopicId(1), 2, 1);
    arena.write(block(40, 0), 0, &vec![1; SLAB_BYTES]);
    assert!((SLAB_BYTES..SLAB_BYTES + (1 << 20)).contains(&resident()), "{} bytes are resident", resident());
    arena.reserver().populate(41).unwrap();
    assert!(resident() >= 2 * SLAB_BYTES);
}

fn resident_bytes_of(path: &Path) -> usize {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mapping = maps.split_once(path.to_str().unwrap()).unwrap().1;
    let line = mapping.lines().find(|line| line.starts_with("Rss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn an_anonymous_arena_works_the_same_but_says_that_it_dies() {
    let mut arena = Arena::anonymous(2).unwrap();
    assert!(!arena.survives_process_kill());
    assert_eq!(arena.usable_slabs(), 2);
    arena.take(block(1, 0), TopicId(1), 0, 1);
    arena.write(block(1, 0), 0, b"abc");
    arena.publish(block(1, 0), 3);
    arena.set_next_incarnation(Incarnation(3));
    arena.commit_incarnation();
    assert_eq!(arena.header().incarnation, Incarnation(3));
    assert_eq!(arena.live_blocks().unwrap().len(), 1);
    arena.remove().unwrap();
}

#[test]
fn sizes_and_slab_counts_fit_each_other() {
    for bytes in [0, 4096, 4 << 20, 32 << 20, (1 << 30) + 12345, 64 << 30] {
        let slabs = slabs_in(bytes);
        assert!(slabs == 0 || arena_bytes(slabs) <= bytes);
        assert!(arena_bytes(slabs + 1) > bytes);
    }
}

#[test]
#[should_panic(expected = "taken twice")]
fn taking_a_taken_block_is_a_bug() {
    let arena = Arena::anonymous(1).unwrap();
    arena.take(0, TopicId(1), 0, 1);
    arena.take(0, TopicId(1), 0, 2);
}

#[test]
#[should_panic(expected = "not committed")]
fn reading_a_free_block_is_a_bug() {
    let _ = Arena::anonymous(1).unwrap().read(0, 0, 1);
}

#[test]
#[should_panic(expected = "not reserved")]
fn taking_a_block_that_is_not_reserved_is_a_bug() {
    let dir = memory_dir();
    create(dir.path(), SLABS_AT_ONCE + 1).take(block(SLABS_AT_ONCE, 0), TopicId(1), 0, 1);
}

const CHILD_DIR: &str = "RINGMAIN_TEST_ARENA_DIR";

/// Takes, fills, commits, seals and frees blocks for ever. Byte `i` of a block of sequence `s` is `(s * 31 + i) as u8`.
fn churn(dir: &Path) -> ! {
    let mut arena = match Arena::open_existing(dir, &identity(dir)) {
        Ok((arena, _)) => arena,
        Err(ArenaError::Missing(_)) => create(dir, 2),
        Err(error) => panic!("{error}"),
    };
    let live = arena.live_blocks().unwrap();
    let mut sequence = live.last().map_or(0, |last| last.sequence + 1);
    for found in live {
        arena.free(found.block);
    }
    let mut held = std::collections::VecDeque::new();
    loop {
        let number = block((sequence % 2) as u32, (sequence / 2 % 128) as u32);
        if held.len() == 100 {
            arena.free(held.pop_front().unwrap());
        }
        arena.take(number, TopicId(sequence % 10), 0, sequence);
        for step in 0..4usize {
            let range = step * 500..(step + 1) * 500;
            let bytes: Vec<u8> = range.clone().map(|i| (sequence as usize * 31 + i) as u8).collect();
            arena.write(number, range.start, &bytes);
            arena.publish(number, range.end as u32);
        }
        arena.seal(number);
        held.push_back(number);
        if sequence.is_multiple_of(7) {
            let next = Incarnation(arena.header().incarnation.0.wrapping_add(1));
            arena.set_next_incarnation(next);
            arena.commit_incarnation();
        }
        sequence += 1;
    }
}

#[test]
fn a_process_killed_at_any_moment_leaves_a_whole_arena() {
    if let Some(dir) = std::env::var_os(CHILD_DIR) {
        churn(Path::new(&dir));
    }
    let dir = memory_dir();
    let mut longest = 0;
    for round in 0..40u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "arena::tests::a_process_killed_at_any_moment_leaves_a_whole_arena"])
            .env(CHILD_DIR, dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Its first moments as well as later ones. Not a wait for something: the moment must be any.
        std::thread::sleep(Duration::from_micros(2_000 + round * 1_777));
        child.kill().unwrap();
        child.wait().unwrap();
        let arena = match Arena::open_existing(dir.path(), &identity(dir.path())) {
            Ok((arena, _)) => arena,
            Err(ArenaError::Missing(_)) => continue,
            Err(error) => panic!("round {round}: {error}"),
        };
        let header = arena.header();
        assert!(header.next_incarnation.0.wrapping_sub(header.incarnation.0) <= 1);
        let live = arena.live_blocks().unwrap();
        let by_sequence: BTreeMap<u64, u32> =
            live.iter().map(|found| (found.sequence, found.committed_bytes)).collect();
        assert!(by_sequence.len() <= 100);
        for found in &live {
            let bytes = arena.read(found.block, 0, found.committed_bytes as usize);
            let right = bytes.iter().enumerate().all(|(i, &byte)| byte == (found.sequence as usize * 31 + i) as u8);
            assert!(right, "round {round}: bytes of block {}", found.block);
            // Only the last one may be half done.
            let done = found.state == BlockState::Sealed && found.committed_bytes == 2000;
            assert!(done || Some((&found.sequence, &found.committed_bytes)) == by_sequence.last_key_value());
        }
        longest = longest.max(by_sequence.last_key_value().map_or(0, |(sequence, _)| *sequence));
    }
    assert!(longest > 1000, "the children got to {longest} only");
}
