//! Tests of the documents: every row of `SPECIFICATION.md` names a test or a command that exists, links lead
//! to files, and commits say why.

mod commits;
mod links;
mod markdown;
mod specification;
