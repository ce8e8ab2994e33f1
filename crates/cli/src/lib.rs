//! What the commands of the program share: options, output, and how sizes are written.

#![forbid(unsafe_code)]
// They panic when the reader has closed the pipe: `say!` and `say_error!` do not.
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod print;
pub mod units;

use clap::Args;

/// Options of every command.
#[derive(Args, Clone)]
pub struct Common {
    /// Print the result as one JSON value on standard output
    #[arg(long, global = true)]
    pub json: bool,
    /// Print errors only
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// Log more; repeat for debug
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// A failure already described to the user.
pub struct Failed;
