//! Zeros ahead of small synced extents, as core decides.

use std::rc::Rc;

use super::{LogWriter, PlacedExtent};
use crate::extent_image::ExtentImage;
use crate::runtime::spawn_local;
use crate::shard::Shard;

impl LogWriter {
    /// Waits until the log may take the next extent: it has not failed meanwhile, and no zeros are being written where the next
    /// extent of `extent_bytes` goes. Called by the flusher, right before [`LogWriter::place`].
    pub(crate) async fn wait_for_fill(&self, shard: &Shard, extent_bytes: u32) -> Result<(), String> {
        loop {
            let place = self.tail.borrow().open_segment().map_or(0, |open| open.place);
            shard.check_log()?;
            if !self.prefill.borrow().must_wait(place + u64::from(extent_bytes)) {
                return Ok(());
            }
            self.progress.wait().await;
        }
    }

    /// Starts to write zeros ahead, if that makes the syncs of extents like this one cheaper.
    pub(crate) fn fill_ahead(&self, shard: &Rc<Shard>, placed: &PlacedExtent, synced: bool) {
        let extent = placed.place..placed.place + placed.bytes;
        let range = self.prefill.borrow_mut().placed(extent, synced, self.segment_bytes);
        let Some(range) = range else { return };
        let (shard, file) = (Rc::clone(shard), placed.file.clone());
        spawn_local(async move {
            let bytes = (range.end - range.start) as usize;
            let mut zeros = ExtentImage::new(bytes);
            zeros.zero(0, bytes);
            match zeros.write_to(&file, range.start).await {
                Ok(()) => shard.log.prefill.borrow_mut().filled(),
                Err(error) => shard.fail_log(&error.to_string()),
            }
            shard.metrics.device_bytes_written_total.add(bytes as u64);
            shard.metrics.filled_bytes_total.add(bytes as u64);
            shard.log.progress.raise();
            shard.flush_wanted.raise();
        });
    }
}
