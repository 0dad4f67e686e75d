//! Killed at every file operation of a checkpoint, then started again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use oclaw::advantage::{self, Estimator, Method};
use oclaw::table::Format;

use crate::forge::{STAGES, finished, write};
use crate::harness::{fixture_models as models, oclaw};

/// Stands before the C library: kills the process ahead of its n-th operation that
/// changes something below a folder.
const SHIM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static void at_path(const char *path) {
    static int count;
    const char *root = getenv("KILL_BELOW"), *at = getenv("KILL_AT");
    if (root && at && !strncmp(path, root, strlen(root))
        && __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST) == atoi(at))
        for (kill(getpid(), SIGKILL);;) pause();
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
ssize_t write(int fd, const void *bytes, size_t n) { REAL(write); at_fd(fd); return real(fd, bytes, n); }
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
    compiler.args(["-shared", "-fPIC", "-O0", "-o"]).args([&library, &source]).arg("-ldl");
    assert!(compiler.status().unwrap().success());
    library
}

fn train(out: &Path, input: &Path) -> assert_cmd::Command {
    let mut command = oclaw();
    command.args(["train", "--lr", "1e-3", "--keep", "1", "--schedule", "cosine"]);
    command.args(["--total-steps", "4", "--model"]).arg(models().join("tiny-qwen3"));
    command.arg("--out").args([out, input]);
    command
}

/// What a run leaves: the newest policy's step, weights, optimiser and ledger.
fn left(out: &Path) -> (PathBuf, Vec<Vec<u8>>) {
    let files = ["model.safetensors", "oclaw/optimizer.safetensors", "oclaw/ledger.parquet"];
    let latest = out.join("latest");
    let bytes = files.iter().map(|file| fs::read(latest.join(file)).unwrap());
    (fs::read_link(&latest).unwrap(), bytes.collect())
}

fn copy(from: &Path, to: &Path) {
    let mut command = Command::new("cp");
    assert!(command.arg("-a").args([from, to]).status().unwrap().success());
}

#[test]
fn killed_at_any_file_operation_a_run_goes_on_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let library = shim(&root);
    let method = Method::new(Estimator::Combine);
    let table = |name: &str, number| {
        let turn = advantage::note(finished("s", number), false, &method);
        write(&root.join(name), Format::Parquet, &STAGES, &[turn])
    };
    let (first, second) = (table("1.parquet", 1), table("2.parquet", 2));
    let (base, whole) = (root.join("base"), root.join("whole"));
    train(&base, &first).assert().success();
    copy(&base, &whole);
    train(&whole, &second).assert().success();
    let (before, wanted) = (left(&base), left(&whole));
    let (mut old, mut new) = (0, 0);
    for at in 1..400 {
        let out = root.join(format!("killed-{at}"));
        copy(&base, &out);
        let mut command = train(&out, &second);
        command.env("LD_PRELOAD", &library).env("KILL_BELOW", &out);
        let run = command.env("KILL_AT", at.to_string()).output().unwrap();
        if run.status.success() {
            break;
        }
        assert_eq!(run.status.code(), None, "at {at}: {}", String::from_utf8_lossy(&run.stderr));
        // At every moment the newest policy is one or the other, and whole.
        match left(&out) {
            found if found == before => old += 1,
            found if found == wanted => new += 1,
            (step, _) => panic!("at {at}: `latest` is {}, and broken", step.display()),
        }
        train(&out, &second).assert().success();
        assert!(left(&out) == wanted, "at {at}: started again, it came to other bits");
        fs::remove_dir_all(&out).unwrap();
    }
    assert!(old > 10 && new > 0, "killed {old} times before `latest` moved and {new} after");
}
