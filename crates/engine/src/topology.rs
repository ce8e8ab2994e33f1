//! What the machine looks like: cores and memory nodes, from sysfs; threads and memory near them.

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

/// The nodes on which this process may run, with the cores it may use of them.
pub fn usable_nodes() -> Vec<Node> {
    // SAFETY: an all-zero set is valid, and the kernel writes no more than its size.
    let mut allowed: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let rc = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut allowed) };
    let mut usable = nodes();
    if rc != 0 {
        return usable;
    }
    for node in &mut usable {
        // SAFETY: CPU_ISSET looks only inside the set, for any number below its size.
        node.cpus.retain(|cpu| *cpu < CPUS_MAX && unsafe { libc::CPU_ISSET(*cpu as usize, &allowed) });
    }
    usable.retain(|node| !node.cpus.is_empty());
    usable
}

/// Cores that the kernel's fixed-size set can name.
const CPUS_MAX: u32 = libc::CPU_SETSIZE as u32;

/// Keeps the calling thread, and those it starts, on these cores; does nothing if there are none.
/// Best effort: where the system refuses, work is done elsewhere, and slower.
pub fn bind_thread(cpus: &[u32]) {
    if cpus.is_empty() {
        return;
    }
    // SAFETY: an all-zero set is valid.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in cpus.iter().filter(|cpu| **cpu < CPUS_MAX) {
        // SAFETY: the number is inside the set.
        unsafe { libc::CPU_SET(*cpu as usize, &mut set) };
    }
    // SAFETY: the set is valid and only read.
    if unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) } != 0 {
        tracing::debug!(error = %std::io::Error::last_os_error(), ?cpus, "binding a thread");
    }
}

/// Asks for the pages of a buffer that are not there yet to come from this node.
pub fn bind_memory(buffer: &thruway_memory::Buffer, node: u32) {
    const PREFERRED: libc::c_int = 1;
    let mut mask = [0u64; 16];
    let Some(word) = mask.get_mut(node as usize / 64) else { return };
    *word = 1 << (node % 64);
    // SAFETY: sets a policy for a mapping that `buffer` keeps; changes no content.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            buffer.as_ptr(),
            buffer.len(),
            PREFERRED,
            mask.as_ptr(),
            mask.len() * 64,
            0 as libc::c_uint,
        )
    };
    if rc != 0 {
        tracing::debug!(error = %std::io::Error::last_os_error(), node, "binding memory");
    }
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
    fn a_thread_and_a_buffer_can_be_bound_to_a_node_of_this_machine() {
        let node = usable_nodes().remove(0);
        let buffer = thruway_memory::Buffer::new(1 << 20).unwrap();
        bind_memory(&buffer, node.number);
        let cpus = node.cpus.clone();
        let bound = std::thread::spawn(move || {
            bind_thread(&node.cpus);
            usable_nodes()
        });
        assert_eq!(bound.join().unwrap()[0].cpus, cpus);
    }

    #[test]
    fn this_machine_has_at_least_one_core_in_one_node() {
        assert!(!nodes().is_empty() && nodes().iter().any(|n| !n.cpus.is_empty()));
    }
}
