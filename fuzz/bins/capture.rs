#![cfg_attr(fuzzing, no_main)]

#[path = "../targets/capture.rs"]
mod target;

include!("../main.rs");
