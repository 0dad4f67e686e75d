"""The soak: see scripts/soak.sh."""

import argparse
import collections
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from people import Person

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = """
[engines.policy]
model = "{model}"
url = "http://{engine}"
env = {{ OMP_NUM_THREADS = "1" }}
[engine]
dtype = "f32"
[serve]
listen = "{front}"
shard-age = "500ms"
[judge]
rules = ""
poll = "200ms"
[hint]
from-feedback = true
poll = "200ms"
[teacher-lp]
poll = "200ms"
no-cache = true
env = {{ OMP_NUM_THREADS = "1" }}
[advantage]
poll = "200ms"
[train]
estimator = "combine"
batch-turns = 64
max-wait = "2s"
lr = 1e-4
poll = "200ms"
max-staleness = 1000
env = {{ OMP_NUM_THREADS = "1" }}
[sync-weights]
poll = "200ms"
[loop]
run = "run"
restart-wait = "500ms"
restart-longest = "4s"
grace = "60s"
"""
CHILDREN = ["engine-policy", "serve", "judge", "hint", "teacher-lp", "advantage", "train", "sync-weights"]
FAULTS = ["kill"] * 6 + ["supervisor"] * 2 + ["update"] * 2 + ["hang"] + ["disk"]


def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


class Soak:
    def __init__(self, seed):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="oclaw-soak-"))
        self.program = str(pathlib.Path(os.environ["OCLAW_BIN"]).resolve())
        self.random = random.Random(seed)
        self.done = collections.Counter()
        self.unbalanced = []
        self.front, engine = address(), address()
        model = ROOT / "fixtures/models/tiny-qwen3"
        (self.folder / "oclaw.toml").write_text(CONFIG.format(model=model, front=self.front, engine=engine))
        self.disk = self.small_disk()
        self.loop = None

    def small_disk(self):
        """A disk that can be filled, under the judge's shards."""
        judged = self.folder / "run/judged"
        judged.mkdir(parents=True)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", judged], stderr=subprocess.DEVNULL)
        if mounted.returncode != 0:
            print("skipped: no full disks, for nothing can be mounted here", flush=True)
            return None
        return judged

    def start(self):
        talk = open(self.folder / "talk.log", "ab")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OCLAW_")}
        self.loop = subprocess.Popen(
            [self.program, "loop", "oclaw.toml"], cwd=self.folder, stdout=talk, stderr=talk,
            stdin=subprocess.DEVNULL, env=environment,
        )

    def status(self):
        """How the loop is; nothing where it, or what has become of the turns, is not told."""
        output = subprocess.run(
            [self.program, "loop", "--status", "run"], cwd=self.folder, capture_output=True, text=True
        )
        told = json.loads(output.stdout) if output.returncode == 0 else None
        return told if told and told["account"] else None

    def pid(self, name):
        try:
            kept = json.loads((self.folder / "run/state/status.json").read_text())
            record = json.loads((self.folder / f"run/state/{name}.process.json").read_text())
        except (OSError, ValueError):
            return None
        pids = {child["name"]: child["pid"] for child in kept["children"]}
        # Only what the loop has just seen, and what is still the process it started.
        same = pids.get(name) == record["pid"]
        try:
            fields = pathlib.Path(f"/proc/{record['pid']}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return None
        return record["pid"] if same and int(fields[19]) == record["started"] else None

    def send(self, name, number):
        pid = self.pid(name)
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def fault(self):
        kind = self.random.choice(FAULTS)
        if kind == "kill":
            name = self.random.choice(CHILDREN)
            self.done[f"{name} killed"] += self.send(name, signal.SIGKILL)
        elif kind == "supervisor":
            self.loop.kill()
            self.loop.wait()
            self.done["supervisor killed"] += 1
            time.sleep(self.random.uniform(0, 2))
            self.start()
        elif kind == "update":
            # A policy that has just come is being pushed now.
            before = self.latest()
            end = time.monotonic() + 20
            while self.latest() == before and time.monotonic() < end:
                time.sleep(0.01)
            if self.latest() != before:
                time.sleep(self.random.uniform(0.1, 0.4))
                self.done["engine killed during an update"] += self.send("engine-policy", signal.SIGKILL)
        elif kind == "hang":
            name = self.random.choice(["judge", "train", "teacher-lp"])
            if self.send(name, signal.SIGSTOP):
                self.done[f"{name} hung"] += 1
                time.sleep(self.random.uniform(1, 4))
                self.send(name, signal.SIGCONT)
        elif kind == "disk" and self.disk:
            self.fill()
            self.done["disk full"] += 1
            time.sleep(self.random.uniform(1, 5))
            (self.disk / ".filler").unlink()

    def balance(self):
        """Holds that every turn is accounted for, whatever has just been done."""
        status = self.status()
        self.done["accounts taken" if status else "accounts not told"] += 1
        if status and not balanced(status["account"]):
            self.unbalanced.append(status["account"])

    def fill(self):
        # Unbuffered: what is held back would be written, and fail, at the close.
        with open(self.disk / ".filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(b"\0" * 65536)
            except OSError:
                pass

    def latest(self):
        try:
            return os.readlink(self.folder / "run/policy/latest")
        except OSError:
            return None

    def settle(self, patience=300):
        """Waits until every turn is trained or refused, and the newest policy served: as
        long as fewer turns wait, or another policy is served, than `patience` seconds ago."""
        end, fewest, seen = time.monotonic() + patience, float("inf"), set()
        status = self.status()
        while time.monotonic() < end:
            status = self.status() or status
            if status:
                served = set(status["policy"]["served"].values())
                current = served == {str(status["policy"]["published"])}
                pending = sum(status["account"]["pending"].values())
                if current and pending == 0:
                    return status, True
                if pending < fewest or served - seen:
                    end, fewest = time.monotonic() + patience, min(fewest, pending)
                    seen |= served
            time.sleep(0.5)
        return status, False

    def close(self, keep):
        if self.loop and self.loop.poll() is None:
            self.loop.kill()
        for name in CHILDREN:
            self.send(name, signal.SIGKILL)
        if self.disk:
            subprocess.run(["umount", "-l", self.disk])
        if keep:
            print(f"run folder: {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


def balanced(account):
    """Captured = trained + refused + pending."""
    told = account["trained"] + sum(account["refused"].values()) + sum(account["pending"].values())
    return account["captured"] == told and not account["lost"] and not account["unreadable"]


def table(soak, people, status):
    seconds = sorted(second for person in people for second in person.seconds)
    at = lambda share: seconds[min(int(len(seconds) * share), len(seconds) - 1)] if seconds else 0.0
    print("\n== done to it")
    for what, count in sorted(soak.done.items()):
        print(f"{what:34} {count:6}")
    print("\n== chats")
    print(f"{'answered':34} {len(seconds):6}")
    print(f"{'requests sent again':34} {sum(person.retried for person in people):6}")
    print(f"{'failed for good':34} {sum(person.failed for person in people):6}")
    print(f"{'seconds, half within':34} {at(0.5):6.2f}\n{'seconds, 99 of 100 within':34} {at(0.99):6.2f}")
    print("\n== the loop")
    print(f"{'policies made':34} {status['policy']['published'] or 0:6}")
    for child in status["children"]:
        print(f"{child['name'] + ' started again':34} {child['restarts']:6}")


def verdict(soak, people, status, settled, code):
    account, answered = status["account"], sum(len(person.seconds) for person in people)
    refused, pending = sum(account["refused"].values()), sum(account["pending"].values())
    captured, opened = account["captured"], account["open"] or 0
    print(f"\ncaptured {captured} = trained {account['trained']} + refused {refused} {account['refused']}"
          f" + pending {pending} {account['pending']}; lost {account['lost']}; open {opened}")
    faults = []
    if not balanced(account):
        faults.append("a turn is unaccounted for")
    if soak.unbalanced:
        faults.append(f"a turn was unaccounted for meanwhile: {soak.unbalanced[0]}")
    if not soak.done["accounts taken"]:
        faults.append("nobody told of the turns meanwhile")
    if captured + opened < answered:
        faults.append(f"{answered} turns were answered, {captured + opened} captured")
    if any(person.failed for person in people):
        faults.append("chats failed: " + "; ".join(odd for person in people for odd in person.odd[:3]))
    if not status["policy"]["published"]:
        faults.append("no policy was made")
    if not settled:
        faults.append(f"it did not settle: {status['policy']}")
    if code != 0:
        faults.append(f"the drained loop ended with {code}")
    for fault in faults:
        print(f"FAILED: {fault}")
    return not faults


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("minutes", nargs="?", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    soak, good = Soak(options.seed), False
    people = [Person(soak.front, f"person{number}") for number in range(3)]
    try:
        soak.start()
        [person.start() for person in people]
        end = time.monotonic() + options.minutes * 60
        while time.monotonic() < end:
            time.sleep(soak.random.uniform(2, 8))
            soak.fault()
            soak.balance()
        [person.over.set() for person in people]
        [person.join(PATIENCE_AT_THE_END) for person in people]
        status, settled = soak.settle()
        if status is None:
            raise SystemExit("FAILED: the loop does not tell how it is")
        soak.loop.terminate()
        code = soak.loop.wait(PATIENCE_AT_THE_END)
        table(soak, people, status)
        good = verdict(soak, people, status, settled, code)
    finally:
        soak.close(options.keep or not good)
    if not good:
        print((soak.folder / "talk.log").read_text()[-3000:])
        return 1
    return 0


PATIENCE_AT_THE_END = 240

if __name__ == "__main__":
    sys.exit(main())
