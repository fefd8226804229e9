//! Making the index of a sealed segment again, when a page of its footer is damaged or can't be read: the runs themselves are
//! not lost by that, neither to readers nor to retention.
//!
//! Header and directory of each extent are read, on a thread of its own; one segment at a time. The index stays in memory
//! until the segment goes or the shard starts again.

use std::cell::Cell;
use std::thread;
use std::time::Duration;

use ringmain_core::ids::SegmentSequence;
use ringmain_core::index::SegmentIndex;
use ringmain_core::recover::rebuild_index;

use crate::log_reader::LogReader;
use crate::mailbox::mailbox;
use crate::shard::Shard;
use crate::signal::Broadcast;

/// Wait for the lock of a sealed segment: nobody writes to it, but a roll that waits for space still has it open.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// Why a page of an index gives nothing.
pub(crate) enum PageError {
    /// The bytes are not the page, or the device can't read them: they will not get better.
    Damaged(String),
    /// Anything else: the next try may succeed.
    Failed(String),
}

/// Whether a segment's index is being made again.
#[derive(Default)]
pub(crate) struct IndexRepair {
    under_way: Cell<bool>,
    ended: Broadcast,
}

/// Puts an index that was made anew in the place of that of `segment`, of which a page is bad for `reason`. Nothing to do
/// when somebody has done so meanwhile.
pub(crate) async fn rebuild(shard: &Shard, segment: SegmentSequence, reason: &str) -> Result<(), String> {
    while shard.index_repair.under_way.get() {
        shard.index_repair.ended.wait().await;
    }
    shard.index_repair.under_way.set(true);
    let result = rebuild_one(shard, segment, reason).await;
    shard.index_repair.under_way.set(false);
    shard.index_repair.ended.raise();
    result.map_err(|error| format!("the index of segment {segment} can't be made again: {error}"))
}

async fn rebuild_one(shard: &Shard, segment: SegmentSequence, reason: &str) -> Result<(), String> {
    let end = match shard.log.index.borrow().get(segment) {
        Some(SegmentIndex::Sealed(sealed)) => *sealed.end(),
        Some(SegmentIndex::Full(_)) | None => return Ok(()),
    };
    tracing::error!(
        shard = shard.id.0,
        segment = segment.0,
        "a page of a footer is lost, its index is made again: {reason}"
    );
    let (dir, segment_bytes) = (shard.log.dir().to_owned(), shard.log.segment_bytes());
    let (done, mut result) = mailbox(1);
    let work = move || {
        let reader = LogReader::with_lock_wait(&dir, LOCK_WAIT).map_err(|error| error.to_string());
        let rebuilt = reader
            .and_then(|mut reader| rebuild_index(&mut reader, segment_bytes, &end).map_err(|error| error.to_string()));
        // Nobody listens when the shard has gone.
        let _ = done.try_send(rebuilt);
    };
    thread::Builder::new().name("index".into()).spawn(work).map_err(|error| error.to_string())?;
    let rebuilt = result.recv().await?;
    for lost in &rebuilt.lost {
        tracing::error!(
            shard = shard.id.0,
            segment = segment.0,
            from = lost.from,
            to = lost.to,
            "directories can't be read back either: their records are reported as gaps"
        );
    }
    let mut index = shard.log.index.borrow_mut();
    if matches!(index.get(segment), Some(SegmentIndex::Sealed(_))) {
        index.put(segment, SegmentIndex::Full(rebuilt.index));
        shard.metrics.indexes_rebuilt_total.add(1);
    }
    Ok(())
}
