//! Every limit, with its unit and reason, and checks at compile time that they fit each other. What changes bytes on
//! disk or wire is a constant here, never a setting.

/// Alignment of every extent and of O_DIRECT writes: the largest block size of common devices.
pub const DISK_BLOCK_BYTES: usize = 4096;

/// Largest key of a record: keys are for routing and compaction, not for data.
pub const KEY_BYTES_MAX: usize = 64 * 1024;
/// Largest headers of a record, all together: their length is a `u16` in the record entry.
pub const HEADERS_BYTES_MAX: usize = u16::MAX as usize;
/// Largest record body (key, headers and value together): TubeMQ's default message limit is 1 MB.
pub const RECORD_BYTES_MAX: usize = 1024 * 1024;
/// Largest batch on wire and disk, header and table included; the largest block class holds just one.
pub const BATCH_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Most records in a batch: the entries of a batch of empty records still fit it.
pub const BATCH_RECORDS_MAX: usize = 64 * 1024;
/// Batches are padded to this, so that headers in a payload or a run can be viewed aligned.
pub const BATCH_ALIGN_BYTES: usize = 8;

/// Largest frame: two of the largest batches and their message.
pub const FRAME_BYTES_MAX: usize = 2 * BATCH_BYTES_MAX + 64 * 1024;
/// Largest message (the flatbuffer in a frame): bounds what the verifier walks.
pub const MESSAGE_BYTES_MAX: usize = 1024 * 1024;
/// Most batches in one produce request: bounds the results in its answer.
pub const PRODUCE_BATCHES_MAX: usize = 1024;
/// Most partitions in one fetch or offsets request.
pub const FETCH_PARTITIONS_MAX: usize = 256;
/// Default and largest byte budget of one fetch: what a reply may pin or read.
pub const FETCH_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Largest byte budget of a filtered fetch: indexes of sparse batches make what passes larger by up to a fifth, and it must
/// still fit a frame.
pub const FILTERED_FETCH_BYTES_MAX: usize = 1024 * 1024;
/// What a filtered fetch looks at before it answers, even when nothing has passed: about 10 ms of work. Of batches that it
/// must decompress, what comes out counts.
pub const FETCH_SCAN_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Most tags in the filter of a fetch: each record that the hash lets through is compared with them.
pub const FETCH_TAGS_MAX: usize = 64;
/// Longest tag.
pub const TAG_BYTES_MAX: usize = 1024;
/// Most topics that one metadata request names; all are asked for by naming none, page by page.
pub const METADATA_TOPICS_MAX: usize = 4096;
/// Longest client name and name of a sign-in mechanism: they go to logs.
pub const CLIENT_NAME_BYTES_MAX: usize = 256;
/// Most bytes of a sign-in step.
pub const SIGN_IN_BYTES_MAX: usize = 16 * 1024;
/// Longest long poll: below the idle timeout of common load balancers.
pub const FETCH_WAIT_MS_MAX: u32 = 30_000;

/// Requests of one connection that may wait for their answer.
pub const CONNECTION_REQUESTS_MAX: usize = 1024;
/// Bytes of requests of one connection that may wait for their answer: what clients are asked to keep to. A broker needs no
/// check of it: it copies what it reads at once, and what waits is bounded by the arena and by MESH_BYTES_MAX.
pub const CONNECTION_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Bytes of replies of one connection that may wait for a slow reader.
pub const CONNECTION_REPLY_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Connections a shard serves; one more is closed with a reason.
pub const SHARD_CONNECTIONS_MAX: usize = 10_000;
/// Fetches that may be parked on a shard.
pub const SHARD_PARKED_FETCHES_MAX: usize = 20_000;
/// Partitions of all fetches that are under way on a shard: what they hold is a few ten MiB at most.
pub const SHARD_FETCH_PARTITIONS_MAX: usize = 400_000;
/// Batches of a shard whose produces wait for the disk: a few ten MiB beside the batches themselves.
pub const SHARD_WAITS_MAX: usize = 200_000;
/// Longest time that a produce may ask to wait for its level; a longer one is cut.
pub const PRODUCE_TIMEOUT_MS_MAX: u32 = 300_000;
/// Most partitions in one metadata answer: some ms of work. Who wants more asks page by page.
pub const METADATA_PARTITIONS_MAX: usize = 50_000;
/// Bytes of topics in one metadata answer: with brokers and their ports it must fit a frame.
pub const METADATA_BYTES_MAX: usize = FRAME_BYTES_MAX - 64 * 1024;
/// Bytes of answers without records (metadata, offsets) that wait for slow clients, for each shard.
pub const SHARD_HEAD_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Bytes that all receive buffers of a shard may hold past their small first ones: when they are used up, connections
/// are not read until some are given back.
pub const SHARD_RECEIVE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Bytes of replies that are copies (read from disk, or from another shard) and wait for their clients, for each shard:
/// eight of the largest fetches.
pub const SHARD_COPY_BYTES_MAX: usize = 32 * 1024 * 1024;
/// The same for what other shards ask for. Of its own: a shard whose clients' copies wait for another shard must not make
/// that one wait for itself.
pub const SHARD_HOP_COPY_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Replies that are copies and that one connection may have at once, one while others wait: one is on its way out, the
/// next ones are being read.
pub const CONNECTION_COPIES_MAX: usize = 4;
/// When memory of receive buffers or replies is short, what a client has held for longer than this is taken from it by
/// closing its connection.
pub const HOLD_MS_MAX: u64 = 2_000;
/// First receive buffer of a connection: 1000 idle connections cost 8 MiB.
pub const RECEIVE_BYTES_MIN: usize = 8 * 1024;
/// A new connection must say hello within this time, else it is closed.
pub const HELLO_TIMEOUT_MS: u64 = 10_000;
/// A frame that has begun must be whole within this time, else the connection is closed.
pub const FRAME_TIMEOUT_MS: u64 = 30_000;
/// A reply must be taken by the client within this time, else the connection is closed.
pub const REPLY_TIMEOUT_MS: u64 = 30_000;
/// Hops between each two shards that may wait for their reply.
pub const MESH_CREDITS: usize = 1024;
/// Bytes that the hops between each two shards may hold.
pub const MESH_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Topic names: TubeMQ's limit.
pub const TOPIC_NAME_BYTES_MAX: usize = 64;
/// Partitions of one topic: TubeMQ's number space has 10 000 per store.
pub const TOPIC_PARTITIONS_MAX: u32 = 10_000;
/// Stores of one topic.
pub const TOPIC_STORES_MAX: u32 = 1024;
/// Topics of one broker.
pub const BROKER_TOPICS_MAX: usize = 100_000;
/// Shortest retention by age: the broker looks about that often.
pub const RETENTION_MS_MIN: u64 = 1_000;
/// Longest retention by age, a hundred years: sums with wall time stay far inside an `i64`.
pub const RETENTION_MS_MAX: u64 = 100 * 366 * 24 * 3600 * 1000;
/// Smallest retention by bytes: ranges below it are not given back to the filesystem one by one.
pub const RETENTION_BYTES_MIN: u64 = 1024 * 1024;
/// Partitions of one shard: a checkpoint lists them all.
pub const SHARD_PARTITIONS_MAX: usize = 200_000;
/// Batches of an idempotent producer that a partition recognises when they come again: as many as a producer may have under
/// way to one partition.
pub const PRODUCER_WINDOW_BATCHES: usize = 5;
/// Idempotent producers that one partition knows; the one that has been idle longest is given up for a new one.
pub const PARTITION_PRODUCERS_MAX: usize = 4096;
/// The same over all partitions of a shard: 8 MiB at most, twice (appended and flushed), and all of it fits a checkpoint.
pub const SHARD_PRODUCERS_MAX: usize = 32 * 1024;
/// Batches of idempotent producers in one extent: what its directory says about them takes at most 128 KiB.
pub const EXTENT_PRODUCER_BATCHES_MAX: usize = 4096;
/// Shards of one broker.
pub const SHARDS_MAX: usize = 256;

/// Connections that the master's frames port serves; admin work is rare and short.
pub const MASTER_CONNECTIONS_MAX: usize = 64;
/// Largest frame that the master takes: a metadata request of 4096 names. All its connections together hold 32 MiB.
pub const MASTER_FRAME_BYTES_MAX: usize = 512 * 1024;
/// Connections that an HTTP port serves: scrapers, probes, a console.
pub const HTTP_CONNECTIONS_MAX: usize = 256;
/// Largest body of an HTTP request: a topic's description is far below.
pub const HTTP_BODY_BYTES_MAX: usize = 64 * 1024;
/// An HTTP or master connection that sends nothing for so long is closed: it holds one of the few places.
pub const ADMIN_IDLE_TIMEOUT_MS: u64 = 300_000;
/// Changes of topics that may wait for the master or a broker.
pub const ADMIN_REQUESTS_MAX: usize = 1024;
/// How long a change waits for the broker before its sender is told that it is still being applied. Well below the 30 s after
/// which clients give a connection up, with all that waits on it.
pub const APPLY_TIMEOUT_MS: u64 = 20_000;
/// Most topics on one page of the HTTP API.
pub const HTTP_PAGE_TOPICS_MAX: usize = 1000;

/// Default size of a segment file.
pub const SEGMENT_BYTES: u64 = 256 * 1024 * 1024;
/// Smallest segment: holds the largest checkpoint, the largest extent and their footer, with room.
pub const SEGMENT_BYTES_MIN: u64 = 32 * 1024 * 1024;
/// Largest segment: a place in it fits a `u32`.
pub const SEGMENT_BYTES_MAX: u64 = 2 * 1024 * 1024 * 1024;
/// Largest data extent, padding included: four writes of 1 MiB fill the device's queue.
pub const EXTENT_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Largest checkpoint extent: all partitions of a shard at 32 bytes each, all producers, and as much again.
pub const CHECKPOINT_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Size of one write to the device.
pub const WRITE_BYTES: usize = 1024 * 1024;
/// Batches that are compressed together as one pack, unless one alone is larger: twice as much saves 1 % more (measured on
/// JSON lines), and unpacking it would hold up a shard twice as long.
pub const PACK_RAW_BYTES: usize = 64 * 1024;
/// Topics of which a shard remembers how well they compress, about 1 MiB: with more, all are looked at anew.
pub const COMPRESSION_TOPICS_MAX: usize = 16 * 1024;
/// Extents being written at once.
pub const EXTENTS_IN_FLIGHT_MAX: usize = 4;
/// Fence keys of sealed segments that may be resident, in bytes, per shard.
pub const FENCE_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Block size classes: an idle topic, a busy one, the largest batch.
pub const BLOCK_BYTES: [usize; 3] = [16 * 1024, 256 * 1024, BATCH_BYTES_MAX];
/// The arena is cut into slabs of the largest block; each slab holds blocks of one class.
pub const SLAB_BYTES: usize = BATCH_BYTES_MAX;
/// Smallest arena of a shard: a block of each class being written while another is flushed.
pub const ARENA_BYTES_MIN: usize = 16 * SLAB_BYTES;

/// Offsets that one epoch sets apart: after a loss a partition goes on this far past its recovered end.
pub const EPOCH_OFFSETS: u64 = 1 << 32;

const _: () = {
    assert!(RECORD_BYTES_MAX + HEADERS_BYTES_MAX + 1024 <= BATCH_BYTES_MAX);
    assert!(KEY_BYTES_MAX < RECORD_BYTES_MAX);
    assert!(BATCH_RECORDS_MAX * 20 + 1024 < BATCH_BYTES_MAX);
    assert!(BATCH_BYTES_MAX + MESSAGE_BYTES_MAX <= FRAME_BYTES_MAX);
    // A page has one topic at least, whatever its size.
    assert!(TOPIC_PARTITIONS_MAX as usize <= METADATA_PARTITIONS_MAX);
    assert!(TOPIC_PARTITIONS_MAX as usize * 64 <= METADATA_BYTES_MAX);
    assert!(BATCH_BYTES_MAX + 64 * 1024 <= EXTENT_BYTES_MAX);
    assert!(FETCH_BYTES_MAX >= BATCH_BYTES_MAX);
    assert!((FILTERED_FETCH_BYTES_MAX + BATCH_BYTES_MAX) / 5 * 6 <= FETCH_BYTES_MAX);
    assert!(CONNECTION_BYTES_MAX >= FRAME_BYTES_MAX);
    assert!(CONNECTION_REPLY_BYTES_MAX >= FETCH_BYTES_MAX);
    assert!(SHARD_RECEIVE_BYTES_MAX >= 4 * FRAME_BYTES_MAX);
    assert!(MESH_BYTES_MAX >= FRAME_BYTES_MAX);
    assert!(SHARD_COPY_BYTES_MAX >= 2 * FETCH_BYTES_MAX);
    assert!(HOLD_MS_MAX < FRAME_TIMEOUT_MS && HOLD_MS_MAX < REPLY_TIMEOUT_MS);
    assert!(SEGMENT_BYTES_MIN as usize >= CHECKPOINT_BYTES_MAX + 2 * EXTENT_BYTES_MAX);
    assert!(SEGMENT_BYTES_MAX <= 1 << 32);
    assert!(PACK_RAW_BYTES <= BATCH_BYTES_MAX);
    assert!(EXTENT_BYTES_MAX.is_multiple_of(DISK_BLOCK_BYTES));
    assert!(WRITE_BYTES.is_multiple_of(DISK_BLOCK_BYTES));
    assert!(BLOCK_BYTES[2] == SLAB_BYTES && SLAB_BYTES.is_multiple_of(BLOCK_BYTES[0]));
    assert!(SHARD_PARTITIONS_MAX * 32 + SHARD_PRODUCERS_MAX * 144 <= CHECKPOINT_BYTES_MAX / 4 * 3);
    assert!(PARTITION_PRODUCERS_MAX <= SHARD_PRODUCERS_MAX);
};
