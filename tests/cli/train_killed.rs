//! Killed at every file operation of a checkpoint, then started again.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread::{self, JoinHandle};

use oclaw::advantage::{self, Estimator, Method};
use oclaw::table::Format;
use oclaw::train::{Ledger, Options, Rates, Schedule, Shape, Trainer};
use oclaw::trajectory::Turn;

use crate::forge::{STAGES, finished, write};
use crate::harness::{fixture_models as models, oclaw};
use crate::room::train::options;

/// Stands before the C library: ahead of each operation that changes something below a
/// folder, and of each line on standard error, it tells what it is about and waits for
/// leave. What lies on the disk meanwhile is what a kill at that moment leaves.
const SHIM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void end_with_the_test(void) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
}
static void ask(const char *what, size_t length) {
    if (!length) return;
    char leave = 0;
    struct sockaddr_un test = { .sun_family = AF_UNIX };
    pthread_mutex_lock(&one_at_a_time);
    strncpy(test.sun_path, getenv("WATCH_AT"), sizeof test.sun_path - 1);
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!connect(s, (struct sockaddr *)&test, sizeof test)) {
        send(s, what, length, MSG_NOSIGNAL);
        shutdown(s, SHUT_WR);
        recv(s, &leave, 1, 0);
    }
    if (leave != 'g') for (kill(getpid(), SIGKILL);;) pause();
    close(s);
    pthread_mutex_unlock(&one_at_a_time);
}
static void at_path(const char *path) {
    const char *root = getenv("WATCH_BELOW");
    if (root && !strncmp(path, root, strlen(root))) ask(path, strlen(path));
}
static void at_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length > 0) { path[length] = 0; at_path(path); }
}
static void at_place(int fd, const char *path) {
    if (path[0] == '/' || fd == AT_FDCWD) at_path(path); else at_fd(fd);
}
#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define MODE(last) va_list rest; va_start(rest, last); int mode = va_arg(rest, int); va_end(rest)
#define WRITES(flags) ((flags) & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR))
int open(const char *path, int flags, ...) {
    REAL(open); MODE(flags); if (WRITES(flags)) at_path(path); return real(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    REAL(open64); MODE(flags); if (WRITES(flags)) at_path(path); return real(path, flags, mode);
}
int openat(int fd, const char *path, int flags, ...) {
    REAL(openat); MODE(flags); if (WRITES(flags)) at_place(fd, path); return real(fd, path, flags, mode);
}
int openat64(int fd, const char *path, int flags, ...) {
    REAL(openat64); MODE(flags); if (WRITES(flags)) at_place(fd, path); return real(fd, path, flags, mode);
}
ssize_t write(int fd, const void *bytes, size_t n) {
    REAL(write); if (fd == 2) ask(bytes, n); else at_fd(fd); return real(fd, bytes, n);
}
ssize_t writev(int fd, const struct iovec *parts, int n) { REAL(writev); at_fd(fd); return real(fd, parts, n); }
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t n, unsigned flags) {
    REAL(copy_file_range); at_fd(out); return real(in, from, out, to, n, flags);
}
int fsync(int fd) { REAL(fsync); at_fd(fd); return real(fd); }
int fdatasync(int fd) { REAL(fdatasync); at_fd(fd); return real(fd); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); at_fd(fd); return real(fd, n); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); at_path(path); return real(path, mode); }
int rmdir(const char *path) { REAL(rmdir); at_path(path); return real(path); }
int unlink(const char *path) { REAL(unlink); at_path(path); return real(path); }
int unlinkat(int fd, const char *path, int flags) { REAL(unlinkat); at_place(fd, path); return real(fd, path, flags); }
int rename(const char *from, const char *to) { REAL(rename); at_path(from); return real(from, to); }
int symlink(const char *to, const char *path) { REAL(symlink); at_path(path); return real(to, path); }
"#;

fn shim(folder: &Path) -> PathBuf {
    let (source, library) = (folder.join("shim.c"), folder.join("shim.so"));
    fs::write(&source, SHIM).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O0", "-o"]).args([&library, &source]);
    compiler.args(["-ldl", "-lpthread"]);
    assert!(compiler.status().unwrap().success());
    library
}

/// A run that stops at every operation. It asks over a connection of its own each time:
/// what ends there ends for both, whatever copies of it a program that another test is
/// about to start holds for a moment. (Named pipes have no such end.)
struct Watched {
    door: UnixListener,
    asking: Option<UnixStream>,
    run: JoinHandle<Output>,
}

impl Watched {
    fn start(root: &Path, library: &Path, mut command: assert_cmd::Command, out: &Path) -> Self {
        let at = root.join("watch");
        let _ = fs::remove_file(&at);
        let door = UnixListener::bind(&at).unwrap();
        command.env("LD_PRELOAD", library).env("WATCH_BELOW", out).env("WATCH_AT", &at);
        let run = thread::spawn(move || {
            let output = command.output().unwrap();
            // It says nothing, and so that it has ended.
            UnixStream::connect(at).unwrap();
            output
        });
        Self { door, asking: None, run }
    }

    /// Waits until the run stops, and returns at what; nothing, if it has ended.
    fn stop(&mut self) -> Option<String> {
        let mut asking = self.door.accept().unwrap().0;
        let mut what = Vec::new();
        asking.read_to_end(&mut what).unwrap();
        self.asking = Some(asking);
        (!what.is_empty()).then(|| String::from_utf8_lossy(&what).into_owned())
    }

    fn answer(&mut self, leave: &[u8]) {
        // A thread that still talks while its program ends does not wait for it.
        let _ = self.asking.take().unwrap().write_all(leave);
    }

    fn go_on(&mut self) {
        self.answer(b"g");
    }

    /// Kills it where it stands.
    fn kill(mut self) {
        self.answer(b"k");
        assert_eq!(self.stop(), None);
        assert_eq!(self.run.join().unwrap().status.signal(), Some(9));
    }
}

fn command(out: &Path, input: &Path) -> assert_cmd::Command {
    let mut command = oclaw();
    command.args(["train", "-vv", "--lr", "1e-3", "--keep", "1", "--mini-batches", "2"]);
    command.args(["--estimator", "combine"]);
    command.args(["--schedule", "cosine", "--total-steps", "4", "--ema", "0.9"]);
    command.arg("--model").arg(models().join("tiny-qwen3")).arg("--out").args([out, input]);
    command
}

/// Starts again in this process, which is quicker than another.
fn start_again(out: &Path, turns: &[Turn]) {
    let options = Options {
        rates: Rates { learning_rate: 1e-3, ..Rates::default() },
        schedule: Schedule { warmup: 0, shape: Shape::Cosine, total: 4 },
        average: Some(0.9),
        parts: 2,
        keep: 1,
        ..options("tiny-qwen3", out)
    };
    let mut trainer = Trainer::open(options).unwrap();
    let samples = trainer.collect(&mut turns.to_vec().into(), None);
    trainer.train(samples).unwrap();
}

/// What a run leaves: the newest policy's step, weights, optimiser and ledger.
fn left(out: &Path) -> (PathBuf, Vec<Vec<u8>>) {
    let files = [
        "model.safetensors",
        "ema/model.safetensors",
        "oclaw/optimizer.safetensors",
        "oclaw/ledger.parquet",
    ];
    let latest = out.join("latest");
    let bytes = files.iter().map(|file| fs::read(latest.join(file)).unwrap());
    (fs::read_link(&latest).unwrap(), bytes.collect())
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => copy(&from, &to),
            kind if kind.is_symlink() => symlink(fs::read_link(from).unwrap(), to).unwrap(),
            _ => drop(fs::copy(from, to).unwrap()),
        }
    }
}

/// A folder with a policy, and what a second step makes of it.
struct Scene {
    _folder: tempfile::TempDir,
    root: PathBuf,
    library: PathBuf,
    table: PathBuf,
    turns: Vec<Turn>,
    base: PathBuf,
    before: (PathBuf, Vec<Vec<u8>>),
    after: (PathBuf, Vec<Vec<u8>>),
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let method = Method::new(Estimator::Combine);
        let noted = |number| advantage::note(finished("s", number), false, &method);
        let table =
            |name: &str, turns: &[Turn]| write(&root.join(name), Format::Parquet, &STAGES, turns);
        let turns = vec![noted(2), noted(3), noted(4)];
        let (base, whole) = (root.join("base"), root.join("whole"));
        command(&base, &table("1.parquet", &[noted(1)])).assert().success();
        copy(&base, &whole);
        start_again(&whole, &turns);
        Self {
            library: shim(&root),
            table: table("2.parquet", &turns),
            before: left(&base),
            after: left(&whole),
            _folder: folder,
            root,
            turns,
            base,
        }
    }

    fn watch(&self, out: &Path) -> Watched {
        copy(&self.base, out);
        Watched::start(&self.root, &self.library, command(out, &self.table), out)
    }

    /// Starts again where a run was killed. Each turn must be trained once.
    fn check(&self, out: &Path, at: &str) {
        start_again(out, &self.turns);
        assert!(left(out) == self.after, "{at}: started again, it came to other bits");
        let ledger = Ledger::read(&out.join("latest/oclaw/ledger.parquet")).unwrap();
        let step = |turn: &Turn| ledger.entry(&turn.turn_id).map(|entry| entry.step);
        assert!(self.turns.iter().all(|turn| step(turn) == Some(2)), "{at}");
        assert_eq!(ledger.trained(), 4, "{at}");
    }
}

#[test]
fn killed_at_any_file_operation_a_run_goes_on_to_the_same_bits() {
    let scene = Scene::new();
    let out = scene.root.join("watched");
    let mut run = scene.watch(&out);
    let (mut old, mut new, mut amid) = (0, 0, 0);
    while let Some(at) = run.stop() {
        let killed = scene.root.join("killed");
        copy(&out, &killed);
        // At every moment the newest policy is one or the other, and whole.
        match left(&killed) {
            found if found == scene.before => old += 1,
            found if found == scene.after => new += 1,
            (step, _) => panic!("{at}: `latest` is {}, and broken", step.display()),
        }
        amid += u32::from(at.contains("have moved"));
        scene.check(&killed, &at);
        fs::remove_dir_all(&killed).unwrap();
        run.go_on();
    }
    assert!(run.run.join().unwrap().status.success());
    assert!(left(&out) == scene.after);
    assert!(old > 50 && new > 5, "{old} times before `latest` moved, {new} after");
    // After the update of the first part, and after that of the second.
    assert_eq!(amid, 2);
}

/// Likewise with a real signal: amid the parts of a batch, amid a file, and between the
/// two renames.
#[test]
fn a_killed_run_trains_each_turn_once() {
    let scene = Scene::new();
    for moment in ["have moved", "optimizer.safetensors", ".tmp-latest"] {
        let out = scene.root.join(moment);
        let mut run = scene.watch(&out);
        while !run.stop().expect("it ended too early").contains(moment) {
            run.go_on();
        }
        run.kill();
        assert!(left(&out) == scene.before, "{moment}");
        scene.check(&out, moment);
    }
}
