//! HTTP/1.1 connections for the ports of [`http`](super::http): bounded in number, ended politely. What is asked
//! and answered on them is not decided here.

use std::{sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
};

use super::connection::Drain;

/// How long a client may take to send its request's headers; also bounds idle connections.
const HEADERS: Duration = Duration::from_secs(60);
/// After a failure to accept (out of files, mostly) the next try waits, so that it is no busy loop.
const AFTER_FAILURE: Duration = Duration::from_millis(50);

/// Serves `router` until `drain` stops it and all requests under way are answered. Above `max_connections` clients
/// wait in the kernel's queue.
pub async fn serve(listener: TcpListener, router: Router, max_connections: usize, drain: Drain) {
    let places = Arc::new(Semaphore::new(max_connections.min(Semaphore::MAX_PERMITS)));
    let mut connections = JoinSet::new();
    loop {
        let accepted = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            biased;
            () = drain.stopped() => break,
            Some(_) = connections.join_next() => continue,
            accepted = accepted => accepted,
        };
        match (place, accepted) {
            (Ok(place), Ok((stream, _))) => {
                let connection = connection(stream, router.clone(), drain.clone());
                connections.spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            (_, Err(error)) => {
                tracing::debug!(%error, "can't accept an HTTP connection");
                tokio::time::sleep(AFTER_FAILURE).await;
            }
            // Nobody closes the semaphore.
            (Err(_), _) => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn connection(stream: TcpStream, router: Router, drain: Drain) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = drain.stopped() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::trace!(%error, "an HTTP connection ended badly");
    }
}
