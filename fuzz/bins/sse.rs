#![cfg_attr(fuzzing, no_main)]

#[path = "../targets/sse.rs"]
mod target;

include!("../main.rs");
