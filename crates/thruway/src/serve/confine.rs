//! Confinement by Landlock (Linux 6.2 and later): the kernel keeps the daemon to what it was told to serve.
//!
//! Paths from peers are resolved beneath their export in any case. This is the second wall, for the day on which the first
//! has a hole: whatever the daemon is talked into, it opens, changes and runs nothing else on this machine. It stands from
//! before the first thread is started, since a thread's children have its walls and its siblings do not.

use super::ServeArgs;
use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError,
    path_beneath_rules,
};
use std::path::{Path, PathBuf};
use thruway_block::export::Spec;
use thruway_block::layer::LayerFile;
use thruway_block::source::Source;
use thruway_server::Address;

/// Truncation is among the rights from here on. Older kernels go without.
const RIGHTS: ABI = ABI::V3;

/// What every program needs: libraries and what configures them, this machine's hardware and processes, names and times.
const READ: &[&str] = &[
    "/usr",
    "/lib",
    "/lib64",
    "/opt",
    "/nix/store",
    "/gnu/store",
    "/proc",
    "/sys",
    "/run/udev",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/libibverbs.d",
    "/etc/rdma",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/gai.conf",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/localtime",
];

/// Devices without a disk behind them; memory that outlives the daemon; RDMA devices.
const WRITE: &[&str] =
    &["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/shm", "/dev/infiniband"];

/// What the daemon may open.
#[derive(Default)]
struct Allowed {
    read: Vec<PathBuf>,
    write: Vec<PathBuf>,
    /// Directories of sockets, which are made and removed there.
    sockets: Vec<PathBuf>,
}

impl Allowed {
    /// A file that is read again, and may have been replaced by another of its name; or a link, by what it leads to.
    fn replaced(&mut self, path: &Path) {
        self.read.extend(directory(path));
        self.read.extend(path.canonicalize().ok().as_deref().and_then(directory));
    }

    fn disk(&mut self, source: &Source, read_only: bool) {
        match source {
            Source::Path(path) if read_only => self.read.push(path.clone()),
            Source::Path(path) => self.write.push(path.clone()),
            Source::Memory(_) => {}
            Source::Stripe { members, .. } => members.iter().for_each(|member| self.disk(member, read_only)),
        }
    }

    fn export(&mut self, spec: &Spec) {
        let overlaid = spec.layers.iter().any(|layer| layer.config.role().hides_changes);
        self.disk(&spec.source, spec.read_only || overlaid);
        for file in spec.layers.iter().filter_map(|layer| layer.config.files()) {
            match file {
                LayerFile::Directory(directory) => self.write.push(directory),
                LayerFile::Append(file) => {
                    // The file, and not whatever is beside it: so it has to be there. If it cannot be, opening it says why.
                    let _ = std::fs::OpenOptions::new().append(true).create(true).open(&file);
                    self.write.push(file);
                }
            }
        }
    }

    fn of(args: &ServeArgs) -> Allowed {
        let mut allowed = Allowed::default();
        allowed.read.extend(READ.iter().map(PathBuf::from));
        allowed.write.extend(WRITE.iter().map(PathBuf::from));
        // Records of copies that are written to no export, and of those into file systems that know no files without names.
        allowed.write.push(crate::directories::temporary());
        for export in &args.export {
            let to = if export.read_only { &mut allowed.read } else { &mut allowed.write };
            // What is in it, so that an automount is there before the wall is.
            to.push(export.dir.join("."));
        }
        args.authorized_keys.iter().chain(&args.config).for_each(|path| allowed.replaced(path));
        allowed.read.extend(args.block.secret_files().cloned());
        allowed.read.extend(std::env::current_exe());
        allowed.write.extend(args.state().filter(|_| !args.block.block.is_empty()));
        args.block.block.iter().for_each(|spec| allowed.export(spec));
        for address in &args.block.nbd {
            if let Address::Unix(path) = address {
                allowed.sockets.extend(directory(path));
            }
        }
        allowed.sockets.extend(args.control.as_deref().and_then(directory));
        allowed
    }
}

fn directory(path: &Path) -> Option<PathBuf> {
    match path.parent()? {
        here if here.as_os_str().is_empty() => Some(".".into()),
        parent => Some(parent.into()),
    }
}

/// Confines this process, if the kernel can.
///
/// # Errors
/// A sentence, if it can and something else keeps it from being done.
pub(super) fn confine(args: &ServeArgs) -> Result<(), String> {
    let run: BitFlags<AccessFs> = AccessFs::Execute.into();
    let (read, all) = (AccessFs::ReadFile | AccessFs::ReadDir, AccessFs::from_all(RIGHTS) & !run);
    let sockets = AccessFs::MakeSock | AccessFs::RemoveFile;
    // Nothing is run.
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(RIGHTS))
        .and_then(Ruleset::create);
    let ruleset = match ruleset {
        Ok(ruleset) => ruleset,
        Err(error @ (RulesetError::CreateRuleset(_) | RulesetError::HandleAccesses(_))) => {
            tracing::warn!(%error, "not confined: this kernel has no Landlock of Linux 6.2 or later");
            return Ok(());
        }
        Err(error) => return Err(format!("confining the daemon: {error}")),
    };
    let allowed = Allowed::of(args);
    // A missing path cannot be opened now; the service that needs it reports that.
    let confined = ruleset
        .add_rules(path_beneath_rules(&allowed.read, read))
        .and_then(|ruleset| ruleset.add_rules(path_beneath_rules(&allowed.write, all)))
        .and_then(|ruleset| ruleset.add_rules(path_beneath_rules(&allowed.sockets, sockets)))
        .and_then(|ruleset| ruleset.restrict_self());
    match confined {
        Ok(_) => {
            tracing::info!("confined by Landlock to what is served");
            Ok(())
        }
        Err(error) => Err(format!("confining the daemon (--no-landlock leaves that out): {error}")),
    }
}
