//! Reading what the index has of a topic, or of a whole segment, for retention.

use std::ops::Range;
use std::rc::Rc;

use ringmain_core::ids::{SegmentSequence, TopicId};
use ringmain_core::index::{FOOTER_PAGE_BYTES, IndexEntry, SegmentIndex};

use crate::files::LogFile;
use crate::shard::Shard;

/// Pages read at once: they are read in order, mostly.
const READ_PAGES: u32 = 64;

/// Reads footers one after the other; keeps the file and the last page, since topics that follow one another share pages.
/// Not by way of the readers' caches: retention must not push out what consumers need.
#[derive(Default)]
pub(super) struct RunReader {
    file: Option<(SegmentSequence, LogFile)>,
    /// Decoded pages of that segment from a number on.
    pages: (u32, Vec<Rc<Vec<IndexEntry>>>),
}

impl RunReader {
    /// The numbers of all pages of a sealed segment.
    pub(super) fn all_pages(&self, shard: &Shard, segment: SegmentSequence) -> Range<u32> {
        match shard.log.index.borrow().get(segment) {
            Some(SegmentIndex::Sealed(sealed)) => 0..sealed.pages(),
            Some(SegmentIndex::Full(_)) | None => 0..0,
        }
    }

    /// The runs of a topic in a segment; none when the segment is gone.
    pub(super) async fn runs_of(
        &mut self,
        shard: &Shard,
        segment: SegmentSequence,
        topic: TopicId,
    ) -> Result<Vec<IndexEntry>, String> {
        let pages = match shard.log.index.borrow().get(segment) {
            Some(SegmentIndex::Full(active)) => return Ok(active.runs_of(topic).collect()),
            Some(SegmentIndex::Sealed(sealed)) => sealed.pages_of(topic),
            None => return Ok(Vec::new()),
        };
        let mut runs = Vec::new();
        for page in pages {
            let entries = self.page(shard, segment, page).await?;
            runs.extend(entries.iter().filter(|run| run.key.topic == topic));
        }
        Ok(runs)
    }

    /// All runs of a segment.
    pub(super) async fn all_runs(
        &mut self,
        shard: &Shard,
        segment: SegmentSequence,
    ) -> Result<Vec<IndexEntry>, String> {
        if let Some(SegmentIndex::Full(active)) = shard.log.index.borrow().get(segment) {
            return Ok(active.sorted());
        }
        let mut runs = Vec::new();
        for page in self.all_pages(shard, segment) {
            runs.extend(self.page(shard, segment, page).await?.iter());
        }
        Ok(runs)
    }

    /// One page of a sealed segment's footer, checked.
    pub(super) async fn page(
        &mut self,
        shard: &Shard,
        segment: SegmentSequence,
        page: u32,
    ) -> Result<Rc<Vec<IndexEntry>>, String> {
        let file = self.file(shard, segment).await?;
        let (from, pages) = &self.pages;
        if let Some(known) = page.checked_sub(*from).and_then(|at| pages.get(at as usize)) {
            return Ok(Rc::clone(known));
        }
        let (place, count) = match shard.log.index.borrow().get(segment) {
            Some(SegmentIndex::Sealed(sealed)) => (sealed.page_place(page), (sealed.pages() - page).min(READ_PAGES)),
            Some(SegmentIndex::Full(_)) | None => return Err(format!("segment {segment} is gone")),
        };
        let bytes = file.read_at(place, count as usize * FOOTER_PAGE_BYTES).await.map_err(|error| error.to_string())?;
        let index = shard.log.index.borrow();
        let Some(SegmentIndex::Sealed(sealed)) = index.get(segment) else {
            return Err(format!("segment {segment} is gone"));
        };
        let decoded: Result<Vec<_>, _> = bytes
            .as_slice()
            .chunks_exact(FOOTER_PAGE_BYTES)
            .zip(page..)
            .map(|(bytes, page)| sealed.decode_page(page, bytes).map(Rc::new))
            .collect();
        self.pages = (page, decoded.map_err(|error| format!("segment {segment}: {error}"))?);
        self.pages.1.first().map(Rc::clone).ok_or_else(|| format!("segment {segment} has no page {page}"))
    }

    async fn file(&mut self, shard: &Shard, segment: SegmentSequence) -> Result<LogFile, String> {
        if let Some((open, file)) = &self.file
            && *open == segment
        {
            return Ok(file.clone());
        }
        self.close().await;
        let file = LogFile::open_sealed(&shard.log.path_of(segment)).await.map_err(|error| error.to_string())?;
        self.file = Some((segment, file.clone()));
        Ok(file)
    }

    /// Gives up the file and the pages.
    pub(super) async fn close(&mut self) {
        self.pages = (0, Vec::new());
        if let Some((_, file)) = self.file.take() {
            // Only read: there is nothing to lose.
            let _ = file.close().await;
        }
    }
}
