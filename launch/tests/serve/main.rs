//! The HTTP layer over real sockets, with a backend in memory: what clients see, what they cannot break, and how it
//! ends.

mod abuse;
mod answers;
mod clients;
mod errors;
mod fake;
mod http;
mod life;
mod odd;
mod stops;
mod streams;
mod unicode;
