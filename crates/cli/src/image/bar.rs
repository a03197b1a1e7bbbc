//! The progress of a verb.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A progress bar on standard error, if that is a terminal.
pub(super) struct Bar(ProgressBar);

const TEMPLATE: &str = "{bar:20} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} to go";

impl Bar {
    pub(super) fn new(is_quiet: bool) -> Self {
        if is_quiet {
            return Self(ProgressBar::hidden());
        }
        // Elsewhere than on a terminal it draws nothing.
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        // The template is a constant that a test renders; a bad one falls back to the default bar.
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("━╸─"));
        }
        bar.enable_steady_tick(Duration::from_millis(250));
        Self(bar)
    }

    pub(super) fn show(&self, done: u64, all: u64) {
        self.0.set_length(all);
        self.0.set_position(done);
    }
}

impl Drop for Bar {
    /// Nothing of it stays, also after an error.
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_is_valid() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }
}
