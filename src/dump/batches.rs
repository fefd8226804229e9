//! How batches and records are shown, wherever they were found.

use std::borrow::Cow;

use anyhow::Result;
use ringmain_core::batch::BatchHeader;
use ringmain_core::compressor::Decompressor;
use ringmain_wire::batch::{BatchView, InvalidBatch};
use ringmain_wire::batch_codec::decompress;
use ringmain_wire::record::RecordView;
use serde_json::{Value, json};

use crate::cli::Format;
use crate::consume::Printer;
use crate::output::show_time;

use super::out::{Out, row};
use super::place::Names;

/// Bytes of a value that the table shows.
const SHOWN_BYTES: usize = 60;

/// Where a batch was found.
#[derive(Clone, Copy, Debug)]
pub struct BatchPlace<'a> {
    /// The file.
    pub file: &'a str,
    /// Where its run or block starts in the file.
    pub place: u64,
    /// Where it starts in that, once decompressed.
    pub at: usize,
}

/// Prints a batch, and its records if asked for.
pub fn put(
    out: &mut Out,
    names: &Names,
    place: BatchPlace<'_>,
    header: &BatchHeader,
    bytes: &[u8],
    records: bool,
) -> Result<()> {
    let (base, next) = (header.base_offset, header.next_offset());
    let object = json!({
        "type": "batch", "file": place.file, "place": place.place, "at": place.at, "bytes": header.batch_bytes,
        "topic": names.get(header.key.topic), "topic_id": header.key.topic.0, "partition": header.key.partition,
        "base_offset": base.0, "next_offset": next.0, "records": header.record_count, "epoch": header.leader_epoch.0,
        "append_time_ms": header.append_time_ms, "codec": header.codec, "flags": header.flags,
        "producer_id": header.producer_id, "producer_epoch": header.producer_epoch,
        "base_sequence": header.base_sequence,
    });
    out.put(&object, || {
        let (count, time) = (header.record_count, show_time(header.append_time_ms));
        let says = format!("{} offsets {base}..{next}, {count} records, {time}", names.partition(header.key));
        row(place.place + place.at as u64, u64::from(header.batch_bytes), "    batch", &says)
    })?;
    if !records {
        return Ok(());
    }
    let (header, bytes) = match plain(header, bytes) {
        Ok(plain) => plain,
        Err(error) => return unreadable(out, place, &error),
    };
    match BatchView::parse(&bytes, &header) {
        Ok(view) => view.records().try_for_each(|record| put_record(out, names, &header, &record)),
        Err(error) => unreadable(out, place, &error),
    }
}

/// The batch without its producer's compression.
pub fn plain<'a>(
    header: &BatchHeader,
    bytes: &'a [u8],
) -> std::result::Result<(BatchHeader, Cow<'a, [u8]>), InvalidBatch> {
    if header.codec == 0 {
        return Ok((*header, Cow::Borrowed(bytes)));
    }
    let (header, bytes) = decompress(&mut Decompressor::default(), header, bytes)?;
    Ok((header, Cow::Owned(bytes.to_vec())))
}

fn unreadable(out: &mut Out, place: BatchPlace<'_>, error: &InvalidBatch) -> Result<()> {
    let text = format!("records of this batch are not readable here: {error}");
    let object = json!({ "type": "note", "file": place.file, "place": place.place, "what": text });
    out.put(&object, || row(place.place + place.at as u64, 0, "      note", &text))
}

fn put_record(out: &mut Out, names: &Names, header: &BatchHeader, record: &RecordView<'_>) -> Result<()> {
    // As `consume` shows it.
    let mut line = Vec::new();
    Printer::new(&mut line, Format::Json, &names.of(header.key.topic)).record(header.key.partition, record)?;
    let mut object: Value = serde_json::from_slice(&line)?;
    object["type"] = "record".into();
    out.put(&object, || {
        let value = record.value.unwrap_or_default();
        let shown = String::from_utf8_lossy(&value[..value.len().min(SHOWN_BYTES)]).into_owned();
        let key = record.key.map(|key| format!("key {:?} ", String::from_utf8_lossy(key))).unwrap_or_default();
        let says = format!("offset {} {key}value {shown:?}", record.offset);
        format!("{:>12}  {:>10}  {:<14}  {says}", "", value.len(), "      record")
    })
}
