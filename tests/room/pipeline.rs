//! The supervised loop: its configuration, and the processes of this machine.

mod local;
mod plan;
mod ray;
mod slurm;
