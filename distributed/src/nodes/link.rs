//! What the proxy's thread needs from the network. [`Carrier`](super::carrier::Carrier) is the one over MPI.

/// The text of a failed call.
pub(super) type Failed = String;

/// Messages to and from the proxies of the peers. No call waits. Messages from one rank to another arrive in the order in which they were
/// sent.
pub(super) trait Link {
    /// The ranks of the peers.
    fn peers(&self) -> &[u32];

    /// True if another message may be sent to this peer.
    fn has_room(&self, peer: usize) -> bool;

    /// True if enough messages are on their way that it pays to check which have been sent.
    fn is_crowded(&self) -> bool;

    /// True if nothing is on its way to any peer.
    fn is_idle(&self) -> bool;

    /// An empty buffer for a message.
    fn buffer(&mut self) -> Vec<u8>;

    /// Starts to send.
    fn send(&mut self, peer: usize, bytes: Vec<u8>) -> Result<(), Failed>;

    /// Recovers the buffers of sent messages. Returns true if there were any.
    fn sent(&mut self) -> Result<bool, Failed>;

    /// Calls `take` with each message that has arrived, and its sender's index among the peers. If `take` returns false, no more
    /// messages are expected from that peer. Returns true if a message has arrived.
    fn take(&mut self, take: impl FnMut(usize, &[u8]) -> bool) -> Result<bool, Failed>;
}
