use super::*;

fn config(data_dir: &Path) -> PreflightConfig {
    PreflightConfig { data_dir: data_dir.to_owned(), shards: 2, io_memory_bytes: 1 << 20, connections: 1000 }
}

#[test]
fn this_host_passes_and_nothing_is_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let host = check(&config(dir.path())).unwrap();
    assert!(host.open_files_max >= 1000);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_data_directory_in_memory_is_refused_with_the_fix() {
    let dir = tempfile::Builder::new().prefix("ringmain-test-").tempdir_in("/dev/shm").unwrap();
    let missing = check(&config(dir.path())).unwrap_err();
    assert!(matches!(missing[..], [PreflightError::DirectIo { .. }]));
    assert!(missing[0].to_string().contains("ext4"), "{}", missing[0]);
}

#[test]
fn a_data_directory_that_is_not_there_or_not_writable_is_refused() {
    for dir in ["/nowhere/at/all", "/proc"] {
        let missing = check(&config(Path::new(dir))).unwrap_err();
        assert!(matches!(missing[..], [PreflightError::DataDir { .. }]), "{missing:?}");
    }
}

#[test]
fn more_than_the_limits_allow_is_refused_all_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.connections = u64::MAX / 2;
    config.data_dir = PathBuf::from("/nowhere");
    let missing = check(&config).unwrap_err();
    assert_eq!(missing.len(), 2);
    assert!(missing[0].to_string().contains("LimitNOFILE"), "{}", missing[0]);
}

#[test]
fn old_kernels_are_named() {
    for release in ["5.7.19-generic", "4.18.0", "3.10.0-1160.el7"] {
        assert!(check_kernel(release).unwrap_err().to_string().contains(release));
    }
    for release in ["5.8.0", "5.15.0-91", "6.18.44-fc", "10.0", "odd"] {
        check_kernel(release).unwrap();
    }
}

#[test]
fn each_way_of_switching_io_uring_off_has_its_own_advice() {
    let advice = |errno, disabled| why_off(io::Error::from_raw_os_error(errno), disabled).to_string();
    assert!(advice(libc::EPERM, 2).contains("sysctl -w kernel.io_uring_disabled=0"));
    assert!(advice(libc::EPERM, 0).contains("seccomp"));
    assert!(advice(libc::ENOSYS, 0).contains("CONFIG_IO_URING"));
    assert!(advice(libc::ENOMEM, 0).contains("memory"));
}
