//! The little of Markdown that the checks read.

/// The cells of a table's row, trimmed; `None` if the line is no row. A `\|` is part of a cell.
pub(super) fn row(line: &str) -> Option<Vec<String>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    let mut cells = vec![String::new()];
    let mut escaped = false;
    for character in inner.chars() {
        match (character, escaped) {
            ('\\', false) => escaped = true,
            ('|', false) => cells.push(String::new()),
            _ => {
                if let Some(cell) = cells.last_mut() {
                    if escaped && character != '|' {
                        cell.push('\\');
                    }
                    cell.push(character);
                }
                escaped = false;
            }
        }
    }
    Some(cells.iter().map(|cell| cell.trim().to_owned()).collect())
}

/// Whether a row is the line between a table's head and its body.
pub(super) fn is_rule(cells: &[String]) -> bool {
    cells
        .iter()
        .all(|cell| !cell.is_empty() && cell.chars().all(|c| matches!(c, '-' | ':')))
}

/// A text's code spans, each with the prose that follows it, up to the next span.
pub(super) fn code_spans(text: &str) -> Vec<(&str, &str)> {
    let parts: Vec<_> = text.split('`').collect();
    parts
        .chunks(2)
        .filter_map(|pair| pair.get(1).copied())
        .zip(parts.iter().skip(2).step_by(2).copied())
        .collect()
}

/// A text without its code spans.
pub(super) fn prose(text: &str) -> String {
    text.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

/// The targets of links, with the numbers of their lines. Code is skipped.
pub(super) fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        let line = prose(line);
        let starts = line.match_indices("](").map(|(at, mark)| at + mark.len());
        found.extend(starts.filter_map(|at| {
            let (target, _) = line.get(at..)?.split_once(')')?;
            Some((number, target.to_owned()))
        }));
    }
    found
}

/// The anchors of a text's headings, as GitHub makes them.
pub(super) fn anchors(text: &str) -> Vec<String> {
    let mut in_code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        let heading = line.trim_start_matches('#');
        if in_code || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let kept = heading.trim().to_lowercase();
        let kept = kept
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        found.push(kept.map(|c| if c == ' ' { '-' } else { c }).collect());
    }
    found
}

/// A command line's words, as a shell splits them: quotes, and no expansions.
pub(super) fn words(line: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for character in line.chars() {
        match quote {
            Some(end) if character == end => quote = None,
            None if matches!(character, '"' | '\'') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            None if character.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(character),
        }
    }
    if quote.is_some() {
        return Err(format!("a quote without its end in {line:?}"));
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_at_bars_that_are_not_escaped() {
        assert_eq!(row(r"| a | `b\|c` | |").unwrap(), ["a", "`b|c`", ""]);
        assert!(is_rule(&row("|---|:-:|").unwrap()));
        assert!(row("no row").is_none());
    }

    #[test]
    fn code_and_prose_are_told_apart() {
        let text = "see `a` (x), `b`";
        assert_eq!(code_spans(text), [("a", " (x), "), ("b", "")]);
        assert_eq!(prose(text), "see   (x),  ");
    }

    #[test]
    fn links_and_headings_are_found_outside_code() {
        let text = "# A `b`: c_d\n[x](y.md#z) `[no](no)`\n```\n# no\n[no](no)\n```\n[q](r)";
        assert_eq!(links(text), [(2, "y.md#z".into()), (7, "r".into())]);
        assert_eq!(anchors(text), ["a-b-c_d"]);
    }

    #[test]
    fn words_are_a_shells() {
        assert_eq!(words(r#"a "b c" 'd "e'"#).unwrap(), ["a", "b c", "d \"e"]);
        assert!(words("a 'b").is_err());
    }
}
