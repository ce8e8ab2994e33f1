//! What the commands of the program share: options, output, and how sizes are written.

#![forbid(unsafe_code)]
// They panic when the reader has closed the pipe: `say!` and `say_error!` do not.
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod print;
pub mod units;

use clap::Args;
use std::fmt::Display;

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

/// A failure already described to the user; the exit status of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// What was to be done has failed, or part of it: exit status 1.
    Operation = 1,
    /// The options or the configuration make no sense: exit status 2, as for those that cannot be parsed.
    Usage = 2,
}

impl Failed {
    /// Prints why a command failed.
    pub fn operation(command: &str, why: impl Display) -> Failed {
        Failed::Operation.say(command, why)
    }

    /// Prints what is wrong with a command's options.
    pub fn usage(command: &str, why: impl Display) -> Failed {
        Failed::Usage.say(command, why)
    }

    /// Prints why standard output cannot be written; nothing if its reader has closed the pipe.
    pub fn output(error: &std::io::Error) -> Failed {
        if error.kind() != std::io::ErrorKind::BrokenPipe {
            say_error!("thruway: standard output: {error}");
        }
        Failed::Operation
    }

    fn say(self, command: &str, why: impl Display) -> Failed {
        say_error!("thruway {command}: {why}");
        self
    }
}
