//! Lets the binary and the tests find libtorch where it was found at build
//! time, so that nothing has to be exported to run them.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=scripts/build.rs");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    if env::var_os("CARGO_FEATURE_TORCH").is_none() {
        return;
    }
    let Some(libtorch) = env::var_os("LIBTORCH") else {
        return;
    };
    // The link's target, so that a binary outlives a moved `.libtorch`.
    match Path::new(&libtorch).canonicalize() {
        Ok(folder) => println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.join("lib").display()),
        Err(error) => println!(
            "cargo:warning=LIBTORCH {} cannot be read ({error}): run scripts/setup-libtorch.sh",
            Path::new(&libtorch).display()
        ),
    }
}
