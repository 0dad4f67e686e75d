//! The GPUs of this machine.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

/// Counts the devices: those that a person says, else those that the system has.
pub(crate) fn present(told: Option<u32>) -> BTreeSet<u32> {
    if let Some(count) = told {
        return (0..count).collect();
    }
    let entries = fs::read_dir("/dev").into_iter().flatten().filter_map(Result::ok);
    let nodes: BTreeSet<u32> = entries
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("nvidia")?.parse().ok())
        .collect();
    if !nodes.is_empty() {
        return nodes;
    }
    // In some containers the nodes have other names.
    let listed = Command::new("nvidia-smi").arg("-L").output();
    let text = listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let lines = text.unwrap_or_default();
    lines
        .lines()
        .filter_map(|line| line.strip_prefix("GPU ")?.split(':').next()?.parse().ok())
        .collect()
}
