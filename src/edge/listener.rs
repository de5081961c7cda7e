//! Sockets that clients connect to: TCP over IPv4 and IPv6, and Unix. What is said on a connection is not here.

use std::{
    fmt, io,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
};

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A TCP address and port; port 0 takes a free one. `::` takes IPv4 as well, and only IPv4 on a machine without
    /// IPv6.
    Tcp(SocketAddr),
    /// The path of a Unix socket. A socket file that a dead process left there is replaced.
    Unix(PathBuf),
}

/// A socket that is listened on. A Unix socket's file goes with it.
#[derive(Debug)]
pub struct Listener {
    local: Address,
    socket: ListenerSocket,
}

/// One accepted connection.
#[derive(Debug)]
pub enum Stream {
    /// Over TCP.
    Tcp(TcpStream),
    /// Over a Unix socket.
    Unix(UnixStream),
}

/// An address that can't be listened on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {cause}")]
pub struct BindError {
    /// The address asked for.
    pub address: Address,
    /// What is in the way. Not a `source`, since the message has it: whoever prints the chain would show it twice.
    pub cause: io::Error,
}

#[derive(Debug)]
enum ListenerSocket {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

/// The file of a Unix socket, removed on drop unless another one has taken its place.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

/// Connections the kernel keeps for us until we accept them; it lowers this to its own bound (`somaxconn`). After a
/// restart every Envoy worker of a fleet connects at once.
const BACKLOG: i32 = 4096;

/// A peer that vanished without a word is noticed by the kernel after the idle time and three probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_PROBE: Duration = Duration::from_secs(10);

// === impl Address ===

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

// === impl Listener ===

impl Listener {
    /// Opens the socket. Within a tokio runtime.
    ///
    /// # Errors
    ///
    /// Names the address and what is in the way: the port or path is in use, not ours to take, not of this machine.
    pub async fn bind(address: &Address) -> Result<Self, BindError> {
        let socket = match address {
            Address::Tcp(address) => listen_tcp(*address).map(ListenerSocket::Tcp),
            Address::Unix(path) => listen_unix(path).await,
        };
        let bound = socket.and_then(|socket| {
            let local = match &socket {
                ListenerSocket::Tcp(listener) => Address::Tcp(listener.local_addr()?),
                ListenerSocket::Unix(_, file) => Address::Unix(file.path.clone()),
            };
            Ok(Self { local, socket })
        });
        bound.map_err(|cause| BindError {
            address: address.clone(),
            cause,
        })
    }

    /// Where it listens: with the port that was taken where port 0 was asked for.
    pub fn local_addr(&self) -> &Address {
        &self.local
    }

    /// The next connection, with latency and liveness options set. Cancel-safe.
    ///
    /// # Errors
    ///
    /// The kernel's: of this one connection, or for want of files or memory. The listener lives on.
    pub async fn accept(&self) -> io::Result<(Stream, Option<SocketAddr>)> {
        match &self.socket {
            ListenerSocket::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                Ok((Stream::tcp(stream), Some(peer)))
            }
            ListenerSocket::Unix(listener, _) => {
                let (stream, _) = listener.accept().await?;
                Ok((Stream::Unix(stream), None))
            }
        }
    }

    /// As [`accept`](Self::accept), of what is in the kernel's queue now; `WouldBlock` if there is nothing. The
    /// runtime may not have heard of it yet, so the kernel itself is asked.
    ///
    /// # Errors
    ///
    /// As `accept`'s.
    pub fn accept_queued(&self) -> io::Result<(Stream, Option<SocketAddr>)> {
        let (accepted, peer) = match &self.socket {
            ListenerSocket::Tcp(listener) => SockRef::from(listener).accept()?,
            ListenerSocket::Unix(listener, _) => SockRef::from(listener).accept()?,
        };
        accepted.set_nonblocking(true)?;
        let stream = match &self.socket {
            ListenerSocket::Tcp(_) => Stream::tcp(TcpStream::from_std(accepted.into())?),
            ListenerSocket::Unix(..) => Stream::Unix(UnixStream::from_std(accepted.into())?),
        };
        Ok((stream, peer.as_socket()))
    }
}

// === impl Stream ===

impl Stream {
    fn tcp(stream: TcpStream) -> Self {
        // An option fails only on a connection that is gone already; reading will tell.
        let _ = stream.set_nodelay(true);
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_IDLE)
            .with_interval(KEEPALIVE_PROBE)
            .with_retries(3);
        let _ = SockRef::from(&stream).set_tcp_keepalive(&keepalive);
        Self::Tcp(stream)
    }

    fn read_half(self: Pin<&mut Self>) -> Pin<&mut (dyn AsyncRead + Unpin)> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream),
            Self::Unix(stream) => Pin::new(stream),
        }
    }

    fn write_half(self: Pin<&mut Self>) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream),
            Self::Unix(stream) => Pin::new(stream),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.read_half().poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write_half().poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write_half().poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write_half().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write_half().poll_shutdown(cx)
    }
}

// === impl SocketFile ===

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        let (device, inode) = identity(path)?;
        Ok(Self {
            path: path.to_owned(),
            device,
            inode,
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = identity(&self.path).is_ok_and(|now| now == (self.device, self.inode));
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket file");
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// A TCP listener as every port of the service has it: the address may be taken again at once after a restart, and
/// shared with a successor that starts before we end (SO_REUSEPORT); `::` is dual-stack. Within a tokio runtime.
///
/// # Errors
///
/// The kernel's.
pub fn listen_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    match open_tcp(address) {
        // Deployments say `::` for "all there is"; a machine without IPv6 has only the other half.
        Err(error) if is_any_v6(address) && lacks_ipv6(&error) => {
            tracing::info!(%address, "no IPv6 on this machine: listening on IPv4 only");
            open_tcp((Ipv4Addr::UNSPECIFIED, address.port()).into())
        }
        opened => opened,
    }
}

fn open_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    if is_any_v6(address) {
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

fn is_any_v6(address: SocketAddr) -> bool {
    address.is_ipv6() && address.ip().is_unspecified()
}

fn lacks_ipv6(error: &io::Error) -> bool {
    // std has no kind for it.
    const EAFNOSUPPORT: i32 = if cfg!(target_os = "linux") { 97 } else { 47 };
    error.kind() == io::ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(EAFNOSUPPORT)
}

async fn listen_unix(path: &Path) -> io::Result<ListenerSocket> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "a file that is no socket is in its place; remove it or choose another path",
            ));
        }
        Ok(_) => match UnixStream::connect(path).await {
            Ok(_) => {
                return Err(io::Error::new(
                    io::ErrorKind::AddrInUse,
                    "another process listens there",
                ));
            }
            // Nobody behind it: its process died without removing it.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path)?;
            }
            Err(error) => return Err(error),
        },
    }
    let listener = UnixListener::bind(path)?;
    let file = SocketFile::of(path)?;
    Ok(ListenerSocket::Unix(listener, file))
}
