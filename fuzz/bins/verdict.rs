#![cfg_attr(fuzzing, no_main)]

#[path = "../targets/verdict.rs"]
mod target;

include!("../main.rs");
