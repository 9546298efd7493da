//! Accepts connections: a bounded number of them, each with limits on how long a silent client may take.

use super::error::ApiError;
use super::limits::Limits;
use super::state::{App, Phase};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Sleep, sleep};

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
    let Limits { head_time, head_bytes, headers, write_time, .. } = app.limits;
    // Sends each token at once.
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(Timed { stream, limit: write_time, stuck: None });
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

/// A socket whose writes fail if the client takes nothing for `limit`.
struct Timed {
    stream: TcpStream,
    limit: Duration,
    stuck: Option<Pin<Box<Sleep>>>,
}

impl Timed {
    /// Passes on the result of a write. A write that makes no progress for too long becomes an error.
    fn bound<T>(&mut self, context: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.stuck = None;
            return result;
        }
        let limit = self.limit;
        let stuck = self.stuck.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(stuck.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
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
