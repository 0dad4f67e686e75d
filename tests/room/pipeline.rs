//! The supervised loop: its configuration, and the processes of this machine.

mod account;
mod children;
mod local;
mod plan;
mod ray;
mod slurm;
mod supervisor;
