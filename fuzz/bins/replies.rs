#![cfg_attr(fuzzing, no_main)]

#[path = "../targets/replies.rs"]
mod target;

include!("../main.rs");
