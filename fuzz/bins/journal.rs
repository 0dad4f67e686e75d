#![cfg_attr(fuzzing, no_main)]

#[path = "../targets/journal.rs"]
mod target;

include!("../main.rs");
