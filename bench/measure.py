#!/usr/bin/env python3
"""Measures Ringmain against the limits of the same machine, in interleaved rounds, and prints a Markdown report.

    cargo build --release && python3 bench/measure.py --rounds 5 --dir /path/on/the/disk > bench/reports/DATE.md

Each round runs every line once, so that a noisy neighbour hits all of them alike; the report gives median and range.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

PRODUCE = ["bench", "produce", "--warm-up-seconds", "1"]
# name, arguments of `bench produce`
LOADS = [
    ("1x10, 1 KiB x 256, memory", "--topics 1 --partitions 10 --batch 256 --clients 4 --in-flight 2"),
    ("1x10, 1 KiB x 100, memory", "--topics 1 --partitions 10 --batch 100 --clients 4 --in-flight 2"),
    ("1000x10, 1 KiB x 100, memory", "--topics 1000 --partitions 10 --batch 100 --clients 4 --in-flight 2"),
    ("1x10, 1 KiB x 100, memory, closed loop", "--topics 1 --partitions 10 --batch 100 --clients 1"),
    ("one client, 1 KiB x 1, memory", "--topics 1 --partitions 1 --batch 1 --clients 1"),
    ("1 client, 1 KiB x 1, synced", "--topics 1 --partitions 10 --batch 1 --clients 1 --durability synced"),
    ("8 clients, 1 KiB x 1, synced", "--topics 1 --partitions 10 --batch 1 --clients 8 --durability synced"),
    ("64 clients, 1 KiB x 1, synced", "--topics 1 --partitions 10 --batch 1 --clients 64 --durability synced"),
    ("1x10, JSON-like 1 KiB x 256, memory", "--topics 1 --partitions 10 --batch 256 --clients 4 --in-flight 2 "
     "--compressibility json"),
]
COLUMNS = ["records_per_s", "mb_per_s", "drained_mb_per_s", "p50_us", "p99_us", "p999_us", "device_bytes_per_payload_byte",
           "broker_cpu_s_per_gb", "records_per_sync", "broker_rss_bytes", "refused_requests"]


def ask(binary, arguments):
    """Runs a command with --json and gives its last line, decoded."""
    done = subprocess.run([binary, *arguments, "--json"], capture_output=True, text=True, timeout=300)
    lines = done.stdout.strip().splitlines()
    if not lines:
        sys.exit(f"{' '.join(arguments)} gave nothing: {done.stderr}")
    return json.loads(lines[-1])


def serve(binary, directory, memory):
    """Starts a broker on ports of its own; gives the process, its broker address and its HTTP address."""
    arguments = ["serve", "--data", os.path.join(directory, "data"), "--memory", memory, "--direct-port-base", "0"]
    for flag in ["--listen", "--http", "--master-listen", "--master-http"]:
        arguments += [flag, "127.0.0.1:0"]
    broker = subprocess.Popen([binary, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    words = dict(word.split("=", 1) for word in broker.stdout.readline().split() if "=" in word)
    return broker, words["broker"], words["http"]


def span(values):
    """`median (lowest .. highest)` of what was measured."""
    values = [value for value in values if value is not None]
    if not values:
        return "-"
    form = "{:.2f}" if max(values) < 100 else "{:.0f}"
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} .. {high})"


def arguments(what):
    """The flags that all measurements have."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--binary", default="target/release/ringmain")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="a directory on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--memory", default="1GiB")
    return parser


def main():
    options = arguments(__doc__.splitlines()[0]).parse_args()
    directory = tempfile.mkdtemp(prefix="ringmain-measure-", dir=options.dir)
    broker, address, http = serve(options.binary, directory, options.memory)
    disks, echoes, loads = [], [], {name: [] for name, _ in LOADS}
    try:
        for _ in range(options.rounds):
            disks.append(ask(options.binary, ["bench", "disk", "--dir", directory, "--seconds", "1", "--runs", "1"]))
            echoes.append(ask(options.binary, ["bench", "echo", "--seconds", "2", "--stream-seconds", "2"]))
            for name, arguments in LOADS:
                where = ["--broker", address, "--broker-http", http, "--broker-pid", str(broker.pid)]
                run = [*PRODUCE, *arguments.split(), "--seconds", str(options.seconds), *where]
                loads[name].append(ask(options.binary, run))
                time.sleep(0.5)
    finally:
        broker.send_signal(signal.SIGTERM)
        broker.wait(60)
        shutil.rmtree(directory, ignore_errors=True)
    report(options, disks, echoes, loads)


def report(options, disks, echoes, loads):
    print(f"# Measured {time.strftime('%Y-%m-%d')}, {options.rounds} interleaved rounds, median (lowest .. highest)\n")
    uname = os.uname()
    print(f"Machine: {os.cpu_count()} CPUs, {uname.sysname} {uname.release}; broker and load on the same CPUs.\n")
    print("| limit | value |\n|---|---|")
    for key in ["write_mb_per_s", "write_fallocated_mb_per_s", "read_mb_per_s", "sync_4k_p50_us", "sync_64k_p50_us"]:
        print(f"| disk {key} | {span([disk.get(key) for disk in disks])} |")
    for key in ["p50_us", "p99_us", "stream_mb_per_s"]:
        print(f"| echo {key} | {span([echo.get(key) for echo in echoes])} |")
    print("\n| load | " + " | ".join(COLUMNS) + " |\n|---" * 1 + "|---" * len(COLUMNS) + "|")
    for name, runs in loads.items():
        print(f"| {name} | " + " | ".join(span([run.get(key) for run in runs]) for key in COLUMNS) + " |")
    wrong = sum(run[key] for runs in loads.values() for run in runs for key in ["lost", "duplicated", "reordered"])
    print(f"\nLost, duplicated or reordered in all runs: {wrong}.\n")
    ratios(disks, echoes, loads)


def ratios(disks, echoes, loads):
    """The figures that carry over to other machines: each of one round."""

    def each(ratio):
        return span([ratio(*row) for row in zip(disks, echoes, *loads.values())])

    names = list(loads)

    def rate(row, name, key="records_per_s"):
        return row[2 + names.index(name)][key]

    rows = [
        ("1x10 payload (drained) / smaller of raw write and loopback stream", lambda *r: rate(r, names[0], "drained_mb_per_s")
         / min(r[0]["write_fallocated_mb_per_s"], r[1]["stream_mb_per_s"])),
        ("1000x10 / 1x10 records per second", lambda *r: rate(r, names[2]) / rate(r, names[1])),
        ("one client p50 / echo p50", lambda *r: rate(r, names[4], "p50_us") / r[1]["p50_us"]),
        ("synced p50, one client / raw 4 KiB write + sync p50", lambda *r: rate(r, names[5], "p50_us") / r[0]["sync_4k_p50_us"]),
        ("synced, 8 clients / 1 client", lambda *r: rate(r, names[6]) / rate(r, names[5])),
        ("synced, 64 clients / 1 client", lambda *r: rate(r, names[7]) / rate(r, names[5])),
    ]
    print("| ratio | value |\n|---|---|")
    for name, ratio in rows:
        print(f"| {name} | {each(ratio)} |")


if __name__ == "__main__":
    main()
