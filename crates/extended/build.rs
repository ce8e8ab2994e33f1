//! The C library's name, by which programs that are linked with it find it: it changes when programs would have to be built again.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libthruway_extended.so.0");
    println!("cargo::rerun-if-changed=build.rs");
}
