//! What the broker says about itself, and what the kernel says about a process: CPU seconds, resident bytes, bytes
//! written to the device, syncs.
//!
//! From the broker's `/metrics` (a plain HTTP/1.1 GET, since one request needs no HTTP library), or from `/proc` when
//! only its process id is known. A metric with labels, one line a shard, counts as the sum of its lines.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// A scrape that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Largest answer that is read: 200 000 lines of metrics.
const ANSWER_BYTES_MAX: u64 = 32 * 1024 * 1024;

/// Where the figures come from. Neither: none are known.
#[derive(Clone, Debug, Default)]
pub struct Broker {
    /// Its HTTP address, `HOST:PORT`.
    pub http: Option<String>,
    /// Its process id on this machine: used for what `http` does not tell.
    pub pid: Option<u32>,
}

/// Counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BrokerSample {
    /// Bytes written to the device since it started.
    pub device_bytes_written: Option<u64>,
    /// fdatasync calls since it started.
    pub syncs: Option<u64>,
    /// CPU seconds since it started.
    pub cpu_s: Option<f64>,
    /// Bytes resident now, its arena included.
    pub resident_bytes: Option<u64>,
    /// Bytes read from disk for fetches since it started.
    pub fetch_disk_read_bytes: Option<u64>,
    /// Those of them for fetches that had been within memory when they began.
    pub tail_disk_read_bytes: Option<u64>,
}

impl Broker {
    /// Reads the figures now; blocks.
    pub fn sample(&self) -> Result<BrokerSample> {
        let mut sample = BrokerSample::default();
        if let Some(http) = &self.http {
            let text = http_get(http, "/metrics").with_context(|| format!("reading http://{http}/metrics"))?;
            sample = sample_of_metrics(&text);
        }
        if let Some(pid) = self.pid {
            let process = ProcessSample::of(pid).with_context(|| format!("reading /proc/{pid}"))?;
            sample.cpu_s = sample.cpu_s.or(Some(process.cpu_s));
            sample.resident_bytes = sample.resident_bytes.or(Some(process.resident_bytes));
            sample.device_bytes_written = sample.device_bytes_written.or(process.written_bytes);
        }
        Ok(sample)
    }
}

impl BrokerSample {
    /// What happened since `before`; the resident bytes are those of this sample.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let counted = |now: Option<u64>, then: Option<u64>| Some(now?.saturating_sub(then?));
        Self {
            device_bytes_written: counted(self.device_bytes_written, before.device_bytes_written),
            syncs: counted(self.syncs, before.syncs),
            cpu_s: self.cpu_s.zip(before.cpu_s).map(|(now, then)| (now - then).max(0.0)),
            resident_bytes: self.resident_bytes,
            fetch_disk_read_bytes: counted(self.fetch_disk_read_bytes, before.fetch_disk_read_bytes),
            tail_disk_read_bytes: counted(self.tail_disk_read_bytes, before.tail_disk_read_bytes),
        }
    }
}

fn sample_of_metrics(text: &str) -> BrokerSample {
    let whole = |name| metric(text, name).map(|value| value as u64);
    BrokerSample {
        device_bytes_written: whole("ringmain_device_bytes_written_total"),
        syncs: whole("ringmain_syncs_total"),
        cpu_s: metric(text, "ringmain_process_cpu_seconds_total"),
        resident_bytes: whole("ringmain_process_resident_bytes"),
        fetch_disk_read_bytes: whole("ringmain_fetch_disk_read_bytes_total"),
        tail_disk_read_bytes: whole("ringmain_tail_disk_read_bytes_total"),
    }
}

/// The metric `name` in Prometheus' text format, summed over its labels; none when it does not occur.
#[must_use]
pub fn metric(text: &str, name: &str) -> Option<f64> {
    let mut sum = None;
    for line in text.lines() {
        let Some(rest) = line.strip_prefix(name) else { continue };
        let value = match rest.strip_prefix('{') {
            // A label value may hold spaces, but no line has a brace behind its labels.
            Some(labelled) => labelled.rsplit_once('}').map(|(_, value)| value),
            None => rest.starts_with(' ').then_some(rest),
        };
        let number = value.and_then(|value| value.split_whitespace().next()?.parse::<f64>().ok());
        if let Some(number) = number {
            sum = Some(sum.unwrap_or(0.0) + number);
        }
    }
    sum
}

/// The body of a successful `GET path`; blocks.
pub fn http_get(address: &str, path: &str) -> Result<String> {
    let resolved = address.to_socket_addrs()?.next().context("the name has no address")?;
    let mut stream = TcpStream::connect_timeout(&resolved, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nAccept: text/plain\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)?;
    let answer = String::from_utf8(answer).context("the answer is not text")?;
    body_of(&answer)
}

fn body_of(answer: &str) -> Result<String> {
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer is not HTTP")?;
    let mut lines = head.lines();
    let status = lines.next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        bail!("the answer is `{status}`");
    }
    let chunked = lines.any(|line| {
        let line = line.to_ascii_lowercase();
        line.starts_with("transfer-encoding:") && line.ends_with("chunked")
    });
    if chunked { joined_chunks(body) } else { Ok(body.to_owned()) }
}

fn joined_chunks(body: &str) -> Result<String> {
    let mut joined = String::new();
    let mut rest = body;
    loop {
        let (size, behind) = rest.split_once("\r\n").context("the answer is cut short")?;
        let size = usize::from_str_radix(size.split(';').next().unwrap_or_default().trim(), 16)?;
        if size == 0 {
            return Ok(joined);
        }
        joined.push_str(behind.get(..size).context("the answer is cut short")?);
        rest = behind.get(size + 2..).context("the answer is cut short")?;
    }
}

/// A process of this machine as `/proc` shows it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProcessSample {
    /// User and system time of all its threads, also those that have ended.
    pub cpu_s: f64,
    /// Resident bytes, shared memory included.
    pub resident_bytes: u64,
    /// Bytes it caused to be written to devices; none when `/proc/PID/io` is not readable.
    pub written_bytes: Option<u64>,
}

impl ProcessSample {
    /// The process `pid`.
    pub fn of(pid: u32) -> Result<Self> {
        Self::read(&format!("/proc/{pid}"))
    }

    /// This process.
    pub fn own() -> Result<Self> {
        Self::read("/proc/self")
    }

    fn read(folder: &str) -> Result<Self> {
        let stat = std::fs::read_to_string(format!("{folder}/stat"))?;
        let status = std::fs::read_to_string(format!("{folder}/status"))?;
        let io = std::fs::read_to_string(format!("{folder}/io")).unwrap_or_default();
        let ticks = cpu_ticks(&stat).context("/proc/PID/stat has another form than expected")?;
        Ok(Self {
            cpu_s: ticks as f64 / rustix::param::clock_ticks_per_second() as f64,
            resident_bytes: field(&status, "VmRSS:").unwrap_or(0) * 1024,
            written_bytes: field(&io, "write_bytes:"),
        })
    }
}

/// `utime + stime`, fields 14 and 15. The command in field 2 may hold spaces and brackets, so count from its end.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (_, behind) = stat.rsplit_once(')')?;
    let mut fields = behind.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const METRICS: &str = "# HELP ringmain_syncs_total fdatasync calls\n# TYPE ringmain_syncs_total counter\n\
        ringmain_syncs_total{shard=\"0\"} 3\nringmain_syncs_total{shard=\"1\"} 4\n\
        ringmain_syncs_total_other 100\nringmain_process_cpu_seconds_total 1.25\n\
        ringmain_device_bytes_written_total{shard=\"0\",name=\"a b\"} 8e3 1700000000000\n";

    #[test]
    fn a_metric_is_summed_over_its_labels_and_not_mixed_with_longer_names() {
        let sample = sample_of_metrics(METRICS);
        assert_eq!(sample.syncs, Some(7));
        assert_eq!(sample.cpu_s, Some(1.25));
        assert_eq!(sample.device_bytes_written, Some(8000));
        assert_eq!(sample.resident_bytes, None);
    }

    #[test]
    fn the_difference_of_two_samples_is_only_known_where_both_are() {
        let before = BrokerSample { syncs: Some(10), cpu_s: Some(1.0), ..BrokerSample::default() };
        let after = BrokerSample {
            syncs: Some(30),
            cpu_s: Some(2.5),
            device_bytes_written: Some(5),
            resident_bytes: Some(9),
            ..before
        };
        let since = after.since(&before);
        assert_eq!(since, BrokerSample { syncs: Some(20), cpu_s: Some(1.5), resident_bytes: Some(9), ..since });
        assert_eq!(since.device_bytes_written, None);
    }

    #[test]
    fn bodies_are_read_whole_or_in_chunks_and_refusals_are_errors() {
        assert_eq!(body_of("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi").unwrap(), "hi");
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=1\r\nde\r\n0\r\n\r\n";
        assert_eq!(body_of(chunked).unwrap(), "abcde");
        assert!(body_of("HTTP/1.1 404 Not Found\r\n\r\n").unwrap_err().to_string().contains("404"));
        assert!(body_of("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nab").is_err());
    }

    #[test]
    fn metrics_come_over_http() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.push(byte[0]);
            }
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{METRICS}", METRICS.len()).unwrap();
        });
        let sample = Broker { http: Some(address), pid: None }.sample().unwrap();
        server.join().unwrap();
        assert_eq!(sample.syncs, Some(7));
    }

    #[test]
    fn a_process_shows_its_cpu_time_and_memory() {
        let own = ProcessSample::own().unwrap();
        assert!(own.resident_bytes > 100_000);
        let sample = Broker { http: None, pid: Some(std::process::id()) }.sample().unwrap();
        assert!(sample.cpu_s.unwrap() >= own.cpu_s);
        assert!(cpu_ticks("7 (a) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13").is_some());
    }
}
