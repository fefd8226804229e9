//! Reading what the index has of a topic, or of a whole segment, for retention.

use std::ops::Range;
use std::rc::Rc;

use ringmain_core::ids::{SegmentSequence, TopicId};
use ringmain_core::index::{FOOTER_PAGE_BYTES, IndexEntry, SegmentIndex};

use crate::files::{FileError, LogFile};
use crate::index_repair::{self, PageError};
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
        loop {
            let pages = match shard.log.index.borrow().get(segment) {
                Some(SegmentIndex::Full(active)) => return Ok(active.runs_of(topic).collect()),
                Some(SegmentIndex::Sealed(sealed)) => sealed.pages_of(topic),
                None => return Ok(Vec::new()),
            };
            if let Some(mut runs) = self.pages(shard, segment, pages).await? {
                runs.retain(|run| run.key.topic == topic);
                return Ok(runs);
            }
        }
    }

    /// All runs of a segment.
    pub(super) async fn all_runs(
        &mut self,
        shard: &Shard,
        segment: SegmentSequence,
    ) -> Result<Vec<IndexEntry>, String> {
        loop {
            if let Some(SegmentIndex::Full(active)) = shard.log.index.borrow().get(segment) {
                return Ok(active.sorted());
            }
            let pages = self.all_pages(shard, segment);
            if let Some(runs) = self.pages(shard, segment, pages).await? {
                return Ok(runs);
            }
        }
    }

    /// The entries of some pages; none when the index was made again instead, since one of them is damaged.
    async fn pages(
        &mut self,
        shard: &Shard,
        segment: SegmentSequence,
        pages: Range<u32>,
    ) -> Result<Option<Vec<IndexEntry>>, String> {
        let mut runs = Vec::new();
        for page in pages {
            match self.page(shard, segment, page).await {
                Ok(entries) => runs.extend(entries.iter()),
                Err(PageError::Failed(error)) => return Err(error),
                Err(PageError::Damaged(reason)) => {
                    self.close().await;
                    index_repair::rebuild(shard, segment, &reason).await?;
                    return Ok(None);
                }
            }
        }
        Ok(Some(runs))
    }

    /// One page of a sealed segment's footer, checked.
    pub(super) async fn page(
        &mut self,
        shard: &Shard,
        segment: SegmentSequence,
        page: u32,
    ) -> Result<Rc<Vec<IndexEntry>>, PageError> {
        let gone = || PageError::Failed(format!("segment {segment} is gone"));
        let file = self.file(shard, segment).await?;
        let (from, pages) = &self.pages;
        if let Some(known) = page.checked_sub(*from).and_then(|at| pages.get(at as usize)) {
            return Ok(Rc::clone(known));
        }
        let (place, count) = match shard.log.index.borrow().get(segment) {
            Some(SegmentIndex::Sealed(sealed)) => (sealed.page_place(page), (sealed.pages() - page).min(READ_PAGES)),
            Some(SegmentIndex::Full(_)) | None => return Err(gone()),
        };
        let bytes = file.read_at(place, count as usize * FOOTER_PAGE_BYTES).await?;
        let index = shard.log.index.borrow();
        let Some(SegmentIndex::Sealed(sealed)) = index.get(segment) else { return Err(gone()) };
        let decoded: Result<Vec<_>, _> = bytes
            .as_slice()
            .chunks_exact(FOOTER_PAGE_BYTES)
            .zip(page..)
            .map(|(bytes, page)| sealed.decode_page(page, bytes).map(Rc::new))
            .collect();
        self.pages = (page, decoded.map_err(|error| PageError::Damaged(error.to_string()))?);
        self.pages.1.first().map(Rc::clone).ok_or_else(gone)
    }

    async fn file(&mut self, shard: &Shard, segment: SegmentSequence) -> Result<LogFile, FileError> {
        if let Some((open, file)) = &self.file
            && *open == segment
        {
            return Ok(file.clone());
        }
        self.close().await;
        let file = LogFile::open_sealed(&shard.log.path_of(segment)).await?;
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
