//! The program: an allocator, the process's arguments, environment and streams, and an exit code. Everything else
//! is in the library.

use std::{
    env,
    io::{self, IsTerminal},
    process::ExitCode,
};

use slidegate::{
    cli::{self, Streams},
    settings::Process,
};

// The log in memory is millions of small rings that come and go with clients, on as many threads as there are cores.
// jemalloc keeps an arena per few threads and gives pages back, so such a process neither contends nor stays at the
// size of its worst hour; glibc's allocator does both, and musl's is slow beside either. Elsewhere the system's
// allocator is as good a choice, or the only one.
#[cfg(all(target_os = "linux", not(target_env = "msvc")))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let (mut out, mut err) = (io::stdout(), io::stderr());
    let mut streams = Streams {
        err_is_terminal: err.is_terminal(),
        out: &mut out,
        err: &mut err,
    };
    cli::run(env::args_os(), &Process, &mut streams).into()
}
