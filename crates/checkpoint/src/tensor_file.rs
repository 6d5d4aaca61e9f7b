//! The safetensors format: 8 bytes of header length, a JSON header, the tensors one after another.
//!
//! The `safetensors` crate needs the whole file in memory or mapped; this implementation streams. It follows
//! <https://huggingface.co/docs/safetensors>; the tests read its files with that crate.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use phalanx_plan::trace::DType;
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, Visitor};

use crate::limits::{self, HEADER_BYTES, NAME_BYTES, TENSORS};
use crate::{CheckpointError, Result};

/// A tensor about to be written.
pub(crate) struct NewEntry {
    pub(crate) key: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: u64,
}

/// The first bytes of a file that holds `entries` in that order: length and header, padded with spaces
/// to a multiple of 8. The same entries give the same bytes.
pub(crate) fn header(entries: &[NewEntry], metadata: &[(&str, &str)]) -> Vec<u8> {
    let mut fields = Vec::with_capacity(entries.len() + 1);
    if !metadata.is_empty() {
        let pairs: Vec<_> =
            metadata.iter().map(|(key, value)| format!("{}:{}", quoted(key), quoted(value))).collect();
        fields.push(format!("\"__metadata__\":{{{}}}", pairs.join(",")));
    }
    let mut begin = 0;
    for entry in entries {
        let end = begin + entry.bytes;
        let shape: Vec<_> = entry.shape.iter().map(usize::to_string).collect();
        fields.push(format!(
            "{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{begin},{end}]}}",
            quoted(&entry.key),
            format_name(entry.dtype),
            shape.join(","),
        ));
        begin = end;
    }
    let mut json = format!("{{{}}}", fields.join(","));
    while json.len() % 8 != 0 {
        json.push(' ');
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

/// A tensor found in a file.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// The type as written in the file: `F32`, `BF16`, `I64` ...
    pub(crate) dtype: Box<str>,
    pub(crate) shape: Vec<usize>,
    /// The range of its data in the file.
    pub(crate) bytes: Range<u64>,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: Box<str>,
    #[serde(deserialize_with = "limits::shape")]
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// A header, with offsets from the end of it. Entries are made one by one while the text is read: no tree of
/// JSON values, which would take many times the text's size.
struct Header(Vec<Entry>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Header, D::Error> {
        from.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a field for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Header, A::Error> {
        let mut entries = Vec::new();
        while let Some(name) = fields.next_key::<String>()? {
            if name == "__metadata__" {
                fields.next_value::<IgnoredAny>()?;
                continue;
            }
            if name.len() > NAME_BYTES {
                let found = name.len();
                let reason = format!("a name has {found} bytes; at most {NAME_BYTES} are expected");
                return Err(A::Error::custom(reason));
            }
            let raw: RawEntry = fields
                .next_value()
                .map_err(|cause| A::Error::custom(format!("the entry of {name} is invalid: {cause}")))?;
            if entries.len() == TENSORS {
                return Err(A::Error::custom(format!("it has more than {TENSORS} tensors")));
            }
            let RawEntry { dtype, shape, data_offsets: [begin, end] } = raw;
            entries.push(Entry { name, dtype, shape, bytes: begin..end });
        }
        Ok(Header(entries))
    }
}

/// Reads the header of `path` and checks that it is consistent and matches the length of the file. Entries are in the
/// order of their data.
///
/// # Errors
/// [`CheckpointError::TensorFile`] for a header that makes no sense, [`CheckpointError::WrongSize`] for a file cut
/// short or too long, [`CheckpointError::Read`].
pub(crate) fn entries(path: &Path) -> Result<Vec<Entry>> {
    let bad = |reason: String| CheckpointError::TensorFile { path: path.to_path_buf(), reason };
    let file = phalanx_system::files::open_regular(path).map_err(CheckpointError::reading(path))?;
    let found = file.metadata().map_err(CheckpointError::reading(path))?.len();
    if found < 8 {
        return Err(bad(format!("{found} bytes are too few for a header")));
    }
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0).map_err(CheckpointError::reading(path))?;
    let length = u64::from_le_bytes(length);
    if length > found - 8 {
        return Err(bad(format!("its header claims {length} bytes, the file has {found}")));
    }
    if length > HEADER_BYTES {
        return Err(bad(format!("its header has {length} bytes; at most {HEADER_BYTES} are read")));
    }
    let mut json = vec![0; length as usize];
    file.read_exact_at(&mut json, 8).map_err(CheckpointError::reading(path))?;
    let entries = parse(&json, 8 + length).map_err(bad)?;
    let expected = entries.last().map_or(8 + length, |last| last.bytes.end);
    if found != expected {
        return Err(CheckpointError::WrongSize { path: path.to_path_buf(), expected, found, tensor: None });
    }
    Ok(entries)
}

/// The entries of a header in order, checked to be contiguous starting at `data_start`.
fn parse(json: &[u8], data_start: u64) -> Result<Vec<Entry>, String> {
    let Header(mut entries) = serde_json::from_slice(json)
        .map_err(|cause| format!("its header is not the JSON object that is expected: {cause}"))?;
    for entry in &mut entries {
        entry.bytes = checked_place(entry, data_start)?;
    }
    let mut names = BTreeSet::new();
    if let Some(twice) = entries.iter().find(|entry| !names.insert(entry.name.as_str())) {
        return Err(format!("its header describes {} twice", twice.name));
    }
    entries.sort_by_key(|entry| (entry.bytes.start, entry.bytes.end));
    let mut expected = data_start;
    for entry in &entries {
        if entry.bytes.start != expected {
            return Err(format!("{} does not begin where the tensor before it ends", entry.name));
        }
        expected = entry.bytes.end;
    }
    Ok(entries)
}

/// The range of `entry` in its file, checked against its shape and type.
fn checked_place(entry: &Entry, data_start: u64) -> Result<Range<u64>, String> {
    let Entry { name, dtype, shape, bytes } = entry;
    let place = data_start.checked_add(bytes.start).zip(data_start.checked_add(bytes.end));
    let Some((begin, end)) = place.filter(|(begin, end)| begin <= end) else {
        return Err(format!("the offsets of {name} are impossible"));
    };
    let Some(count) = elements(shape) else {
        return Err(format!("{name} has an impossible shape {shape:?}"));
    };
    let length = end - begin;
    let fits = match element_bytes(dtype) {
        Some(bytes) => count.checked_mul(bytes) == Some(length),
        // Every type has at least one bit.
        None => count.div_ceil(8) <= length,
    };
    if !fits {
        return Err(format!("{name} of shape {shape:?} and type {dtype} does not fit its {length} bytes"));
    }
    Ok(begin..end)
}

/// Elements of a shape; `None` when they exceed 64 bits.
pub(crate) fn elements(shape: &[usize]) -> Option<u64> {
    shape.iter().try_fold(1u64, |count, &size| count.checked_mul(size as u64))
}

fn format_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "F64",
        DType::F32 => "F32",
        DType::BF16 => "BF16",
        DType::F16 => "F16",
        DType::U32 => "U32",
        DType::Q8_0 | DType::Nf4 => unreachable!("files have no {}", dtype.name()),
    }
}

/// Bytes of one element; `None` for a type that is newer than this list.
fn element_bytes(name: &str) -> Option<u64> {
    match name {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" => Some(1),
        "F16" | "BF16" | "U16" | "I16" => Some(2),
        "F32" | "U32" | "I32" => Some(4),
        "F64" | "U64" | "I64" => Some(8),
        _ => None,
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
