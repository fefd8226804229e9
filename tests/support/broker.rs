//! The real binary as a child process: started on directories of its own, on any free ports; killed, stopped, and never
//! left behind.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use tempfile::TempDir;

use super::{LIMIT, wait_for};

/// The binary under test.
pub const RINGMAIN: &str = env!("CARGO_BIN_EXE_ringmain");

/// Memory of the brokers unless a test asks for more.
pub const MEMORY: &str = "64MiB";

/// What one broker leaves to the next: the data directory, and the arena in memory. Both go when it is dropped.
pub struct Home {
    data: TempDir,
    arena: TempDir,
    /// Flags that each broker of this home gets.
    pub flags: Vec<String>,
}

impl Default for Home {
    fn default() -> Self {
        Self::new(&["--shards", "2", "--memory", MEMORY])
    }
}

impl Home {
    /// A home whose brokers get these flags.
    pub fn new(flags: &[&str]) -> Self {
        Self::within(&std::env::temp_dir(), flags)
    }

    /// The same, with its data in `dir`.
    pub fn within(dir: &Path, flags: &[&str]) -> Self {
        let arena = tempfile::Builder::new().prefix("ringmain-test-").tempdir_in("/dev/shm").unwrap();
        let data = tempfile::Builder::new().prefix("ringmain-test-").tempdir_in(dir).unwrap();
        Self { data, arena, flags: flags.iter().map(ToString::to_string).collect() }
    }

    /// The data directory.
    pub fn data(&self) -> PathBuf {
        self.data.path().join("data")
    }

    /// The directory of the arena.
    pub fn arena(&self) -> &Path {
        self.arena.path()
    }

    /// The files of the arena.
    pub fn arena_files(&self) -> Vec<PathBuf> {
        std::fs::read_dir(self.arena()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// Removes the files of the arena, as a restart of the machine would.
    pub fn delete_arena(&self) {
        for file in self.arena_files() {
            std::fs::remove_file(file).unwrap();
        }
    }

    /// The command that serves on this home. A flag in `more` replaces the one of the same name.
    pub fn command(&self, more: &[&str]) -> Command {
        let (data, arena) = (self.data(), self.arena());
        let mut pairs = vec![("--data", data.to_str().unwrap()), ("--direct-port-base", "0")];
        pairs.extend(["--listen", "--http", "--master-listen", "--master-http"].map(|flag| (flag, "127.0.0.1:0")));
        if !self.flags.iter().any(|flag| flag == "--arena") {
            pairs.push(("--arena-dir", arena.to_str().unwrap()));
        }
        pairs.extend(self.flags.chunks(2).map(|pair| (pair[0].as_str(), pair[1].as_str())));
        let mut command = Command::new(RINGMAIN);
        command.arg("serve");
        for (flag, value) in pairs.into_iter().filter(|(flag, _)| !more.contains(flag)) {
            command.args([flag, value]);
        }
        command.args(more).stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    /// Starts a broker and waits until it is ready.
    pub fn start(&self) -> Broker {
        self.start_with(&[])
    }

    /// The same, with more flags.
    pub fn start_with(&self, more: &[&str]) -> Broker {
        self.launch(more).ready().unwrap_or_else(|refused| panic!("the broker did not start: {refused:?}"))
    }

    /// Starts a process without waiting for anything.
    pub fn launch(&self, more: &[&str]) -> Launched {
        Launched::new(&mut self.command(more), &self.data.path().join("broker.log"))
    }
}

/// A process that may or may not become ready.
pub struct Launched {
    process: Process,
    lines: Receiver<String>,
}

/// A process that ended instead of becoming ready.
#[derive(Debug)]
pub struct Refused {
    /// How it ended.
    pub status: ExitStatus,
    /// What it logged.
    pub log: String,
}

impl Launched {
    /// Runs `command` with its log in `log`, behind what is there.
    pub fn new(command: &mut Command, log: &Path) -> Self {
        let file = File::options().create(true).append(true).open(log).unwrap();
        let log_from = file.metadata().unwrap().len();
        let mut child = command.stderr(file).spawn().unwrap();
        let stdout = child.stdout.take().unwrap();
        let process = Process { child, log: log.to_owned(), log_from };
        let lines = lines_of(stdout);
        Self { process, lines }
    }

    /// Waits for the ready line.
    pub fn ready(mut self) -> Result<Broker, Refused> {
        match self.lines.recv_timeout(LIMIT) {
            Ok(line) => {
                let part = |name: &str| {
                    let found = line.split(' ').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
                    found.unwrap_or_else(|| panic!("the ready line lacks {name}: {line}")).to_owned()
                };
                assert!(line.starts_with("ringmain ready "), "{line}");
                Ok(Broker {
                    broker: part("broker"),
                    http: part("http"),
                    console: part("console"),
                    process: self.process,
                })
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(Refused { status: self.process.wait(), log: self.process.log() })
            }
            Err(RecvTimeoutError::Timeout) => {
                panic!("the broker was not ready in {LIMIT:?}; its log:\n{}", self.process.log())
            }
        }
    }

    /// `kill -9`, wherever it is in its start.
    pub fn kill(mut self) {
        self.process.kill();
    }
}

/// A broker that is ready.
pub struct Broker {
    /// Its common port.
    pub broker: String,
    /// Its probe port.
    pub http: String,
    /// The master's HTTP API.
    pub console: String,
    process: Process,
}

impl Broker {
    /// `kill -9`; gives back when the process is gone, which its writes may not be.
    pub fn kill(mut self) {
        self.process.kill();
    }

    /// `kill -9` without waiting for its end: the next broker may start while the kernel still takes this one apart.
    pub fn strike(mut self) -> Dying {
        self.process.child.kill().unwrap();
        Dying(self.process)
    }

    /// SIGTERM, which must end in exit code 0.
    pub fn stop(mut self) {
        self.process.terminate();
        let status = self.process.wait();
        assert_eq!(status.code(), Some(0), "{status}; the log:\n{}", self.process.log());
    }

    /// Its process.
    pub fn process_id(&self) -> u32 {
        self.process.child.id()
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        self.process.child.try_wait().unwrap().is_none()
    }

    /// Runs a client command of the binary against this broker.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(RINGMAIN);
        command.args(args).env("RINGMAIN_BROKER", &self.broker).stdin(Stdio::null());
        command
    }

    /// The same, run to its end.
    pub fn output(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// The same, which must succeed; gives its standard output.
    pub fn ok(&self, args: &[&str]) -> Vec<u8> {
        let output = self.output(args);
        assert!(output.status.success(), "{args:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    /// The same, which must fail with exit code 1; gives its standard error.
    pub fn fails(&self, args: &[&str]) -> String {
        let output = self.output(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// The value of a metric, summed over the shards.
    pub fn metric(&self, name: &str) -> u64 {
        let text = http_get(&self.http, "/metrics");
        let values = text.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            (series.split('{').next() == Some(name)).then(|| value.parse::<f64>().unwrap() as u64)
        });
        values.sum()
    }
}

/// A broker that was killed and may not be gone yet.
pub struct Dying(Process);

impl Dying {
    /// Waits for its end, which must come from the kill.
    pub fn end(mut self) {
        let status = self.0.child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "it had ended by itself with {status}; its log:\n{}", self.0.log());
    }
}

/// The lines that come out of a process, for waiting with a limit.
pub fn lines_of(out: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = channel();
    // Ends with the process, which holds the other end of the pipe.
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    lines
}

/// The answer to a GET, head and body.
pub fn http_get(address: &str, path: &str) -> String {
    use std::io::Write;
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// A child process that does not outlive its test.
struct Process {
    child: Child,
    log: PathBuf,
    log_from: u64,
}

impl Process {
    fn log(&self) -> String {
        // Its home may be gone already when a test fails.
        let Ok(mut file) = File::open(&self.log) else { return "(no log)".to_owned() };
        file.seek(SeekFrom::Start(self.log_from)).unwrap();
        let mut log = Vec::new();
        file.read_to_end(&mut log).unwrap();
        String::from_utf8_lossy(&log).into_owned()
    }

    fn terminate(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    fn wait(&mut self) -> ExitStatus {
        wait_for("the end of a process", || self.child.try_wait().unwrap())
    }

    /// Kills it; that it was still alive is part of every test that does so.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        let status = self.child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "it had ended by itself with {status}; its log:\n{}", self.log());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("log of the broker:\n{}", self.log());
        }
    }
}
