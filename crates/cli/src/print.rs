//! Output that survives a reader who has gone.

/// Prints a line on standard output. Unlike `println!` it ends the program in order when the reader has closed the pipe
/// (`| head`), and reports a write that fails (a full disk). It runs no destructors: a command with children or
/// temporary files calls `print::try_say`.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::print::say(format_args!($($text)*)) };
}

/// Writes a line to standard error. A failure is ignored: there is no place to report it.
#[macro_export]
macro_rules! say_error {
    ($($text:tt)*) => { $crate::print::say_error(format_args!($($text)*)) };
}

/// As [`say_error!`].
pub fn say_error(text: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// As [`say!`].
pub fn say(text: std::fmt::Arguments<'_>) {
    if let Err(error) = try_say(text) {
        std::process::exit(crate::Failed::output(&error) as i32);
    }
}

/// Prints a line on standard output, for commands that clean up after a failure: [`Failed::output`](crate::Failed::output)
/// reports the error.
///
/// # Errors
/// If the line cannot be written.
pub fn try_say(text: std::fmt::Arguments<'_>) -> std::io::Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    out.write_fmt(text).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush())
}
