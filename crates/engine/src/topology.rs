//! What the machine looks like: cores and memory nodes, from sysfs.

use std::fs;
use std::path::Path;

/// One memory node and the cores next to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The kernel's number.
    pub number: u32,
    /// Cores of the node.
    pub cpus: Vec<u32>,
}

/// The nodes of this machine; one node with every core where the kernel tells of none.
pub fn nodes() -> Vec<Node> {
    let found = read_nodes(Path::new("/sys/devices/system/node"));
    if found.is_empty() { vec![Node { number: 0, cpus: (0..cores() as u32).collect() }] } else { found }
}

/// Cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Octets of memory that can be had without swapping, as the kernel estimates it.
pub fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib << 10)
}

fn read_nodes(dir: &Path) -> Vec<Node> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut nodes: Vec<Node> = entries
        .flatten()
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let cpus = parse_list(&fs::read_to_string(entry.path().join("cpulist")).ok()?)?;
            Some(Node { number, cpus })
        })
        .collect();
    nodes.sort_by_key(|n| n.number);
    nodes
}

/// Parses the kernel's list form: `0-3,8,10-11`.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    let mut out = Vec::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        out.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse_list("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse_list("\n"), Some(vec![]));
        assert_eq!(parse_list("x"), None);
    }

    #[test]
    fn a_simulated_machine_with_two_nodes_is_read() {
        let dir = tempfile::tempdir().unwrap();
        for (node, cpus) in [("node1", "4-7"), ("node0", "0-3"), ("power", "")] {
            fs::create_dir(dir.path().join(node)).unwrap();
            fs::write(dir.path().join(node).join("cpulist"), cpus).unwrap();
        }
        let nodes = read_nodes(dir.path());
        assert_eq!(nodes.len(), 2);
        assert_eq!(nodes[1], Node { number: 1, cpus: vec![4, 5, 6, 7] });
    }

    #[test]
    fn this_machine_has_at_least_one_core_in_one_node() {
        assert!(!nodes().is_empty() && nodes().iter().any(|n| !n.cpus.is_empty()));
    }
}
