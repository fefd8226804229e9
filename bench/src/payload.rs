//! Record values that a codec or a deduplicating disk can't cheat with, and that say who sent them when.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | `run`: random number of this run |
//! | 4 | 4 | `producer`: index of the client that sent it |
//! | 8 | 8 | `sequence`: number of the record among those of its producer and partition, from 0 |
//! | 16 | 8 | `sent_ns`: when its batch was built, nanoseconds of [`now_ns`] |
//! | 24 | rest | content, which follows from run, producer, partition and sequence alone |
//!
//! Little-endian. How the content is made: a pool of 256 KiB of pseudo-random words, made once per run, is copied from a
//! place that the record's number picks, and each 64-byte line is xored with a 64-bit key of its own (SplitMix64 of a
//! counter that never repeats in a run). So two lines share an 8-byte word only by chance, although all come from one
//! pool: no string matcher finds anything to fold, at 14 GB/s instead of the 4.5 GB/s of a generator run for each word.
//! It is not random in the sense of cryptography: who knows the scheme can fold it. Codecs and disks do not.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Instant;

/// Bytes of the stamp at the front of each record: the smallest `size`.
pub const STAMP_BYTES: usize = 24;
/// Words of the pool: 256 KiB, so that it stays in a core's own cache.
const POOL_WORDS: usize = 32 * 1024;
/// Words that share a key.
const LINE_WORDS: usize = 8;
/// Bytes that share a key.
const LINE_BYTES: usize = LINE_WORDS * 8;
/// With a stated compressibility, random and repeated bytes take turns at this period: long enough that the codec's own
/// overhead stays small.
const STRETCH_BYTES: usize = 256;
/// Counter step of SplitMix64: odd, so that the counter visits all 2^64 values.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
/// Repeated bytes of a stated compressibility: text, since some disks treat zeros apart.
const FILLER: &[u8; 32] = b"ringmain bench compressible text";

/// How much a codec can save.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Compressibility {
    /// Nothing.
    #[default]
    Random,
    /// Lines of JSON as services log them: LZ4 about 3, zstd-1 about 5 to 1.
    Json,
    /// This share of the bytes repeats, the rest is random: 0.5 = a codec halves it.
    Ratio(f64),
}

/// Not a compressibility.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownCompressibility(String);

impl fmt::Display for UnknownCompressibility {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown compressibility `{}`: use random, json or a number from 0 to 1", self.0)
    }
}

impl std::error::Error for UnknownCompressibility {}

impl FromStr for Compressibility {
    type Err = UnknownCompressibility;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "random" => Ok(Self::Random),
            "json" => Ok(Self::Json),
            number => match number.parse::<f64>() {
                Ok(share) if (0.0..=1.0).contains(&share) => Ok(Self::Ratio(share)),
                _ => Err(UnknownCompressibility(text.to_owned())),
            },
        }
    }
}

impl fmt::Display for Compressibility {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Random => f.write_str("random"),
            Self::Json => f.write_str("json"),
            Self::Ratio(share) => share.fmt(f),
        }
    }
}

/// What a record says about itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// Random number of the run.
    pub run: u32,
    /// Index of the client that sent it.
    pub producer: u32,
    /// Number among the records of its producer and partition.
    pub sequence: u64,
    /// When its batch was built.
    pub sent_ns: u64,
}

impl Stamp {
    /// The stamp of a record, or none when the value is too short to have one.
    #[must_use]
    pub fn read(value: &[u8]) -> Option<Self> {
        let (run, rest) = value.split_first_chunk::<4>()?;
        let (producer, rest) = rest.split_first_chunk::<4>()?;
        let (sequence, rest) = rest.split_first_chunk::<8>()?;
        let (sent_ns, _) = rest.split_first_chunk::<8>()?;
        Some(Self {
            run: u32::from_le_bytes(*run),
            producer: u32::from_le_bytes(*producer),
            sequence: u64::from_le_bytes(*sequence),
            sent_ns: u64::from_le_bytes(*sent_ns),
        })
    }

    fn write(&self, out: &mut [u8]) {
        out[0..4].copy_from_slice(&self.run.to_le_bytes());
        out[4..8].copy_from_slice(&self.producer.to_le_bytes());
        out[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        out[16..24].copy_from_slice(&self.sent_ns.to_le_bytes());
    }
}

/// Nanoseconds since this process first asked: the clock of `sent_ns`. Only this process can read it.
#[must_use]
pub fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Makes record values. Shared by all clients of a run; immutable.
#[derive(Debug)]
pub struct Payload {
    run: u32,
    kind: Compressibility,
    pool: Box<[u64]>,
    templates: Vec<JsonTemplate>,
}

impl Payload {
    /// A generator for one run. The same `run` gives the same bytes again.
    #[must_use]
    pub fn new(run: u32, kind: Compressibility) -> Self {
        let mut counter = u64::from(run) << 32;
        let mut next = || {
            counter = counter.wrapping_add(STEP);
            mixed(counter)
        };
        let pool = (0..POOL_WORDS).map(|_| next()).collect();
        let templates = if kind == Compressibility::Json { json_templates() } else { Vec::new() };
        Self { run, kind, pool, templates }
    }

    /// The number of the run that `new` was given.
    #[must_use]
    pub fn run(&self) -> u32 {
        self.run
    }

    /// Fills `out` with the record that `producer` sends to `partition` (an index over all topics) as its
    /// `sequence`th.
    ///
    /// # Panics
    /// When `out` is shorter than [`STAMP_BYTES`].
    pub fn fill(&self, producer: u32, partition: u32, sequence: u64, sent_ns: u64, out: &mut [u8]) {
        Stamp { run: self.run, producer, sequence, sent_ns }.write(out);
        self.fill_content(self.key(producer, partition, sequence), &mut out[STAMP_BYTES..]);
    }

    /// Whether `value` is byte for byte what [`Payload::fill`] makes for its stamp in `partition`. `scratch` is room
    /// to work in.
    #[must_use]
    pub fn is_intact(&self, stamp: &Stamp, partition: u32, value: &[u8], scratch: &mut Vec<u8>) -> bool {
        if value.len() < STAMP_BYTES {
            return false;
        }
        scratch.resize(value.len() - STAMP_BYTES, 0);
        self.fill_content(self.key(stamp.producer, partition, stamp.sequence), scratch);
        value[STAMP_BYTES..] == scratch[..]
    }

    /// Fills `out` with bytes that no other key gives, as [`Compressibility`] says. Keys must lie as far apart as the
    /// lines that one call fills.
    pub fn fill_content(&self, key: u64, out: &mut [u8]) {
        match self.kind {
            Compressibility::Random => self.fill_random(key, out),
            Compressibility::Json => self.fill_json(key, out),
            Compressibility::Ratio(share) => {
                let random_bytes = ((1.0 - share) * STRETCH_BYTES as f64).round() as usize;
                let mut key = key;
                for stretch in out.chunks_mut(STRETCH_BYTES) {
                    let (random, repeated) = stretch.split_at_mut(random_bytes.min(stretch.len()));
                    self.fill_random(key, random);
                    for part in repeated.chunks_mut(FILLER.len()) {
                        part.copy_from_slice(&FILLER[..part.len()]);
                    }
                    key = key.wrapping_add((STRETCH_BYTES / LINE_BYTES) as u64);
                }
            }
        }
    }

    /// Where the record's line keys start. Each producer and partition has a random place on the ring of 2^64 keys, far
    /// from the others'; a record takes as many keys as it has lines, of which there is room for 2^15.
    fn key(&self, producer: u32, partition: u32, sequence: u64) -> u64 {
        let stream = (u64::from(producer) << 32) | u64::from(partition);
        mixed(stream ^ mixed(u64::from(self.run))).wrapping_add(sequence << 15)
    }

    fn fill_random(&self, key: u64, out: &mut [u8]) {
        let mut from = (mixed(key) as usize % (POOL_WORDS / LINE_WORDS)) * LINE_WORDS;
        let mut key = key;
        let mut lines = out.chunks_exact_mut(LINE_BYTES);
        for line in &mut lines {
            let pool = &self.pool[from..from + LINE_WORDS];
            let line_key = line_key(key);
            for (word, pool) in line.chunks_exact_mut(8).zip(pool) {
                word.copy_from_slice(&(pool ^ line_key).to_le_bytes());
            }
            key = key.wrapping_add(1);
            from = (from + LINE_WORDS) % POOL_WORDS;
        }
        let line_key = line_key(key);
        for (word, pool) in lines.into_remainder().chunks_mut(8).zip(&self.pool[from..from + LINE_WORDS]) {
            word.copy_from_slice(&(pool ^ line_key).to_le_bytes()[..word.len()]);
        }
    }

    fn fill_json(&self, key: u64, out: &mut [u8]) {
        let mut key = key;
        let mut rest = out;
        while !rest.is_empty() {
            let dice = line_key(key);
            key = key.wrapping_add(1);
            let template = &self.templates[dice as usize % self.templates.len()];
            let taken = template.text.len().min(rest.len());
            let (line, behind) = rest.split_at_mut(taken);
            line.copy_from_slice(&template.text[..taken]);
            let mut dice = mixed(dice);
            for slot in &template.slots {
                slot.fill(dice, line);
                dice = mixed(dice.wrapping_add(STEP));
            }
            rest = behind;
        }
    }
}

/// SplitMix64's output function: a bijection, so distinct counters give distinct words.
fn mixed(counter: u64) -> u64 {
    let mut z = counter;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn line_key(key: u64) -> u64 {
    mixed(key.wrapping_mul(STEP))
}

/// A line of JSON with places whose characters differ from record to record.
#[derive(Debug)]
struct JsonTemplate {
    text: Vec<u8>,
    slots: Vec<JsonSlot>,
}

#[derive(Debug)]
struct JsonSlot {
    at: usize,
    characters: usize,
    base: u64,
}

impl JsonSlot {
    fn fill(&self, dice: u64, line: &mut [u8]) {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut dice = dice;
        let end = (self.at + self.characters).min(line.len());
        for character in line.iter_mut().take(end).skip(self.at) {
            *character = DIGITS[(dice % self.base) as usize];
            dice /= self.base;
        }
    }
}

/// `#` stands for a decimal digit, `%` for a hexadecimal one; the time's leading digits stay, as in real logs.
const JSON_LINE: &str = concat!(
    r#"{"id":"%%%%%%%%%%%%%%%%","time":"2026-11-3#T##:##:##.###Z","user_id":"u-########","action":"ACTION","#,
    r#""path":"PATH/######","status":STATUS,"duration_us":1####,"bytes":2###,"region":"REGION","#,
    r#""session":"%%%%%%%%%%%%","agent":"Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36"}"#,
    "\n"
);

fn json_templates() -> Vec<JsonTemplate> {
    let mut templates = Vec::new();
    for action in ["page_view", "add_to_cart", "search", "checkout"] {
        for path in ["/api/v1/items", "/api/v1/users", "/static/images", "/search"] {
            for (status, region) in [("200", "eu-west-1"), ("304", "us-east-2"), ("404", "ap-south-1")] {
                let line = JSON_LINE.replace("ACTION", action).replace("PATH", path);
                templates.push(json_template(&line.replace("STATUS", status).replace("REGION", region)));
            }
        }
    }
    templates
}

fn json_template(line: &str) -> JsonTemplate {
    let text = line.as_bytes().to_vec();
    let mut slots: Vec<JsonSlot> = Vec::new();
    for (at, byte) in text.iter().enumerate() {
        let base = match byte {
            b'#' => 10,
            b'%' => 16,
            _ => continue,
        };
        match slots.last_mut() {
            Some(slot) if slot.at + slot.characters == at && slot.base == base => slot.characters += 1,
            _ => slots.push(JsonSlot { at, characters: 1, base }),
        }
    }
    JsonTemplate { text, slots }
}

#[cfg(test)]
mod tests;
