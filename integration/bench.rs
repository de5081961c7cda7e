//! `make bench`: Slidegate beside a bare tonic service, in alternating rounds of one run, so that both meet the same
//! noise. Prints medians, the spread, and the ratio of each pair of rounds.
//!
//! Options after `--`: `--rounds N` (5), `--seconds N` of each round (3), a word that a scenario's name must contain,
//! and `--peer NAME=HOST:PORT`, repeatable, for other services that serve domain `bench` with the same rules.

#![allow(clippy::print_stdout, reason = "a table is what it is for")]

use std::{
    env, fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use slidegate::bench::{self, Report};

struct Scenario {
    name: &'static str,
    descriptor: &'static str,
    keys: u64,
}

const SCENARIOS: [Scenario; 3] = [
    Scenario {
        name: "hot key, allowed",
        descriptor: "hot=key",
        keys: 1,
    },
    Scenario {
        name: "hot key, denied",
        descriptor: "denied=key",
        keys: 1,
    },
    Scenario {
        name: "100,000 keys",
        descriptor: "many=",
        keys: 100_000,
    },
];

const RULES: &str = "domain: bench
descriptors:
- {key: hot, rate_limit: {unit: hour, requests_per_unit: 4000000000}}
- {key: denied, rate_limit: {unit: hour, requests_per_unit: 1}}
- {key: many, rate_limit: {unit: hour, requests_per_unit: 1000000}}
";

/// A service under load.
struct Service {
    name: String,
    address: String,
    /// Of a process whose time can be read.
    child: Option<Child>,
}

/// One round of one service.
#[derive(Clone, Copy)]
struct Round {
    per_second: f64,
    /// CPU seconds of the server per 100,000 answers.
    cpu: f64,
    p50: f64,
    p99: f64,
}

struct Options {
    rounds: usize,
    seconds: u64,
    filter: String,
    peers: Vec<(String, String)>,
}

fn main() {
    let options = Options::read();
    println!("{}", machine());
    let directory = tempfile::tempdir().expect("a directory");
    let mut services = vec![bare(), slidegate(directory.path().to_owned())];
    services.extend(options.peers.iter().map(|(name, address)| Service {
        name: name.clone(),
        address: address.clone(),
        child: None,
    }));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    println!(
        "{} rounds of {} s each, in turn, after one that is not counted; 4 connections with 32 requests under way; \
         median (least to most)\n",
        options.rounds, options.seconds
    );
    println!(
        "{:<18} {:<12} {:>28} {:>26} {:>12} {:>12}  CPU to bare",
        "scenario", "service", "answers/s", "CPU s per 100,000", "p50 ms", "p99 ms"
    );
    for scenario in SCENARIOS
        .iter()
        .filter(|scenario| scenario.name.contains(&options.filter))
    {
        let mut rounds: Vec<Vec<Round>> = services.iter().map(|_| Vec::new()).collect();
        for number in 0..=options.rounds {
            for (service, rounds) in services.iter().zip(&mut rounds) {
                let round = runtime.block_on(service.round(scenario, options.seconds));
                if number > 0 {
                    rounds.push(round);
                }
            }
        }
        for (service, of_service) in services.iter().zip(&rounds) {
            let ratios = of_service
                .iter()
                .zip(&rounds[0])
                .map(|(one, bare)| one.cpu / bare.cpu);
            let of = |value: fn(&Round) -> f64| of_service.iter().map(value).collect::<Vec<_>>();
            let cpu = if service.child.is_some() {
                spread(of(|round| round.cpu), 3)
            } else {
                "-".to_owned()
            };
            let ratio = if service.child.is_some() {
                spread(ratios.collect(), 2)
            } else {
                "-".to_owned()
            };
            println!(
                "{:<18} {:<12} {:>28} {:>26} {:>12.2} {:>12.2}  {ratio}",
                scenario.name,
                service.name,
                spread(of(|round| round.per_second), 0),
                cpu,
                median(of(|round| round.p50)),
                median(of(|round| round.p99)),
            );
        }
    }
}

// === impl Service ===

impl Service {
    async fn round(&self, scenario: &Scenario, seconds: u64) -> Round {
        let options = bench::Options {
            address: self.address.clone(),
            domain: "bench".to_owned(),
            descriptors: vec![scenario.descriptor.to_owned()],
            keys: scenario.keys,
            hits: 1,
            connections: 4,
            in_flight: 32,
            duration: Duration::from_secs(seconds),
            requests: None,
            warm_up: Duration::ZERO,
            rate: None,
            json: false,
        };
        let before = self.cpu();
        let report: Report = bench::load(options)
            .await
            .unwrap_or_else(|error| panic!("{}: {error:#}", self.name));
        let used = self.cpu() - before;
        assert!(
            report.grpc_errors.is_empty() && report.transport_errors == 0,
            "{}: {report}",
            self.name
        );
        Round {
            per_second: report.per_second,
            cpu: used.as_secs_f64() / report.answers as f64 * 100_000.0,
            p50: report.p50 as f64 / 1_000.0,
            p99: report.p99 as f64 / 1_000.0,
        }
    }

    /// CPU time of all threads so far, in nanoseconds from the scheduler's own books.
    fn cpu(&self) -> Duration {
        let Some(child) = &self.child else {
            return Duration::ZERO;
        };
        let tasks =
            fs::read_dir(format!("/proc/{}/task", child.id())).expect("the server's threads");
        let nanoseconds = tasks.flatten().map(|task| {
            let books = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            books
                .split_whitespace()
                .next()
                .map_or(0, |first| first.parse().unwrap_or(0))
        });
        Duration::from_nanos(nanoseconds.sum())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn bare() -> Service {
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_slidegate"))
        .with_file_name("examples")
        .join("bare");
    assert!(binary.exists(), "no {}: run `make bench`", binary.display());
    let port = free_port();
    start(
        "bare tonic",
        port,
        Command::new(binary).arg(port.to_string()),
    )
}

fn slidegate(root: PathBuf) -> Service {
    fs::create_dir(root.join("config")).expect("a directory");
    fs::write(root.join("config/bench.yaml"), RULES).expect("a file");
    let port = free_port();
    let mut command = Command::new(env!("CARGO_BIN_EXE_slidegate"));
    command
        .arg("serve")
        .env("RUNTIME_ROOT", &root)
        .env("RUNTIME_WATCH_ROOT", "false")
        .env("BACKEND_TYPE", "memory")
        .env("GRPC_HOST", "127.0.0.1")
        .env("GRPC_PORT", port.to_string())
        .env("HOST", "127.0.0.1")
        .env("PORT", free_port().to_string())
        .env("DEBUG_HOST", "127.0.0.1")
        .env("DEBUG_PORT", free_port().to_string())
        .env("LOG_LEVEL", "error");
    start("slidegate", port, &mut command)
}

fn start(name: &str, port: u16, command: &mut Command) -> Service {
    let child = command
        .stdin(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("can't start {name}: {error}"));
    let service = Service {
        name: name.to_owned(),
        address: format!("127.0.0.1:{port}"),
        child: Some(child),
    };
    for _ in 0..500 {
        if std::net::TcpStream::connect(("127.0.0.1", port)).is_ok() {
            return service;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{name} does not listen on port {port}");
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("its address").port()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn spread(values: Vec<f64>, digits: usize) -> String {
    let (least, most) = values
        .iter()
        .fold((f64::MAX, f64::MIN), |(least, most), value| {
            (least.min(*value), most.max(*value))
        });
    format!(
        "{:.digits$} ({least:.digits$} to {most:.digits$})",
        median(values)
    )
}

fn machine() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown CPU", |name| {
            name.trim_start_matches([' ', '\t', ':'])
        });
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{model}, {cores} cores, Linux {}", kernel.trim())
}

// === impl Options ===

impl Options {
    fn read() -> Self {
        let mut options = Self {
            rounds: 5,
            seconds: 3,
            filter: String::new(),
            peers: Vec::new(),
        };
        let mut words = env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || {
                words
                    .next()
                    .unwrap_or_else(|| panic!("{word} needs a value"))
            };
            match word.as_str() {
                // cargo adds it.
                "--bench" => {}
                "--rounds" => options.rounds = value().parse().expect("a number of rounds"),
                "--seconds" => options.seconds = value().parse().expect("a number of seconds"),
                "--peer" => {
                    let peer = value();
                    let (name, address) = peer.split_once('=').expect("NAME=HOST:PORT");
                    options.peers.push((name.to_owned(), address.to_owned()));
                }
                filter => options.filter = filter.to_owned(),
            }
        }
        options
    }
}
