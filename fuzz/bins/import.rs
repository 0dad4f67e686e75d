#![cfg_attr(fuzzing, no_main)]

#[path = "../targets/import.rs"]
mod target;

include!("../main.rs");
