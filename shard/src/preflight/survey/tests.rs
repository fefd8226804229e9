use super::*;

fn config(data_dir: &Path) -> SurveyConfig {
    SurveyConfig {
        data_dir: data_dir.to_owned(),
        shards: Some(1),
        memory_bytes: Some(64 << 20),
        memory_default: |_, _| 64 << 20,
        arena: ArenaChoice::Dir(PathBuf::from("/dev/shm")),
        segment_bytes: 32 << 20,
        listen: "127.0.0.1:0".parse().unwrap(),
        direct_port_base: 0,
        ports: vec![("--http", "127.0.0.1:0".parse().unwrap())],
    }
}

fn check<'a>(checks: &'a [Check], name: &str) -> &'a Check {
    checks.iter().find(|check| check.name == name).unwrap_or_else(|| panic!("no {name}: {checks:?}"))
}

#[test]
fn this_host_can_start_a_broker_in_a_directory_that_is_not_there_yet_and_nothing_is_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("deep/data");
    let checks = survey(&config(&data));
    let problems: Vec<&Check> = checks.iter().filter(|check| check.outcome == Outcome::Problem).collect();
    assert!(problems.is_empty(), "{problems:?}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let mut names: Vec<&str> = checks.iter().map(|check| check.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), checks.len(), "each check has a name of its own");
    for check in &checks {
        assert_eq!(check.fix.is_none(), check.outcome == Outcome::Ok, "{check:?}");
    }
}

#[test]
fn a_taken_port_is_a_problem_and_names_the_flag() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config = config(dir.path());
    config.ports.push(("--master-http", taken.local_addr().unwrap()));
    let checks = survey(&config);
    let ports = check(&checks, "ports");
    assert_eq!(ports.outcome, Outcome::Problem);
    assert!(ports.found.contains("--master-http") && ports.found.contains("in use"), "{ports:?}");
}

#[test]
fn too_much_memory_and_too_little_are_problems_with_the_fix() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.memory_bytes = Some(1 << 20);
    let checks = survey(&config);
    assert_eq!(check(&checks, "memory").outcome, Outcome::Problem);
    assert_eq!(check(&checks, "memory").fix.as_deref(), Some("give at least --memory 32MiB"));
    config.memory_bytes = Some(1 << 44);
    let checks = survey(&config);
    let arena = check(&checks, "arena");
    assert_eq!(arena.outcome, Outcome::Problem);
    assert!(arena.fix.as_ref().unwrap().contains("remount,size="), "{arena:?}");
}

#[test]
fn slow_clocks_quotas_and_tight_containers_are_warnings_with_the_command() {
    let slow = clock_source(Some("hpet"), Some("tsc hpet acpi_pm"));
    assert!(slow.fix.unwrap().starts_with("echo tsc > /sys/"));
    assert_eq!(clock_source(Some("hpet"), Some("hpet")).outcome, Outcome::Warning);
    assert_eq!(clock_source(Some("tsc"), None).outcome, Outcome::Ok);
    assert_eq!(cpu_quota(Some("max 100000"), 4).outcome, Outcome::Ok);
    assert_eq!(cpu_quota(None, 4).outcome, Outcome::Ok);
    assert!(cpu_quota(Some("150000 100000"), 2).fix.unwrap().contains("--cpus 2"));
    assert_eq!(cpu_quota(Some("200000 100000"), 2).outcome, Outcome::Ok);
    assert_eq!(cpus(1, 2, Some("0-3,8")).found, "1 of 5 CPUs may be used by 2 shards");
    assert_eq!(cpus(2, 2, None).outcome, Outcome::Ok);
    let limits = vec![("memory.max".to_owned(), 1 << 30)];
    assert_eq!(cgroup_memory(&limits, 900 << 20).outcome, Outcome::Warning);
    assert_eq!(cgroup_memory(&limits, 256 << 20).outcome, Outcome::Ok);
    assert_eq!(cgroup_memory(&[], 900 << 20).outcome, Outcome::Ok);
}

fn device(settings: &[(&str, &str)]) -> (tempfile::TempDir, BlockDevice) {
    let dir = tempfile::tempdir().unwrap();
    for (name, value) in settings {
        fs::write(dir.path().join(name), format!("{value}\n")).unwrap();
    }
    let device = BlockDevice { name: "nvme0n1".into(), queue: dir.path().to_owned() };
    (dir, device)
}

#[test]
fn settings_of_the_disk_that_cost_are_told_with_the_command() {
    let (_dir, good) = device(&[
        ("logical_block_size", "512"),
        ("physical_block_size", "4096"),
        ("write_cache", "write back"),
        ("fua", "1"),
        ("scheduler", "[none] mq-deadline"),
        ("rotational", "0"),
    ]);
    for check in [block_size(&good), write_cache(&good), scheduler(&good)] {
        assert_eq!(check.outcome, Outcome::Ok, "{check:?}");
    }
    let (_dir, bad) = device(&[
        ("logical_block_size", "16384"),
        ("physical_block_size", "16384"),
        ("write_cache", "write through"),
        ("scheduler", "none [bfq]"),
        ("rotational", "0"),
    ]);
    assert_eq!(block_size(&bad).outcome, Outcome::Problem);
    assert!(write_cache(&bad).fix.unwrap().contains("echo \"write back\" >"));
    assert!(scheduler(&bad).fix.unwrap().starts_with("echo none >"));
    let (_dir, rotating) = device(&[("scheduler", "[mq-deadline]"), ("rotational", "1")]);
    assert!(scheduler(&rotating).found.contains("rotating"));
}
