//! Images as files: what is written is read, or an error says why not.

mod common;
mod content;
mod damage;
mod identity;
mod mapped_ram;
mod speed;
mod trust;
