//! What a reader of README types, as a shell program that says when each command has ended.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// What each line of the output that tells a time begins with: seconds, and what was reached.
const REACHED: &str = "== reached after ";

/// The file that README calls FILE, and restore.md by this name.
const IMAGE: &str = "/snapshots/web.mem";

/// How the table of `pagetide try` begins.
const FIRST_TABLE: &str = "first page";

/// The program: README's commands in their order, but for `make test`.
pub(super) fn program(readme: &str, restore: &str) -> Result<String> {
    let blocks = blocks(readme);
    let [install, serve, two] = blocks.as_slice() else {
        anyhow::bail!("README has {} blocks of commands, not 3", blocks.len());
    };
    let of_restore = self::blocks(restore);
    ensure!(
        of_restore.first() == Some(serve),
        "restore.md does not begin with README's command, {serve:?}"
    );
    let mut text = format!(
        "set -e
        begun=$(date +%s)
        reached() {{ echo \"{REACHED}$(( $(date +%s) - begun )) s: $*\"; }}
        mkdir -p /snapshots /run
        head -c 64M /dev/urandom > {IMAGE}
        "
    );
    for command in install {
        let command = command.replace("FILE", IMAGE);
        text += &format!("{command}\nreached '{command}'\n");
    }
    let [serve] = serve.as_slice() else {
        anyhow::bail!("README serves by {serve:?}");
    };
    let socket = serve.split([' ', '=']).find(|word| word.ends_with(".sock"));
    let socket = socket.with_context(|| format!("no socket in {serve:?}"))?;
    text += &format!(
        "{serve} &
        n=0
        until test -S {socket}; do n=$((n + 1)); test $n -lt 600; sleep 0.1; done
        reached '{serve}'
        kill $!; wait $! || true
        "
    );
    let [demo, test] = two.as_slice() else {
        anyhow::bail!("README's two commands are {two:?}");
    };
    ensure!(test == "make test", "README's second command is {test:?}");
    // A pipe's status is its last part's: files have the first one's, and whether the table has come.
    text += &format!(
        "{{ if {demo} 2>&1; then touch /ended; fi; }} | while IFS= read -r line; do
            printf '%s\\n' \"$line\"
            case $line in *'{FIRST_TABLE}'*) touch /shown; reached 'the first table of {demo}' ;; esac
        done
        test -e /shown
        test -e /ended
        reached 'the end of {demo}'
        "
    );
    Ok(text)
}

/// The blocks of commands in a document, without comments and blocks that have none.
fn blocks(document: &str) -> Vec<Vec<String>> {
    let mut blocks = Vec::new();
    let mut block = None;
    for line in document.lines().map(str::trim) {
        if line.starts_with("```") {
            match block.take() {
                None => block = Some(Vec::new()),
                Some(ended) => blocks.push(ended),
            }
        } else if let Some(block) = &mut block
            && !line.is_empty()
            && !line.starts_with('#')
        {
            let command = line.split_once("  # ").map_or(line, |(command, _)| command);
            block.push(command.trim_end().to_owned());
        }
    }
    blocks.retain(|block| !block.is_empty());
    blocks
}

/// What was reached, and when, by a program's output.
pub(super) fn times(output: &str) -> Vec<(Duration, &str)> {
    let lines = output.lines().filter_map(|line| {
        let (seconds, what) = line.strip_prefix(REACHED)?.split_once(" s: ")?;
        Some((Duration::from_secs(seconds.parse().ok()?), what))
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Run;
    use crate::paths::Paths;

    #[test]
    fn the_documents_have_the_commands_that_the_roots_run() {
        let paths = Paths::find().unwrap();
        let text = |name| std::fs::read_to_string(paths.in_root(name)).unwrap();
        let program = program(&text("README.md"), &text("docs/guide/restore.md")).unwrap();
        for part in [
            "cargo install --locked --path crates/cli",
            "\npagetide try /snapshots/web.mem\n",
            "pagetide serve /tmp/web.sock=/snapshots/web.mem &",
            "{ if make demo 2>&1;",
        ] {
            assert!(program.contains(part), "{part} in {program}");
        }
        let checked = Run::new("sh").args(["-n", "-c", &program]).succeeds();
        assert!(checked.unwrap(), "{program}");
    }

    #[test]
    fn what_was_reached_is_read_with_its_time() {
        let readme = "a\n```\nx FILE   # why\n# then\n```\nb\n```\ns a.sock=b\n```\n```\nmake demo\nmake test\n```\n";
        assert!(program(readme, "\n```\nother\n```\n").is_err());
        let program = program(readme, "\n```\ns a.sock=b\n```\n").unwrap();
        assert!(program.contains(" x /snapshots/web.mem\n"), "{program}");
        let output = "== reached after 12 s: make demo\n== reached after x s: y\nother\n";
        assert_eq!(times(output), [(Duration::from_secs(12), "make demo")]);
    }
}
