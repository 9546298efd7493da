//! The API key.

use axum::http::{HeaderMap, header};
use subtle::{ConstantTimeEq, ConstantTimeLess};

/// Longest key.
const LONGEST: usize = 256;

/// The key that requests must carry.
pub struct ApiKey {
    padded: [u8; LONGEST],
    length: u16,
}

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ApiKey")
    }
}

impl ApiKey {
    /// Accepts a key of 1 to 256 visible ASCII characters.
    ///
    /// # Errors
    /// What is wrong with `key`.
    pub fn new(key: &str) -> Result<Self, String> {
        if key.is_empty() || key.len() > LONGEST || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!("an API key must have 1 to {LONGEST} visible ASCII characters"));
        }
        Ok(ApiKey { padded: padded(key.as_bytes()), length: key.len() as u16 })
    }

    /// True if `headers` carry the key. The time that this takes reveals neither the key nor its length.
    pub fn admits(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(header::AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
        let given = match given.split_at_checked(7) {
            // There may be several spaces.
            Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"Bearer ") => {
                let spaces = key.iter().take_while(|&&byte| byte == b' ').count();
                &key[spaces..]
            }
            _ => b"",
        };
        let length = u16::try_from(given.len()).unwrap_or(u16::MAX);
        let fits = !(LONGEST as u16).ct_lt(&length);
        let same = padded(given).ct_eq(&self.padded) & length.ct_eq(&self.length) & fits;
        same.into()
    }
}

fn padded(key: &[u8]) -> [u8; LONGEST] {
    let mut padded = [0; LONGEST];
    let length = key.len().min(LONGEST);
    padded[..length].copy_from_slice(&key[..length]);
    padded
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn only_the_key_is_admitted() {
        let key = ApiKey::new("sk-123").unwrap();
        let admits = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
            key.admits(&headers)
        };
        assert!(admits("Bearer sk-123") && admits("bearer sk-123") && admits("Bearer   sk-123"));
        for wrong in [
            "",
            "sk-123",
            "Bearer",
            "Bearer ",
            "Bearer sk-12",
            "Bearer sk-1234",
            "Bearer   ",
            "Bearer   sk-12",
            "Bearersk-123",
            " Bearer sk-123",
            "Basic sk-123",
        ] {
            assert!(!admits(wrong), "{wrong}");
        }
        assert!(!admits(&format!("Bearer {}", "x".repeat(70_000))));
        assert!(!key.admits(&HeaderMap::new()));
        let longest = "k".repeat(LONGEST);
        let key = ApiKey::new(&longest).unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {longest}k")).unwrap());
        assert!(!key.admits(&headers));
    }

    #[test]
    fn keys_that_no_header_can_carry_are_refused() {
        for key in ["", "a b", "clé", "a\n", &"k".repeat(LONGEST + 1)] {
            assert!(ApiKey::new(key).is_err(), "{key:?}");
        }
    }
}
