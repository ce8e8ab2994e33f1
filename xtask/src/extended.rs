//! The library for extended sockets, as programs in C want it.

use std::fs;
use std::path::Path;

/// Builds it, and copies it, its header, its pkg-config file and its manual pages beneath `prefix`.
pub(crate) fn install(prefix: &str) -> Result<(), String> {
    super::run("the library", "cargo", &["build", "--release", "-p", "thruway-extended"])?;
    let prefix = std::path::absolute(prefix).map_err(|error| format!("{prefix}: {error}"))?;
    let from = Path::new("crates/extended");
    let version = env!("CARGO_PKG_VERSION");
    let directory = |name: &str| {
        let path = prefix.join(name);
        fs::create_dir_all(&path).map(|()| path.clone()).map_err(|error| format!("{}: {error}", path.display()))
    };
    let copy = |file: &Path, to: &Path| {
        let name = file.file_name().expect("a file");
        fs::copy(file, to.join(name)).map(drop).map_err(|error| format!("{}: {error}", file.display()))
    };
    let libraries = directory("lib")?;
    let real = libraries.join(format!("libthruway_extended.so.{version}"));
    // Beside the old one, which programs may have mapped.
    let new = libraries.join(".libthruway_extended.so.new");
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let built = Path::new(&target).join("release/libthruway_extended.so");
    fs::copy(&built, &new).map_err(|error| format!("{}: {error}", built.display()))?;
    fs::rename(&new, &real).map_err(|error| format!("{}: {error}", real.display()))?;
    for link in ["libthruway_extended.so.0", "libthruway_extended.so"] {
        let link = libraries.join(link);
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(real.file_name().expect("a file"), &link)
            .map_err(|error| format!("{}: {error}", link.display()))?;
    }
    copy(&from.join("include/thruway/extended.h"), &directory("include/thruway")?)?;
    let template = fs::read_to_string(from.join("thruway-extended.pc.in")).map_err(|error| error.to_string())?;
    let text = template.replace("@PREFIX@", &prefix.display().to_string()).replace("@VERSION@", version);
    let to = directory("lib/pkgconfig")?.join("thruway-extended.pc");
    fs::write(&to, text).map_err(|error| format!("{}: {error}", to.display()))?;
    for page in fs::read_dir(from.join("man")).map_err(|error| error.to_string())? {
        let page = page.map_err(|error| error.to_string())?.path();
        let section = page.extension().and_then(|section| section.to_str()).unwrap_or("3").to_owned();
        copy(&page, &directory(&format!("share/man/man{section}"))?)?;
    }
    println!(
        "installed beneath {}; for pkg-config: PKG_CONFIG_PATH={}",
        prefix.display(),
        to.parent().expect("a directory").display()
    );
    Ok(())
}
