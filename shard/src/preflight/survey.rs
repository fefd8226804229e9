//! Everything that a start checks, and what else decides how well a broker runs here, for `ringmain doctor`. What would
//! end a start is a problem, found by the same functions; what costs speed or safety is a warning.

use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use ringmain_core::ids::ShardId;
use ringmain_core::limits::{ARENA_BYTES_MIN, DISK_BLOCK_BYTES};

use super::device::BlockDevice;
use super::{
    PreflightConfig, check_direct_io, check_io_uring, check_kernel, check_memlock, check_open_files, kernel_release,
};
use crate::arena::{ArenaIdentity, check_dir, missing_bytes};
use crate::broker::{ArenaChoice, CONNECTIONS_MIN, IO_MEMORY_BYTES, cpus_of_this_process, slabs_of};
use crate::data_dir::{DataDir, DataDirError, Identity};
use crate::net::{BindError, BoundListener};

/// A shard's log takes a segment at once and makes the next one ahead; below this much room it is soon full.
const SEGMENTS_FREE_MIN: u64 = 4;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As it should be.
    Ok,
    /// A broker starts, but slower or less safe than it could be.
    Warning,
    /// No broker starts.
    Problem,
}

impl Outcome {
    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// One line of the survey.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What was checked; stable.
    pub name: &'static str,
    /// How it came out.
    pub outcome: Outcome,
    /// What was found.
    pub found: String,
    /// What to do, where there is something to do.
    pub fix: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, outcome: Outcome::Ok, found: found.into(), fix: None }
    }

    fn warning(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, outcome: Outcome::Warning, found: found.into(), fix: Some(fix.into()) }
    }

    fn problem(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, outcome: Outcome::Problem, found: found.into(), fix: Some(fix.into()) }
    }

    /// An error of a start: what was found, a colon, what to do.
    fn refused(name: &'static str, error: &impl fmt::Display) -> Self {
        let text = error.to_string();
        let (found, fix) = text.split_once(": ").unwrap_or((&text, "see the README, Requirements"));
        Self::problem(name, found, fix)
    }
}

/// What would be started.
#[derive(Clone, Debug)]
pub struct SurveyConfig {
    /// The data directory, which need not be there.
    pub data_dir: PathBuf,
    /// Shards that are asked for, if any.
    pub shards: Option<u16>,
    /// Memory for records, all shards together; none = `memory_default` of the number of shards.
    pub memory_bytes: Option<u64>,
    /// What a broker takes when nobody says.
    pub memory_default: fn(&ArenaChoice, u16) -> u64,
    /// Where that memory lies.
    pub arena: ArenaChoice,
    /// Segment size of a new data directory.
    pub segment_bytes: u64,
    /// Port for clients.
    pub listen: SocketAddr,
    /// First direct port; 0 = any.
    pub direct_port_base: u16,
    /// The other ports, with the flags that set them.
    pub ports: Vec<(&'static str, SocketAddr)>,
}

/// The host and the place, as they are.
struct Survey<'a> {
    config: &'a SurveyConfig,
    checks: Vec<Check>,
    /// The data directory, or the nearest folder above it that is there.
    existing: PathBuf,
    identity: Option<Identity>,
    shards: u16,
    cpus: usize,
    /// A broker runs here already: its ports and its memory are no fault.
    holder: Option<String>,
}

/// Looks at everything; blocks for a moment. Leaves nothing behind.
#[must_use]
pub fn survey(config: &SurveyConfig) -> Vec<Check> {
    let cpus = cpus_of_this_process().len();
    let mut existing = config.data_dir.as_path();
    while !existing.exists() {
        existing = existing.parent().unwrap_or(Path::new("/"));
        if existing.as_os_str().is_empty() {
            existing = Path::new(".");
        }
    }
    let mut survey = Survey {
        config,
        checks: Vec::new(),
        existing: existing.to_owned(),
        identity: None,
        shards: config.shards.unwrap_or_else(|| u16::try_from(cpus).unwrap_or(u16::MAX)).max(1),
        cpus,
        holder: None,
    };
    survey.host();
    survey.data_dir();
    survey.limits();
    survey.disk();
    survey.memory();
    survey.ports();
    survey.checks
}

impl Survey<'_> {
    fn put(&mut self, check: Check) {
        self.checks.push(check);
    }

    /// A check that a start makes: fine, or its error.
    fn start_check<T, E: fmt::Display>(&mut self, name: &'static str, found: &str, result: Result<T, E>) {
        self.put(match result {
            Ok(_) => Check::ok(name, found),
            Err(error) => Check::refused(name, &error),
        });
    }

    fn host(&mut self) {
        let release = kernel_release();
        self.start_check("kernel", &format!("Linux {release}"), check_kernel(&release));
        self.start_check("io_uring", "allowed", check_io_uring());
        self.put(clock_source(
            read("/sys/devices/system/clocksource/clocksource0/current_clocksource").as_deref(),
            read("/sys/devices/system/clocksource/clocksource0/available_clocksource").as_deref(),
        ));
    }

    /// Whose directory it is, which also tells the number of shards.
    fn data_dir(&mut self) {
        let dir = &self.config.data_dir;
        let shown = dir.display();
        let check = match DataDir::peek(dir) {
            Err(error) => Check::refused("data_dir", &error),
            Ok(None) if dir.exists() && !dir.is_dir() => {
                Check::problem("data_dir", format!("{shown} is no directory"), "name another one with --data")
            }
            Ok(None) => Check::ok("data_dir", format!("{shown} will be made for {} shards", self.shards)),
            Ok(Some(identity)) => {
                let has = identity.shards();
                let asked = self.config.shards.unwrap_or(has);
                self.shards = asked.max(has);
                self.identity = Some(identity);
                self.holder = DataDir::holder(dir);
                match &self.holder {
                    _ if asked < has => {
                        let dir = dir.clone();
                        let error = DataDirError::FewerShards { dir, has, asked, with_data: Vec::new() };
                        Check::refused("data_dir", &error)
                    }
                    Some(holder) => Check::warning(
                        "data_dir",
                        format!("{shown} is in use by {holder}: ports and memory are taken to be its own"),
                        "stop it before another broker is started here",
                    ),
                    None => Check::ok("data_dir", format!("{shown} has {has} shards")),
                }
            }
        };
        self.put(check);
    }

    fn limits(&mut self) {
        let config = PreflightConfig {
            data_dir: self.existing.clone(),
            shards: self.shards,
            io_memory_bytes: IO_MEMORY_BYTES,
            connections: CONNECTIONS_MIN,
        };
        self.start_check("memlock", "enough memory may be locked", check_memlock(&config));
        let files = check_open_files(&config);
        let most = files.as_ref().map_or(0, |host| host.open_files_max);
        self.start_check("nofile", &format!("{most} files may be open"), files);
        self.put(cpus(self.cpus, self.shards, read("/sys/devices/system/cpu/online").as_deref()));
        self.put(cpu_quota(read("/sys/fs/cgroup/cpu.max").as_deref(), self.shards));
    }

    fn disk(&mut self) {
        let existing = self.existing.clone();
        let shown = existing.display().to_string();
        let direct = check_direct_io(&existing);
        let is_direct = direct.is_ok();
        self.start_check("direct_io", &format!("{shown} takes O_DIRECT"), direct);
        self.put(filesystem(&existing));
        self.put(free_space(&existing, self.segment_bytes(), self.shards));
        match BlockDevice::under(&existing).filter(|_| is_direct) {
            Some(device) => {
                self.put(block_size(&device));
                self.put(write_cache(&device));
                self.put(scheduler(&device));
            }
            None => {
                for name in ["block_size", "write_cache", "scheduler"] {
                    let found = format!("{shown} is on no block device that the kernel names here");
                    self.put(Check::warning(name, found, "check the settings of the disk below by hand"));
                }
            }
        }
    }

    fn segment_bytes(&self) -> u64 {
        self.identity.as_ref().map_or(self.config.segment_bytes, |identity| identity.segment_bytes)
    }

    fn memory(&mut self) {
        let bytes =
            self.config.memory_bytes.unwrap_or_else(|| (self.config.memory_default)(&self.config.arena, self.shards));
        let slabs = slabs_of(bytes, self.shards);
        let least = ARENA_BYTES_MIN as u64 * u64::from(self.shards);
        match &slabs {
            Ok(_) => self.put(Check::ok("memory", format!("{} for records, {} at least", mib(bytes), mib(least)))),
            Err(error) => self.put(Check::problem(
                "memory",
                error.to_string(),
                format!("give at least --memory {}MiB", least.div_ceil(1 << 20)),
            )),
        }
        let check = match (&self.config.arena, slabs) {
            (ArenaChoice::Anonymous, _) => Check::warning(
                "arena",
                "anonymous: records acked at level memory die with the process",
                "leave out --arena anonymous, so that they lie in shared memory",
            ),
            (ArenaChoice::Dir(_), Err(_)) => {
                Check::warning("arena", "not checked, since its size is not possible", "see memory")
            }
            (ArenaChoice::Dir(dir), Ok(_)) if self.holder.is_some() => {
                Check::ok("arena", format!("in {}, used by the broker that runs", dir.display()))
            }
            (ArenaChoice::Dir(dir), Ok(slabs)) => {
                let needs = missing_bytes(dir, &self.arena_identities(), slabs);
                match check_dir(dir, needs) {
                    Ok(()) => Check::ok("arena", format!("{} has room for {}", dir.display(), mib(needs))),
                    Err(error) => Check::refused("arena", &error),
                }
            }
        };
        self.put(check);
        self.put(cgroup_memory(&memory_limits(), bytes));
    }

    /// Whose arenas a start would look for.
    fn arena_identities(&self) -> Vec<Option<ArenaIdentity>> {
        let of = |shard: u16| {
            let log_id = *self.identity.as_ref()?.log_ids.get(usize::from(shard))?;
            ArenaIdentity::of(&fs::canonicalize(&self.config.data_dir).ok()?, log_id, ShardId(shard)).ok()
        };
        (0..self.shards).map(of).collect()
    }

    fn ports(&mut self) {
        if self.holder.is_some() {
            return self.put(Check::ok("ports", "used by the broker that runs"));
        }
        let mut refused = Vec::new();
        let mut count = 0;
        let mut bind = |flag: &str, address: SocketAddr| {
            count += 1;
            match BoundListener::alone(address) {
                Ok(_) => {}
                Err(error @ BindError::InUse { .. }) => refused.push(format!("{flag}: {error}")),
                Err(error) => refused.push(format!("{flag}: {error}")),
            }
        };
        bind("--listen", self.config.listen);
        for shard in (0..self.shards).filter(|_| self.config.direct_port_base > 0) {
            let port = self.config.direct_port_base.saturating_add(shard);
            bind("--direct-port-base", SocketAddr::new(self.config.listen.ip(), port));
        }
        for (flag, address) in &self.config.ports {
            bind(flag, *address);
        }
        self.put(match refused.first() {
            None => Check::ok("ports", format!("{count} ports are free")),
            Some(first) => {
                let (found, fix) = first.rsplit_once(": ").unwrap_or((first, "choose another port"));
                let more = if refused.len() > 1 { format!(" (and {} more)", refused.len() - 1) } else { String::new() };
                Check::problem("ports", format!("{found}{more}"), fix)
            }
        });
    }
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

fn clock_source(current: Option<&str>, available: Option<&str>) -> Check {
    const FAST: [&str; 4] = ["tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"];
    let name = "clock_source";
    let Some(current) = current else { return Check::ok(name, "the kernel does not say") };
    if FAST.contains(&current) {
        return Check::ok(name, current);
    }
    let better = FAST.into_iter().find(|fast| available.unwrap_or_default().split_whitespace().any(|one| one == *fast));
    let found = format!("{current}: each look at the clock is a system call or a device access");
    match better {
        Some(better) => Check::warning(
            name,
            found,
            format!("echo {better} > /sys/devices/system/clocksource/clocksource0/current_clocksource"),
        ),
        None => {
            Check::warning(name, found, "none of the fast ones is offered: see the host's or hypervisor's settings")
        }
    }
}

/// How many CPUs a list such as `0-3,8` names.
fn count_of(list: &str) -> Option<usize> {
    list.split(',').try_fold(0, |sum, range| {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        let (from, to) = (from.trim().parse::<usize>().ok()?, to.trim().parse::<usize>().ok()?);
        Some(sum + to.checked_sub(from)? + 1)
    })
}

fn cpus(allowed: usize, shards: u16, online: Option<&str>) -> Check {
    let online = online.and_then(count_of).unwrap_or(allowed);
    let found = format!("{allowed} of {online} CPUs may be used by {shards} shards");
    if usize::from(shards) > allowed {
        let fix = "the shards run unpinned and share CPUs: allow one for each (taskset, systemd: CPUAffinity=, docker: \
                   --cpuset-cpus)";
        return Check::warning("cpus", found, fix);
    }
    Check::ok("cpus", format!("{found}, each pinned to its own"))
}

fn cpu_quota(cpu_max: Option<&str>, shards: u16) -> Check {
    let name = "cpu_quota";
    let numbers = cpu_max.and_then(|text| text.split_once(' '));
    let quota = numbers.and_then(|(quota, period)| Some((quota.parse::<f64>().ok()?, period.parse::<f64>().ok()?)));
    let Some((quota, period)) = quota else { return Check::ok(name, "none") };
    let cpus = quota / period.max(1.0);
    let found = format!("the container may use {cpus:.1} CPUs");
    if cpus < f64::from(shards) {
        let fix = format!(
            "a shard that is stopped for the rest of a period delays every ack: allow {shards} (docker: --cpus {shards}, \
             systemd: CPUQuota={}%), or start with fewer --shards",
            u32::from(shards) * 100
        );
        return Check::warning(name, found, fix);
    }
    Check::ok(name, found)
}

fn filesystem(dir: &Path) -> Check {
    let name = "filesystem";
    // linux/magic.h
    let known = |magic: u64| match magic {
        0xef53 => Some(("ext4", true)),
        0x5846_5342 => Some(("xfs", true)),
        0x9123_683e => Some(("btrfs", false)),
        0x794c_7630 => Some(("overlayfs", false)),
        0x2fc1_2fc1 => Some(("zfs", false)),
        0x6969 => Some(("nfs", false)),
        0x0102_1994 => Some(("tmpfs", false)),
        0xf2f5_2010 => Some(("f2fs", false)),
        _ => None,
    };
    let Ok(stat) = rustix::fs::statfs(dir) else {
        return Check::problem(name, format!("{} can't be looked at", dir.display()), "name another --data");
    };
    match known(stat.f_type as u64) {
        Some((kind, true)) => Check::ok(name, kind),
        kind => {
            let kind = kind.map_or_else(|| format!("of type {:#x}", stat.f_type), |(kind, _)| kind.to_owned());
            let fix = "what a completed write and sync mean was checked on ext4 and xfs: put --data on one of them";
            Check::warning(name, kind, fix)
        }
    }
}

fn free_space(dir: &Path, segment_bytes: u64, shards: u16) -> Check {
    let name = "free_space";
    let Ok(stat) = rustix::fs::statvfs(dir) else {
        return Check::problem(name, format!("{} can't be looked at", dir.display()), "name another --data");
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let wanted = SEGMENTS_FREE_MIN * segment_bytes * u64::from(shards);
    let found = format!("{} free in {}", mib(free), dir.display());
    if free < wanted {
        let fix = format!(
            "{} are {SEGMENTS_FREE_MIN} segments for each shard: free some space, or make the data directory with a \
             smaller --segment-bytes",
            mib(wanted)
        );
        return Check::warning(name, found, fix);
    }
    Check::ok(name, found)
}

fn block_size(device: &BlockDevice) -> Check {
    let (logical, physical) = (device.number("logical_block_size"), device.number("physical_block_size"));
    let found = format!("{}: logical {logical:?}, physical {physical:?}", device.name)
        .replace("Some(", "")
        .replace(')', "")
        .replace("None", "unknown");
    let most = DISK_BLOCK_BYTES as u64;
    match (logical, physical) {
        (Some(logical), _) if logical > most => Check::problem(
            "block_size",
            found,
            format!("writes are aligned to {most} bytes: use a device formatted with blocks of {most} or less"),
        ),
        (_, Some(physical)) if physical > most => {
            Check::warning("block_size", found, "small synced writes are read, changed and written again by the device")
        }
        _ => Check::ok("block_size", found),
    }
}

fn write_cache(device: &BlockDevice) -> Check {
    let name = "write_cache";
    let Some(cache) = device.text("write_cache") else {
        return Check::warning(name, format!("{} does not say", device.name), "see the manual of the device");
    };
    let fua = device.number("fua") == Some(1);
    let found = format!("{}: {cache}, FUA {}", device.name, if fua { "yes" } else { "no" });
    if cache == "write through" {
        // Either there is none, or somebody has told the kernel so: then a sync flushes nothing.
        return Check::warning(
            name,
            found,
            format!(
                "fine for a device without a volatile cache; else each sync must flush it: echo \"write back\" > {}",
                device.queue.join("write_cache").display()
            ),
        );
    }
    Check::ok(name, format!("{found}: a sync flushes it"))
}

fn scheduler(device: &BlockDevice) -> Check {
    let name = "scheduler";
    let Some(all) = device.text("scheduler") else { return Check::ok(name, format!("{}: none", device.name)) };
    let chosen = all.split_whitespace().find_map(|one| one.strip_prefix('[')?.strip_suffix(']'));
    let chosen = chosen.unwrap_or(&all).to_owned();
    let path = device.queue.join("scheduler").display().to_string();
    if device.number("rotational") == Some(1) && !device.is_virtual() {
        let found = format!("{}: {chosen}, a rotating disk", device.name);
        return Check::warning(name, found, "a sync costs milliseconds there: use an SSD for synced acks");
    }
    if matches!(chosen.as_str(), "none" | "mq-deadline") {
        return Check::ok(name, format!("{}: {chosen}", device.name));
    }
    Check::warning(name, format!("{}: {chosen}", device.name), format!("echo none > {path}"))
}

/// Memory limits of the container, with the files that say so.
fn memory_limits() -> Vec<(String, u64)> {
    let path = "/sys/fs/cgroup/memory.max";
    let limit = read(path).and_then(|text| text.parse().ok());
    limit.map(|limit| (path.to_owned(), limit)).into_iter().collect()
}

fn cgroup_memory(limits: &[(String, u64)], budget: u64) -> Check {
    let name = "cgroup_memory";
    let Some((path, limit)) = limits.iter().min_by_key(|(_, limit)| *limit) else {
        return Check::ok(name, "no limit");
    };
    let found = format!("{path} allows {}, {} of it for records", mib(*limit), mib(budget));
    // Receive buffers, replies, disk buffers and the program itself come on top; shared memory counts as well.
    if budget > limit / 4 * 3 {
        let fix =
            format!("the kernel would kill the broker: allow {}, or give a smaller --memory", mib(budget / 3 * 4));
        return Check::warning(name, found, fix);
    }
    Check::ok(name, found)
}

#[cfg(test)]
mod tests;
