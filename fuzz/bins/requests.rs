#![cfg_attr(fuzzing, no_main)]

#[path = "../targets/requests.rs"]
mod target;

include!("../main.rs");
