//! A host's side of its rank's request table and admission ring.

use super::wire::Entry;
use crate::batch_memory::first_page_key;
use crate::control::Control;
use crate::control_writer::ControlWriter;
use crate::error::Result;
use crate::outputs::Outputs;
use kernels_cu::abi;
use std::time::{Duration, Instant};

/// How long a host waits for its writes to arrive.
const ARRIVAL: Duration = Duration::from_micros(30);

/// The entries that a host has written, and those that its kernel may see.
#[derive(Debug, Default)]
pub(super) struct Table {
    written: u64,
    counted: u64,
}

impl Table {
    /// Writes an entry with its payload. Returns false, without writing, if the ring is full, or if the previous user of the
    /// number or the memory has not ended.
    pub fn write(
        &mut self,
        entry: &Entry,
        outputs: &Outputs,
        control: &Control,
        writer: &impl ControlWriter,
    ) -> Result<bool> {
        let places = control.table;
        let open = (self.written as u32).wrapping_sub(outputs.entries_taken()) & abi::MPK_ENTRY_COUNT_MASK;
        if open >= places.ring || outputs.finished() < entry.after_finished {
            return Ok(false);
        }
        if let Some(payload) = &entry.payload {
            let tokens: Vec<u8> = payload.prompt.iter().flat_map(|token| token.to_ne_bytes()).collect();
            writer.write(places.tokens + 4 * u64::from(payload.request.first_token), &tokens)?;
            if !payload.keys.is_empty() {
                let place = first_page_key(payload.request.first_token, places.page_size);
                let words = payload.keys.iter().flat_map(|key| key.words);
                let keys: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
                let size = size_of::<abi::mpk_page_key>() as u64;
                writer.write(places.page_keys + size * u64::from(place), &keys)?;
            }
            let size = size_of::<abi::mpk_request>();
            // SAFETY: a plain struct without padding.
            let bytes =
                unsafe { std::slice::from_raw_parts((&raw const payload.request).cast::<u8>(), size) };
            writer.write(places.requests + u64::from(entry.number) * size as u64, bytes)?;
            outputs.clear(entry.number);
        }
        let place = self.written % u64::from(places.ring) * size_of::<abi::mpk_admission>() as u64;
        let words: [u8; 8] = std::array::from_fn(|i| {
            if i < 4 { entry.kind.to_ne_bytes()[i] } else { entry.number.to_ne_bytes()[i - 4] }
        });
        writer.write(places.admissions + place, &words)?;
        self.written += 1;
        Ok(true)
    }

    /// Lets the kernel see those of the first `most` entries that have been written and have arrived.
    pub fn count(&mut self, most: u64, outputs: &Outputs, writer: &impl ControlWriter) -> Result<()> {
        let count = self.written.min(most);
        if self.counted >= count {
            return Ok(());
        }
        // A device receives writes within microseconds; the host's next check may be later than that.
        let begin = Instant::now();
        while !writer.is_written()? {
            if begin.elapsed() > ARRIVAL {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.counted = count;
        outputs.count_entries(self.counted as u32);
        Ok(())
    }

    /// Number of entries written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Number of entries that the kernel may see.
    pub fn counted(&self) -> u64 {
        self.counted
    }

    /// Number of entries that the kernel may see but has not taken yet.
    pub fn open(&self, outputs: &Outputs) -> u32 {
        (self.counted as u32).wrapping_sub(outputs.entries_taken()) & abi::MPK_ENTRY_COUNT_MASK
    }
}
