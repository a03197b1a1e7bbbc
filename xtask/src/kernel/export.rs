//! stub
use crate::paths::Paths;
pub(crate) fn run(_paths: &Paths) -> anyhow::Result<()> {
    Ok(())
}
