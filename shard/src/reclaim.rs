//! Gives back sealed segments that hold nothing but records of deleted topics.
//!
//! Runs after a topic was deleted, one segment at a time: its footer is read until an entry of a living topic turns up,
//! which in a living segment is at once. A newer checkpoint is synced by then: the one that the open segment began with.

use std::collections::HashSet;
use std::rc::Rc;

use ringmain_core::ids::{SegmentSequence, TopicId};
use ringmain_core::index::{FOOTER_PAGE_BYTES, SegmentIndex};

use crate::runtime::{spawn_local, yield_if_needed};
use crate::shard::Shard;

/// A topic was deleted: look for dead segments, unless that is being done already (then once more afterwards).
pub(crate) fn wanted(shard: &Rc<Shard>) {
    if shard.reclaim_wanted.replace(true) || shard.reclaiming.replace(true) {
        return;
    }
    let shard = Rc::clone(shard);
    spawn_local(async move {
        while shard.reclaim_wanted.replace(false) && !shard.stopping.get() {
            reclaim(&shard).await;
        }
        shard.reclaiming.set(false);
    });
}

async fn reclaim(shard: &Rc<Shard>) {
    let living: HashSet<TopicId> = shard.routing.borrow().all().into_iter().map(|topic| topic.info.id).collect();
    let open = shard.log.open_segment().map(|(segment, _)| segment);
    let segments: Vec<SegmentSequence> = shard.log.index.borrow().segments().collect();
    for segment in segments {
        if open.is_none_or(|open| segment >= open) || shard.stopping.get() {
            continue;
        }
        match is_dead(shard, segment, &living).await {
            Ok(false) => {}
            Ok(true) => {
                if let Err(error) = free(shard, segment).await {
                    tracing::warn!(shard = shard.id.0, segment = segment.0, "can't free a dead segment: {error}");
                }
            }
            Err(error) => {
                tracing::warn!(
                    shard = shard.id.0,
                    segment = segment.0,
                    "can't tell whether a segment is dead: {error}"
                );
            }
        }
        yield_if_needed().await;
    }
}

/// Whether no entry of the segment's footer is of a living topic.
async fn is_dead(shard: &Rc<Shard>, segment: SegmentSequence, living: &HashSet<TopicId>) -> Result<bool, String> {
    let pages: Vec<u64> = match shard.log.index.borrow().get(segment) {
        Some(SegmentIndex::Sealed(sealed)) => (0..sealed.pages()).map(|page| sealed.page_place(page)).collect(),
        // Its footer is lost: it is kept, its entries are in memory.
        Some(SegmentIndex::Full(_)) | None => return Ok(false),
    };
    let file =
        crate::files::LogFile::open_sealed(&shard.log.path_of(segment)).await.map_err(|error| error.to_string())?;
    let mut dead = true;
    for (page, place) in pages.into_iter().enumerate() {
        let read = file.read_at(place, FOOTER_PAGE_BYTES).await.map_err(|error| error.to_string())?;
        let index = shard.log.index.borrow();
        let Some(SegmentIndex::Sealed(sealed)) = index.get(segment) else { return Ok(false) };
        // A footer has fewer pages than a u32 can count.
        let entries = sealed.decode_page(page as u32, read.as_slice()).map_err(|error| error.to_string())?;
        if entries.iter().any(|entry| living.contains(&entry.key.topic)) {
            dead = false;
            break;
        }
    }
    file.close().await.map_err(|error| error.to_string())?;
    Ok(dead)
}

async fn free(shard: &Rc<Shard>, segment: SegmentSequence) -> Result<(), String> {
    shard.log.index.borrow_mut().remove(segment);
    shard.readers.forget(segment);
    shard.log.recycle.put(&shard.log.path_of(segment)).await.map_err(|error| error.to_string())?;
    shard.metrics.segments_freed_total.add(1);
    shard.metrics.segments.set(shard.log.index.borrow().segments().count() as u64);
    tracing::info!(shard = shard.id.0, segment = segment.0, "freed a segment of deleted topics");
    Ok(())
}
