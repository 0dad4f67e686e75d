"""Measures `oclaw serve` beside nginx (as a bare reverse proxy) and FastAPI + httpx, in
front of the same fake engine, all in one run. Prints one JSON line per figure.

    serve.py OCLAW PROGRAM [PEER_PYTHON]

PROGRAM is the bench target `serve`. A peer that is not there is left out, which is said.
"""

import json
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from machine import facts

HERE = pathlib.Path(__file__).resolve().parents[2]
ROUNDS = 3
SECONDS = 3
CONNECTIONS = 64
STREAMS = 1000
NGINX = """
worker_processes auto;
daemon off;
error_log stderr crit;
pid {folder}/nginx.pid;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream engine {{ server {engine}; keepalive 1024; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    keepalive_requests 1000000;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(port):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"nothing listens on {port}")


def memory(pid, key):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"no {key} of {pid}")


class Bench:
    def __init__(self, oclaw, program, peer, folder):
        self.oclaw, self.program, self.peer, self.folder = oclaw, program, peer, folder
        self.running, self.urls = [], {}

    def start(self, command, **more):
        process = subprocess.Popen(command, text=True, **more)
        self.running.append(process)
        return process

    def open(self):
        engine = self.start([self.program, "engine"], stdout=subprocess.PIPE).stdout.readline().strip()
        self.urls["engine"] = engine
        nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/sbin")
        if nginx:
            port = free_port()
            settings = self.folder / "nginx.conf"
            settings.write_text(NGINX.format(folder=self.folder, engine=engine.removeprefix("http://"), port=port))
            self.start([nginx, "-p", str(self.folder), "-c", str(settings)])
            wait_for(port)
            self.urls["nginx"] = f"http://127.0.0.1:{port}"
        else:
            print("serve: NOT MEASURED: nginx (not installed)", file=sys.stderr)
        if self.peer:
            port = free_port()
            self.start([self.peer, str(HERE / "benches/peers/proxy_fastapi.py"), engine, str(port)])
            wait_for(port)
            self.urls["fastapi"] = f"http://127.0.0.1:{port}"
        self.serve(engine)

    def serve(self, engine):
        """Starts `oclaw serve` with its defaults: capture to disk, journal synced as it ships."""
        command = [self.oclaw, "serve", "--engine", engine, "--listen", "127.0.0.1:0", "--spool", str(self.folder / "turns")]
        self.captor = self.start(command, stderr=subprocess.PIPE)
        line = self.captor.stderr.readline()
        self.urls["oclaw"] = line.split()[1].removesuffix("/v1")

    def run(self, *words):
        out = subprocess.run([self.program, *map(str, words)], capture_output=True, text=True, check=True)
        return json.loads(out.stdout)

    def loads(self, names, connections, seconds):
        """Takes turns, so that a busy moment of the machine hits all alike."""
        found = {name: [] for name in names}
        for _ in range(ROUNDS):
            for name in names:
                found[name].append(self.run("load", self.urls[name], connections, seconds))
        broken = {name: sum(run["broken_connections"] for run in runs) for name, runs in found.items()}
        assert not any(broken.values()), f"connections broke: {broken}"
        middle = lambda runs, key: statistics.median(run[key] for run in runs)
        return {name: {key: middle(runs, key) for key in ("per_second", "p50_ms", "p99_ms")} for name, runs in found.items()}

    def streams(self, name):
        """Returns the gaps of many streams at once, and what they added to oclaw's memory."""
        before, most, over = memory(self.captor.pid, "VmRSS"), 0, threading.Event()

        def look():
            nonlocal most
            while not over.wait(0.1):
                most = max(most, memory(self.captor.pid, "VmRSS"))

        watcher = threading.Thread(target=look)
        watcher.start()
        found = self.run("streams", self.urls[name], STREAMS)
        over.set()
        watcher.join()
        assert not found["broken"], f"{name}: {found['broken']} streams broke"
        return {**found, "before_mb": before, "added_mb": max(most - before, 0)}

    def kept(self):
        """Ends oclaw and returns its last words, which count what it recorded."""
        self.captor.terminate()
        words = self.captor.stderr.read()
        assert self.captor.wait(120) == 0, words
        # A proxy that captures nothing is quick.
        lost = [word for word in ("not captured", "not for training") if word in words]
        assert not lost, words
        return words.strip()

    def close(self):
        for process in self.running:
            process.terminate()
        for process in self.running:
            process.wait()


def say(figure, **found):
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}
    print(json.dumps({"figure": f"serve.{figure}", **rounded}), flush=True)


def measure(bench):
    print(json.dumps({"machine": facts()}), flush=True)
    names = list(bench.urls)
    # First the streams: their memory is that of a proxy that has just begun.
    gaps = {name: bench.streams(name) for name in names if name not in ("engine", "fastapi")}
    gaps["engine"] = bench.streams("engine")
    say("stream_gap_p99_ms", streams=STREAMS, **{name: run["gap_p99_ms"] for name, run in gaps.items()})
    say("stream_gap_p50_ms", streams=STREAMS, **{name: run["gap_p50_ms"] for name, run in gaps.items()})
    say("stream_memory_mb", streams=STREAMS, added=gaps["oclaw"]["added_mb"], peak=memory(bench.captor.pid, "VmHWM"))
    bench.loads(names, CONNECTIONS, 0.5)
    found = bench.loads(names, CONNECTIONS, SECONDS)
    for key in ("per_second", "p50_ms", "p99_ms"):
        say(f"requests_{key}", connections=CONNECTIONS, **{name: run[key] for name, run in found.items()})
    rate = {name: run["per_second"] for name, run in found.items()}
    say("requests_ratio", connections=CONNECTIONS, **{f"to_{peer}": rate["oclaw"] / rate[peer] for peer in rate if peer != "oclaw"})
    alone = bench.loads([name for name in names if name != "fastapi"], 1, 2)
    say("one_connection_p50_ms", **{name: run["p50_ms"] for name, run in alone.items()})
    if "nginx" in alone:
        say("one_connection_added_ms", over_nginx=alone["oclaw"]["p50_ms"] - alone["nginx"]["p50_ms"],
            over_engine=alone["oclaw"]["p50_ms"] - alone["engine"]["p50_ms"])
    say("peak_memory_mb", oclaw=memory(bench.captor.pid, "VmHWM"))


def main():
    oclaw, program, *peer = sys.argv[1:]
    # On the disk itself: a folder in memory would capture to no disk.
    (HERE / "target/bench").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HERE / "target/bench") as folder:
        bench = Bench(oclaw, program, peer[0] if peer else None, pathlib.Path(folder))
        try:
            bench.open()
            measure(bench)
            say("recorded", words=bench.kept())
        finally:
            bench.close()


if __name__ == "__main__":
    main()
