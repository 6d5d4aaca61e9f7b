//! The manifest, which describes everything in a checkpoint.
//!
//! `manifest.json` lists every tensor of every state with its global shape and the pieces that cover it,
//! each with file, byte offset, element range and blake3, and carries the caller's own state. A piece of a
//! tensor-parallel rank also has its stripe, and its range counts elements of that. The manifest's first
//! field is the blake3 of everything after that line, so a flipped bit in an offset or a shape is found as
//! surely as one in a tensor. Coverage is checked when a manifest is written and again when it is read.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_plan::Stripe;
use phalanx_plan::trace::DType;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::limits::{self, MANIFEST_BYTES, NAME_BYTES, STATE_BYTES};
use crate::stored_tensor::{StoredPiece, StoredTensor};
use crate::{CheckpointError, Result, coverage};

/// Name of the manifest in its folder.
pub(crate) const MANIFEST: &str = "manifest.json";

const FORMAT: &str = "phalanx-checkpoint";
/// Every piece is a range of the whole tensor.
const WHOLE_VERSION: u32 = 1;

/// Pieces may be ranges of stripes, which a program that knows only the first version must refuse.
const STRIPED_VERSION: u32 = 2;

/// The file and pieces that one rank wrote; exists from `write_rank` to `commit`.
#[derive(Serialize, Deserialize)]
pub(crate) struct PieceList {
    pub(crate) file_bytes: u64,
    pub(crate) header: HeaderRecord,
    pub(crate) pieces: Vec<PieceRecord>,
}

/// The first bytes of a rank's file, before its pieces.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HeaderRecord {
    pub(crate) bytes: u64,
    pub(crate) blake3: String,
}

/// One piece as its rank describes it.
#[derive(Serialize, Deserialize)]
pub(crate) struct PieceRecord {
    pub(crate) state: String,
    pub(crate) name: String,
    #[serde(deserialize_with = "limits::shape")]
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stripe: Option<Stripe>,
    pub(crate) range: [u64; 2],
    pub(crate) offset: u64,
    pub(crate) blake3: String,
}

/// The manifest, without its checksum.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) format: String,
    pub(crate) version: u32,
    pub(crate) step: u64,
    pub(crate) ranks: usize,
    /// State of the caller: sampler cursor, configuration ...
    #[serde(deserialize_with = "bounded_state")]
    pub(crate) state: Value,
    /// Name and bytes of each file.
    pub(crate) files: BTreeMap<String, u64>,
    /// Header of each file. Manifests of earlier programs have none.
    #[serde(default)]
    pub(crate) headers: BTreeMap<String, HeaderRecord>,
    /// Ordered by state, then name.
    pub(crate) tensors: Vec<StoredTensor>,
}

impl Manifest {
    /// Merges the lists of all ranks.
    ///
    /// # Errors
    /// A description of the problem: ranks that disagree about a tensor, a gap, an overlap.
    pub(crate) fn merge(
        step: u64,
        state: Value,
        lists: Vec<(String, PieceList)>,
    ) -> Result<Manifest, String> {
        let ranks = lists.len();
        let (mut files, mut headers) = (BTreeMap::new(), BTreeMap::new());
        let mut tensors: BTreeMap<(String, String), StoredTensor> = BTreeMap::new();
        for (file, list) in lists {
            files.insert(file.clone(), list.file_bytes);
            headers.insert(file.clone(), list.header);
            for record in list.pieces {
                let PieceRecord { state, name, shape, dtype, stripe, range, offset, blake3 } = record;
                let key = (state.clone(), name.clone());
                let tensor = tensors.entry(key).or_insert_with(|| StoredTensor {
                    state,
                    name,
                    dtype,
                    shape: shape.clone(),
                    pieces: Vec::new(),
                });
                if tensor.shape != shape || tensor.dtype != dtype {
                    return Err(format!(
                        "{} is {} of shape {:?} in {} and {} of shape {shape:?} in {file}",
                        tensor.label(),
                        tensor.dtype.name(),
                        tensor.shape,
                        tensor.pieces[0].file,
                        dtype.name(),
                    ));
                }
                tensor.pieces.push(StoredPiece { file: file.clone(), offset, stripe, range, blake3 });
            }
        }
        let mut tensors: Vec<StoredTensor> = tensors.into_values().collect();
        for tensor in &mut tensors {
            tensor.pieces.sort_by_key(StoredPiece::order);
        }
        let striped = tensors.iter().flat_map(|tensor| &tensor.pieces).any(|piece| piece.stripe.is_some());
        let version = if striped { STRIPED_VERSION } else { WHOLE_VERSION };
        let format = FORMAT.to_string();
        let manifest = Manifest { format, version, step, ranks, state, files, headers, tensors };
        manifest.check()?;
        Ok(manifest)
    }

    /// The bytes of `manifest.json`.
    ///
    /// # Errors
    /// A description: the manifest is larger than can be read again.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, String> {
        let state = self.state.to_string().len();
        if state > STATE_BYTES {
            return Err(format!("its state has {state} bytes as JSON; at most {STATE_BYTES} are kept"));
        }
        let json = serde_json::to_string_pretty(self).expect("a manifest has only names and numbers");
        let rest = json.strip_prefix("{\n").expect("a pretty object opens with its own line");
        let text = format!("{{\n  \"blake3\": \"{}\",\n{rest}\n", digest(rest.as_bytes()));
        if text.len() as u64 > MANIFEST_BYTES {
            let (found, pieces) =
                (text.len(), self.tensors.iter().map(|tensor| tensor.pieces.len()).sum::<usize>());
            return Err(format!(
                "its manifest of {pieces} pieces has {found} bytes; at most {MANIFEST_BYTES} can be read: save \
                 on fewer ranks"
            ));
        }
        Ok(text.into_bytes())
    }

    /// Reads and checks `bytes`, found at `path`.
    pub(crate) fn decode(path: &Path, bytes: &[u8]) -> Result<Manifest> {
        let decoded = checked_text(bytes).and_then(|text| {
            let versioned: Versioned = serde_json::from_str(text).map_err(|cause| cause.to_string())?;
            let known = WHOLE_VERSION..=STRIPED_VERSION;
            if versioned.format != FORMAT || !known.contains(&versioned.version) {
                return Err(format!(
                    "it is {} version {}, and this program reads {FORMAT} versions \
                     {WHOLE_VERSION} to {STRIPED_VERSION}: use the program that wrote it, or a newer one",
                    versioned.format, versioned.version
                ));
            }
            let manifest: Manifest = serde_json::from_str(text).map_err(|cause| cause.to_string())?;
            manifest.check()?;
            Ok(manifest)
        });
        decoded.map_err(|reason| CheckpointError::Manifest { path: path.to_path_buf(), reason })
    }

    /// Every tensor is tiled exactly once by pieces that lie within known files.
    fn check(&self) -> Result<(), String> {
        for file in self.files.keys() {
            if Path::new(file).file_name() != Some(file.as_ref()) {
                return Err(format!("{file:?} is not the name of a file in this folder"));
            }
        }
        if self.ranks == 0 || self.files.len() != self.ranks {
            return Err(format!("it has {} files for {} ranks", self.files.len(), self.ranks));
        }
        if self.files.values().try_fold(0u64, |sum, bytes| sum.checked_add(*bytes)).is_none() {
            return Err("its files have more than 2^64 bytes".to_string());
        }
        let names = self.tensors.iter().flat_map(|tensor| [&tensor.state, &tensor.name]);
        if let Some(long) = names.chain(self.files.keys()).map(String::len).find(|bytes| *bytes > NAME_BYTES)
        {
            return Err(format!("a name has {long} bytes; at most {NAME_BYTES} are expected"));
        }
        for pair in self.tensors.windows(2) {
            if (&pair[0].state, &pair[0].name) >= (&pair[1].state, &pair[1].name) {
                return Err(format!("{} and {} are out of order", pair[0].label(), pair[1].label()));
            }
        }
        self.tensors.iter().try_for_each(|tensor| coverage::check(tensor, &self.files))?;
        coverage::check_apart(&self.tensors)
    }
}

/// The caller's state, parsed only where its text is not too long.
fn bounded_state<'de, D: Deserializer<'de>>(from: D) -> Result<Value, D::Error> {
    let text = <&RawValue>::deserialize(from)?.get();
    if text.len() > STATE_BYTES {
        let found = text.len();
        return Err(D::Error::custom(format!("its state has {found} bytes; at most {STATE_BYTES} are read")));
    }
    serde_json::from_str(text).map_err(D::Error::custom)
}

#[derive(Deserialize)]
struct Versioned {
    format: String,
    version: u32,
}

/// The text of a manifest, whose first field is the checksum of the rest.
fn checked_text(bytes: &[u8]) -> Result<&str, String> {
    let damaged = "it is damaged or was edited: load another checkpoint or copy this one again";
    let text = str::from_utf8(bytes).map_err(|_| damaged.to_string())?;
    let (stated, rest) = text
        .strip_prefix("{\n  \"blake3\": \"")
        .and_then(|text| text.split_once("\",\n"))
        .ok_or_else(|| damaged.to_string())?;
    let rest = rest.strip_suffix('\n').unwrap_or(rest);
    if digest(rest.as_bytes()) != stated {
        return Err(damaged.to_string());
    }
    Ok(text)
}

/// blake3 in hexadecimal.
pub(crate) fn digest(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}
