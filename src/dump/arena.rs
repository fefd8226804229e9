//! Arenas: their header, blocks and batches.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, bail};
use ringmain_core::batch::{BatchHeader, check_crc, check_stamp};
use ringmain_shard::arena::image::ArenaImage;
use ringmain_shard::arena::{BlockState, LiveBlock};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde_json::json;

use super::batches::BatchPlace;
use super::out::{row, row_heading};
use super::report::Report;
use super::walk::Visitor;

/// Opens an arena that no process uses.
pub fn open(path: &Path, force: bool) -> Result<(File, u64)> {
    let file = File::open(path).with_context(|| format!("can't open {}", path.display()))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) if force => {}
        Err(Errno::WOULDBLOCK) => {
            bail!("arena {} is in use by a broker: stop it, or read all the same with --force", path.display())
        }
        Err(errno) => return Err(errno).with_context(|| format!("can't lock {}", path.display())),
    }
    let bytes = file.metadata().with_context(|| format!("can't look at {}", path.display()))?.len();
    Ok((file, bytes))
}

/// Prints an arena, or what is wrong with it.
pub fn dump(path: &Path, force: bool, report: &mut Report) -> Result<()> {
    let shown = path.display().to_string();
    let (file, bytes) = open(path, force)?;
    report.count_arena();
    let image = match ArenaImage::read(file, bytes) {
        Ok(image) => image,
        Err(error) => return report.damage(&shown, 0, &format!("arena header: {error}")),
    };
    let header = *image.header();
    let identity = header.identity;
    let object = json!({
        "type": "arena", "file": shown, "bytes": bytes, "log_id": format!("{:016x}", identity.log_id.0),
        "shard": identity.shard.0, "incarnation": header.incarnation.0, "slabs": header.slab_count,
        "next_incarnation": header.next_incarnation.0, "adoption_panics": header.adoption_panics,
        "data_device": identity.data_device, "data_inode": identity.data_inode,
    });
    report.heading(|| format!("\n{shown}, {bytes} bytes\n{}", row_heading()))?;
    report.show(&object, || {
        let says = format!(
            "arena of shard {}, log {:016x}, incarnation {}, next {}, {} slabs",
            identity.shard, identity.log_id.0, header.incarnation, header.next_incarnation, header.slab_count
        );
        row(0, 4096, "header", &says)
    })?;
    let mut sequences: Vec<(u64, u32)> = Vec::new();
    for slab in 0..header.slab_count {
        for found in image.blocks(slab).with_context(|| format!("can't read {shown}"))? {
            match found {
                Ok(block) => {
                    sequences.push((block.sequence, block.block));
                    let bytes = image.committed(&block).with_context(|| format!("can't read {shown}"))?;
                    dump_block(&shown, image.place(&block), &block, &bytes, report)?;
                }
                Err((block, reason)) => {
                    let place = ArenaImage::<File>::descriptor_place(block);
                    report.damage(&shown, place, &format!("descriptor of block {block}: {reason}"))?;
                }
            }
        }
    }
    sequences.sort_unstable();
    for pair in sequences.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
        let place = ArenaImage::<File>::descriptor_place(pair[1].1);
        report.damage(&shown, place, &format!("block {} has the sequence of block {}", pair[1].1, pair[0].1))?;
    }
    Ok(())
}

fn dump_block(file: &str, place: u64, block: &LiveBlock, bytes: &[u8], report: &mut Report) -> Result<()> {
    let state = if block.state == BlockState::Open { "open" } else { "sealed" };
    let topic = report.names().of(block.topic);
    let object = json!({
        "type": "block", "file": file, "place": place, "block": block.block, "topic_id": block.topic.0,
        "topic": report.names().get(block.topic), "class": block.class, "sequence": block.sequence, "state": state,
        "committed_bytes": block.committed_bytes,
    });
    report.show(&object, || {
        let says = format!(
            "block {}, {state}, topic {topic}, class {}, sequence {}",
            block.block, block.class, block.sequence
        );
        row(place, u64::from(block.committed_bytes), "block", &says)
    })?;
    for batch in batches(bytes) {
        match batch {
            Ok((at, header, bytes)) if report.takes(header.key) => {
                report.batch(BatchPlace { file, place, at }, &header, bytes)?;
            }
            Ok(_) => {}
            Err((at, error)) => {
                let text = format!("block {}: batch at {at} of it: {error}", block.block);
                report.damage(file, place + at as u64, &text)?;
            }
        }
    }
    Ok(())
}

/// A whole batch with its place in the block, or a damaged one.
type BlockBatch<'a> = Result<(usize, BatchHeader, &'a [u8]), (usize, ringmain_core::batch::BatchError)>;

/// The batches of a block. Goes on behind one whose header is whole.
pub fn batches(bytes: &[u8]) -> impl Iterator<Item = BlockBatch<'_>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = bytes.get(at..).filter(|rest| !rest.is_empty())?;
        let here = at;
        let header = match BatchHeader::parse(rest) {
            Ok(header) => header,
            Err(error) => {
                at = bytes.len();
                return Some(Err((here, error)));
            }
        };
        let batch = &rest[..header.batch_bytes as usize];
        at += batch.len();
        let checked = check_stamp(batch).and_then(|()| check_crc(&header, batch));
        Some(checked.map(|()| (here, header, batch)).map_err(|error| (here, error)))
    })
}
