//! The test vectors beside the protocol's document are what this code makes.

use std::fmt::Write;

use pagetide_memory::{GuestAddress, PageIndex, PageRange};

use crate::checksum::{page_checksum, page_checksum_seed};
use crate::coding::tests::examples;
use crate::frame::{Decoder, MAGIC};
use crate::handshake::{Hello, Proof, Prover, Purpose, Versions, Welcome, prove};
use crate::ids::{MigrationId, Secret, Token, TokenHash, VmId};
use crate::journal::{JournalHead, KeptState, Record, RecordKind, Side, new_journal};
use crate::message::{Content, Message, PageRecord, Stage, StreamIndex};
use crate::pages::PageSet;
use crate::rounds::Round;

/// Bytes in hexadecimal; more than eight equal ones as `byte*count`.
fn hex(bytes: &[u8]) -> String {
    let runs = bytes.chunk_by(|one, next| one == next);
    let words = runs.map(|run| match run {
        [byte, ..] if run.len() > 8 => format!(" {byte:02x}*{} ", run.len()),
        _ => run.iter().map(|byte| format!("{byte:02x}")).collect(),
    });
    let text: String = words.collect();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn line(out: &mut String, name: &str, bytes: &[u8]) {
    writeln!(out, "{name}: {}", hex(bytes)).unwrap();
}

fn frames(out: &mut String) {
    for (message, content) in examples() {
        let mut frame = Vec::new();
        message.encode(&content, &mut frame).unwrap();
        let kind = match &message {
            Message::Pages(record) => match record.content {
                Content::Bytes => " bytes",
                Content::Zstd => " zstd",
                Content::Zero => " zero",
                Content::Discarded => " discarded",
                Content::Poisoned => " poisoned",
            },
            _ => "",
        };
        line(out, &format!("{}{kind}", message.name()), &frame);
    }
}

fn digests(out: &mut String) {
    let token = Token::new(Secret([8; 32]));
    line(out, "hash of the token 08*32", &token.hash().0);
    let mut map = PageSet::empty(70);
    map.insert(PageRange::new(PageIndex(1), 3));
    map.insert(PageRange::single(PageIndex(69)));
    line(out, "map of 70 pages with 1, 2, 3 and 69", &map.part(0, 70));
    line(out, "its digest", &map.digest().0);
    let state = KeptState::of(&[3; 9]);
    line(out, "digest of the state 03*9", &state.digest);
    checksums(out);
}

/// Records of round 3 at one place, with their checksums.
fn checksums(out: &mut String) {
    let (vm, gpa) = (VmId([5; 16]), GuestAddress(0x7000));
    let place = "vm 05*16, gpa 0x7000, round 3";
    for (name, content, pages, bytes) in [
        ("a page of 01*4096", Content::Bytes, 1, &[1; 4096][..]),
        ("a zero page", Content::Zero, 1, &[]),
        ("two zero pages", Content::Zero, 2, &[]),
        ("two discarded pages", Content::Discarded, 2, &[]),
    ] {
        let record = PageRecord {
            run: PageRange::new(PageIndex(7), pages),
            round: Round(3),
            content,
            checksum: 0,
        };
        let seed = page_checksum_seed(vm, gpa, &record);
        line(
            out,
            &format!("seed of {name}, {place}"),
            &seed.to_le_bytes(),
        );
        let checksum = page_checksum(vm, gpa, &record, bytes);
        line(out, "its checksum", &checksum.to_le_bytes());
    }
}

fn proofs(out: &mut String) {
    let hello = Hello {
        versions: crate::handshake::VERSIONS,
        features: 1,
        purpose: Purpose::Join,
        stream: StreamIndex(3),
        migration: MigrationId([1; 16]),
        nonce: [2; 32],
    };
    let welcome = Welcome {
        version: 1,
        features: 1,
        nonce: [3; 32],
        proof: Proof([0; 32]),
    };
    let mut frame = Vec::new();
    Message::Hello(hello).encode(&[], &mut frame).unwrap();
    line(out, "hello that joins stream 3", &frame);
    both_prove(out, &hello, &welcome);
    // A newer source's, whose payload has four bytes more.
    let versions = Versions {
        lowest: 1,
        highest: 2,
    };
    let newer = Hello { versions, ..hello };
    let mut frame = Vec::new();
    Message::Hello(newer)
        .encode(&[0xaa; 4], &mut frame)
        .unwrap();
    line(out, "hello of version 1 to 2 with 4 bytes more", &frame);
    let mut decoder = Decoder::default();
    decoder.push(&[&MAGIC[..], &frame].concat());
    let frame = decoder.next_frame().unwrap().unwrap();
    let received = Message::of(&frame).unwrap();
    assert_eq!(received.message, Message::Hello(newer));
    both_prove(out, &newer, &welcome);
    let none = Welcome {
        version: 0,
        features: 0,
        ..welcome
    };
    let mut frame = Vec::new();
    Message::Welcome(none).encode(&[], &mut frame).unwrap();
    line(out, "welcome without a common version", &frame);
}

fn both_prove(out: &mut String, hello: &Hello, welcome: &Welcome) {
    let secret = Secret([6; 32]);
    for (name, prover) in [
        ("the destination", Prover::Destination),
        ("the source", Prover::Source),
    ] {
        let proof = prove(&secret, prover, hello, welcome);
        let name = format!("proof of {name}, session 06*32, nonce of welcome 03*32");
        line(out, &name, &proof.0);
    }
}

/// The stages of *held*, with their arguments.
fn stages(out: &mut String) {
    for (name, stage) in [
        ("round 3", Stage::Round(3)),
        ("paused", Stage::Paused),
        ("sealed", Stage::Sealed),
        ("yielded", Stage::Yielded),
        ("ready", Stage::Ready),
        ("running", Stage::Running),
    ] {
        let mut frame = Vec::new();
        Message::Held { stage }.encode(&[], &mut frame).unwrap();
        line(out, &format!("held at {name}"), &frame);
    }
}

fn journal(out: &mut String) {
    let head = JournalHead {
        side: Side::Source,
        migration: MigrationId([1; 16]),
        vm: VmId([5; 16]),
        session: Secret([6; 32]),
        token: Secret([8; 32]),
        peer_hash: TokenHash([7; 32]),
    };
    let (bytes, mut writer) = new_journal(&head);
    line(out, "journal without records", &bytes);
    for (name, kind, state) in [
        ("SEALED", RecordKind::Sealed, KeptState::of(&[3; 9])),
        ("YIELDED", RecordKind::Yielded, KeptState::default()),
        ("ENTERED", RecordKind::Entered, KeptState::default()),
        ("FINISHED", RecordKind::Finished, KeptState::default()),
    ] {
        let (at, slot) = writer.encode(&Record { kind, state }).unwrap();
        line(out, &format!("{name} at {at}"), &slot);
        writer.synced();
    }
}

#[test]
fn the_documents_vectors_are_those_of_the_code() {
    let mut vectors = String::new();
    frames(&mut vectors);
    stages(&mut vectors);
    digests(&mut vectors);
    proofs(&mut vectors);
    journal(&mut vectors);
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/design/migration-vectors.txt"
    );
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let found: String = lines.map(|line| format!("{line}\n")).collect();
    assert!(found == vectors, "the code makes these:\n{vectors}");
}

/// The document's table of times has the constants' values.
#[test]
fn the_document_has_the_times() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/design/migration-protocol.md"
    );
    let text = std::fs::read_to_string(path).unwrap();
    for (name, time) in crate::times::ALL {
        let row = format!("| `{name}` | {time:?} |");
        assert!(text.contains(&row), "{row}");
    }
}
