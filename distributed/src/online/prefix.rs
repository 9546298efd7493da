//! Keys of a prompt's pages for the prefix cache (`kernels-cu/protocol/pages.h`).

use kernels_cu::abi;
use std::hash::{BuildHasher, Hasher, RandomState};

/// Computes keys. Two values of this type compute different keys, because each has its own secrets.
#[derive(Debug)]
pub(super) struct PageKeys {
    page_size: usize,
    /// The standard library's keyed hash (SipHash) with 128 random bits each. Together they give a key of 128 bits, and nobody outside
    /// can construct a second page with the same key. Keys are only used in this process, so the hash function may change.
    secrets: [RandomState; 2],
}

impl PageKeys {
    pub fn new(page_size: u32) -> PageKeys {
        PageKeys { page_size: page_size as usize, secrets: [RandomState::new(), RandomState::new()] }
    }

    /// One key per full page of the prompt. It stands for all tokens up to the end of the page: the page's own tokens, and the previous
    /// key.
    pub fn of(&self, prompt: &[i32]) -> Vec<abi::mpk_page_key> {
        let mut words = [0; 2];
        let key = |page: &[i32]| {
            let hash = |secret: &RandomState| {
                let mut hasher = secret.build_hasher();
                hasher.write_u64(words[0]);
                hasher.write_u64(words[1]);
                hasher.write(bytes_of(page));
                hasher.finish()
            };
            words = [hash(&self.secrets[0]), hash(&self.secrets[1])];
            abi::mpk_page_key { words }
        };
        prompt.chunks_exact(self.page_size).map(key).collect()
    }
}

fn bytes_of(tokens: &[i32]) -> &[u8] {
    // SAFETY: numbers without padding, as bytes.
    unsafe { std::slice::from_raw_parts(tokens.as_ptr().cast(), size_of_val(tokens)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_stands_for_everything_up_to_its_page() {
        let keys = PageKeys::new(2);
        let words = |prompt: &[i32]| keys.of(prompt).iter().map(|key| key.words).collect::<Vec<_>>();
        let all = words(&[1, 2, 3, 4, 5]);
        assert_eq!(all.len(), 2);
        assert_eq!(words(&[1, 2, 3]), all[..1]);
        assert_eq!(words(&[1, 2, 3, 4]), all);
        assert!(words(&[1, 2, 3, 5])[1] != all[1] && words(&[1, 2, 3, 5])[0] == all[0]);
        let other = words(&[1, 3, 3, 4]);
        assert!(other[0] != all[0] && other[1] != all[1]);
        assert!(words(&[3, 4])[0] != all[1] && words(&[1]).is_empty());
        assert!(PageKeys::new(2).of(&[1, 2])[0].words != all[0]);
        assert!(all[0][0] != all[0][1]);
    }
}
