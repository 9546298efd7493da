//! Measures the time of a put of 8 KB (or BYTES) with its signal between two nodes, compared with MPI's own messages,
//! and the time of an exchange in which both nodes put at once.
//!
//! `mpirun -H node1:1,node2:1 target/release/examples/proxy_latency [ROUNDS [BYTES]]`

use distributed::{WatchOptions, World};
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let argument = |place, default: &str| std::env::args().nth(place).unwrap_or_else(|| default.into());
    let (rounds, bytes) = (argument(1, "2000").parse()?, argument(2, "8192").parse()?);
    let tell = |message: &str| eprintln!("{message}");
    let options = WatchOptions { deadline: Duration::from_secs(30), tell, fault: None, carries_all: false };
    let world = World::init(options)?;
    match distributed::latency(&world, bytes, rounds)? {
        Some(found) if world.rank() == 0 => {
            let [put, message, exchange] =
                [found.put_with_signal, found.message, found.exchange].map(|time| time.as_secs_f64() * 1e6);
            println!(
                "put with signal {put:.1} us, MPI message {message:.1} us, one way (medians of {rounds}): {:.2} times; \
                 an exchange, in which both put at once, {exchange:.1} us",
                put / message
            );
        }
        None if world.rank() == 0 => println!("all ranks are on one node"),
        _ => {}
    }
    world.finalize();
    Ok(())
}
