//! The composition root: everything is built here from the settings, put together, and taken down again in order.
//! What talks to whom is read in this file.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    task::JoinSet,
};

use crate::{
    clock::Clock,
    edge::{
        answer::{self, Answerer},
        connection::{self, ConnectionStats, Drain},
        grpc,
        health::Health,
        http, http1,
        json::Translator,
        listener::{self, Listener, listen_tcp},
    },
    limiter::{self, Limiter},
    metrics::Metrics,
    rules::{
        compile,
        reload::{self, Rules, Source},
    },
    settings::{Address, GrpcListener, Host, RulesSource, Settings},
    store::{
        Store,
        denials::Denials,
        memory::{self, MemoryLog},
    },
};

/// Serves until a signal says to stop, and returns when everything is taken down. Fails if it can't start.
pub async fn run(settings: Settings) -> Result<()> {
    let metrics = Metrics::new(settings.metrics.detailed_max_series as u64);
    let rules = Rules::new(
        source(&settings.rules.source),
        compile::Options {
            merge_domains: settings.rules.merge_domains,
        },
    );
    // Good or bad: without rules every call is refused, and a good file repairs it.
    rules.load();
    let watching = reload::watch(rules.clone());
    metrics.register({
        let rules = rules.clone();
        move |page| rules.export(page)
    });

    // The store is a stack: whatever is in front of the log answers some checks without it.
    let clock = Clock::system();
    let log = Arc::new(MemoryLog::new(
        memory::Config::new(settings.memory.max_bytes),
        clock.clone(),
    ));
    metrics.register({
        let log = Arc::clone(&log);
        move |page| log.stats().export(page)
    });
    let reclaiming = tokio::spawn(Arc::clone(&log).reclaim_forever());
    let served = match settings.limiting.denials_max_bytes {
        0 => serve(log, settings, rules, metrics).await,
        bytes => {
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            let denials = Arc::new(Denials::new(log, bytes, clock));
            metrics.register({
                let denials = Arc::clone(&denials);
                move |page| denials.stats().export(page)
            });
            rules.on_change({
                let denials = Arc::clone(&denials);
                move || denials.flush()
            });
            serve(denials, settings, rules, metrics).await
        }
    };
    reclaiming.abort();
    drop(watching);
    served
}

/// What answers messages: the limiter over `store`, by `rules`.
pub fn answerer<S: Store>(
    store: S,
    settings: &Settings,
    rules: Rules,
    metrics: Arc<Metrics>,
) -> Arc<Answerer<S>> {
    let limiter = Limiter::new(store, limiting(settings), metrics);
    Answerer::new(limiter, rules, answering(settings))
}

/// Opens every port over `store`, and closes them in order when a signal comes.
async fn serve<S: Store>(
    store: S,
    settings: Settings,
    rules: Rules,
    metrics: Arc<Metrics>,
) -> Result<()> {
    let mut signals = Signals::new().context("can't listen for signals")?;
    let answerer = answerer(store, &settings, rules.clone(), Arc::clone(&metrics));
    let (health, health_calls) =
        Health::new(rules.clone(), settings.rules.healthy_with_a_domain_only);
    health.report().await;
    rules.on_change({
        let (health, runtime) = (health.clone(), tokio::runtime::Handle::current());
        move || {
            let health = health.clone();
            runtime.spawn(async move { health.report().await });
        }
    });

    let drain = Drain::new();
    let listeners = &settings.listeners;
    let max_connections = listeners.max_connections.unwrap_or(usize::MAX);
    let stats = Arc::new(ConnectionStats::default());
    metrics.register({
        let stats = Arc::clone(&stats);
        move |page| stats.export(page)
    });

    // The ports: all are bound before the first one answers.
    let grpc_listener = bind_grpc(&listeners.grpc).await?;
    let http_listener = bind("HTTP", &listeners.http).await?;
    let mut http_ports = JoinSet::new();
    let mut http_port = |listener: TcpListener, router: http::Router| {
        http_ports.spawn(http1::serve(
            listener,
            router,
            max_connections,
            drain.clone(),
        ));
    };
    // The reference serves without its debug port if it must.
    match bind("debug", &listeners.debug).await {
        Ok(listener) => http_port(
            listener,
            http::debug_port(rules.clone(), Arc::clone(&metrics)),
        ),
        Err(error) => tracing::error!("no debug port: {error:#}"),
    }
    if let Some(prometheus) = &listeners.prometheus {
        let listener = bind("Prometheus", &prometheus.address).await?;
        http_port(
            listener,
            http::metrics_port(Arc::clone(&metrics), &prometheus.path),
        );
    }
    let max_message = settings.bounds.message_bytes;
    let port = grpc::Port::new(Arc::clone(&answerer), health_calls, max_message)?;
    tracing::info!(
        grpc = %grpc_listener.local_addr(),
        http = %http_listener.local_addr()?,
        "serving; logs are kept in memory"
    );
    http_port(
        http_listener,
        http::client_port(answerer, health.clone(), Translator::new()?, max_message),
    );
    let mut grpc_port = tokio::spawn(connection::serve(
        grpc_listener,
        port,
        connections(&settings),
        stats,
        drain.clone(),
    ));

    // The end: unhealthy first, then no new connections, then the calls under way, then the rest.
    let delay = tokio::select! {
        delay = signals.delay_before_stop(settings.drain.delay) => delay,
        // It ends when it is told to, and not before. A process without the port must not go on looking well.
        ended = &mut grpc_port => bail!("the gRPC port ended by itself: {ended:?}"),
    };
    health.drain().await;
    tracing::warn!(?delay, "stopping: unhealthy from now on, still answering");
    tokio::select! {
        () = tokio::time::sleep(delay) => {}
        () = signals.next() => {}
    }
    drain.stop();
    let drained = async {
        let grpc_ended = (&mut grpc_port).await;
        while http_ports.join_next().await.is_some() {}
        grpc_ended
    };
    tokio::select! {
        ended = tokio::time::timeout(settings.drain.timeout, drained) => match ended {
            Ok(Ok(())) => tracing::info!("stopped"),
            Ok(Err(error)) => bail!("the gRPC port ended badly: {error}"),
            Err(_) => {
                let after = settings.drain.timeout;
                tracing::warn!(?after, "stopped with calls or connections still open");
            }
        },
        () = signals.next() => tracing::warn!("stopped at once, by a second signal"),
    }
    grpc_port.abort();
    Ok(())
}

/// The signals that end the process.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

// === impl Signals ===

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for a signal; the time to stay after it. An orchestrator (SIGTERM) needs some to send traffic
    /// elsewhere; a person at a terminal does not.
    async fn delay_before_stop(&mut self, on_terminate: Duration) -> Duration {
        tokio::select! {
            _ = self.terminate.recv() => on_terminate,
            _ = self.interrupt.recv() => Duration::ZERO,
            _ = self.hang_up.recv() => Duration::ZERO,
        }
    }

    async fn next(&mut self) {
        self.delay_before_stop(Duration::ZERO).await;
    }
}

// === settings to what each room takes ===

fn source(source: &RulesSource) -> Source {
    match source {
        RulesSource::Paths(paths) => Source::Paths(paths.clone()),
        RulesSource::Runtime(layout) => Source::Runtime {
            root: layout.root.clone(),
            subdirectory: layout.subdirectory.clone(),
            app_directory: layout.app_directory.clone(),
            ignore_dot_files: layout.ignore_dotfiles,
            watch_root: layout.watch_root,
        },
    }
}

fn limiting(settings: &Settings) -> limiter::Config {
    limiter::Config {
        near_limit_ratio: settings.limiting.near_limit_ratio,
        shadow: settings.limiting.shadow_mode,
        quota: settings.limiting.quota_mode,
        all_or_nothing: settings.limiting.all_or_nothing,
    }
}

fn answering(settings: &Settings) -> answer::Config {
    answer::Config {
        max_descriptors: settings.bounds.descriptors,
        max_entries: settings.bounds.entries,
        headers: settings.headers.as_ref().map(|names| answer::Headers {
            limit: names.limit.clone(),
            remaining: names.remaining.clone(),
            reset: names.reset.clone(),
        }),
        dynamic_metadata: settings.limiting.dynamic_metadata,
    }
}

fn connections(settings: &Settings) -> connection::Config {
    let grpc = &settings.grpc;
    connection::Config {
        max_connections: settings.listeners.max_connections.unwrap_or(usize::MAX),
        max_connection_age: grpc.max_connection_age,
        max_connection_age_grace: grpc.max_connection_age_grace,
        keepalive_interval: grpc.keepalive_interval,
        keepalive_timeout: grpc.keepalive_timeout,
        ..connection::Config::default()
    }
}

// === ports ===

async fn bind_grpc(listener: &GrpcListener) -> Result<Listener> {
    match listener {
        GrpcListener::Unix(path) => {
            let address = listener::Address::Unix(path.clone());
            Listener::bind(&address).await.context("the gRPC port")
        }
        GrpcListener::Tcp(address) => {
            let mut last = None;
            for address in resolve(address).await? {
                match Listener::bind(&listener::Address::Tcp(address)).await {
                    Ok(listener) => return Ok(listener),
                    Err(error) => last = Some(error),
                }
            }
            let error = last.map_or_else(|| anyhow::anyhow!("no address"), anyhow::Error::from);
            Err(error.context("the gRPC port"))
        }
    }
}

async fn bind(what: &str, address: &Address) -> Result<TcpListener> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for resolved in resolve(address).await? {
        match listen_tcp(resolved) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last).with_context(|| format!("the {what} port: can't listen on {address}"))
}

/// Every address a host stands for.
async fn resolve(Address { host, port }: &Address) -> Result<Vec<SocketAddr>> {
    Ok(match host {
        Host::All => vec![SocketAddr::from(([0_u16; 8], *port))],
        Host::Ip(ip) => vec![SocketAddr::new(*ip, *port)],
        Host::Name(name) => tokio::net::lookup_host((&**name, *port))
            .await
            .with_context(|| format!("can't find the host {name}"))?
            .collect(),
    })
}
