//! Identities, secrets and their hashes.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Text that is no identity or token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{digits} lower-case hexadecimal digits are needed")]
pub struct ParseHexError {
    /// The number of digits.
    pub digits: usize,
}

fn parse_hex<const BYTES: usize>(text: &str) -> Result<[u8; BYTES], ParseHexError> {
    let error = ParseHexError { digits: 2 * BYTES };
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Ok(byte - b'0'),
        b'a'..=b'f' => Ok(byte - b'a' + 10),
        _ => Err(error),
    };
    let pairs = text.as_bytes().chunks_exact(2);
    if text.len() != 2 * BYTES {
        return Err(error);
    }
    let mut bytes = [0; BYTES];
    for (byte, pair) in bytes.iter_mut().zip(pairs) {
        let &[high, low] = pair else {
            return Err(error);
        };
        *byte = digit(high)? << 4 | digit(low)?;
    }
    Ok(bytes)
}

fn write_hex(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

macro_rules! hexadecimal {
    ($($(#[$doc:meta])* $name:ident: $bytes:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub [u8; $bytes]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_hex(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = ParseHexError;

            fn from_str(text: &str) -> Result<Self, ParseHexError> {
                parse_hex(text).map(Self)
            }
        }
    )*};
}

hexadecimal! {
    /// A VM. It stays the same over its migrations.
    VmId: 16;
    /// One migration of a VM. The source draws it.
    MigrationId: 16;
    /// The hash of a [`Token`]'s secret, exchanged before the first page.
    TokenHash: 32;
    /// A digest of the missing map.
    MapDigest: 32;
}

/// A secret of 32 bytes. Its text is never part of a message for people.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Secret(pub [u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A secret that decides who owns the VM, together with its hash: the commit token *c* of the source, or the refusal
/// token *r* of the destination.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token {
    secret: Secret,
    hash: TokenHash,
}

impl Token {
    /// The token with this secret.
    pub fn new(secret: Secret) -> Self {
        let hash = TokenHash(blake3::derive_key("pagetide migration token 1", &secret.0));
        Self { secret, hash }
    }

    /// The secret, to be sent or stored.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// What the peer knows from the beginning.
    pub fn hash(&self) -> TokenHash {
        self.hash
    }

    /// The 64 digits that an operator carries.
    pub fn to_hex(&self) -> String {
        self.secret.0.iter().map(|b| format!("{b:02x}")).collect()
    }
}

impl FromStr for Token {
    type Err = ParseHexError;

    fn from_str(text: &str) -> Result<Self, ParseHexError> {
        Ok(Self::new(Secret(parse_hex(text)?)))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second, ..] = self.hash.0;
        write!(f, "Token(hash {first:02x}{second:02x}..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lower_case_hexadecimal_is_an_identity() {
        let text = "00112233445566778899aabbccddeeff";
        let id: VmId = text.parse().unwrap();
        assert_eq!(id.to_string(), text);
        for wrong in [
            "",
            &text[1..],
            &text.to_uppercase(),
            &format!("{text}00"),
            &text.replace('f', "é"),
        ] {
            assert_eq!(
                wrong.parse::<VmId>(),
                Err(ParseHexError { digits: 32 }),
                "{wrong}"
            );
        }
    }

    #[test]
    fn a_token_survives_its_text_and_hides_in_debug_output() {
        let token = Token::new(Secret([0xab; 32]));
        assert_eq!(token.to_hex().parse(), Ok(token));
        assert!(!format!("{token:?} {:?}", token.secret()).contains("abab"));
        assert_ne!(token.hash(), Token::new(Secret([0xac; 32])).hash());
    }
}
