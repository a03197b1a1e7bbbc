//! stub
use crate::paths::Paths;
/// stub
#[derive(Debug, clap::Args)]
pub(crate) struct CheckArgs {}
pub(crate) fn run(_: &CheckArgs, _paths: &Paths) -> anyhow::Result<()> {
    Ok(())
}
