//! What was typed, turned into what it means: one validated [`Config`] of `serve`, from flags, environment, file and
//! defaults, in this order.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ringmain_core::ids::Durability;
use ringmain_core::limits::{
    ARENA_BYTES_MIN, DISK_BLOCK_BYTES, SEGMENT_BYTES, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SHARDS_MAX,
};
use toml::Value;

use crate::cli::{ArenaKind, ServeArgs};

/// A setting of the file; its flag has dashes for underscores.
pub struct Setting {
    /// Its key.
    pub key: &'static str,
    /// What its value is, for messages.
    pub kind: &'static str,
    take: fn(&mut ServeArgs, &Value) -> Result<(), String>,
}

/// Half for readers, half for writers.
const CATCH_UP_SHARE_PERCENT: u16 = 50;

/// All settings, in the order of deploy/ringmain.toml.
pub const SETTINGS: &[Setting] = &[
    Setting { key: "data", kind: "a path", take: |args, value| put(&mut args.data, path(value)) },
    Setting { key: "listen", kind: "HOST:PORT", take: |args, value| put(&mut args.listen, address(value)) },
    Setting { key: "http", kind: "HOST:PORT", take: |args, value| put(&mut args.http, address(value)) },
    Setting {
        key: "master_listen",
        kind: "HOST:PORT",
        take: |args, value| put(&mut args.master_listen, address(value)),
    },
    Setting { key: "master_http", kind: "HOST:PORT", take: |args, value| put(&mut args.master_http, address(value)) },
    Setting {
        key: "direct_port_base",
        kind: "a port",
        take: |args, value| put(&mut args.direct_port_base, number(value)),
    },
    Setting { key: "advertise", kind: "HOST or HOST:PORT", take: |args, value| put(&mut args.advertise, text(value)) },
    Setting {
        key: "advertise_direct_base",
        kind: "a port",
        take: |args, value| put(&mut args.advertise_direct_base, number(value)),
    },
    Setting { key: "shards", kind: "a number from 1 to 256", take: |args, value| put(&mut args.shards, number(value)) },
    Setting {
        key: "memory",
        kind: "a size such as \"512MiB\"",
        take: |args, value| put(&mut args.memory, size(value)),
    },
    Setting {
        key: "segment_bytes",
        kind: "a size such as \"256MiB\"",
        take: |args, value| put(&mut args.segment_bytes, size(value)),
    },
    Setting {
        key: "catch_up_share_percent",
        kind: "a number from 1 to 100",
        take: |args, value| put(&mut args.catch_up_share_percent, number(value)),
    },
    Setting { key: "arena_dir", kind: "a path", take: take_arena_dir },
    Setting { key: "arena", kind: "\"shared\" or \"anonymous\"", take: take_arena },
    Setting {
        key: "log",
        kind: "a log level",
        take: |args, value| put(&mut args.log, text(value).and_then(|text| parse_log(&text))),
    },
];

/// Where the arena lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arena {
    /// In files of this memory filesystem.
    Shared(PathBuf),
    /// In memory of the process.
    Anonymous,
}

/// A host and a port that has been typed, not resolved yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Name, IPv4, or IPv6 without brackets.
    pub host: String,
    /// Port; 0 = any free one, for listening.
    pub port: u16,
}

/// Everything `serve` needs to know, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Data directory.
    pub data: PathBuf,
    /// Common port of the broker.
    pub listen: SocketAddr,
    /// Probes and metrics.
    pub http: SocketAddr,
    /// The master's frames.
    pub master_listen: SocketAddr,
    /// The master's API and console.
    pub master_http: SocketAddr,
    /// First direct port; 0 = any free ones.
    pub direct_port_base: u16,
    /// Host that clients are told.
    pub advertise_host: String,
    /// Port that clients are told; none = the common port.
    pub advertise_port: Option<u16>,
    /// First direct port that clients are told; none = the direct ports.
    pub advertise_direct_base: Option<u16>,
    /// Number of shards; none = as stored, else one for each CPU.
    pub shards: Option<u16>,
    /// Arena bytes of all shards; none = what the host affords.
    pub memory: Option<u64>,
    /// Segment size of a new data directory.
    pub segment_bytes: u64,
    /// Share of the disk's time for consumers behind memory while a shard writes.
    pub catch_up_share_percent: u16,
    /// Where the arena lives.
    pub arena: Arena,
    /// Filter of the log.
    pub log: String,
}

impl Config {
    /// The config that `typed` and the file it names amount to.
    pub fn resolve(typed: ServeArgs) -> Result<Self> {
        match typed.config.clone() {
            Some(path) => {
                let file = std::fs::read_to_string(&path)
                    .with_context(|| format!("can't read the config file {}", path.display()))?;
                let file = parse_file(&file, &path)?;
                Self::validate(overlay(typed, file))
            }
            None => Self::validate(typed),
        }
    }

    fn validate(args: ServeArgs) -> Result<Self> {
        let listen = bind_address("listen", args.listen, 8123)?;
        let config = Self {
            data: args.data.unwrap_or_else(|| PathBuf::from("ringmain-data")),
            http: bind_address("http", args.http, 8081)?,
            master_listen: bind_address("master_listen", args.master_listen, 8715)?,
            master_http: bind_address("master_http", args.master_http, 8080)?,
            direct_port_base: args.direct_port_base.unwrap_or(8200),
            advertise_host: String::new(),
            advertise_port: None,
            advertise_direct_base: args.advertise_direct_base,
            shards: args.shards,
            memory: args.memory,
            segment_bytes: args.segment_bytes.unwrap_or(SEGMENT_BYTES),
            catch_up_share_percent: args.catch_up_share_percent.unwrap_or(CATCH_UP_SHARE_PERCENT),
            arena: match (args.arena, args.arena_dir) {
                (Some(ArenaKind::Anonymous), Some(_)) => {
                    bail!("`arena_dir` makes no sense with `arena = \"anonymous\"`: leave one of them out")
                }
                (Some(ArenaKind::Anonymous), None) => Arena::Anonymous,
                (_, directory) => Arena::Shared(directory.unwrap_or_else(|| PathBuf::from("/dev/shm"))),
            },
            log: args.log.unwrap_or_else(|| "info".to_owned()),
            listen,
        };
        config.check_ports()?;
        config.check_memory()?;
        config.check_segment()?;
        if !(1..=100).contains(&config.catch_up_share_percent) {
            bail!("`catch_up_share_percent` is {}: use 1 to 100", config.catch_up_share_percent);
        }
        let (host, port) = advertised(args.advertise.as_deref(), listen)?;
        Ok(Self { advertise_host: host, advertise_port: port, ..config })
    }

    fn check_ports(&self) -> Result<()> {
        let ports = [
            ("listen", self.listen),
            ("http", self.http),
            ("master_listen", self.master_listen),
            ("master_http", self.master_http),
        ];
        for (index, (name, address)) in ports.iter().enumerate() {
            if let Some((other, _)) = ports[..index].iter().find(|(_, other)| clash(*other, *address)) {
                bail!("`{other}` and `{name}` are the same port {}: give each its own", address.port());
            }
        }
        let shards = self.shards.unwrap_or(1);
        let first = u32::from(self.direct_port_base);
        let direct = first..first + u32::from(shards);
        if first != 0 && direct.end > 1 << 16 {
            bail!("{shards} direct ports from {first} go past 65535: lower `direct_port_base`");
        }
        if first != 0
            && let Some((name, address)) = ports.iter().find(|(_, address)| direct.contains(&u32::from(address.port())))
        {
            bail!(
                "`{name}` has port {}, which is one of the {shards} direct ports from {first}: move one of them",
                address.port()
            );
        }
        if let Some(base) = self.advertise_direct_base
            && (base == 0 || u32::from(base) + u32::from(shards) > 1 << 16)
        {
            bail!("{shards} ports from `advertise_direct_base` {base} are not all from 1 to 65535");
        }
        Ok(())
    }

    fn check_segment(&self) -> Result<()> {
        let bytes = self.segment_bytes;
        if !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&bytes) || !bytes.is_multiple_of(DISK_BLOCK_BYTES as u64) {
            bail!(
                "`segment_bytes` is {bytes}: use {} to {}, in whole blocks of {DISK_BLOCK_BYTES} bytes",
                show_size(SEGMENT_BYTES_MIN),
                show_size(SEGMENT_BYTES_MAX)
            );
        }
        Ok(())
    }

    fn check_memory(&self) -> Result<()> {
        if let Some(shards) = self.shards
            && !(1..=SHARDS_MAX).contains(&usize::from(shards))
        {
            bail!("`shards` is {shards}: use 1 to {SHARDS_MAX}");
        }
        let least = ARENA_BYTES_MIN as u64 * u64::from(self.shards.unwrap_or(1));
        match self.memory {
            Some(memory) if memory < least => {
                let shards = self.shards.unwrap_or(1);
                bail!(
                    "`memory` is {memory} bytes: {shards} shard(s) need {} at least, {} each",
                    show_size(least),
                    show_size(ARENA_BYTES_MIN as u64)
                )
            }
            _ => Ok(()),
        }
    }
}

/// Whether two listeners can't both have their port.
fn clash(a: SocketAddr, b: SocketAddr) -> bool {
    a.port() != 0 && a.port() == b.port() && (a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified())
}

/// Host and port that clients are told.
fn advertised(typed: Option<&str>, listen: SocketAddr) -> Result<(String, Option<u16>)> {
    if let Some(typed) = typed {
        // A bare IPv6 address has colons as well, so it goes first.
        if typed.parse::<std::net::Ipv6Addr>().is_ok() {
            return Ok((typed.to_owned(), None));
        }
        let address = match typed.rsplit_once(':') {
            Some(_) => parse_address(typed).map(|address| (address.host, Some(address.port))),
            None if typed.is_empty() => Err("it is empty".to_owned()),
            None => Ok((typed.to_owned(), None)),
        };
        return match address {
            Ok((_, Some(0))) => bail!("`advertise` is `{typed}`: clients can't connect to port 0"),
            Ok(address) => Ok(address),
            Err(error) => bail!("`advertise` is `{typed}`: {error}"),
        };
    }
    if !listen.ip().is_unspecified() {
        return Ok((listen.ip().to_string(), None));
    }
    // All interfaces, and nobody said how clients reach this machine: its name, if that leads anywhere at all.
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    match (name.as_str(), 0).to_socket_addrs() {
        Ok(found) if found.len() > 0 => Ok((name, None)),
        _ => Ok(("127.0.0.1".to_owned(), None)),
    }
}

fn bind_address(setting: &str, typed: Option<Address>, default_port: u16) -> Result<SocketAddr> {
    let Some(address) = typed else { return Ok(SocketAddr::from(([127, 0, 0, 1], default_port))) };
    let mut found = (address.host.as_str(), address.port)
        .to_socket_addrs()
        .with_context(|| format!("`{setting}` is {address}: no such host, use an address of this machine"))?;
    found.next().with_context(|| format!("`{setting}` is {address}: the name has no address"))
}

/// The settings of a file. A key that is none is an error that names it.
fn parse_file(text: &str, path: &Path) -> Result<ServeArgs> {
    let place = path.display();
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
        anyhow::anyhow!("{place}, line {line}: {}", error.message().replace('\n', " "))
    })?;
    let mut args = ServeArgs::default();
    for (key, value) in &table {
        let Some(setting) = SETTINGS.iter().find(|setting| setting.key == key) else {
            let known: Vec<_> = SETTINGS.iter().map(|setting| setting.key).collect();
            bail!("{place}: unknown key `{key}`; the keys are {}", known.join(", "));
        };
        (setting.take)(&mut args, value)
            .map_err(|error| anyhow::anyhow!("{place}: `{key}` must be {}: {error}", setting.kind))?;
    }
    Ok(args)
}

/// `typed` with the holes filled from `file`.
fn overlay(typed: ServeArgs, file: ServeArgs) -> ServeArgs {
    // Where the arena lives is one choice in two settings: typing one of them takes both out of the file.
    let arena_typed = typed.arena.is_some() || typed.arena_dir.is_some();
    let (arena, arena_dir) = if arena_typed { (typed.arena, typed.arena_dir) } else { (file.arena, file.arena_dir) };
    ServeArgs {
        config: typed.config,
        data: typed.data.or(file.data),
        listen: typed.listen.or(file.listen),
        http: typed.http.or(file.http),
        master_listen: typed.master_listen.or(file.master_listen),
        master_http: typed.master_http.or(file.master_http),
        direct_port_base: typed.direct_port_base.or(file.direct_port_base),
        advertise: typed.advertise.or(file.advertise),
        advertise_direct_base: typed.advertise_direct_base.or(file.advertise_direct_base),
        shards: typed.shards.or(file.shards),
        memory: typed.memory.or(file.memory),
        segment_bytes: typed.segment_bytes.or(file.segment_bytes),
        catch_up_share_percent: typed.catch_up_share_percent.or(file.catch_up_share_percent),
        arena_dir,
        arena,
        log: typed.log.or(file.log),
    }
}

fn put<T>(field: &mut Option<T>, value: Result<T, String>) -> Result<(), String> {
    value.map(|value| *field = Some(value))
}

fn take_arena_dir(args: &mut ServeArgs, value: &Value) -> Result<(), String> {
    put(&mut args.arena_dir, path(value))
}

fn take_arena(args: &mut ServeArgs, value: &Value) -> Result<(), String> {
    let kind = match text(value)?.as_str() {
        "shared" => ArenaKind::Shared,
        "anonymous" => ArenaKind::Anonymous,
        other => return Err(format!("it is `{other}`")),
    };
    put(&mut args.arena, Ok(kind))
}

fn text(value: &Value) -> Result<String, String> {
    value.as_str().map(str::to_owned).ok_or_else(|| format!("it is {value}, text in quotes is expected"))
}

fn path(value: &Value) -> Result<PathBuf, String> {
    text(value).map(PathBuf::from)
}

fn address(value: &Value) -> Result<Address, String> {
    text(value).and_then(|text| parse_address(&text))
}

fn number(value: &Value) -> Result<u16, String> {
    let number = value.as_integer().and_then(|number| u16::try_from(number).ok());
    number.ok_or_else(|| format!("it is {value}"))
}

fn size(value: &Value) -> Result<u64, String> {
    match value {
        Value::Integer(bytes) => u64::try_from(*bytes).map_err(|_| format!("it is {bytes}")),
        _ => text(value).and_then(|text| parse_size(&text)),
    }
}

/// Reads `HOST:PORT`; an empty host is all interfaces, an IPv6 address stands in brackets.
pub fn parse_address(text: &str) -> Result<Address, String> {
    let wrong = || format!("`{text}` is not HOST:PORT, such as 127.0.0.1:8123");
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let port = port.parse().map_err(|_| wrong())?;
    let host = match host.strip_prefix('[').map(|rest| rest.strip_suffix(']')) {
        Some(inner) => inner.ok_or_else(wrong)?,
        None if host.contains(':') => {
            return Err(format!("`{text}`: put the IPv6 address in brackets, such as [::1]:8123"));
        }
        None if host.is_empty() => "0.0.0.0",
        None => host,
    };
    Ok(Address { host: host.to_owned(), port })
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

const UNITS: [(&str, u32); 4] = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];

/// Reads a size: plain bytes, or a whole number of KiB, MiB, GiB or TiB.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a size: use bytes, or 64KiB, 512MiB, 2GiB, 1TiB");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &text[digits.len()..];
    let shift = match unit {
        "" | "B" => 0,
        _ => UNITS.iter().find(|(name, _)| *name == unit).map(|(_, shift)| *shift).ok_or_else(wrong)?,
    };
    let number: u64 = digits.trim_end().parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("`{text}` is too large"))
}

/// A size as [`parse_size`] reads it, in the largest unit that is exact.
pub fn show_size(bytes: u64) -> String {
    let exact = UNITS.iter().rev().find(|(_, shift)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    exact.map_or_else(|| bytes.to_string(), |(name, shift)| format!("{}{name}", bytes >> shift))
}

/// A size for people: to one digit, in the largest unit that it has one of.
pub fn show_about(bytes: u64) -> String {
    match UNITS.iter().rev().find(|(_, shift)| bytes >> shift > 0) {
        Some((name, shift)) => format!("{:.1} {name}", bytes as f64 / (1_u64 << shift) as f64),
        None => format!("{bytes} bytes"),
    }
}

/// Reads a durability level.
pub fn parse_durability(text: &str) -> Result<Durability, String> {
    text.parse().map_err(|error: ringmain_core::ids::UnknownDurability| error.to_string())
}

/// Checks a log filter, and gives it back.
pub fn parse_log(text: &str) -> Result<String, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    // A lone word that is no level would be taken for the name of a module, and silence everything else.
    let is_level = |word: &str| LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    let is_known = |word: &str| is_level(word) || word.contains(['=', ':', '[']) || word.starts_with("ringmain");
    match tracing_subscriber::EnvFilter::try_new(text) {
        Ok(_) if !text.trim().is_empty() && text.split(',').map(str::trim).all(is_known) => Ok(text.to_owned()),
        _ => Err(format!("`{text}` is not a log level: use error, warn, info, debug or trace")),
    }
}

#[cfg(test)]
mod tests;
