// How a target is run: by libFuzzer under `cargo fuzz`; else once over each of the
// files that are named, which shows again what a fuzzer has found.

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| target::run(bytes));

#[cfg(not(fuzzing))]
fn main() -> std::io::Result<()> {
    for path in std::env::args_os().skip(1) {
        target::run(&std::fs::read(path)?);
    }
    Ok(())
}
