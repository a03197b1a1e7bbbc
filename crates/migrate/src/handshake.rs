//! How a connection begins: versions, features, and the proof that it belongs to its session.

use thiserror::Error;

use crate::ids::{MigrationId, Secret};
use crate::message::{MAX_STREAMS, StreamIndex};
use crate::wire::{DecodeError, Reader, Writer};

/// The versions of this protocol that this side speaks.
pub const VERSIONS: Versions = Versions {
    lowest: 1,
    highest: 1,
};

/// The features of this version: pages compressed with zstd.
pub const FEATURE_ZSTD: u32 = 1;

/// A range of versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Versions {
    /// The lowest.
    pub lowest: u16,
    /// The highest.
    pub highest: u16,
}

impl Versions {
    /// The highest version that both speak.
    pub fn common(self, other: Self) -> Option<u16> {
        let highest = self.highest.min(other.highest);
        (highest >= self.lowest.max(other.lowest)).then_some(highest)
    }
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// A new migration.
    Begin,
    /// A stream of a session that exists.
    Join,
    /// A look at whether the VM would be accepted.
    Check,
}

/// The source's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Hello {
    /// The versions that the source speaks.
    pub versions: Versions,
    /// Bits of features that the source can use.
    pub features: u32,
    /// What the connection is for.
    pub purpose: Purpose,
    /// Its number in the session.
    pub stream: StreamIndex,
    /// The migration.
    pub migration: MigrationId,
    /// Random bytes that were never used before.
    pub nonce: [u8; 32],
}

/// The destination's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Welcome {
    /// The version of this connection; 0: there is no common one, and the connection ends.
    pub version: u16,
    /// The features that both can use.
    pub features: u32,
    /// Random bytes that were never used before.
    pub nonce: [u8; 32],
    /// To [`Purpose::Join`], the proof that the destination knows the session's secret. Otherwise zeroes.
    pub proof: Proof,
}

/// That a side knows a session's secret and answers this connection's nonces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Proof(pub [u8; 32]);

/// Which side proves. Different bytes enter the proof, so that no side can send the other's proof back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Prover {
    /// The source.
    Source,
    /// The destination.
    Destination,
}

/// Why a connection does not join a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HandshakeError {
    /// No version in common.
    #[error("no version in common: this side speaks {} to {}, the peer {} to {}",
        VERSIONS.lowest, VERSIONS.highest, peer.lowest, peer.highest)]
    Version {
        /// What the peer speaks.
        peer: Versions,
    },
    /// The peer does not know the session's secret, or repeats a recording.
    #[error("the peer does not prove that it belongs to migration {migration}")]
    Proof {
        /// The session's migration.
        migration: MigrationId,
    },
    /// The peer chose a version or a feature that it was not offered.
    #[error(
        "the peer chose version {version} and features {features:#x}, which it was not offered"
    )]
    NotOffered {
        /// The version.
        version: u16,
        /// The features.
        features: u32,
    },
}

/// The proof of a side over everything that both have said on this connection.
pub fn prove(secret: &Secret, prover: Prover, hello: &Hello, welcome: &Welcome) -> Proof {
    let mut said = Writer::default();
    said.byte(match prover {
        Prover::Source => 1,
        Prover::Destination => 2,
    });
    hello.write(&mut said);
    Welcome {
        proof: Proof([0; 32]),
        ..*welcome
    }
    .write(&mut said);
    Proof(*blake3::keyed_hash(&secret.0, &said.0).as_bytes())
}

/// Checks a proof, in a time that does not depend on the bytes that differ.
///
/// # Errors
/// [`HandshakeError::Proof`].
pub fn check_proof(
    secret: &Secret,
    prover: Prover,
    hello: &Hello,
    welcome: &Welcome,
    proof: &Proof,
) -> Result<(), HandshakeError> {
    let right = blake3::Hash::from_bytes(prove(secret, prover, hello, welcome).0);
    // `blake3::Hash` compares in constant time.
    match right == blake3::Hash::from_bytes(proof.0) {
        true => Ok(()),
        false => Err(HandshakeError::Proof {
            migration: hello.migration,
        }),
    }
}

/// The destination's answer to a hello. `session` is the secret of the session to join.
///
/// # Errors
/// [`HandshakeError::Version`]: the caller sends a welcome of version 0 and closes the connection.
pub fn welcome(
    hello: &Hello,
    features: u32,
    nonce: [u8; 32],
    session: Option<&Secret>,
) -> Result<Welcome, HandshakeError> {
    let peer = hello.versions;
    let version = VERSIONS
        .common(peer)
        .ok_or(HandshakeError::Version { peer })?;
    let features = features & hello.features;
    let mut welcome = Welcome {
        version,
        features,
        nonce,
        proof: Proof([0; 32]),
    };
    if let Some(secret) = session {
        welcome.proof = prove(secret, Prover::Destination, hello, &welcome);
    }
    Ok(welcome)
}

/// What the source does with the answer to its hello: it checks it and, to join a session, returns its own proof.
///
/// # Errors
/// [`HandshakeError`].
pub fn answer(
    hello: &Hello,
    welcome: &Welcome,
    session: Option<&Secret>,
) -> Result<Option<Proof>, HandshakeError> {
    let Welcome {
        version, features, ..
    } = *welcome;
    let offered = hello.versions.lowest..=hello.versions.highest;
    if version == 0 {
        let peer = Versions {
            lowest: 0,
            highest: 0,
        };
        return Err(HandshakeError::Version { peer });
    }
    if !offered.contains(&version) || features & !hello.features != 0 {
        return Err(HandshakeError::NotOffered { version, features });
    }
    let Some(secret) = session else {
        return Ok(None);
    };
    check_proof(secret, Prover::Destination, hello, welcome, &welcome.proof)?;
    Ok(Some(prove(secret, Prover::Source, hello, welcome)))
}

impl Hello {
    pub(crate) fn write(&self, out: &mut Writer) {
        out.short(self.versions.lowest);
        out.short(self.versions.highest);
        out.word(self.features);
        out.byte(match self.purpose {
            Purpose::Begin => 0,
            Purpose::Join => 1,
            Purpose::Check => 2,
        });
        out.byte(0);
        out.short(self.stream.0);
        out.bytes(&self.migration.0);
        out.bytes(&self.nonce);
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let error = |field| DecodeError::Field { field };
        let versions = Versions {
            lowest: from.short()?,
            highest: from.short()?,
        };
        if versions.lowest == 0 || versions.lowest > versions.highest {
            return Err(error("the range of versions"));
        }
        let features = from.word()?;
        let purpose = match from.byte()? {
            0 => Purpose::Begin,
            1 => Purpose::Join,
            2 => Purpose::Check,
            _ => return Err(error("the purpose of a connection")),
        };
        from.zeros::<1>()?;
        let stream = StreamIndex(from.short()?);
        if stream.0 >= MAX_STREAMS || (purpose != Purpose::Join && stream.0 != 0) {
            return Err(error("the number of a stream"));
        }
        let (migration, nonce) = (MigrationId(from.array()?), from.array()?);
        // What later versions say behind it.
        from.rest();
        Ok(Self {
            versions,
            features,
            purpose,
            stream,
            migration,
            nonce,
        })
    }
}

impl Welcome {
    pub(crate) fn write(&self, out: &mut Writer) {
        out.short(self.version);
        out.short(0);
        out.word(self.features);
        out.bytes(&self.nonce);
        out.bytes(&self.proof.0);
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let version = from.short()?;
        from.zeros::<2>()?;
        let (features, nonce) = (from.word()?, from.array()?);
        Ok(Self {
            version,
            features,
            nonce,
            proof: Proof(from.array()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: Secret = Secret([5; 32]);

    fn hello(lowest: u16, highest: u16) -> Hello {
        Hello {
            versions: Versions { lowest, highest },
            features: FEATURE_ZSTD | 0x8000,
            purpose: Purpose::Join,
            stream: StreamIndex(3),
            migration: MigrationId([1; 16]),
            nonce: [2; 32],
        }
    }

    #[test]
    fn versions_one_older_and_one_newer_are_understood() {
        let of = |lowest, highest| Versions { lowest, highest };
        assert_eq!(of(1, 2).common(of(1, 1)), Some(1), "an older peer");
        assert_eq!(of(1, 1).common(of(1, 2)), Some(1), "a newer peer");
        assert_eq!(of(2, 3).common(of(1, 1)), None);
        assert_eq!(of(1, 1).common(of(2, 3)), None);
        let newer = welcome(&hello(1, 2), FEATURE_ZSTD, [3; 32], None).unwrap();
        assert_eq!((newer.version, newer.features), (1, FEATURE_ZSTD));
        let error = welcome(&hello(2, 3), FEATURE_ZSTD, [3; 32], None).unwrap_err();
        assert!(
            error.to_string().contains("1 to 1, the peer 2 to 3"),
            "{error}"
        );
    }

    #[test]
    fn both_sides_prove_that_they_know_the_session() {
        let hello = hello(1, 1);
        let welcome = welcome(&hello, FEATURE_ZSTD, [3; 32], Some(&SECRET)).unwrap();
        let proof = answer(&hello, &welcome, Some(&SECRET)).unwrap().unwrap();
        let check = |hello, proof| check_proof(&SECRET, Prover::Source, hello, &welcome, proof);
        assert_eq!(check(&hello, &proof), Ok(()));
        let error = HandshakeError::Proof {
            migration: hello.migration,
        };
        assert_eq!(
            check(&hello, &welcome.proof),
            Err(error),
            "the proof that was sent"
        );
        assert_eq!(answer(&hello, &welcome, Some(&Secret([6; 32]))), Err(error));
    }

    #[test]
    fn a_recording_joins_nothing() {
        let hello = hello(1, 1);
        let first = welcome(&hello, 0, [3; 32], Some(&SECRET)).unwrap();
        let recorded = answer(&hello, &first, Some(&SECRET)).unwrap().unwrap();
        let second = welcome(&hello, 0, [4; 32], Some(&SECRET)).unwrap();
        assert!(check_proof(&SECRET, Prover::Source, &hello, &second, &recorded).is_err());
        let other_stream = Hello {
            stream: StreamIndex(4),
            ..hello
        };
        assert!(check_proof(&SECRET, Prover::Source, &other_stream, &first, &recorded).is_err());
        // Nor does a welcome that was recorded for another hello.
        let fresh = Hello {
            nonce: [9; 32],
            ..hello
        };
        assert!(answer(&fresh, &first, Some(&SECRET)).is_err());
    }

    #[test]
    fn what_was_not_offered_is_refused() {
        let hello = hello(1, 1);
        let good = welcome(&hello, FEATURE_ZSTD, [3; 32], None).unwrap();
        assert_eq!(answer(&hello, &good, None), Ok(None));
        for wrong in [
            Welcome { version: 2, ..good },
            Welcome {
                features: 2,
                ..good
            },
        ] {
            let error = answer(&hello, &wrong, None).unwrap_err();
            assert!(
                matches!(error, HandshakeError::NotOffered { .. }),
                "{error}"
            );
        }
        let none = Welcome { version: 0, ..good };
        assert!(matches!(
            answer(&hello, &none, None),
            Err(HandshakeError::Version { .. })
        ));
    }
}
