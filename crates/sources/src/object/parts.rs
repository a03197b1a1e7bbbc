//! A URL, taken apart. A program without clients of stores needs this to name an object in messages.

/// A URL, taken apart. No part of it is decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parts<'a> {
    pub(super) scheme: &'a str,
    pub(super) user: Option<&'a str>,
    pub(super) host: &'a str,
    pub(super) path: &'a str,
    pub(super) query: Option<&'a str>,
}

impl<'a> Parts<'a> {
    /// `None` if the URL lacks a scheme, a host or bucket, or a path or key.
    pub(super) fn of(url: &'a str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        // A key may contain `?` and `#`, and a user may contain `@`. What else may be a URL of HTTP, also in capitals, is not
        // for a store.
        let is_http = !matches!(scheme, "s3" | "gs" | "az");
        let (rest, query) = match is_http {
            true => {
                let rest = rest.split('#').next().unwrap_or(rest);
                rest.split_once('?')
                    .map_or((rest, None), |(rest, query)| (rest, Some(query)))
            }
            false => (rest, None),
        };
        let (authority, path) = rest.split_once('/')?;
        let (user, host) = authority
            .rsplit_once('@')
            .map_or((None, authority), |(user, host)| (Some(user), host));
        (!host.is_empty() && !path.is_empty()).then_some(Self {
            scheme,
            user,
            host,
            path,
            query,
        })
    }

    /// The URL without credentials, query and fragment.
    pub(super) fn name(&self) -> String {
        let Self {
            scheme, host, path, ..
        } = self;
        format!("{scheme}://{host}/{path}")
    }
}

/// The name of an object for messages, also of a text that is no URL.
pub(crate) fn shown(url: &str) -> String {
    Parts::of(url).map_or_else(
        || {
            // Not taken apart: whatever could be a secret is left out.
            let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
            let end = rest.find(['?', '#']).unwrap_or(rest.len());
            let rest = rest.get(..end).unwrap_or_default();
            let rest = rest.rsplit('@').next().unwrap_or(rest);
            format!("{scheme}://{rest}")
        },
        |parts| parts.name(),
    )
}

/// The bytes of a text with `%41` for `A`.
pub(crate) fn decoded(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        if *first == b'%' {
            let (digits, tail) = tail.split_at_checked(2)?;
            let digits = str::from_utf8(digits).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = tail;
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_neither_credentials_nor_a_query() {
        for (url, name) in [
            ("http://u:p@host:80/a/b?X-Sig=1#f", "http://host:80/a/b"),
            ("https://host/a", "https://host/a"),
            ("HTTPS://u:p@host/a?X-Sig=1", "HTTPS://host/a"),
            ("ftp://u:p@host/a?X-Sig=1", "ftp://host/a"),
            ("s3://bucket/a?b#c", "s3://bucket/a?b#c"),
            ("http://user:secret@host?token=1", "http://host"),
        ] {
            assert_eq!(shown(url), name);
        }
    }

    #[test]
    fn a_url_without_a_host_or_a_key_is_none() {
        for url in [
            "http://host",
            "http://host/",
            "http:///a",
            "s3://bucket",
            "a/b",
        ] {
            assert_eq!(Parts::of(url), None, "{url}");
        }
    }

    #[test]
    fn credentials_are_decoded() {
        assert_eq!(decoded("a%3Ab%40").as_deref(), Some(b"a:b@".as_slice()));
        for bad in ["%", "%4", "%zz", "%é"] {
            assert_eq!(decoded(bad), None);
        }
    }
}
