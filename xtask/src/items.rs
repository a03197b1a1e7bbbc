//! Rust's items, by the lines with which they begin.

/// The type of an item that has members.
pub(crate) fn item(words: &str) -> Option<String> {
    let words = words.strip_prefix("pub(crate) ").unwrap_or(words);
    let words = words.strip_prefix("pub(super) ").unwrap_or(words);
    let words = words.strip_prefix("pub ").unwrap_or(words);
    let words = words.strip_prefix("unsafe ").unwrap_or(words);
    for keyword in ["struct ", "trait ", "enum "] {
        if let Some(behind) = words.strip_prefix(keyword) {
            return Some(ident(behind).to_owned());
        }
    }
    let behind = words.strip_prefix("impl")?;
    let behind = match behind.strip_prefix('<') {
        Some(generics) => after_generics(generics)?,
        None => behind.strip_prefix(' ')?,
    };
    let kind = behind.split_once(" for ").map_or(behind, |(_, kind)| kind);
    let kind = kind.trim_start().trim_start_matches('&');
    let path = kind.split(['<', ' ', '{']).next()?;
    path.rsplit("::").next().map(str::to_owned)
}

/// What comes after the `>` that ends generics.
fn after_generics(text: &str) -> Option<&str> {
    let mut depth = 1;
    let mut before = ' ';
    for (at, letter) in text.char_indices() {
        match letter {
            '<' => depth += 1,
            // Not that of an arrow.
            '>' if before != '-' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return text.get(at + 1..);
        }
        before = letter;
    }
    None
}

/// The identifier at the beginning.
pub(crate) fn ident(text: &str) -> &str {
    let end = text.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    text.get(..end.unwrap_or(text.len())).unwrap_or_default()
}
