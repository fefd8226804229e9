//! How much memory the broker takes when nobody says. The same on each start of one machine: an arena of another size than
//! before could not be adopted as it is.

use std::fs;
use std::path::Path;

use ringmain_core::limits::ARENA_BYTES_MIN;

use crate::config::Arena;

/// Budgets are a multiple of this, so that small differences between boots don't change them.
const STEP_BYTES: u64 = 64 * 1024 * 1024;

/// A quarter of the memory of the machine or container, at most half of the arena's filesystem, but what the shards need
/// at least.
pub fn default_memory(arena: &Arena, shards: u16) -> u64 {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| total_bytes(&text));
    let container = fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|text| text.trim().parse().ok());
    let memory = machine.into_iter().chain(container).min();
    let filesystem = match arena {
        Arena::Shared(directory) => filesystem_bytes(directory),
        Arena::Anonymous => None,
    };
    budget(memory, filesystem, shards)
}

fn budget(memory: Option<u64>, filesystem: Option<u64>, shards: u16) -> u64 {
    let affordable = memory.map(|bytes| bytes / 4).into_iter().chain(filesystem.map(|bytes| bytes / 2)).min();
    let least = ARENA_BYTES_MIN as u64 * u64::from(shards);
    let rounded = affordable.map_or(0, |bytes| bytes / STEP_BYTES * STEP_BYTES);
    rounded.max(least)
}

/// `MemTotal` of /proc/meminfo.
fn total_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn filesystem_bytes(directory: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(directory).ok()?;
    Some(stat.f_blocks * stat.f_frsize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_is_read_from_meminfo() {
        assert_eq!(total_bytes("MemTotal:       16384 kB\nMemFree: 1 kB\n"), Some(16384 * 1024));
        assert_eq!(total_bytes("MemFree: 1 kB\n"), None);
    }

    #[test]
    fn the_budget_is_what_both_afford_and_the_shards_need() {
        let gib = 1 << 30;
        assert_eq!(budget(Some(8 * gib), Some(2 * gib), 2), gib);
        assert_eq!(budget(Some(8 * gib + 12345), None, 2), 2 * gib);
        assert_eq!(budget(Some(gib), Some(64 << 20), 4), 4 * ARENA_BYTES_MIN as u64);
        assert_eq!(budget(None, None, 1), ARENA_BYTES_MIN as u64);
    }

    #[test]
    fn this_machine_has_a_budget() {
        assert!(default_memory(&Arena::Anonymous, 1) >= ARENA_BYTES_MIN as u64);
    }
}
