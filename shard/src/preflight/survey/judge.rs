//! What is made of each thing that was found: pure but for the look at filesystems.

use std::path::Path;

use ringmain_core::limits::DISK_BLOCK_BYTES;

use super::{Check, mib, read};
use crate::preflight::device::BlockDevice;

/// A shard's log takes a segment at once and makes the next one ahead; below this much room it is soon full.
const SEGMENTS_FREE_MIN: u64 = 4;

pub(super) fn clock_source(current: Option<&str>, available: Option<&str>) -> Check {
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

pub(super) fn cpus(allowed: usize, shards: u16, online: Option<&str>) -> Check {
    let online = online.and_then(count_of).unwrap_or(allowed);
    let found = format!("{allowed} of {online} CPUs may be used by {shards} shards");
    if usize::from(shards) > allowed {
        let fix = "the shards run unpinned and share CPUs: allow one for each (taskset, systemd: CPUAffinity=, docker: \
                   --cpuset-cpus)";
        return Check::warning("cpus", found, fix);
    }
    Check::ok("cpus", format!("{found}, each pinned to its own"))
}

pub(super) fn cpu_quota(cpu_max: Option<&str>, shards: u16) -> Check {
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

pub(super) fn filesystem(dir: &Path) -> Check {
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

pub(super) fn free_space(dir: &Path, segment_bytes: u64, shards: u16) -> Check {
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

pub(super) fn block_size(device: &BlockDevice) -> Check {
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

pub(super) fn write_cache(device: &BlockDevice) -> Check {
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

pub(super) fn scheduler(device: &BlockDevice) -> Check {
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
pub(super) fn memory_limits() -> Vec<(String, u64)> {
    let path = "/sys/fs/cgroup/memory.max";
    let limit = read(path).and_then(|text| text.parse().ok());
    limit.map(|limit| (path.to_owned(), limit)).into_iter().collect()
}

pub(super) fn cgroup_memory(limits: &[(String, u64)], budget: u64) -> Check {
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
