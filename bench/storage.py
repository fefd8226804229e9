#!/usr/bin/env python3
"""Measures the storage engine against the limits of the same machine, in interleaved rounds, and prints a Markdown table.

    cargo build --release && python3 bench/storage.py --rounds 5 --dir /path/on/the/disk > bench/reports/DATE-storage.md

Each figure is a ratio of two measurements of one round. With `--throttle MB_PER_S` (root, cgroup v1 blkio) the device is
slowed down for the lines that say so; without, they are left out.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time

from measure import arguments, ask, serve, span

WARM_UP = ["--warm-up-seconds", "1"]
ONE_BY_TEN = "--topics 1 --partitions 10"
BATCHED = f"{ONE_BY_TEN} --batch 256 --clients 4 --in-flight 2"
CGROUP = "/sys/fs/cgroup/blkio"


class Bench:
    """A broker, and what is asked of it."""

    def __init__(self, options, directory):
        self.options = options
        self.broker, self.address, self.http = serve(options.binary, directory, options.memory)

    def where(self):
        return ["--broker", self.address, "--broker-http", self.http, "--broker-pid", str(self.broker.pid)]

    def produce(self, arguments, seconds=None):
        seconds = str(seconds or self.options.seconds)
        command = ["bench", "produce", *WARM_UP, *arguments.split(), "--seconds", seconds, *self.where()]
        return ask(self.options.binary, command)

    def consume(self, arguments):
        command = ["bench", "consume", *WARM_UP, *arguments.split(), "--seconds", str(self.options.seconds), *self.where()]
        return ask(self.options.binary, command)

    def stop(self):
        self.broker.send_signal(signal.SIGTERM)
        self.broker.wait(120)


class Throttle:
    """Slows the writes of a process to the device under a directory down."""

    def __init__(self, directory, mb_per_s):
        device = os.stat(directory).st_dev
        self.group = tempfile.mkdtemp(prefix="ringmain-", dir=CGROUP)
        limit = f"{os.major(device)}:{os.minor(device)} {mb_per_s * 1_000_000}"
        self.write("blkio.throttle.write_bps_device", limit)

    def write(self, name, text):
        with open(os.path.join(self.group, name), "w") as file:
            file.write(text)

    def take(self, pid):
        self.write("cgroup.procs", str(pid))

    def end(self):
        os.rmdir(self.group)


def beside_catch_up(bench, topic):
    """What a producer sees alone, and beside a consumer that catches up."""
    produce = f"{ONE_BY_TEN} --batch 100 --clients 1"
    alone = bench.produce(produce)
    read = ["bench", "consume", "--mode", "catch-up", "--topic", topic, "--seconds", str(bench.options.seconds + 3)]
    reader = subprocess.Popen([bench.options.binary, *read, *bench.where(), "--json"], stdout=subprocess.DEVNULL)
    try:
        beside = bench.produce(produce)
    finally:
        reader.terminate()
        reader.wait()
    return alone, beside


def fill(bench, topic, gigabytes):
    """A topic with so much on disk: ten files of lines would do as well, but this is quick."""
    subprocess.run([bench.options.binary, "topic", "create", topic, "--partitions", "10", "--broker", bench.address],
                   check=True, stdout=subprocess.DEVNULL)
    lines = subprocess.Popen(["sh", "-c", f"head -c {gigabytes}G /dev/urandom | base64 -w 1023"], stdout=subprocess.PIPE)
    subprocess.run([bench.options.binary, "produce", topic, "-", "--broker", bench.address, "--json"],
                   stdin=lines.stdout, check=True, stdout=subprocess.DEVNULL)
    lines.wait()


def one_round(bench, directory):
    disk = ask(bench.options.binary, ["bench", "disk", "--dir", directory, "--seconds", "1", "--runs", "1"])
    echo = ask(bench.options.binary, ["bench", "echo", "--seconds", "1", "--stream-seconds", "1"])
    batched = bench.produce(BATCHED)
    small = bench.produce(f"{ONE_BY_TEN} --size 100 --batch 1000 --clients 2 --in-flight 2")
    json = bench.produce(f"{BATCHED} --compressibility json")
    single = bench.produce(f"{ONE_BY_TEN} --batch 1 --clients 64 --in-flight 4")
    one = bench.produce("--topics 1 --partitions 1 --batch 1 --clients 1")
    synced = {n: bench.produce(f"--topics 1 --partitions 1 --batch 1 --clients {n} --durability synced") for n in (1, 8, 64)}
    through = {n: bench.consume(f"--mode tail --topics {n} --partitions 10 --batch 100 --clients 1") for n in (1, 1000)}
    catch_up = bench.consume("--mode catch-up --partitions 1 --records 1500000")
    alone, beside = beside_catch_up(bench, "old")
    limit = min(disk["write_fallocated_mb_per_s"], echo["stream_mb_per_s"])
    return {
        "raw write to new and to written blocks, MB/s": (disk["write_fallocated_mb_per_s"], disk["write_mb_per_s"]),
        "raw write and sync of 4 KiB, us": disk["sync_4k_p50_us"],
        "raw read, MB/s": disk["read_mb_per_s"],
        "echo p50, us; stream, MB/s": (echo["p50_us"], echo["stream_mb_per_s"]),
        "1 KiB x 256, 1x10, drained / min(raw write to new blocks, stream)": batched["drained_mb_per_s"] / limit,
        "the same, acked MB/s; drained MB/s": (batched["mb_per_s"], batched["drained_mb_per_s"]),
        "device bytes / payload bytes: 1 KiB x 256": batched["device_bytes_per_payload_byte"],
        "device bytes / payload bytes: 100 B x 1000": small["device_bytes_per_payload_byte"],
        "device bytes / payload bytes: JSON 1 KiB x 256": json["device_bytes_per_payload_byte"],
        "one record at a time, memory: p50 / echo p50": one["p50_us"] / echo["p50_us"],
        "synced, 1 client: p50 / raw write and sync": synced[1]["p50_us"] / disk["sync_4k_p50_us"],
        "synced, records/s: 1, 8, 64 clients": tuple(synced[n]["records_per_s"] for n in (1, 8, 64)),
        "synced, records per sync: 8, 64 clients": tuple(synced[n]["records_per_sync"] for n in (8, 64)),
        "synced, 64 clients / 1 client": synced[64]["records_per_s"] / synced[1]["records_per_s"],
        "broker CPU, ns a record: 1 KiB x 256": batched["broker_cpu_s"] * 1e9 / batched["records"],
        "broker CPU, ns a record: 1 KiB single, 64 clients x 4": single["broker_cpu_s"] * 1e9 / single["records"],
        "1 in 1 out, 1000x10 / 1x10: records/s": through[1000]["records_per_s"] / through[1]["records_per_s"],
        "1 in 1 out, 1000x10 / 1x10: p99 end to end": through[1000]["p99_us"] / through[1]["p99_us"],
        "produce p99 beside a catch-up reader / alone": beside["p99_us"] / alone["p99_us"],
        "the same, us": (beside["p99_us"], alone["p99_us"]),
        "catch-up, one topic: MB/s / raw read": catch_up["mb_per_s"] / disk["read_mb_per_s"],
    }


def throttled_round(bench):
    json = bench.produce(f"{ONE_BY_TEN} --batch 100 --clients 2 --in-flight 2 --compressibility json", 12)
    plain = bench.produce(f"{ONE_BY_TEN} --batch 100 --clients 2 --in-flight 2 --compressibility json --compression none", 12)
    rate = bench.options.throttle
    return {
        f"device at {rate} MB/s, JSON, drained / device: auto": json["drained_mb_per_s"] / rate,
        f"device at {rate} MB/s, JSON, drained / device: none": plain["drained_mb_per_s"] / rate,
        f"device at {rate} MB/s, p99 of acks, us: auto, none": (json["p99_us"], plain["p99_us"]),
    }


def add(table, row):
    for name, value in row.items():
        table.setdefault(name, []).append(value if isinstance(value, tuple) else (value,))


def main():
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--throttle", type=int, metavar="MB_PER_S", help="also measure with a slower device")
    options = parser.parse_args()
    table = {}
    directory = tempfile.mkdtemp(prefix="ringmain-storage-", dir=options.dir)
    try:
        bench = Bench(options, directory)
        try:
            fill(bench, "old", 3)
            for _ in range(options.rounds):
                add(table, one_round(bench, directory))
        finally:
            bench.stop()
        if options.throttle:
            throttle = Throttle(directory, options.throttle)
            bench = Bench(options, os.path.join(directory, "slow"))
            try:
                throttle.take(bench.broker.pid)
                for _ in range(options.rounds):
                    add(table, throttled_round(bench))
            finally:
                bench.stop()
                throttle.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    uname = os.uname()
    print(f"# Storage, measured {time.strftime('%Y-%m-%d')}: {options.rounds} interleaved rounds, median (lowest .. highest)\n")
    print(f"Machine: {os.cpu_count()} CPUs, {uname.sysname} {uname.release}; broker and load on the same CPUs.\n")
    print("| what | figure |\n|---|---|")
    for name, rows in table.items():
        print(f"| {name} | {'; '.join(span(column) for column in zip(*rows))} |")


if __name__ == "__main__":
    main()
