//! The two foreign formats of one file.
//!
//! llm.c (`dev/data/data_common.py`): 256 little-endian 32-bit integers, of which the first three are
//! a magic number, a version and the number of tokens; then the ids. nanoGPT (`prepare.py`): 16-bit
//! ids and nothing else, so that all there is to check here is the length ([`super::look`] has the rest).

use std::path::Path;

use super::foreign::Look;
use super::{IdType, Layout, TokenFormat, TokenType, foreign};
use crate::{DataError, Result};

const LLM_C_HEADER_BYTES: usize = 256 * 4;

/// Magic number, version, id type, vocabulary: GPT-2's tokens, and Llama 3's.
const LLM_C: [(u32, u32, IdType, usize); 2] =
    [(20_240_520, 1, IdType::U16, 50_257), (20_240_801, 7, IdType::U32, 128_256)];

/// The layout of llm.c's file, or `None` when the magic number is another.
/// `head` are the first bytes of the file, which has `found` bytes.
pub(super) fn read_llm_c(path: &Path, head: &[u8], found: u64) -> Result<Option<Layout>> {
    let Some((magic, _)) = head.split_first_chunk() else {
        return Ok(None);
    };
    let magic = u32::from_le_bytes(*magic);
    let Some((_, version, ids, vocab)) = LLM_C.into_iter().find(|(known, ..)| *known == magic) else {
        return Ok(None);
    };
    let wrong_size =
        |what: String, expected| DataError::WrongSize { path: path.to_path_buf(), what, expected, found };
    let Some(header) = head.first_chunk::<LLM_C_HEADER_BYTES>() else {
        return Err(wrong_size("its magic number is llm.c's".to_string(), LLM_C_HEADER_BYTES as u64));
    };
    let (fields, _) = header.as_chunks::<4>();
    let (found_version, count) = (u32::from_le_bytes(fields[1]), u32::from_le_bytes(fields[2]));
    if found_version != version {
        return Err(DataError::BadHeader {
            path: path.to_path_buf(),
            reason: format!("llm.c's magic number {magic} goes with version {version}, not {found_version}"),
        });
    }
    let expected = LLM_C_HEADER_BYTES as u64 + u64::from(count) * ids.bytes() as u64;
    if found != expected {
        return Err(wrong_size(format!("its header (llm.c's) counts {count} tokens"), expected));
    }
    Ok(Some(Layout {
        format: TokenFormat::LlmC,
        ids,
        data: LLM_C_HEADER_BYTES as u64..found,
        vocab: Some(vocab),
        tokenizer: 0..0,
    }))
}

/// The layout of nanoGPT's file: bare ids, of the type `given`. Any `.bin` file of unknown format can be one, and any file whose
/// type is given. `head` are the first bytes of the file, which has `found` bytes.
pub(super) fn read_bare(path: &Path, head: &[u8], found: u64, given: TokenType) -> Result<Layout> {
    let refuse = |reason: String| Err(DataError::NotTokenFile { path: path.to_path_buf(), reason });
    let ids = given.ids();
    let width = ids.bytes() as u64;
    let is_named = path.extension().is_some_and(|extension| extension == "bin") || given != TokenType::Auto;
    if found == 0 {
        return refuse("it is empty".to_string());
    }
    if is_named && found.is_multiple_of(width) {
        return Ok(Layout {
            format: TokenFormat::NanoGpt,
            ids,
            data: 0..found,
            vocab: None,
            tokenizer: 0..0,
        });
    }
    if let Some(Look { is, advice }) = foreign::by_magic(head, found).or_else(|| foreign::text(head, head)) {
        return refuse(format!("{is}; {advice}"));
    }
    if !is_named {
        return refuse(
            "it has no known header, and bare ids are only read from a file named .bin, or where data.token_type says \
             their type"
                .to_string(),
        );
    }
    Err(DataError::WrongSize {
        path: path.to_path_buf(),
        what: format!("it has no known header, so it would be nanoGPT's ids of {width} bytes each"),
        expected: found.next_multiple_of(width),
        found,
    })
}
