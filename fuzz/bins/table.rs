#![cfg_attr(fuzzing, no_main)]

#[path = "../targets/table.rs"]
mod target;

include!("../main.rs");
