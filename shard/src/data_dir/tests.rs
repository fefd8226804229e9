use std::process::{Child, Command, Stdio};

use super::*;

fn open(path: &Path, shards: Option<u16>) -> Result<DataDir, DataDirError> {
    DataDir::open(path, &DataDirOptions { shards, shards_if_new: 2, ..DataDirOptions::default() })
}

#[test]
fn a_new_directory_keeps_what_it_was_made_with() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("a/b");
    let options = DataDirOptions { segment_bytes_if_new: 32 << 20, cluster_id: Some(5), ..DataDirOptions::default() };
    let first = DataDir::open(&path, &options).unwrap();
    assert!(first.is_new());
    assert_eq!((first.shards(), first.segment_bytes(), first.identity().cluster_id), (1, 32 << 20, 5));
    let identity = first.identity().clone();
    drop(first);
    let again = open(&path, None).unwrap();
    assert!(!again.is_new());
    assert_eq!(again.identity(), &identity);
    for dir in [again.shard_dir(ShardId(0)), again.master_dir(), again.quarantine_dir()] {
        assert!(dir.is_dir());
    }
}

#[test]
fn more_shards_are_added_with_logs_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let two = open(dir.path(), None).unwrap().identity().clone();
    let four = open(dir.path(), Some(4)).unwrap();
    assert_eq!(four.identity().log_ids[..2], two.log_ids);
    let mut ids = four.identity().log_ids.clone();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 4);
    assert!(four.shard_dir(ShardId(3)).is_dir());
    drop(four);
    assert_eq!(open(dir.path(), None).unwrap().shards(), 4);
}

#[test]
fn fewer_shards_are_refused_naming_those_with_data() {
    let dir = tempfile::tempdir().unwrap();
    let data = open(dir.path(), Some(4)).unwrap();
    drop(data);
    let error = open(dir.path(), Some(1)).unwrap_err();
    assert!(matches!(&error, DataDirError::FewerShards { has: 4, asked: 1, with_data, .. } if with_data.is_empty()));
    fs::write(dir.path().join("shard-001/00000000000000000000.log"), "x").unwrap();
    fs::write(dir.path().join("shard-003/00000000000000000007.log"), "x").unwrap();
    let error = open(dir.path(), Some(1)).unwrap_err();
    assert!(error.to_string().contains("shards 1, 3 hold data"), "{error}");
    assert!(error.to_string().contains("--shards 4"), "{error}");
    // Nothing was changed.
    assert_eq!(open(dir.path(), None).unwrap().shards(), 4);
}

#[test]
fn a_directory_of_another_cluster_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = |cluster_id| DataDirOptions { cluster_id, ..DataDirOptions::default() };
    drop(DataDir::open(dir.path(), &options(Some(1))).unwrap());
    let error = DataDir::open(dir.path(), &options(Some(2))).unwrap_err();
    assert!(matches!(error, DataDirError::ForeignCluster { has: 1, asked: 2, .. }));
    DataDir::open(dir.path(), &options(None)).unwrap();
}

/// A process that holds the lock of a data directory until it is dropped.
struct Holder {
    flock: Child,
    /// The process that flock(1) has passed its descriptor on to.
    sleep: String,
}

impl Holder {
    fn of(lock: &Path) -> Self {
        let flock = Command::new("flock").arg(lock).args(["sleep", "1000"]).stdout(Stdio::null()).spawn().unwrap();
        let mut holder = Self { flock, sleep: String::new() };
        let locked = || {
            let file = File::open(lock).unwrap();
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
        };
        let children = format!("/proc/{0}/task/{0}/children", holder.flock.id());
        let begun = Instant::now();
        while holder.sleep.is_empty() || !locked() {
            assert!(begun.elapsed() < Duration::from_secs(20), "flock(1) does not lock");
            thread::sleep(Duration::from_millis(5));
            fs::read_to_string(&children).unwrap().trim().clone_into(&mut holder.sleep);
        }
        holder
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-9", &self.sleep]).status();
        let _ = self.flock.kill();
        let _ = self.flock.wait();
    }
}

#[test]
fn a_directory_in_use_is_refused_at_once_naming_the_process() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path(), None).unwrap());
    let lock = dir.path().join("LOCK");
    let holder = Holder::of(&lock);
    fs::write(&lock, format!("{}\n", holder.flock.id())).unwrap();
    let begun = Instant::now();
    let error = open(dir.path(), None).unwrap_err();
    assert!(begun.elapsed() < LOCK_WAIT / 2);
    assert!(error.to_string().contains(&format!("process {}", holder.flock.id())), "{error}");
    drop(holder);
    open(dir.path(), None).unwrap();
    assert_eq!(fs::read_to_string(&lock).unwrap(), format!("{}\n", std::process::id()));
}

#[test]
fn the_lock_of_a_dying_process_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path(), None).unwrap());
    let lock = dir.path().join("LOCK");
    let holder = Holder::of(&lock);
    // No such process: as one that is gone but whose descriptors are not yet closed.
    fs::write(&lock, "4194304999\n").unwrap();
    let path = dir.path().to_owned();
    let opener = thread::spawn(move || open(&path, None).map(|data| data.shards()));
    thread::sleep(2 * LOCK_RETRY);
    assert!(!opener.is_finished());
    drop(holder);
    assert_eq!(opener.join().unwrap().unwrap(), 2);
}

#[test]
fn a_copied_directory_works() {
    let root = tempfile::tempdir().unwrap();
    let (a, b) = (root.path().join("a"), root.path().join("b"));
    let first = open(&a, None).unwrap();
    assert!(Command::new("cp").arg("-a").arg(&a).arg(&b).status().unwrap().success());
    let second = open(&b, None).unwrap();
    assert_eq!(first.identity(), second.identity());
}

#[test]
fn data_without_an_identity_is_refused_and_a_half_made_directory_is_finished() {
    let dir = tempfile::tempdir().unwrap();
    // A kill before the identity was in place.
    fs::write(dir.path().join("LOCK"), "1\n").unwrap();
    fs::write(dir.path().join("identity.new"), "half").unwrap();
    drop(open(dir.path(), None).unwrap());
    assert!(!dir.path().join("identity.new").exists());
    fs::remove_file(dir.path().join("identity")).unwrap();
    let error = open(dir.path(), None).unwrap_err();
    assert!(matches!(error, DataDirError::IdentityMissing(_)), "{error}");
}

#[test]
fn a_damaged_identity_is_refused_whatever_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path(), None).unwrap());
    let path = dir.path().join("identity");
    let whole = fs::read(&path).unwrap();
    for bytes in 0..whole.len() {
        assert!(Identity::decode(&whole[..bytes]).is_err(), "cut to {bytes}");
        let mut flipped = whole.clone();
        flipped[bytes] ^= 0x10;
        assert!(Identity::decode(&flipped).is_err(), "flipped at {bytes}");
    }
    fs::write(&path, [whole.as_slice(), b"x"].concat()).unwrap();
    let error = open(dir.path(), None).unwrap_err();
    assert!(matches!(error, DataDirError::Identity { reason: IdentityError::Damaged, .. }), "{error}");
}

#[test]
fn an_identity_of_a_later_version_is_named() {
    let identity = Identity { segment_bytes: SEGMENT_BYTES, cluster_id: 1, log_ids: vec![LogId(2)] };
    let mut bytes = identity.encode();
    assert_eq!(Identity::decode(&bytes), Ok(identity));
    bytes[4] = 2;
    let body = bytes.len() - 4;
    let crc = ringmain_core::crc::crc32c(&bytes[..body]);
    bytes[body..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(Identity::decode(&bytes), Err(IdentityError::Version(2)));
}

#[test]
fn counts_and_sizes_out_of_bounds_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(open(dir.path(), Some(0)), Err(DataDirError::Shards(0))));
    assert!(matches!(open(dir.path(), Some(257)), Err(DataDirError::Shards(257))));
    for segment_bytes_if_new in [0, 4096, (16 << 20) + 1, 4 << 30] {
        let options = DataDirOptions { segment_bytes_if_new, ..DataDirOptions::default() };
        assert!(matches!(DataDir::open(dir.path(), &options), Err(DataDirError::SegmentBytes(_))));
    }
}
