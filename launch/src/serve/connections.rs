//! Accepts connections: a bounded number of them, each with limits on how long a silent client may take.

use super::backlog::Backlog;
use super::error::ApiError;
use super::limits::Limits;
use super::state::{App, Phase};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io;
use std::os::fd::AsRawFd;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Sleep, sleep, sleep_until};

/// Pause after an error of `accept`, such as too many open files.
const PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections until the server stops accepting requests. Returns the semaphore of the connections that are
/// still open: all its permits are free once the last one is closed.
pub async fn accept(listener: TcpListener, app: App, router: Router) -> Arc<Semaphore> {
    let all = Arc::new(Semaphore::new(app.limits.connections));
    let mut phase = app.phase.subscribe();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = phase.wait_for(closed) => return all,
        };
        let Ok((stream, _)) = accepted else {
            sleep(PAUSE).await;
            continue;
        };
        let Ok(permit) = Arc::clone(&all).try_acquire_owned() else {
            tokio::spawn(turn_away(stream));
            continue;
        };
        tracing::debug!("a connection is accepted");
        let (app, router) = (Arc::clone(&app), router.clone());
        tokio::spawn(async move {
            talk(stream, &app, router).await;
            drop(permit);
        });
    }
}

/// True if no new connections are accepted. A server whose engine is lost accepts them as long as it lives, to report
/// that.
fn closed(phase: &Phase) -> bool {
    matches!(phase, Phase::Draining | Phase::Ending)
}

/// Serves one connection until it ends.
async fn talk(stream: TcpStream, app: &App, router: Router) {
    let Limits { head_time, head_bytes, headers, .. } = app.limits;
    // Sends each token at once.
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(Timed::new(stream, Backlog::new(&app.limits)));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_time)
        .max_headers(headers)
        .max_buf_size(head_bytes)
        .serve_connection(io, TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    let mut phase = app.phase.subscribe();
    // hyper has answered clients that do not speak HTTP. Clients that are gone need no answer.
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = phase.wait_for(closed) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

/// Answers that there are too many connections.
async fn turn_away(mut stream: TcpStream) {
    let body = ApiError::unavailable("too many connections", "busy").object().to_string();
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n\
         Connection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let _ = tokio::time::timeout(Duration::from_secs(1), stream.write_all(answer.as_bytes())).await;
}

/// A socket whose writes fail if the client takes what is written too slowly.
struct Timed {
    stream: TcpStream,
    /// Bytes that the socket has accepted.
    accepted: u64,
    backlog: Backlog,
    /// Ends together with the client's time. `None`: nothing waits.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Timed {
    fn new(stream: TcpStream, backlog: Backlog) -> Self {
        Timed { stream, accepted: 0, backlog, timer: None }
    }

    /// Bytes that the socket has accepted and the client's system has not confirmed. They count, because a socket may accept megabytes,
    /// and then nothing more until the client has taken a third of them.
    fn queued(&self) -> u64 {
        let mut queued: libc::c_int = 0;
        // SAFETY: the descriptor is open, and the call only writes to `queued`.
        let done = unsafe { libc::ioctl(self.stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut queued) };
        // Without an answer, all bytes count as taken.
        if done == 0 { u64::try_from(queued).unwrap_or(0) } else { 0 }
    }

    /// Passes on the result of a write. If the client's time is over, a write that cannot go on becomes an error.
    fn bound(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let Poll::Ready(result) = result else { return self.wait(context) };
        self.timer = None;
        if let Ok(count) = result {
            self.accepted += count as u64;
            // A client that keeps up costs no system call.
            if self.backlog.has_begun() {
                let queued = self.queued();
                if queued <= count as u64 {
                    self.backlog.caught_up();
                } else {
                    self.backlog.wait(Instant::now(), self.accepted.saturating_sub(queued));
                }
            }
        }
        Poll::Ready(result)
    }

    /// Waits until the socket accepts more. An error when the client's time is over.
    fn wait(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        loop {
            let (now, taken) = (Instant::now(), self.accepted.saturating_sub(self.queued()));
            let end = self.backlog.wait(now, taken);
            if end <= now {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            let end = tokio::time::Instant::from_std(end);
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(end)));
            if timer.deadline() != end {
                timer.as_mut().reset(end);
            }
            ready!(timer.as_mut().poll(context));
        }
    }
}

impl AsyncRead for Timed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Timed {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.bound(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.bound(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;
    use tokio::runtime::Builder;

    /// A client, and the server's end of its connection.
    async fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    #[test]
    fn a_client_that_reads_a_few_bytes_now_and_then_is_cut_off() {
        let limits = Limits {
            write_time: Duration::from_millis(100),
            slowest_reader: 1 << 20,
            longest_pause: Duration::from_millis(300),
            ..Limits::default()
        };
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut client, stream) = connected().await;
            let reader = tokio::spawn(async move {
                while client.read(&mut [0; 8]).await.is_ok_and(|count| count > 0) {
                    sleep(Duration::from_millis(10)).await;
                }
            });
            let begin = Instant::now();
            let mut socket = Timed::new(stream, Backlog::new(&limits));
            // More than the buffers of both sockets hold.
            let error = socket.write_all(&vec![0; 64 << 20]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
            reader.abort();
        });
    }

    #[test]
    fn a_client_that_reads_everything_is_not_cut_off() {
        let limits = Limits { write_time: Duration::from_secs(30), slowest_reader: 1, ..Limits::default() };
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut client, stream) = connected().await;
            let reader = tokio::spawn(async move {
                let mut all = Vec::new();
                client.read_to_end(&mut all).await.map(|_| all.len())
            });
            let mut socket = Timed::new(stream, Backlog::new(&limits));
            socket.write_all(&vec![0; 16 << 20]).await.unwrap();
            drop(socket);
            assert_eq!(reader.await.unwrap().unwrap(), 16 << 20);
        });
    }
}
