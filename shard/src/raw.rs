//! The raw calls under the runtime that no safe crate offers: io_uring probing and worker affinity, the borrowing and
//! handing over of descriptors that glommio knows only as numbers, scheduling class and CPU time of a thread. Nothing here
//! keeps state.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::time::Duration;

/// `IORING_REGISTER_IOWQ_AFF` of linux/io_uring.h.
const IORING_REGISTER_IOWQ_AFF: libc::c_uint = 17;
/// Size of `struct io_uring_params` of linux/io_uring.h; all fields zero asks for no feature.
const IO_URING_PARAMS_BYTES: usize = 120;

/// Types that own their descriptor for as long as they can be borrowed.
pub(crate) trait OwnsFd: AsRawFd {
    /// The descriptor, borrowed for as long as its owner is.
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the implementors below own the descriptor and close it only when they are consumed or dropped, which
        // the borrow of `self` rules out.
        unsafe { BorrowedFd::borrow_raw(self.as_raw_fd()) }
    }
}

impl OwnsFd for glommio::net::TcpStream {}
impl OwnsFd for glommio::io::DmaFile {}

/// Hands a listening socket to the executor of this thread.
///
/// # Panics
/// Outside an executor.
pub(crate) fn listener_of(socket: OwnedFd) -> glommio::net::TcpListener {
    // SAFETY: `socket` is an owned, open descriptor, and its ownership goes over.
    unsafe { glommio::net::TcpListener::from_raw_fd(socket.into_raw_fd()) }
}

/// Makes a small io_uring and drops it. The error is the kernel's: ENOSYS or EPERM when io_uring is off.
pub(crate) fn probe_io_uring() -> io::Result<OwnedFd> {
    let mut params = [0u64; IO_URING_PARAMS_BYTES / 8];
    // SAFETY: the pointer is to a zeroed, 8-aligned block of the size of io_uring_params, which lives across the call.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 2 as libc::c_uint, params.as_mut_ptr()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor; nobody else knows it. A descriptor fits an i32.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Lets the io_uring workers of the calling thread run on the CPUs of `mask` (bit n of byte n/8 is CPU n). The kernel
/// keeps one worker pool per thread: any one of its rings will do as `ring`.
pub(crate) fn set_worker_affinity(ring: libc::c_int, mask: &[u8]) -> io::Result<()> {
    // SAFETY: the kernel reads `mask.len()` bytes at the pointer, which live across the call; a `ring` that is no ring
    // or not open gives an error.
    let result = unsafe {
        libc::syscall(libc::SYS_io_uring_register, ring, IORING_REGISTER_IOWQ_AFF, mask.as_ptr(), mask.len())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Another descriptor of the file that `fd` names, if it is open.
pub(crate) fn duplicate(fd: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: takes and gives descriptor numbers only; one that is not open gives an error.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor; nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Puts the calling thread behind the ones that it serves: with `only_idle_time` it gets only CPU time that no other thread
/// wants. Where threads have a real-time priority, it gets the next lower one.
pub(crate) fn step_back(only_idle_time: bool) -> io::Result<()> {
    let mut parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread; the kernel fills `parameters`, which lives across the call.
    let policy = unsafe {
        if libc::sched_getparam(0, &raw mut parameters) < 0 {
            return Err(io::Error::last_os_error());
        }
        libc::sched_getscheduler(0)
    };
    let policy = match policy & !libc::SCHED_RESET_ON_FORK {
        real_time @ (libc::SCHED_FIFO | libc::SCHED_RR) if parameters.sched_priority > 1 => {
            parameters.sched_priority -= 1;
            real_time
        }
        _ if !only_idle_time => return Ok(()),
        _ => {
            parameters.sched_priority = 0;
            libc::SCHED_IDLE
        }
    };
    // SAFETY: 0 is the calling thread; `parameters` lives across the call.
    let result = unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// CPU time that the calling thread has used.
pub(crate) fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills `time`, which lives across the call. It knows this clock since Linux 2.6.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}
