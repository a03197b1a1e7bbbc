//! Tests of the documents: every row of `SPECIFICATION.md` names a test or a command that exists, links lead
//! to files, members that the design documents name exist, README is short, and commits say why.

mod circles;
mod commits;
mod links;
mod markdown;
mod members;
mod readme;
mod specification;
