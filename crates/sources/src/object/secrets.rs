//! What no message shows: the credentials and the query of a URL, in each spelling that a store's text may have.

use std::collections::BTreeSet;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};

use super::failure::Report;
use super::parts::{Parts, decoded};

/// A part of a URL that is shorter, in bytes, is no secret: removing it would garble messages.
const LEAST: usize = 4;

/// A field of a query without a value that is shorter is a word of the store's.
const LEAST_TOKEN: usize = 16;

/// The maximal length of a store's text in a message, in characters.
const MOST_TEXT: usize = 500;

/// The longest reference to a character in HTML, in bytes: `&#x10FFFF;`, with some zeroes.
const MOST_REFERENCE: usize = 12;

/// Parts of a URL that no message shows.
#[derive(Clone, Default)]
pub(super) struct Secrets(BTreeSet<Vec<u8>>);

impl Secrets {
    pub(super) fn of(parts: &Parts<'_>) -> Self {
        let mut secrets = Self::default();
        if let Some(user) = parts.user {
            secrets.add(user);
            // A password may have a colon.
            if let Some((name, word)) = user.split_once(':') {
                secrets.add(name);
                secrets.add(word);
            }
            // What the header of the authorization has.
            let plain = decoded(user).unwrap_or_else(|| user.into());
            for engine in [STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD] {
                secrets.add(&engine.encode(&plain));
            }
        }
        if let Some(query) = parts.query {
            if query.contains('=') {
                secrets.add(query);
            }
            // A store's error may repeat one field, such as the signature that it refuses.
            for field in query.split('&') {
                match field.split_once('=') {
                    Some((_, value)) => secrets.add(value),
                    // A token, or a word such as `versions`.
                    None if field.len() >= LEAST_TOKEN => secrets.add(field),
                    None => {}
                }
            }
        }
        secrets
    }

    /// Adds a part as the URL has it, and what it stands for.
    fn add(&mut self, part: &str) {
        let plain = decoded(part);
        // A form writes a space like this.
        let of_form = decoded(&part.replace('+', " "));
        let forms = [Some(part.as_bytes().to_vec()), plain, of_form];
        let long = forms.into_iter().flatten().filter(|it| it.len() >= LEAST);
        self.0.extend(long);
    }

    /// The text of an error as a message may show it.
    pub(super) fn report(&self, text: &str) -> Report {
        let mut shown = String::new();
        // The end of what is hidden. Secrets may overlap.
        let mut hidden = 0;
        for (at, character) in text.char_indices() {
            if shown.chars().count() >= MOST_TEXT {
                break;
            }
            let rest = text.as_bytes().get(at..).unwrap_or_default();
            let longest = self.0.iter().filter_map(|secret| length(secret, rest));
            let end = at + longest.max().unwrap_or(0);
            if at >= hidden {
                match end > at {
                    true => shown.push_str("[...]"),
                    false => shown.push(character),
                }
            }
            hidden = hidden.max(end);
        }
        Report::new(&shown)
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secrets({})", self.0.len())
    }
}

/// How many bytes of `text` are a spelling of `secret`, which begins there; `None` if it does not.
fn length(secret: &[u8], text: &[u8]) -> Option<usize> {
    // How much of the text is how much of the secret. `%` stands for itself or begins an escape: both are tried.
    let mut states = BTreeSet::from([(0, 0)]);
    let mut longest = None;
    while let Some((at, known)) = states.pop_first() {
        let (rest, missing) = (text.get(at..)?, secret.get(known..)?);
        if missing.is_empty() {
            longest = Some(at);
            continue;
        }
        for (bytes, length) in readings(rest).into_iter().flatten() {
            if missing.starts_with(&bytes) {
                states.insert((at + length, known + bytes.len()));
            }
        }
    }
    longest
}

/// What the text may begin with, each with the number of its bytes in the text: a byte as it is, and one that is escaped for a
/// URL, once or twice, for HTML or for JSON.
fn readings(text: &[u8]) -> [Option<(Vec<u8>, usize)>; 3] {
    let Some(&first) = text.first() else {
        return [None, None, None];
    };
    let byte = |code: u32| u8::try_from(code).ok().map(|byte| vec![byte]);
    // A URL within a URL.
    let twice = text
        .starts_with(b"%25")
        .then(|| hexadecimal(text, 3..5).and_then(byte).map(|byte| (byte, 5)))
        .flatten();
    let escaped = match first {
        b'%' => hexadecimal(text, 1..3).and_then(byte).map(|byte| (byte, 3)),
        b'+' => Some((vec![b' '], 1)),
        b'&' => reference(text),
        b'\\' => match text.get(1) {
            Some(b'u') => hexadecimal(text, 2..6)
                .and_then(char::from_u32)
                .map(|character| (character.to_string().into_bytes(), 6)),
            Some(sign @ (b'"' | b'\\' | b'/' | b'\'')) => Some((vec![*sign], 2)),
            _ => None,
        },
        _ => None,
    };
    [Some((vec![first], 1)), escaped, twice]
}

/// The digits of this range, in either case.
fn hexadecimal(text: &[u8], digits: std::ops::Range<usize>) -> Option<u32> {
    let digits = str::from_utf8(text.get(digits)?).ok()?;
    u32::from_str_radix(digits, 16).ok()
}

/// A reference to a character, `&amp;` or `&#38;` or `&#x26;`.
fn reference(text: &[u8]) -> Option<(Vec<u8>, usize)> {
    let end = text
        .iter()
        .take(MOST_REFERENCE)
        .position(|byte| *byte == b';')?;
    let character = match str::from_utf8(text.get(1..end)?).ok()? {
        "amp" => '&',
        "lt" => '<',
        "gt" => '>',
        "quot" => '"',
        "apos" => '\'',
        name => {
            let number = name.strip_prefix('#')?;
            let code = match number.strip_prefix(['x', 'X']) {
                Some(digits) => u32::from_str_radix(digits, 16),
                None => number.parse(),
            };
            char::from_u32(code.ok()?)?
        }
    };
    Some((character.to_string().into_bytes(), end + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(url: &str, text: &str) -> String {
        let parts = Parts::of(url).unwrap();
        Secrets::of(&parts).report(text).to_string()
    }

    #[test]
    fn secrets_are_removed_from_a_stores_text() {
        let url = "http://me:word@host/a?X-Sig=7777";
        let text = "GET http://me:word@host/a?X-Sig=7777 failed: signature 7777 of me";
        let expected = "GET http://[...]@host/a?[...] failed: signature [...] of me";
        assert_eq!(shown(url, text), expected);
    }

    /// Kind: a secret that a store repeats in another spelling than the URL's.
    #[test]
    fn secrets_are_removed_in_each_spelling() {
        let url = "https://someone:pa%2fss%22wo%26rd@host/a?sig=Ab%2BcD%3d&plain=1+2%203";
        for spelling in [
            // as it is, and decoded
            "pa%2fss%22wo%26rd",
            "pa/ss\"wo&rd",
            "Ab+cD=",
            // other digits, other characters, and encoded once more
            "pa%2Fss%22wo%26rd",
            "p%61/ss%22wo%26rd",
            "pa%252Fss%2522wo%2526rd",
            "sig=Ab%2bcD%3D&plain=1+2+3",
            // HTML and XML
            "pa/ss&quot;wo&amp;rd",
            "pa&#47;ss&#x22;wo&#x26;rd",
            "sig=Ab%2BcD%3d&amp;plain=1+2%203",
            // JSON
            r#"pa/ss\"wo&rd"#,
            r#"pa\/ss\u0022wo\u0026rd"#,
            r"Ab\u002BcD\u003d",
            // a form
            "1 2 3",
            "1%202+3",
            // the header of the authorization: someone:pa/ss"wo&rd
            "c29tZW9uZTpwYS9zcyJ3byZyZA==",
            "c29tZW9uZTpwYS9zcyJ3byZyZA",
            "c29tZW9uZTpwYS9zcyJ3byZyZA%3D%3d",
            "someone:pa/ss\"wo&rd",
        ] {
            let text = format!("before <{spelling}> after");
            assert_eq!(shown(url, &text), "before <[...]> after", "{spelling}");
        }
    }

    #[test]
    fn a_field_without_a_value_is_a_secret_unless_it_is_a_word() {
        let said = "the token 0123456789abcdef";
        assert_eq!(
            shown("http://host/a?0123456789abcdef&x=1", said),
            "the token [...]"
        );
        assert_eq!(
            shown("http://host/a?0123456789abcdef", said),
            "the token [...]"
        );
        let said = "no versions here";
        assert_eq!(shown("http://host/a?versions", said), said);
        assert_eq!(shown("http://host/a?versions&x=1", said), said);
    }

    #[test]
    fn a_password_may_have_a_colon() {
        let text = shown("http://me:abc:defgh@host/a", "not abc:defgh");
        assert_eq!(text, "not [...]");
    }

    #[test]
    fn of_secrets_that_overlap_nothing_is_shown() {
        let text = shown("http://host/a?x=abcde&y=cdefgh", "of abcdefgh.");
        assert_eq!(text, "of [...].");
    }

    #[test]
    fn text_that_is_no_secret_stays() {
        let text = "é 100% of %zz, %2 &amp; &nothing; &#xD800; &#99999999; \\u12 \\n \\ +";
        assert_eq!(shown("http://me:word@host/a?b=%25%25", text), text);
    }

    #[test]
    fn a_secret_at_the_end_of_a_long_text_is_not_shown_in_part() {
        let text = format!("{}password", "x".repeat(MOST_TEXT - 2));
        let shown = shown("http://me:password@host/a", &text);
        assert_eq!(shown, format!("{}[...]", "x".repeat(MOST_TEXT - 2)));
    }
}
