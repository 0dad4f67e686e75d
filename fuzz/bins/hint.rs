#![cfg_attr(fuzzing, no_main)]

#[path = "../targets/hint.rs"]
mod target;

include!("../main.rs");
