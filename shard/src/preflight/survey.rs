//! Everything that a start checks, and what else decides how well a broker runs here, for `ringmain doctor`. What would
//! end a start is a problem, found by the same functions; what costs speed or safety is a warning.

mod judge;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use ringmain_core::ids::ShardId;
use ringmain_core::limits::ARENA_BYTES_MIN;

use self::judge::{
    block_size, cgroup_memory, clock_source, cpu_quota, cpus, filesystem, free_space, memory_limits, scheduler,
    write_cache,
};
use super::device::BlockDevice;
use super::{
    PreflightConfig, check_direct_io, check_io_uring, check_kernel, check_memlock, check_open_files, kernel_release,
};
use crate::arena::{ArenaIdentity, check_dir, missing_bytes};
use crate::broker::{ArenaChoice, CONNECTIONS_MIN, IO_MEMORY_BYTES, cpus_of_this_process, slabs_of};
use crate::data_dir::{DataDir, DataDirError, Identity};
use crate::net::{BindError, BoundListener};

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
