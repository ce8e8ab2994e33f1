//! The `thruway` program.

#![forbid(unsafe_code)]
// They panic on a closed pipe: `say!` and `say_error!` do not.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod clean;
mod cp;
mod demo;
mod directories;
mod endpoint;
mod keys;
mod lines;
mod log;
mod ls;
mod output;
mod relay;
mod remote;
mod run;
mod serve;
mod ssh;
mod tables;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use std::io::Write;
use std::process::ExitCode;
use thruway_cli::{Common, Failed, say_error};

/// Copies directory trees, serves disks, shares directories by NFS, and speeds up socket programs, over RDMA, iWARP, shared memory
/// and TCP.
#[derive(Parser)]
#[command(name = "thruway", version, about, max_term_width = 100, propagate_version = true)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Copy files and directory trees between hosts
    Cp(Box<cp::CpArgs>),
    /// List or remove leftovers of interrupted copies
    Clean(clean::CleanArgs),
    /// List an export or a directory
    Ls(ls::LsArgs),
    /// Run the daemon
    Serve(Box<serve::ServeArgs>),
    /// Run a program whose TCP connections go on through shared memory, and to other hosts by RDMA
    Run(Box<run::RunArgs>),
    /// Carry connections of such programs to other hosts
    Relay(relay::RelayArgs),
    /// Make a key pair, by which daemons and relays know this user
    Keygen(keys::KeygenArgs),
    /// Run a self-contained demonstration on this machine
    Demo(demo::DemoArgs),
    /// Measure the fabric (latency, bandwidth, rping), disks and file servers
    #[cfg(feature = "bench")]
    Bench(thruway_bench::BenchArgs),
}

/// Parses the command line; ends the program if it makes no sense.
fn parse() -> Cli {
    Cli::try_parse().unwrap_or_else(|mut error| {
        let is_information = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
        let is_copy = std::env::args_os().nth(1).is_some_and(|command| command == "cp");
        let arguments = std::env::args_os().skip(2).take_while(|argument| argument != "--");
        let hidden = arguments.filter_map(|argument| argument.into_string().ok()).find(|one| cp::hides_help(one));
        if let Some(argument) = hidden.filter(|_| is_information && is_copy) {
            let why =
                format!("'{argument}' contains an option that prints help or the version; leave it out, sizes are always printed with units\n");
            Cli::command().error(ErrorKind::ArgumentConflict, why).exit();
        }
        if let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg)
            && std::env::args_os().nth(1).is_some_and(|command| command == "cp")
            && let Some(hint) = cp::hint(argument)
        {
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
        }
        if is_information {
            let printed = error.print().and_then(|()| std::io::stdout().flush());
            let code = printed.map_or_else(|error| Failed::output(&error) as i32, |()| 0);
            std::process::exit(code);
        }
        error.exit()
    })
}

#[global_allocator]
static ALLOCATOR: thruway_engine::allocator::ExitOnFailure = thruway_engine::allocator::ExitOnFailure;

/// Smallest limit on the stack. With 128 KiB every command starts; the rest is a reserve.
const STACK_MIN: u64 = 256 << 10;

fn main() -> ExitCode {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Stack).current;
    if let Some(limit) = limit.filter(|limit| *limit < STACK_MIN) {
        let (limit, least) = (limit >> 10, STACK_MIN >> 10);
        say_error!("thruway: the limit of {limit} KiB on the stack is too low; raise it with ulimit -s {least}");
        return ExitCode::FAILURE;
    }
    thruway_engine::limits::share_heap_under_limit();
    run()
}

/// Runs the command. It has a frame of its own, so that a small stack is enough for `main`.
#[inline(never)]
fn run() -> ExitCode {
    directories::init();
    let cli = parse();
    // What nothing else notes the time of.
    let has_times = matches!(&cli.command, Command::Relay(args) if args.is_in_background());
    // The first -v of a copy prints items; it does not raise the log level.
    let is_copy = matches!(&cli.command, Command::Cp(_));
    log::start(cli.common.verbose.saturating_sub(is_copy.into()), has_times, is_copy);
    let result = match cli.command {
        Command::Cp(args) => cp::run(&args, &cli.common),
        Command::Clean(args) => clean::run(&args, &cli.common),
        Command::Ls(args) => ls::run(&args, &cli.common),
        Command::Serve(args) => serve::run(&args, &cli.common),
        Command::Run(args) => run::run(&args, &cli.common),
        Command::Relay(args) => relay::run(&args, &cli.common),
        Command::Keygen(args) => keys::run(&args, &cli.common),
        Command::Demo(args) => demo::run(&args, &cli.common),
        #[cfg(feature = "bench")]
        Command::Bench(args) => thruway_bench::run(&args, &cli.common),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => ExitCode::from(failed as u8),
    }
}
